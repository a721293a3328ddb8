"""Measure on rows of the user's own how a loss splits over the rows of a batch. Never assume it from a name.

Trainer's loss may be the model's, a function of the user's, or an overridden ``compute_loss``. It may divide by
``num_items_in_batch``, by the labels of its batch, or by its rows. It may weigh classes. A contrastive loss or batch
normalization does not split at all. Before a batch is cut another way than the user's, its loss and its gradient must come out
the same, for rows that differ in what the loss may look at. More is measured if the loss is the script's own: a whole batch of
the script's size, every label, later steps, and training mode. Such a loss may keep no state and draw no random numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from upshift.models.profile import Isolation
from upshift.training.batches.layout import RowGroup
from upshift.training.batches.user_batches import RowBatch
from upshift.training.checkpoint.rng import HostRng, host_rng, undisturbed_rng
from upshift.training.data.corpus import IGNORED
from upshift.training.hf_trainer.loss_state import is_of_library
from upshift.training.out_of_memory import is_out_of_memory

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TOLERANCE = 1e-4  # relative; fp32 sums in another order differ by some 1e-6
OWN_TOLERANCE = 2e-5  # of a loss of the script's: nothing is known of it
PAIR_CANDIDATES = 64  # rows among which two short ones of different length are looked for
MOST_CLASSES = 8  # pairs that are measured for the sake of their labels
MOST_TOGETHER = 64  # rows of one batch that are measured at once
LABELS_SECONDS = 10.0  # of measuring every label
LARGER = 4.0  # times the weights
GRADIENT_ELEMENTS = 2**22  # of the parameters whose gradients are compared, the smallest first

Inputs = dict[str, Tensor]
Measured = float | Tensor
LossOf = Callable[[Inputs, int | None], Measured]  # inputs and num_items_in_batch, None: not given
Members = tuple[int, ...]
Unit = Literal["items", "labels", "rows"]
Ranges = Mapping[str, tuple[float, float]]
READ_AS_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask"}
)


class Unsplittable(Exception):
    """An error: the loss does not split, which is known only after measuring. The message gives the reason."""


@dataclass(frozen=True)
class LossProbes:
    """One loss, computed in several ways.

    Each function is called with the inputs and num_items_in_batch. It leaves the random number generators as they were.
    """

    loss: LossOf
    gradient: LossOf
    larger_gradient: LossOf | None = None  # of a model with larger weights: a coupling that is small now may grow
    elsewhere: Mapping[str, LossOf] = field(default_factory=dict)  # when and in which mode -> the loss there
    counts_items: bool = False  # the loss is given num_items_in_batch
    is_known: bool = True  # it is a loss of transformers, a mean over labels that weighs them alike


@dataclass(frozen=True)
class Split:
    """The way in which a loss splits over the rows of a batch.

    ``unit`` says how the loss of a batch follows from the losses of its parts: as their sum ("items", divided by
    num_items_in_batch), or as their mean weighted by labels or rows. None means that the loss does not split, for ``reason``.
    """

    unit: Unit | None
    trims: bool = False  # padding may be cut off
    drops_mask: bool = False  # on right padding, no mask is needed
    flattens: bool = False  # several sequences may share a row
    even: bool = False  # it was seen for rows with as many labels each, and nothing is known of others
    ranges: Ranges = field(default_factory=dict)  # the measured range of each entry: a batch with a value beyond it stays whole
    reason: str = ""
    why_not_flat: str = "the loss of two rows end to end is not that of the two"
    isolation: Isolation | None = None  # None: nothing is known of the model's class


def has_batch_statistics(model: nn.Module) -> str | None:
    """Return the name of the first module that computes over the rows of a batch, or None."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            return str(name)
    return None


def measure_split(rows: RowBatch, probes: LossProbes, *, model: nn.Module, num_first: int) -> Split:
    """Return how the loss splits. ``num_first`` is the number of rows of the first global batch."""
    statistics = has_batch_statistics(model)
    if statistics:
        return Split(None, reason=f"{statistics} computes over the rows of a batch")
    pairs = _choose_pairs(rows, num_first, is_known=probes.is_known)
    if not pairs:
        return Split(None, reason="there are no two rows to compare")
    if not probes.is_known and _have_one_label(rows):
        return Split(None, reason="all rows have the same label: what the loss makes of another is not known")
    try:
        return _measure(rows, probes, pairs)
    except Unsplittable as error:
        return Split(None, reason=str(error))
    except Exception as error:  # the user's loss runs with rows, and in a mode, that it may not be made for
        if is_out_of_memory(error):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        return Split(None, reason=f"the loss could not be measured on two rows: {words}")


def _have_one_label(rows: RowBatch) -> bool:
    labels = set().union(*rows.label_values)
    return 0 < len(labels) == len({name for name, _ in labels})


