"""A study, drawn, as one HTML file: history, parallel coordinates, importances, Pareto front, and every trial."""

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

from upshift.benchmarking.page_document import PageSection, page_html, write_page
from upshift.benchmarking.page_html import empty, number, plot, table, text, tile_list
from upshift.benchmarking.page_plots import Figure, layout
from upshift.tuning.objectives import Direction
from upshift.tuning.tune import Found, Row
from upshift.units import format_seconds

HEADS = (("Trial", "number"), ("State", ""), ("Result", "long"), ("Hyper-parameters", "long"), ("Seconds", "number"))
FEWEST = 2  # trials that came to their end, for a drawing to say anything


def write_study_page(path: Path, found: Found) -> None:
    """Raises RequestError when the file cannot be written."""
    write_page(path, study_page_html(found))


def study_page_html(found: Found) -> str:
    study, figures = in_memory(found), dict[str, Figure]()
    parts = {place: _drawn(place, study, found, figures) for place in ("history", "front", "parallel", "importances")}
    best = ", ".join(f"{name} {value:.4g}" for name, value in (found.best[0].values or {}).items())
    complete = sum(row.state == "complete" for row in found.trials)
    sections = [
        PageSection("history", "Results in the order of trials", "History", parts["history"]),
        PageSection("parallel", "Hyper-parameters and results", "Hyper-parameters", parts["parallel"]),
        PageSection("importances", "What matters", "Importances", parts["importances"]),
        PageSection("trials", "Every trial", "Trials", [_trials(found)]),
    ]
    if len(found.objectives) > 1:
        sections.insert(1, PageSection("front", "Trials that no other beats in every objective", "Pareto front", parts["front"]))
    return page_html(
        title=f"Study {found.study}",
        summary=f"{len(found.trials)} trials, {complete} to their end. Best: trial {found.best[0].number}, {best}.",
        tiles=tile_list([*_best(found), *_spent(found)]),
        sections=sections,
        figures=figures,
    )


def _best(found: Found) -> list[tuple[str, str, str]]:
    return [(name, number(value), "best trial") for name, value in (found.best[0].values or {}).items()]


def _spent(found: Found) -> list[tuple[str, str, str]]:
    """By the last call, which drew the page."""
    spent = [("time", text(format_seconds(found.seconds)), "of this call")]
    if found.cost is not None:
        spent.append(("cost", number(found.cost), f"at {number(found.price_per_hour)} an hour"))
    return spent


def in_memory(found: Found) -> optuna.Study:
    """The study again, from what is known of it: a page is drawn from values alone."""
    study = optuna.create_study(directions=list(found.objectives.values()))
    spaces = _distributions(found.trials)
    for row in found.trials:
        if row.values is not None:
            study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.COMPLETE, values=list(row.values.values()), params=row.parameters,
                    distributions={name: spaces[name] for name in row.parameters},
                )
            )  # fmt: skip
    return study


def _distributions(rows: tuple[Row, ...]) -> dict[str, BaseDistribution]:
    """As wide as what was tried."""
    seen: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.parameters.items():
            seen.setdefault(name, []).append(value)
    return {name: _distribution(values) for name, values in seen.items()}


def _distribution(values: list[Any]) -> BaseDistribution:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return CategoricalDistribution(tuple(dict.fromkeys(values)))
    low, high = min(values), max(values)
    log = low > 0 and high / low > 10
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _drawn(place: str, study: optuna.Study, found: Found, figures: dict[str, Figure]) -> list[str]:
    names, parts = list(found.objectives), []
    if len(study.trials) < FEWEST:
        return [empty("Too few trials came to their end to draw this.")]
    if place == "front":
        drawings = [("", plot_pareto_front(study, target_names=names))] if len(names) in (2, 3) else []
    else:
        draw: Any = {
            "history": plot_optimization_history, "parallel": plot_parallel_coordinate, "importances": plot_param_importances,
        }[place]  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that importances are of low values: _reading sees to it
            drawings = [
                (name, draw(study, target=_reading(at, place, found.objectives[name]), target_name=name))
                for at, name in enumerate(names)
            ]
    for at, (name, figure) in enumerate(drawings):
        figures[f"{place}-plot-{at}"] = _figure(figure)
        parts.append(plot(f"{place}-plot-{at}", label=f"{place} {name}", caption=text(name)))
    return parts


def _reading(at: int, place: str, direction: Direction) -> Callable[[FrozenTrial], float]:
    sign = -1.0 if place == "importances" and direction == "maximize" else 1.0
    return lambda trial: sign * float(trial.values[at])


def _figure(drawn: Any) -> Figure:
    """A Plotly figure with the page's own colours around it."""
    raw = json.loads(drawn.to_json())
    kept = {name: raw["layout"].get(name, {}) for name in ("xaxis", "yaxis")}
    x, y = ({"automargin": True, "gridcolor": "@line", **axis} for axis in kept.values())
    return {"data": raw["data"], "layout": layout(x=x, y=y)}


def _trials(found: Found) -> str:
    best = {row.number for row in found.best}
    rows = [
        (
            number(row.number), text(row.state),
            text(", ".join(f"{name} {value:.5g}" for name, value in (row.values or {}).items()) or row.reason),
            text(", ".join(f"{name} = {value}" for name, value in row.parameters.items())), number(row.seconds),
        )
        for row in found.trials
    ]  # fmt: skip
    marked = frozenset(at for at, row in enumerate(found.trials) if row.number in best)
    return table(HEADS, rows, label="Every trial", marked=marked)
