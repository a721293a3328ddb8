"""How a loss splits over the rows of a batch, measured on two rows of the user's own: never assumed from a name.

Trainer's loss may be the model's, a function of the user's, or an overridden ``compute_loss``; it may divide by
``num_items_in_batch``, by the labels of its batch, or by its rows; and a contrastive loss or batch normalization does not
split at all. Before a batch is cut another way than the user's, its loss must be seen to come out the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from upshift.training.batches.collated import CollatedRows
from upshift.training.batches.layout import RowGroup
from upshift.training.checkpoint.rng import undisturbed_rng

TOLERANCE = 1e-4  # relative; fp32 sums in another order differ by some 1e-6
PAIR_CANDIDATES = 64  # rows among which two short ones of different length are looked for

Inputs = dict[str, Tensor]
LossOf = Callable[[Inputs, int | None], float]  # inputs and num_items_in_batch, None: not given


@dataclass(frozen=True)
class Split:
    """``unit``: the loss of a batch is the sum of its parts' (divided by num_items_in_batch), or their mean weighted by labels or
    rows. None: it does not split, for ``reason``."""

    unit: Literal["items", "labels", "rows"] | None
    trims: bool = False  # padding may be cut off
    drops_mask: bool = False  # on right padding, no mask is needed
    flattens: bool = False  # several sequences may share a row
    reason: str = ""


def has_batch_statistics(model: nn.Module) -> str | None:
    """The first module that computes over the rows of a batch, by its name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            return name
    return None


def measure_split(rows: CollatedRows, loss_of: LossOf, *, model: nn.Module, counts_items: bool) -> Split:
    """``loss_of`` runs the model in evaluation mode. ``counts_items``: the loss is given num_items_in_batch."""
    statistics = has_batch_statistics(model)
    if statistics:
        return Split(None, reason=f"{statistics} computes over the rows of a batch")
    pair = _choose_pair(rows)
    if pair is None:
        return Split(None, reason="there are no two rows to compare")
    wide = max(rows.anatomies[rows.places[row][0]].width for row in pair)
    probe = _Probe(rows, loss_of, pair, wide)
    items = sum(rows.num_labels[row] for row in pair) if counts_items else None
    both = probe.together(items)
    if math.isnan(both):
        return Split(None, reason="the loss of the first rows is not a number")
    unit = probe.unit(both, items)
    if unit is None:
        return Split(None, reason="the loss of two rows is not made of the losses of each")
    trims = probe.agrees(both, probe.apart(unit, items, trim=True))
    drops = trims and rows.can_flatten and probe.agrees(both, probe.apart(unit, items, trim=True, drop_mask=True, extra=1))
    flattens = drops and probe.agrees(both, probe.flat(items))
    return Split(unit, trims, drops, flattens)


def _choose_pair(rows: CollatedRows) -> tuple[int, int] | None:
    """Two short rows, of different length and with labels where there are such."""
    candidates = [row for row in range(min(len(rows), PAIR_CANDIDATES)) if rows.num_labels[row]]
    candidates.sort(key=lambda row: rows.lengths[row])
    if len(candidates) < 2:
        return None
    first = candidates[0]
    longer = next((row for row in candidates if rows.lengths[row] > rows.lengths[first]), candidates[1])
    return first, longer


class _Probe:
    def __init__(self, rows: CollatedRows, loss_of: LossOf, pair: tuple[int, int], width: int) -> None:
        self.rows, self.loss_of, self.pair, self.width = rows, loss_of, pair, width

    def together(self, items: int | None) -> float:
        return self.loss_of(self._build(self.pair, self.width), items)

    def unit(self, both: float, items: int | None) -> Literal["items", "labels", "rows"] | None:
        """By what the loss of two rows is divided: the first rule that gives it from the losses of each."""
        if items is not None and self.agrees(both / 2, self.together(2 * items)):
            return "items" if self.agrees(both, self.apart("items", items)) else None
        for unit in ("labels", "rows"):
            if self.agrees(both, self.apart(unit, items)):
                return unit  # type: ignore[return-value]
        return None

    def apart(self, unit: str, items: int | None, *, trim: bool = False, drop_mask: bool = False, extra: int = 0) -> float:
        """The loss of the pair from the losses of each row alone. ``extra``: columns of padding that stay."""
        counts = [self.rows.num_labels[row] if unit == "labels" else 1 for row in self.pair]
        shares = [1.0 if unit == "items" else count / sum(counts) for count in counts]
        total = 0.0
        for row, share in zip(self.pair, shares, strict=True):
            width = min(max(self.rows.lengths[row], 2) + extra, self.width) if trim else self.width
            total += share * self.loss_of(self._build((row,), width, drop_mask=drop_mask), items)
        return total

    def flat(self, items: int | None) -> float:
        """Both in one row. A mean over its labels is the mean over both rows' labels."""
        width = sum(self.rows.lengths[row] for row in self.pair) + 1
        return self.loss_of(self.rows.build(RowGroup((self.pair,), width), pad_multiple=1), items)

    def agrees(self, loss: float, other: float) -> bool:
        return abs(loss - other) <= TOLERANCE * max(abs(loss), 1e-3)

    def _build(self, members: tuple[int, ...], width: int, *, drop_mask: bool = False) -> Inputs:
        group = RowGroup(tuple((row,) for row in members), width)
        return self.rows.build(group, pad_multiple=1, drop_mask=drop_mask)


def evaluating_loss(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor]) -> LossOf:
    """``compute`` in evaluation mode, without gradients, the random numbers left as they were."""

    def loss_of(inputs: Inputs, items: int | None) -> float:
        training = model.training
        model.train(False)
        try:
            with torch.no_grad(), undisturbed_rng():
                return float(compute(dict(inputs), items))
        finally:
            model.train(training)

    return loss_of
