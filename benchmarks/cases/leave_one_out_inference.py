"""Judge each source of published speeds of inference by factors that did not see it.

A predicted time is a sum of terms. Here three factors scale them: one for reading (weights, the cache, activations), one for
arithmetic (products, attention of prompts), one for launches and the host. For each source they are fitted to the rows of all
other sources, and the source's rows are predicted with them. The rows of a source share what is odd about it. So it counts with
the square root of their number.

The printed interval comes from the same errors: of measured over predicted tokens/s 5 % lie below it and 5 % above. The rows of
one engine in one source count once, those of the program twice. For a program without rows it is wider by how much the medians
of engines differ. A source is judged by the interval of the other sources.

Which terms there are was decided with all rows in view. That stays.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from numpy import interp
from scipy.optimize import minimize

from upshift.planning.inference.plan import PROGRAM_NAMES
from upshift.planning.inference.time import StepTime

FACTORS = (("weights", "cache", "activations"), ("products", "attention"), ("launches",))
BOUNDS = (0.25, 4.0)  # of each factor
NEAR = 0.3  # the goal: nine of ten rows are that close
PROGRAM_OF = {"TensorRT-LLM": "tensorrt-llm", "vLLM": "vllm"}  # by the first word of the engine
OWN_WEIGHT = 2.0  # of the rows of the same program
TAIL = 0.05  # the share of rows below an interval, and above it
TAIL_SIGMAS = 1.645  # of a normal distribution, beyond which such a share lies
Errors = dict[tuple[str, str], list[float]]  # predicted over measured, by source and program


class Row(NamedTuple):
    """A published speed, its prediction, and the seconds of the prediction by term."""

    source: str
    predicted: float
    measured: float
    seconds: StepTime
    engine: str = ""

    @property
    def program(self) -> str:
        """Return the name in ``--program``, or that of the engine."""
        return PROGRAM_OF.get((self.engine.split() or [""])[0], self.engine)

    def ratio(self, factors: Sequence[float]) -> float:
        """Return predicted over measured speed, with the terms scaled by ``factors``."""
        scaled = sum(
            (factor - 1.0) * sum(getattr(self.seconds, name) for name in names)
            for factor, names in zip(factors, FACTORS, strict=True)
        )
        total = self.seconds.total
        return self.predicted / self.measured * total / (total + scaled)


def by_source(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[row.source].append(row)
    return dict(sorted(groups.items()))


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """Return the factors with the least error of the logarithm."""
    groups = list(by_source(rows).values())

    def error(factors: Sequence[float]) -> float:
        sizes = [statistics.fmean(abs(math.log(row.ratio(factors))) for row in group) for group in groups]
        return sum(math.sqrt(len(group)) * size for group, size in zip(groups, sizes, strict=True))

    start = [1.0] * len(FACTORS)
    found = minimize(error, start, method="Nelder-Mead", bounds=[BOUNDS] * len(FACTORS), options={"xatol": 1e-3, "fatol": 1e-4})
    return tuple(map(float, found.x))


def left_out_ratios(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return predicted over measured speed of each source's rows, by factors that were fitted without that source."""
    ratios = {}
    for source, own in by_source(rows).items():
        factors = fit([row for row in rows if row.source != source])
        ratios[source] = [row.ratio(factors) for row in own]
    return ratios


def errors_of(rows: Sequence[Row], ratios: dict[str, list[float]]) -> Errors:
    """Return the ratios by source and program."""
    errors: Errors = {}
    for source, own in by_source(rows).items():
        for row, ratio in zip(own, ratios[source], strict=True):
            errors.setdefault((source, row.program), []).append(ratio)
    return errors


def interval(errors: Errors, program: str) -> tuple[float, float]:
    """Return the interval of measured over predicted tokens/s that some sources give a program."""
    is_known = any(name == program for _, name in errors)
    weights = {key: OWN_WEIGHT if key[1] == program else 1.0 for key in errors}
    ordered = sorted((-math.log(ratio), weights[key] / len(group)) for key, group in errors.items() for ratio in group)
    values, shares = zip(*ordered, strict=True)
    centres = [total - weight / 2 for total, weight in zip(accumulate(shares), shares, strict=True)]
    low, high = (float(interp(share * sum(shares), centres, values)) for share in (TAIL, 1.0 - TAIL))
    medians = [statistics.median(math.log(ratio) for ratio in group) for group in errors.values()]
    widening = 0.0 if is_known or len(medians) < 2 else TAIL_SIGMAS * statistics.stdev(medians)
    return math.exp(-math.hypot(min(low, 0.0), widening)), math.exp(math.hypot(max(high, 0.0), widening))


def intervals(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the interval of each program that plans are made for, by all sources."""
    errors = errors_of(rows, left_out_ratios(rows))
    return {program: interval(errors, program) for program in PROGRAM_NAMES}


def covered(rows: Sequence[Row], ratios: dict[str, list[float]]) -> dict[str, list[bool]]:
    """Return whether each row of each source lies in the interval that the other sources give its program."""
    errors = errors_of(rows, ratios)
    inside: dict[str, list[bool]] = {}
    for source, own in by_source(rows).items():
        others = {key: group for key, group in errors.items() if key[0] != source}
        bounds = {program: interval(others, program) for program in {row.program for row in own}}
        inside[source] = [
            bounds[row.program][0] <= 1.0 / ratio <= bounds[row.program][1]
            for row, ratio in zip(own, ratios[source], strict=True)
        ]
    return inside


def figures(ratios: Sequence[float], inside: Sequence[bool]) -> dict[str, float]:
    """Return the number of rows, their median error, its sign, the share of rows within NEAR, and the share in the interval."""
    return {
        "rows": len(ratios),
        "median": statistics.median(abs(ratio - 1) for ratio in ratios),
        "bias": statistics.median(ratios) - 1,
        "near": statistics.fmean(abs(ratio - 1) <= NEAR for ratio in ratios),
        "inside": statistics.fmean(inside),
    }


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the figures of all rows, then those of each source, the largest error first."""
    ratios = left_out_ratios(rows)
    inside = covered(rows, ratios)
    sources = {source: figures(group, inside[source]) for source, group in ratios.items()}
    everything = figures(
        [ratio for group in ratios.values() for ratio in group], [is_inside for group in inside.values() for is_inside in group]
    )
    return {"all": everything, **dict(sorted(sources.items(), key=lambda item: -item[1]["median"]))}
