"""Run ``upshift quantize``: write a directory with weights of 8 or 4 bits, and a report of what rounding did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.plan.command import Json, Model
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
    loads = choose_engine("encode" if encodes else generation_task(source), source, width, engine)
    said = pick_evenly_from_stream(read_prompts(texts), count_lines(texts), SAMPLE_TEXTS)
    plain_texts = [text for text in said if isinstance(text, str)]
    if len(plain_texts) < len(said):
        raise RequestError(f"--texts {texts} has chats; quantize rounds by texts: write a text a line")
    rounding_of = encoding.rounding_of if encodes else generation.rounding_of
    with tables.step(f"Rounding weights to {bits} bits, and comparing what is computed"):
        found = quantize(source, rounding_of(source, plain_texts), output, bits=width, engine=loads)
    if as_json:
        sys.stdout.write(found.to_json() + "\n")
        return
    _tell(found, output)


def _tell(found: Any, output: Path) -> None:
    encodes = found.task == "encode"
    per_second, of = ("texts/s", "vector or its scores") if encodes else ("tokens/s", "token's logits")
    numbers = ("weights", per_second, *(() if encodes else ("same token",)), "cosine", "worst")
    table = tables.new_table("Quality, on texts it was not fitted to", "", numbers=numbers)
    for name, run, size in (
        ("fp32, transformers", found.before, found.bytes_before),
        (f"{found.bits} bits, {found.engine}", found.after, found.bytes_after),
    ):
        same = () if encodes else (f"{run.same_tokens:.1%}",)
        quality = (*same, f"{run.median_cosine:.5f}", f"{run.worst_cosine:.5f}")
        table.add_row(name, format_bytes(size), f"{run.per_second:,.0f}", *quality)
    tables.out.print(table)
    fitted = f"fitted to {found.calibrated_on} texts" if found.calibrated_on else "rounded without texts"
    same_token = "" if encodes else "same token: the likeliest is that of before; "
    dim(f"{fitted}; {same_token}cosine: of a {of}, the median")
    command = "encode" if encodes else "generate"
    tables.out.print(f"{output} loads with {LOADS[found.task, found.engine]}, and with: upshift {command} {output}")
