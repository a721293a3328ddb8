"""Find how long the ranks of a pipeline wait: by a formula, and by a simulation of the schedules in unit times.

The schedules are GPipe, 1F1B, interleaved 1F1B and ZB-H1.

A rank runs its passes in the order of its schedule, each as soon as the passes it depends on have ended. A forward pass (F)
takes 1, a backward pass (B) takes 2. zero_bubble cuts the backward pass into the gradient of the input (B) and those of the
weights (W), 1 each. Transfers take no time, and all stages are equal.

GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021, section 2.2. ZB-H1: Qi et al. 2024, section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from upshift.planning.layout import Schedule
from upshift.planning.plan import Plan

Kind = Literal["F", "B", "W"]
Order = list[tuple[Kind, int, int]]
"""(kind, micro-batch, chunk) of one rank"""


class Pass(NamedTuple):
    """A pass of one micro-batch through one stage."""

    rank: int
    start: int
    duration: int
    kind: Kind
    micro_batch: int
    chunk: int  # the rank's virtual stage; the first in forward order is 0


def simulate(schedule: Schedule, *, ranks: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Pass, ...]:
    """Return every pass of an optimizer step, by rank and then by time."""
    durations: dict[Kind, int] = {"F": 1, "B": 1, "W": 1} if schedule == "zero_bubble" else {"F": 1, "B": 2, "W": 0}
    orders = [_rank_order(schedule, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
    num_stages = ranks * virtual_stages
    ends: dict[tuple[Kind, int, int], int] = {}  # by kind, micro-batch and stage of the whole model
    passes_by_rank: list[list[Pass]] = [[] for _ in range(ranks)]
    clocks = [0] * ranks
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in enumerate(orders):
            while len(passes_by_rank[rank]) < len(order):
                kind, micro_batch, chunk = order[len(passes_by_rank[rank])]
                stage = chunk * ranks + rank
                dependencies = _dependencies(kind, micro_batch, stage, num_stages)
                if any(dependency not in ends for dependency in dependencies):
                    break
                start = max([clocks[rank], *(ends[dependency] for dependency in dependencies)])
                clocks[rank] = ends[kind, micro_batch, stage] = start + durations[kind]
                passes_by_rank[rank].append(Pass(rank, start, durations[kind], kind, micro_batch, chunk))
                has_progress = True
    return tuple(chain.from_iterable(passes_by_rank))


def _dependencies(kind: Kind, micro_batch: int, stage: int, num_stages: int) -> list[tuple[Kind, int, int]]:
    """Return the passes that must end before this one starts."""
    if kind == "F":
        return [("F", micro_batch, stage - 1)] if stage else []
    if kind == "W":
        return [("B", micro_batch, stage)]
    dependencies: list[tuple[Kind, int, int]] = [("F", micro_batch, stage)]
    if stage + 1 < num_stages:
        dependencies.append(("B", micro_batch, stage + 1))
    return dependencies


def _rank_order(schedule: Schedule, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Order:
    if schedule == "interleaved_1f1b":
        return _interleaved_order(rank, ranks, micro_batches, virtual_stages)
    numbers = range(micro_batches)
    forward: Order = [("F", number, 0) for number in numbers]
    backward: Order = [("B", number, 0) for number in numbers]
    if schedule == "gpipe":
        return forward + backward
    order = _alternate_passes(forward, backward, warm_up=ranks - rank - 1)
    return _insert_weight_passes(order, rank) if schedule == "zero_bubble" else order


def _alternate_passes(forward: Order, backward: Order, *, warm_up: int) -> Order:
    """Return ``warm_up`` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    order = forward[:warm_up]
    for first, second in zip(forward[warm_up:], backward, strict=False):
        order += [first, second]
    return order + backward[max(len(forward) - warm_up, 0) :]


def _interleaved_order(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Order:
    """Return the order of interleaved 1F1B. Each chunk takes a group of micro-batches in turn.

    A group has as many micro-batches as ranks, or a few more where the ranks do not divide them.
    """
    num_groups = max(micro_batches // ranks, 1)
    borders = [index * micro_batches // num_groups for index in range(num_groups + 1)]
    groups = [range(first, last) for first, last in pairwise(borders)]
    chunks = range(virtual_stages)
    forward: Order = [("F", number, chunk) for group in groups for chunk in chunks for number in group]
    backward: Order = [("B", number, chunk) for group in groups for chunk in reversed(chunks) for number in group]
    largest = max(len(group) for group in groups)
    return _alternate_passes(forward, backward, warm_up=2 * (ranks - rank - 1) + (virtual_stages - 1) * largest)


def _insert_weight_passes(order: Order, rank: int) -> Order:
    """Return the order of ZB-H1.

    The weight pass of a micro-batch is delayed by as many micro-batches as there are ranks before this one. The passes that are
    left run at the end.
    """
    with_weights: Order = []
    delayed: Order = []
    for kind, micro_batch, chunk in order:
        with_weights.append((kind, micro_batch, chunk))
        if kind == "B":
            delayed.append(("W", micro_batch, chunk))
            if len(delayed) > rank:
                with_weights.append(delayed.pop(0))
    return with_weights + delayed


def makespan(passes: Sequence[Pass]) -> int:
    """Return the time at which the last pass ends."""
    return max(item.start + item.duration for item in passes)


def idle_share(passes: Sequence[Pass]) -> float:
    """Return the idle share of the time of all ranks, from the first pass to the last."""
    num_ranks = 1 + max(item.rank for item in passes)
    return 1.0 - sum(item.duration for item in passes) / (num_ranks * makespan(passes))


def peak_in_flight(passes: Sequence[Pass], rank: int, *, virtual_stages: int = 1, until: Kind = "B") -> float:
    """Return the largest number of micro-batches whose activations a rank holds at once, in micro-batches of all its layers.

    A rank holds a micro-batch from F to the end of ``until``. With zero_bubble W needs a part of the activations that B needs,
    so this part stays after B.
    """
    in_flight = peak = 0
    for item in passes:
        if item.rank == rank and item.kind == "F":
            in_flight += 1
            peak = max(peak, in_flight)
        elif item.rank == rank and item.kind == until:
            in_flight -= 1
    return peak / virtual_stages


def idle_micro_batches(plan: Plan) -> float:
    """Return for how many micro-batches' time a pipeline rank waits in a step.

    The formula is from Narayanan et al. 2021 (section 2.2). For zero_bubble it is the third that is left when weights' gradients
    fill the gaps (Qi et al. 2024, ZB-H1). With fewer micro-batches than ranks the gaps stay, as a simulation of the schedules
    shows.
    """
    layout = plan.layout
    ranks = layout.pipeline_parallel
    missing_micro_batches = max(layout.pipeline_parallel - plan.gradient_accumulation_steps, 0)
    if layout.pipeline_schedule == "zero_bubble":
        return (ranks - 1 + missing_micro_batches) / 3.0
    if layout.pipeline_schedule == "interleaved_1f1b":
        stages_per_rank = layout.virtual_stages
        return (ranks - 1 + missing_micro_batches * (stages_per_rank - 1)) / stages_per_rank
    return float(ranks - 1)
