"""Predict the memory of a training job on the rank that needs most: its steps, and the phases around them, by part.

The peaks of a micro-batch are found segment by segment, forward and backward, from the profile's segments. Allocated bytes are
exact where the traced operators are those that run (COSTS.md D2, D3): eager kernels on one device. Scratch inside kernels is
ignored: it is under 1.1 % of the peak where measured, and on a CPU with bf16 instructions oneDNN's products take 0.05 to 0.2 MB
a thread. A compiled layer keeps what torch.compile's own partition keeps (cost/segments.py). Its temporaries are taken to be
those of the operators that it fuses, which is more.

The phases around the steps are loading, the first step, evaluation, saving and resuming. Loading reads weights tensor by tensor.
The first update creates the optimizer state. Evaluation runs the steps' micro-batches without gradients. A save copies weights
and optimizer state to host memory, or writes without copies if they have no room there. A training run generates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from upshift.models.profile import ModelProfile, StepTrace, highest_at
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.optimizer import trained_shapes, update_workspace_bytes
from upshift.planning.cost.partition import (
    InFlight,
    Share,
    Stage,
    compute_bytes,
    deciding_stages,
    gradients_preexist,
    outside_part,
    residual_bytes,
    share_of,
)
from upshift.planning.cost.segments import PlacedSegment, place_segments
from upshift.planning.plan import ALONE, Plan


@dataclass
class Peak:
    """The bytes of the highest moment of a phase, in total and by part."""

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def offer(self, parts: dict[str, float]) -> None:
        """Keep ``parts`` if they are the first, or if their total is larger than that of the parts before."""
        total = sum(parts.values())
        if not self.parts or total > self.total:
            self.total = total
            self.parts = parts


# A step's moments, in order. At each of them a rank holds another amount of other ranks' parts (FsdpTransients).
PHASE_OF_MOMENT = {
    "start": "forward",
    "forward": "forward",
    "loss": "forward",
    "head": "backward",
    "last_layer": "backward",
    "layers": "backward",
    "end": "backward",
    "outside": "backward",
}


@dataclass(frozen=True)
class Peaks:
    """The peak of each moment of a step if ``by_moment``, else of each phase."""

    by_moment: bool
    peaks: dict[str, Peak] = field(default_factory=dict)

    def offer(self, moment: str, parts: dict[str, float]) -> None:
        name = moment if self.by_moment else PHASE_OF_MOMENT[moment]
        self.peaks.setdefault(name, Peak()).offer(parts)


def offer_forward_peaks(
    peaks: Peaks,
    resident: dict[str, float],
    placed: list[PlacedSegment],
    gradients: float,
    plan: Plan,
    batch: int,
    sequence: int,
    *,
    beside: float = 0.0,
) -> float:
    """Offer the moments of the forward pass to ``peaks``. Return the bytes that are live when the pass has ended.

    ``beside``: bytes of activations that no segment of ``placed`` makes.
    """
    live = {"activations": beside, "loss": 0.0}
    released = 0.0
    for item in placed:
        cost = item.segment.forward
        own_part = "loss" if item.is_loss else "activations"
        rise = max(highest_at(cost.rise, batch, sequence), 0.0) + item.scratch
        left_bytes = cost.left.at(batch, sequence)
        released_here = cost.released.at(batch, sequence)
        if plan.activation_offload and item.is_layer:
            left_bytes = 0.0
            released_here = 0.0
        for num_before in dict.fromkeys((0, item.count - 1)):
            parts = {**resident, "gradients": gradients, **live, "workspace": 0.0}
            parts[own_part] += num_before * left_bytes
            parts["loss" if item.is_loss else "workspace"] += rise
            moment = "forward" if num_before else "start"
            if item.is_loss:
                moment = "loss"
            peaks.offer(moment, parts)
        live[own_part] += item.count * left_bytes
        released += item.count * released_here
    return live["activations"] + live["loss"] - released


@dataclass(frozen=True)
class Backward:
    """The backward pass of a plan's micro-batches, from which the memory of a segment's pass follows."""

    plan: Plan
    profile: ModelProfile
    batch: int
    sequence: int
    accumulating: bool  # gradients exist, and the pass adds to them

    @property
    def divides(self) -> bool:
        """Return whether ranks divide gradients layer by layer, as soon as they are computed.

        The ranks of a pipeline do so after the last micro-batch.
        """
        return self.plan.layout.gathers and self.plan.layout.pipeline_parallel == 1

    def rise_and_left(self, item: PlacedSegment) -> tuple[float, float]:
        """Return the bytes that a segment's pass adds at its peak, and the bytes that it leaves."""
        segment = item.segment
        shape = (self.batch, self.sequence)
        cost = segment.backward_accumulating if self.accumulating and not self.divides else segment.backward
        leaving_cost = segment.backward_accumulating if self.divides and item.is_layer else cost
        left_bytes = leaving_cost.left.at(*shape)
        rises = [rise.at(*shape) for rise in cost.rise]
        if self.plan.optimizer_in_backward and segment.gradients_go is not None:
            gradients_go = segment.gradients_go
            rises = [rise.at(*shape) for rise in gradients_go.rise]
            for elements, live in gradients_go.moments:
                rises.append(live.at(*shape) + update_workspace_bytes(self.profile, self.plan, elements))
            left_bytes -= gradients_go.born.at(*shape)
        highest_rise = max(rises, default=0.0)
        if self.plan.activation_offload and item.is_layer:
            copied_back = segment.forward.left.at(*shape) - segment.forward.released.at(*shape)
            highest_rise += copied_back
            left_bytes += copied_back
        return max(highest_rise, 0.0), left_bytes


