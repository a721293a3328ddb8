# needs torch
"""Compute attention on CPUs as plain matrix products over blocks of queries, for any causal or explicit mask.

PyTorch's fused kernel for CPUs reaches a third of the rate of matrix products (docs/log.md). Here each block of queries is
multiplied with the range of keys that it may see. Nothing is computed outside that range, which saves half the work under a
causal mask, and more if many sequences share a row. Without an explicit mask, the probabilities are saved for the backward
pass in the inputs' precision, as transformers' ``eager`` does. With an explicit mask they are computed again. Dropout is drawn
from a seed that comes from torch's generator, so a repeated step drops the same probabilities.

The attention is a registered operator, so that torch.compile does not trace into it.
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
# In 16 bits, oneDNN makes code for each size of a product and never frees it: 0.27 MiB a size (torch 2.13). Packed texts begin
# anywhere in a row, so their ranges of keys are rounded to this multiple. The mask hides the keys that come on top.
HALF_KEY_MULTIPLE = 32


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the model's attention kernel. Register ``block`` with transformers first if it is the one."""
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

    Leave other cases to ``sdpa``: a position bias, a soft cap, keys of a cache, and other devices.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if not is_plain or query.device.type != "cpu" or query.shape[2] != key.shape[2] or query.shape[2] == 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    save_probabilities = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = torch.randint(2**62, (1,)) if dropout else None
    is_causal = is_causal and attention_mask is None
    out, _ = block_attention(query, key, value, attention_mask, seed, is_causal, scale, save_probabilities, dropout)
    return out, None


class Block(NamedTuple):
    """A range of the batch's rows, a range of their queries, and the range of keys that these queries may see."""

    rows: slice
    queries: slice
    keys: slice


def forward_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    save_probabilities: bool,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention [B, S, H, D], and the flat probabilities of all blocks or an empty tensor."""
    probability_dropout = ProbabilityDropout(seed, dropout)
    query = query.contiguous()
    value = value.contiguous()
    key_columns = key.transpose(2, 3).contiguous()  # a product copies a slice of ``key``, but not a slice of this
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1])
    saved = query.new_empty(num_probabilities(query, mask, is_causal) if save_probabilities else 0)
    start = 0
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(query, mask, is_causal):
            queries = _group_heads(query, key, block) * scale
            values = _flatten_heads(value, block)
            probabilities = _probabilities(queries, _key_columns(key_columns, block), mask, is_causal, block, saved[start:])
            weighted = torch.bmm(probability_dropout.apply(probabilities), values)
            block_output = probability_dropout.rescale(weighted).view(-1, heads, _length(block.queries), values.shape[-1])
            out[block.rows, block.queries].copy_(block_output.transpose(1, 2))
            start += probabilities.numel()
    return out, saved


def backward_in_blocks(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    saved: torch.Tensor,
    is_causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. Those of key and value are summed over blocks in fp32."""
    probability_dropout = ProbabilityDropout(seed, dropout)
    query = query.contiguous()
    key = key.contiguous()
    key_columns = key.transpose(2, 3).contiguous()
    value_columns = value.transpose(2, 3).contiguous()
    grad = probability_dropout.rescale(grad.transpose(1, 2).contiguous())
    query_grad = query.new_empty(query.shape)
    key_grad = key.new_zeros(key.shape, dtype=torch.float32)
    value_grad = value.new_zeros(value.shape, dtype=torch.float32)
    start = 0
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(query, mask, is_causal):
            queries = _group_heads(query, key, block) * scale
            incoming = _group_heads(grad, key, block)
            keys = _flatten_heads(key, block)
            if saved.numel():
                shape = (*queries.shape[:2], keys.shape[1])
                probabilities = saved[start : start + prod(shape)].view(shape)
                start += prod(shape)
            else:
                probabilities = _probabilities(queries, _key_columns(key_columns, block), mask, is_causal, block, saved)
            dropped = probability_dropout.draw(probabilities)
            weights = probability_dropout.zero_dropped(probabilities, dropped)
            _flatten_heads(value_grad, block).add_(torch.bmm(weights.transpose(1, 2), incoming))
            score_grad = probability_dropout.zero_dropped(torch.bmm(incoming, _key_columns(value_columns, block)), dropped)
            score_grad = softmax_backward(score_grad, probabilities)
            block_grad = torch.bmm(score_grad, keys).mul_(scale)
            query_grad[block.rows, :, block.queries].copy_(block_grad.view(query_grad[block.rows, :, block.queries].shape))
            _flatten_heads(key_grad, block).add_(torch.bmm(score_grad.transpose(1, 2), queries))
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)


