"""Explain why a step ran out of memory: each part's predicted bytes, its bytes at the moment of the failure, and the culprit."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from torch import nn

from upshift.benchmarking.meters import resident_bytes, tensor_bytes
from upshift.planning.plan import Plan
from upshift.record import Numbers
from upshift.units import GIB, format_bytes, gib
from upshift.value import Value

AUTOPSIES_NAME = "upshift_out_of_memory.jsonl"
TRANSIENT = ("activations", "loss", "workspace")
NOTICED = 0.05  # a part over its prediction by less explains nothing
ALLOCATOR_KEYS = (
    "allocated_bytes.all.current", "reserved_bytes.all.current", "inactive_split_bytes.all.current", "num_alloc_retries",
    "num_ooms",
)  # fmt: skip


class PartMemory(Value):
    part: str
    predicted_gib: float | None
    measured_gib: float


class Autopsy(Value):
    step: int
    shape: tuple[int, ...]  # rows and tokens a row of the micro-batch that did not fit
    planned_shape: tuple[int, ...]  # of the largest that was planned for
    smaller: tuple[int, ...]  # of the largest one from now on
    words: str  # the allocator's
    parts: tuple[PartMemory, ...]
    held_gib: float  # of the process, or in use on the device
    free_gib: float  # left to others
    free_when_planned_gib: float | None
    allocator: dict[str, int]
    verdict: str

    def write(self, folder: Path) -> Path:
        """Append one line to the run's file. Return the path of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / AUTOPSIES_NAME
        with path.open("a", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")
        return path


class Scene(Value):
    """The readings of the meters while the failed step's tensors were still there."""

    held: int
    tensors: int  # allocated on the device; on a CPU 0: its allocator keeps no count
    free: int
    allocator: dict[str, int]


def read_scene(device: str) -> Scene:
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        counters = torch.cuda.memory_stats()
        kept = {key: int(counters.get(key, 0)) for key in ALLOCATOR_KEYS}
        return Scene(held=total - free, tensors=torch.cuda.memory_allocated(), free=free, allocator=kept)
    return Scene(held=resident_bytes(), tensors=0, free=psutil.virtual_memory().available, allocator={})


def examine(
    scene: Scene,
    *,
    step: int,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    predicted: Numbers | None,
    free_when_planned: float | None,
    shape: tuple[int, ...],
    smaller: tuple[int, ...],
    words: str,
) -> Autopsy:
    """Return the autopsy of a failed step. Call it before the model or the optimizer change."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    known = {"weights": weights, "gradients": gradients, "optimizer": tensor_bytes(optimizer) if optimizer else 0}
    phases = predicted.memory if predicted is not None and predicted.memory else {}
    expected = {name: size * GIB for name, size in max(phases.values(), key=lambda p: sum(p.values()), default={}).items()}
    predicted_held = predicted.resident_gib * GIB if predicted is not None and predicted.resident_gib else None
    base = max((predicted_held or 0.0) - sum(expected.values()), 0.0)
    rest = max((scene.tensors or scene.held - base) - sum(known.values()), 0.0)
    parts = [_part(name, expected.get(name), size) for name, size in known.items()]
    transient = sum(expected.get(name, 0.0) for name in TRANSIENT) if expected else None
    parts.append(_part("activations, loss and workspace", transient, rest))
    planned = (plan.per_device_train_batch_size, plan.sequence_length)
    return Autopsy(
        step=step, shape=shape, planned_shape=planned, smaller=smaller, words=" ".join(words.split())[:300], parts=tuple(parts),
        held_gib=gib(scene.held), free_gib=gib(scene.free), allocator=scene.allocator,
        free_when_planned_gib=gib(free_when_planned) if free_when_planned else None,
        verdict=_verdict(parts, scene, predicted_held, free_when_planned, shape, planned),
    )  # fmt: skip


def _part(name: str, predicted: float | None, measured: float) -> PartMemory:
    return PartMemory(part=name, predicted_gib=None if predicted is None else gib(predicted), measured_gib=gib(measured))


def _verdict(
    parts: list[PartMemory],
    scene: Scene,
    predicted_held: float | None,
    free_when_planned: float | None,
    shape: tuple[int, ...],
    planned: tuple[int, ...],
) -> str:
    """Return the first cause that shows, the surest first."""
    tokens, planned_tokens = shape[0] * shape[-1], planned[0] * planned[-1]
    if planned[-1] > 1 and tokens > planned_tokens:
        return f"a micro-batch of {tokens:,} tokens came, and the longest of the sample made {planned_tokens:,}"
    if free_when_planned is not None and predicted_held is not None and scene.free + scene.held < free_when_planned:
        gone = free_when_planned - scene.free - scene.held
        if gone > NOTICED * predicted_held:
            return f"other processes have taken {format_bytes(gone)} since the plan was made"
    over = [(p.measured_gib - p.predicted_gib, p) for p in parts if p.predicted_gib is not None]
    excess, worst = max(over, key=lambda pair: pair[0], default=(0.0, None))
    if worst is not None and excess > NOTICED * sum(p.predicted_gib or 0.0 for p in parts):
        return f"{worst.part} took {format_bytes(excess * GIB)} more than predicted"
    retries = scene.allocator.get("inactive_split_bytes.all.current", 0)
    if retries > NOTICED * max(scene.tensors, 1):
        return f"{format_bytes(retries)} were free in pieces too small to use (fragmentation)"
    return "no part is over its prediction: less memory was free than the step needs"


def as_lines(autopsy: Autopsy) -> list[str]:
    """Return the autopsy as lines for the terminal."""
    lines = [f"why: {autopsy.verdict}"]
    for part in autopsy.parts:
        predicted = "unknown" if part.predicted_gib is None else f"{part.predicted_gib:.2f}"
        lines.append(f"  {part.part}: {part.measured_gib:.2f} GiB, predicted {predicted}")
    return lines