def offer_backward_peaks(
    peaks: Peaks,
    resident: dict[str, float],
    placed: list[PlacedSegment],
    live: float,
    gradients: float,
    backward: Backward,
    *,
    received: float = 0.0,
) -> None:
    """Offer the moments of the backward pass to ``peaks``.

    In a first backward pass gradients are allocated as segments finish. In later passes they all exist. If ranks divide them,
    the gradients of a layer are allocated and freed, and those outside the layers stay until the pass has ended.

    Args:
        live: bytes that the forward pass left.
        gradients: bytes of all gradients of the rank.
        received: bytes of a buffer with the gradient of the last layer's output, which the last layer seems to free.
    """
    plan = backward.plan
    divides = backward.divides
    accumulating = backward.accumulating and not divides
    born_bytes = gradients if accumulating else 0.0
    per_parameter = gradients / max(sum(item.count * item.parameters for item in placed), 1)
    is_last = True
    for item in reversed(placed):
        born_per_segment = item.parameters * per_parameter
        if divides:
            born_per_segment = item.parameters * compute_bytes(plan) * outside_part(backward.profile, plan)
            if item.is_layer:
                born_per_segment = 0.0
        elif accumulating or plan.optimizer_in_backward:
            born_per_segment = 0.0
        rise, left_bytes = backward.rise_and_left(item)
        for num_before in dict.fromkeys((0, item.count - 1)):
            gradients_now = born_bytes + num_before * born_per_segment
            is_received = num_before > 0 or item is not placed[-1]
            live_here = live + num_before * left_bytes + (received if is_received else 0.0)
            live_here += born_bytes if accumulating else 0.0
            parts = {**resident, "gradients": gradients_now, "activations": max(live_here - gradients_now, 0.0)}
            parts |= {"loss": 0.0, "workspace": 0.0}
            parts["loss" if item.is_loss else "workspace"] += rise
            peaks.offer(_moment(item, is_last=is_last and num_before == 0, is_end=num_before > 0), parts)
        is_last = is_last and not item.is_layer
        live += item.count * left_bytes
        born_bytes += item.count * born_per_segment


def _moment(item: PlacedSegment, *, is_last: bool, is_end: bool) -> str:
    """Return the name of a moment of the backward pass. ``is_last``: the moment is in the last layer, whose pass is the
    first."""
    if item.is_layer:
        if is_last:
            return "last_layer"
        return "end" if is_end else "layers"
    return "head" if item.is_loss else "outside"


