"""The longest sequence, the largest micro-batch or the deepest model that fits a host, and the plan that does it.

Each is found by bisecting with the memory model. That is exact where what fits once goes on to fit below: memory
grows with sequence, micro-batch and depth for a fixed way to share them, so every such way is looked at apart.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.bisecting import largest_multiple
from upshift.planning.cost.resident import memory_limit
from upshift.planning.counterfactual import Trace, too_big
from upshift.planning.depth import with_layers
from upshift.planning.layouts import DEEPEST_PIPELINE
from upshift.planning.plan import Plan
from upshift.planning.planner import variants_for
from upshift.planning.plans import enumerate_plans
from upshift.planning.rank import Candidate, Coster, Ranking, Rejected, TooBig
from upshift.planning.search import search
from upshift.planning.space import BATCH_FACTORS, parse_fixed
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.value import Value

What = Literal["sequence", "batch", "model"]
SEQUENCE_STEP = 64  # tokens
LONGEST_SEQUENCE, LARGEST_BATCH, DEEPEST_MODEL = 2**24, 2**20, 2**12  # where the search ends, should memory never do
THRIFTY = 32  # plans that are asked first


class Largest(Value):
    what: What
    value: int = Field(description="tokens of a sequence, sequences of a micro-batch, or layers of the deepest stack")
    parameters: int = Field(description="of the model; of the deepened one where that was asked for")
    plan: Plan
    predicted: Numbers
    limited_by: str = Field(description="what the next step would need")


def find_largest(what: str, host: Host, workload: Workload, *, fixed: tuple[str, ...], trace: Trace) -> Largest:
    """Raises RequestError for another ``what`` or a host of unknown memory, NothingFits where not even the smallest does."""
    ways: dict[str, type[_Way]] = {"sequence": _Sequence, "batch": _Batch, "model": _Depth}
    if what not in ways:
        raise RequestError(f"--largest {what!r} is not known; use one of {', '.join(get_args(What))}, such as --largest sequence")
    device = host.gpu or host.cpu
    if device is None or (device.free_memory_bytes or device.memory_bytes) is None:
        example = "describe it, as in --on epyc-9654-768gb"
        raise RequestError(f"--largest {what} needs the memory of {host.name}, which is unknown; {example}")
    workload = workload.changed(lengths=None)  # every sequence is as long as the longest
    profile = trace(workload.sequence_length, variants_for(host, workload, fixed))
    way = ways[what](host, workload, fixed, trace, profile)
    first, *others = way.sharings()
    best, sharing = way.largest(first, above=way.step(first)), first
    for other in others:
        larger = (best // way.step(other) + 1) * way.step(other)
        if larger <= way.ceiling and way.fits(larger, other):
            best, sharing = way.largest(other, above=larger), other
    if best == 0:
        smallest = way.ranking(way.step(sharing), sharing)
        why = too_big(smallest.too_big[0], host) if smallest.too_big else "no plan is legal"
        raise NothingFits(f"not even {way.step(sharing)} {way.unit} fit {host.name}: the smallest plan {why}")
    return way.answer(best, sharing)


@dataclass
class _Way:
    """What grows. A ``sharing`` is one choice of how ranks share the job, for which memory grows with the size."""

    host: Host
    workload: Workload
    fixed: tuple[str, ...]
    trace: Trace
    profile: ModelProfile
    known: dict[tuple[int, int | None], bool] = field(default_factory=dict)

    unit: ClassVar[str]
    what: ClassVar[What]
    degree: ClassVar[str | None] = None  # the layout's field whose values are looked at apart

    def __post_init__(self) -> None:
        self.choices = parse_fixed(self.fixed, self.host, self.profile, self.workload)

    @property
    def ceiling(self) -> int:
        raise NotImplementedError

    @property
    def start(self) -> int:
        raise NotImplementedError

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        """The model and the workload of this size."""
        raise NotImplementedError

    def posed_roughly(self, size: int) -> tuple[ModelProfile, Workload]:
        """Likewise, without tracing again."""
        return self.posed(size)

    def fixed_at(self, size: int) -> dict[str, Any]:
        return self.choices

    def step(self, sharing: int | None) -> int:
        return 1

    def degrees(self) -> list[int]:
        return [degree for degree in range(1, self.host.num_devices + 1) if self.host.num_devices % degree == 0]

    def sharings(self) -> list[int | None]:
        if self.degree is None or self.host.device == "cpu" or self.host.num_devices == 1:
            return [None]
        asked = self.choices.get(self.degree)
        return [*(self.degrees() if asked is None else [asked])]

    def fixed_for(self, size: int, sharing: int | None) -> dict[str, Any]:
        return self.fixed_at(size) | ({} if sharing is None or self.degree is None else {self.degree: sharing})

    def fits(self, size: int, sharing: int | None) -> bool:
        if (size, sharing) not in self.known:
            self.known[size, sharing] = _fits(self.host, *self.posed(size), self.fixed_for(size, sharing))
        return self.known[size, sharing]

    def resized(self, plan: Plan, size: int) -> Plan:
        raise NotImplementedError

    def largest(self, sharing: int | None, *, above: int) -> int:
        """The plans that need least at the start say where the border is near; the whole search says where it is."""
        step = self.step(sharing)
        start = min(max(self.start, above), self.ceiling) // step * step
        ranking = self.ranking(start, sharing)
        least = heapq.nsmallest(THRIFTY, (*ranking.candidates, *ranking.too_big), key=lambda candidate: candidate.resident)

        def likely(size: int) -> bool:
            profile, workload = self.posed_roughly(size)
            coster = Coster(self.host, profile, workload)
            return any(_holds(coster.cost(self.resized(one.plan, size)), self.host) for one in least)

        near = largest_multiple(likely, step=step, start=start, ceiling=self.ceiling)
        return largest_multiple(lambda size: self.fits(size, sharing), step=step, start=max(near, above), ceiling=self.ceiling)

    def ranking(self, size: int, sharing: int | None) -> Ranking:
        profile, workload = self.posed(size)
        return search(self.host, profile, workload, fixed=self.fixed_for(size, sharing))

    def answer(self, size: int, sharing: int | None) -> Largest:
        profile, workload = self.posed(size)
        best = self.ranking(size, sharing).candidates[0]
        flops = profile.train_flops(1, workload.sequence_length) * workload.global_batch
        return Largest(
            what=self.what,
            value=size,
            parameters=profile.parameters.total,
            plan=best.plan,
            predicted=best.numbers(model_flops_per_step=flops),
            limited_by=self.beyond(size + self.step(sharing), sharing),
        )

    def beyond(self, size: int, sharing: int | None) -> str:
        if size > self.ceiling:
            return f"no more than {self.ceiling:,} {self.unit} are looked for"
        ranking = self.ranking(size, sharing)
        reason = too_big(ranking.too_big[0], self.host) if ranking.too_big else "no plan is legal"
        return f"{size:,} {self.unit}: the smallest plan {reason}"


class _Sequence(_Way):
    """Traced again where it is longer than what was traced, at powers of two."""

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
        workload = self.workload.changed(sequence_length=size)
        for profile in self.traced:
            if profile.sequence_range[0] <= size <= profile.sequence_range[1]:
                return profile, workload
        length = self.grid(size)
        longer = self.workload.changed(sequence_length=length)
        self.traced.append(self.trace(length, variants_for(self.host, longer, self.fixed)))
        return self.traced[-1], workload

    def grid(self, size: int) -> int:
        """The length that is traced for ``size``: the next power of two."""
        return min(1 << (size - 1).bit_length(), max(self.ceiling, size))

    def posed_roughly(self, size: int) -> tuple[ModelProfile, Workload]:
        """The first trace's polynomials, beyond the lengths that they were fitted on."""
        return self.profile, self.workload.changed(sequence_length=size)

    def resized(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"sequence_length": size})

    def beyond(self, size: int, sharing: int | None) -> str:
        if self.profile.max_positions is not None and size > self.profile.max_positions:
            return f"the model has {self.profile.max_positions:,} positions"
        return super().beyond(size, sharing)


