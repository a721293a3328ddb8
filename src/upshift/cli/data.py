"""Run ``upshift data show``, which prints what a model learns of its data, and ``upshift data to-tfrecord``.

``to-tfrecord`` tokenizes once, for all runs, and writes TFRecord files, which a TPU's host reads fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import (
    Data,
    EvalSizeOption,
    Model,
    ObjectiveOption,
    SequenceLength,
    option,
    with_row_options,
)
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.help_page import Panel
from upshift.training.arguments import SEEDS
from upshift.training.data.data_options import DataOptions

if TYPE_CHECKING:
    from upshift.models.source import ModelSource
    from upshift.training.data.dataset import TrainingData
    from upshift.training.tasks.prepare import TaskModel

app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True, help="See what a model learns of its data, or write data as a backend reads it best.",
    epilog="upshift data to-tfrecord MODEL --data texts.jsonl --output records",
)  # fmt: skip
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
Rows = Annotated[int, option("--rows", text="How many sequences or pairs to print.", panel=Panel.OUTPUT, metavar="N", least=1)]
LEARNED_STYLE = "bold green"
LEARNED_BRACKETS = ("[[", "]]")  # around what is learned, where there is no colour


@app.command("show", cls=HelpCommand, epilog="upshift data show MODEL --data chats.jsonl")
@with_row_options
def show(
    model: Model,
    data: Data,
    row_options: dict[str, Any],
    objective: ObjectiveOption = None,
    sequence_length: SequenceLength = None,
    rows: Rows = 3,
    eval_size: EvalSizeOption = None,
) -> None:
    """Print the first sequences of DATA, with what MODEL learns in colour, and count tokens."""
    options = DataOptions.from_fields({**row_options, "objective": objective, "eval_size": eval_size})
    from upshift.models.source import find_model_to_train
    from upshift.training.data.corpus import check_paths

    source = find_model_to_train(model, has_reward_head=options.has_reward_head)
    check_paths(data)  # before the imports, which take seconds
    from upshift.training.data.dataset import prepare_data
    from upshift.training.data.show import count_tokens, show_sequences
    from upshift.training.tasks.prepare import find_task_model

    task = find_task_model(source, data, options)
    if task is not None:
        _show_task(source, task, data, options, sequence_length=sequence_length, rows=rows)
        return
    prepared = prepare_data(source, data, sequence_length=sequence_length, options=options)
    for number, parts in enumerate(show_sequences(prepared, rows * options.rows_together), start=1):
        tables.dim(_title(number, prepared))
        tables.out.print(_marked_text(parts), soft_wrap=True)
    counts = count_tokens(prepared)
    learned = "drawn at random while the model is trained"
    if counts.num_learned is not None:
        learned = f"{counts.num_learned:,} ({counts.num_learned / max(counts.num_tokens, 1):.0%})"
    num_examples = f"{counts.num_sequences // options.rows_together:,} {prepared.objective.examples}"
    evaluated = f"{len(prepared.evaluation or ()) // options.rows_together:,} to evaluate on"
    tables.out.print(
        f"{prepared.summary.num_documents:,} rows, {num_examples} to train on, {evaluated}\n"
        f"{counts.num_tokens:,} tokens; {'compared' if options.has_pairs else 'trained on'}: {learned}",
        highlight=False,
    )


def _show_task(
    source: ModelSource, task: TaskModel, data: str, options: DataOptions, *, sequence_length: int | None, rows: int
) -> None:
    """Print the first rows of images or sounds, with what the model learns, and count the rows."""
    from upshift.training.data.show import TextPart
    from upshift.training.tasks.prepare import prepare_task

    prepared = prepare_task(source, task, data, options, sequence_length=sequence_length)
    for number in range(min(rows, len(prepared.training))):
        tables.dim(f"row {number + 1}")
        parts = [TextPart(text, is_learned) for text, is_learned in prepared.describe(prepared.training[number])]
        tables.out.print(_marked_text(parts), soft_wrap=True)
    evaluated = len(prepared.evaluation or ())
    tables.out.print(f"{len(prepared.training):,} rows to train on, {evaluated:,} to evaluate on", highlight=False)


def _title(number: int, data: TrainingData) -> str:
    """Return the title of a sequence. Sequences of pairs alternate: chosen, rejected; or rated, mismatched."""
    if not data.objective.has_pairs:
        return f"sequence {number}"
    example = (number + 1) // 2
    if not data.objective.has_ratings:
        return f"pair {example}, {'chosen' if number % 2 else 'rejected'}"
    if number % 2 == 0:
        return f"completion {example}, for the KL term: its prompt with the completion of another row"
    assert data.training.ratings is not None
    return f"completion {example}, {'good' if data.training.ratings[number - 1] else 'bad'}"


def _marked_text(parts: Any) -> Text:
    """Return the parts of a sequence as one text: what is learned in colour, or in brackets where there is no colour."""
    has_colour = tables.out.color_system is not None and not tables.out.no_color
    before, after = ("", "") if has_colour else LEARNED_BRACKETS
    text = Text()
    for part in parts:
        if part.is_learned:
            text.append(f"{before}{part.text}{after}", style=LEARNED_STYLE)
        else:
            text.append(part.text)
    return text


@app.command("to-tfrecord", cls=HelpCommand, epilog="upshift data to-tfrecord MODEL --data texts.jsonl --output records")
@with_row_options
def to_tfrecord(
    model: Model,
    data: Data,
    output: Output,
    row_options: dict[str, Any],
    sequence_length: SequenceLength = None,
    shards: Shards = 1,
    eval_size: EvalSizeOption = None,
    seed: Seed = 42,
) -> None:
    """Tokenize data once, and write it as TFRecord files for upshift train --backend xla."""
    options = DataOptions.from_fields({**row_options, "eval_size": eval_size})
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow("upshift data to-tfrecord")
    from upshift.models.source import find_model
    from upshift.training.data.dataset import prepare_data
    from upshift.xla.data.tfrecord import write_records

    prepared = prepare_data(find_model(model), data, sequence_length=sequence_length, options=options)
    pad_token_id = prepared.objective.pad_token_id
    index = write_records(_examples(prepared, seed), output, pad_token_id=pad_token_id, shards=shards)
    tables.out.print(f"{index.num_examples:,} sequences, {index.num_tokens:,} tokens, in {output}", highlight=False)
    num_held_out = len(prepared.evaluation or ())
    if num_held_out:
        tables.dim(f"{num_held_out:,} sequences are held out for evaluation, and are not written")


def _examples(prepared: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the arrays of one sequence at a time, as training would batch it alone."""
    from upshift.training.batches.collate import fill_micro_batch
    from upshift.training.batches.layout import Layout, RowGroup

    layout = Layout(micro_batch=1, pad_multiple=1)
    for index, length in enumerate(prepared.training.lengths.tolist()):
        batch = fill_micro_batch(RowGroup(((index,),), length), prepared.training, layout, prepared.objective, seed=seed, epoch=0)
        yield {name: batch.arrays[name][0] for name in ("input_ids", "labels")}
