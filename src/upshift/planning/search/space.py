"""Define the plan space: the values of each choice for a host, a model and a workload, and the values that a user fixes.

First come the functions that read ``field=value`` texts, such as those of --set, for plans of training and of inference. Each
text names a field of the plan, no field gets two different values, and each value is one that the field may have here.

Then come the places outside the memory of the device where frozen weights may be kept. The planner uses them when nothing else
fits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any, NoReturn, get_args, get_type_hints

from pydantic import ValidationError

from upshift.errors import RequestError
from upshift.hardware.disk import disk_rate
from upshift.hardware.spec import TRITON_CAPABILITY, Host
from upshift.models.profile import LOSS_CHUNK_TOKENS, Granularity, ModelProfile
from upshift.models.source import ModelSource
from upshift.planning.cost.rates import MATRIX_PRECISION, host_link
from upshift.planning.layout import Layout, divisors
from upshift.planning.optimizers import ALIASES, check_library, check_name, has_gpu_code, optimizers, read_optim_args
from upshift.planning.plan import (
    Attention,
    Compile,
    HostMemory,
    LossKernel,
    Plan,
    Precision,
    Rounding,
    WeightOffload,
    changes_of_mathematics,
)
from upshift.planning.program import OWN
from upshift.planning.search.constraints import (
    PACKED_KERNELS,
    can_pack,
    odd_micro_batch,
    read_base,
    why_kernel_unusable,
    why_never_packed,
)
from upshift.planning.search.layouts import check_layout, check_processes, check_threads, shares_work
from upshift.planning.workload import Workload
from upshift.text import did_you_mean
from upshift.value import Value, first_problem


def split_assignment(text: str, field_names: Collection[str], *, option: str = "--set") -> tuple[str, str]:
    """Return the field and the value of ``text``. Raises RequestError."""
    name, equals, value = text.partition("=")
    if not equals and name in field_names:
        raise RequestError(f"{option} {text!r} lacks a '='; write field=value, such as {name}=VALUE")
    if not equals or name not in field_names:
        similar = did_you_mean(name, field_names)
        fields = ", ".join(field_names)
        raise RequestError(f"{option} {text!r} names no plan field{similar}; use field=value with one of {fields}")
    return name, value


def read_assignments(texts: tuple[str, ...], field_names: Collection[str], parse: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the value of each field, as ``parse`` reads it from the field's name and text. Raises RequestError."""
    values: dict[str, Any] = {}
    for text in texts:
        name, value = split_assignment(text, field_names)
        parsed = parse(name, value)
        if values.setdefault(name, parsed) != parsed:
            raise RequestError(f"--set fixes {name} twice, to {values[name]} and to {parsed}; give one of them")
    return values


def parse_field(kind: type[Value], required: dict[str, Any], name: str, text: str, *, valid: str, option: str = "--set") -> Any:
    """Return the value of a field, read from ``text``. Raise RequestError that names the option.

    Args:
        kind: the class of the plan.
        required: values of the fields without which no ``kind`` can be made.
        name: the field.
        text: the user's text.
        valid: the end of the error message, which lists valid values.
        option: the option with which the user gave the text.
    """
    try:
        return getattr(kind.model_validate({**required, name: text}), name)
    except ValidationError as error:
        raise RequestError(f"{option} {first_problem(kind, error)}{valid}") from None


def list_valid_values(values: Sequence[Any], otherwise: str = "") -> str:
    """Return the end of an error message: the values that a field may have, or ``otherwise`` if there is no list of them."""
    return f"; use one of {', '.join(map(str, values))}" if values else otherwise


def check_legal(fixed: dict[str, Any], legal: dict[str, list[Any]], reason_for: Callable[[str], str]) -> None:
    """Raise RequestError for the first value that is not among the legal ones. ``reason_for``: returns the reason for a field."""
    for name, value in fixed.items():
        if name in legal and value not in legal[name]:
            refuse_value(name, value, legal[name], reason_for(name))


def refuse_value(name: str, value: Any, legal: list[Any], reason: str) -> NoReturn:
    """Raise RequestError for a value that is not legal."""
    raise RequestError(f"--set {name}={value} is not possible here{list_valid_values(legal)}{reason}")


