"""Define the space of inference plans: the values of each field for a host and a model, and the values that a user fixes."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple, get_args, get_type_hints

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.inference.plan import (
    CACHE_ALLOW,
    CHANGES_MATHEMATICS,
    MAX_SEQUENCES,
    WEIGHTS,
    CachePrecision,
    Execution,
    InferencePlan,
    InferenceWorkload,
    WeightPrecision,
)
from upshift.planning.inference.time import activation_precision
from upshift.planning.layout import divisors
from upshift.planning.search.space import check_allowed_names, check_legal, list_valid_values, parse_field, read_assignments

CHUNKS = (512, 2048, 8192)  # prompt tokens of a step: fewer favour decoding latency, more favour efficient products
FIXED_BY_REQUEST = ("device", "host", "model", "replicas")
REPLAYED = ("cuda", "hpu", "xla")  # devices that replay a recorded step
DEGREES = ("tensor_parallel", "pipeline_parallel")
ONE_GROUP = 2**31  # more inputs than a matrix has: each output has one scale


def choices(host: Host, profile: ModelProfile, workload: InferenceWorkload) -> dict[str, list[Any]]:
    """Return the values of each field that are searched without a request. No list is empty."""
    legal = legal_values(host, profile, workload)
    if {"bf16", "fp16"} <= set(legal["weights"]):  # they cost the same
        legal["weights"].remove("fp16")
    return legal


def legal_values(host: Host, profile: ModelProfile, workload: InferenceWorkload) -> dict[str, list[Any]]:
    """Return the legal values of each field."""
    degrees = {"tensor_parallel": _tensor_degrees(host, profile), "pipeline_parallel": _pipeline_degrees(host, profile)}
    return {**_legal_here(host, workload), **_of_program(degrees, workload)}


def _of_program(values: dict[str, list[Any]], workload: InferenceWorkload) -> dict[str, list[Any]]:
    """Return the values of each field that the program has words for. Raise RequestError if a field has none left."""
    valid = workload.runs_in.values
    narrowed = {name: [value for value in found if value in valid.get(name, found)] for name, found in values.items()}
    for name, found in narrowed.items():
        if not found:
            words = " or ".join(map(str, valid[name]))
            here = ", ".join(map(str, values[name]))
            raise RequestError(
                f"--program {workload.program} has {name} {words}, and here it can be {here}; use another --program or --on"
            )
    return narrowed


def _legal_here(host: Host, workload: InferenceWorkload) -> dict[str, list[Any]]:
    """Return the legal values of the fields that do not depend on the model."""
    values: dict[str, list[Any]] = {
        "weights": legal_weights(host, workload),
        "kv_cache": _cache_precisions(host, workload),
        "execution": _executions(host),
    }
    return _of_program(values, workload)


def default_cache(weights: WeightPrecision, host: Host) -> CachePrecision:
    """Return the precision in which keys and values are computed with these weights."""
    if weights in ("fp32", "bf16", "fp16"):
        return weights
    return activation_precision(host)


def chunk_sizes(workload: InferenceWorkload, fixed: dict[str, Any]) -> list[int]:
    """Return the numbers of prompt tokens of a step to search.

    The largest holds all prompts, or else the whole longest one. Chunks larger than all prompts together change nothing.
    """
    if "prefill_chunk_tokens" in fixed:
        return [fixed["prefill_chunk_tokens"]]
    max_tokens = workload.prompt_length * (workload.concurrency or MAX_SEQUENCES)
    sizes = [size for size in CHUNKS if size < max_tokens]
    covering = next((size for size in CHUNKS if size >= max_tokens), max(workload.prompt_length, CHUNKS[-1]))
    return [*sizes, *([covering] if covering not in sizes else [])]


def concurrencies(workload: InferenceWorkload, replicas: int, largest: int | None, fixed: dict[str, Any]) -> list[int]:
    """Return the numbers of sequences at once in one replica.

    If the user gave a number of requests, each replica has its share. Otherwise they are powers of two, and sizes between them,
    up to the largest that fits. The first that does not fit is included, so that its reason is shown.
    """
    if "max_concurrency" in fixed:
        return [fixed["max_concurrency"]]
    if workload.concurrency is not None and workload.task == "generate":
        return [min(ceil(workload.concurrency / replicas), workload.runs_in.max_sequences)]
    most = workload.runs_in.max_sequences
    max_sequences = most if workload.concurrency is None else ceil(workload.concurrency / replicas)
    sizes = sorted(
        {size for power in range(max_sequences.bit_length()) for size in (2**power, 3 * 2**power // 2)} | {max_sequences}
    )
    sizes = [size for size in sizes if size <= max_sequences]
    if largest is None or largest >= max_sequences:
        return sizes
    fitting = [size for size in sizes if size <= largest]
    return sorted({*fitting, *([largest] if largest else []), sizes[len(fitting)]})


def occupied_share(workload: InferenceWorkload, replicas: int, rows: int) -> float:
    """Return the share of the replicas' rows that requests fill; 1 where the number of requests is not given.

    Some replicas have one request less than the fullest one, or none. When encoding, a replica computes its share of the batch
    in several steps.
    """
    if workload.concurrency is None:
        return 1.0
    return workload.concurrency / (replicas * max(rows, ceil(workload.concurrency / replicas)))


def device_layouts(host: Host, values: dict[str, list[Any]]) -> list[tuple[int, int, int]]:
    """Return all (tensor-parallel degree, pipeline-parallel degree, replicas) that use every device."""
    degrees = []
    for tensor in values["tensor_parallel"]:
        for pipeline in values["pipeline_parallel"]:
            if host.num_devices % (tensor * pipeline) == 0:
                degrees.append((tensor, pipeline, host.num_devices // (tensor * pipeline)))
    return degrees


def check_allow(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of --allow. Raise RequestError for an unknown one."""
    return check_allowed_names(names, CHANGES_MATHEMATICS, of=" of inference")


