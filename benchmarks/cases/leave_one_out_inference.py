"""Judge each source of published speeds of inference by factors that did not see it.

A predicted time is a sum of terms. Here three factors scale them: one for reading (weights, the cache, activations), one for
arithmetic (products, attention of prompts), one for launches and the host. For each source they are fitted to the rows of all
other sources, and the source's rows are predicted with them. The rows of a source share what is odd about it. So it counts with
the square root of their number.

Which terms there are was decided with all rows in view. That stays.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from scipy.optimize import minimize

from upshift.planning.inference.time import StepTime

FACTORS = (("weights", "cache", "activations"), ("products", "attention"), ("launches",))
BOUNDS = (0.25, 4.0)  # of each factor
NEAR = 0.3  # the goal: nine of ten rows are that close


class Row(NamedTuple):
    """A published speed, its prediction, and the seconds of the prediction by term."""

    source: str
    predicted: float
    measured: float
    seconds: StepTime

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


def figures(ratios: Sequence[float]) -> dict[str, float]:
    """Return the number of rows, their median error, its sign, and the share of rows within NEAR."""
    return {
        "rows": len(ratios),
        "median": statistics.median(abs(ratio - 1) for ratio in ratios),
        "bias": statistics.median(ratios) - 1,
        "near": statistics.fmean(abs(ratio - 1) <= NEAR for ratio in ratios),
    }


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the figures of all rows, then those of each source, the largest error first."""
    ratios = left_out_ratios(rows)
    sources = {source: figures(group) for source, group in ratios.items()}
    everything = figures([ratio for group in ratios.values() for ratio in group])
    return {"all": everything, **dict(sorted(sources.items(), key=lambda item: -item[1]["median"]))}
