"""Compare two runs that should agree: their requests, the first step whose loss differs, and the first tensors that differ.

The runs may be Upshift's or those of transformers' Trainer. Losses come from the newest checkpoint, weights from checkpoints of
the same step.
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
REQUEST_FIELDS = ("model", "data", "eval_data", "global_batch", "sequence_length", "objective")  # of the run file
GROUPS = ("arguments", "adapter", "data_options")  # objects in the run file, whose fields also belong to the request
MAX_SHOWN_TENSORS = 3
# Relative tolerance of a loss, by the less precise run, and for all other precisions.
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
DEFAULT_LOSS_TOLERANCE = 5e-3
RANK_FILE_PREFIX = "weights-"  # files of a divided checkpoint, each beside its pieces-<rank>.json
# Weights may differ more than losses: for a gradient near zero, Adam takes a whole step in the direction of its rounded sign.
WEIGHT_TOLERANCE_FACTOR = 100
StoredPart = tuple[Path, Piece | None]  # the file, and the part of the tensor that it holds; None: the whole tensor


class Difference(Value):
    """The difference of one tensor: the largest distance of two numbers, divided by the largest number."""

    name: str
    relative: float
    numbers: int


class Comparison(Value):
    """The result of a comparison."""

    one: str
    other: str
    tolerance: float
    first_step: int | None = None  # the first whose losses differ by more than the tolerance
    first_checkpoint: int | None = None  # the first whose weights differ by more than the tolerance
    tensors: tuple[Difference, ...] = ()  # the tensors of that checkpoint, the largest difference first
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder."""

    folder: Path
    request: Mapping[str, Any]
    losses: Mapping[int, float]  # by step
    checkpoints: Mapping[int, Path]  # with weights


def compare_runs(one: Path, other: Path, *, tolerance: float | None = None) -> Comparison:
    """Compare two runs. ``tolerance`` is relative, for a loss. None derives it from the precisions of the runs."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise RequestError(f"tolerance {tolerance} is not possible; give 0 or more, such as 1e-5")
    pair = (read_run(one), read_run(other))
    limit = tolerance if tolerance is not None else _tolerance(pair)
    weight_limit = limit if tolerance is not None else limit * WEIGHT_TOLERANCE_FACTOR
    findings = list(_compare_requests(*pair))
    step, loss_finding = _compare_losses(*pair, limit)
    checkpoint, tensors, weight_finding = _compare_checkpoints(*pair, weight_limit)
    findings += [loss_finding, weight_finding]
    return Comparison(
        one=str(one),
        other=str(other),
        tolerance=limit,
        first_step=step,
        first_checkpoint=checkpoint,
        tensors=tensors,
        findings=tuple(findings),
    )


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raise RequestError if it is not one."""
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give the output folder of a run, which has {' or '.join(RUN_NAMES)}")
    checkpoints = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    newest = checkpoints[max(checkpoints)] if checkpoints else folder
    run_file = _read_json(folder / "upshift_run.json")
    state = _read_json(newest / "upshift_state.json")
    train = state.get("train", {})
    losses = {step: loss for step, loss in enumerate(train.get("loss_curve", ()), start=1)}
    history = _read_json(newest / "trainer_state.json") or _read_json(folder / "trainer_state.json")
    losses |= {entry["step"]: entry["loss"] for entry in history.get("log_history", ()) if "loss" in entry}
    if not (run_file or losses):
        raise RequestError(
            f"{folder} has neither {' nor '.join(RUN_NAMES)}; give the output folder of a run that saved a checkpoint"
        )
    plan = {f"plan.{name}": value for name, value in train.get("plan", {}).items()}
    request: dict[str, Any] = {}
    for group in GROUPS:
        request |= run_file.get(group) or {}
    request |= {name: run_file[name] for name in REQUEST_FIELDS if name in run_file}
    with_weights = {step: path for step, path in checkpoints.items() if _weight_files(path)}
    if _weight_files(folder) and losses:
        with_weights.setdefault(max(losses), folder)
    return Run(folder, request | plan, losses, with_weights)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. It is empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise RequestError(f"{path} is not JSON: it was cut off, or is another program's; give another run") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} is not a JSON object: it is another program's; give another run")
    return content


def _tolerance(pair: tuple[Run, Run]) -> float:
    precisions = {str(run.request.get("plan.precision", "fp32")) for run in pair}
    return max(LOSS_TOLERANCES.get(precision, DEFAULT_LOSS_TOLERANCE) for precision in precisions)


def _compare_requests(run: Run, other_run: Run) -> Iterator[Finding]:
    names = [name for name in {**run.request, **other_run.request} if run.request.get(name) != other_run.request.get(name)]
    changes = [name for name in names if not name.startswith("plan.")]
    for name in changes:
        value = run.request.get(name, "unset")
        other_value = other_run.request.get(name, "unset")
        yield warning(
            name,
            what=f"{value} and {other_value}: the runs had different settings",
            evidence="upshift_run.json of both",
            fix=f"train one of them again: upshift train ... with the {name} of the other",
        )
    plan_changes = [
        f"{name[5:]} {run.request.get(name)} and {other_run.request.get(name)}" for name in names if name.startswith("plan.")
    ]
    if plan_changes:
        yield ok("plans", what="differ, which must not change the loss", evidence="; ".join(plan_changes)[:400])
    elif not changes:
        yield ok("request", what="the same", evidence="upshift_run.json and plan of both")


