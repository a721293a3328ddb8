"""Assign every nanosecond of one rank's profiled steps to one kind of work: by operator on a CPU, by kernel on a device.

The innermost of nested operators gets the time. Time in which no operator runs belongs to the host (Python, autograd, queueing),
or to communication if a collective is running meanwhile. Recording itself takes time, which is subtracted equally from all
operators, so that the kinds sum to the step without the profiler.

The allocator's events in the profiler also give the peak bytes of each phase of a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from upshift.planning.analysis.bottleneck import ATTENTION, COMMUNICATION, DATA, ELEMENTWISE, HEAD, IDLE, OPTIMIZER, PRODUCTS

STEP_RANGE = "upshift.step"
DATA_RANGE = "upshift.data"
UPDATE_RANGE = "upshift.update"
HEAD_RANGE = "upshift.head"
RECORDING_SECONDS = 1e-6  # the most that recording one operator takes, measured for torch.profiler on a 2-core Zen 4
BACKWARD = "autograd::engine::evaluate_function"

_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm", "_grouped_mm", "convolution",
    "mkldnn_convolution", "convolution_backward", "_addmm_activation", "mkldnn_linear", "_linear_pointwise",
    "mkldnn_linear_backward_weights", "mkldnn_linear_backward_input",
}  # fmt: skip
_WITHOUT_OWN_WORK = {  # views, bookkeeping, and operators whose work is in the operators that they call
    "t", "transpose", "transpose_", "view", "reshape", "_reshape_alias", "_unsafe_view", "expand", "as_strided", "slice",
    "select", "unsqueeze", "unsqueeze_", "squeeze", "squeeze_", "permute", "detach", "detach_", "alias", "empty", "empty_like",
    "empty_strided", "resize_", "split", "chunk", "unbind", "narrow", "lift_fresh", "result_type", "item", "is_nonzero",
    "_local_scalar_dense", "linear", "matmul", "einsum", "to", "_to_copy", "contiguous", "zeros", "ones", "new_empty",
    "new_zeros", "zeros_like", "ones_like", "flatten", "unflatten", "_has_compatible_shallow_copy_type", "set_",
}  # fmt: skip
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention", "block_attention", "fmha")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "_c10d_functional", "fsdp::", "ncclDevKernel", "ncclKernel")
_PRODUCT_KERNELS = ("gemm", "cutlass", "nvjet", "wgmma", "cublas", "Cijk_", "splitKreduce")


class Span(NamedTuple):
    """An operator or a marked range on one thread, or a kernel on a device. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    sequence: int = -1  # the number in the autograd graph: the same for an operator and for its backward function


class TimeBreakdown(NamedTuple):
    """The time of all profiled steps together, by kind of work."""

    seconds: dict[str, float]  # by kind
    head: dict[str, float]  # seconds in HEAD of products, attention and elementwise work
    spans: dict[str, int]  # number of operators, by kind
    operators: dict[str, tuple[float, int]]  # by name: own seconds, and calls


def kind_of_operator(name: str) -> str:
    """Return the kind of an operator's own time."""
    if any(word in name for word in _COMMUNICATION):
        return COMMUNICATION
    if any(word in name for word in _ATTENTION):
        return ATTENTION
    namespace, colons, operator = name.rpartition("::")
    if operator in _PRODUCTS:
        return PRODUCTS
    if operator in _WITHOUT_OWN_WORK or (not colons and name.endswith("Backward0")) or namespace.startswith("autograd"):
        return IDLE
    # The kernels that a compiler writes for a CPU are functions inside of these ranges.
    is_compiled = name.startswith(("CompiledFunction", "Torch-Compiled Region"))
    return ELEMENTWISE if colons or is_compiled else IDLE


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel on a device."""
    if any(word in name for word in _COMMUNICATION):
        return COMMUNICATION
    if any(word in name.lower() for word in ("flash", "fmha", "attention")):
        return ATTENTION
    if any(word in name for word in _PRODUCT_KERNELS):
        return PRODUCTS
    is_update = any(word in name.lower() for word in ("multi_tensor_apply", "adam"))
    return OPTIMIZER if is_update else ELEMENTWISE


class BusyIntervals:
    """The times in which at least one of the given spans was running."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._merged = merge_intervals(spans)
        self._starts = [start for start, _ in self._merged]

    def overlap(self, start: int, end: int) -> int:
        """Return the nanoseconds from ``start`` to ``end`` in which a span was running."""
        total = 0
        for first, last in self._merged[max(bisect_right(self._starts, start) - 1, 0) :]:
            if first >= end:
                break
            total += max(min(end, last) - max(start, first), 0)
        return total