def _measure(rows: RowBatch, probes: LossProbes, pairs: list[Members]) -> Split:
    is_known = probes.is_known
    probe = _Probe(rows, probes.loss, probes.counts_items, TOLERANCE if is_known else OWN_TOLERANCE)
    first = pairs[0]
    both = probe.together(first)
    if not math.isfinite(float(both)):
        return Split(None, reason="the loss of the first rows is not a number")
    units = probe.units(pairs)
    if not units:
        return Split(None, reason="the loss of two rows is not made of the losses of each")
    even = len(units) > 1 and len({*rows.num_labels}) == 1
    if not is_known and (probe.are_alike(pairs) or len(units) > 1 and not even):
        return Split(None, reason="the losses of all rows are alike: how they are put together cannot be seen")
    unit = units[0]
    _check_gradient(rows, probes, first, unit)
    if not is_known:
        _check_own(rows, probes, probe, pairs, unit)
    trims = probe.holds(both, lambda: probe.apart(first, unit, trim=True))
    drops = trims and rows.can_flatten
    drops = drops and probe.holds(both, lambda: probe.apart(first, unit, trim=True, drop_mask=True, extra=1))
    flattens = drops and probe.holds(both, lambda: probe.flat(first))
    ranges = {} if is_known else entry_ranges(rows)
    return Split(unit, trims, drops, flattens, even=even and not is_known, ranges=ranges)


def _check_gradient(rows: RowBatch, probes: LossProbes, members: Members, unit: Unit) -> None:
    """Raise Unsplittable if the gradient does not split: a part of the loss that is detached, or small, shows in the gradient
    alone."""
    for gradient_of_rows in filter(None, (probes.gradient, probes.larger_gradient)):
        gradient = _Probe(rows, gradient_of_rows, probes.counts_items, TOLERANCE)
        together, apart = gradient.together(members), gradient.apart(members, unit)
        is_number = math.isfinite(_size(together)) or gradient_of_rows is probes.gradient
        if is_number and not gradient.agrees(together, apart):
            raise Unsplittable(f"the gradient of {len(members)} rows is not made of the gradients of each")


def _check_own(rows: RowBatch, probes: LossProbes, probe: _Probe, pairs: list[Members], unit: Unit) -> None:
    """Check everything that a loss of the script's own may look at. Raise Unsplittable."""
    whole = tuple(row for row, (number, _) in enumerate(rows.locations) if number == 0)[:MOST_TOGETHER]
    if not probe.agrees(probe.together(whole), probe.apart(whole, unit)):
        raise Unsplittable(f"the loss of {len(whole)} rows is not made of the losses of each")
    _check_gradient(rows, probes, whole, unit)
    for when, loss_of in probes.elsewhere.items():
        other = _Probe(rows, loss_of, probes.counts_items, OWN_TOLERANCE)
        for members in (pairs[0], whole):
            if not other.agrees(other.together(members), other.apart(members, unit)):
                raise Unsplittable(f"the loss of {len(members)} rows is not made of the losses of each {when}")
    _check_labels(rows, probe, pairs[0], unit)


def _check_labels(rows: RowBatch, probe: _Probe, pair: Members, unit: Unit) -> None:
    """Check every label between the lowest and the highest, put into rows in place of their own. Raise Unsplittable."""
    labels = rows.batches[0].get("labels")
    if labels is None or labels.is_floating_point():
        return
    low, high = (int(bound) for bound in entry_ranges(rows)["labels"])
    carrier = max(range(len(rows)), key=lambda row: rows.num_labels[row] if _may_pair(rows, pair[0], row) else -1)
    if carrier == pair[0]:
        carrier = pair[1]
    room = rows.num_labels[carrier]
    start = time.monotonic()
    for begin in range(low, high + 1, room):
        values = tuple(range(begin, min(begin + room, high + 1)))
        members = (pair[0], carrier)
        both = probe.together(members, labels=values)
        if not probe.agrees(both, probe.apart(members, unit, labels=values)):
            what = f"label {values[0]}" if len(values) == 1 else f"labels {values[0]} to {values[-1]}"
            raise Unsplittable(f"the loss of two rows is not made of the losses of each: it weighs {what} otherwise")
        if time.monotonic() - start > LABELS_SECONDS:
            raise Unsplittable(
                f"measuring what the loss makes of {high - low + 1} labels takes longer than {LABELS_SECONDS:.0f} s"
            )


def _may_pair(rows: RowBatch, row: int, other: int) -> bool:
    return rows.can_mix or rows.locations[row][0] == rows.locations[other][0]


