# needs torch
"""Compute the cross entropy of a linear layer over a vocabulary, one chunk of labelled tokens at a time.

The logits of all tokens are never in memory. The loss and the gradients of a chunk are computed together from the same
probabilities (Hsu et al., "Liger Kernel", 2024, section 3.2). Rows with an ignored label are not computed. Losses are summed,
not averaged, and the divisor of a mean scales the gradients afterwards, so that they do not underflow in half precision. Each
rank may have a shard of the vocabulary. Ranks then exchange the largest logit and the sum of exponentials for each label
(Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from upshift.internals.torch_names import is_fake

ROW_MULTIPLE = 64
CACHED_BYTES = 2**24  # processed at once on a CPU, so that they stay in its cache from one pass to the next


class HeadLoss(NamedTuple):
    """The steps from hidden states to a loss: logits = ``scale * hidden @ weight.T + bias``, or ``cap * tanh(that)``."""

    chunk_tokens: int
    scale: float = 1.0
    cap: float | None = None  # None: no tanh
    ignore_index: int = -100
    label_smoothing: float = 0.0  # Szegedy et al. 2016, as in torch.nn.functional.cross_entropy
    z_loss: float = 0.0  # the factor of logsumexp(logits) ** 2; Chowdhery et al., "PaLM", 2022, section 5


class VocabularyShard(NamedTuple):
    """This rank's shard of a vocabulary that the ranks of ``group`` share."""

    group: dist.ProcessGroup
    first: int  # the first word of the shard
    vocabulary: int  # the number of words on all ranks


