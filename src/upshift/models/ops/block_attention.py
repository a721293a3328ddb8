"""Compute attention on CPUs as plain matrix products over blocks of queries, for any causal or explicit mask.

PyTorch's fused kernel for CPUs reaches a third of the matrix rate (docs/log.md). Here each block of queries is multiplied
with the range of keys that it may see, and nothing is computed outside that range: half the work of a causal mask, far
less where many sequences share a row. Without an explicit mask the probabilities are kept for the backward pass in the
inputs' precision, as transformers' ``eager`` does; with one they are computed again. Dropout draws the probabilities that it
drops again from a seed, which is itself drawn from torch's generator: a step that is done again drops the same ones.

The attention is a registered operator, so that torch.compile calls it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from upshift.internals.torch_names import is_fake, softmax_backward
from upshift.models.profile import BLOCK_QUERIES

BLOCK_ATTENTION = "block"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Call ``model.set_attn_implementation``, after making ``block`` known to transformers beside ``sdpa`` and ``eager``."""
    if name == BLOCK_ATTENTION:
        AttentionInterface.register(BLOCK_ATTENTION, block_attention_forward)
        AttentionMaskInterface.register(BLOCK_ATTENTION, sdpa_mask)
    model.set_attn_implementation(name)


def block_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention: query [B, H, S, D], key and value [B, K, S, D] with K dividing H -> [B, S, H, D].

    Cases that it does not compute (position bias, a cache's longer keys, other devices) go to ``sdpa``.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    simple = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if not simple or query.device.type != "cpu" or query.shape[2] != key.shape[2] or query.shape[2] == 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = torch.randint(2**62, (1,)) if dropout else None
    out, _ = block_attention(query, key, value, attention_mask, seed, is_causal and attention_mask is None, scale, keep, dropout)
    return out, None


class Block(NamedTuple):
    """Some rows of the batch, some of their queries, and the keys that these may see."""

    rows: slice
    queries: slice
    keys: slice


def forward_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    scale: float,
    keep: bool,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([B, S, H, D] attention, flat probabilities of all blocks or an empty tensor)."""
    left = ProbabilityDropout(seed, dropout)
    query = query.contiguous()
    value = value.contiguous()
    columns = key.transpose(2, 3).contiguous()  # a slice of it needs no copy in a product, one of ``key`` does
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1])
    kept = query.new_empty(num_probabilities(query, mask, causal) if keep else 0)
    start = 0
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(query, mask, causal):
            queries = _grouped(query, key, block) * scale
            values = _flat(value, block)
            probabilities = _probabilities(queries, _columns(columns, block), mask, causal, block, kept[start:])
            own = left.scaled(torch.bmm(left.of(probabilities), values)).view(-1, heads, *_size(block.queries), values.shape[-1])
            out[block.rows, block.queries].copy_(own.transpose(1, 2))
            start += probabilities.numel()
    return out, kept


def backward_in_blocks(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    kept: torch.Tensor,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. Those of key and value are summed over blocks in fp32."""
    left = ProbabilityDropout(seed, dropout)
    query = query.contiguous()
    key = key.contiguous()
    columns = key.transpose(2, 3).contiguous()
    value_columns = value.transpose(2, 3).contiguous()
    grad = left.scaled(grad.transpose(1, 2).contiguous())
    query_grad = query.new_empty(query.shape)
    key_grad = key.new_zeros(key.shape, dtype=torch.float32)
    value_grad = value.new_zeros(value.shape, dtype=torch.float32)
    start = 0
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(query, mask, causal):
            queries = _grouped(query, key, block) * scale
            incoming = _grouped(grad, key, block)
            keys = _flat(key, block)
            if kept.numel():
                shape = (*queries.shape[:2], keys.shape[1])
                probabilities = kept[start : start + prod(shape)].view(shape)
                start += prod(shape)
            else:
                probabilities = _probabilities(queries, _columns(columns, block), mask, causal, block, kept)
            gone = left.draw(probabilities)
            _flat(value_grad, block).add_(torch.bmm(left.only(probabilities, gone).transpose(1, 2), incoming))
            slope = left.only(torch.bmm(incoming, _columns(value_columns, block)), gone)
            slope = softmax_backward(slope, probabilities)
            own = torch.bmm(slope, keys).mul_(scale)
            query_grad[block.rows, :, block.queries].copy_(own.view(query_grad[block.rows, :, block.queries].shape))
            _flat(key_grad, block).add_(torch.bmm(slope.transpose(1, 2), queries))
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)


