"""Predicted memory of a training step, by phase and part, by walking the profile's segments.

Allocated bytes are exact where the traced operators are those that run (COSTS.md D2, D3): eager kernels on one device.
Ignored: scratch inside kernels (under 1.1 % of the peak where measured), and what torch.compile saves by fusing: a
compiled plan is predicted as if it were not, which is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from upshift.models.profile import LOSS_CHUNK_TOKENS, ModelProfile, Segment, StepTrace, highest
from upshift.planning.cost.optimizer import state_bytes, trained_shapes, update_workspace_bytes, workspace_bytes
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

PARTS = ("weights", "gradients", "optimizer", "batch", "activations", "loss", "workspace")
LASTING_PARTS = ("weights", "gradients", "optimizer", "batch")
PHASES = ("forward", "backward", "optimizer")


@dataclass
class Peak:
    """The highest moment of a phase, and what it is made of."""

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def offer(self, parts: dict[str, float]) -> None:
        total = sum(parts.values())
        if total > self.total:
            self.total, self.parts = total, parts


@dataclass(frozen=True)
class Placed:
    """A run of ``count`` equal segments where it stands in the full model. What a segment leaves is the same for each of
    them, so the highest of a run is its first or its last."""

    segment: Segment
    count: int
    parameters: int  # that one of them trains
    is_loss: bool = False
    is_layer: bool = False
    scratch: float = 0.0  # bytes in the forward pass that the trace does not show
    remade: Segment | None = None  # the layer as it is when the backward pass has recomputed it

    @property
    def is_recomputed(self) -> bool:
        return self.remade is not None


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
    lasting = sum(highest.parts[part] for part in LASTING_PARTS)
    factor = max(peak_bytes - lasting, 0.0) / max(highest.total - lasting, 1.0)
    phases = {}
    for name, peak in memory.phases.items():
        parts = {part: size * (1.0 if part in LASTING_PARTS else factor) for part, size in peak.parts.items()}
        phases[name] = Peak(total=sum(parts.values()), parts=parts)
    return StepMemory(phases=phases, recomputed=memory.recomputed * factor)


def trace_for(profile: ModelProfile, plan: Plan, workload: Workload) -> StepTrace | None:
    """The trace that this plan's tensors follow; None where the profile has none (the plan cannot be predicted)."""
    masked = plan.packing and workload.lengths is not None
    if profile.objective != "causal-lm" and workload.lengths is not None:
        masked = True  # right padding must be masked where attention looks at later positions
    if plan.attention == "eager":
        masked = False  # it builds its mask in any case
    return profile.step(precision=plan.traced_precision, attention=plan.attention, masked=masked)


def place_segments(profile: ModelProfile, trace: StepTrace, plan: Plan) -> list[Placed]:
    """Every segment of the full model in forward order, the first ``activation_checkpointing`` layers recomputed."""
    head = profile.parameters.trainable_head
    outside = profile.parameters.trainable - profile.parameters.trainable_layers
    placed: list[Placed] = []
    to_recompute, recompute = plan.activation_checkpointing, plan.activation_checkpointing > 0
    last = len(profile.stacks)
    for number, stack in enumerate(profile.stacks):
        gap = trace.gaps_recomputed[number] if recompute else trace.gaps[number]
        placed.append(Placed(gap, 1, outside - head if number == 0 else 0))
        traced = trace.stacks[number]
        for index, count in _runs(stack.assignment, to_recompute):
            recompute = to_recompute > 0
            to_recompute = max(to_recompute - count, 0)
            segment = traced.recomputed[index] if recompute else traced.plain[index]
            remade = traced.plain[index] if recompute else None
            placed.append(Placed(segment, count, stack.layer_trainable[index], is_layer=True, remade=remade))
    gap = trace.gaps_recomputed[last] if recompute else trace.gaps[last]
    scratch = 0.0
    if plan.loss_chunk_tokens and trace.chunked_gap is not None:
        gap, scratch = trace.chunked_gap, chunk_scratch_bytes(profile, plan)
    placed.append(Placed(gap, 1, head if last else outside, is_loss=True, scratch=scratch))
    return placed


