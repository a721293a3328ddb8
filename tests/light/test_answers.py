"""Answers about plans that differ from the best one, on candidates with made numbers: reasons, outcomes, orders and prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from made_generators import ENCODER, LLAMA_8B
from made_profile import make_profile
from made_requests import model_of

from upshift.errors import NothingFits
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
from upshift.planning.analysis import tpu_programs
from upshift.planning.analysis.compare_hosts import ComparisonTerms, compare, read_hosts, read_tokens
from upshift.planning.analysis.explain import reasons_among, shadow_price
from upshift.planning.analysis.lock_file import Lock, _no_longer_fits, _versions, check_lock, lock_plan
from upshift.planning.analysis.max_size import _scale, find_largest, with_layers
from upshift.planning.analysis.what_if import _compare_with_best, _shadow_price, explain_choice
from upshift.planning.inference.plan import InferenceWorkload
from upshift.planning.inference.planner import plan_profile, rank_plans
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning, plan_training
from upshift.planning.search.ranking import Candidate, Coster, Ranking, Rejected, cost_plan
from upshift.planning.workload import LengthHistogram, Workload
from upshift.record import Environment, Numbers, Record
from upshift.units import format_bytes

PROFILE = make_profile()
WORKLOAD = Workload(sequence_length=1024, global_batch=8)
HOST = describe("h100")


def costed(**fields: Any) -> Candidate:
    plain = {"device": "cuda", "host": HOST.fingerprint, "model": "feed", "sequence_length": 1024, "precision": "bf16",
             "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
    candidate = cost_plan(Plan(**{**plain, **fields}), host=HOST, profile=PROFILE, workload=WORKLOAD)
    assert isinstance(candidate, Candidate)
    return candidate


BEST = replace(costed(), tokens_per_second=1000.0)


def planning_of(*candidates: Candidate, host: Host = HOST, workload: Workload = WORKLOAD, **ranking: Any) -> Planning:
    return Planning(host, PROFILE, workload, Ranking(candidates=list(candidates), **ranking), BEST)


# --- reasons ---------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    plan: Any
    speed: float = 0.0


def test_each_reason_names_the_best_plan_that_differs_in_the_choice() -> None:
    """The second candidate differs in one choice, the third in both; a blocked one alone differs in the attention."""

    def entry(speed: float = 0.0, **fields: Any) -> Entry:
        return Entry(BEST.plan.changed(**fields), speed)

    candidates = [
        entry(9.0), entry(8.0, precision="fp32"), entry(7.0, precision="fp32", optim="sgd"), entry(6.0, precision="fp16"),
    ]  # fmt: skip
    blocked = [entry(optim="muon"), entry(attention="eager")]
    because = {"optim": "state", "precision": "rate", "attention": "scores", "torch_compile": "kernels"}
    rows = reasons_among(candidates, blocked, because, cost=lambda other: f"{other.speed} of 9", blocked_cost="does not fit")
    assert [(row.choice, row.value, row.why, row.runner_up, row.runner_up_cost) for row in rows] == [
        ("optim", "adamw_torch_fused", "state", "sgd", "7.0 of 9"), ("precision", "bf16", "rate", "fp32", "8.0 of 9"),
        ("attention", "sdpa", "scores", "eager", "does not fit"),
    ]  # fmt: skip


# --- what if ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "outcome"), [(1200.0, "faster"), (1001.0, "faster"), (1000.4, "as fast"), (999.6, "as fast"), (999.0, "slower")]
)
def test_outcomes_by_the_gain(speed: float, outcome: str) -> None:
    other = replace(BEST, plan=BEST.plan.changed(packing=True), tokens_per_second=speed)
    found = _compare_with_best(planning_of(BEST), "packing=True", "packing", (), other, "")
    assert (found.outcome, found.gain) == (outcome, pytest.approx(speed / 1000 - 1))
    price = _shadow_price(planning_of(BEST), "more", Ranking(candidates=[other]))
    assert price.gain == (pytest.approx(speed / 1000 - 1) if outcome == "faster" else 0.0)
    assert (price.plan is None) == (outcome != "faster")
    assert _shadow_price(planning_of(BEST), "more", Ranking()).gain == 0.0


def test_terms_are_written_as_exactly_as_they_are_large() -> None:
    terms = dict.fromkeys(BEST.time.terms, 0.1) | {"update": 0.1}
    best = replace(BEST, time=replace(BEST.time, terms=terms))
    more = replace(best, time=replace(best.time, terms={**terms, "update": 0.1 + 1.2345, "dispatch": 0.1 - 0.009876}))
    found = _compare_with_best(planning_of(best), "packing=True", "packing", (), more, "")
    assert found.why.startswith("update +1,234 ms, dispatch -9.88 ms")
    assert found.more_ms == pytest.approx({"update": 1234.5, "dispatch": -9.876})


def test_a_question_replaces_only_the_field_that_it_asks_about() -> None:
    """The precision stays as it was fixed."""
    fixed = ("precision=fp32", "per_device_train_batch_size=2")
    trace: Callable[..., Any] = lambda length, variants: PROFILE  # noqa: E731
    base = planning_of(costed(precision="fp32"))
    found = explain_choice(base, "per_device_train_batch_size=4", fixed=fixed, trace=trace)
    assert found.plan is not None
    assert (found.plan.precision, found.plan.per_device_train_batch_size) == ("fp32", 4)


# --- a shadow price --------------------------------------------------------------------------------------------------


def test_more_memory_is_worth_what_the_fastest_plan_that_then_fits_gains() -> None:
    """Eight GiB more: one plan needs them, one needs more."""
    assert HOST.gpu is not None and HOST.gpu.memory_bytes is not None
    limit = 0.95 * HOST.gpu.memory_bytes
    near = replace(BEST, resident=limit + 2.0**32, tokens_per_second=1500.0)
    nearer = replace(BEST, resident=limit + 2.0**31, tokens_per_second=1200.0)
    far = replace(BEST, resident=limit + 2.0**34, tokens_per_second=9000.0)
    ranking = Ranking(candidates=[BEST, replace(BEST, tokens_per_second=1.0)], too_big=[nearer, near, far])
    assert (shadow_price(ranking, HOST, WORKLOAD) or "").startswith("8 GiB more memory would give +50.0% tokens/s")
    slow = Ranking(candidates=[BEST], too_big=[replace(near, tokens_per_second=900.0)])
    assert shadow_price(slow, HOST, WORKLOAD) == "8 GiB more memory would not make it faster"
    assert shadow_price(Ranking(too_big=[near]), HOST, WORKLOAD) is None
    unknown = HOST.changed(gpu=HOST.gpu.changed(memory_bytes=None))
    assert shadow_price(ranking, unknown, WORKLOAD) is None


def test_what_did_not_fit_when_it_was_locked_is_no_news() -> None:
    """80 GiB are predicted, of which 0.95 may be used; 79 would not have fit then, either."""
    big = replace(BEST, resident=80.0 * 2**30)
    lock = Lock.model_construct(host=HOST, workload=WORKLOAD)
    assert "no longer fits: needs 80.0 GiB" in (_no_longer_fits(big, lock, 60.0) or "")
    assert "no longer fits" in (_no_longer_fits(big, lock, None) or "")
    assert _no_longer_fits(big, lock, 79.0) is None
    assert _no_longer_fits(replace(BEST, resident=2.0**30), lock, 0.5) is None


def test_a_lock_whose_plan_cannot_be_predicted_any_more_has_moved() -> None:
    source = ModelSource(reference="made", directory=None, config={})
    locked = lock_plan(planning_of(BEST), source, fixed=(), described=True)
    same = check_lock(locked, PROFILE)
    assert (same.moved, same.problem, same.segments, same.terms_ms, same.parts_gib) == (False, None, (), (), ())
    assert same.peak_gib.share == same.step_ms.share == 0.0
    gone = check_lock(locked, PROFILE.changed(steps=()))
    assert gone.moved and gone.problem == "sdpa attention in bf16 was not traced"
    assert (gone.peak_gib.now, gone.step_ms.now) == (None, None)
    assert gone.peak_gib.before == same.peak_gib.before


def test_a_lock_names_the_versions_that_its_numbers_follow_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upshift's own is unknown where it runs from its source."""
    for installed, version in ((None, "unknown"), ("1.2", "1.2")):
        monkeypatch.setattr("upshift.planning.analysis.lock_file.installed_version", lambda name, found=installed: found)
        versions = _versions(PROFILE)
        assert versions["upshift"] == version
        assert {"python", "torch", "transformers"} <= {*versions}