class _Batch(_Way):
    """Sequences at once on a device, or on a group of them that shares its sequences; every device has one micro-batch."""

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
        return self.profile, self.workload.changed(global_batch=size * self.host.num_devices)

    def fixed_at(self, size: int) -> dict[str, Any]:
        return self.choices | {"per_device_train_batch_size": size}

    def resized(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"per_device_train_batch_size": size})


class _Depth(_Way):
    """Layers. A pipeline divides them evenly, so that its degrees are looked at apart."""

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


def _fits(host: Host, profile: ModelProfile, workload: Workload, fixed: dict[str, Any]) -> bool:
    """Whether any plan does; on one device it ends with the first that does."""
    try:
        if host.device == "cpu" or host.num_devices == 1:
            coster = Coster(host, profile, workload)
            return any(_holds(coster.cost(plan), host) for plan in enumerate_plans(host, profile, workload, fixed=fixed))
        return bool(search(host, profile, workload, fixed=fixed).candidates)
    except RequestError:
        return False  # no plan of this size is legal with what is fixed


def _holds(candidate: Candidate | Rejected | TooBig, host: Host) -> bool:
    if isinstance(candidate, Rejected | TooBig):
        return False
    limit = memory_limit(candidate.plan, host)
    return limit is None or candidate.resident <= limit
