"""Predict the memory and time of frozen layer weights that are kept on the host or on disk.

A step reads these weights layer by layer, forward and backward. Two buffers of a layer's size stay in memory: the step reads
into one while the other computes. An embedding that is not tied to the head is looked up in its file, so a step reads only the
rows of a batch's tokens. All other weights, such as the head, stay in memory.
"""

from __future__ import annotations

from typing import NamedTuple

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.rates import host_link
from upshift.planning.plan import Plan

PASSES = 2  # forward and backward; what is recomputed is there already when its backward pass begins
BUFFERS = 2  # the next pass goes the other way, and begins with the layers that the buffers hold


class Offloaded(NamedTuple):
    """Bytes of the weights that are not kept in memory, and of the buffers for them."""

    layers: float = 0.0  # read by each pass
    rows: float = 0.0  # looked up row by row
    buffers: float = 0.0

    @property
    def saved(self) -> float:
        return self.layers + self.rows - self.buffers


NOTHING = Offloaded()


def offloaded(profile: ModelProfile, plan: Plan) -> Offloaded:
    if plan.weight_offload == "none":
        return NOTHING
    size = frozen_bytes(profile, plan)
    trained = [sizes for stack in profile.stacks for sizes in (stack.layer_trainable[index] for index in stack.assignment)]
    # An adapter around every product grows with its layer.
    largest = max(trained) / sum(trained) if sum(trained) else 1.0 / max(profile.num_layers, 1)
    parameters = profile.parameters
    outside = parameters.trainable - parameters.trainable_layers - parameters.trainable_head
    looked_up = plan.weight_offload == "disk" and not parameters.tied and outside == 0
    rows = parameters.embedding * _element(profile, plan) if looked_up else 0.0
    return Offloaded(size, rows, min(BUFFERS * largest, 1.0) * size)


def frozen_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes of the frozen weights of the layers."""
    parameters = profile.parameters
    return float(parameters.layers - parameters.trainable_layers) * _element(profile, plan)


def _element(profile: ModelProfile, plan: Plan) -> int:
    return 2 if profile.parameters.always_bf16 else plan.parameter_bytes


def waiting_seconds(profile: ModelProfile, plan: Plan, host: Host, computed: float) -> dict[str, float]:
    """Return the seconds for which a step waits for weights, by the place that it waits for; empty if no weights are offloaded.

    ``computed``: the seconds for which the step's micro-batches compute, while the next layer is read.
    """
    if plan.weight_offload == "none":
        return {}
    link = host_link(host) if plan.device == "cuda" else None
    rates = {"host": link, "disk": host.disk_bytes_per_second if plan.weight_offload == "disk" else None}
    known = {place: rate for place, rate in rates.items() if rate is not None}
    slowest = min(known, key=lambda place: known[place])  # the two go on at the same time
    of_plan = offloaded(profile, plan)
    read = plan.gradient_accumulation_steps * (PASSES * of_plan.layers - of_plan.buffers) / known[slowest]
    return {f"weights from the {slowest}": max(read - computed, 0.0)}
