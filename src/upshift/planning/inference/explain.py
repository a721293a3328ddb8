"""Say why: what each choice of the best plan brings, and what the runner-up would cost."""

from __future__ import annotations

from functools import partial

from upshift.planning.explain import MAX_REJECTED, Reason, differences, reasons_among
from upshift.planning.inference.rank import Candidate, Ranking, Rejected

BECAUSE = {
    "weights": "bytes read for every step, and the rate of matrix products",
    "kv_cache": "sequences that fit, and bytes read for each of them",
    "tensor_parallel": "weights and cache shared in a step, against exchanges in every layer",
    "pipeline_parallel": "memory of several devices with few exchanges, against latency",
    "max_concurrency": "weights are read once for all sequences, each of which waits longer",
    "prefill_chunk_tokens": "efficient products for prompts, against longer steps for those that decode",
    "execution": "kernels replayed without a gap, against none recorded",
}
OF_GENERATION = ("kv_cache", "prefill_chunk_tokens")


def reasons(ranking: Ranking) -> tuple[Reason, ...]:
    """Return one row for each choice: the best plan that differs in it, and how much slower or bigger that plan is."""
    best = ranking.candidates[0]
    encodes = best.service.tpot is None
    because = {name: why for name, why in BECAUSE.items() if not (encodes and name in OF_GENERATION)}
    cost = partial(_cost, best)
    return reasons_among(ranking.candidates, ranking.rejected, because, cost=cost, blocked_cost="does not fit, or is too slow")


def _cost(best: Candidate, other: Candidate) -> str:
    return differences(other.tokens_per_second / best.tokens_per_second, other.resident - best.resident)


def representative(rejected: list[Rejected]) -> list[Rejected]:
    """Return at most 200 rejections, evenly drawn in the order of the space."""
    step = -(-len(rejected) // MAX_REJECTED) if rejected else 1
    return rejected[::step]
