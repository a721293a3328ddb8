"""``upshift encode``: texts of a file to vectors or class scores, by the fastest engine within the quality that is asked for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import show
from upshift.cli.plan import Json, Model


def command(
    model: Model,
    texts: Annotated[Path, typer.Option("--input", "-i", help='a text a line (.txt), or JSON lines with a "text" (.jsonl)')],
    output: Annotated[Path, typer.Option("--output", "-o", help="one row a text, in order: .npy or .parquet")],
    quality: Annotated[str, typer.Option(help="exact, or the lowest cosine to transformers in fp32, such as 0.99")] = "exact",
    engine: Annotated[str | None, typer.Option(help="only this engine; unasked, all installed ones race")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an output that exists")] = False,
    as_json: Json = False,
) -> None:
    """Race the installed engines on a sample of the texts, then encode them all with the winner."""
    from upshift.inference.encoder import Encoder
    from upshift.inference.engines.registry import missing
    from upshift.inference.files import check_files, count_texts, sample_texts
    from upshift.inference.race import SAMPLE_TEXTS

    check_files(texts, output, overwrite=overwrite)
    with show.step("Racing the installed engines on a sample of the texts"):
        encoder = Encoder(
            model,
            quality=quality,
            engine=engine,
            on_run=lambda run: show.err.print(_line(run), style="dim", markup=False, highlight=False),
        )
        total = count_texts(texts)
        encoder.prepare(sample_texts(texts, total, SAMPLE_TEXTS))
    start = time.perf_counter()
    done = _encode(encoder, texts, output, total)
    seconds = time.perf_counter() - start
    race: Any = encoder.race
    if as_json:
        said = {"race": race.model_dump(mode="json"), "texts": total, "encoded": done, "seconds": seconds, "output": str(output)}
        sys.stdout.write(json.dumps(said) + "\n")
        return
    _dim(_said(encoder.recipe))
    show.out.print(race_table(race))
    for run in race.runs:
        if run.failure:
            _dim(f"{run.setup.engine} {run.setup.precision} did not run: {run.failure}")
    if race.recalled:
        _dim(f"remembered; delete {race.file} to race again")
    show.out.print(f"Chosen: {race.chosen.label()}")
    for line in missing():
        _dim(line)
    rate = f", {done / seconds:,.0f} a second" if done and seconds else ""
    show.out.print(f"{total:,} texts in {output} ({done:,} encoded now{rate})")


def _dim(text: str) -> None:
    """As it is: the names of extras look like markup."""
    show.out.print(text, style="dim", markup=False, highlight=False)


def _encode(encoder: Any, texts: Path, output: Path, total: int) -> int:
    """Texts that were encoded now: not those that an earlier, interrupted run had done."""
    from rich.progress import Progress

    from upshift.inference.files import Rows, blocks

    stat = texts.stat()
    made_of = f"{texts.name} {stat.st_size} {stat.st_mtime_ns} {encoder.source.model_hash} {encoder.race.chosen.to_json()}"
    rows = Rows(output, total, made_of)
    before = rows.done
    with Progress(console=show.err, transient=True) as bar:
        task = bar.add_task("Encoding", total=total, completed=before)
        for block in blocks(texts, skip=before):
            rows.add(encoder.encode(block))
            bar.update(task, completed=rows.done)
    rows.finish()
    return rows.done - before


def _said(recipe: Any) -> str:
    """What a row of the output is, and which file says so."""
    if recipe.output == "class scores":
        return f"A row: class scores (by {recipe.said_by})"
    normal = ", normalized" if recipe.normalize else ""
    return f"A row: {recipe.pooling} pooling{normal} (by {recipe.said_by})"


def _line(run: Any) -> str:
    return f"{run.setup.engine} {run.setup.precision}: {run.failure or f'{run.texts_per_second:,.0f} texts/s'}"


def race_table(race: Any) -> Table:
    """Every contestant that ran, the fastest first. cosine: of the text that agrees least; diff:
    the largest of any number."""
    numbers = ("batch", "texts/s", "cosine", "diff", "load s")
    table = show.new_table("Race, from memory" if race.recalled else "Race", "engine", "precision", numbers=numbers)
    ran = [run for run in race.runs if not run.failure]
    for run in sorted(ran, key=lambda run: -run.texts_per_second):
        table.add_row(
            run.setup.engine, run.setup.precision, f"{run.setup.token_budget:,}", f"{run.texts_per_second:,.0f}",
            f"{run.worst_cosine:.5f}", f"{run.largest_difference:.1e}", f"{run.load_seconds:.1f}",
            style="bold green" if run.setup == race.chosen else None,
        )  # fmt: skip
    return table
