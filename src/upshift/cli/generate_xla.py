"""Run ``upshift generate --backend xla``: write texts to prompts, by programs that XLA compiles whole."""

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
FLAGS = {"engine_arguments": "--engine-set"}  # whose names differ from those of the race's options


def check(backend: str, race_options: Mapping[str, Any]) -> None:
    """Raise RequestError for an unknown backend, and for ``race_options`` that are set: XLA runs no race."""
    if backend != "xla":
        raise RequestError(f"--backend {backend!r} is not known; use race or xla")
    unsupported = [name for name, value in race_options.items() if value not in (None, [], {}, EXACT)]
    if unsupported:
        flags = ", ".join(FLAGS.get(name, "--" + name.replace("_", "-")) for name in unsupported)
        raise RequestError(f"--backend xla computes in fp32, by its one engine, and does not take {flags}; leave out one of them")


def run(
    model: str, *, prompt: str | None, prompts: Path | None, output: Path | None, chat: bool, options: Mapping[str, Any],
    as_json: bool,
) -> None:  # fmt: skip
    """Answer ``prompt`` on standard output, or all ``prompts`` in the file ``output``."""
    from upshift.xla.tensorflow import keep_programs, need_tensorflow

    need_tensorflow("--backend xla")
    keep_programs()
    with tables.step("Reading the model"):
        from upshift.inference.generation.prompts import Prompts
        from upshift.xla.generation.generator import XlaGenerator
        from upshift.xla.model import build

        generator = XlaGenerator(build(model))
        source = generator.model.source
        texts = Prompts(source, chat=chat)
    generation = generator.options(**options)
    start = time.perf_counter()
    if prompt is not None:
        (answer,) = _answers(generator, texts, [prompt], generation, first=0)
        sys.stdout.write((json.dumps({"prompt": prompt, **answer}) if as_json else answer["text"]) + "\n")
    else:
        assert prompts is not None and output is not None
        total, tokens = _write_answers(generator, texts, prompts, output, generation)
        seconds = time.perf_counter() - start
        document: dict[str, Any] = {"prompts": total, "tokens": tokens, "seconds": seconds, "output": str(output)}
        if as_json:
            document["compiled"] = [program.model_dump() for program in generator.compiled]
            sys.stdout.write(json.dumps(document) + "\n")
        else:
            tables.out.print(f"{total:,} answers in {output} ({tokens / seconds:,.0f} tokens/s with compiling)")
    for program in generator.compiled:
        size = f"{program.rows} prompts of {program.width} tokens"
        dim(f"Compiled for {size}: {program.seconds:.1f} s with its first run", tables.err)


def _write_answers(generator: Any, texts: Any, prompts: Path, output: Path, options: Any) -> tuple[int, int]:
    """Write the answers to a file of prompts. Return the number of prompts, and of tokens generated now."""
    from upshift.inference.generation.prompts import BLOCK_PROMPTS, prompt_record, read_prompts
    from upshift.inference.resumable_output import UnfinishedLines, output_identity, read_blocks

    total = 0
    for block in read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS):  # before anything is compiled
        generator.check(texts.tokenize(block, first=total), options, first=total)
        total += len(block)
    num_tokens = 0
    identity = output_identity(prompts, generator.model.source, "xla", repr(texts.chat), options.to_json())
    with closing(UnfinishedLines(output, total, identity)) as answers, tables.bar("Generating") as update:
        for block in read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS, skip=answers.done):
            block_answers = _answers(generator, texts, block, options, first=answers.done)
            num_tokens += sum(answer["tokens"] for answer in block_answers)
            answers.add({**prompt_record(prompt), **answer} for prompt, answer in zip(block, block_answers, strict=True))
            update(answers.done, total)
        answers.finish()
    return total, num_tokens


def _answers(generator: Any, texts: Any, prompts: Any, options: Any, *, first: int) -> list[dict[str, Any]]:
    prompt_ids = texts.tokenize(prompts, first=first)
    outputs = dict(generator.generate_each(prompt_ids, options, first=first))
    answers = []
    for index, prompt in enumerate(prompt_ids):
        tokens = outputs[index]
        ending = "eos" if tokens[-1] in options.eos_token_id else "length"
        answers.append(
            {"text": texts.decode(tokens), "ending": ending, "prompt_tokens": len(prompt), "tokens": len(tokens)}
        )  # fmt: skip
    return answers
