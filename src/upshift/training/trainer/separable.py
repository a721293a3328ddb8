"""How a loss splits over the rows of a batch, measured on pairs of the user's own: never assumed from a name.

Trainer's loss may be the model's, a function of the user's, or an overridden ``compute_loss``; it may divide by
``num_items_in_batch``, by the labels of its batch, or by its rows; it may weigh classes; and a contrastive loss or batch
normalization does not split at all. Before a batch is cut another way than the user's, its loss must be seen to come out the
same, for rows that differ in what it may look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from upshift.models.profile import Isolation
from upshift.training.batches.collated import CollatedRows
from upshift.training.batches.layout import RowGroup
from upshift.training.checkpoint.rng import undisturbed_rng
from upshift.training.out_of_memory import is_out_of_memory

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TOLERANCE = 1e-4  # relative; fp32 sums in another order differ by some 1e-6
PAIR_CANDIDATES = 64  # rows among which two short ones of different length are looked for
MOST_CLASSES = 8  # pairs that are measured for the sake of their labels

Inputs = dict[str, Tensor]
LossOf = Callable[[Inputs, int | None], float]  # inputs and num_items_in_batch, None: not given
Pair = tuple[int, int]
Unit = Literal["items", "labels", "rows"]


@dataclass(frozen=True)
class Split:
    """``unit``: the loss of a batch is the sum of its parts' (divided by num_items_in_batch), or their mean weighted by labels or
    rows. None: it does not split, for ``reason``."""

    unit: Unit | None
    trims: bool = False  # padding may be cut off
    drops_mask: bool = False  # on right padding, no mask is needed
    flattens: bool = False  # several sequences may share a row
    even: bool = False  # it was seen for rows with as many labels each, and nothing is known of others
    reason: str = ""
    why_not_flat: str = "the loss of two rows end to end is not that of the two"
    isolation: Isolation | None = None  # None: nothing is known of the model's class


def has_batch_statistics(model: nn.Module) -> str | None:
    """The first module that computes over the rows of a batch, by its name."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            return name
    return None


def measure_split(
    rows: CollatedRows, loss_of: LossOf, *, model: nn.Module, counts_items: bool, num_first: int, is_known: bool
) -> Split:
    """``loss_of`` runs the model in evaluation mode. ``counts_items``: the loss is given num_items_in_batch. ``num_first``: rows
    of the first global batch. ``is_known``: it is a loss of transformers, a mean over labels that weighs them alike."""
    statistics = has_batch_statistics(model)
    if statistics:
        return Split(None, reason=f"{statistics} computes over the rows of a batch")
    pairs = _choose_pairs(rows, num_first, is_known=is_known)
    if not pairs:
        return Split(None, reason="there are no two rows to compare")
    if not is_known and _have_one_label(rows):
        return Split(None, reason="all rows have the same label: what the loss makes of another is not known")
    try:
        return _measure(_Probe(rows, loss_of, counts_items), pairs, is_known=is_known)
    except Exception as error:  # the user's loss runs with rows, and in a mode, that it may not be made for
        if is_out_of_memory(error):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        return Split(None, reason=f"the loss could not be measured on two rows: {words}")


def _have_one_label(rows: CollatedRows) -> bool:
    labels = set().union(*rows.label_values)
    return 0 < len(labels) == len({name for name, _ in labels})


def _measure(probe: _Probe, pairs: list[Pair], *, is_known: bool) -> Split:
    first, num_labels = pairs[0], probe.rows.num_labels
    both = probe.together(first)
    if math.isnan(both):
        return Split(None, reason="the loss of the first rows is not a number")
    units = probe.units(pairs)
    if not units:
        return Split(None, reason="the loss of two rows is not made of the losses of each")
    even = len(units) > 1 and len({*num_labels}) == 1
    if not is_known and (probe.are_alike(pairs) or len(units) > 1 and not even):
        return Split(None, reason="the losses of all rows are alike: how they are put together cannot be seen")
    unit = units[0]
    trims = probe.holds(both, lambda: probe.apart(first, unit, trim=True))
    drops = trims and probe.rows.can_flatten
    drops = drops and probe.holds(both, lambda: probe.apart(first, unit, trim=True, drop_mask=True, extra=1))
    flattens = drops and probe.holds(both, lambda: probe.flat(first))
    return Split(unit, trims, drops, flattens, even=even and not is_known)


