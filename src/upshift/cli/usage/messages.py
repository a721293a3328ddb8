"""Say in one line what is wrong with a command's options, and what to give instead."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import typer

from upshift.cli.usage.foreign_options import foreign_hint, is_foreign
from upshift.cli.usage.help_page import is_option, long_name, shown_parameters, usage_line
from upshift.errors import RequestError
from upshift.text import did_you_mean

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's, or that of the copy of click in newer versions of typer
MAY_BE_EMPTY = ("allow", "prompt")  # parameters: --allow "" allows nothing, and a prompt may have no text
ABOVE_ZERO = 1e-9  # the lower bound of an option that must be above 0: typer's own bounds are inclusive
LARGEST_WHOLE_NUMBER = 2**53  # JSON, and every float, holds the whole numbers up to it exactly (RFC 8259, section 6)


class WrongValue(RequestError):
    """The value of an option is not one of the valid values."""


class MissingValue(RequestError):
    """A command was started without something that it needs.

    ``page``: what to print before the message, for a command without any argument."""

    page = ""


def annotation_of(command: Any, parameter: Any) -> Any:
    """Return the annotation of a parameter in the function behind the command: ``Annotated[int | None, ...]``.

    It stands in the signature. From Python 3.14 on, typer's wrapper of the function has no annotations of its own."""
    return inspect.signature(command.callback, eval_str=True).parameters[parameter.name].annotation


def number_type(annotation: Any) -> type[int | float] | None:
    """Return int or float if an annotation is that of a number, else None."""
    kinds = {annotation, *get_args(annotation)}
    kinds |= {kind for part in tuple(kinds) for kind in get_args(part)}
    if bool in kinds:
        return None
    return next((kind for kind in (int, float) if kind in kinds), None)


def expected_number(annotation: Any) -> str:
    """Return what an option takes: ``a whole number of at least 1``."""
    noun = "a whole number" if number_type(annotation) is int else "a number"
    info = next((part for part in get_args(annotation) if hasattr(part, "rich_help_panel")), None)
    least = getattr(info, "min", None)
    most = getattr(info, "max", None)
    if least is None:
        return noun
    if most is None:
        return f"{noun} above 0" if least == ABOVE_ZERO else f"{noun} of at least {least}"
    return f"{noun} above 0, at most {most}" if least == ABOVE_ZERO else f"{noun} from {least} to {most}"


def check_extra(command: Any, path: str, extra: Sequence[str]) -> None:
    """Raise WrongValue for words that are neither an option nor an argument of the command."""
    if extra:
        raise WrongValue(f"{path} does not take {' '.join(extra)!r}; write {usage_line(command, path)}")


def check_words(path: str, values: Mapping[str, Any], order: Sequence[Any], may_be_empty: Iterable[str]) -> None:
    """Raise WrongValue for an option with an empty value, and for one that is given twice.

    The words of another command, after ``--``, are left to that command.

    Args:
        path: the words that start the command.
        values: the words of each parameter, by its name.
        order: the parameters, as often as they occur.
        may_be_empty: names of parameters whose text may be empty.
    """
    for parameter in order:
        words = values.get(parameter.name)
        texts = [words] if isinstance(words, str) else words if isinstance(words, list | tuple) else []
        is_checked = parameter.name not in may_be_empty and not _is_other_command(parameter)
        if is_checked and any(isinstance(text, str) and not text.strip() for text in texts):
            raise WrongValue(f"{long_name(parameter)} is empty; write {_example(parameter)}, or see {path} --help")
    counts = Counter(id(parameter) for parameter in order if is_option(parameter))
    for parameter in order:
        if counts[id(parameter)] > 1 and not parameter.multiple and not parameter.is_flag:
            raise WrongValue(f"{long_name(parameter)} is given {counts[id(parameter)]} times; give it once")


def _is_other_command(parameter: Any) -> bool:
    """Return whether an argument takes the words of another command, as in ``upshift launch -- train MODEL``."""
    return not is_option(parameter) and "-- " in str(parameter.metavar)


