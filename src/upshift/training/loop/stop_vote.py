"""Let all ranks of a run agree before each step on whether to stop, and why."""

from __future__ import annotations

from upshift.planning.plan import Plan
from upshift.training.distributed.host_copy import LateMax
from upshift.training.distributed.mesh import all_reduce_max
from upshift.training.elastic.replica import ReplicaGroup
from upshift.training.loop.events import EARLY_STOPPING

# Why to stop before max_steps; the later one wins.
REASONS = ("", "tokens", "seconds", EARLY_STOPPING, "interrupted", "not saved")


class StopVote:
    """Collect the reasons of all ranks. Several GPUs learn of the reason of one rank a step late, and so never wait for it."""

    def __init__(self, plan: Plan, copies: ReplicaGroup | None) -> None:
        self._plan = plan
        self._copies = copies
        self._late_max = LateMax(plan) if plan.device == "cuda" and plan.num_processes > 1 and copies is None else None

    def agree(self, *, shared: str, own: str) -> str:
        """Return the reason to stop, or an empty text. All ranks call it, and get the same.

        ``shared`` is a reason that all ranks have, and ``own`` one that perhaps only this rank has.
        """
        shared_number = REASONS.index(shared)
        own_number = REASONS.index(own)
        if self._late_max is not None:
            return REASONS[max(shared_number, self._late_max.exchange(own_number))]
        number = max(shared_number, own_number)
        return REASONS[all_reduce_max(number, self._plan) if self._copies is None else self._copies.agreed_max(number)]
