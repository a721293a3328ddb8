"""The best plan's family at other sequence lengths and micro-batches, costed in advance: a page has no planner in it.

A family shares every choice but the micro-batch (accumulated to the same global batch) and what is recomputed. Ignored:
the data's own length histogram; every sequence is taken to be full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from upshift.planning.layout import divisors
from upshift.planning.legal import conflict
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate, Coster, limit_of
from upshift.planning.space import BLOCK_ATTENTION_LIMIT

LENGTH_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of the workload's sequence length
MAX_MICRO_BATCHES = 12
Recomputation = tuple[int, str]  # how many layers, in which granularity


@dataclass(frozen=True)
class Cell:
    """At one sequence length and micro-batch: the family's plans, and of them the fastest that fits, else the smallest."""

    plans: tuple[Candidate, ...]
    shown: Candidate
    fits: bool


@dataclass(frozen=True)
class Grid:
    sequence_lengths: tuple[int, ...]
    micro_batches: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]  # by sequence length, by micro-batch
    traced: tuple[int, int]  # lengths between which the profile's polynomials were fitted
    own: tuple[int, int]  # where the best plan stands


def family_grid(planning: Planning) -> Grid | None:
    """Only lengths and micro-batches at which the family has plans; None where it has none at its own."""
    own_length, own_size = planning.best.sequence_length, planning.best.per_device_train_batch_size
    lengths, sizes = sequence_lengths(planning), micro_batches(planning)
    costed = {(length, size): plans for length in lengths for size, plans in costed_at(planning, length, sizes)}
    if not costed[own_length, own_size]:
        return None
    lengths = tuple(length for length in lengths if costed[length, own_size])
    sizes = tuple(size for size in sizes if all(costed[length, size] for length in lengths))
    return Grid(
        sequence_lengths=lengths,
        micro_batches=sizes,
        cells=tuple(tuple(cell_of(costed[length, size], planning) for size in sizes) for length in lengths),
        traced=planning.profile.sequence_range,
        own=(lengths.index(own_length), sizes.index(own_size)),
    )


def sequence_lengths(planning: Planning) -> tuple[int, ...]:
    """Around the workload's own, as far as the model has positions and the kernel is offered."""
    own, ranks = planning.best.sequence_length, planning.best.layout.context_parallel
    longest = planning.profile.max_positions or own * int(LENGTH_FACTORS[-1])
    if planning.best.attention == "block":
        longest = min(longest, max(BLOCK_ATTENTION_LIMIT, own))
    found = {round(own * factor) for factor in LENGTH_FACTORS}
    return tuple(sorted({own} | {length for length in found if 2 <= length <= longest and length % ranks == 0}))


def micro_batches(planning: Planning) -> tuple[int, ...]:
    """Those that divide what a data-parallel rank has of the global batch; of many, a few, the ends and the best plan's own."""
    mine = planning.workload.global_batch // planning.best.data_parallel
    sizes = divisors(mine)
    own, step = planning.best.per_device_train_batch_size, -(-len(sizes) // MAX_MICRO_BATCHES)
    return tuple(sorted({*sizes[::step], sizes[-1], own}))


def recomputations(planning: Planning) -> list[Recomputation]:
    """Those that the planning considered: one that was fixed by the user stays fixed."""
    ranking = planning.ranking
    return sorted(
        {(one.plan.activation_checkpointing, one.plan.recompute_granularity) for one in (*ranking.candidates, *ranking.too_big)}
    )


def costed_at(planning: Planning, length: int, sizes: Sequence[int]) -> Iterator[tuple[int, list[Candidate]]]:
    """Each micro-batch with the plans of the family that can be costed there."""
    workload = planning.workload.model_copy(update={"sequence_length": length, "lengths": None})
    coster = Coster(planning.host, planning.profile, workload)
    mine = workload.global_batch // planning.best.data_parallel
    for size in sizes:
        plans = [
            planning.best.model_copy(update={
                "sequence_length": length, "per_device_train_batch_size": size, "gradient_accumulation_steps": mine // size,
                "activation_checkpointing": layers, "recompute_granularity": granularity,
            })
            for layers, granularity in recomputations(planning)
        ]  # fmt: skip
        legal = [plan for plan in plans if conflict(plan, clips_gradients=workload.clips_gradients) is None]
        costed = [one for one in map(coster.cost, legal) if isinstance(one, Candidate)]
        yield size, [planning.calibration.of(one, workload) for one in costed]


def cell_of(plans: Sequence[Candidate], planning: Planning) -> Cell:
    fitting = [one for one in plans if fits(one, planning)]
    if fitting:
        return Cell(tuple(plans), max(fitting, key=lambda one: one.tokens_per_second), True)
    return Cell(tuple(plans), min(plans, key=lambda one: one.resident), False)


def fits(candidate: Candidate, planning: Planning) -> bool:
    limit = limit_of(candidate, planning.host, planning.workload)
    return limit is None or candidate.resident <= limit
