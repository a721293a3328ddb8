"""The search for layouts against every plan, one by one: it leaves out none that fits, and offers none that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from made_requests import measured_cpus, model_of

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.process_memory import memory_limit
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.enumerate import PlanSpace
from upshift.planning.search.layouts import enumerate_layouts
from upshift.planning.search.ranking import Coster, Ranking, Rejected
from upshift.planning.search.search import _first_round_values, _search_layouts, search
from upshift.planning.search.space import choices, parse_fixed, settable_fields
from upshift.planning.workload import Workload
from upshift.units import GIB

WORKLOAD = Workload(sequence_length=1024, global_batch=8)


def profile_of(kind: str) -> ModelProfile:
    """Return a made profile. router: the loss is taken over the batch; drop: layers are left out at random."""
    if kind == "router":
        mixture = model_of("mixture", "causal-lm", longest=4096)
        return mixture.changed(isolation=mixture.isolation.changed(loss_splits=False))
    if kind == "drop":
        full = model_of("full", "causal-lm", longest=4096)
        return full.changed(isolation=full.isolation.changed(drops_layers=True))
    if kind == "adapted mixture":
        mixture = model_of("mixture", "causal-lm", longest=4096)
        return model_of("lora", "causal-lm", longest=4096).changed(experts=mixture.experts, declares=mixture.declares)
    return model_of(kind, "causal-lm", longest=4096)


def host_of(name: str, gib: float) -> Host:
    host = describe(name)
    assert host.gpu is not None
    return host.changed(gpu=host.gpu.changed(memory_bytes=int(gib * GIB), free_memory_bytes=None))


def fits(plan: Plan, coster: Coster) -> bool:
    limit = memory_limit(plan, coster.host, risk=coster.workload.risk)
    estimate = coster.estimate_memory(plan)
    return not isinstance(estimate, Rejected) and (limit is None or estimate.resident <= limit)


def kind_of(plan: Plan) -> tuple[Any, ...]:
    granularity = plan.recompute_granularity if plan.activation_checkpointing else "full"
    batch = (plan.per_device_train_batch_size, plan.gradient_accumulation_steps)
    return plan.layout, *batch, plan.activation_checkpointing, granularity, plan.attention


@pytest.mark.parametrize("kind", ["full", "mixture", "router", "drop", "lora", "qlora"])
@pytest.mark.parametrize(("name", "gib"), [("4xh100", 80.0), ("4xh100", 24.0), ("2x2xh100", 12.0)])
def test_the_first_round_leaves_out_no_plan_that_fits(kind: str, name: str, gib: float) -> None:
    profile = profile_of(kind)
    host = host_of(name, gib)
    values = _first_round_values(choices(host, profile, WORKLOAD))
    space = PlanSpace(host, profile, WORKLOAD, only=values)
    coster = Coster(host, profile, WORKLOAD)
    ranking = Ranking()
    if kind == "router" and host.num_nodes > 1:  # each node would have a part of the batch: no plan is legal
        for find in (lambda: _search_layouts(space, coster, ranking), lambda: list(space.all())):
            with pytest.raises(RequestError, match="output_router_logits"):
                find()
        return
    _search_layouts(space, coster, ranking)
    ranked = {kind_of(candidate.plan) for candidate in ranking.candidates}
    compiled = values["torch_compile"][-1]
    plans = list(space.all())
    expected = {kind_of(plan) for plan in plans if plan.torch_compile in (compiled, "off") and fits(plan, coster)}
    legal = {kind_of(plan) for plan in plans}
    assert ranked <= legal
    assert {entry for entry in expected if entry not in ranked} == set()
    assert ranked or gib < 80


def test_a_loss_over_the_whole_batch_is_planned_on_ranks_that_share_it() -> None:
    """A router's loss (output_router_logits): one micro-batch, which tensor-parallel ranks share."""
    found = search(describe("4xh100"), profile_of("router"), WORKLOAD, fixed={})
    assert found.candidates
    for candidate in found.candidates:
        plan = candidate.plan
        assert (plan.data_parallel, plan.gradient_accumulation_steps) == (1, 1)
        assert plan.layout.tensor_parallel == 4
    for text in ("pipeline_parallel=2", "context_parallel=2"):
        with pytest.raises(RequestError, match="output_router_logits"):
            parse_fixed((text,), describe("4xh100"), profile_of("router"), WORKLOAD)
    with pytest.raises(RequestError, match="output_router_logits"):
        search(describe("2x2xh100"), profile_of("router"), WORKLOAD, fixed={})  # each node would have a part of the batch


