"""Watch the ranks of a run: find out which ranks wait for which, which rank is slow, and which is gone.

A thread of every rank writes a heartbeat into the job's store every few seconds. While steps follow each other, no rank reads
them. A rank that has been in one step for longer than ``PATIENCE`` also reports the collective that it waits in, from torch's
record of the last ones (its flight recorder). Rank 0 then reads all heartbeats, and the others check that rank 0 still writes.

A rank that waits in a step for a rank that has been silent for ``ENDS_AFTER`` ends its process, and so do all others. A launcher
can then start again without the lost host. gloo alone would wait for it for half an hour.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from upshift.debugging.run_report import report_of
from upshift.errors import MissingInternal
from upshift.internals.torch_names import DEFAULT_STORE, FLIGHT_RECORDER
from upshift.planning.plan import Plan
from upshift.training.distributed.stragglers import Heartbeat, PendingCollective, describe_stall, find_straggler
from upshift.training.rank_processes import rank_environment
from upshift.units import format_seconds

logger = logging.getLogger(__name__)

PERIOD = 5.0  # seconds between two heartbeats
PATIENCE = 60.0  # seconds in one step, or more if steps take long
STEPS_OF_PATIENCE = 10  # median steps that patience lasts at least
SILENCE = 6  # heartbeats that a rank may miss
ENDS_AFTER = 300.0  # seconds of silence of a rank for which this rank waits in a step
LAST_STEPS = 16  # steps of which medians are taken
ENOUGH_STEPS = 8  # steps before a rank can be called slow
STRAGGLER_PERIODS = 12  # heartbeats between two searches for the slowest rank
STORE_SECONDS = timedelta(seconds=20)
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # on Linux: nanoseconds on a core, and waiting for one
GONE = "gone"  # key in the store: the reason why all ranks end
PACKAGE = Path(__file__).parents[2]

OnWarning = Callable[[int, str], None]  # gets the step and a message


class Watchdog:
    """Watch one rank among several. Open ``step`` around each step."""

    def __init__(self, plan: Plan, on_warning: OnWarning, output: Path | None = None) -> None:
        self.rank, self.size = rank_environment()
        # The file of the thread that makes this object and runs the steps. It stays open: opening takes 120 microseconds.
        self._schedstat = SCHEDSTAT.open("rb", buffering=0) if plan.device == "cpu" and SCHEDSTAT.exists() else None
        self._on_warning = on_warning
        self._output = output
        self._reported = 0  # the last step about which this rank wrote a report
        self._store = PrefixStore("watch", _clone_store())
        self._main_thread = threading.get_ident()
        self._start = time.monotonic()
        # The step, whether the main thread is in it, and since when: one tuple, so that other threads read all three at once.
        self._state = (0, False, self._start)
        self._times: deque[tuple[float, float]] = deque(maxlen=LAST_STEPS)  # seconds of a step, and of own work in it
        self._last_beats: dict[int, tuple[int, float]] = {}  # of each rank: its last beat, and when it came
        self._beat = 0
        self._warned: set[str] = set()  # the steps that stall and the ranks that are slow, each warned about once
        self._end = threading.Event()
        self._last_answer = self._start  # when the store last answered
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work in (self._run, self._watch_store)]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        start = time.monotonic()
        busy_before = self._busy_seconds()
        self._state = (number, True, start)
        yield
        end = time.monotonic()
        self._times.append((end - start, self._busy_seconds() - busy_before))
        self._state = (number, False, end)

    def _busy_seconds(self) -> float:
        """Return the seconds that this thread, which runs the steps, had work. While it slept, it waited for other ranks."""
        if self._schedstat is None:
            return 0.0
        on_core, queued, _ = os.pread(self._schedstat.fileno(), 128, 0).split()
        return (int(on_core) + int(queued)) * 1e-9

    @property
    def patience(self) -> float:
        """Return the seconds that a step may take before it counts as stalled."""
        step_seconds = [seconds for seconds, _ in list(self._times)]
        if not step_seconds:
            return PATIENCE
        return max(PATIENCE, STEPS_OF_PATIENCE * statistics.median(step_seconds))

    def _run(self) -> None:
        """Write a heartbeat in every period, and look at those of other ranks."""
        while not self._end.wait(PERIOD):
            heartbeat = self._make_heartbeat()
            with suppress(RuntimeError):  # the store ends with the job, or with rank 0, and the main threads report that
                self._store.set(str(self.rank), heartbeat.to_json())
                if self.rank == 0:
                    self._check_all_ranks(heartbeat)
                else:
                    self._check_rank_0(heartbeat)
                self._last_answer = time.monotonic()

    def _watch_store(self) -> None:
        """Leave the job if the store does not answer.

        The store's server keeps its time limits, so a request to a stopped server waits for ever.
        """
        while not self._end.wait(PERIOD):
            step, in_step, since = self._state
            time_now = time.monotonic()
            silence = time_now - self._last_answer
            if in_step and min(silence, time_now - since) > ENDS_AFTER:
                self._leave(step, f"rank 0, or the launcher beside it, does not answer since {format_seconds(silence)}")

    def _make_heartbeat(self) -> Heartbeat:
        self._beat += 1
        step, in_step, since = self._state
        seconds = time.monotonic() - since
        times = list(self._times)
        is_late = seconds > self.patience
        waiting = active_collective() if is_late else None
        if is_late and self._reported != step:
            self._reported = step
            self._report("stalled", step, f"in step {step} since {format_seconds(seconds)}", waiting)
        own_seconds = None
        if self._schedstat and len(times) >= ENOUGH_STEPS:
            own_seconds = statistics.median(computed for _, computed in times)
        return Heartbeat(
            rank=self.rank,
            beat=self._beat,
            step=step,
            in_step=in_step,
            seconds=seconds,
            own_seconds=own_seconds,
            step_seconds=statistics.median(elapsed for elapsed, _ in times) if times else None,
            waiting=waiting,
            at=self._current_line() if is_late else None,
        )

    def _check_all_ranks(self, own_heartbeat: Heartbeat) -> None:
        """Read the heartbeats of all ranks if rank 0 is late, and now and then to find the slowest rank."""
        is_late = own_heartbeat.seconds > self.patience + 2 * PERIOD  # by then all ranks have reported what they wait for
        if not is_late and self._beat % STRAGGLER_PERIODS:
            return
        keys = [str(rank) for rank in range(self.size)]
        present = [key for key in keys if self._store.check([key])]
        heartbeats = [Heartbeat.from_json(text) for text in self._store.multi_get(present)]
        time_now = time.monotonic()
        silent = {int(key): time_now - self._start for key in keys if key not in present}  # stopped before their first heartbeat
        for heartbeat in heartbeats:
            last_beat, came = self._last_beats.get(heartbeat.rank, (None, time_now))
            is_new = last_beat != heartbeat.beat
            self._last_beats[heartbeat.rank] = (heartbeat.beat, time_now if is_new else came)
            if not is_new and time_now - came > SILENCE * PERIOD:
                silent[heartbeat.rank] = time_now - came
        if is_late:
            stall = describe_stall(heartbeats, silent, patience=self.patience)
            self._warn(own_heartbeat.step, f"step {own_heartbeat.step}", stall)
            gone = {rank: seconds for rank, seconds in silent.items() if seconds > ENDS_AFTER}
            if gone and own_heartbeat.in_step:
                message = "; ".join(f"rank {rank} says nothing since {format_seconds(gone[rank])}" for rank in sorted(gone))
                self._store.set(GONE, message)
                self._end.wait(2 * PERIOD)  # the others read the message meanwhile
                self._leave(own_heartbeat.step, message)
        else:
            straggler = find_straggler(heartbeats)
            if straggler is not None:
                rank, message = straggler
                self._warn(own_heartbeat.step, f"rank {rank}", message)
                self._report("slow", own_heartbeat.step, message, None)

    def _check_rank_0(self, own_heartbeat: Heartbeat) -> None:
        """On a late rank other than 0, check whether rank 0 still writes heartbeats, or has written why all ranks end."""
        if not own_heartbeat.in_step or own_heartbeat.seconds <= self.patience + 2 * PERIOD:
            return
        if self._store.check([GONE]):
            self._leave(own_heartbeat.step, self._store.get(GONE).decode())
        heartbeat = Heartbeat.from_json(self._store.get("0")) if self._store.check(["0"]) else None
        beat = heartbeat.beat if heartbeat else 0
        time_now = time.monotonic()
        if self._last_beats.get(0, (None, 0.0))[0] != beat:
            self._last_beats[0] = (beat, time_now)
        silence = time_now - self._last_beats[0][1]
        if silence > ENDS_AFTER:
            self._leave(own_heartbeat.step, f"rank 0 says nothing since {format_seconds(silence)}")

    def _leave(self, step: int, message: str) -> None:
        """End the process, whatever its main thread waits for."""
        message = f"{message}: its process is stopped, or its host is gone; this one ends"
        self._report("died", step, message, None)
        logger.error("rank %s, step %s: %s", self.rank, step, message)
        os._exit(os.EX_UNAVAILABLE)

    def _warn(self, step: int, subject: str, message: str | None) -> None:
        """Pass on the message, once for each subject."""
        if message is not None and subject not in self._warned:
            self._warned.add(subject)
            with suppress(OSError):  # the terminal or the pipe that it goes to may be gone
                self._on_warning(step, message)

    def _report(self, kind: str, step: int, message: str, waiting: PendingCollective | None) -> None:
        """Write a report for `upshift doctor`: what every thread of this rank is doing."""
        if self._output is None:
            return
        collective = None if waiting is None else f"{waiting.name} {waiting.number} of group {waiting.group}"
        report = report_of(None, rank=self.rank, ranks=self.size, kind=kind, step=step, words=message, waiting=collective)
        with suppress(OSError):  # the disk may be full, or what hangs; without its report this thread still watches
            report.write(self._output)

    def _current_line(self) -> str | None:
        """Return the innermost line of this package that the main thread is in."""
        frame = sys._current_frames().get(self._main_thread)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return None
        return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_name})"


@contextmanager
def watching(
    plan: Plan, on_warning: OnWarning, output: Path | None = None
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Watch the ranks while open. Yield a function that returns a context for a step.

    With one process the context does nothing. ``output`` is the folder for reports.
    """
    if plan.num_processes == 1:
        yield lambda step: nullcontext()
        return
    try:
        watchdog = Watchdog(plan, on_warning, output)
    except MissingInternal as missing:
        on_warning(0, str(missing))
        yield lambda step: nullcontext()
        return
    with watchdog:
        yield watchdog.step


