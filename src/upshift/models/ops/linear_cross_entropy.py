"""Compute the cross entropy of a linear layer over a vocabulary, a chunk of labelled tokens at a time.

The logits of all tokens are never in memory. Loss and gradients of a chunk are made in one go, while its probabilities are at
hand (Hsu et al., "Liger Kernel", 2024, section 3.2). Rows whose label is ignored are not computed. Losses are summed, not
averaged: the divisor of a mean multiplies the gradients afterwards, so that half precision does not lose them. Ranks may have
a part of the vocabulary each: per label they exchange the largest logit and the sum of exponentials (Shoeybi et al.,
"Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from upshift.internals.torch_names import is_fake

ROW_MULTIPLE = 64
CACHED_BYTES = 2**24  # worked on at once on a CPU: they stay in its cache from one pass over them to the next


class HeadLoss(NamedTuple):
    """The steps from hidden states to a loss: logits = ``scale * hidden @ weight.T + bias``, or ``cap * tanh(that)``."""

    chunk_tokens: int
    scale: float = 1.0
    cap: float | None = None  # None: no tanh
    ignore_index: int = -100
    label_smoothing: float = 0.0  # Szegedy et al. 2016, as torch.nn.functional.cross_entropy has it
    z_loss: float = 0.0  # times logsumexp(logits) ** 2; Chowdhery et al., "PaLM", 2022, section 5


class VocabularyShard(NamedTuple):
    """This rank's part of a vocabulary that the ranks of ``group`` share.

    Its words begin at ``first``. ``vocabulary``: how many words there are in all."""

    group: dist.ProcessGroup
    first: int
    vocabulary: int


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of chunks follows the labels: compiled, each would be a graph of its own
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: HeadLoss,
    words: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all labels but the ignored ones.

    Shapes: hidden [N, H], weight [V, H], bias [V], labels [N] -> fp32 scalar. Matrix products are in autocast's dtype where it
    is on, all else in fp32. Backward may run once only: it consumes the gradients. With ``words``, weight and bias are of
    these alone; every rank of the group has the same hidden states and labels, and gets the same loss and the whole gradient
    of the hidden states.
    """
    total: torch.Tensor = LinearCrossEntropy.apply(hidden, weight, bias, labels, head, words, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


class LinearCrossEntropy(torch.autograd.Function):
    """An autograd function that makes gradients in the forward pass.

    The backward pass only scales them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: HeadLoss,
        words: VocabularyShard | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wanted = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        sums = Gradients(
            hidden=torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None,
            weight=torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None,
            bias=torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None,
        )
        with torch.autocast(device, enabled=False):
            total = _sum_chunks(hidden, weight.to(compute), bias, labels, head, words, sums if any(wanted) else None)
            if words is not None:
                for shared in (total, sums.hidden):
                    if shared is not None:
                        dist.all_reduce(shared, group=words.group)
        ctx.save_for_backward(sums.hidden, sums.weight, None if sums.bias is None or bias is None else sums.bias.to(bias.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grad_outputs
        gradients = ctx.saved_tensors
        return (*(g.mul_(scale.to(g.dtype)) if g is not None else None for g in gradients), None, None, None, None)


class Gradients(NamedTuple):
    """Gradients of the summed loss, added to chunk by chunk. None: not needed."""

    hidden: torch.Tensor | None  # [N, H]
    weight: torch.Tensor | None  # [V, H]; the first chunk fills it
    bias: torch.Tensor | None  # [V]


def _sum_chunks(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: HeadLoss,
    words: VocabularyShard | None,
    sums: Gradients | None,
) -> torch.Tensor:
    """Return the summed loss. ``matrix``: the weight in the dtype of the products. One buffer of logits serves all chunks."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    rows = _labelled_rows(labels, head.ignore_index)
    buffer = matrix.new_empty(min(head.chunk_tokens, _padded(len(rows))), len(matrix))
    for number, chunk in enumerate(rows.split(head.chunk_tokens)):  # one empty chunk where there are no rows
        padded = torch.nn.functional.pad(chunk, (0, min(_padded(len(chunk)), len(buffer)) - len(chunk)))
        inputs = hidden[padded].to(matrix.dtype)
        logits = torch.mm(inputs, matrix.T, out=buffer[: len(padded)])
        real = logits[: len(chunk)]
        block = _rows_in_cache(logits)
        for part, targets in zip(real.split(block), labels[chunk].split(block), strict=True):
            total += _loss_then_slope(part, targets, bias, head, words, sums)
        logits[len(chunk) :] = 0.0
        if sums is not None and sums.hidden is not None:
            sums.hidden.index_copy_(0, chunk, (logits @ matrix)[: len(chunk)].to(hidden.dtype))
        if sums is not None and sums.weight is not None:
            _add_outer(sums.weight, logits, inputs, first=number == 0)
    return total


def _add_outer(total: torch.Tensor, slope: torch.Tensor, inputs: torch.Tensor, *, first: bool) -> None:
    """Compute total [V, H] += slope.T [V, C] @ inputs [C, H], or = if ``first``.

    If dtypes differ the product is read again, so this goes by blocks that stay in the cache."""
    if total.dtype == slope.dtype:
        torch.addmm(total, slope.T, inputs, beta=0 if first else 1, out=total)
        return
    block = _rows_in_cache(total)
    for part, columns in zip(total.split(block), slope.T.split(block), strict=True):
        part.copy_(columns @ inputs) if first else part.add_(columns @ inputs)


def _labelled_rows(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the numbers of the rows with a label.

    Return all rows if labels are fake: this is the most memory that there can be, in shapes that depend on no data."""
    if is_fake(labels):
        return torch.arange(len(labels), device=labels.device)
    return (labels != ignore_index).nonzero().squeeze(1)


def _padded(num_rows: int) -> int:
    """Return the number of rows that are computed, rounded up: oneDNN remembers a kernel for each size, and sizes follow the
    data."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _rows_in_cache(matrix: torch.Tensor) -> int:
    """Return how many rows to work on at once, in fp32. On a GPU take all, as each block would cost the start of kernels."""
    if matrix.device.type != "cpu":
        return max(len(matrix), 1)
    return max(CACHED_BYTES // (4 * matrix.shape[1]), 1)


def _loss_then_slope(
    part: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    head: HeadLoss,
    words: VocabularyShard | None,
    sums: Gradients | None,
) -> torch.Tensor:
    """Return the summed loss of ``part`` [C, V], products without scale and bias, and overwrite ``part`` with the loss's
    gradient.

    With own words, return only their terms of the loss."""
    logits = part.float()
    vocabulary = part.shape[1] if words is None else words.vocabulary
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if bias is not None:
        logits.add_(bias)
    if head.cap is not None:
        logits.tanh_().mul_(head.cap)
    log_probabilities, normaliser = _log_softmax(logits, words)
    columns, named = _own_columns(labels, words, logits)
    loss = (log_probabilities.gather(1, columns) * named).sum() * (head.label_smoothing - 1.0)
    if head.label_smoothing:
        loss -= log_probabilities.sum(1).div_(vocabulary).sum() * head.label_smoothing
    if head.z_loss and (words is None or words.first == 0):
        loss += normaliser.square().sum() * head.z_loss
    if sums is None:
        return loss
    slope = log_probabilities.exp_()
    if head.z_loss:
        slope.mul_(normaliser.mul_(2.0 * head.z_loss).add_(1.0))
    if head.label_smoothing:
        slope.sub_(head.label_smoothing / vocabulary)
    slope.scatter_add_(1, columns, named * (head.label_smoothing - 1.0))
    if head.cap is not None:  # the derivative of cap * tanh(x) is cap * (1 - tanh(x) ** 2)
        slope.mul_(logits.square_().mul_(-1.0 / head.cap).add_(head.cap))
    if sums.bias is not None:
        sums.bias.add_(slope.sum(0))
    part.copy_(slope.mul_(head.scale) if head.scale != 1.0 else slope)
    return loss


def _log_softmax(logits: torch.Tensor, words: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities [C, V], normalized over all words of all ranks, and logsumexp [C, 1]."""
    if words is None:
        log_probabilities = torch.log_softmax(logits, dim=1)
        return log_probabilities, (logits[:, :1] - log_probabilities[:, :1])
    largest = logits.amax(1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, words.group)
    exponentials = (logits - largest).exp_().sum(1, keepdim=True)
    dist.all_reduce(exponentials, group=words.group)
    normaliser = largest + exponentials.log_()
    return logits - normaliser, normaliser


def _own_columns(labels: torch.Tensor, words: VocabularyShard | None, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [C, 1] twice: the column of every label, and 1.0, or 0.0 if another rank has it."""
    columns = labels.unsqueeze(1)
    if words is None:
        return columns, torch.ones_like(columns, dtype=logits.dtype)
    columns = columns - words.first
    own = (columns >= 0) & (columns < logits.shape[1])
    return columns.clamp(0, logits.shape[1] - 1), own.to(logits.dtype)