def test_programs_of_tpus_are_kept_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The newest of three shapes; a program that is compiled again takes the place of its row."""
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    host = describe("4xtpu-v5e")
    assert host.gpu is not None
    key = host.gpu.table_key
    source = ModelSource(reference="small", directory=None, config={"model_type": "x"})
    assert tpu_programs.describe_programs(source, HOST) == ""
    assert tpu_programs.describe_programs(source, host).endswith(f"small --topology {(key or '').removeprefix('tpu-')}-4")
    environment = Environment(
        time="", host="", host_fingerprint="", processor=None, num_cores=None, python="", versions={}, commit=None
    )

    def store(length: int, gib: float, model: str = source.model_hash) -> None:
        plan = {"model": model, "device": key, "kind": "train", "rows": 2, "length": length, "dtype": "bf16", "topology": "v5e-4"}
        tpu_programs.store_program(Record(
            kind="trial", name="tpu", plan=plan, predicted=None, measured=Numbers(peak_gib=gib), flop_convention="",
            environment=environment, details={"memory_gib": 16.0},
        ))  # fmt: skip

    for length in (128, 256, 512, 1024):
        store(length, length / 128)
    store(256, 9.0)
    store(64, 1.0, model="another")
    text = tpu_programs.describe_programs(source, host)
    shapes = [part.partition(" on ")[0] for part in text.removeprefix("; Google's compiler: ").split("; ")]
    assert shapes == [f"train of 2 x {length} tokens in bf16" for length in (256, 1024, 512)]
    assert "takes 9.00 of 16.00 GiB a chip" in text
    monkeypatch.setattr(tpu_programs, "MAX_ROWS", 2)
    store(32, 1.0)
    assert len((tmp_path / tpu_programs.FILE_NAME).read_text().splitlines()) == 2


# --- hosts -----------------------------------------------------------------------------------------------------------


def test_hosts_without_a_plan_are_last_and_all_without_one_are_a_problem() -> None:
    def plan_on(host: Host, workload: Workload) -> Planning:
        if host.num_devices == 1:
            raise NothingFits("too small")
        return planning_of(BEST, host=host, workload=workload)

    for terms in (ComparisonTerms(prices={}), ComparisonTerms(prices={}, tokens=10**6)):
        rows = compare(read_hosts("1xh100,2xh100,1xa100-80gb,4xh100"), WORKLOAD, terms, plan_on=plan_on).hosts
        assert [row.host for row in rows] == ["2xh100", "4xh100", "1xh100", "1xa100-80gb"]
        assert [row.plan is None for row in rows] == [False, False, True, True]
        with pytest.raises(NothingFits, match="too small"):
            compare(read_hosts("1xh100,1xa100-80gb"), WORKLOAD, terms, plan_on=plan_on)


def test_one_time_costs_are_spread_over_the_steps_of_the_tokens() -> None:
    """A million tokens in batches of eight sequences of 1,024, or of 500 in the mean."""
    steps: list[int] = []

    def plan_on(host: Host, workload: Workload) -> Planning:
        steps.append(workload.total_steps)
        return planning_of(BEST, host=host, workload=workload)

    lengths = LengthHistogram(sequence_length=1024, lengths=(500,), counts=(2,), num_tokens=1000)
    for workload in (WORKLOAD, WORKLOAD.changed(lengths=lengths)):
        compare(read_hosts("h100"), workload, ComparisonTerms(prices={}, tokens=10**6), plan_on=plan_on)
    compare(read_hosts("h100"), WORKLOAD, ComparisonTerms(prices={}, tokens=1), plan_on=plan_on)
    assert steps == [123, 250, 1]


@pytest.mark.parametrize(
    ("text", "tokens"), [("1.5e3", 1500), ("2.5K", 2500), ("1e-2M", 10_000), ("3", 3), ("15T", 15 * 10**12), ("1_000b", 10**12)]
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert read_tokens(text) == tokens


# --- the largest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "most"), [("model", 4096), ("batch", 2**20), ("sequence", 2**24)])
def test_a_search_for_the_largest_ends_where_everything_fits(what: Any, most: int) -> None:
    assert HOST.gpu is not None
    endless = HOST.changed(gpu=HOST.gpu.changed(memory_bytes=10**20))
    fixed = ("optim=adamw_torch_fused", "torch_compile=off", "activation_checkpointing=0", "precision=bf16")
    profile = PROFILE.changed(max_positions=None)
    found = find_largest(what, endless, WORKLOAD, fixed=fixed, trace=lambda length, variants: profile)
    assert found.value == most


def test_the_speed_of_the_largest_counts_the_models_own_work() -> None:
    """All tokens of a global batch; those of the data where sequences are shorter: half of the positions in the mean."""

    def lengths_at(size: int) -> LengthHistogram:
        return LengthHistogram(sequence_length=size, lengths=(size // 2,), counts=(2,), num_tokens=2 * (size // 2))

    fixed = ("optim=adamw_torch_fused", "torch_compile=off", "activation_checkpointing=0", "precision=bf16", "packing=false")
    profile = PROFILE.changed(max_positions=2048)
    for lengths, share in ((None, 1.0), (lengths_at, 0.5)):
        found = find_largest("sequence", HOST, WORKLOAD, fixed=fixed, trace=lambda length, variants: profile, lengths_at=lengths)
        assert found.value == 2048 and found.limited_by == "the model has 2,048 positions"
        assert found.predicted.step_ms is not None and found.predicted.model_flops_per_second is not None
        work = found.predicted.model_flops_per_second * found.predicted.step_ms.p50 / 1000
        assert work == pytest.approx(share * 8 * profile.train_flops(1, 2048))
        assert found.parameters == profile.parameters.total


def test_more_layers_have_more_of_everything_in_layers() -> None:
    found = with_layers(PROFILE, 48)
    assert (found.num_layers, found.parameters.layers) == (48, 2 * PROFILE.parameters.layers)
    adapted = model_of("lora", "causal-lm", longest=4096)
    assert with_layers(adapted, 48).parameters.trainable == 2 * adapted.parameters.trainable
    assert [_scale(total, ratio) for total, ratio in ((5, (1, 2)), (7, (1, 3)), (8, (1, 3)), (9, (4, 6)))] == [3, 2, 3, 6]


# --- frozen weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "folder", "fixed", "place"),
    [
        (64, True, (), "none"), (6, True, (), "disk"), (6, False, (), None), (6, True, ("weight_offload=none",), None),
        (64, True, ("weight_offload=disk",), "disk"),
    ],
)  # fmt: skip
def test_frozen_weights_are_read_from_disk_where_nothing_else_fits(
    gib: int, folder: bool, fixed: tuple[str, ...], place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user decides, or the model has no files. An adapter's base of 1.7 B parameters takes 7 GB in fp32."""
    profile = model_of("lora", "causal-lm", longest=4096)
    monkeypatch.setattr("upshift.planning.search.space.disk_rate", lambda files: 1e9)
    source = ModelSource(reference="adapted", directory=tmp_path if folder else None, config={})
    host = describe("epyc-9654")
    assert host.cpu is not None
    memory = host.changed(cpu=host.cpu.changed(memory_bytes=gib * 2**30, usable_cores=1), disk_bytes_per_second=1e9)
    workload = WORKLOAD.changed(sequence_length=64, global_batch=1)
    fixed = ("precision=fp32", "optim=adamw_torch_fused", "attention=sdpa", *fixed)  # few plans

    def plan() -> Planning:
        return plan_training(source, memory, workload, fixed=fixed, described=True, profiler=lambda *_, **named: profile)

    if place is None:
        with pytest.raises(NothingFits):
            plan()
        return
    assert plan().best.weight_offload == place


