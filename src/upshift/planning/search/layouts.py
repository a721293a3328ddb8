"""Find every layout that a host, a model and a workload allow, and say why one that was asked for is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import lcm
from typing import Any

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.layout import ContextKind, Layout, divisors, reason_not_split
from upshift.planning.workload import Workload

LONG_ENOUGH = 4096  # tokens a rank: below it there is nothing to gain from sharing a sequence
VIRTUAL_STAGES = (2, 4)
ASKED_LAYOUTS = ("master_weights", "gather_again", "vocabulary_parallel", "overlap")  # never chosen unasked
DEEPEST_PIPELINE = 64
MOST_A_CORE = 4  # processes that take turns; more than one for each core is for trying layouts out
DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
LARGEST_NAMED = 16  # the largest degree of processes on CPUs that a message names
PLAIN = Layout()


def shares_work(host: Host, fixed: dict[str, Any]) -> bool:
    """Return whether to look for ways to share the job.

    They are among all devices, or among processes on one machine's CPU if several processes or a layout are asked for. Otherwise
    processes on one machine's CPU have sequences of their own each.
    """
    if host.device != "cpu" or host.num_nodes > 1:
        return host.num_devices > 1
    asked = any(value != getattr(PLAIN, name) for name, value in fixed.items() if name in Layout.model_fields)
    return asked or fixed.get("num_processes", 1) > 1


def rank_counts(host: Host, fixed: dict[str, Any]) -> list[int]:
    """Return how many ranks a shared job may have.

    On GPUs it is one for each. On CPUs it is the number of processes that is asked for, or else as many as the requested degrees
    need, and one for each NUMA node.
    """
    if host.device != "cpu":
        return [host.num_devices]
    if "num_processes" in fixed:
        return [fixed["num_processes"]]
    asked = PLAIN.model_copy(update={name: value for name, value in fixed.items() if name in Layout.model_fields})
    divided = max(asked.shard_size, 1 if asked.fully_shard == "no" else 2)
    sharing = lcm(asked.context_parallel, divided, asked.expert_parallel)
    least = max(asked.tensor_parallel * lcm(asked.pipeline_parallel * sharing, host.num_nodes), 2)
    sockets = host.num_nodes * ((host.cpu.numa_nodes if host.cpu else None) or 1)
    return sorted({least, sockets if sockets % least == 0 else least})


def layouts(
    host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any] | None = None, ranks: int | None = None
) -> Iterator[tuple[int, Layout]]:
    """Yield (data-parallel ranks, layout) in a fixed order, of layouts with the ``fixed`` fields only.

    ``ranks``: the number of ranks; None: one for each device.
    """
    fixed = fixed or {}
    ranks = ranks or host.num_devices
    for tensor, context, pipeline, kind in _degrees(host, profile, workload, fixed, ranks):
        data = ranks // (tensor * context * pipeline)
        if workload.global_batch % data:
            continue
        for sharding in _shardings(host.ranks_per_node(ranks), data * context, tensor):
            for schedule, stages in _schedules(profile, pipeline, fixed):
                for experts, tokens in product(_expert_degrees(profile, data * context), _shares_tokens(host, tensor)):
                    layout = Layout(
                        fully_shard=sharding[0], shard_size=sharding[1], tensor_parallel=tensor, sequence_parallel=tokens,
                        context_parallel=context, context_kind=kind, pipeline_parallel=pipeline, pipeline_schedule=schedule,
                        virtual_stages=stages, expert_parallel=experts,
                    )  # fmt: skip
                    layout = layout.model_copy(update=_asked(layout, profile, fixed))
                    if reason_not_split(layout) is None and all(getattr(layout, name) == value for name, value in fixed.items()):
                        yield data, layout


def _asked(layout: Layout, profile: ModelProfile, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are set only when asked for, where this layout can have them."""
    vocabulary = layout.tensor_parallel > 1 and profile.tensor_parallel is not None and profile.tensor_parallel.outside > 0
    possible = {
        "master_weights": layout.fully_shard == "optimizer", "gather_again": layout.sequence_parallel,
        "vocabulary_parallel": vocabulary and profile.objective == "causal-lm",
    }  # fmt: skip
    taken = {name: True for name, can in possible.items() if can and fixed.get(name)}
    return taken | {name: fixed[name] for name in ("overlap",) if name in fixed}


