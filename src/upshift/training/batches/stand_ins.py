"""Make rows that stand in for batches which a plan leaves whole.

A script's batch may hold pairs, texts end to end, strings, or several texts in one example. Such a batch cannot be taken apart,
but its tokens can be counted: in its entries, or in the calls of the model. Predictions and trials compute rows of the same
shapes with the model's own loss. A model without a loss gets a head that gives each text one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from upshift.models.adapter import base_of, planned_part
from upshift.models.build import has_own_loss
from upshift.models.describe import max_positions
from upshift.training.batches.model_calls import TOKENS, StepCalls
from upshift.training.batches.user_batches import Batch, InseparableRows
from upshift.training.data.rows.token_rows import IGNORED

MASK = "attention_mask"
POSITIONS = "position_ids"
LEAST_SHARE = 0.9  # of the trained weights that are in the transformers model, for which a plan is made
MAX_RECORDED = 4  # batches whose loss is computed to see the rows
Texts = Mapping[str, Tensor]  # the tokens of some rows, and their mask or positions


def make_stand_ins(batches: Sequence[Batch], model: nn.Module) -> list[Batch]:
    """Return for each batch the rows of its texts, with labels for the model's own loss.

    Leave out batches with fewer rows than the first one, such as the last batch of an epoch. Raise InseparableRows if a batch
    has no tokens, or if the model is not one of transformers, whose loss is known.
    """
    base = _transformers_model(model)
    return _alike([_stand_in(_texts_of(batch), _own_labels(batch), base) for batch in batches])


def stand_ins_of_calls(steps: Sequence[StepCalls], model: nn.Module) -> list[Batch]:
    """Return for each step the rows that its loss learned from, as ``make_stand_ins`` does for the entries of batches."""
    base = _transformers_model(model)
    return _alike([_stand_in([call.inputs for call in step.trained], None, base) for step in steps])


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        name = type(model).__name__
        raise InseparableRows(f"{name} is no transformers model, nor does it hold a single one, so its rows are not known")
    return base


def _alike(stand_ins: list[dict[str, Tensor]]) -> list[Batch]:
    """Return the stand-ins with as many rows and the same entries as the first one."""
    first = stand_ins[0]
    return [rows for rows in stand_ins if len(rows[TOKENS]) == len(first[TOKENS]) and rows.keys() == first.keys()]


def _stand_in(texts: Sequence[Texts], own_labels: Tensor | None, base: PreTrainedModel) -> dict[str, Tensor]:
    """Return one batch of rows with the texts of all groups, each widened to the widest."""
    width = max(group[TOKENS].shape[1] for group in texts)
    names = [TOKENS]
    if all(MASK in group for group in texts):
        names.append(MASK)
    elif all(POSITIONS in group for group in texts):  # texts lie end to end
        names.append(POSITIONS)
    rows = {name: torch.cat([_widened(group[name], width) for group in texts]) for name in names}
    rows["labels"] = _labels(rows, own_labels, base)
    limit = max_positions(base)
    if POSITIONS in rows and limit is not None and width > limit:
        return _cut_rows(rows, limit)
    return rows


def _cut_rows(rows: dict[str, Tensor], limit: int) -> dict[str, Tensor]:
    """Return rows of texts end to end as rows of at most ``limit`` tokens, with as many tokens in all.

    The positions begin again at each text, so a row of several texts may be longer than the model has positions. A trace of the
    model has one text in each row.
    """
    num_rows, width = rows[TOKENS].shape
    num_parts = math.ceil(width / limit)
    part = math.ceil(width / num_parts)
    cut = {}
    for name, value in rows.items():
        if value.shape != (num_rows, width):
            raise InseparableRows(f"rows of {width} tokens are longer than the model's {limit} positions")
        padding = IGNORED if name == "labels" else 0
        cut[name] = pad(value, (0, num_parts * part - width), value=padding).reshape(-1, part)
    return cut


def _texts_of(batch: Any) -> list[Texts]:
    """Return the texts of a batch: of the entry ``input_ids``, or of all entries whose names end in it."""
    if not isinstance(batch, Mapping):
        raise InseparableRows(f"a batch is a {type(batch).__name__}, and its tokens have no name")
    names = [TOKENS] if TOKENS in batch else [name for name in batch if str(name).endswith(f"_{TOKENS}")]
    tokens = {name: batch[name] for name in names}
    is_text = [isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() for value in tokens.values()]
    if not tokens or not all(is_text):
        raise InseparableRows(f"no entry {TOKENS!r} of a batch has rows of tokens")
    return [_with_entries_beside(batch, name) for name in names]


def _with_entries_beside(batch: Mapping[str, Any], name: str) -> Texts:
    """Return the tokens ``name``, with the mask and the positions of the same shape, if there are any."""
    texts = {TOKENS: batch[name]}
    for kind in (MASK, POSITIONS):
        value = batch.get(name.removesuffix(TOKENS) + kind)
        if isinstance(value, Tensor) and value.shape == batch[name].shape:
            texts[kind] = value
    return texts


def _own_labels(batch: Mapping[str, Any]) -> Tensor | None:
    labels = batch.get("labels")
    return labels if isinstance(labels, Tensor) and labels.ndim else None


def _labels(rows: Mapping[str, Tensor], own_labels: Tensor | None, base: PreTrainedModel) -> Tensor:
    """Return the batch's own labels if it has one for each row or token, else labels of the kind that the model's loss reads."""
    tokens = rows[TOKENS]
    if not has_own_loss(base):
        return torch.zeros(len(tokens))
    if own_labels is not None and len(own_labels) == len(tokens):
        return own_labels
    if base.get_output_embeddings() is not None:
        return tokens if MASK not in rows else tokens.masked_fill(rows[MASK] == 0, IGNORED)
    if getattr(base.config, "num_labels", 1) == 1:
        return torch.zeros(len(tokens))
    return torch.zeros(len(tokens), dtype=torch.long)


def _widened(tokens: Tensor, width: int) -> Tensor:
    return pad(tokens, (0, width - tokens.shape[1]))


@dataclass(frozen=True)
class WholeRows:
    """The rows that stand in for batches which stay whole, and how the loss computes those of one batch."""

    batches: list[Batch]
    num_at_once: int  # rows whose activations are in memory at the same time
    num_parts: int = 1  # parts of so many rows in one batch
    num_untrained: int = 0  # rows of one batch that are also computed without gradients
    frees_attention: bool = False  # each attention kernel computes the same of these rows

    @property
    def num_rows(self) -> int:
        return len(self.batches[0][TOKENS])


def find_rows(batches: Sequence[Batch], model: nn.Module, record: Callable[[Batch], StepCalls]) -> WholeRows:
    """Return the rows of the batches: those of their entries, if the loss learns from each of these texts once.

    ``record`` returns the calls of the transformers model for a batch. It is called if the entries do not tell enough: they
    hold no tokens, or several tokens, of which the loss may leave out some (a prompt beside two answers that begin with it), or
    ``model`` has other modules around that model. Raise InseparableRows if no rows can be counted.
    """
    part = planned_part(model)
    try:
        rows = make_stand_ins(batches, part)
    except InseparableRows:
        if not isinstance(base_of(part), PreTrainedModel):
            raise
        rows = None
    if rows is not None and part is model and TOKENS in batches[0]:
        return WholeRows(rows, len(rows[0][TOKENS]))
    _check_share(model, part)
    try:
        first = record(batches[0])
    except InseparableRows:
        if rows is None or part is not model:
            raise
        return WholeRows(rows, len(rows[0][TOKENS]))
    if rows is None or first.num_trained != len(rows[0][TOKENS]):
        rows = stand_ins_of_calls([first, *map(record, batches[1:MAX_RECORDED])], part)
    num_at_once = first.num_at_once
    return WholeRows(
        rows,
        num_at_once,
        num_parts=math.ceil(first.num_trained / num_at_once),
        num_untrained=first.num_untrained,
        frees_attention=part is not model and all(call.has_padding_alone for call in first.calls),
    )


def _check_share(model: nn.Module, part: nn.Module) -> None:
    """Raise InseparableRows if a plan would leave out too many of the trained weights."""
    inside, trained = (sum(weight.numel() for weight in each.parameters() if weight.requires_grad) for each in (part, model))
    if inside < LEAST_SHARE * trained:
        raise InseparableRows(
            f"{type(base_of(part)).__name__} has {inside / trained:.0%} of the trained weights of {type(model).__name__}, and a "
            "plan would be for these alone"
        )
