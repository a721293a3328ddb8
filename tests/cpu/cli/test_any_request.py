"""Any two options of a request for a plan meet in some request here, and each ends in a plan, a RequestError or NothingFits.

A plan that comes out keeps what holds for every plan. On profiles that are written by hand, without torch.
"""

from __future__ import annotations

import json
from functools import cache
from math import exp
from typing import Any, get_args

import pytest
from made_requests import measured_cpus, model_of, pairs_of

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Objective
from upshift.models.source import ModelSource
from upshift.planning import planner
from upshift.planning.analysis.lock_file import check_lock, lock_plan
from upshift.planning.analysis.max_size import find_largest
from upshift.planning.analysis.what_if import explain_choice
from upshift.planning.planner import Planning, plan_training
from upshift.planning.search.constraints import conflict
from upshift.planning.search.ranking import Candidate, limit_of
from upshift.planning.search.simplicity import MECHANISM_ERROR
from upshift.planning.workload import LengthHistogram, Workload

SOURCE = ModelSource(reference="made up", directory=None, config={})
LONGEST = 4096
SHORT = LengthHistogram(sequence_length=LONGEST, lengths=(64, 512, LONGEST), counts=(50, 40, 10), num_tokens=64640)
ALLOWED = ("bf16-weights", "sgd")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "on": ("1xh100", "2xh100", "2x2xa100-40gb", "t4", "epyc-9654-768gb", "epyc-9654", "cpus", "gaudi-3"),
    "fixed": (
        (), ("precision=fp32",), ("precision=fp16",), ("packing=True",), ("activation_checkpointing=3",),
        ("activation_checkpointing=24", "recompute_granularity=selective"), ("tensor_parallel=2",), ("fully_shard=weights",),
        ("fully_shard=optimizer", "master_weights=True"), ("pipeline_parallel=2",),
        ("context_parallel=2",), ("num_processes=2",), ("optim=sgd",), ("optim_offload=True",), ("activation_offload=True",),
        ("weight_offload=host",), ("weight_offload=disk",), ("fused_kernels=True", "loss_kernel=fused"),
        ("loss_chunk_tokens=512",), ("torch_compile=layer",), ("attention=eager",), ("attention=block",),
        ("optimizer_in_backward=True",), ("mup_base=hidden_size=64",), ("per_device_train_batch_size=2",), ("expert_parallel=2",),
        ("tensor_parallel=2", "vocabulary_parallel=True", "gather_again=True"),
    ),
    "model": ("full", "lora", "qlora", "mixture", "tied", "plain"),
    "objective": get_args(Objective),
    "length": (LONGEST, 128),
    "batch": (2, 1, 6),
    "lengths": (None, SHORT),
    "risk": (None, 0.01, 0.4),
    "clips": (True, False),
    "allow": ((), ALLOWED),
    "question": ("rank", "why", "lock", "sequence", "batch", "model"),
}  # fmt: skip
REQUESTS = pairs_of(OPTIONS)


def workload_of(request: dict[str, Any]) -> Workload:
    lengths = request["lengths"]
    if lengths is not None and request["length"] != LONGEST:
        lengths = LengthHistogram.of_documents([16, 64, 100, 300], request["length"])
    return Workload(
        sequence_length=request["length"], global_batch=request["batch"], lengths=lengths, risk=request["risk"],
        clips_gradients=request["clips"], allow=request["allow"],
    )  # fmt: skip


@cache
def host_of(name: str) -> Host:
    return measured_cpus() if name == "cpus" else describe(name)


def ask(request: dict[str, Any]) -> None:
    """Answer one request, and check the answer."""
    host, workload, fixed = host_of(request["on"]), workload_of(request), request["fixed"]

    def trace(sequence_length: int, variants: object) -> Any:
        return model_of(request["model"], request["objective"], longest=sequence_length)

    if request["question"] in ("sequence", "batch", "model"):
        planner.check_fixed(fixed, host, SOURCE, workload)
        largest = find_largest(request["question"], host, workload, fixed=fixed, trace=trace)
        assert largest.value > 0
        return

    def profiler(source: ModelSource, *, sequence_length: int, **named: Any) -> ModelProfile:
        profile: ModelProfile = trace(sequence_length, ())
        return profile

    planning = plan_training(SOURCE, host, workload, fixed=fixed, described=True, profiler=profiler)
    check_planning(planning, fixed)
    if request["question"] == "why":
        for choice in ("precision=fp32", "per_device_train_batch_size=1", "activation_checkpointing=0", "fully_shard=optimizer"):
            assert explain_choice(planning, choice, fixed=fixed, trace=trace).why
    if request["question"] == "lock":
        locked = lock_plan(planning, SOURCE, fixed=fixed, described=True)
        found = check_lock(locked, planning.profile)
        assert not found.moved, found


def check_planning(planning: Planning, fixed: tuple[str, ...]) -> None:
    workload = planning.workload
    assert json.loads(json.dumps(planning.document()))["plans"]
    for candidate in (*planning.ranking.candidates[:5], *planning.ranking.candidates[-2:]):
        check_candidate(candidate, planning)
        limit = limit_of(candidate, planning.host, workload)
        assert limit is None or candidate.resident <= limit
        assert conflict(candidate.plan, clips_gradients=workload.clips_gradients) is None
        for name, _, text in (one.partition("=") for one in fixed):
            holder = candidate.plan.layout if hasattr(candidate.plan.layout, name) else candidate.plan
            assert str(getattr(holder, name)) == text
    check_candidate(planning.default, planning)
    best, *others = [candidate.tokens_per_second for candidate in planning.ranking.candidates]
    assert others == sorted(others, reverse=True)
    assert best >= max([best, *others]) * exp(-MECHANISM_ERROR)  # the simplest of those that the prediction cannot tell apart


def check_candidate(candidate: Candidate, planning: Planning) -> None:
    plan, memory = candidate.plan, candidate.memory
    assert plan.global_batch == planning.workload.global_batch
    for name, peak in planning.job_memory.phase_peaks(candidate).items():
        assert peak.total == pytest.approx(sum(peak.parts.values())), name
        assert all(size >= 0.0 for size in peak.parts.values()), (name, peak.parts)
    assert memory.peak == max(peak.total for peak in memory.phases.values()) > 0.0
    assert candidate.resident > memory.peak
    assert candidate.time.total > 0.0
    assert all(seconds >= 0.0 for seconds in candidate.time.terms.values()), candidate.time.terms
    assert candidate.tokens_per_second > 0.0
    numbers = planning.numbers(candidate)
    assert numbers.step_ms is not None
    assert numbers.step_ms.p50 == pytest.approx(1000 * candidate.time.total)


@pytest.mark.parametrize("model", OPTIONS["model"])
def test_a_request_ends_in_a_plan_or_in_one_line(model: str) -> None:
    planned = refused = 0
    for request in REQUESTS:
        if request["model"] != model:
            continue
        try:
            ask(request)
            planned += 1
        except (RequestError, NothingFits) as problem:
            refused += 1
            assert len(str(problem).splitlines()) == 1, request
        except Exception as problem:
            raise AssertionError(f"{request} ends in {problem!r}") from problem
    assert planned >= 2
    assert refused >= 2
