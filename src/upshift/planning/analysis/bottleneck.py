"""Find the one choice of a plan whose change would help most, from the measured time of each kind of work in its step.

Each answer is a search with one choice left free and all others kept. The search predicts plans with the planner's terms. Each
term is multiplied by measured over predicted time of this step. Work that takes many times its roofline is not bound by a rate:
the time above the roofline is scaled with the number of operators. A kind without a term, such as waiting for data, stays as it
is.

The roofline is the predicted step by kind of work, at the rates that this host reaches. It follows from the formulas alone,
without corrections from earlier runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.rates import host_link, predict_rates
from upshift.planning.cost.segments import plan_trace
from upshift.planning.cost.time import micro_batch_terms, num_full_micro_batches
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan, changes_of_mathematics
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.ranking import Candidate
from upshift.planning.search.search import search
from upshift.planning.search.space import ONLY_WHEN_ASKED, choices
from upshift.planning.workload import Workload
from upshift.value import Value

KINDS = (
    "matrix products",
    "attention",
    "norms and elementwise",
    "head and loss",
    "communication",
    "optimizer",
    "data",
    "idle and dispatch",
)
PRODUCTS, ATTENTION, ELEMENTWISE, HEAD, COMMUNICATION, OPTIMIZER, DATA, IDLE = KINDS
KIND_OF_TERM = {
    "matrix products": PRODUCTS,
    "attention": ATTENTION,
    "memory traffic": ELEMENTWISE,
    "page faults": ELEMENTWISE,
    "dispatch": IDLE,
    "pipeline idle": IDLE,
    "update": OPTIMIZER,
}


def sum_by_kind(terms: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the planner's terms by kind.

    Terms without an entry in KIND_OF_TERM are exchanges. The head is counted among the matrix products.
    """
    seconds_by_kind: dict[str, float] = defaultdict(float)
    for term, seconds in terms.items():
        seconds_by_kind[KIND_OF_TERM.get(term, COMMUNICATION)] += seconds
    return dict(seconds_by_kind)


def head_seconds(host: Host, profile: ModelProfile, workload: Workload, plan: Plan) -> dict[str, float]:
    """Return the seconds of a step in the loss head's products and elementwise work, by kind.

    Return an empty dictionary if the head is on one pipeline stage of several.
    """
    trace = plan_trace(profile, plan, workload)
    rates = predict_rates(host, profile, plan)
    if trace is None or rates is None or plan.layout.pipeline_parallel > 1:
        return {}
    one_micro_batch = micro_batch_terms(profile, trace, plan, rates, link=host_link(host), head_alone=True)
    if workload.forward_passes:
        forward = micro_batch_terms(profile, trace, plan, rates, head_alone=True, forward_alone=True)
        one_micro_batch = {term: seconds + forward.get(term, 0.0) for term, seconds in one_micro_batch.items()}
    num_micro_batches = num_full_micro_batches(plan, workload)
    by_kind = sum_by_kind({term: num_micro_batches * seconds for term, seconds in one_micro_batch.items() if term != "dispatch"})
    return {kind: seconds for kind, seconds in by_kind.items() if kind in (PRODUCTS, ATTENTION, ELEMENTWISE) and seconds > 0}


def roofline(candidate: Candidate, *, host: Host, profile: ModelProfile, workload: Workload) -> dict[str, float]:
    """Return the seconds of a step by kind. ``candidate``: the plan as the formulas predict it."""
    by_kind = sum_by_kind(candidate.time.terms)
    head = head_seconds(host, profile, workload, candidate.plan)
    for kind, seconds in head.items():
        by_kind[kind] = max(by_kind.get(kind, 0.0) - seconds, 0.0)
    return by_kind | ({HEAD: sum(head.values())} if head else {})


MIN_GAIN = 0.01  # a smaller gain is no reason for a change
BOUND_BY_RATE = 3.0  # times the roofline: kernels of a usual size take less
LAYOUT = tuple(Layout.model_fields)
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# The fields of each choice, which are left free together.
FREE_FIELDS: dict[str, tuple[str, ...]] = {
    "precision": ("precision",),
    "optimizer": ("optim", "optim_args"),
    "compilation": ("torch_compile",),
    "attention": ("attention",),
    "recomputation": ("activation_checkpointing", "recompute_granularity"),
    "micro-batch": BATCH,
    "processes": ("num_processes", "threads_per_process", *BATCH, *LAYOUT),
    "layout of the ranks": (*LAYOUT, *BATCH),
    "packing": ("packing",),
    "loss": ("loss_chunk_tokens",),
    "host memory": ("host_memory",),
    "optimizer in the backward pass": ("optimizer_in_backward",),
}
DERIVED = ("gradient_accumulation_steps", "threads_per_process")  # they follow from other fields


class Change(Value):
    """A plan with one choice changed, and what that would gain."""

    choice: str
    values: dict[str, str] = Field(description="field of the plan: value")
    gain: float = Field(description="tokens per second over the measured, less 1")
    saved_ms: float = Field(description="of a step")
    why: str = Field(description="the kinds of work that become shorter, or longer")
    more_gib: float | None = Field(None, description="its predicted peak above this plan's")
    allow: tuple[str, ...] = Field((), description="changes the mathematics: what --allow must name")
    fix: str