# --- rejections ------------------------------------------------------------------------------------------------------


def test_what_was_not_traced_is_said_with_the_ranks_that_share_it() -> None:
    alone = PROFILE.changed(steps=tuple(step for step in PROFILE.steps if step.tensor_parallel == 1))
    coster = Coster(describe("2xh100"), alone, WORKLOAD)
    shared = BEST.plan.changed(num_processes=2, layout=Layout(tensor_parallel=2))
    found = coster.cost(shared)
    assert isinstance(found, Rejected)
    assert found.reason == "sdpa attention in bf16 was not traced as one of 2 tensor-parallel ranks"
    plain = coster.cost(BEST.plan.changed(attention="eager"))
    assert isinstance(plain, Rejected) and plain.reason == "eager attention in bf16 was not traced"
    granularity = coster.cost(BEST.plan.changed(activation_checkpointing=1, recompute_granularity="selective"))
    assert isinstance(granularity, Rejected) and "cannot be recomputed in selective" in granularity.reason


# --- inference -------------------------------------------------------------------------------------------------------


def test_prompts_come_in_chunks_of_every_size_and_batches_to_encode_once() -> None:
    generated = rank_plans(HOST, LLAMA_8B, InferenceWorkload(prompt_length=512, output_length=64), fixed={})
    plans = [candidate.plan for candidate in generated.candidates]
    assert {plan.prefill_chunk_tokens for plan in plans} == {512, 2048, 8192}
    assert len(set(plans)) == len(plans)
    encode = InferenceWorkload(task="encode", prompt_length=128, concurrency=8)
    encoded = [candidate.plan for candidate in rank_plans(HOST, ENCODER, encode, fixed={}).candidates]
    assert len(set(encoded)) == len(encoded)
    assert all(plan.prefill_chunk_tokens == 128 * plan.max_concurrency for plan in encoded)