def _choose_pairs(rows: RowBatch, num_first: int, *, is_known: bool) -> list[Members]:
    """Return pairs of rows to compare.

    The first pair is two short rows of the first global batch, of different length and with labels if there are such. The
    other pairs have its first row beside others of the sample: with another number of labels, without labels, with other
    labels, and with the lowest and highest of every other entry.
    """
    mixing = [row for row, (number, _) in enumerate(rows.locations) if number == 0 or rows.can_mix]
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
        for values in entry_values(rows).values():
            others += [min(labelled, key=values.__getitem__), max(labelled, key=values.__getitem__)]
    return [(first, other) for other in dict.fromkeys(others) if other != first]


def entry_values(rows: RowBatch) -> dict[str, list[float]]:
    """Return one number a row for each entry that may weigh it: the number itself, or the sum of a row of several.

    Entries that a model reads as text are left out, as are labels with a class for each token or row.
    """
    found: dict[str, list[float]] = {}
    for name, value in rows.batches[0].items():
        is_class = name == "labels" and not value.is_floating_point()
        if is_class or name in READ_AS_TEXT or value.ndim > 2 or value.is_complex():
            continue
        found[name] = [float(row.sum()) for batch in rows.batches for row in batch[name]]
    return found


def entry_ranges(rows: RowBatch) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest of ``entry_values``, and of labels that count."""
    found = {name: (min(values), max(values)) for name, values in entry_values(rows).items()}
    labels = [batch["labels"] for batch in rows.batches if "labels" in batch]
    if labels and not labels[0].is_floating_point():
        counted = torch.cat([value[value != IGNORED].flatten() for value in labels])
        if len(counted):
            found["labels"] = float(counted.min()), float(counted.max())
    return found


def is_within(rows: RowBatch, ranges: Ranges) -> bool:
    """Return whether all entries of a batch lie within the measured ranges."""
    if not ranges:
        return True
    here = entry_ranges(rows)
    return all(name in ranges and ranges[name][0] <= low and high <= ranges[name][1] for name, (low, high) in here.items())


class _Probe:
    def __init__(self, rows: RowBatch, loss_of: LossOf, counts_items: bool, tolerance: float) -> None:
        self.rows, self.loss_of, self.counts_items, self.tolerance = rows, loss_of, counts_items, tolerance
        self._measured: dict[tuple[Any, ...], Measured] = {}

    def together(self, members: Members, *, times: int = 1, labels: Members = ()) -> Measured:
        """Return the loss of rows in one batch.

        ``times`` multiplies the number of labels that the loss is told. ``labels`` replace the labels of the last row.
        """
        items = self._items(members)
        return self._loss(members, self._width(members), None if items is None else times * items, labels=labels)

    def units(self, pairs: list[Members]) -> list[Unit]:
        """Return the rules that give the loss of two rows from the losses of each, by what the loss is divided."""
        by_items = self.counts_items and self.agrees(self.together(pairs[0]) / 2, self.together(pairs[0], times=2))
        units: list[Unit] = ["items"] if by_items else ["labels", "rows"]
        for pair in pairs:
            both = self.together(pair)
            units = [unit for unit in units if self.agrees(both, self.apart(pair, unit))]
        return units

    def are_alike(self, pairs: list[Members]) -> bool:
        """Return whether a mean of the losses would be the same with any weights."""
        labelled = [pair for pair in pairs if self.rows.num_labels[pair[1]]]
        return all(self.agrees(*(self._loss((row,), self._width(pair), self._items(pair)) for row in pair)) for pair in labelled)

    def apart(
        self, members: Members, unit: Unit, *, trim: bool = False, drop_mask: bool = False, extra: int = 0, labels: Members = ()
    ) -> Measured:
        """Return the loss of the rows from the losses of each alone. A row without labels is left out, as it is in training.

        ``extra`` is the number of columns of padding that stay.
        """
        counts = [self.rows.num_labels[row] if unit == "labels" else 1 for row in members]
        shares = [1.0 if unit == "items" else count / sum(counts) for count in counts]
        total: Measured = 0.0
        widest = self._width(members)
        for row, share in zip(members, shares, strict=True):
            if self.rows.num_labels[row]:
                width = min(max(self.rows.lengths[row], 2) + extra, widest) if trim else widest
                own_labels = labels if row == members[-1] else ()
                total = total + share * self._loss((row,), width, self._items(members), drop_mask, own_labels)
        return total

    def flat(self, pair: Members) -> Measured:
        """Return the loss of both rows end to end in one row. A mean over its labels is the mean over both rows' labels."""
        width = sum(self.rows.lengths[row] for row in pair) + 1
        return self.loss_of(self.rows.build(RowGroup((pair,), width), pad_multiple=1), self._items(pair))

    def agrees(self, loss: Measured, other: Measured) -> bool:
        difference, size = _size(loss - other), _size(loss)
        return difference <= self.tolerance * max(size, 1e-3)

    def holds(self, loss: Measured, other: Callable[[], Measured]) -> bool:
        """Return whether another way to compute the loss works, and agrees."""
        try:
            return self.agrees(loss, other())
        except Exception as error:  # the user's loss may look at what is left out there
            if is_out_of_memory(error):
                raise
            return False

    def _items(self, members: Members) -> int | None:
        return sum(self.rows.num_labels[row] for row in members) if self.counts_items else None

    def _width(self, members: Members) -> int:
        return max(self.rows.schemas[self.rows.locations[row][0]].width for row in members)

    def _loss(self, members: Members, width: int, items: int | None, drop_mask: bool = False, labels: Members = ()) -> Measured:
        key = members, width, items, drop_mask, labels
        if key not in self._measured:
            group = RowGroup(tuple((row,) for row in members), width)
            inputs = self.rows.build(group, pad_multiple=1, drop_mask=drop_mask)
            if labels:
                inputs["labels"] = _relabelled(inputs["labels"], labels, shifts=self.rows.shifts_labels)
            self._measured[key] = self.loss_of(inputs, items)
        return self._measured[key]


