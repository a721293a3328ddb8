"""Options that several commands share: their types, how they are read, and which of them the command line has.

An option that a command does not use is rejected, never ignored: see ``command_line_options``. A number is finite: inf and nan
are within every range, and no limit of anything.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.models.sequence_length import SEQUENCE_HELP
from upshift.planning.inference.plan import CHANGES_MATHEMATICS
from upshift.planning.plan import changes_of_mathematics
from upshift.training.data.data_options import DataOptions


def command_line_options(context: typer.Context) -> dict[str, str]:
    """Return the options that the user typed, as typed, by parameter name: ``{"global_batch": "--global-batch"}``."""
    return {
        parameter.name: parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name and (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }


def split_names(text: str, option: str = "--allow") -> tuple[str, ...]:
    """Return the names of a list that is separated by commas. Raise RequestError if it has commas and no name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise RequestError(f"{option} {text!r} names nothing; give names separated by commas")
    return names


def number_option(name: str, help_text: str | None, *, least: float) -> Any:
    """Return an option that takes a finite number of at least ``least``."""
    return typer.Option(name, help=help_text, callback=_check_finite, min=least)


def _check_finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is not possible; give a finite number")
    return value


LARGEST_BATCH = 10_000_000  # sequences; a plan for the lengths of data draws so many
ALLOW_TRAINING_HELP = ",".join(changes_of_mathematics())
ALLOW_INFERENCE_HELP = f"with --generate or --encode: {','.join(CHANGES_MATHEMATICS)}"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="local Hugging Face directory, a config.json, or a hub id")]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence-length", min=2, help=f"tokens of the longest sequence; {SEQUENCE_HELP}")
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", min=1, max=LARGEST_BATCH, help="sequences per optimizer step; no plan changes it")
]
Epochs = Annotated[float, number_option("--epochs", None, least=0.001)]
Set = Annotated[list[str] | None, typer.Option("--set", help="fix a field of the plan: field=value (repeatable)")]
Allow = Annotated[
    str,
    typer.Option("--allow", help=f"allowed to change the mathematics: {ALLOW_TRAINING_HELP}; {ALLOW_INFERENCE_HELP}"),
]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", min=1, help="train LoRA of this rank around every linear layer but the head")
]
FourBits = Annotated[bool, typer.Option("--load-in-4bit", help="QLoRA: below --lora-rank the weights are stored in NF4")]
RaceSeconds = Annotated[
    float | None, typer.Option("--race-seconds", help="most of the race; default: 90, or a tenth of the run if that is more")
]
TextColumn = Annotated[str | None, typer.Option("--text-column", help="of --data: the column that holds the text, if not text")]
DataFormat = Annotated[
    str | None,
    typer.Option(
        "--data-format",
        help="of --data, if its columns allow several: text, input_ids, messages, conversations, prompt-completion, alpaca",
    ),
]
LossOn = Annotated[
    str | None,
    typer.Option("--loss-on", help="of chats and prompts: assistant (its turns, the completion; default) or all tokens"),
]
LongRows = Annotated[
    str | None,
    typer.Option("--long-rows", help="rows longer than a sequence: cut (default for chats), split (default for text) or drop"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def data_options_of(options: Mapping[str, Any]) -> DataOptions:
    """Return what the user says of the data. ``options``: options of the command, by name."""
    return DataOptions.from_fields({name: options[name] for name in DataOptions.model_fields})


class LayoutFlag(NamedTuple):
    """An option that is short for ``--set field=value``."""

    field: str
    type: Any
    help: str


SHARDED_STATES = "what data-parallel ranks divide: no, optimizer, gradients, weights (ZeRO 0 to 3)"
LAYOUT_FLAGS = {  # how ranks share a job
    "nproc": LayoutFlag("num_processes", int, "processes on each host, which share its cores or GPUs"),
    "tensor_parallel": LayoutFlag("tensor_parallel", int, "ranks that share every layer's matrices"),
    "pipeline_parallel": LayoutFlag("pipeline_parallel", int, "ranks that share the layers by depth"),
    "context_parallel": LayoutFlag("context_parallel", int, "ranks that share every sequence"),
    "expert_parallel": LayoutFlag("expert_parallel", int, "ranks that share the experts"),
    "fully_shard": LayoutFlag("fully_shard", str, SHARDED_STATES),
}


def with_layout_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the layout flags, too, and passes them to ``command`` as assignments of its ``--set``."""
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def command_with_flags(**arguments: Any) -> None:
        command(**move_flags_to_set(arguments))

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=kind) for parameter in signature.parameters.values()]
    for name, flag in LAYOUT_FLAGS.items():
        parameters.append(inspect.Parameter(name, kind, default=None, annotation=_flag_annotation(name, flag)))
    command_with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command_with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command_with_flags.__wrapped__
    return command_with_flags


def move_flags_to_set(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a command's arguments by name, with each layout flag replaced by an assignment in ``set_``.

    Raise RequestError for a field that a flag and ``--set`` both fix."""
    flags = {name: arguments[name] for name in LAYOUT_FLAGS}
    others = {name: value for name, value in arguments.items() if name not in LAYOUT_FLAGS}
    assignments = arguments["set_"] or []
    return others | {"set_": [*assignments, *_assignments_of_flags(flags, arguments.get("on"), assignments)]}


def _flag_annotation(name: str, flag: LayoutFlag) -> Any:
    placeholder = "..." if flag.type is str else "N"
    help_text = f"{flag.help}; --set {flag.field}={placeholder}"
    return Annotated[flag.type | None, typer.Option(_option_name(name), help=help_text, show_default=False)]


def _option_name(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"


def _assignments_of_flags(flags: dict[str, Any], on: str | None, assignments: list[str]) -> list[str]:
    """Return ``field=value`` for each flag that is set. ``--nproc`` counts processes of one host; its field counts all."""
    texts = []
    for name, value in flags.items():
        if value is None:
            continue
        field = LAYOUT_FLAGS[name].field
        duplicate = next((text for text in assignments if text.partition("=")[0] == field), None)
        if duplicate is not None:
            raise RequestError(f"{_option_name(name)} {value} and --set {duplicate} fix the same field; give one of them")
        num_nodes = describe(on).num_nodes if name == "nproc" and on is not None else 1
        texts.append(f"{field}={value * num_nodes if name == 'nproc' else value}")
    return texts
