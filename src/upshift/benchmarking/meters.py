"""Measure memory: the bytes of tensors, and the bytes that the process occupies."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from upshift.internals.torch_names import STORAGE


@dataclass
class AllocatedPeak:
    """The result of ``allocated_peak``, set when its block ends. ``bytes`` is None if nothing was allocated in the block."""

    bytes: int | None = None
    left: int = 0  # bytes allocated at the end beyond those at the start (CPU only)


@contextmanager
def allocated_peak(device: str, *, resident_bytes: int) -> Iterator[AllocatedPeak]:
    """Measure the highest allocated bytes in a block. ``resident_bytes``: of tensors that exist before (CUDA counts them itself).

    On the CPU it reads the allocator's events through torch's profiler, which slows the block down: never time it.
    """
    import torch

    peak = AllocatedPeak()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated()
        return
    # torch.profiler.profile does the same, and in torch 2.11 it warns at each start of cycles, of which there are none here.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield peak
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    peak.bytes = resident_bytes + highest if events else None
    peak.left = live
    # The profiler's own records are in cycles. If a later collection frees them, they leave holes in the heap, and later
    # allocations go behind them: 16 MiB more from then on for a model of 1 M parameters.
    del profiler, events
    gc.collect()


def tensor_bytes(*groups: object) -> int:
    """Return the bytes of the distinct storages of models, optimizers and tensors."""
    import torch

    storages: dict[int, int] = {}
    pending = list(groups)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__"):
            storages[STORAGE.of(value.untyped_storage())] = value.untyped_storage().nbytes()
        pending.extend(_parts_of(value))
    return sum(storages.values())


def _parts_of(value: object) -> list[object]:
    """Return the tensors that a model, an optimizer or a quantized tensor refers to."""
    import torch

    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):  # a subclass, such as 8-bit state
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        return [getattr(value, "quant_state", None)]
    if type(value).__name__ == "QuantState":  # bitsandbytes' scales beside a 4-bit weight
        return list(vars(value).values())
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers(), *(parameter.grad for parameter in value.parameters())]
    if isinstance(value, torch.optim.Optimizer):
        return [tensor for state in value.state.values() for tensor in state.values()]
    return []


def resident_bytes() -> int:
    """Return the bytes that the process occupies now."""
    return int(psutil.Process().memory_info().rss)


def tree_bytes(pid: int) -> int:
    """Return the bytes that a process and all that it has started occupy now. Processes that have ended count 0."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return sum(_resident(member) for member in (process, *process.children(recursive=True)))
    return 0


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


def anonymous_bytes() -> int:
    """Return the occupied bytes that no file backs (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def reset_resident_peak() -> None:
    """Start a new peak where the kernel offers it (Linux)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def resident_peak_bytes() -> int:
    """Return the highest occupied bytes since the process started, or since ``reset_resident_peak``."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def bytes_left_with_parent() -> int:
    """Return the bytes of mapped files that are resident in the parent process, and not yet in this fork of it.

    A fork maps the same libraries but starts without their pages. A process that imported them itself would hold them.
    """
    try:
        own_mappings, parent_mappings = (_file_bytes(pid) for pid in (os.getpid(), os.getppid()))
    except OSError:  # no Linux, or the parent is another user's
        return 0
    total = 0
    for mapping, size in own_mappings.items():
        if mapping in parent_mappings:  # only a fork has the same file at the same addresses
            total += max(parent_mappings[mapping] - size, 0)
    return total


def _file_bytes(pid: int) -> dict[str, int]:
    """Return the resident bytes of each mapping of a file, by addresses and inode (proc_pid_smaps(5))."""
    sizes: dict[str, int] = {}
    mapping = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            mapping = f"{name} {fields[3]}" if fields[3] != "0" else ""
        elif mapping and name == "Rss:":
            sizes[mapping] = 1024 * int(fields[0])
        elif mapping and name == "Anonymous:":  # pages that were written to are the process's own
            sizes[mapping] -= 1024 * int(fields[0])
    return sizes


@dataclass(frozen=True)
class MemorySample:
    """The resident bytes at one time of a run."""

    seconds: float
    phase: str
    resident: int


@dataclass
class MemoryRecorder:
    """A recorder that samples the process's memory in the background. Each sample has the phase that runs then."""

    interval_seconds: float = 0.25
    measure: Callable[[], int] = resident_bytes
    samples: list[MemorySample] = field(default_factory=list)
    phase: str = "load"

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryRecorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            self.samples.append(MemorySample(time.perf_counter() - self._start, self.phase, self.measure()))

    def highest(self) -> int:
        """Return the highest memory so far, in bytes."""
        return max([self.measure(), *(sample.resident for sample in self.samples)])
