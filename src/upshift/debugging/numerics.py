# needs torch
"""Watch a model's numbers while it runs: find the module that first makes inf or NaN, underflows, and numbers near their limit.

On a CPU each call of a module is checked when it ends. On a device all calls are checked after the forward pass, so that the host
waits for the device once. Compiled modules write their ranges into a tensor inside the compiled graph; their frames are ordered
as the modules are defined.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upshift.debugging.finding import Finding
from upshift.debugging.number_ranges import Frame, Reading, Trends, diagnose, is_bad, underflows
from upshift.errors import JobFailed, RequestError
from upshift.internals.torch_names import PARAMETERS, VERSION

FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def local_part(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor that this process holds, or None if it is not of floats, is empty, or is on meta."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    has_range = tensor.dtype in FLOATS and tensor.numel() and tensor.device.type != "meta"
    return tensor if has_range else None


def labelled_tensors(inputs: Any, named: Any, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's call, each with a label such as input[0]."""
    for index, value in enumerate(inputs):
        yield from tensors_inside(value, f"input[{index}]")
    for name, value in named.items():
        yield from tensors_inside(value, f"input[{name}]")
    yield from tensors_inside(output, "output")


def tensors_inside(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, lists and tuples, each with its label."""
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_inside(item, f"{label}[{name}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_inside(item, f"{label}[{index}]")


def read_ranges(ranges: list[Tensor]) -> list[list[float]]:
    """Return the smallest and the largest magnitude of each range, with one transfer from the device."""
    if not ranges:
        return []
    on_one_device = [value_range.to(ranges[0].device, torch.float32) for value_range in ranges]
    limits: list[list[float]] = torch.stack(on_one_device).tolist()
    return limits


def holds_bad(tensor: Tensor) -> bool:
    """Return whether a tensor has inf or NaN and is no mask."""
    local = local_part(tensor)
    return local is not None and not bool(torch.isfinite(local).all()) and not is_mask(tensor)


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is an attention mask: it has only zeros and minus infinity."""
    local = local_part(tensor)
    return local is not None and bool(((local == -torch.inf) | (local == 0)).all())


TENSORS_PER_MODULE = 8  # the tensors of a compiled module's call that are checked: inputs first, then outputs
NOT_WRITTEN = -1.0  # no magnitude is negative


class NumericsError(JobFailed, ValueError):
    """Report numbers that are not finite. ``finding`` is the diagnosis. Like transformers' error, this is a ValueError."""

    def __init__(self, message: str, finding: Finding | None = None) -> None:
        super().__init__(message)
        self.finding = finding


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class DebugUnderflowOverflow:
    """Debug a model like transformers' class of this name. docs/doctor.md lists what it does beyond that.

    ``findings`` collects warnings about underflows and about numbers that approach the limit of their type.

    Args:
        model: the model to watch.
        max_frames_to_save: how many calls of modules before a bad number are printed.
        trace_batch_nums: batches (forward passes, counted from 0) whose frames are all printed, without detecting anything.
        abort_after_batch_num: raise NumericsError after this batch.
        tell: receives each line of the output; by default it is written to standard error.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: list[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        tell: Callable[[str], None] = _to_stderr,
    ) -> None:
        if max_frames_to_save < 1:
            raise RequestError(f"max_frames_to_save={max_frames_to_save}: give 1 or more, such as 21")
        self.model = model
        self.trace_batch_nums = set(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self.findings: list[Finding] = []
        self._last: deque[Frame] = deque(maxlen=max_frames_to_save)
        self._tell = tell
        self._trends = Trends()
        self._warned = set[tuple[str, str]]()
        self._frames: list[Frame] = []  # the frames of this batch
        # Calls whose ranges are not read yet: name and class of the module, then label, tensor and range of each tensor.
        self._pending: list[tuple[str, str, list[tuple[str, Tensor, Tensor]]]] = []
        self._open = False
        self._bad_data = False
        # By id of a tensor: the tensor, its version, its range.
        self._measured: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._weights: dict[str, tuple[int, int, Reading]] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._order = {name: index for index, name in enumerate(_children_first(model))}
        self._compiled_ranges: Tensor | None = None
        _COMPILED_TENSORS.pop(id(self), None)  # an earlier debugger that is gone may have had the same id
        self._handles = [model.register_forward_pre_hook(_never_compiled(self._start_batch), with_kwargs=True)]
        for index, (module, name) in enumerate(self._names.items()):
            self._handles.append(
                module.register_forward_hook(self._make_hook(name, index * TENSORS_PER_MODULE), with_kwargs=True)
            )
        self._handles.append(model.register_forward_hook(_never_compiled(self._end_batch), with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        _COMPILED_TENSORS.pop(id(self), None)
        while self._handles:
            self._handles.pop().remove()

    def _start_batch(self, module: nn.Module, inputs: Any, named: Any) -> None:
        self._finish_batch()  # an exception may have ended the previous forward pass, as in stages of a pipeline
        self._open = True
        self._measured.clear()
        if self._compiled_ranges is None:
            device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
            self._compiled_ranges = torch.empty(len(self._names) * TENSORS_PER_MODULE, 2, device=device)
        self._compiled_ranges.fill_(NOT_WRITTEN)
        self._bad_data = any(holds_bad(tensor) for _, tensor in labelled_tensors(inputs, named, ()))
        self._check_weights()

    def _end_batch(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        self._finish_batch()

    def _finish_batch(self) -> None:
        """Check the frames that are not checked yet, follow the trends, and count the batch."""
        if not self._open:
            return
        frames = self._read_pending()
        compiled = self._read_compiled_frames()
        if compiled:
            frames = sorted([*frames, *compiled], key=lambda frame: self._order[frame.module])
        for frame in frames:
            self._add_frame(frame)
        self._open = False
        frames = self._frames
        self._frames = []
        number = self.batch_number
        self.batch_number += 1
        if number not in self.trace_batch_nums:
            for finding in self._trends.add(frames):
                self._warn(finding)
        if self.abort_after_batch_num is not None and number >= self.abort_after_batch_num:
            raise NumericsError(f"stopped after batch {number}, as abort_after_batch_num={self.abort_after_batch_num} asks for")

    def _make_hook(self, name: str, row: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                self._record_ranges(row, inputs, named, output)
            else:
                self._record_call(name, module, inputs, named, output)

        return hook

    @torch.no_grad()
    def _record_call(self, name: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        """Measure the tensors of a call. On a CPU also check them at once."""
        if not self._open:
            return  # the backward pass recomputes a layer that was already checked
        ranges = []
        for label, tensor in labelled_tensors(inputs, named, output):
            value_range = self._measure_range(tensor)
            if value_range is not None:
                ranges.append((label, tensor, value_range))
        self._pending.append((name, type(module).__name__, ranges))
        if id(self) not in _COMPILED_TENSORS and (not ranges or ranges[0][1].device.type == "cpu"):
            for frame in self._read_pending():
                self._add_frame(frame)

    def _measure_range(self, tensor: Tensor) -> Tensor | None:
        """Return the smallest and the largest magnitude. A tensor that one module passes to the next is measured once."""
        local = local_part(tensor)
        if local is None:
            return None
        measured_before = self._measured.get(id(local))
        if measured_before is not None and measured_before[0]() is local and measured_before[1] == VERSION.of(local):
            return measured_before[2]
        measured = torch.stack(torch.aminmax(local.detach().abs()))
        self._measured[id(local)] = (weakref.ref(local), VERSION.of(local), measured)
        return measured

    def _read_pending(self) -> list[Frame]:
        """Return the frames of the pending calls."""
        pending = self._pending
        self._pending = []
        frames = []
        limits = iter(read_ranges([value_range for _, _, ranges in pending for _, _, value_range in ranges]))
        for name, kind, ranges in pending:
            readings = []
            for label, tensor, _ in ranges:
                low, high = next(limits)
                if label.startswith("input") and high == torch.inf and is_mask(tensor):
                    continue
                readings.append(Reading(label, FLOATS[tensor.dtype], low, high))
            frames.append(Frame(name, kind, (*self._weight_readings(name), *readings)))
        return frames

    def _add_frame(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._last.append(frame)
        if self.batch_number in self.trace_batch_nums:
            if len(self._frames) == 1:
                self._tell(f"batch {self.batch_number}\n abs min  abs max")
            for line in frame.lines():
                self._tell(line)
            return
        if is_bad(frame):
            self._open = False
            finding = diagnose(frame, batch=self.batch_number, from_data=self._bad_data)
            self.findings.append(finding)
            lines = [line for last_frame in self._last for line in last_frame.lines()]
            self._tell("\n".join([f"Last {len(self._last)} forward frames:", " abs min  abs max", *lines]))
            raise NumericsError(f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}", finding)
        for finding in underflows(frame):
            self._warn(finding)

    def _warn(self, finding: Finding) -> None:
        key = (finding.subject, finding.what.partition(":")[0])
        if key not in self._warned:
            self._warned.add(key)
            self.findings.append(finding)
            self._tell(f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}")

    @torch.no_grad()
    def _check_weights(self) -> None:
        """Read the ranges of the weights that changed since the last batch, and report weights that are not finite."""
        changed = []
        for name, parameter in self.model.named_parameters():
            local = local_part(parameter)
            if local is not None and self._weights.get(name, (0, -1))[:2] != (local.data_ptr(), VERSION.of(local)):
                changed.append((name, local, torch.stack(torch.aminmax(local.detach().abs()))))
        limits = read_ranges([value_range for _, _, value_range in changed])
        for (name, local, _), (low, high) in zip(changed, limits, strict=True):
            reading = Reading(name.rpartition(".")[2], FLOATS[local.dtype], low, high)
            self._weights[name] = (local.data_ptr(), VERSION.of(local), reading)
        bad = [name for name, (_, _, reading) in self._weights.items() if not reading.is_finite]
        if bad and self.batch_number not in self.trace_batch_nums:
            owner = bad[0].rpartition(".")[0]
            self._add_frame(Frame(owner, type(self.model.get_submodule(owner)).__name__, (self._weights[bad[0]][2],)))

    def _weight_readings(self, module: str) -> Iterator[Reading]:
        """Yield the readings of a module's own weights."""
        owner = self.model.get_submodule(module)
        for name in PARAMETERS.of(owner):
            stored = self._weights.get(f"{module}.{name}" if module else name)
            if stored is not None:
                yield stored[2]

    def _record_ranges(self, row: int, inputs: Any, named: Any, output: Any) -> None:
        """Write the ranges of a compiled module's call into the tensor of ranges, from ``row`` on."""
        assert self._compiled_ranges is not None
        for index, (label, tensor) in enumerate(labelled_tensors(inputs, named, output)):
            if index < TENSORS_PER_MODULE and tensor.dtype in FLOATS and tensor.numel():
                with torch.no_grad():
                    limits = torch.stack(torch.aminmax(tensor.detach().abs()))
                    self._compiled_ranges[row + index] = limits.to(self._compiled_ranges)
                _register_compiled_tensor(id(self), row + index, label, FLOATS[tensor.dtype])

    def _read_compiled_frames(self) -> list[Frame]:
        """Return the frames of compiled modules."""
        types = _COMPILED_TENSORS.get(id(self))
        if not types or self._compiled_ranges is None:
            return []
        compiled: dict[int, list[Reading]] = {}
        for row, (low, high) in enumerate(self._compiled_ranges.tolist()):
            if row in types and low != NOT_WRITTEN:
                compiled.setdefault(row // TENSORS_PER_MODULE, []).append(Reading(*types[row], low, high))
        names = [(name, type(module).__name__) for module, name in self._names.items()]
        frames = []
        for index, readings in compiled.items():
            name, kind = names[index]
            frames.append(Frame(name, kind, (*self._weight_readings(name), *readings)))
        return frames


_COMPILED_TENSORS: dict[int, dict[int, tuple[str, str]]] = {}  # by id of the debugger and row of ranges: label and dtype


# It runs once, when a module is compiled. A graph that changed Python's state would be compiled again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _register_compiled_tensor(debugger: int, row: int, label: str, dtype: str) -> None:
    _COMPILED_TENSORS.setdefault(debugger, {})[row] = (label, dtype)


def _never_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    disabled: Callable[..., None] = torch.compiler.disable(hook)
    return disabled


def _children_first(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix


def detect_overflow(tensor: Tensor, name: str, *, tell: Callable[[str], None] = _to_stderr) -> bool:
    """Return whether the tensor has NaN or inf. If it has, report how many, and the range of the other numbers."""
    local = local_part(tensor)
    if local is None or bool(torch.isfinite(local).all()):
        return False
    finite = local[torch.isfinite(local)].abs()
    counts = []
    for word, matches in (("NaN", local.isnan()), ("inf", local.isinf())):
        if matches.any():
            counts.append(f"{int(matches.sum()):,} {word}")
    others = f"the rest up to {float(finite.max()):.3g}" if finite.numel() else "nothing else"
    tell(f"{name} has {' and '.join(counts)} of {local.numel():,} numbers, {others} ({FLOATS[local.dtype]})")
    return True
