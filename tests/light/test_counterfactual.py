"""Why not, what would help, the largest that fits, and which host to rent: on a profile that is written here, without torch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_profile import LAYER, LAYERS, OUTSIDE, make_profile
from made_sizes import Size, decoder

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import ModelSource
from upshift.planning.analysis.compare_hosts import (
    DURATIONS,
    ComparisonTerms,
    compare,
    price_names,
    read_duration,
    read_hosts,
    read_prices,
    read_tokens,
)
from upshift.planning.analysis.explain import shadow_price
from upshift.planning.analysis.max_size import find_largest, largest_multiple, with_layers
from upshift.planning.analysis.what_if import describe_shortage, explain_choice, hint_at_allow, shadow_prices
from upshift.planning.plan import plain_default
from upshift.planning.planner import Planning, calibrate_and_filter, find_host, plan_training
from upshift.planning.search.ranking import EXTRA_MEMORY_BYTES, Candidate, cost_plan
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.calibration import NO_RECORDS
from upshift.planning.workload import Workload

BATCH = 4  # sequences of a global batch: few micro-batches to search


class Traced:
    """Stands for the tracer: remembers which lengths were asked for."""

    def __init__(self, **fields: int | None) -> None:
        self.fields, self.lengths = fields, []

    def __call__(self, sequence_length: int, variants: tuple[Variant, ...]) -> ModelProfile:
        self.lengths.append(sequence_length)
        return make_profile(longest=sequence_length, **self.fields)  # type: ignore[arg-type]


TRACE = Traced()
SOURCE = ModelSource(reference="made up", directory=None, config={})
ONE, TWO, FOUR, NODES = describe("1xh100"), describe("2xh100"), describe("4xh100"), describe("2x2xh100")


def planned(host: Host, *, fixed: tuple[str, ...] = (), allow: tuple[str, ...] = (), sequence: int = 4096) -> Planning:
    workload = Workload(sequence_length=sequence, global_batch=BATCH, allow=allow)
    profile = make_profile()
    ranking = search(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    default = cost_plan(plain_default(host, profile, workload), host=host, profile=profile, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, profile, workload, ranking, default)


@pytest.fixture(scope="module")
def four() -> Planning:
    return planned(FOUR)


@pytest.fixture(scope="module")
def one() -> Planning:
    return planned(ONE)


def test_why_not_a_slower_choice(four: Planning) -> None:
    best = four.ranking.candidates[0]
    degree = 4 if best.plan.layout.tensor_parallel != 4 else 2
    found = explain_choice(four, f"tensor_parallel={degree}", fixed=(), trace=TRACE)
    assert found.outcome == "slower" and found.plan is not None and found.plan.layout.tensor_parallel == degree
    assert found.gain is not None and found.gain < 0
    assert "tensor parallel +" in found.why and found.more_ms["tensor parallel"] > 0
    assert sum(found.more_ms.values()) > 0
    assert four.ranking.candidates[0] is best


def test_the_differences_add_up_to_the_step(four: Planning) -> None:
    found = explain_choice(four, "precision=fp32", fixed=(), trace=TRACE)
    assert found.predicted is not None and found.predicted.step_ms is not None
    best = 1000 * four.ranking.candidates[0].time.total
    left_out = 0.005 * best * 20  # of each term that is not worth saying
    more = {term: ms for term, ms in found.more_ms.items() if not term.startswith("compiling")}
    assert sum(more.values()) == pytest.approx(found.predicted.step_ms.p50 - best, abs=left_out)


def test_why_not_the_choice_that_was_made(four: Planning) -> None:
    precision = four.ranking.candidates[0].plan.precision
    found = explain_choice(four, f"precision={precision}", fixed=(), trace=TRACE)
    assert (found.outcome, found.gain, found.plan) == ("chosen", 0.0, four.ranking.candidates[0].plan)


def test_why_not_replaces_what_is_fixed() -> None:
    planning = planned(ONE, fixed=("precision=fp32",))
    found = explain_choice(planning, "precision=bf16", fixed=("precision=fp32",), trace=TRACE)
    assert found.outcome == "faster" and found.plan is not None and found.plan.precision == "bf16"


def test_why_not_what_does_not_fit() -> None:
    fixed = ("per_device_train_batch_size=4",)
    found = explain_choice(planned(ONE, sequence=16384, fixed=fixed), "activation_checkpointing=0", fixed=fixed, trace=TRACE)
    assert found.outcome == "does not fit" and found.gain is None
    for word in ("needs", "GiB of", "phase", "activations"):
        assert word in found.why


def test_why_not_what_changes_the_mathematics(one: Planning) -> None:
    found = explain_choice(one, "optim=adafactor", fixed=(), trace=TRACE)
    assert found.allow == ("adafactor",) and "--allow adafactor" in found.why
    assert found.plan is not None and found.plan.optim == "adafactor"


def test_why_not_what_is_not_possible(four: Planning, one: Planning) -> None:
    found = explain_choice(four, "tensor_parallel=3", fixed=(), trace=TRACE)
    assert found.outcome == "not possible" and "1, 2, 4" in found.why and "--set" not in found.why
    assert explain_choice(one, "tensor_parallel=2", fixed=(), trace=TRACE).outcome == "not possible"
    assert explain_choice(one, "tensor_parallel=1", fixed=(), trace=TRACE).outcome == "chosen"
    assert explain_choice(one, "per_device_train_batch_size=3", fixed=(), trace=TRACE).outcome == "not possible"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("colour=blue", ["--why", "colour", "precision", "tensor_parallel"]),
        ("precision", ["--why", "field=value"]),
        ("precision=fp7", ["--why", "fp7", "bf16"]),
        ("tensor_parallel=many", ["--why", "many", "whole number"]),
        ("host=x", ["--why", "host"]),
    ],
)
def test_a_wrong_question_is_one_line(one: Planning, asked: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as problem:
        explain_choice(one, asked, fixed=(), trace=TRACE)
    assert "\n" not in str(problem.value)
    assert all(word in str(problem.value) for word in words)


def test_only_what_is_missing_is_traced() -> None:
    trace, planning = Traced(), planned(ONE)
    for choice in ("optim=sgd", "torch_compile=off"):
        explain_choice(planning, choice, fixed=(), trace=trace)
    assert trace.lengths == []
    explain_choice(planning, "precision=bf16-weights", fixed=(), trace=trace)
    assert trace.lengths == [4096]


def test_shadow_prices_of_one_device() -> None:
    planning = planned(ONE)
    prices = {price.change: price for price in shadow_prices(planning, fixed=())}
    assert not [change for change in prices if "links" in change]
    memory = prices["8.00 GiB more memory on each device"]
    # What is printed unasked, from the plans that were too big.
    line = shadow_price(planning.ranking, ONE, planning.workload) or ""
    assert memory.gain is not None
    assert ("not make it faster" in line) == (memory.gain == 0.0)
    if memory.gain:
        assert f"{memory.gain:+.1%}" in line
    gains = [price.gain for price in prices.values() if price.gain is not None]
    assert gains and min(gains) >= 0.0
    assert prices["--allow sgd"].plan is not None
    assert prices["--allow sgd"].plan.optim == "sgd"


def memory_bound(allow: tuple[str, ...] = ()) -> Planning:
    """Return the plan of 1.3B on a card of 24 GB, where weights in fp32 with their states leave little."""
    host, workload = describe("rtx-4090"), Workload(sequence_length=2048, global_batch=32, allow=allow)
    profile = decoder(Size(2048, 8192, 20, 32, 8, 32000))
    ranking = search(host, profile, workload, fixed=parse_fixed((), host, profile, workload))
    candidates = calibrate_and_filter(ranking, host, profile, workload, NO_RECORDS)
    return Planning(host, profile, workload, candidates, ranking.candidates[0])


def test_a_plan_short_of_memory_names_what_would_help() -> None:
    """The gain is that of the plan with the choice allowed; where it is allowed, or nothing is recomputed, there is no hint."""
    planning, with_it = memory_bound(), memory_bound(allow=("bf16-weights",))
    gain = with_it.ranking.candidates[0].tokens_per_second / planning.ranking.candidates[0].tokens_per_second - 1
    hint = hint_at_allow(planning, fixed=()) or ""
    assert gain > 0.25 and "--allow bf16-weights" in hint and f"{gain:+.0%}" in hint
    assert hint_at_allow(with_it, fixed=()) is None
    assert hint_at_allow(planned(ONE), fixed=()) is None


@pytest.mark.parametrize(
    ("host", "fixed", "words"),
    [
        ("4xgh200-96gb", (), "the rate inside nodes is unknown on 4xgh200-96gb; give the path of a Host JSON file"),
        ("8xh100", ("optim_offload=true",), "rates of its memory and link"),
    ],
)
def test_no_plan_names_what_is_unknown(host: str, fixed: tuple[str, ...], words: str) -> None:
    """And not that one of the plans needs too much memory, nor that the rate of its precision is unknown."""
    profile = decoder(Size(4096, 14336, 32, 32, 8))
    workload = Workload(sequence_length=512, global_batch=64)
    with pytest.raises(RequestError, match=words):
        plan_training(SOURCE, describe(host), workload, fixed=fixed, described=True, profiler=lambda *_, **__: profile)


def test_a_price_is_what_the_changed_host_gives() -> None:
    planning = planned(ONE)
    assert ONE.gpu is not None and ONE.gpu.memory_bytes is not None
    larger = ONE.changed(gpu=ONE.gpu.changed(memory_bytes=ONE.gpu.memory_bytes + EXTRA_MEMORY_BYTES))
    again = planned(larger).ranking.candidates[0].tokens_per_second / planning.ranking.candidates[0].tokens_per_second - 1
    memory = next(price for price in shadow_prices(planning, fixed=()) if "memory" in price.change)
    assert memory.gain == pytest.approx(max(again, 0.0), abs=1e-3)


def test_shadow_prices_of_links() -> None:
    fixed = ("tensor_parallel=2", "optim=adamw_torch_fused", "precision=bf16", "activation_checkpointing=24")
    changes = [price.change for price in shadow_prices(planned(TWO, fixed=fixed), fixed=fixed)]
    assert "links twice as fast inside nodes" in changes and "links twice as fast between nodes" not in changes
    prices = {price.change: price for price in shadow_prices(planned(NODES, fixed=fixed), fixed=fixed)}
    gain = prices["links twice as fast inside nodes"].gain
    assert gain is not None and gain > 0.0  # tensor parallelism waits for it
    assert "links twice as fast between nodes" in prices and not [change for change in prices if "--allow" in change]


def test_what_is_allowed_or_fixed_has_no_price() -> None:
    planning = planned(ONE, allow=("sgd",), fixed=("precision=bf16",))
    changes = [price.change for price in shadow_prices(planning, fixed=("precision=bf16",))]
    assert "--allow sgd" not in changes and "--allow bf16-weights" not in changes
    assert "--allow adafactor" in changes


@given(limit=st.integers(0, 10**6), step=st.integers(1, 128), start=st.integers(1, 10**6), ceiling=st.integers(1, 10**6))
def test_bisecting_is_exact(limit: int, step: int, start: int, ceiling: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = largest_multiple(fits, step=step, start=start, ceiling=ceiling)
    assert found == min(limit, ceiling) // step * step
    assert len(asked) <= 2 * (math.log2(abs(found - min(start, ceiling)) / step + 1) + 2)  # of the way from the start
    assert all(size % step == 0 and 0 < size <= ceiling for size in asked)


def fits(planning: Planning) -> bool:
    return bool(planning.ranking.candidates)


def test_longest_sequence() -> None:
    trace = Traced()
    workload = Workload(sequence_length=4096, global_batch=BATCH)
    found = find_largest("sequence", ONE, workload, fixed=(), trace=trace)
    assert found.value > 4096 and found.value % 64 == 0 and found.plan.sequence_length == found.value
    assert fits(planned(ONE, sequence=found.value)) and not fits(planned(ONE, sequence=found.value + 64))
    assert trace.lengths[0] == 4096 and len(trace.lengths) <= 3  # the request's own, the surroundings of the answer
    assert trace.lengths[-1] >= found.value
    assert "needs" in found.limited_by


def test_a_sequence_shorter_than_asked_for() -> None:
    workload = Workload(sequence_length=1 << 20, global_batch=BATCH)
    found = find_largest("sequence", ONE, workload, fixed=("precision=fp32",), trace=Traced(max_positions=None))
    shorter = planned(ONE, sequence=found.value, fixed=("precision=fp32",))
    assert 0 < found.value < 1 << 20 and fits(shorter)
    assert not fits(planned(ONE, sequence=found.value + 64, fixed=("precision=fp32",)))


def test_positions_end_a_sequence() -> None:
    trace = Traced(max_positions=5000)
    found = find_largest("sequence", ONE, Workload(sequence_length=512, global_batch=BATCH), fixed=(), trace=trace)
    assert found.value == 4992 and "5,000 positions" in found.limited_by


def test_ranks_that_share_a_sequence_make_it_longer() -> None:
    workload = Workload(sequence_length=4096, global_batch=2)
    alone = find_largest("sequence", TWO, workload, fixed=("context_parallel=1",), trace=Traced(max_positions=None))
    shared = find_largest("sequence", TWO, workload, fixed=(), trace=Traced(max_positions=None))
    assert shared.value >= alone.value and alone.plan.layout.context_parallel == 1


def test_largest_batch() -> None:
    workload = Workload(sequence_length=4096, global_batch=BATCH)
    found = find_largest("batch", ONE, workload, fixed=(), trace=TRACE)
    assert found.plan.per_device_train_batch_size == found.value == found.plan.global_batch
    at = [Workload(sequence_length=4096, global_batch=size) for size in (found.value, found.value + 1)]
    rankings = [search(ONE, make_profile(), w, fixed={"per_device_train_batch_size": w.global_batch}) for w in at]
    assert rankings[0].candidates and not rankings[1].candidates
    with pytest.raises(RequestError, match="per_device_train_batch_size=2"):
        find_largest("batch", ONE, workload, fixed=("per_device_train_batch_size=2",), trace=TRACE)


@pytest.mark.parametrize("host", [ONE, TWO], ids=["one", "two"])
def test_deepest_model(host: Host) -> None:
    workload = Workload(sequence_length=4096, global_batch=BATCH)
    found = find_largest("model", host, workload, fixed=(), trace=TRACE)
    deeper = with_layers(make_profile(), found.value)
    assert found.parameters == deeper.parameters.total == found.value * LAYER + 2 * OUTSIDE
    assert search(host, deeper, workload, fixed={}).candidates
    assert not search(host, with_layers(make_profile(), found.value + 1), workload, fixed={}).candidates
    assert found.plan.model != "feed"  # no plan for the model as it is


@given(layers=st.integers(1, 200))
def test_layers_make_a_profile_of_their_own(layers: int) -> None:
    profile = make_profile()
    deeper = with_layers(profile, layers)
    assert deeper.num_layers == layers and deeper.parameters.layers == deeper.parameters.trainable_layers == layers * LAYER
    shapes = sum(shape.count * shape.elements for shape in deeper.parameters.trainable_shapes)
    assert shapes == deeper.parameters.trainable == deeper.parameters.total
    assert with_layers(deeper, LAYERS).parameters == profile.parameters


def test_memory_grows_with_the_size() -> None:
    """What bisecting rests on: for one plan, more tokens, more sequences or more layers never need less."""
    planning = planned(FOUR)
    assert len(planning.ranking.candidates) >= 20
    for candidate in planning.ranking.candidates[:: max(len(planning.ranking.candidates) // 20, 1)]:
        needs = []
        for length in (512, 1024, 2048, 4096):
            plan = candidate.plan.model_copy(update={"sequence_length": length})
            workload = planning.workload.changed(sequence_length=length)
            costed = cost_plan(plan, host=FOUR, profile=planning.profile, workload=workload)
            assert isinstance(costed, Candidate)
            needs.append(costed.resident)
        assert needs == sorted(needs)


def test_wrong_sizes_are_one_line() -> None:
    workload = Workload(sequence_length=4096, global_batch=BATCH)
    with pytest.raises(RequestError, match="sequence, batch, model"):
        find_largest("width", ONE, workload, fixed=(), trace=TRACE)
    with pytest.raises(RequestError, match="unknown"):
        find_largest("batch", describe("epyc-9654"), workload, fixed=(), trace=TRACE)
    assert ONE.gpu is not None
    for sizes in ({"memory_bytes": 2**30}, {"memory_bytes": 0}, {"free_memory_bytes": 0}):
        with pytest.raises(NothingFits, match="needs"):
            find_largest("sequence", ONE.changed(gpu=ONE.gpu.changed(**sizes)), workload, fixed=(), trace=Traced())
    pictures = make_profile().changed(objective="image-classification")
    with pytest.raises(RequestError, match="takes images; use --largest batch"):
        find_largest("sequence", ONE, workload, fixed=(), trace=lambda length, variants: pictures)


@given(amount=st.floats(1e-3, 1e6), unit=st.sampled_from(sorted(DURATIONS)))
def test_durations(amount: float, unit: str) -> None:
    assert read_duration(f"{amount!r}{unit}") == pytest.approx(amount * DURATIONS[unit])
    assert read_duration(f" {amount!r} {unit.upper()} ") == pytest.approx(amount * DURATIONS[unit])


@given(count=st.integers(1, 10**17), suffix=st.sampled_from(["", "K", "M", "B", "T", "k", "b"]))
def test_token_counts(count: int, suffix: str) -> None:
    scale = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[suffix.upper()]
    if count * scale <= 10**18:
        assert read_tokens(f"{count}{suffix}") == pytest.approx(count * scale)
    else:
        with pytest.raises(RequestError):
            read_tokens(f"{count}{suffix}")


def test_how_people_write_them() -> None:
    assert [read_tokens(text) for text in ("1e12", "300B", "15T")] == [10**12, 3 * 10**11, 15 * 10**12]
    assert [read_tokens(text) for text in ("1_000", "2.5M")] == [1000, 2500000]
    assert [read_duration(text) for text in ("72h", "3d", "90min", "1.5h")] == [259200, 259200, 5400, 5400]


@settings(max_examples=25)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,12}[a-z0-9]", fullmatch=True), st.floats(0, 1e6), min_size=1, max_size=4))
def test_prices(prices: dict[str, float]) -> None:
    assert read_prices(",".join(f"{name}={price!r}/h" for name, price in prices.items())) == pytest.approx(prices)


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_one_line(text: str) -> None:
    for read in (read_duration, read_tokens, read_prices):
        try:
            read(text)
        except RequestError as problem:
            assert len(str(problem).splitlines()) == 1 and "such as" in str(problem)


@pytest.mark.parametrize("text", ["", "h", "-1h", "0h", "72", "3 days", "nan h", "infh", "1e999h", "5m"])
def test_wrong_durations(text: str) -> None:
    with pytest.raises(RequestError, match="72h, 3d or 90min"):
        read_duration(text)


@pytest.mark.parametrize("text", ["", "many", "-5", "0", "0.2", "1e999", "5X", "1e19"])
def test_wrong_token_counts(text: str) -> None:
    with pytest.raises(RequestError, match="1e12, 300B or 15T"):
        read_tokens(text)


WRONG_PRICES = ["", "h100", "h100=", "h100=2.5", "=2/h", "h100=-1/h", "h100=x/h", "h100=1e99/h", "h100=1/h,h100=2/h"]


@pytest.mark.parametrize("text", WRONG_PRICES)
def test_wrong_prices(text: str) -> None:
    with pytest.raises(RequestError, match="h100=2.5/h"):
        read_prices(text)


def compared(hosts: str, prices: str | None, **terms: float | int) -> list[tuple[str, float | None]]:
    found = compare(
        read_hosts(hosts), Workload(sequence_length=4096, global_batch=BATCH),
        ComparisonTerms(prices=read_prices(prices) if prices else {}, **terms),  # type: ignore[arg-type]
        plan_on=lambda host, workload: planned(host),
    )  # fmt: skip
    return [(row.host, row.money) for row in found.hosts]


def test_hosts_are_sorted_by_money_where_all_have_a_price() -> None:
    dear = compared("2xh100,2xa100-80gb", "h100=100/h,a100-80gb=1/h", tokens=10**9)
    assert [host for host, _ in dear] == ["2xa100-80gb", "2xh100"]
    unknown = compared("2xa100-80gb,2xh100", "h100=100/h", tokens=10**9)
    assert [host for host, _ in unknown] == ["2xh100", "2xa100-80gb"]  # by time
    assert unknown[1][1] is None


def test_the_arithmetic_of_a_comparison() -> None:
    found = compare(
        read_hosts("4xh100"), Workload(sequence_length=4096, global_batch=BATCH),
        ComparisonTerms(prices={"h100-sxm": 2.0}, tokens=10**9, deadline_seconds=60.0),
        plan_on=lambda host, workload: planned(host),
    ).hosts[0]  # fmt: skip
    assert found.seconds and found.device_hours and found.predicted and found.predicted.tokens_per_second
    steady = 10**9 / (BATCH * 4096) * found.predicted.step_ms.p50 / 1000  # type: ignore[union-attr]
    assert found.seconds == pytest.approx(steady + (found.predicted.one_time_seconds or 0.0))
    assert found.device_hours == pytest.approx(4 * found.seconds / 3600)
    assert found.money == pytest.approx(2.0 * found.device_hours)
    assert found.energy_kwh == pytest.approx(0.7 * found.device_hours, rel=1e-12)  # 700 W each
    assert found.in_time is False


def test_a_host_on_which_nothing_fits_is_a_row() -> None:
    def plan_on(host: Host, workload: Workload) -> Planning:
        if host.num_devices == 1:
            raise NothingFits("nothing fits here")
        return planned(host)

    workload = Workload(sequence_length=4096, global_batch=BATCH)
    rows = compare(read_hosts("1xt4,4xh100"), workload, ComparisonTerms(prices={}, tokens=10**9), plan_on=plan_on).hosts
    assert [row.host for row in rows] == ["4xh100", "1xt4"]
    assert rows[1].plan is None and rows[1].why == "nothing fits here"
    with pytest.raises(NothingFits):
        compare(read_hosts("1xt4"), workload, ComparisonTerms(prices={}), plan_on=plan_on)


def test_a_link_that_is_unknown_is_stated_where_the_host_is_named() -> None:
    workload, terms = Workload(sequence_length=4096, global_batch=BATCH), ComparisonTerms(prices={})

    def plan_on(host: Host, workload: Workload) -> Planning:
        return plan_training(SOURCE, host, workload, described=True, profiler=lambda *_, **named: make_profile())

    with pytest.raises(RequestError, match="HOST@LINK") as problem:
        compare(read_hosts("2xepyc-9654"), workload, terms, plan_on=plan_on)
    assert "--on" not in str(problem.value)


def test_different_devices_are_said_before_anything_else(tmp_path: Path) -> None:
    assert ONE.gpu is not None
    mixed = ONE.changed(gpu=None, gpus_per_node=2, mixed_gpus=(ONE.gpu, ONE.gpu.changed(name="A")))
    (tmp_path / "host.json").write_text(mixed.to_json())
    with pytest.raises(RequestError, match="has different devices .A, NVIDIA"):
        find_host(str(tmp_path / "host.json"))


def test_names_of_prices() -> None:
    assert {"h100", "h100-sxm"} <= {*price_names(describe("2x8xh100@ib-ndr"))}
    assert price_names(describe("2xepyc-9654-768gb@ethernet-25")) == ("epyc-9654-768gb", "epyc-9654")
    with pytest.raises(RequestError, match="b200.*h100"):
        compared("4xh100", "b200=3/h")
    with pytest.raises(RequestError, match="8xh100,8xa100-80gb"):
        read_hosts(" , ")


def test_what_is_too_big_says_where(one: Planning) -> None:
    text = describe_shortage(one.ranking.too_big[-1], ONE, one.workload)
    assert text.startswith("needs ") and " of " in text and "phase: " in text
