"""Record how a loss calls a model: which texts it computes at once, with or without gradients.

A loss of a script may be a module of its own that calls the model several times a step, or makes the texts' tokens itself. A
loss that caches gradients computes all texts without gradients, and calls the model again in its backward pass, a few texts at a
time (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upshift.training.batches.user_batches import InseparableRows

TOKENS = "input_ids"
PADDED = (TOKENS, "attention_mask", "token_type_ids")  # arguments of rows that are padded, and hold one text each


@dataclass(frozen=True)
class ModelCall:
    """One call of the model."""

    inputs: dict[str, Tensor]  # the tokens, and their mask and positions
    is_trained: bool  # gradients are computed
    in_backward: bool  # it was made in the backward pass
    has_padding_alone: bool = False  # what else the model read of the rows is padding, which each attention kernel knows

    @property
    def num_rows(self) -> int:
        return len(self.inputs[TOKENS])


@dataclass
class StepCalls:
    """The calls of the model in one forward and backward pass of a loss."""

    calls: list[ModelCall] = field(default_factory=list)
    in_backward: bool = False

    @property
    def trained(self) -> list[ModelCall]:
        """Return the calls with gradients. Raise InseparableRows if there are none."""
        trained = [call for call in self.calls if call.is_trained]
        if not trained:
            raise InseparableRows("the loss calls the model with no rows of tokens that it learns from")
        return trained

    @property
    def num_trained(self) -> int:
        """Return how many rows have gradients."""
        return sum(call.num_rows for call in self.trained)

    @property
    def num_untrained(self) -> int:
        """Return how many rows are computed without gradients."""
        return sum(call.num_rows for call in self.calls if not call.is_trained)

    @property
    def num_at_once(self) -> int:
        """Return how many rows have their activations in memory at the same time.

        Those of the forward pass stay until the backward pass. A call in the backward pass ends with its own backward pass.
        """
        forward = sum(call.num_rows for call in self.trained if not call.in_backward)
        return forward + max((call.num_rows for call in self.trained if call.in_backward), default=0)


def record_calls(model: PreTrainedModel, compute: Callable[[], Tensor]) -> StepCalls:
    """Return the calls of the model while ``compute`` computes a loss, and in the loss's backward pass."""
    record = StepCalls()
    with _watched(model, record):
        loss = compute()
        record.in_backward = True
        loss.backward()
    return record


@contextmanager
def _watched(model: PreTrainedModel, record: StepCalls) -> Iterator[None]:
    """Append each call of the model to the record while open."""
    layers: Any = model.base_model  # without a head, which a loss may leave out
    previous = vars(layers).get("forward")
    forward = layers.forward

    @wraps(forward)
    def look(*arguments: Any, **named: Any) -> Any:
        _append(record, named if TOKENS in named or not arguments else {**named, TOKENS: arguments[0]})
        return forward(*arguments, **named)

    layers.forward = look  # a hook would miss the libraries that call forward themselves
    try:
        yield
    finally:
        if previous is None:
            del layers.forward
        else:
            layers.forward = previous


def _append(record: StepCalls, arguments: dict[str, Any]) -> None:
    """Append a call with these arguments to the record, if it is of rows of tokens."""
    tokens = arguments.get(TOKENS)
    if isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point():
        inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.shape == tokens.shape}
        has_padding_alone = all(
            name in PADDED and value.shape == tokens.shape for name, value in arguments.items() if isinstance(value, Tensor)
        )
        record.calls.append(ModelCall(inputs, torch.is_grad_enabled(), record.in_backward, has_padding_alone))