class ProbabilityDropout:
    """Dropout of probabilities, drawn from a seed block by block in their order. Without a seed, nothing is dropped.

    It takes sixteen random bits for each probability. NumPy draws them in a tenth of the time of torch's bernoulli on a CPU
    (docs/log.md).
    """

    def __init__(self, seed: torch.Tensor | None, dropout: float) -> None:
        self.threshold = 0 if seed is None else round(dropout * 2**16)
        self.bits = None if seed is None or is_fake(seed) else numpy.random.SFC64(int(seed))

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor | None:
        """Return which probabilities to drop, or None for none."""
        if not self.threshold:
            return None
        if self.bits is None:  # a fake seed has no value
            return probabilities.new_empty(probabilities.shape, dtype=torch.bool)
        count = probabilities.numel()
        random_bits = torch.from_numpy(self.bits.random_raw(-(-count // 4)).view(numpy.int16))[:count]
        return (random_bits < self.threshold - 2**15).view(probabilities.shape)

    def zero_dropped(self, values: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
        return values if dropped is None else values.masked_fill(dropped, 0.0)

    def apply(self, probabilities: torch.Tensor) -> torch.Tensor:
        return self.zero_dropped(probabilities, self.draw(probabilities))

    def rescale(self, values: torch.Tensor) -> torch.Tensor:
        """Divide values by the share that is not dropped, so that their mean stays the same."""
        return values / (1.0 - self.threshold / 2**16) if self.threshold else values


def _probabilities(
    queries: torch.Tensor, columns: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, block: Block, saved: torch.Tensor
) -> torch.Tensor:
    """Return the probabilities of one block, [rows x K, H / K x queries, keys]. The queries must be scaled.

    Write them to the start of ``saved``, unless it is empty."""
    scores = torch.bmm(queries, columns)
    _apply_mask(scores, mask, is_causal, block)
    if not saved.numel():
        return torch.softmax(scores, -1)
    probabilities = saved[: scores.numel()].view(scores.shape)
    return torch.softmax(scores, -1, out=probabilities)


def num_probabilities(query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> int:
    """Return the number of saved probabilities, or 0 with an explicit mask, whose values decide the number."""
    batch, heads, length, _ = query.shape
    if mask is not None:
        return 0
    if not is_causal:
        return batch * heads * length * length
    num_full_blocks = length // BLOCK_QUERIES  # only arithmetic, because torch.compile may not know the length
    last_block_size = length % BLOCK_QUERIES
    return batch * heads * (BLOCK_QUERIES**2 * num_full_blocks * (num_full_blocks + 1) // 2 + last_block_size * length)


def _query_ranges(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK_QUERIES, length)) for start in range(0, length, BLOCK_QUERIES)]


def _blocks(query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> Iterator[Block]:
    """Yield blocks that span all rows of the batch. With an explicit mask, go row by row, because each row sees other keys."""
    batch, _, length, _ = query.shape
    multiple = 1 if query.dtype == torch.float32 else HALF_KEY_MULTIPLE
    for rows in [slice(0, batch)] if mask is None else [slice(row, row + 1) for row in range(batch)]:
        for start, stop in _query_ranges(length):
            queries = slice(start, stop)
            if mask is None or is_fake(mask):
                yield Block(rows, queries, slice(0, stop if is_causal else length))
            else:
                yield Block(rows, queries, _visible_keys(mask, rows, queries, multiple))


def _visible_keys(mask: torch.Tensor, rows: slice, queries: slice, multiple: int) -> slice:
    """Return the range of the keys that any of these queries may see, or the first key if they may see none.

    Both ends are rounded to ``multiple``, to have fewer sizes.
    """
    mask_rows = mask[rows if mask.shape[0] > 1 else slice(None), :, queries]
    is_visible = mask_rows if mask_rows.dtype == torch.bool else mask_rows > torch.finfo(mask_rows.dtype).min / 2
    positions = is_visible.view(torch.uint8).flatten(0, 2).amax(dim=0).nonzero()  # ten times as fast as any()
    if not len(positions):
        return slice(0, 1)
    num_before = int(positions[0]) // multiple
    num_through = int(positions[-1]) // multiple + 1
    return slice(num_before * multiple, min(num_through * multiple, mask.shape[-1]))


def _apply_mask(scores: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, block: Block) -> None:
    """Set forbidden scores to the lowest number. A query that may see nothing attends to all keys evenly, as in ``eager``."""
    lowest = torch.finfo(scores.dtype).min
    rows = _length(block.rows)
    queries = _length(block.queries)
    by_head = scores.view(rows, -1, queries, scores.shape[-1])
    if mask is not None:
        mask_part = mask[block.rows if mask.shape[0] > 1 else slice(None), :, block.queries, block.keys]
        if mask_part.dtype == torch.bool:  # adding to all heads is three times as fast as filling them
            mask_part = torch.zeros(mask_part.shape, dtype=scores.dtype).masked_fill_(~mask_part, lowest)
        by_head.add_(mask_part)
    elif is_causal:
        later = torch.ones(queries, queries, dtype=torch.bool).triu_(1)
        by_head[..., -queries:].masked_fill_(later, lowest)


def _length(indices: slice) -> int:
    return int(indices.stop - indices.start)


def _group_heads(tensor: torch.Tensor, key: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the queries of a block as [rows x K, H / K x queries, D]: query heads with the same key head share a product."""
    queries = tensor[block.rows, :, block.queries]
    return queries.reshape(queries.shape[0] * key.shape[1], -1, queries.shape[-1])


def _flatten_heads(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the keys or values of a block as a view [rows x K, keys, D]. ``tensor`` is contiguous [B, K, S, D]."""
    return tensor[block.rows].flatten(0, 1)[:, block.keys]


def _key_columns(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the transposed keys or values of a block as a view [rows x K, D, keys] of [B, K, D, S]."""
    return tensor[block.rows].flatten(0, 1)[:, :, block.keys]


block_attention = torch.library.custom_op("upshift::block_attention", forward_in_blocks, mutates_args=(), device_types="cpu")
block_attention_backward = torch.library.custom_op(
    "upshift::block_attention_backward", backward_in_blocks, mutates_args=(), device_types="cpu"
)


@block_attention.register_fake
def _(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    seed: Any,
    is_causal: bool,
    scale: float,
    save_probabilities: bool,
    dropout: float,
) -> Any:
    batch, heads, length, _ = query.shape
    saved = query.new_empty(num_probabilities(query, mask, is_causal) if save_probabilities else 0)
    return query.new_empty(batch, length, heads, value.shape[-1]), saved


@block_attention_backward.register_fake
def _(
    grad: Any, query: Any, key: Any, value: Any, mask: Any, seed: Any, saved: Any, is_causal: bool, scale: float, dropout: float
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
    query, key, value, mask, seed, saved = ctx.saved_tensors
    gradients = block_attention_backward(grad, query, key, value, mask, seed, saved, ctx.causal, ctx.scale, ctx.dropout)
    return (*gradients, None, None, None, None, None, None)


block_attention.register_autograd(_backward, setup_context=_save)
