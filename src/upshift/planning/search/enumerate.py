"""Enumerate every legal plan for one host, model and workload that has the fields the user fixed.

Plans are ordered by the way that ranks share the job, then by micro-batch, then by every other choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.layout import Layout, divisors
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.constraints import (
    PACKED_KERNELS,
    conflict,
    conflict_with_pairs,
    is_redundant,
    layout_conflict_with_pairs,
    why_not_isolated,
)
from upshift.planning.search.layouts import enumerate_layouts, rank_counts, shares_work
from upshift.planning.search.space import FIXED_IN_SEARCH, choices
from upshift.planning.workload import PAIR_OBJECTIVES, Workload

KEEPS_REDUNDANT = {"optim", "recompute_granularity"}  # redundant plans are kept if the user set one of these fields
OBJECTIVES_OF_PAIRS = ("causal-lm", "sequence-classification")  # of DPO, and of reward models


@dataclass(frozen=True)
class Sharing:
    """A way to share the job: the number of ranks, the number of data-parallel ranks, and the layout."""

    ranks: int
    data: int
    layout: Layout


class PlanSpace:
    """All legal plans for one host, model and workload.

    Args:
        fixed: the fields that the user set.
        only: the values of other choices to enumerate.
        sharings: the ways to share the job; None: all that are legal.
    """

    def __init__(
        self,
        host: Host,
        profile: ModelProfile,
        workload: Workload,
        *,
        fixed: dict[str, Any] | None = None,
        only: dict[str, list[Any]] | None = None,
        sharings: list[Sharing] | None = None,
    ) -> None:
        self.host = host
        self.profile = profile
        self.workload = workload
        self.fixed = fixed or {}
        if workload.rows_together > 1 and profile.objective not in OBJECTIVES_OF_PAIRS:
            raise RequestError(
                f"{PAIR_OBJECTIVES} is for causal language models, and {profile.architecture} is of the "
                f"kind {profile.objective}; use another model"
            )
        if workload.rows_together > 1 and profile.isolation.padding == "none":
            raise RequestError(
                f"{PAIR_OBJECTIVES} pads two answers to one length, and padding changes the results of {profile.architecture}; "
                "use another model"
            )
        values = choices(host, profile, workload) | (only or {})
        values |= {name: [self.fixed[name]] for name in values if name in self.fixed}
        self._counts = values.pop("num_processes")
        combinations = (dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values()))
        self.combinations = [workload.runs_in.complete(combination, self.fixed) for combination in combinations]
        if sharings is None:
            sharings = self._legal_sharings()
            self._check_batch_factors(sharings)
        self.sharings = sharings

    def _check_batch_factors(self, sharings: list[Sharing]) -> None:
        """Raise RequestError if the fixed micro-batch and accumulation steps make the global batch with no number of ranks."""
        if not {"per_device_train_batch_size", "gradient_accumulation_steps"} <= self.fixed.keys() or not sharings:
            return
        if not any(self.micro_batches(sharing) for sharing in sharings):
            micro_batch = self.fixed["per_device_train_batch_size"]
            steps = self.fixed["gradient_accumulation_steps"]
            ranks = ", ".join(map(str, sorted({sharing.data for sharing in sharings})))
            raise RequestError(
                f"per_device_train_batch_size={micro_batch} x gradient_accumulation_steps={steps} are not the global batch of "
                f"{self.workload.global_batch} with {ranks} data-parallel ranks; leave one of them out"
            )

    def _legal_sharings(self) -> list[Sharing]:
        batch = self.workload.num_units
        if not shares_work(self.host, self.fixed):  # each rank has its own sequences
            layout = self.workload.runs_in.layout_of(ALONE)
            return [Sharing(count, count, layout) for count in self._counts if batch % count == 0]
        layout_fields = {name: self.fixed[name] for name in Layout.model_fields if name in self.fixed}
        sharings = [
            Sharing(ranks, data, layout)
            for ranks in rank_counts(self.host, self.fixed)
            for data, layout in enumerate_layouts(self.host, self.profile, self.workload, fixed=layout_fields, ranks=ranks)
        ]
        if self.workload.rows_together > 1:
            sharings = _without_conflicts_with_pairs(sharings)
        undivided = [
            sharing for sharing in sharings if sharing.layout == ALONE
        ]  # muP needs these; conflict_with_mup refuses others
        return undivided if undivided and self.fixed.get("mup_base") else sharings

    def micro_batches(self, sharing: Sharing) -> list[int]:
        """Return the sizes of micro-batches into which a data-parallel rank can divide its sequences, ascending."""
        sequences_per_rank = self.workload.global_batch // sharing.data
        requested = self.fixed.get("per_device_train_batch_size")
        steps = self.fixed.get("gradient_accumulation_steps")
        if requested is not None and steps is not None:
            return [requested] if requested * steps == sequences_per_rank else []
        if requested is not None:
            return [requested] if sequences_per_rank % requested == 0 else []
        if steps is not None:
            return [sequences_per_rank // steps] if sequences_per_rank % steps == 0 else []
        together = self.workload.rows_together
        return [together * units for units in divisors(sequences_per_rank // together)]

    def start(self, sharing: Sharing, micro_batch: int) -> Plan:
        """Return the plan from which all plans of one micro-batch are made. Every other choice has its default."""
        ranks_here = self.host.ranks_per_node(sharing.ranks)
        return self._start.model_copy(
            update={
                "num_processes": sharing.ranks,
                "layout": sharing.layout,
                "per_device_train_batch_size": micro_batch,
                "gradient_accumulation_steps": self.workload.global_batch // sharing.data // micro_batch,
                "threads_per_process": self.fixed.get("threads_per_process", max(self._cores // ranks_here, 1)),
            }
        )

    def of(self, sharing: Sharing, micro_batch: int) -> Iterator[Plan | str]:
        """Yield every plan in a fixed order. Instead of a plan that is not legal, yield the reason.

        Redundant plans, which run as another one does, are left out.
        """
        start = self.start(sharing, micro_batch)
        for combination in self.combinations:
            plan = start.model_copy(update=combination)
            problem = conflict(plan, clips_gradients=self.workload.clips_gradients)
            problem = problem or why_not_isolated(self.profile.isolation, plan, longest=self.workload.longest)
            if problem is None and self.workload.rows_together > 1:
                problem = conflict_with_pairs(plan)
            if problem is not None:
                yield problem
            elif KEEPS_REDUNDANT & self.fixed.keys() or self.fixed.get("attention") in PACKED_KERNELS or not is_redundant(plan):
                yield plan

    def all(self) -> Iterator[Plan]:
        """Yield every legal plan, in a fixed order. Raises RequestError where ``fixed`` leaves none."""
        has_plan = False
        problem = None
        for sharing in self.sharings:
            for micro_batch in self.micro_batches(sharing):
                for plan in self.of(sharing, micro_batch):
                    if isinstance(plan, str):
                        problem = problem or plan
                    else:
                        has_plan = True
                        yield plan
        if problem is not None and not has_plan:
            raise RequestError(problem)

    @property
    def _cores(self) -> int:
        return self.host.cpu.usable_cores if self.host.cpu else 1

    @cached_property
    def _start(self) -> Plan:
        """Return the plan from which all plans are made."""
        return Plan(
            device=self.host.device,
            host=self.host.fingerprint,
            model=self.profile.model_hash,
            sequence_length=self.workload.sequence_length,
            per_device_train_batch_size=1,
            **{name: self.fixed[name] for name in (*FIXED_IN_SEARCH, "optim_args", "mup_base") if name in self.fixed},
        )


def enumerate_plans(
    host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any] | None = None
) -> Iterator[Plan]:
    """Yield every legal plan, in a fixed order. Raises RequestError where ``fixed`` leaves none."""
    return PlanSpace(host, profile, workload, fixed=fixed).all()


def _without_conflicts_with_pairs(sharings: list[Sharing]) -> list[Sharing]:
    """Return the ways whose ranks each compute whole pairs. Raise RequestError if the user's choices leave none."""
    problems = [layout_conflict_with_pairs(sharing.layout) for sharing in sharings]
    usable = [sharing for sharing, problem in zip(sharings, problems, strict=True) if problem is None]
    if sharings and not usable:
        raise RequestError(problems[0] or "")
    return usable
