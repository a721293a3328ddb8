"""Find the signs of a run that goes badly in its steps: it waits for data, it compiles again and again, its memory grows.

A step leaves a few numbers, and no library is needed. Each fault is reported once.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from upshift.debugging.finding import Finding, warning
from upshift.units import MIB, format_bytes

SETTLING = 3  # steps that allocate and compile
EVERY = 4  # steps between two looks: medians take longer than noting a step
# steps that are looked at, and the fewest
WINDOW = 16
ENOUGH = 8
# of a step, spent waiting for its batch: less is no fault worth a word
DATA_SHARE = 0.2
DATA_SECONDS = 0.005
COMPILING_STEPS = 4  # steps of the window that compiled: shapes that come once each are no fault
LEAK_STEPS = 32
QUARTERS = 4
# of growth in LEAK_STEPS: absolute, and of what the process holds
LEAK_BYTES = 16 * MIB
LEAK_SHARE = 0.005

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
    """One optimizer step, when it is over."""

    seconds: float  # from the start of its data to the start of the next one's
    data_seconds: float  # part of these seconds, until the batch was there
    compiled: int  # frames that torch.compile has compiled, since the process began
    held: int  # bytes of the process, or allocated on its device


class Signs:
    """The signs of a run. It is given each step of the run, and says each fault once."""

    def __init__(self, *, data_fix: str) -> None:
        self._data_fix = data_fix
        self._newest: deque[Step] = deque(maxlen=WINDOW + 1)  # from step 1 on: torch gives up after eight graphs
        self._steps: deque[Step] = deque(maxlen=LEAK_STEPS)
        self._count = 0
        self._said: set[str] = set()

    def add(self, step: Step) -> list[Finding]:
        self._count += 1
        self._newest.append(step)
        if self._count > SETTLING:
            self._steps.append(step)
        if self._count % EVERY:
            return []
        found = [self._data(), self._recompiles()]
        return [finding for finding in found if finding is not None]

    def _data(self) -> Finding | None:
        last = list(self._steps)[-WINDOW:]
        if "data" in self._said or len(last) < ENOUGH:
            return None
        # The median step: a single step that waits for a shard to open is no slow loader.
        share = statistics.median(step.data_seconds / step.seconds for step in last if step.seconds > 0)
        waited, whole = (statistics.median(values) for values in zip(*((s.data_seconds, s.seconds) for s in last), strict=True))
        if share < DATA_SHARE or waited < DATA_SECONDS:
            return None
        self._said.add("data")
        return warning(
            "data loader", what=f"{share:.0%} of a step waits for its batch", fix=self._data_fix,
            evidence=f"{1000 * waited:.1f} of {1000 * whole:.1f} ms a step, median of the last {len(last)}",
            cause="batches are made slower than the step uses them up",
        )  # fmt: skip

    def _recompiles(self) -> Finding | None:
        last = list(self._newest)
        made = [later.compiled - earlier.compiled for earlier, later in zip(last, last[1:], strict=False)]
        if "recompiles" in self._said or sum(count > 0 for count in made) < COMPILING_STEPS:
            return None
        self._said.add("recompiles")
        slow = sum(step.seconds for step, count in zip(last[1:], made, strict=True) if count > 0)
        return warning(
            "recompiles", what=f"{sum(count > 0 for count in made)} of the last {len(made)} steps compiled again",
            evidence=f"{sum(made)} compilations; these steps took {slow:.1f} s of {sum(step.seconds for step in last[1:]):.1f} s",
            cause="a tensor's shape, or a Python value that the graph depends on, is another one in each step", fix=RECOMPILE_FIX,
        )  # fmt: skip

    def growth(self) -> float | None:
        """Return the bytes a step, where memory grows step after step; None where it does not, or it is not known yet.

        One jump, as an evaluation makes, is no leak, whatever crept before it.
        """
        if len(self._steps) < LEAK_STEPS or self._count % EVERY:
            return None
        held = [step.held for step in self._steps]
        quarter = LEAK_STEPS // QUARTERS
        levels = [statistics.median(held[start : start + quarter]) for start in range(0, LEAK_STEPS, quarter)]
        rises = [later - earlier for earlier, later in zip(levels, levels[1:], strict=False)]
        mean = sum(rises) / len(rises)
        if QUARTERS * mean < max(LEAK_BYTES, LEAK_SHARE * held[-1]) or min(rises) < 0.5 * mean:
            return None
        return mean / quarter


def leak(growth: float, *, grew: dict[str, float], free: float | None) -> Finding:
    """Return a warning about a leak.

    ``grew``: bytes a step, by the code that ran while they came. ``free``: bytes that are left.
    """
    named, largest = max(grew.items(), key=lambda item: item[1], default=("", 0.0))
    known = largest > 0.5 * growth
    end = "" if free is None else f"; the {format_bytes(free)} that are free last {free / growth:,.0f} more steps"
    others = ", ".join(f"{name} {format_bytes(size)}" for name, size in grew.items() if size > 0.1 * growth)
    return warning(
        f"memory leak in {named}" if known else "memory leak",
        what=f"memory grows by {format_bytes(growth)} in every step",
        evidence=f"over {LEAK_STEPS} steps{end}" + (f"; of it a step: {others}" if others else ""),
        cause=f"{named} keeps what it is given" if known else "something keeps a tensor, or a graph, of each step",
        fix=LEAK_FIX if known else f"{LEAK_FIX}; to see who: python -X tracemalloc=10 SCRIPT",
    )
