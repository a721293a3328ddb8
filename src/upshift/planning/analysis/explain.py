"""Explain a plan: why each choice matters, what the runner-up would cost, and what more memory would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from upshift.hardware.spec import Host
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import SampleUnit
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.ranking import EXTRA_MEMORY_BYTES, Candidate, Ranking, Rejected, TooBig, limit_of
from upshift.planning.workload import Workload
from upshift.units import format_bytes
from upshift.value import Value

REASON_BY_CHOICE = {
    "layout": "memory of each rank against exchanges between ranks",
    "precision": "rate of matrix products and bytes moved",
    "per_device_train_batch_size": "kernel sizes against memory; accumulated to the same global batch",
    "activation_checkpointing": "layers computed twice to hold fewer activations",
    "recompute_granularity": "what is made again against what is kept of a recomputed layer",
    "attention": "time and memory of the attention kernel at this length",
    "torch_compile": "fused kernels against the time to compile",
    "optim": "time and temporaries of the update",
    "optimizer_in_backward": "gradients never stand together in memory",
    "loss_chunk_tokens": "the logits of the whole batch never stand in memory",
    "packing": "no computation on padding",
    "num_processes": "one process with many threads against several with few",
    "host_memory": "no page faults for memory that comes back every step",
}
MAX_REJECTED = 200
LEAST_GAIN = 0.0005  # printed as 0.1 %


class Reason(Value):
    """The reason why the best plan has a value, and the cost of the best plan with another value."""

    choice: str
    value: str
    why: str
    runner_up: str | None = None
    runner_up_cost: str | None = None


class HasPlan(Protocol):
    @property
    def plan(self) -> Any: ...


Choosable = TypeVar("Choosable", bound=HasPlan)


def reasons(ranking: Ranking) -> tuple[Reason, ...]:
    """Return one row for each choice: the best plan that differs in it, and how much slower or bigger that plan is."""
    best = ranking.candidates[0]
    because = dict(REASON_BY_CHOICE)
    if not best.plan.activation_checkpointing:
        del because["recompute_granularity"]
    cost = partial(_describe_cost, best)
    return reasons_among(ranking.candidates, ranking.too_big, because, cost=cost, blocked_cost="does not fit")


def reasons_among(
    candidates: Sequence[Choosable],
    blocked: Sequence[HasPlan],
    because: Mapping[str, str],
    *,
    cost: Callable[[Choosable], str],
    blocked_cost: str,
) -> tuple[Reason, ...]:
    """Return one row for each choice in which a plan differs from the best.

    Args:
        candidates: the plans that may be chosen, best first.
        blocked: the plans that may not be chosen. They are used for a choice in which no candidate differs.
        because: the reason why a choice matters, by the field of the plan.
        cost: returns the cost of a candidate as a text.
        blocked_cost: the same for all blocked plans.
    """
    best = candidates[0].plan
    rows = []
    for name, why in because.items():
        value = getattr(best, name)
        alternative = next((entry for entry in candidates if getattr(entry.plan, name) != value), None)
        if alternative is not None:
            runner_up = describe_value(alternative.plan, name)
            cost_text = cost(alternative)
        else:
            excluded = next((entry for entry in blocked if getattr(entry.plan, name) != value), None)
            if excluded is None:
                continue
            runner_up = describe_value(excluded.plan, name)
            cost_text = blocked_cost
        text = describe_value(best, name)
        rows.append(Reason(choice=name, value=text, why=why, runner_up=runner_up, runner_up_cost=cost_text))
    return tuple(rows)


def describe_value(plan: Any, name: str) -> str:
    """Return a short text for the value of a plan's field."""
    value = getattr(plan, name)
    if isinstance(value, Layout):
        return value.label() or "data parallel"
    return str(value)


def _describe_cost(best: Candidate, alternative: Candidate) -> str:
    return describe_difference(alternative.tokens_per_second / best.tokens_per_second, alternative.memory.peak - best.memory.peak)


def describe_difference(speed: float, more_bytes: float) -> str:
    """Return a text with the cost of another plan. ``speed``: its tokens a second over the best plan's."""
    sign = "+" if more_bytes >= 0 else "-"
    return f"{speed - 1:+.1%}, {sign}{format_bytes(abs(more_bytes))}"


def with_more_memory(host: Host, extra_bytes: int) -> Host | None:
    """Return the host with more memory on each device, or in its CPU's memory; None where its memory is unknown."""
    device = host.gpu or host.cpu
    if device is None or device.memory_bytes is None:
        return None
    free = None if device.free_memory_bytes is None else device.free_memory_bytes + extra_bytes
    larger = device.changed(memory_bytes=device.memory_bytes + extra_bytes, free_memory_bytes=free)
    return host.changed(**{"gpu" if host.gpu else "cpu": larger})


def shadow_price(ranking: Ranking, host: Host, workload: Workload, unit: SampleUnit = "tokens") -> str | None:
    """Return a sentence on what 8 GiB more memory would gain, from the fastest plan that would fit then."""
    bigger = with_more_memory(host, EXTRA_MEMORY_BYTES)
    if not ranking.candidates or unknown_memory(host) is not None or bigger is None:
        return None
    best = ranking.candidates[0]
    reachable = []
    for candidate in ranking.too_big:
        limit = limit_of(candidate, bigger, workload)
        if limit is not None and candidate.resident <= limit:
            reachable.append(candidate)
    fastest = max(reachable, key=lambda entry: entry.tokens_per_second, default=None)
    gain = 0.0 if fastest is None else fastest.tokens_per_second / best.tokens_per_second - 1
    if fastest is None or gain < LEAST_GAIN:
        return "8 GiB more memory would not make it faster"
    return f"8 GiB more memory would give {gain:+.1%} {unit}/s ({fastest.plan.label()})"


def sample_rejections(rejected: list[Rejected | TooBig]) -> list[Rejected | TooBig]:
    """Return at most MAX_REJECTED rejections, with each kind of reason among them."""
    by_kind: dict[tuple[str, Plan | str], Rejected | TooBig] = {}
    for entry in rejected:
        by_kind.setdefault((entry.reason.split(" (")[-1], entry.plan.precision), entry)
    chosen = list(by_kind.values())[:MAX_REJECTED]
    chosen_ids = {id(entry) for entry in chosen}
    step = max(len(rejected) // MAX_REJECTED, 1)
    chosen += [entry for entry in rejected[::step] if id(entry) not in chosen_ids]
    return chosen[:MAX_REJECTED]
