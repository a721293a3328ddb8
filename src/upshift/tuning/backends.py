"""Translate a search space for each backend: Optuna's distributions, Ray Tune's domains, and sweeps of Weights & Biases.

All backends draw the same values with the same probabilities. Where a distribution of Ray or wandb differs from Optuna's, this
module uses another one. Sweeps are also translated back.
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
    """Return the callable that transformers takes for the backend.

    A callable, which is the backend's form already, and None, its default, are returned unchanged."""
    if not isinstance(space, Space):
        return space
    our_space = space
    if backend == "ray":
        return lambda trial: ray_domains(our_space)
    if backend == "wandb":
        return lambda trial: {"method": "random", "parameters": wandb_parameters(our_space)}

    return lambda trial: draw_values(trial, our_space)


def optuna_distributions(space: Space) -> dict[str, BaseDistribution]:
    return {name: _distribution(parameter) for name, parameter in space.searched.items()}


def draw_values(trial: Any, space: Space) -> dict[str, Any]:
    """Return the values of a trial by name: those that Optuna suggests, then the fixed ones."""
    return {name: _suggest(trial, name, parameter) for name, parameter in space.searched.items()} | space.fixed


def _suggest(trial: Any, name: str, parameter: Range | Choices) -> Any:
    if isinstance(parameter, Choices):
        return trial.suggest_categorical(name, parameter.choices)
    if parameter.is_whole:
        return trial.suggest_int(name, parameter.low, _last(parameter), step=parameter.step or 1, log=parameter.log)
    return trial.suggest_float(name, parameter.low, _last(parameter), step=parameter.step, log=parameter.log)


def _last(parameter: Range) -> int | float:
    return parameter.grid[-1] if parameter.grid else parameter.high


def _distribution(parameter: Range | Choices) -> BaseDistribution:
    if isinstance(parameter, Choices):
        return CategoricalDistribution(parameter.choices)
    if parameter.is_whole:
        return IntDistribution(int(parameter.low), int(_last(parameter)), log=parameter.log, step=int(parameter.step or 1))
    return FloatDistribution(parameter.low, _last(parameter), log=parameter.log, step=parameter.step)


def ray_domains(space: Space) -> dict[str, Any]:
    return {name: _domain(parameter) for name, parameter in space.searched.items()} | space.fixed


def _domain(parameter: Range | Choices) -> Any:
    from ray import tune

    if isinstance(parameter, Choices):
        return tune.choice(list(parameter.choices))
    if parameter.grid is not None:  # tune.qrandint counts from 0, not from low
        return tune.choice(list(parameter.grid))
    if parameter.is_whole and parameter.log:  # tune.lograndint rounds down: high would be almost never drawn
        return tune.sample_from(partial(_whole_log, int(parameter.low), int(parameter.high)))
    if parameter.is_whole:
        return tune.randint(int(parameter.low), int(parameter.high) + 1)
    return (tune.loguniform if parameter.log else tune.uniform)(parameter.low, parameter.high)


def _whole_log(low: int, high: int, spec: Any = None) -> int:
    """Draw as Optuna does: round a logarithmic draw between low - 1/2 and high + 1/2 to the nearest whole number."""
    drawn = round(math.exp(random.uniform(math.log(low - 0.5), math.log(high + 0.5))))
    return min(max(drawn, low), high)


KINDS = ("uniform", "log_uniform_values", "int_uniform", "q_log_uniform_values", "constant", "categorical")


def wandb_parameters(space: Space) -> dict[str, Any]:
    return {name: _parameter(parameter) for name, parameter in space.parameters.items()}


def _parameter(parameter: Range | Choices) -> dict[str, Any]:
    if isinstance(parameter, Choices):
        return {"values": list(parameter.choices)} if len(parameter.choices) > 1 else {"value": parameter.choices[0]}
    if parameter.grid is not None:
        return {"values": list(parameter.grid)}
    if parameter.is_whole and parameter.log:  # it rounds to q: half a step beyond both ends makes them as likely as others
        return {"distribution": "q_log_uniform_values", "min": parameter.low - 0.5, "max": parameter.high + 0.5, "q": 1}
    kind = "int_uniform" if parameter.is_whole else "log_uniform_values" if parameter.log else "uniform"
    return {"distribution": kind, "min": parameter.low, "max": parameter.high}


def space_of_sweep(sweep: dict[str, Any]) -> Space:
    """Return the space of a sweep's configuration. Raise RequestError for a distribution that other backends lack."""
    return Space(parameters={name: _read(name, entry) for name, entry in sweep.get("parameters", {}).items()})


def _read(name: str, entry: dict[str, Any]) -> Range | Choices:
    if "values" in entry or "value" in entry:
        return Choices(choices=tuple(entry.get("values", [entry.get("value")])))
    kind = entry.get("distribution")
    if kind is None and {"min", "max"} <= entry.keys():  # wandb's own default
        kind = "int_uniform" if all(isinstance(entry[end], int) for end in ("min", "max")) else "uniform"
    if kind == "q_log_uniform_values" and entry.get("q", 1) == 1:
        return Range(low=int(entry["min"] + 0.5), high=int(entry["max"] - 0.5), log=True)
    if kind in ("uniform", "log_uniform_values"):
        return Range(low=float(entry["min"]), high=float(entry["max"]), log=kind != "uniform")
    if kind == "int_uniform":
        return Range(low=int(entry["min"]), high=int(entry["max"]))
    raise RequestError(f"the sweep's {name} has distribution {kind!r}; use one of {', '.join(KINDS)}")
