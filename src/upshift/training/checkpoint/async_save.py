"""Save in the background: copy weights and optimizer state to host memory, and write the copies on a thread.

The training step does not wait for the thread. It does one piece of work at a time. Its errors are raised when the trainer
checks it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.benchmarking.meters import resident_bytes, resident_peak_bytes
from upshift.errors import JobFailed, UpshiftError
from upshift.hardware.host_memory import free_memory_bytes
from upshift.training.checkpoint.model import saved_state
from upshift.training.checkpoint.optimizer import OptimizerContent

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """A thread that does one piece of work at a time. The interpreter does not exit before the work is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: UpshiftError | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for any earlier work, start the new work, and return at once. Raise the error of the earlier work."""
        self.wait()
        # Not a daemon: the interpreter joins it at exit, so that the save is completed.
        self._thread = threading.Thread(target=self._run, args=(work,), name="upshift-save", daemon=False)
        self._thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether the work failed and its error was not raised yet."""
        return self._failure is not None and not self.is_working

    def check(self) -> bool:
        """Return whether no work is running. Raise the error of finished work once."""
        if self.is_working:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until no work is running. Raise the error of the work once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Wait until no work is running, while another error is on its way. The error of the work was logged."""
        with contextlib.suppress(UpshiftError):
            self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # wait() raises it, whatever it is, in the thread that started the work
            failure = _as_upshift_error(error)
            # Log it too, because the process may end without another call.
            logger.error("%s", failure)
            self._failure = failure


def _as_upshift_error(error: Exception) -> UpshiftError:
    """Return the error of a write as one that the user sees as one line. The original error stays its cause."""
    if isinstance(error, UpshiftError):
        return error
    message = " ".join(f"{type(error).__name__}: {error}".split())
    failure = JobFailed(
        f"a checkpoint could not be written in the background ({message}); earlier checkpoints are whole, resume from the newest"
    )
    failure.__cause__ = error
    return failure


SMALLEST_MAPPED_BYTES = 2**16
USABLE_SHARE = 0.95  # of the free memory, as planning counts it


def has_room(num_bytes: int) -> bool:
    """Return whether the host has room for ``num_bytes`` more.

    The process may again need as much memory as at its peak, so the difference to the memory that it has now stays free.
    """
    needed_again = max(0, resident_peak_bytes() - resident_bytes())
    return num_bytes + needed_again <= USABLE_SHARE * free_memory_bytes()


class HostCopies:
    """Copies of tensors in host memory. Tensors that share memory also share it in the copies."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._copy_subclass(tensor)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._copies or tensor.numel() == 0:
            self._copies[key] = _mapped_copy(tensor) if _should_map(tensor) else tensor.detach().to("cpu", copy=True)
        return self._copies[key]

    def _copy_subclass(self, tensor: Any) -> Tensor:
        """Copy a tensor of a subclass that is made of plain tensors, such as the 8-bit states of torchao."""
        if not hasattr(tensor, "__tensor_flatten__"):
            copy: Tensor = tensor.detach().clone()
            return copy
        names, context = tensor.__tensor_flatten__()
        components = {name: self.copy(getattr(tensor, name)) for name in names}
        rebuilt: Tensor = type(tensor).__tensor_unflatten__(components, context, tensor.size(), tensor.stride())
        return rebuilt


def _should_map(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes >= SMALLEST_MAPPED_BYTES


def _mapped_copy(tensor: Tensor) -> Tensor:
    """Return a copy in its own memory mapping, which goes back to the system with the copy.

    The heap might keep the freed memory for good.
    """
    mapping = mmap.mmap(-1, tensor.nbytes)
    copy = torch.frombuffer(mapping, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the saved tensors of the model."""
    copies = HostCopies()
    return {name: copies.copy(tensor) for name, tensor in saved_state(model).items()}


def with_copied_config(model: nn.Module) -> nn.Module:
    """Return the model with a copy of its config, to be written while the training goes on. Weights and modules are the same.

    Each forward pass of the training turns ``use_cache`` off in the config for a moment. An adapter's files have no config."""
    if not isinstance(model, PreTrainedModel):
        return model
    written: PreTrainedModel = copy.copy(model)
    written.config = copy.deepcopy(model.config)
    return written


def copy_optimizer(content: OptimizerContent) -> OptimizerContent:
    """Return the content with copied tensors. The keys stay the tensors that the optimizer updates, which it names."""
    copies = HostCopies()

    def copied(value: Any) -> Any:
        return copies.copy(value) if isinstance(value, Tensor) else value

    state = {}
    for parameter, parameter_state in content.state.items():
        state[parameter] = {key: copied(value) for key, value in parameter_state.items()}
    groups = [
        {key: list(value) if key == "params" else copied(value) for key, value in group.items()} for group in content.groups
    ]
    return replace(content, state=state, groups=groups)
