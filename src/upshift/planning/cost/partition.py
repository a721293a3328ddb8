"""Compute a rank's share of the job: its layers, and its bytes of weights, gradients and optimizer state under a plan's layout.

Compute the trace of one rank that shares every layer with others: tensor, sequence and context parallelism.

Every number of a trace is a + c / t on ``t`` ranks: each rank has ``a``, and all ranks together divide ``c``. The traces of one
rank and of one of two ranks (ModelProfile.step, tensor_parallel=2) give both. The terms of ``rise`` stand in the same order in
the two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StackTrace, StepTrace
from upshift.planning.cost.memo import Known
from upshift.planning.cost.optimizer import state_bytes, workspace_bytes
from upshift.planning.cost.rates import offloaded
from upshift.planning.plan import ALONE, Plan

GATHERED_INPUTS = 2  # of attention and of the feed-forward part: sequence parallelism gathers them, autograd keeps them
HALF_BYTES = 2


def divide(
    whole: StepTrace, half: StepTrace, ranks: int, *, sequence_parallel: bool, hidden_size: int, keeps_inputs: bool = True
) -> StepTrace:
    """Return the trace of one of ``ranks`` tensor-parallel ranks.

    Sequence parallelism also divides what each rank had whole, but for the inputs of the layers' first matrices. Ranks gather
    these inputs. A plain layer keeps them for the backward pass. A recomputed layer, and every layer if ``keeps_inputs`` is
    false, gathers them again (Korthikanti et al. 2022, section 4.2.2).
    """
    kept = _gathered(ranks, hidden_size) if sequence_parallel else None
    ways = whole.gaps_recomputed
    return whole.model_copy(
        update={
            "tensor_parallel": ranks,
            "gaps": tuple(_segment(one, two, ranks) for one, two in zip(whole.gaps, half.gaps, strict=True)),
            "gaps_recomputed": {
                way: tuple(_segment(one, two, ranks) for one, two in zip(gaps, half.gaps_recomputed[way], strict=True))
                for way, gaps in ways.items()
            },
            "stacks": tuple(
                _stack(one, two, ranks, kept, keeps=keeps_inputs) for one, two in zip(whole.stacks, half.stacks, strict=True)
            ),
        }
    )


def _stack(one: StackTrace, two: StackTrace, ranks: int, kept: Polynomial | None, *, keeps: bool) -> StackTrace:
    return StackTrace(
        plain=tuple(_layer(a, b, ranks, kept, keeps=keeps) for a, b in zip(one.plain, two.plain, strict=True)),
        recomputed={
            way: tuple(_layer(a, b, ranks, kept, keeps=False) for a, b in zip(layers, two.recomputed[way], strict=True))
            for way, layers in one.recomputed.items()
        },
    )


def _gathered(ranks: int, hidden_size: int) -> Polynomial:
    """Return the bytes that stay whole beside the part that sequence parallelism divides: each rank keeps 1 - 1/t
    of them more.
    """
    return Polynomial(bs=GATHERED_INPUTS * HALF_BYTES * hidden_size * (1.0 - 1.0 / ranks))


def _layer(one: Segment, two: Segment, ranks: int, kept: Polynomial | None, *, keeps: bool) -> Segment:
    if kept is None:
        return _segment(one, two, ranks)
    nothing = Polynomial()
    return Segment(
        forward=_shared_tokens(one.forward, two.forward, ranks, left=kept if keeps else nothing, rise=kept),
        backward=_shared_tokens(
            one.backward, two.backward, ranks, left=scaled(kept, -1.0) if keeps else nothing, rise=nothing if keeps else kept
        ),
        backward_accumulating=_shared_tokens(
            one.backward_accumulating, two.backward_accumulating, ranks,
            left=scaled(kept, -1.0) if keeps else nothing, rise=nothing if keeps else kept,
        ),
        compiled=None if one.compiled is None else total(scaled(one.compiled, 1.0 / ranks), kept if keeps else nothing),
    )  # fmt: skip


def divide_experts(profile: ModelProfile, trace: StepTrace, ranks: int) -> StepTrace:
    """Return the trace of one of ``ranks`` ranks that share experts.

    Each rank has its part of what does not grow with tokens in the experts: weights, their gradients and kernels. It still has
    as many tokens for its experts.
    """
    stacks = []
    number = 0
    for stack, traced in zip(profile.stacks, trace.stacks, strict=True):
        parts = [1.0] * len(traced.plain)
        for index in stack.assignment:
            experts = experts_of(profile, number, number + 1) / max(stack.layer_trainable[index], 1)
            parts[index] = 1.0 - min(experts, 1.0) * (1.0 - 1.0 / ranks)
            number += 1
        recomputed = {
            way: tuple(of_constants(layer, part) for layer, part in zip(layers, parts, strict=True))
            for way, layers in traced.recomputed.items()
        }
        plain = tuple(of_constants(layer, part) for layer, part in zip(traced.plain, parts, strict=True))
        stacks.append(StackTrace(plain=plain, recomputed=recomputed))
    return trace.model_copy(update={"stacks": tuple(stacks)})


def of_constants(layer: Segment, part: float) -> Segment:
    """Return the layer with ``part`` of what does not grow with tokens: weights, their gradients and kernels."""

    def less(polynomial: Polynomial) -> Polynomial:
        return polynomial._replace(one=polynomial.one * part)

    def of_pass(cost: PassCost) -> PassCost:
        return cost.model_copy(
            update={
                "left": less(cost.left), "released": less(cost.released), "rise": tuple(map(less, cost.rise)),
                "moved_bytes": less(cost.moved_bytes), "matmul_bytes": less(cost.matmul_bytes),
                "num_kernels": round(cost.num_kernels * part),
            }
        )  # fmt: skip

    return layer.model_copy(
        update={
            "forward": of_pass(layer.forward), "backward": of_pass(layer.backward),
            "backward_accumulating": of_pass(layer.backward_accumulating),
        }
    )  # fmt: skip


def experts_of(profile: ModelProfile, first: int, last: int) -> float:
    """Return the number of parameters of all experts in layers ``first`` to ``last`` (exclusive)."""
    if profile.experts is None:
        return 0.0
    have_them = mixtures(profile)
    return profile.experts.parameters * sum(have_them[first:last]) / max(sum(have_them), 1)


def mixtures(profile: ModelProfile) -> list[bool]:
    """Return for every layer whether it has experts. A layer that is smaller than the mean layer's experts has none."""
    mean = profile.experts.parameters / max(profile.num_layers, 1) if profile.experts else math.inf
    return [size >= mean for size in layer_sizes(profile)]


