"""Describe a model in numbers: parameters, FLOPs, bytes of activations and of the cache."""

from __future__ import annotations

from typing import Any

from upshift.models.profile import Isolation, ModelProfile, PassCost, Variant
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.value import Value

BF16_BYTES = 2


class ActivationBytes(Value):
    """The bytes that one sequence saves for the backward pass."""

    precision: str
    per_layer: int
    whole_model: int
    whole_model_recomputed: int | None


class Inspection(Value):
    """A model in numbers."""

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
    kv_bytes: float | None  # keys and values of one sequence of this length, in bf16
    declares: dict[str, Any]
    chunked_loss: str
    isolation: Isolation


def inspect(model: str, *, sequence_length: int | None = None) -> Inspection:
    """Return a model's parameters by part, FLOPs, activation and cache bytes, and declared plans. Load no weights.

    ``sequence_length``: None means 512 tokens, or the model's positions if they are fewer."""
    source = find_model(model)
    sequence_length = sequence_length_of(source, sequence_length)
    variants = (Variant("fp32", "sdpa", False), Variant("bf16", "sdpa", False), Variant("fp32", "eager", False))
    profile = profile_model(source, sequence_length=sequence_length, variants=variants, chunked=False)
    kv_bytes = profile.kv_elements.at(1, sequence_length) * BF16_BYTES if profile.kv_elements else None
    return Inspection(
        architecture=profile.architecture,
        objective=profile.objective,
        sequence_length=sequence_length,
        parameters={name: getattr(profile.parameters, name) for name in ("total", "embedding", "layers", "head", "other")},
        num_layers=profile.num_layers,
        flops_forward=profile.forward_flops.at(1, sequence_length),
        flops_train=profile.train_flops(1, sequence_length),
        flop_convention=profile.flop_convention,
        activations=_activations(profile, sequence_length),
        kv_bytes_per_token=kv_bytes / sequence_length if kv_bytes is not None else None,
        kv_bytes=kv_bytes,
        declares=profile.declares.model_dump(),
        chunked_loss=profile.chunked_loss_reason,
        isolation=profile.isolation,
    )


def _activations(profile: ModelProfile, sequence: int) -> tuple[ActivationBytes, ...]:
    rows = []
    for step in profile.steps:
        saved = 0.0
        recomputed = 0.0
        largest_layer = 0.0
        for stack, traced in zip(profile.stacks, step.stacks, strict=True):
            for index in stack.assignment:
                saved += _saved_bytes(traced.plain[index].forward, sequence)
                if traced.recomputed:
                    recomputed += _saved_bytes(traced.recomputed["full"][index].forward, sequence)
            middle_layer = traced.plain[len(stack.traced_layers) // 2]
            largest_layer = max(largest_layer, _saved_bytes(middle_layer.forward, sequence))
        gaps = sum(_saved_bytes(gap.forward, sequence) for gap in step.gaps)
        rows.append(
            ActivationBytes(
                precision=f"{step.precision}, {step.attention} attention",
                per_layer=round(largest_layer),
                whole_model=round(saved + gaps),
                whole_model_recomputed=round(recomputed + gaps) if recomputed else None,
            )
        )
    return tuple(rows)


def _saved_bytes(forward: PassCost, sequence: int) -> float:
    """Return the bytes of one sequence's activations that a forward pass leaves for the backward pass.

    Layers that are computed again do not keep autocast's copies of weights, which are freed at the end of the forward pass."""
    return forward.left.at(1, sequence) - forward.released.at(1, sequence)
