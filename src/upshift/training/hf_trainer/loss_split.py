"""Measure on rows of the user's data how a loss splits over the rows of a batch. Names of losses are not trusted.

The Trainer's loss may be the model's, a function of the user, or an overridden ``compute_loss``. It may divide by
``num_items_in_batch``, by the labels of its batch, or by its rows. It may have class weights. A contrastive loss or batch
normalization does not split at all. Before a batch is cut in another way than the user's, the loss and the gradient must come
out the same, for rows that differ in everything that the loss may read. More is measured if the loss is the script's own: a
whole batch of the script's size, every label, later steps, and training mode. Such a loss may keep no state and draw no random
numbers.
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
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.models.describe import max_positions
from upshift.models.profile import Isolation
from upshift.training.batches.layout import RowGroup
from upshift.training.batches.model_calls import StepCalls, record_calls
from upshift.training.batches.user_batches import InseparableRows, RowBatch, RowStructure
from upshift.training.checkpoint.rng import HostRng, host_rng, preserved_rng
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.hf_trainer.loss_state import is_library_class
from upshift.training.out_of_memory import is_out_of_memory

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TOLERANCE = 1e-4  # relative; fp32 sums in another order differ by some 1e-6
SCRIPT_TOLERANCE = 2e-5  # relative, for a loss of the script, of which nothing is known
PAIR_CANDIDATES = 64  # rows among which two short ones of different length are chosen
MAX_LABEL_PAIRS = 8  # pairs of rows that are measured because of their labels
MAX_ROWS_AT_ONCE = 64  # rows of one batch that are measured at once
MAX_LABEL_SECONDS = 10.0  # time limit for measuring every label
LARGER_SCALE = 4.0  # factor on the weights
GRADIENT_ELEMENTS = 2**22  # limit for the parameters whose gradients are compared

RAN_OUT = "measuring the loss ran out of memory"  # a reason not to split

Inputs = dict[str, Tensor]
Measured = float | Tensor
LossOf = Callable[[Inputs, int | None], Measured]  # from the inputs and num_items_in_batch (None: not given)
Members = tuple[int, ...]
Unit = Literal["items", "labels", "rows"]
Ranges = Mapping[str, tuple[float, float]]
TEXT_INPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask"}
)


class Unsplittable(Exception):
    """An error: a measurement shows that the loss does not split. The message gives the reason."""


@dataclass(frozen=True)
class LossProbes:
    """Functions that compute one loss in several ways.

    Each function takes the inputs and num_items_in_batch, and leaves the random number generators unchanged.
    """

    loss: LossOf
    gradient: LossOf
    larger_gradient: LossOf | None = None  # with larger weights: a coupling of rows that is small now may grow
    # The loss at other steps and in training mode, by the words that name these in a message.
    other_states: Mapping[str, LossOf] = field(default_factory=dict)
    counts_items: bool = False  # the loss takes num_items_in_batch
    is_library_loss: bool = True  # a mean over labels of equal weight


@dataclass(frozen=True)
class Split:
    """The way in which a loss splits over the rows of a batch.

    ``unit`` says how the losses of micro-batches combine to the loss of the batch: by their sum ("items": each is divided by
    num_items_in_batch), or by their mean weighted by labels or rows. None means that the loss does not split; ``reason`` says
    why.
    """

    unit: Unit | None
    trims: bool = False  # padding may be cut off
    drops_mask: bool = False  # on right padding, no mask is needed
    flattens: bool = False  # several sequences may share a row
    needs_equal_labels: bool = False  # measured only for rows with the same number of labels
    ranges: Ranges = field(default_factory=dict)  # measured range of each entry; a batch with a value outside stays whole
    reason: str = ""
    why_not_flat: str = "the loss of two rows end to end is not that of the two"
    isolation: Isolation | None = None  # None: unknown for this class of model
    structure: RowStructure | None = None  # of the sampled batches; None: they are not made of rows, or stay whole


def has_batch_statistics(model: nn.Module) -> str | None:
    """Return the name of the first module with statistics over the rows of a batch, or None."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            return str(name)
    return None


