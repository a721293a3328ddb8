"""Rank the inference plans for a host, a ModelProfile and an InferenceWorkload: the entry point of this package.

For every plan of the space the memory is predicted first, then the time. Plans that do not fit, or that answer too slowly, are
rejected with the reason. Then come a plan's predicted numbers, the reasons for the choices of the best plan, and the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pydantic import Field

from upshift.errors import NothingFits, RequestError
from upshift.hardware import collective, describe
from upshift.hardware.catalog.efficiency import GEMM_EFFICIENCY
from upshift.hardware.catalog.lookup import names_with_more
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.models.source import ModelSource
from upshift.models.tracing.profile_model import Profiler, profile_model
from upshift.planning.analysis.explain import MAX_REJECTED, Reason, describe_difference, reasons_among
from upshift.planning.analysis.rejections import Lesson, lessons_of
from upshift.planning.cost.communication import link_advice
from upshift.planning.cost.network import has_slow_link
from upshift.planning.cost.rates import NO_RATE_ADVICE
from upshift.planning.cost.time import sample_unit
from upshift.planning.inference.memory import ReplicaMemory, replica_memory
from upshift.planning.inference.plan import InferencePlan, InferenceWorkload, ReplicaShape
from upshift.planning.inference.space import (
    choices,
    chunk_sizes,
    concurrencies,
    default_cache,
    device_layouts,
    occupied_share,
    parse_fixed,
    read_fixed,
)
from upshift.planning.inference.time import TERM_NAMES, Engine, Service, build_engine, predict_service
from upshift.planning.search.simplicity import move_simplest, why_simplest
from upshift.record import Tier
from upshift.units import format_bytes, gib
from upshift.value import Value

MILLISECONDS = 1000.0
LEANER_WEIGHTS = ("fp8-weights", "int8-weights", "int4-weights")  # --allow: their plans need less memory
LEANER_CACHE = ("fp8-kv", "int8-kv")
HALVINGS = 5  # of the requests at once and of the lengths, if nothing fits
MAX_ADVICE = 3  # options in a message


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted costs. ``tokens_per_second`` and ``requests_per_second`` are those of all replicas.

    ``occupied``: the share of the replicas' rows that the workload's requests fill.
    """

    plan: InferencePlan
    memory: ReplicaMemory
    service: Service
    occupied: float

    @property
    def tokens_per_second(self) -> float:
        return self.service.tokens_per_second * self.plan.replicas * self.occupied

    @property
    def requests_per_second(self) -> float:
        return self.service.requests_per_second * self.plan.replicas * self.occupied

    @property
    def resident(self) -> float:
        return self.memory.total(self.plan.max_concurrency)

    @property
    def fits(self) -> bool:
        return self.memory.limit is None or self.resident <= self.memory.limit


@dataclass(frozen=True)
class Rejected:
    """A plan that is not offered, and why."""

    plan: InferencePlan
    reason: str


@dataclass
class Ranking:
    """The plans of a space, best first.

    ``too_big`` and ``too_slow`` have the plans that miss a limit, those that miss it by least first.
    """

    candidates: list[Candidate] = field(default_factory=list)
    too_big: list[Candidate] = field(default_factory=list)
    too_slow: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def num_plans(self) -> int:
        return len(self.candidates) + len(self.rejected)


def rank_plans(host: Host, profile: ModelProfile, workload: InferenceWorkload, *, fixed: dict[str, Any]) -> Ranking:
    """Return the ranking of all plans that have the ``fixed`` fields."""
    ranking = Ranking()
    base: dict[str, Any] = {"device": host.device, "host": host.fingerprint, "model": profile.model_hash}
    for shape, replicas in _shapes(host, profile, workload, fixed):
        engine = build_engine(host, profile, workload, shape)
        for chunk in chunk_sizes(workload, fixed):
            memory = replica_memory(host, profile, workload, shape, chunk_tokens=chunk)
            for concurrency in concurrencies(workload, replicas, memory.largest_concurrency, fixed):
                tokens = chunk if workload.task == "generate" else concurrency * workload.prompt_length
                plan = InferencePlan.model_construct(
                    **base, **shape._asdict(), replicas=replicas, max_concurrency=concurrency, prefill_chunk_tokens=tokens
                )
                _add_plan(ranking, plan, engine, memory, workload)
            if workload.task == "encode":
                break  # a batch is one step, whatever the chunks
    ranking.candidates.sort(key=_sort_key)
    ranking.candidates = _simplest_first(ranking.candidates, host)
    ranking.too_big.sort(key=lambda candidate: (candidate.resident, *_sort_key(candidate)))
    ranking.too_slow.sort(key=lambda candidate: (_latency_excess(candidate, workload), *_sort_key(candidate)))
    return ranking


