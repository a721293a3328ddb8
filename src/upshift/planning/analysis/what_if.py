"""Explain why another choice was not taken, and what more memory, faster links or a choice that is not allowed would gain.

Every answer comes from a new search with one change. There are no derivatives and no rules of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log1p
from typing import Any, Literal, get_args

from pydantic import Field

from upshift.errors import MissingExtra, RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Variant
from upshift.planning.analysis.explain import with_more_memory
from upshift.planning.layout import Layout
from upshift.planning.optimizers import ALIASES, optimizers
from upshift.planning.plan import Plan, Precision, changes_of_mathematics
from upshift.planning.planner import Planning, calibrate_and_filter
from upshift.planning.search.layouts import REQUESTED_LAYOUTS
from upshift.planning.search.ranking import EXTRA_MEMORY_BYTES, Candidate, Ranking, limit_of
from upshift.planning.search.search import search
from upshift.planning.search.simplicity import PAIR_ERROR, complexity, is_as_good
from upshift.planning.search.space import ONLY_WHEN_ASKED, parse_fixed, parse_value, settable_fields, split_assignment
from upshift.planning.search.variants import is_traced, variants_for
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.units import format_bytes, gib
from upshift.value import Value

Outcome = Literal["chosen", "slower", "as fast", "faster", "does not fit", "not possible"]
Trace = Callable[[int, tuple[Variant, ...]], ModelProfile]  # traces a model for sequences of up to so many tokens

SAME_SPEED = 0.0005  # of tokens/s: a smaller difference is not printed
MIN_SHOWN_SHARE = 0.005  # of the best plan's step: smaller differences are left out
MAX_NAMED = 4  # terms, parts or choices that one line names
FASTER_LINK = 2.0
HINTED = ("bf16-weights", "8bit-optimizer")  # the choices that change the mathematics least, for the memory that they save
LEAST_HINT = PAIR_ERROR  # logarithm of a gain: the prediction cannot tell smaller ones from none
MAX_HINTED_DEVICES = 8  # one more search on more devices takes seconds


class Counterfactual(Value):
    """The best plan with the requested value, compared with the best of all plans."""

    asked: str = Field(description="field=value")
    outcome: Outcome
    allow: tuple[str, ...] = Field((), description="what --allow must name for it, beside what it names already")
    plan: Plan | None = Field(None, description="the fastest that fits, else the smallest that does not; None: not possible")
    predicted: Numbers | None = None
    gain: float | None = Field(None, description="its tokens per second over the best plan's, less 1; None: it does not fit")
    more_gib: float | None = Field(None, description="its peak above the best plan's")
    more_ms: dict[str, float] = Field(default_factory=dict, description="terms of its step above the best plan's")
    why: str


class ShadowPrice(Value):
    """The gain from one change outside the plan."""

    change: str
    gain: float | None = Field(description="tokens per second over the best plan's, less 1, at least 0; None: not known")
    plan: Plan | None = Field(None, description="the best with the change, where it is faster")
    why: str


def explain_choice(planning: Planning, choice: str, *, fixed: tuple[str, ...], trace: Trace) -> Counterfactual:
    """Return the best plan with ``choice`` (field=value), which replaces the value of that field in ``fixed``.

    Raise RequestError for an unknown field or a value of another type. For a value that is not possible here, the result says so.
    """
    field, value = read_choice(choice)
    best = planning.ranking.candidates[0]
    if value_of(best.plan, field) == value:
        return Counterfactual(
            asked=choice,
            outcome="chosen",
            plan=best.plan,
            predicted=planning.numbers(best),
            gain=0.0,
            more_gib=0.0,
            why="the best plan has it",
        )
    host = planning.host
    needed_allow = _needed_allowance(field, value, planning.workload)
    if field in Layout.model_fields and host.device != "cpu" and host.num_devices == 1:
        reason = f"it says how the devices of a host share the job, and {host.name} has one that computes"
        return Counterfactual(asked=choice, outcome="not possible", why=reason)
    workload = planning.workload.changed(allow=(*planning.workload.allow, *needed_allow))
    other_fixed = tuple(text for text in fixed if text.partition("=")[0] != field)
    try:
        profile = _profile(planning, workload, fixed, (*other_fixed, choice), trace)
        ranking = _search_again(planning, host, profile, workload, (*other_fixed, choice))
    except RequestError as problem:
        return Counterfactual(asked=choice, outcome="not possible", allow=needed_allow, why=_without_set_option(problem))
    return _answer(planning, choice, field, needed_allow, ranking)


def _search_again(
    planning: Planning, host: Host, profile: ModelProfile, workload: Workload, assignments: tuple[str, ...]
) -> Ranking:
    """Return the ranking of a new search, corrected and checked as the planning's own ranking.

    The planner fixed some fields because nothing fits without them. They are fixed here only if the same is true here.
    """
    fixed_fields = {text.partition("=")[0] for text in assignments}
    added = tuple(text for text in planning.added if text.partition("=")[0] not in fixed_fields)
    ranking = _search(planning, host, profile, workload, assignments)
    if added and not ranking.candidates:
        return _search(planning, host, profile, workload, (*assignments, *added))
    return ranking


def _search(planning: Planning, host: Host, profile: ModelProfile, workload: Workload, assignments: tuple[str, ...]) -> Ranking:
    chosen = parse_fixed(assignments, host, profile, workload)
    ranking = search(host, profile, workload, fixed=chosen)
    return calibrate_and_filter(ranking, host, profile, workload, planning.calibration, num_plans=1)


def read_choice(choice: str) -> tuple[str, Any]:
    """Return the field and the value of --why. Raises RequestError."""
    name, text = split_assignment(choice, settable_fields(), option="--why")
    return name, parse_value(name, text, option="--why")


def value_of(plan: Plan, name: str) -> Any:
    """Return the value of a field of the plan or of its layout."""
    return getattr(plan.layout if name in Layout.model_fields else plan, name)


def _needed_allowance(name: str, value: Any, workload: Workload) -> tuple[str, ...]:
    """Return the names that --allow needs for the value of a field, beside those it has."""
    if name == "precision":
        change: str | None = value
    elif name == "optim":
        change = optimizers()[value].allow
    else:
        change = None
    if change is None or change in workload.allow or change not in changes_of_mathematics():
        return ()
    return (change,)


def _profile(
    planning: Planning, workload: Workload, fixed: tuple[str, ...], assignments: tuple[str, ...], trace: Trace
) -> ModelProfile:
    """Return the planning's profile if it has the traces that the search needs, else trace the model again."""
    variants = variants_for(planning.host, workload, assignments)
    traced = variants_for(planning.host, planning.workload, fixed)
    if all(is_traced(variant, traced) for variant in variants):
        return planning.profile
    return trace(workload.sequence_length, variants)


