"""Run ``upshift data to-tfrecord``: tokenize once, for all runs, and write TFRecord files, which a TPU's host reads fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.options import Model, SequenceLength

app = typer.Typer(no_args_is_help=True, help="Data in the form that a backend reads best.")


@app.command("to-tfrecord")
def to_tfrecord(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="as in upshift train")],
    output: Annotated[str, typer.Option("--output", "-o", help="a new folder: a local path, or gs://bucket/folder")],
    sequence_length: SequenceLength = None,
    shards: Annotated[int, typer.Option("--shards", min=1, help="files; a TPU pod reads best from at least one a host")] = 1,
    text_column: Annotated[str | None, typer.Option("--text-column")] = None,
    seed: Annotated[int, typer.Option("--seed", help="of the tokens that a masked language model is to find")] = 42,
) -> None:
    """Tokenize DATA for MODEL and write it as TFRecord files, for upshift train --backend xla --data FOLDER."""
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow("upshift data to-tfrecord")
    from upshift.models.source import find_model
    from upshift.training.data.dataset import prepare_data
    from upshift.xla.data.tfrecord import write_records

    prepared = prepare_data(find_model(model), data, sequence_length=sequence_length, text_column=text_column)
    pad_token_id = prepared.objective.pad_token_id
    index = write_records(_examples(prepared, seed), output, pad_token_id=pad_token_id, shards=shards)
    tables.out.print(f"{index.num_examples:,} sequences, {index.num_tokens:,} tokens, in {output}", highlight=False)


def _examples(prepared: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the arrays of one sequence at a time, as training would batch it alone."""
    from upshift.training.batches.collate import fill_micro_batch
    from upshift.training.batches.layout import Layout, RowGroup

    layout = Layout(micro_batch=1, pad_multiple=1)
    for index, length in enumerate(prepared.training.lengths.tolist()):
        batch = fill_micro_batch(RowGroup(((index,),), length), prepared.training, layout, prepared.objective, seed=seed, epoch=0)
        yield {name: batch.arrays[name][0] for name in ("input_ids", "labels")}
