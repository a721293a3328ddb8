"""Layouts of processes on CPUs and of several hosts: which are planned, what they exchange, what a wrong one is told; without
torch."""

from __future__ import annotations

from typing import Any

import pytest
from made_profile import make_profile

from upshift.cli.options import LAYOUT_FLAGS
from upshift.errors import JobFailed, RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host, Link, Measured, Rates
from upshift.models.profile import with_eager_attention
from upshift.planning.cost.network import Group, collective_seconds, point_to_point_seconds
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.layouts import enumerate_layouts
from upshift.planning.search.ranking import Candidate, Coster, Ranking
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.search.variants import is_traced, variants_for
from upshift.planning.trials.runner import TrialResult
from upshift.planning.trials.select import Proof, prove
from upshift.planning.workload import Workload
from upshift.record import Spread

PROFILE = make_profile()
WORKLOAD = Workload(sequence_length=4096, global_batch=8)
ONE, TWO = describe("epyc-9654-768gb"), describe("2x2xepyc-9654-768gb@ethernet-25")


def searched(host: Host, *fixed: str, workload: Workload = WORKLOAD) -> Ranking:
    return search(host, PROFILE, workload, fixed=parse_fixed(fixed, host, PROFILE, workload))


def measured(host: Host, **rates: float) -> Host:
    """Probed: gloo's rate of each operation."""
    return host.changed(
        measured=Measured(
            torch_version="2", transformers_version="5",
            num_threads=host.cpu.usable_cores if host.cpu else 1, cpu=Rates(fp32=1e12, memory_bytes_per_second=1e11),
            dispatch_seconds=1e-6, first_touch_seconds_per_byte=None, base_resident_bytes=None, compiler=None, probe_seconds=1,
            exchanges={
                name: Link(name=name, bytes_per_second=rate, latency_seconds=1e-3, measured=True)
                for name, rate in rates.items()
            },  # type: ignore[misc]
        )
    )  # fmt: skip


def test_unasked_a_cpu_runs_one_process_or_whole_copies() -> None:
    plans = [candidate.plan for candidate in searched(ONE).candidates]
    assert {plan.layout for plan in plans} == {ALONE}
    assert {plan.num_processes for plan in plans} == {1, 2}


@pytest.mark.parametrize("host", [ONE, TWO], ids=["one", "two"])
def test_mup_keeps_parameters_whole_wherever_they_run(host: Host) -> None:
    ranks = 2 if host is ONE else 4
    base = ("mup_base=hidden_size=32", f"num_processes={ranks}")
    assert {plan.layout for plan in (candidate.plan for candidate in searched(host, *base).candidates)} == {ALONE}
    with pytest.raises(RequestError, match="muP compares whole parameters"):
        searched(host, *base, "tensor_parallel=2")


@pytest.mark.parametrize(
    ("fixed", "ranks"),
    [
        (("num_processes=4",), 4), (("tensor_parallel=2",), 2), (("tensor_parallel=2", "pipeline_parallel=2"), 4),
        (("fully_shard=weights",), 2), (("fully_shard=weights", "tensor_parallel=4"), 8), (("context_parallel=4",), 4),
        (("num_processes=3",), 3),
    ],
)  # fmt: skip
def test_degrees_that_are_fixed_are_planned_around(fixed: tuple[str, ...], ranks: int) -> None:
    plans = [candidate.plan for candidate in searched(ONE, *fixed).candidates]
    assert plans and {plan.num_processes for plan in plans} == {ranks}
    for plan in plans:
        assert plan.threads_per_process == 96 // ranks and plan.global_batch == 8
        for name, _, value in (text.partition("=") for text in fixed):
            assert str(getattr(plan if name in Plan.model_fields else plan.layout, name)) == value
    if fixed == ("num_processes=4",):
        stages = {plan.layout.fully_shard for plan in plans}
        assert stages == {"no", "optimizer", "gradients", "weights"} and {p.layout.pipeline_parallel for p in plans} == {1, 2, 4}


def test_processes_of_several_hosts_are_counted_on_each() -> None:
    plans = [candidate.plan for candidate in searched(TWO).candidates]
    assert {plan.num_processes for plan in plans} == {2} and {plan.threads_per_process for plan in plans} == {192}
    assert {plan.num_processes for plan in (c.plan for c in searched(TWO, "tensor_parallel=2").candidates)} == {4}
    assert {layout.tensor_parallel for _, layout in enumerate_layouts(TWO, PROFILE, WORKLOAD, ranks=4)} == {1, 2}  # inside a host
    assert {plan.threads_per_process for plan in (c.plan for c in searched(TWO, "num_processes=8").candidates)} == {48}


