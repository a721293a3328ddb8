"""Read the claims, figures and tables that benchmark cases declare, and their numbers from the result rows.

A case declares them at its top, in ``CLAIMS``, ``FIGURES`` and ``TABLES``. They are read from its source: a list of all claims
imports no case and no torch, and a new case is one file. ``claim_statuses`` compares each claim's newest number with its goal.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from upshift.errors import RequestError
from upshift.value import Value

CASES = Path("benchmarks") / "cases"


class Source(Value):
    """The place of a number: a key of the rows with a name, whose details or settings have the values of ``where``."""

    row: str = Field(description="behind the case's name: summary for drop_in/summary")
    value: str = Field(description="keys of the row, joined by dots: measured.tokens_per_second")
    where: dict[str, Any] = Field(default_factory=dict)


class Figure(Value):
    """A number that a document states."""

    name: str = Field(description="within the case; documents say case/name")
    of: Source | None = Field(None, description="None: no row has it yet")
    over: Source | None = Field(None, description="what it is divided by, in the same run")
    scale: float = Field(1.0, description="to the unit that is written")


class Claim(Figure):
    """A figure that Upshift promises, with its baseline and its goal."""

    text: str
    ours: str
    baseline: str
    options: str = Field("", description="of the command that measures it")
    unit: str = "times"
    better: Literal["higher", "lower"] = "higher"
    goal: float | None = None


class Table(Value):
    """A table of a document, between ``<!-- rows: case/name -->`` and ``<!-- end -->``.

    The cells of ``rows`` hold figures of the case, as ``{name:.1f}``. Or a line stands for each entry of the dictionary ``each``
    in the newest row ``of``: its key, then ``cells``, filled with its values."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    of: str = Field("", description="behind the case's name, as a Source's")
    each: str = Field("", description="keys of the row, joined by dots, to the dictionary")
    cells: tuple[str, ...] = ()


class Reading(Value):
    """The value of a figure at one time."""

    value: float
    time: str
    commit: str | None


