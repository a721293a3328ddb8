"""Predicted memory of a training step, by phase and part, by walking the profile's segments.

Allocated bytes are exact where the traced operators are those that run (COSTS.md D2, D3): eager kernels on one device.
Ignored: scratch inside kernels (under 1.1 % of the peak where measured). A compiled layer keeps what torch.compile's own
partition keeps (cost/compiled.py); its temporaries are taken to be those of the operators that it fuses, which is more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from upshift.models.profile import ModelProfile, StepTrace, highest
from upshift.planning.cost.optimizer import trained_shapes, update_workspace_bytes, workspace_bytes
from upshift.planning.cost.segments import Placed, place_segments
from upshift.planning.cost.share import Share, Stage, compute_bytes, share_of, stages
from upshift.planning.plan import ALONE, Plan

PARTS = ("weights", "gradients", "optimizer", "communication", "batch", "activations", "loss", "workspace")
LASTING_PARTS = ("weights", "gradients", "optimizer", "communication", "batch")
PHASES = ("forward", "backward", "optimizer")
# Of one micro-batch's hidden states: gradients of several matrices' inputs are summed over tensor-parallel ranks one by one,
# into new tensors. Measured between two gloo ranks: 4.0 in each of four settings (tests/cpu/test_layouts.py).
EXCHANGED_COPIES = 4


@dataclass
class Peak:
    """The highest moment of a phase, and what it is made of."""

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def offer(self, parts: dict[str, float]) -> None:
        total = sum(parts.values())
        if total > self.total:
            self.total, self.parts = total, parts


# A step's moments, in order: what ranks hold of each other's differs between them (Passing).
PHASE_OF_MOMENT = {
    "forward": "forward", "loss": "forward",
    "head": "backward", "last_layer": "backward", "layers": "backward", "outside": "backward",
}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """The highest point of each moment of a step where they are ``apart``, else of each phase."""

    apart: bool
    found: dict[str, Peak] = field(default_factory=dict)

    def offer(self, moment: str, parts: dict[str, float]) -> None:
        self.found.setdefault(moment if self.apart else PHASE_OF_MOMENT[moment], Peak()).offer(parts)


@dataclass(frozen=True)
class StepMemory:
    """Bytes by phase, of one process. ``recomputed``: what the backward pass of one recomputed layer makes and drops."""

    phases: dict[str, Peak]
    recomputed: float = 0.0

    @property
    def peak(self) -> float:
        return max(peak.total for peak in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)


def scaled_to(memory: StepMemory, peak_bytes: float) -> StepMemory:
    """The same with what comes and goes scaled, so that the peak is the measured one (compiled layers save less)."""
    highest = memory.phases[memory.peak_phase]
    lasting = sum(highest.parts.get(part, 0.0) for part in LASTING_PARTS)
    factor = max(peak_bytes - lasting, 0.0) / max(highest.total - lasting, 1.0)
    phases = {}
    for name, peak in memory.phases.items():
        parts = {part: size * (1.0 if part in LASTING_PARTS else factor) for part, size in peak.parts.items()}
        phases[name] = Peak(total=sum(parts.values()), parts=parts)
    return StepMemory(phases=phases, recomputed=memory.recomputed * factor)


def predict_memory(profile: ModelProfile, trace: StepTrace, plan: Plan, *, shape: tuple[int, int] | None = None) -> StepMemory:
    """Peak bytes of a steady optimizer step (the second and later ones: the optimizer's state exists), of the rank that needs
    most.

    ``shape``: rows and tokens a row of the largest micro-batch; None: the plan's own.
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
    """Whether gradients exist before a backward pass: of an earlier micro-batch, or as the buckets that ranks exchange."""
    buckets = plan.device != "cpu" and plan.num_processes > 1
    return plan.gradient_accumulation_steps > 1 or buckets or plan.layout != ALONE


@dataclass(frozen=True)
class Walk:
    """What comes and goes while one micro-batch runs on a rank; ``left``: its activations when another one takes its turn."""

    peaks: Peaks
    left: float
    recomputed: float
    batch: float
    exchanged: float  # copies of hidden states on their way between ranks


def walk_stage(profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, *, shape: tuple[int, int]) -> Walk:
    """Onto gradients that exist. The same for every plan that shares neither more nor fewer layers and tokens."""
    batch, sequence = shape[0], -(-shape[1] // plan.layout.context_parallel)
    placed, peaks = place_segments(profile, trace, plan, stage), Peaks(apart=plan.layout.gathers)
    live = _walk_forward(peaks, {}, placed, 0.0, plan, batch, sequence)
    _walk_backward(peaks, {}, placed, live, 0.0, _backward_of(profile, plan, batch, sequence))
    left = sum(item.count * item.segment.forward.left.at(batch, sequence) for item in placed if not item.is_loss)
    exchanged = EXCHANGED_COPIES * batch * sequence * (profile.hidden_size or 0) * compute_bytes(plan)
    return Walk(
        peaks, left, _recomputed(placed, batch, sequence), batch_bytes(profile, plan, batch, sequence),
        exchanged if plan.layout.tensor_parallel > 1 else 0.0,
    )  # fmt: skip


def add_share(walk: Walk, profile: ModelProfile, plan: Plan, stage: Stage, share: Share) -> StepMemory:
    """The step's memory on a rank that has ``share`` of the model and whose micro-batches wait as the pipeline says."""
    resident = _resident(share, profile, walk.batch)
    waiting = (stage.waiting - 1.0) * walk.left if stage.waiting > 1.0 else 0.0
    phases = {name: Peak() for name in PHASES}
    for moment, peak in walk.peaks.found.items():
        passing = walk.exchanged + (getattr(share.passing, moment) if share.passing else 0.0)
        parts = {**peak.parts, **resident, "activations": peak.parts["activations"] + waiting}
        parts["gradients"] = peak.parts["gradients"] + share.gradients
        if passing:
            parts["communication"] = passing
        phases[PHASE_OF_MOMENT.get(moment, moment)].offer(parts)
    workspace = workspace_bytes(profile, plan) * share.updated
    phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": workspace})
    return StepMemory(phases, walk.recomputed)


def _resident(share: Share, profile: ModelProfile, batch: float) -> dict[str, float]:
    return {"weights": share.weights + profile.parameters.buffers_bytes, "optimizer": share.optimizer, "batch": batch}


def _predict_first_backward(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage, share: Share, shape: tuple[int, int]
) -> StepMemory:
    """One process whose gradients are born in the step's only backward pass."""
    placed, peaks = place_segments(profile, trace, plan, stage), Peaks(apart=False)
    resident = _resident(share, profile, batch_bytes(profile, plan, *shape))
    live = _walk_forward(peaks, resident, placed, 0.0, plan, *shape)
    _walk_backward(peaks, resident, placed, live, share.gradients, _backward_of(profile, plan, *shape))
    phases = {name: peaks.found.get(name, Peak()) for name in PHASES}
    if not plan.optimizer_in_backward:
        workspace = workspace_bytes(profile, plan) * share.updated
        phases["optimizer"].offer({**resident, "gradients": share.gradients, "workspace": workspace})
    return StepMemory(phases, _recomputed(placed, *shape))


def _backward_of(profile: ModelProfile, plan: Plan, batch: int, sequence: int) -> _Backward:
    return _Backward(plan, tuple(shape.elements for shape in trained_shapes(profile)), profile, batch, sequence)


def _recomputed(placed: list[Placed], batch: int, sequence: int) -> float:
    rises = [highest(item.segment.backward_accumulating.rise, batch, sequence) for item in placed if item.is_recomputed]
    return max(rises, default=0.0)


def _walk_forward(
    peaks: Peaks,
    resident: dict[str, float],
    placed: list[Placed],
    gradients: float,
    plan: Plan,
    batch: int,
    sequence: int,
) -> float:
    """Returns what is live when the forward pass has ended."""
    held = {"activations": 0.0, "loss": 0.0}
    released = 0.0
    for item in placed:
        cost, own = item.segment.forward, "loss" if item.is_loss else "activations"
        rise, left = max(highest(cost.rise, batch, sequence), 0.0) + item.scratch, cost.left.at(batch, sequence)
        released_here = cost.released.at(batch, sequence)
        if plan.activation_offload and item.is_layer:
            left, released_here = 0.0, 0.0
        for before in {0, item.count - 1}:
            parts = {**resident, "gradients": gradients, **held, "workspace": 0.0}
            parts[own] += before * left
            parts["loss" if item.is_loss else "workspace"] += rise
            peaks.offer("loss" if item.is_loss else "forward", parts)
        held[own] += item.count * left
        released += item.count * released_here
    return held["activations"] + held["loss"] - released


@dataclass(frozen=True)
class _Backward:
    """How the backward pass of a segment moves memory under a plan."""

    plan: Plan
    tensors: tuple[int, ...]  # elements of the trained parameters
    profile: ModelProfile
    batch: int
    sequence: int

    @property
    def accumulating(self) -> bool:
        return accumulates(self.plan)

    def of(self, item: Placed, own: float) -> tuple[float, float]:
        """(bytes above the entry at the highest moment, bytes that stay); ``own``: the segment's gradients."""
        segment, at = item.segment, (self.batch, self.sequence)
        gathers = self.plan.layout.gathers
        cost = segment.backward_accumulating if self.accumulating and not gathers else segment.backward
        left = (segment.backward_accumulating if gathers and item.is_layer else cost).left.at(*at)
        rises = [rise.at(*at) for rise in cost.rise]
        if self.plan.optimizer_in_backward and own:
            largest = max((size for size in self.tensors if size <= item.parameters), default=0)
            alone = own * largest / item.parameters
            workspace = update_workspace_bytes(self.profile, self.plan, largest)
            # What does not grow with the batch are gradients: those born before are gone, the largest one may be there.
            freed = [max(min(rise.one, own) - alone, 0.0) for rise in cost.rise]
            rises = [rise - gone for rise, gone in zip(rises, freed, strict=True)]
            # A layer's first update comes while its activations are there, a head's when the logits are gone.
            held = 0.0 if item.is_layer else left - own
            if item.remade is not None:
                held = item.remade.forward.left.at(*at) - item.remade.forward.released.at(*at)
            rises.append(held + alone + workspace)
            left -= own
        highest_rise = max(rises, default=0.0)
        if self.plan.activation_offload and item.is_layer:
            back = segment.forward.left.at(*at) - segment.forward.released.at(*at)
            highest_rise, left = highest_rise + back, left + back
        return max(highest_rise, 0.0), left


def _walk_backward(
    peaks: Peaks, resident: dict[str, float], placed: list[Placed], live: float, gradients: float, backward: _Backward
) -> None:
    """``live`` is what forward left. In a first backward gradients are born as segments finish; later they all exist. Where
    ranks divide them, a layer's are born and go, and those outside the layers stay until the pass has ended."""
    plan, tied = backward.plan, backward.profile.parameters.tied
    gathers, in_backward = plan.layout.gathers, plan.optimizer_in_backward
    accumulating = backward.accumulating and not gathers
    born = gradients if accumulating else 0.0
    per_parameter = gradients / max(sum(item.count * item.parameters for item in placed), 1)
    is_last = True
    for item in reversed(placed):
        own = 0.0 if accumulating else item.parameters * per_parameter
        if gathers:
            own = 0.0 if item.is_layer else float(item.parameters * compute_bytes(plan))
        waits = in_backward and not (tied and item.is_loss)  # a tied head's gradient is whole when the embedding's is born
        rise, left = backward.of(item, own if waits else 0.0)
        own = 0.0 if waits else own
        for before in {0, item.count - 1}:
            gradients_now = born + before * own
            total = live + before * left + (born if accumulating else 0.0)
            parts = {**resident, "gradients": gradients_now, "activations": max(total - gradients_now, 0.0)}
            parts |= {"loss": 0.0, "workspace": 0.0}
            parts["loss" if item.is_loss else "workspace"] += rise
            peaks.offer(_moment(item, is_last=is_last and before == 0), parts)
        is_last = is_last and not item.is_layer
        live += item.count * left
        born += item.count * own


def _moment(item: Placed, *, is_last: bool) -> str:
    if item.is_layer:
        return "last_layer" if is_last else "layers"
    return "head" if item.is_loss else "outside"


def batch_bytes(profile: ModelProfile, plan: Plan, batch: int, sequence: int) -> float:
    """Token ids and labels (int64), and position ids or a mask where the plan passes one. Images: the trace's own input."""
    if profile.objective == "image-classification":
        return 0.0
    tensors = 3 if plan.packing or profile.objective != "causal-lm" else 2
    return 8.0 * batch * sequence * tensors
