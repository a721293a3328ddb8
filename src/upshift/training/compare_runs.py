"""Compare two runs that should agree: their requests, the first step that differs, and the first tensors that differ.

The runs are of Upshift or of transformers' Trainer. Losses come from the newest checkpoint, weights from checkpoints of one
step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from upshift.debugging.finding import Finding, error, ok, unknown, warning
from upshift.errors import RequestError
from upshift.training.checkpoint.sharded import Piece, Pieces, copy_overlap
from upshift.units import format_count
from upshift.value import Value

RUN_NAMES = ("upshift_run.json", "trainer_state.json")
IGNORED = {"tokens", "evaluations", "finished", "output", "id", "checksum"}  # fields that are no part of the request
SHOWN = 3  # tensors
RELATIVE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # of one loss, by the coarser precision of the two; else the last
LOOSE = 5e-3
OF_RANK = "weights-"  # files of a checkpoint in parts, each beside its pieces-<rank>.json
OF_WEIGHTS = 100  # times as much: Adam takes a whole step of a gradient near zero, whichever sign rounding gave it
Part = tuple[Path, Piece | None]  # its file; where in the whole it belongs, None: it is the whole


class Difference(Value):
    """The difference of one tensor: the largest distance of two numbers, over the largest number."""

    name: str
    relative: float
    numbers: int


class Comparison(Value):
    one: str
    other: str
    tolerance: float
    first_step: int | None = None  # the first whose losses differ by more
    first_checkpoint: int | None = None  # the first whose weights differ by more
    tensors: tuple[Difference, ...] = ()  # there, the worst first
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Run:
    folder: Path
    asked: Mapping[str, Any]
    losses: Mapping[int, float]  # by step
    checkpoints: Mapping[int, Path]  # with weights


def compare_runs(one: Path, other: Path, *, tolerance: float | None = None) -> Comparison:
    """Compare two runs. ``tolerance`` is the relative one of a loss; None takes it from the precisions of the two."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise RequestError(f"tolerance {tolerance} is not possible; give 0 or more, such as 1e-5")
    pair = (read_run(one), read_run(other))
    limit = tolerance if tolerance is not None else _tolerance(pair)
    findings = list(_asked(*pair))
    step, of_losses = _first_loss(*pair, limit)
    checkpoint, tensors, of_weights = _first_weights(*pair, limit if tolerance is not None else limit * OF_WEIGHTS)
    findings += [of_losses, of_weights]
    return Comparison(
        one=str(one), other=str(other), tolerance=limit, first_step=step, first_checkpoint=checkpoint, tensors=tensors,
        findings=tuple(findings),
    )  # fmt: skip


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give the output folder of a run, which has {' or '.join(RUN_NAMES)}")
    checkpoints = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    newest = checkpoints[max(checkpoints)] if checkpoints else folder
    asked = _json(folder / "upshift_run.json")
    state = _json(newest / "upshift_state.json")
    train = state.get("train", {})
    losses = {step: loss for step, loss in enumerate(train.get("loss_curve", ()), start=1)}
    history = _json(newest / "trainer_state.json") or _json(folder / "trainer_state.json")
    losses |= {entry["step"]: entry["loss"] for entry in history.get("log_history", ()) if "loss" in entry}
    if not (asked or losses):
        raise RequestError(
            f"{folder} has neither {' nor '.join(RUN_NAMES)}; give the output folder of a run that saved a checkpoint"
        )
    plan = {f"plan.{name}": value for name, value in train.get("plan", {}).items()}
    flat = {name: value for name, value in asked.items() if name not in IGNORED and name != "arguments"}
    with_weights = {step: path for step, path in checkpoints.items() if _weight_files(path)}
    if _weight_files(folder) and losses:
        with_weights.setdefault(max(losses), folder)
    return Run(folder, flat | asked.get("arguments", {}) | plan, losses, with_weights)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise RequestError(f"{path} is not JSON: it was cut off, or is another program's; give another run") from None
    if not isinstance(found, dict):
        raise RequestError(f"{path} is not a JSON object: it is another program's; give another run")
    return found


def _tolerance(pair: tuple[Run, Run]) -> float:
    precisions = {str(run.asked.get("plan.precision", "fp32")) for run in pair}
    return max(RELATIVE.get(precision, LOOSE) for precision in precisions)


def _asked(one: Run, other: Run) -> Iterator[Finding]:
    names = [name for name in {**one.asked, **other.asked} if one.asked.get(name) != other.asked.get(name)]
    changes = [name for name in names if not name.startswith("plan.")]
    for name in changes:
        yield warning(
            name,
            what=f"{one.asked.get(name, 'unset')} and {other.asked.get(name, 'unset')}: the runs were not asked for the same",
            evidence="upshift_run.json of both",
            fix=f"run one of them again: upshift train ... --{name.replace('_', '-')} of the other",
        )
    plans = [f"{name[5:]} {one.asked.get(name)} and {other.asked.get(name)}" for name in names if name.startswith("plan.")]
    if plans:
        yield ok("plans", what="differ, which must not change the loss", evidence="; ".join(plans)[:400])
    elif not changes:
        yield ok("request", what="the same", evidence="upshift_run.json and plan of both")


