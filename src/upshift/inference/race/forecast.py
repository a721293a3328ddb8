"""Predict a setup's speed by the planner's formulas before it is measured: a roofline of the model's products on this
CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.encoding.engines.base import by_length
from upshift.inference.registry import ENGINES, ROUNDED, EngineSetup, Precision
from upshift.models.profile import ModelProfile
from upshift.models.profile_model import profile_model
from upshift.models.source import ModelSource
from upshift.planning.inference.plan import CachePrecision, Execution, InferenceWorkload, ReplicaShape, WeightPrecision
from upshift.planning.inference.planner import PROFILE_LENGTH
from upshift.planning.inference.time import Engine, build_engine

Forecast = Callable[[EngineSetup], float | None]  # texts, or generated tokens, a second; None: no formula for it
FORMATS: dict[Precision, tuple[WeightPrecision, CachePrecision]] = {
    "fp32": ("fp32", "fp32"),
    "tf32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "fp16": ("bf16", "bf16"),
    "fp16-weights": ("bf16", "fp32"),  # as many bytes
    "fp8": ("fp8", "bf16"),
    "int8-weights": ("int8", "fp32"),
    "int8": ("int8", "int8"),
    "int4-weights": ("int4", "fp32"),
    "int4": ("int4", "int8"),
}


def forecast_encoding(source: ModelSource, host: Host, lengths: Sequence[int]) -> Forecast:
    """Return the forecast of encoding. ``lengths`` are the tokens of each text."""
    workload = InferenceWorkload(task="encode", prompt_length=_mean(lengths))
    engine_of = _engines(source, host, workload)

    def found(setup: EngineSetup) -> float | None:
        engine = engine_of(setup)
        batches = [len(places) * lengths[places[0]] for places in by_length(lengths, setup.batch)]
        steps = [engine.step(float(tokens), 0.0, logits=0.0) for tokens in batches] if engine else []
        seconds = sum(step.total for step in steps if step is not None)
        return len(lengths) / seconds if seconds else None

    return found


def forecast_generation(source: ModelSource, host: Host, lengths: Sequence[int], new_tokens: int) -> Forecast:
    """Return the forecast of generation. ``lengths`` are the tokens of each prompt."""
    workload = InferenceWorkload(task="generate", prompt_length=_mean(lengths), output_length=new_tokens)
    engine_of = _engines(source, host, workload)

    def found(setup: EngineSetup) -> float | None:
        engine, rows = engine_of(setup), float(setup.batch)
        first = engine.step(rows * workload.prompt_length, 0.0, logits=rows) if engine else None
        step = engine.step(0.0, rows) if engine else None
        if first is None or step is None:
            return None
        return rows * new_tokens / (first.total + step.total * workload.decode_steps)

    return found


def _mean(lengths: Sequence[int]) -> int:
    return max(round(sum(lengths) / max(len(lengths), 1)), 1)


def _engines(source: ModelSource, host: Host, workload: InferenceWorkload) -> Callable[[EngineSetup], Engine | None]:
    """Return the function that predicts a setup's engine.

    A host that is not measured is measured now, so call this while nothing else runs. The model is traced for the
    first setup. A model that cannot be traced has no forecast."""
    from upshift.hardware.probe_cache import measure

    measured = host if host.measured is not None else measure(host)
    traced = cache(partial(_profile, source))

    def found(setup: EngineSetup) -> Engine | None:
        if setup.precision not in FORMATS:  # quantized by others: in a form that is not known
            return None
        if ENGINES[setup.engine].uncompiled and not (measured.measured and measured.measured.compiler):
            return None
        weights, cached = FORMATS[setup.precision]
        if setup.precision in ROUNDED and (setup.device == "cuda" or (cached == "fp32" and host.supports("bf16"))):
            cached = "bf16"  # beside any rounded weights
        execution: Execution = "eager" if setup.engine == "torch" else "graphs"
        profile = traced()
        if profile is None:
            return None
        return build_engine(measured, profile, workload, ReplicaShape(weights, cached, 1, 1, execution))

    return found


def _profile(source: ModelSource) -> ModelProfile | None:
    try:
        profile = profile_model(source, sequence_length=PROFILE_LENGTH, variants=())
    except RequestError:
        return None
    return None if profile.objective == "seq2seq-lm" else profile  # two stacks: not planned yet