def has_noise(model: nn.Module) -> bool:
    """Return whether transformers adds noise to the embeddings (NEFTune). Its scale depends on the width of a batch."""
    return any(getattr(module, "neftune_noise_alpha", None) is not None for module in model.modules())


def measure_split(rows: RowBatch, probes: LossProbes, *, model: nn.Module, num_first: int) -> Split:
    """Return how the loss splits over rows. ``num_first`` is the number of rows of the first global batch."""
    statistics = has_batch_statistics(model)
    if statistics:
        return Split(None, reason=f"{statistics} computes over the rows of a batch")
    if has_noise(model):
        return Split(None, reason="the noise of neftune_noise_alpha depends on the width of a batch")
    pairs = _choose_pairs(rows, num_first, is_library_loss=probes.is_library_loss)
    if not pairs:
        return Split(None, reason="there are no two rows to compare")
    if not probes.is_library_loss and _have_same_label(rows):
        return Split(None, reason="all rows have the same label: what the loss makes of another is not known")
    try:
        return _measure(rows, probes, pairs)
    except Unsplittable as error:
        reason = str(error)
    except Exception as error:  # the script's loss may not work for these rows, or in this mode
        if is_out_of_memory(error):
            reason = RAN_OUT
        else:
            if probes.is_library_loss:
                raise_for_inputs(error)
            message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            reason = f"the loss could not be measured on two rows: {message}"
    if reason == RAN_OUT:  # not in the except block: there the error still holds the tensors of the failed measurement
        free_cached_memory()
    return Split(None, reason=reason)