def _first_loss(one: Run, other: Run, limit: float) -> tuple[int | None, Finding]:
    steps = sorted(one.losses.keys() & other.losses.keys())
    if not steps:
        return None, unknown("loss", what="no step whose loss both runs have written", evidence="newest checkpoints of both")
    distances = {step: distance(one.losses[step], other.losses[step]) for step in steps}
    first = next((step for step in steps if not distances[step] <= limit), None)
    worst = max(steps, key=lambda step: (distances[step] != distances[step], distances[step]))
    evidence = f"{len(steps):,} common steps, largest difference {distances[worst]:.1e} at step {worst}; {limit:.0e} tolerated"
    if first is None:
        return None, ok("loss", what="agrees at every common step", evidence=evidence)
    return first, error(
        "loss",
        what=f"differs first at step {first}: {one.losses[first]:.6f} and {other.losses[first]:.6f} ({distances[first]:.1e})",
        evidence=evidence,
        fix=f"--save-steps {max(first - 1, 1)} --max-steps {first} on both; upshift compare-runs then names the tensors",
    )


def _first_weights(one: Run, other: Run, limit: float) -> tuple[int | None, tuple[Difference, ...], Finding]:
    common = sorted(one.checkpoints.keys() & other.checkpoints.keys())
    if not common:
        have = "; ".join(f"{run.folder}: {', '.join(map(str, sorted(run.checkpoints))) or 'none'}" for run in (one, other))
        return (
            None,
            (),
            unknown("weights", what="no checkpoint of the same step in both; --save-steps N writes them", evidence=have),
        )
    every: list[Difference] = []
    for step in common:
        different = compare_weights(one.checkpoints[step], other.checkpoints[step])
        every += different
        over = [item for item in different if not item.relative <= limit]
        if over:
            first = over[0]
            worst = sorted(over, key=lambda item: -item.relative)
            words = ", ".join(f"{item.name} {item.relative:.1e}" for item in worst[:SHOWN])
            before = [other for other in common if other < step]
            return (
                step,
                tuple(worst),
                error(
                    "weights",
                    what=f"differ first in checkpoint {step}, by name first in {first.name} ({first.relative:.1e})",
                    evidence=f"{len(over)} of {len(different)} tensors over {limit:.0e}; most: {words}"
                    + (f"; the same in checkpoint {before[-1]}" if before else ""),
                    fix=f"--save-steps 1 --max-steps {step} on both, then upshift compare-runs again names the first step",
                ),
            )
    total = sum(item.numbers for item in every)
    furthest = max(every, key=lambda item: item.relative)
    return None, (), ok(
        "weights", what=f"agree in checkpoints {', '.join(map(str, common))}",
        evidence=f"{format_count(total)} numbers; largest difference {furthest.relative:.1e} in {furthest.name}",
    )  # fmt: skip


def compare_weights(one: Path, other: Path) -> list[Difference]:
    """Return the difference of every tensor of two folders, in the order of names, with numbers compared by value."""
    places = [_places(folder) for folder in (one, other)]
    missing = sorted(places[0].keys() ^ places[1].keys())
    if missing:
        raise RequestError(f"{missing[0]} is in one of {one} and {other} only: they are different models")
    found = []
    for name in sorted(places[0], key=_by_number):
        a, b = (_whole(name, parts[name]) for parts in places)
        if a.shape != b.shape:
            raise RequestError(f"{name} is {tuple(a.shape)} in {one} and {tuple(b.shape)} in {other}: they are different models")
        largest = float(a.double().abs().max()) if a.numel() else 0.0
        far = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        found.append(Difference(name=name, relative=_finite(far / largest if largest else far), numbers=a.numel()))
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a whole model, or of each rank's parts."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name.startswith(("model", "adapter", OF_RANK)))


def _places(folder: Path) -> dict[str, list[Part]]:
    """Return the parts of each tensor by its name."""
    found: dict[str, list[Part]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
        except SafetensorError as error:
            raise RequestError(f"{path} is not a whole safetensors file ({error}); compare other checkpoints") from None
        said = _pieces(path) if path.name.startswith(OF_RANK) else None
        for name in names:
            piece = None if said is None else said.get(f"weights/{name}")
            if said is not None and piece is None:
                raise RequestError(f"{path} has a part of {name}, and no pieces-*.json says which; compare other checkpoints")
            found.setdefault(name, []).append((path, piece))
    return found


def _pieces(weights: Path) -> Mapping[str, Piece]:
    """Return the pieces of the parts in a rank's file."""
    path = weights.with_name(weights.name.replace(OF_RANK, "pieces-", 1)).with_suffix(".json")
    return Pieces.from_file(path).tensors if path.is_file() else {}


def _whole(name: str, parts: list[Part]) -> Tensor:
    whole: Tensor | None = None
    for path, piece in parts:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if piece is None:
            return tensor
        whole = torch.zeros(piece.shape, dtype=tensor.dtype) if whole is None else whole
        copy_overlap(whole, Piece(shape=piece.shape), tensor, piece)
    assert whole is not None, "a tensor is there because a file has it"
    return whole


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def distance(one: float, other: float) -> float:
    """Return the relative distance of two losses. NaN is at no distance from NaN."""
    if one != one and other != other:
        return 0.0
    return _finite(abs(one - other) / max(abs(one), abs(other), 1e-30))


def _finite(value: float) -> float:
    return value if value == value and value != float("inf") else 1e300
