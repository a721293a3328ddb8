"""Compute what one rank of a layout has of the job: its layers and its bytes.

The bytes are those of weights, gradients and optimizer state, and of what passes through a rank while a step runs.
"""

from __future__ import annotations

from typing import NamedTuple

from upshift.models.profile import ModelProfile
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.optimizer import state_bytes, workspace_bytes
from upshift.planning.cost.parallel_trace import expert_elements, layer_sizes
from upshift.planning.cost.rates import offloaded_weights
from upshift.planning.plan import ALONE, Plan

REDUCED_BYTES = 4  # gradients are summed over ranks in fp32
MASTER_BYTES = 4  # of an fp32 weight that the optimizer updates
MASTERED_BYTES = 2  # of the bf16 copy that the model computes with


class InFlight(NamedTuple):
    """The memory of the micro-batches that are in flight on a rank, beside the one that it computes.

    Gradients exist in every backward pass of a step except the first, in which they are allocated. If they always exist, there
    is no such first pass. The numbers are those of a pipeline as upshift runs torch.distributed.pipelining (torch 2.13),
    measured between gloo ranks (tests/cpu/planning/test_layouts.py): the transfer holds what was sent.
    """

    first: float = 0.0  # micro-batches whose activations exist in the step's first backward pass; 0: as in any other
    later: float = 1.0  # the same in the other backward passes; 0: there are no others
    hidden: float = 0.0  # buffers for hidden states and their gradients, each of one micro-batch
    sent: float = 0.0  # sent hidden states and gradients that are still held in later passes
    losses: bool = False  # the loss of each micro-batch in flight is computed
    pending: int = 0  # micro-batches whose weights' gradients are not computed yet, with all that the forward pass left
    splits: bool = False  # the backward pass leaves weights' gradients for later
    batches: float = 1.0  # micro-batches whose inputs exist