def check_allowed_names(names: tuple[str, ...], valid_names: Collection[str], *, of: str = "") -> tuple[str, ...]:
    """Return the names of --allow. Raise RequestError for an unknown one."""
    unknown = next((name for name in names if name not in valid_names), None)
    if unknown is not None:
        raise RequestError(
            f"--allow {unknown!r} is unknown; the choices that change the mathematics{of} are {', '.join(valid_names)}"
        )
    return names


WEIGHT_OFFLOAD = "weight_offload"
DISK_RATE_FIELD = "disk_bytes_per_second"


def fixes_weight_offload(fixed: tuple[str, ...]) -> bool:
    """Return whether the user set where frozen weights are kept."""
    return any(assignment.partition("=")[0].strip() == WEIGHT_OFFLOAD for assignment in fixed)


def with_disk_rate(host: Host, source: ModelSource) -> Host:
    """Return the host with the rate of the disk that holds the model's weights.

    Return the host unchanged if this machine has no weights of the model, or if the host has the rate already.
    """
    if source.directory is None or host.disk_bytes_per_second is not None:
        return host
    rate = disk_rate(sorted(source.directory.glob("*.safetensors")))
    if rate is None:
        return host
    origin = host.origin | {DISK_RATE_FIELD: "measured on the model's files"}
    return host.changed(disk_bytes_per_second=rate, origin=origin)


def has_frozen_layers(profile: ModelProfile) -> bool:
    """Return whether layers have frozen weights that can be kept outside the device's memory.

    They must be stored in the dtype that they are computed in, so weights stored in 4 bits cannot.
    """
    parameters = profile.parameters
    return not parameters.quantized and parameters.layers > parameters.trainable_layers


def automatic_weight_places(host: Host) -> list[WeightOffload]:
    """Return the places for weights that the planner tries without a request, where nothing else fits.

    On a GPU a user must request them, as other offloads that have not run on a GPU.
    """
    return weight_places(host)[1:] if host.device == "cpu" else []


def _shares_memory(host: Host) -> bool:
    """Return whether the GPU's memory is the CPU's, so that moving something to the host frees nothing."""
    return host.gpu is not None and host.gpu.shares_host_memory


def weight_places(host: Host) -> list[WeightOffload]:
    """Return where frozen weights may be kept on this host, the fastest place first."""
    link = host_link(host) if host.device == "cuda" else None
    disk = host.disk_bytes_per_second
    values: list[WeightOffload] = ["none"]
    if host.num_devices == 1 and link is not None and not _shares_memory(host):
        values.append("host")
    if host.num_devices == 1 and disk is not None and (host.device == "cpu" or link is not None):
        values.append("disk")
    return values


BLOCK_ATTENTION_LIMIT = 8192  # the probabilities that it saves grow with the square of the length
WORTH_PACKING = 0.97  # mean length over sequence length; above it there is nothing to gain
MICRO_BATCH = "per_device_train_batch_size"
BATCH_FACTORS = (MICRO_BATCH, "gradient_accumulation_steps", "num_processes")
FIXED_BY_REQUEST = ("device", "host", "model", "sequence_length", "layout")
# Only chosen on request: no run on a GPU has confirmed what they are predicted to cost.
OFFLOADS = ("optim_offload", "activation_offload")
PLANNED_ONLY = ("fused_kernels", "loss_kernel", "rounding")  # no engine here runs them
ONLY_WHEN_ASKED = (*OFFLOADS, *PLANNED_ONLY)
FIXED_IN_SEARCH = (*ONLY_WHEN_ASKED, WEIGHT_OFFLOAD)  # the planner sets the last one where nothing else fits
LIBRARY_OF_PRECISION = {"fp8": "torchao"}
WHOLE_WEIGHTS = ("bf16-weights", "fp8")  # they convert weights, which cannot be done with weights stored in 4 bits


