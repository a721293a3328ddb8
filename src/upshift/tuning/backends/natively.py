"""A space of ours as the callable that transformers asks each backend's users for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upshift.tuning.space import Space

SpaceOf = Callable[[Any], dict[str, Any]]


def native_space(backend: str, space: Space | SpaceOf | None) -> SpaceOf | None:
    """Callables, which are the backend's own already, and None, its default, stay as they are."""
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
