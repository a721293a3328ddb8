"""Draw a study as one HTML file: history, parallel coordinates, importances, Pareto front, and every trial."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import plot_optimization_history, plot_param_importances, plot_pareto_front

from upshift.reports.blocks import Block, Plot, Table, Tile, missing, number
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plots import BLUE, ORANGE, Figure, axis, layout, plot_text
from upshift.tuning.objectives import Direction
from upshift.tuning.tune import TrialRow, TuneResult
from upshift.units import format_seconds

HEADS = (("Trial", "number"), ("State", ""), ("Result", "long"), ("Hyper-parameters", "long"), ("Seconds", "number"))
FEW_TRIALS = 20  # each has its tick
MIN_COMPLETE = 2  # trials with a result, for a plot to show anything
CAPTIONS = {
    "history": "Each dot is the {} of a trial.",
    "front": "Each dot is a trial, by {}. No other trial beats one of the front in every objective.",
    "parallel": "Each line is a trial: its hyper-parameters, and its {} as the colour.",
    "importances": "How much of the differences in {} comes from each hyper-parameter, as a share of 1.",
}
NUM_TICKS = 5  # of each axis of the parallel coordinates
PLOTS = {"history": plot_optimization_history, "importances": plot_param_importances}


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
            plots.append(Plot(plot_name, f"{title}: {objective}", CAPTIONS[name].format(objective)))
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
    summary = f"{complete} of {len(result.trials)} trials ran to their end. Best: trial {result.best[0].number}, {best}."
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
    numbers = [row.number for row in result.trials if row.values is not None]
    if len(study.trials) < MIN_COMPLETE:
        return []
    if name == "front":  # Optuna's plot takes two or three objectives
        if len(objectives) not in (2, 3):
            return []
        return [(" and ".join(objectives), _figure(plot_pareto_front(study, target_names=objectives), numbers))]
    if name == "parallel":
        return [(objective, _parallel_figure(study, index, objective)) for index, objective in enumerate(objectives)]
    plot: Any = PLOTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "low values count as good": _target changes the sign
        return [
            (objective, _figure(plot(study, target=_target(index, name, direction), target_name=objective), numbers))
            for index, (objective, direction) in enumerate(result.objectives.items())
        ]


def _target(index: int, plot: str, direction: Direction) -> Callable[[FrozenTrial], float]:
    sign = -1.0 if plot == "importances" and direction == "maximize" else 1.0
    return lambda trial: sign * float(trial.values[index])


def _figure(plot: Any, numbers: list[int]) -> Figure:
    """Return a Plotly figure as plain data, with the page's axes and colours.

    ``numbers``: of the complete trials. Optuna counts these alone, so a trial after a pruned one would have another number."""
    raw = json.loads(plot.to_json())
    x, y = (_axis(raw["layout"].get(name, {})) for name in ("xaxis", "yaxis"))
    if x["title"]["text"] == "Trial":
        for trace in raw["data"]:
            trace["x"] = [numbers[place] for place in trace.get("x") or ()]
        trials = [number for trace in raw["data"] for number in trace.get("x") or ()]
        x |= {"tickformat": "d", "dtick": 1} if len(set(trials)) <= FEW_TRIALS else {"tickformat": "d"}
    return {"data": raw["data"], "layout": layout(x=x, y=y)}


def _parallel_figure(study: optuna.Study, index: int, objective: str) -> Figure:
    """Return a line for each trial through its result and its hyper-parameters. The colour is the result.

    Plotly's own kind of this plot needs WebGL, which not every browser has."""
    results = [float(trial.values[index]) for trial in study.trials]
    shared = [name for name in study.trials[0].params if all(name in trial.params for trial in study.trials)]
    columns = [ParallelAxis(objective, results)]
    columns += [ParallelAxis(name, [trial.params[name] for trial in study.trials]) for name in shared]
    places = list(range(len(columns)))
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": places,
            "y": [column.heights[row] for column in columns],
            "line": {"color": _mixed(columns[0].heights[row]), "width": 2},
            "showlegend": False,
            "hovertemplate": f"trial {trial.number}<extra></extra>",
        }
        for row, trial in enumerate(study.trials)
    ]
    bar = {"colorscale": [[0.0, BLUE], [1.0, ORANGE]], "showscale": True, "size": 7, "color": results}
    dots = {"type": "scatter", "mode": "markers", "x": [0] * len(results), "y": columns[0].heights, "marker": bar}
    line = {"color": "@muted", "width": 1}
    shapes = [{"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "line": line, "layer": "below"} for place in places]
    style = {"showarrow": False, "xanchor": "right", "xshift": -5, "font": {"color": "@text", "size": 11}, "bgcolor": "@surface"}
    notes = [
        {"x": place, "y": height, "text": plot_text(text), **style}
        for place, column in zip(places, columns, strict=True)
        for height, text in column.ticks
    ]
    names = [plot_text(column.name) for column in columns]
    x = axis("", tickvals=places, ticktext=names, range=[-0.4, places[-1] + 0.15], showgrid=False, zeroline=False)
    y = axis("", visible=False, range=[-0.06, 1.06])
    drawing = layout(x=x, y=y, shapes=shapes, annotations=notes, showlegend=False, hovermode="closest")
    return {"data": [*traces, dots], "layout": drawing}


class ParallelAxis:
    """One axis of the parallel coordinates: the height of each trial from 0 to 1, and ticks.

    It is logarithmic if the values span orders of magnitude. Names stand in the order in which they appear."""

    def __init__(self, name: str, values: list[Any]) -> None:
        self.name = name
        kind = _distribution(values)
        if isinstance(kind, CategoricalDistribution):
            places = [float(kind.choices.index(value)) for value in values]
            ticks = [(float(place), str(choice)) for place, choice in enumerate(kind.choices)]
        else:
            is_log = bool(getattr(kind, "log", False))
            places = [math.log10(value) if is_log else float(value) for value in values]
            steps = [step / (NUM_TICKS - 1) for step in range(NUM_TICKS)]
            marks = dict.fromkeys(min(places) + (max(places) - min(places)) * step for step in steps)
            ticks = [(mark, f"{10**mark if is_log else mark:.4g}") for mark in marks]
        self._low = min(places)
        self._high = max(places)
        self.heights = [self._height(place) for place in places]
        self.ticks = [(self._height(place), text) for place, text in ticks]

    def _height(self, place: float) -> float:
        return 0.5 if self._high == self._low else round((place - self._low) / (self._high - self._low), 4)


def _mixed(share: float) -> str:
    """Return the colour between the ends of the scale, which both stand out on white and on black."""
    ends = [[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for colour in (BLUE, ORANGE)]
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(*ends, strict=True))


def _axis(raw: dict[str, Any]) -> Figure:
    """Return an axis of Optuna's plot with this page's distance between ticks and title."""
    title = raw.get("title", {}).get("text") or ""
    return {**axis(title), **{name: value for name, value in raw.items() if name != "title"}}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trials(result: TuneResult) -> Table:
    best = {row.number for row in result.best}
    rows = []
    for row in result.trials:
        values = ", ".join(f"{name} {value:.5g}" for name, value in (row.values or {}).items())
        parameters = ", ".join(f"{name} = {_shown(value)}" for name, value in row.parameters.items())
        rows.append([number(row.number), row.state, values or row.reason, parameters, number(row.seconds)])
    return Table("Every trial", HEADS, rows, frozenset(index for index, row in enumerate(result.trials) if row.number in best))
