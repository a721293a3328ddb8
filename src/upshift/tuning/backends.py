"""Translate a space of ours into the callable that transformers takes for each backend.

Translate a space into Optuna's distributions.

Translate a space into Ray Tune's domains.

If Ray's own distribution of that name differs from Optuna's, one that does not is used.

Translate a space into the parameters of Weights & Biases' sweeps, and back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from upshift.errors import RequestError
from upshift.tuning.space import Choices, Range, Space

SpaceOf = Callable[[Any], dict[str, Any]]


def native_space(backend: str, space: Space | SpaceOf | None) -> SpaceOf | None:
    """Return the callable for a space.

    Callables, which are the backend's own already, and None, its default, are returned unchanged."""
    if not isinstance(space, Space):
        return space
    known = space
    if backend == "ray":
        return lambda trial: domains(known)
    if backend == "wandb":
        return lambda trial: {"method": "random", "parameters": parameters(known)}

    return lambda trial: draw(trial, known)


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


def domains(space: Space) -> dict[str, Any]:
    return {name: _domain(one) for name, one in space.searched.items()} | space.fixed


def _domain(one: Range | Choices) -> Any:
    from ray import tune

    if isinstance(one, Choices):
        return tune.choice(list(one.choices))
    if one.grid is not None:  # tune.qrandint counts from 0, not from low
        return tune.choice(list(one.grid))
    if one.whole and one.log:  # tune.lograndint rounds down: high would be almost never drawn
        return tune.sample_from(partial(_whole_log, int(one.low), int(one.high)))
    if one.whole:
        return tune.randint(int(one.low), int(one.high) + 1)
    return (tune.loguniform if one.log else tune.uniform)(one.low, one.high)


def _whole_log(low: int, high: int, spec: Any = None) -> int:
    """Draw as Optuna does: the nearest whole number of a logarithmic draw between low - 1/2 and high + 1/2."""
    drawn = round(math.exp(random.uniform(math.log(low - 0.5), math.log(high + 0.5))))
    return min(max(drawn, low), high)


KINDS = ("uniform", "log_uniform_values", "int_uniform", "q_log_uniform_values", "constant", "categorical")


def parameters(space: Space) -> dict[str, Any]:
    return {name: _parameter(one) for name, one in space.parameters.items()}


def _parameter(one: Range | Choices) -> dict[str, Any]:
    if isinstance(one, Choices):
        return {"values": list(one.choices)} if len(one.choices) > 1 else {"value": one.choices[0]}
    if one.grid is not None:
        return {"values": list(one.grid)}
    if one.whole and one.log:  # rounds to q: half a step beyond both ends makes them as likely as others
        return {"distribution": "q_log_uniform_values", "min": one.low - 0.5, "max": one.high + 0.5, "q": 1}
    kind = "int_uniform" if one.whole else "log_uniform_values" if one.log else "uniform"
    return {"distribution": kind, "min": one.low, "max": one.high}


def space_of(sweep: dict[str, Any]) -> Space:
    """Return the space of a sweep's configuration. Raise RequestError for a distribution that no other backend has."""
    return Space(parameters={name: _read(name, said) for name, said in sweep.get("parameters", {}).items()})


def _read(name: str, said: dict[str, Any]) -> Range | Choices:
    if "values" in said or "value" in said:
        return Choices(choices=tuple(said.get("values", [said.get("value")])))
    kind = said.get("distribution")
    if kind is None and {"min", "max"} <= said.keys():  # wandb's own default
        kind = "int_uniform" if all(isinstance(said[end], int) for end in ("min", "max")) else "uniform"
    if kind == "q_log_uniform_values" and said.get("q", 1) == 1:
        return Range(low=int(said["min"] + 0.5), high=int(said["max"] - 0.5), log=True)
    if kind in ("uniform", "log_uniform_values"):
        return Range(low=float(said["min"]), high=float(said["max"]), log=kind != "uniform")
    if kind == "int_uniform":
        return Range(low=int(said["min"]), high=int(said["max"]))
    raise RequestError(f"the sweep's {name} has distribution {kind!r}; use one of {', '.join(KINDS)}")
