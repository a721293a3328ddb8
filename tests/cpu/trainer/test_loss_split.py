"""How losses of two to eight small rows are found to split, without a Trainer: which unit, which reason, what may be cut off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from upshift.training.batches.user_batches import RowBatch
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.hf_trainer.loss_split import (
    LossProbes,
    Split,
    Unsplittable,
    _choose_pairs,
    _replace_labels,
    _scaled_parameters,
    _smallest_parameters,
    entry_ranges,
    entry_values,
    exact_matmuls,
    gradient_in_evaluation,
    has_batch_statistics,
    is_within,
    loss_in_evaluation,
    loss_in_training,
    measure_split,
)

CLASSES = 5
LENGTHS = (3, 5, 4, 2, 6, 5)
Loss = Callable[["Bag", dict[str, Tensor], int | None], Tensor]


class Bag(nn.Module):
    """The mean of the real tokens' vectors, and one vector for each token: nothing that takes time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, CLASSES)

    def tokens(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.table(inputs["input_ids"])  # type: ignore[no-any-return]

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        mask = inputs["attention_mask"].unsqueeze(-1)
        return (self.tokens(inputs) * mask).sum(1) / mask.sum(1)  # type: ignore[no-any-return]


def classified(
    labels: Sequence[int] = (0, 1, 2, 3, 4, 0), *, lengths: Sequence[int] = LENGTHS, **entries: Tensor
) -> RowBatch:
    """Return rows with a class each."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 16, (len(lengths), max(lengths)), generator=draw)
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor(labels), **entries}
    return RowBatch([batch], encoder_decoder=False, shifts_labels=False)


def generated() -> RowBatch:
    """Return the same rows with a label for each token but the first, as causal language models are trained."""
    batch = classified().batches[0]
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % CLASSES, IGNORED)
    return RowBatch([{**batch, "labels": labels}], encoder_decoder=False, shifts_labels=True)


def without_label(label: int) -> RowBatch:
    """Return the rows with labels of tokens, none of which is ``label``."""
    batch = generated().batches[0]
    labels = torch.where(batch["labels"] == label, 0, batch["labels"])
    return RowBatch([{**batch, "labels": labels}], encoder_decoder=False, shifts_labels=True)


def split_of(loss: Loss, rows: RowBatch, *, num_first: int = 6, **probes: Any) -> Split:
    model = Bag()

    def compute(inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return loss(model, inputs, items)

    plain = {"loss": loss_in_evaluation(model, compute), "gradient": gradient_in_evaluation(model, compute)}
    return measure_split(rows, LossProbes(**{**plain, **probes}), model=model, num_first=num_first)


def by_class(model: Bag, inputs: dict[str, Tensor], items: int | None, reduction: str = "mean") -> Tensor:
    return cross_entropy(model(inputs), inputs["labels"], reduction=reduction)


def by_token(model: Bag, inputs: dict[str, Tensor], items: int | None, reduction: str = "mean") -> Tensor:
    labels = inputs["labels"][:, 1:]
    return cross_entropy(model.tokens(inputs)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def by_row_of_tokens(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    labels = inputs["labels"][:, 1:]
    each = cross_entropy(model.tokens(inputs)[:, :-1].transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return (each.sum(1) / (labels != IGNORED).sum(1)).mean()


def of_items(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    assert items is not None
    return by_token(model, inputs, items, "sum") / items


# --- units -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "rows", "probes", "unit"),
    [
        (by_class, classified(), {}, "labels"), (by_token, generated(), {}, "labels"),
        (by_row_of_tokens, generated(), {}, "rows"),
        (of_items, generated(), {"counts_items": True}, "items"), (by_token, generated(), {"counts_items": True}, "labels"),
    ],
)  # fmt: skip
def test_losses_of_rows_combine_by_a_unit(loss: Loss, rows: RowBatch, probes: dict[str, Any], unit: str) -> None:
    """A mean over labels, a mean over rows, or a sum over the items of the whole batch, which the loss must use."""
    found = split_of(loss, rows, **probes)
    assert (found.unit, found.reason, found.needs_equal_labels) == (unit, "", False)


def test_a_loss_of_the_script_is_held_to_the_labels_that_were_seen() -> None:
    """With one label in each row a mean over labels cannot be told from one over rows."""
    found = split_of(by_class, classified(), is_library_loss=False)
    assert (found.unit, found.needs_equal_labels) == ("labels", True)
    assert found.ranges == {"labels": (0.0, 4.0)}
    tokens = split_of(by_token, generated(), is_library_loss=False)
    assert (tokens.unit, tokens.needs_equal_labels) == ("labels", False)


def test_what_may_be_cut_off() -> None:
    """Padding and its mask where the loss ignores both; rows end to end only for the next tokens of each."""
    tokens = split_of(by_token, generated())
    assert (tokens.trims, tokens.drops_mask, tokens.flattens) == (True, True, True)
    classes = split_of(by_class, classified())
    assert (classes.trims, classes.drops_mask, classes.flattens) == (True, False, False)

    def by_width(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return by_class(model, inputs, items) * inputs["input_ids"].shape[1]

    assert (split_of(by_width, classified()).unit, split_of(by_width, classified()).trims) == ("labels", False)

    def sees_padding(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return by_class(model, inputs, items) + float(inputs["attention_mask"].all())

    assert (split_of(sees_padding, classified()).unit, split_of(sees_padding, classified()).trims) == ("labels", False)

    def reads_what_is_before(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
        before = {**inputs, "input_ids": inputs["input_ids"].cumsum(1) % 16}
        return by_token(model, before, items)

    found = split_of(reads_what_is_before, generated())
    assert (found.trims, found.drops_mask, found.flattens) == (True, True, False)

    def needs_mask(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return by_token(model, inputs, items) + 0.0 * inputs["attention_mask"].sum()

    found = split_of(needs_mask, generated())
    assert (found.trims, found.drops_mask, found.flattens) == (True, False, False)


# --- reasons ---------------------------------------------------------------------------------------------------------


def coupled(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    vectors = model(inputs)
    return cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def coupled_in_the_gradient(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    centre = model(inputs).mean() ** 2
    return by_class(model, inputs, items) + centre - centre.detach()


def coupled_in_threes(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    vectors = model(inputs)
    return by_class(model, inputs, items) + (vectors.std() if len(vectors) > 2 else 0.0)


def weighs_a_class(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    weights = torch.tensor([1.0, 1.0, 1.0, 9.0, 1.0])
    each = cross_entropy(model(inputs), inputs["labels"], reduction="none") * weights[inputs["labels"]]
    return each.sum() / weights[inputs["labels"]].sum()


def weighs_a_token(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    labels = inputs["labels"][:, 1:].flatten()
    weights = torch.where(labels == 3, 9.0, 1.0)
    each = cross_entropy(model.tokens(inputs)[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED, reduction="none")
    return (each * weights).sum() / weights[labels != IGNORED].sum()


def constant(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    return model.table.weight.mean() * 0.0 + 2.0


def endless(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    return by_class(model, inputs, items) * math.inf


def broken(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
    raise ValueError("no such\nentry")


SCRIPT = {"is_library_loss": False}


@pytest.mark.parametrize(
    ("loss", "rows", "probes", "reason"),
    [
        (coupled, classified(), {}, "the loss of two rows is not made of the losses of each"),
        (coupled_in_the_gradient, classified(), {}, "the gradient of 2 rows is not made of the gradients of each"),
        (coupled_in_threes, classified(), SCRIPT, "the loss of 6 rows is not made of the losses of each"),
        (weighs_a_class, classified((0, 1, 2, 4, 4, 3)), SCRIPT, "the loss of two rows is not made of the losses of each"),
        (weighs_a_class, classified((0, 1, 2, 4, 4, 2)), SCRIPT, "label 3 otherwise"),
        (weighs_a_class, classified((0, 1, 2, 4, 4, 2), lengths=(4,) * 6), SCRIPT, "label 3 otherwise"),
        (weighs_a_token, without_label(3), SCRIPT, "labels 0 to 4 otherwise"),
        (constant, classified(), SCRIPT, "the losses of all rows are alike"),
        (by_class, classified((2,) * 6), SCRIPT, "all rows have the same label"),
        (endless, classified(), {}, "the loss of the first rows is not a number"),
        (broken, classified(), {}, "could not be measured on two rows: ValueError: no such entry"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_split_has_a_reason(loss: Loss, rows: RowBatch, probes: dict[str, Any], reason: str) -> None:
    found = split_of(loss, rows, **probes)
    assert found.unit is None
    assert reason in found.reason
    assert (found.trims, found.drops_mask, found.flattens, found.needs_equal_labels, found.ranges) == (False,) * 4 + ({},)


def test_a_loss_without_two_rows_to_compare() -> None:
    assert split_of(by_class, classified(), num_first=1).reason == "there are no two rows to compare"
    assert split_of(by_class, classified(), num_first=2).unit == "labels"


def test_a_loss_that_may_be_told_the_items_is_not_told_unless_it_counts_them() -> None:
    def of_items_or_labels(model: Bag, inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return by_token(model, inputs, items) if items is None else of_items(model, inputs, items)

    assert split_of(of_items_or_labels, generated()).unit == "labels"
    assert split_of(of_items_or_labels, generated(), counts_items=True).unit == "items"


def test_two_rows_are_enough_and_rows_may_be_equally_long() -> None:
    model = Bag()
    plain = loss_in_evaluation(model, lambda inputs, items: by_class(model, inputs, items))
    for rows in (classified((0, 1), lengths=(3, 5)), classified(lengths=(4,) * 6)):
        found = split_of(by_class, rows, num_first=len(rows), is_library_loss=False, other_states={"at step 9": plain})
        assert (found.unit, found.reason) == ("labels", "")


def test_a_library_loss_is_measured_on_two_rows_alone() -> None:
    assert split_of(coupled_in_threes, classified()).unit == "labels"
    assert split_of(weighs_a_class, classified((0, 1, 2, 4, 4, 2))).unit == "labels"


def test_other_states_and_larger_weights_are_measured_too() -> None:
    model = Bag()
    loss = loss_in_evaluation(model, lambda inputs, items: coupled(model, inputs, items))
    found = split_of(by_class, classified(), is_library_loss=False, other_states={"at step 9": loss})
    assert found.reason == "the loss of 2 rows is not made of the losses of each at step 9"
    gradient = gradient_in_evaluation(model, lambda inputs, items: coupled_in_the_gradient(model, inputs, items), scale=4.0)
    larger = split_of(by_class, classified(), larger_gradient=gradient)
    assert larger.reason == "the gradient of 2 rows is not made of the gradients of each"
    nothing = split_of(by_class, classified(), larger_gradient=lambda inputs, items: torch.tensor([math.nan]))
    assert nothing.unit == "labels"  # weights so large that nothing can be computed tell nothing


def test_batch_normalization_computes_over_the_rows() -> None:
    class Normalized(Bag):
        def __init__(self, *, tracks: bool) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(CLASSES, track_running_stats=tracks)

    assert has_batch_statistics(Normalized(tracks=True)) == "norm"
    assert has_batch_statistics(Normalized(tracks=False)) is None
    probes = LossProbes(loss=lambda inputs, items: 0.0, gradient=lambda inputs, items: 0.0)
    found = measure_split(classified(), probes, model=Normalized(tracks=True), num_first=6)
    assert found.reason == "norm computes over the rows of a batch"


# --- what is compared ------------------------------------------------------------------------------------------------


def test_pairs_differ_in_what_a_loss_may_read() -> None:
    """Rows by length: 3 (2 tokens), 0, 2, 1 and 5, 4. The first pair is the shortest with the next longer one."""
    weights = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    rows = classified((0, 1, 2, 3, 4, 0), weight=weights)
    assert _choose_pairs(rows, 6, is_library_loss=True) == [(3, 0)]
    # Other labels 1, 2 and 4, by length; then the least and the largest weight.
    assert _choose_pairs(rows, 6, is_library_loss=False) == [(3, 0), (3, 2), (3, 1), (3, 4), (3, 5)]
    assert _choose_pairs(rows, 2, is_library_loss=True) == [(0, 1)]
    assert _choose_pairs(rows, 1, is_library_loss=True) == []
    tokens = _choose_pairs(generated(), 6, is_library_loss=True)
    assert tokens == [(3, 0)]  # one label and two: no other pair needs to differ in their number
    unlabelled = classified((0, 1, IGNORED, 3, 4, 0))
    assert _choose_pairs(unlabelled, 6, is_library_loss=True) == [(3, 0), (3, 2)]
    two_unlabelled = classified((0, 1, IGNORED, 3, 4, IGNORED))
    assert _choose_pairs(two_unlabelled, 6, is_library_loss=True) == [(3, 0), (3, 2)]
    two_batches = [
        {name: value[:3] for name, value in unlabelled.batches[0].items()},
        {name: value[3:] for name, value in two_unlabelled.batches[0].items()},
    ]
    mixed = RowBatch(two_batches, encoder_decoder=False, shifts_labels=False)
    assert mixed.can_mix and _choose_pairs(mixed, 6, is_library_loss=True) == [(3, 0), (3, 2)]
    narrow = [{name: value[:3, :5] if value.ndim == 2 else value[:3] for name, value in classified().batches[0].items()}]
    apart = RowBatch(
        [{name: value for name, value in batch.items() if name != "attention_mask"} for batch in (*narrow, two_batches[1])],
        encoder_decoder=False, shifts_labels=False,
    )  # fmt: skip
    assert not apart.can_mix and _choose_pairs(apart, 6, is_library_loss=True) == [(0, 1)]
    many = classified(range(12), lengths=range(2, 14))
    assert _choose_pairs(many, 12, is_library_loss=False) == [(0, partner) for partner in range(1, 9)]
    assert _choose_pairs(many, 12, is_library_loss=True) == [(0, 1)]


def test_entries_that_may_weigh_rows() -> None:
    """Text and classes are none; of several numbers of a row their sum counts."""
    scores = torch.tensor([[1.0, 2.0]] * 5 + [[-1.0, 8.0]])
    rows = classified((0, 1, IGNORED, 3, 4, 0), scores=scores, cube=torch.zeros(6, 2, 2))
    assert entry_values(rows) == {"scores": [3.0] * 5 + [7.0]}
    assert entry_ranges(rows) == {"scores": (3.0, 7.0), "labels": (0.0, 4.0)}
    real = classified(labels=[0.5, 1.5, 2.5, 0.0, 0.0, 0.0])  # type: ignore[list-item]
    assert entry_ranges(real) == {"labels": (0.0, 2.5)}
    ranges = {"scores": (3.0, 7.0), "labels": (0.0, 4.0)}
    assert is_within(rows, ranges) and is_within(rows, {})
    for name, bounds in (("scores", (3.0, 6.9)), ("scores", (3.1, 7.0)), ("labels", (1.0, 4.0)), ("labels", (0.0, 3.0))):
        assert not is_within(rows, {**ranges, name: bounds})
    assert not is_within(rows, {"labels": (0.0, 4.0)})


def test_labels_are_replaced_in_the_last_row() -> None:
    labels = torch.tensor([[7, 7, 7, 7], [8, IGNORED, 8, 8]])
    assert _replace_labels(labels, (1, 2), shifts=False).tolist() == [[7, 7, 7, 7], [1, IGNORED, 2, 1]]
    assert _replace_labels(labels, (1, 2), shifts=True).tolist() == [[7, 7, 7, 7], [8, IGNORED, 1, 2]]
    assert _replace_labels(torch.tensor([3, 4]), (9,), shifts=True).tolist() == [3, 9]
    assert labels.tolist() == [[7, 7, 7, 7], [8, IGNORED, 8, 8]]


def test_measuring_leaves_model_and_random_numbers_as_they_were() -> None:
    class Dropping(Bag):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return torch.nn.functional.dropout(super().forward(inputs), 0.5, self.training)

    model = Dropping()
    inputs = dict(classified().batches[0])

    def compute(inputs: dict[str, Tensor], items: int | None) -> Tensor:
        return by_class(model, inputs, items)

    model.train()
    before = torch.get_rng_state()
    plain = loss_in_evaluation(model, compute)
    assert plain(inputs, None) == plain(inputs, None)
    with pytest.raises(Unsplittable, match="the loss draws random numbers"):
        loss_in_training(model, compute)(inputs, None)
    gradient_in_evaluation(model, compute)(inputs, None)
    assert torch.equal(before, torch.get_rng_state()) and model.training and model.table.training
    quiet = Bag()
    assert loss_in_training(quiet, lambda inputs, items: by_class(quiet, inputs, items))(inputs, None) == pytest.approx(
        by_class(quiet, inputs, None).item()
    )


def test_gradients_are_those_of_the_smallest_parameters() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(2**11, 2**11, bias=False), "small": nn.Linear(3, 2), "frozen": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(False)
    small = model["small"]
    assert [*map(id, _smallest_parameters(model))] == [id(small.bias), id(small.weight)]
    alone = nn.Linear(2**12, 2**11, bias=False)
    assert [*map(id, _smallest_parameters(alone))] == [id(alone.weight)]
    before = small.weight.detach().clone()
    with _scaled_parameters([small.weight], 4.0):
        assert torch.equal(small.weight.detach(), 4.0 * before)
    assert torch.equal(small.weight.detach(), before)
    bag = Bag()
    inputs = dict(classified().batches[0])
    gradient = gradient_in_evaluation(bag, lambda inputs, items: bag(inputs).sum(), scale=3.0)(inputs, None)
    assert isinstance(gradient, Tensor)
    assert float(gradient.sum()) == pytest.approx(len(LENGTHS) * CLASSES)


def test_products_are_exact_while_a_loss_is_measured() -> None:
    before = torch.get_float32_matmul_precision()
    with exact_matmuls():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before
