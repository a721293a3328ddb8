"""Find out which of the ranked plans a model can run. Its modules are checked, without weights, before a trial or a run
starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from upshift.errors import RequestError
from upshift.models.adapter import complete_model
from upshift.models.build import build_model, choose_class
from upshift.models.source import ModelSource
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate, Rejected
from upshift.training.parallel.refusals import cannot_run
from upshift.training.parallel.rehearsal import Rehearsals


def runnable(planning: Planning, source: ModelSource) -> Planning:
    """Return the planning with the plans that cannot run among the rejected.

    Raise RequestError if no plan can run, with the reason of the best.
    """
    ranking = planning.ranking
    if all(candidate.plan.layout == ALONE for candidate in ranking.candidates):
        return planning
    config = source.hf_config
    with torch.device("meta"):
        empty = build_model(config, choose_class(config, source.reference)[0], dtype=torch.float32)
        model = complete_model(empty, source)
    rehearsals = Rehearsals(source)
    return keep_runnable(planning, lambda plan: cannot_run(plan, model) or rehearsals.reason_not(plan))


def keep_runnable(planning: Planning, reason_not: Callable[[Plan], str | None]) -> Planning:
    """Return the planning as ``runnable`` does, by ``reason_not``, which returns why a plan cannot run, or None."""
    ranking = planning.ranking
    reasons: dict[tuple[object, ...], str | None] = {}

    def reason(plan: Plan) -> str | None:
        key = (plan.num_processes, plan.layout, plan.torch_compile, plan.attention, plan.optim, plan.optimizer_in_backward)
        if key not in reasons:
            reasons[key] = reason_not(plan)
        return reasons[key]

    kept: list[Candidate] = []
    rejected: list[Rejected] = []
    for candidate in ranking.candidates:
        problem = reason(candidate.plan)
        if problem is None:
            kept.append(candidate)
        else:
            rejected.append(Rejected(candidate.plan, problem))
    if not kept:
        raise RequestError(f"no plan for {planning.host.name} can run: {rejected[0].reason}")
    return replace(planning, ranking=replace(ranking, candidates=kept, rejected=[*rejected, *ranking.rejected]))
