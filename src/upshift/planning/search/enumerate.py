"""Enumerate every legal plan for one host, model and workload, around what the user fixed.

Plans come by the way that ranks share the job, then by micro-batch, then by every other choice.
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
from upshift.planning.row_sharing import why_not_isolated
from upshift.planning.search.constraints import PACKED_KERNELS, conflict, repeats
from upshift.planning.search.layouts import layouts, rank_counts, shares_work
from upshift.planning.search.space import STARTED_WITH, choices
from upshift.planning.workload import Workload

REPEATED = {"optim", "recompute_granularity"}  # a plan that repeats another one is kept if the user set one of these


@dataclass(frozen=True)
class Sharing:
    """A way to share the job: the number of ranks, how many of them have sequences of their own, and the layout."""

    ranks: int
    data: int
    layout: Layout


class Plans:
    """All legal plans for one host, model and workload.

    ``fixed``: what the user set. ``only``: the values of other choices that are looked at. ``sharings``: the ways that ranks
    share the job; None: all that are legal.
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
        values = choices(host, profile, workload) | (only or {})
        values |= {name: [self.fixed[name]] for name in values if name in self.fixed}
        self._counts = values.pop("num_processes")
        self.combinations = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
        self.sharings = self._legal_sharings() if sharings is None else sharings

    def _legal_sharings(self) -> list[Sharing]:
        batch = self.workload.global_batch
        if not shares_work(self.host, self.fixed):  # each rank has its own sequences
            return [Sharing(count, count, ALONE) for count in self._counts if batch % count == 0]
        asked = {name: self.fixed[name] for name in Layout.model_fields if name in self.fixed}
        found = [
            Sharing(ranks, data, layout)
            for ranks in rank_counts(self.host, self.fixed)
            for data, layout in layouts(self.host, self.profile, self.workload, fixed=asked, ranks=ranks)
        ]
        whole = [sharing for sharing in found if sharing.layout == ALONE]  # muP needs these; conflict_with_mup refuses others
        return whole if whole and self.fixed.get("mup_base") else found

    def micro_batches(self, sharing: Sharing) -> list[int]:
        """Return the micro-batches that make up the global batch, ascending: whole ones of every rank with sequences of
        its own.
        """
        each = self.workload.global_batch // sharing.data
        if "per_device_train_batch_size" in self.fixed:
            asked = self.fixed["per_device_train_batch_size"]
            return [asked] if each % asked == 0 else []
        if "gradient_accumulation_steps" in self.fixed:
            steps = self.fixed["gradient_accumulation_steps"]
            return [each // steps] if each % steps == 0 else []
        return divisors(each)

    def start(self, sharing: Sharing, micro_batch: int) -> Plan:
        """Return the plan that all plans of one micro-batch start from. Every other choice is the plain one."""
        here = self.host.ranks_per_node(sharing.ranks)
        return self._start.model_copy(
            update={
                "num_processes": sharing.ranks,
                "layout": sharing.layout,
                "per_device_train_batch_size": micro_batch,
                "gradient_accumulation_steps": self.workload.global_batch // sharing.data // micro_batch,
                "threads_per_process": self.fixed.get("threads_per_process", max(self._cores // here, 1)),
            }
        )

    def of(self, sharing: Sharing, micro_batch: int) -> Iterator[Plan | str]:
        """Yield every plan in a fixed order; for one that is not legal, the reason. Plans that only repeat another one are left
        out."""
        start = self.start(sharing, micro_batch)
        for combination in self.combinations:
            plan = start.model_copy(update=combination)
            excluded = conflict(plan, clips_gradients=self.workload.clips_gradients)
            excluded = excluded or why_not_isolated(self.profile.isolation, plan)
            if excluded is not None:
                yield excluded
            elif REPEATED & self.fixed.keys() or self.fixed.get("attention") in PACKED_KERNELS or not repeats(plan):
                yield plan

    def all(self) -> Iterator[Plan]:
        """Yield every legal plan, in a fixed order. Raises RequestError where ``fixed`` leaves none."""
        found = False
        problem = None
        for sharing in self.sharings:
            for micro_batch in self.micro_batches(sharing):
                for plan in self.of(sharing, micro_batch):
                    if isinstance(plan, str):
                        problem = problem or plan
                    else:
                        found = True
                        yield plan
        if problem is not None and not found:
            raise RequestError(problem)

    @property
    def _cores(self) -> int:
        return self.host.cpu.usable_cores if self.host.cpu else 1

    @cached_property
    def _start(self) -> Plan:
        """Return the plan that all plans start from."""
        return Plan(
            device=self.host.device, host=self.host.fingerprint, model=self.profile.model_hash,
            sequence_length=self.workload.sequence_length, per_device_train_batch_size=1,
            **{name: self.fixed[name] for name in (*STARTED_WITH, "optim_args", "mup_base") if name in self.fixed},
        )  # fmt: skip


def enumerate_plans(
    host: Host, profile: ModelProfile, workload: Workload, *, fixed: dict[str, Any] | None = None
) -> Iterator[Plan]:
    """Yield every legal plan, in a fixed order. Raises RequestError where ``fixed`` leaves none."""
    return Plans(host, profile, workload, fixed=fixed).all()
