"""``--compare`` and ``--largest`` with the data's own lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_profile import make_profile
from made_up_plans import made_up_planning

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Variant
from upshift.planning.analysis.compare_hosts import ComparisonTerms, compare
from upshift.planning.analysis.max_size import LargestResult, find_largest
from upshift.planning.planner import Planning
from upshift.planning.workload import MAX_BUCKETS, LengthHistogram, Workload

LENGTH = 2048
ONE = describe("1xa100-80gb")
DOCUMENTS = [100, 300, 700, 1500, 5000]


def lengths(cut: int = LENGTH) -> LengthHistogram:
    return LengthHistogram.of_documents(DOCUMENTS, cut)


def masked_profile() -> ModelProfile:
    """With the traces that packed sequences need."""
    profile = make_profile(longest=4 * LENGTH)
    return profile.model_copy(
        update={"steps": (*profile.steps, *(step.model_copy(update={"masked": True}) for step in profile.steps))}
    )


def trace(sequence_length: int, variants: tuple[Variant, ...]) -> ModelProfile:
    return masked_profile()


@given(documents=st.lists(st.integers(0, 9000), min_size=1, max_size=20), cut=st.integers(2, 4096))
def test_documents_are_cut_as_training_cuts_them(documents: list[int], cut: int) -> None:
    pieces = [min(cut, length - start) for length in documents for start in range(0, length, cut)]
    pieces = [piece for piece in pieces if piece >= 2]
    if not pieces:
        with pytest.raises(RequestError, match="two or more tokens"):
            LengthHistogram.of_documents(documents, cut)
        return
    found = LengthHistogram.of_documents(documents, cut)
    assert (found.num_sequences, found.num_tokens) == (len(pieces), sum(pieces))
    assert max(pieces) <= found.longest <= min(max(pieces) + -(-cut // MAX_BUCKETS), cut)


def test_tokens_are_steps_of_what_sequences_hold() -> None:
    asked: list[Workload] = []

    def plan_on(host: Host, workload: Workload) -> Planning:
        asked.append(workload)
        return made_up_planning(on=host.name, global_batch=8)

    for given_lengths in (None, lengths()):
        workload = Workload(sequence_length=LENGTH, global_batch=8, lengths=given_lengths)
        compare((ONE,), workload, ComparisonTerms(prices={}, tokens=10_000_000), plan_on=plan_on)
    full, short = asked
    assert full.total_steps == math.ceil(10_000_000 / (8 * LENGTH))
    assert short.total_steps == math.ceil(10_000_000 / (8 * lengths().mean)) > full.total_steps


def largest(what: str, workload: Workload, **more: object) -> LargestResult:
    return find_largest(what, ONE, workload, fixed=("precision=fp32",), trace=trace, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["batch", "model"])
def test_only_real_tokens_are_counted(what: str) -> None:
    workload = Workload(sequence_length=LENGTH, global_batch=4)
    full, short = (largest(what, workload.changed(lengths=given_lengths)) for given_lengths in (None, lengths()))
    assert short.value == full.value  # the longest sequences decide what fits
    assert full.predicted.tokens_per_second != short.predicted.tokens_per_second
    step = short.predicted.step_ms
    assert step is not None and full.predicted.step_ms is not None and step.p50 < full.predicted.step_ms.p50


def test_data_is_cut_anew_where_sequences_grow() -> None:
    asked: list[int] = []

    def at(cut: int) -> LengthHistogram:
        asked.append(cut)
        return lengths(cut)

    workload = Workload(sequence_length=LENGTH, global_batch=4, lengths=lengths())
    found, full = largest("sequence", workload, lengths_at=at), largest("sequence", workload)
    assert found.value == full.value > LENGTH and found.value in asked and len({*asked}) > 2
    faster = found.predicted.step_ms, full.predicted.step_ms
    assert faster[0] is not None and faster[1] is not None and faster[0].p50 < faster[1].p50
