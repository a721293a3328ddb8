"""Finds the best plans of a space: all of it on one device; on many, first how the ranks share the job, then the rest.

On many devices layouts, micro-batches and recomputation are searched together, since they decide together what fits; every
other choice is made alike for all of them first, and searched around the best of them afterwards.
"""

from __future__ import annotations

from typing import Any

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.plan import Plan
from upshift.planning.rank import Coster, Ranking, rank_plans
from upshift.planning.space import choices, enumerate_plans
from upshift.planning.workload import Workload

KEPT_LAYOUTS = 24  # the fastest of the first round, around which every other choice is searched
SEARCHED_TOGETHER = ("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing")


def search(host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any]) -> Ranking:
    if host.device == "cpu" or host.num_devices == 1:
        return rank_plans(enumerate_plans(host, profile, workload, fixed=fixed), host=host, profile=profile, workload=workload)
    coster, ranking = Coster(host, profile, workload), Ranking()
    alike = _alike(choices(host, profile, workload))
    for plan in enumerate_plans(host, profile, workload, fixed=fixed, only=alike):
        ranking.add(plan, coster)
    ranking.sort(coster)
    known = {_key(plan) for plan in _seen(ranking)}
    for best in (ranking.candidates or ranking.too_big)[:KEPT_LAYOUTS]:
        kept = {name: getattr(best.plan, name) for name in SEARCHED_TOGETHER} | best.plan.layout.model_dump()
        for plan in enumerate_plans(host, profile, workload, fixed={**kept, **fixed}):
            if _key(plan) not in known:
                known.add(_key(plan))
                ranking.add(plan, coster)
    ranking.sort(coster)
    return ranking


def _alike(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """For the first round: the cheapest that changes nothing, compiled by layer or not at all."""
    precision = next((name for name in ("bf16", "fp16") if name in values["precision"]), values["precision"][0])
    return {
        "precision": [precision],
        "torch_compile": [way for way in ("off", "layer") if way in values["torch_compile"]],
        "optim": values["optim"][:1],
        "optimizer_in_backward": [False],
        "loss_chunk_tokens": values["loss_chunk_tokens"][-1:],
        "packing": values["packing"][-1:],
    }


def _seen(ranking: Ranking) -> list[Plan]:
    return [candidate.plan for candidate in (*ranking.candidates, *ranking.too_big)]


def _key(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in Plan.model_fields)
