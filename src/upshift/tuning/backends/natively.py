"""Translate a space of ours into the callable that transformers takes for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upshift.tuning.space import Space

SpaceOf = Callable[[Any], dict[str, Any]]


def native_space(backend: str, space: Space | SpaceOf | None) -> SpaceOf | None:
    """Return the callable for a space.

    Callables, which are the backend's own already, and None, its default, are returned unchanged."""
    if not isinstance(space, Space):
        return space
    known = space
    if backend == "ray":
        from upshift.tuning.backends.ray_space import domains

        return lambda trial: domains(known)
    if backend == "wandb":
        from upshift.tuning.backends.wandb_space import parameters

        return lambda trial: {"method": "random", "parameters": parameters(known)}
    from upshift.tuning.backends.optuna_space import draw

    return lambda trial: draw(trial, known)
