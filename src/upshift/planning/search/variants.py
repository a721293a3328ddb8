"""Choose the steps of a model that must be traced for the plans of a host and a workload."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm
from typing import NamedTuple

from upshift.hardware.spec import Host
from upshift.models.profile import TracedPrecision, Variant, with_eager_attention
from upshift.planning.search.layouts import rank_counts
from upshift.planning.search.space import BLOCK_ATTENTION_LIMIT, can_compile, parse_layout, texts_share_work
from upshift.planning.workload import Workload

EAGER_ATTENTION_LIMIT = 256  # tokens; measured in docs/log.md


def variants_for(host: Host, workload: Workload, fixed: tuple[str, ...] = (), *, selective: bool = False) -> tuple[Variant, ...]:
    """Return the variants to trace: each precision's tensor sizes and each attention kernel, with and without an explicit mask.

    Variants that ``fixed`` excludes are left out. The plain default's variant is always among them. ``selective``: also trace
    selective recomputation, which takes half as long again and matters where memory is short. Alternate recomputation is traced
    on request.
    """
    granularities = workload.runs_in.granularities
    variants = _variants_for(host, workload, fixed, selective=selective and "selective" in granularities)
    traces_alternate = "recompute_granularity=alternate" in fixed or (selective and "alternate" in granularities)
    return tuple(variant._replace(alternate=True) for variant in variants) if traces_alternate else variants


def _variants_for(host: Host, workload: Workload, fixed: tuple[str, ...], *, selective: bool) -> tuple[Variant, ...]:
    selective = selective or "recompute_granularity=selective" in fixed
    precisions: list[TracedPrecision] = ["fp32"]
    if not {"precision=fp32", "precision=tf32"} & {*fixed} and (host.supports("bf16") or host.supports("fp16")):
        precisions.append("bf16")
    if "bf16-weights" in workload.allow or workload.runs_in.layout.get("master_weights"):
        precisions.append("bf16-pure")
    masks = (False, True) if workload.lengths is not None else (False,)
    is_shared = texts_share_work(host, fixed)
    if is_shared and host.device != "cpu":
        shared = _shared_variants(precisions, masks, selective=selective, may_compile=not _leaves_out_compiling(fixed))
        return _and_eager(shared) if "attention=eager" in fixed else shared
    kernels = ["sdpa"]
    can_block = host.device == "cpu" and workload.sequence_length <= BLOCK_ATTENTION_LIMIT
    if can_block and not {"attention=sdpa", "attention=eager"} & {*fixed}:
        kernels.append("block")
    may_compile = can_compile(host) and not _leaves_out_compiling(fixed)
    divided = False
    if is_shared:
        summary = _summarize_layouts(host, fixed)
        divided = summary.matrices
        if "bf16" in precisions and summary.gathered and "bf16-pure" not in precisions:
            precisions.append("bf16-pure")
        if "bf16" in precisions and not summary.autocast:
            precisions.remove("bf16")
    variants = [
        Variant(precision, kernel, masked, divided=divided, selective=selective, compiled=may_compile)
        for precision in precisions
        for kernel in kernels
        for masked in masks
    ]
    if "attention=eager" in fixed:
        return _and_eager(variants)
    if workload.sequence_length > EAGER_ATTENTION_LIMIT or {"attention=sdpa", "attention=block"} & {*fixed}:
        return tuple(variants)
    return (*variants, *(Variant(precision, "eager", False) for precision in precisions))


def is_traced(variant: Variant, variants: Collection[Variant]) -> bool:
    """Return whether a profile of ``variants`` has the trace of ``variant``. The trace of a step whose layers may be compiled has
    all numbers of the same step without."""
    return variant in variants or variant._replace(compiled=True) in variants


def _leaves_out_compiling(fixed: tuple[str, ...]) -> bool:
    """Return whether no plan is compiled. A trace of what compiled layers save loads Inductor, which takes seconds."""
    return "torch_compile=off" in fixed


def _and_eager(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants and those of ``eager``, with the flags of ``sdpa``."""
    return tuple(dict.fromkeys((*variants, *with_eager_attention(tuple(variants)))))


class _DivisionSummary(NamedTuple):
    """Says for each of these whether any of some layouts has it."""

    matrices: bool  # divided among tensor-parallel ranks
    gathered: bool  # weights that were gathered in bf16
    autocast: bool  # weights that autocast casts


def _summarize_layouts(host: Host, fixed: tuple[str, ...]) -> _DivisionSummary:
    """Summarize the layouts of processes on CPUs. ``fixed`` leaves few of them, and every needless trace takes seconds."""
    fixed_fields = parse_layout(fixed)
    ranks = max(rank_counts(host, fixed_fields))
    stage = fixed_fields.get("fully_shard")
    group_ranks = lcm(fixed_fields.get("context_parallel", 1), fixed_fields.get("shard_size", 1 if stage in (None, "no") else 2))
    pipeline = fixed_fields.get("pipeline_parallel", 1)
    tensor = fixed_fields.get("tensor_parallel", ranks // (pipeline * group_ranks))
    has_data_parallel = ranks // (pipeline * fixed_fields.get("tensor_parallel", 1)) > 1
    gathers = stage in ("gradients", "weights")
    masters = bool(fixed_fields.get("master_weights"))
    return _DivisionSummary(tensor > 1, gathers or masters or (stage is None and has_data_parallel), not (gathers or masters))


def _shared_variants(
    precisions: list[TracedPrecision], masks: tuple[bool, ...], *, selective: bool, may_compile: bool
) -> tuple[Variant, ...]:
    """Return the variants for GPUs that share a job.

    bf16 is also traced as one of two ranks, and with weights that were gathered in bf16. fp32 is traced as one of two ranks only
    if bf16 is not traced: tensor parallelism is never fastest in fp32 where there is bf16, and its trace takes time. Weights in
    bf16 alone are no substitute, because another precision may be fixed.
    """
    divides_fp32 = "bf16" not in precisions
    gathered: list[TracedPrecision] = ["bf16-pure"] if "bf16" in precisions and "bf16-pure" not in precisions else []
    return tuple(
        Variant(precision, "sdpa", masked, divided=divides_fp32 or precision != "fp32", selective=selective, compiled=may_compile)
        for precision in (*precisions, *gathered)
        for masked in masks
    )
