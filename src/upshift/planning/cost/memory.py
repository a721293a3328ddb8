"""Predict the memory of a training step, by phase and part, from the profile's segments.

Allocated bytes are exact where the traced operators are those that run (COSTS.md D2, D3): eager kernels on one device. Ignored:
scratch inside kernels (under 1.1 % of the peak where measured; on a CPU with bf16 instructions oneDNN's products take 0.05 to
0.2 MB a thread). A compiled layer keeps what torch.compile's own partition keeps (cost/compiled.py). Its temporaries are taken
to be those of the operators that it fuses, which is more.

Find the highest points of a micro-batch's forward and backward pass, segment by segment.

Predict the memory of a job around its training steps, on the rank that needs most: loading, the first step, evaluation,
saving, resuming.

Bytes are listed by part, as those of a step. Each phase follows what training/ does in it. Loading reads weights tensor by
tensor. The first update creates the optimizer state. Evaluation runs the steps' micro-batches without gradients. A save copies
weights and optimizer state to host memory, and writes without copies if they have no room there. A training run generates
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from upshift.models.profile import ModelProfile, StepTrace, highest_at
from upshift.planning.cost.memo import Known
from upshift.planning.cost.optimizer import trained_shapes, update_workspace_bytes
from upshift.planning.cost.partition import (
    Share,
    Stage,
    Waiting,
    compute_bytes,
    gradients_exist,
    outside_part,
    residual_bytes,
    share_of,
    stages,
)
from upshift.planning.cost.segments import Placed, place_segments
from upshift.planning.plan import ALONE, Plan


@dataclass
class Peak:
    """The highest moment of a phase, and its parts in bytes."""

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def offer(self, parts: dict[str, float]) -> None:
        """Keep ``parts`` if they are the first, or more than those before: a moment that holds nothing has its parts, too."""
        total = sum(parts.values())
        if not self.parts or total > self.total:
            self.total, self.parts = total, parts


# A step's moments, in order. At each of them a rank holds another amount of other ranks' parts (Passing).
PHASE_OF_MOMENT = {
    "start": "forward", "forward": "forward", "loss": "forward",
    "head": "backward", "last_layer": "backward", "layers": "backward", "end": "backward", "outside": "backward",
}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """The highest point of each moment of a step where they are ``apart``, else of each phase."""

    apart: bool
    found: dict[str, Peak] = field(default_factory=dict)

    def offer(self, moment: str, parts: dict[str, float]) -> None:
        self.found.setdefault(moment if self.apart else PHASE_OF_MOMENT[moment], Peak()).offer(parts)


def walk_forward(
    peaks: Peaks,
    resident: dict[str, float],
    placed: list[Placed],
    gradients: float,
    plan: Plan,
    batch: int,
    sequence: int,
    *,
    beside: float = 0.0,
) -> float:
    """Return the bytes that are live when the forward pass has ended. ``beside``: activations that no segment of ``placed``
    makes."""
    held = {"activations": beside, "loss": 0.0}
    released = 0.0
    for item in placed:
        cost, own = item.segment.forward, "loss" if item.is_loss else "activations"
        rise, left = max(highest_at(cost.rise, batch, sequence), 0.0) + item.scratch, cost.left.at(batch, sequence)
        released_here = cost.released.at(batch, sequence)
        if plan.activation_offload and item.is_layer:
            left, released_here = 0.0, 0.0
        for before in {0, item.count - 1}:
            parts = {**resident, "gradients": gradients, **held, "workspace": 0.0}
            parts[own] += before * left
            parts["loss" if item.is_loss else "workspace"] += rise
            peaks.offer("loss" if item.is_loss else "forward" if before else "start", parts)
        held[own] += item.count * left
        released += item.count * released_here
    return held["activations"] + held["loss"] - released


@dataclass(frozen=True)
class Backward:
    """The backward pass of a segment under a plan: how it moves memory."""

    plan: Plan
    profile: ModelProfile
    batch: int
    sequence: int
    accumulating: bool  # gradients exist, and the pass adds to them

    @property
    def divides(self) -> bool:
        """Return whether ranks divide gradients layer by layer as they are born. A pipeline's ranks do so after the last
        micro-batch."""
        return self.plan.layout.gathers and self.plan.layout.pipeline_parallel == 1

    def of(self, item: Placed) -> tuple[float, float]:
        """Return (bytes above the entry at the highest moment, bytes that stay)."""
        segment, at = item.segment, (self.batch, self.sequence)
        cost = segment.backward_accumulating if self.accumulating and not self.divides else segment.backward
        left = (segment.backward_accumulating if self.divides and item.is_layer else cost).left.at(*at)
        rises = [rise.at(*at) for rise in cost.rise]
        if self.plan.optimizer_in_backward and segment.gradients_go is not None:
            gone = segment.gradients_go
            rises = [rise.at(*at) for rise in gone.rise]
            rises += [live.at(*at) + update_workspace_bytes(self.profile, self.plan, size) for size, live in gone.moments]
            left -= gone.born.at(*at)
        highest_rise = max(rises, default=0.0)
        if self.plan.activation_offload and item.is_layer:
            back = segment.forward.left.at(*at) - segment.forward.released.at(*at)
            highest_rise, left = highest_rise + back, left + back
        return max(highest_rise, 0.0), left


def walk_backward(
    peaks: Peaks,
    resident: dict[str, float],
    placed: list[Placed],
    live: float,
    gradients: float,
    backward: Backward,
    *,
    received: float = 0.0,
) -> None:
    """Offer the moments of the backward pass to ``peaks``.

    In a first backward pass gradients are born as segments finish. Later they all exist. Where ranks divide them, a layer's are
    born and go, and those outside the layers stay until the pass has ended. ``live``: bytes that the forward pass left.
    ``received``: bytes of a buffer with the gradient of the last layer's output, which the last layer seems to free.
    """
    plan, divides = backward.plan, backward.divides
    accumulating = backward.accumulating and not divides
    born = gradients if accumulating else 0.0
    per_parameter = gradients / max(sum(item.count * item.parameters for item in placed), 1)
    is_last = True
    for item in reversed(placed):
        own = 0.0 if accumulating or plan.optimizer_in_backward else item.parameters * per_parameter
        if divides:
            own = 0.0 if item.is_layer else item.parameters * compute_bytes(plan) * outside_part(backward.profile, plan)
        rise, left = backward.of(item)
        for before in {0, item.count - 1}:
            gradients_now = born + before * own
            total = live + before * left + (received if before or item is not placed[-1] else 0.0)
            total += born if accumulating else 0.0
            parts = {**resident, "gradients": gradients_now, "activations": max(total - gradients_now, 0.0)}
            parts |= {"loss": 0.0, "workspace": 0.0}
            parts["loss" if item.is_loss else "workspace"] += rise
            peaks.offer(_moment(item, is_last=is_last and before == 0, is_end=before > 0), parts)
        is_last = is_last and not item.is_layer
        live += item.count * left
        born += item.count * own


def _moment(item: Placed, *, is_last: bool, is_end: bool) -> str:
    if item.is_layer:
        return "last_layer" if is_last else "end" if is_end else "layers"
    return "head" if item.is_loss else "outside"


PARTS = ("weights", "gradients", "optimizer", "communication", "batch", "activations", "loss", "workspace")
LASTING_PARTS = ("weights", "gradients", "optimizer", "communication", "batch")
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


def scaled_to(memory: StepMemory, peak_bytes: float) -> StepMemory:
    """Return ``memory`` with its passing parts scaled so that the peak is the measured one (compiled layers save less)."""
    highest = memory.phases[memory.peak_phase]
    lasting = sum(highest.parts.get(part, 0.0) for part in LASTING_PARTS)
    factor = max(peak_bytes - lasting, 0.0) / max(highest.total - lasting, 1.0)
    phases = {}
    for name, peak in memory.phases.items():
        parts = {part: size * (1.0 if part in LASTING_PARTS else factor) for part, size in peak.parts.items()}
        phases[name] = Peak(total=sum(parts.values()), parts=parts)
    return StepMemory(phases=phases, recomputed=memory.recomputed * factor, half_logits=memory.half_logits)


def predict_memory(profile: ModelProfile, trace: StepTrace, plan: Plan, *, shape: tuple[int, int] | None = None) -> StepMemory:
    """Return the peak bytes of a steady optimizer step, on the rank that needs most.

    A steady step is the second or a later one: the optimizer state exists. ``shape``: rows and tokens a row of the largest
    micro-batch; None: the plan's own.
    """
    shape = shape or (plan.per_device_train_batch_size, plan.sequence_length)
    of_ranks = []
    for stage in stages(profile, plan):
        share = share_of(profile, plan, stage)
        if accumulates(plan):
            walk = walk_stage(profile, trace, plan, stage, shape=shape)
            of_ranks.append(add_share(walk, profile, plan, stage, share))
        else:
            of_ranks.append(_predict_first_backward(profile, trace, plan, stage, share, shape))
    return max(of_ranks, key=lambda memory: memory.peak)


def accumulates(plan: Plan) -> bool:
    """Return whether gradients exist before a backward pass: of an earlier micro-batch, or as the buckets that ranks exchange."""
    buckets = plan.device != "cpu" and plan.num_processes > 1
    return plan.gradient_accumulation_steps > 1 or buckets or plan.layout != ALONE


@dataclass(frozen=True)
class Walk:
    """The memory that comes and goes while one micro-batch runs on a rank, and that it leaves there while another one runs."""

    first: Peaks | None  # gradients are born in the backward pass; None where they always exist
    later: Peaks  # gradients exist before the backward pass
    left: float
    left_of_loss: float
    recomputed: float
    batch: float
    hidden: float  # hidden states at the border of two layers
    outputs: float  # gradients of the products with weights: all wait if the weights' gradients are computed later
    half_logits: float


def walk_stage(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, *, shape: tuple[int, int], known: Known | None = None
) -> Walk:
    """Walk through one micro-batch on a rank. The result is the same for all plans that share the same layers and tokens."""
    batch, sequence = shape[0], -(-shape[1] // plan.layout.context_parallel)
    placed, piped = place_segments(profile, trace, plan, stage, known=known), plan.layout.pipeline_parallel > 1
    hidden = float(batch * sequence * (profile.hidden_size or 0) * residual_bytes(plan))
    hidden /= plan.layout.tensor_parallel if plan.layout.sequence_parallel else 1
    # Each stage makes what the first gap does but for the embedding: its input comes from another rank.
    beside = 0.0 if stage.has_embedding else max(trace.gaps[0].forward.left.at(batch, sequence) - hidden, 0.0)
    logits = _logits(profile, plan, batch * sequence)
    received = hidden if piped and not stage.has_head else 0.0  # the gradient of its output

    def peaks(*, accumulating: bool) -> Peaks:
        found = Peaks(apart=plan.layout.gathers)
        live = walk_forward(found, {}, placed, 0.0, plan, batch, sequence, beside=beside)
        born = 0.0 if accumulating else share_of(profile, plan, stage).gradients
        backward = _backward_of(profile, plan, batch, sequence, accumulating=accumulating)
        walk_backward(found, {}, placed, live, born, backward, received=received)
        return found

    loss = sum(item.segment.forward.left.at(batch, sequence) for item in placed if item.is_loss)
    return Walk(
        peaks(accumulating=False) if not gradients_exist(plan) else None, peaks(accumulating=True),
        beside + sum(item.count * item.segment.forward.left.at(batch, sequence) for item in placed if not item.is_loss),
        loss, _recomputed(placed, batch, sequence), batch_bytes(profile, plan, batch, sequence),
        hidden, _outputs_of_weights(profile, plan, stage, batch * sequence), _half_logits(logits, plan, stage),
    )  # fmt: skip


def add_share(walk: Walk, profile: ModelProfile, plan: Plan, stage: Stage, share: Share) -> StepMemory:
    """Return the memory of the step on a rank that has ``share`` of the model. Its micro-batches wait as the pipeline says."""
    waiting = stage.waiting
    resident = _resident(share, profile, walk.batch * waiting.batches)
    phases = {name: Peak() for name in PHASES}
    in_transit = walk.hidden * waiting.hidden
    if waiting.first and walk.first is not None:
        _add(phases, walk, walk.first, waiting, share, resident, (waiting.first, 0.0, in_transit))
    if waiting.later:
        in_transit += walk.hidden * waiting.sent
        _add(phases, walk, walk.later, waiting, share, resident, (waiting.later, share.gradients_between, in_transit))
        if waiting.splits:
            micro_batches = waiting.later + waiting.pending
            activations = micro_batches * walk.left + (waiting.pending + 1) * (walk.outputs + walk.left_of_loss)
            born = share.gradients_between if plan.gradient_accumulation_steps > waiting.pending + 1 else 0.0
            parts = {"gradients": born, "activations": activations, "communication": in_transit}
            phases["backward"].offer({**resident, **parts})
    phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": share.workspace})
    return StepMemory(phases, walk.recomputed, walk.half_logits)


def _add(
    phases: dict[str, Peak],
    walk: Walk,
    peaks: Peaks,
    waiting: Waiting,
    share: Share,
    resident: dict[str, float],
    now: tuple[float, float, float],
) -> None:
    """Offer the peaks of one micro-batch to ``phases``.

    ``now``: the micro-batches whose activations exist, the bytes of gradients, and the bytes of hidden states in buffers.
    """
    count, gradients, in_transit = now
    others = (count - 1.0) * (walk.left + walk.left_of_loss * waiting.losses) if count > 1.0 else 0.0
    for moment, peak in peaks.found.items():
        passing = in_transit + (getattr(share.passing, moment) if share.passing else 0.0)
        parts = {**peak.parts, **resident, "activations": peak.parts["activations"] + others}
        parts["gradients"] = peak.parts["gradients"] + gradients
        if passing:
            parts["communication"] = passing
        phases[PHASE_OF_MOMENT.get(moment, moment)].offer(parts)


def _outputs_of_weights(profile: ModelProfile, plan: Plan, stage: Stage, tokens: int) -> float:
    """Return the bytes of the gradients of every product with a weight of the stage: a row of outputs for each token."""
    width, vocabulary = 0.0, profile.vocab_size or 0
    for shape in trained_shapes(profile):
        if len(shape.shape) == 2 and shape.shape[0] != vocabulary:
            width += shape.count * shape.shape[0] / plan.layout.tensor_parallel
        elif len(shape.shape) == 3 and profile.experts is not None:  # a token is sent to some of the experts
            width += shape.count * shape.shape[1] * profile.experts.per_token
        elif shape.shape == (profile.hidden_size,):
            width += shape.count * shape.shape[0]
    width *= (stage.last - stage.first) / max(profile.num_layers, 1)
    return tokens * compute_bytes(plan) * (width + vocabulary * stage.has_head)


def _resident(share: Share, profile: ModelProfile, batch: float) -> dict[str, float]:
    return {"weights": share.weights + profile.parameters.buffers_bytes, "optimizer": share.optimizer, "batch": batch}


def _predict_first_backward(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, share: Share, shape: tuple[int, int]
) -> StepMemory:
    """Return the memory of one process whose gradients are born in the only backward pass of the step."""
    placed, peaks = place_segments(profile, trace, plan, stage), Peaks(apart=False)
    resident = _resident(share, profile, batch_bytes(profile, plan, *shape))
    live = walk_forward(peaks, resident, placed, 0.0, plan, *shape)
    walk_backward(peaks, resident, placed, live, share.gradients, _backward_of(profile, plan, *shape, accumulating=False))
    phases = {name: peaks.found.get(name, Peak()) for name in PHASES}
    if not plan.optimizer_in_backward:
        phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": share.workspace})
    half_logits = _half_logits(_logits(profile, plan, shape[0] * shape[1]), plan, stage)
    return StepMemory(phases, _recomputed(placed, *shape), half_logits)


def _logits(profile: ModelProfile, plan: Plan, tokens: int) -> float:
    """Return the bytes of a rank's logits, without what the loss makes of them.

    They are 0 where the loss is computed in chunks or by a kernel of its own.
    """
    if plan.loss_chunk_tokens or plan.loss_kernel != "eager":
        return 0.0
    ranks = plan.layout.tensor_parallel if plan.layout.vocabulary_parallel else 1
    return float(tokens * (profile.vocab_size or 0) * compute_bytes(plan)) / ranks


def _half_logits(logits: float, plan: Plan, stage: Stage) -> float:
    return logits if stage.has_head and compute_bytes(plan) < 4 else 0.0


def _backward_of(profile: ModelProfile, plan: Plan, batch: int, sequence: int, *, accumulating: bool) -> Backward:
    return Backward(plan, profile, batch, sequence, accumulating)


def _recomputed(placed: list[Placed], batch: int, sequence: int) -> float:
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


def life(profile: ModelProfile, trace: StepTrace, plan: Plan, memory: StepMemory, *, shape: tuple[int, int]) -> dict[str, Peak]:
    """Return the peak of every phase, in order. On a CUDA device saving takes host memory, so it is no phase here.

    ``memory``: of a steady step. ``shape``: rows and tokens a row of the largest micro-batch.
    """
    stage = stages(profile, plan)[-1]
    share = share_of(profile, plan, stage)
    largest = float(profile.parameters.largest * plan.parameter_bytes)
    model = {"weights": share.weights + profile.parameters.buffers_bytes}
    lasting = {**model, "optimizer": share.optimizer}
    found = {"load": _peak({**model, "workspace": largest}), "first step": _first_step(memory), **memory.phases}
    found["evaluation"] = _peak(_evaluation(profile, trace, plan, shape) | lasting)
    if plan.loss_chunk_tokens and trace.chunked_gap is not None:
        whole = plan.model_copy(update={"loss_chunk_tokens": 0})
        found[WITH_LOGITS] = _peak(_evaluation(profile, trace, whole, shape) | lasting)
    if plan.device == "cpu":
        found["save"] = _peak({**lasting, "communication": share.weights + share.optimizer})
    found["resume"] = _peak({**lasting, "workspace": largest})
    return found


def needed(phase: str, peak: Peak) -> float:
    """Return the bytes without which the phase fails. A save that has no room for copies writes without them."""
    return peak.total - (peak.parts.get("communication", 0.0) if phase == "save" else 0.0)


def _peak(parts: dict[str, float]) -> Peak:
    peak = Peak()
    peak.offer(parts)
    return peak


def _first_step(memory: StepMemory) -> Peak:
    """Return the peak of the first step: the optimizer state does not exist before the first update."""
    peak = Peak()
    for name, phase in memory.phases.items():
        peak.offer(phase.parts if name == "optimizer" else {**phase.parts, "optimizer": 0.0})
    return peak


def _evaluation(profile: ModelProfile, trace: StepTrace, plan: Plan, shape: tuple[int, int]) -> dict[str, float]:
    """Return the bytes of a micro-batch without gradients, by part.

    A layer leaves only its result. Beside it is the highest moment of one layer, or of the head.
    """
    batch, sequence = shape[0], -(-shape[1] // plan.layout.context_parallel)
    stage = stages(profile, plan)[-1]
    placed = place_segments(profile, trace, plan.model_copy(update={"activation_checkpointing": 0}), stage)
    hidden = batch * sequence * (profile.hidden_size or 0) * float(plan.parameter_bytes)
    rises = {"activations": 0.0, "loss": 0.0}
    for item in placed:
        part = "loss" if item.is_loss else "activations"
        rises[part] = max(rises[part], highest_at(item.segment.forward.rise, batch, sequence) + item.scratch)
    if rises["loss"] >= rises["activations"]:
        return {"activations": hidden, "loss": rises["loss"]}
    return {"activations": hidden + rises["activations"]}
