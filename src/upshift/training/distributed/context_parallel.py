"""Share every sequence among ranks (context parallelism).

Outside attention each rank has its own range of tokens. In attention each rank has all tokens of its own heads (Ulysses, Jacobs
et al. 2023).

The unmodified model runs on its rank's tokens. Masks are those of the whole sequence, so padding, windows and the borders of
packed sequences are where they are with one process. A rank's loss is the sum over its own labels, divided by the number of
labels of all ranks of the group. Over the group these shares add up to the micro-batch's mean.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from upshift.errors import JobFailed
from upshift.internals.torch_names import COLLECTIVES, is_fake
from upshift.internals.transformers_names import (
    ATTENTION,
    ATTENTION_FUNCTIONS,
    CAUSAL_LOSS,
    MASK_FUNCTIONS,
    MASKED_LOSS,
    SUPPORTS_BACKEND,
)
from upshift.models.adapter import base_of
from upshift.models.build import find_stacks
from upshift.models.config import heads_of
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import round_up
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.distributed.collectives import Exchange
from upshift.training.distributed.mesh import Mesh

ATTENTION_NAME = "ulysses"
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # they mix tokens only in attention
PER_HEAD_TENSORS = ("position_bias", "s_aux")  # arguments with an entry for every head of the whole model
_ops = COLLECTIVES.get()  # a namespace of torch.ops, which is never missing; parallelize.py checks its operators
PADDING_VALUES = {"labels": IGNORED, "attention_mask": 0}


@dataclass(frozen=True)
class WholeSequences:
    """The whole sequences that ranks share in one micro-batch."""

    width: int
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    documents: torch.Tensor | None  # of packed rows: the number of each token's document in its row


def apply_context_parallel(models: list[PreTrainedModel], mesh: Mesh) -> None:
    """Make each of ``models``, which are the stages of one model, take whole sequences and compute this rank's part of them.

    Call it after the attention of the models is set.
    """
    if mesh.context_mesh is None:
        return
    context_parallel = ContextParallel(models[0], mesh)
    AttentionInterface.register(ATTENTION_NAME, context_parallel.attend)
    AttentionMaskInterface.register(ATTENTION_NAME, context_parallel.make_mask)
    for model in models:
        model.set_attn_implementation(ATTENTION_NAME)
        model.register_forward_pre_hook(context_parallel.shard_inputs, with_kwargs=True)
        model.register_forward_hook(context_parallel.add_loss)


def padded_width(width: int, layout: Layout) -> int:
    """Return the width, rounded up to a multiple of the ranks that share a sequence by context or sequence parallelism."""
    return round_up(width, layout.context_parallel * (layout.tensor_parallel if layout.sequence_parallel else 1))


def why_not_context_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot share this model's sequences and what to use instead, or None if they can."""
    degree = plan.layout.context_parallel
    if degree == 1:
        return None
    setting = f"context_parallel={degree}"
    instead = "fully_shard=weights and activation_checkpointing for long sequences"
    if plan.layout.context_kind == "ring":
        return f"{setting} with context_kind=ring is not built; use context_kind=ulysses"
    if plan.attention.startswith("flash_attention"):
        return f"{setting} needs masks of whole sequences, which attention={plan.attention} does not take; use attention=sdpa"
    base = base_of(model)
    reason = _why_tokens_mix_outside_attention(base)
    if reason is not None:
        return f"{setting} is not possible: {reason}; use {instead}"
    sizes = heads_of(base.config.get_text_config())
    if sizes is None:
        return f"{setting} (ulysses) divides attention heads, whose number the model's config does not say; use {instead}"
    heads = sizes.queries
    if heads % (degree * plan.layout.tensor_parallel):
        valid = [str(number) for number in range(2, heads + 1) if heads % (number * plan.layout.tensor_parallel) == 0]
        return f"{setting} (ulysses) divides the model's {heads} attention heads; use {', '.join(valid)}, or {instead}"
    return None


