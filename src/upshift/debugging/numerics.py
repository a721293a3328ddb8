"""Watch a model's numbers while it runs: the first module that makes inf or NaN, what vanishes, what climbs toward its limit.

On a CPU each call is looked at when it ends; on a device after the forward pass, so that the host waits for it once. Compiled
modules write their ranges into a tensor inside of the compiled graph; their frames come in the order of definition.

Find the tensors in a module's inputs and outputs, and the part of each that is here to be measured.
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
from upshift.debugging.ranges import Frame, Reading, Trends, diagnose, is_bad, underflows
from upshift.errors import JobFailed, RequestError
from upshift.internals.torch_names import PARAMETERS, VERSION

FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def local_part(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor that this process has; None where that is nothing that has a range."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor if tensor.dtype in FLOATS and tensor.numel() and tensor.device.type != "meta" else None


def tensors(inputs: Any, named: Any, output: Any) -> Iterator[tuple[str, Tensor]]:
    for place, value in enumerate(inputs):
        yield from inside(value, f"input[{place}]")
    for name, value in named.items():
        yield from inside(value, f"input[{name}]")
    yield from inside(output, "output")


def inside(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from inside(part, f"{label}[{name}]")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from inside(part, f"{label}[{place}]")


def numbers(ranges: list[Tensor]) -> list[list[float]]:
    if not ranges:
        return []
    stacked: list[list[float]] = torch.stack([found.to(ranges[0].device, torch.float32) for found in ranges]).tolist()
    return stacked


def holds_bad(tensor: Tensor) -> bool:
    local = local_part(tensor)
    return local is not None and not bool(torch.isfinite(local).all()) and not is_mask(tensor)


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is a mask: zero where attention may look, minus infinity where not."""
    local = local_part(tensor)
    return local is not None and bool(((local == -torch.inf) | (local == 0)).all())


SLOTS = 8  # tensors of a compiled module's call that are looked at: inputs, then outputs
NOT_TOUCHED = -1.0  # no magnitude