@dataclass
class LabelLimit:
    """Hold how many labels a forward pass has at most, as the host knows it.

    A GPU is then not asked for the number, and the host does not wait for it.
    """

    labels: int | None = None  # that are not ignored; None: unknown
    positions: int = 0  # all of them, ignored or not

    def of(self, labels: torch.Tensor) -> int | None:
        """Return the limit for these labels, or None if it is unknown. Only a part of the labels can have fewer than all."""
        return self.labels if labels.device.type != "cpu" and len(labels) <= self.positions else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of chunks follows the labels: compiled, each would be a graph of its own
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: HeadLoss,
    shard: VocabularyShard | None = None,
    limit: LabelLimit | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all labels that are not ignored, or NaN if these are more than ``limit`` says.

    Shapes: hidden [N, H], weight [V, H], bias [V], labels [N] -> fp32 scalar. Matrix products run in autocast's dtype if it is
    on, everything else in fp32. The backward pass may run only once, because it consumes the gradients. With a ``shard``,
    weight and bias hold only its words. Every rank of the group must have the same hidden states and labels, and gets the same
    loss and the whole gradient of the hidden states.
    """
    total: torch.Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, head, shard, None if limit is None else limit.of(labels), torch.is_grad_enabled()
    )
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: HeadLoss,
    limit: LabelLimit | None = None,
) -> torch.Tensor:
    """Return the loss of each label [N] in fp32, 0 for ignored labels. Shapes and precisions as in ``linear_cross_entropy``.

    How much a loss counts is not known before all are computed. So the backward pass computes the logits again, chunk by chunk.
    """
    losses: torch.Tensor = LinearTokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, head, None if limit is None else limit.of(labels)
    )
    return losses


class LinearTokenLosses(torch.autograd.Function):
    """An autograd function that keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: HeadLoss,
        max_labels: int | None,
    ) -> torch.Tensor:
        ctx.head = head
        ctx.max_labels = max_labels
        ctx.compute_dtype = _compute_dtype(hidden)
        ctx.save_for_backward(hidden, weight, bias, labels)
        losses = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            _sum_chunks(
                hidden, weight.to(ctx.compute_dtype), bias, labels, head, None, None, losses=losses, max_labels=max_labels
            )
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        sums = _empty_gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(ctx.compute_dtype)
            _sum_chunks(hidden, matrix, bias, labels, ctx.head, None, sums, factors=grad_outputs[0], max_labels=ctx.max_labels)
        bias_sum = None if sums.bias is None or bias is None else sums.bias.to(bias.dtype)
        return sums.hidden, sums.weight, bias_sum, None, None, None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's, if it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class LinearCrossEntropy(torch.autograd.Function):
    """An autograd function that computes its gradients in the forward pass.

    The backward pass only scales them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: HeadLoss,
        shard: VocabularyShard | None,
        max_labels: int | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        compute_dtype = _compute_dtype(hidden)
        needs_gradient = tuple(with_gradients and is_needed for is_needed in ctx.needs_input_grad[:3])
        sums = _empty_gradients(hidden, weight, bias, needs_gradient)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(compute_dtype)
            needed_sums = sums if any(needs_gradient) else None
            total = _sum_chunks(hidden, matrix, bias, labels, head, shard, needed_sums, max_labels=max_labels)
            if shard is not None:
                for tensor in (total, sums.hidden):
                    if tensor is not None:
                        dist.all_reduce(tensor, group=shard.group)
        bias_sum = None if sums.bias is None or bias is None else sums.bias.to(bias.dtype)
        ctx.save_for_backward(sums.hidden, sums.weight, bias_sum)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grad_outputs
        gradients = ctx.saved_tensors
        return (*(g.mul_(scale.to(g.dtype)) if g is not None else None for g in gradients), None, None, None, None, None)


class Gradients(NamedTuple):
    """The gradients of the summed loss, which each chunk adds to. None means not needed."""

    hidden: torch.Tensor | None  # [N, H]
    weight: torch.Tensor | None  # [V, H]; the first chunk fills it
    bias: torch.Tensor | None  # [V]


def _empty_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_needed: tuple[bool, ...]
) -> Gradients:
    """Return the gradients that are needed, before the first chunk."""
    return Gradients(
        hidden=torch.zeros_like(hidden, memory_format=torch.contiguous_format) if is_needed[0] else None,
        weight=torch.empty_like(weight, memory_format=torch.contiguous_format) if is_needed[1] else None,
        bias=torch.zeros_like(bias, dtype=torch.float32) if is_needed[2] and bias is not None else None,
    )


def _sum_chunks(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: HeadLoss,
    shard: VocabularyShard | None,
    sums: Gradients | None,
    *,
    losses: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    max_labels: int | None = None,
) -> torch.Tensor:
    """Return the summed loss, and add the gradients to ``sums``. All chunks share one buffer of logits.

    Args:
        matrix: the weight in the dtype of the products.
        losses: gets the loss of each label.
        factors: of the loss of each label, for the gradients; None: all are 1.
        max_labels: how many labels are not ignored, at most; None: find out, for which the host waits for a GPU.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    rows, ignored = _labelled_rows(labels, head.ignore_index, max_labels)
    if ignored is not None:
        labels = labels.masked_fill(ignored, 0)
        if sums is not None and sums.bias is not None and factors is None:
            factors = torch.ones(len(labels), device=labels.device)
        factors = None if factors is None else _zero_ignored(factors, ignored)
        total = torch.where((~ignored).sum() > len(rows), torch.nan, total)
    buffer = matrix.new_empty(min(head.chunk_tokens, _round_up(len(rows))), len(matrix))
    for number, chunk in enumerate(rows.split(head.chunk_tokens)):  # one empty chunk if there are no rows
        num_padded = min(_round_up(len(chunk)), len(buffer))
        # The last row repeats: another one, without a label, may have hidden states that are not numbers.
        padded_chunk = chunk[torch.arange(num_padded, device=chunk.device).clamp(max=len(chunk) - 1)]
        inputs = _zero_ignored(hidden[padded_chunk].to(matrix.dtype), ignored, padded_chunk)
        logits = torch.mm(inputs, matrix.T, out=buffer[: len(padded_chunk)])
        chunk_logits = logits[: len(chunk)]
        rows_in_cache = _rows_in_cache(logits)
        for rows_of_logits, members in zip(chunk_logits.split(rows_in_cache), chunk.split(rows_in_cache), strict=True):
            member_factors = None if factors is None else factors[members]
            member_losses = _losses_and_gradient(rows_of_logits, labels[members], bias, head, shard, sums, member_factors)
            member_losses = _zero_ignored(member_losses, ignored, members)
            total += member_losses.sum()
            if losses is not None:
                losses[members] = member_losses
        logits[len(chunk) :] = 0.0
        if sums is not None and sums.hidden is not None:
            hidden_grad = (logits @ matrix)[: len(chunk)].to(hidden.dtype)
            sums.hidden.index_copy_(0, chunk, _zero_ignored(hidden_grad, ignored, chunk))
        if sums is not None and sums.weight is not None:
            _add_outer(sums.weight, logits, inputs, first=number == 0)
    return total


def _add_outer(total: torch.Tensor, logits_grad: torch.Tensor, inputs: torch.Tensor, *, first: bool) -> None:
    """Compute total [V, H] += logits_grad.T [V, C] @ inputs [C, H], or = instead of += if ``first``.

    If the dtypes differ, the product is read again. It is then computed in blocks that stay in the cache."""
    if total.dtype == logits_grad.dtype:
        torch.addmm(total, logits_grad.T, inputs, beta=0 if first else 1, out=total)
        return
    rows_in_cache = _rows_in_cache(total)
    for rows, columns in zip(total.split(rows_in_cache), logits_grad.T.split(rows_in_cache), strict=True):
        rows.copy_(columns @ inputs) if first else rows.add_(columns @ inputs)