def read_fixed(assignments: tuple[str, ...], host: Host, workload: InferenceWorkload) -> dict[str, Any]:
    """Return the ``field=value`` pairs of --set, checked against the plan's fields and types.

    They are also checked against what is legal here, as far as that is known before a model is traced.
    """
    settable = [name for name in InferencePlan.model_fields if name not in FIXED_BY_REQUEST]
    fixed = read_assignments(assignments, settable, _parse_value)
    _check_used(fixed, workload)
    check_legal(fixed, _legal_here(host, workload), lambda name: _reason_not_legal_here(name, fixed[name], host, workload))
    return fixed


def _check_used(fixed: dict[str, Any], workload: InferenceWorkload) -> None:
    """Raise RequestError for a field that no plan of this task, or of these weights, uses."""
    if workload.task == "encode":
        for name, reason in (("kv_cache", "keeps no cache"), ("prefill_chunk_tokens", "computes each batch in one step")):
            if name in fixed:
                raise RequestError(f"--set {name}={fixed[name]} has no effect: encoding {reason}; leave it out")
    if "group_size" not in fixed:
        return
    weights = fixed.get("weights", "int4")
    allow = WEIGHTS["int4"].allow
    subject = f"--set group_size={fixed['group_size']} is for weights in 4 bits"
    if weights != "int4":
        raise RequestError(f"{subject}, and --set weights={weights} are not; leave one out")
    if allow not in workload.allow:
        raise RequestError(f"{subject}; add --allow {allow}, or leave it out")


def parse_fixed(assignments: tuple[str, ...], host: Host, profile: ModelProfile, workload: InferenceWorkload) -> dict[str, Any]:
    """Return the pairs of ``read_fixed``, also checked against what is legal for the model."""
    fixed = read_fixed(assignments, host, workload)
    if "group_size" in fixed:
        fixed["weights"] = "int4"  # no other weights have groups
    legal = legal_values(host, profile, workload)
    check_legal(fixed, legal, lambda name: _reason_not_legal_degree(name, fixed[name], profile, workload))
    if not device_layouts(host, {name: [fixed[name]] if name in fixed else legal[name] for name in DEGREES}):
        requested = " x ".join(f"{name}={fixed[name]}" for name in DEGREES if name in fixed)
        raise RequestError(f"{requested} does not divide the {host.num_devices} devices of {host.name}; use degrees that do")
    return fixed


def _parse_value(name: str, text: str) -> Any:
    required = {
        "device": "cpu",
        "host": "",
        "model": "",
        "weights": "bf16",
        "kv_cache": "bf16",
        "max_concurrency": 1,
        "prefill_chunk_tokens": 1,
        "execution": "eager",
    }
    options = get_args(get_type_hints(InferencePlan)[name])
    return parse_field(InferencePlan, required, name, text, valid=list_valid_values(options, "; use a whole number from 1"))


def _reason_not_legal_degree(name: str, value: Any, profile: ModelProfile, workload: InferenceWorkload) -> str:
    if value not in workload.runs_in.values.get(name, (value,)):
        return f" (of --program {workload.program})"
    if name == "tensor_parallel":
        degrees = f"; degrees divide {profile.tensor_parallel.divisor}" if profile.tensor_parallel else ""
        return f" (the devices of a node; {profile.tensor_parallel_reason}{degrees})"
    declared = "declares" if profile.declares.pipeline_parallel_plan else "declares no"
    return f" (the model {declared} pipeline stages, and has {profile.num_layers} layers to divide evenly)"


