"""Simulate when each pipeline rank runs which pass, in unit times: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

A rank runs its passes in the order of its schedule, each as soon as what it needs has been computed. A forward pass (F) takes 1,
a backward pass (B) 2. zero_bubble cuts the backward pass into the gradient of the input (B) and those of the weights (W), 1
each. Transfers take no time, stages are equal.

GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021, section 2.2. ZB-H1: Qi et al. 2024, section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from upshift.planning.layout import Schedule

Kind = Literal["F", "B", "W"]
Order = list[tuple[Kind, int, int]]
"""(kind, micro-batch, chunk) of one rank"""


class Pass(NamedTuple):
    rank: int
    start: int
    duration: int
    kind: Kind
    micro_batch: int
    chunk: int  # of the rank's virtual stages, the first in forward order is 0


def simulate(schedule: Schedule, *, ranks: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Pass, ...]:
    """Return every pass of an optimizer step, by rank and then by time."""
    durations: dict[Kind, int] = {"F": 1, "B": 1, "W": 1} if schedule == "zero_bubble" else {"F": 1, "B": 2, "W": 0}
    orders = [_order(schedule, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
    num_stages = ranks * virtual_stages
    ends: dict[tuple[Kind, int, int], int] = {}  # by kind, micro-batch and stage of the whole model
    done: list[list[Pass]] = [[] for _ in range(ranks)]
    clocks = [0] * ranks
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while len(done[rank]) < len(order):
                kind, micro_batch, chunk = order[len(done[rank])]
                stage = chunk * ranks + rank
                needs = _needs(kind, micro_batch, stage, num_stages)
                if any(need not in ends for need in needs):
                    break
                start = max([clocks[rank], *(ends[need] for need in needs)])
                clocks[rank] = ends[kind, micro_batch, stage] = start + durations[kind]
                done[rank].append(Pass(rank, start, durations[kind], kind, micro_batch, chunk))
                moving = True
    return tuple(one for passes in done for one in passes)


def _needs(kind: Kind, micro_batch: int, stage: int, num_stages: int) -> list[tuple[Kind, int, int]]:
    """Return the passes that must have been computed before."""
    if kind == "F":
        return [("F", micro_batch, stage - 1)] if stage else []
    if kind == "W":
        return [("B", micro_batch, stage)]
    own: list[tuple[Kind, int, int]] = [("F", micro_batch, stage)]
    return own if stage + 1 == num_stages else [*own, ("B", micro_batch, stage + 1)]


def _order(schedule: Schedule, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Order:
    if schedule == "interleaved_1f1b":
        return _interleaved(rank, ranks, micro_batches, virtual_stages)
    all_of_them = range(micro_batches)
    forward: Order = [("F", one, 0) for one in all_of_them]
    backward: Order = [("B", one, 0) for one in all_of_them]
    if schedule == "gpipe":
        return forward + backward
    order = _alternating(forward, backward, warm_up=ranks - rank - 1)
    return _with_weight_passes(order, rank) if schedule == "zero_bubble" else order


def _alternating(forward: Order, backward: Order, *, warm_up: int) -> Order:
    """Return ``warm_up`` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    order = forward[:warm_up]
    for first, second in zip(forward[warm_up:], backward, strict=False):
        order += [first, second]
    return order + backward[max(len(forward) - warm_up, 0) :]


def _interleaved(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Order:
    """Return the order of interleaved 1F1B. Each chunk takes a group of micro-batches in turn.

    A group has as many micro-batches as ranks, or a few more where the ranks do not divide them.
    """
    num_groups = max(micro_batches // ranks, 1)
    borders = [index * micro_batches // num_groups for index in range(num_groups + 1)]
    groups = [range(first, last) for first, last in pairwise(borders)]
    chunks = range(virtual_stages)
    forward: Order = [("F", one, chunk) for group in groups for chunk in chunks for one in group]
    backward: Order = [("B", one, chunk) for group in groups for chunk in reversed(chunks) for one in group]
    largest = max(len(group) for group in groups)
    return _alternating(forward, backward, warm_up=2 * (ranks - rank - 1) + (virtual_stages - 1) * largest)


def _with_weight_passes(order: Order, rank: int) -> Order:
    """Return the order of ZB-H1.

    Gradients of weights wait for as many micro-batches as there are ranks before. Those left fill the end.
    """
    with_weights: Order = []
    waiting: Order = []
    for kind, micro_batch, chunk in order:
        with_weights.append((kind, micro_batch, chunk))
        if kind == "B":
            waiting.append(("W", micro_batch, chunk))
            if len(waiting) > rank:
                with_weights.append(waiting.pop(0))
    return with_weights + waiting


def makespan(passes: Sequence[Pass]) -> int:
    return max(one.start + one.duration for one in passes)


def idle_share(passes: Sequence[Pass]) -> float:
    """Return the idle share of the time of all ranks, from the first pass to the last."""
    num_ranks = 1 + max(one.rank for one in passes)
    return 1.0 - sum(one.duration for one in passes) / (num_ranks * makespan(passes))


def most_waiting(passes: Sequence[Pass], rank: int, *, virtual_stages: int = 1, until: Kind = "B") -> float:
    """Return the most micro-batches whose activations a rank holds at once, in micro-batches of its layers.

    A micro-batch is held from F to the end of ``until``. W (zero_bubble) needs a part of what B needs, which waits on after B.
    """
    held = most = 0
    for one in passes:
        if one.rank == rank and one.kind == "F":
            held += 1
            most = max(most, held)
        elif one.rank == rank and one.kind == until:
            held -= 1
    return most / virtual_stages