def choices(host: Host, profile: ModelProfile, workload: Workload) -> dict[str, list[Any]]:
    """Return the values that each field may have here. No list is empty, because the default is always legal."""
    layers = profile.num_layers
    quarters = sorted({round(layers * share / 4) for share in range(5)})
    recompute = quarters if profile.declares.gradient_checkpointing_per_layer else [0, layers]
    attention = [name for name in get_args(Attention) if any(step.attention == name for step in profile.steps)]
    if host.device != "cpu" and "block" in attention:
        attention.remove("block")
    if "sdpa" in attention and host.num_devices == 1:
        attention += [name for name in PACKED_KERNELS if why_kernel_unusable(name, host, profile) is None]
    quantized = profile.parameters.quantized > 0
    values: dict[str, list[Any]] = {
        "precision": _precisions(host, workload, quantized=quantized),
        "activation_checkpointing": recompute if profile.declares.gradient_checkpointing else [0],
        "recompute_granularity": _granularities(profile),
        "attention": attention,
        "torch_compile": _compile_ways(host, quantized=quantized),
        "optim": _optimizers(host, workload),
        "optimizer_in_backward": _updates_in_backward(workload),
        "loss_chunk_tokens": [0, LOSS_CHUNK_TOKENS] if _can_chunk(profile) else [0],
        "packing": [False, True] if _worth_packing(profile, workload, attention) else [False],
        "num_processes": _process_counts(host, workload),
        "host_memory": _host_memory(host),
    }
    return workload.runs_in.narrow(values, num_layers=layers)


def _granularities(profile: ModelProfile) -> list[Granularity]:
    granularities: set[Granularity] = {granularity for step in profile.steps for granularity in step.gaps_recomputed}
    return sorted(granularities) or ["full"]


def settable_fields() -> list[str]:
    """Return the names of the fields of Plan and Layout that a user may fix."""
    return [name for name in (*Plan.model_fields, *Layout.model_fields) if name not in FIXED_BY_REQUEST]


def read_fixed(assignments: tuple[str, ...], host: Host, workload: Workload, *, quantized: bool) -> dict[str, Any]:
    """Return the ``field=value`` pairs of --set, checked against the plan's fields and types.

    They are also checked against what is legal here, as far as that is known before a model is traced. ``quantized``: the
    model's weights are stored in 4 bits.
    """
    layout_text = next((text for text in assignments if text.partition("=")[0] in Layout.model_fields), None)
    if layout_text is not None and host.num_devices == 1 and host.device != "cpu":
        raise RequestError(f"--set {layout_text} is for several ranks, and {host.name} has one GPU; leave it out")
    fixed = read_assignments(assignments, settable_fields(), parse_value)
    workload.runs_in.check(fixed)
    check_processes(fixed, host)
    check_threads(fixed, host)
    if quantized and host.device == "cuda" and host.measured is not None:
        check_library("bitsandbytes", purpose="a model in 4 bits", on_gpu=True)
    _check_batches(fixed, host, workload)
    read_optim_args(fixed.get("optim", "adamw_torch_fused"), fixed.get("optim_args", ""))
    if fixed.get("mup_base"):
        read_base(fixed["mup_base"])
    legal = _legal_here(host, workload, quantized=quantized)
    check_legal(fixed, legal, lambda name: _reason_not_legal_here(name, fixed[name], host, workload, quantized=quantized))
    return fixed


def parse_fixed(assignments: tuple[str, ...], host: Host, profile: ModelProfile, workload: Workload) -> dict[str, Any]:
    """Return the pairs of ``read_fixed``, also checked against what is legal for the model, and what the program always does."""
    fixed = read_fixed(assignments, host, workload, quantized=profile.parameters.quantized > 0)
    check_layout(fixed, host, profile, workload)
    legal = legal_values(host, profile, workload)
    for name, value in fixed.items():
        if name == "activation_checkpointing" and legal[name] != [0]:
            if value > profile.num_layers or (not profile.declares.gradient_checkpointing_per_layer and value not in legal[name]):
                raise RequestError(
                    f"--set {name}={value} is not possible: the model has {profile.num_layers} layers to recompute"
                )
        elif name in legal and value not in legal[name] and not (name == "loss_chunk_tokens" and len(legal[name]) > 1):
            refuse_value(name, value, legal[name], _reason_not_legal(name, value, host, profile, workload))
    return {**workload.runs_in.always, **fixed}