def layer_sizes(profile: ModelProfile) -> list[int]:
    """Return the number of trained parameters of every layer."""
    return [stack.layer_trainable[index] for stack in profile.stacks for index in stack.assignment]


def keep_more(layer: Segment, extra: Polynomial, *, keeps: bool) -> Segment:
    """Return a layer whose forward pass makes ``extra`` more bytes for the backward pass.

    If ``keeps`` is false, as in a recomputed layer, the backward pass makes these bytes again.
    """
    nothing = Polynomial()
    left, again = (extra, nothing) if keeps else (nothing, extra)

    def more(cost: PassCost, left: Polynomial, rise: Polynomial) -> PassCost:
        return cost.model_copy(update={"left": total(cost.left, left), "rise": tuple(total(term, rise) for term in cost.rise)})

    freed = scaled(left, -1.0)
    return Segment(
        forward=more(layer.forward, left, extra), backward=more(layer.backward, freed, again),
        backward_accumulating=more(layer.backward_accumulating, freed, again),
    )  # fmt: skip


def _segment(one: Segment, two: Segment, ranks: int) -> Segment:
    return Segment(
        forward=_pass(one.forward, two.forward, ranks),
        backward=_pass(one.backward, two.backward, ranks),
        backward_accumulating=_pass(one.backward_accumulating, two.backward_accumulating, ranks),
        compiled=None if one.compiled is None or two.compiled is None else _between(one.compiled, two.compiled, ranks),
    )