class ProbabilityDropout:
    """Dropout of probabilities: the dropped ones are drawn from a seed, block by block in their order. Without a seed none is
    dropped.

    It uses sixteen random bits a probability. NumPy draws them in a tenth of the time of torch's bernoulli on a CPU
    (docs/log.md).
    """

    def __init__(self, seed: torch.Tensor | None, dropout: float) -> None:
        self.threshold = 0 if seed is None else round(dropout * 2**16)
        self.bits = None if seed is None or is_fake(seed) else numpy.random.SFC64(int(seed))

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor | None:
        if not self.threshold:
            return None
        if self.bits is None:  # of a seed that has no value
            return probabilities.new_empty(probabilities.shape, dtype=torch.bool)
        count = probabilities.numel()
        drawn = torch.from_numpy(self.bits.random_raw(-(-count // 4)).view(numpy.int16))[:count]
        return (drawn < self.threshold - 2**15).view(probabilities.shape)

    def only(self, values: torch.Tensor, gone: torch.Tensor | None) -> torch.Tensor:
        return values if gone is None else values.masked_fill(gone, 0.0)

    def of(self, probabilities: torch.Tensor) -> torch.Tensor:
        return self.only(probabilities, self.draw(probabilities))

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Divide values by the share that is kept, so that their mean stays."""
        return values / (1.0 - self.threshold / 2**16) if self.threshold else values


def _probabilities(
    queries: torch.Tensor, columns: torch.Tensor, mask: torch.Tensor | None, causal: bool, block: Block, kept: torch.Tensor
) -> torch.Tensor:
    """Return the probabilities of one block, [rows x K, H / K x queries, keys]. Queries are scaled already.

    They are written to the start of ``kept`` if that has room."""
    scores = torch.bmm(queries, columns)
    _hide(scores, mask, causal, block)
    if not kept.numel():
        return torch.softmax(scores, -1)
    probabilities = kept[: scores.numel()].view(scores.shape)
    return torch.softmax(scores, -1, out=probabilities)


def num_probabilities(query: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> int:
    """Return how many probabilities are kept. None are kept under an explicit mask: their number is known only when it runs."""
    batch, heads, length, _ = query.shape
    if mask is not None:
        return 0
    if not causal:
        return batch * heads * length * length
    whole = length // BLOCK_QUERIES  # arithmetic alone: torch.compile may not know the length
    rest = length % BLOCK_QUERIES
    return batch * heads * (BLOCK_QUERIES**2 * whole * (whole + 1) // 2 + rest * length)


def _borders(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK_QUERIES, length)) for start in range(0, length, BLOCK_QUERIES)]


def _blocks(query: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Iterator[Block]:
    """Yield blocks of all rows of the batch at once. With an explicit mask go row by row, for each row sees keys of its own."""
    batch, _, length, _ = query.shape
    for rows in [slice(0, batch)] if mask is None else [slice(row, row + 1) for row in range(batch)]:
        for start, stop in _borders(length):
            queries = slice(start, stop)
            if mask is None or is_fake(mask):
                yield Block(rows, queries, slice(0, stop if causal else length))
            else:
                yield Block(rows, queries, _visible(mask, rows, queries))


def _visible(mask: torch.Tensor, rows: slice, queries: slice) -> slice:
    """Return the range of keys that any of these queries sees, or one key if they see none."""
    part = mask[rows if mask.shape[0] > 1 else slice(None), :, queries]
    seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
    positions = seen.view(torch.uint8).flatten(0, 2).amax(dim=0).nonzero()  # ten times as fast as any()
    return slice(int(positions[0]), int(positions[-1]) + 1) if len(positions) else slice(0, 1)


def _hide(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, block: Block) -> None:
    """Lower the scores that the mask forbids; a query that sees nothing spreads evenly, as in ``eager``."""
    lowest = torch.finfo(scores.dtype).min
    rows = block.rows.stop - block.rows.start
    (queries,) = _size(block.queries)
    by_head = scores.view(rows, -1, queries, scores.shape[-1])
    if mask is not None:
        part = mask[block.rows if mask.shape[0] > 1 else slice(None), :, block.queries, block.keys]
        if part.dtype == torch.bool:  # adding over all heads is three times as fast as filling
            part = torch.zeros(part.shape, dtype=scores.dtype).masked_fill_(~part, lowest)
        by_head.add_(part)
    elif causal:
        later = torch.ones(queries, queries, dtype=torch.bool).triu_(1)
        by_head[..., -queries:].masked_fill_(later, lowest)


def _size(part: slice) -> tuple[int]:
    return (part.stop - part.start,)


def _grouped(tensor: torch.Tensor, key: torch.Tensor, block: Block) -> torch.Tensor:
    """Return [rows x K, H / K x queries, D]: the query heads that share a key head are rows of one product."""
    part = tensor[block.rows, :, block.queries]
    return part.reshape(part.shape[0] * key.shape[1], -1, part.shape[-1])


def _flat(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return [rows x K, keys, D], a view: ``tensor`` is contiguous, so rows and heads are one dimension."""
    return tensor[block.rows].flatten(0, 1)[:, block.keys]


def _columns(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return [rows x K, D, keys], a view of [B, K, D, S]."""
    return tensor[block.rows].flatten(0, 1)[:, :, block.keys]


block_attention = torch.library.custom_op("upshift::block_attention", forward_in_blocks, mutates_args=(), device_types="cpu")
block_attention_backward = torch.library.custom_op(
    "upshift::block_attention_backward", backward_in_blocks, mutates_args=(), device_types="cpu"
)


@block_attention.register_fake
def _(query: Any, key: Any, value: Any, mask: Any, seed: Any, causal: bool, scale: float, keep: bool, dropout: float) -> Any:
    batch, heads, length, _ = query.shape
    kept = query.new_empty(num_probabilities(query, mask, causal) if keep else 0)
    return query.new_empty(batch, length, heads, value.shape[-1]), kept


@block_attention_backward.register_fake
def _(
    grad: Any, query: Any, key: Any, value: Any, mask: Any, seed: Any, kept: Any, causal: bool, scale: float, dropout: float
) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, seed, causal, scale, _, dropout = inputs
    ctx.save_for_backward(query, key, value, mask, seed, output[1])
    ctx.causal = causal
    ctx.scale = scale
    ctx.dropout = dropout
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, mask, seed, kept = ctx.saved_tensors
    gradients = block_attention_backward(grad, query, key, value, mask, seed, kept, ctx.causal, ctx.scale, ctx.dropout)
    return (*gradients, None, None, None, None, None, None)


block_attention.register_autograd(_backward, setup_context=_save)