def free_cached_memory() -> None:
    """Return memory that torch keeps for later tensors to the GPU, so that the training has what it had before."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def raise_for_inputs(error: Exception) -> None:
    """Raise RequestError if ``error`` comes from a transformers model that got a mask or token ids that it cannot use.

    The traceback shows what the model got. A script's loss may call it with other inputs than those of the batch. Raise
    ``error`` again if memory ran out."""
    if is_out_of_memory(error):
        raise error
    traceback = error.__traceback__
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        model = values.get("self")
        if isinstance(model, PreTrainedModel):
            arguments = values.get("kwargs")
            if isinstance(arguments, dict):
                values = values | arguments
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            _check_masks(tensors, model, error)
            _check_ids(tensors, model, error)
        traceback = traceback.tb_next


def _check_masks(tensors: Mapping[str, Tensor], model: PreTrainedModel, error: Exception) -> None:
    """Raise RequestError for a mask of more than two dimensions."""
    for name, value in tensors.items():
        if name.endswith("attention_mask") and value.ndim > 2:
            message = " ".join(str(error).split())[:160]
            raise RequestError(
                f"{type(model).__name__} does not compute with {name} of shape {list(value.shape)} ({message}); give "
                "a mask of shape [rows, tokens], or a model that takes a mask for every query and key"
            ) from error


def _check_ids(tensors: Mapping[str, Tensor], model: PreTrainedModel, error: Exception) -> None:
    """Raise RequestError for token ids without an embedding, and for more tokens than positions.

    A GPU stops at such ids, and cannot be asked for them."""
    if not isinstance(error, IndexError):
        return
    embeddings = model.get_input_embeddings()
    ids = tensors.get("input_ids")
    if ids is None or not ids.numel() or not isinstance(embeddings, nn.Embedding):
        return
    for token_id in (int(ids.min()), int(ids.max())):
        if not 0 <= token_id < embeddings.num_embeddings:
            raise RequestError(
                f"input_ids hold {token_id}, and {type(model).__name__} has embeddings for 0 to {embeddings.num_embeddings - 1}; "
                "tokenize with the model's own tokenizer, or call model.resize_token_embeddings"
            ) from error
    num_positions = max_positions(model)
    if num_positions is not None and ids.shape[-1] > num_positions:
        raise RequestError(
            f"a row has {ids.shape[-1]} tokens, and {type(model).__name__} has positions for {num_positions}; cut the rows, for "
            f"example by the tokenizer with truncation=True and max_length={num_positions}"
        ) from error


def _have_same_label(rows: RowBatch) -> bool:
    """Return whether the rows have labels, and all labels that count are the same."""
    labels = set().union(*rows.label_values)
    return 0 < len(labels) == len({name for name, _ in labels})


def _measure(rows: RowBatch, probes: LossProbes, pairs: list[Members]) -> Split:
    is_library_loss = probes.is_library_loss
    probe = _Probe(rows, probes.loss, probes.counts_items, TOLERANCE if is_library_loss else SCRIPT_TOLERANCE)
    first_pair = pairs[0]
    pair_loss = probe.loss_of_batch(first_pair)
    if not math.isfinite(float(pair_loss)):
        return Split(None, reason="the loss of the first rows is not a number")
    matching_units = probe.matching_units(pairs)
    if not matching_units:
        return Split(None, reason="the loss of two rows is not made of the losses of each")
    has_equal_labels = len(matching_units) > 1 and len({*rows.num_labels}) == 1
    if not is_library_loss and (probe.are_alike(pairs) or len(matching_units) > 1 and not has_equal_labels):
        return Split(None, reason="the losses of all rows are alike: how they are put together cannot be seen")
    unit = matching_units[0]
    _check_gradient(rows, probes, first_pair, unit)
    if not is_library_loss:
        _check_script_loss(rows, probes, probe, pairs, unit)
    trims = probe.works_and_agrees(pair_loss, lambda: probe.combined_loss(first_pair, unit, trim=True))
    drops_mask = (
        trims
        and rows.can_flatten
        and probe.works_and_agrees(pair_loss, lambda: probe.combined_loss(first_pair, unit, trim=True, drop_mask=True, extra=1))
    )
    flattens = drops_mask and probe.works_and_agrees(pair_loss, lambda: probe.flattened_loss(first_pair))
    ranges = {} if is_library_loss else entry_ranges(rows)
    return Split(
        unit,
        trims,
        drops_mask,
        flattens,
        needs_equal_labels=has_equal_labels and not is_library_loss,
        ranges=ranges,
        structure=rows.structure,
    )


def _check_gradient(rows: RowBatch, probes: LossProbes, members: Members, unit: Unit) -> None:
    """Raise Unsplittable if the gradient does not split.

    A part of the loss that is detached, or small, may show only in the gradient.
    """
    for gradient_of_rows in filter(None, (probes.gradient, probes.larger_gradient)):
        probe = _Probe(rows, gradient_of_rows, probes.counts_items, TOLERANCE)
        batch_gradient = probe.loss_of_batch(members)
        combined_gradient = probe.combined_loss(members, unit)
        is_number = math.isfinite(_magnitude(batch_gradient)) or gradient_of_rows is probes.gradient
        if is_number and not probe.agrees(batch_gradient, combined_gradient):
            raise Unsplittable(f"the gradient of {len(members)} rows is not made of the gradients of each")


def _check_script_loss(rows: RowBatch, probes: LossProbes, probe: _Probe, pairs: list[Members], unit: Unit) -> None:
    """Check everything that a loss of the script may depend on. Raise Unsplittable."""
    batch_rows = tuple(row for row, (number, _) in enumerate(rows.locations) if number == 0)[:MAX_ROWS_AT_ONCE]
    if not probe.agrees(probe.loss_of_batch(batch_rows), probe.combined_loss(batch_rows, unit)):
        raise Unsplittable(f"the loss of {len(batch_rows)} rows is not made of the losses of each")
    _check_gradient(rows, probes, batch_rows, unit)
    for state, loss_of in probes.other_states.items():
        state_probe = _Probe(rows, loss_of, probes.counts_items, SCRIPT_TOLERANCE)
        for members in (pairs[0], batch_rows):
            if not state_probe.agrees(state_probe.loss_of_batch(members), state_probe.combined_loss(members, unit)):
                raise Unsplittable(f"the loss of {len(members)} rows is not made of the losses of each {state}")
    _check_labels(rows, probe, pairs[0], unit)


def _check_labels(rows: RowBatch, probe: _Probe, pair: Members, unit: Unit) -> None:
    """Raise Unsplittable if the loss of a pair does not split for some label between the lowest and the highest.

    The labels of a row are replaced by all of these, as many at a time as it has labels.
    """
    labels = rows.batches[0].get("labels")
    if labels is None or labels.is_floating_point():
        return
    low, high = (int(bound) for bound in entry_ranges(rows)["labels"])
    target_row = max(range(len(rows)), key=lambda row: rows.num_labels[row] if _can_share_batch(rows, pair[0], row) else -1)
    if target_row == pair[0]:
        target_row = pair[1]
    num_labels = rows.num_labels[target_row]
    start = time.monotonic()
    for first in range(low, high + 1, num_labels):
        values = tuple(range(first, min(first + num_labels, high + 1)))
        members = (pair[0], target_row)
        pair_loss = probe.loss_of_batch(members, labels=values)
        if not probe.agrees(pair_loss, probe.combined_loss(members, unit, labels=values)):
            description = f"label {values[0]}" if len(values) == 1 else f"labels {values[0]} to {values[-1]}"
            raise Unsplittable(f"the loss of two rows is not made of the losses of each: it weighs {description} otherwise")
        if time.monotonic() - start > MAX_LABEL_SECONDS:
            raise Unsplittable(
                f"measuring what the loss makes of {high - low + 1} labels takes longer than {MAX_LABEL_SECONDS:.0f} s"
            )


def _can_share_batch(rows: RowBatch, row: int, other_row: int) -> bool:
    return rows.can_mix or rows.locations[row][0] == rows.locations[other_row][0]


def _choose_pairs(rows: RowBatch, num_first: int, *, is_library_loss: bool) -> list[Members]:
    """Return pairs of rows to compare.

    The first pair is two short rows of the first global batch, with labels and, if possible, of different length. The other
    pairs combine its first row with rows that have another number of labels, no labels, other labels, and the lowest and
    highest value of every other entry.
    """
    candidates = [row for row, (number, _) in enumerate(rows.locations) if number == 0 or rows.can_mix]
    candidates.sort(key=lambda row: rows.lengths[row])
    labelled = [row for row in candidates if rows.num_labels[row]]
    early = [row for row in labelled if row < min(num_first, PAIR_CANDIDATES)]
    if len(early) < 2:
        return []
    first = early[0]
    longer = next((row for row in early if rows.lengths[row] > rows.lengths[first]), early[1])
    partners = [longer]
    if rows.num_labels[longer] == rows.num_labels[first]:
        partners += [row for row in labelled if rows.num_labels[row] != rows.num_labels[first]][:1]
    partners += [row for row in candidates if not rows.num_labels[row]][:1]
    if not is_library_loss:
        seen_labels = set().union(*(rows.label_values[row] for row in (first, *partners)))
        for row in labelled:
            if len(partners) < MAX_LABEL_PAIRS and not rows.label_values[row] <= seen_labels:
                partners.append(row)
                seen_labels |= rows.label_values[row]
        for values in entry_values(rows).values():
            partners += [min(labelled, key=values.__getitem__), max(labelled, key=values.__getitem__)]
    return [(first, partner) for partner in dict.fromkeys(partners) if partner != first]


def entry_values(rows: RowBatch) -> dict[str, list[float]]:
    """Return, for each entry that may weight a row, one number for each row: the value itself, or the sum of the row.

    Leave out entries that a model reads as text, and labels that are classes.
    """
    values_by_name: dict[str, list[float]] = {}
    for name, value in rows.batches[0].items():
        is_class = name == "labels" and not value.is_floating_point()
        if is_class or name in TEXT_INPUTS or value.ndim > 2 or value.is_complex():
            continue
        values_by_name[name] = [float(row.sum()) for batch in rows.batches for row in batch[name]]
    return values_by_name


def entry_ranges(rows: RowBatch) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest value of each of ``entry_values``, and of the labels that count."""
    ranges = {name: (min(values), max(values)) for name, values in entry_values(rows).items()}
    labels = [batch["labels"] for batch in rows.batches if "labels" in batch]
    if labels and not labels[0].is_floating_point():
        counted_labels = torch.cat([value[value != IGNORED].flatten() for value in labels])
        if len(counted_labels):
            ranges["labels"] = float(counted_labels.min()), float(counted_labels.max())
    return ranges


