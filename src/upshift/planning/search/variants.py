"""Decide which steps of a model must be traced for the plans of a host and a workload."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from upshift.hardware.spec import Host
from upshift.models.profile import TracedPrecision, Variant
from upshift.planning.search.layouts import rank_counts
from upshift.planning.search.space import BLOCK_ATTENTION_LIMIT, can_compile, layout_of_texts, texts_share
from upshift.planning.workload import Workload


def variants_for(host: Host, workload: Workload, fixed: tuple[str, ...] = (), *, selective: bool = False) -> tuple[Variant, ...]:
    """Return what must be traced: each precision's tensor sizes, each attention kernel, with and without an explicit mask.

    Variants that ``fixed`` rules out are left out. The plain default's is always among them. ``selective``: also trace selective
    recomputation, which takes half as long again and matters where memory is short. Alternate recomputation is traced where it
    is asked for.
    """
    found = _variants_for(host, workload, fixed, selective=selective)
    asked = "recompute_granularity=alternate" in fixed
    return tuple(variant._replace(alternate=True) for variant in found) if asked else found


def _variants_for(host: Host, workload: Workload, fixed: tuple[str, ...], *, selective: bool) -> tuple[Variant, ...]:
    selective = selective or "recompute_granularity=selective" in fixed
    precisions: list[TracedPrecision] = ["fp32"]
    if not {"precision=fp32", "precision=tf32"} & {*fixed} and (host.supports("bf16") or host.supports("fp16")):
        precisions.append("bf16")
    if "bf16-weights" in workload.allow:
        precisions.append("bf16-pure")
    masks = (False, True) if workload.lengths is not None else (False,)
    shared = texts_share(host, fixed)
    if shared and host.device != "cpu":
        return _shared_variants(precisions, masks, selective=selective)
    kernels = ["sdpa"]
    block = host.device == "cpu" and workload.sequence_length <= BLOCK_ATTENTION_LIMIT
    if block and not {"attention=sdpa", "attention=eager"} & {*fixed}:
        kernels.append("block")
    compiled = can_compile(host)
    divided = False
    if shared:
        divides = _dividing(host, fixed)
        divided = divides.matrices
        if "bf16" in precisions and divides.gathered and "bf16-pure" not in precisions:
            precisions.append("bf16-pure")
        if "bf16" in precisions and not divides.whole:
            precisions.remove("bf16")
    variants = [
        Variant(precision, kernel, masked, divided=divided, selective=selective, compiled=compiled)
        for precision in precisions
        for kernel in kernels
        for masked in masks
    ]
    return (*variants, *(Variant(p, "eager", False) for p in precisions))


class _Dividing(NamedTuple):
    """A summary of some layouts: whether any of them has each of these."""

    matrices: bool
    gathered: bool  # weights that were gathered in bf16
    whole: bool  # weights that autocast casts


def _dividing(host: Host, fixed: tuple[str, ...]) -> _Dividing:
    """Return what layouts of processes on CPUs divide: ``fixed`` leaves few ranks for the rest, and every trace takes seconds."""
    given = layout_of_texts(fixed)
    ranks = max(rank_counts(host, given))
    stage = given.get("fully_shard")
    sharing = lcm(given.get("context_parallel", 1), given.get("shard_size", 1 if stage in (None, "no") else 2))
    pipeline = given.get("pipeline_parallel", 1)
    tensor = given.get("tensor_parallel", ranks // (pipeline * sharing))
    beside = ranks // (pipeline * given.get("tensor_parallel", 1)) > 1
    gathers = stage in ("gradients", "weights")
    masters = bool(given.get("master_weights"))
    return _Dividing(tensor > 1, gathers or masters or (stage is None and beside), not (gathers or masters))


def _shared_variants(precisions: list[TracedPrecision], masks: tuple[bool, ...], *, selective: bool) -> tuple[Variant, ...]:
    """Return the variants for GPUs that share a job: bf16 also as one of two ranks, and with weights that were
    gathered in bf16.
    """
    gathered: list[TracedPrecision] = ["bf16-pure"] if "bf16" in precisions and "bf16-pure" not in precisions else []
    return tuple(
        Variant(precision, "sdpa", masked, divided=precision != "fp32", selective=selective, compiled=True)
        for precision in (*precisions, *gathered)
        for masked in masks
    )
