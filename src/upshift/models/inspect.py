"""Describe a model in numbers: parameters, FLOPs, bytes of activations and of the cache."""

from __future__ import annotations

from typing import Any

from upshift.models.profile import Isolation, ModelProfile, Variant
from upshift.models.profile_model import profile_model
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import find_model
from upshift.value import Value

BF16_BYTES = 2


class ActivationBytes(Value):
    """Bytes that are saved for the backward pass of one sequence."""

    precision: str
    per_layer: int
    whole_model: int
    whole_model_recomputed: int | None


class Inspection(Value):
    architecture: str
    objective: str
    sequence_length: int
    parameters: dict[str, int]
    num_layers: int
    flops_forward: float
    flops_train: float
    flop_convention: str
    activations: tuple[ActivationBytes, ...]
    kv_bytes_per_token: float | None  # in bf16, whole model
    kv_bytes: float | None  # of one sequence of this length, in bf16
    declares: dict[str, Any]
    chunked_loss: str
    isolation: Isolation


def inspect(model: str, *, sequence_length: int | None = None) -> Inspection:
    """Return parameters by part, FLOPs, activation and cache bytes, and the plans that the model declares. Load no weights.

    ``sequence_length``: None takes 512, or the model's positions where they are fewer."""
    source = find_model(model)
    sequence_length = sequence_length_of(source, sequence_length)
    variants = (Variant("fp32", "sdpa", False), Variant("bf16", "sdpa", False), Variant("fp32", "eager", False))
    profile = profile_model(source, sequence_length=sequence_length, variants=variants)
    kv = profile.kv_elements.at(1, sequence_length) * BF16_BYTES if profile.kv_elements else None
    return Inspection(
        architecture=profile.architecture,
        objective=profile.objective,
        sequence_length=sequence_length,
        parameters={part: getattr(profile.parameters, part) for part in ("total", "embedding", "layers", "head", "other")},
        num_layers=profile.num_layers,
        flops_forward=profile.forward_flops.at(1, sequence_length),
        flops_train=profile.train_flops(1, sequence_length),
        flop_convention=profile.flop_convention,
        activations=_activations(profile, sequence_length),
        kv_bytes_per_token=kv / sequence_length if kv is not None else None,
        kv_bytes=kv,
        declares=profile.declares.model_dump(),
        chunked_loss=profile.chunked_loss_reason,
        isolation=profile.isolation,
    )


def _activations(profile: ModelProfile, sequence: int) -> tuple[ActivationBytes, ...]:
    rows = []
    for step in profile.steps:
        plain = recomputed = inner = 0.0
        for stack, traced in zip(profile.stacks, step.stacks, strict=True):
            for index in stack.assignment:
                plain += traced.plain[index].forward.left.at(1, sequence)
                if traced.recomputed:
                    recomputed += traced.recomputed["full"][index].forward.left.at(1, sequence)
            inner = max(inner, traced.plain[len(stack.traced_layers) // 2].forward.left.at(1, sequence))
        gaps = sum(gap.forward.left.at(1, sequence) for gap in step.gaps)
        rows.append(
            ActivationBytes(
                precision=f"{step.precision}, {step.attention} attention",
                per_layer=round(inner),
                whole_model=round(plain + gaps),
                whole_model_recomputed=round(recomputed + gaps) if recomputed else None,
            )
        )
    return tuple(rows)