def chunk_scratch_bytes(profile: ModelProfile, plan: Plan) -> float:
    """What larger chunks than the traced ones hold; on a GPU also two copies of their logits in fp32 and the product for the
    weight's gradient, which the traced CPU makes by blocks."""
    words, product_bytes = profile.vocab_size or 0, 4 if plan.precision in ("fp32", "tf32") else 2
    larger = max(plan.loss_chunk_tokens - LOSS_CHUNK_TOKENS, 0) * words * product_bytes
    if plan.device != "cuda":
        return float(larger)
    return float(larger + words * max(8 * plan.loss_chunk_tokens, product_bytes * (profile.hidden_size or 0)))


def _runs(assignment: tuple[int, ...], to_recompute: int) -> list[tuple[int, int]]:
    """(traced layer, how many in a row), cut where recomputation ends."""
    runs: list[tuple[int, int]] = []
    for layer, index in enumerate(assignment):
        if runs and runs[-1][0] == index and layer != to_recompute:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def predict_memory(profile: ModelProfile, trace: StepTrace, plan: Plan, *, shape: tuple[int, int] | None = None) -> StepMemory:
    """Peak bytes of a steady optimizer step (the second and later ones: the optimizer's state exists).

    ``shape``: rows and tokens a row of the largest micro-batch; None: the plan's own.
    """
    batch, sequence = shape or (plan.per_device_train_batch_size, plan.sequence_length)
    placed = place_segments(profile, trace, plan)
    gradients = float(profile.parameters.gradient_bytes(plan.parameter_bytes))
    resident = {
        "weights": float(profile.parameters.weight_bytes(plan.parameter_bytes) + profile.parameters.buffers_bytes),
        "optimizer": state_bytes(profile, plan),
        "batch": batch_bytes(profile, plan, batch, sequence),
    }
    accumulating = plan.gradient_accumulation_steps > 1
    phases = {name: Peak() for name in PHASES}
    live = _walk_forward(phases["forward"], resident, placed, gradients if accumulating else 0.0, plan, batch, sequence)
    backward = _Backward(plan, tuple(shape.elements for shape in trained_shapes(profile)), profile, batch, sequence)
    _walk_backward(phases["backward"], resident, placed, live, gradients, backward)
    if not plan.optimizer_in_backward:
        phases["optimizer"].offer({**resident, "gradients": gradients, "workspace": workspace_bytes(profile, plan)})
    rises = [highest(item.segment.backward_accumulating.rise, batch, sequence) for item in placed if item.is_recomputed]
    return StepMemory(phases=phases, recomputed=max(rises, default=0.0))


def _walk_forward(
    peak: Peak, resident: dict[str, float], placed: list[Placed], gradients: float, plan: Plan, batch: int, sequence: int
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
            peak.offer(parts)
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
        return self.plan.gradient_accumulation_steps > 1

    def of(self, item: Placed, own: float) -> tuple[float, float]:
        """(bytes above the entry at the highest moment, bytes that stay); ``own``: the segment's gradients."""
        segment, at = item.segment, (self.batch, self.sequence)
        cost = segment.backward_accumulating if self.accumulating else segment.backward
        left = cost.left.at(*at)
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
    peak: Peak, resident: dict[str, float], placed: list[Placed], live: float, gradients: float, backward: _Backward
) -> None:
    """``live`` is what forward left. In a first backward gradients are born as segments finish; later they all exist."""
    accumulating, in_backward = backward.accumulating, backward.plan.optimizer_in_backward
    born = gradients if accumulating else 0.0
    per_parameter = gradients / max(sum(item.count * item.parameters for item in placed), 1)
    tied = backward.profile.parameters.tied
    for item in reversed(placed):
        own = 0.0 if accumulating else item.parameters * per_parameter
        waits = in_backward and not (tied and item.is_loss)  # a tied head's gradient is whole when the embedding's is born
        rise, left = backward.of(item, own if waits else 0.0)
        own = 0.0 if waits else own
        for before in {0, item.count - 1}:
            gradients_now = born + before * own
            total = live + before * left + (born if accumulating else 0.0)
            parts = {**resident, "gradients": gradients_now, "activations": max(total - gradients_now, 0.0)}
            parts |= {"loss": 0.0, "workspace": 0.0}
            parts["loss" if item.is_loss else "workspace"] += rise
            peak.offer(parts)
        live += item.count * left
        born += item.count * own


def batch_bytes(profile: ModelProfile, plan: Plan, batch: int, sequence: int) -> float:
    """Token ids and labels (int64), and position ids or a mask where the plan passes one. Images: the trace's own input."""
    if profile.objective == "image-classification":
        return 0.0
    tensors = 3 if plan.packing or profile.objective != "causal-lm" else 2
    return 8.0 * batch * sequence * tensors
