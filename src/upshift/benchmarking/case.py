"""The parts that all benchmark cases share: the command line, and rows that carry the settings and the machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from upshift.benchmarking.environment import environment
from upshift.benchmarking.harness import append_rows
from upshift.hardware.spec import Host
from upshift.record import Environment, Numbers, Record, Spread
from upshift.units import FLOP_CONVENTION


def command_line(description: str, *, results: Path) -> argparse.ArgumentParser:
    """Return a parser with the options that all cases share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny settings: shows that the case runs, proves nothing")
    parser.add_argument("--results", type=Path, default=results, help="folder of the JSONL rows, which are appended")
    parser.add_argument("--seed", type=int, default=42)
    return parser


class Times(NamedTuple):
    """The seconds of a contender and of its baseline, round by round."""

    seconds: list[float]
    base: list[float]
    base_name: str

    def ratio(self) -> float:
        return median(baseline / seconds for baseline, seconds in zip(self.base, self.seconds, strict=True))


@dataclass
class Case:
    """A collector of the rows of one run. Each row names the case, its settings and the machine."""

    name: str
    results: Path  # the folder
    host: Host
    quick: bool
    settings: dict[str, Any]
    environment: Environment = field(init=False)
    rows: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment = environment(self.host)

    @property
    def path(self) -> Path:
        return self.results / f"{self.name}.jsonl"

    def add(
        self,
        name: str,
        *,
        plan: dict[str, Any],
        measured: Numbers | None,
        predicted: Numbers | None = None,
        baseline: Numbers | None = None,
        baseline_name: str | None = None,
        failure: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> Record:
        """Make a row and append it at once, so that it is not lost when a later contender fails."""
        row = Record(
            kind="benchmark",
            name=f"{self.name}/{name}",
            plan=plan,
            predicted=predicted,
            measured=measured,
            baseline=baseline,
            baseline_name=baseline_name,
            flop_convention=f"model FLOPs: {FLOP_CONVENTION}",
            environment=self.environment,
            failure=failure,
            details={"quick": self.quick, "settings": self.settings, **(details or {})},
        )
        self.rows.append(row)
        append_rows(self.path, [row])
        return row

    def add_times(self, name: str, times: Times, *, plan: dict[str, Any], details: dict[str, Any]) -> float:
        """Add a contender's row beside its baseline's of the same rounds, and return the median ratio."""
        self.add(
            name,
            plan=plan,
            measured=_times_numbers(times.seconds),
            baseline=_times_numbers(times.base),
            baseline_name=times.base_name,
            details={"ratio": times.ratio(), **details},
        )
        return times.ratio()


def _times_numbers(seconds: list[float]) -> Numbers:
    return Numbers(step_ms=Spread.of([1000 * value for value in seconds], num_warmup=1))


def print_progress(text: str) -> None:
    """Print a line to standard error, apart from the results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
