"""Predict the numbers of an inference plan: speed, latency and memory."""

from __future__ import annotations

from pydantic import Field

from upshift.hardware import collective
from upshift.hardware.efficiency import GEMM_EFFICIENCY
from upshift.hardware.spec import Host
from upshift.planning.inference.engine import TERM_NAMES
from upshift.planning.inference.rank import MILLISECONDS, Candidate
from upshift.record import Tier
from upshift.units import gib
from upshift.value import Value

# Measured over predicted tokens/s, 95 of 100 published rows (docs/inference_planning.md), of products whose matrix products were
# measured; between those whose collectives were not, such as those on PCIe, predictions are far too low. None: no rows.
FORMULA_INTERVAL, UNMEASURED_LINK_INTERVAL = (0.7, 1.25), (0.7, 3.1)


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


def numbers_of(candidate: Candidate, host: Host) -> InferenceNumbers:
    plan, memory, service = candidate.plan, candidate.memory, candidate.service
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
        interval=_interval(host, plan.tensor_parallel),
    )


def _interval(host: Host, tensor_parallel: int) -> tuple[float, float] | None:
    key = host.gpu.table_key if host.gpu is not None else None
    if key is None or key not in GEMM_EFFICIENCY:
        return None
    return FORMULA_INTERVAL if tensor_parallel == 1 or collective(key, "all_reduce") else UNMEASURED_LINK_INTERVAL
