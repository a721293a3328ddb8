"""The structure of collated batches: which entries have a value for each token, and where rows are padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from upshift.training.batches.layout import RowGroup
from upshift.training.batches.user_batches import CutSettings, InseparableRows, RowBatch, read_stored_rows, write_stored_rows

CLASSES = 6
Side = Literal["left", "right"]


def collated(lengths: list[int], *, side: Side = "right", width: int | None = None, **entries: Tensor) -> dict[str, Tensor]:
    """Return a batch of rows of these lengths, as wide as the longest row."""
    width = max(lengths) if width is None else width
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    ids = torch.arange(1, len(lengths) * width + 1).reshape(len(lengths), width) * mask
    if side == "left":
        mask = mask.flip(1)
        ids = ids.flip(1)
    return {"input_ids": ids, "attention_mask": mask, **entries}


def real_labels(num_rows: int) -> Tensor:
    return torch.arange(num_rows * CLASSES, dtype=torch.float32).reshape(num_rows, CLASSES)


def rows_of(*batches: dict[str, Tensor], **options: Any) -> RowBatch:
    return RowBatch(list(batches), encoder_decoder=False, shifts_labels=False, **options)


def built(rows: RowBatch, members: tuple[int, ...]) -> dict[str, Tensor]:
    group = RowGroup(tuple((row,) for row in members), max(rows.lengths[row] for row in members))
    return rows.build(group, pad_multiple=1)


@pytest.mark.parametrize("name", ["labels", "weights", "label_mask"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_an_entry_of_a_row_stays_whole_in_a_batch_that_is_as_wide_as_it(name: str, kind: torch.dtype) -> None:
    """Multi-label classification: a batch of as many tokens as there are classes."""
    values = [real_labels(2).to(kind), real_labels(2).to(kind)]
    batches = [collated([3, CLASSES], **{name: values[0]}), collated([2, 4], **{name: values[1]})]
    rows = rows_of(*batches)
    later = rows_of(collated([3, CLASSES], **{name: values[0]}), sampled=rows.structure)
    for row_batch in (rows, later):
        assert row_batch.sides == {"input_ids": "source", "attention_mask": "source", name: "row"}
        micro_batch = built(row_batch, (0,))
        assert micro_batch["input_ids"].shape == (1, 3)
        assert torch.equal(micro_batch[name], values[0][:1])


def test_batches_of_one_width_keep_it_if_an_entry_may_be_of_tokens_or_of_rows() -> None:
    labels = real_labels(2)
    rows = rows_of(collated([3, CLASSES], labels=labels), collated([2, 4], width=CLASSES, labels=labels))
    assert set(rows.sides.values()) == {"row"} and rows.can_mix
    micro_batch = built(rows, (0, 2))
    assert all(value.shape == (2, CLASSES) for value in micro_batch.values())


def test_an_entry_of_tokens_that_no_name_tells_is_trimmed_with_them() -> None:
    batches = [collated([2, 5], weights=torch.rand(2, 5)), collated([3, 4], weights=torch.rand(2, 4))]
    rows = rows_of(*batches)
    assert rows.sides["weights"] == "source" and not rows.can_mix  # how it is padded is not known
    assert torch.equal(built(rows, (0,))["weights"], batches[0]["weights"][:1, :2])
    with pytest.raises(InseparableRows, match="weights"):
        rows_of(collated([2, 5], weights=torch.rand(2, 9)), sampled=rows.structure)
    with pytest.raises(InseparableRows, match="entries"):
        rows_of(collated([2, 5]), sampled=rows.structure)


def test_rows_that_keep_their_width_share_no_batch_with_others() -> None:
    """A mask of all queries and keys has two widths, and nothing pads it."""
    batches = [collated([width, width], mask=torch.ones(2, 1, width, width)) for width in (4, 6)]
    assert not rows_of(*batches).can_mix
    assert rows_of(batches[0], batches[0]).can_mix


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("full_first", [True, False])
def test_a_batch_without_padding_fits_batches_padded_on_either_side(side: Side, full_first: bool) -> None:
    full = collated([4, 4], side=side)
    padded = collated([2, 5], side=side)
    rows = rows_of(*([full, padded] if full_first else [padded, full]))
    assert rows.padding_side == side and rows.can_mix
    micro_batch = built(rows, (0, 1, 2, 3))
    for row, (number, index) in enumerate(rows.locations):
        batch = rows.batches[number]
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(
                micro_batch[name][row][micro_batch["attention_mask"][row].bool()],
                batch[name][index][batch["attention_mask"][index].bool()],
            )
        assert micro_batch["attention_mask"][row, -1 if side == "left" else 0] == 1
    assert rows_of(full, sampled=rows.structure).padding_side == side
    assert rows_of(padded, sampled=rows_of(full).structure).padding_side == side


def test_padding_on_the_other_side_is_refused() -> None:
    left = collated([2, 5], side="left")
    right = collated([2, 5])
    with pytest.raises(InseparableRows):
        rows_of(left, right)
    with pytest.raises(InseparableRows):
        rows_of(right, sampled=rows_of(left).structure)


def test_a_file_of_a_few_rows_is_cut_as_all_sampled_rows_are(tmp_path: Path) -> None:
    batch = collated([3, CLASSES], labels=real_labels(2))
    sampled = rows_of(batch, collated([2, 4], labels=real_labels(2)))
    settings = CutSettings(
        encoder_decoder=False, shifts_labels=False, unit="rows", trims=True, drops_mask=False, structure=sampled.structure
    )
    rows, _ = read_stored_rows(write_stored_rows(tmp_path, [batch], settings))
    assert rows.structure == sampled.structure
