"""Fill one micro-batch as arrays: inputs, labels, and a mask or positions only if the model needs them.

In a packed row position_ids start again at 0 for each sequence. A model whose isolation was tested (models/isolation/check.py)
builds the block-diagonal mask from them, if attention_mask is None and its config says use_cache=False. Padding in such a row is
a separate sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from upshift.planning.workload import round_up
from upshift.training.batches.layout import Layout, RowGroup
from upshift.training.batches.objective import Objective
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.tokens import Sequences

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The rows that a rank computes at once."""

    arrays: Mapping[str, NDArray[Any]]  # the model's keyword arguments
    sequence_ids: Ids  # of the sequences in it; empty for a stand-in that only keeps ranks in step
    num_label_tokens: int  # labels that count, for causal-lm after they are shifted; pairs, where pairs are compared
    num_tokens: int  # real tokens, without padding
    # Of pairs whose answers are compared, and of rated answers: the log-probability of each row's labels by the model before the
    # training [rows]. The rows of a pair follow each other.
    reference: NDArray[np.float32] | None = None
    # Of pairs whose answers are compared: the number of labels of each row, and how many of them the model predicts [2, rows].
    # It does not predict the first token of a row, which is a label if the prompt is empty.
    label_counts: NDArray[np.float32] | None = None
    # Of pairs for a reward model: by how much the reward of the chosen answer should be larger than that of the rejected one
    # [rows / 2].
    margins: NDArray[np.float32] | None = None
    # Of rated answers: whether the answer in row 2 i is good [rows / 2]. Row 2 i + 1 has its prompt with another row's answer.
    ratings: NDArray[np.bool_] | None = None
    can_be_split: bool = True  # False: its loss does not follow from the losses of its parts
    row_tokens: int | None = None  # of a row of an encoder-decoder, both sides together; None: those of input_ids

    @property
    def has_pairs(self) -> bool:
        """Return whether rows 2 i and 2 i + 1 are a pair."""
        return self.reference is not None or self.margins is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows and the tokens in a row. A row without tokens (an image) counts as one token."""
        ids = self.arrays.get("input_ids")
        if ids is None:
            return len(next(iter(self.arrays.values()))), 1
        return ids.shape[0], ids.shape[1]

    @property
    def num_padded_tokens(self) -> int:
        """Return the tokens that the model computes, padding included, as ``RowGroup.num_padded_tokens`` counts them."""
        rows, width = self.shape
        return rows * (self.row_tokens or width)


def to_tensors(micro_batch: MicroBatch, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
    """Return the model's keyword arguments as tensors. They go to a CUDA device through pinned memory, without waiting."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in micro_batch.arrays.items()}
    if device is None:
        return tensors
    return {name: to_device(tensor, device) for name, tensor in tensors.items()}


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return the host's tensor on a device. It goes to a CUDA device through pinned memory, without waiting."""
    import torch

    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fill_micro_batch(
    group: RowGroup, sequences: Sequences, layout: Layout, objective: Objective, *, seed: int, epoch: int
) -> MicroBatch:
    """Return the micro-batch of a row group, whose rows hold ids of ``sequences``."""
    if objective.kind == "causal-lm":
        micro_batch = replace(_fill_causal(group, sequences, layout, objective), can_be_split=objective.loss_splits)
        if objective.has_ratings:
            micro_batch = _with_ratings(micro_batch, sequences)
        return _with_reference(micro_batch, sequences) if objective.has_pairs else micro_batch
    if objective.has_rewards:
        return _fill_rewarded(group, sequences, objective)
    ids = np.array([row[0] for row in group.rows], np.int64)
    lengths = sequences.lengths[ids]
    if objective.kind == "seq2seq-lm":
        micro_batch = _fill_seq2seq(ids, lengths, sequences, layout, objective)
        return replace(micro_batch, row_tokens=group.width, can_be_split=objective.loss_splits)
    input_ids = _pad_rows(sequences.tokens, ids, sequences.starts[ids], lengths, group.width, objective.pad_token_id)
    if sequences.labels is not None:  # the data has labels, so its words are masked already
        inputs = input_ids
        labels = _pad_rows(sequences.labels, ids, sequences.starts[ids], lengths, group.width, IGNORED)
    else:
        real = np.arange(group.width) < _as_column(lengths)
        members = ids if len(ids) else np.zeros(1, np.int64)
        inputs, labels = objective.mask_tokens(input_ids, real, members, seed=seed, epoch=epoch)
    return MicroBatch(
        arrays=_without_missing(input_ids=inputs, attention_mask=_attention_mask(lengths, group.width), labels=labels),
        sequence_ids=ids,
        num_label_tokens=int(np.count_nonzero(labels != IGNORED)),
        num_tokens=int(lengths.sum()),
        can_be_split=objective.loss_splits,
    )


