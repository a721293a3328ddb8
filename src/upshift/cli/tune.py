"""Run ``upshift tune``: search hyper-parameters, with a live table of the trials on standard error."""

from __future__ import annotations

import inspect
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from upshift.cli import tables
from upshift.cli import train as train_command
from upshift.cli.options import (
    ROW_PARAMETERS,
    Allow,
    Data,
    Epochs,
    EvalSizeOption,
    FromConfig,
    GlobalBatch,
    Html,
    Json,
    Model,
    SequenceLength,
    Set,
    check_file,
    option,
    output_folder,
    split_names,
    with_adapter_options,
    with_layout_flags,
    with_row_options,
)
from upshift.cli.progress import activity, importing_libraries
from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import ABOVE_ZERO, check_choice
from upshift.errors import MissingExtra
from upshift.models.source import AdapterOptions
from upshift.training.arguments import SEEDS
from upshift.training.data.data_options import DataOptions
from upshift.units import format_seconds
from upshift.versions import installed_version

ROWS = 10  # of trials that ended, in the live table
Space = Annotated[
    Path,
    option(
        "--space", panel=Panel.SEARCH, metavar="PATH",
        text="A YAML file with the range of each hyper-parameter, such as learning_rate: {low: 1.0e-5, high: 1.0e-3, log: true}.",
    ),
]  # fmt: skip
Output = Annotated[Path, output_folder("The folder for the study and the best models.")]
Trials = Annotated[
    int,
    option(
        "--trials", text="The number of trials of the study, with those of earlier calls.", panel=Panel.SEARCH,
        metavar="N", least=1,
    ),
]  # fmt: skip
OBJECTIVES = ("eval_loss", "time", "memory", "speed")


def _check_objectives(text: str) -> str:
    for name in split_names(text, "--objective"):
        check_choice("--objective", name, OBJECTIVES)
    return text


