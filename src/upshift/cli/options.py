"""Read which options the command line gives. An option that is given and not used is refused, never ignored.

Define options that take a number: inf and nan are within every range, and no limit of anything.

Define options for how a job is shared among ranks. Each is short for ``--set field=value``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from upshift.errors import RequestError
from upshift.hardware import describe


def given_options(context: typer.Context) -> dict[str, str]:
    """By the parameter's name, as it is written: ``{"global_batch": "--global-batch"}``."""
    return {
        parameter.name: parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name and (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }


def number(name: str, what: str | None, *, least: float) -> Any:
    """An option; ``what``: its help."""
    return typer.Option(name, help=what, callback=_finite, min=least)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is not possible; give a finite number")
    return value


class Flag(NamedTuple):
    field: str
    type: Any
    help: str


FLAGS = {
    "nproc": Flag("num_processes", int, "processes on each host, which share its cores or GPUs"),
    "tensor_parallel": Flag("tensor_parallel", int, "ranks that share every layer's matrices"),
    "pipeline_parallel": Flag("pipeline_parallel", int, "ranks that share the layers by depth"),
    "context_parallel": Flag("context_parallel", int, "ranks that share every sequence"),
    "expert_parallel": Flag("expert_parallel", int, "ranks that share the experts"),
    "fully_shard": Flag("fully_shard", str, "what data-parallel ranks divide: no, optimizer, gradients, weights (ZeRO 0 to 3)"),
}


def with_layout_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options beside its ``--set``."""
    plain = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        command(**with_assignments(given))

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=kind) for parameter in plain.parameters.values()]
    more = [inspect.Parameter(name, kind, default=None, annotation=_option(name, flag)) for name, flag in FLAGS.items()]
    wrapped.__signature__ = plain.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *more)}
    del wrapped.__wrapped__
    return wrapped


def with_assignments(given: dict[str, Any]) -> dict[str, Any]:
    """A command's options by name, with these as assignments of its ``--set``."""
    asked = {name: given[name] for name in FLAGS}
    rest = {name: value for name, value in given.items() if name not in FLAGS}
    return rest | {"set_": [*(given["set_"] or []), *_assignments(asked, given.get("on"), given["set_"] or [])]}


def _option(name: str, flag: Flag) -> Any:
    return Annotated[flag.type | None, typer.Option(_dashed(name), help=f"{flag.help}; {_short_for(flag)}", show_default=False)]


def _short_for(flag: Flag) -> str:
    return f"--set {flag.field}={'...' if flag.type is str else 'N'}"


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _assignments(asked: dict[str, Any], on: str | None, already: list[str]) -> list[str]:
    found = []
    for name, value in asked.items():
        if value is None:
            continue
        field = FLAGS[name].field
        twice = next((text for text in already if text.partition("=")[0] == field), None)
        if twice is not None:
            raise RequestError(f"{_dashed(name)} {value} and --set {twice} fix the same field; give one of them")
        nodes = describe(on).num_nodes if name == "nproc" and on is not None else 1
        found.append(f"{field}={value * nodes if name == 'nproc' else value}")
    return found
