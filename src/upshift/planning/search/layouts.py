"""Enumerate the layouts that a host, a model and a workload allow, and explain why a requested one is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import lcm
from typing import Any

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.layout import ContextKind, FullyShard, Layout, divisors, why_not_split
from upshift.planning.workload import Workload

MIN_TOKENS_PER_RANK = 4096  # with fewer tokens there is nothing to gain from sharing a sequence
VIRTUAL_STAGES = (2, 4)
REQUESTED_LAYOUTS = ("master_weights", "bf16_gradients", "gather_again", "vocabulary_parallel", "overlap")  # on request
MAX_PIPELINE = 64
MAX_PROCESSES_PER_CORE = 4  # more than one only serves to try layouts out, as processes then take turns
MAX_THREADS_PER_CORE = 4  # of all processes; more than a core's hardware threads only serve to try layouts out
DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
LARGEST_NAMED = 16  # the largest degree of processes on CPUs that a message names
DEFAULT_LAYOUT = Layout()


def shares_work(host: Host, fixed: dict[str, Any]) -> bool:
    """Return whether to search for layouts that share the job.

    All devices share it, or the processes on one machine's CPU if several processes or a layout are requested. Otherwise each
    process on one machine's CPU has its own sequences.
    """
    if host.device != "cpu" or host.num_nodes > 1:
        return host.num_devices > 1
    asks_for_layout = any(value != getattr(DEFAULT_LAYOUT, name) for name, value in fixed.items() if name in Layout.model_fields)
    return asks_for_layout or fixed.get("num_processes", 1) > 1


def rank_counts(host: Host, fixed: dict[str, Any]) -> list[int]:
    """Return how many ranks a shared job may have.

    On GPUs it is one for each. On CPUs it is the requested number of processes. If no number is requested, it is as many as the
    requested degrees need, and one for each NUMA node.
    """
    if host.device != "cpu":
        return [host.num_devices]
    if "num_processes" in fixed:
        return [fixed["num_processes"]]
    requested = DEFAULT_LAYOUT.model_copy(update={name: value for name, value in fixed.items() if name in Layout.model_fields})
    shards = max(requested.shard_size, 1 if requested.fully_shard == "no" else 2)
    group_ranks = lcm(requested.context_parallel, shards, requested.expert_parallel)
    fewest_ranks = max(requested.tensor_parallel * lcm(requested.pipeline_parallel * group_ranks, host.num_nodes), 2)
    numa_nodes = host.num_nodes * ((host.cpu.numa_nodes if host.cpu else None) or 1)
    return sorted({fewest_ranks, numa_nodes if numa_nodes % fewest_ranks == 0 else fewest_ranks})


def enumerate_layouts(
    host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any] | None = None, ranks: int | None = None
) -> Iterator[tuple[int, Layout]]:
    """Yield (number of data-parallel ranks, layout) in a fixed order. All layouts have the ``fixed`` fields.

    ``ranks``: the number of ranks; None: one for each device.
    """
    fixed = fixed or {}
    ranks = ranks or host.num_devices
    for tensor, context, pipeline, kind in _degrees(host, profile, workload, fixed, ranks):
        data = ranks // (tensor * context * pipeline)
        if workload.num_units % data:
            continue
        shardings = _shardings(host.ranks_per_node(ranks), data * context, tensor, stages=_stages_of_zero(profile))
        schedules = _schedules(profile, pipeline, fixed)
        expert_degrees = _expert_degrees(profile, data * context, tensor)
        sequence_values = _sequence_parallel_values(host, tensor)
        for shard, schedule, expert_parallel, sequence_parallel in product(shardings, schedules, expert_degrees, sequence_values):
            layout = Layout(
                fully_shard=shard[0],
                shard_size=shard[1],
                tensor_parallel=tensor,
                sequence_parallel=sequence_parallel,
                context_parallel=context,
                context_kind=kind,
                pipeline_parallel=pipeline,
                pipeline_schedule=schedule[0],
                virtual_stages=schedule[1],
                expert_parallel=expert_parallel,
            )
            layout = layout.model_copy(update=_requested_fields(layout, profile, workload, fixed))
            arranged = workload.runs_in.arrange(layout, sharing=data * context)
            if arranged is None or why_not_split(arranged) is not None:
                continue
            if all(getattr(arranged, name) == value for name, value in fixed.items()):
                yield data, arranged


def _requested_fields(layout: Layout, profile: ModelProfile, workload: Workload, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are only set on request, where this layout can have them."""
    divides_vocabulary = (
        layout.tensor_parallel > 1 and profile.tensor_parallel is not None and profile.tensor_parallel.outside > 0
    )
    has_masters = layout.fully_shard == "optimizer" and bool(fixed.get("master_weights"))
    has_masters = has_masters or bool(workload.runs_in.layout.get("master_weights"))
    possible = {
        "master_weights": layout.fully_shard == "optimizer",
        "bf16_gradients": has_masters,
        "gather_again": layout.sequence_parallel,
        "vocabulary_parallel": divides_vocabulary and profile.objective == "causal-lm",
    }
    requested = {name: True for name, is_possible in possible.items() if is_possible and fixed.get(name)}
    if "overlap" in fixed:
        requested["overlap"] = fixed["overlap"]
    return requested