def _why_tokens_mix_outside_attention(model: PreTrainedModel) -> str | None:
    """Return why a rank needs the other ranks' tokens, or their number, outside of attention, or None if it does not."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder have sequences of different lengths"
    if not SUPPORTS_BACKEND.of(model):
        return "its attention is not behind transformers' attention interface"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids, so it would count each rank's tokens from 0"
    if model.loss_function not in (CAUSAL_LOSS.get(), MASKED_LOSS.get()):
        return "its loss is not a mean over words"
    if getattr(config, "output_router_logits", False):
        return "the loss of its router (output_router_logits) is taken over whole sequences"
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if other_layers:
        return f"its layers of {', '.join(other_layers)} mix tokens outside attention"
    layers = [module for _, stack in find_stacks(model) for module in stack.modules()]
    if any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase) for module in layers):
        return "its layers mix tokens in convolutions or recurrences"
    return None


class RegroupedAttention:
    """Present an attention module with another number of query heads for each key head, after key heads were repeated."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module = module
        self.num_key_value_groups = num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def eager_attention_of(module: nn.Module) -> Any:
    """Return the eager attention function of the model, from the Python module in which transformers looks for it."""
    return sys.modules[type(module).__module__].eager_attention_forward


def document_of_each_token(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's document in its row [B, S], or None if every row is one document.

    A document begins where a position is not the previous one plus 1. A row of a fake tensor, which has no values, counts as
    one document.
    """
    if is_fake(positions):
        return None
    begins = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def within_documents(mask_function: Any, positions: torch.Tensor, documents: torch.Tensor) -> Any:
    """Return a mask function for transformers' AttentionMaskInterface.

    It allows what ``mask_function`` allows for the tokens' positions, but only between tokens of one document.
    """

    def allowed(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same_document = documents[batch, query] == documents[batch, key]
        return same_document & mask_function(batch, head, positions[batch, query], positions[batch, key])

    return allowed


class ContextParallel:
    """Run a model on one rank's part of its sequences."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        assert mesh.context_mesh is not None
        self.group = mesh.context_mesh.get_group("context")
        self._layout = mesh.plan.layout
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        name = ATTENTION.of(model.config)
        self._inner_attention: Any = ATTENTION_FUNCTIONS.get().get(name)  # None: eager attention, which each model defines itself
        self._inner_mask: Any = MASK_FUNCTIONS.get()[name]
        self._shifts_labels = model.loss_function is CAUSAL_LOSS.get()
        self._whole: WholeSequences
        self._local_labels: torch.Tensor | None = None
        self._num_labels: torch.Tensor

    def shard_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace whole sequences by this rank's tokens. A width that ranks cannot divide is padded on the right."""
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.ndim >= 2}
        ids_or_labels = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["labels"]
        rows, width = ids_or_labels.shape[:2]
        missing = padded_width(width, self._layout) - width
        if missing:
            tensors = {name: _pad_right(name, value, missing) for name, value in tensors.items() if value.shape[1] == width}
        mask = tensors.get("attention_mask")
        if missing and mask is None and not self._shifts_labels:  # causal tokens never attend to padding on their right
            mask = _pad_right("attention_mask", tensors["input_ids"].new_ones(rows, width), missing)
        positions = tensors.get("position_ids")
        if positions is None:
            positions = torch.arange(width + missing, device=tensors["input_ids"].device).expand(rows, -1)
        documents = document_of_each_token(positions) if mask is None else None
        self._whole = WholeSequences(width + missing, None if mask is None else mask.bool(), positions, documents)
        labels = tensors.pop("labels", None)
        if labels is not None:
            if self._shifts_labels:
                labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            self._num_labels = (labels != IGNORED).sum().clamp(min=1)
        self._local_labels = None if labels is None else self._local_tokens(labels)
        tensors = tensors | {"position_ids": positions}
        local: dict[str, torch.Tensor | None] = {name: self._local_tokens(value) for name, value in tensors.items()}
        # Without a mask, transformers would look for borders of packed sequences in the positions of the rank's own tokens.
        local["attention_mask"] = torch.ones_like(positions) if documents is not None else mask
        return args, {**kwargs, **local, "labels": None}

    def add_loss(self, model: Any, args: Any, output: Any) -> Any:
        """Compute the loss of this rank's labels, and put it into the model's output."""
        labels = self._local_labels
        self._local_labels = None
        if labels is not None:
            argument = "shift_labels" if self._shifts_labels else "labels"
            output.loss = model.loss_function(
                logits=output.logits,
                vocab_size=output.logits.shape[-1],
                num_items_in_batch=self._num_labels,
                **{"labels": None, argument: labels},
            )
        return output

    def make_mask(self, *, mask_function: Any, attention_mask: Any, **settings: Any) -> Any:
        """Return the mask between all tokens of the whole sequences, as the wrapped attention takes it."""
        whole = self._whole
        if whole.documents is not None:
            mask_function = within_documents(mask_function, whole.position_ids, whole.documents)
            settings["allow_is_causal_skip"] = False
        settings |= {"q_length": whole.width, "kv_length": whole.width, "q_offset": 0, "kv_offset": 0}
        return self._inner_mask(mask_function=mask_function, attention_mask=whole.attention_mask, **settings)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention: query [B, H, S / ranks, D], key and value [B, K, S / ranks, D] -> [B, S / ranks, H, D]."""
        for name in PER_HEAD_TENSORS:
            if settings.get(name) is not None:
                raise JobFailed(f"context_parallel cannot divide the heads of the model's {name}; use context_parallel=1")
        device = query.device.type
        if torch.is_autocast_enabled(device):  # cast before the exchange; attention would cast after it
            query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
        num_heads = query.shape[1]
        num_key_heads = key.shape[1]
        # Each rank needs whole key heads. If there are too few, they are repeated.
        num_repeated = math.lcm(num_key_heads, self.ranks)
        if num_heads % num_repeated:
            num_repeated = num_heads
        if num_repeated > num_key_heads:
            key, value = (tensor.repeat_interleave(num_repeated // num_key_heads, 1) for tensor in (key, value))
        query, key, value = (self._exchange(tensor) for tensor in (query, key, value))
        attention: Any = module
        if num_repeated != num_key_heads:
            attention = RegroupedAttention(module, num_heads // num_repeated)
        out, _ = (self._inner_attention or eager_attention_of(module))(attention, query, key, value, mask, **settings)
        return self._exchange(out), None

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange tokens for heads between ranks, or back.

        [B, heads, own tokens, D] -> [B, own heads, tokens, D], and [B, tokens, own heads, D] -> [B, own tokens, heads, D].
        """
        return Exchange.apply(tensor, self.group, all_to_all, all_to_all_back)  # type: ignore[no-any-return,no-untyped-call]

    def _local_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[1] != self._whole.width:
            return tensor
        return tensor.chunk(self.ranks, 1)[self.rank].contiguous()


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup, scattered: int = 1, gathered: int = 2) -> torch.Tensor:
    """Divide dimension ``scattered`` among the ranks, and join dimension ``gathered``, of which each rank had a part."""
    sent = torch.stack(tensor.chunk(group.size(), scattered))
    sizes = [1] * group.size()
    received = _ops.wait_tensor(_ops.all_to_all_single(sent, sizes, sizes, group.group_name))
    return torch.cat(received.unbind(0), gathered)


def all_to_all_back(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo ``all_to_all``."""
    return all_to_all(tensor, group, scattered=2, gathered=1)


def _pad_right(name: str, tensor: torch.Tensor, missing: int) -> torch.Tensor:
    if name == "position_ids":  # positions go on, as if the last sequence were longer
        padding = tensor[:, -1:] + torch.arange(1, missing + 1, device=tensor.device)
        return torch.cat([tensor, padding], 1)
    return nn.functional.pad(tensor, (0, missing), value=PADDING_VALUES.get(name, 0))
