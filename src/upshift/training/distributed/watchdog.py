"""Report in the job's store, from a thread of every rank, what the rank does, and read the reports when nothing moves.

While steps follow each other a rank writes a line every few seconds, and nothing is looked up. A rank that has been in one
step for longer than ``PATIENCE`` reports which collective it waits in, by the record that torch keeps of the last ones (its
flight recorder). Rank 0 reads all reports, and the others read whether rank 0 reports. A rank that waits in a step for a rank
that has been silent for ``ENDS_AFTER`` ends its process, and so do all: a launcher can then start again without the host that
is gone, for which gloo alone would wait half an hour.

Read together what all ranks report, and say in words which ranks wait for which since when, and which rank is slower.
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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from upshift.debugging.run_report import report_of
from upshift.errors import MissingInternal
from upshift.internals.torch_names import DEFAULT_STORE, FLIGHT_RECORDER
from upshift.planning.plan import Plan
from upshift.training.process_group import rank_environment
from upshift.units import format_bytes, format_seconds
from upshift.value import Value

STRAGGLER_FACTOR = 1.3  # than the median of the ranks: named
MIN_WORK_SHARE = 0.5  # of the step: a rank's own work below it holds up nobody
MAX_NAMED = 8


class PendingCollective(Value):
    """A collective that a rank has begun and not ended."""

    name: str  # all_reduce
    number: int  # of this rank's collectives in the group
    group: str
    bytes: int
    seconds: float


class Heartbeat(Value):
    """The report of one rank. It counts seconds by its own clock, as clocks of hosts differ."""

    rank: int
    beat: int  # grows while the process runs
    step: int
    seconds: float  # since its last step began or ended
    in_step: bool
    own_seconds: float | None = None  # of a step, less what it waited; the median of the last
    step_seconds: float | None = None
    waiting: PendingCollective | None = None
    at: str | None = None  # the line of Upshift's that its main thread has come to


def describe_stall(pulses: list[Heartbeat], silent: Mapping[int, float], *, patience: float) -> str | None:
    """Return in words that ranks are stalled, or None.

    Return None unless a rank waits in one collective, or is silent, for longer than ``patience`` seconds. Return None also
    while one rank still moves. ``silent`` holds the seconds of ranks that report nothing; their earlier reports do not count.
    """
    speaking = [pulse for pulse in pulses if pulse.rank not in silent]
    waiting = [pulse for pulse in speaking if pulse.waiting is not None]
    late = [pulse for pulse in waiting if pulse.waiting is not None and pulse.waiting.seconds > patience]
    if (not late and not silent) or any(pulse.seconds <= patience for pulse in speaking):
        return None
    alike: dict[tuple[str, int, str, int], list[Heartbeat]] = defaultdict(list)
    for pulse in waiting:
        assert pulse.waiting is not None
        alike[pulse.waiting.name, pulse.waiting.number, pulse.waiting.group, pulse.waiting.bytes].append(pulse)
    words = []
    for (name, number, group, size), ranks in alike.items():
        since = max(pulse.waiting.seconds for pulse in ranks if pulse.waiting is not None)
        words.append(
            f"{_format_ranks([pulse.rank for pulse in ranks])} since {format_seconds(since)} in {name} {number} of group {group} "
            f"({format_bytes(size)}), step {min(pulse.step for pulse in ranks)}"
        )
    for pulse in [pulse for pulse in speaking if pulse.waiting is None][:MAX_NAMED]:
        where = f", at {pulse.at}" if pulse.at else ""
        doing = f"step {pulse.step}" if pulse.in_step else f"after step {pulse.step}"
        words.append(f"rank {pulse.rank} is in no collective: {doing} since {format_seconds(pulse.seconds)}{where}")
    for rank, seconds in sorted(silent.items())[:MAX_NAMED]:
        words.append(f"rank {rank} says nothing since {format_seconds(seconds)}: its process is stopped, or its host is gone")
    if len(alike) > 1:
        words.append("they wait in different collectives: ranks in one group must begin the same ones in the same order")
    return "; ".join(words)


def find_straggler(pulses: list[Heartbeat]) -> tuple[int, str] | None:
    """Return the rank whose own work takes longest, with words, if the others wait for it."""
    own = {pulse.rank: pulse.own_seconds for pulse in pulses if pulse.own_seconds is not None}
    if len(own) < 2:
        return None
    rank = max(own, key=lambda rank: own[rank])
    rest = statistics.median(seconds for other, seconds in own.items() if other != rank)
    step = next(pulse.step_seconds for pulse in pulses if pulse.rank == rank) or own[rank]
    if own[rank] < STRAGGLER_FACTOR * rest or own[rank] < MIN_WORK_SHARE * step:
        return None
    words = (
        f"rank {rank} holds up the others: its own work takes {format_seconds(own[rank])} of a step of {format_seconds(step)}, "
        f"theirs {format_seconds(rest)} (medians); look at what else runs on its cores, and at their clock"
    )
    return rank, words


def _format_ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank {named} waits" if len(ranks) == 1 else f"ranks {named}{more} wait"


logger = logging.getLogger(__name__)

PERIOD = 5.0  # seconds between two pulses
PATIENCE = 60.0  # seconds in one step, and longer where steps take long
STEPS_OF_PATIENCE = 10
SILENCE = 6  # pulses that a rank may miss
ENDS_AFTER = 300.0  # seconds of silence while this rank waits in a step
LAST_STEPS = 16  # of which medians are taken
ENOUGH_STEPS = 8  # to say who is slow
STRAGGLER_PERIODS = 12  # between two looks at who is slowest
STORE_SECONDS = timedelta(seconds=20)
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # of Linux: nanoseconds on a core, and waiting for one
GONE = "gone"  # in the store: why all end
PACKAGE = Path(__file__).parents[2]

OnWarning = Callable[[int, str], None]  # the step, and what is said of it


class Watchdog:
    """The watch of one rank among several. ``step()`` surrounds each step."""

    def __init__(self, plan: Plan, on_words: OnWarning, output: Path | None = None) -> None:
        self.rank, self.size = rank_environment()
        # The file of the thread that makes this object and steps. It stays open: opening it takes 120 microseconds of a step.
        self._schedstat = SCHEDSTAT.open("rb", buffering=0) if plan.device == "cpu" and SCHEDSTAT.exists() else None
        self._on_words = on_words
        self._output = output
        self._reported = 0  # the last step of which this rank left a report
        self._store = PrefixStore("watch", _clone_store())
        self._main = threading.get_ident()
        self._began = time.monotonic()
        self._state = (0, False, self._began)  # the step, whether inside of it, since when
        self._times: deque[tuple[float, float]] = deque(maxlen=LAST_STEPS)  # whole, own
        self._seen: dict[int, tuple[int, float]] = {}  # of each rank: its last beat, and when it came
        self._beat = 0
        self._said: set[str] = set()  # once for each step that stalls, and for each rank that lags
        self._ends = threading.Event()
        self._answered = self._began  # when the store last did
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work in (self._run, self._guard)]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        start = time.monotonic()
        busy = self._busy()
        self._state = (number, True, start)
        yield
        end = time.monotonic()
        self._times.append((end - start, self._busy() - busy))
        self._state = (number, False, end)

    def _busy(self) -> float:
        """Return the seconds that this thread, which computes and waits, had work. The time it slept belongs to the others."""
        if self._schedstat is None:
            return 0.0
        on_core, queued, _ = os.pread(self._schedstat.fileno(), 128, 0).split()
        return (int(on_core) + int(queued)) * 1e-9

    @property
    def patience(self) -> float:
        steps = [whole for whole, _ in list(self._times)]
        return max(PATIENCE, STEPS_OF_PATIENCE * statistics.median(steps)) if steps else PATIENCE

    def _run(self) -> None:
        while not self._ends.wait(PERIOD):
            pulse = self._pulse()
            with suppress(RuntimeError):  # the store ends with the job, or with rank 0, whose end the ranks themselves report
                self._store.set(str(self.rank), pulse.to_json())
                self._read(pulse) if self.rank == 0 else self._listen(pulse)
                self._answered = time.monotonic()

    def _guard(self) -> None:
        """Leave the job if the store does not answer.

        The store's own time limits are kept by its server: a request to a stopped server waits for ever.
        """
        while not self._ends.wait(PERIOD):
            (step, in_step, since) = self._state
            now = time.monotonic()
            silence = now - self._answered
            if in_step and min(silence, now - since) > ENDS_AFTER:
                self._leave(step, f"rank 0, or the launcher beside it, does not answer since {format_seconds(silence)}")

    def _pulse(self) -> Heartbeat:
        self._beat += 1
        step, in_step, since = self._state
        seconds = time.monotonic() - since
        times = list(self._times)
        looks = seconds > self.patience
        waiting = active_collective() if looks else None
        if looks and self._reported != step:
            self._reported = step
            self._report("stalled", step, f"in step {step} since {format_seconds(seconds)}", waiting)
        return Heartbeat(
            rank=self.rank, beat=self._beat, step=step, in_step=in_step, seconds=seconds,
            own_seconds=statistics.median(own for _, own in times) if self._schedstat and len(times) >= ENOUGH_STEPS else None,
            step_seconds=statistics.median(whole for whole, _ in times) if times else None,
            waiting=waiting, at=self._line() if looks else None,
        )  # fmt: skip

    def _read(self, mine: Heartbeat) -> None:
        is_late = mine.seconds > self.patience + 2 * PERIOD  # by then all have said what they wait for
        if not is_late and self._beat % STRAGGLER_PERIODS:
            return
        keys = [str(rank) for rank in range(self.size)]
        said = [key for key in keys if self._store.check([key])]
        pulses = [Heartbeat.from_json(text) for text in self._store.multi_get(said)]
        now = time.monotonic()
        silent = {int(key): now - self._began for key in keys if key not in said}  # stopped before their first pulse
        for pulse in pulses:
            beat, came = self._seen.get(pulse.rank, (None, now))
            self._seen[pulse.rank] = (pulse.beat, came if beat == pulse.beat else now)
            if beat == pulse.beat and now - came > SILENCE * PERIOD:
                silent[pulse.rank] = now - came
        if is_late:
            self._say(mine.step, f"step {mine.step}", describe_stall(pulses, silent, patience=self.patience))
            gone = {rank: seconds for rank, seconds in silent.items() if seconds > ENDS_AFTER}
            if gone and mine.in_step:
                words = "; ".join(f"rank {rank} says nothing since {format_seconds(gone[rank])}" for rank in sorted(gone))
                self._store.set(GONE, words)
                self._ends.wait(2 * PERIOD)  # in which the others read it
                self._leave(mine.step, words)
        else:
            found = find_straggler(pulses)
            if found is not None:
                self._say(mine.step, f"rank {found[0]}", found[1])
                self._report("slow", mine.step, found[1], None)

    def _listen(self, mine: Heartbeat) -> None:
        """Check, on a late rank other than 0, whether rank 0 reports, or has written why all end."""
        if not mine.in_step or mine.seconds <= self.patience + 2 * PERIOD:
            return
        if self._store.check([GONE]):
            self._leave(mine.step, self._store.get(GONE).decode())
        said = Heartbeat.from_json(self._store.get("0")) if self._store.check(["0"]) else None
        beat = said.beat if said else 0
        now = time.monotonic()
        if self._seen.get(0, (None, 0.0))[0] != beat:
            self._seen[0] = (beat, now)
        silence = now - self._seen[0][1]
        if silence > ENDS_AFTER:
            self._leave(mine.step, f"rank 0 says nothing since {format_seconds(silence)}")

    def _leave(self, step: int, words: str) -> None:
        """End the process, whatever its main thread waits for."""
        words = f"{words}: its process is stopped, or its host is gone; this one ends"
        self._report("died", step, words, None)
        logger.error("rank %s, step %s: %s", self.rank, step, words)
        os._exit(os.EX_UNAVAILABLE)

    def _say(self, step: int, about: str, words: str | None) -> None:
        if words is not None and about not in self._said:
            self._said.add(about)
            self._on_words(step, words)

    def _report(self, kind: str, step: int, words: str, waiting: PendingCollective | None) -> None:
        """Write a report for `upshift doctor`: where every thread of this rank is."""
        if self._output is None:
            return
        where = None if waiting is None else f"{waiting.name} {waiting.number} of group {waiting.group}"
        report = report_of(None, rank=self.rank, ranks=self.size, kind=kind, step=step, words=words, waiting=where)
        report.write(self._output)

    def _line(self) -> str | None:
        """Return the innermost line of this package that the main thread is in."""
        frame = sys._current_frames().get(self._main)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return None
        return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_name})"


@contextmanager
def watching(
    plan: Plan, on_words: OnWarning, output: Path | None = None
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Yield a context manager for each step; with one process it does nothing. ``output`` is the folder for reports."""
    if plan.num_processes == 1:
        yield lambda step: nullcontext()
        return
    try:
        made = Watchdog(plan, on_words, output)
    except MissingInternal as missing:
        on_words(0, str(missing))
        yield lambda step: nullcontext()
        return
    with made as watch:
        yield watch.step