def check_numbers(command: Any, path: str, values: Mapping[str, Any], order: Iterable[Any]) -> None:
    """Raise WrongValue for a number that is infinite, is not a number (nan), or is too large to be exact.

    ``values`` and ``order``: as in ``check_words``."""
    for parameter in order:
        text = values.get(parameter.name)
        value = _as_float(text) if isinstance(text, str) else 0.0
        if math.isfinite(value) and abs(value) <= LARGEST_WHOLE_NUMBER:
            continue
        annotation = annotation_of(command, parameter)
        kind = number_type(annotation)
        if kind is not None and not math.isfinite(value):
            raise WrongValue(f"{long_name(parameter)} {text} is not {expected_number(annotation)}; see {path} --help")
        if kind is int:
            raise WrongValue(f"{long_name(parameter)} {text} is too large; give at most {LARGEST_WHOLE_NUMBER}")


def _as_float(text: str) -> float:
    """Return the number that a text is, or 0 for any other text."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value``. Raise WrongValue if it is not one of the choices."""
    if value not in choices:
        raise WrongValue(f"{option} {value!r} is not known; use one of {', '.join(choices)}{did_you_mean(value, choices)}")
    return value


def describe_error(command: Any, path: str, error: Any, values: Mapping[str, Any]) -> RequestError:
    """Return an error in our words for a usage error of the library that parses the command line.

    Args:
        command: the command that was started.
        path: the words that start it.
        error: click's UsageError, or typer's copy of it.
        values: the words of each parameter, by its name.
    """
    kind = type(error).__name__
    option = str(getattr(error, "option_name", ""))
    parameter = getattr(error, "param", None)
    if kind == "MissingParameter" and parameter is not None:
        typed = {name for name, words in values.items() if words and isinstance(words, str | list | tuple)}
        missing = [other for other in shown_parameters(command) if other.required and other.name not in typed]
        *names, last = map(_example, missing or [parameter])
        words = f"{', '.join(names)} and {last}" if names else last
        return MissingValue(f"{path} needs {words}; see {path} --help")
    if kind == "NoSuchOption":
        metavars = {name: str(other.metavar or "") for other in command.params if is_option(other) for name in other.opts}
        meant = _likely_meant(option, metavars)
        wrapped = next((long_name(other) for other in command.params if long_name(other).startswith("-- ")), None)
        if wrapped is not None and not meant:
            return RequestError(
                f"{path} has no option {option}; write the command that has it after --: {path} {wrapped}; see {path} --help-all"
            )
        return RequestError(f"{path} has no option {option}{meant}; see {path} --help-all")
    if kind == "BadOptionUsage":
        return WrongValue(_usage_of_option(command, option, path))
    if parameter is not None and parameter.name in values:
        annotation = annotation_of(command, parameter)
        if number_type(annotation) is not None:
            value = values[parameter.name]
            return WrongValue(f"{long_name(parameter)} {value} is not {expected_number(annotation)}; see {path} --help")
    message = str(error.format_message()).rstrip(".")
    return RequestError(f"{message[:1].lower()}{message[1:]}; see {path} --help")


def _likely_meant(option: str, metavars: Mapping[str, str]) -> str:
    """Return ``; did you mean NAME?`` for an option that does not exist, or an empty text.

    An option of another library may have another name (``--lr``), or more words than ours (``--num_train_epochs``)."""
    words = re.split("[-_]+", option.strip("-"))
    dashed = f"--{'-'.join(words)}"
    if dashed in metavars:
        return f"; did you mean {dashed}?"
    near = [name for name in metavars if set(name[2:].split("-")) < set(words)]
    if (hint := foreign_hint(option, metavars)) or near:
        return hint or f"; did you mean {' or '.join(near[:2])}?"
    return "" if is_foreign(option) else did_you_mean(option, metavars)


def _usage_of_option(command: Any, name: str, path: str) -> str:
    parameter = next((other for other in command.params if is_option(other) and name in other.opts), None)
    if parameter is None:
        return f"{name} is not used so; see {path} --help"
    if parameter.is_flag:
        return f"{name} takes no value; write {name} alone"
    return f"{name} needs a value; write {_example(parameter)}"


def _example(parameter: Any) -> str:
    return f"{long_name(parameter)} {parameter.metavar}" if is_option(parameter) else long_name(parameter)