def test_where_the_first_values_fit_nowhere_every_layout_is_tried_with_leaner_ones() -> None:
    """With fp32 weights no layout fits. With bf16 weights several do, and the fastest is not the smallest."""
    workload = WORKLOAD.changed(global_batch=4, allow=("bf16-weights",))
    profile = profile_of("full")
    host = host_of("4xh100", 7.0)
    coster = Coster(host, profile, workload)
    values: dict[str, list[Any]] = {"attention": ["sdpa"], "torch_compile": ["layer"], "optim": ["adamw_torch_fused"]}

    def speeds(precision: str) -> list[float]:
        plans = PlanSpace(host, profile, workload, only=values | {"precision": [precision]}).all()
        costs = [coster.cost(plan) for plan in plans if fits(plan, coster)]
        return [cost.tokens_per_second for cost in costs if not isinstance(cost, Rejected)]

    found = search(host, profile, workload, fixed={})
    assert speeds("bf16") == []
    assert found.candidates[0].tokens_per_second >= max(speeds("bf16-weights")) * 0.999
    assert len({candidate.plan.layout for candidate in found.candidates}) > 5


def test_where_the_smallest_plan_fits_it_is_found() -> None:
    """Among all layouts and all other choices. The first values may fit nowhere, and the leanest with another layout only."""
    workload = WORKLOAD.changed(global_batch=2, allow=("bf16-weights",), clips_gradients=False)
    profile = profile_of("full")
    host = describe("2x2xh100")
    coster = Coster(host, profile, workload)
    smallest: tuple[float, Plan] | None = None
    for plan in PlanSpace(host, profile, workload).all():
        estimate = coster.estimate_memory(plan)
        if not isinstance(estimate, Rejected) and (smallest is None or estimate.resident < smallest[0]):
            smallest = estimate.resident, plan
    assert smallest is not None
    for spare in (1.01, 0.99):
        gib = next(
            size / 64 for size in range(64, 5120)
            if (memory_limit(smallest[1], host_of("2x2xh100", size / 64), risk=workload.risk) or 0.0) >= spare * smallest[0]
        )  # fmt: skip
        found = search(host_of("2x2xh100", gib), profile, workload, fixed={})
        assert bool(found.candidates) == (spare > 1.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("4xh100", kind) for kind in ("full", "mixture", "router", "drop", "lora", "qlora", "adapted mixture")),
        ("2x2xh100", "mixture"), ("2x2xh100", "adapted mixture"), ("cpu", "mixture"),
    ],
)  # fmt: skip
def test_each_plan_that_is_offered_may_be_asked_for_and_costs_the_same(name: str, kind: str) -> None:
    host = measured_cpus() if name == "cpu" else describe(name)
    profile = profile_of(kind)
    found = search(host, profile, WORKLOAD.changed(allow=("muon", "8bit-optimizer")), fixed={})
    assert found.candidates
    layouts: dict[Layout, Any] = {}
    for candidate in found.candidates:
        layouts.setdefault(candidate.plan.layout, candidate)
    for candidate in list(layouts.values())[:2]:
        texts = texts_of(candidate.plan)
        workload = WORKLOAD.changed(allow=("muon", "8bit-optimizer"))
        again = search(host, profile, workload, fixed=parse_fixed(texts, host, profile, workload))
        assert [entry.plan for entry in again.candidates] == [candidate.plan]
        assert again.candidates[0].time.total == pytest.approx(candidate.time.total)
        assert again.candidates[0].memory.peak == pytest.approx(candidate.memory.peak)


def texts_of(plan: Plan) -> tuple[str, ...]:
    values = {name: getattr(plan, name, getattr(plan.layout, name, None)) for name in settable_fields()}
    return tuple(f"{name}={value}" for name, value in values.items() if value not in ("", None))


def test_experts_beside_an_adapter_are_not_shared() -> None:
    """No engine runs it. What cannot be shared is refused by name."""
    host = describe("4xh100")
    adapted = profile_of("adapted mixture")
    assert {layout.expert_parallel for _, layout in enumerate_layouts(host, adapted, WORKLOAD)} == {1}
    with pytest.raises(RequestError, match="expert_parallel=2 is not possible .* adapter"):
        parse_fixed(("expert_parallel=2",), host, adapted, WORKLOAD)
    with pytest.raises(RequestError, match="fully_shard=weights is not possible .* 4 bits"):
        parse_fixed(("fully_shard=weights",), host, profile_of("qlora"), WORKLOAD)


def test_experts_are_divided_by_both_degrees() -> None:
    mixture = profile_of("mixture")
    layouts = [layout for _, layout in enumerate_layouts(describe("2x8xh100"), mixture, WORKLOAD.changed(global_batch=64))]
    shared = {(layout.expert_parallel, layout.tensor_parallel) for layout in layouts if layout.expert_parallel > 1}
    assert mixture.experts is not None and {(2, 4), (4, 2), (8, 1)} <= shared
    assert all(mixture.experts.count % (experts * tensor) == 0 for experts, tensor in shared)


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_are_planned_where_nothing_is_divided(optim: str) -> None:
    workload = WORKLOAD.changed(allow=(optim,))
    profile = profile_of("full")
    found = search(describe("4xh100"), profile, workload, fixed={"optim": optim})
    assert found.candidates
    for candidate in found.candidates:
        layout = candidate.plan.layout
        assert (layout.fully_shard, layout.tensor_parallel, layout.expert_parallel) == ("no", 1, 1)
    with pytest.raises(RequestError, match="looks at whole matrices"):
        search(describe("4xh100"), profile, workload, fixed={"optim": optim, "fully_shard": "weights"})