def _without_set_option(problem: RequestError) -> str:
    """Return the problem's message without the option --set, which the user did not use."""
    return str(problem).removeprefix("--set ")


def _answer(planning: Planning, choice: str, name: str, allow: tuple[str, ...], ranking: Ranking) -> Counterfactual:
    changes = "".join(
        f"changes the mathematics ({changes_of_mathematics()[change]}): --allow {change} lets it in; " for change in allow
    )
    if ranking.candidates:
        return _compare_with_best(planning, choice, name, allow, ranking.candidates[0], changes)
    if ranking.too_big:
        nearest = ranking.too_big[0]
        return Counterfactual(
            asked=choice,
            outcome="does not fit",
            allow=allow,
            plan=nearest.plan,
            predicted=planning.numbers(nearest),
            more_gib=gib(nearest.memory.peak - planning.ranking.candidates[0].memory.peak),
            why=changes + describe_shortage(nearest, planning.host, planning.workload),
        )
    reason = ranking.rejected[0].reason if ranking.rejected else "no combination of the other choices is legal with it"
    return Counterfactual(asked=choice, outcome="not possible", allow=allow, why=changes + reason)


def describe_shortage(candidate: Candidate, host: Host, workload: Workload) -> str:
    """Return ``needs 92.0 GiB of 76.0 GiB in the backward phase: activations 60.0 GiB, weights 16.0 GiB``."""
    limit = limit_of(candidate, host, workload) or 0.0
    phase = candidate.memory.peak_phase
    largest_parts = sorted(candidate.memory.phases[phase].parts.items(), key=lambda item: -item[1])
    named_parts = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in largest_parts[:MAX_NAMED] if size > 0.01 * candidate.memory.peak
    )
    return f"needs {format_bytes(candidate.resident)} of {format_bytes(limit)} in the {phase} phase: {named_parts}"


