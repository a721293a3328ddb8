"""Run ``upshift xla compile``: compile the program of a training step, or of generation, for a TPU that this machine lacks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import tables
from upshift.cli.options import POSITIONS_DEFAULT, Json, Model, command_line_options, option
from upshift.cli.tables import dim
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.models.sequence_length import DEFAULT_SEQUENCE_LENGTH, prompt_and_answer_lengths, sequence_length_of
from upshift.models.source import ModelSource
from upshift.units import GIB, format_count, format_seconds

LENGTHS = (DEFAULT_SEQUENCE_LENGTH, 128)  # of a prompt and its answer
app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True, help="Compile programs of XLA for TPUs.",
    epilog="upshift xla compile MODEL --topology v5e-4",
)  # fmt: skip
Topology = Annotated[
    str,
    option(
        "--topology", text="A slice of TPUs by Google's name, such as v5e-4, v6e-8 or v5p-8.", panel=Panel.TASK, metavar="NAME"
    ),
]
GenerateOption = Annotated[bool, option("--generate", text="Compile generation, not a training step.", panel=Panel.TASK)]
Batch = Annotated[
    int | None,
    option(
        "--batch", text="Sequences at a time, on all chips together.", panel=Panel.TASK, metavar="N", default="one on each chip",
        least=1,
    ),
]  # fmt: skip
Length = Annotated[
    int | None,
    option(
        "--sequence-length", text="The length of a sequence or of a prompt, in tokens.", panel=Panel.MODEL, metavar="N",
        default=POSITIONS_DEFAULT, least=2,
    ),
]  # fmt: skip
MaxNewTokens = Annotated[
    int | None,
    option(
        "--max-new-tokens", text="With --generate: the longest answer, in tokens.", panel=Panel.TASK, metavar="N",
        default=f"{LENGTHS[1]}, or what fits", least=1,
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    option(
        "--dtype", text="The dtype that is computed in. Trained weights stay in fp32", panel=Panel.TASK, metavar="NAME",
        choices=("bfloat16", "float32"),
    ),
]  # fmt: skip


@app.callback()
def _group() -> None:
    """Compile programs of XLA for TPUs."""


@app.command("compile", cls=HelpCommand, epilog="upshift xla compile MODEL --topology v5e-4")
def compile_command(
    context: typer.Context,
    model: Model,
    topology: Topology,
    generate: GenerateOption = False,
    batch: Batch = None,
    sequence_length: Length = None,
    max_new_tokens: MaxNewTokens = None,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Compile a training step or generation for a TPU. Needs no TPU and no weights.

    Shows whether it compiles, how much memory it takes, and how fast it can be at most. Exit code 3: it does not fit.
    """
    from upshift.models.source import find_model
    from upshift.xla.tpu.compile import compile_for_tpu

    if not generate and "max_new_tokens" in command_line_options(context):
        raise RequestError(f"--max-new-tokens {max_new_tokens} is of --generate; add it, or leave this out")
    length, new_tokens = _lengths(find_model(model), sequence_length, max_new_tokens, generate=generate)
    program = compile_for_tpu(
        model, topology, kind="generate" if generate else "train", rows=batch, length=length,
        max_new_tokens=new_tokens, dtype=dtype, on_step=lambda text: dim(text, tables.err),
    )  # fmt: skip
    if as_json:
        sys.stdout.write(program.to_json() + "\n")
        return
    tables.out.print(_memory_table(program))
    answer = program.answer
    bound = "arithmetic" if program.compute_seconds > program.traffic_seconds else "memory traffic"
    tables.out.print(
        f"No faster than {format_seconds(program.roofline_seconds)}, bound by {bound} ({program.topology.facts.source}); "
        f"{answer.exchanges} exchanges among {program.topology.chips} chips, {answer.num_dynamic_dimensions} dynamic dimensions, "
        f"{answer.num_custom_calls} custom calls"
    )
    dim(f"Compiled in {format_seconds(answer.compile_seconds)} by libtpu {program.versions['libtpu']}; not run on a TPU")


def _lengths(source: ModelSource, length: int | None, new_tokens: int | None, *, generate: bool) -> tuple[int, int]:
    if not generate:
        return sequence_length_of(source, length), LENGTHS[1]
    names = ("--sequence-length", "--max-new-tokens")
    return prompt_and_answer_lengths(source, length, new_tokens, defaults=LENGTHS, options=names)


def _memory_table(program: Any) -> Table:
    new_tokens = f" and {program.max_new_tokens} new ones" if program.kind == "generate" else ""
    sequences = f"{program.rows} sequences of {program.length} tokens{new_tokens}"
    title = f"{program.kind}, {sequences}, {format_count(program.num_parameters)} parameters, {program.topology.name}"
    table = tables.new_table(title, "a chip's memory", numbers=("GiB",))
    rows = {
        "weights": program.weight_bytes, "optimizer states": program.optimizer_bytes,
        "temporary": program.answer.temporary_bytes, "program": program.answer.code_bytes,
        "highest moment": program.answer.peak_bytes, "there is": program.memory_bytes,
    }  # fmt: skip
    for name, value in rows.items():
        table.add_row(name, f"{value / GIB:.2f}")
    return table