def _clone_store() -> Store:
    """Return a new connection to the job's store. The main thread may block the existing one for all its users."""
    store = DEFAULT_STORE.get()()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    connection: Store = store.clone()  # missing in the type stub
    connection.set_timeout(STORE_SECONDS)
    return connection


def active_collective() -> PendingCollective | None:
    """Return the oldest collective of this process that has begun and not ended, or None."""
    try:
        library = FLIGHT_RECORDER.get()
    except MissingInternal:
        return None
    dump_names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dump_name = next((name for name in dump_names if hasattr(library, name)), None)
    if dump_name is None:
        return None
    entries = json.loads(getattr(library, dump_name)(True, True)).get("entries", [])
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not active:
        return None
    oldest = min(active, key=lambda entry: entry["time_created_ns"])
    number = oldest["p2p_seq_id"] if oldest["is_p2p"] else oldest["collective_seq_id"]
    return PendingCollective(
        name=oldest["profiling_name"].partition(":")[2] or oldest["profiling_name"],
        number=number,
        group=" ".join(oldest["process_group"]),
        bytes=_bytes(oldest),
        seconds=max(time.time() - oldest["time_created_ns"] * 1e-9, 0.0),
    )


def _bytes(entry: dict[str, object]) -> int:
    """Return the bytes of a collective's inputs."""
    sizes = entry["input_sizes"]
    dtypes = entry["input_dtypes"]
    assert isinstance(sizes, list) and isinstance(dtypes, list)
    return sum(math.prod(size) * _ITEM_BYTES.get(dtype, 0) for size, dtype in zip(sizes, dtypes, strict=False))


_ITEM_BYTES = {  # by the names of torch's scalar types
    "Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