def _pass(one: PassCost, two: PassCost, ranks: int) -> PassCost:
    return PassCost(
        left=_between(one.left, two.left, ranks),
        released=_between(one.released, two.released, ranks),
        rise=tuple(_between(first, second, ranks) for first, second in zip(one.rise, two.rise, strict=True)),
        matmul_flops=_between(one.matmul_flops, two.matmul_flops, ranks),
        attention_flops=_between(one.attention_flops, two.attention_flops, ranks),
        moved_bytes=_between(one.moved_bytes, two.moved_bytes, ranks),
        matmul_bytes=_between(one.matmul_bytes, two.matmul_bytes, ranks),
        num_kernels=two.num_kernels,
    )


def _shared_tokens(one: PassCost, two: PassCost, ranks: int, *, left: Polynomial, rise: Polynomial) -> PassCost:
    """Return the cost with everything divided among the ranks. ``left`` and ``rise`` are the bytes that each rank has beside its
    part."""
    divided = _pass(one, two, ranks)
    return divided.model_copy(
        update={
            "left": total(scaled(one.left, 1.0 / ranks), left),
            "rise": tuple(total(scaled(term, 1.0 / ranks), rise) for term in one.rise),
            "moved_bytes": scaled(one.moved_bytes, 1.0 / ranks),
        }
    )


def _between(one: Polynomial, two: Polynomial, ranks: int) -> Polynomial:
    """Return a + c / ranks, given ``one`` = a + c and ``two`` = a + c / 2."""
    share = 2.0 * (1.0 - 1.0 / ranks)
    return Polynomial(*(first + (second - first) * share for first, second in zip(one, two, strict=True)))


def scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(term * factor for term in polynomial))


def total(one: Polynomial, two: Polynomial) -> Polynomial:
    return Polynomial(*(first + second for first, second in zip(one, two, strict=True)))


REDUCED_BYTES = 4  # gradients are summed over ranks in fp32
# an fp32 weight that the optimizer updates, and the bf16 one that is computed with
MASTER_BYTES = 4
MASTERED_BYTES = 2


class Waiting(NamedTuple):
    """The memory that a rank holds beside the micro-batch that it computes.

    Gradients exist in every backward pass of a step but the first, in which they are born. Where they always exist there is no
    first pass of this kind. The numbers are those of a pipeline as upshift runs torch.distributed.pipelining (torch 2.13),
    measured between gloo ranks (tests/cpu/test_layouts.py): the transfer holds what was sent.
    """

    first: float = 0.0  # micro-batches whose activations are there in the step's first backward pass; 0: as in any other
    later: float = 1.0  # the same in the other backward passes; 0: there are no others
    hidden: float = 0.0  # hidden states and gradients of them, of one micro-batch each, in buffers
    sent: float = 0.0  # sent hidden states and gradients that are still held in later passes
    losses: bool = False  # each waiting micro-batch has its loss computed
    pending: int = 0  # micro-batches that wait for their weights' gradients, with all that the forward pass left
    splits: bool = False  # the backward pass leaves weights' gradients for later
    batches: float = 1.0  # micro-batches whose inputs are there


