"""Recognize that memory ran out, and split a micro-batch into two.

Explain why a step ran out of memory: each part's predicted bytes, its bytes at the moment of the failure, and the culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from upshift.benchmarking.meters import resident_bytes, tensor_bytes
from upshift.planning.plan import Plan
from upshift.record import Numbers
from upshift.training.batches.collate import MicroBatch
from upshift.training.data.corpus import IGNORED
from upshift.units import GIB, format_bytes, gib
from upshift.value import Value

FEW_TOKENS = 8
# What else a RuntimeError says where memory ran out; torch has no type for these.
OOM_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/CPUAllocator.cpp
    "CUDA error: out of memory",  # the driver's, for a context, a graph or pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
    "HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # NCCL's, by version
)  # fmt: skip
Part = TypeVar("Part")
Result = TypeVar("Result")


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the allocator's refusal, which is the error or its cause, or None. torch's pipelines wrap an error of a stage."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (MemoryError, torch.OutOfMemoryError)):
            return found
        if isinstance(found, RuntimeError) and any(words in str(found) for words in OOM_MESSAGES):
            return found
        found = found.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return find_out_of_memory(error) is not None


def halve(micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Return two halves that hold the same labels, or None if the micro-batch is indivisible.

    Its rows are halved, or one long row is cut at the beginning of a sequence.
    """
    if not micro_batch.splits:
        return None
    rows, width = micro_batch.shape
    if rows > 1:
        middle = (rows + 1) // 2
        return _slice_micro_batch(micro_batch, slice(None, middle), slice(None)), _slice_micro_batch(
            micro_batch, slice(middle, None), slice(None)
        )
    starts = _starts(micro_batch.arrays.get("position_ids"))
    if not len(starts):
        return None
    cut = int(starts[np.abs(starts - width / 2).argmin()])
    return _slice_micro_batch(micro_batch, slice(None), slice(None, cut)), _slice_micro_batch(
        micro_batch, slice(None), slice(cut, None)
    )