def _shapes(
    host: Host, profile: ModelProfile, workload: InferenceWorkload, fixed: dict[str, Any]
) -> Iterator[tuple[ReplicaShape, int]]:
    """Yield (shape of a replica, number of replicas), in a fixed order."""
    values = choices(host, profile, workload)
    values |= {name: [fixed[name]] for name in values if name in fixed}
    quantized = [name for name in values["kv_cache"] if name in ("fp8", "int8")]
    device_degrees = device_layouts(host, values)
    group_size = fixed.get("group_size", workload.runs_in.group_size)
    for weights in values["weights"]:
        default_precision = default_cache(weights, host)
        for cache in [fixed["kv_cache"]] if "kv_cache" in fixed else [default_precision, *quantized]:
            for tensor, pipeline, replicas in device_degrees:
                for execution in values["execution"]:
                    yield ReplicaShape(weights, cache, tensor, pipeline, execution, group_size), replicas


def _add_plan(
    ranking: Ranking, plan: InferencePlan, engine: Engine | None, memory: ReplicaMemory, workload: InferenceWorkload
) -> None:
    if engine is None:
        ranking.rejected.append(Rejected(plan, f"this host's rate with {plan.weights} weights is unknown{NO_RATE_ADVICE}"))
        return
    service = predict_service(engine, workload, plan.max_concurrency, plan.prefill_chunk_tokens)
    if service is None:
        reason = f"the link between its devices is unknown; {link_advice(engine.host)}"
        ranking.rejected.append(Rejected(plan, reason))
        return
    candidate = Candidate(plan, memory, service, occupied_share(workload, plan.replicas, plan.max_concurrency))
    latency_problem = describe_latency(candidate, workload)
    if not candidate.fits:
        ranking.too_big.append(candidate)
        ranking.rejected.append(Rejected(plan, describe_excess(candidate)))
    elif latency_problem is not None:
        ranking.too_slow.append(candidate)
        ranking.rejected.append(Rejected(plan, latency_problem))
    else:
        ranking.candidates.append(candidate)


def describe_excess(candidate: Candidate) -> str:
    """Return how much memory the plan needs, and how many sequences would fit."""
    memory = candidate.memory
    needs = f"needs {format_bytes(candidate.resident)} of the {format_bytes(memory.limit or 0.0)} that a process may use"
    largest = memory.largest_concurrency or 0
    return f"{needs}; at most {largest:,} fit at once" if largest else f"{needs}; not one sequence fits beside the weights"


def describe_latency(candidate: Candidate, workload: InferenceWorkload) -> str | None:
    """Return the first latency limit of the request that the plan exceeds; None where it exceeds none."""
    for name, milliseconds, limit in _latencies(candidate, workload):
        if limit is not None and milliseconds > limit:
            return f"{name} {milliseconds:,.1f} ms, over --max-{name.lower()}-ms {limit:g}"
    return None


def _latencies(candidate: Candidate, workload: InferenceWorkload) -> list[tuple[str, float, float | None]]:
    service = candidate.service
    first = "latency" if workload.task == "encode" else "TTFT"
    return [
        (first, MILLISECONDS * service.ttft, workload.max_ttft_ms),
        ("TPOT", MILLISECONDS * (service.tpot or 0.0), workload.max_tpot_ms),
    ]


