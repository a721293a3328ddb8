"""Run ``upshift xla compile``: compile the program of a training step, or of generation, for a TPU that this machine lacks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import tables
from upshift.cli.options import Json, Model, command_line_options
from upshift.cli.tables import dim
from upshift.errors import RequestError
from upshift.models.sequence_length import DEFAULT_SEQUENCE_LENGTH, SEQUENCE_HELP, prompt_and_answer_lengths, sequence_length_of
from upshift.models.source import ModelSource
from upshift.units import GIB, format_count, format_seconds

LENGTHS = (DEFAULT_SEQUENCE_LENGTH, 128)  # of a prompt and its answer
app = typer.Typer(help="Programs of XLA: compiled ahead of time for TPUs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Programs of XLA."""


@app.command("compile")
def compile_command(
    context: typer.Context,
    model: Model,
    topology: Annotated[str, typer.Option("--topology", help="a slice by Google's name: v5e-4, v6e-8, v5p-8, v4-8")],
    generate: Annotated[bool, typer.Option("--generate", help="all of generation; default: a training step")] = False,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="sequences of all chips; default: one a chip")] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=2, help=f"tokens of a sequence, or of a prompt; {SEQUENCE_HELP}")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help=f"of --generate; default: {LENGTHS[1]}, or what fits")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="computed in: bfloat16 or float32; trained weights: fp32")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Does it compile for this TPU, how much of its memory does it take, and how fast can it be? Needs no TPU, and makes no
    weights: MODEL may be a config.json. Exit code 3: it does not fit, in the compiler's words."""
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
