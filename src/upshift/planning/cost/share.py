"""What one rank has of the job: layers, and bytes of weights, gradients and optimizer state, under a plan's layout."""

from __future__ import annotations

from dataclasses import dataclass

from upshift.models.profile import ModelProfile
from upshift.planning.cost.known import Known
from upshift.planning.cost.optimizer import state_bytes
from upshift.planning.plan import ALONE, Plan

REDUCED_BYTES = 4  # gradients are summed over ranks in fp32


@dataclass(frozen=True)
class Stage:
    """A rank's place in the pipeline: layers ``first`` to ``last`` (exclusive), and how many micro-batches' activations wait."""

    first: int
    last: int
    num_layers: int  # of the model
    waiting: float = 1.0  # micro-batches whose activations it holds at once, the running one included

    @property
    def has_embedding(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.last == self.num_layers


@dataclass(frozen=True)
class Passing:
    """Bytes of whole weights and of gradients that are being reduced, which a rank of fully_shard holds at each moment of a
    step. Gradients that are not yet being reduced are the walk's (cost/memory.py)."""

    forward: float = 0.0  # while a layer computes
    loss: float = 0.0
    head: float = 0.0  # the loss's backward pass
    last_layer: float = 0.0  # its backward pass is the first: nothing is being reduced yet
    layers: float = 0.0  # the backward pass of the others
    outside: float = 0.0  # the backward pass of what stands before and between the layers


@dataclass(frozen=True)
class Share:
    """Bytes of one rank. ``passing`` is None where weights and gradients are never divided."""

    weights: float
    gradients: float
    optimizer: float
    passing: Passing | None = None
    updated: float = 1.0  # of the model's trained parameters, those that the rank's optimizer updates


def stages(profile: ModelProfile, plan: Plan) -> list[Stage]:
    """The ranks that decide memory and time: the first, which holds most activations, and the last, which has the loss."""
    layers, degree = profile.num_layers, plan.layout.pipeline_parallel
    if degree == 1:
        return [Stage(0, layers, layers)]
    per_rank = -(-layers // degree)
    return [
        Stage(0, per_rank, layers, waiting=micro_batches_waiting(plan, 0)),
        Stage(layers - per_rank, layers, layers, waiting=micro_batches_waiting(plan, degree - 1)),
    ]


def micro_batches_waiting(plan: Plan, rank: int) -> float:
    """Whose activations a pipeline rank holds at once, in micro-batches of its layers (Narayanan et al. 2021, section 2.2)."""
    layout, micro_batches = plan.layout, plan.gradient_accumulation_steps
    degree, each = layout.pipeline_parallel, layout.virtual_stages
    if layout.pipeline_schedule == "gpipe":
        return float(micro_batches)
    if layout.pipeline_schedule == "interleaved_1f1b":
        chunks = 2 * (degree - rank - 1) + (each - 1) * degree + 1
        return min(chunks / each, float(micro_batches))
    return float(min(degree - rank, micro_batches))


def layer_elements(profile: ModelProfile, plan: Plan) -> float:
    """Parameters of one layer (the mean of all) that a rank computes with, divided by tensor and expert parallelism."""
    layout, total = plan.layout, float(profile.parameters.layers)
    experts = float(profile.experts.parameters) if profile.experts else 0.0
    if layout.tensor_parallel > 1 and profile.tensor_parallel is not None:
        total -= profile.tensor_parallel.layers * (1.0 - 1.0 / layout.tensor_parallel)
        experts /= layout.tensor_parallel
    return (total - experts * (1.0 - 1.0 / layout.expert_parallel)) / max(profile.num_layers, 1)


def outside_elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Of embedding, head and what else is outside the layers; a tied embedding is needed at both ends of a pipeline."""
    parameters, degree = profile.parameters, plan.layout.tensor_parallel
    head = parameters.head or (parameters.embedding if parameters.tied and not stage.has_embedding else 0)
    found = float(parameters.embedding * stage.has_embedding + (head + parameters.other) * stage.has_head)
    if degree > 1 and profile.tensor_parallel is not None:
        both = parameters.embedding + parameters.head
        found -= found * min(profile.tensor_parallel.outside / max(both, 1), 1.0) * (1.0 - 1.0 / degree)
    return found


def elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Parameters that a rank computes with."""
    return (stage.last - stage.first) * layer_elements(profile, plan) + outside_elements(profile, plan, stage)


def share_of(profile: ModelProfile, plan: Plan, stage: Stage) -> Share:
    """Of a rank at ``stage``; the whole where one process does the job, or each has all of it."""
    parameters = profile.parameters
    weights = float(parameters.weight_bytes(plan.parameter_bytes))
    gradients = float(parameters.gradient_bytes(plan.parameter_bytes))
    state = state_bytes(profile, plan)
    layout = plan.layout
    if layout == ALONE:
        return Share(weights, gradients, state)
    part = elements(profile, plan, stage) / parameters.total
    weights, gradients, state, ranks = weights * part, gradients * part, state * part, layout.shard_size
    if layout.fully_shard == "no":
        return Share(weights, gradients, state, updated=part)
    if layout.fully_shard == "optimizer":
        return Share(weights, gradients, state / ranks, updated=part / ranks)
    return Share(weights / ranks, gradients / ranks, state / ranks, _passing(profile, plan, stage), part / ranks)


def shares(profile: ModelProfile, plan: Plan, known: Known) -> list[tuple[Stage, Share]]:
    """Of the ranks that decide memory and time."""
    key = (
        "shares", plan.layout, plan.optim, plan.optim_args, plan.precision, plan.optim_offload,
        plan.gradient_accumulation_steps if plan.layout.pipeline_parallel > 1 else 0,
    )  # fmt: skip
    return known.get(key, lambda: [(stage, share_of(profile, plan, stage)) for stage in stages(profile, plan)])


def compute_bytes(plan: Plan) -> int:
    """Of a weight as fully_shard gathers it, and of its gradient before it is reduced."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def _passing(profile: ModelProfile, plan: Plan, stage: Stage) -> Passing:
    """As torch's fully_shard does it (FSDPParamGroup of torch 2.13), and exact between gloo ranks (tests/cpu/test_layouts.py).

    A gather fills one buffer, which is then copied into the weights. Forward, the buffer stays until the next layer's copy;
    backward, the layer before is gathered meanwhile. Gradients are copied into one fp32 buffer, which stays until the next
    layer's. What is outside the layers is whole all the time.
    """
    size, trained = compute_bytes(plan), profile.parameters.trainable / profile.parameters.total
    layers, inner = stage.last - stage.first, layer_elements(profile, plan)
    layer, outside = size * inner, size * outside_elements(profile, plan, stage)
    reduced = REDUCED_BYTES * inner * trained
    if plan.layout.fully_shard == "gradients":  # the whole model's weights stay from forward to backward
        whole = outside + layers * layer
        return Passing(whole + layer, whole + layer, whole, whole, whole - layer + reduced, outside + reduced)
    return Passing(
        forward=outside + 2.0 * layer, loss=outside + layer, head=outside + layer,
        last_layer=outside + min(layers, 2) * layer, layers=outside + 2.0 * layer + reduced, outside=outside + reduced,
    )  # fmt: skip