Objective = Annotated[
    str,
    option(
        "--objective", text=f"What to optimize, one or several of {', '.join(OBJECTIVES)}.", panel=Panel.SEARCH,
        metavar="NAME,NAME", check=_check_objectives,
    ),
]  # fmt: skip
Pruner = Annotated[
    str,
    option(
        "--pruner", text="The rule that ends bad trials early", panel=Panel.SEARCH, metavar="NAME",
        choices=("halving", "hyperband", "median", "none"),
    ),
]  # fmt: skip
Evaluations = Annotated[
    int,
    option(
        "--evaluations", text="Evaluations of each trial. A bad trial ends at one of them.", panel=Panel.SEARCH, metavar="N",
        least=1,
    ),
]  # fmt: skip
Jobs = Annotated[
    int,
    option(
        "--jobs", text="Trials at the same time. Each gets its share of the cores and the memory.", panel=Panel.PROCESSES,
        metavar="N", least=1,
    ),
]  # fmt: skip
MaxSteps = Annotated[
    int | None,
    option(
        "--max-steps", text="The number of optimizer steps of a trial. Replaces --epochs.", panel=Panel.TRAINING, metavar="N",
        default="as many as --epochs needs", least=1,
    ),
]  # fmt: skip
MaxHours = Annotated[
    float | None,
    option(
        "--max-hours", text="Start no trial after this time, in hours.", panel=Panel.LIMITS, metavar="HOURS", default="no limit",
        least=0.0,
    ),
]  # fmt: skip
MaxCost = Annotated[
    float | None,
    option(
        "--max-cost", text="Start no trial after this cost. Needs --price-per-hour.", panel=Panel.LIMITS, metavar="COST",
        default="no limit", least=0.0,
    ),
]  # fmt: skip
PricePerHour = Annotated[
    float | None,
    option(
        "--price-per-hour", text="The price of this machine for one hour, in any currency.", panel=Panel.LIMITS, metavar="COST",
        default="unknown", least=ABOVE_ZERO,
    ),
]  # fmt: skip
Storage = Annotated[
    str | None,
    option(
        "--storage", text="Where the study is kept: a database's URL, or the path of SQLite or a journal.", panel=Panel.SPECIAL,
        metavar="URL", default="SQLite in the output folder",
    ),
]  # fmt: skip
Study = Annotated[
    str,
    option(
        "--study", text="The name of the study. Processes with the same name and storage share it.", panel=Panel.SPECIAL,
        metavar="NAME",
    ),
]  # fmt: skip
WarmStart = Annotated[
    list[str] | None,
    option(
        "--warm-start", text="Learn from an earlier study: its output folder or its database.", panel=Panel.SPECIAL,
        metavar="PATH", default="no earlier study",
    ),
]  # fmt: skip
MupWidth = Annotated[
    int | None,
    option(
        "--mup-width", panel=Panel.SPECIAL, metavar="N", default="search on the model itself", least=1,
        text="Search on a copy of the model with this hidden_size. muP carries the result over.",
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    option(
        "--seed", text="The seed of the search, and of trials whose space has no seed.", panel=Panel.OPTIMIZATION, metavar="N",
        least=0, most=SEEDS - 1,
    ),
]  # fmt: skip
TrialSeconds = Annotated[
    float,
    option(
        "--trial-seconds", text="The time to test plans before a run of a new shape, in seconds. 0 tests none.", panel=Panel.PLAN,
        metavar="SECONDS", least=0.0,
    ),
]  # fmt: skip
TRAINING_OPTIONS = (  # options of this command that change a training, and that `upshift train` has, too
    "sequence_length",
    "global_batch",
    "max_steps",
    "epochs",
    *(parameter.name for parameter in ROW_PARAMETERS),
    "eval_size",
    "seed",
    "set_",
    "allow",
)


@with_layout_flags
@with_adapter_options
@with_row_options
def command(
    model: Model,
    data: Data,
    adapter: AdapterOptions,
    row_options: dict[str, Any],
    space: Space,
    output: Output = Path("upshift-tune"),
    trials: Trials = 20,
    objective: Objective = "eval_loss",
    pruner: Pruner = "halving",
    evaluations: Evaluations = 9,
    jobs: Jobs = 1,
    sequence_length: SequenceLength = None,
    global_batch: GlobalBatch = 8,
    max_steps: MaxSteps = None,
    epochs: Epochs = 1.0,
    max_hours: MaxHours = None,
    max_cost: MaxCost = None,
    price_per_hour: PricePerHour = None,
    storage: Storage = None,
    study: Study = "upshift",
    warm_start: WarmStart = None,
    mup_width: MupWidth = None,
    from_config: FromConfig = False,
    eval_size: EvalSizeOption = None,
    seed: Seed = 42,
    set_: Set = None,
    allow: Allow = "",
    trial_seconds: TrialSeconds = 0.0,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Search the best hyper-parameters of a training. If you start the same command again, it continues the study."""
    _check_request(model, data, space, html)
    options = {**locals(), **row_options}
    training_options = {name: options[name] for name in TRAINING_OPTIONS}
    of_data = DataOptions.from_fields({**row_options, "eval_size": eval_size})
    with importing_libraries():
        from upshift.tuning.tune import tune

    with Display(quiet=as_json) as display:
        result = tune(
            model, data, space=space, output=output, trials=trials, objective=split_names(objective, "--objective"),
            pruner=pruner,
            evaluations=evaluations, jobs=jobs, max_hours=max_hours, max_cost=max_cost, price_per_hour=price_per_hour,
            storage=storage, study_name=study, warm_start=tuple(warm_start or ()), mup_width=mup_width, seed=seed,
            arguments={"max_steps": max_steps, "seed": seed}, progress=display.progress(), sequence_length=sequence_length,
            global_batch=global_batch, epochs=epochs, fixed=tuple(set_ or ()), allow=split_names(allow),
            from_config=from_config, trial_seconds=trial_seconds,
            **adapter.model_dump(), **of_data.model_dump(exclude={"objective"}),
        )  # fmt: skip
    if html is not None:
        from upshift.tuning.report import write_study_page

        write_study_page(html, result)
    _print_result(result, model, data, training_options, as_json=as_json)


def _check_request(model: str, data: str, space: Path, html: Path | None) -> None:
    """Raise before the search if the model, the data, the space or Optuna is missing, or if the page cannot be written."""
    from upshift.models.source import find_model
    from upshift.training.data.corpus import check_paths
    from upshift.tuning.space import read_space

    check_file("--space", space)
    read_space(space)
    find_model(model)
    check_paths(data)
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


def _result_table(rows: Any) -> Table:
    """Return a row for each of the best trials, with a column for each objective."""
    names = tuple(rows[0].values or ())
    table = tables.new_table("", "trial", numbers=(*names, "seconds"))
    for row in rows:
        results = [f"{row.values[name]:.4g}" for name in names]
        table.add_row(str(row.number), *results, "" if row.seconds is None else f"{row.seconds:.1f}")
    return table


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_result(result: Any, model: str, data: str, options: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
        return
    _print_best(result)
    if result.mup_base is not None:
        _print_transfer(result, model, data, options)


def _print_best(result: Any) -> None:
    is_multi_objective = len(result.objectives) > 1
    best = result.best if is_multi_objective else result.best[:1]
    tables.out.print(_result_table(best))
    for row in best:  # below the table: a cell of it would wrap over many lines
        values = ", ".join(f"{name}={shown(value)}" for name, value in row.parameters.items())
        tables.out.print(f"Trial {row.number}: {values}", soft_wrap=True)
    states = [row.state for row in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    title = "Trials that no other beats in every objective" if is_multi_objective else "Best trial"
    spent = format_seconds(result.seconds)
    if result.cost is not None:
        spent += f", cost {result.cost:.4g}"
    tables.out.print(f"{title} of {len(states)} ({counts}), {spent}.")
    if result.checkpoint is not None:
        tables.out.print(f"Its model: {result.checkpoint}", soft_wrap=True)
    tables.out.print(f"Show the study: optuna-dashboard {shlex.quote(str(result.storage))}", soft_wrap=True)


def _print_transfer(result: Any, model: str, data: str, options: dict[str, Any]) -> None:
    """Print how to train the whole model as the best trial trained the narrow one. ``options``: those of TRAINING_OPTIONS."""
    values = options | result.fixed_parameters | result.best[0].parameters
    defaults = {name: parameter.default for name, parameter in inspect.signature(train_command.command).parameters.items()}
    words = ["upshift", "train", model, "--data", data, "--from-config", "--mup-base", result.mup_base]
    others = []
    for name, value in values.items():
        if name not in defaults:
            others.append(f"{name}={value}")
        elif value != defaults[name]:
            words += _option_words(name, value)
    tables.out.print(f"{result.mup_check.words()}.")
    tables.out.print(f"The whole model: {shlex.join(words)}", soft_wrap=True)
    if others:
        tables.out.print(f"And {', '.join(others)}: by upshift.train(..., arguments=) from Python.", soft_wrap=True)


def _option_words(name: str, value: Any) -> list[str]:
    """Return the words of the command line for an option. One with several values is repeated."""
    values = value if isinstance(value, list | tuple) else [value]
    return [word for single in values for word in (f"--{name.strip('_').replace('_', '-')}", str(single))]
