"""Find faults of a run from a few numbers of its steps: it waits for data, it compiles in many steps, its memory grows.

No library is needed. Each fault is reported once.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from upshift.debugging.finding import Finding, warning
from upshift.units import MIB, format_bytes

SETTLING = 3  # first steps, which allocate and compile
CHECK_INTERVAL = 4  # steps between two checks, because computing medians takes longer than recording a step
WINDOW = 16  # newest steps that are checked
MIN_STEPS = 8  # fewer steps are not checked
# A step that waits less than this for its batch is no fault.
DATA_SHARE = 0.2  # of the step
DATA_SECONDS = 0.005
COMPILING_STEPS = 4  # steps of the window that compiled; a few new shapes are no fault
LEAK_STEPS = 32  # of a window in which memory grows: two of them are a leak, because a heap may grow in the first steps only
URGENT_STEPS = 10 * LEAK_STEPS  # memory that lasts for fewer is reported after one window
QUARTERS = 4  # of a window
# Less growth in a window is no leak.
LEAK_BYTES = 16 * MIB
LEAK_SHARE = 0.005  # of the memory that the process holds
# Code that libraries keep for a new size: oneDNN's 0.56 MiB for each of the products of a layer, of attention and of the loss.
NEW_SIZE_BYTES = 16 * MIB

RECOMPILE_FIX = (
    "pad to few widths: DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64), drop_last=True; or upshift train ... --set "
    "torch_compile=off; to see each reason: export TORCH_LOGS=recompiles"
)
TRAINER_DATA_FIX = (
    "TrainingArguments(dataloader_num_workers=4, dataloader_persistent_workers=True); what the dataset does for each item, "
    "do once: dataset = dataset.map(...)"
)
LOOP_DATA_FIX = "copy the data to a local disk (cp -r DATA /tmp/data) and give it: upshift train ... --data /tmp/data"
LEAK_FIX = "keep numbers, not tensors: losses.append(loss.item()), or tensor.detach().cpu() where the tensor is needed"


class Step(NamedTuple):
    """Hold the numbers of a finished optimizer step."""

    seconds: float  # from requesting its batch to requesting the next one
    data_seconds: float  # the part of them spent waiting for the batch
    compiled: int  # frames that torch.compile has compiled since the process started
    held: int  # bytes of the process, or bytes allocated on its device
    has_new_size: bool = False  # a micro-batch had a size that came in no earlier step; never on a device, which keeps no code


class Growth(NamedTuple):
    """Hold the growth of memory in a window of LEAK_STEPS steps, and the bytes held in its first and its last quarter."""

    last_step: int
    bytes_per_step: float
    first_level: float
    last_level: float

    def is_after(self, other: Growth) -> bool:
        """Return whether this window has no step of the other one."""
        return self.last_step >= other.last_step + LEAK_STEPS

    def gave_back(self, other: Growth) -> bool:
        """Return whether at least half of what grew in the other window was given back before this one."""
        return self.first_level < (other.first_level + other.last_level) / 2


class Signs:
    """Watch the steps of a run. ``data_fix``: what a user should do if the run waits for data."""

    def __init__(self, *, data_fix: str) -> None:
        self._data_fix = data_fix
        self._newest: deque[Step] = deque(
            maxlen=WINDOW + 1
        )  # including the first steps, because torch stops compiling after eight graphs
        self._steps: deque[Step] = deque(maxlen=LEAK_STEPS)
        self._count = 0
        self._first_growth: Growth | None = None  # of which nothing was given back since
        self._newest_growth: Growth | None = None  # in the newest steps
        self._reported: set[str] = set()

    def add(self, step: Step) -> list[Finding]:
        """Add a step, and return findings that were not reported before."""
        self._count += 1
        self._newest.append(step)
        if self._count > SETTLING:
            self._steps.append(step)
        if self._count % CHECK_INTERVAL:
            return []
        self._note_growth()
        findings = [self._data(), self._recompiles()]
        return [finding for finding in findings if finding is not None]

    def _data(self) -> Finding | None:
        last = list(self._steps)[-WINDOW:]
        if "data" in self._reported or len(last) < MIN_STEPS:
            return None
        # The median counts, because a single step that waits for a shard to open does not mean a slow loader.
        share = statistics.median(step.data_seconds / step.seconds for step in last if step.seconds > 0)
        waited = statistics.median(step.data_seconds for step in last)
        total = statistics.median(step.seconds for step in last)
        if share < DATA_SHARE or waited < DATA_SECONDS:
            return None
        self._reported.add("data")
        return warning(
            "data loader",
            what=f"{share:.0%} of a step waits for its batch",
            fix=self._data_fix,
            evidence=f"{1000 * waited:.1f} of {1000 * total:.1f} ms a step, median of the last {len(last)}",
            cause="batches are made slower than the step uses them up",
        )

    def _recompiles(self) -> Finding | None:
        last = list(self._newest)
        compilations = [later.compiled - earlier.compiled for earlier, later in zip(last, last[1:], strict=False)]
        num_compiling = sum(count > 0 for count in compilations)
        if "recompiles" in self._reported or num_compiling < COMPILING_STEPS:
            return None
        self._reported.add("recompiles")
        slow = sum(step.seconds for step, count in zip(last[1:], compilations, strict=True) if count > 0)
        all_seconds = sum(step.seconds for step in last[1:])
        return warning(
            "recompiles",
            what=f"{num_compiling} of the last {len(compilations)} steps compiled again",
            evidence=f"{sum(compilations)} compilations; these steps took {slow:.1f} s of {all_seconds:.1f} s",
            cause="a tensor's shape, or a Python value that the graph depends on, is another one in each step",
            fix=RECOMPILE_FIX,
        )

    def growth(self, free: Callable[[], float | None]) -> float | None:
        """Return the bytes by which memory grows in each step, or None if it does not grow steadily or is not known yet.

        ``free`` returns the free bytes, or None if they are unknown. Memory must grow in two windows of LEAK_STEPS steps, which
        need not be adjacent: a checkpoint that is written meanwhile takes memory for some steps. One window is enough if memory
        would be full after URGENT_STEPS.
        """
        newest, first = self._newest_growth, self._first_growth
        if newest is None or first is None or self._count % CHECK_INTERVAL:
            return None
        if newest.is_after(first):
            return newest.bytes_per_step
        free_bytes = free()
        is_urgent = free_bytes is not None and free_bytes < URGENT_STEPS * newest.bytes_per_step
        return newest.bytes_per_step if is_urgent else None

    def _note_growth(self) -> None:
        """Note whether memory grew in the newest steps. Forget earlier growth that was given back."""
        self._newest_growth = self._growth_of_window() if len(self._steps) == LEAK_STEPS else None
        newest, first = self._newest_growth, self._first_growth
        if newest is not None and (first is None or (newest.is_after(first) and newest.gave_back(first))):
            self._first_growth = newest

    def _growth_of_window(self) -> Growth | None:
        """Return how memory grew in the newest LEAK_STEPS steps, or None if it did not grow steadily in them.

        A single jump, such as an evaluation causes, is no leak. What a step with a new size adds is none either: libraries keep
        the code that they make for a size.
        """
        levels = _medians_of_quarters(_without_new_sizes(list(self._steps)))
        rises = [later - earlier for earlier, later in zip(levels, levels[1:], strict=False)]
        mean = sum(rises) / len(rises)
        if QUARTERS * mean < max(LEAK_BYTES, LEAK_SHARE * self._steps[-1].held) or min(rises) < 0.5 * mean:
            return None
        held = _medians_of_quarters([step.held for step in self._steps])
        return Growth(self._count, mean * QUARTERS / LEAK_STEPS, held[0], held[-1])


def _medians_of_quarters(held_bytes: list[int]) -> list[float]:
    quarter = LEAK_STEPS // QUARTERS
    return [statistics.median(held_bytes[start : start + quarter]) for start in range(0, LEAK_STEPS, quarter)]


def _without_new_sizes(steps: list[Step]) -> list[int]:
    """Return the bytes held after each step, less what libraries may keep for new sizes."""
    held_bytes = [steps[0].held]
    for earlier, later in zip(steps, steps[1:], strict=False):
        growth = later.held - earlier.held
        kept = min(max(growth, 0), NEW_SIZE_BYTES) if later.has_new_size else 0
        held_bytes.append(held_bytes[-1] + growth - kept)
    return held_bytes


def leak_finding(growth: float, *, grew: dict[str, float], free: float | None) -> Finding:
    """Return a warning about a leak.

    ``grew``: the bytes in each step, by the code that ran while memory grew. ``free``: the free bytes, or None if unknown.
    """
    named, largest = max(grew.items(), key=lambda item: item[1], default=("", 0.0))
    evidence = f"over at least {LEAK_STEPS} steps"
    if free is not None:
        evidence += f"; the {format_bytes(free)} that are free last {free / growth:,.0f} more steps"
    shares = ", ".join(f"{name} {format_bytes(size)}" for name, size in grew.items() if size > 0.1 * growth)
    if shares:
        evidence += f"; of it a step: {shares}"
    subject = "memory leak"
    cause = "something keeps a tensor, or a graph, of each step"
    fix = f"{LEAK_FIX}; to see who: python -X tracemalloc=10 SCRIPT"
    if largest > 0.5 * growth:
        subject = f"memory leak in {named}"
        cause = f"{named} keeps what it is given"
        fix = LEAK_FIX
    what = f"memory grows by {format_bytes(growth)} in every step"
    return warning(subject, what=what, evidence=evidence, cause=cause, fix=fix)