def legal_values(host: Host, profile: ModelProfile, workload: Workload) -> dict[str, list[Any]]:
    """Return the values of ``choices``, and those that are legal but only taken on request."""
    legal_here = _legal_here(host, workload, quantized=profile.parameters.quantized > 0)
    kernels = legal_here["loss_kernel"] if profile.objective == "causal-lm" else ["eager"]
    offloads = legal_here[WEIGHT_OFFLOAD] if has_frozen_layers(profile) else ["none"]
    searched = {name: values for name, values in choices(host, profile, workload).items() if name != "num_processes"}
    return {**searched, **legal_here, "loss_kernel": kernels, WEIGHT_OFFLOAD: offloads}


def _legal_here(host: Host, workload: Workload, *, quantized: bool) -> dict[str, list[Any]]:
    """Return the legal values of the fields that do not depend on the model."""
    can_offload = host.device == "cuda" and host_link(host) is not None and not _shares_memory(host)
    offload_values = [False, True] if can_offload else [False]
    optimizers = _optimizers(host, workload)
    plans_alone = host.device == "cuda" and (host.num_devices > 1 or workload.program != OWN)
    return {
        "precision": _precisions(host, workload, quantized=quantized, is_requested=True),
        "torch_compile": _compile_ways(host, quantized=quantized),
        "optim": [*optimizers, *(name for name in ALIASES if ALIASES[name] in optimizers)],
        "optimizer_in_backward": _updates_in_backward(workload),
        "host_memory": _host_memory(host),
        **dict.fromkeys(OFFLOADS, offload_values),
        WEIGHT_OFFLOAD: ["none"] if quantized else weight_places(host),
        "fused_kernels": [False, True] if plans_alone else [False],
        "loss_kernel": list(get_args(LossKernel)) if plans_alone else ["eager"],
        "rounding": ["stochastic"] if workload.program == OWN else list(get_args(Rounding)),
    }


def texts_share_work(host: Host, fixed: tuple[str, ...]) -> bool:
    """Return whether ``field=value`` pairs ask to search for layouts that share the job."""
    return shares_work(host, parse_layout(fixed))


def parse_layout(fixed: tuple[str, ...]) -> dict[str, Any]:
    """Return the layout's fields and the number of processes that ``field=value`` pairs fix."""
    text_by_name = {name: text for name, _, text in (assignment.partition("=") for assignment in fixed)}
    layout = {name: text for name, text in text_by_name.items() if name in Layout.model_fields or name == "num_processes"}
    return {name: parse_value(name, text) for name, text in layout.items()}


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Plan) | get_type_hints(Layout)


def parse_value(name: str, text: str, *, option: str = "--set") -> Any:
    """Return the value of a field of Plan or Layout. Raises RequestError that names the option."""
    options = tuple(optimizers()) if name == "optim" else get_args(_hints()[name])
    if name == "optim":
        check_name(text)
    required_of_plan = {"device": "cpu", "host": "", "model": "", "sequence_length": 1, "per_device_train_batch_size": 1}
    is_layout_field = name in Layout.model_fields
    kind = Layout if is_layout_field else Plan
    required = {} if is_layout_field else required_of_plan
    return parse_field(kind, required, name, text, valid=list_valid_values(options), option=option)


def fixed_value(assignments: tuple[str, ...], name: str) -> Any:
    """Return the value that ``field=value`` assignments give a field of a plan, or None without one. Raises RequestError."""
    texts = [text for field, _, text in (assignment.partition("=") for assignment in assignments) if field == name]
    return parse_value(name, texts[-1]) if texts else None


