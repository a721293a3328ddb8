"""Turn the images and sounds of ``upshift encode --input`` into rows, by the fastest engine that has the requested quality, or
into the results of the model's task."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from upshift.cli import tables
from upshift.cli.progress import importing_libraries
from upshift.cli.tables import describe_copies, dim, print_race_notes, race_table, run_printer
from upshift.errors import RequestError
from upshift.inference.workers.options import LEAST_MEDIA, WorkerOptions, encoding_workers

BLOCK = 256  # items between two records of the progress
LEAST_BLOCK = 16  # items that a worker computes together
UNIT = "items/s"


class MediaOptions(NamedTuple):
    """The options of the command for images and sounds."""

    quality: str
    engine: str | None
    race_seconds: float | Literal["run"]
    workers: WorkerOptions
    overwrite: bool
    as_json: bool


def refuse_options(query: str | None, task: str | None, max_latency_ms: float | None, tensor_parallel: int | None) -> None:
    """Raise RequestError for an option that is set and that images and sounds do not have."""
    for option, value in (
        ("--query", query), ("--task", task), ("--max-latency-ms", max_latency_ms), ("--tensor-parallel", tensor_parallel),
    ):  # fmt: skip
        if value is not None:
            raise RequestError(
                f"{option} {value} is for vectors and scores of texts, without images, sounds and --labels; leave it out"
            )


def encode_media(model: str, path: Path, output: Path, options: MediaOptions) -> None:
    """Encode the images and sounds of a folder or of JSON lines. Refuse bad files before the model is loaded."""
    from upshift.inference.encoding.files import check_vector_output
    from upshift.inference.media.files import read_media, with_whole_paths
    from upshift.inference.weights import find_weights
    from upshift.loading.media_files import check_media

    check_vector_output(path, output, overwrite=options.overwrite)
    items = read_media(path)
    check_media(items)
    find_weights(model)
    with importing_libraries():
        from upshift.inference.media.encoder import SAMPLE_ITEMS, MediaEncoder
        from upshift.inference.race.types import pick_evenly

    arguments: dict[str, Any] = {
        "model": model, "quality": options.quality, "engine": options.engine, "race_seconds": options.race_seconds,
    }  # fmt: skip
    with tables.step("Reading the model"):
        encoder = MediaEncoder(**arguments, on_run=run_printer(UNIT))
        encoder.check(items)
    with encoding_workers(encoder, options.workers, arguments, len(items), least=LEAST_MEDIA) as pool:
        with tables.step("Racing the installed engines on a sample of the files"):
            sample = pick_evenly(with_whole_paths(items), SAMPLE_ITEMS)
            (pool or encoder).prepare_sample(sample, len(items))
        start = time.perf_counter()
        num_encoded = _encode(encoder, pool, path, items, output)
        seconds = time.perf_counter() - start
        copies = describe_copies(None if pool is None else pool.size)
    race: Any = encoder.race
    if options.as_json:
        document = {
            "race": race.model_dump(mode="json"), "items": len(items), "encoded": num_encoded, "seconds": seconds,
            "output": str(output),
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    dim(f"A row: {encoder.config.kind} (by the model's class)")
    if race.runs:
        tables.out.print(race_table(race, "batch", UNIT, {"load s": lambda run: f"{run.load_seconds:.1f}"}))
    print_race_notes(race, UNIT)
    tables.out.print(f"Chosen: {race.chosen.label()}, batches of {race.chosen.batch:,}{copies}")
    rate = f", {num_encoded / seconds:,.1f} a second" if num_encoded and seconds else ""
    tables.out.print(f"{len(items):,} rows in {output} ({num_encoded:,} encoded now{rate})")


def predict(
    model: str, path: Path, output: Path, labels: Sequence[str] | None, template: str | None, options: MediaOptions
) -> None:
    """Write the results of the model's task for the items of a folder, of JSON lines, or of a file of texts. Refuse bad items
    before the model is loaded."""
    from upshift.inference.encoding.files import check_texts
    from upshift.inference.media.files import read_labels, read_media
    from upshift.inference.media.results import SUFFIX, check_files_folder, check_no_item_within
    from upshift.inference.resumable_output import check_output
    from upshift.inference.weights import find_weights

    _refuse_race_options(options)
    given = read_labels(labels, template)
    find_weights(model)
    if not path.is_dir():
        check_texts(path, "--input")
    check_output(output, (SUFFIX,), path, overwrite=options.overwrite)
    check_files_folder(output, path, overwrite=options.overwrite)
    items = read_media(path)
    check_no_item_within(output, items)
    with importing_libraries():
        from upshift.inference.media.predict import Predictor

    with tables.step("Reading the model"):
        predictor = Predictor(model, given)
        predictor.check(items)
    start = time.perf_counter()
    num_new = _predict(predictor, path, items, output)
    seconds = time.perf_counter() - start
    if options.as_json:
        document = {
            "task": predictor.task, "items": len(items), "encoded": num_new, "seconds": seconds, "output": str(output),
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    dim(f"A line: the result of transformers' pipeline {predictor.task} (by the model's class)")
    rate = f", {num_new / seconds:,.1f} a second" if num_new and seconds else ""
    tables.out.print(f"{len(items):,} results in {output} ({num_new:,} computed now{rate})")


def _refuse_race_options(options: MediaOptions) -> None:
    """Raise RequestError for an option of races, engines and workers that is set, because transformers alone computes."""
    given = {
        "--quality": None if options.quality == "exact" else options.quality,
        "--engine": None if options.engine == "torch" else options.engine,
        "--race-seconds": None if options.race_seconds == "run" else options.race_seconds,
        "--replicas": options.workers.replicas,
        "--ray": options.workers.on_ray or None,
    }
    for option, value in given.items():
        if value is not None:
            raise RequestError(
                f"{option} {value} is for rows of numbers; transformers' pipeline alone computes these results: leave it out"
            )


def _predict(predictor: Any, path: Path, items: list[Any], output: Path) -> int:
    """Compute the results. Return the number computed now, without those that an earlier, interrupted run had done."""
    from upshift.inference.media.results import ResultLines
    from upshift.inference.resumable_output import read_blocks

    lines = ResultLines(output, len(items), _identity(path, predictor.source, items, predictor.settings))
    num_resumed = lines.done
    with closing(lines), tables.bar("Computing") as update:
        update(num_resumed, len(items))
        for block in read_blocks(iter(items), size=LEAST_BLOCK, skip=num_resumed):
            lines.add(block, predictor.predict(block))
            update(lines.done, len(items))
        lines.finish()
    return int(lines.done - num_resumed)


def _identity(path: Path, source: Any, items: list[Any], *by: str) -> str:
    """Return a text that identifies the input, the model and the further texts ``by``."""
    from upshift.inference.resumable_output import output_identity
    from upshift.inference.weights import files_identity

    files = files_identity(Path(item.content) for item in items if item.modality != "text")
    return output_identity(path, source, *by, files, repr([item.content for item in items]))


def _encode(encoder: Any, workers: Any, path: Path, items: list[Any], output: Path) -> int:
    """Encode the items. Return the number encoded now, without those that an earlier, interrupted run had done."""
    from upshift.inference.encoding.files import Rows
    from upshift.inference.media.files import with_whole_paths
    from upshift.inference.resumable_output import read_blocks

    setup = encoder.race.chosen.changed(batch=1)  # the rows are the same at any batch size
    identity = _identity(path, encoder.source, items, setup.to_json(), encoder.config.to_json())
    rows = Rows(output, len(items), identity)
    num_resumed = rows.done
    with closing(rows), tables.bar("Encoding") as update:
        update(num_resumed, len(items))
        size = BLOCK if workers is None else workers.block_size(len(items), BLOCK, least=LEAST_BLOCK)
        blocks = read_blocks(iter(with_whole_paths(items)), size=size, skip=num_resumed)
        for results in map(encoder.rows, blocks) if workers is None else workers.encode(blocks, "rows"):
            rows.add(results)
            update(rows.done, len(items))
        rows.finish()
    return int(rows.done - num_resumed)