def _choose_pairs(rows: CollatedRows, num_first: int, *, is_known: bool) -> list[Pair]:
    """Two short rows of the first global batch, of different length and with labels where there are such; and the first of them
    beside others of the sample: with another number of labels, without labels, and with other labels."""
    mixing = [row for row, (number, _) in enumerate(rows.places) if number == 0 or rows.can_mix]
    mixing.sort(key=lambda row: rows.lengths[row])
    labelled = [row for row in mixing if rows.num_labels[row]]
    near = [row for row in labelled if row < min(num_first, PAIR_CANDIDATES)]
    if len(near) < 2:
        return []
    first = near[0]
    longer = next((row for row in near if rows.lengths[row] > rows.lengths[first]), near[1])
    others = [longer]
    if rows.num_labels[longer] == rows.num_labels[first]:
        others += [row for row in labelled if rows.num_labels[row] != rows.num_labels[first]][:1]
    others += [row for row in mixing if not rows.num_labels[row]][:1]
    if not is_known:
        seen = set().union(*(rows.label_values[row] for row in (first, *others)))
        for row in labelled:
            if len(others) < MOST_CLASSES and not rows.label_values[row] <= seen:
                others.append(row)
                seen |= rows.label_values[row]
    return [(first, other) for other in others]


class _Probe:
    def __init__(self, rows: CollatedRows, loss_of: LossOf, counts_items: bool) -> None:
        self.rows, self.loss_of, self.counts_items = rows, loss_of, counts_items
        self._measured: dict[tuple[Any, ...], float] = {}

    def together(self, pair: Pair, *, times: int = 1) -> float:
        """``times``: of the number of labels, which is told instead."""
        items = self._items(pair)
        return self._loss(pair, self._width(pair), None if items is None else times * items)

    def units(self, pairs: list[Pair]) -> list[Unit]:
        """By what the loss of two rows is divided: the rules that give it from the losses of each."""
        by_items = self.counts_items and self.agrees(self.together(pairs[0]) / 2, self.together(pairs[0], times=2))
        units: list[Unit] = ["items"] if by_items else ["labels", "rows"]
        for pair in pairs:
            both = self.together(pair)
            units = [unit for unit in units if self.agrees(both, self.apart(pair, unit))]
        return units

    def are_alike(self, pairs: list[Pair]) -> bool:
        """Whether a mean of the losses would be the same with any weights."""
        labelled = [pair for pair in pairs if self.rows.num_labels[pair[1]]]
        return all(self.agrees(*(self._loss((row,), self._width(pair), self._items(pair)) for row in pair)) for pair in labelled)

    def apart(self, pair: Pair, unit: Unit, *, trim: bool = False, drop_mask: bool = False, extra: int = 0) -> float:
        """The loss of the pair from the losses of each row alone; a row without labels is left out, as it is in training.
        ``extra``: columns of padding that stay."""
        counts = [self.rows.num_labels[row] if unit == "labels" else 1 for row in pair]
        shares = [1.0 if unit == "items" else count / sum(counts) for count in counts]
        total, widest = 0.0, self._width(pair)
        for row, share in zip(pair, shares, strict=True):
            if self.rows.num_labels[row]:
                width = min(max(self.rows.lengths[row], 2) + extra, widest) if trim else widest
                total += share * self._loss((row,), width, self._items(pair), drop_mask)
        return total

    def flat(self, pair: Pair) -> float:
        """Both in one row. A mean over its labels is the mean over both rows' labels."""
        width = sum(self.rows.lengths[row] for row in pair) + 1
        return self.loss_of(self.rows.build(RowGroup((pair,), width), pad_multiple=1), self._items(pair))

    def agrees(self, loss: float, other: float) -> bool:
        return abs(loss - other) <= TOLERANCE * max(abs(loss), 1e-3)

    def holds(self, loss: float, other: Callable[[], float]) -> bool:
        """Whether another way to compute it works, and agrees."""
        try:
            return self.agrees(loss, other())
        except Exception as error:  # the user's loss may look at what is left out there
            if is_out_of_memory(error):
                raise
            return False

    def _items(self, pair: Pair) -> int | None:
        return sum(self.rows.num_labels[row] for row in pair) if self.counts_items else None

    def _width(self, pair: Pair) -> int:
        return max(self.rows.anatomies[self.rows.places[row][0]].width for row in pair)

    def _loss(self, members: tuple[int, ...], width: int, items: int | None, drop_mask: bool = False) -> float:
        key = members, width, items, drop_mask
        if key not in self._measured:
            group = RowGroup(tuple((row,) for row in members), width)
            self._measured[key] = self.loss_of(self.rows.build(group, pad_multiple=1, drop_mask=drop_mask), items)
        return self._measured[key]


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
