"""Make rows that stand in for batches which a plan leaves whole.

A script's batch may hold pairs, texts end to end, strings, or several texts in one example. Such a batch cannot be taken apart,
but its tokens can be counted. Predictions and trials compute rows of the same shapes with the model's own loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from upshift.models.adapter import base_of
from upshift.training.batches.user_batches import Batch, InseparableRows
from upshift.training.data.corpus import IGNORED

TOKENS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"


def make_stand_ins(batches: Sequence[Batch], model: nn.Module) -> list[Batch]:
    """Return for each batch the rows of its texts, with labels for the model's own loss.

    Leave out batches with fewer rows than the first one, such as the last batch of an epoch. Raise InseparableRows if a batch
    has no tokens, or if the model is not one of transformers, whose loss is known.
    """
    if not isinstance(base_of(model), PreTrainedModel):
        raise InseparableRows(f"{type(model).__name__} is no transformers model, so rows for its loss are not known")
    stand_ins = [_stand_in(batch, model) for batch in batches]
    has_mask = MASK in stand_ins[0]
    num_rows = len(stand_ins[0][TOKENS])
    return [stand_in for stand_in in stand_ins if len(stand_in[TOKENS]) == num_rows and (MASK in stand_in) == has_mask]


def _stand_in(batch: Any, model: nn.Module) -> dict[str, Tensor]:
    texts = _texts_of(batch)
    width = max(tokens.shape[1] for tokens in texts.values())
    rows = {TOKENS: torch.cat([_widened(tokens, width) for tokens in texts.values()])}
    masks = [_entry_beside(batch, name, MASK) for name in texts]
    positions = [_entry_beside(batch, name, POSITIONS) for name in texts]
    if all(mask is not None for mask in masks):
        rows[MASK] = torch.cat([_widened(mask, width) for mask in masks if mask is not None])
    elif len(texts) == 1 and positions[0] is not None:  # texts lie end to end
        rows[POSITIONS] = positions[0]
    rows["labels"] = _labels(batch, rows, model)
    return rows


def _texts_of(batch: Any) -> dict[str, Tensor]:
    """Return the token ids of a batch: those of the entry ``input_ids``, or of all entries whose names end in it."""
    if not isinstance(batch, Mapping):
        raise InseparableRows(f"a batch is a {type(batch).__name__}, and its tokens have no name")
    names = [TOKENS] if TOKENS in batch else [name for name in batch if str(name).endswith(f"_{TOKENS}")]
    texts = {name: batch[name] for name in names}
    is_text = [isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point() for tokens in texts.values()]
    if not texts or not all(is_text):
        raise InseparableRows(f"no entry {TOKENS!r} of a batch has rows of tokens")
    return texts


def _entry_beside(batch: Mapping[str, Any], name: str, kind: str) -> Tensor | None:
    """Return the mask, or the positions, of the tokens ``name``, or None if there is none of the same shape."""
    value = batch.get(name.removesuffix(TOKENS) + kind)
    return value if isinstance(value, Tensor) and value.shape == batch[name].shape else None


def _labels(batch: Mapping[str, Any], rows: dict[str, Tensor], model: nn.Module) -> Tensor:
    """Return the batch's own labels if it has one for each row or token, else labels of the kind that the model's loss reads."""
    tokens = rows[TOKENS]
    own_labels = batch.get("labels")
    if isinstance(own_labels, Tensor) and own_labels.ndim and len(own_labels) == len(tokens):
        return own_labels
    base: Any = base_of(model)
    if base.get_output_embeddings() is not None:
        return tokens if MASK not in rows else tokens.masked_fill(rows[MASK] == 0, IGNORED)
    if getattr(base.config, "num_labels", 1) == 1:
        return torch.zeros(len(tokens))
    return torch.zeros(len(tokens), dtype=torch.long)


def _widened(tokens: Tensor, width: int) -> Tensor:
    return pad(tokens, (0, width - tokens.shape[1]))
