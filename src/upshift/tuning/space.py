"""Define the values that each searched hyper-parameter may take, in one form that is translated for every backend.

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
from upshift.text import did_you_mean
from upshift.training.arguments import Arguments, RunNumbers
from upshift.value import Value

Choice = bool | int | float | str
RUN_FIELDS = ("epochs", "global_batch", "lora_rank", "sequence_length")  # fields of a run, not of Arguments
# A trial ends, is evaluated and is judged as the study says. It does not learn from preferences.
NOT_OF_TRIALS = (
    "logging_steps",
    "eval_steps",
    "early_stopping_patience",
    "load_best",
    "dpo_beta",
    "dpo_loss",
    "dpo_label_smoothing",
    "simpo_gamma",
    "kto_loss",
    "kto_beta",
    "desirable_weight",
    "undesirable_weight",
    "metric_for_best_model",
    "center_rewards_coefficient",
    "range_test_from",
)
NAMES = tuple(sorted({*Arguments.model_fields, *RUN_FIELDS} - {*NOT_OF_TRIALS}))
_KINDS: dict[str, Any] = {name: Arguments for name in Arguments.model_fields} | dict.fromkeys(RUN_FIELDS, RunNumbers)
_FLOATS = {name for name, kind in _KINDS.items() if kind.model_fields[name].annotation is float}
_WHOLE = {name for name, kind in _KINDS.items() if kind.model_fields[name].annotation in (int, int | None)}
PLANNED = {  # hints for names that are searched in transformers, and that the planner chooses here
    "per_device_train_batch_size": "search global_batch: its micro-batch is planned",
    "gradient_accumulation_steps": "search global_batch: its accumulation is planned",
    "num_train_epochs": "it is called epochs",
}


class Range(Value):
    """A range of numbers. ``log``: uniform on a logarithmic scale. ``step``: the values low, low + step, ... up to high."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
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
    def is_whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, self.step or 1))

    @property
    def grid(self) -> tuple[int | float, ...] | None:
        """Return the values of a range with a step, or None without a step."""
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.low + number * self.step for number in range(count))


class Choices(Value):
    """A list of values to choose from."""

    choices: tuple[Choice, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.choices:
            raise ValueError("there is nothing to choose from")
        return self


class Space(Value):
    """The values of each hyper-parameter, by name. One with a single choice is fixed, the others are searched."""

    parameters: dict[str, Range | Choices]

    @property
    def searched(self) -> dict[str, Range | Choices]:
        return {name: values for name, values in self.parameters.items() if not is_fixed(values)}

    @property
    def fixed(self) -> dict[str, Choice]:
        return {
            name: values.choices[0]
            for name, values in self.parameters.items()
            if isinstance(values, Choices) and is_fixed(values)
        }


def is_fixed(values: Range | Choices) -> bool:
    return isinstance(values, Choices) and len(values.choices) == 1


def read_space(path: Path, names: tuple[str, ...] | None = NAMES) -> Space:
    """Read a space from a YAML or JSON file. ``names``: as in ``make_space``.

    Raise RequestError with the file, the name and the problem."""
    import yaml

    try:
        mapping = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a YAML file of hyper-parameters") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(mapping, dict) or not mapping:
        raise RequestError(f"{path} holds no hyper-parameters; write lines such as  learning_rate: {{low: 1.0e-5, high: 1.0e-3}}")
    return make_space(mapping, origin=str(path), names=names)


def make_space(mapping: dict[str, Any], *, origin: str = "the space", names: tuple[str, ...] | None = NAMES) -> Space:
    """Make a space from mappings with low and high, lists, and single values. ``names``: the allowed names; None: any."""
    parameters = {}
    for name, definition in mapping.items():
        if names is not None and name not in names:
            hint = PLANNED.get(str(name), f"use one of {', '.join(names)}{did_you_mean(str(name), names)}")
            raise RequestError(f"{origin}: {name!r} is not a hyper-parameter that is searched; {hint}")
        parameter = _parameter(definition, f"{origin}: {name}")
        parameters[name] = _as_floats(parameter, f"{origin}: {name}") if name in _FLOATS else parameter
        if names is not None:
            _check_values(name, parameters[name], origin)
    return Space(parameters=parameters)


def _parameter(definition: Any, origin: str) -> Range | Choices:
    if isinstance(definition, Range | Choices):
        return definition
    if isinstance(definition, dict):
        kind: type[Range] | type[Choices] = Choices if "choices" in definition else Range
        return kind.from_json(json.dumps(definition, default=str), origin=origin)
    choices = definition if isinstance(definition, list) else [definition]
    return Choices.from_json(json.dumps({"choices": choices}, default=str), origin=origin)


def _check_values(name: str, parameter: Range | Choices, origin: str) -> None:
    """Raise RequestError if an end of a range, or a choice, is not a valid value of the run's field."""
    values = parameter.choices if isinstance(parameter, Choices) else (parameter.low, parameter.high)
    required = {"max_steps": 1} if _KINDS[name] is Arguments else {}
    for value in values:
        try:
            _KINDS[name].from_fields(required | {name: value})
        except RequestError as error:
            raise RequestError(f"{origin}: {error}") from None
    if name not in _WHOLE:
        return
    step = (parameter.step or 1,) if isinstance(parameter, Range) else ()
    not_whole = [value for value in (*values, *step) if type(value) is not int]
    if not_whole:
        raise RequestError(f"{origin}: {name} takes whole numbers, not {json.dumps(not_whole[0])}; write numbers such as 16")


def _as_floats(parameter: Range | Choices, origin: str) -> Range | Choices:
    """Convert the values to floats: {low: 0, high: 1} of a learning rate means floats, and YAML reads 1e-3 as a string."""
    try:
        if isinstance(parameter, Choices):
            return Choices(choices=tuple(_to_float(value) for value in parameter.choices))
        return parameter.changed(low=float(parameter.low), high=float(parameter.high))
    except ValueError:
        raise RequestError(f"{origin}: {parameter.to_json()} is not of numbers; write numbers such as 1.0e-4") from None


def _to_float(value: Choice) -> float:
    if isinstance(value, bool):
        raise ValueError("float() would read true and false as 1 and 0")
    return float(value)
