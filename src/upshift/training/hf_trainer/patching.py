"""Change how code of transformers runs, and tell what is the script's own: methods, and autocast that it opens.

A function of transformers runs with one other global name. The model's ``forward`` runs in the plan's precision, as accelerate
runs it. ``LibraryTrainer`` is transformers.Trainer for type checkers and ``object`` at run time. At run time the mix-ins come
before transformers.Trainer or transformers.Seq2SeqTrainer in the bases of ``upshift.Trainer`` and ``upshift.Seq2SeqTrainer``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from upshift.planning.plan import Plan
from upshift.training.prepare import LOW_PRECISIONS, autocast

LOW_DTYPES = (torch.bfloat16, torch.float16)


def with_global(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a copy of the function that reads ``value`` for one global of its module. The module itself does not change.

    Copied source text would be out of date with every version of transformers, and a patched module would affect other
    trainers.
    """
    namespace = {**function.__globals__, name: value}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def is_own(trainer: Any, method: str, library_class: type) -> bool:
    """Return whether a method of a Trainer is the script's own code: of its class, or set on the object."""
    function = getattr(trainer, method)
    return getattr(function, "__func__", function) is not getattr(library_class, method)


@contextmanager
def forward_in_precision(model: nn.Module, plan: Plan, *, reads_outputs: bool) -> Iterator[None]:
    """Run the model's ``forward`` in the plan's precision while open, and return its outputs in fp32.

    This is what accelerate does for bf16=True: a loss of the script reads outputs in fp32, and runs outside of autocast. If
    ``reads_outputs`` is False, nothing reads more than the loss in training. Then a copy of the logits would only cost memory,
    and the loss alone is converted. A forward inside an autocast of the script stays as it is.
    """
    if plan.precision not in LOW_PRECISIONS:
        yield
        return
    from accelerate.utils import recursively_apply  # late: without it, upshift.Trainer names its extra

    previous = vars(model).get("forward")
    forward = _function_of(model)

    @functools.wraps(forward)
    def forward_of_plan(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if torch.is_autocast_enabled(plan.device):
            return forward(self, *arguments, **named)
        with autocast(plan):
            outputs = forward(self, *arguments, **named)
        only_scalars = self.training and not reads_outputs
        return recursively_apply(torch.Tensor.float, outputs, test_type=partial(_is_converted, only_scalars=only_scalars))

    # A bound method follows the model into a copy of it.
    model.forward = types.MethodType(forward_of_plan, model)
    try:
        yield
    finally:
        if previous is None:
            del model.forward
        else:
            model.forward = previous


def _function_of(model: nn.Module) -> Callable[..., Any]:
    """Return the function of the model's ``forward``, whose first argument is the model."""
    forward: Any = model.forward
    function: Callable[..., Any] | None = getattr(forward, "__func__", None)
    if function is not None:
        return function

    @functools.wraps(forward)
    def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return call


def _is_converted(value: Any, *, only_scalars: bool) -> bool:
    """Return whether an output has 16 bits. ``only_scalars``: and no dimensions, such as a loss."""
    return isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES and not (only_scalars and value.ndim)


@dataclass
class AutocastUse:
    """Say whether a module ran under autocast."""

    is_seen: bool = False


@contextmanager
def watched_autocast(device: str) -> Iterator[AutocastUse]:
    """Watch the modules that run while open. Yield whether one ran under autocast of the device."""
    use = AutocastUse()

    def look(module: nn.Module, inputs: Any) -> None:
        use.is_seen = use.is_seen or torch.is_autocast_enabled(device)

    handle = register_module_forward_pre_hook(look)
    try:
        yield use
    finally:
        handle.remove()


if TYPE_CHECKING:
    from transformers import Trainer as LibraryTrainer
else:
    LibraryTrainer = object

__all__ = ["LibraryTrainer"]
