"""Run ``upshift data to-tfrecord``: tokenize once, for all runs, and write TFRecord files, which a TPU's host reads fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.options import DATA_TEXT, Model, SequenceLength, TextColumn, option
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.help_page import Panel
from upshift.training.arguments import SEEDS

app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True, help="Convert data to the form that a backend reads best.",
    epilog="upshift data to-tfrecord MODEL --data texts.jsonl --output records",
)  # fmt: skip
Data = Annotated[str, option("--data", text=f"{DATA_TEXT}.", panel=Panel.MODEL, metavar="PATH")]
Output = Annotated[
    str,
    option("--output", "-o", text="A new folder: a local path, or gs://bucket/folder.", panel=Panel.OUTPUT, metavar="PATH"),
]
Shards = Annotated[
    int,
    option(
        "--shards", text="The number of files. A TPU pod reads best from at least one for each host.", panel=Panel.OUTPUT,
        metavar="N", least=1,
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    option(
        "--seed", text="The seed of the tokens that a masked language model must find.", panel=Panel.OUTPUT, metavar="N",
        least=0, most=SEEDS - 1,
    ),
]  # fmt: skip


@app.command("to-tfrecord", cls=HelpCommand, epilog="upshift data to-tfrecord MODEL --data texts.jsonl --output records")
def to_tfrecord(
    model: Model,
    data: Data,
    output: Output,
    sequence_length: SequenceLength = None,
    shards: Shards = 1,
    text_column: TextColumn = None,
    seed: Seed = 42,
) -> None:
    """Tokenize data once, and write it as TFRecord files for upshift train --backend xla."""
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
