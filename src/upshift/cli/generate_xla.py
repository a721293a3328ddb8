"""Run ``upshift generate --backend xla``: texts from prompts, by programs that XLA compiles whole."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from upshift.cli import tables
from upshift.cli.tables import dim
from upshift.errors import RequestError

EXACT = "exact"


def check(backend: str, races: Mapping[str, Any]) -> None:
    """``races``: options that mean nothing here."""
    if backend != "xla":
        raise RequestError(f"--backend {backend!r} is not known; use race or xla")
    wrong = [name for name, value in races.items() if value not in (None, [], EXACT)]
    if wrong:
        flags = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise RequestError(f"--backend xla computes in fp32, by its one engine, and does not take {flags}; leave out one of them")


def run(
    model: str, *, prompt: str | None, prompts: Path | None, output: Path | None, chat: bool, options: Mapping[str, Any],
    as_json: bool,
) -> None:  # fmt: skip
    from upshift.xla.tensorflow import keep_programs, need_tensorflow

    need_tensorflow("--backend xla")
    keep_programs()
    with tables.step("Reading the model"):
        from upshift.inference.generation.prompts import Prompts
        from upshift.models.generation_config import unused_options
        from upshift.xla.generation.generator import XlaGenerator
        from upshift.xla.generation.options import XlaGeneration
        from upshift.xla.model import build

        generator = XlaGenerator(build(model))
        source = generator.model.source
        texts = Prompts(source, chat=chat)
    read = generator.options(**options)
    for name, value in unused_options(XlaGeneration, source, options).items():
        dim(f"generation_config.json says {name}={value!r}, which is not done here", tables.err)
    start = time.perf_counter()
    if prompt is not None:
        (answer,) = _answers(generator, texts, [prompt], read, first=0)
        sys.stdout.write((json.dumps({"prompt": prompt, **answer}) if as_json else answer["text"]) + "\n")
    else:
        assert prompts is not None and output is not None
        total, tokens = _write(generator, texts, prompts, output, read)
        seconds = time.perf_counter() - start
        done = {"prompts": total, "tokens": tokens, "seconds": seconds, "output": str(output)}
        if as_json:
            sys.stdout.write(json.dumps({**done, "compiled": [one.model_dump() for one in generator.compiled]}) + "\n")
        else:
            tables.out.print(f"{total:,} answers in {output} ({tokens / seconds:,.0f} tokens/s with compiling)")
    for one in generator.compiled:
        dim(f"Compiled for {one.rows} prompts of {one.width} tokens: {one.seconds:.1f} s with its first run", tables.err)


def _write(generator: Any, texts: Any, prompts: Path, output: Path, options: Any) -> tuple[int, int]:
    from upshift.inference.generation.prompts import BLOCK_PROMPTS, prompt_record, read_prompts
    from upshift.inference.resumable_output import UnfinishedLines, output_identity, read_blocks

    total, tokens = sum(1 for _ in read_prompts(prompts)), 0
    made = output_identity(prompts, generator.model.source, "xla", repr(texts.chat), options.to_json())
    with closing(UnfinishedLines(output, total, made)) as answers, tables.bar("Generating") as update:
        for block in read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS, skip=answers.done):
            found = _answers(generator, texts, block, options, first=answers.done)
            tokens += sum(one["tokens"] for one in found)
            answers.add({**prompt_record(prompt), **answer} for prompt, answer in zip(block, found, strict=True))
            update(answers.done, total)
        answers.finish()
    return total, tokens


def _answers(generator: Any, texts: Any, prompts: Any, options: Any, *, first: int) -> list[dict[str, Any]]:
    ids = texts.tokenize(prompts, first=first)
    found = dict(generator.generate_each(ids, options, first=first))
    return [
        {
            "text": texts.decode(found[place]), "ending": "eos" if found[place][-1] in options.eos_token_id else "length",
            "prompt_tokens": len(prompt), "tokens": len(found[place]),
        }
        for place, prompt in enumerate(ids)
    ]  # fmt: skip
