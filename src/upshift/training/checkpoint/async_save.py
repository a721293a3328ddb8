"""Do work on a thread that the training step does not wait for: one piece at a time. Its failure is raised when it is noticed.

Copy weights and optimizer state to host memory, so that training can go on while they are written.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from upshift.benchmarking.meters import resident_bytes, resident_peak_bytes
from upshift.hardware.cgroup import read_limits
from upshift.training.checkpoint.model import saved_state

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """A thread for at most one piece of work at a time. The interpreter does not exit before the work is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start the work and return at once, after any earlier work has ended. Raise the error of the earlier work."""
        self.wait()
        # Not a daemon: an exiting interpreter joins it, so that a save that was begun is finished.
        self._thread = threading.Thread(target=self._run, args=(work,), name="upshift-save", daemon=False)
        self._thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether finished work failed, and the error was not raised yet."""
        return self._failure is not None and not self.is_working

    def check(self) -> bool:
        """Return whether no work is under way. Raise the error of finished work, once."""
        if self.is_working:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until no work is under way. Raise the error of the work, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:  # whatever it is, wait() raises it in the thread that asked for the work
            # Also here: a process that ends without another call would say nothing.
            logger.error("%s", failure)
            self._failure = failure


SMALLEST_MAPPED_BYTES = 2**16
USABLE_SHARE = 0.95  # of the free memory, as planning counts it


def has_room(num_bytes: int) -> bool:
    """Return whether the host has room for so many more bytes.

    The memory that this process has needed beyond what it holds now stays free for it.
    """
    limit = read_limits(Path("/")).free_memory_bytes
    available = int(psutil.virtual_memory().available)
    free = available if limit is None else min(available, limit)
    needed_again = max(0, resident_peak_bytes() - resident_bytes())
    return num_bytes + needed_again <= USABLE_SHARE * free


class HostCopies:
    """A copier of tensors to host memory. Tensors that share memory share it in the copies too."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._of_parts(tensor)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if place not in self._copies or tensor.numel() == 0:
            self._copies[place] = _mapped_copy(tensor) if _should_map(tensor) else tensor.detach().to("cpu", copy=True)
        return self._copies[place]

    def _of_parts(self, tensor: Any) -> Tensor:
        """Copy a subclass that is made of plain tensors, such as torchao's 8-bit states."""
        if not hasattr(tensor, "__tensor_flatten__"):
            copy: Tensor = tensor.detach().clone()
            return copy
        names, context = tensor.__tensor_flatten__()
        parts = {name: self.of(getattr(tensor, name)) for name in names}
        whole: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
        return whole


def _should_map(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes >= SMALLEST_MAPPED_BYTES


def _mapped_copy(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own that goes back to the system with it.

    A heap that keeps freed memory would hold it for good.
    """
    mapping = mmap.mmap(-1, tensor.nbytes)
    copy = torch.frombuffer(mapping, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the saved tensors of the model."""
    copies = HostCopies()
    return {name: copies.of(tensor) for name, tensor in saved_state(model).items()}


def copy_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with copied state, for the same parameters. It can be written and nothing else."""
    copies = HostCopies()

    def copied(value: Any) -> Any:
        return copies.of(value) if isinstance(value, Tensor) else value

    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    state = {parameter: {key: copied(value) for key, value in kept.items()} for parameter, kept in optimizer.state.items()}
    groups = [
        {key: list(value) if key == "params" else copied(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    vars(copy).update(state=state, param_groups=groups)
    return copy


class ParameterNames(nn.Module):
    """The names of a model's parameters at one moment, as write_optimizer reads them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._named = tuple(model.named_parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)
