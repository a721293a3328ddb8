"""Run ``upshift train``: plan, prove, train and save."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import tables, train_xla
from upshift.cli.options import number, with_layout_flags
from upshift.cli.plan.command import Allow, FourBits, GlobalBatch, Json, LoraRank, Model, SequenceLength, Set, adapter_line, split
from upshift.cli.progress import activity
from upshift.importing import importing
from upshift.record import Record
from upshift.settings import read_ranks
from upshift.training.arguments import DEFAULT_OUTPUT, SEEDS, TRIAL_SECONDS, Arguments, TrainRequest
from upshift.units import GIB, format_bytes, format_seconds

Data = Annotated[
    str, typer.Option("--data", help="text, JSON, CSV, Parquet, a folder of them, or a saved datasets directory (docs/data.md)")
]
MupBase = Annotated[
    str | None, typer.Option("--mup-base", help="muP: a narrower model or config.json whose learning rate is to hold here")
]
Heal = Annotated[
    bool, typer.Option("--heal", help="of several processes (--nproc) one that is killed comes back, and the others go on")
]
Epochs = Annotated[float, number("--epochs", None, least=0.001)]
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
    text_column: Annotated[str | None, typer.Option("--text-column", help="the column that holds the text, if not text")] = None,
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
    if train_xla.is_asked(backend):
        train_xla.run(request, as_json=as_json)
        return
    with importing():
        from upshift.training.run import run_training

    adapter = None if lora_rank is None else adapter_line(lora_rank, load_in_4bit)
    with RunDisplay(quiet=as_json or not _speaks(), title=adapter) as display:
        record = run_training(request, display.watcher)
    if record is not None:
        _print(record, as_json=as_json)


def request_of(given: dict[str, Any]) -> TrainRequest:
    """Return the request of a training run. ``given``: all options of the command, by name."""
    fields = {name: given[name] for name in TrainRequest.model_fields if name in given}
    fields |= {"plan_file": given["plan"], "fixed": tuple(given["set_"] or ()), "allow": split(given["allow"])}
    return TrainRequest.of(fields, {name: given[name] for name in Arguments.model_fields if name in given})


def _speaks() -> bool:
    """Return whether this process is the first of the ranks that a launcher started, or the only one."""
    ranks = read_ranks()
    return ranks is None or ranks.rank == 0


def _print(record: Record, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(record.to_json() + "\n")
    elif record.predicted is not None and record.measured is not None:
        tables.out.print(tables.prediction_table(record.predicted, record.measured))
        tables.out.print(f"Held-out loss {tables.number(record.measured.evaluation_loss, 4)}. Model saved in {record.checkpoint}")


class RunDisplay:
    """Bars and lines of a run on standard error: tokenizing, tracing, trials, training."""

    def __init__(self, *, quiet: bool = False, title: str | None = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.quiet, self.title = quiet, title
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=tables.err, transient=True, disable=quiet)
        self._tasks: dict[str, Any] = {}
        self.predicted_bytes: float | None = None
        self._open = ExitStack()

    def __enter__(self) -> RunDisplay:
        self.progress.start()
        self._now = self._open.enter_context(activity("Reading the data"))
        if self.title is not None:
            self._print(self.title)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.progress.stop()

    @property
    def watcher(self) -> Any:
        from upshift.training.run import Watcher

        return Watcher(
            tokenizing=lambda done, total: self._show("Tokenizing", done, total),
            tracing=lambda done, total: self._show("Tracing the model", done, total),
            planned=self._planned,
            trying=lambda plan: self._show(f"Trial {plan.label()}"[:90], None, None, key="trial"),
            tried=self._tried,
            proved=self._proved,
            ready=self._ready,
            event=self._event,
        )

    def _show(self, title: str, done: float | None, total: float | None, *, text: str = "", key: str | None = None) -> None:
        name = key or title
        if name not in self._tasks:
            for task in self._tasks.values():
                self.progress.update(task, visible=False)
            self._tasks[name] = self.progress.add_task(title, total=total, text=text)
        self.progress.update(self._tasks[name], description=title, completed=done or 0, total=total, text=text)
        self._now.update(done, total, title=title if key is None or done is None else key, text=text and f"{title}, {text}")
        if key is None and total and done is not None and done >= total:
            self._now.update(title="Planning")  # whatever comes between what is counted

    def _planned(self, planning: Any) -> None:
        self._now.update(title="Choosing among the plans")
        best = planning.ranking.candidates[0]
        self._print(
            f"[dim]{len(planning.ranking.candidates):,} plans fit {planning.host.name}; best predicted: {best.plan.label()}, "
            f"{best.tokens_per_second:,.0f} tokens/s[/dim]"
        )

    def _tried(self, tried: Any) -> None:
        said = f"{tried.best.tokens_per_second:,.0f} tokens/s" if tried.ok else f"[red]{tried.failure}[/red]"
        self._print(f"[dim]tried {tried.candidate.plan.label()}: {said}[/dim]")

    def _proved(self, proof: Any) -> None:
        for note in proof.notes:
            self._print(f"[dim]{note}[/dim]")

    def _ready(self, prepared: Any) -> None:
        self._now.update(title="Loading the model")
        held = prepared.predicted.resident_gib
        self.predicted_bytes = held * GIB if held else None
        self._print(f"[bold]Plan: {prepared.plan.label()}[/bold]")

    def named(self, name: str, predicted_bytes: float | None) -> Any:
        """An event callback for one of several runs."""

        def show_event(event: Any) -> None:
            known, self.predicted_bytes = self.predicted_bytes, predicted_bytes or self.predicted_bytes
            self._event(event, name=name)
            self.predicted_bytes = known

        return show_event

    def _event(self, event: Any, *, name: str = "Step") -> None:
        kind = type(event).__name__
        if kind == "StepDone":
            held = format_bytes(event.resident_bytes)
            against = f" of {format_bytes(self.predicted_bytes)} predicted" if self.predicted_bytes else ""
            speed, left = f"{event.tokens_per_second:,.0f} tokens/s", format_seconds(event.seconds_left)
            text = f"loss {event.loss:.3f} · {speed} · {held}{against} · {left} left"
            self._show(f"{name} {event.step}/{event.max_steps}", event.step, event.max_steps, text=text, key=name)
        elif kind == "OutOfMemory":
            self._print(
                f"[yellow]step {event.step} ran out of memory: {event.verdict}; it goes on with micro-batches of "
                f"{event.smaller[0]} x {event.smaller[1]} tokens, {event.largest[0]} x {event.largest[1]} before, and the same "
                f"gradients; {event.autopsy}[/yellow]"
            )
        elif kind == "Doubted":
            self._print(f"[yellow]{event.words}[/yellow]")
        elif kind == "Waited":
            self._print(f"[yellow]step {event.step}: {event.words}[/yellow]")
        elif kind == "Evaluated":
            self._print(f"[dim]held-out loss after {event.tokens:,} tokens: {event.loss:.4f}[/dim]")
        elif kind == "Saved":
            self._print(f"[dim]saved {event.path}[/dim]")
        elif kind == "Started":
            self._now.update(title="The first step")
            if event.resumed_from:
                self._print(f"[dim]resumed from {event.resumed_from} after step {event.step}[/dim]")

    def _print(self, text: str) -> None:
        if not self.quiet:
            self.progress.console.print(text, highlight=False)
