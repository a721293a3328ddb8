"""A planning of a model that does not exist, made without torch."""

from __future__ import annotations

from made_profile import make_profile

from upshift.hardware import describe
from upshift.models.profile import Objective
from upshift.planning.plan import plain_default
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.search import search
from upshift.planning.workload import RowsTogether, Workload

LENGTH = 2048


def made_up_planning(
    *, on: str = "8xa100-40gb", global_batch: int = 32, architecture: str = "MadeUpForCausalLM",
    objective: Objective = "causal-lm", rows_together: RowsTogether = 1,
) -> Planning:  # fmt: skip
    host = describe(on)
    profile = make_profile(max_positions=4 * LENGTH, longest=LENGTH).changed(architecture=architecture, objective=objective)
    workload = Workload(sequence_length=LENGTH, global_batch=global_batch, rows_together=rows_together)
    default = cost_plan(plain_default(host, profile, workload), host=host, profile=profile, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, profile, workload, search(host, profile, workload, fixed={}), default)
