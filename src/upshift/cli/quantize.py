"""Run ``upshift quantize``: write a directory with weights of 8 or 4 bits, and report how the outputs changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.options import Json, Model
from upshift.cli.tables import dim
from upshift.errors import RequestError
from upshift.units import format_bytes

TRANSFORMERS = "transformers' from_pretrained"
LOADS = {
    ("generate", "torch"): TRANSFORMERS,
    ("generate", "openvino"): "optimum-intel's OVModelForCausalLM and, beside a tokenizer by openvino_tokenizers, OpenVINO GenAI",
    ("seq2seq", "torch"): TRANSFORMERS,
    ("seq2seq", "openvino"): "OpenVINO's read_model, an encoder and a decoder apart",
    ("encode", "torch"): TRANSFORMERS,
    ("encode", "openvino"): "OpenVINO's read_model",
}


def command(
    model: Model,
    bits: Annotated[int, typer.Option(help="of a weight: 8 or 4")],
    texts: Annotated[Path, typer.Option("--texts", help='texts like those to come, a line each (.txt), or a "prompt" (.jsonl)')],
    output: Annotated[Path, typer.Option("--output", "-o", help="the directory to write")],
    engine: Annotated[
        str | None, typer.Option(help="what is to load it: torch (transformers) or openvino; default: openvino if installed")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what an earlier upshift quantize wrote")] = False,
    as_json: Json = False,
) -> None:
    """Round the weights of a language model, encoder-decoder or encoder, fitted to some texts, and compare on others."""
    from upshift.inference.encoding import quantize as encoding
    from upshift.inference.encoding.model_config import is_encoder
    from upshift.inference.generation import quantize as generation
    from upshift.inference.generation.model import generation_task
    from upshift.inference.generation.prompts import check_prompts, read_prompts
    from upshift.inference.quantize import SAMPLE_TEXTS, Bits, check_output, choose_engine, quantize
    from upshift.inference.race.types import pick_evenly_from_stream
    from upshift.inference.resumable_output import count_lines
    from upshift.inference.weights import find_plain_weights

    if bits not in (4, 8):
        raise RequestError(f"--bits {bits} is not possible; use 8 or 4")
    check_prompts(texts, "--texts")
    check_output(output, overwrite=overwrite)
    source = find_plain_weights(model)
    encodes = is_encoder(source)
    width: Bits = 8 if bits == 8 else 4
    loader = choose_engine("encode" if encodes else generation_task(source), source, width, engine)
    sample = pick_evenly_from_stream(read_prompts(texts), count_lines(texts), SAMPLE_TEXTS)
    plain_texts = [text for text in sample if isinstance(text, str)]
    if len(plain_texts) < len(sample):
        raise RequestError(f"--texts {texts} has chats; quantize rounds by texts: write a text a line")
    rounding_of = encoding.rounding_of if encodes else generation.rounding_of
    with tables.step(f"Rounding weights to {bits} bits, and comparing what is computed"):
        result = quantize(source, rounding_of(source, plain_texts), output, bits=width, engine=loader)
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
        return
    _print_quality(result, output)


def _print_quality(result: Any, output: Path) -> None:
    encodes = result.task == "encode"
    columns: tuple[str, ...] = ("weights", "tokens/s", "same token", "cosine", "worst")
    compared = "token's logits"
    if encodes:
        columns = ("weights", "texts/s", "cosine", "worst")
        compared = "vector or its scores"
    table = tables.new_table("Quality, on texts it was not fitted to", "", numbers=columns)
    for name, run, size in (
        ("fp32, transformers", result.before, result.bytes_before),
        (f"{result.bits} bits, {result.engine}", result.after, result.bytes_after),
    ):
        same_tokens = () if encodes else (f"{run.same_tokens:.1%}",)
        quality = (*same_tokens, f"{run.median_cosine:.5f}", f"{run.worst_cosine:.5f}")
        table.add_row(name, format_bytes(size), f"{run.per_second:,.0f}", *quality)
    tables.out.print(table)
    fitted = f"fitted to {result.calibrated_on} texts" if result.calibrated_on else "rounded without texts"
    same_token = "" if encodes else "same token: the likeliest is that of before; "
    dim(f"{fitted}; {same_token}cosine: of a {compared}, the median")
    command = "encode" if encodes else "generate"
    tables.out.print(f"{output} loads with {LOADS[result.task, result.engine]}, and with: upshift {command} {output}")
