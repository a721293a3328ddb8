"""The linear head and its cross entropy in chunks of tokens, so that the logits of a whole batch never stand in memory.

The unmodified model runs with its own forward: its output embedding is made to hand the hidden states through, and its
``loss_function`` (the property that transformers gives every model) multiplies them by the head's weight a chunk at a
time, computing loss and gradients in one go (Hsu et al., "Liger Kernel", 2024, section 3.2). Whether that is the same
mathematics is decided by ``why_not_chunked``: the tensor that reaches the loss must be the very tensor that left the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

IGNORE_INDEX = -100


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T (+ bias)`` over the labels that are not ignored.

    hidden [N, H], weight [V, H], bias [V] or None, labels [N] -> scalar fp32. Gradients are made in the forward pass, while
    a chunk's probabilities are at hand; the backward pass only scales them by the incoming scalar.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        compute = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
        matrix = weight.to(compute)
        needs_grad = any(ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = None
        grad_bias = torch.zeros_like(bias) if needs_grad and bias is not None else None
        num_labels = (labels != IGNORE_INDEX).sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                inputs = hidden[rows].to(compute)
                logits = (inputs @ matrix.T).float()
                if bias is not None:
                    logits += bias
                loss, slope = _loss_and_slope(logits, labels[rows], num_labels)
                total += loss
                if needs_grad:
                    if grad_bias is not None:
                        grad_bias += slope.sum(0)
                    slope = slope.to(compute)
                    torch.mm(slope, matrix, out=grad_hidden[rows]) if hidden.dtype == compute else grad_hidden[rows].copy_(
                        slope @ matrix
                    )
                    grad_weight = _add_outer(grad_weight, slope, inputs, weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grad_outputs
        gradients = ctx.saved_tensors
        return (*(g.mul_(scale.to(g.dtype)) if g is not None else None for g in gradients), None, None)


def _loss_and_slope(logits: torch.Tensor, labels: torch.Tensor, num_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one chunk divided by ``num_labels``, and its gradient by the logits."""
    kept = labels != IGNORE_INDEX
    columns = labels.clamp(min=0).unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, dim=1)
    loss = -(log_probabilities.gather(1, columns).squeeze(1) * kept).sum() / num_labels
    slope = log_probabilities.exp_()
    slope.scatter_add_(1, columns, torch.full_like(columns, -1, dtype=slope.dtype))
    return loss, slope.mul_((kept / num_labels).unsqueeze(1))


def _add_outer(total: torch.Tensor | None, slope: torch.Tensor, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total [V, H] (None: zero) + slope.T [V, C] @ inputs [C, H], in ``dtype``."""
    if total is None:
        return (slope.T @ inputs).to(dtype)
    return total.addmm_(slope.T, inputs) if dtype == slope.dtype else total.add_(slope.T @ inputs)


@contextmanager
def chunked_head(model: nn.Module, *, chunk_tokens: int) -> Iterator[list[torch.Tensor]]:
    """Run ``model`` with its loss in chunks while the context is open. Yields the tensors that left the head, for the check."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    left_head: list[torch.Tensor] = []

    def hand_through(hidden: torch.Tensor) -> torch.Tensor:
        left_head[:] = [hidden]
        return hidden

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int | None = None, **ignored: Any) -> torch.Tensor:
        if not left_head or logits is not left_head[0]:
            raise ChunkedHeadError("the model changes the logits between its head and its loss")
        left_head.clear()
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        hidden = logits.reshape(-1, logits.shape[-1])
        value: torch.Tensor = LinearCrossEntropy.apply(hidden, head.weight, head.bias, shifted.reshape(-1), chunk_tokens)
        return value

    original_loss = model.loss_function
    head.forward = hand_through
    model.loss_function = loss  # type: ignore[assignment]
    try:
        yield left_head
    finally:
        del head.forward
        model.loss_function = original_loss  # type: ignore[assignment]


class ChunkedHeadError(RuntimeError):
    """This model's head and loss are not a plain linear layer followed by cross entropy."""


def why_not_chunked(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str | None:
    """None where the loss may be computed in chunks, else the reason. Runs one forward pass (fake tensors will do)."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        return "the model has no plain linear output embedding"
    if getattr(model, "loss_type", None) != "ForCausalLM":
        return f"the model's loss is {getattr(model, 'loss_type', None)}, not ForCausalLM"
    try:
        with chunked_head(model, chunk_tokens=64) as left_head, torch.no_grad():
            model(**inputs)
            if left_head:
                return "the model computes its loss without its loss_function"
    except ChunkedHeadError as error:
        return str(error)
    return None
