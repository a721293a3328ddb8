"""Run ``upshift generate``: texts from prompts, by the fastest engine within the requested quality."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import generate_xla, tables
from upshift.cli.plan.command import Json, Model
from upshift.cli.tables import RaceSeconds, dim, failures, table, teller
from upshift.errors import RequestError
from upshift.importing import importing
from upshift.settings import wait_briefly

MaxTtft = Annotated[
    float | None, typer.Option("--max-ttft-ms", help="longest until the first tokens of prompts that are admitted together")
]
MaxTpot = Annotated[float | None, typer.Option("--max-tpot-ms", help="longest mean time for a token more of each sequence")]
MaxMemory = Annotated[
    list[str] | None, typer.Option("--max-memory", help="cpu=8GiB: a larger model runs partly from the disk; default: all")
]
WIDE = 90  # columns that the whole race takes
FLAGS = {"max_new_tokens": "--max-new-tokens", "seed": "--seed", "stop_strings": "--stop"}  # what --set can say, too


def command(
    model: Model,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="a prompt a line (.txt), or JSON lines (.jsonl)")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="an answer a line, in order: .jsonl")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="one prompt; its text is written as it comes")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="most tokens of an answer; default: the model's, or 128")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE by its transformers name: temperature=0.7, top_p=0.9 ...")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="end a text behind this; may be given again")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="of sampling; default: 0")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="prompts are what a user says, by the model's chat template")] = False,
    quality: Annotated[str, typer.Option(help="exact, or the lowest cosine of logits to transformers in fp32: 0.999")] = "exact",
    engine: Annotated[str | None, typer.Option(help="only this engine; unasked, all installed ones race")] = None,
    backend: Annotated[str, typer.Option(help="race: the installed engines; xla: TensorFlow, compiled whole")] = "race",
    max_ttft_ms: MaxTtft = None,
    max_tpot_ms: MaxTpot = None,
    max_memory: MaxMemory = None,
    race_seconds: RaceSeconds = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an output that exists")] = False,
    as_json: Json = False,
) -> None:
    """Race the installed engines on some of the prompts, then generate with the winner."""
    wait_briefly()
    from upshift.inference.generation.prompts import check_files

    if (prompt is None) == (prompts is None) or (prompts is None) != (output is None):
        raise RequestError("generate takes either --prompt TEXT, or --prompts FILE with --output FILE.jsonl")
    if prompts is not None and output is not None:
        check_files(prompts, output, overwrite=overwrite)
    asked = _options(options or [], {"max_new_tokens": max_new_tokens, "seed": seed, "stop_strings": tuple(stop or ()) or None})
    races = {
        "quality": quality, "engine": engine, "max_ttft_ms": max_ttft_ms, "max_tpot_ms": max_tpot_ms, "max_memory": max_memory,
        "race_seconds": race_seconds,
    }  # fmt: skip
    if backend != "race":
        generate_xla.check(backend, {**races, "stop": stop})
        generate_xla.run(model, prompt=prompt, prompts=prompts, output=output, chat=chat, options=asked, as_json=as_json)
        return
    generator, read = _prepare(model, races, asked, chat=chat)
    if prompt is not None:
        _stream(generator, prompt, read, as_json=as_json)
        return
    assert prompts is not None and output is not None
    _generate(generator, prompts, output, read, as_json=as_json)


def _prepare(model: str, races: dict[str, Any], given: dict[str, Any], *, chat: bool) -> tuple[Any, Any]:
    with importing():
        from upshift.inference.generation.generator import Generator
        from upshift.loading.placement.memory_limits import read_max_memory

    limits = read_max_memory(races["max_memory"])
    with tables.step("Reading the model"):
        generator = Generator(model, **{**races, "max_memory": limits}, chat=chat, on_run=teller("tokens/s"))
    return generator, generator.options(**given)


def _options(pairs: list[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of generation. ``flags`` are those that other options of the command set."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise RequestError(f"--set {pair!r} has no value; write NAME=VALUE, such as temperature=0.7")
        try:
            found[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            found[name] = value
    for name, value in flags.items():
        said = found.get(name)
        if value is not None and said is not None and _several(said) != _several(value):
            told = " ".join(map(str, _several(value)))
            raise RequestError(f"--set {name}={json.dumps(said)} and {FLAGS[name]} {told} say two things; leave out one of them")
        found[name] = said if value is None else value
    return {name: value for name, value in found.items() if value is not None}


def _several(said: Any) -> tuple[Any, ...]:
    return tuple(said) if isinstance(said, list | tuple) else (said,)


def _stream(generator: Any, prompt: str, options: Any, *, as_json: bool) -> None:
    if as_json:
        (found,) = generator.complete([prompt], options)
        said = {"prompt": prompt, **_answer(found), "race": generator.race.model_dump(mode="json")}
        sys.stdout.write(json.dumps(said) + "\n")
        return
    start, pieces = time.perf_counter(), 0.0
    for piece in generator.pieces(prompt, options):
        pieces = pieces or time.perf_counter()
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    chosen = generator.race.chosen
    if generator.race.divided is not None:
        dim(generator.race.divided, tables.err)
    dim(f"{chosen.label()}; first text after {pieces - start:.1f} s with the race, loading included", tables.err)


def _generate(generator: Any, prompts: Path, output: Path, options: Any, *, as_json: bool) -> None:
    from upshift.inference.generation.prompts import BLOCK_PROMPTS, prompt_record, read_prompts
    from upshift.inference.resumable_output import UnfinishedLines, output_identity, read_blocks

    total = sum(1 for _ in read_prompts(prompts))
    with tables.step("Racing the installed engines on some of the prompts"):
        first = next(read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS))
        generator.prepare(generator.read(first, options), options, total=total)
    chosen = generator.race.chosen
    setup = chosen.changed(batch=1)  # however many at once, the texts are the same
    made = output_identity(prompts, generator.source, setup.to_json(), options.to_json(), repr(generator.prompts.chat))
    before, tokens, start = 0, 0, time.perf_counter()
    with closing(UnfinishedLines(output, total, made)) as answers, tables.bar("Generating") as update:
        before = answers.done
        update(before, total)
        for block in read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS, skip=before):
            found = generator.complete(block, options, first=answers.done)
            tokens += sum(len(one.tokens) for one in found)
            answers.add({**prompt_record(prompt), **_answer(one)} for prompt, one in zip(block, found, strict=True))
            update(answers.done, total)
        answers.finish()
    seconds = time.perf_counter() - start
    if as_json:
        race = generator.race.model_dump(mode="json")
        done = {"race": race, "prompts": total, "generated": total - before, "tokens": tokens, "seconds": seconds}
        sys.stdout.write(json.dumps({**done, "output": str(output)}) + "\n")
        return
    if generator.race.runs:
        tables.out.print(_table(generator.race))
        _bound(generator)
    if generator.race.divided is not None:
        dim(generator.race.divided)
    failures(generator.race, "tokens/s")
    tables.out.print(f"Chosen: {chosen.label()}, {chosen.batch} at once")
    tables.out.print(f"{total:,} answers in {output} ({total - before:,} now, {tokens / seconds:,.0f} tokens/s)")


def _answer(found: Any) -> dict[str, Any]:
    return {"text": found.text, "ending": found.ending, "prompt_tokens": found.prompt_tokens, "tokens": len(found.tokens)}


def _bound(generator: Any) -> None:
    """Return how near the chosen setup's step is to what memory allows: no step is faster than reading its weights
    once."""
    from upshift.hardware.probe_cache import measure

    (run,) = (run for run in generator.race.runs if run.setup == generator.race.chosen)
    with tables.step("Measuring this machine"):
        measured = measure(generator.host).measured
    rate = None if measured is None else measured.cpu.memory_bytes_per_second
    if rate and run.step_seconds:
        least = run.weight_bytes / rate
        dim(
            f"Its weights, read once, take {1e3 * least:.1f} ms at the {rate / 1e9:.1f} GB/s that memory gives here: "
            f"{least / run.step_seconds:.0%} of a step"
        )


def _table(race: Any) -> Table:
    """rows: sequences at once; first: until the first tokens of so many prompts; step: one token more of each; GB/s: of weights,
    in a step; cosine: of the logits of the token that agrees least; diff: of any logit, over the largest."""
    more = {
        "first ms": lambda run: f"{1e3 * run.first_seconds:.0f}",
        "step ms": lambda run: f"{1e3 * run.step_seconds:.1f}",
        "GB/s": lambda run: f"{run.weight_bytes / run.step_seconds / 1e9 if run.step_seconds else 0.0:.1f}",
    }
    if tables.out.width < WIDE:
        del more["GB/s"]  # a line below says it of the chosen one
    return table(race, "rows", "tokens/s", more)