MEMORY_PARTS = ("weights", "gradients", "optimizer", "communication", "batch", "activations", "loss", "workspace", "libraries")
LASTING_PARTS = ("weights", "gradients", "optimizer", "communication", "batch", "libraries")
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class StepMemory:
    """Bytes by phase, of one process.

    ``recomputed``: bytes that the backward pass of one recomputed layer makes and drops. ``half_logits``: bytes of the logits
    before their fp32 copy, if the loss makes one.
    """

    phases: dict[str, Peak]
    recomputed: float = 0.0
    half_logits: float = 0.0

    @cached_property
    def peak(self) -> float:
        return max(peak.total for peak in self.phases.values())

    @cached_property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)


def with_libraries(memory: StepMemory, library_bytes: float) -> StepMemory:
    """Return ``memory`` with the bytes that libraries such as cuBLAS keep of torch's allocator from the first product on."""
    if not library_bytes:
        return memory
    phases = {
        name: Peak(total=peak.total + library_bytes, parts={**peak.parts, "libraries": library_bytes})
        for name, peak in memory.phases.items()
    }
    return replace(memory, phases=phases)


def scale_to_peak(memory: StepMemory, peak_bytes: float) -> StepMemory:
    """Return ``memory`` with the parts that do not last scaled, so that its peak is the measured ``peak_bytes``."""
    highest = memory.phases[memory.peak_phase]
    lasting = sum(highest.parts.get(part, 0.0) for part in LASTING_PARTS)
    factor = max(peak_bytes - lasting, 0.0) / max(highest.total - lasting, 1.0)
    phases = {}
    for name, peak in memory.phases.items():
        scaled_parts = {part: size * (1.0 if part in LASTING_PARTS else factor) for part, size in peak.parts.items()}
        phases[name] = Peak(total=sum(scaled_parts.values()), parts=scaled_parts)
    return StepMemory(phases=phases, recomputed=memory.recomputed * factor, half_logits=memory.half_logits)


def predict_memory(profile: ModelProfile, trace: StepTrace, plan: Plan, *, shape: tuple[int, int] | None = None) -> StepMemory:
    """Return the peak bytes of a steady optimizer step, on the rank that needs most.

    A steady step is the second or a later one: the optimizer state exists. ``shape``: rows and tokens a row of the largest
    micro-batch; None: the plan's own.
    """
    shape = shape or (plan.per_device_train_batch_size, plan.sequence_length)
    memory_by_rank = []
    for stage in deciding_stages(profile, plan):
        share = share_of(profile, plan, stage)
        if has_earlier_gradients(plan):
            micro_batch = micro_batch_memory(profile, trace, plan, stage, shape=shape)
            memory_by_rank.append(step_memory(micro_batch, profile, plan, stage, share))
        else:
            memory_by_rank.append(_predict_first_backward(profile, trace, plan, stage, share, shape))
    return max(memory_by_rank, key=lambda memory: memory.peak)


def has_earlier_gradients(plan: Plan) -> bool:
    """Return whether gradients exist before a backward pass of a step.

    They are those of an earlier micro-batch, or the buckets that ranks exchange.
    """
    buckets = plan.device != "cpu" and plan.num_processes > 1
    return plan.gradient_accumulation_steps > 1 or buckets or plan.layout != ALONE


@dataclass(frozen=True)
class MicroBatchMemory:
    """The memory of one micro-batch on a rank: its peaks while it runs, and the bytes that it holds while another one runs."""

    first: Peaks | None  # gradients are allocated in the backward pass; None where they always exist
    later: Peaks  # gradients exist before the backward pass
    left: float  # bytes that its layers leave for the backward pass
    left_of_loss: float
    recomputed: float
    batch: float
    hidden: float  # hidden states at the border of two layers
    outputs: float  # gradients of the products with weights, which are all held if weights' gradients are computed later
    half_logits: float