def _check_batches(fixed: dict[str, Any], host: Host, workload: Workload) -> None:
    """Raise RequestError if the fixed batch factors do not make up the global batch, or if a micro-batch divides a pair.

    If ranks share the job, the number of processes is no factor: the layout says how many have their own sequences.
    """
    factor_names = [name for name in BATCH_FACTORS if name != "num_processes" or not shares_work(host, fixed)]
    factors = {name: fixed[name] for name in factor_names if name in fixed}
    words = " x ".join(f"{name}={value}" for name, value in factors.items())
    together = workload.rows_together
    micro_batch = factors.get(MICRO_BATCH, together)
    if micro_batch % together:
        raise RequestError(odd_micro_batch(micro_batch))
    total = workload.num_units
    product = prod((factors | {MICRO_BATCH: micro_batch // together}).values())
    if total % product:
        unit = "sequences" if together == 1 else "pairs"
        twice = "" if together == 1 else f" ({MICRO_BATCH} counts sequences: twice such a number)"
        raise RequestError(
            f"{words} does not divide the global batch of {total} {unit}; use divisors of it: "
            f"{', '.join(map(str, divisors(total)[:16]))}{twice}"
        )
    if set(factors) == set(BATCH_FACTORS) and product != total:
        numbers = " x ".join(map(str, factors.values()))
        raise RequestError(f"{numbers} sequences are not the global batch of {workload.global_batch}; leave one of them out")


def _reason_not_legal(name: str, value: Any, host: Host, profile: ModelProfile, workload: Workload) -> str:
    """Return why a value of a field is not legal for this model, in brackets."""
    if value in PACKED_KERNELS:
        return f" ({why_kernel_unusable(value, host, profile) or 'it is planned for one device'})"
    if name == "packing" and workload.rows_together > 1:
        return " (two rows of a pair are compared)"
    if name == "packing":
        kernels = choices(host, profile, workload)["attention"]
        reason = why_never_packed(profile, kernels, longest=workload.longest)
        return f" ({reason or 'no sequence of the data leaves room in its row'})"
    if name == "loss_chunk_tokens":
        return f" ({profile.chunked_loss_reason})"
    if name == WEIGHT_OFFLOAD and not has_frozen_layers(profile):
        return " (only weights that are not trained can be elsewhere; train an adapter, such as --lora-rank 16)"
    return _reason_not_legal_here(name, value, host, workload, quantized=profile.parameters.quantized > 0)


def _reason_not_legal_anywhere(name: str) -> str | None:
    """Return what a field needs that this host or this request lacks, in brackets; None if the field needs nothing."""
    if name == "rounding":
        return " (Upshift rounds stochastically; add --program transformers, whose optimizers round to the nearest)"
    if name in PLANNED_ONLY:
        return " (it is planned for several CUDA devices alone: no engine here runs it)"
    if name == WEIGHT_OFFLOAD:
        return (
            " (frozen weights are read from the host of a CUDA device with memory of its own, or from files on a disk whose rate "
            "was measured)"
        )
    if name in OFFLOADS:
        return " (it needs a CUDA device with memory of its own, whose connection to the host is known)"
    if name == "optimizer_in_backward":
        return " (gradients are clipped by their norm, which needs all of them; add --max-grad-norm 0)"
    return None


def _needs_of(name: str, value: Any) -> tuple[str | None, str | None]:
    """Return the change of mathematics that a value is, and the library that it needs."""
    if name == "precision":
        return value, LIBRARY_OF_PRECISION.get(value)
    if name == "optim":
        return optimizers()[value].allow, optimizers()[value].library
    return None, None


def _reason_not_legal_here(name: str, value: Any, host: Host, workload: Workload, *, quantized: bool) -> str:
    """Return why a value of a field is not legal here for any model, in brackets.

    Raises MissingExtra where only a library is missing.
    """
    if quantized and (name == "torch_compile" or value in WHOLE_WEIGHTS):
        return " (the model's weights are stored in 4 bits)"
    reason = _reason_not_legal_anywhere(name)
    if reason is not None:
        return reason
    change, library = _needs_of(name, value)
    if change in changes_of_mathematics() and change not in workload.allow:
        return f" (it changes the mathematics; add --allow {change})"
    if name == "optim" and optimizers()[value].cuda_only and host.device != "cuda":
        return f" ({library} is for CUDA devices)"
    if name == "optim" and optimizers()[value].compiles and lacks_compiler(host):
        return f" ({library} compiles its update, and no compiler works here; run  upshift doctor)"
    if library is not None and (name == "optim" or host.supports(MATRIX_PRECISION[value])):
        check_library(library, purpose=f"{name}={value}", on_gpu=name == "optim" and optimizers()[value].cuda_only)
    return ""


def check_allow(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of --allow. Raise RequestError for an unknown one."""
    return check_allowed_names(names, changes_of_mathematics())


def _precisions(host: Host, workload: Workload, *, quantized: bool, is_requested: bool = False) -> list[Precision]:
    """Return the precisions for which the host has instructions. ``is_requested``: also those that are never the best.

    If torch computes its precision ``medium`` in bf16, tf32 would be less accurate than its name says, and is left out.
    """
    precisions: list[Precision] = ["fp32"]
    if not host.medium_is_bf16 and host.supports(MATRIX_PRECISION["tf32"]):
        precisions.append("tf32")
    precisions += [name for name in ("bf16", "fp16") if host.supports(MATRIX_PRECISION[name])]
    if not is_requested and host.device == "cuda" and {"bf16", "fp16"} <= {*precisions}:
        precisions.remove("fp16")  # as fast and as large on GPUs, and its gradients overflow
    if "bf16-weights" in workload.allow and "bf16" in precisions:
        precisions.append("bf16-weights")
    if "fp8" in workload.allow and "bf16" in precisions and host.supports("fp8") and _has_fp8(workload):
        precisions.append("fp8")
    return [name for name in precisions if not quantized or name not in WHOLE_WEIGHTS]


def _optimizers(host: Host, workload: Workload) -> list[str]:
    """Return the optimizers that are allowed and run here, each under one name."""
    names: list[str] = []
    for name, facts in optimizers().items():
        allowed = facts.allow is None or facts.allow in workload.allow
        runs_here = (host.device == "cuda" or not facts.cuda_only) and not (facts.compiles and lacks_compiler(host))
        if not allowed or not runs_here or name in ALIASES:
            continue  # its library need not be looked for, which every folder of sys.path takes time for
        if facts.library is None or (has_gpu_code if facts.cuda_only else _is_installed)(facts.library):
            names.append(name)
    return names


def _has_fp8(workload: Workload) -> bool:
    """Return whether a library computes in fp8. Another program brings its own."""
    return workload.program != OWN or _is_installed(LIBRARY_OF_PRECISION["fp8"])


def _is_installed(library: str) -> bool:
    return find_spec(library) is not None


def can_compile(host: Host) -> bool:
    """Return whether torch.compile works. A described GPU of compute capability 7.0 or newer has Triton."""
    if host.device != "cuda":
        return bool(host.measured and host.measured.compiler)
    if host.measured is not None and host.measured.gpu_compiler is not None:
        return host.measured.gpu_compiler
    capability = host.gpu.compute_capability if host.gpu is not None else None
    return capability is None or capability >= TRITON_CAPABILITY


def lacks_compiler(host: Host) -> bool:
    """Return whether torch.compile is known not to work. Nothing is known about a CPU that was not measured."""
    if host.device == "cuda":
        return not can_compile(host)
    return host.measured is not None and host.measured.compiler is False


def _compile_ways(host: Host, *, quantized: bool) -> list[Compile]:
    """Return the ways to compile. transformers trains no compiled model on quantized weights."""
    return ["off", "layer", "model"] if can_compile(host) and not quantized else ["off"]


def _updates_in_backward(workload: Workload) -> list[bool]:
    return [False] if workload.clips_gradients else [False, True]


def _host_memory(host: Host) -> list[HostMemory]:
    return ["keep", "system"] if host.device == "cpu" and _has_glibc() else ["system"]


def _can_chunk(profile: ModelProfile) -> bool:
    return any(step.chunked_gap is not None for step in profile.steps)


def _worth_packing(profile: ModelProfile, workload: Workload, kernels: list[str]) -> bool:
    lengths = workload.lengths
    short = workload.rows_together == 1 and lengths is not None and lengths.mean < WORTH_PACKING * workload.sequence_length
    return short and profile.objective == "causal-lm" and can_pack(profile, kernels, longest=workload.longest)


def _process_counts(host: Host, workload: Workload) -> list[int]:
    if host.device != "cpu" or host.cpu is None:
        return [1]
    cores = host.cpu.usable_cores
    candidates = {1, host.cpu.numa_nodes or 1, *({2} if cores >= 2 else set())}
    return sorted(count for count in candidates if cores % count == 0 and workload.num_units % count == 0)


def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