def _degrees(
    host: Host, profile: ModelProfile, workload: Workload, fixed: dict[str, Any], devices: int
) -> Iterator[tuple[int, int, int, ContextKind]]:
    """Yield (tensor, context, pipeline degree, kind of context parallelism).

    Tensor-parallel groups stay inside a node, because no computation hides their exchange.
    """
    tensors = [degree for degree in divisors(host.ranks_per_node(devices)) if degree == 1 or _can_divide_layers(profile, degree)]
    pipelines = [
        degree for degree in divisors(devices) if degree == 1 or (_can_pipeline(profile, degree) and degree <= MAX_PIPELINE)
    ]
    always_included = {1, fixed.get("context_parallel")} if profile.isolation.loss_splits else {1}
    contexts = [
        degree for degree in divisors(devices) if degree in always_included or _is_worth_sharing(profile, workload, degree)
    ]
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if devices % (tensor * context * pipeline):
            continue
        for kind in _context_kinds(host, profile, tensor, context):
            yield tensor, context, pipeline, kind


def _sequence_parallel_values(host: Host, tensor: int) -> list[bool]:
    """Return the values of sequence_parallel to search: only true where it costs nothing.

    On CPUs a reduce_scatter moves as much as the sum (cost/network.py), so it trades time for memory.
    """
    if tensor == 1:
        return [False]
    return [True] if host.device != "cpu" else [True, False]


def _can_divide_layers(profile: ModelProfile, degree: int) -> bool:
    return profile.tensor_parallel is not None and profile.tensor_parallel.divisor % degree == 0


def _can_pipeline(profile: ModelProfile, degree: int) -> bool:
    has_stages = bool(profile.declares.pipeline_parallel_plan) and len(profile.stacks) == 1
    return has_stages and profile.isolation.loss_splits and profile.num_layers % degree == 0


def _is_worth_sharing(profile: ModelProfile, workload: Workload, degree: int) -> bool:
    is_shared = profile.objective == "causal-lm" and profile.isolation.loss_splits
    return is_shared and workload.sequence_length >= degree * MIN_TOKENS_PER_RANK


def _context_kinds(host: Host, profile: ModelProfile, tensor: int, context: int) -> list[ContextKind]:
    if context == 1:
        return ["ring"]
    queries, keys = profile.heads or (1, 1)
    if host.device == "cpu":  # torch's ring needs CUDA kernels; ranks with fewer keys than they need repeat them
        return ["ulysses"] if queries % (tensor * context) == 0 else []
    can_exchange_heads = queries % (tensor * context) == 0 and keys % (tensor * context) == 0
    return ["ring", "ulysses"] if can_exchange_heads else ["ring"]


def _stages_of_zero(profile: ModelProfile) -> list[FullyShard]:
    """Return the ZeRO stages that can divide this model. Weights in 4 bits are never gathered to compute with."""
    return ["optimizer"] if profile.parameters.quantized else ["optimizer", "gradients", "weights"]


