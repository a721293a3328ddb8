"""Layouts of many devices: which are legal, what a rank holds, what exchanging costs; without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_profile import LAYERS, make_profile

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host, Link
from upshift.models.profile import Declares, Experts
from upshift.models.source import ModelSource
from upshift.planning.cost.memory import predict_memory
from upshift.planning.cost.network import Group, collective_seconds
from upshift.planning.cost.parallel_trace import tensor_parallel_trace
from upshift.planning.cost.partition import deciding_stages, share_of
from upshift.planning.cost.segments import plan_trace
from upshift.planning.layout import Layout, divisors
from upshift.planning.plan import Plan
from upshift.planning.planner import plan_training
from upshift.planning.search.enumerate import PlanSpace
from upshift.planning.search.layouts import enumerate_layouts
from upshift.planning.search.ranking import Candidate, Coster, Rejected
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.search.variants import variants_for
from upshift.planning.workload import Workload

PROFILE = make_profile()
HOSTS = ("8xh100", "2x8xh100", "16x8xh100", "8xa100-80gb", "4xl40s", "64x8xb200")
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def workload(*, batch: int = 512, sequence: int = 4096) -> Workload:
    return Workload(sequence_length=sequence, global_batch=batch)


def plan_of(host: Host, layout: Layout, *, batch: int = 1, accumulation: int = 4, recomputed: int = 0) -> Plan:
    return Plan(
        device="cuda", host=host.fingerprint, model="feed", sequence_length=4096, precision="bf16",
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, activation_checkpointing=recomputed,
        num_processes=host.num_devices, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_layouts_use_every_device_and_stay_legal(name: str) -> None:
    host, found = describe(name), list(enumerate_layouts(describe(name), PROFILE, workload()))
    assert len(found) == len(set(found)) > 3
    for data, layout in found:
        assert data * layout.ranks_per_replica == host.num_devices
        assert workload().global_batch % data == 0
        assert host.gpus_per_node % layout.tensor_parallel == 0 and PROFILE.tensor_parallel is not None
        assert PROFILE.tensor_parallel.divisor % layout.tensor_parallel == 0
        assert LAYERS % (layout.pipeline_parallel * layout.virtual_stages) == 0
        assert (data * layout.context_parallel) % layout.shard_size == 0
        assert layout.expert_parallel == 1  # it has no experts


def test_experts_are_shared_by_what_divides_them() -> None:
    mixture = PROFILE.model_copy(
        update={
            "experts": Experts(count=8, parameters=PROFILE.parameters.layers // 2, per_token=2),
            "declares": PROFILE.declares.changed(expert_parallel=True),
        }
    )
    degrees = {layout.expert_parallel for _, layout in enumerate_layouts(describe("2x8xh100"), mixture, workload())}
    assert degrees == {1, 2, 4, 8}


def test_a_layout_that_is_not_possible_is_one_clear_error() -> None:
    host = describe("8xh100")
    for text, words in (
        ("tensor_parallel=3", "use one of 1, 2, 4, 8"), ("pipeline_parallel=5", "24 layers"), ("expert_parallel=2", "no experts"),
        ("fully_shard=all", "use one of no, optimizer, gradients, weights"), ("tensor=2", "names no plan field"),
        ("tensor_parallel", "lacks a '='; write field=value"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=words):
            parse_fixed((text,), host, PROFILE, workload())


@pytest.mark.parametrize("gpus", ["2xh100", "2xt4", "8x4090", "2x8xh100@ethernet-25"])
@pytest.mark.parametrize("fixed", [(), ("precision=fp32",), ("precision=tf32",), ("precision=fp16",), ("attention=eager",)])
def test_a_rank_of_gpus_is_traced_in_some_precision_whatever_is_fixed(gpus: str, fixed: tuple[str, ...]) -> None:
    """Without such a trace tensor parallelism is refused, as if one device had been asked for."""
    workload = Workload(sequence_length=128, global_batch=16)
    assert any(variant.divided for variant in variants_for(describe(gpus), workload, fixed))


def test_a_field_is_fixed_once() -> None:
    with pytest.raises(RequestError, match="fixes precision twice, to bf16 and to fp32; give one of them"):
        parse_fixed(("precision=bf16", "optim=adamw_torch", "precision=fp32"), describe("h100"), PROFILE, workload())
    same = parse_fixed(("precision=bf16", "precision=bf16"), describe("h100"), PROFILE, workload())
    assert same == {"precision": "bf16"}


@pytest.mark.parametrize(("host", "words"), [("8xh100", "a multiple of 8, or fewer devices"), ("epyc-9654", "--nproc")])
def test_a_batch_that_ranks_do_not_divide_says_what_to_change(host: str, words: str) -> None:
    whole = PROFILE.changed(tensor_parallel=None, declares=Declares())
    with pytest.raises(RequestError, match=words) as problem:
        parse_fixed(("num_processes=8",), describe(host), whole, workload(batch=3))
    assert ("--nproc" in str(problem.value)) == (host != "8xh100")


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def test_unknown_links_are_said_not_guessed() -> None:
    host = describe("2x8xl40s")
    assert host.inter_node is None
    plan = plan_of(host, Layout(fully_shard="weights", shard_size=16), accumulation=32)
    found = Coster(host, PROFILE, workload()).cost(plan)
    assert isinstance(found, Rejected) and "HOST@LINK" in found.reason
    stated = describe("2x8xl40s@ethernet-100")
    assert isinstance(Coster(stated, PROFILE, workload()).cost(plan), Candidate)


@given(st.sampled_from(OPERATIONS), st.floats(1e3, 1e11), st.sampled_from((2, 4, 8, 16, 64)), st.sampled_from((1, 2, 8)))
def test_exchanging_more_or_over_slower_links_takes_longer(operation: str, size: float, ranks: int, stride: int) -> None:
    host, group = describe("64x8xh100"), Group(ranks, stride, 8)
    seconds = collective_seconds(host, operation, size, group)  # type: ignore[arg-type]
    more = collective_seconds(host, operation, 2 * size, group)  # type: ignore[arg-type]
    assert seconds is not None and more is not None and 0.0 < seconds < more
    slow = host.changed(inter_node=Link(name="slow", bytes_per_second=1e9))
    slower = collective_seconds(slow, operation, size, group)  # type: ignore[arg-type]
    assert slower is not None and slower >= seconds
    assert collective_seconds(host, operation, size, Group(1, stride, 8)) == 0.0  # type: ignore[arg-type]


def test_a_group_knows_its_nodes() -> None:
    assert (Group(8, 1, 8).num_nodes, Group(16, 1, 8).num_nodes, Group(4, 8, 8).num_nodes) == (1, 2, 4)
    assert Group(4, 8, 8).side_by_side == 8 and Group(16, 1, 8).side_by_side == 1 and Group(16, 2, 8).side_by_side == 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_is_divided_goes_with_the_degree(ranks: int) -> None:
    whole = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    half = PROFILE.step(precision="bf16", attention="sdpa", masked=False, tensor_parallel=2)
    assert whole is not None and half is not None
    found = tensor_parallel_trace(whole, half, ranks, sequence_parallel=False, hidden_size=2048)
    layer, one, two = (trace.stacks[0].plain[0].forward for trace in (found, whole, half))
    assert layer.matmul_flops.bs == pytest.approx(one.matmul_flops.bs / ranks)
    fixed = 2 * two.left.bs - one.left.bs  # what each rank has
    assert layer.left.bs == pytest.approx(fixed + (one.left.bs - fixed) / ranks)
    shared = tensor_parallel_trace(whole, half, ranks, sequence_parallel=True, hidden_size=2048)
    assert shared.stacks[0].plain[0].forward.left.bs <= layer.left.bs + 2 * 2 * 2048


@given(st.sampled_from((0, LAYERS // 2, LAYERS)), st.sampled_from((1, 2, 4)))
def test_dividing_more_holds_less(recomputed: int, batch: int) -> None:
    host = describe("8xh100")

    def peak(layout: Layout) -> float:
        plan = plan_of(host, layout, batch=batch, recomputed=recomputed)
        trace = plan_trace(PROFILE, plan, workload())
        assert trace is not None
        return predict_memory(PROFILE, trace, plan).peak

    stages_of_zero = ("no", "optimizer", "weights")
    zero = [peak(Layout(fully_shard=stage, shard_size=8 if stage != "no" else 1)) for stage in stages_of_zero]  # type: ignore[arg-type]
    assert zero[0] > zero[1] > zero[2]
    both = peak(Layout(fully_shard="weights", shard_size=4, tensor_parallel=2))
    assert both < peak(Layout(fully_shard="weights", shard_size=8))
    assert peak(Layout(pipeline_parallel=2)) < zero[0]
    one, gpipe = (
        peak(Layout(pipeline_parallel=4, pipeline_schedule=schedule))  # type: ignore[arg-type]
        for schedule in ("1f1b", "gpipe")
    )
    assert one <= gpipe


def test_stages_have_all_layers_between_them() -> None:
    plan = plan_of(describe("8xh100"), Layout(pipeline_parallel=4))
    first, last = deciding_stages(PROFILE, plan)
    assert (first.first, first.last, last.first, last.last) == (0, 6, 18, 24)
    assert first.has_embedding and last.has_head and not first.has_head and not last.has_embedding
    held = [share_of(PROFILE, plan, stage).weights for stage in (first, last)]
    whole = share_of(
        PROFILE, plan_of(describe("1xh100"), Layout()), deciding_stages(PROFILE, plan_of(describe("1xh100"), Layout()))[0]
    )
    assert sum(held) < whole.weights < 2.5 * sum(held)


@pytest.mark.parametrize("name", ["4xh100"])
def test_search_is_deterministic_and_keeps_reasons(name: str) -> None:
    first, second = (search(describe(name), PROFILE, workload(batch=16), fixed={}) for _ in range(2))
    assert [c.plan for c in first.candidates] == [c.plan for c in second.candidates]
    assert first.candidates and first.rejected and all(entry.reason for entry in first.rejected)
    speeds = [candidate.tokens_per_second for candidate in first.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert all(candidate.plan.global_batch == 16 for candidate in first.candidates[:100])


def test_what_a_search_remembers_is_what_each_plan_alone_costs() -> None:
    """Plans of every way to share: what they have in common is computed once, for the first of them."""
    host, asked = describe("8xh100"), workload(batch=8)
    plans = [plan for plan in PlanSpace(host, PROFILE, asked).all() if plan.optim == "adamw_torch_fused"][::23]
    together = Coster(host, PROFILE, asked)
    assert len({plan.layout for plan in plans}) > 40
    for plan in plans:
        assert together.cost(plan) == Coster(host, PROFILE, asked).cost(plan)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor=2", "names no plan field"), ("precision=fp4", "use one of fp32"), ("precision=fp8", "add --allow fp8"),
        ("per_device_train_batch_size=3", "does not divide the global batch"), ("optim=muon", "add --allow muon"),
        ("optimizer_in_backward=true", "--max-grad-norm 0"), ("optim_args=speed=2", "speed"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_refused_before_a_model_is_traced(text: str, words: str) -> None:
    nothing_to_trace = ModelSource(reference="none", directory=None, config={})
    with pytest.raises(RequestError, match=words):
        plan_training(nothing_to_trace, describe("2x8xh100"), workload(batch=64), fixed=(text,), described=True)


def test_a_fixed_degree_is_kept() -> None:
    host = describe("8xh100")
    fixed = parse_fixed(("tensor_parallel=4", "fully_shard=weights"), host, PROFILE, workload(batch=64))
    found = search(host, PROFILE, workload(batch=64), fixed=fixed)
    assert found.candidates
    assert {(c.plan.layout.tensor_parallel, c.plan.layout.fully_shard) for c in found.candidates} == {(4, "weights")}