def _latency_excess(candidate: Candidate, workload: InferenceWorkload) -> float:
    """Return the largest ratio of a latency to its limit."""
    return max(milliseconds / limit for _, milliseconds, limit in _latencies(candidate, workload) if limit is not None)


def _sort_key(candidate: Candidate) -> tuple[Any, ...]:
    """Return the sort key: throughput, then latency, memory and name.

    With the name the ranking never depends on the order of the space.
    """
    service = candidate.service
    return -candidate.tokens_per_second, service.tpot or service.ttft, service.ttft, candidate.resident, candidate.plan.label()


def _simplest_first(candidates: list[Candidate], host: Host) -> list[Candidate]:
    """Return the candidates with the simplest first among those that cannot be told from the fastest."""
    if not candidates:
        return candidates
    fastest = candidates[0].plan

    def can_replace(candidate: Candidate) -> bool:
        plan = candidate.plan
        return (plan.weights, plan.kv_cache, plan.execution) == (fastest.weights, fastest.kv_cache, fastest.execution)

    return _soonest_first(move_simplest(candidates, partial(_complexity, host=host), can_replace))


SAME_THROUGHPUT = 0.98  # of the first plan's: a plan as good, whose answers decide
SOONER = 0.95  # of the first plan's time per token: a difference that somebody notices
REQUEST_CHOICES = {"max_concurrency", "prefill_chunk_tokens"}


