"""Define the numbers that documents and claims state, each as the place in the result rows that it is read from.

A case names them at its top, in ``FIGURES`` and ``CLAIMS``; they are read from its source, so that a list of all claims
imports no case and no torch, and a new case is one file.

Compare each claim's newest number with its goal, the worst first.
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
    """A number in a row, among all rows of that name whose details, or settings, equal ``where``."""

    row: str = Field(description="behind the case's name: summary for drop_in/summary")
    value: str = Field(description="keys of the row, joined by dots: measured.tokens_per_second")
    where: dict[str, Any] = Field(default_factory=dict)


class Figure(Value):
    name: str = Field(description="within the case; documents say case/name")
    of: Source | None = Field(None, description="None: no row has it yet")
    over: Source | None = Field(None, description="what it is divided by, in the same run")
    scale: float = Field(1.0, description="to the unit that is written")


class Claim(Figure):
    """A figure that is promised, with its baseline and its goal."""

    text: str
    ours: str
    baseline: str
    options: str = Field("", description="of the command that measures it")
    unit: str = "times"
    better: Literal["higher", "lower"] = "higher"
    goal: float | None = None


class Table(Value):
    """A table between ``<!-- rows: case/name -->`` and ``<!-- end -->``.

    Its lines have figures of the case as ``{name:.1f}`` in their cells. Or there is a line for each entry of a dictionary in
    the newest row ``of``: its key, then ``cells`` of its values."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    of: str = Field("", description="behind the case's name, as a Source's")
    each: str = Field("", description="keys of the row, joined by dots, to the dictionary")
    cells: tuple[str, ...] = ()


class Reading(Value):
    """The value of a figure at a time."""

    value: float
    time: str
    commit: str | None