def _degrees(
    host: Host, profile: ModelProfile, workload: Workload, fixed: dict[str, Any], devices: int
) -> Iterator[tuple[int, int, int, ContextKind]]:
    """Yield (tensor, context, pipeline degree, kind of context parallelism).

    Tensor-parallel groups stay inside a node: their exchange hides behind nothing.
    """
    tensors = [t for t in divisors(host.ranks_per_node(devices)) if t == 1 or _divides(profile, t)]
    pipelines = [p for p in divisors(devices) if p == 1 or (_can_pipeline(profile, p) and p <= DEEPEST_PIPELINE)]
    asked = {1, fixed.get("context_parallel")}
    contexts = [c for c in divisors(devices) if c in asked or _worth_sharing(profile, workload, c)]
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if devices % (tensor * context * pipeline):
            continue
        for kind in _context_kinds(host, profile, tensor, context):
            yield tensor, context, pipeline, kind


def _shares_tokens(host: Host, tensor: int) -> list[bool]:
    """Return the values of sequence_parallel to look at: always true where it costs nothing.

    On CPUs a reduce_scatter moves as much as the sum (cost/network.py), so it trades time for memory.
    """
    return [tensor > 1] if tensor == 1 or host.device != "cpu" else [True, False]


def _divides(profile: ModelProfile, degree: int) -> bool:
    return profile.tensor_parallel is not None and profile.tensor_parallel.divisor % degree == 0


def _can_pipeline(profile: ModelProfile, degree: int) -> bool:
    return bool(profile.declares.pipeline_parallel_plan) and len(profile.stacks) == 1 and profile.num_layers % degree == 0


def _worth_sharing(profile: ModelProfile, workload: Workload, degree: int) -> bool:
    return profile.objective == "causal-lm" and workload.sequence_length >= degree * LONG_ENOUGH


def _context_kinds(host: Host, profile: ModelProfile, tensor: int, context: int) -> list[ContextKind]:
    if context == 1:
        return ["ring"]
    queries, keys = profile.heads or (1, 1)
    if host.device == "cpu":  # torch's ring needs CUDA kernels; ranks with fewer keys than they need repeat them
        return ["ulysses"] if queries % (tensor * context) == 0 else []
    exchanges = queries % (tensor * context) == 0 and keys % (tensor * context) == 0
    return ["ring", "ulysses"] if exchanges else ["ring"]


