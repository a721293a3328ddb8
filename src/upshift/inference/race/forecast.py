"""Predict the speed of setups by the planner's formulas before they are measured: a roofline of the model's matrix
products on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.encoding.engines.base import batch_by_length
from upshift.inference.registry import ENGINES, ROUNDED, EngineSetup, Precision
from upshift.models.profile import ModelProfile
from upshift.models.source import ModelSource
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.inference.plan import CachePrecision, Execution, InferenceWorkload, ReplicaShape, WeightPrecision
from upshift.planning.inference.planner import PROFILE_LENGTH
from upshift.planning.inference.time import Engine, build_engine

Forecast = Callable[[EngineSetup], float | None]  # texts or generated tokens per second; None: no formula
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
    """Return the forecast of encoding. ``lengths`` holds the number of tokens of each text."""
    workload = InferenceWorkload(task="encode", prompt_length=_mean_length(lengths))
    model_engine = _engine_models(source, host, workload)

    def texts_per_second(setup: EngineSetup) -> float | None:
        engine = model_engine(setup)
        if engine is None:
            return None
        batch_tokens = [len(indices) * lengths[indices[0]] for indices in batch_by_length(lengths, setup.batch)]
        steps = [engine.step(float(tokens), 0.0, logits=0.0) for tokens in batch_tokens]
        seconds = sum(step.total for step in steps if step is not None)
        return len(lengths) / seconds if seconds else None

    return texts_per_second


def forecast_generation(source: ModelSource, host: Host, lengths: Sequence[int], new_tokens: int) -> Forecast:
    """Return the forecast of generation. ``lengths`` holds the number of tokens of each prompt."""
    workload = InferenceWorkload(task="generate", prompt_length=_mean_length(lengths), output_length=new_tokens)
    model_engine = _engine_models(source, host, workload)

    def tokens_per_second(setup: EngineSetup) -> float | None:
        engine = model_engine(setup)
        if engine is None:
            return None
        rows = float(setup.batch)
        prompt_step = engine.step(rows * workload.prompt_length, 0.0, logits=rows)
        decode_step = engine.step(0.0, rows)
        if prompt_step is None or decode_step is None:
            return None
        return rows * new_tokens / (prompt_step.total + decode_step.total * workload.decode_steps)

    return tokens_per_second


def _mean_length(lengths: Sequence[int]) -> int:
    return max(round(sum(lengths) / max(len(lengths), 1)), 1)


def _engine_models(source: ModelSource, host: Host, workload: InferenceWorkload) -> Callable[[EngineSetup], Engine | None]:
    """Return a function that returns the planner's model of a setup's engine, or None without one.

    If the host is not measured yet, it is measured now, so call this while nothing else runs. The model is traced for
    the first setup. A model that cannot be traced has no forecast."""
    from upshift.hardware.probe_cache import measure

    measured_host = host if host.measured is not None else measure(host)
    traced_profile = cache(partial(_trace, source))

    def model_engine(setup: EngineSetup) -> Engine | None:
        if setup.precision not in FORMATS:  # weights that were quantized before, in an unknown format
            return None
        if ENGINES[setup.engine].uncompiled and not (measured_host.measured and measured_host.measured.compiler):
            return None
        weight_precision, cache_precision = FORMATS[setup.precision]
        caches_bf16 = setup.device == "cuda" or (cache_precision == "fp32" and host.supports("bf16"))
        if setup.precision in ROUNDED and caches_bf16:
            cache_precision = "bf16"
        execution: Execution = "eager" if setup.engine == "torch" else "graphs"
        profile = traced_profile()
        if profile is None:
            return None
        return build_engine(measured_host, profile, workload, ReplicaShape(weight_precision, cache_precision, 1, 1, execution))

    return model_engine


def _trace(source: ModelSource) -> ModelProfile | None:
    """Return the traced profile of a model, or None if it cannot be traced or has no formulas."""
    try:
        profile = profile_model(source, sequence_length=PROFILE_LENGTH, variants=())
    except RequestError:
        return None
    return None if profile.objective == "seq2seq-lm" else profile  # the formulas do not cover two stacks