def _reason_not_legal_here(name: str, value: Any, host: Host, workload: InferenceWorkload) -> str:
    if name == "kv_cache" and workload.task == "encode":
        return " (encoding keeps no cache)"
    if value in ("bf16", "fp16", "fp8") and host.supports(value) is False:
        return f" ({host.name} has no instructions for it)"
    change: str | None = None
    if name == "weights":
        change = WEIGHTS[value].allow
    elif name == "kv_cache":
        change = CACHE_ALLOW.get(value)
    if value not in workload.runs_in.values.get(name, (value,)):
        return f" (of --program {workload.program})"
    if change is not None and change not in workload.allow:
        return f" (it changes the mathematics; add --allow {change})"
    return f" (of {host.name})"


def _half_precisions(host: Host) -> list[WeightPrecision]:
    return [name for name in ("bf16", "fp16") if host.supports(name) is not False]


def legal_weights(host: Host, workload: InferenceWorkload) -> list[WeightPrecision]:
    """Return the precisions of weights that the host computes with, and that the workload allows."""
    half_precisions = _half_precisions(host)
    allowed = set(workload.allow)
    precisions: list[WeightPrecision] = ["fp32", *half_precisions]
    if "fp8-weights" in allowed and half_precisions and host.device != "cpu" and host.supports("fp8"):
        precisions.append("fp8")
    if half_precisions or host.device == "cpu":
        precisions += [name for name in ("int8", "int4") if WEIGHTS[name].allow in allowed]
    return precisions


def _cache_precisions(host: Host, workload: InferenceWorkload) -> list[CachePrecision]:
    precisions: list[CachePrecision] = ["fp32", *_half_precisions(host)]  # type: ignore[list-item]
    if workload.task == "generate":
        if "fp8-kv" in workload.allow and host.supports("fp8"):
            precisions.append("fp8")
        if "int8-kv" in workload.allow:
            precisions.append("int8")
    return precisions


def _tensor_degrees(host: Host, profile: ModelProfile) -> list[int]:
    """Return the tensor-parallel degrees inside a node. Two exchanges a layer are hidden by no computation."""
    divisor = profile.tensor_parallel.divisor if profile.tensor_parallel is not None else 1
    return [degree for degree in divisors(max(host.gpus_per_node, 1)) if divisor % degree == 0]


def _pipeline_degrees(host: Host, profile: ModelProfile) -> list[int]:
    can_pipeline = bool(profile.declares.pipeline_parallel_plan) and len(profile.stacks) == 1 and host.device != "cpu"
    return [degree for degree in divisors(host.num_devices) if degree == 1 or (can_pipeline and profile.num_layers % degree == 0)]


def _executions(host: Host) -> list[Execution]:
    replays = host.device in REPLAYED or bool(host.measured and host.measured.compiler)
    return ["graphs", "eager"] if replays else ["eager"]


class StoredWeights(NamedTuple):
    """The precision of quantized weights, and how many of them share a scale. ``group_size`` is None for other than 4 bits."""

    weights: WeightPrecision
    group_size: int | None = None


def read_stored_weights(config: Mapping[str, Any]) -> StoredWeights | None:
    """Return the precision of a model's quantized weights, or None if they are plain, or if the planner has no such precision."""
    stored = config.get("quantization_config") or {}
    groups = stored.get("config_groups")  # of compressed-tensors
    if isinstance(groups, Mapping):
        kinds = {_precision_of_weights((group or {}).get("weights") or {}) for group in groups.values()}
        return kinds.pop() if len(kinds) == 1 else None
    if "fp8" in str(stored.get("quant_method")):
        return StoredWeights("fp8")
    bits = stored.get("bits") or 4 * bool(stored.get("load_in_4bit")) or 8 * bool(stored.get("load_in_8bit"))
    return _precision_of_weights({"num_bits": bits, "group_size": stored.get("group_size")})


def _precision_of_weights(weights: Mapping[str, Any]) -> StoredWeights | None:
    bits = weights.get("num_bits")
    is_float = weights.get("type") == "float"
    if bits == 8:
        return StoredWeights("fp8" if is_float else "int8")
    if bits != 4 or is_float:
        return None
    size = weights.get("group_size")
    return StoredWeights("int4", size if isinstance(size, int) and size > 0 else ONE_GROUP)


def fix_stored_weights(
    config: Mapping[str, Any], host: Host, workload: InferenceWorkload, fixed: tuple[str, ...]
) -> tuple[InferenceWorkload, tuple[str, ...]] | None:
    """Return the workload and the fixed fields for weights as they are stored.

    Return None if the weights are plain, if the user fixes other weights, or if the host cannot compute with the stored ones."""
    stored = read_stored_weights(config)
    if stored is None or any(text.partition("=")[0] in ("weights", "group_size") for text in fixed):
        return None
    allow = WEIGHTS[stored.weights].allow
    allowed = workload if allow is None or allow in workload.allow else workload.changed(allow=(*workload.allow, allow))
    if stored.weights not in _legal_here(host, allowed)["weights"]:
        return None
    groups = () if stored.group_size is None else (f"group_size={stored.group_size}",)
    return allowed, (*fixed, f"weights={stored.weights}", *groups)
