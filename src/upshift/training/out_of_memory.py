"""Handle a step, or a pass without gradients, that runs out of memory: recognize the error, repeat in halves, and explain it.

The explanation (the autopsy) has the predicted and the measured bytes of each part, and names the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upshift.benchmarking.meters import resident_bytes, tensor_bytes
from upshift.hardware.host_memory import free_memory_bytes
from upshift.planning.plan import Plan
from upshift.record import Numbers
from upshift.training.batches.collate import MicroBatch
from upshift.training.checkpoint.directory import AUTOPSIES_NAME
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.loop.events import FailedPass
from upshift.units import GIB, format_bytes, gib
from upshift.value import Value

FEW_TOKENS = 8
# Messages of RuntimeErrors for which torch has no type, of CUDA and its libraries and of their AMD twins.
OOM_MESSAGES = re.compile(
    r"DefaultCPUAllocator: can't allocate memory"  # c10/core/CPUAllocator.cpp
    r"|(CUDA|HIP)( driver)? error: out of memory"  # for a context, a graph, pinned memory or an expandable segment
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"  # as a compiled kernel is loaded
    r"|\b(CU|HIP|ROC)[A-Z]+(_STATUS)?(_INTERNAL_ERROR_(HOST|DEVICE))?_ALLOC(ATION)?_FAILED"  # cuBLAS, cuFFT, cuDNN 8 and 9, ...
    r"|(Cuda|HIP) failure (2 )?'out of memory'"  # from NCCL and RCCL, by version
    r"|NVML_SUCCESS == "  # torch asks NVML only for the message about a lack of memory; in a MIG instance NVML may refuse
)
Shape = tuple[int, ...]  # rows and tokens a row
Part = TypeVar("Part")
Result = TypeVar("Result")


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the allocator's error, which is ``error`` or one of its causes, or None.

    torch's pipelines wrap the error of a stage.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
            return cause
        if isinstance(cause, RuntimeError) and OOM_MESSAGES.search(str(cause)):
            return cause
        cause = cause.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return find_out_of_memory(error) is not None


def halve(micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Return two halves that hold the same labels, or None if the micro-batch is indivisible.

    The rows are halved. A single row is cut where one of its sequences begins.
    """
    if not micro_batch.can_be_split:
        return None
    rows, width = micro_batch.shape
    together = 2 if micro_batch.has_pairs else 1
    if rows > together:
        middle = together * ((rows // together + 1) // 2)
        first = _slice_micro_batch(micro_batch, slice(None, middle), slice(None))
        second = _slice_micro_batch(micro_batch, slice(middle, None), slice(None))
        return first, second
    starts = _starts(micro_batch.arrays.get("position_ids"))
    if not len(starts):
        return None
    cut = int(starts[np.abs(starts - width / 2).argmin()])
    return _slice_micro_batch(micro_batch, slice(None), slice(None, cut)), _slice_micro_batch(
        micro_batch, slice(None), slice(cut, None)
    )


def _starts(position_ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the positions at which the sequences after the first one begin, in the first row."""
    if position_ids is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(position_ids[0, 1:] == 0) + 1


def _slice_micro_batch(micro_batch: MicroBatch, rows: slice, columns: slice) -> MicroBatch:
    has_all_columns = columns == slice(None)
    cut = {name: array[rows] if has_all_columns else array[rows, columns] for name, array in micro_batch.arrays.items()}
    reference = None if micro_batch.reference is None else micro_batch.reference[rows]
    label_counts = None if micro_batch.label_counts is None else micro_batch.label_counts[:, rows]
    margins = None
    if micro_batch.margins is not None:
        margins = np.repeat(micro_batch.margins, 2)[rows][0::2]
    ratings = None
    if micro_batch.ratings is not None:
        ratings = np.repeat(micro_batch.ratings, 2)[rows][0::2]
    num_pairs = len(next(iter(cut.values()))) // 2
    labels = num_pairs if micro_batch.has_pairs else int(np.count_nonzero(cut["labels"] != IGNORED))
    share = labels / max(micro_batch.num_label_tokens, 1)
    return replace(
        micro_batch,
        arrays=cut,
        reference=reference,
        label_counts=label_counts,
        margins=margins,
        ratings=ratings,
        sequence_ids=micro_batch.sequence_ids[:0],  # known only for the whole micro-batch
        num_label_tokens=labels,
        num_tokens=round(micro_batch.num_tokens * share),
        row_tokens=micro_batch.row_tokens if has_all_columns else None,
    )


def shrink_to_few_tokens(micro_batch: MicroBatch) -> MicroBatch:
    """Return one short row of a micro-batch, or the two of a pair. Only its shapes matter."""
    rows = 2 if micro_batch.has_pairs else 1
    few = _slice_micro_batch(micro_batch, slice(0, rows), slice(0, FEW_TOKENS))
    return replace(few, num_tokens=0)


def stand_in(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch without labels, for a rank that has fewer micro-batches than others."""
    few = shrink_to_few_tokens(micro_batch)
    arrays = dict(few.arrays)
    if "labels" in arrays:
        arrays["labels"] = np.full_like(arrays["labels"], IGNORED)
    return replace(few, arrays=arrays, num_label_tokens=0)


class OomOnSomeRank(MemoryError):
    """Raised on all ranks when one of them ran out of memory. ``final`` says that its micro-batch cannot be halved."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Halved:
    """The micro-batches that were halved because memory ran out."""

    largest: Shape  # of the micro-batches that did not fit
    smaller: Shape  # of the largest one from now on
    message: str  # of the allocator
    failed: FailedPass = "step"


OnHalved = Callable[[Halved], None]


class BatchHalving(Generic[Part]):
    """Do the work of a step in parts. If memory runs out, start again with smaller parts, and keep to them from then on.

    The weights have not changed meanwhile, so the gradients of the global batch are the same.
    """

    def __init__(
        self,
        *,
        halve: Callable[[Part], tuple[Part, Part] | None],
        size: Callable[[Part], int],
        restart: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
        on_halved: Callable[[Part, Part, str], None],
        equalize: Callable[[list[Part]], list[Part]] = lambda parts: parts,
    ) -> None:
        """Set the callbacks.

        Args:
            halve: returns two halves of a part, or None if it is indivisible.
            size: returns the size of a part.
            restart: drops what the failed try left.
            on_failure: may read the memory in use at the failure.
            on_halved: gets the largest part before and after, and the allocator's message.
            equalize: returns halved parts with stand-ins, so that all ranks have equally many.
        """
        self.count = 0
        self._equalize = equalize
        self._halve = halve
        self._size = size
        self._restart = restart
        self._on_halved = on_halved
        self._on_failure = on_failure

    def run(self, parts: Sequence[Part], work: Callable[[list[Part]], Result]) -> Result:
        """Return the result of ``work`` on the parts, or on halves of them."""
        while True:
            halved = self._halve_all(parts)
            try:
                return work(halved)
            except (MemoryError, RuntimeError) as error:
                largest = max(halved, key=self._size)
                if not is_out_of_memory(error) or self._is_final(error, largest):
                    raise
                message = str(error)
                if not isinstance(error, OomOnSomeRank):
                    self._on_failure()
            # Not in the except block: there the exception still holds the tensors of the failed try.
            self._restart()
            self.count += 1
            self._on_halved(largest, max(self._halve_all(parts), key=self._size), message)

    def _halve_all(self, parts: Sequence[Part]) -> list[Part]:
        """Halve all parts as often as memory ran out."""
        halved = list(parts)
        for _ in range(self.count):
            halved = [half for part in halved for half in self._halve(part) or (part,)]
        return self._equalize(halved) if self.count else halved

    def _is_final(self, error: BaseException, largest: Part) -> bool:
        return error.final if isinstance(error, OomOnSomeRank) else self._halve(largest) is None


TRANSIENT = ("activations", "loss", "workspace")  # parts of the prediction that are measured together
MIN_EXCESS_SHARE = 0.05  # a smaller excess over the prediction explains nothing
ALLOCATOR_KEYS = (
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "inactive_split_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
)


class PartMemory(Value):
    """The predicted and the measured memory of one part."""

    part: str
    predicted_gib: float | None
    measured_gib: float


class Autopsy(Value):
    """The explanation of why a step, or a pass without gradients, ran out of memory."""

    step: int  # of an evaluation: the step before it
    failed: FailedPass = "step"
    shape: Shape  # of the micro-batch that did not fit
    planned_shape: Shape  # of the largest micro-batch of the plan
    smaller: Shape  # of the largest one from now on
    words: str  # of the allocator
    parts: tuple[PartMemory, ...]
    held_gib: float  # of the process, or in use on the device
    free_gib: float  # left to others
    free_before_gib: float | None  # what the run could use when it began
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
    """The memory in use, in bytes: at a failure, while the failed step's tensors still exist."""

    held: int  # of the process, or in use on the device
    own: int  # of it, this process's: on a device what the allocator has reserved
    tensors: int  # allocated on the device; 0 on a CPU, whose allocator keeps no count
    free: int
    allocator: dict[str, int]


def read_memory(device: str) -> MemoryReadings:
    """Return the memory in use now."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        counters = torch.cuda.memory_stats()
        allocator = {key: int(counters.get(key, 0)) for key in ALLOCATOR_KEYS}
        return MemoryReadings(
            held=total - free,
            own=torch.cuda.memory_reserved(),
            tensors=torch.cuda.memory_allocated(),
            free=free,
            allocator=allocator,
        )
    held = resident_bytes()
    return MemoryReadings(held=held, own=held, tensors=0, free=free_memory_bytes(), allocator={})


def make_autopsy(
    readings: MemoryReadings,
    *,
    step: int,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    predicted: Numbers | None,
    free_before: float | None,
    halved: Halved,
) -> Autopsy:
    """Return the autopsy of a failed step or pass. Call it before the model or the optimizer change.

    A step is counted with the gradients of all trained weights. Other passes run while there are none.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and halved.failed == "step"]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    measured = {"weights": weights, "gradients": gradients, "optimizer": tensor_bytes(optimizer) if optimizer else 0}
    phases = predicted.memory if predicted is not None and predicted.memory else {}
    largest_phase = max(phases.values(), key=lambda phase: sum(phase.values()), default={})
    expected = {name: size * GIB for name, size in largest_phase.items()}
    predicted_held = predicted.resident_gib * GIB if predicted is not None and predicted.resident_gib else None
    base = max((predicted_held or 0.0) - sum(expected.values()), 0.0)
    remaining = max((readings.tensors or readings.held - base) - sum(measured.values()), 0.0)
    parts = [_part_memory(name, expected.get(name), size) for name, size in measured.items()]
    transient = sum(expected.get(name, 0.0) for name in TRANSIENT) if expected else None
    parts.append(_part_memory("activations, loss and workspace", transient, remaining))
    planned = (plan.per_device_train_batch_size, plan.sequence_length)
    return Autopsy(
        step=step,
        failed=halved.failed,
        shape=halved.largest,
        planned_shape=planned,
        smaller=halved.smaller,
        words=" ".join(halved.message.split())[:300],
        parts=tuple(parts),
        held_gib=gib(readings.held),
        free_gib=gib(readings.free),
        allocator=readings.allocator,
        free_before_gib=gib(free_before) if free_before else None,
        verdict=_verdict(parts, readings, _taken_by_others(readings, base, free_before), predicted_held, halved.largest, planned),
    )


def _part_memory(name: str, predicted: float | None, measured: float) -> PartMemory:
    return PartMemory(part=name, predicted_gib=None if predicted is None else gib(predicted), measured_gib=gib(measured))


def _taken_by_others(readings: MemoryReadings, base: float, free_before: float | None) -> float:
    """Return the bytes that other processes have taken since the run began, as far as they are known.

    ``base``: what a process holds beside its tensors. A device's allocator does not count CUDA's context."""
    if free_before is None:
        return 0.0
    on_device = bool(readings.tensors)
    return free_before - readings.free - readings.own - (base if on_device else 0.0)


def _verdict(
    parts: list[PartMemory],
    readings: MemoryReadings,
    taken: float,
    predicted_held: float | None,
    shape: Shape,
    planned: Shape,
) -> str:
    """Return the cause of the failure: the first one that applies, the most certain first."""
    tokens = shape[0] * shape[-1]
    planned_tokens = planned[0] * planned[-1]
    if planned[-1] > 1 and tokens > planned_tokens:
        return f"a micro-batch of {tokens:,} tokens came, and the longest of the sample made {planned_tokens:,}"
    if predicted_held is not None and taken > MIN_EXCESS_SHARE * predicted_held:
        return f"other processes have taken {format_bytes(taken)} since the run began"
    excesses = [(part.measured_gib - part.predicted_gib, part) for part in parts if part.predicted_gib is not None]
    excess, worst = max(excesses, key=lambda pair: pair[0], default=(0.0, None))
    if worst is not None and excess > MIN_EXCESS_SHARE * sum(part.predicted_gib or 0.0 for part in parts):
        return f"{worst.part} took {format_bytes(excess * GIB)} more than predicted"
    fragmented = readings.allocator.get("inactive_split_bytes.all.current", 0)
    if fragmented > MIN_EXCESS_SHARE * max(readings.tensors, 1):
        return f"{format_bytes(fragmented)} were free in pieces too small to use (fragmentation)"
    return "no part is over its prediction: too little memory was free"


def format_autopsy(autopsy: Autopsy) -> list[str]:
    """Return the autopsy as lines for the terminal."""
    lines = [f"why: {autopsy.verdict}"]
    for part in autopsy.parts:
        predicted = "unknown" if part.predicted_gib is None else f"{part.predicted_gib:.2f}"
        lines.append(f"  {part.part}: {part.measured_gib:.2f} GiB, predicted {predicted}")
    return lines
