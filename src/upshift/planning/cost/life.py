"""Predict the memory of a job around its training steps, on the rank that needs most: loading, the first step, evaluation,
saving, resuming.

Bytes are listed by part, as those of a step. Each phase follows what training/ does in it. Loading reads weights tensor by
tensor. The first update creates the optimizer state. Evaluation runs the steps' micro-batches without gradients. A save copies
weights and optimizer state to host memory, and writes without copies if they have no room there. A training run generates
nothing.
"""

from __future__ import annotations

from upshift.models.profile import ModelProfile, StepTrace, highest
from upshift.planning.cost.memory import Peak, StepMemory
from upshift.planning.cost.segments import place_segments
from upshift.planning.cost.share import share_of, stages
from upshift.planning.plan import Plan

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
        rises[part] = max(rises[part], highest(item.segment.forward.rise, batch, sequence) + item.scratch)
    if rises["loss"] >= rises["activations"]:
        return {"activations": hidden, "loss": rises["loss"]}
    return {"activations": hidden + rises["activations"]}