def _size(value: Measured) -> float:
    return float(value.norm()) if isinstance(value, Tensor) else abs(value)


def _relabelled(labels: Tensor, values: Sequence[int], *, shifts: bool) -> Tensor:
    """Return the labels with those of the last row that count replaced by ``values``."""
    labels = labels.clone()
    row = labels[-1:].view(-1)
    counted = row != IGNORED
    if shifts and labels.ndim > 1:
        counted[0] = False
    places = counted.nonzero().flatten()
    chosen = torch.tensor([values[number % len(values)] for number in range(len(places))], dtype=labels.dtype)
    row[places] = chosen.to(labels.device)
    return labels


def evaluating_loss(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor]) -> LossOf:
    """Return ``compute`` in evaluation mode, without gradients. It leaves the random numbers as they were."""

    def loss_of(inputs: Inputs, items: int | None) -> float:
        with _mode(model, training=()), torch.no_grad(), undisturbed_rng():
            return float(compute(dict(inputs), items))

    return loss_of


def training_loss(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor]) -> LossOf:
    """Return ``compute`` with the script's own modules in training mode.

    Modules of libraries, which drop out, are in evaluation mode. The returned function raises Unsplittable if the loss draws
    random numbers: parts of a batch draw others than the whole.
    """
    own = [module for module in model.modules() if module is model or not is_of_library(type(module))]

    def loss_of(inputs: Inputs, items: int | None) -> float:
        with _mode(model, training=own), torch.no_grad(), undisturbed_rng():
            before = host_rng()
            loss = float(compute(dict(inputs), items))
            if not _same_rng(before, host_rng()):
                raise Unsplittable("the loss draws random numbers")
        return loss

    return loss_of


def _small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the smallest trained parameters of all layers, up to GRADIENT_ELEMENTS elements."""
    chosen: list[nn.Parameter] = []
    for parameter in sorted((one for one in model.parameters() if one.requires_grad), key=lambda one: one.numel()):
        if not chosen or sum(one.numel() for one in chosen) + parameter.numel() <= GRADIENT_ELEMENTS:
            chosen.append(parameter)
    return chosen


@contextmanager
def _scaled(parameters: Sequence[nn.Parameter], factor: float) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in parameters] if factor != 1.0 else []
    try:
        with torch.no_grad():
            for parameter, _ in zip(parameters, before, strict=False):
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=False):
                parameter.copy_(value)


def gradient_of(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor], *, scale: float = 1.0) -> LossOf:
    """Return a function for the gradient of small parameters of all layers, in evaluation mode, as one vector on the host.

    ``scale`` multiplies these parameters while the gradient is computed.
    """
    parameters = _small_parameters(model)

    def gradient(inputs: Inputs, items: int | None) -> Tensor:
        with _mode(model, training=()), torch.enable_grad(), undisturbed_rng(), _scaled(parameters, scale):
            loss = compute(dict(inputs), items)
            parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(parts, parameters, strict=True)
        filled = [torch.zeros_like(one) if part is None else part for part, one in pairs]
        return torch.cat([part.detach().to("cpu", torch.float64).flatten() for part in filled])

    return gradient


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32 while losses are compared, whatever TrainingArguments(tf32=...) has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _mode(model: nn.Module, *, training: Sequence[nn.Module]) -> Iterator[None]:
    """Set evaluation mode for all modules but ``training``. Restore each module's own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(False)
    for module in training:
        module.training = True
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _same_rng(one: HostRng, other: HostRng) -> bool:
    same_numpy = all(np.array_equal(a, b) for a, b in zip(one.numpy, other.numpy, strict=True))
    return torch.equal(one.cpu, other.cpu) and one.python == other.python and same_numpy
