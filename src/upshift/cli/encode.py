"""Run ``upshift encode``: turn the texts of a file into vectors, or into scores of texts, pairs of texts or tokens, by the
fastest engine that has the requested quality."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.table import Table

from upshift.cli import tables
from upshift.cli.encode_media import MediaOptions, encode_media, predict, refuse_options
from upshift.cli.options import (
    Engine,
    Json,
    MaxLatency,
    Model,
    OnRay,
    Overwrite,
    Quality,
    RaceSeconds,
    TensorParallel,
    WorkerReplicas,
    option,
)
from upshift.cli.progress import importing_libraries
from upshift.cli.tables import describe_copies, dim, print_race_notes, race_table, run_printer
from upshift.cli.usage.help_page import Panel
from upshift.inference.workers.options import WorkerOptions, encoding_workers, refuse_ranks
from upshift.settings import wait_briefly

Input = Annotated[
    Path,
    option(
        "--input", "-i",
        text='The texts: a .txt file with one text in each line, or .jsonl with the field "text" or "prompt". For a '
        'cross-encoder: .jsonl with the fields "query" and "document", or "text" and "text_pair". For images and sounds: a '
        'folder of them, or .jsonl with the field "image" or "audio", the path of a file.',
        panel=Panel.MODEL, metavar="PATH",
    ),
]  # fmt: skip
Query = Annotated[
    str | None,
    option("--query", text="Score each text of --input for this query, with a cross-encoder.", panel=Panel.MODEL, metavar="TEXT"),
]
Task = Annotated[
    str | None,
    option(
        "--task", panel=Panel.MODEL, metavar="NAME",
        text="What the texts are: query or document, for models that encode the two in different ways.",
    ),
]  # fmt: skip
Labels = Annotated[
    list[str] | None,
    option(
        "--labels", panel=Panel.MODEL, metavar="NAMES",
        text="Score these labels by a model of images and texts (CLIP, SigLIP), or for texts by a model of entailment (NLI). "
        "Give names with commas between them, or a .txt file with one in each line. If you repeat the option, each value is one "
        "label.",
    ),
]  # fmt: skip
Template = Annotated[
    str | None,
    option(
        "--label-template", panel=Panel.MODEL, metavar="TEXT",
        text="The sentence with {} in the place of a label, such as 'I see {}.' Default: that of transformers' pipeline.",
    ),
]  # fmt: skip
Output = Annotated[
    Path,
    option(
        "--output", "-o", panel=Panel.OUTPUT, metavar="PATH",
        text="The file for the results: .npy or .parquet. For results of tokens, and sparse vectors: .parquet or .jsonl. For "
        "masks, depth, boxes and scores of labels of images: .jsonl.",
    ),
]  # fmt: skip


def command(
    model: Model,
    texts: Input,
    output: Output,
    query: Query = None,
    task: Task = None,
    labels: Labels = None,
    label_template: Template = None,
    quality: Quality = "exact",
    engine: Engine = None,
    max_latency_ms: MaxLatency = None,
    race_seconds: RaceSeconds = None,
    replicas: WorkerReplicas = None,
    tensor_parallel: TensorParallel = None,
    on_ray: OnRay = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Turn texts, images or sounds into vectors, or texts or pairs of texts into scores. Tests the installed engines on some of
    the input, and uses the fastest one."""
    wait_briefly()
    refuse_ranks("encode")
    from upshift.inference.encoding.files import check_files, check_query, check_task, holds_pairs
    from upshift.inference.media.files import holds_media
    from upshift.inference.media.results import SUFFIX as RESULTS_SUFFIX
    from upshift.inference.weights import find_weights

    longest_race: float | Literal["run"] = "run" if race_seconds is None else race_seconds
    workers = WorkerOptions(replicas, on_ray)
    media_options = MediaOptions(quality, engine, longest_race, workers, overwrite, as_json)
    if labels or label_template is not None or (holds_media(texts) and output.suffix == RESULTS_SUFFIX):
        refuse_options(query, task, max_latency_ms, tensor_parallel)
        predict(model, texts, output, labels, label_template, media_options)
        return
    if holds_media(texts):
        refuse_options(query, task, max_latency_ms, tensor_parallel)
        encode_media(model, texts, output, media_options)
        return
    check_files(texts, output, overwrite=overwrite)
    check_query(texts, query)
    checked_task = check_task(task, has_query=query is not None)
    has_pairs = query is not None or holds_pairs(texts)
    source = find_weights(model)  # a wrong path is refused before libraries are imported
    with importing_libraries():
        from upshift.inference.media.model import encodes_media

    if encodes_media(source):  # texts that are compared with images or sounds
        refuse_options(query, task, max_latency_ms, tensor_parallel)
        encode_media(model, texts, output, media_options)
        return
    arguments: dict[str, Any] = {
        "model": model, "quality": quality, "engine": engine, "max_latency_ms": max_latency_ms, "race_seconds": longest_race,
        "tensor_parallel": tensor_parallel or 1, **({} if has_pairs else {"task": checked_task}),
    }  # fmt: skip
    _encode_texts(arguments, texts, query, output, workers, has_pairs=has_pairs, as_json=as_json)