class NumericsError(JobFailed, ValueError):
    """Raised where numbers stopped being finite; ``finding`` is the diagnosis. Like transformers' error, it is a ValueError."""

    def __init__(self, message: str, finding: Finding | None = None) -> None:
        super().__init__(message)
        self.finding = finding


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class DebugUnderflowOverflow:
    """A debugger like the class of this name in transformers, with more: see docs/doctor.md.

    ``tell`` receives lines; default: standard error. ``trace_batch_nums``: of these batches (forward passes, from 0) every frame
    is told, and nothing is detected. ``findings`` collects the warnings: what vanishes, and what climbs toward the limit of its
    type.
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
        self._frames: list[Frame] = []  # of this batch
        self._pending: list[tuple[str, str, list[tuple[str, Tensor, Tensor]]]] = []  # read together, at the end of the batch
        self._open = False
        self._bad_data = False
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # by id: the tensor, its version, its range
        self._weights: dict[str, tuple[int, int, Reading]] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._order = {name: place for place, name in enumerate(_children_first(model))}
        self._slots: Tensor | None = None
        _NOTED.pop(id(self), None)  # an earlier debugger that is gone may have had the same id
        self._handles = [model.register_forward_pre_hook(_never_compiled(self._begin), with_kwargs=True)]
        for place, (module, name) in enumerate(self._names.items()):
            self._handles.append(module.register_forward_hook(self._hook(name, place * SLOTS), with_kwargs=True))
        self._handles.append(model.register_forward_hook(_never_compiled(self._end), with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        _NOTED.pop(id(self), None)
        while self._handles:
            self._handles.pop().remove()

    # One batch

    def _begin(self, module: nn.Module, inputs: Any, named: Any) -> None:
        self._finish()  # an exception may have ended the last forward pass, as in stages of a pipeline
        self._open = True
        self._known.clear()
        if self._slots is None:
            device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
            self._slots = torch.empty(len(self._names) * SLOTS, 2, device=device)
        self._slots.fill_(NOT_TOUCHED)
        self._bad_data = any(holds_bad(tensor) for _, tensor in tensors(inputs, named, ()))
        self._look_at_weights()

    def _end(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._open:
            return
        frames = self._read_pending()
        compiled = self._read_slots()
        for frame in sorted([*frames, *compiled], key=lambda frame: self._order[frame.module]) if compiled else frames:
            self._add(frame)
        self._open = False
        frames = self._frames
        self._frames = []
        number = self.batch_number
        self.batch_number = self.batch_number + 1
        if number not in self.trace_batch_nums:
            for finding in self._trends.add(frames):
                self._warn(finding)
        if self.abort_after_batch_num is not None and number >= self.abort_after_batch_num:
            raise NumericsError(f"stopped after batch {number}, as abort_after_batch_num={self.abort_after_batch_num} asks for")

    # One call

    def _hook(self, name: str, slot: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                self._into_slots(slot, inputs, named, output)
            else:
                self._look(name, module, inputs, named, output)

        return hook

    @torch.no_grad()
    def _look(self, name: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if not self._open:
            return  # the backward pass recomputes a layer that was looked at before
        ranges = []
        for label, tensor in tensors(inputs, named, output):
            found = self._range(tensor)
            if found is not None:
                ranges.append((label, tensor, found))
        self._pending.append((name, type(module).__name__, ranges))
        if id(self) not in _NOTED and (not ranges or ranges[0][1].device.type == "cpu"):
            for frame in self._read_pending():
                self._add(frame)

    def _range(self, tensor: Tensor) -> Tensor | None:
        """Return the smallest and the largest magnitude. A tensor that one module gives to the next is measured once."""
        local = local_part(tensor)
        if local is None:
            return None
        known = self._known.get(id(local))
        if known is not None and known[0]() is local and known[1] == VERSION.of(local):
            return known[2]
        measured = torch.stack(torch.aminmax(local.detach().abs()))
        self._known[id(local)] = (weakref.ref(local), VERSION.of(local), measured)
        return measured

    def _read_pending(self) -> list[Frame]:
        pending = self._pending
        self._pending = []
        frames = []
        each = iter(numbers([found for _, _, ranges in pending for _, _, found in ranges]))
        for name, kind, ranges in pending:
            readings = []
            for label, tensor, _ in ranges:
                low, high = next(each)
                if label.startswith("input") and high == torch.inf and is_mask(tensor):
                    continue
                readings.append(Reading(label, FLOATS[tensor.dtype], low, high))
            frames.append(Frame(name, kind, (*self._of_weights(name), *readings)))
        return frames

    def _add(self, frame: Frame) -> None:
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
            lines = [line for one in self._last for line in one.lines()]
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

    # Weights: once a batch, and only those that have changed

    @torch.no_grad()
    def _look_at_weights(self) -> None:
        changed = []
        for name, parameter in self.model.named_parameters():
            local = local_part(parameter)
            if local is not None and self._weights.get(name, (0, -1))[:2] != (local.data_ptr(), VERSION.of(local)):
                changed.append((name, local, torch.stack(torch.aminmax(local.detach().abs()))))
        for (name, local, _), (low, high) in zip(changed, numbers([found for _, _, found in changed]), strict=True):
            reading = Reading(name.rpartition(".")[2], FLOATS[local.dtype], low, high)
            self._weights[name] = (local.data_ptr(), VERSION.of(local), reading)
        bad = [name for name, (_, _, reading) in self._weights.items() if not reading.is_finite]
        if bad and self.batch_number not in self.trace_batch_nums:
            owner = bad[0].rpartition(".")[0]
            self._add(Frame(owner, type(self.model.get_submodule(owner)).__name__, (self._weights[bad[0]][2],)))

    def _of_weights(self, module: str) -> Iterator[Reading]:
        owner = self.model.get_submodule(module)
        for name in PARAMETERS.of(owner):
            known = self._weights.get(f"{module}.{name}" if module else name)
            if known is not None:
                yield known[2]

    # Compiled modules

    def _into_slots(self, slot: int, inputs: Any, named: Any, output: Any) -> None:
        assert self._slots is not None
        for place, (label, tensor) in enumerate(tensors(inputs, named, output)):
            if place < SLOTS and tensor.dtype in FLOATS and tensor.numel():
                with torch.no_grad():
                    self._slots[slot + place] = torch.stack(torch.aminmax(tensor.detach().abs())).to(self._slots)
                _note(id(self), slot + place, label, FLOATS[tensor.dtype])

    def _read_slots(self) -> list[Frame]:
        types = _NOTED.get(id(self))
        if not types or self._slots is None:
            return []
        compiled: dict[int, list[Reading]] = {}
        for slot, (low, high) in enumerate(self._slots.tolist()):
            if slot in types and low != NOT_TOUCHED:
                compiled.setdefault(slot // SLOTS, []).append(Reading(*types[slot], low, high))
        names = [(name, type(module).__name__) for module, name in self._names.items()]
        return [Frame(*names[place], (*self._of_weights(names[place][0]), *found)) for place, found in compiled.items()]


_NOTED: dict[int, dict[int, tuple[str, str]]] = {}  # by the id of the debugger: a slot's name and type


# Runs once, when a module is compiled: a graph that changed Python's state would be made anew.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(debugger: int, slot: int, label: str, dtype: str) -> None:
    _NOTED.setdefault(debugger, {})[slot] = (label, dtype)


def _never_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    disabled: Callable[..., None] = torch.compiler.disable(hook)
    return disabled


def _children_first(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix


def detect_overflow(tensor: Tensor, name: str, *, tell: Callable[[str], None] = _to_stderr) -> bool:
    """Return whether the tensor has NaN or inf; tell it with the range of the rest."""
    local = local_part(tensor)
    if local is None or bool(torch.isfinite(local).all()):
        return False
    finite = local[torch.isfinite(local)].abs()
    counts = [f"{int(found.sum()):,} {word}" for word, found in (("NaN", local.isnan()), ("inf", local.isinf())) if found.any()]
    rest = f"the rest up to {float(finite.max()):.3g}" if finite.numel() else "nothing else"
    tell(f"{name} has {' and '.join(counts)} of {local.numel():,} numbers, {rest} ({FLOATS[local.dtype]})")
    return True