def _compare_with_best(
    planning: Planning, choice: str, name: str, allow: tuple[str, ...], candidate: Candidate, changes: str
) -> Counterfactual:
    best = planning.ranking.candidates[0]
    gain = candidate.tokens_per_second / best.tokens_per_second - 1
    outcome: Outcome = "faster" if gain > 0 else "slower"
    if abs(gain) < SAME_SPEED:
        outcome = "as fast"
    terms = _step_differences(best, candidate, planning.workload.total_steps)
    term_texts = [f"{term} {ms:+,.{0 if abs(ms) >= 10 else 2}f} ms" for term, ms in list(terms.items())[:MAX_NAMED]]
    sentences = [", ".join(term_texts)] if term_texts else []
    other_changes = _other_differences(best.plan, candidate.plan, name)
    if other_changes:
        sentences.append(f"with {', '.join(other_changes[:MAX_NAMED])}")
    if outcome == "faster" and not allow:
        sentences.append(_why_not_taken(best, candidate, choice, name, planning.host))
    return Counterfactual(
        asked=choice,
        outcome=outcome,
        allow=allow,
        plan=candidate.plan,
        predicted=planning.numbers(candidate),
        gain=gain,
        more_gib=gib(candidate.memory.peak - best.memory.peak),
        more_ms=terms,
        why=changes + ("; ".join(sentences) or "the two steps are the same to the accuracy of the prediction"),
    )


def _why_not_taken(best: Candidate, candidate: Candidate, choice: str, name: str, host: Host) -> str:
    """Return why a plan is not the best one that is predicted to be faster than the best one."""
    if name in (*ONLY_WHEN_ASKED, *REQUESTED_LAYOUTS):
        return "no run has confirmed it: only taken when asked for"
    if is_as_good(best, candidate) and complexity(candidate.plan, host) > complexity(best.plan, host):
        return "the prediction cannot tell the two apart, and the best plan is simpler"
    return f"the search missed it: --set {choice}"


def _step_differences(best: Candidate, candidate: Candidate, total_steps: int) -> dict[str, float]:
    """Return the terms of a step that differ, the largest difference first; one-time costs are spread over the run."""
    best_terms = _terms_with_compiling(best, total_steps)
    terms = _terms_with_compiling(candidate, total_steps)
    differences = {}
    for term in dict.fromkeys((*terms, *best_terms)):
        milliseconds = 1000 * (terms.get(term, 0.0) - best_terms.get(term, 0.0))
        if abs(milliseconds) > 1000 * MIN_SHOWN_SHARE * best.time.total:
            differences[term] = milliseconds
    return dict(sorted(differences.items(), key=lambda item: -abs(item[1])))


def _terms_with_compiling(candidate: Candidate, total_steps: int) -> dict[str, float]:
    return {**candidate.time.terms, "compiling, spread over the steps": candidate.time.one_time / total_steps}


def _other_differences(best: Plan, candidate: Plan, choice: str) -> list[str]:
    """Return the choices besides ``choice`` in which the candidate differs from the best plan."""
    names = [name for name in settable_fields() if name != choice]
    return [f"{name}={value_of(candidate, name)}" for name in names if value_of(candidate, name) != value_of(best, name)]