@dataclass(frozen=True)
class Measured:
    """The seconds of a plan's step by kind of work, predicted by formula and measured."""

    host: Host
    profile: ModelProfile
    workload: Workload
    candidate: Candidate
    seconds: dict[str, float]  # the seconds of a step; the head is among the products and the elementwise work

    def scaled_seconds(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds that another plan's step would take, by kind."""
        predicted_here = sum_by_kind(self.candidate.time.terms)
        predicted_there = sum_by_kind(candidate.time.terms)
        operator_ratio = predicted_there.get(IDLE, 0.0) / predicted_here[IDLE] if predicted_here.get(IDLE) else 1.0
        seconds_by_kind = {}
        for kind in predicted_there | self.seconds:
            predicted = predicted_here.get(kind, 0.0)
            measured = self.seconds.get(kind, 0.0)
            bound_by_rate = min(measured, BOUND_BY_RATE * predicted)
            scale = bound_by_rate / predicted if predicted else 1.0
            seconds_by_kind[kind] = predicted_there.get(kind, 0.0) * scale + (measured - bound_by_rate) * (
                operator_ratio if predicted else 1.0
            )
        return seconds_by_kind

    def total(self, candidate: Candidate) -> float:
        """Return the seconds of a step, with one-time costs spread over the run."""
        return sum(self.scaled_seconds(candidate).values()) + candidate.time.one_time / self.workload.total_steps


def find_changes(
    measured: Measured, *, fixed: tuple[str, ...] = (), legal: Callable[[Plan], bool] = lambda plan: True
) -> list[Change]:
    """Return the best change of each choice, if it gains enough, most gain first.

    ``fixed``: fields that the user has decided. ``legal``: whether a plan can run.
    """
    changes: list[Change] = []
    free_fields = {choice: tuple(name for name in fields if name not in fixed) for choice, fields in FREE_FIELDS.items()}
    for choice, fields in free_fields.items():
        if FREE_FIELDS[choice][0] in fixed:
            continue
        change = _best_change(measured, choice, fields, (), legal)
        if change is None and choice in ("precision", "optimizer"):  # values that change the mathematics, if nothing else helps
            change = _best_change(measured, choice, fields, tuple(changes_of_mathematics()), legal)
        if change is not None and change.values not in [earlier.values for earlier in changes]:
            changes.append(change)
    return sorted(changes, key=lambda change: -change.gain)


def _best_change(
    measured: Measured, choice: str, fields: tuple[str, ...], allow: tuple[str, ...], legal: Callable[[Plan], bool]
) -> Change | None:
    workload = measured.workload.changed(allow=tuple(dict.fromkeys((*measured.workload.allow, *allow))))
    plan = measured.candidate.plan
    seconds_before = measured.total(measured.candidate)
    try:
        ranking = search(measured.host, measured.profile, workload, fixed=_fixed_fields(measured, plan, fields, workload))
    except RequestError:
        return None  # no other value is legal here
    job_memory = JobMemory(measured.host, measured.profile, workload)
    for candidate in sorted(ranking.candidates, key=measured.total):
        gain = seconds_before / measured.total(candidate) - 1
        if gain < MIN_GAIN:
            return None
        if _changed_values(plan, candidate.plan) and job_memory.describe_excess(candidate) is None and legal(candidate.plan):
            return _describe_change(measured, choice, candidate, gain)
    return None


def _fixed_fields(measured: Measured, plan: Plan, free_fields: tuple[str, ...], workload: Workload) -> dict[str, Any]:
    request_fields = (*ONLY_WHEN_ASKED, "weight_offload", "optim_args", "mup_base")
    names = [*choices(measured.host, measured.profile, workload), *request_fields, BATCH[0]]
    fixed = {name: getattr(plan, name) for name in names if name not in free_fields}
    if plan.num_processes > 1 and "num_processes" not in free_fields:
        fixed |= {name: getattr(plan.layout, name) for name in LAYOUT if name not in free_fields}
    return fixed


def _changed_values(old_plan: Plan, new_plan: Plan) -> dict[str, str]:
    """Return the fields that differ, without those that follow from other fields."""
    old_values = old_plan.model_dump(exclude={"layout"}) | old_plan.layout.model_dump()
    new_values = new_plan.model_dump(exclude={"layout"}) | new_plan.layout.model_dump()
    changed = {name: str(value) for name, value in new_values.items() if value != old_values[name]}
    return {name: value for name, value in changed.items() if name not in DERIVED} or changed


def _describe_change(measured: Measured, choice: str, candidate: Candidate, gain: float) -> Change:
    seconds_now = measured.scaled_seconds(measured.candidate)
    seconds_then = measured.scaled_seconds(candidate)
    differences = {kind: seconds_then.get(kind, 0.0) - seconds_now.get(kind, 0.0) for kind in seconds_now | seconds_then}
    large_differences = sorted(
        (item for item in differences.items() if abs(item[1]) > 0.002 * sum(seconds_now.values())), key=lambda item: item[1]
    )
    values = _changed_values(measured.candidate.plan, candidate.plan)
    allowed = measured.workload.allow
    allow = tuple(name for name in candidate.plan.changes_mathematics if name not in allowed)
    options = " ".join(f"--set {name}={value}" for name, value in values.items())
    return Change(
        choice=choice,
        values=values,
        gain=gain,
        saved_ms=1000 * (measured.total(measured.candidate) - measured.total(candidate)),
        why=", ".join(f"{kind} {1000 * seconds:+,.1f} ms" for kind, seconds in large_differences[:4]),
        more_gib=(candidate.memory.peak - measured.candidate.memory.peak) / 2**30,
        allow=allow,
        fix=f"upshift train ... {options}" + (f" --allow {','.join((*allowed, *allow))}" if allow else ""),
    )