def _compare_losses(run: Run, other_run: Run, limit: float) -> tuple[int | None, Finding]:
    steps = sorted(run.losses.keys() & other_run.losses.keys())
    if not steps:
        return None, unknown("loss", what="no step whose loss both runs have written", evidence="newest checkpoints of both")
    distances = {step: relative_distance(run.losses[step], other_run.losses[step]) for step in steps}
    first = next((step for step in steps if not distances[step] <= limit), None)
    worst = max(steps, key=lambda step: (distances[step] != distances[step], distances[step]))
    evidence = f"{len(steps):,} common steps, largest difference {distances[worst]:.1e} at step {worst}; {limit:.0e} tolerated"
    if first is None:
        return None, ok("loss", what="agrees at every common step", evidence=evidence)
    return first, error(
        "loss",
        what=f"differs first at step {first}: {run.losses[first]:.6f} and {other_run.losses[first]:.6f} ({distances[first]:.1e})",
        evidence=evidence,
        fix=f"--save-steps {max(first - 1, 1)} --max-steps {first} on both; upshift compare-runs then names the tensors",
    )


def _compare_checkpoints(run: Run, other_run: Run, limit: float) -> tuple[int | None, tuple[Difference, ...], Finding]:
    common = sorted(run.checkpoints.keys() & other_run.checkpoints.keys())
    if not common:
        checkpoints = "; ".join(
            f"{side.folder}: {', '.join(map(str, sorted(side.checkpoints))) or 'none'}" for side in (run, other_run)
        )
        return (
            None,
            (),
            unknown("weights", what="no checkpoint of the same step in both; --save-steps N writes them", evidence=checkpoints),
        )
    all_differences: list[Difference] = []
    for step in common:
        differences = compare_weights(run.checkpoints[step], other_run.checkpoints[step])
        all_differences += differences
        too_large = [difference for difference in differences if not difference.relative <= limit]
        if too_large:
            first = too_large[0]
            largest_first = sorted(too_large, key=lambda difference: -difference.relative)
            largest = ", ".join(f"{item.name} {item.relative:.1e}" for item in largest_first[:MAX_SHOWN_TENSORS])
            earlier_steps = [earlier for earlier in common if earlier < step]
            return (
                step,
                tuple(largest_first),
                error(
                    "weights",
                    what=f"differ first in checkpoint {step}, by name first in {first.name} ({first.relative:.1e})",
                    evidence=f"{len(too_large)} of {len(differences)} tensors over {limit:.0e}; most: {largest}"
                    + (f"; the same in checkpoint {earlier_steps[-1]}" if earlier_steps else ""),
                    fix=f"--save-steps 1 --max-steps {step} on both, then upshift compare-runs again names the first step",
                ),
            )
    total = sum(difference.numbers for difference in all_differences)
    furthest = max(all_differences, key=lambda difference: difference.relative)
    return (
        None,
        (),
        ok(
            "weights",
            what=f"agree in checkpoints {', '.join(map(str, common))}",
            evidence=f"{format_count(total)} numbers; largest difference {furthest.relative:.1e} in {furthest.name}",
        ),
    )


def compare_weights(folder: Path, other_folder: Path) -> list[Difference]:
    """Return the difference of every tensor of two folders, in the order of names."""
    parts = _parts_by_name(folder)
    other_parts = _parts_by_name(other_folder)
    missing = sorted(parts.keys() ^ other_parts.keys())
    if missing:
        raise RequestError(f"{missing[0]} is in one of {folder} and {other_folder} only: they are different models")
    differences = []
    for name in sorted(parts, key=_natural_key):
        a = _read_whole(name, parts[name])
        b = _read_whole(name, other_parts[name])
        if a.shape != b.shape:
            raise RequestError(
                f"{name} is {tuple(a.shape)} in {folder} and {tuple(b.shape)} in {other_folder}: they are different models"
            )
        largest = float(a.double().abs().max()) if a.numel() else 0.0
        distance = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        relative = _finite(distance / largest if largest else distance)
        differences.append(Difference(name=name, relative=relative, numbers=a.numel()))
    return differences


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with a whole model's weights, or with those of each rank."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name.startswith(("model", "adapter", RANK_FILE_PREFIX)))


def _parts_by_name(folder: Path) -> dict[str, list[StoredPart]]:
    """Return the parts of each tensor, by its name."""
    parts: dict[str, list[StoredPart]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
        except SafetensorError as error:
            raise RequestError(f"{path} is not a whole safetensors file ({error}); compare other checkpoints") from None
        pieces = _read_pieces(path) if path.name.startswith(RANK_FILE_PREFIX) else None
        for name in names:
            piece = None if pieces is None else pieces.get(f"weights/{name}")
            if pieces is not None and piece is None:
                raise RequestError(f"{path} has a part of {name}, and no pieces-*.json says which; compare other checkpoints")
            parts.setdefault(name, []).append((path, piece))
    return parts


def _read_pieces(weights: Path) -> Mapping[str, Piece]:
    """Return which part of each tensor a rank's file holds, by the tensor's name."""
    path = weights.with_name(weights.name.replace(RANK_FILE_PREFIX, "pieces-", 1)).with_suffix(".json")
    return Pieces.from_file(path).tensors if path.is_file() else {}


def _read_whole(name: str, parts: list[StoredPart]) -> Tensor:
    """Return a tensor, joined from its parts."""
    joined: Tensor | None = None
    for path, piece in parts:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if piece is None:
            return tensor
        joined = torch.zeros(piece.shape, dtype=tensor.dtype) if joined is None else joined
        copy_overlap(joined, Piece(shape=piece.shape), tensor, piece)
    assert joined is not None, "a tensor has at least one part"
    return joined


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in names sort by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def relative_distance(loss: float, other_loss: float) -> float:
    """Return the relative distance of two losses. The distance of NaN from NaN is 0."""
    if loss != loss and other_loss != other_loss:
        return 0.0
    return _finite(abs(loss - other_loss) / max(abs(loss), abs(other_loss), 1e-30))


def _finite(value: float) -> float:
    return value if value == value and value != float("inf") else 1e300
