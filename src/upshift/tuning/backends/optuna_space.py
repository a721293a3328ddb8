"""Translate a space into Optuna's distributions."""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from upshift.tuning.space import Choices, Range, Space


def distributions(space: Space) -> dict[str, BaseDistribution]:
    return {name: _distribution(one) for name, one in space.searched.items()}


def draw(trial: Any, space: Space) -> dict[str, Any]:
    """Return the values of a trial, in the space's order, followed by the fixed values."""
    return {name: _suggest(trial, name, one) for name, one in space.searched.items()} | space.fixed


def _suggest(trial: Any, name: str, one: Range | Choices) -> Any:
    if isinstance(one, Choices):
        return trial.suggest_categorical(name, one.choices)
    if one.whole:
        return trial.suggest_int(name, one.low, _last(one), step=one.step or 1, log=one.log)
    return trial.suggest_float(name, one.low, _last(one), step=one.step, log=one.log)


def _last(one: Range) -> int | float:
    return one.grid[-1] if one.grid else one.high


def _distribution(one: Range | Choices) -> BaseDistribution:
    if isinstance(one, Choices):
        return CategoricalDistribution(one.choices)
    if one.whole:
        return IntDistribution(int(one.low), int(_last(one)), log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low, _last(one), log=one.log, step=one.step)
