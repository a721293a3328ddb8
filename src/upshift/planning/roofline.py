"""Predict a plan's step by kind of work, at the rates that this host reaches: the roofline that a profile is compared with.

The formulas alone make it: what runs here have taught the planner is in the measured side.
"""

from __future__ import annotations

from collections import defaultdict

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.rates import host_link, rates_for
from upshift.planning.cost.segments import trace_for
from upshift.planning.cost.time import full_micro_batches, micro_batch_terms
from upshift.planning.plan import Plan
from upshift.planning.rank import Candidate
from upshift.planning.workload import Workload

KINDS = (
    "matrix products", "attention", "norms and elementwise", "head and loss", "communication", "optimizer", "data",
    "idle and dispatch",
)  # fmt: skip
PRODUCTS, ATTENTION, ELEMENTWISE, HEAD, COMMUNICATION, OPTIMIZER, DATA, IDLE = KINDS
OF_TERM = {
    "matrix products": PRODUCTS, "attention": ATTENTION, "memory traffic": ELEMENTWISE, "page faults": ELEMENTWISE,
    "dispatch": IDLE, "pipeline idle": IDLE, "update": OPTIMIZER,
}  # fmt: skip


def by_kind(terms: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the planner's terms by kind. Terms that are not named are exchanges. The head is among the products.
    """
    found: dict[str, float] = defaultdict(float)
    for term, seconds in terms.items():
        found[OF_TERM.get(term, COMMUNICATION)] += seconds
    return dict(found)


def head_seconds(host: Host, profile: ModelProfile, workload: Workload, plan: Plan) -> dict[str, float]:
    """Return the seconds of a step in the loss head's products and elementwise work, by kind.

    Return an empty dictionary if the head is on one pipeline stage of several.
    """
    trace, rates = trace_for(profile, plan, workload), rates_for(host, profile, plan)
    if trace is None or rates is None or plan.layout.pipeline_parallel > 1:
        return {}
    of_one = micro_batch_terms(profile, trace, plan, rates, link=host_link(host), head_alone=True)
    count = full_micro_batches(plan, workload)
    found = by_kind({term: count * seconds for term, seconds in of_one.items() if term != "dispatch"})
    return {kind: seconds for kind, seconds in found.items() if kind in (PRODUCTS, ATTENTION, ELEMENTWISE) and seconds > 0}


def roofline(candidate: Candidate, *, host: Host, profile: ModelProfile, workload: Workload) -> dict[str, float]:
    """Return the seconds of a step by kind. ``candidate``: as the formulas predict it."""
    found = by_kind(candidate.time.terms)
    head = head_seconds(host, profile, workload, candidate.plan)
    for kind, seconds in head.items():
        found[kind] = max(found.get(kind, 0.0) - seconds, 0.0)
    return found | ({HEAD: sum(head.values())} if head else {})