def _clone_store() -> Store:
    """Return a connection of its own to the job's store. The main thread may wait on the first one, and any other caller with
    it."""
    store = DEFAULT_STORE.get()()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    copy: Store = store.clone()  # not in its stub
    copy.set_timeout(STORE_SECONDS)
    return copy


def active_collective() -> PendingCollective | None:
    """Return the oldest collective of this process that has begun and not ended, or None."""
    try:
        library = FLIGHT_RECORDER.get()
    except MissingInternal:
        return None
    name = next((name for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if hasattr(library, name)), None)
    if name is None:
        return None
    entries = json.loads(getattr(library, name)(True, True)).get("entries", [])
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not active:
        return None
    oldest = min(active, key=lambda entry: entry["time_created_ns"])
    number = oldest["p2p_seq_id"] if oldest["is_p2p"] else oldest["collective_seq_id"]
    return PendingCollective(
        name=oldest["profiling_name"].partition(":")[2] or oldest["profiling_name"], number=number,
        group=" ".join(oldest["process_group"]), bytes=_bytes(oldest),
        seconds=max(time.time() - oldest["time_created_ns"] * 1e-9, 0.0),
    )  # fmt: skip


def _bytes(entry: dict[str, object]) -> int:
    sizes = entry["input_sizes"]
    dtypes = entry["input_dtypes"]
    assert isinstance(sizes, list) and isinstance(dtypes, list)
    return sum(math.prod(size) * _ITEM_BYTES.get(dtype, 0) for size, dtype in zip(sizes, dtypes, strict=False))


_ITEM_BYTES = {  # by the names of torch's scalar types
    "Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
