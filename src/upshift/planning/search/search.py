"""Find the best plans of a space. On one device the whole space is searched.

On many devices layouts, micro-batches and recomputation are searched together, since they decide together what fits. In this
first round all plans have the same values of every other choice. If nothing fits with them, the round is repeated with those
that need least memory. The other choices are searched afterwards, around the best plans.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import divides_evenly, sharing_facts
from upshift.planning.search.enumerate import PlanSpace, Sharing, enumerate_plans
from upshift.planning.search.layouts import shares_work
from upshift.planning.search.ranking import Coster, Ranking, Rejected, rank_plans
from upshift.planning.search.simplicity import simplest_first
from upshift.planning.search.space import choices
from upshift.planning.workload import Workload

Chains = list[list[dict[str, Any]]]
NUM_BEST_LAYOUTS = 24  # the fastest of the first round, around which every other choice is searched
SEARCHED_TOGETHER = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "recompute_granularity",
)


def search(host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any]) -> Ranking:
    """Return the ranking of the plans that have the ``fixed`` fields. Raise RequestError where no plan is legal."""
    with _without_garbage_collection():
        return _search(host, profile, workload, fixed)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off garbage collection for the search.

    Plans and their costs stay and are in no cycles. Looking for garbage among them took a fifth of the search.
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
        plans = enumerate_plans(host, profile, workload, fixed=fixed)
        return rank_plans(plans, host=host, profile=profile, workload=workload)
    coster = Coster(host, profile, workload)
    ranking = Ranking()
    first_values = _first_round_values(choices(host, profile, workload))
    _search_layouts(PlanSpace(host, profile, workload, fixed=fixed, only=first_values), coster, ranking)
    ranking.sort(coster)
    if ranking.too_big and not ranking.candidates:
        lean_values = _leanest_values(ranking.too_big[0].plan, first_values, coster, fixed)
        if lean_values is not None:
            _search_layouts(PlanSpace(host, profile, workload, fixed=fixed, only=lean_values), coster, ranking)
            ranking.sort(coster)
    costed = {candidate.plan for candidate in (*ranking.candidates, *ranking.too_big)}
    for best in _best_layouts(ranking, host):
        for plan in _plans_around(best, coster, fixed):
            if plan not in costed:
                ranking.add(plan, coster)
    ranking.sort(coster)
    return ranking


def _plans_around(plan: Plan, coster: Coster, fixed: dict[str, Any]) -> Iterator[Plan]:
    """Yield the plans with the same layout, micro-batch and recomputation, and every value of the other choices."""
    together = {name: getattr(plan, name) for name in SEARCHED_TOGETHER}
    sharing = Sharing(plan.num_processes, plan.data_parallel, plan.layout)
    space = PlanSpace(coster.host, coster.profile, coster.workload, fixed={**together, **fixed}, sharings=[sharing])
    return space.all()


def _leanest_values(
    smallest: Plan, first_values: dict[str, list[Any]], coster: Coster, fixed: dict[str, Any]
) -> dict[str, list[Any]] | None:
    """Return the values of the first round's choices with which a plan needs least memory, where the first values fit nowhere.

    Return None where no other values need less. ``smallest``: the smallest plan of the first round.
    """
    sizes = [(coster.estimate_memory(plan), plan) for plan in _plans_around(smallest, coster, fixed)]
    computed = [(size.resident, plan) for size, plan in sizes if not isinstance(size, Rejected)]
    _, leanest = min(computed, key=lambda entry: entry[0])
    if all(getattr(leanest, name) == getattr(smallest, name) for name in first_values):
        return None
    return {name: [getattr(leanest, name)] for name in first_values}


def _first_round_values(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the values of the first round: the cheapest that change nothing, compiled by layer where that is possible."""
    precision = next((name for name in ("bf16", "fp16") if name in values["precision"]), values["precision"][0])
    return {
        "precision": [precision],
        "torch_compile": [mode for mode in ("off", "layer") if mode in values["torch_compile"]],
        "optim": values["optim"][:1],
        "optimizer_in_backward": [False],
        "loss_chunk_tokens": values["loss_chunk_tokens"][-1:],
        "packing": values["packing"][-1:],
    }


def _best_layouts(ranking: Ranking, host: Host) -> list[Plan]:
    """Return the best plan of the first round for each way to share the job, to batch it and to recompute, best first.

    The simplest plan that cannot be told from the fastest is among them.
    """
    plans: dict[tuple[Any, ...], Plan] = {}
    for candidate in simplest_first(ranking, host).candidates or ranking.too_big:
        plan = candidate.plan
        key = (plan.num_processes, plan.layout, *(getattr(plan, name) for name in SEARCHED_TOGETHER))
        plans.setdefault(key, plan)
        if len(plans) == NUM_BEST_LAYOUTS:
            break
    return list(plans.values())


def _search_layouts(plans: PlanSpace, coster: Coster, ranking: Ranking) -> None:
    """Add the plans of every layout to the ranking, with the same other choices. Raise RequestError where no plan is legal.

    Memory grows with the micro-batch, and with every layer that is not recomputed. So after a plan that is far too big there
    are only larger ones. They are counted, and their costs are not predicted.
    """
    chains_by_facts: dict[Hashable, Chains] = {}
    for sharing in plans.sharings:
        sequences_per_rank = plans.workload.global_batch // sharing.data
        is_too_big = False
        for size in plans.micro_batches(sharing):
            if not divides_evenly(sharing.layout, sequences_per_rank // size):
                continue
            start = plans.start(sharing, size)
            facts = sharing_facts(start)
            if facts not in chains_by_facts:
                chains_by_facts[facts] = _chains(plans, sharing, size)
            chains = chains_by_facts[facts]
            is_alone = size == sequences_per_rank  # a single micro-batch meets no gradients of earlier ones, and may be smaller
            if is_too_big and not is_alone:
                ranking.num_unseen += sum(map(len, chains))
            elif chains:
                is_too_big = not _add_leanest_first(start, chains, coster, ranking)
    if not any(chains_by_facts.values()):
        next(plans.all(), None)  # raises the reason why none is legal


def _chains(plans: PlanSpace, sharing: Sharing, size: int) -> Chains:
    """Return the other choices in chains. In each chain the number of recomputed layers falls.

    The micro-batch and the layout decide by their ``sharing_facts`` alone which of these choices are legal. If plans differ only
    in what is compiled, take the last one, which needs the least memory.
    """
    legal = [plan for plan in plans.of(sharing, size) if isinstance(plan, Plan)]
    distinct = {(_memory_kind(plan), -plan.activation_checkpointing): plan for plan in legal}
    ordered = [distinct[key] for key in sorted(distinct)]
    names = plans.combinations[0].keys()
    return [[{name: getattr(plan, name) for name in names} for plan in chain] for _, chain in groupby(ordered, key=_memory_kind)]


def _add_leanest_first(start: Plan, chains: Chains, coster: Coster, ranking: Ranking) -> bool:
    """Add the plans of one layout and micro-batch to the ranking. Return whether any of them is not far too big."""
    any_near = False
    for chain in chains:
        for number, combination in enumerate(chain):
            if not ranking.add(start.model_copy(update=combination), coster):
                ranking.num_unseen += len(chain) - number - 1
                break
            any_near = True
    return any_near


def _memory_kind(plan: Plan) -> tuple[str, str, int, bool]:
    """Return the kind of a plan. Plans of one kind, layout and micro-batch differ in memory only by their recomputed layers."""
    granularity = plan.recompute_granularity if plan.activation_checkpointing > 0 else "full"
    return plan.attention, granularity, plan.loss_chunk_tokens, plan.packing
