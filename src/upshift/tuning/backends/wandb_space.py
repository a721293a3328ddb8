"""Translate a space into the parameters of Weights & Biases' sweeps, and back."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.tuning.space import Choices, Range, Space

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