def _labelled_rows(labels: torch.Tensor, ignore_index: int, max_labels: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the indices of the rows that have a label, and None.

    Return all rows if the labels are fake: that is the upper bound of memory, and its shapes depend on no values. With
    ``max_labels``, return so many rows, those with a label first, and a mask of the ignored labels [N].
    """
    if is_fake(labels):
        return torch.arange(len(labels), device=labels.device), None
    if max_labels is None:
        return (labels != ignore_index).nonzero().squeeze(1), None
    ignored = labels == ignore_index
    return torch.argsort(ignored.to(torch.uint8), stable=True)[:max_labels], ignored


def _zero_ignored(values: torch.Tensor, ignored: torch.Tensor | None, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values [C, ...] of some rows, or of all, with 0 where the label is ignored. Without a mask none is."""
    if ignored is None:
        return values
    mask = ignored if rows is None else ignored[rows]
    return values.masked_fill(mask.view(-1, *[1] * (values.ndim - 1)), 0.0)


def _round_up(num_rows: int) -> int:
    """Round a number of rows up to a multiple. The number depends on the data, and oneDNN caches a kernel for each size."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _rows_in_cache(matrix: torch.Tensor) -> int:
    """Return how many rows in fp32 to process at once. On a GPU this is all rows, because each block would launch kernels."""
    if matrix.device.type != "cpu":
        return max(len(matrix), 1)
    return max(CACHED_BYTES // (4 * matrix.shape[1]), 1)


def _losses_and_gradient(
    products: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    head: HeadLoss,
    shard: VocabularyShard | None,
    sums: Gradients | None,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """Return the losses [C] of ``products`` [C, V], which are logits without scale and bias, and overwrite them with the gradient
    of their sum, each loss times its factor.

    With a ``shard``, return only the terms of its words."""
    logits = _complete_logits(products, bias, head)
    vocabulary = products.shape[1] if shard is None else shard.vocabulary
    log_probabilities, normaliser = _log_softmax(logits, shard)
    columns, has_label = _label_columns(labels, shard, logits)
    losses = (log_probabilities.gather(1, columns) * has_label).squeeze(1) * (head.label_smoothing - 1.0)
    if head.label_smoothing:
        losses -= log_probabilities.sum(1).div_(vocabulary) * head.label_smoothing
    if head.z_loss and (shard is None or shard.first == 0):
        losses += normaliser.square().squeeze(1) * head.z_loss
    if sums is None:
        return losses
    logits_grad = log_probabilities.exp_()
    if head.z_loss:
        logits_grad.mul_(normaliser.mul_(2.0 * head.z_loss).add_(1.0))
    if head.label_smoothing:
        logits_grad.sub_(head.label_smoothing / vocabulary)
    logits_grad.scatter_add_(1, columns, has_label * (head.label_smoothing - 1.0))
    if head.cap is not None:  # the derivative of cap * tanh(x) is cap * (1 - tanh(x) ** 2)
        logits_grad.mul_(logits.square_().mul_(-1.0 / head.cap).add_(head.cap))
    if factors is not None:
        logits_grad.mul_(factors.unsqueeze(1))
    if sums.bias is not None:
        sums.bias.add_(logits_grad.sum(0))
    products.copy_(logits_grad.mul_(head.scale) if head.scale != 1.0 else logits_grad)
    return losses


def _complete_logits(products: torch.Tensor, bias: torch.Tensor | None, head: HeadLoss) -> torch.Tensor:
    """Return fp32 logits [C, V] with the head's scale, bias and cap, in the memory of ``products`` if these are fp32."""
    logits = products.float()
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if bias is not None:
        logits.add_(bias)
    if head.cap is not None:
        logits.tanh_().mul_(head.cap)
    return logits


def _log_softmax(logits: torch.Tensor, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities [C, V], normalized over the words of all ranks, and logsumexp [C, 1]."""
    if shard is None:
        log_probabilities = torch.log_softmax(logits, dim=1)
        return log_probabilities, (logits[:, :1] - log_probabilities[:, :1])
    largest = logits.amax(1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, shard.group)
    exponentials = (logits - largest).exp_().sum(1, keepdim=True)
    dist.all_reduce(exponentials, group=shard.group)
    normaliser = largest + exponentials.log_()
    return logits - normaliser, normaliser


def _label_columns(
    labels: torch.Tensor, shard: VocabularyShard | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [C, 1] twice: the column of every label, and 1.0, or 0.0 if another rank has the label's word."""
    columns = labels.unsqueeze(1)
    if shard is None:
        return columns, torch.ones_like(columns, dtype=logits.dtype)
    columns = columns - shard.first
    is_local = (columns >= 0) & (columns < logits.shape[1])
    return columns.clamp(0, logits.shape[1] - 1), is_local.to(logits.dtype)