def merge_intervals(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return the spans as intervals (start, end) that do not touch, in order."""
    intervals: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if intervals and span.start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], span.end))
        else:
            intervals.append((span.start, span.end))
    return intervals


class _OpenSpan(NamedTuple):
    span: Span
    kind: str | None  # the kind of everything inside; None: each operator has its own
    in_head: bool


class HostBreakdown:
    """Break down the time of the thread that computes.

    ``spans`` are its own, nested. ``exchanges`` may run on any thread.
    """

    def __init__(self, spans: list[Span], exchanges: list[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._exchanges = BusyIntervals(exchanges)
        self._seconds: dict[str, float] = defaultdict(float)
        self._head: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)
        self._operators: dict[str, tuple[float, int]] = {}
        self._head_sequences: set[int] = set()

    def compute(self) -> TimeBreakdown:
        """Return the breakdown. Only time inside a STEP_RANGE counts."""
        stack: list[_OpenSpan] = []
        position = 0  # all time before it is assigned
        for span in self._spans:
            while stack and stack[-1].span.end <= span.start:
                position = self._assign_until(stack, stack[-1].span.end, position)
                stack.pop()
            position = self._assign_until(stack, span.start, position)
            stack.append(self._open(span, stack[-1] if stack else None))
        while stack:
            position = self._assign_until(stack, stack[-1].span.end, position)
            stack.pop()
        return TimeBreakdown(dict(self._seconds), dict(self._head), dict(self._count), self._operators)

    def _open(self, span: Span, outer: _OpenSpan | None) -> _OpenSpan:
        in_head = span.name == HEAD_RANGE or (outer is not None and outer.in_head)
        if in_head and span.sequence >= 0 and not span.name.startswith(BACKWARD):
            self._head_sequences.add(span.sequence)
        elif span.name.startswith(BACKWARD):
            in_head = span.sequence in self._head_sequences
        inherited = outer.kind if outer is not None else None
        kind_inside = {DATA_RANGE: DATA, UPDATE_RANGE: OPTIMIZER}.get(span.name)
        own_kind = kind_of_operator(span.name)
        if own_kind == COMMUNICATION or (inherited is None and own_kind == ATTENTION):
            kind_inside = own_kind
        open_span = _OpenSpan(span, kind_inside or inherited, in_head)
        self._count[self._kind(open_span)] += 1
        return open_span

    def _kind(self, open_span: _OpenSpan) -> str:
        return open_span.kind or kind_of_operator(open_span.span.name)

    def _assign_until(self, stack: list[_OpenSpan], end: int, position: int) -> int:
        """Assign the time from ``position`` to ``end`` to the innermost span. Return the new position."""
        if not stack or stack[0].span.name != STEP_RANGE or end <= position:
            return max(end, position)
        inner = stack[-1]
        start = max(position, stack[0].span.start)
        kind = self._kind(inner)
        seconds = (end - start) * 1e-9
        if kind == IDLE or inner.span.name == UPDATE_RANGE:
            waited = self._exchanges.overlap(start, end) * 1e-9
            self._seconds[COMMUNICATION] += waited
            seconds -= waited
        if inner.in_head and kind in (PRODUCTS, ATTENTION, ELEMENTWISE):
            self._head[kind] += seconds
            kind = HEAD
        self._seconds[kind] += seconds
        if not inner.span.name.startswith("upshift."):
            previous_seconds, calls = self._operators.get(inner.span.name, (0.0, 0))
            self._operators[inner.span.name] = (previous_seconds + seconds, calls + (start <= inner.span.start))
        return end


def break_down_device(kernels: list[Span], updates: list[Span], steps: list[Span]) -> TimeBreakdown:
    """Break down the time of a device: kernels by kind, and exchanges only while nothing else runs.

    ``updates`` and ``steps`` are ranges on the device.
    """
    computing = BusyIntervals(span for span in kernels if kind_of_kernel(span.name) != COMMUNICATION)
    busy = BusyIntervals(kernels)
    updating = BusyIntervals(updates)
    seconds: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    operators: dict[str, tuple[float, int]] = {}
    for span in kernels:
        kind = kind_of_kernel(span.name)
        count[kind] += 1
        previous_seconds, calls = operators.get(span.name, (0.0, 0))
        operators[span.name] = (previous_seconds + (span.end - span.start) * 1e-9, calls + 1)
        if kind != COMMUNICATION:
            if updating.overlap(span.start, span.end):
                kind = OPTIMIZER
            seconds[kind] += (span.end - span.start) * 1e-9
    step_ns = sum(span.end - span.start for span in steps)
    computing_ns = sum(computing.overlap(span.start, span.end) for span in steps)
    busy_ns = sum(busy.overlap(span.start, span.end) for span in steps)
    scale = computing_ns * 1e-9 / (sum(seconds.values()) or 1.0)  # kernels of several streams may run at once
    scaled = {kind: value * scale for kind, value in seconds.items()}
    scaled |= {COMMUNICATION: (busy_ns - computing_ns) * 1e-9, IDLE: (step_ns - busy_ns) * 1e-9}
    return TimeBreakdown(scaled, {}, dict(count), operators)


def seconds_per_recording(breakdown: TimeBreakdown, *, profiled: float, plain: float) -> float:
    """Return the seconds that recording one operator takes, at most RECORDING_SECONDS.

    ``profiled`` and ``plain`` are the seconds of the same steps with and without the profiler. A larger difference shows that
    the machine was busier under the profiler.
    """
    num_operators = sum(breakdown.spans.values())
    if not num_operators:
        return 0.0
    return min(max(profiled - plain, 0.0) / num_operators, RECORDING_SECONDS)


def subtract_recording(breakdown: TimeBreakdown, *, profiled: float, plain: float) -> dict[str, float]:
    """Return seconds by kind that sum to ``plain``, the seconds of the same steps without the profiler."""
    recording = seconds_per_recording(breakdown, profiled=profiled, plain=plain)
    corrected = {}
    for kind, seconds in breakdown.seconds.items():
        corrected[kind] = max(seconds - recording * breakdown.spans.get(kind, 0), 0.0)
    # Recording takes time between operators too.
    between = min(max(sum(corrected.values()) - plain, 0.0), corrected.get(IDLE, 0.0) / 2)
    corrected[IDLE] = corrected.get(IDLE, 0.0) - between
    scale = plain / (sum(corrected.values()) or 1.0)
    return {kind: seconds * scale for kind, seconds in corrected.items()}


PHASES = FORWARD_PHASE, BACKWARD_PHASE, OPTIMIZER_PHASE = "forward", "backward", "optimizer"  # the planner's names
MEMORY_EVENT = "[memory]"


def peak_bytes_by_phase(events: list[Any]) -> dict[str, int]:
    """Return the peak of each phase, in bytes above those at the start. ``events`` are the profiler's events of one step."""

    def intervals_of(prefix: str) -> BusyIntervals:
        matching = [event for event in events if event.name().startswith(prefix)]
        return BusyIntervals(Span(prefix, event.start_ns(), event.start_ns() + event.duration_ns()) for event in matching)

    backward = intervals_of(BACKWARD)
    update = intervals_of(UPDATE_RANGE)
    live = 0
    highest = dict.fromkeys(PHASES, 0)
    memory_events = [event for event in events if event.name() == MEMORY_EVENT]
    for event in sorted(memory_events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        time_ns = event.start_ns()
        phase = FORWARD_PHASE
        if update.overlap(time_ns, time_ns + 1):
            phase = OPTIMIZER_PHASE
        elif backward.overlap(time_ns, time_ns + 1):
            phase = BACKWARD_PHASE
        highest[phase] = max(highest[phase], live)
    return highest
