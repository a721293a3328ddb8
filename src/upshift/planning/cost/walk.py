"""Find the highest points of a micro-batch's forward and backward pass, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass, field

from upshift.models.profile import ModelProfile, highest
from upshift.planning.cost.optimizer import update_workspace_bytes
from upshift.planning.cost.segments import Placed
from upshift.planning.cost.share import compute_bytes, outside_part
from upshift.planning.plan import Plan


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
        rise, left = max(highest(cost.rise, batch, sequence), 0.0) + item.scratch, cost.left.at(batch, sequence)
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
