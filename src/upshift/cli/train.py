"""Run ``upshift train``: plan, prove, train and save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import tables, train_xla
from upshift.cli.options import (
    Allow,
    DataFormat,
    Epochs,
    FourBits,
    GlobalBatch,
    Json,
    LongRows,
    LoraRank,
    LossOn,
    Model,
    SequenceLength,
    Set,
    TextColumn,
    split_names,
    with_layout_flags,
)
from upshift.cli.run_display import RunDisplay
from upshift.importing import importing
from upshift.record import Record
from upshift.settings import read_ranks
from upshift.training.arguments import DEFAULT_OUTPUT, SEEDS, TRIAL_SECONDS, Arguments, TrainRequest

Data = Annotated[
    str, typer.Option("--data", help="text, JSON, CSV, Parquet, a folder of them, or a saved datasets directory (docs/data.md)")
]
MupBase = Annotated[
    str | None, typer.Option("--mup-base", help="muP: a narrower model or config.json whose learning rate is to hold here")
]
Heal = Annotated[
    bool, typer.Option("--heal", help="of several processes (--nproc) one that is killed comes back, and the others go on")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=SEEDS - 1)]
TrialSeconds = Annotated[float, typer.Option("--trial-seconds", min=0.0, help="budget for trials; 0: trust the prediction")]


@with_layout_flags
def command(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the trained model goes")] = DEFAULT_OUTPUT,
    sequence_length: SequenceLength = None,
    global_batch: GlobalBatch = 8,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="optimizer steps; default: one epoch")] = None,
    epochs: Epochs = 1.0,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0)] = 5e-5,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=0)] = 0,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0)] = 0.0,
    max_grad_norm: Annotated[float, typer.Option("--max-grad-norm", min=0.0)] = 1.0,
    lr_scheduler_type: Annotated[str, typer.Option("--lr-scheduler-type")] = "linear",
    seed: Seed = 42,
    eval_steps: Annotated[int, typer.Option("--eval-steps", min=0)] = 0,
    save_steps: Annotated[int, typer.Option("--save-steps", min=0)] = 0,
    save_total_limit: Annotated[int, typer.Option("--save-total-limit", min=2, help="newest checkpoints that are kept")] = 2,
    from_config: Annotated[bool, typer.Option("--from-config", help="random weights")] = False,
    mup_base: MupBase = None,
    lora_rank: LoraRank = None,
    load_in_4bit: FourBits = False,
    text_column: TextColumn = None,
    data_format: DataFormat = None,
    loss_on: LossOn = None,
    long_rows: LongRows = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="a plan written by upshift plan --json; no trials")] = None,
    set_: Set = None,
    allow: Allow = "",
    trial_seconds: TrialSeconds = TRIAL_SECONDS,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in the output directory")] = False,
    heal: Heal = False,
    as_json: Json = False,
    backend: train_xla.Backend = "torch",
) -> None:
    """Plan, prove and run the training of MODEL on DATA; Ctrl-C saves a checkpoint that --resume continues."""
    request = request_of(locals())
    if train_xla.is_xla(backend):
        train_xla.run(request, as_json=as_json)
        return
    with importing():
        from upshift.training.run import run_training

    adapter = None if lora_rank is None else tables.adapter_line(lora_rank, load_in_4bit)
    with RunDisplay(quiet=as_json or not _is_first_rank(), title=adapter) as display:
        record = run_training(request, display.watcher)
    if record is not None:
        _print_record(record, as_json=as_json)


def request_of(options: dict[str, Any]) -> TrainRequest:
    """Return the request of a training run. ``options``: all options of the command, by name."""
    fields = {name: options[name] for name in TrainRequest.model_fields if name in options}
    fields |= {"plan_file": options["plan"], "fixed": tuple(options["set_"] or ()), "allow": split_names(options["allow"])}
    return TrainRequest.of(fields, {name: options[name] for name in Arguments.model_fields if name in options})


def _is_first_rank() -> bool:
    """Return True in the first of the ranks that a launcher started, and in a process that no launcher started."""
    ranks = read_ranks()
    return ranks is None or ranks.rank == 0


def _print_record(record: Record, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(record.to_json() + "\n")
    elif record.predicted is not None and record.measured is not None:
        tables.out.print(tables.prediction_table(record.predicted, record.measured))
        tables.out.print(f"Held-out loss {tables.number(record.measured.evaluation_loss, 4)}. Model saved in {record.checkpoint}")