class Stage(NamedTuple):
    """A rank's place in the pipeline: layers ``first`` to ``last`` (exclusive), and what waits there."""

    first: int
    last: int
    num_layers: int  # of the model
    waiting: Waiting = Waiting()

    @property
    def has_embedding(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.last == self.num_layers


class Passing(NamedTuple):
    """Bytes of whole weights and of gradients in reduction that a rank of fully_shard holds at each moment of a step.

    Gradients that are not yet being reduced are counted by the walk (cost/memory.py).
    """

    start: float = 0.0  # before and in the first layer
    forward: float = 0.0  # while another layer computes
    loss: float = 0.0
    head: float = 0.0  # the loss's backward pass
    last_layer: float = 0.0  # its backward pass is the first: nothing is being reduced yet
    layers: float = 0.0  # the backward pass of the others
    end: float = 0.0  # the backward pass of the first layer
    outside: float = 0.0  # the backward pass of what stands before and between the layers


class Share(NamedTuple):
    """Bytes of one rank. ``passing`` is None where weights and gradients are never divided."""

    weights: float
    gradients: float
    optimizer: float
    passing: Passing | None = None
    updated: float = 1.0  # of the model's trained parameters, those that the rank's optimizer updates
    workspace: float = 0.0  # temporaries of that update
    accumulated: float | None = None  # gradients while micro-batches run, where they are divided only after the last one

    @property
    def gradients_between(self) -> float:
        """Return the bytes of gradients of earlier micro-batches while another one runs."""
        return self.gradients if self.accumulated is None else self.accumulated


def stages(profile: ModelProfile, plan: Plan) -> list[Stage]:
    """Return the stages of the ranks that decide memory and time.

    They are the first, which holds most activations, and the last, which has the loss.
    """
    degree = plan.layout.pipeline_parallel
    return [stage_of(profile, plan, rank) for rank in ((0,) if degree == 1 else (0, degree - 1))]


def stage_of(profile: ModelProfile, plan: Plan, rank: int) -> Stage:
    """Return the stage of a pipeline rank."""
    layers = profile.num_layers
    degree = plan.layout.pipeline_parallel
    if degree == 1:
        born = not gradients_exist(plan) and plan.gradient_accumulation_steps == 1
        return Stage(0, layers, layers, Waiting(first=1.0, later=0.0) if born else Waiting())
    per_rank = -(-layers // degree)
    first = layers - per_rank if rank == degree - 1 else rank * per_rank
    return Stage(first, first + per_rank, layers, _waiting(plan, rank))


def gradients_exist(plan: Plan) -> bool:
    """Return whether gradients exist before the first backward pass of a step.

    They exist as buckets that data-parallel ranks exchange, or layer by layer.
    """
    buckets = plan.device != "cpu" and plan.data_parallel * plan.layout.context_parallel > 1
    return buckets or (plan.layout.gathers and plan.layout.pipeline_parallel == 1)


def _waiting(plan: Plan, rank: int) -> Waiting:
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    schedule = layout.pipeline_schedule
    degree = layout.pipeline_parallel
    each = layout.virtual_stages
    is_first = rank == 0
    is_last = rank == degree - 1
    most = micro_batches_waiting(plan, rank)
    later = min(most, micro_batches - 1.0 / each)
    ran = micro_batches * each - round(most * each)  # backward passes, of chunks, before the last moment at which most wait
    first_chunk, last_chunk = (_of_chunk(ran, chunk, each, degree) for chunk in (0, each - 1))
    outputs = ran - last_chunk * is_last
    gradients = ran - first_chunk * is_first
    # Room for the gradient of what the stage yields; what it received, for as long as its activations are there: in the last
    # stage until the step ends, for losses keep it.
    hidden = 1.0 - (is_last and each == 1) + (micro_batches if is_last else 0.0)
    hidden += most if each > 1 or not (is_first or is_last) else 0.0
    if schedule in ("gpipe", "1f1b"):  # transfers that variables of its loop still name; the other schedules keep all
        outputs = int(not is_last and (schedule == "gpipe" or most < micro_batches))
        gradients = int(not is_first)
        gradients *= schedule == "1f1b"
    splits = schedule == "zero_bubble" and not is_first
    if splits:
        hidden = hidden + 1.0
        gradients = 0
    return Waiting(
        first=0.0 if gradients_exist(plan) or later == most else most,
        later=most if gradients_exist(plan) else later, hidden=hidden, sent=float(outputs + gradients),
        losses=schedule == "gpipe" and is_last, pending=min(rank, micro_batches - 1) * splits, splits=splits,
        batches=float(micro_batches),
    )  # fmt: skip


def _of_chunk(passes: int, chunk: int, chunks: int, degree: int) -> int:
    """Return how many of a rank's first ``passes`` backward passes are those of one chunk.

    Last chunks come first, with ``degree`` micro-batches each.
    """
    rounds, rest = divmod(passes, degree * chunks)
    return rounds * degree + min(max(rest - (chunks - 1 - chunk) * degree, 0), degree)


def micro_batches_waiting(plan: Plan, rank: int) -> float:
    """Return the number of micro-batches whose activations a pipeline rank holds at once, in micro-batches of its layers.

    The formula is from Narayanan et al. 2021, section 2.2.
    """
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    degree = layout.pipeline_parallel
    each = layout.virtual_stages
    if layout.pipeline_schedule == "gpipe":
        return float(micro_batches)
    if layout.pipeline_schedule == "interleaved_1f1b":
        chunks = 2 * (degree - rank - 1) + (each - 1) * degree + 1
        return min(chunks / each, float(micro_batches))
    return float(min(degree - rank, micro_batches))


def layer_elements(profile: ModelProfile, plan: Plan) -> float:
    """Return the parameters of one layer (the mean of all) that a rank computes with, divided by tensor and expert
    parallelism.
    """
    layout = plan.layout
    total = float(profile.parameters.layers)
    experts = float(profile.experts.parameters) if profile.experts else 0.0
    if layout.tensor_parallel > 1 and profile.tensor_parallel is not None:
        total -= profile.tensor_parallel.layers * (1.0 - 1.0 / layout.tensor_parallel)
        experts /= layout.tensor_parallel
    return (total - experts * (1.0 - 1.0 / layout.expert_parallel)) / max(profile.num_layers, 1)


def outside_elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the elements of embedding, head and all other parameters outside the layers that a rank at ``stage`` has.

    A tied embedding is needed at both ends of a pipeline.
    """
    parameters = profile.parameters
    head = parameters.head or (parameters.embedding if parameters.tied and not stage.has_embedding else 0)
    found = float(parameters.embedding * stage.has_embedding + (head + parameters.other) * stage.has_head)
    return found * outside_part(profile, plan)


def outside_part(profile: ModelProfile, plan: Plan) -> float:
    """Return the part of embedding and head that one of the tensor-parallel ranks has."""
    if profile.tensor_parallel is None:
        return 1.0
    if plan.layout.vocabulary_parallel:  # whatever the model declares
        return 1.0 / plan.layout.tensor_parallel
    both = profile.parameters.embedding + profile.parameters.head
    divided = min(profile.tensor_parallel.outside / max(both, 1), 1.0)
    return 1.0 - divided * (1.0 - 1.0 / plan.layout.tensor_parallel)


def elements(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the number of parameters that a rank computes with."""
    inner = (stage.last - stage.first) * layer_elements(profile, plan) + _beyond_the_mean(profile, plan, stage)
    return inner + outside_elements(profile, plan, stage)


def _beyond_the_mean(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return how many more elements the stage's layers have than as many mean layers.

    Layers with experts are larger than those without.
    """
    kinds = {size for stack in profile.stacks for size in stack.layer_trainable}
    parameters = profile.parameters
    if len(kinds) == 1 or parameters.trainable_layers != parameters.layers:
        return 0.0
    sizes = layer_sizes(profile)
    count = stage.last - stage.first
    more = sum(sizes[stage.first : stage.last]) - count * sum(sizes) / len(sizes)
    experts = experts_of(profile, stage.first, stage.last) - count / len(sizes) * experts_of(profile, 0, len(sizes))
    return (more - experts + experts / plan.layout.expert_parallel) / plan.layout.tensor_parallel


def share_of(profile: ModelProfile, plan: Plan, stage: Stage) -> Share:
    """Return the share of a rank at ``stage``. It is the whole if one process does the job, or if each process has all of it."""
    parameters = profile.parameters
    weights = float(parameters.weight_bytes(plan.parameter_bytes)) - offloaded(profile, plan).saved
    gradients = float(parameters.gradient_bytes(plan.parameter_bytes))
    state = state_bytes(profile, plan)
    workspace = workspace_bytes(profile, plan)
    layout = plan.layout
    if layout == ALONE:
        return Share(weights, gradients, state, workspace=workspace)
    if layout.master_weights:
        weights = float(parameters.weight_bytes(MASTERED_BYTES))
        state = state + MASTER_BYTES * parameters.trainable
    part = elements(profile, plan, stage) / parameters.total
    weights = weights * part
    gradients = gradients * part
    state = state * part
    own = _divided_part(profile, plan, stage)
    if not layout.gathers:
        gradients += _whole_embedding(profile, plan, stage)
    if layout.fully_shard == "no":
        return Share(weights, gradients, state, None, part, workspace * part)
    if layout.fully_shard == "optimizer":
        return Share(weights, gradients, state * own, None, part * own, workspace * (part * own))
    whole = REDUCED_BYTES * part * parameters.trainable if layout.pipeline_parallel > 1 else None
    passing = _passing(profile, plan, stage)
    return Share(weights * own, gradients * own, state * own, passing, part * own, workspace * (part * own), accumulated=whole)


def _divided_part(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the part that fully_shard leaves to a rank, of the parameters that the rank computes with.

    Experts that ranks share already are divided among fewer ranks.
    """
    layout = plan.layout
    ranks = layout.shard_size
    experts = layout.expert_parallel
    if experts == 1 or profile.experts is None:
        return 1.0 / ranks
    shared = experts_of(profile, stage.first, stage.last) / layout.tensor_parallel / experts / elements(profile, plan, stage)
    return shared / max(ranks / experts, 1.0) + (1.0 - shared) / ranks


def shares(profile: ModelProfile, plan: Plan, known: Known) -> list[tuple[Stage, Share]]:
    """Return the stages and shares of the ranks that decide memory and time."""
    layout = plan.layout
    micro_batches = plan.gradient_accumulation_steps
    steps = micro_batches if layout.pipeline_parallel > 1 else micro_batches == 1
    pipeline = (layout.pipeline_parallel, layout.pipeline_schedule, layout.virtual_stages, steps, gradients_exist(plan))
    held = (layout, plan.optim, plan.optim_args, plan.precision, plan.optim_offload, plan.weight_offload)

    def share(stage: Stage) -> Share:
        return known.get(("share", held, stage.first), lambda: share_of(profile, plan, stage))

    found = known.get(("stages", pipeline), lambda: stages(profile, plan))
    return known.get(("shares", held, steps), lambda: [(stage, share(stage)) for stage in found])


def compute_bytes(plan: Plan) -> int:
    """Return the bytes of an element of a weight as fully_shard gathers it, and of its gradient before it is reduced."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def residual_bytes(plan: Plan) -> int:
    """Return the bytes of an element of the hidden states between layers: autocast leaves the sum of layers in fp32."""
    return 2 if plan.traced_precision == "bf16-pure" else 4


def _whole_embedding(profile: ModelProfile, plan: Plan, stage: Stage) -> float:
    """Return the bytes of the rest of an embedding's gradient where ranks divide its words: the kernel fills rows for all of
    them."""
    parameters = profile.parameters
    styles = profile.declares.tensor_parallel_plan.values()
    whole = "embedding_rowwise" not in styles or plan.layout.vocabulary_parallel
    if whole or parameters.tied or not stage.has_embedding:
        return 0.0
    return parameters.embedding * plan.parameter_bytes * (1.0 - 1.0 / plan.layout.tensor_parallel)


def _passing(profile: ModelProfile, plan: Plan, stage: Stage) -> Passing:
    """Return the passing bytes of torch's fully_shard (FSDPParamGroup of torch 2.13).

    They are exact between gloo ranks (tests/cpu/test_layouts.py). A gather fills one buffer, which is then copied into the
    weights. Forward, the buffer stays until the next layer's copy. Backward, the layer before is gathered meanwhile. Gradients
    are copied into one fp32 buffer, which stays until the next layer's. Weights outside the layers are whole all the time.
    """
    size = compute_bytes(plan)
    trained = profile.parameters.trainable / profile.parameters.total
    layers = stage.last - stage.first
    inner = layer_elements(profile, plan)
    layer = size * inner
    outside = size * outside_elements(profile, plan, stage)
    reduced = REDUCED_BYTES * inner * trained
    if plan.layout.pipeline_parallel > 1:  # once gathered backward, weights stay until the next forward pass divides them
        whole = outside + layers * layer
        few = outside + min(layers, 2) * layer
        if plan.layout.fully_shard == "gradients":
            return Passing(whole, whole, whole, whole, whole, whole, whole, whole)
        return Passing(
            start=whole, forward=few, loss=outside + layer, head=outside + layer, last_layer=few, layers=few, end=whole,
            outside=whole,
        )  # fmt: skip
    if plan.layout.fully_shard == "gradients":  # the whole model's weights stay from forward to backward
        whole = outside + layers * layer
        between = whole - layer + reduced
        return Passing(whole + layer, whole + layer, whole + layer, whole, whole, between, between, outside + reduced)
    two = outside + 2.0 * layer
    between = outside + 2.0 * layer + reduced
    return Passing(
        start=two, forward=two, loss=outside + layer, head=outside + layer, last_layer=outside + min(layers, 2) * layer,
        layers=between, end=between, outside=outside + reduced,
    )  # fmt: skip
