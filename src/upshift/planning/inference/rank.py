"""Cost every plan of the space: memory first, then time. Drop what does not fit or is too slow to answer, and keep the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.inference.engine import Engine, build_engine
from upshift.planning.inference.memory import ReplicaMemory, replica_memory
from upshift.planning.inference.plan import DEFAULT_GROUP, InferencePlan, ReplicaShape
from upshift.planning.inference.serving import Service, serve
from upshift.planning.inference.space import choices, chunks, concurrencies, layouts, occupied, plain_cache
from upshift.planning.inference.workload import InferenceWorkload
from upshift.units import format_bytes

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted costs. ``tokens_per_second`` and ``requests_per_second`` are of all replicas.

    ``occupied``: the share of the replicas' room that the workload's requests fill.
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
    plan: InferencePlan
    reason: str


@dataclass
class Ranking:
    """The plans of a space, best first. ``too_big`` and ``too_slow`` are kept, the nearest first, for the plan that would nearly
    do."""

    candidates: list[Candidate] = field(default_factory=list)
    too_big: list[Candidate] = field(default_factory=list)
    too_slow: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def num_plans(self) -> int:
        return len(self.candidates) + len(self.rejected)


def rank(host: Host, profile: ModelProfile, workload: InferenceWorkload, *, fixed: dict[str, Any]) -> Ranking:
    ranking = Ranking()
    base: dict[str, Any] = {"device": host.device, "host": host.fingerprint, "model": profile.model_hash}
    for shape, replicas in _shapes(host, profile, workload, fixed):
        engine = build_engine(host, profile, workload, shape)
        for chunk in chunks(workload, fixed):
            memory = replica_memory(host, profile, workload, shape, chunk_tokens=chunk)
            for concurrency in concurrencies(workload, replicas, memory.largest_concurrency, fixed):
                tokens = chunk if workload.task == "generate" else concurrency * workload.prompt_length
                plan = InferencePlan.model_construct(
                    **base, **shape._asdict(), replicas=replicas, max_concurrency=concurrency, prefill_chunk_tokens=tokens
                )
                _add(ranking, plan, engine, memory, workload)
            if workload.task == "encode":
                break  # a batch is one step, whatever the chunks
    ranking.candidates.sort(key=_best_first)
    ranking.too_big.sort(key=lambda c: (c.resident, *_best_first(c)))
    ranking.too_slow.sort(key=lambda c: (_excess(c, workload), *_best_first(c)))
    return ranking


def _shapes(
    host: Host, profile: ModelProfile, workload: InferenceWorkload, fixed: dict[str, Any]
) -> Iterator[tuple[ReplicaShape, int]]:
    """Yield (shape of a replica, number of replicas), in a fixed order."""
    values = choices(host, profile, workload)
    values |= {name: [fixed[name]] for name in values if name in fixed}
    quantized = [name for name in values["kv_cache"] if name in ("fp8", "int8")]
    ways, group_size = layouts(host, values), fixed.get("group_size", DEFAULT_GROUP)
    for weights in values["weights"]:
        plain = plain_cache(weights, host)
        for cache in [fixed["kv_cache"]] if "kv_cache" in fixed else [plain, *quantized]:
            for tensor, pipeline, replicas in ways:
                for execution in values["execution"]:
                    yield ReplicaShape(weights, cache, tensor, pipeline, execution, group_size), replicas


def _add(
    ranking: Ranking, plan: InferencePlan, engine: Engine | None, memory: ReplicaMemory, workload: InferenceWorkload
) -> None:
    if engine is None:
        ranking.rejected.append(Rejected(plan, f"this host's rate with {plan.weights} weights is unknown"))
        return
    service = serve(engine, workload, plan.max_concurrency, plan.prefill_chunk_tokens)
    if service is None:
        unknown = "the link between its devices is unknown; name the host with its link, as HOST@LINK"
        ranking.rejected.append(Rejected(plan, unknown))
        return
    candidate = Candidate(plan, memory, service, occupied(workload, plan.replicas, plan.max_concurrency))
    slow = too_slow(candidate, workload)
    if not candidate.fits:
        ranking.too_big.append(candidate)
        ranking.rejected.append(Rejected(plan, too_big(candidate)))
    elif slow is not None:
        ranking.too_slow.append(candidate)
        ranking.rejected.append(Rejected(plan, slow))
    else:
        ranking.candidates.append(candidate)


def too_big(candidate: Candidate) -> str:
    memory = candidate.memory
    needs = f"needs {format_bytes(candidate.resident)} of the {format_bytes(memory.limit or 0.0)} that a process may use"
    largest = memory.largest_concurrency or 0
    return f"{needs}; at most {largest:,} fit at once" if largest else f"{needs}; not one sequence fits beside the weights"


def too_slow(candidate: Candidate, workload: InferenceWorkload) -> str | None:
    """Return in words which limit of the request the plan exceeds; None: none."""
    for name, milliseconds, limit in _latencies(candidate, workload):
        if limit is not None and milliseconds > limit:
            return f"{name} {milliseconds:,.1f} ms, over --max-{name.lower()}-ms {limit:g}"
    return None


def _latencies(candidate: Candidate, workload: InferenceWorkload) -> list[tuple[str, float, float | None]]:
    service = candidate.service
    return [
        ("TTFT", MILLISECONDS * service.ttft, workload.max_ttft_ms),
        ("TPOT", MILLISECONDS * (service.tpot or 0.0), workload.max_tpot_ms),
    ]


def _excess(candidate: Candidate, workload: InferenceWorkload) -> float:
    """Return how many times over its limits the plan is, at the worst of them."""
    return max(milliseconds / limit for _, milliseconds, limit in _latencies(candidate, workload) if limit is not None)


def _best_first(candidate: Candidate) -> tuple[Any, ...]:
    """Return the sort key: throughput, then latency, memory and name, so that the order never depends on the order of the space.
    """
    service = candidate.service
    return -candidate.tokens_per_second, service.tpot or service.ttft, service.ttft, candidate.resident, candidate.plan.label()
