"""Every layout that a host, a model and a workload allow, and why one that was asked for is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.layout import ContextKind, Layout, divisors
from upshift.planning.workload import Workload

LONG_ENOUGH = 4096  # tokens a rank: below it there is nothing to gain from sharing a sequence
VIRTUAL_STAGES = (2, 4)
ASKED_LAYOUTS = ("master_weights", "gather_again", "vocabulary_parallel", "overlap")  # never chosen unasked
DEEPEST_PIPELINE = 64


def layouts(
    host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any] | None = None
) -> Iterator[tuple[int, Layout]]:
    """(data-parallel ranks, layout) of all devices, in a fixed order; only those with the ``fixed`` fields."""
    fixed = fixed or {}
    for tensor, context, pipeline, kind in _degrees(host, profile, workload, fixed):
        data = host.num_devices // (tensor * context * pipeline)
        if workload.global_batch % data:
            continue
        for sharding in _shardings(host, data * context, tensor):
            for schedule, stages in _schedules(profile, pipeline, fixed):
                for experts in _expert_degrees(profile, data * context):
                    layout = Layout(
                        fully_shard=sharding[0], shard_size=sharding[1], tensor_parallel=tensor, sequence_parallel=tensor > 1,
                        context_parallel=context, context_kind=kind, pipeline_parallel=pipeline, pipeline_schedule=schedule,
                        virtual_stages=stages, expert_parallel=experts,
                    )  # fmt: skip
                    layout = layout.model_copy(update=_asked(layout, profile, fixed))
                    if all(getattr(layout, name) == value for name, value in fixed.items()):
                        yield data, layout


def _asked(layout: Layout, profile: ModelProfile, fixed: dict[str, Any]) -> dict[str, Any]:
    """What is taken only when asked for, where this layout can have it."""
    vocabulary = layout.tensor_parallel > 1 and profile.tensor_parallel is not None and profile.tensor_parallel.outside > 0
    possible = {
        "master_weights": layout.fully_shard == "optimizer", "gather_again": layout.sequence_parallel,
        "vocabulary_parallel": vocabulary and profile.objective == "causal-lm",
    }  # fmt: skip
    taken = {name: True for name, can in possible.items() if can and fixed.get(name)}
    return taken | {name: fixed[name] for name in ("overlap",) if name in fixed}


def _degrees(
    host: Host, profile: ModelProfile, workload: Workload, fixed: dict[str, Any]
) -> Iterator[tuple[int, int, int, ContextKind]]:
    """Tensor-parallel groups stay inside a node: their exchange hides behind nothing."""
    devices = host.num_devices
    tensors = [t for t in divisors(host.gpus_per_node) if t == 1 or _divides(profile, t)]
    pipelines = [p for p in divisors(devices) if p == 1 or (_can_pipeline(profile, p) and p <= DEEPEST_PIPELINE)]
    asked = {1, fixed.get("context_parallel")}
    contexts = [c for c in divisors(devices) if c in asked or _worth_sharing(profile, workload, c)]
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if devices % (tensor * context * pipeline):
            continue
        for kind in _context_kinds(profile, tensor, context):
            yield tensor, context, pipeline, kind


def _divides(profile: ModelProfile, degree: int) -> bool:
    return profile.tensor_parallel is not None and profile.tensor_parallel.divisor % degree == 0


def _can_pipeline(profile: ModelProfile, degree: int) -> bool:
    return bool(profile.declares.pipeline_parallel_plan) and len(profile.stacks) == 1 and profile.num_layers % degree == 0


def _worth_sharing(profile: ModelProfile, workload: Workload, degree: int) -> bool:
    return profile.objective == "causal-lm" and workload.sequence_length >= degree * LONG_ENOUGH


def _context_kinds(profile: ModelProfile, tensor: int, context: int) -> list[ContextKind]:
    if context == 1:
        return ["ring"]
    queries, keys = profile.heads or (1, 1)
    exchanges = queries % (tensor * context) == 0 and keys % (tensor * context) == 0
    return ["ring", "ulysses"] if exchanges else ["ring"]


def _shardings(host: Host, ranks: int, tensor: int) -> list[tuple[Any, int]]:
    """(what is divided, among how many): nothing; each ZeRO stage over all ranks that share gradients, or over those of one
    node, replicated between nodes."""
    sizes = [ranks] if ranks > 1 else []
    node = max(host.gpus_per_node // tensor, 1)
    if 1 < node < ranks and ranks % node == 0:
        sizes.append(node)
    return [("no", 1), *((stage, size) for stage in ("optimizer", "gradients", "weights") for size in sizes)]


def _schedules(profile: ModelProfile, pipeline: int, fixed: dict[str, Any]) -> list[tuple[Any, int]]:
    """gpipe only when asked for: it takes the time of 1f1b and more memory."""
    if pipeline == 1:
        return [("1f1b", 1)]
    interleaved = [("interleaved_1f1b", each) for each in VIRTUAL_STAGES if profile.num_layers % (pipeline * each) == 0]
    asked = [("gpipe", 1)] if fixed.get("pipeline_schedule") == "gpipe" else []
    return [("1f1b", 1), ("zero_bubble", 1), *interleaved, *asked]


def _expert_degrees(profile: ModelProfile, ranks: int) -> list[int]:
    if profile.experts is None or not profile.declares.expert_parallel:
        return [1]
    return [degree for degree in divisors(ranks) if profile.experts.count % degree == 0]


def check_layout(fixed: dict[str, Any], host: Host, profile: ModelProfile, workload: Workload) -> None:
    """Raises RequestError, naming the value, the valid ones and why, for a degree that no layout here has."""
    for name, value in fixed.items():
        valid = sorted({getattr(layout, name) for _, layout in layouts(host, profile, workload, fixed={name: value})})
        if valid:
            continue
        known = sorted({getattr(layout, name) for _, layout in layouts(host, profile, workload)})
        why = _why(name, profile)
        raise RequestError(f"--set {name}={value} is not possible on {host.name}; use one of {', '.join(map(str, known))}{why}")


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