def _shardings(node_ranks: int, ranks: int, tensor: int, *, stages: list[FullyShard]) -> list[tuple[FullyShard, int]]:
    """Return the values of (fully_shard, shard_size).

    Nothing is divided, or a ZeRO stage divides its tensors among all ranks that sum gradients, or among those of one node, with
    replicas between nodes.
    """
    sizes = [ranks] if ranks > 1 else []
    ranks_in_node = max(node_ranks // tensor, 1)
    if 1 < ranks_in_node < ranks and ranks % ranks_in_node == 0:
        sizes.append(ranks_in_node)
    return [("no", 1), *((stage, size) for stage in stages for size in sizes)]


def _schedules(profile: ModelProfile, pipeline: int, fixed: dict[str, Any]) -> list[tuple[Any, int]]:
    """Return (schedule, virtual stages). gpipe is only among them on request: it is as fast as 1f1b and needs more memory."""
    if pipeline == 1:
        return [("1f1b", 1)]
    interleaved = [
        ("interleaved_1f1b", num_stages) for num_stages in VIRTUAL_STAGES if profile.num_layers % (pipeline * num_stages) == 0
    ]
    gpipe = [("gpipe", 1)] if fixed.get("pipeline_schedule") == "gpipe" else []
    return [("1f1b", 1), ("zero_bubble", 1), *interleaved, *gpipe]


def _expert_degrees(profile: ModelProfile, ranks: int, tensor: int) -> list[int]:
    """Return the degrees of expert parallelism. Each rank of a tensor-parallel group then has experts of its own, too."""
    if profile.experts is None or not profile.declares.expert_parallel or profile.parameters.adapter:
        return [1]
    return [degree for degree in divisors(ranks) if degree == 1 or profile.experts.count % (degree * tensor) == 0]


def check_processes(fixed: dict[str, Any], host: Host) -> None:
    """Raise RequestError where this host cannot run the requested number of processes."""
    requested = fixed.get("num_processes")
    if requested is None:
        return
    if host.device != "cpu":
        if requested != host.num_devices:
            ranks = f"one for each of its GPUs, {host.num_devices}"
            raise RequestError(f"--set num_processes={requested} is not possible on {host.name}, which runs {ranks}; use that")
    elif requested % host.num_nodes and requested > 1:
        raise RequestError(
            f"--set num_processes={requested} does not divide among {host.num_nodes} hosts; use a multiple of that"
        )
    elif host.cpu is not None:
        cores = host.cpu.usable_cores
        max_processes = MAX_PROCESSES_PER_CORE * cores
        if host.ranks_per_node(requested) > max_processes:
            raise RequestError(
                f"--set num_processes={requested} is more than {MAX_PROCESSES_PER_CORE} for each of the {cores} cores of "
                f"{host.name}, where they only wait for each other; use at most {max_processes * host.num_nodes}"
            )


def check_threads(fixed: dict[str, Any], host: Host) -> None:
    """Raise RequestError where the processes of a host would have far more threads than it has cores."""
    requested = fixed.get("threads_per_process")
    if requested is None or host.cpu is None:
        return
    cores = host.cpu.usable_cores
    processes = host.ranks_per_node(fixed.get("num_processes", host.num_devices if host.device != "cpu" else host.num_nodes))
    max_threads = max(MAX_THREADS_PER_CORE * cores // processes, 1)
    if requested > max_threads:
        of_processes = f" with {processes} processes" if processes > 1 else ""
        raise RequestError(
            f"--set threads_per_process={requested}{of_processes} is more than {MAX_THREADS_PER_CORE} threads for each of the "
            f"{cores} cores of {host.name}, where they only wait for each other; use at most {max_threads}"
        )


def _valid_values(
    fixed: dict[str, Any],
    host: Host,
    profile: ModelProfile,
    workload: Workload,
    fields: dict[str, Any],
    name: str,
    *,
    searches_degrees: bool = False,
) -> list[Any]:
    """Return the values of a field in the layouts that have the given fields.

    ``searches_degrees``: on CPUs, also search layouts with as many processes as other degrees need.
    """
    counts = fixed if "num_processes" in fixed else fields
    candidates = [fields]
    if searches_degrees and name in DEGREES and host.device == "cpu":
        candidates = [fields | {name: degree} for degree in range(1, LARGEST_NAMED + 1)]
    values = set()
    for candidate in candidates:
        for ranks in rank_counts(host, {**candidate, **counts}):
            matching = enumerate_layouts(host, profile, workload, fixed=candidate, ranks=ranks)
            values |= {getattr(layout, name) for _, layout in matching}
    return sorted(values)


def check_layout(fixed: dict[str, Any], host: Host, profile: ModelProfile, workload: Workload) -> None:
    """Raise RequestError if no layout here has the requested fields. The message names the value, the valid ones and the reason.

    The problem may be one field, several fields together, or the number of processes. ``fixed`` may also have other fields.
    """
    if not shares_work(host, fixed):
        return
    requested = {name: value for name, value in fixed.items() if name in Layout.model_fields}
    valid_values = partial(_valid_values, fixed, host, profile, workload)
    for name, value in requested.items():
        if not valid_values({name: value}, name):
            valid = ", ".join(map(str, valid_values({}, name, searches_degrees=True)))
            where = f"of {fixed['num_processes']} processes on {host.name}" if "num_processes" in fixed else f"on {host.name}"
            raise RequestError(f"--set {name}={value} is not possible {where}; use one of {valid}{_explain_field(name, profile)}")
    if valid_values(requested, "tensor_parallel"):
        return
    joined = " ".join(f"--set {name}={value}" for name, value in requested.items())
    for name, value in sorted(requested.items(), key=lambda item: item[0] in DEGREES):
        other_fields = {other_name: other_value for other_name, other_value in requested.items() if other_name != name}
        if valid_with_others := valid_values(other_fields, name):
            valid = ", ".join(map(str, valid_with_others))
            raise RequestError(f"{joined} is not possible on {host.name}; with the others {name} can be {valid}, not {value}")
    if host.device == "cpu":
        advice = "another number of processes (--nproc)"
    else:
        advice = f"a --global-batch that is a multiple of {host.num_devices}, or fewer devices (--on)"
    raise RequestError(
        f"{joined or _describe_processes(fixed)} is not possible on {host.name}: ranks must divide the global batch of "
        f"{workload.global_batch}{_describe_divisions(profile)}; use {advice}"
    )


def _describe_processes(fixed: dict[str, Any]) -> str:
    return f"num_processes={fixed['num_processes']}" if "num_processes" in fixed else "sharing the job"


def _describe_divisions(profile: ModelProfile) -> str:
    """Return a text with the other parts of the model that ranks may divide."""
    divisible = [f"{profile.num_layers} layers"] if _can_pipeline(profile, profile.num_layers) else []
    if profile.tensor_parallel is not None:
        divisible.append(f"heads and matrices that divide by {profile.tensor_parallel.divisor}")
    return "".join(f", or {text}" for text in divisible)


def _explain_field(name: str, profile: ModelProfile) -> str:
    if name in ("tensor_parallel", "sequence_parallel", "gather_again", "vocabulary_parallel"):
        degrees = f"; degrees divide {profile.tensor_parallel.divisor}" if profile.tensor_parallel else ""
        return f" ({profile.tensor_parallel_reason}{degrees})"
    pipeline_fields = ("pipeline_parallel", "pipeline_schedule", "virtual_stages")
    if name in (*pipeline_fields, "context_parallel", "context_kind") and not profile.isolation.loss_splits:
        return " (the model's loss is taken over a whole batch and all layers, as a router's loss is: output_router_logits)"
    if name in pipeline_fields:
        declared = "declares" if profile.declares.pipeline_parallel_plan else "declares no"
        return f" (the model {declared} pipeline stages, and has {profile.num_layers} layers to divide evenly)"
    if name == "expert_parallel":
        return f" ({_explain_experts(profile)})"
    if name == "fully_shard" and profile.parameters.quantized:
        return " (weights in 4 bits are not gathered)"
    return ""


def _explain_experts(profile: ModelProfile) -> str:
    if profile.experts is None:
        return "the model has no experts"
    if not profile.declares.expert_parallel:
        return "the model declares no expert-parallel plan"
    if profile.parameters.adapter:
        return "the model has an adapter, and what it declares to share are plain weights"
    return f"the model has {profile.experts.count} experts a layer, which expert_parallel x tensor_parallel divides"