class CaseFile:
    """A case's claims, figures and tables, read from its source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        assigned = (node for node in self._tree.body if isinstance(node, ast.Assign))
        self._assigned = {to.id: node.value for node in assigned for to in node.targets if isinstance(to, ast.Name)}
        self.text = (ast.get_docstring(self._tree) or "").split("\n\n")[0].replace("\n", " ")
        self.claims: tuple[Claim, ...] = self._stated("CLAIMS", ())
        self.figures: tuple[Figure, ...] = (*self.claims, *self._stated("FIGURES", ()))
        self.tables: tuple[Table, ...] = self._stated("TABLES", ())
        self.peers: dict[str, str] = self._stated("PEERS", {})  # by value of --against: the options that run it alone
        self.suite: str = self._stated("SUITE", "")  # options for a run of some minutes, as part of the suite of all cases

    @property
    def is_case(self) -> bool:
        """Return whether the file runs from the command line with the options that all cases have."""
        return any(isinstance(node, ast.Call) and _called(node) == "command_line" for node in ast.walk(self._tree))

    @property
    def results(self) -> Path:
        return self.path.parents[1] / "results" / f"{self.name}.jsonl"

    def command(self, claim: Claim | None = None) -> str:
        """Return the command that runs the case, from the folder above benchmarks."""
        options = f" {claim.options}" if claim and claim.options else ""
        return f"python benchmarks/cases/{self.path.name}{options}"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text(encoding="utf-8").splitlines()]

    def readings(self, figure: Figure) -> list[Reading]:
        """Return the readings of a figure, oldest first, without those of runs with --quick.

        The divisor is a number of the same run: its row has the same time."""
        divisors: dict[str, float] = {}
        for row in self.rows:
            if figure.over is not None and (divisor := self._number(figure.over, row)):
                divisors[row["environment"]["time"]] = divisor
        readings = []
        for row in self.rows:
            row_environment = row["environment"]
            value = None if figure.of is None else self._number(figure.of, row)
            base = 1.0 if figure.over is None else divisors.get(row_environment["time"])
            if value is not None and base is not None and not row["details"].get("quick"):
                readings.append(
                    Reading(value=figure.scale * value / base, time=row_environment["time"], commit=row_environment.get("commit"))
                )
        return readings

    def latest(self, name: str) -> float:
        """Return the newest value of a figure. Raise RequestError if the case has no such figure, or no row has it."""
        figure = next((candidate for candidate in self.figures if candidate.name == name), None)
        if figure is None:
            names = ", ".join(candidate.name for candidate in self.figures) or "none"
            raise RequestError(f"{self.path.name} states no figure {name!r}; it states {names}")
        readings = self.readings(figure)
        if not readings:
            raise RequestError(f"no row of {self.results.name} has {self.name}/{name}; run {self.command()}")
        return readings[-1].value

    def entries(self, row: str, value: str) -> dict[str, dict[str, Any]]:
        """Return the dictionary at the key ``value`` of the newest row that has one, without runs with --quick.

        Raise RequestError if no row has one."""
        for candidate in reversed(self.rows):
            if candidate["name"] != f"{self.name}/{row}" or candidate["details"].get("quick"):
                continue
            entries = _item_at(candidate, value)
            if isinstance(entries, dict):
                return entries
        raise RequestError(f"no row {self.name}/{row} of {self.results.name} has {value}; run {self.command()}")

    def _number(self, source: Source, row: dict[str, Any]) -> float | None:
        if row["name"] != f"{self.name}/{source.row}":
            return None
        settings = (row["details"], row["details"].get("settings", {}))
        if not all(any(mapping.get(key) == value for mapping in settings) for key, value in source.where.items()):
            return None
        number = _item_at(row, source.value)
        return float(number) if isinstance(number, int | float) else None

    def _stated(self, name: str, default: Any) -> Any:
        node = self._assigned.get(name)
        return default if node is None else _evaluate(node, f"{self.path.name}, {name}", self._assigned)


def _item_at(row: dict[str, Any], path: str) -> Any:
    """Return the item at keys that are joined by dots, or None."""
    item: Any = row
    for key in path.split("."):
        item = item.get(key) if isinstance(item, dict) else None
    return item


VALUES: dict[str, type[Value]] = {kind.__name__: kind for kind in (Source, Figure, Claim, Table)}


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _evaluate(node: ast.expr, origin: str, assigned: Mapping[str, ast.expr]) -> Any:
    """Evaluate an expression of literals, of the classes in VALUES, and of names that ``assigned`` has.

    ``origin``: the file and the name, for error messages. ``assigned``: the expressions at the top of the file."""
    if isinstance(node, ast.Name) and node.id in assigned:
        return _evaluate(assigned[node.id], origin, assigned)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_evaluate(element, origin, assigned) for element in node.elts)
    if isinstance(node, ast.Call) and _called(node) in VALUES and not node.args:
        try:
            fields = {str(element.arg): _evaluate(element.value, origin, assigned) for element in node.keywords}
            return VALUES[_called(node)].from_fields(fields)
        except RequestError as error:
            raise RequestError(f"{origin}, line {node.lineno}: {error}") from None
    try:
        return ast.literal_eval(node)
    except ValueError:
        allowed = f"{', '.join(VALUES)} with fields by name, literals, and names of them"
        raise RequestError(f"{origin}, line {node.lineno}: {ast.unparse(node)[:60]!r} is computed; use {allowed}") from None


def find_cases(folder: Path | None = None) -> dict[str, CaseFile]:
    """Return all cases of ``folder`` by name. None: those of the clone that holds the current folder."""
    parents = (Path.cwd(), *Path.cwd().parents)
    chosen = folder or next((parent / CASES for parent in parents if (parent / CASES).is_dir()), CASES)
    if not chosen.is_dir():
        expected = folder or f"{CASES} in this folder or above it"
        raise RequestError(
            f"there is no {expected}; cases come with a clone, not with the package: go there, or give --cases FOLDER"
        )
    files = [CaseFile(path) for path in sorted(chosen.glob("*.py"))]
    return {file.name: file for file in files if file.is_case}


def find_case(name: str, folder: Path | None = None) -> CaseFile:
    cases = find_cases(folder)
    if name not in cases:
        raise RequestError(f"there is no case {name!r}; there are {', '.join(cases) or 'none'}")
    return cases[name]


class ClaimStatus(Value):
    """A claim and its readings."""

    name: str  # case/claim
    claim: Claim
    command: str
    readings: tuple[Reading, ...]

    @classmethod
    def of(cls, case: CaseFile, claim: Claim) -> ClaimStatus:
        readings = tuple(case.readings(claim))
        return cls(name=f"{case.name}/{claim.name}", claim=claim, command=case.command(claim), readings=readings)

    @property
    def value(self) -> float | None:
        return self.readings[-1].value if self.readings else None

    @property
    def share(self) -> float | None:
        """Return the reached share of the goal, 1 or more if it is reached, or None without rows or a goal."""
        if self.value is None or self.claim.goal is None or min(self.value, self.claim.goal) <= 0:
            return None
        return self.value / self.claim.goal if self.claim.better == "higher" else self.claim.goal / self.value

    @property
    def is_reached(self) -> bool | None:
        if self.value is None or self.claim.goal is None:
            return None
        return self.value >= self.claim.goal if self.claim.better == "higher" else self.value <= self.claim.goal

    def written(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f} {self.claim.unit}" if abs(value) >= 100 else f"{value:.3g} {self.claim.unit}"


def claim_statuses(cases: Mapping[str, CaseFile]) -> list[ClaimStatus]:
    """Return the claims, the furthest from its goal first. Claims without a goal follow, then claims without rows."""
    statuses = [ClaimStatus.of(case, claim) for case in cases.values() for claim in case.claims]
    return sorted(statuses, key=lambda status: (not status.readings, status.share is None, status.share or 0.0, status.name))