def _shardings(node_ranks: int, ranks: int, tensor: int) -> list[tuple[Any, int]]:
    """Return (what is divided, among how many ranks).

    They are: nothing, or each ZeRO stage over all ranks that share gradients, or over those of one node with replicas between
    nodes.
    """
    sizes = [ranks] if ranks > 1 else []
    node = max(node_ranks // tensor, 1)
    if 1 < node < ranks and ranks % node == 0:
        sizes.append(node)
    return [("no", 1), *((stage, size) for stage in ("optimizer", "gradients", "weights") for size in sizes)]


def _schedules(profile: ModelProfile, pipeline: int, fixed: dict[str, Any]) -> list[tuple[Any, int]]:
    """Return the schedules and their virtual stages. gpipe only when asked for: it takes the time of 1f1b and more memory."""
    if pipeline == 1:
        return [("1f1b", 1)]
    interleaved = [("interleaved_1f1b", each) for each in VIRTUAL_STAGES if profile.num_layers % (pipeline * each) == 0]
    asked = [("gpipe", 1)] if fixed.get("pipeline_schedule") == "gpipe" else []
    return [("1f1b", 1), ("zero_bubble", 1), *interleaved, *asked]


def _expert_degrees(profile: ModelProfile, ranks: int) -> list[int]:
    if profile.experts is None or not profile.declares.expert_parallel:
        return [1]
    return [degree for degree in divisors(ranks) if profile.experts.count % degree == 0]


def check_processes(fixed: dict[str, Any], host: Host) -> None:
    """Raise RequestError where this host does not run as many processes as are asked for."""
    asked = fixed.get("num_processes")
    if asked is None:
        return
    if host.device != "cpu":
        if asked != host.num_devices:
            ranks = f"one for each of its GPUs, {host.num_devices}"
            raise RequestError(f"--set num_processes={asked} is not possible on {host.name}, which runs {ranks}; use that")
    elif asked % host.num_nodes and asked > 1:
        raise RequestError(f"--set num_processes={asked} does not divide among {host.num_nodes} hosts; use a multiple of that")
    elif host.cpu is not None and host.ranks_per_node(asked) > (most := MOST_A_CORE * host.cpu.usable_cores):
        raise RequestError(
            f"--set num_processes={asked} is more than {MOST_A_CORE} for each of the {host.cpu.usable_cores} cores of "
            f"{host.name}, where they only wait for each other; use at most {most * host.num_nodes}"
        )


def check_layout(fixed: dict[str, Any], host: Host, profile: ModelProfile, workload: Workload) -> None:
    """Raise RequestError for what no layout here has, naming the value, the valid ones and why.

    The problem may be a degree, all fields that are asked for together, or the number of processes. ``fixed`` may name other
    fields too.
    """
    if not shares_work(host, fixed):
        return
    asked = {name: value for name, value in fixed.items() if name in Layout.model_fields}

    def known(asked: dict[str, Any], name: str, *, looked_for: bool = False) -> list[Any]:
        """Return the field's values in the layouts that have what is asked for. ``looked_for``: with as many processes as they
        need, on CPUs."""
        counts = fixed if "num_processes" in fixed else asked
        found = [asked]
        if looked_for and name in DEGREES and host.device == "cpu":
            found = [asked | {name: degree} for degree in range(1, LARGEST_NAMED + 1)]
        return sorted({
            getattr(layout, name)
            for one in found
            for ranks in rank_counts(host, {**one, **counts})
            for _, layout in layouts(host, profile, workload, fixed=one, ranks=ranks)
        })  # fmt: skip

    for name, value in asked.items():
        if not known({name: value}, name):
            valid = ", ".join(map(str, known({}, name, looked_for=True)))
            on = f"of {fixed['num_processes']} processes on {host.name}" if "num_processes" in fixed else f"on {host.name}"
            raise RequestError(f"--set {name}={value} is not possible {on}; use one of {valid}{_why(name, profile)}")
    if known(asked, "tensor_parallel"):
        return
    together = " ".join(f"--set {name}={value}" for name, value in asked.items())
    for name, value in sorted(asked.items(), key=lambda item: item[0] in DEGREES):
        others = {other: given for other, given in asked.items() if other != name}
        if valid_with_them := known(others, name):
            one_of = ", ".join(map(str, valid_with_them))
            raise RequestError(f"{together} is not possible on {host.name}; with the others {name} can be {one_of}, not {value}")
    several = f"a --global-batch that is a multiple of {host.num_devices}, or fewer devices (--on)"
    raise RequestError(
        f"{together or _processes(fixed)} is not possible on {host.name}: ranks must divide the global batch of "
        f"{workload.global_batch}{_divided(profile)}; use "
        f"{'another number of processes (--nproc)' if host.device == 'cpu' else several}"
    )


def _processes(fixed: dict[str, Any]) -> str:
    return f"num_processes={fixed['num_processes']}" if "num_processes" in fixed else "sharing the job"


def _divided(profile: ModelProfile) -> str:
    """Return what else of the model ranks may divide, in words."""
    found = [f"{profile.num_layers} layers"] if _can_pipeline(profile, profile.num_layers) else []
    if profile.tensor_parallel is not None:
        found.append(f"heads and matrices that divide by {profile.tensor_parallel.divisor}")
    return "".join(f", or {one}" for one in found)


def _why(name: str, profile: ModelProfile) -> str:
    if name in ("tensor_parallel", "sequence_parallel", "gather_again", "vocabulary_parallel"):
        degrees = f"; degrees divide {profile.tensor_parallel.divisor}" if profile.tensor_parallel else ""
        return f" ({profile.tensor_parallel_reason}{degrees})"
    if name in ("pipeline_parallel", "pipeline_schedule", "virtual_stages"):
        declared = "declares" if profile.declares.pipeline_parallel_plan else "declares no"
        return f" (the model {declared} pipeline stages, and has {profile.num_layers} layers to divide evenly)"
    if name == "expert_parallel":
        return f" (the model has {profile.experts.count} experts a layer)" if profile.experts else " (the model has no experts)"
    return ""