def micro_batch_memory(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, *, shape: tuple[int, int], memo: Memo | None = None
) -> MicroBatchMemory:
    """Return the memory of one micro-batch on a rank. It is the same for all plans with the same layers and tokens on a rank."""
    batch = shape[0]
    sequence = -(-shape[1] // plan.layout.context_parallel)
    placed = place_segments(profile, trace, plan, stage, memo=memo)
    has_pipeline = plan.layout.pipeline_parallel > 1
    hidden = float(batch * sequence * (profile.hidden_size or 0) * residual_bytes(plan))
    hidden /= plan.layout.tensor_parallel if plan.layout.sequence_parallel else 1
    # Each stage makes the tensors of the first gap except the embedding's output, which comes from another rank.
    unplaced = 0.0 if stage.has_embedding else max(trace.gaps[0].forward.left.at(batch, sequence) - hidden, 0.0)
    logits = _logits_bytes(profile, plan, batch * sequence)
    received_bytes = hidden if has_pipeline and not stage.has_head else 0.0  # the gradient of its output

    def peaks(*, accumulating: bool) -> Peaks:
        result = Peaks(by_moment=plan.layout.gathers)
        live = offer_forward_peaks(result, {}, placed, 0.0, plan, batch, sequence, beside=unplaced)
        gradients = 0.0 if accumulating else share_of(profile, plan, stage).gradients
        backward = Backward(plan, profile, batch, sequence, accumulating)
        offer_backward_peaks(result, {}, placed, live, gradients, backward, received=received_bytes)
        return result

    left_of_loss = sum(item.segment.forward.left.at(batch, sequence) for item in placed if item.is_loss)
    left_elsewhere = sum(item.count * item.segment.forward.left.at(batch, sequence) for item in placed if not item.is_loss)
    return MicroBatchMemory(
        first=None if gradients_preexist(plan) else peaks(accumulating=False),
        later=peaks(accumulating=True),
        left=unplaced + left_elsewhere,
        left_of_loss=left_of_loss,
        recomputed=_recomputed_bytes(placed, batch, sequence),
        batch=batch_bytes(profile, plan, batch, sequence),
        hidden=hidden,
        outputs=_weight_output_bytes(profile, plan, stage, batch * sequence),
        half_logits=_half_logits_bytes(logits, plan, stage),
    )


def step_memory(micro_batch: MicroBatchMemory, profile: ModelProfile, plan: Plan, stage: Stage, share: Share) -> StepMemory:
    """Return the memory of a step on a rank that has ``share`` of the model.

    The pipeline's stage says how many micro-batches are in flight.
    """
    in_flight = stage.in_flight
    resident = _resident_parts(share, profile, micro_batch.batch * in_flight.batches)
    phases = {name: Peak() for name in PHASES}
    in_transit = micro_batch.hidden * in_flight.hidden
    if in_flight.first and micro_batch.first is not None:
        _offer_peaks(phases, micro_batch, micro_batch.first, in_flight, share, resident, (in_flight.first, 0.0, in_transit))
    if in_flight.later:
        in_transit += micro_batch.hidden * in_flight.sent
        existing = (in_flight.later, share.accumulated_gradients, in_transit)
        _offer_peaks(phases, micro_batch, micro_batch.later, in_flight, share, resident, existing)
        if in_flight.splits:
            num_micro_batches = in_flight.later + in_flight.pending
            activations = num_micro_batches * micro_batch.left
            activations += (in_flight.pending + 1) * (micro_batch.outputs + micro_batch.left_of_loss)
            gradients = share.accumulated_gradients if plan.gradient_accumulation_steps > in_flight.pending + 1 else 0.0
            parts = {"gradients": gradients, "activations": activations, "communication": in_transit}
            phases["backward"].offer({**resident, **parts})
    phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": share.workspace})
    return StepMemory(phases, micro_batch.recomputed, micro_batch.half_logits)


def _offer_peaks(
    phases: dict[str, Peak],
    micro_batch: MicroBatchMemory,
    peaks: Peaks,
    in_flight: InFlight,
    share: Share,
    resident: dict[str, float],
    existing: tuple[float, float, float],
) -> None:
    """Offer the peaks of one micro-batch to ``phases``.

    ``existing``: the micro-batches whose activations exist, the bytes of gradients, and the bytes of hidden states in buffers.
    """
    count, gradients, in_transit = existing
    other_activations = 0.0
    if count > 1.0:
        other_activations = (count - 1.0) * (micro_batch.left + micro_batch.left_of_loss * in_flight.losses)
    for moment, peak in peaks.peaks.items():
        transient = in_transit + (getattr(share.transients, moment) if share.transients else 0.0)
        moment_parts = {**peak.parts, **resident, "activations": peak.parts["activations"] + other_activations}
        moment_parts["gradients"] = peak.parts["gradients"] + gradients
        if transient:
            moment_parts["communication"] = transient
        phases[PHASE_OF_MOMENT.get(moment, moment)].offer(moment_parts)


def _weight_output_bytes(profile: ModelProfile, plan: Plan, stage: Stage, tokens: int) -> float:
    """Return the bytes of the gradients of the outputs of all products with the stage's weights, a row for each token."""
    outputs = 0.0
    vocabulary = profile.vocab_size or 0
    for shape in trained_shapes(profile):
        if len(shape.shape) == 2 and shape.shape[0] != vocabulary:
            outputs += shape.count * shape.shape[0] / plan.layout.tensor_parallel
        elif len(shape.shape) == 3 and profile.experts is not None:  # a token is sent to some of the experts
            outputs += shape.count * shape.shape[1] * profile.experts.per_token
        elif shape.shape == (profile.hidden_size,):
            outputs += shape.count * shape.shape[0]
    outputs *= (stage.last - stage.first) / max(profile.num_layers, 1)
    return tokens * compute_bytes(plan) * (outputs + vocabulary * stage.has_head)


def _resident_parts(share: Share, profile: ModelProfile, batch: float) -> dict[str, float]:
    return {"weights": share.weights + profile.parameters.buffers_bytes, "optimizer": share.optimizer, "batch": batch}


def _predict_first_backward(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, share: Share, shape: tuple[int, int]
) -> StepMemory:
    """Return the memory of one process that allocates gradients in the only backward pass of the step."""
    placed = place_segments(profile, trace, plan, stage)
    peaks = Peaks(by_moment=False)
    resident = _resident_parts(share, profile, batch_bytes(profile, plan, *shape))
    live = offer_forward_peaks(peaks, resident, placed, 0.0, plan, *shape)
    offer_backward_peaks(peaks, resident, placed, live, share.gradients, Backward(plan, profile, *shape, accumulating=False))
    phases = {name: peaks.peaks.get(name, Peak()) for name in PHASES}
    if not plan.optimizer_in_backward:
        phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": share.workspace})
    half_logits = _half_logits_bytes(_logits_bytes(profile, plan, shape[0] * shape[1]), plan, stage)
    return StepMemory(phases, _recomputed_bytes(placed, *shape), half_logits)


def _logits_bytes(profile: ModelProfile, plan: Plan, tokens: int) -> float:
    """Return the bytes of a rank's logits, without the tensors that the loss makes from them.

    Return 0 where the loss is computed in chunks or by a kernel of its own.
    """
    if plan.loss_chunk_tokens or plan.loss_kernel != "eager":
        return 0.0
    ranks = plan.layout.tensor_parallel if plan.layout.vocabulary_parallel else 1
    return float(tokens * (profile.vocab_size or 0) * compute_bytes(plan)) / ranks


def _half_logits_bytes(logits: float, plan: Plan, stage: Stage) -> float:
    return logits if stage.has_head and compute_bytes(plan) < 4 else 0.0


def _recomputed_bytes(placed: list[PlacedSegment], batch: int, sequence: int) -> float:
    rises = [highest_at(item.segment.backward_accumulating.rise, batch, sequence) for item in placed if item.is_recomputed]
    return max(rises, default=0.0)


def batch_bytes(profile: ModelProfile, plan: Plan, batch: int, sequence: int) -> float:
    """Return the bytes of token ids and labels (int64), and of position ids or a mask where the plan passes one.

    Return 0 for images: they are the trace's own input.
    """
    if profile.objective == "image-classification":
        return 0.0
    tensors = 3 if plan.packing or profile.objective != "causal-lm" else 2
    return 8.0 * batch * sequence * tensors


WITH_LOGITS = "evaluation with logits"  # for a user's own metrics; upshift train needs only the loss


def phase_memory(
    profile: ModelProfile, trace: StepTrace, plan: Plan, memory: StepMemory, *, shape: tuple[int, int]
) -> dict[str, Peak]:
    """Return the peak of every phase, in order. On a CUDA device saving takes host memory, so it is left out.

    ``memory``: the memory of a steady step. ``shape``: rows and tokens a row of the largest micro-batch.
    """
    stage = deciding_stages(profile, plan)[-1]
    share = share_of(profile, plan, stage)
    largest = float(profile.parameters.largest * plan.parameter_bytes)
    model = {"weights": share.weights + profile.parameters.buffers_bytes}
    resident = {**model, "optimizer": share.optimizer}
    phases = {"load": _peak_of({**model, "workspace": largest}), "first step": _first_step_peak(memory)}
    phases |= memory.phases
    libraries = {part: size for part, size in memory.phases[memory.peak_phase].parts.items() if part == "libraries"}
    in_use = {**resident, **libraries}
    phases["evaluation"] = _peak_of(_evaluation_parts(profile, trace, plan, shape) | in_use)
    if plan.loss_chunk_tokens and trace.chunked_gap is not None:
        unchunked = plan.model_copy(update={"loss_chunk_tokens": 0})
        phases[WITH_LOGITS] = _peak_of(_evaluation_parts(profile, trace, unchunked, shape) | in_use)
    if plan.device == "cpu":
        phases["save"] = _peak_of({**resident, "communication": share.weights + share.optimizer})
    phases["resume"] = _peak_of({**resident, "workspace": largest})
    return phases


def required_bytes(phase: str, peak: Peak) -> float:
    """Return the bytes without which the phase fails. A save that has no room for copies writes without them."""
    copies = peak.parts.get("communication", 0.0) if phase == "save" else 0.0
    return peak.total - copies


def _peak_of(parts: dict[str, float]) -> Peak:
    peak = Peak()
    peak.offer(parts)
    return peak


def _first_step_peak(memory: StepMemory) -> Peak:
    """Return the peak of the first step. The optimizer state does not exist before the first update."""
    peak = Peak()
    for name, phase in memory.phases.items():
        peak.offer(phase.parts if name == "optimizer" else {**phase.parts, "optimizer": 0.0})
    return peak


def _evaluation_parts(profile: ModelProfile, trace: StepTrace, plan: Plan, shape: tuple[int, int]) -> dict[str, float]:
    """Return the bytes of a micro-batch without gradients, by part.

    A layer leaves only its result. On top comes the peak of one layer, or of the head.
    """
    batch = shape[0]
    sequence = -(-shape[1] // plan.layout.context_parallel)
    stage = deciding_stages(profile, plan)[-1]
    placed = place_segments(profile, trace, plan.model_copy(update={"activation_checkpointing": 0}), stage)
    hidden_bytes = batch * sequence * (profile.hidden_size or 0) * float(plan.parameter_bytes)
    rises = {"activations": 0.0, "loss": 0.0}
    for item in placed:
        name = "loss" if item.is_loss else "activations"
        rises[name] = max(rises[name], highest_at(item.segment.forward.rise, batch, sequence) + item.scratch)
    if rises["loss"] >= rises["activations"]:
        return {"activations": hidden_bytes, "loss": rises["loss"]}
    return {"activations": hidden_bytes + rises["activations"]}
