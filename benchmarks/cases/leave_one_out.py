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

The printed interval of a step's time comes from the same errors: of measured over predicted time 5 % of the rows lie below it and
5 % above, where each source counts once, and those of the program twice. On a kind of GPU that nobody measured it is wider by how
much such kinds differ. A source is judged by the interval of the other sources, which may not know its program or its GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from numpy import interp
from scipy.optimize import minimize

from upshift.benchmarking.harness import format_table
from upshift.hardware import describe
from upshift.planning.cost.rates import SUSTAINED, SUSTAINED_ELSEWHERE, Sustained
from upshift.planning.cost.uncertainty import GPU_STEP_INTERVALS

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
# The programs of the sources, by their names in --program where they have one.
PROGRAM_OF = {
    "MooreThreads/SimuMax": "megatron", "bigscience-workshop/bigscience": "Megatron of 2022",
    "calculon-ai/calculon": "Megatron of 2022", "pytorch/torchtitan": "torchtitan", "pytorch/ao": "torchtitan",
    "huggingface/transformers": "transformers", "keras-team/keras-io": "transformers",
    "microsoft/DeepSpeedExamples": "transformers",
}  # fmt: skip
SAME_FACTS = {"axolotl": "transformers", "llama-factory": "transformers"}  # they run the other program's Trainer
OWN_WEIGHT = 2.0  # of a source of the same program, for the interval
TAIL = 0.05  # the share of rows below an interval, and above it
TAIL_SIGMAS = 1.645  # of a normal distribution, beyond which such a share lies


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


def interval(ratios: dict[str, list[float]], program: str, *, is_new_kind: bool) -> tuple[float, float]:
    """Return the interval of measured over predicted time that the ratios of some sources give a program.

    ``is_new_kind``: no source measured the kind of GPU.
    """
    weights = {source: OWN_WEIGHT if PROGRAM_OF.get(source) == program else 1.0 for source in ratios}
    rows = sorted((math.log(ratio), weights[source] / len(group)) for source, group in ratios.items() for ratio in group)
    widening = TAIL_SIGMAS * PRIOR_SPREAD if is_new_kind else 0.0
    low, high = min(_quantile(rows, TAIL), 0.0), max(_quantile(rows, 1.0 - TAIL), 0.0)  # the prediction itself lies within
    return math.exp(-math.hypot(low, widening)), math.exp(math.hypot(high, widening))


def _quantile(rows: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which a share of the weight lies. ``rows``: (value, weight), ascending."""
    values, weights = zip(*rows, strict=True)
    centres = [total - weight / 2 for total, weight in zip(accumulate(weights), weights, strict=True)]
    return float(interp(share * sum(weights), centres, values))


def covered(rows: Sequence[Row], ratios: dict[str, list[float]]) -> dict[str, list[bool]]:
    """Return whether each row of each source lies in the interval that the other sources give it."""
    inside: dict[str, list[bool]] = {}
    for source, own in by_source(rows).items():
        others = {name: group for name, group in ratios.items() if name != source}
        measured = {row.kind for row in rows if row.source != source and not row.is_limited}
        bounds = {
            kind: interval(others, PROGRAM_OF.get(source, source), is_new_kind=kind not in measured or kind not in SUSTAINED)
            for kind in {row.kind for row in own}
        }
        inside[source] = [
            bounds[row.kind][0] <= ratio <= bounds[row.kind][1] for row, ratio in zip(own, ratios[source], strict=True)
        ]
    return inside


def figures(ratios: Sequence[float]) -> tuple[str, str, str]:
    """Return the median error, its sign, and the share of rows within NEAR."""
    median = statistics.median(abs(ratio - 1) for ratio in ratios)
    bias = statistics.median(ratios) - 1
    near = statistics.mean(abs(ratio - 1) <= NEAR for ratio in ratios)
    return f"{median:.1%}", f"{bias:+.1%}", f"{near:.0%}"


def sentence(rows: Sequence[Row], ratios: dict[str, list[float]]) -> str:
    """Return the result in three sentences."""
    median, _, near = figures([ratio for group in ratios.values() for ratio in group])
    medians = [statistics.median(abs(ratio - 1) for ratio in group) for group in ratios.values()]
    count = sum(map(len, ratios.values()))
    inside = covered(rows, ratios)
    share = statistics.mean(is_inside for group in inside.values() for is_inside in group)
    by_sources = statistics.mean(statistics.mean(group) for group in inside.values())
    return (
        f"**Each source judged by factors that did not see it: half of {count} predicted speeds are within {median}, and {near} "
        f"are within {NEAR:.0%}. {share:.0%} lie in the interval that the other sources give, in the mean of the {len(ratios)} "
        f"sources {by_sources:.0%}.** The median error of the middle source is {statistics.median(medians):.1%}, that of the "
        f"worst {max(medians):.1%}."
    )


def table(rows: Sequence[Row], ratios: dict[str, list[float]], *, markdown: bool) -> str:
    """Return a line for each source: by the factors of today, and by factors that did not see it."""
    cells = []
    inside = covered(rows, ratios)
    for source, own in by_source(rows).items():
        today = figures([row.predicted / row.measured for row in own])
        cells.append([source, len(own), today[0], today[2], *figures(ratios[source]), f"{statistics.mean(inside[source]):.0%}"])
    near = f"within {NEAR:.0%}"
    header = ("source", "runs", "today: median", near, "left out: median", "bias", near, "in interval")
    return format_table(header, cells, markdown=markdown)


def interval_table(ratios: dict[str, list[float]]) -> str:
    """Return the intervals of measured over predicted time by program, in Markdown."""
    cells = []
    for program in GPU_STEP_INTERVALS:
        own = [source for source in ratios if PROGRAM_OF.get(source) == SAME_FACTS.get(program, program)]
        bounds = [interval(ratios, SAME_FACTS.get(program, program), is_new_kind=is_new) for is_new in (False, True)]
        cells.append([program, ", ".join(own) or "none", *(f"{low:.2f} to {high:.2f}" for low, high in bounds)])
    return format_table(("program", "its sources", "A100, H100, B200", "another GPU"), cells, markdown=True)


def main() -> int:
    rows = read_rows()
    ratios = left_out_ratios(rows)
    print(sentence(rows, ratios), table(rows, ratios, markdown=False), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
