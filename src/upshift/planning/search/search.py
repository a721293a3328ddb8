"""Find the best plans of a space. On one device the whole space is searched.

On many devices layouts, micro-batches and recomputation are searched together, since they decide together what fits. Every other
choice is the same for all of them at first, and is searched around the best of them afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import divides_evenly
from upshift.planning.search.enumerate import Plans, Sharing, enumerate_plans
from upshift.planning.search.layouts import shares_work
from upshift.planning.search.ranking import Coster, Ranking, rank_plans
from upshift.planning.search.space import choices
from upshift.planning.workload import Workload

Chains = list[list[dict[str, Any]]]
KEPT_LAYOUTS = 24  # the fastest of the first round, around which every other choice is searched
SEARCHED_TOGETHER = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "recompute_granularity",
)  # fmt: skip


def search(host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any]) -> Ranking:
    with _uncollected():
        return _search(host, profile, workload, fixed)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off garbage collection for the search.

    Plans and their costs live on and are in no cycles: looking for garbage among them took a fifth of the search.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _search(host: Host, profile: ModelProfile, workload: Workload, fixed: dict[str, Any]) -> Ranking:
    if not shares_work(host, fixed):
        return rank_plans(enumerate_plans(host, profile, workload, fixed=fixed), host=host, profile=profile, workload=workload)
    coster = Coster(host, profile, workload)
    ranking = Ranking()
    alike = _alike(choices(host, profile, workload))
    _search_layouts(Plans(host, profile, workload, fixed=fixed, only=alike), coster, ranking)
    ranking.sort(coster)
    for best in _distinct(ranking):
        kept = {name: getattr(best, name) for name in SEARCHED_TOGETHER}
        sharing = Sharing(best.num_processes, best.data_parallel, best.layout)
        for plan in Plans(host, profile, workload, fixed={**kept, **fixed}, sharings=[sharing]).all():
            if plan != best:
                ranking.add(plan, coster)
    ranking.sort(coster)
    return ranking


def _alike(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the values of the first round: the cheapest that change nothing, compiled by layer where that is possible."""
    precision = next((name for name in ("bf16", "fp16") if name in values["precision"]), values["precision"][0])
    return {
        "precision": [precision],
        "torch_compile": [way for way in ("off", "layer") if way in values["torch_compile"]],
        "optim": values["optim"][:1],
        "optimizer_in_backward": [False],
        "loss_chunk_tokens": values["loss_chunk_tokens"][-1:],
        "packing": values["packing"][-1:],
    }


def _distinct(ranking: Ranking) -> list[Plan]:
    """Return the best plans of the first round, each way to share and recompute once."""
    found: dict[tuple[Any, ...], Plan] = {}
    for candidate in ranking.candidates or ranking.too_big:
        plan = candidate.plan
        found.setdefault((plan.num_processes, plan.layout, *(getattr(plan, name) for name in SEARCHED_TOGETHER)), plan)
        if len(found) == KEPT_LAYOUTS:
            break
    return list(found.values())


def _search_layouts(plans: Plans, coster: Coster, ranking: Ranking) -> None:
    """Cost the plans of every layout, with the other choices alike. Raises RequestError where no plan is legal.

    Memory grows with the micro-batch, and with every layer that is not recomputed. So behind a plan that is far too big there
    are only larger ones, which are counted and not costed.
    """
    known: dict[bool, Chains] = {}
    for sharing in plans.sharings:
        each = plans.workload.global_batch // sharing.data
        sizes = [size for size in plans.micro_batches(sharing) if divides_evenly(sharing.layout, each // size)]
        for number, size in enumerate(sizes):
            if sharing.layout.splits_backward not in known:
                known[sharing.layout.splits_backward] = _chains(plans, sharing, size)
            chains = known[sharing.layout.splits_backward]
            if not chains:
                break
            if not _add_leanest_first(plans.start(sharing, size), chains, coster, ranking):
                ranking.unseen += sum(map(len, chains)) * (len(sizes) - number - 1)
                break
    if not any(known.values()):
        next(plans.all(), None)  # raises the reason why none is legal


def _chains(plans: Plans, sharing: Sharing, size: int) -> Chains:
    """Return the other choices in chains. In each chain the number of recomputed layers falls.

    None of these choices decides with another micro-batch or another layout what is legal, except whether the layout splits
    backward passes. Of those that differ only in what is compiled, the last is taken: it holds least.
    """
    legal = [plan for plan in plans.of(sharing, size) if isinstance(plan, Plan)]
    distinct = {(_kind(plan), -plan.activation_checkpointing): plan for plan in legal}
    ordered = [distinct[key] for key in sorted(distinct)]
    names = plans.combinations[0].keys()
    return [[{name: getattr(plan, name) for name in names} for plan in same] for _, same in groupby(ordered, key=_kind)]


def _add_leanest_first(start: Plan, chains: Chains, coster: Coster, ranking: Ranking) -> bool:
    """Add the plans of one layout and micro-batch to the ranking. Return whether any of them is not far too big."""
    any_near = False
    for chain in chains:
        for number, combination in enumerate(chain):
            if not ranking.add(start.model_copy(update=combination), coster):
                ranking.unseen += len(chain) - number - 1
                break
            any_near = True
    return any_near


def _kind(plan: Plan) -> tuple[str, str, int, bool]:
    """Return the kind of a plan: plans of one kind, layout and micro-batch differ in memory by how many layers are recomputed."""
    way = plan.recompute_granularity if plan.activation_checkpointing > 0 else "full"
    return plan.attention, way, plan.loss_chunk_tokens, plan.packing