def _soonest_first(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates with the plan first that answers soonest, of those that differ in how many requests run at once.

    Beyond some number of requests, more of them add hardly any throughput, and each waits longer.
    """
    first = candidates[0]
    enough = SAME_THROUGHPUT * first.tokens_per_second
    alike = [other for other in candidates if other.tokens_per_second >= enough and only_requests_differ(other, first)]
    chosen = min(alike, key=lambda other: (other.service.tpot or 0.0, other.service.ttft))
    if (chosen.service.tpot or 0.0) >= SOONER * (first.service.tpot or 0.0):
        return candidates
    return [chosen, *(other for other in candidates if other is not chosen)]


def only_requests_differ(one: Candidate, other: Candidate) -> bool:
    return one.plan.model_dump(exclude=REQUEST_CHOICES) == other.plan.model_dump(exclude=REQUEST_CHOICES)


def _complexity(plan: InferencePlan, host: Host) -> int:
    """Return 0 for replicas alone, 1 for tensor parallelism, 2 for a pipeline and 3 for both. Over PCIe: 0, 3, 2 and 5.

    It is the order of vLLM's guide: tensor parallelism inside a node, a pipeline where the model needs more nodes, and a pipeline
    first on GPUs without NVLink.
    """
    tensor = 3 if has_slow_link(host) else 1
    return tensor * (plan.tensor_parallel > 1) + 2 * (plan.pipeline_parallel > 1)


# Devices whose matrix products were measured have the interval of the program; others have no rows, and None. It is wider for
# collectives that were not measured, such as those on PCIe: 36 rows of 4 and 8 L40S lie within 0.88 and 1.15, but another such
# host copied eight times more slowly than a plan says (cost/network.py).
UNMEASURED_LINK_LOW = 0.3


class InferenceNumbers(Value):
    """The numbers of a plan. None is unknown, never zero."""

    ttft_ms: float = Field(description="time to first token; of a whole batch to encode")
    tpot_ms: float | None = Field(None, description="time per output token after the first, mean")
    tokens_per_second: float = Field(description="generated tokens of all replicas; those of the sequences, to encode")
    tokens_per_second_per_device: float
    requests_per_second: float
    memory: dict[str, float] = Field(description="GiB of the fullest device, by part")
    peak_gib: float
    limit_gib: float | None = Field(None, description="what a process may use of the device")
    largest_concurrency: int | None = Field(None, description="sequences that fit at once in all replicas")
    step_ms: dict[str, float] = Field(description="of the step that takes most of the time, by term")
    binding_term: str = Field(description="what a faster device would have to be faster at")
    tier: Tier = "formula"
    interval: tuple[float, float] | None = Field(None, description="factor range of tokens/s that should hold the truth")


def numbers_of(candidate: Candidate, host: Host, workload: InferenceWorkload) -> InferenceNumbers:
    """Return the predicted numbers of a plan."""
    plan = candidate.plan
    memory = candidate.memory
    service = candidate.service
    largest = memory.largest_concurrency
    return InferenceNumbers(
        ttft_ms=MILLISECONDS * service.ttft,
        tpot_ms=None if service.tpot is None else MILLISECONDS * service.tpot,
        tokens_per_second=candidate.tokens_per_second,
        tokens_per_second_per_device=candidate.tokens_per_second / plan.num_devices,
        requests_per_second=candidate.requests_per_second,
        memory={part: gib(size) for part, size in memory.parts(plan.max_concurrency).items()},
        peak_gib=gib(candidate.resident),
        limit_gib=None if memory.limit is None else gib(memory.limit),
        largest_concurrency=None if largest is None else largest * plan.replicas,
        step_ms=dict(zip(TERM_NAMES, (MILLISECONDS * seconds for seconds in service.step), strict=True)),
        binding_term=service.step.binding_term,
        interval=_formula_interval(host, plan.tensor_parallel, workload.runs_in.interval),
    )


def _formula_interval(host: Host, tensor_parallel: int, interval: tuple[float, float]) -> tuple[float, float] | None:
    key = host.gpu.table_key if host.gpu is not None else None
    if key is None or key not in GEMM_EFFICIENCY:
        return None
    low, high = interval
    return interval if tensor_parallel == 1 or collective(key, "all_reduce") else (min(low, UNMEASURED_LINK_LOW), high)


REASON_BY_CHOICE = {
    "weights": "bytes read for every step, and the rate of matrix products",
    "kv_cache": "sequences that fit, and bytes read for each of them",
    "tensor_parallel": "weights and cache shared in a step, against exchanges in every layer",
    "pipeline_parallel": "memory of several devices with few exchanges, against latency",
    "max_concurrency": "weights are read once for all sequences, each of which waits longer",
    "prefill_chunk_tokens": "efficient products for prompts, against longer steps for those that decode",
    "execution": "kernels replayed without a gap, against none recorded",
}
GENERATION_CHOICES = ("kv_cache", "prefill_chunk_tokens")


def reasons(ranking: Ranking) -> tuple[Reason, ...]:
    """Return one row for each choice: the best plan that differs in it, and how much slower or bigger that plan is."""
    best = ranking.candidates[0]
    encodes = best.service.tpot is None
    because = {name: why for name, why in REASON_BY_CHOICE.items() if not (encodes and name in GENERATION_CHOICES)}
    cost = partial(_describe_cost, best)
    return reasons_among(ranking.candidates, ranking.rejected, because, cost=cost, blocked_cost="does not fit, or is too slow")


def _describe_cost(best: Candidate, other: Candidate) -> str:
    return describe_difference(other.tokens_per_second / best.tokens_per_second, other.resident - best.resident)


def sample_rejections(rejected: list[Rejected]) -> list[Rejected]:
    """Return at most MAX_REJECTED rejections, evenly drawn in the order of the space."""
    stride = -(-len(rejected) // MAX_REJECTED) if rejected else 1
    return rejected[::stride]


PROFILE_LENGTH = 128  # tokens; no number that inference plans use depends on it
MAX_SHOWN_PLANS = 50
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class InferencePlanning:
    """The result of a request for inference plans."""

    host: Host
    profile: ModelProfile
    workload: InferenceWorkload
    ranking: Ranking

    @property
    def best(self) -> Candidate:
        return self.ranking.candidates[0]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return reasons(self.ranking)

    @property
    def preference(self) -> str | None:
        """Return why the best plan is not the one that is predicted to be the fastest; None where it is."""
        fastest = max(self.ranking.candidates, key=lambda candidate: candidate.tokens_per_second)
        if fastest is self.best or not only_requests_differ(fastest, self.best):
            return why_simplest(self.ranking.candidates)
        gain = fastest.tokens_per_second / self.best.tokens_per_second - 1
        shorter = 1 - self.best.service.ttft / fastest.service.ttft
        return (
            f"Plan 1 answers sooner: its first token comes in {shorter:.0%} less time than with {fastest.plan.max_concurrency:,} "
            f"at once, which is the fastest, predicted {gain:+.1%}"
        )

    @property
    def lessons(self) -> list[Lesson]:
        """Return the rejected plans that teach something, one for each reason, the fastest first."""
        missing = (*self.ranking.too_big, *self.ranking.too_slow)
        speeds = {id(entry.plan): entry.tokens_per_second / self.best.tokens_per_second for entry in missing}
        return lessons_of(self.ranking.rejected, self.best.plan, lambda entry: speeds.get(id(entry.plan)))

    def numbers(self, candidate: Candidate) -> InferenceNumbers:
        return numbers_of(candidate, self.host, self.workload)

    def document(self, *, num_plans: int = MAX_SHOWN_PLANS) -> dict[str, Any]:
        """Return the JSON document of ``upshift plan --generate --json``, with at most ``num_plans`` plans."""
        plans: list[dict[str, Any]] = [
            {
                "plan": candidate.plan.model_dump(mode="json"),
                "predicted": self.numbers(candidate).model_dump(mode="json"),
                "reasons": [],
            }
            for candidate in self.ranking.candidates[:num_plans]
        ]
        plans[0]["reasons"] = [reason.model_dump(mode="json") for reason in self.reasons]
        return {
            "host": self.host.model_dump(mode="json"),
            "model": self.profile.model_dump(mode="json", exclude={"steps"}),
            "workload": self.workload.model_dump(mode="json"),
            "plans": plans,
            "rejected": [
                {"plan": rejection.plan.model_dump(mode="json"), "reason": rejection.reason}
                for rejection in sample_rejections(self.ranking.rejected)
            ],
            "preference": self.preference,
            "num_candidates": len(self.ranking.candidates),
            "num_rejected": len(self.ranking.rejected),
        }


def plan_inference(
    source: ModelSource,
    host: Host,
    workload: InferenceWorkload,
    *,
    fixed: tuple[str, ...] = (),
    progress: Progress = lambda done, total: None,
    profiler: Profiler = profile_model,
) -> InferencePlanning:
    """Rank the plan space. ``profiler``: makes the model's profile.

    Raises RequestError for a wrong request, NothingFits with the nearest plan if nothing fits or answers fast enough.
    """
    if source.adapter is not None:
        raise RequestError(
            f"{source.reference!r} is an adapter; write one model of both: upshift merge {source.reference} --output DIR, "
            "then plan for DIR"
        )
    read_fixed(fixed, host, workload)  # before the seconds that tracing takes
    profile = profiler(source, sequence_length=PROFILE_LENGTH, variants=(), progress=progress)
    return plan_profile(profile, host, workload, fixed)


def plan_profile(
    profile: ModelProfile, host: Host, workload: InferenceWorkload, fixed: tuple[str, ...] = ()
) -> InferencePlanning:
    """Rank the plan space of a model that has a profile already. Raises the same errors as ``plan_inference``."""
    _check_request(profile, host, workload, fixed)
    ranking = rank_plans(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    if not ranking.candidates:
        _raise_no_plan(ranking, profile, host, workload, fixed)
    return InferencePlanning(host, profile, workload, ranking)


def _check_request(profile: ModelProfile, host: Host, workload: InferenceWorkload, fixed: tuple[str, ...]) -> None:
    if host.mixed_gpus:
        names = ", ".join(sorted({gpu.name for gpu in host.mixed_gpus}))
        raise RequestError(f"{host.name} has different devices ({names}); plan for one kind of them")
    if workload.task == "generate" and profile.objective == "seq2seq-lm":
        reason = "encodes prompts with one stack and generates with another"
        raise RequestError(f"{profile.architecture} {reason}, which is not planned yet; plan its encoder with --encode")
    if profile.max_positions is not None and workload.longest > profile.max_positions:
        options = "--prompt-length + --output-length" if workload.task == "generate" else "--sequence-length"
        raise RequestError(
            f"{options} {workload.longest} is longer than the model's {profile.max_positions} positions; "
            f"use at most {profile.max_positions}"
        )
    if sample_unit(profile) == "images":
        option = f"--{workload.task}"
        raise RequestError(f"{profile.architecture} takes images, and {option} plans for tokens; leave {option} out")
    if workload.task == "encode":
        return
    if workload.output_length < 1:
        raise RequestError("--output-length 0 generates nothing; use 1 or more, or --encode")
    if not profile.declares.can_generate or not profile.cache:
        raise RequestError(f"{profile.architecture} does not generate with a cache of keys and values; plan it with --encode")
    if workload.concurrency is not None and any(entry.startswith("max_concurrency=") for entry in fixed):
        raise RequestError("--concurrency and --set max_concurrency both say how many sequences there are; give one of them")


def _raise_no_plan(
    ranking: Ranking, profile: ModelProfile, host: Host, workload: InferenceWorkload, fixed: tuple[str, ...]
) -> None:
    if not ranking.too_slow and not ranking.too_big:
        reason = ranking.rejected[0].reason if ranking.rejected else "no combination of choices is legal"
        raise RequestError(f"no plan for {host.name}: {reason}")
    if ranking.too_slow:
        nearest = ranking.too_slow[0]
        problem = f"no plan for {host.name} answers fast enough; the nearest has {describe_latency(nearest, workload)}"
        otherwise = "looser limits, a smaller model, or faster devices"
    else:
        nearest = ranking.too_big[0]
        problem = f"nothing fits on {host.name}; the nearest plan {describe_excess(nearest)}"
        otherwise = "a smaller model, or a larger device"

    def numbers_of(change: Change) -> str | None:
        changed_host = host if change.host is None else describe(change.host)
        changed = workload.changed(**change.fields)
        best = rank_plans(changed_host, profile, changed, fixed=parse_fixed(fixed, changed_host, profile, changed)).candidates
        if not best:
            return None
        return f"{change.words} ({format_bytes(best[0].resident)}, {best[0].tokens_per_second:,.0f} tokens/s)"

    found = [text for kind in _changes(host, workload) if (text := _first(kind, numbers_of)) is not None]
    advice = f"what is predicted to work: {', or '.join(found[:MAX_ADVICE])}" if found else f"use {otherwise}"
    raise NothingFits(f"{problem}: {nearest.plan.label()}; {advice}")


class Change(NamedTuple):
    """Hold options with which a plan may fit, and the fields of the workload that they change. ``host``: a described one."""

    words: str
    fields: Mapping[str, Any] = {}
    host: str | None = None


def _first(kind: Iterable[Change], numbers_of: Callable[[Change], str | None]) -> str | None:
    """Return the words and numbers of the first change with which a plan fits, or None."""
    for change in kind:
        with suppress(RequestError):
            if (text := numbers_of(change)) is not None:
                return text
    return None


def _changes(host: Host, workload: InferenceWorkload) -> list[list[Change]]:
    """Return the changes of each kind that may make a plan fit, the mildest first."""
    allowed = [tuple(dict.fromkeys((*workload.allow, *names))) for names in (LEANER_WEIGHTS, LEANER_WEIGHTS + LEANER_CACHE)]
    requests = [(workload.concurrency or 1) >> power for power in range(1, HALVINGS)]
    halves = [(workload.prompt_length >> power, workload.output_length >> power) for power in range(1, HALVINGS)]
    lengths = [pair for pair in halves if pair[0] and (pair[1] or workload.task == "encode")]
    words = "--prompt-length {} --output-length {}" if workload.task == "generate" else "--sequence-length {}"
    return [
        [Change(f"--allow {','.join(names)}", {"allow": names}) for names in allowed],
        [Change(f"--concurrency {count}", {"concurrency": count}) for count in requests if count],
        [Change(words.format(*pair), {"prompt_length": pair[0], "output_length": pair[1]}) for pair in lengths],
        [Change(f"--on {shlex.quote(name)}", host=name) for name in names_with_more(host)],
    ]
