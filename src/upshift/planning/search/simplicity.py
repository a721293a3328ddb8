"""Choose the simplest among the plans that the prediction cannot tell apart.

A plan that is predicted a few percent faster than a simpler one may be the slower one. So the plan with the fewest mechanisms
wins among those whose predicted speeds differ by less than the prediction's own error. If all plans need the same mechanisms,
the fastest wins. Plans that were measured are told apart by their measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import expm1, log
from typing import Any, Protocol, TypeVar

from upshift.hardware.spec import Host
from upshift.planning.cost.network import has_slow_link
from upshift.planning.plan import Plan
from upshift.planning.search.ranking import Candidate, Ranking

# Error of the ratio of two predicted speeds, as a logarithm: 90 % of the pairs of published training rows of one model on one
# host are within it (benchmarks/cases/published.py). Of the pairs that differ in degrees and batches alone: 0.20.
PAIR_ERROR = 0.213
# The same, of those pairs (122 of 860) of which one uses a kind of parallelism, sharding or recomputation that the other does
# not (Plan.mechanisms). Published rows of inference have too few such pairs for a figure of their own.
MECHANISM_ERROR = 0.270
# How much each mechanism adds that can go wrong or be slow. They are in the order in which torchtitan (arXiv 2410.06511) and the
# Ultra-Scale Playbook take them up: data parallelism, fully_shard and recomputation first, pipelines last.
ZERO = 1
HYBRID = 1  # replicas of shards
RECOMPUTATION = 1
IN_BACKWARD = 1
CONTEXT_PARALLEL = 1  # weights stay as they are
EXPERT_PARALLEL = 2
TENSOR_PARALLEL = 2
OFFLOAD = 2
PIPELINE = 3
SLOW_LINK = 2  # ranks that exchange in every layer over PCIe. Megatron-LM (arXiv 2104.04473) takes pipelines there
SCHEDULE = 1  # another one than 1f1b
WIDE = 3  # layers gathered among more ranks than MAX_GATHERING
MAX_GATHERING = 512  # from there on the Playbook's runs lost speed, and it adds tensor parallelism; published rows end at 128


def complexity(plan: Plan, host: Host) -> tuple[int, int]:
    """Return how many mechanisms the plan needs beside plain data parallelism, each with its weight, and the largest weight.

    If two plans have the same sum, the simpler one has the mechanisms that people take up first: ZeRO and recomputation come
    before tensor parallelism.
    """
    layout = plan.layout
    num_summing = plan.data_parallel * layout.context_parallel
    slow = SLOW_LINK * has_slow_link(host)
    mechanisms = (
        (layout.fully_shard != "no", ZERO),
        (layout.fully_shard != "no" and layout.shard_size < num_summing, HYBRID),
        (layout.gathers and layout.shard_size > MAX_GATHERING, WIDE),
        (plan.activation_checkpointing > 0, RECOMPUTATION),
        (plan.optimizer_in_backward, IN_BACKWARD),
        (layout.context_parallel > 1, CONTEXT_PARALLEL + slow * (layout.context_kind == "ulysses")),  # attention hides rings
        (layout.expert_parallel > 1, EXPERT_PARALLEL + slow),
        (layout.tensor_parallel > 1, TENSOR_PARALLEL + slow),
        (plan.optim_offload or plan.activation_offload or plan.weight_offload != "none", OFFLOAD),
        (layout.pipeline_parallel > 1, PIPELINE),
        (layout.pipeline_parallel > 1 and layout.pipeline_schedule != "1f1b", SCHEDULE),
    )
    weights = [weight for is_used, weight in mechanisms if is_used]
    return sum(weights), max(weights, default=0)


def simplest_first(ranking: Ranking, host: Host, fits: Callable[[Candidate], bool] = lambda candidate: True) -> Ranking:
    """Return the ranking with the simplest plan first among those as good as the fastest. The others keep their order.

    ``fits``: returns whether a plan fits in every phase of its job.
    """
    if not ranking.candidates or ranking.candidates[0].basis("step").tier == "measured":
        return ranking
    fastest = ranking.candidates[0].plan

    def can_replace(candidate: Candidate) -> bool:
        same_numbers = candidate.plan.precision == fastest.precision and candidate.plan.optim == fastest.optim
        return same_numbers and (candidate.plan is fastest or fits(candidate))

    return replace(ranking, candidates=move_simplest(ranking.candidates, partial(complexity, host=host), can_replace))


class Ranked(Protocol):
    """A plan with its predicted speed."""

    @property
    def plan(self) -> Any: ...

    @property
    def tokens_per_second(self) -> float: ...


AnyRanked = TypeVar("AnyRanked", bound=Ranked)


def move_simplest(
    candidates: list[AnyRanked],
    complexity_of: Callable[[Any], Any],
    can_replace: Callable[[AnyRanked], bool],
) -> list[AnyRanked]:
    """Return the candidates, fastest first, with the simplest one moved to the front that the prediction cannot tell apart.

    Args:
        complexity_of: returns the complexity of a plan, as a value that can be ordered.
        can_replace: returns whether a candidate may replace the fastest one, which it may itself.
    """
    as_good = [candidate for candidate in candidates if is_as_good(candidate, candidates[0])]
    as_good.sort(key=lambda candidate: complexity_of(candidate.plan))  # stable: the fastest of the simplest comes first
    chosen = next(candidate for candidate in as_good if can_replace(candidate))
    return [chosen, *(candidate for candidate in candidates if candidate is not chosen)]


def pair_error(one: Any, other: Any) -> float:
    """Return the error of the ratio of the predicted speeds of two plans, as a logarithm."""
    return PAIR_ERROR if one.mechanisms == other.mechanisms else MECHANISM_ERROR


def is_as_good(candidate: Ranked, fastest: Ranked) -> bool:
    """Return whether the prediction cannot tell a candidate's speed from that of the fastest one."""
    if candidate.tokens_per_second <= 0:
        return False
    return log(fastest.tokens_per_second / candidate.tokens_per_second) <= pair_error(candidate.plan, fastest.plan)


def why_simplest(candidates: Sequence[Ranked]) -> str | None:
    """Return why the first plan is not the one that is predicted to be the fastest; None where it is."""
    best = candidates[0]
    fastest = max(candidates, key=lambda candidate: candidate.tokens_per_second)
    gain = fastest.tokens_per_second / best.tokens_per_second - 1
    if gain <= 0:
        return None
    return (
        f"Plan 1 is the simplest of those that the prediction cannot tell apart (between two plans it errs by up to "
        f"{expm1(pair_error(best.plan, fastest.plan)):.0%}). The fastest is predicted {gain:+.1%}: {fastest.plan.label()}"
    )
