"""Assign every nanosecond of one rank's profiled steps to one kind of work: by operator on a CPU, by kernel on a device.

Of nested operators the innermost has the time. Time in which no operator runs is the host's (Python, autograd, queueing). If a
collective is under way meanwhile, it is communication. The time that recording itself takes is taken off each operator alike,
so that the kinds sum to the step as it is without the profiler.

Compute the allocated bytes of a step, by phase, from the allocator's events in the profiler.
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
RECORDING_SECONDS = 1e-6  # of an operator at most: torch.profiler's own, on a 2-core Zen 4
BACKWARD = "autograd::engine::evaluate_function"

_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm", "_grouped_mm", "convolution",
    "mkldnn_convolution", "convolution_backward", "_addmm_activation", "mkldnn_linear", "_linear_pointwise",
    "mkldnn_linear_backward_weights", "mkldnn_linear_backward_input",
}  # fmt: skip
_NO_WORK = {  # of their own: views, bookkeeping, and operators whose work is in the operators inside
    "t", "transpose", "transpose_", "view", "reshape", "_reshape_alias", "_unsafe_view", "expand", "as_strided", "slice",
    "select", "unsqueeze", "unsqueeze_", "squeeze", "squeeze_", "permute", "detach", "detach_", "alias", "empty", "empty_like",
    "empty_strided", "resize_", "split", "chunk", "unbind", "narrow", "lift_fresh", "result_type", "item", "is_nonzero",
    "_local_scalar_dense", "linear", "matmul", "einsum", "to", "_to_copy", "contiguous", "zeros", "ones", "new_empty",
    "new_zeros", "zeros_like", "ones_like", "flatten", "unflatten", "_has_compatible_shallow_copy_type", "set_",
}  # fmt: skip
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention", "block_attention", "fmha")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "_c10d_functional", "fsdp::", "ncclDevKernel", "ncclKernel")
_KERNELS_OF_PRODUCTS = ("gemm", "cutlass", "nvjet", "wgmma", "cublas", "Cijk_", "splitKreduce")


class Span(NamedTuple):
    """An operator, or a range that was marked, on one thread, or a kernel on a device. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    sequence: int = -1  # of the autograd graph: the same for an operator and for its backward function


class Account(NamedTuple):
    seconds: dict[str, float]  # by kind, of all steps together
    head: dict[str, float]  # the parts of HEAD that are products, attention and elementwise
    spans: dict[str, int]  # how many operators, by kind
    operators: dict[str, tuple[float, int]]  # seconds of their own, and calls, by name


def kind_of(name: str) -> str:
    """Return the kind of an operator's own time."""
    if any(word in name for word in _COMMUNICATION):
        return COMMUNICATION
    if any(word in name for word in _ATTENTION):
        return ATTENTION
    namespace, colons, operator = name.rpartition("::")
    if operator in _PRODUCTS:
        return PRODUCTS
    if operator in _NO_WORK or (not colons and name.endswith("Backward0")) or namespace.startswith("autograd"):
        return IDLE
    # Kernels that a compiler wrote for a CPU are functions inside of these ranges.
    return ELEMENTWISE if colons or name.startswith(("CompiledFunction", "Torch-Compiled Region")) else IDLE


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel on a device."""
    if any(word in name for word in _COMMUNICATION):
        return COMMUNICATION
    if any(word in name.lower() for word in ("flash", "fmha", "attention")):
        return ATTENTION
    if any(word in name for word in _KERNELS_OF_PRODUCTS):
        return PRODUCTS
    return OPTIMIZER if any(word in name.lower() for word in ("multi_tensor_apply", "adam")) else ELEMENTWISE


class Collectives:
    """The times in which some exchange was under way."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._merged = merged(spans)
        self._starts = [start for start, _ in self._merged]

    def overlap(self, start: int, end: int) -> int:
        total = 0
        for first, last in self._merged[max(bisect_right(self._starts, start) - 1, 0) :]:
            if first >= end:
                break
            total += max(min(end, last) - max(start, first), 0)
        return total