def test_the_plan_that_misses_a_limit_by_least_is_named() -> None:
    with pytest.raises(NothingFits) as too_big:
        plan_profile(LLAMA_8B, describe("t4"), InferenceWorkload(prompt_length=512, output_length=64))
    ranking = rank_plans(describe("t4"), LLAMA_8B, InferenceWorkload(prompt_length=512, output_length=64), fixed={})
    assert f"needs {format_bytes(min(item.resident for item in ranking.too_big))} of" in str(too_big.value)
    slow = InferenceWorkload(prompt_length=512, output_length=64, max_tpot_ms=0.5)
    fastest = min(item.service.tpot or 0.0 for item in rank_plans(HOST, LLAMA_8B, slow, fixed={}).too_slow)
    with pytest.raises(NothingFits, match=f"TPOT {1000 * fastest:.1f} ms, over"):
        plan_profile(LLAMA_8B, HOST, slow)


def test_the_slowest_and_the_largest_that_miss_a_limit_are_last() -> None:
    workload = InferenceWorkload(prompt_length=512, output_length=64, max_tpot_ms=1.0, max_ttft_ms=1.0)
    slow = rank_plans(HOST, LLAMA_8B, workload, fixed={}).too_slow
    excess = [max(1000 * item.service.ttft, 1000 * (item.service.tpot or 0.0)) for item in slow]
    assert excess == sorted(excess) and len(excess) > 9
    big = rank_plans(describe("t4"), LLAMA_8B, workload, fixed={}).too_big
    assert [item.resident for item in big] == sorted(item.resident for item in big)
