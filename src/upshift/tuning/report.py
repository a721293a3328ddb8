"""Draw a study as one HTML file: history, parallel coordinates, importances, Pareto front, and every trial."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import plot_optimization_history, plot_parallel_coordinate, plot_param_importances, plot_pareto_front

from upshift.reports.blocks import Block, Plot, Table, Tile, missing, number
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plots import Figure, layout
from upshift.tuning.objectives import Direction
from upshift.tuning.tune import TrialRow, TuneResult
from upshift.units import format_seconds

HEADS = (("Trial", "number"), ("State", ""), ("Result", "long"), ("Hyper-parameters", "long"), ("Seconds", "number"))
MIN_COMPLETE = 2  # trials with a result, for a plot to show anything
PLOTS = {"history": plot_optimization_history, "parallel": plot_parallel_coordinate, "importances": plot_param_importances}


def write_study_page(path: Path, result: TuneResult) -> None:
    """Write the page of a study. Raise RequestError if the file cannot be written."""
    write_page(path, study_page_html(result))


def study_page_html(result: TuneResult) -> str:
    study = rebuild_study(result)
    figures = dict[str, Figure]()

    def section(name: str, title: str, link: str) -> Section:
        plots: list[Block] = []
        for index, (objective, figure) in enumerate(_figures(name, study, result)):
            plot_name = f"{name}-plot-{index}"
            figures[plot_name] = figure
            plots.append(Plot(plot_name, f"{name} {objective}", objective))
        reason = "Two or three objectives can be drawn, no more."
        if len(study.trials) < MIN_COMPLETE:
            reason = "Too few trials came to their end to draw this."
        return Section(name, title, link, plots or [missing(reason)])

    sections = [
        section("history", "Results in the order of trials", "History"),
        section("parallel", "Hyper-parameters and results", "Hyper-parameters"),
        section("importances", "What matters", "Importances"),
        Section("trials", "Every trial", "Trials", [_trials(result)]),
    ]
    if len(result.objectives) > 1:
        sections.insert(1, section("front", "Trials that no other beats in every objective", "Pareto front"))
    best = ", ".join(f"{name} {value:.4g}" for name, value in (result.best[0].values or {}).items())
    complete = sum(row.state == "complete" for row in result.trials)
    summary = f"{len(result.trials)} trials, {complete} to their end. Best: trial {result.best[0].number}, {best}."
    return page_html(Page(f"Study {result.study}", summary, _tiles(result), sections, figures))


def _tiles(result: TuneResult) -> list[Tile]:
    """Return the best results, and the time and cost of the last call, which drew the page."""
    tiles = [Tile(name, number(value), "best trial") for name, value in (result.best[0].values or {}).items()]
    tiles.append(Tile("time", format_seconds(result.seconds), "of this call"))
    if result.cost is not None:
        tiles.append(Tile("cost", number(result.cost), f"at {number(result.price_per_hour)} an hour"))
    return tiles


def rebuild_study(result: TuneResult) -> optuna.Study:
    """Return a study in memory with the values of the complete trials, for Optuna's plots."""
    study = optuna.create_study(directions=list(result.objectives.values()))
    spaces = _distributions(result.trials)
    for row in result.trials:
        if row.values is not None:
            distributions = {name: spaces[name] for name in row.parameters}
            study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.COMPLETE,
                    values=list(row.values.values()),
                    params=row.parameters,
                    distributions=distributions,
                )
            )
    return study


def _distributions(rows: tuple[TrialRow, ...]) -> dict[str, BaseDistribution]:
    """Return for each parameter the narrowest distribution that holds the values of all trials."""
    values_by_name: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.parameters.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: _distribution(values) for name, values in values_by_name.items()}


def _distribution(values: list[Any]) -> BaseDistribution:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return CategoricalDistribution(tuple(dict.fromkeys(values)))
    low = min(values)
    high = max(values)
    log = low > 0 and high / low > 10
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _figures(name: str, study: optuna.Study, result: TuneResult) -> list[tuple[str, Figure]]:
    """Return (objective, figure) for each plot of a section."""
    objectives = list(result.objectives)
    if len(study.trials) < MIN_COMPLETE:
        return []
    if name == "front":  # Optuna's plot takes two or three objectives
        if len(objectives) not in (2, 3):
            return []
        return [(" and ".join(objectives), _figure(plot_pareto_front(study, target_names=objectives)))]
    plot: Any = PLOTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "low values count as good": _target changes the sign
        return [
            (objective, _figure(plot(study, target=_target(index, name, direction), target_name=objective)))
            for index, (objective, direction) in enumerate(result.objectives.items())
        ]


def _target(index: int, plot: str, direction: Direction) -> Callable[[FrozenTrial], float]:
    sign = -1.0 if plot == "importances" and direction == "maximize" else 1.0
    return lambda trial: sign * float(trial.values[index])


def _figure(plot: Any) -> Figure:
    """Return a Plotly figure as plain data, with the page's axes and colours."""
    raw = json.loads(plot.to_json())
    x, y = ({"automargin": True, "gridcolor": "@line", **raw["layout"].get(name, {})} for name in ("xaxis", "yaxis"))
    return {"data": raw["data"], "layout": layout(x=x, y=y)}


def _trials(result: TuneResult) -> Table:
    best = {row.number for row in result.best}
    rows = []
    for row in result.trials:
        values = ", ".join(f"{name} {value:.5g}" for name, value in (row.values or {}).items())
        parameters = ", ".join(f"{name} = {value}" for name, value in row.parameters.items())
        rows.append([number(row.number), row.state, values or row.reason, parameters, number(row.seconds)])
    return Table("Every trial", HEADS, rows, frozenset(index for index, row in enumerate(result.trials) if row.number in best))
