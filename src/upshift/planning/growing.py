"""Grow the sequence, the micro-batch or the depth until nothing fits.

The border is found by bisecting with the memory model. That is exact if all sizes below one that fits also fit: for a fixed way
to share them, memory grows with sequence, micro-batch and depth. So every way to share is looked at apart. Packed rows are as
long as a sample of the data makes them. They may become a little shorter where they should become longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.bisecting import largest_multiple
from upshift.planning.calibration import Calibration
from upshift.planning.counterfactual import Trace, too_big
from upshift.planning.depth import with_layers
from upshift.planning.layout import divisors
from upshift.planning.layouts import DEEPEST_PIPELINE, rank_counts, shares_work
from upshift.planning.lengths import LengthHistogram
from upshift.planning.plan import Plan
from upshift.planning.planner import as_here
from upshift.planning.plans import enumerate_plans
from upshift.planning.rank import Candidate, Coster, Ranking, Rejected, TooBig
from upshift.planning.search import search
from upshift.planning.space import BATCH_FACTORS, parse_fixed
from upshift.planning.variants import variants_for
from upshift.planning.whole_life import WholeLife
from upshift.planning.workload import Workload

What = Literal["sequence", "batch", "model"]
SEQUENCE_STEP = 64  # tokens
LONGEST_SEQUENCE, LARGEST_BATCH, DEEPEST_MODEL = 2**24, 2**20, 2**12  # where the search ends if memory never does
THRIFTY = 32  # plans that are costed first, those that need least memory


def why_none(ranking: Ranking, host: Host, workload: Workload) -> str:
    """Return why a ranking has no plan that fits."""
    if (phase := ranking.in_another_phase) is not None:
        return f"of the best plan {phase}"
    if ranking.too_big:
        return f"the smallest plan {too_big(ranking.too_big[0], host, workload)}"
    return ranking.rejected[0].reason if ranking.rejected else "no plan is legal"


@dataclass
class Way:
    """The quantity that grows. A ``sharing`` is one choice of how ranks share the job, for which memory grows with the size."""

    host: Host
    workload: Workload
    fixed: tuple[str, ...]
    trace: Trace
    profile: ModelProfile
    lengths_at: Callable[[int], LengthHistogram | None] | None
    calibration: Calibration
    known: dict[tuple[int, int | None], bool] = field(default_factory=dict)

    unit: ClassVar[str]
    what: ClassVar[What]
    degree: ClassVar[str | None] = None  # the field of the layout whose values are looked at apart

    def __post_init__(self) -> None:
        self.choices = parse_fixed(self.fixed, self.host, self.profile, self.workload)

    @property
    def ceiling(self) -> int:
        raise NotImplementedError

    @property
    def start(self) -> int:
        raise NotImplementedError

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the model and the workload of this size."""
        raise NotImplementedError

    def posed_roughly(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the model and the workload of this size without tracing again."""
        return self.posed(size)

    def fixed_at(self, size: int) -> dict[str, Any]:
        return self.choices

    def step(self, sharing: int | None) -> int:
        return 1

    @cached_property
    def ranks(self) -> int:
        """Return the most ranks that the job may have."""
        return rank_counts(self.host, self.choices)[-1] if shares_work(self.host, self.choices) else 1

    def degrees(self) -> list[int]:
        return divisors(self.ranks)

    def sharings(self) -> list[int | None]:
        if self.degree is None or not shares_work(self.host, self.choices):
            return [None]
        asked = self.choices.get(self.degree)
        return [*(self.degrees() if asked is None else [asked])]

    def fixed_for(self, size: int, sharing: int | None) -> dict[str, Any]:
        return self.fixed_at(size) | ({} if sharing is None or self.degree is None else {self.degree: sharing})

    def fits(self, size: int, sharing: int | None) -> bool:
        if (size, sharing) not in self.known:
            self.known[size, sharing] = self.fits_anew(size, sharing)
        return self.known[size, sharing]

    def resized(self, plan: Plan, size: int) -> Plan:
        raise NotImplementedError

    def largest(self, sharing: int | None, *, above: int) -> int:
        """Return the largest size that fits with this sharing.

        The plans that need least at the start show where the border is near. The whole search then finds the border itself.
        """
        step = self.step(sharing)
        start = min(max(self.start, above), self.ceiling) // step * step
        ranking = self.ranking(start, sharing)
        least = heapq.nsmallest(THRIFTY, (*ranking.candidates, *ranking.too_big), key=lambda candidate: candidate.resident)

        def likely(size: int) -> bool:
            profile, workload = self.posed_roughly(size)
            coster = Coster(self.host, profile, workload)
            return any(self.holds(coster.cost(self.resized(one.plan, size)), profile, workload) for one in least)

        near = largest_multiple(likely, step=step, start=start, ceiling=self.ceiling)
        return largest_multiple(lambda size: self.fits(size, sharing), step=step, start=max(near, above), ceiling=self.ceiling)

    def ranking(self, size: int, sharing: int | None) -> Ranking:
        profile, workload = self.posed(size)
        found = search(self.host, profile, workload, fixed=self.fixed_for(size, sharing))
        return as_here(found, self.host, profile, workload, self.calibration, enough=1)

    def fits_anew(self, size: int, sharing: int | None) -> bool:
        """Return whether any plan of this size fits. On one device the search ends with the first plan that does."""
        (profile, workload), fixed = self.posed(size), self.fixed_for(size, sharing)
        try:
            if shares_work(self.host, fixed):
                return bool(self.ranking(size, sharing).candidates)
            coster = Coster(self.host, profile, workload)
            plans = enumerate_plans(self.host, profile, workload, fixed=fixed)
            return any(self.holds(coster.cost(plan), profile, workload) for plan in plans)
        except RequestError:
            return False  # no plan of this size is legal with what is fixed

    def holds(self, candidate: Candidate | Rejected | TooBig, profile: ModelProfile, workload: Workload) -> bool:
        if isinstance(candidate, Rejected | TooBig):
            return False
        found = self.calibration.of(candidate, workload)
        life = WholeLife(self.host, profile, workload)
        limit = life.limit(found)
        return limit is None or (found.resident <= limit and life.too_big(found) is None)

    def beyond(self, size: int, sharing: int | None) -> str:
        if size > self.ceiling:
            return f"no more than {self.ceiling:,} {self.unit} are looked for"
        return f"{size:,} {self.unit}: {why_none(self.ranking(size, sharing), self.host, self.workload)}"


class Sequence(Way):
    """The length of a sequence. A longer sequence than what was traced is traced again, at powers of two."""

    unit = "tokens"
    what: ClassVar[What] = "sequence"
    degree = "context_parallel"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traced = [self.profile]

    @property
    def ceiling(self) -> int:
        positions = self.profile.max_positions or LONGEST_SEQUENCE
        return min(positions, LONGEST_SEQUENCE) // self.step(None) * self.step(None)

    @property
    def start(self) -> int:
        return self.workload.sequence_length

    def step(self, sharing: int | None) -> int:
        return min(SEQUENCE_STEP, self.profile.max_positions or SEQUENCE_STEP)

    def degrees(self) -> list[int]:
        return super().degrees() if self.profile.objective == "causal-lm" else [1]

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        workload = self.resized_workload(size)
        for profile in self.traced:
            if profile.sequence_range[0] <= size <= profile.sequence_range[1]:
                return profile, workload
        length = self.grid(size)
        longer = self.workload.changed(sequence_length=length)
        self.traced.append(self.trace(length, variants_for(self.host, longer, self.fixed)))
        return self.traced[-1], workload

    def grid(self, size: int) -> int:
        """Return the length that is traced for ``size``: the next power of two."""
        return min(1 << (size - 1).bit_length(), max(self.ceiling, size))

    def posed_roughly(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the first trace's profile, whose polynomials go on beyond the lengths that they were fitted on."""
        return self.profile, self.resized_workload(size)

    def resized_workload(self, size: int) -> Workload:
        lengths = self.lengths_at(size) if self.lengths_at is not None else None
        return self.workload.changed(sequence_length=size, lengths=lengths)

    def resized(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"sequence_length": size})

    def beyond(self, size: int, sharing: int | None) -> str:
        if self.profile.max_positions is not None and size > self.profile.max_positions:
            return f"the model has {self.profile.max_positions:,} positions"
        return super().beyond(size, sharing)