def _starts(position_ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the positions at which sequences after the first begin in a row of several."""
    if position_ids is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(position_ids[0, 1:] == 0) + 1


def _slice_micro_batch(micro_batch: MicroBatch, rows: slice, columns: slice) -> MicroBatch:
    every = columns == slice(None)
    cut = {name: array[rows] if every else array[rows, columns] for name, array in micro_batch.arrays.items()}
    labels = int(np.count_nonzero(cut["labels"] != IGNORED))
    share = labels / max(micro_batch.num_label_tokens, 1)
    return replace(
        micro_batch,
        arrays=cut,
        sequence_ids=micro_batch.sequence_ids[:0],  # of the whole micro-batch they were known
        num_label_tokens=labels,
        num_tokens=round(micro_batch.num_tokens * share),
    )


def shrink_to_few_tokens(micro_batch: MicroBatch) -> MicroBatch:
    """Return one short row of a micro-batch, for its shapes alone."""
    few = _slice_micro_batch(micro_batch, slice(0, 1), slice(0, FEW_TOKENS))
    return replace(few, num_tokens=0)


def stand_in(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch without labels, for a rank that has fewer of them than others."""
    few = shrink_to_few_tokens(micro_batch)
    labels = np.full_like(few.arrays["labels"], IGNORED)
    return replace(few, arrays={**few.arrays, "labels": labels}, num_label_tokens=0)


class OomOnSomeRank(MemoryError):
    """All ranks know that one of them ran out of memory. ``final`` says that its micro-batch cannot be halved."""

    def __init__(self, words: str, *, final: bool) -> None:
        super().__init__(words)
        self.final = final


class BatchHalving(Generic[Part]):
    """A loop that does the work of a step in parts. When memory runs out, it starts again in smaller parts, and keeps them
    from then on.

    The weights have not moved, so the gradients of the global batch come out the same.
    """

    def __init__(
        self,
        *,
        halve: Callable[[Part], tuple[Part, Part] | None],
        size: Callable[[Part], int],
        restart: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
        on_halved: Callable[[Part, Part, str], None],
        level: Callable[[list[Part]], list[Part]] = lambda parts: parts,
    ) -> None:
        """Set the callbacks.

        ``on_failure`` may look at memory as it failed. ``restart`` then drops what the try left. ``on_halved`` gets the
        largest part before and after, and the allocator's words. ``level`` returns halved parts as all ranks run them, as many
        on each.
        """
        self.count = 0
        self._level = level
        self._halve = halve
        self._size = size
        self._restart = restart
        self._on_halved = on_halved
        self._on_failure = on_failure

    def run(self, parts: Sequence[Part], work: Callable[[list[Part]], Result]) -> Result:
        while True:
            now = self._cut(parts)
            try:
                return work(now)
            except (MemoryError, RuntimeError) as error:
                largest = max(now, key=self._size)
                if not is_out_of_memory(error) or self._is_final(error, largest):
                    raise
                refusal = str(error)
                if not isinstance(error, OomOnSomeRank):
                    self._on_failure()
            # Here and not above: the exception held the tensors of the try that failed.
            self._restart()
            self.count += 1
            self._on_halved(largest, max(self._cut(parts), key=self._size), refusal)

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        cut = list(parts)
        for _ in range(self.count):
            cut = [half for part in cut for half in self._halve(part) or (part,)]
        return self._level(cut) if self.count else cut

    def _is_final(self, error: BaseException, largest: Part) -> bool:
        return error.final if isinstance(error, OomOnSomeRank) else self._halve(largest) is None


AUTOPSIES_NAME = "upshift_out_of_memory.jsonl"
TRANSIENT = ("activations", "loss", "workspace")
MIN_EXCESS_SHARE = 0.05  # a part over its prediction by less explains nothing
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


class MemoryReadings(Value):
    """The readings of the meters while the failed step's tensors were still there."""

    held: int
    tensors: int  # allocated on the device; on a CPU 0: its allocator keeps no count
    free: int
    allocator: dict[str, int]


def read_memory(device: str) -> MemoryReadings:
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        counters = torch.cuda.memory_stats()
        kept = {key: int(counters.get(key, 0)) for key in ALLOCATOR_KEYS}
        return MemoryReadings(held=total - free, tensors=torch.cuda.memory_allocated(), free=free, allocator=kept)
    return MemoryReadings(held=resident_bytes(), tensors=0, free=psutil.virtual_memory().available, allocator={})


def make_autopsy(
    scene: MemoryReadings,
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
    parts = [_part_memory(name, expected.get(name), size) for name, size in known.items()]
    transient = sum(expected.get(name, 0.0) for name in TRANSIENT) if expected else None
    parts.append(_part_memory("activations, loss and workspace", transient, rest))
    planned = (plan.per_device_train_batch_size, plan.sequence_length)
    return Autopsy(
        step=step, shape=shape, planned_shape=planned, smaller=smaller, words=" ".join(words.split())[:300], parts=tuple(parts),
        held_gib=gib(scene.held), free_gib=gib(scene.free), allocator=scene.allocator,
        free_when_planned_gib=gib(free_when_planned) if free_when_planned else None,
        verdict=_verdict(parts, scene, predicted_held, free_when_planned, shape, planned),
    )  # fmt: skip


def _part_memory(name: str, predicted: float | None, measured: float) -> PartMemory:
    return PartMemory(part=name, predicted_gib=None if predicted is None else gib(predicted), measured_gib=gib(measured))


def _verdict(
    parts: list[PartMemory],
    scene: MemoryReadings,
    predicted_held: float | None,
    free_when_planned: float | None,
    shape: tuple[int, ...],
    planned: tuple[int, ...],
) -> str:
    """Return the first cause that shows, the surest first."""
    tokens = shape[0] * shape[-1]
    planned_tokens = planned[0] * planned[-1]
    if planned[-1] > 1 and tokens > planned_tokens:
        return f"a micro-batch of {tokens:,} tokens came, and the longest of the sample made {planned_tokens:,}"
    if free_when_planned is not None and predicted_held is not None and scene.free + scene.held < free_when_planned:
        gone = free_when_planned - scene.free - scene.held
        if gone > MIN_EXCESS_SHARE * predicted_held:
            return f"other processes have taken {format_bytes(gone)} since the plan was made"
    over = [(p.measured_gib - p.predicted_gib, p) for p in parts if p.predicted_gib is not None]
    excess, worst = max(over, key=lambda pair: pair[0], default=(0.0, None))
    if worst is not None and excess > MIN_EXCESS_SHARE * sum(p.predicted_gib or 0.0 for p in parts):
        return f"{worst.part} took {format_bytes(excess * GIB)} more than predicted"
    retries = scene.allocator.get("inactive_split_bytes.all.current", 0)
    if retries > MIN_EXCESS_SHARE * max(scene.tensors, 1):
        return f"{format_bytes(retries)} were free in pieces too small to use (fragmentation)"
    return "no part is over its prediction: less memory was free than the step needs"


def format_autopsy(autopsy: Autopsy) -> list[str]:
    """Return the autopsy as lines for the terminal."""
    lines = [f"why: {autopsy.verdict}"]
    for part in autopsy.parts:
        predicted = "unknown" if part.predicted_gib is None else f"{part.predicted_gib:.2f}"
        lines.append(f"  {part.part}: {part.measured_gib:.2f} GiB, predicted {predicted}")
    return lines