def merged(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return the spans as intervals that do not touch."""
    found: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


class _Open(NamedTuple):
    span: Span
    kind: str | None  # the kind of everything inside; None: each operator has its own
    in_head: bool


class HostTime:
    """The time of the thread that computes. ``spans`` are its own, nested; ``exchanges`` are those of any thread."""

    def __init__(self, spans: list[Span], exchanges: list[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._exchanges = Collectives(exchanges)
        self._seconds: dict[str, float] = defaultdict(float)
        self._head: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)
        self._operators: dict[str, tuple[float, int]] = {}
        self._head_sequences: set[int] = set()

    def account(self) -> Account:
        """Return the account of the time. Only time inside a STEP_RANGE counts."""
        stack: list[_Open] = []
        now = 0
        for span in self._spans:
            while stack and stack[-1].span.end <= span.start:
                now = self._until(stack, stack[-1].span.end, now)
                stack.pop()
            now = self._until(stack, span.start, now)
            stack.append(self._opened(span, stack[-1] if stack else None))
        while stack:
            now = self._until(stack, stack[-1].span.end, now)
            stack.pop()
        return Account(dict(self._seconds), dict(self._head), dict(self._count), self._operators)

    def _opened(self, span: Span, outer: _Open | None) -> _Open:
        in_head = span.name == HEAD_RANGE or (outer is not None and outer.in_head)
        if in_head and span.sequence >= 0 and not span.name.startswith(BACKWARD):
            self._head_sequences.add(span.sequence)
        elif span.name.startswith(BACKWARD):
            in_head = span.sequence in self._head_sequences
        inherited = outer.kind if outer is not None else None
        whole = {DATA_RANGE: DATA, UPDATE_RANGE: OPTIMIZER}.get(span.name)
        own = kind_of(span.name)
        if own == COMMUNICATION or (inherited is None and own == ATTENTION):
            whole = own
        opened = _Open(span, whole or inherited, in_head)
        self._count[self._kind(opened)] += 1
        return opened

    def _kind(self, opened: _Open) -> str:
        return opened.kind or kind_of(opened.span.name)

    def _until(self, stack: list[_Open], end: int, now: int) -> int:
        """Give the time from ``now`` to ``end`` to the innermost span."""
        if not stack or stack[0].span.name != STEP_RANGE or end <= now:
            return max(end, now)
        inner = stack[-1]
        start = max(now, stack[0].span.start)
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
            known, calls = self._operators.get(inner.span.name, (0.0, 0))
            self._operators[inner.span.name] = (known + seconds, calls + (start <= inner.span.start))
        return end


def device_time(kernels: list[Span], updates: list[Span], steps: list[Span]) -> Account:
    """Return the account of a device: kernels by kind, exchanges only while nothing else runs.

    ``updates`` and ``steps`` are ranges on the device.
    """
    busy = Collectives(span for span in kernels if kind_of_kernel(span.name) != COMMUNICATION)
    together = Collectives(kernels)
    updating = Collectives(updates)
    seconds: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    operators: dict[str, tuple[float, int]] = {}
    for span in kernels:
        kind = kind_of_kernel(span.name)
        count[kind] += 1
        known, calls = operators.get(span.name, (0.0, 0))
        operators[span.name] = (known + (span.end - span.start) * 1e-9, calls + 1)
        if kind != COMMUNICATION:
            kind = OPTIMIZER if updating.overlap(span.start, span.end) else kind
            seconds[kind] += (span.end - span.start) * 1e-9
    whole = sum(span.end - span.start for span in steps)
    computing = sum(busy.overlap(span.start, span.end) for span in steps)
    all_of_it = sum(together.overlap(span.start, span.end) for span in steps)
    scale = computing * 1e-9 / (sum(seconds.values()) or 1.0)  # kernels of two streams run at once
    shared = {kind: value * scale for kind, value in seconds.items()}
    shared |= {COMMUNICATION: (all_of_it - computing) * 1e-9, IDLE: (whole - all_of_it) * 1e-9}
    return Account(shared, {}, dict(count), operators)


def recording_seconds(account: Account, *, profiled: float, plain: float) -> float:
    """Return the seconds that recording one operator takes.

    If steps under the profiler took longer than that explains, the machine was busier then.
    """
    operators = sum(account.spans.values())
    return min(max(profiled - plain, 0.0) / operators, RECORDING_SECONDS) if operators else 0.0


def without_recording(account: Account, *, profiled: float, plain: float) -> dict[str, float]:
    """Return seconds by kind that sum to ``plain``, the same steps without the profiler."""
    each = recording_seconds(account, profiled=profiled, plain=plain)
    left = {kind: max(value - each * account.spans.get(kind, 0), 0.0) for kind, value in account.seconds.items()}
    between = min(max(sum(left.values()) - plain, 0.0), left.get(IDLE, 0.0) / 2)  # recording takes time around operators, too
    left[IDLE] = left.get(IDLE, 0.0) - between
    scale = plain / (sum(left.values()) or 1.0)
    return {kind: value * scale for kind, value in left.items()}


PHASES = FORWARD_PHASE, BACKWARD_PHASE, OPTIMIZER_PHASE = "forward", "backward", "optimizer"  # the planner's words
MEMORY_EVENT = "[memory]"


def phases_of(events: list[Any]) -> dict[str, int]:
    """Return the most bytes above those at the start, in each phase. ``events`` are the profiler's, of one step."""

    def within(names: str) -> Collectives:
        found = [event for event in events if event.name().startswith(names)]
        return Collectives(Span(names, event.start_ns(), event.start_ns() + event.duration_ns()) for event in found)

    backward = within(BACKWARD)
    update = within(UPDATE_RANGE)
    live = 0
    highest = dict.fromkeys(PHASES, 0)
    for event in sorted((event for event in events if event.name() == MEMORY_EVENT), key=lambda event: event.start_ns()):
        live += event.nbytes()
        now = event.start_ns()
        phase = (
            OPTIMIZER_PHASE
            if update.overlap(now, now + 1)
            else BACKWARD_PHASE
            if backward.overlap(now, now + 1)
            else FORWARD_PHASE
        )
        highest[phase] = max(highest[phase], live)
    return highest
