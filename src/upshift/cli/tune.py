"""Run ``upshift tune``: search hyper-parameters, with a live table of the trials on standard error."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import tables
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
    data_options_of,
    split_names,
    with_layout_flags,
)
from upshift.cli.progress import activity
from upshift.errors import MissingExtra
from upshift.importing import importing
from upshift.training.arguments import SEEDS
from upshift.units import format_seconds
from upshift.versions import installed_version

ROWS = 10  # of trials that ended, in the live table
WarmStart = Annotated[
    list[str] | None, typer.Option("--warm-start", help="output folder or database of an earlier search; repeatable")
]

MupWidth = Annotated[
    int | None,
    typer.Option("--mup-width", min=1, help="search on a copy of MODEL of this hidden_size; muP carries the result over"),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=SEEDS - 1, help="of the search, and of trials whose space has no seed")]
TRAIN_FLAGS = ("learning_rate", "warmup_steps", "weight_decay", "lr_scheduler_type", "global_batch", "sequence_length", "seed")


@with_layout_flags
def command(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="as in upshift train")],
    space: Annotated[Path, typer.Option("--space", help="a YAML file: learning_rate: {low: 1.0e-5, high: 1.0e-3, log: true}")],
    output: Annotated[Path, typer.Option("--output", "-o", help="where the study and the best models go")] = Path("upshift-tune"),
    trials: Annotated[int, typer.Option("--trials", min=1, help="of this study in all, earlier calls counted")] = 20,
    objective: Annotated[str, typer.Option("--objective", help="one or several of eval_loss,time,memory,speed")] = "eval_loss",
    pruner: Annotated[str, typer.Option("--pruner", help="ends trials early: halving, hyperband, median, none")] = "halving",
    evaluations: Annotated[int, typer.Option("--evaluations", min=1, help="of a trial, at which it may end")] = 9,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="trials at once, each with its share of cores and memory")] = 1,
    sequence_length: SequenceLength = None,
    global_batch: GlobalBatch = 8,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="of a trial; default: one epoch")] = None,
    epochs: Epochs = 1.0,
    max_hours: Annotated[float | None, typer.Option("--max-hours", min=0.0, help="start no trial after so long")] = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", min=0.0, help="likewise, by --price-per-hour")] = None,
    price_per_hour: Annotated[float | None, typer.Option("--price-per-hour", min=0.000001, help="of the machine")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="a database URL or a journal's path; default: SQLite")] = None,
    study: Annotated[str, typer.Option("--study", help="name; processes that name the same in one storage share it")] = "upshift",
    warm_start: WarmStart = None,
    mup_width: MupWidth = None,
    from_config: Annotated[bool, typer.Option("--from-config", help="random weights")] = False,
    lora_rank: LoraRank = None,
    load_in_4bit: FourBits = False,
    text_column: TextColumn = None,
    data_format: DataFormat = None,
    loss_on: LossOn = None,
    long_rows: LongRows = None,
    seed: Seed = 42,
    set_: Set = None,
    allow: Allow = "",
    trial_seconds: Annotated[float, typer.Option("--trial-seconds", min=0.0, help="to try plans, once a shape of run")] = 0.0,
    html: Annotated[Path | None, typer.Option("--html", help="write the study, drawn, to this file")] = None,
    as_json: Json = False,
) -> None:
    """Search hyper-parameters for training MODEL on DATA. The same command goes on with the study that is there."""
    _check_request(html)
    of_data = data_options_of(locals())
    with importing():
        from upshift.tuning.tune import tune

    with Display(quiet=as_json) as display:
        result = tune(
            model, data, space=space, output=output, trials=trials, objective=split_names(objective, "--objective"),
            pruner=pruner,
            evaluations=evaluations, jobs=jobs, max_hours=max_hours, max_cost=max_cost, price_per_hour=price_per_hour,
            storage=storage, study_name=study, warm_start=tuple(warm_start or ()), mup_width=mup_width, seed=seed,
            arguments={"max_steps": max_steps, "seed": seed}, progress=display.progress(), sequence_length=sequence_length,
            global_batch=global_batch, epochs=epochs, lora_rank=lora_rank, fixed=tuple(set_ or ()), allow=split_names(allow),
            from_config=from_config, load_in_4bit=load_in_4bit, text_column=of_data.text_column, data_format=of_data.data_format,
            loss_on=of_data.loss_on, long_rows=of_data.long_rows, trial_seconds=trial_seconds,
        )  # fmt: skip
    if html is not None:
        from upshift.tuning.report import write_study_page

        write_study_page(html, result)
    _print_result(result, model, data, as_json=as_json)


def _check_request(html: Path | None) -> None:
    """Raise before the search if Optuna is missing, or if the page cannot be written."""
    if installed_version("optuna") is None:
        raise MissingExtra(library="optuna", extra="tune", purpose="upshift tune")
    if html is not None:
        from upshift.reports.document import check_page_path

        check_page_path(html)


class Display:
    """A live table on standard error: the trials that run, and the last trials that ended."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.live import Live

        self._live = Live(console=tables.err, transient=True, refresh_per_second=4, auto_refresh=not quiet)
        self._quiet = quiet
        self._running: dict[int, str] = {}
        self._ended: list[Any] = []
        self._speed = ""
        self._stack = ExitStack()

    def __enter__(self) -> Display:
        if not self._quiet:
            self._live.start()
        self._activity = self._stack.enter_context(activity("Searching"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._live.stop()

    def progress(self) -> Any:
        from upshift.tuning.tune import Progress

        return Progress(step=self._step, ended=self._end)

    def _step(self, number: int, event: Any) -> None:
        if type(event).__name__ == "StepDone":
            self._running[number] = f"step {event.step} of {event.max_steps}, loss {event.loss:.3f}"
            self._speed = f"{event.tokens_per_second:,.0f} tokens/s"
            self._draw()

    def _end(self, row: Any) -> None:
        self._running.pop(row.number, None)
        self._ended.append(row)
        self._draw()

    def _draw(self) -> None:
        trials = [f"trial {number} at {text}" for number, text in sorted(self._running.items())]
        speed = [self._speed] if self._speed else []
        self._activity.update(text=", ".join([f"{len(self._ended)} trials ended", *trials, *speed]))
        if self._quiet:
            return
        table = _table(self._ended[-ROWS:])
        for number, text in sorted(self._running.items()):
            table.add_row(str(number), "running", text, "", "")
        self._live.update(table)


def _table(rows: Any) -> Table:
    table = Table("trial", "state", "result", "hyper-parameters", "seconds", box=None, header_style="bold")
    for row in rows:
        result = ", ".join(f"{name} {value:.4g}" for name, value in (row.values or {}).items()) or row.reason
        values = ", ".join(f"{name}={shown(value)}" for name, value in row.parameters.items())
        table.add_row(str(row.number), row.state, result, values, "" if row.seconds is None else f"{row.seconds:.1f}")
    return table


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_result(result: Any, model: str, data: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
        return
    is_multi_objective = len(result.objectives) > 1
    tables.out.print(_table(result.best if is_multi_objective else result.best[:1]))
    states = [row.state for row in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    title = "Trials that no other beats in every objective" if is_multi_objective else "Best trial"
    spent = format_seconds(result.seconds)
    if result.cost is not None:
        spent += f", cost {result.cost:.4g}"
    tables.out.print(f"{title} of {len(states)} ({counts}), {spent}. Study in {result.storage}")
    if result.checkpoint is not None:
        tables.out.print(f"Its model is in {result.checkpoint}; optuna-dashboard {result.storage} shows the study.")
    if result.mup_base is not None:
        _print_transfer(result, model, data)


def _print_transfer(result: Any, model: str, data: str) -> None:
    """Print how to use the results for the whole model."""
    best = result.best[0].parameters
    flags = "".join(f" --{name.replace('_', '-')} {shown(best[name])}" for name in TRAIN_FLAGS if name in best)
    others = ", ".join(f"{name}={shown(value)}" for name, value in best.items() if name not in TRAIN_FLAGS)
    tables.out.print(f"{result.mup_check.words()}.")
    command = f"upshift train {model} --data {data} --from-config --mup-base {result.mup_base}{flags}"
    tables.out.print(f"The whole model: {command}", soft_wrap=True)
    if others:
        tables.out.print(f"And {others}: by upshift.train(..., arguments=) from Python.")
