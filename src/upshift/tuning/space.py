"""Define the values that each searched hyper-parameter may take: one form, which is translated for every backend.

    learning_rate: {low: 1.0e-5, high: 1.0e-2, log: true}
    warmup_steps: {low: 0, high: 100, step: 10}
    lr_scheduler_type: [linear, cosine]
    weight_decay: 0.01

A range of whole numbers gives whole numbers. A single value is the same in every trial.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from upshift.errors import RequestError
from upshift.training.arguments import Arguments, RunNumbers
from upshift.value import Value

Choice = bool | int | float | str
OF_RUN = ("epochs", "global_batch", "lora_rank", "sequence_length")  # beside the fields of Arguments
NAMES = tuple(sorted({*Arguments.model_fields, *OF_RUN}))
_KINDS: dict[str, Any] = {name: Arguments for name in Arguments.model_fields} | dict.fromkeys(OF_RUN, RunNumbers)
_FLOATS = {name for name, kind in _KINDS.items() if kind.model_fields[name].annotation is float}
_WHOLE = {name for name, kind in _KINDS.items() if kind.model_fields[name].annotation in (int, int | None)}
PLANNED = {  # what transformers' users search, and the planner decides
    "per_device_train_batch_size": "search global_batch: its micro-batch is planned",
    "gradient_accumulation_steps": "search global_batch: its accumulation is planned",
    "num_train_epochs": "it is called epochs",
}


class Range(Value):
    """A range of numbers. ``log``: equally likely on a logarithmic scale. ``step``: low, low + step, ... up to high."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ValueError("low must be below high")
        if self.log and self.low <= 0:
            raise ValueError("a logarithmic range begins above 0")
        if self.step is not None and self.step > self.high - self.low:
            raise ValueError("step must be at most high - low")
        if self.log and self.step is not None:
            raise ValueError("a range is logarithmic or has a step, not both")
        return self

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, self.step or 1))

    @property
    def grid(self) -> tuple[int | float, ...] | None:
        """Return the values of a range with a step, or None without a step."""
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.low + number * self.step for number in range(count))


class Choices(Value):
    choices: tuple[Choice, ...]

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.choices:
            raise ValueError("there is nothing to choose from")
        return self


class Space(Value):
    parameters: dict[str, Range | Choices]

    @property
    def searched(self) -> dict[str, Range | Choices]:
        return {name: one for name, one in self.parameters.items() if not is_fixed(one)}

    @property
    def fixed(self) -> dict[str, Choice]:
        return {name: one.choices[0] for name, one in self.parameters.items() if isinstance(one, Choices) and is_fixed(one)}


def is_fixed(one: Range | Choices) -> bool:
    return isinstance(one, Choices) and len(one.choices) == 1


def read_space(path: Path, names: tuple[str, ...] | None = NAMES) -> Space:
    """Read a space from a YAML or JSON file. ``names``: as in ``make_space``.

    Raise RequestError with the file, the name and what is wrong with it."""
    import yaml

    try:
        written = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a YAML file of hyper-parameters") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(written, dict) or not written:
        raise RequestError(f"{path} holds no hyper-parameters; write lines such as  learning_rate: {{low: 1.0e-5, high: 1.0e-3}}")
    return make_space(written, origin=str(path), names=names)


def make_space(written: dict[str, Any], *, origin: str = "the space", names: tuple[str, ...] | None = NAMES) -> Space:
    """Make a space of mappings with low and high, lists, and single values. ``names``: names that are allowed; None: any."""
    parameters = {}
    for name, what in written.items():
        if names is not None and name not in names:
            hint = PLANNED.get(str(name), f"it is one of {', '.join(names)}")
            raise RequestError(f"{origin}: {name!r} is not a hyper-parameter that is searched; {hint}")
        found = _parameter(what, f"{origin}: {name}")
        parameters[name] = _as_floats(found, f"{origin}: {name}") if name in _FLOATS else found
        if names is not None:
            _check_values(name, parameters[name], origin)
    return Space(parameters=parameters)


def _parameter(what: Any, origin: str) -> Range | Choices:
    if isinstance(what, Range | Choices):
        return what
    if isinstance(what, dict):
        kind: type[Range] | type[Choices] = Choices if "choices" in what else Range
        return kind.from_json(json.dumps(what, default=str), origin=origin)
    return Choices.from_json(json.dumps({"choices": what if isinstance(what, list) else [what]}, default=str), origin=origin)


def _check_values(name: str, one: Range | Choices, origin: str) -> None:
    """Check a range's ends, or every choice, by the rules of a run. Raise RequestError for a value that a run does not take."""
    values = one.choices if isinstance(one, Choices) else (one.low, one.high)
    for value in values:
        try:
            _KINDS[name].from_fields(({"max_steps": 1} if _KINDS[name] is Arguments else {}) | {name: value})
        except RequestError as error:
            raise RequestError(f"{origin}: {error}") from None
    steps = (one.step or 1,) if isinstance(one, Range) else ()
    broken = [value for value in (*values, *steps) if type(value) is not int] if name in _WHOLE else []
    if broken:
        raise RequestError(f"{origin}: {name} takes whole numbers, not {json.dumps(broken[0])}; write numbers such as 16")


def _as_floats(one: Range | Choices, origin: str) -> Range | Choices:
    """Turn values into floats: {low: 0, high: 1} of a learning rate is not whole numbers, and YAML reads 1e-3 as a word."""
    try:
        if isinstance(one, Choices):
            return Choices(choices=tuple(_number(value) for value in one.choices))
        return one.changed(low=float(one.low), high=float(one.high))
    except ValueError:
        raise RequestError(f"{origin}: {one.to_json()} is not of numbers; write numbers such as 1.0e-4") from None


def _number(value: Choice) -> float:
    if isinstance(value, bool):
        raise ValueError("true and false are 1 and 0 to float")
    return float(value)