def hint_at_allow(planning: Planning, *, fixed: tuple[str, ...]) -> str | None:
    """Return a sentence on the choice of ``--allow`` that would speed up a plan that is short of memory; None: no such choice."""
    best = planning.ranking.candidates[0].plan
    offloads = best.optim_offload or best.activation_offload or best.weight_offload != "none"
    if planning.host.num_devices > MAX_HINTED_DEVICES or not (best.activation_checkpointing or offloads):
        return None
    names = [name for name in HINTED if name not in planning.workload.allow]
    prices = [price for name in names if (price := _price_of_change(planning, name, fixed)) is not None]
    known = [price for price in prices if price.plan is not None and price.gain is not None]
    fastest = max(known, key=lambda price: price.gain or 0.0, default=None)
    if fastest is not None and log1p(fastest.gain or 0.0) > LEAST_HINT:
        gain = f"{fastest.change}, which changes the mathematics, would give {fastest.gain:+.0%} tokens/s"
        return f"Memory is short: {gain} ({fastest.why})"
    asked = [f"--why precision={name}" for name in names if name in get_args(Precision)]
    unknown = any(price.gain is None for price in prices)
    return f"Memory is short: {asked[0]} shows what other weights would bring" if unknown and asked else None


def shadow_prices(planning: Planning, *, fixed: tuple[str, ...]) -> tuple[ShadowPrice, ...]:
    """Return one price for each change that could matter here. Links that the host does not have are left out."""
    prices = []
    for change, host in _better_hosts(planning.host):
        ranking = _search_again(planning, host, planning.profile, planning.workload, fixed)
        prices.append(_shadow_price(planning, change, ranking))
    for name in changes_of_mathematics():
        if name in planning.workload.allow:
            continue
        price = _price_of_change(planning, name, fixed)
        if price is not None:
            prices.append(price)
    return tuple(prices)


def _better_hosts(host: Host) -> Iterator[tuple[str, Host]]:
    """Yield (name of the change, host with this change): more memory, faster links."""
    with_memory = with_more_memory(host, EXTRA_MEMORY_BYTES)
    if with_memory is not None:
        yield f"{format_bytes(EXTRA_MEMORY_BYTES)} more memory on each device", with_memory
    if host.device == "cpu":
        return
    links = (
        ("inside", "intra_node", host.intra_node, host.gpus_per_node > 1),
        ("between", "inter_node", host.inter_node, host.num_nodes > 1),
    )
    for place, name, link, is_used in links:
        if link is not None and is_used:
            faster = link.changed(bytes_per_second=FASTER_LINK * link.bytes_per_second)
            yield f"links twice as fast {place} nodes", host.changed(**{name: faster})


def _shadow_price(planning: Planning, change: str, ranking: Ranking) -> ShadowPrice:
    best = planning.ranking.candidates[0]
    candidate = ranking.candidates[0] if ranking.candidates else best
    gain = candidate.tokens_per_second / best.tokens_per_second - 1
    if gain < SAME_SPEED:
        return ShadowPrice(change=change, gain=0.0, why="would not make it faster")
    return ShadowPrice(change=change, gain=gain, plan=candidate.plan, why=candidate.plan.label())


def _price_of_change(planning: Planning, name: str, fixed: tuple[str, ...]) -> ShadowPrice | None:
    """Return the price of the best plan that ``--allow name`` adds; None where it adds none on this host."""
    workload = planning.workload.changed(allow=(*planning.workload.allow, name))
    best = None
    change = f"--allow {name}"
    problem = None
    for added in _assignments_allowed_by(name):
        try:  # a field that the user fixed is refused
            ranking = _search_again(planning, planning.host, planning.profile, workload, (*fixed, added))
        except MissingExtra as missing:
            problem = str(missing)
            continue
        except RequestError:
            continue
        if not ranking.candidates and not ranking.too_big and ranking.rejected:
            problem = f"not traced yet: ask with --why {added}"
            continue
        price = _shadow_price(planning, change, ranking)
        best = price if best is None or (price.gain or 0.0) > (best.gain or 0.0) else best
    if best is None and problem is not None:
        return ShadowPrice(change=change, gain=None, why=problem)
    return best


def _assignments_allowed_by(name: str) -> list[str]:
    if name in get_args(Precision):
        return [f"precision={name}"]
    return [f"optim={optim}" for optim, facts in optimizers().items() if facts.allow == name and optim not in ALIASES]
