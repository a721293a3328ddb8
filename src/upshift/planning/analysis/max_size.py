"""Find the longest sequence, the largest micro-batch or the deepest model that fits a host, and its plan.

The largest size is found by bisecting with as few tests as possible, because every test is a search. Bisecting is exact if all
sizes below a fitting one also fit. This holds for a fixed way to share the job: memory grows with sequence, micro-batch and
depth. So every way to share the job is searched separately. There is one exception: the length of packed rows follows from a
sample of the data, and may become a little shorter for a longer sequence.

A model is made deeper or shallower by a profile with another number of the traced layers.
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
from upshift.planning.analysis.what_if import Trace, describe_shortage
from upshift.planning.cost.time import SampleUnit, sample_unit
from upshift.planning.layout import divisors
from upshift.planning.plan import Plan
from upshift.planning.planner import calibrate_and_filter
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

    ``fits`` must be true up to some value and false above it. Doubling strides lead away from ``start`` until they pass the
    border. Then the border is bisected. The nearer ``start`` is to the border, the fewer sizes are tested.
    """
    low = 0  # fits
    high = ceiling // step + 1  # does not fit
    probe = min(max(start // step, 1), high - 1)
    stride = 1
    low_fits = high_fails = False
    while high - low > 1:
        if fits(probe * step):
            low = probe
            low_fits = True
        else:
            high = probe
            high_fails = True
        if low_fits and high_fails:
            probe = (low + high) // 2
        else:
            probe = min(low + stride, high - 1) if low_fits else max(high - stride, low + 1)
            stride *= 2
    return low * step


def with_layers(profile: ModelProfile, layers: int) -> ModelProfile:
    """Return the profile with ``layers`` layers in its deepest stack, and in the others in proportion.

    The traced layers are repeated in their order. Everything outside the layers stays.
    """
    deepest = max((stack.num_layers for stack in profile.stacks), default=0)
    if layers == deepest or not deepest:
        return profile
    stacks = tuple(_repeat_layers(stack, max(stack.num_layers * layers // deepest, 1)) for stack in profile.stacks)
    forward = profile.forward_flops
    backward = profile.backward_flops
    for old_stack, new_stack, traced in zip(profile.stacks, stacks, profile.steps[0].stacks, strict=True):
        for index, segment in enumerate(traced.plain):
            num_added = new_stack.assignment.count(index) - old_stack.assignment.count(index)
            attention = segment.forward.attention_flops
            forward = _add_layers(forward, num_added, segment.forward.matmul_flops, attention)
            # A fused backward pass computes the scores again. The convention does not count this: it is twice the forward pass.
            backward = _add_layers(backward, num_added, segment.backward.matmul_flops, attention, attention)
    ratio = (_layer_weight(stacks), _layer_weight(profile.stacks))
    tensor_parallel = profile.tensor_parallel
    experts = profile.experts
    kv = profile.kv_elements
    return profile.model_copy(
        update={
            "model_hash": f"{profile.model_hash}-{layers}-layers",
            "stacks": stacks,
            "parameters": _scale_parameters(
                profile.parameters, ratio, layers=(sum(stack.num_layers for stack in stacks), profile.num_layers)
            ),
            "tensor_parallel": tensor_parallel and tensor_parallel.changed(layers=_scale(tensor_parallel.layers, ratio)),
            "experts": experts and experts.changed(parameters=_scale(experts.parameters, ratio)),
            "kv_elements": kv and Polynomial(*(term * layers / deepest for term in kv)),
            "forward_flops": forward,
            "backward_flops": backward,
        }
    )


def _repeat_layers(stack: Stack, layers: int) -> Stack:
    return stack.changed(assignment=tuple(stack.assignment[layer % stack.num_layers] for layer in range(layers)))


def _layer_weight(stacks: tuple[Stack, ...]) -> int:
    """Return the trained parameters of all layers, to scale sums over them, or the number of layers if none is trained."""
    trained = sum(stack.layer_trainable[index] for stack in stacks for index in stack.assignment)
    return trained or sum(stack.num_layers for stack in stacks)


def _scale(total: int, ratio: tuple[int, int]) -> int:
    return (total * ratio[0] + ratio[1] // 2) // ratio[1]


def _add_layers(polynomial: Polynomial, count: int, *costs: Polynomial) -> Polynomial:
    return Polynomial(*(coefficient + count * sum(additions) for coefficient, *additions in zip(polynomial, *costs, strict=True)))


def _scale_parameters(parameters: Parameters, ratio: tuple[int, int], *, layers: tuple[int, int]) -> Parameters:
    inside = _scale(parameters.layers, ratio)
    trained = _scale(parameters.trainable_layers, ratio)
    frozen = parameters.layers - parameters.trainable_layers
    frozen_bf16 = max(frozen - parameters.quantized, 0) if parameters.always_bf16 else 0
    trained_bf16 = min(max(parameters.trainable_layers - parameters.always_fp32, 0), parameters.trainable_bf16)
    return parameters.changed(
        total=parameters.total - parameters.layers + inside,
        layers=inside,
        trainable=parameters.trainable - parameters.trainable_layers + trained,
        trainable_layers=trained,
        always_fp32=_scale(parameters.always_fp32, ratio),
        always_bf16=parameters.always_bf16 - frozen_bf16 + _scale(frozen_bf16, ratio),
        trainable_bf16=parameters.trainable_bf16 - trained_bf16 + _scale(trained_bf16, ratio),
        quantized=_scale(parameters.quantized, ratio),
        quantized_bytes=_scale(parameters.quantized_bytes, ratio),
        trainable_shapes=_scale_shapes(parameters, parameters.trainable_shapes, parameters.trainable_layers, ratio, layers),
        frozen_shapes=_scale_shapes(parameters, parameters.frozen_shapes, frozen, ratio, layers),
    )


def _scale_shapes(
    parameters: Parameters, shapes: tuple[ParameterShape, ...], in_layers: int, ratio: tuple[int, int], layers: tuple[int, int]
) -> tuple[ParameterShape, ...]:
    """Return the shapes with the counts of the new number of layers.

    A shape occurs equally often in each layer, and a few times outside the layers. Outside are the remainder of the division by
    the number of layers, and shapes as large as embedding or head. If this does not add up to the layers' parameters
    (``in_layers``), all counts are scaled in proportion.
    """
    new_layers, old_layers = layers
    outside = {parameters.embedding, parameters.head}
    per_layer = [0 if shape.elements in outside else shape.count // old_layers for shape in shapes]
    elements_in_layers = sum(count * old_layers * shape.elements for count, shape in zip(per_layer, shapes, strict=True))
    if elements_in_layers == in_layers:
        pairs = zip(per_layer, shapes, strict=True)
        return tuple(shape.changed(count=shape.count + count * (new_layers - old_layers)) for count, shape in pairs)
    return tuple(shape.changed(count=max(_scale(shape.count, ratio), 1)) for shape in shapes)


DimensionName = Literal["sequence", "batch", "model"]
SEQUENCE_STEP = 64  # tokens
# Where the search ends if everything fits.
MAX_SEQUENCE = 2**24
MAX_BATCH = 2**20
MAX_DEPTH = 2**12
NUM_SMALLEST_PLANS = 32  # plans with which the border is estimated first


def why_nothing_fits(ranking: Ranking, host: Host, workload: Workload) -> str:
    """Return why a ranking has no plan that fits."""
    if (phase := ranking.phase_problem) is not None:
        return f"of the best plan {phase}"
    if ranking.too_big:
        return f"the smallest plan {describe_shortage(ranking.too_big[0], host, workload)}"
    return ranking.rejected[0].reason if ranking.rejected else "no plan is legal"


@dataclass
class Dimension:
    """The quantity that grows: sequence length, micro-batch or depth.

    A ``sharing`` is a value of the layout's field ``degree``. With the same sharing memory grows with the size. None: no field.
    """

    host: Host
    workload: Workload
    fixed: tuple[str, ...]
    trace: Trace
    profile: ModelProfile
    lengths_at: Callable[[int], LengthHistogram | None] | None
    calibration: Calibration
    cached_fits: dict[tuple[int, int | None], bool] = field(default_factory=dict)

    unit: ClassVar[str]
    what: ClassVar[DimensionName]
    degree: ClassVar[str | None] = None  # the field of the layout whose values are searched separately

    def __post_init__(self) -> None:
        self.choices = parse_fixed(self.fixed, self.host, self.profile, self.workload)

    @property
    def ceiling(self) -> int:
        """Return the largest size to search."""
        raise NotImplementedError

    @property
    def start(self) -> int:
        """Return the size at which the search starts."""
        raise NotImplementedError

    def problem_at(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the model and the workload of this size."""
        raise NotImplementedError

    def extrapolated_at(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the model and the workload of this size without tracing again."""
        return self.problem_at(size)

    def fixed_at(self, size: int) -> dict[str, Any]:
        """Return the fixed fields of plans of this size."""
        return self.choices

    def step(self, sharing: int | None) -> int:
        """Return the number of which all sizes are multiples."""
        return 1

    @cached_property
    def ranks(self) -> int:
        """Return the largest number of ranks that the job may have."""
        return rank_counts(self.host, self.choices)[-1] if shares_work(self.host, self.choices) else 1

    def degrees(self) -> list[int]:
        return divisors(self.ranks)

    def sharing_degrees(self) -> list[int | None]:
        if self.degree is None or not shares_work(self.host, self.choices):
            return [None]
        requested = self.choices.get(self.degree)
        return [*(self.degrees() if requested is None else [requested])]

    def fixed_for(self, size: int, sharing: int | None) -> dict[str, Any]:
        fixed = self.fixed_at(size)
        if sharing is not None and self.degree is not None:
            fixed = fixed | {self.degree: sharing}
        return fixed

    def fits(self, size: int, sharing: int | None) -> bool:
        if (size, sharing) not in self.cached_fits:
            self.cached_fits[size, sharing] = self.search_fits(size, sharing)
        return self.cached_fits[size, sharing]

    def resize(self, plan: Plan, size: int) -> Plan:
        raise NotImplementedError

    def largest(self, sharing: int | None, *, above: int) -> int:
        """Return the largest size that fits with this sharing.

        The plans that need least memory at the start give an estimate of the border. Whole searches then find the border.
        """
        step = self.step(sharing)
        start = min(max(self.start, above), self.ceiling) // step * step
        ranking = self.ranking(start, sharing)
        candidates = (*ranking.candidates, *ranking.too_big)
        smallest = heapq.nsmallest(NUM_SMALLEST_PLANS, candidates, key=lambda candidate: candidate.resident)

        def small_plans_fit(size: int) -> bool:
            profile, workload = self.extrapolated_at(size)
            coster = Coster(self.host, profile, workload)
            for candidate in smallest:
                resized = coster.cost(self.resize(candidate.plan, size))
                if self.candidate_fits(resized, profile, workload):
                    return True
            return False

        estimate = largest_multiple(small_plans_fit, step=step, start=start, ceiling=self.ceiling)
        return largest_multiple(
            lambda size: self.fits(size, sharing), step=step, start=max(estimate, above), ceiling=self.ceiling
        )

    def ranking(self, size: int, sharing: int | None) -> Ranking:
        profile, workload = self.problem_at(size)
        ranking = search(self.host, profile, workload, fixed=self.fixed_for(size, sharing))
        return calibrate_and_filter(ranking, self.host, profile, workload, self.calibration, num_plans=1)

    def search_fits(self, size: int, sharing: int | None) -> bool:
        """Return whether any plan of this size fits. On one device the search ends with the first plan that does."""
        profile, workload = self.problem_at(size)
        fixed = self.fixed_for(size, sharing)
        try:
            if shares_work(self.host, fixed):
                return bool(self.ranking(size, sharing).candidates)
            coster = Coster(self.host, profile, workload)
            plans = enumerate_plans(self.host, profile, workload, fixed=fixed)
            return any(self.candidate_fits(coster.cost(plan), profile, workload) for plan in plans)
        except RequestError:
            return False  # no plan of this size is legal with the fixed fields

    def candidate_fits(self, candidate: Candidate | Rejected | TooBig, profile: ModelProfile, workload: Workload) -> bool:
        if isinstance(candidate, Rejected | TooBig):
            return False
        return JobMemory(self.host, profile, workload).fits(self.calibration.of(candidate, workload))

    def why_not(self, size: int, sharing: int | None) -> str:
        if size > self.ceiling:
            return f"no more than {self.ceiling:,} {self.unit} are looked for"
        return f"{size:,} {self.unit}: {why_nothing_fits(self.ranking(size, sharing), self.host, self.workload)}"


class SequenceLength(Dimension):
    """The length of a sequence. For lengths that the profile does not cover the model is traced again, at powers of two."""

    unit = "tokens"
    what: ClassVar[DimensionName] = "sequence"
    degree = "context_parallel"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traced = [self.profile]

    @property
    def ceiling(self) -> int:
        positions = self.profile.max_positions or MAX_SEQUENCE
        return min(positions, MAX_SEQUENCE) // self.step(None) * self.step(None)

    @property
    def start(self) -> int:
        return self.workload.sequence_length

    def step(self, sharing: int | None) -> int:
        return min(SEQUENCE_STEP, self.profile.max_positions or SEQUENCE_STEP)

    def degrees(self) -> list[int]:
        return super().degrees() if self.profile.objective == "causal-lm" else [1]

    def problem_at(self, size: int) -> tuple[ModelProfile, Workload]:
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

    def extrapolated_at(self, size: int) -> tuple[ModelProfile, Workload]:
        """Return the first trace's profile, whose polynomials extrapolate to lengths that they were not fitted on."""
        return self.profile, self.resized_workload(size)

    def resized_workload(self, size: int) -> Workload:
        lengths = self.lengths_at(size) if self.lengths_at is not None else None
        return self.workload.changed(sequence_length=size, lengths=lengths)

    def resize(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"sequence_length": size})

    def why_not(self, size: int, sharing: int | None) -> str:
        if self.profile.max_positions is not None and size > self.profile.max_positions:
            return f"the model has {self.profile.max_positions:,} positions"
        return super().why_not(size, sharing)


class MicroBatchSize(Dimension):
    """The number of sequences of a micro-batch, on a device or on a group of devices that shares its sequences."""

    unit = "sequences"
    what: ClassVar[DimensionName] = "batch"
    ceiling = MAX_BATCH
    start = 1

    def __post_init__(self) -> None:
        batch_fields = [text for text in self.fixed if text.partition("=")[0] in BATCH_FACTORS]
        if batch_fields:
            raise RequestError(f"--largest batch finds the micro-batch itself; leave out --set {batch_fields[0]}")
        super().__post_init__()

    def problem_at(self, size: int) -> tuple[ModelProfile, Workload]:
        return self.profile, self.workload.changed(global_batch=size * self.ranks)

    def fixed_at(self, size: int) -> dict[str, Any]:
        return self.choices | {"per_device_train_batch_size": size}

    def resize(self, plan: Plan, size: int) -> Plan:
        return plan.model_copy(update={"per_device_train_batch_size": size})


class Depth(Dimension):
    """The number of layers. A pipeline divides them evenly, so its degrees are searched separately."""

    unit = "layers"
    what: ClassVar[DimensionName] = "model"
    degree = "pipeline_parallel"
    ceiling = MAX_DEPTH

    @property
    def start(self) -> int:
        return max((stack.num_layers for stack in self.profile.stacks), default=1)

    def step(self, sharing: int | None) -> int:
        return sharing or 1

    def degrees(self) -> list[int]:
        declared = self.profile.declares.pipeline_parallel_plan and len(self.profile.stacks) == 1
        return [degree for degree in super().degrees() if degree == 1 or (declared and degree <= MAX_PIPELINE)]

    def problem_at(self, size: int) -> tuple[ModelProfile, Workload]:
        return with_layers(self.profile, size), self.workload

    def fixed_at(self, size: int) -> dict[str, Any]:
        recomputed = self.choices.get("activation_checkpointing", 0)
        if not recomputed:
            return self.choices
        return self.choices | {"activation_checkpointing": min(recomputed, size)}

    def resize(self, plan: Plan, size: int) -> Plan:
        recomputed = -(-plan.activation_checkpointing * size // self.start)
        return plan.model_copy(update={"activation_checkpointing": recomputed})


class LargestResult(Value):
    what: DimensionName
    takes: SampleUnit = Field("tokens", description="what the model is given: predicted.tokens_per_second counts these")
    value: int = Field(description="tokens of a sequence, sequences of a micro-batch, or layers of the deepest stack")
    parameters: int = Field(description="of the model; of the deepened one where that was asked for")
    plan: Plan
    predicted: Numbers
    limited_by: str = Field(description="what the next step would need")


def find_largest(
    dimension_name: str,
    host: Host,
    workload: Workload,
    *,
    fixed: tuple[str, ...],
    trace: Trace,
    lengths_at: Callable[[int], LengthHistogram | None] | None = None,
    calibration: Calibration = NO_RECORDS,
) -> LargestResult:
    """Return the largest size that fits.

    ``lengths_at``: returns the lengths of the data, cut at a number of tokens; None: all sequences are as long as the longest.
    Raise RequestError for an unknown dimension or a host of unknown memory, and NothingFits if not even the smallest size fits.
    """
    dimensions: dict[str, type[Dimension]] = {"sequence": SequenceLength, "batch": MicroBatchSize, "model": Depth}
    if dimension_name not in dimensions:
        names = ", ".join(get_args(DimensionName))
        raise RequestError(f"--largest {dimension_name!r} is not known; use one of {names}, such as --largest sequence")
    if stated_memory(host.gpu or host.cpu) is None:
        example = "describe it, as in --on epyc-9654-768gb"
        raise RequestError(f"--largest {dimension_name} needs the memory of {host.name}, which is unknown; {example}")
    if dimension_name == "sequence" and lengths_at is None:
        workload = workload.changed(lengths=None)
    profile = trace(workload.sequence_length, variants_for(host, workload, fixed))
    if dimension_name == "sequence" and sample_unit(profile) == "images":
        raise RequestError(
            f"--largest sequence asks for tokens, and {profile.architecture} takes images; use --largest batch or --largest model"
        )
    dimension = dimensions[dimension_name](host, workload, fixed, trace, profile, lengths_at, calibration)
    first_degree, *other_degrees = dimension.sharing_degrees()
    best = dimension.largest(first_degree, above=dimension.step(first_degree))
    sharing = first_degree
    for degree in other_degrees:
        next_size = (best // dimension.step(degree) + 1) * dimension.step(degree)
        if next_size <= dimension.ceiling and dimension.fits(next_size, degree):
            best = dimension.largest(degree, above=next_size)
            sharing = degree
    if best == 0:
        smallest = dimension.ranking(dimension.step(sharing), sharing)
        raise NothingFits(
            f"not even {dimension.step(sharing)} {dimension.unit} fit {host.name}: {why_nothing_fits(smallest, host, workload)}"
        )
    return _answer(dimension, best, sharing)


def _answer(dimension: Dimension, size: int, sharing: int | None) -> LargestResult:
    profile, workload = dimension.problem_at(size)
    best = dimension.ranking(size, sharing).candidates[0]
    mean = workload.lengths.mean / workload.lengths.sequence_length if workload.lengths else 1.0
    flops = profile.train_flops(1, workload.sequence_length) * workload.global_batch * mean
    return LargestResult(
        what=dimension.what,
        takes=sample_unit(profile),
        value=size,
        parameters=profile.parameters.total,
        plan=best.plan,
        predicted=best.numbers(model_flops_per_step=flops, host=dimension.host),
        limited_by=dimension.why_not(size + dimension.step(sharing), sharing),
    )