class CaseFile:
    """A case's claims, figures and tables, read from its source."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        self._tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        assigned = (node for node in self._tree.body if isinstance(node, ast.Assign))
        self._assigned = {to.id: node.value for node in assigned for to in node.targets if isinstance(to, ast.Name)}
        self.text = (ast.get_docstring(self._tree) or "").split("\n\n")[0].replace("\n", " ")
        self.claims: tuple[Claim, ...] = self._stated("CLAIMS", ())
        self.figures: tuple[Figure, ...] = (*self.claims, *self._stated("FIGURES", ()))
        self.tables: tuple[Table, ...] = self._stated("TABLES", ())
        self.peers: dict[str, str] = self._stated("PEERS", {})  # what --against takes -> the options that run them alone
        self.suite: str = self._stated("SUITE", "")  # options of a run that takes minutes, among all other cases

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
        """Return the readings, oldest first, without runs with --quick.

        The divisor is of the same run, whose rows have one time."""
        over: dict[str, float] = {}
        for row in self.rows:
            if figure.over is not None and (beside := self._number(figure.over, row)):
                over[row["environment"]["time"]] = beside
        found = []
        for row in self.rows:
            where, value = row["environment"], None if figure.of is None else self._number(figure.of, row)
            base = 1.0 if figure.over is None else over.get(where["time"])
            if value is not None and base is not None and not row["details"].get("quick"):
                found.append(Reading(value=figure.scale * value / base, time=where["time"], commit=where.get("commit")))
        return found

    def latest(self, name: str) -> float:
        """Return the newest value of a figure. Raise RequestError if the case has no such figure, or its rows do not."""
        figure = next((one for one in self.figures if one.name == name), None)
        if figure is None:
            said = ", ".join(one.name for one in self.figures) or "none"
            raise RequestError(f"{self.path.name} states no figure {name!r}; it states {said}")
        readings = self.readings(figure)
        if not readings:
            raise RequestError(f"no row of {self.results.name} has {self.name}/{name}; run {self.command()}")
        return readings[-1].value

    def entries(self, row: str, value: str) -> dict[str, dict[str, Any]]:
        """Return the dictionary of that name in the newest row, without runs with --quick.

        Raise RequestError if there is none."""
        for one in reversed(self.rows):
            found = _at(one, value) if one["name"] == f"{self.name}/{row}" and not one["details"].get("quick") else None
            if isinstance(found, dict):
                return found
        raise RequestError(f"no row {self.name}/{row} of {self.results.name} has {value}; run {self.command()}")

    def _number(self, source: Source, row: dict[str, Any]) -> float | None:
        if row["name"] != f"{self.name}/{source.row}":
            return None
        said = (row["details"], row["details"].get("settings", {}))
        if not all(any(one.get(key) == value for one in said) for key, value in source.where.items()):
            return None
        found = _at(row, source.value)
        return float(found) if isinstance(found, int | float) else None

    def _stated(self, name: str, default: Any) -> Any:
        node = self._assigned.get(name)
        return default if node is None else _evaluate(node, f"{self.path.name}, {name}", self._assigned)


def _at(row: dict[str, Any], value: str) -> Any:
    found: Any = row
    for key in value.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


VALUES: dict[str, type[Value]] = {kind.__name__: kind for kind in (Source, Figure, Claim, Table)}


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _evaluate(node: ast.expr, origin: str, assigned: Mapping[str, ast.expr]) -> Any:
    """Evaluate literals, the values above made of them, and names of either. ``assigned``: at the top of the file."""
    if isinstance(node, ast.Name) and node.id in assigned:
        return _evaluate(assigned[node.id], origin, assigned)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_evaluate(one, origin, assigned) for one in node.elts)
    if isinstance(node, ast.Call) and _called(node) in VALUES and not node.args:
        try:
            fields = {str(one.arg): _evaluate(one.value, origin, assigned) for one in node.keywords}
            return VALUES[_called(node)].from_fields(fields)
        except RequestError as error:
            raise RequestError(f"{origin}, line {node.lineno}: {error}") from None
    try:
        return ast.literal_eval(node)
    except ValueError:
        what = f"{', '.join(VALUES)} with fields by name, literals, and names of them"
        raise RequestError(f"{origin}, line {node.lineno}: {ast.unparse(node)[:60]!r} is computed; use {what}") from None


def find_cases(folder: Path | None = None) -> dict[str, CaseFile]:
    """Return all cases of ``folder``, by name; None: the cases of the clone that this is called in."""
    chosen = folder or next((one / CASES for one in (Path.cwd(), *Path.cwd().parents) if (one / CASES).is_dir()), CASES)
    if not chosen.is_dir():
        where = folder or f"{CASES} in this folder or above it"
        raise RequestError(
            f"there is no {where}; cases come with a clone, not with the package: go there, or give --cases FOLDER"
        )
    files = [CaseFile(path) for path in sorted(chosen.glob("*.py"))]
    return {file.name: file for file in files if file.is_case}


def find_case(name: str, folder: Path | None = None) -> CaseFile:
    cases = find_cases(folder)
    if name not in cases:
        raise RequestError(f"there is no case {name!r}; there are {', '.join(cases) or 'none'}")
    return cases[name]


class Standing(Value):
    name: str  # case/claim
    claim: Claim
    command: str
    readings: tuple[Reading, ...]

    @classmethod
    def of(cls, case: CaseFile, claim: Claim) -> Standing:
        readings = tuple(case.readings(claim))
        return cls(name=f"{case.name}/{claim.name}", claim=claim, command=case.command(claim), readings=readings)

    @property
    def value(self) -> float | None:
        return self.readings[-1].value if self.readings else None

    @property
    def share(self) -> float | None:
        """Return the share of the goal that is reached: 1 and more if it is. None: no rows, or no goal."""
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


def standings(cases: Mapping[str, CaseFile]) -> list[Standing]:
    """Return the claims, the furthest from its goal first; then those without a goal, then those without rows."""
    found = [Standing.of(case, claim) for case in cases.values() for claim in case.claims]
    return sorted(found, key=lambda one: (not one.readings, one.share is None, one.share or 0.0, one.name))
