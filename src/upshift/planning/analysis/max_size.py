"""Grow the sequence, the micro-batch or the depth until nothing fits.

The border is found by bisecting with the memory model. That is exact if all sizes below one that fits also fit: for a fixed way
to share them, memory grows with sequence, micro-batch and depth. So every way to share is looked at apart. Packed rows are as
long as a sample of the data makes them. They may become a little shorter where they should become longer.

Find the longest sequence, the largest micro-batch or the deepest model that fits a host, and its plan.

Find the largest size that fits with as few questions as possible: every question is a search.

Make a model of the same architecture deeper or shallower: a profile with another number of the traced layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host, stated_memory
from upshift.models.profile import ModelProfile, Parameters, ParameterShape, Polynomial, Stack
from upshift.planning.analysis.what_if import Trace, too_big
from upshift.planning.cost.time import SampleUnit, sample_unit
from upshift.planning.layout import divisors
from upshift.planning.plan import Plan
from upshift.planning.planner import as_here
from upshift.planning.search.enumerate import enumerate_plans
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.layouts import MAX_PIPELINE, rank_counts, shares_work
from upshift.planning.search.ranking import Candidate, Coster, Ranking, Rejected, TooBig
from upshift.planning.search.search import search
from upshift.planning.search.space import BATCH_FACTORS, parse_fixed
from upshift.planning.search.variants import variants_for
from upshift.planning.trials.calibration import NO_RECORDS, Calibration
from upshift.planning.workload import LengthHistogram, Workload
from upshift.record import Numbers
from upshift.value import Value


def largest_multiple(fits: Callable[[int], bool], *, step: int, start: int, ceiling: int) -> int:
    """Return the largest multiple of ``step`` up to ``ceiling`` that fits, 0 where none does.

    ``fits`` must hold up to some value and not beyond. Strides that double lead away from ``start`` until the border is passed.
    Then the border is bisected. The nearer ``start`` is to the border, the fewer sizes are tested.
    """
    # fits at low, not at high
    low = 0
    high = ceiling // step + 1
    probe = min(max(start // step, 1), high - 1)
    stride = 1
    found_low = found_high = False
    while high - low > 1:
        if fits(probe * step):
            low = probe
            found_low = True
        else:
            high = probe
            found_high = True
        if found_low and found_high:
            probe = (low + high) // 2
        else:
            probe = min(low + stride, high - 1) if found_low else max(high - stride, low + 1)
            stride *= 2
    return low * step


def with_layers(profile: ModelProfile, layers: int) -> ModelProfile:
    """Return the profile with ``layers`` layers in its deepest stack, and in the others in proportion.

    The traced layers are repeated in their order. Everything outside the layers stays.
    """
    deepest = max((stack.num_layers for stack in profile.stacks), default=0)
    if layers == deepest or not deepest:
        return profile
    stacks = tuple(_stretched(stack, max(stack.num_layers * layers // deepest, 1)) for stack in profile.stacks)
    forward = profile.forward_flops
    backward = profile.backward_flops
    for old, new, traced in zip(profile.stacks, stacks, profile.steps[0].stacks, strict=True):
        for index, segment in enumerate(traced.plain):
            more = new.assignment.count(index) - old.assignment.count(index)
            attention = segment.forward.attention_flops
            forward = _plus(forward, more, segment.forward.matmul_flops, attention)
            # A fused backward pass computes the scores again, which the convention leaves out: it is twice the forward pass.
            backward = _plus(backward, more, segment.backward.matmul_flops, attention, attention)
    ratio = (_weight(stacks), _weight(profile.stacks))
    divided = profile.tensor_parallel
    experts = profile.experts
    kv = profile.kv_elements
    return profile.model_copy(
        update={
            "model_hash": f"{profile.model_hash}-{layers}-layers",
            "stacks": stacks,
            "parameters": _parameters(profile.parameters, ratio, layers=(sum(s.num_layers for s in stacks), profile.num_layers)),
            "tensor_parallel": divided and divided.changed(layers=_scaled(divided.layers, ratio)),
            "experts": experts and experts.changed(parameters=_scaled(experts.parameters, ratio)),
            "kv_elements": kv and Polynomial(*(term * layers / deepest for term in kv)),
            "forward_flops": forward,
            "backward_flops": backward,
        }
    )


def _stretched(stack: Stack, layers: int) -> Stack:
    return stack.changed(assignment=tuple(stack.assignment[layer % stack.num_layers] for layer in range(layers)))


def _weight(stacks: tuple[Stack, ...]) -> int:
    """Return the trained parameters of all layers, to scale sums over them, or the number of layers if none is trained."""
    trained = sum(stack.layer_trainable[index] for stack in stacks for index in stack.assignment)
    return trained or sum(stack.num_layers for stack in stacks)


def _scaled(total: int, ratio: tuple[int, int]) -> int:
    return (total * ratio[0] + ratio[1] // 2) // ratio[1]


def _plus(polynomial: Polynomial, count: int, *others: Polynomial) -> Polynomial:
    return Polynomial(*(old + count * sum(more) for old, *more in zip(polynomial, *others, strict=True)))


def _parameters(parameters: Parameters, ratio: tuple[int, int], *, layers: tuple[int, int]) -> Parameters:
    inside = _scaled(parameters.layers, ratio)
    trained = _scaled(parameters.trainable_layers, ratio)
    frozen = parameters.layers - parameters.trainable_layers
    return parameters.changed(
        total=parameters.total - parameters.layers + inside,
        layers=inside,
        trainable=parameters.trainable - parameters.trainable_layers + trained,
        trainable_layers=trained,
        always_fp32=_scaled(parameters.always_fp32, ratio),
        quantized=_scaled(parameters.quantized, ratio),
        quantized_bytes=_scaled(parameters.quantized_bytes, ratio),
        trainable_shapes=_shapes(parameters, parameters.trainable_shapes, parameters.trainable_layers, ratio, layers),
        frozen_shapes=_shapes(parameters, parameters.frozen_shapes, frozen, ratio, layers),
    )


def _shapes(
    parameters: Parameters, shapes: tuple[ParameterShape, ...], in_layers: int, ratio: tuple[int, int], layers: tuple[int, int]
) -> tuple[ParameterShape, ...]:
    """Return the shapes with the counts of the new number of layers.

    A shape stands so many times in each of equal layers, and a few times outside. Outside are the remainder of the division by
    the layers, and shapes as large as embedding or head. If that does not add up to the layers' parameters (``in_layers``), all
    counts are scaled alike.
    """
    new, old = layers
    outside = {parameters.embedding, parameters.head}
    inner = [0 if shape.elements in outside else shape.count // old for shape in shapes]
    found = sum(each * old * shape.elements for each, shape in zip(inner, shapes, strict=True))
    if found == in_layers:
        pairs = zip(inner, shapes, strict=True)
        return tuple(shape.changed(count=shape.count + each * (new - old)) for each, shape in pairs)
    return tuple(shape.changed(count=max(_scaled(shape.count, ratio), 1)) for shape in shapes)


What = Literal["sequence", "batch", "model"]
SEQUENCE_STEP = 64  # tokens
# where the search ends if memory never does
LONGEST_SEQUENCE = 2**24
LARGEST_BATCH = 2**20
DEEPEST_MODEL = 2**12
THRIFTY = 32  # plans that are costed first, those that need least memory


def why_none(ranking: Ranking, host: Host, workload: Workload) -> str:
    """Return why a ranking has no plan that fits."""
    if (phase := ranking.phase_problem) is not None:
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
        (profile, workload) = self.posed(size)
        fixed = self.fixed_for(size, sharing)
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
        life = JobMemory(self.host, profile, workload)
        limit = life.limit(found)
        return limit is None or (found.resident <= limit and life.describe_excess(found) is None)

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
        return [degree for degree in super().degrees() if degree == 1 or (declared and degree <= MAX_PIPELINE)]

    def posed(self, size: int) -> tuple[ModelProfile, Workload]:
        return with_layers(self.profile, size), self.workload

    def fixed_at(self, size: int) -> dict[str, Any]:
        recomputed = self.choices.get("activation_checkpointing", 0)
        return self.choices | ({"activation_checkpointing": min(recomputed, size)} if recomputed else {})

    def resized(self, plan: Plan, size: int) -> Plan:
        recomputed = -(-plan.activation_checkpointing * size // self.start)
        return plan.model_copy(update={"activation_checkpointing": recomputed})


class Largest(Value):
    what: What
    takes: SampleUnit = Field("tokens", description="what the model is given: predicted.tokens_per_second counts these")
    value: int = Field(description="tokens of a sequence, sequences of a micro-batch, or layers of the deepest stack")
    parameters: int = Field(description="of the model; of the deepened one where that was asked for")
    plan: Plan
    predicted: Numbers
    limited_by: str = Field(description="what the next step would need")


def find_largest(
    what: str,
    host: Host,
    workload: Workload,
    *,
    fixed: tuple[str, ...],
    trace: Trace,
    lengths_at: Callable[[int], LengthHistogram | None] | None = None,
    calibration: Calibration = NO_RECORDS,
) -> Largest:
    """Return the largest size that fits.

    ``lengths_at``: the lengths of the data, cut at so many tokens; None: if sequences grow, all are as long as the longest.
    Raises RequestError for another ``what`` or a host of unknown memory, NothingFits if not even the smallest size fits.
    """
    ways: dict[str, type[Way]] = {"sequence": Sequence, "batch": Batch, "model": Depth}
    if what not in ways:
        raise RequestError(f"--largest {what!r} is not known; use one of {', '.join(get_args(What))}, such as --largest sequence")
    if stated_memory(host.gpu or host.cpu) is None:
        example = "describe it, as in --on epyc-9654-768gb"
        raise RequestError(f"--largest {what} needs the memory of {host.name}, which is unknown; {example}")
    if what == "sequence" and lengths_at is None:
        workload = workload.changed(lengths=None)
    profile = trace(workload.sequence_length, variants_for(host, workload, fixed))
    if what == "sequence" and sample_unit(profile) == "images":
        raise RequestError(
            f"--largest sequence asks for tokens, and {profile.architecture} takes images; use --largest batch or --largest model"
        )
    way = ways[what](host, workload, fixed, trace, profile, lengths_at, calibration)
    first, *others = way.sharings()
    best = way.largest(first, above=way.step(first))
    sharing = first
    for other in others:
        larger = (best // way.step(other) + 1) * way.step(other)
        if larger <= way.ceiling and way.fits(larger, other):
            best = way.largest(other, above=larger)
            sharing = other
    if best == 0:
        smallest = way.ranking(way.step(sharing), sharing)
        raise NothingFits(f"not even {way.step(sharing)} {way.unit} fit {host.name}: {why_none(smallest, host, workload)}")
    return _answer(way, best, sharing)


def _answer(way: Way, size: int, sharing: int | None) -> Largest:
    profile, workload = way.posed(size)
    best = way.ranking(size, sharing).candidates[0]
    mean = workload.lengths.mean / workload.lengths.sequence_length if workload.lengths else 1.0
    flops = profile.train_flops(1, workload.sequence_length) * workload.global_batch * mean
    return Largest(
        what=way.what,
        takes=sample_unit(profile),
        value=size,
        parameters=profile.parameters.total,
        plan=best.plan,
        predicted=best.numbers(model_flops_per_step=flops, host=way.host),
        limited_by=way.beyond(size + way.step(sharing), sharing),
    )
