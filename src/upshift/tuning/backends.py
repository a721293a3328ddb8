"""Translate a search space for each backend: Optuna's distributions, Ray Tune's domains, and sweeps of Weights & Biases.

All backends draw the same values with the same probabilities. If a distribution of Ray or wandb differs from Optuna's, this
module uses another one. Sweeps are also translated back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from upshift.errors import RequestError
from upshift.tuning.space import Choices, Range, Space

Parameter = TypeVar("Parameter", Range, Choices)
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


KEYS_OF_KINDS = {  # a parameter's keys beside distribution, by its distribution
    "uniform": ("min", "max"),
    "log_uniform_values": ("min", "max"),
    "int_uniform": ("min", "max"),
    "q_log_uniform_values": ("min", "max", "q"),
    "constant": ("value",),
    "categorical": ("values",),
}
SWEEP_KEYS = ("method", "metric", "parameters")
METRIC_KEYS = ("name", "goal")  # name: what the objective of the call computes


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
    """Return the space of a sweep's configuration.

    Raise RequestError for a distribution that other backends lack, and for an entry that would have no effect."""
    return Space(parameters={name: _read(name, entry) for name, entry in sweep.get("parameters", {}).items()})


def check_sweep(sweep: dict[str, Any], directions: Sequence[str]) -> None:
    """Raise RequestError for an entry of a sweep, beside its parameters, that has no effect here or contradicts the call."""
    for origin, entry, keys in (("the sweep", sweep, SWEEP_KEYS), ("the sweep's metric", sweep.get("metric", {}), METRIC_KEYS)):
        unused = next((key for key in entry if key not in keys), None)
        if unused is not None:
            hint = "; give pruner=" if unused == "early_terminate" else "; give n_trials=" if unused == "run_cap" else ""
            raise RequestError(f"{origin} has {unused!r}, which is not used here{hint}; leave it out")
    goal = sweep.get("metric", {}).get("goal")
    if goal is not None and [goal] != list(directions):
        raise RequestError(f"the sweep's metric has goal {goal!r}, and direction is {', '.join(directions)}; use the same")


def _read(name: str, entry: Any) -> Range | Choices:
    origin = f"the sweep's {name}"
    if not isinstance(entry, dict):
        raise RequestError(
            f"{origin} is {entry!r}; write {{'value': {entry!r}}}, {{'values': [...]}} or {{'min': ..., 'max': ...}}"
        )
    kind = _kind(entry)
    if kind not in KEYS_OF_KINDS:
        raise RequestError(f"{origin} has distribution {kind!r}; use one of {', '.join(KEYS_OF_KINDS)}")
    keys = KEYS_OF_KINDS[kind]
    unused = next((key for key in entry if key not in ("distribution", *keys)), None)
    missing = next((key for key in keys if key not in entry and key != "q"), None)
    if unused is not None:
        raise RequestError(f"{origin} has {unused!r}, which is not used here; leave it out")
    if missing is not None:
        raise RequestError(f"{origin} has distribution {kind!r} and no {missing!r}; give {' and '.join(keys)}")
    if kind in ("constant", "categorical"):
        values = [entry["value"]] if kind == "constant" else entry["values"]
        return _checked(Choices, {"choices": values}, origin)
    return _read_range(origin, kind, entry)


def _checked(kind: type[Parameter], fields: dict[str, Any], origin: str) -> Parameter:
    try:
        return kind.from_fields(fields)
    except RequestError as error:
        raise RequestError(f"{origin}: {error}") from None


def _kind(entry: dict[str, Any]) -> str | None:
    """Return the distribution of a parameter: the one that it names, or else the one that wandb takes by default."""
    if "distribution" in entry:
        return str(entry["distribution"])
    if "values" in entry:
        return "categorical"
    if "value" in entry:
        return "constant"
    are_whole = all(type(entry.get(end, 0)) is int for end in ("min", "max"))
    return "int_uniform" if are_whole else "uniform"


def _read_range(origin: str, kind: str, entry: dict[str, Any]) -> Range:
    low = entry["min"]
    high = entry["max"]
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in (low, high)):
        raise RequestError(f"{origin} is of {low!r} to {high!r}; write numbers such as 1.0e-4")
    if kind == "q_log_uniform_values":
        if entry.get("q", 1) != 1:
            raise RequestError(f"{origin} has q {entry['q']!r}; only 1 is possible here, for whole numbers")
        return _checked(Range, {"low": int(low + 0.5), "high": int(high - 0.5), "log": True}, origin)
    if kind == "int_uniform":
        if low != int(low) or high != int(high):
            raise RequestError(f"{origin} has distribution 'int_uniform' and ends {low} and {high}; give whole numbers")
        return _checked(Range, {"low": int(low), "high": int(high)}, origin)
    is_log = kind == "log_uniform_values"
    return _checked(Range, {"low": float(low), "high": float(high), "log": is_log}, origin)