def _encode_texts(
    arguments: dict[str, Any], texts: Path, query: str | None, output: Path, workers: WorkerOptions, *, has_pairs: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Race the engines on some of the texts, or pairs of texts, and encode all of them. ``arguments``: those of the encoder."""
    with importing_libraries():
        from upshift.inference.encoding.cross_encoder import CrossEncoder
        from upshift.inference.encoding.encoder import Encoder
        from upshift.inference.encoding.files import check_form, read_items
        from upshift.inference.race.types import pick_evenly_from_stream
        from upshift.inference.resumable_output import count_lines

    with tables.step("Reading the model"):
        encoder = (CrossEncoder if has_pairs else Encoder)(**arguments, on_run=run_printer("texts/s"))
        check_form(output, encoder.config.output)
        total = count_lines(texts)
        encoder.check_lengths(read_items(texts, query))
    with encoding_workers(encoder, workers, arguments, total) as pool:
        with tables.step("Racing the installed engines on a sample of the texts"):
            sample = encoder.take_sample(lambda count: pick_evenly_from_stream(read_items(texts, query), total, count), total)
            (pool or encoder).prepare_sample(sample, total)
        start = time.perf_counter()
        num_encoded = _encode(encoder, pool, texts, query, output, total)
    copies = None if pool is None else pool.size
    _report(encoder, copies, output, total, num_encoded, time.perf_counter() - start, as_json=as_json)


def _report(
    encoder: Any, copies: int | None, output: Path, total: int, num_encoded: int, seconds: float, *, as_json: bool
) -> None:
    """Print the race, and how many texts were encoded in how many seconds. ``copies``: of the model, that shared the texts."""
    race: Any = encoder.race
    if as_json:
        document = {
            "race": race.model_dump(mode="json"), "texts": total, "encoded": num_encoded, "seconds": seconds,
            "output": str(output),
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    dim(_describe_row(encoder.config))
    if race.runs:
        tables.out.print(_encode_race_table(race))
    print_race_notes(race, "texts/s")
    tables.out.print(f"Chosen: {race.chosen.label()}, batches of {race.chosen.batch:,} tokens{describe_copies(copies)}")
    rate = f", {num_encoded / seconds:,.0f} a second" if num_encoded and seconds else ""
    tables.out.print(f"{total:,} texts in {output} ({num_encoded:,} encoded now{rate})")


def _encode(encoder: Any, workers: Any, texts: Path, query: str | None, output: Path, total: int) -> int:
    """Encode the texts. Return the number encoded now, without those that an earlier, interrupted run had done."""
    from upshift.inference.encoding.files import LISTS, Rows, read_items
    from upshift.inference.encoding.list_rows import ListRows
    from upshift.inference.resumable_output import output_identity, read_blocks

    setup = encoder.race.chosen.changed(batch=1)  # the rows are the same at any batch size
    identity = output_identity(texts, encoder.source, setup.to_json(), encoder.config.to_json(), query or "")
    rows: Any
    if encoder.config.output in LISTS:
        rows = ListRows(output, total, identity, encoder.config.output, encoder.labels)
        method = "token_scores" if encoder.config.output == "token scores" else "encode"
    else:
        rows = Rows(output, total, identity)
        method = "rows"
    num_resumed = rows.done
    size = rows.block if workers is None else workers.block_size(total, rows.block)
    with closing(rows), tables.bar("Encoding") as update:
        update(num_resumed, total)
        blocks = read_blocks(read_items(texts, query), size=size, skip=num_resumed)
        for results in map(getattr(encoder, method), blocks) if workers is None else workers.encode(blocks, method):
            rows.add(results)
            update(rows.done, total)
        rows.finish()
    return int(rows.done - num_resumed)


def _describe_row(recipe: Any) -> str:
    """Return a sentence about a row of the output, and the file that determines it."""
    if recipe.pairs:
        return f"A row: the scores of a pair, activation {recipe.activation} (by {recipe.said_by})"
    if recipe.output == "class scores":
        return f"A row: class scores (by {recipe.said_by})"
    if recipe.output == "token scores":
        return f"A row: tokens of a text, where each starts and ends, its likeliest label and that score (by {recipe.said_by})"
    if recipe.output == "sparse vectors":
        return f"A row: the tokens of the vocabulary with a weight, by {recipe.sparse_pooling} (by {recipe.said_by})"
    normal = ", normalized" if recipe.normalize else ""
    prompt = f", of the prompt {recipe.prompt!r} and the text" if recipe.prompt else ""
    if recipe.output == "token vectors":
        return f"A row: a vector for each token{normal}{prompt} (by {recipe.said_by})"
    return f"A row: {recipe.pooling} pooling{normal}{prompt} (by {recipe.said_by})"


def _encode_race_table(race: Any) -> Table:
    """Return the race's table. slowest: of batches that ran alone; cosine: of the text, or token, that agrees least."""
    columns = {"load s": lambda run: f"{run.load_seconds:.1f}"}
    if race.chosen.hint == "latency":
        columns = {"slowest ms": lambda run: f"{1e3 * run.first_seconds:.1f}", **columns}
    return race_table(race, "batch", "texts/s", columns)
