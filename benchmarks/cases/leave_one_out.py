"""Judge each source of published training speeds by factors that did not see it.

    python benchmarks/cases/leave_one_out.py        # a minute: from the rows of benchmarks/results/published.jsonl

The planner has two factors for each kind of GPU: what matrix products and memory traffic keep of the rates of single kernels
(planning/cost/rates.py). For each source they are fitted again to the rows of all other sources on the same kind of GPU. Then the
source's rows are predicted: the terms of a step scale with the factors, and the other terms stay. Attention is fitted to no row:
its rate is that of the program's kernel.

The fit is the most likely one (maximum a posteriori). Before any row, a factor is the mean of the planner's factors that were
not fitted to the source, times or over 1.28 (PRIOR_SPREAD). So two rows of one source do not push it to its bound. The rows of a
source share what is odd about it. So a source counts with the square root of their number. Rows of GPUs whose power was limited
are judged, but no factor is fitted to them: they show the limit, and not the kind of GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.optimize import minimize

from upshift.benchmarking.harness import format_table
from upshift.hardware import describe
from upshift.planning.cost.rates import SUSTAINED, SUSTAINED_ELSEWHERE, Sustained
from upshift.planning.cost.uncertainty import GPU_STEP_INTERVAL

ROWS = Path(__file__).parents[1] / "results" / "published.jsonl"
TERMS = ("matrix products", "memory traffic")  # in the order of Sustained
BOUNDS = (0.1, 1.0)  # of each factor
FITTED_TO = {  # the sources of the planner's own factors
    (8, 0): "mosaicml/llm-foundry",
    (9, 0): "mosaicml/llm-foundry",
    (10, 0): "MooreThreads/SimuMax",
}
PRIOR_SPREAD = 0.25  # standard deviation of a factor's logarithm among kinds of GPU
ROW_ERROR = 0.1  # the expected size of a row's error: the goal for its median
LIMITED = ("power limited", "500 W")  # of an H100's 700
NEAR = 0.25  # the goal: nine of ten rows are that close


class Row(NamedTuple):
    """A published speed and its prediction."""

    source: str
    kind: tuple[int, int]  # compute capability
    predicted: float  # tokens/s
    measured: float
    terms: dict[str, float]  # seconds of a step
    precision: str = "bf16"
    is_limited: bool = False  # the source says that the GPUs had less power than they are sold with

    def ratio(self, factors: Sequence[float]) -> float:
        """Return predicted over measured speed with other factors."""
        known = SUSTAINED.get(self.kind, SUSTAINED_ELSEWHERE)
        scales = {name: old / new for name, old, new in zip(TERMS, known, factors, strict=True)}
        if self.precision == "fp32":  # its products run without tensor cores, whose factor this is
            del scales["matrix products"]
        seconds = sum(self.terms.values())
        changed = sum(value * scales.get(name, 1.0) for name, value in self.terms.items())
        return self.predicted * seconds / changed / self.measured


def read_rows() -> list[Row]:
    """Return the rows with a speed. A run that is published with two kinds of memory counts once."""
    rows: dict[str, Row] = {}
    for line in ROWS.read_text().splitlines():
        document = json.loads(line)
        published = document["details"].get("published")
        if published is None or not (document["measured"] or {}).get("tokens_per_second"):
            continue
        gpu = describe(published["host"]).gpu
        assert gpu is not None
        measured = document["measured"]["tokens_per_second"]
        rows.setdefault(
            json.dumps((published["source"], published["host"], document["plan"], measured)),
            Row(
                published["source"], gpu.compute_capability or (0, 0), document["predicted"]["tokens_per_second"],
                measured, document["details"]["terms"], document["plan"]["precision"],
                any(words in (published.get("host_note") or "") for words in LIMITED),
            ),
        )  # fmt: skip
    return list(rows.values())


def by_source(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[row.source].append(row)
    return dict(sorted(groups.items()))


def unseen_factors(source: str) -> Sustained:
    """Return the geometric mean of the planner's factors that were not fitted to ``source``."""
    factors = [SUSTAINED[kind] for kind, seen in FITTED_TO.items() if seen != source]
    return Sustained(*(statistics.geometric_mean(values) for values in zip(*factors, strict=True)))


def fit(rows: Sequence[Row], start: Sustained) -> Sustained:
    """Return the most likely factors by rows of one kind of GPU. ``start``: the most likely ones without any row."""
    if not rows:
        return start
    groups = list(by_source(rows).values())

    def error(factors: Sequence[float]) -> float:
        sizes = [statistics.fmean(abs(math.log(row.ratio(factors))) for row in group) for group in groups]
        by_rows = sum(math.sqrt(len(group)) * size for group, size in zip(groups, sizes, strict=True)) / ROW_ERROR
        by_prior = sum(math.log(factor / start) ** 2 for factor, start in zip(factors, start, strict=True)) / PRIOR_SPREAD**2 / 2
        return by_rows + by_prior

    found = minimize(error, start, method="Nelder-Mead", bounds=[BOUNDS] * len(TERMS), options={"xatol": 1e-3, "fatol": 1e-4})
    return Sustained(*map(float, found.x))


def left_out_ratios(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return predicted over measured speed of each source's rows, by factors that were fitted without that source."""
    ratios = {}
    for source, own in by_source(rows).items():
        others = [row for row in rows if row.source != source and not row.is_limited]
        start = unseen_factors(source)
        factors = {kind: fit([row for row in others if row.kind == kind], start) for kind in {row.kind for row in own}}
        ratios[source] = [row.ratio(factors[row.kind]) for row in own]
    return ratios


def figures(ratios: Sequence[float]) -> tuple[str, str, str, str]:
    """Return the median error, its sign, the share of rows within NEAR, and the share in the printed interval of a step."""
    low, high = GPU_STEP_INTERVAL
    median = statistics.median(abs(ratio - 1) for ratio in ratios)
    bias = statistics.median(ratios) - 1
    near = statistics.mean(abs(ratio - 1) <= NEAR for ratio in ratios)
    # The predicted over the measured speed is the measured over the predicted time.
    inside = statistics.mean(low <= ratio <= high for ratio in ratios)
    return f"{median:.1%}", f"{bias:+.1%}", f"{near:.0%}", f"{inside:.0%}"


def sentence(ratios: dict[str, list[float]]) -> str:
    """Return the result in two sentences."""
    median, _, near, inside = figures([ratio for group in ratios.values() for ratio in group])
    medians = [statistics.median(abs(ratio - 1) for ratio in group) for group in ratios.values()]
    count = sum(map(len, ratios.values()))
    return (
        f"**Each source judged by factors that did not see it: half of {count} predicted speeds are within {median}, {near} are "
        f"within {NEAR:.0%}, and {inside} lie in the printed interval.** The median error of the middle source of {len(ratios)} "
        f"is {statistics.median(medians):.1%}, that of the worst {max(medians):.1%}."
    )


def table(rows: Sequence[Row], ratios: dict[str, list[float]], *, markdown: bool) -> str:
    """Return a line for each source: by the factors of today, and by factors that did not see it."""
    cells = []
    for source, own in by_source(rows).items():
        today = figures([row.predicted / row.measured for row in own])
        cells.append([source, len(own), today[0], today[2], *figures(ratios[source])])
    near = f"within {NEAR:.0%}"
    header = ("source", "runs", "today: median", near, "left out: median", "bias", near, "in interval")
    return format_table(header, cells, markdown=markdown)


def main() -> int:
    rows = read_rows()
    ratios = left_out_ratios(rows)
    print(sentence(ratios), table(rows, ratios, markdown=False), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