class Stage(NamedTuple):
    """A rank's stage of the pipeline: layers ``first`` to ``last`` (exclusive), and the micro-batches in flight."""

    first: int
    last: int
    num_layers: int  # the model's layers
    in_flight: InFlight = InFlight()

    @property
    def has_embedding(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.last == self.num_layers


class FsdpTransients(NamedTuple):
    """The bytes of whole weights, and of gradients in reduction, that a rank of fully_shard holds at each moment of a step.

    Gradients whose reduction has not started are counted among the peaks of the backward pass (cost/memory.py).
    """

    start: float = 0.0  # before and in the first layer
    forward: float = 0.0  # while another layer computes
    loss: float = 0.0
    head: float = 0.0  # the loss's backward pass
    last_layer: float = 0.0  # its backward pass is the first, so no gradient is in reduction yet
    layers: float = 0.0  # the backward pass of the other layers
    end: float = 0.0  # the backward pass of the first layer
    outside: float = 0.0  # the backward pass of the segments before and between the layers


class Share(NamedTuple):
    """The bytes that one rank has. ``transients`` is None where weights and gradients are never divided."""

    weights: float
    gradients: float
    optimizer: float
    transients: FsdpTransients | None = None
    updated: float = 1.0  # share of the model's trained parameters that the rank's optimizer updates
    workspace: float = 0.0  # temporaries of that update
    undivided_gradients: float | None = None  # while micro-batches run, where gradients are divided only after the last one

    @property
    def accumulated_gradients(self) -> float:
        """Return the bytes of gradients of earlier micro-batches while another one runs."""
        return self.gradients if self.undivided_gradients is None else self.undivided_gradients


def deciding_stages(profile: ModelProfile, plan: Plan) -> list[Stage]:
    """Return the stages of the ranks that decide memory and time.

    They are the first, which holds most activations, and the last, which has the loss.
    """
    degree = plan.layout.pipeline_parallel
    ranks = (0,) if degree == 1 else (0, degree - 1)
    return [stage_of(profile, plan, rank) for rank in ranks]


def stage_of(profile: ModelProfile, plan: Plan, rank: int) -> Stage:
    """Return the stage of a pipeline rank."""
    layers = profile.num_layers
    degree = plan.layout.pipeline_parallel
    if degree == 1:
        is_only_backward = not gradients_preexist(plan) and plan.gradient_accumulation_steps == 1
        return Stage(0, layers, layers, InFlight(first=1.0, later=0.0) if is_only_backward else InFlight())
    per_rank = -(-layers // degree)
    first = layers - per_rank if rank == degree - 1 else rank * per_rank
    return Stage(first, first + per_rank, layers, _in_flight(plan, rank))


def gradients_preexist(plan: Plan) -> bool:
    """Return whether gradients exist before the first backward pass of a step.

    They exist as buckets that data-parallel ranks exchange, or they are divided layer by layer.
    """
    buckets = plan.device != "cpu" and plan.data_parallel * plan.layout.context_parallel > 1
    return buckets or (plan.layout.gathers and plan.layout.pipeline_parallel == 1)


def _in_flight(plan: Plan, rank: int) -> InFlight:
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    schedule = layout.pipeline_schedule
    degree = layout.pipeline_parallel
    stages_per_rank = layout.virtual_stages
    is_first = rank == 0
    is_last = rank == degree - 1
    peak = micro_batches_in_flight(plan, rank)
    later = min(peak, micro_batches - 1.0 / stages_per_rank)
    # Backward passes, of chunks, before the last moment at which most micro-batches are in flight.
    passes = micro_batches * stages_per_rank - round(peak * stages_per_rank)
    first_chunk = _passes_of_chunk(passes, 0, stages_per_rank, degree)
    last_chunk = _passes_of_chunk(passes, stages_per_rank - 1, stages_per_rank, degree)
    outputs = passes - last_chunk * is_last
    gradients = passes - first_chunk * is_first
    # There is a buffer for the gradient of the stage's output. What the stage received stays as long as its activations: in the
    # last stage until the step ends, because the losses keep it.
    hidden = 1.0 - (is_last and stages_per_rank == 1) + (micro_batches if is_last else 0.0)
    hidden += peak if stages_per_rank > 1 or not (is_first or is_last) else 0.0
    if schedule in ("gpipe", "1f1b"):
        # Only transfers that variables of the schedule's loop still refer to. The other schedules keep all of them.
        outputs = int(not is_last and (schedule == "gpipe" or peak < micro_batches))
        gradients = int(not is_first)
        gradients *= schedule == "1f1b"
    splits = schedule == "zero_bubble" and not is_first
    if splits:
        hidden = hidden + 1.0
        gradients = 0
    preexist = gradients_preexist(plan)
    return InFlight(
        first=0.0 if preexist or later == peak else peak,
        later=peak if preexist else later,
        hidden=hidden,
        sent=float(outputs + gradients),
        losses=schedule == "gpipe" and is_last,
        pending=min(rank, micro_batches - 1) * splits,
        splits=splits,
        batches=float(micro_batches),
    )


def _passes_of_chunk(passes: int, chunk: int, chunks: int, degree: int) -> int:
    """Return how many of a rank's first ``passes`` backward passes are those of one chunk.

    The last chunk comes first, and each chunk takes ``degree`` micro-batches in turn.
    """
    rounds, remainder = divmod(passes, degree * chunks)
    return rounds * degree + min(max(remainder - (chunks - 1 - chunk) * degree, 0), degree)


def micro_batches_in_flight(plan: Plan, rank: int) -> float:
    """Return the number of micro-batches whose activations a pipeline rank holds at once, in micro-batches of its layers.

    The formula is from Narayanan et al. 2021, section 2.2.
    """
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    degree = layout.pipeline_parallel
    stages_per_rank = layout.virtual_stages
    if layout.pipeline_schedule == "gpipe":
        return float(micro_batches)
    if layout.pipeline_schedule == "interleaved_1f1b":
        chunks = 2 * (degree - rank - 1) + (stages_per_rank - 1) * degree + 1
        return min(chunks / stages_per_rank, float(micro_batches))
    return float(min(degree - rank, micro_batches))


def layer_elements(profile: ModelProfile, plan: Plan) -> float:
    """Return the number of parameters of one layer (the mean of all) that a rank computes with.

    Tensor and expert parallelism divide them.
    """
    layout = plan.layout
    num_elements = float(profile.parameters.layers)
    experts = float(profile.experts.parameters) if profile.experts else 0.0
    if layout.tensor_parallel > 1 and profile.tensor_parallel is not None:
        num_elements -= profile.tensor_parallel.layers * (1.0 - 1.0 / layout.tensor_parallel)
        experts /= layout.tensor_parallel
    return (num_elements - experts * (1.0 - 1.0 / layout.expert_parallel)) / max(profile.num_layers, 1)


def outside_elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the number of elements of embedding, head and other parameters outside the layers that a rank at ``stage`` has.

    A tied embedding is needed at both ends of a pipeline. A tied head may also have weights of its own: a bias, or the copy that
    is trained whole beside an adapter.
    """
    parameters = profile.parameters
    head = parameters.head if stage.has_embedding else parameters.whole_head
    num_elements = float(parameters.embedding * stage.has_embedding + (head + parameters.other) * stage.has_head)
    return num_elements * outside_part(profile, plan)


def outside_part(profile: ModelProfile, plan: Plan) -> float:
    """Return the part of embedding and head that one of the tensor-parallel ranks has."""
    if profile.tensor_parallel is None:
        return 1.0
    if plan.layout.vocabulary_parallel:  # whatever plan the model declares
        return 1.0 / plan.layout.tensor_parallel
    embedding_and_head = profile.parameters.embedding + profile.parameters.head
    divided = min(profile.tensor_parallel.outside / max(embedding_and_head, 1), 1.0)
    return 1.0 - divided * (1.0 - 1.0 / plan.layout.tensor_parallel)


def elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the number of parameters that a rank computes with."""
    inner = (stage.last - stage.first) * layer_elements(profile, plan) + _elements_above_mean(profile, plan, stage)
    return inner + outside_elements(profile, plan, stage)


def _elements_above_mean(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return how many more elements the stage's layers have than as many mean layers.

    Layers with experts are larger than those without.
    """
    distinct_sizes = {size for stack in profile.stacks for size in stack.layer_trainable}
    parameters = profile.parameters
    if len(distinct_sizes) == 1 or parameters.trainable_layers != parameters.layers:
        return 0.0
    sizes = layer_sizes(profile)
    count = stage.last - stage.first
    excess = sum(sizes[stage.first : stage.last]) - count * sum(sizes) / len(sizes)
    experts = expert_elements(profile, stage.first, stage.last) - count / len(sizes) * expert_elements(profile, 0, len(sizes))
    return (excess - experts + experts / plan.layout.expert_parallel) / plan.layout.tensor_parallel


def trained_part(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the part of the trained parameters that a rank computes with.

    An adapter is not spread as the weights are: a stage without the head has nothing of a head that is trained whole. The profile
    does not say whether other trained weights outside the layers are before or after them, so each end is taken to have them.
    If an adapter trains a tied head, the trained weights belong to the head and not to the embedding: LoRA, or a copy of the
    weight.
    """
    parameters = profile.parameters
    if parameters.trainable == parameters.total:
        return elements(profile, plan, stage) / parameters.total
    sizes = layer_sizes(profile)
    in_layers = parameters.trainable_layers * sum(sizes[stage.first : stage.last]) / max(sum(sizes), 1)
    in_layers *= layer_elements(profile, plan) * profile.num_layers / max(parameters.layers, 1)
    outside = parameters.trainable - parameters.trainable_layers - parameters.trainable_head
    is_end = stage.has_embedding or stage.has_head
    has_head = is_end if parameters.tied and not parameters.adapter else stage.has_head
    at_ends = parameters.trainable_head * has_head + outside * is_end
    return (in_layers + at_ends * outside_part(profile, plan)) / parameters.trainable


def summed_bytes(plan: Plan) -> int:
    """Return the bytes of an element in which gradients are kept and summed over micro-batches and ranks."""
    return MASTERED_BYTES if plan.layout.bf16_gradients else plan.parameter_bytes


def share_of(profile: ModelProfile, plan: Plan, stage: Stage) -> Share:
    """Return the bytes of a rank at ``stage``. They are the whole model's if the ranks have nothing but the batch to share."""
    parameters = profile.parameters
    weights = float(parameters.weight_bytes(plan.parameter_bytes)) - offloaded_weights(profile, plan).saved
    gradients = float(parameters.gradient_bytes(summed_bytes(plan)))
    state = state_bytes(profile, plan)
    workspace = workspace_bytes(profile, plan)
    layout = plan.layout
    if layout == ALONE:
        return Share(weights, gradients, state, workspace=workspace)
    if layout.master_weights:
        weights = float(parameters.weight_bytes(MASTERED_BYTES))
        state = state + MASTER_BYTES * parameters.trainable
    if layout.bf16_gradients:  # a rank updates its part by fp32 copies of the gradients (Megatron Core: 4 + 16 / d bytes)
        workspace = workspace + REDUCED_BYTES * parameters.trainable
    updated = trained_part(profile, plan, stage)
    weights = weights * elements(profile, plan, stage) / parameters.total
    gradients = gradients * updated
    state = state * updated
    sharded_part = _sharded_part(profile, plan, stage)
    if not layout.gathers:
        gradients += _embedding_gradient_rest(profile, plan, stage)
    if layout.fully_shard == "no":
        return Share(weights, gradients, state, None, updated, workspace * updated)
    undivided = updated
    updated = updated * sharded_part
    if layout.fully_shard == "optimizer":
        return Share(weights, gradients, state * sharded_part, None, updated, workspace * updated)
    return Share(
        weights=weights * sharded_part,
        gradients=gradients * sharded_part,
        optimizer=state * sharded_part,
        transients=_fsdp_transients(profile, plan, stage),
        updated=updated,
        workspace=workspace * updated,
        undivided_gradients=REDUCED_BYTES * undivided * parameters.trainable if layout.pipeline_parallel > 1 else None,
    )


def _sharded_part(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the part of the parameters that a rank computes with which fully_shard leaves to the rank.

    Experts that are divided by expert parallelism are sharded among fewer ranks.
    """
    layout = plan.layout
    ranks = layout.shard_size
    experts = layout.expert_parallel
    if experts == 1 or profile.experts is None:
        return 1.0 / ranks
    shared = expert_elements(profile, stage.first, stage.last) / layout.tensor_parallel / experts / elements(profile, plan, stage)
    return shared / max(ranks / experts, 1.0) + (1.0 - shared) / ranks


def deciding_shares(profile: ModelProfile, plan: Plan, memo: Memo) -> list[tuple[Stage, Share]]:
    """Return the stages and shares of the ranks that decide memory and time."""
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    # On one stage it only matters whether there are several micro-batches.
    micro_batch_key = micro_batches if layout.pipeline_parallel > 1 else micro_batches == 1
    pipeline_key = (
        layout.pipeline_parallel,
        layout.pipeline_schedule,
        layout.virtual_stages,
        micro_batch_key,
        gradients_preexist(plan),
    )
    state_key = (layout, plan.optim, plan.optim_args, plan.precision, plan.optim_offload, plan.weight_offload)

    def cached_share(stage: Stage) -> Share:
        return memo.get_or_compute(("share", state_key, stage.first), lambda: share_of(profile, plan, stage))

    stages = memo.get_or_compute(("stages", pipeline_key), lambda: deciding_stages(profile, plan))
    key = ("shares", state_key, micro_batch_key)
    return memo.get_or_compute(key, lambda: [(stage, cached_share(stage)) for stage in stages])


def compute_bytes(plan: Plan) -> int:
    """Return the bytes of an element of a weight as fully_shard gathers it, and of its gradient before it is reduced."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def residual_bytes(plan: Plan) -> int:
    """Return the bytes of an element of the hidden states between layers: autocast leaves the sum of layers in fp32."""
    return 2 if plan.traced_precision == "bf16-pure" else 4


def _embedding_gradient_rest(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the bytes of an embedding's gradient for the words of other ranks.

    If ranks divide the words, the kernel still fills rows for all of them.
    """
    parameters = profile.parameters
    styles = profile.declares.tensor_parallel_plan.values()
    fills_all_rows = "embedding_rowwise" in styles and not plan.layout.vocabulary_parallel
    if not fills_all_rows or parameters.tied or not stage.has_embedding:
        return 0.0
    return parameters.embedding * summed_bytes(plan) * (1.0 - 1.0 / plan.layout.tensor_parallel)


def _fsdp_transients(profile: ModelProfile, plan: Plan, stage: Stage) -> FsdpTransients:
    """Return the transient bytes of torch's fully_shard (FSDPParamGroup of torch 2.13).

    They are exact between gloo ranks (tests/cpu/planning/test_layouts.py). A gather fills one buffer, which is then copied into
    the weights. In the forward pass the buffer stays until the next layer's copy. In the backward pass the layer before is
    gathered meanwhile. Gradients are copied into one fp32 buffer, which stays until that of the next layer. Weights outside the
    layers are whole all the time.
    """
    element_size = compute_bytes(plan)
    trained = profile.parameters.trainable_layers / max(profile.parameters.layers, 1)
    num_layers = stage.last - stage.first
    per_layer = layer_elements(profile, plan)
    layer = element_size * per_layer
    outside = element_size * outside_elements(profile, plan, stage)
    reduced = REDUCED_BYTES * per_layer * trained
    whole_stage = outside + num_layers * layer
    if plan.layout.pipeline_parallel > 1:  # once gathered backward, weights stay until the next forward pass divides them
        if plan.layout.fully_shard == "gradients":
            return FsdpTransients(*[whole_stage] * len(FsdpTransients._fields))
        two_layers = outside + min(num_layers, 2) * layer
        return FsdpTransients(
            start=whole_stage,
            forward=two_layers,
            loss=outside + layer,
            head=outside + layer,
            last_layer=two_layers,
            layers=two_layers,
            end=whole_stage,
            outside=whole_stage,
        )
    if plan.layout.fully_shard == "gradients":  # the whole model's weights stay from forward to backward
        with_buffer = whole_stage + layer
        in_backward = whole_stage - layer + reduced
        return FsdpTransients(
            start=with_buffer,
            forward=with_buffer,
            loss=with_buffer,
            head=whole_stage,
            last_layer=whole_stage,
            layers=in_backward,
            end=in_backward,
            outside=outside + reduced,
        )
    two_layers = outside + 2.0 * layer
    in_backward = outside + 2.0 * layer + reduced
    return FsdpTransients(
        start=two_layers,
        forward=two_layers,
        loss=outside + layer,
        head=outside + layer,
        last_layer=outside + min(num_layers, 2) * layer,
        layers=in_backward,
        end=in_backward,
        outside=outside + reduced,
    )
