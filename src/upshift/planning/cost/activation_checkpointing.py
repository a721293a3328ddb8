"""Price activation checkpointing: which layers of a stage are recomputed, and what these layers keep.

The profile has each layer twice, traced with and without recomputation. The recomputed layers of a stage are its first ones. They
keep less between the passes, and their backward pass computes them again.
"""

from __future__ import annotations

from upshift.models.profile import ModelProfile, Polynomial, Segment
from upshift.planning.cost.parallel_trace import add_left, scale
from upshift.planning.cost.partition import Stage
from upshift.planning.plan import Plan

RANDOM_STATE = Polynomial(one=5056.0)  # bytes; torch.utils.checkpoint keeps one for each layer that it recomputes


def num_recomputed(profile: ModelProfile, plan: Plan, stage: Stage) -> int:
    """Return how many layers of a stage are recomputed: its part of the plan's ``activation_checkpointing``, rounded up."""
    return -(-plan.activation_checkpointing * (stage.last - stage.first) // max(profile.num_layers, 1))


def runs_of_layers(assignment: tuple[int, ...], to_recompute: int) -> list[tuple[int, int]]:
    """Return runs of equal layers as (index of the traced layer, number in a row), cut where recomputation ends."""
    runs: list[tuple[int, int]] = []
    for layer, index in enumerate(assignment):
        if runs and runs[-1][0] == index and layer != to_recompute:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def with_random_state(layer: Segment, plan: Plan) -> Segment:
    """Return a recomputed layer that also keeps its random state, which fake tensors do not show.

    On a GPU it is a few bytes, which are not counted.
    """
    if plan.device != "cpu":
        return layer
    freed = scale(RANDOM_STATE, -1.0)
    return layer.model_copy(
        update={
            "forward": add_left(layer.forward, RANDOM_STATE),
            "backward": add_left(layer.backward, freed),
            "backward_accumulating": add_left(layer.backward_accumulating, freed),
        }
    )
