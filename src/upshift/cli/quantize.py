"""Run ``upshift quantize``: write a directory with weights of 8 or 4 bits, and report how the outputs changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from upshift.cli import tables
from upshift.cli.options import Json, Model, Overwrite, option, output_folder
from upshift.cli.tables import dim
from upshift.cli.usage.help_page import Panel
from upshift.units import format_bytes

TRANSFORMERS = "transformers' from_pretrained"
LOADS = {
    ("generate", "torch"): TRANSFORMERS,
    ("generate", "openvino"): "optimum-intel's OVModelForCausalLM and, beside a tokenizer by openvino_tokenizers, OpenVINO GenAI",
    ("seq2seq", "torch"): TRANSFORMERS,
    ("states", "torch"): TRANSFORMERS,
    ("as-transformers", "torch"): TRANSFORMERS,
    ("seq2seq", "openvino"): "OpenVINO's read_model, an encoder and a decoder apart",
    ("encode", "torch"): TRANSFORMERS,
    ("encode", "openvino"): "OpenVINO's read_model",
}

BitsOption = Annotated[str, option("--bits", text="The bits of one weight", panel=Panel.MODEL, metavar="8|4", choices=("8", "4"))]
Texts = Annotated[
    Path,
    option(
        "--texts", panel=Panel.MODEL, metavar="PATH",
        text='Texts like those of later use: a .txt file with one in each line, or .jsonl with the field "text" or "prompt".',
    ),
]  # fmt: skip
Output = Annotated[Path, output_folder("The folder to write.")]
Loader = Annotated[
    str | None,
    option(
        "--engine", text="The engine that shall load the result", panel=Panel.ENGINES, metavar="NAME",
        default="openvino if it is installed, else torch", choices=("torch", "openvino"),
    ),
]  # fmt: skip


def command(
    model: Model,
    bits: BitsOption,
    texts: Texts,
    output: Output,
    engine: Loader = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a model with weights of 8 or 4 bits, and report how its results changed.

    The rounding is fitted to some of the texts, and the results are compared on others.
    """
    from upshift.inference.encoding.files import check_texts, read_texts
    from upshift.inference.quantize import SAMPLE_TEXTS, Bits, check_output, choose_engine, quantize
    from upshift.inference.race.types import pick_evenly_from_stream
    from upshift.inference.resumable_output import count_lines
    from upshift.inference.weights import find_plain_weights

    check_texts(texts, "--texts")
    check_output(output, overwrite=overwrite)
    source = find_plain_weights(model)
    from upshift.inference.encoding import quantize as encoding  # imports torch: a wrong path was refused before
    from upshift.inference.encoding.model_config import is_encoder
    from upshift.inference.generation import quantize as generation
    from upshift.inference.generation.model import generation_task

    encodes = is_encoder(source)
    width: Bits = 8 if bits == "8" else 4
    loader = choose_engine("encode" if encodes else generation_task(source), source, width, engine)
    sample = pick_evenly_from_stream(read_texts(texts), count_lines(texts), SAMPLE_TEXTS)
    rounding_of = encoding.rounding_of if encodes else generation.rounding_of
    with tables.step(f"Rounding weights to {bits} bits, and comparing what is computed"):
        result = quantize(source, rounding_of(source, sample), output, bits=width, engine=loader)
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
        return
    _print_quality(result, output)


def _print_quality(result: Any, output: Path) -> None:
    encodes = result.task == "encode"
    compared = "vector or its scores" if encodes else "token's logits"
    tables.out.print(_quality_table(result))
    fitted = f"fitted to {result.calibrated_on} texts" if result.calibrated_on else "rounded without texts"
    same_token = "" if encodes else "same token: the likeliest is that of before; "
    dim(f"{fitted}; {same_token}cosine: of a {compared}, the median")
    command = "encode" if encodes else "generate"
    tables.out.print(
        f"{output} loads with {LOADS[result.task, result.engine]}, and with: upshift {command} {output}", soft_wrap=True
    )


def _quality_table(result: Any) -> Table:
    """Return a row for the model before, and one for the rounded model."""
    encodes = result.task == "encode"
    columns: tuple[str, ...] = ("weights", "tokens/s", "same token", "cosine", "worst")
    if encodes:
        columns = ("weights", "texts/s", "cosine", "worst")
    table = tables.new_table("Quality, on texts it was not fitted to", "", numbers=columns)
    for name, run, size in (
        ("fp32, transformers", result.before, result.bytes_before),
        (f"{result.bits} bits, {result.engine}", result.after, result.bytes_after),
    ):
        same_tokens = () if encodes else (f"{run.same_tokens:.1%}",)
        quality = (*same_tokens, f"{run.median_cosine:.5f}", f"{run.worst_cosine:.5f}")
        table.add_row(name, format_bytes(size), f"{run.per_second:,.0f}", *quality)
    return table