class Batch(Way):
    """The sequences at once on a device, or on a group of devices that shares its sequences. Every device has one micro-batch."""

    unit = "sequences"
    what: ClassVar[What] = "batch"
    ceiling = LARGEST_BATCH
    start = 1

    def __post_init__(self) -> None:
        given = [text for text in self.fixed if text.partition("=")[0] in BATCH_FACTORS]
        if given:
            raise RequestError(f"--largest batch finds the micro-batch itself; leave out --set {given[0]}")
        super().__post_init__()

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        return self.profile, self.workload.changed(global_batch=size * self.ranks)

    def fixed_at(self, size: int) -> dict[str, Any]:
        return self.choices | {"per_device_train_batch_size": size}

    def resized(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"per_device_train_batch_size": size})


class Depth(Way):
    """The number of layers. A pipeline divides them evenly, so its degrees are looked at apart."""

    unit = "layers"
    what: ClassVar[What] = "model"
    degree = "pipeline_parallel"
    ceiling = DEEPEST_MODEL

    @property
    def start(self) -> int:
        return max((stack.num_layers for stack in self.profile.stacks), default=1)

    def step(self, sharing: int | None) -> int:
        return sharing or 1

    def degrees(self) -> list[int]:
        declared = self.profile.declares.pipeline_parallel_plan and len(self.profile.stacks) == 1
        return [degree for degree in super().degrees() if degree == 1 or (declared and degree <= DEEPEST_PIPELINE)]

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        return with_layers(self.profile, size), self.workload

    def fixed_at(self, size: int) -> dict[str, Any]:
        recomputed = self.choices.get("activation_checkpointing", 0)
        return self.choices | ({"activation_checkpointing": min(recomputed, size)} if recomputed else {})

    def resized(self, plan: Plan, size: int) -> Plan:
        recomputed = -(-plan.activation_checkpointing * size // self.start)
        return plan.model_copy(update={"activation_checkpointing": recomputed})
