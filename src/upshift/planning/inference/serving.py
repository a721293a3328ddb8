"""Predict a replica under load: from the time of single steps to time to first token, time per token and throughput.

Batching is continuous: a request that ends makes room for the next, whose prompt is computed in chunks beside the decoding of
the others. In the steady state each decoding step is followed by P = D I / (O - 1) prompt tokens in the mean (D sequences
decode, prompts have I tokens, answers O). Little's law ties the requests that are inside to throughput and latency: concurrency
= requests/s x (time to first token + (O - 1) x time per token).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from upshift.planning.inference.engine import Engine, StepTime
from upshift.planning.inference.workload import InferenceWorkload

MOST_LOADED = 0.9  # share of steps with prompts up to which arrivals are taken as independent of each other
# From a request's arrival to its first step, and back: text to tokens, queues between processes. Fitted as STEP_SECONDS is.
REQUEST_SECONDS = 7e-3


@dataclass(frozen=True)
class Service:
    """The latency (in seconds) and throughput of one replica."""

    ttft: float
    tpot: float | None
    requests_per_second: float
    tokens_per_second: float  # generated tokens; when encoding, the tokens of the sequences
    step: StepTime  # the mean step's


def serve(engine: Engine, workload: InferenceWorkload, concurrency: int, chunk_tokens: int) -> Service | None:
    """Return the service with ``concurrency`` requests inside at any time; None where a link is unknown."""
    if workload.task == "encode":
        return _encode(engine, workload, concurrency)
    if workload.decode_steps == 0:
        return _prefill_only(engine, workload, concurrency, chunk_tokens)
    prompt, steps = workload.prompt_length, workload.decode_steps
    block = min(chunk_tokens, prompt)  # prompt tokens that one step takes, as long as there is no more to do
    chunks = ceil(prompt / chunk_tokens)
    decoding = concurrency * steps / (steps + chunks)
    needed = decoding * prompt / steps
    if needed > chunk_tokens:  # prompts are the bottleneck: fewer sequences decode, the others wait for their turn
        decoding, needed = chunk_tokens * steps / prompt, float(chunk_tokens)
    busy = engine.step(max(block, needed), decoding)
    idle = engine.step(0.0, decoding)
    if busy is None or idle is None:
        return None
    share = min(needed / block, 1.0)  # share of the steps that have prompt tokens
    mean = share * busy.total + (1.0 - share) * idle.total
    rate = decoding / steps / mean
    load = min(share, MOST_LOADED)
    waits = load / (2.0 * (1.0 - load)) * busy.total * chunks  # M/D/1
    alone = REQUEST_SECONDS + mean / 2.0 + chunks * busy.total
    ttft = max(min(alone + waits, alone * concurrency), concurrency / rate - steps * mean)
    step = busy if share * busy.total >= (1.0 - share) * idle.total else idle
    return Service(ttft, mean, rate, rate * workload.output_length, step)


def _prefill_only(engine: Engine, workload: InferenceWorkload, concurrency: int, chunk_tokens: int) -> Service | None:
    """Return the service of one token for each request: prompts fill steps, one behind the other."""
    tokens = concurrency * workload.prompt_length
    steps = ceil(tokens / chunk_tokens)
    step = engine.step(tokens / steps, 0.0, logits=concurrency / steps)
    if step is None:
        return None
    seconds = steps * step.total
    return Service(REQUEST_SECONDS + seconds, None, concurrency / seconds, concurrency / seconds, step)


def _encode(engine: Engine, workload: InferenceWorkload, concurrency: int) -> Service | None:
    """Return the service of encoding, one batch at a time."""
    step = engine.step(float(concurrency * workload.prompt_length), 0.0, logits=0.0)
    if step is None:
        return None
    rate = concurrency / step.total
    return Service(step.total, None, rate, rate * workload.prompt_length, step)