def _fill_causal(group: RowGroup, sequences: Sequences, layout: Layout, objective: Objective) -> MicroBatch:
    """Fill rows of one or several sequences. The labels are shifted here if the model does not shift them."""
    shape = (max(layout.rows_together, len(group.rows)), group.width)
    # A real token, not the padding token: its embedding is 0, and a norm of it has no finite gradient (Gemma 3n).
    input_ids = np.full(shape, sequences.tokens[0], np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    count = np.arange(group.width)
    # A sequence that is alone in its row needs no positions: under a causal mask it never sees the padding on its right.
    position_ids = np.empty(shape, np.int64) if group.has_shared_rows else None
    for row, members in enumerate(group.rows):
        filled = 0
        for member in members:
            start = int(sequences.starts[member])
            end = filled + int(sequences.lengths[member])
            tokens = sequences.tokens[start : start + end - filled]
            input_ids[row, filled:end] = tokens
            token_labels = tokens if sequences.labels is None else sequences.labels[start : start + end - filled]
            labels[row, filled + 1 : end] = token_labels[1:]
            if position_ids is not None:
                position_ids[row, filled:end] = count[: end - filled]
            filled = end
        if position_ids is not None:
            position_ids[row, filled:] = count[: group.width - filled]
    if not objective.loss_shifts:
        labels = np.concatenate([labels[:, 1:], np.full((len(labels), 1), IGNORED)], axis=1)
    ids = np.array([member for members in group.rows for member in members], np.int64)
    lengths = sequences.lengths[ids]
    mask = _attention_mask(lengths, group.width) if layout.mask_padding and not layout.packing else None
    return MicroBatch(
        arrays=_without_missing(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, labels=labels),
        sequence_ids=ids,
        num_label_tokens=int(sequences.num_labels(ids, first=1).sum()),
        num_tokens=int(lengths.sum()),
    )


def _fill_rewarded(group: RowGroup, sequences: Sequences, objective: Objective) -> MicroBatch:
    """Fill rows of pairs whose rewards the model computes. A stand-in has a pair of padding."""
    ids = np.array([row[0] for row in group.rows], np.int64)
    lengths = sequences.lengths[ids]
    num_rows = max(objective.rows_together, len(ids))
    input_ids = np.full((num_rows, group.width), objective.pad_token_id, np.int64)
    filled = _pad_rows(sequences.tokens, ids, sequences.starts[ids], lengths, group.width, objective.pad_token_id)
    input_ids[: len(filled)] = filled
    margins = np.zeros(num_rows // 2, np.float32)
    if sequences.margins is not None:
        margins[: len(ids) // 2] = sequences.margins[ids[0::2]]
    return MicroBatch(
        arrays=_without_missing(input_ids=input_ids, attention_mask=_attention_mask(lengths, group.width)),
        sequence_ids=ids,
        num_label_tokens=len(ids) // 2,
        num_tokens=int(lengths.sum()),
        margins=margins,
    )


def _with_reference(micro_batch: MicroBatch, sequences: Sequences) -> MicroBatch:
    """Return a micro-batch of pairs or rated answers with the reference's log-probabilities, and a count of the labels of pairs.

    The log-probabilities are NaN as long as they are not computed.
    """
    ids = micro_batch.sequence_ids
    reference = np.full(micro_batch.shape[0], np.nan, np.float32)
    if sequences.reference is not None:
        reference[: len(ids)] = sequences.reference[ids]
    if micro_batch.ratings is not None:
        return replace(micro_batch, reference=reference, num_label_tokens=len(ids) // 2)
    counts = np.zeros((2, len(reference)), np.float32)
    counts[:, : len(ids)] = [sequences.num_labels(ids, first=first) for first in (0, 1)]
    return replace(micro_batch, reference=reference, label_counts=counts, num_label_tokens=len(ids) // 2)


def _with_ratings(micro_batch: MicroBatch, sequences: Sequences) -> MicroBatch:
    """Return a micro-batch of rated answers with their ratings. A stand-in has one that does not count."""
    assert sequences.ratings is not None
    ratings = np.zeros(micro_batch.shape[0] // 2, np.bool_)
    own = sequences.ratings[micro_batch.sequence_ids[0::2]]
    ratings[: len(own)] = own
    return replace(micro_batch, ratings=ratings)


def every_second_row(micro_batch: MicroBatch, *, first: Literal[0, 1]) -> MicroBatch:
    """Return the rated answers of a micro-batch (``first`` = 0), or the mismatched ones (1), each with its reference."""
    assert micro_batch.reference is not None
    arrays = {name: np.ascontiguousarray(array[first::2]) for name, array in micro_batch.arrays.items()}
    return replace(micro_batch, arrays=arrays, reference=np.ascontiguousarray(micro_batch.reference[first::2]))


def without_pairs(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with the loss of its labels instead of the loss of its pairs.

    Others stay as they are, and so do pairs without labels, whose rewards are compared.
    """
    if micro_batch.reference is None:
        return micro_batch
    num_labels = int(np.count_nonzero(micro_batch.arrays["labels"][:, 1:] != IGNORED))
    return replace(micro_batch, reference=None, label_counts=None, ratings=None, num_label_tokens=num_labels)


def _fill_seq2seq(ids: Ids, lengths: Ids, sequences: Sequences, layout: Layout, objective: Objective) -> MicroBatch:
    """Use the source of each sequence as input, and its labels. Without labels, the second half is learned after the first.

    The model makes decoder_input_ids from the labels.
    """
    first = lengths // 2 if sequences.source_lengths is None else sequences.source_lengths[ids]
    width = min(round_up(int(first.max(initial=1)), layout.pad_multiple), sequences.sequence_length)
    label_width = min(round_up(int((lengths - first).max(initial=1)), layout.pad_multiple), sequences.sequence_length)
    starts = sequences.starts[ids]
    targets = sequences.tokens if sequences.labels is None else sequences.labels
    labels = _pad_rows(targets, ids, starts + first, lengths - first, label_width, IGNORED)
    return MicroBatch(
        arrays=_without_missing(
            input_ids=_pad_rows(sequences.tokens, ids, starts, first, width, objective.pad_token_id),
            attention_mask=_attention_mask(first, width),
            labels=labels,
        ),
        sequence_ids=ids,
        num_label_tokens=int(np.count_nonzero(labels != IGNORED)),
        num_tokens=int(lengths.sum()),
    )


def _without_missing(**arrays: Ids | None) -> dict[str, Ids]:
    return {name: array for name, array in arrays.items() if array is not None}


def _pad_rows(flat: NDArray[Any], ids: Ids, starts: Ids, lengths: Ids, width: int, padding: int) -> Ids:
    """Return rows of the given parts of a flat array, padded on the right."""
    rows = np.full((max(1, len(ids)), width), padding, np.int64)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        rows[row, :length] = flat[start : start + length]
    return rows


def _as_column(lengths: Ids) -> Any:
    return lengths[:, None] if len(lengths) else np.zeros((1, 1), np.int64)


def _attention_mask(lengths: Ids, width: int) -> Ids | None:
    """Return the mask, or None without padding.

    A stand-in has no mask either: a row that is masked completely makes NaN in some attention kernels.
    """
    if not len(lengths) or int(lengths.min()) >= width:
        return None
    return (np.arange(width) < lengths[:, None]).astype(np.int64)