def is_within(rows: RowBatch, ranges: Ranges) -> bool:
    """Return whether all entries of a batch lie within the measured ranges."""
    if not ranges:
        return True
    batch_ranges = entry_ranges(rows)
    return all(
        name in ranges and ranges[name][0] <= low and high <= ranges[name][1] for name, (low, high) in batch_ranges.items()
    )


class _Probe:
    """One way to compute the loss of some rows, with the results that were computed before."""

    def __init__(self, rows: RowBatch, loss_of: LossOf, counts_items: bool, tolerance: float) -> None:
        self.rows = rows
        self.loss_of = loss_of
        self.counts_items = counts_items
        self.tolerance = tolerance
        self._measured: dict[tuple[Any, ...], Measured] = {}

    def loss_of_batch(self, members: Members, *, times: int = 1, labels: Members = ()) -> Measured:
        """Return the loss of rows in one batch.

        ``times`` multiplies the number of labels that is passed to the loss. ``labels`` replace the labels of the last row.
        """
        items = self._items(members)
        return self._loss(members, self._width(members), None if items is None else times * items, labels=labels)

    def matching_units(self, pairs: list[Members]) -> list[Unit]:
        """Return the units by which the losses of single rows combine to the loss of each pair."""
        by_items = self.counts_items and self.agrees(self.loss_of_batch(pairs[0]) / 2, self.loss_of_batch(pairs[0], times=2))
        matching_units: list[Unit] = ["items"] if by_items else ["labels", "rows"]
        for pair in pairs:
            pair_loss = self.loss_of_batch(pair)
            matching_units = [unit for unit in matching_units if self.agrees(pair_loss, self.combined_loss(pair, unit))]
        return matching_units

    def are_alike(self, pairs: list[Members]) -> bool:
        """Return whether the rows of each pair have the same loss, so that any weights would give the same mean."""
        labelled = [pair for pair in pairs if self.rows.num_labels[pair[1]]]
        return all(self.agrees(*(self._loss((row,), self._width(pair), self._items(pair)) for row in pair)) for pair in labelled)

    def combined_loss(
        self, members: Members, unit: Unit, *, trim: bool = False, drop_mask: bool = False, extra: int = 0, labels: Members = ()
    ) -> Measured:
        """Return the loss of rows from the loss of each row alone. A row without labels is left out, as in training.

        ``extra`` is the number of padding columns that stay.
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

    def flattened_loss(self, pair: Members) -> Measured:
        """Return the loss of both rows end to end in one row.

        A mean over its labels is the mean over the labels of both rows.
        """
        width = sum(self.rows.lengths[row] for row in pair) + 1
        return self.loss_of(self.rows.build(RowGroup((pair,), width), pad_multiple=1), self._items(pair))

    def agrees(self, loss: Measured, other_loss: Measured) -> bool:
        difference = _magnitude(loss - other_loss)
        size = _magnitude(loss)
        return difference <= self.tolerance * max(size, 1e-3)

    def works_and_agrees(self, loss: Measured, compute: Callable[[], Measured]) -> bool:
        """Return whether another way to compute the loss works, and returns the same loss."""
        try:
            return self.agrees(loss, compute())
        except Exception as error:  # the script's loss may need what is left out here
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
                inputs["labels"] = _replace_labels(inputs["labels"], labels, shifts=self.rows.shifts_labels)
            self._measured[key] = self.loss_of(inputs, items)
        return self._measured[key]


def _magnitude(value: Measured) -> float:
    return float(value.norm()) if isinstance(value, Tensor) else abs(value)


def _replace_labels(labels: Tensor, values: Sequence[int], *, shifts: bool) -> Tensor:
    """Return the labels with the ones that count in the last row replaced by ``values``, over and over."""
    labels = labels.clone()
    row = labels[-1:].view(-1)
    counted = row != IGNORED
    if shifts and labels.ndim > 1:
        counted[0] = False
    positions = counted.nonzero().flatten()
    new_labels = torch.tensor([values[number % len(values)] for number in range(len(positions))], dtype=labels.dtype)
    row[positions] = new_labels.to(labels.device)
    return labels


def loss_in_evaluation(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor]) -> LossOf:
    """Return ``compute`` in evaluation mode, without gradients and without a change of the random numbers."""

    def loss_of(inputs: Inputs, items: int | None) -> float:
        with _evaluation_mode(model, training=()), torch.no_grad(), preserved_rng():
            return float(compute(dict(inputs), items))

    return loss_of


def calls_in_training(model: nn.Module, part: PreTrainedModel, compute: Callable[[], Tensor]) -> StepCalls:
    """Return the calls of ``part`` in the loss and its backward pass, in training mode. Raise InseparableRows if these fail.

    In evaluation mode some modules compute in place, and have no backward pass.
    """
    try:
        with _evaluation_mode(model, training=[*model.modules()]), torch.enable_grad(), preserved_rng():
            return record_calls(part, compute)
    except Exception as error:  # the script's loss may fail in any way
        reason = RAN_OUT if is_out_of_memory(error) else " ".join(f"{type(error).__name__}: {error}".split())[:160]
    free_cached_memory()
    raise InseparableRows(f"the calls of {type(part).__name__} could not be counted: {reason}")


def loss_in_training(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor]) -> LossOf:
    """Return ``compute`` with the script's own modules in training mode.

    Modules of libraries stay in evaluation mode, because they apply dropout. The returned function raises Unsplittable if the
    loss draws random numbers, because micro-batches would draw other numbers than the batch.
    """
    script_modules = [module for module in model.modules() if module is model or not is_library_class(type(module))]

    def loss_of(inputs: Inputs, items: int | None) -> float:
        with _evaluation_mode(model, training=script_modules), torch.no_grad(), preserved_rng():
            rng = host_rng()
            loss = float(compute(dict(inputs), items))
            if not _is_same_rng(rng, host_rng()):
                raise Unsplittable("the loss draws random numbers")
        return loss

    return loss_of


def _smallest_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the smallest trained parameters of all layers, up to GRADIENT_ELEMENTS elements. Return at least one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen: list[nn.Parameter] = []
    num_elements = 0
    for parameter in sorted(trained, key=lambda parameter: parameter.numel()):
        if not chosen or num_elements + parameter.numel() <= GRADIENT_ELEMENTS:
            chosen.append(parameter)
            num_elements += parameter.numel()
    return chosen


@contextmanager
def _scaled_parameters(parameters: Sequence[nn.Parameter], factor: float) -> Iterator[None]:
    """Multiply the parameters by ``factor`` while open."""
    values = [parameter.detach().clone() for parameter in parameters] if factor != 1.0 else []
    try:
        with torch.no_grad():
            for parameter, _ in zip(parameters, values, strict=False):
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=False):
                parameter.copy_(value)


def gradient_in_evaluation(model: nn.Module, compute: Callable[[Inputs, int | None], Tensor], *, scale: float = 1.0) -> LossOf:
    """Return a function that computes the gradient of the smallest parameters in evaluation mode, as one vector on the host.

    ``scale`` multiplies these parameters while the gradient is computed.
    """
    parameters = _smallest_parameters(model)

    def gradient(inputs: Inputs, items: int | None) -> Tensor:
        with _evaluation_mode(model, training=()), torch.enable_grad(), preserved_rng(), _scaled_parameters(parameters, scale):
            loss = compute(dict(inputs), items)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = []
        for parameter, value in zip(parameters, gradients, strict=True):
            value = torch.zeros_like(parameter) if value is None else value
            flat.append(value.detach().to("cpu", torch.float64).flatten())
        return torch.cat(flat)

    return gradient


@contextmanager
def exact_matmuls() -> Iterator[None]:
    """Compute fp32 matrix products in fp32 while open, even if TrainingArguments(tf32=True) is set."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _evaluation_mode(model: nn.Module, *, training: Sequence[nn.Module]) -> Iterator[None]:
    """Set evaluation mode for all modules but ``training`` while open. Restore the mode of each module on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    for module in training:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _is_same_rng(first: HostRng, second: HostRng) -> bool:
    is_same_numpy = all(np.array_equal(a, b) for a, b in zip(first.numpy, second.numpy, strict=True))
    return torch.equal(first.cpu, second.cpu) and first.python == second.python and is_same_numpy