@pytest.mark.parametrize(
    ("host", "fixed", "words"),
    [
        (ONE, ("tensor_parallel=3",), "use one of 1, 2, 4, 8 .*degrees divide 8"),
        (ONE, ("num_processes=2", "tensor_parallel=4"), "of 2 processes on epyc-9654-768gb; use one of 1, 2"),
        (ONE, ("expert_parallel=2",), "the model has no experts"),
        (ONE, ("context_parallel=2", "context_kind=ring"), "context_kind=ring is not possible with Upshift; use ulysses"),
        (ONE, ("num_processes=2", "tensor_parallel=2", "pipeline_parallel=2"), "tensor_parallel can be 1, not 2"),
        (ONE, ("num_processes=5",), "ranks must divide the global batch of 8, or 24 layers, or heads.* by 8; use another"),
        (ONE, ("num_processes=500",), "4 for each of the 96 cores.*at most 384"),
        (ONE, ("fully_shard=all",), "use one of no, optimizer, gradients, weights"),
        (TWO, ("num_processes=3",), "does not divide among 2 hosts"),
        (describe("h100"), ("tensor_parallel=2",), "for several ranks, and h100 has one GPU"),
        (describe("h100"), ("tensr_parallel=2",), "names no plan field.* tensor_parallel, .*, expert_parallel"),
        (describe("8xh100"), ("tensr_parallel=2",), "names no plan field.* tensor_parallel, .*, expert_parallel"),
        (describe("8xh100"), ("num_processes=4",), "one for each of its GPUs, 8"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_one_clear_error(host: Host, fixed: tuple[str, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_fixed(fixed, host, PROFILE, WORKLOAD)


def test_ranks_that_share_sequences_need_none_of_their_own() -> None:
    one = WORKLOAD.changed(global_batch=1)
    best = searched(ONE, "num_processes=2", workload=one).candidates[0].plan
    assert best.data_parallel == 1 and best.layout != ALONE


def test_gloo_is_scaled_from_two_processes() -> None:
    host = measured(ONE, all_reduce=2e9, all_gather=1e9, send=4e9)
    size = 1e9
    assert collective_seconds(host, "all_reduce", size, Group(2, 1, 2)) == pytest.approx(1e-3 + 0.5)
    assert collective_seconds(host, "all_reduce", size, Group(4, 1, 4)) == pytest.approx(3e-3 + 0.5 * 1.5)
    assert collective_seconds(host, "all_gather", size, Group(4, 1, 4)) == pytest.approx(3e-3 + 1.0 * 1.5)
    assert collective_seconds(host, "all_reduce", size, Group(2, 1, 192)) == pytest.approx(1e-3 + 0.5 * 2)  # they take turns
    assert point_to_point_seconds(host, size, between_nodes=False, node_ranks=2, num_senders=1) == pytest.approx(1e-3 + 0.25)


def test_a_ring_between_hosts_carries_what_every_rank_sends() -> None:
    link = Link(name="slow", bytes_per_second=25e6, latency_seconds=0.0, measured=True)
    host = TWO.changed(inter_node=link)
    assert collective_seconds(host, "all_reduce", 1e8, Group(2, 1, 1)) == pytest.approx(4.0)
    assert collective_seconds(host, "reduce_scatter", 1e8, Group(2, 1, 1)) == pytest.approx(4.0)  # gloo sums all of it
    assert collective_seconds(host, "all_gather", 1e8, Group(2, 1, 1)) == pytest.approx(2.0)
    assert collective_seconds(host, "all_reduce", 1e8, Group(4, 1, 2)) == pytest.approx(6.0)
    assert collective_seconds(host, "all_reduce", 1e8, Group(2, 2, 2)) == pytest.approx(8.0)  # two groups share the port
    assert collective_seconds(host.changed(inter_node=None), "all_reduce", 1e8, Group(2, 1, 1)) is None


def test_sums_between_hosts_take_two_rounds_of_latency() -> None:
    host = TWO.changed(inter_node=Link(name="far", bytes_per_second=1e12, latency_seconds=1.0, measured=True))
    rounds = {"all_reduce": 6.0, "reduce_scatter": 6.0, "all_gather": 3.0}
    for operation, seconds in rounds.items():
        assert collective_seconds(host, operation, 8.0, Group(4, 1, 1)) == pytest.approx(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "waits"), [("1f1b", 2 + 7), ("zero_bubble", 2)])
def test_a_pipeline_of_1f1b_waits_for_transfers_between_micro_batches(schedule: str, waits: int) -> None:
    """Two stages: hidden states go there and back while two micro-batches are under way."""
    far = Link(name="far", bytes_per_second=1e15, latency_seconds=1.0, measured=True)
    layout = Layout(pipeline_parallel=2, pipeline_schedule=schedule)  # type: ignore[arg-type]
    assert plan_on(TWO.changed(inter_node=far), 2, layout).time.terms["pipeline transfers"] == pytest.approx(waits, rel=1e-3)


@pytest.mark.parametrize(
    ("fixed", "precisions", "divided"),
    [
        (("num_processes=2",), {"fp32", "bf16", "bf16-pure"}, True),
        (("num_processes=2", "fully_shard=weights"), {"fp32", "bf16-pure"}, False),
        (("num_processes=4", "fully_shard=weights"), {"fp32", "bf16-pure"}, True),
        (("tensor_parallel=2",), {"fp32", "bf16"}, True),
        (("pipeline_parallel=2",), {"fp32", "bf16"}, False),
        ((), {"fp32", "bf16"}, False),
    ],
)
def test_only_what_layouts_can_need_is_traced(fixed: tuple[str, ...], precisions: set[str], divided: bool) -> None:
    variants = variants_for(ONE, WORKLOAD, fixed)
    assert {variant.precision for variant in variants} == precisions
    assert any(variant.divided for variant in variants) == divided


@pytest.mark.parametrize(
    ("attention", "traced"), [("sdpa", {"sdpa"}), ("block", {"sdpa", "block"}), ("eager", {"sdpa", "eager"})]
)
@pytest.mark.parametrize("length", [128, 4096])
def test_kernels_that_a_request_excludes_are_not_traced(attention: str, traced: set[str], length: int) -> None:
    """The plain default has sdpa, and is traced for every request."""
    variants = variants_for(ONE, WORKLOAD.changed(sequence_length=length), (f"attention={attention}",))
    assert {variant.attention for variant in variants} == traced


@pytest.mark.parametrize("gpus", ["1xh100", "2xh100"])
@pytest.mark.parametrize("fixed", [(), ("attention=sdpa",), ("attention=eager",), ("tensor_parallel=1",)])
def test_what_compiled_layers_save_is_traced_only_for_plans_that_may_be_compiled(gpus: str, fixed: tuple[str, ...]) -> None:
    """Nothing else about the traces changes."""
    host = describe(gpus)
    compiled = variants_for(host, WORKLOAD, fixed)
    eager = variants_for(host, WORKLOAD, (*fixed, "torch_compile=off"))
    assert any(variant.compiled for variant in compiled)
    assert [*dict.fromkeys(variant._replace(compiled=False) for variant in compiled)] == [*eager]
    assert all(is_traced(variant, compiled) for variant in eager)
    assert not all(is_traced(variant, eager) for variant in compiled)


@pytest.mark.parametrize("length", [128, 256, 257, 4096])
@pytest.mark.parametrize("fixed", [(), ("attention=eager",)])
@pytest.mark.parametrize("layout", ["tensor_parallel=2", "recompute_granularity=selective", "recompute_granularity=alternate"])
def test_eager_attention_is_traced_with_the_flags_of_the_kernel_whose_place_it_takes(
    length: int, fixed: tuple[str, ...], layout: str
) -> None:
    variants = variants_for(ONE, WORKLOAD.changed(sequence_length=length), (*fixed, layout))
    flags = {variant._replace(attention="", masked=False) for variant in variants if variant.attention == "sdpa"}
    without_sdpa = with_eager_attention(variants)
    assert {variant._replace(attention="") for variant in without_sdpa if variant.attention == "eager"} == flags
    if fixed:
        assert {variant._replace(attention="") for variant in variants if variant.attention == "eager"} == flags


def plan_on(host: Host, ranks: int, layout: Layout = ALONE) -> Candidate:
    plan = Plan(
        device="cpu", host=host.fingerprint, model="feed", sequence_length=4096, per_device_train_batch_size=1, layout=layout,
        gradient_accumulation_steps=8 // (ranks // layout.ranks_per_replica), num_processes=ranks,
        threads_per_process=max((host.cpu.usable_cores if host.cpu else 1) // host.ranks_per_node(ranks), 1),
    )  # fmt: skip
    found = Coster(host, PROFILE, WORKLOAD).cost(plan)
    assert isinstance(found, Candidate)
    return found


def test_more_processes_than_cores_take_turns() -> None:
    """They compute as fast together, and pay for more exchange."""
    assert ONE.cpu is not None
    host = measured(ONE.changed(cpu=ONE.cpu.changed(usable_cores=2)), all_reduce=1e9)
    full, turns = (plan_on(host, ranks).time for ranks in (2, 8))
    for term in ("matrix products", "attention", "dispatch"):
        assert turns.terms[term] == pytest.approx(full.terms[term])
    assert turns.terms["gradient exchange"] > 4 * full.terms["gradient exchange"]


@pytest.mark.parametrize(("processes", "limit"), [((), 8), (("num_processes=2",), 4), (("num_processes=8",), 1)])
def test_far_more_threads_than_cores_are_refused(processes: tuple[str, ...], limit: int) -> None:
    assert ONE.cpu is not None
    host = ONE.changed(cpu=ONE.cpu.changed(usable_cores=2))
    parse_fixed((*processes, f"threads_per_process={limit}"), host, PROFILE, WORKLOAD)
    with pytest.raises(RequestError, match=rf"threads_per_process={limit + 1} .*the 2 cores of .*use at most {limit}$"):
        parse_fixed((*processes, f"threads_per_process={limit + 1}"), host, PROFILE, WORKLOAD)


def test_slow_links_between_hosts_change_which_layout_is_best() -> None:
    """Whole gradients every step against hidden states between two layers."""
    slow = TWO.changed(inter_node=Link(name="200 Mbit/s", bytes_per_second=25e6, latency_seconds=1e-4, measured=True))
    whole, stages = (plan_on(slow, 2, layout).time.total for layout in (ALONE, Layout(pipeline_parallel=2)))
    assert stages < whole / 5
    assert searched(slow).candidates[0].plan.layout.pipeline_parallel == 2


def test_memory_of_a_host_is_shared_by_its_processes() -> None:
    one, four = (searched(ONE.changed(cpu=ONE.cpu.changed(free_memory_bytes=2**35)), f"num_processes={n}") for n in (1, 4))  # type: ignore[union-attr]
    assert max(c.resident for c in one.candidates) > 2**35 / 4
    assert all(c.resident <= 2**35 / 4 for c in four.candidates)


def test_flags_name_fields_of_a_plan() -> None:
    fields = {**Plan.model_fields, **Layout.model_fields}
    assert all(flag.field in fields for flag in LAYOUT_FLAGS.values())


def test_the_plain_default_is_not_chosen_against_what_was_asked_for() -> None:
    """Though it was tried, and is faster."""
    asked, default = (plan_on(ONE, ranks) for ranks in (2, 1))

    def run(plan: Plan, limit_seconds: float) -> TrialResult:
        speed = 100.0 / plan.num_processes
        return TrialResult(tokens_per_second=speed, step_seconds=Spread(p20=1.0, p50=1.0, p80=1.0), wall_seconds=limit_seconds)

    def proof(**more: Any) -> Proof:
        return prove([asked], default, workload=WORKLOAD, run=run, budget_seconds=1e-3, **more)

    assert proof().chosen.candidate is default
    found = proof(obeys=lambda plan: plan.num_processes == 2)
    assert found.chosen.candidate is asked and found.default.candidate is default


def test_what_held_more_than_allowed_leads_to_leaner_plans() -> None:
    """Each holds a fifth more than predicted, which the first trial says: those that the limit then leaves out are not tried."""
    found = searched(ONE, "num_processes=1").candidates
    leanest, default = min(found, key=lambda one: one.resident), max(found, key=lambda one: one.resident)
    held = {id(one.plan): 1.2 * one.resident for one in found}
    seen: list[float] = []

    def run(plan: Plan, limit_seconds: float) -> TrialResult:
        seen.append(held[id(plan)])
        steps = Spread(p20=1.0, p50=1.0, p80=1.0)
        return TrialResult(tokens_per_second=100.0, step_seconds=steps, wall_seconds=0.0, resident_bytes=int(seen[-1]))

    def proof(limit: float) -> Proof:
        seen.clear()
        return prove(found, default, workload=WORKLOAD, run=run, budget_seconds=0.2, limit_bytes=limit)

    between = (held[id(leanest.plan)] + held[id(default.plan)]) / 2
    assert 1.2 * proof(between).chosen.candidate.resident <= between and max(seen[1:]) <= between + 1
    with pytest.raises(JobFailed, match="are allowed"):
        proof(0.9 * held[id(leanest.plan)])
    assert seen[1] == held[id(leanest.plan)]
