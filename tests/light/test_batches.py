"""The plan decides the layout of a global batch and never its sequences, labels or order. No torch here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.planning.workload import LengthHistogram, pack_rows, spread_rows
from upshift.training.batches.layout import Layout, lay_out
from upshift.training.batches.objective import IGNORED, Objective, objective_for
from upshift.training.batches.sampler import BatchSource, GlobalBatch, Position, evaluation_batches, look_ahead, synthetic_batch
from upshift.training.data.tokens import (
    TokenizedCorpus,
    cut_sequences,
    histogram_of,
    hold_out_evaluation,
)

PAD = 1
MASKED = Objective(kind="masked-lm", pad_token_id=PAD, mask_token_id=4, vocab_size=1000, special_token_ids=(PAD, 2))
CAUSAL = Objective(pad_token_id=PAD)
SEQ2SEQ = Objective(kind="seq2seq-lm", pad_token_id=PAD)

document_lengths = st.lists(st.integers(0, 40), min_size=6, max_size=40).filter(lambda x: sum(n >= 2 for n in x) >= 5)
layouts = st.builds(
    lambda micro_batch, packing, pad_multiple, world_size: (micro_batch, packing, pad_multiple, world_size),
    st.integers(1, 7),
    st.sampled_from(["no", "rows", "flat"]),
    st.sampled_from([1, 8]),
    st.integers(1, 5),
)


def corpus_of(lengths: list[int]) -> TokenizedCorpus:
    """Token value = position in the corpus, so that a token says where it came from."""
    ends = np.cumsum(lengths)
    return TokenizedCorpus.from_documents([np.arange(end - n, end) + 10 for n, end in zip(lengths, ends.tolist(), strict=True)])


def ranks(lengths: list[int], shape: tuple[int, str, int, int], objective: Objective = CAUSAL) -> list[BatchSource]:
    micro_batch, packing, pad_multiple, world_size = shape
    sequences = cut_sequences(corpus_of(lengths), 16)
    return [
        BatchSource(
            sequences=sequences,
            global_batch=5,
            seed=3,
            objective=objective,
            layout=Layout(
                micro_batch=micro_batch,
                packing=packing != "no",
                flatten=packing == "flat",
                pad_multiple=pad_multiple,
                rank=rank,
                world_size=world_size,
            ),
        )  # fmt: skip
        for rank in range(world_size)
    ]


def first_batches(source: BatchSource, count: int, position: Position | None = None) -> list[GlobalBatch]:
    return list(islice(source.batches(position), count))


def members(batches: list[GlobalBatch]) -> list[int]:
    return sorted(i for batch in batches for micro in batch.micro_batches for i in micro.sequence_ids.tolist())


@settings(max_examples=30, deadline=None)
@given(document_lengths, layouts)
def test_labels_are_shifted_once_by_the_model_or_by_the_rows(lengths: list[int], shape: tuple[int, str, int, int]) -> None:
    """A model that compares a label with the output of its own place learns the same tokens from the same places."""
    by_model, by_rows = (ranks(lengths, shape, CAUSAL.changed(loss_shifts=shifts))[0] for shifts in (True, False))
    for one, other in zip(first_batches(by_model, 3), first_batches(by_rows, 3), strict=True):
        for micro, shifted in zip(one.micro_batches, other.micro_batches, strict=True):
            assert micro.num_label_tokens == shifted.num_label_tokens == int((shifted.arrays["labels"] != IGNORED).sum())
            learned = shifted.arrays["labels"]
            assert (learned[:, :-1] == micro.arrays["labels"][:, 1:]).all() and (learned[:, -1] == IGNORED).all()
            places = np.argwhere(learned != IGNORED)
            ids = shifted.arrays["input_ids"]
            assert all(learned[row, place] == ids[row, place + 1] == ids[row, place] + 1 for row, place in places)


@given(document_lengths, layouts, st.sampled_from([CAUSAL, MASKED, SEQ2SEQ]))
@settings(deadline=None, max_examples=80)
def test_the_plan_never_changes_what_is_in_a_global_batch(lengths, shape, objective):
    if objective is not CAUSAL:
        shape = (shape[0], "no", *shape[2:])
    reference = first_batches(ranks(lengths, (1, "no", 1, 1), objective)[0], 4)
    of_ranks = [first_batches(source, 4) for source in ranks(lengths, shape, objective)]
    for expected, *got in zip(reference, *of_ranks, strict=True):
        assert members(got) == members([expected]) == sorted(expected.sequence_ids.tolist())
        assert len({len(batch.micro_batches) for batch in got}) == 1
        micro_batches = [micro for batch in got for micro in batch.micro_batches]
        assert sum(micro.num_label_tokens for micro in micro_batches) == expected.num_label_tokens
        assert sum(micro.num_tokens for micro in micro_batches) == expected.num_tokens
        assert {batch.num_label_tokens for batch in got} == {expected.num_label_tokens}
        for micro in micro_batches:
            rows, width = (1, 16 * shape[0]) if shape[1] == "flat" else (shape[0], 16)
            assert len(micro.arrays["input_ids"]) <= rows and micro.arrays["input_ids"].shape[1] <= width
            counted = micro.arrays["labels"][:, 1:] if objective is CAUSAL else micro.arrays["labels"]
            assert np.count_nonzero(counted != IGNORED) == micro.num_label_tokens


@given(document_lengths, layouts)
@settings(deadline=None, max_examples=60)
def test_every_row_is_made_of_whole_sequences(lengths, shape):
    source = ranks(lengths, shape)[0]
    batches = list(first_batches(source, 2))
    assert len(batches) == 2 and all(batch.micro_batches for batch in batches)
    for batch in batches:
        for micro in batch.micro_batches:
            found = sorted(tuple(piece) for row in range(len(micro.arrays["input_ids"])) for piece in pieces_of(micro, row))
            starts, sizes = source.sequences.starts, source.sequences.lengths
            tokens = source.sequences.tokens
            ids = micro.sequence_ids.tolist()
            assert found == sorted(tuple(tokens[starts[i] : starts[i] + sizes[i]].tolist()) for i in ids)


def pieces_of(micro, row: int) -> Iterator[list[int]]:
    """Sequences of a row as the model sees them: cut where positions restart, without padding."""
    inputs, labels = micro.arrays["input_ids"][row], micro.arrays["labels"][row]
    positions = np.arange(len(inputs)) if "position_ids" not in micro.arrays else micro.arrays["position_ids"][row]
    starts = np.flatnonzero(positions == 0).tolist()
    for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
        assert positions[start:end].tolist() == list(range(end - start))
        real = labels[start:end] != IGNORED
        real[0] = real[1:2].any()  # the first token of a sequence, of two tokens or more, is no label
        assert labels[start] == IGNORED
        assert (labels[start + 1 : end] == np.where(real, inputs[start:end], IGNORED)[1:]).all()
        if "attention_mask" in micro.arrays:
            assert "position_ids" not in micro.arrays
            assert (micro.arrays["attention_mask"][row] == real).all()
        if real.any():
            yield inputs[start:end][real].tolist()


@given(document_lengths, layouts, st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_resuming_continues_exactly(lengths, shape, step):
    source = ranks(lengths, shape)[-1]
    whole = first_batches(source, step + 3)
    resumed = first_batches(source, 3, Position.from_json(whole[step].position.to_json()))
    assert source.position_of_step(step) == whole[step].position
    for expected, got in zip(whole[step:], resumed, strict=True):
        assert (got.position, got.next_position) == (expected.position, expected.next_position)
        for one, other in zip(expected.micro_batches, got.micro_batches, strict=True):
            assert one.arrays.keys() == other.arrays.keys()
            assert all((one.arrays[name] == other.arrays[name]).all() for name in one.arrays)


def test_an_epoch_is_a_permutation_and_epochs_and_seeds_differ():
    source = ranks([10] * 20, (2, "no", 8, 1))[0]
    first, second = (members(first_batches(source, 4, Position(epoch=epoch))) for epoch in (0, 1))
    assert first == second == list(range(20))
    orders = {tuple(first_batches(source, 1, Position(epoch=epoch))[0].sequence_ids.tolist()) for epoch in range(4)}
    other_seed = BatchSource(sequences=source.sequences, global_batch=5, layout=source.layout, seed=4)
    assert len(orders | {tuple(other_seed.sequence_ids(Position()).tolist())}) == 5


@given(st.lists(st.integers(1, 50), max_size=80))
def test_packing_is_complete_and_tight(lengths):
    rows = pack_rows(lengths, capacity=50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert all(fill <= 50 for fill in fills)
    assert sum(fill <= 25 for fill in fills) <= 1, "two half-empty rows would fit in one"


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 4))
def test_spreading_is_complete_and_even(lengths, multiple):
    rows = spread_rows(lengths, capacity=100, multiple=multiple)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert all(fill <= 100 for fill in fills) and len(rows) % multiple == 0
    assert max(fills) - min(fills) <= max(lengths, default=0)


def test_packed_rows_with_one_sequence_take_no_positions():
    sequences = cut_sequences(corpus_of([16, 16, 16, 16, 9, 8, 8]), 16)
    source = BatchSource(sequences=sequences, global_batch=7, layout=Layout(micro_batch=2, packing=True))
    micro_batches = next(source.batches()).micro_batches
    assert ["position_ids" not in micro.arrays for micro in micro_batches] == [True, True, False]
    assert all("attention_mask" not in micro.arrays for micro in micro_batches)


def test_more_ranks_than_sequences_get_stand_ins_without_labels():
    for objective in (CAUSAL, MASKED, SEQ2SEQ):
        sources = ranks([8] * 5, (4, "no", 8, 7), objective)
        micro_batches = [next(source.batches()).micro_batches for source in sources]
        assert [len(hand) for hand in micro_batches] == [1] * 7
        stand_ins = [hand[0] for hand in micro_batches if not len(hand[0].sequence_ids)]
        assert len(stand_ins) == 2
        assert all((m.arrays["labels"] == IGNORED).all() and m.num_label_tokens == 0 == m.num_tokens for m in stand_ins)


def test_dealing_splits_the_longest_and_balances():
    hands = lay_out([16] * 9, Layout(micro_batch=4, world_size=2), sequence_length=16)
    sizes = [[len(group.rows) for group in hand] for hand in hands]
    assert sorted(map(sum, sizes)) == [4, 5]


def test_masking_follows_the_sequence_and_bert_shares():
    lengths = [512] * 60
    sequences = cut_sequences(corpus_of(lengths), 512)
    objective = MASKED.changed(vocab_size=60 * 512 + 10, mask_token_id=0)
    labels: dict[int, list[int]] = {}
    shares = np.zeros(3)
    for micro_batch in (4, 7):
        layout = Layout(micro_batch=micro_batch)
        source = BatchSource(sequences=sequences, global_batch=60, layout=layout, objective=objective)
        for micro in next(source.batches()).micro_batches:
            for row, sequence in enumerate(micro.sequence_ids.tolist()):
                assert labels.setdefault(sequence, micro.arrays["labels"][row].tolist()) == micro.arrays["labels"][row].tolist()
            chosen = micro.arrays["labels"] != IGNORED
            kept = (micro.arrays["input_ids"] == micro.arrays["labels"])[chosen].sum()
            masked = (micro.arrays["input_ids"] == 0)[chosen].sum()
            shares += [chosen.sum(), masked, kept]
    assert shares[0] / (2 * 60 * 512) == pytest.approx(0.15, abs=0.01)
    assert shares[1] / shares[0] == pytest.approx(0.8, abs=0.02)
    assert shares[2] / shares[0] == pytest.approx(0.1, abs=0.02)
    next_epoch = next(source.batches(Position(epoch=1))).micro_batches[0]
    assert labels[int(next_epoch.sequence_ids[0])] != next_epoch.arrays["labels"][0].tolist()


def test_special_tokens_are_never_masked():
    objective = MASKED.changed(mask_probability=1.0)
    tokens = TokenizedCorpus.from_documents([np.array([2, 50, 51, 2])])
    micro = next(evaluation_batches(cut_sequences(tokens, 8), global_batch=4, layout=Layout(micro_batch=1), objective=objective))
    assert micro.micro_batches[0].arrays["labels"][0, :4].tolist() == [IGNORED, 50, 51, IGNORED]


def test_seq2seq_halves():
    tokens = TokenizedCorpus.from_documents([np.array([10, 11, 12, 13, 14])])
    layout = Layout(micro_batch=1, pad_multiple=4)
    batch = next(evaluation_batches(cut_sequences(tokens, 8), global_batch=1, layout=layout, objective=SEQ2SEQ))
    micro = batch.micro_batches[0]
    assert micro.arrays["input_ids"].tolist() == [[10, 11, PAD, PAD]]
    assert micro.arrays["attention_mask"].tolist() == [[1, 1, 0, 0]]
    assert micro.arrays["labels"].tolist() == [[12, 13, 14, IGNORED]]


@given(document_lengths, layouts)
@settings(deadline=None, max_examples=40)
def test_evaluation_sees_every_sequence_once(lengths, shape):
    seen: list[int] = []
    for source in ranks(lengths, shape):
        seen += members(list(evaluation_batches(source.sequences, global_batch=4, layout=source.layout)))
    assert sorted(seen) == list(range(len(source.sequences)))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(2, 20))
def test_cutting_keeps_documents_apart(lengths, sequence_length):
    corpus = corpus_of(lengths)
    sequences = cut_sequences(corpus, sequence_length)
    borders = set(corpus.offsets.tolist())
    for start, length in zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True):
        assert 2 <= length <= sequence_length
        assert not borders & set(range(start + 1, start + length))
    dropped = sum(n % sequence_length == 1 for n in lengths)
    assert int(sequences.lengths.sum()) == corpus.num_tokens - dropped


@given(st.lists(st.integers(0, 90), min_size=1, max_size=60), st.integers(2, 20), st.sampled_from([None, 0, 0.1, 0.9, 3, 40]))
def test_holding_out_loses_nothing(lengths, sequence_length, size):
    corpus = corpus_of(lengths)
    total = len(cut_sequences(corpus, sequence_length))
    expected = {None: max(1, min(64, round(total * 0.02))), 0: 0}.get(size) or (max(1, round(total * size)) if size else 0)
    expected = size if size in (3, 40) else expected
    expected = 0 if size is None and total < 2 else expected
    if size and expected >= total:
        with pytest.raises(RequestError, match="leaves none to train on"):
            hold_out_evaluation(corpus, sequence_length=sequence_length, size=size)
        return
    train, evaluation = hold_out_evaluation(corpus, sequence_length=sequence_length, size=size)
    if evaluation is None:
        assert not expected and train is corpus
        return
    assert np.concatenate([train.tokens, evaluation.tokens]).tolist() == corpus.tokens.tolist()
    assert train.offsets[-1] == train.num_tokens
    assert evaluation.offsets[-1] == evaluation.num_tokens
    kept, held = (len(cut_sequences(part, sequence_length)) for part in (train, evaluation))
    assert kept >= 1
    assert 1 <= held <= expected
    assert held == expected or corpus.offsets.tolist().count(train.num_tokens)  # whole documents, where some fit
    assert kept + held == total


def test_histogram_estimates():
    corpus = corpus_of([8] * 30 + [16] * 10 + [1] * 3)
    histogram = histogram_of(cut_sequences(corpus, 16).lengths, 16)
    assert histogram == LengthHistogram.from_json(histogram.to_json())
    assert (histogram.num_sequences, histogram.mean, histogram.longest) == (40, 10.0, 16)
    assert histogram.packed_rows_per_sequence() == pytest.approx((15 + 10) / 40, abs=0.05)
    assert histogram.flat_tokens_ratio(4) == pytest.approx(1.0, abs=0.05)
    assert histogram.visible_share(16) == 1.0
    assert histogram.visible_share(0) == pytest.approx((30 * 8 * 4 + 10 * 16 * 8) / (16 * 400))
    assert histogram.padded_tokens_ratio(1) == 1.0
    assert 1.0 < histogram.padded_tokens_ratio(16) < histogram.padded_tokens_ratio(64) <= 1.7
    long = histogram_of(cut_sequences(corpus_of([3000, 1777, 2]), 4096).lengths, 4096)
    assert len(long.counts) == 3
    assert long.num_tokens == 4779


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("kind", "packing"), [("causal-lm", False), ("causal-lm", True), ("seq2seq-lm", False)])
def test_looking_ahead_sees_what_the_batches_then_are(kind, packing, world_size):
    sequences = cut_sequences(corpus_of([3, 9, 2, 5, 14, 3, 7] * 9 + [16]), 16)
    layout = Layout(micro_batch=2, packing=packing, pad_multiple=1, world_size=world_size)
    objective = Objective(kind=kind)
    sources = [
        BatchSource(sequences=sequences, global_batch=6, layout=layout.changed(rank=rank), objective=objective, seed=3)
        for rank in range(world_size)
    ]
    steps, first = sources[0].batches_per_epoch + 2, 3
    ahead = look_ahead(sources[0], num_steps=steps, first_step=first)
    batches = [list(islice(source.batches(source.position_of_step(first)), steps)) for source in sources]
    sizes = [[[micro.num_padded_tokens for micro in batch.micro_batches] for batch in of_rank] for of_rank in batches]
    assert ahead.steps == steps
    assert ahead.num_tokens == pytest.approx(sum(batch.num_tokens for batch in batches[0]) / steps)
    assert ahead.num_padded_tokens == pytest.approx(sum(max(map(sum, ranks)) for ranks in zip(*sizes, strict=True)) / steps)
    assert ahead.longest_tokens == max(size for of_rank in sizes for step in of_rank for size in step)
    assert ahead.longest_tokens == max(max(of_rank[ahead.longest_step]) for of_rank in sizes)
    for batch in chain(*batches):  # what the model computes: of an encoder-decoder, the rows of both sides
        for micro in batch.micro_batches:
            padded = micro.num_padded_tokens
            computed = micro.arrays["input_ids"].size + (micro.arrays["labels"].size if kind == "seq2seq-lm" else 0)
            assert padded <= computed <= padded + len(micro.arrays["input_ids"])  # an odd row is split 1 longer


def test_longest_and_synthetic_batches():
    sequences = cut_sequences(corpus_of([3] * 30 + [16]), 16)
    source = BatchSource(sequences=sequences, global_batch=31, layout=Layout(micro_batch=4))
    assert look_ahead(source, num_steps=100).longest_tokens == 4 * 16
    for packing in (False, True):
        micro = synthetic_batch(Layout(micro_batch=3, packing=packing), sequence_length=16, vocab_size=50)
        assert micro.arrays["input_ids"].shape == (3, 16)
        assert micro.num_tokens == 48
        assert ("position_ids" in micro.arrays) == packing


def source_of(**changes):
    options = {"global_batch": 2, "layout": Layout(micro_batch=1), "sequences": cut_sequences(corpus_of([8] * 3), 8)}
    return BatchSource(**{**options, **changes})


@pytest.mark.parametrize(
    ("request_it", "words"),
    [
        (lambda: source_of(global_batch=9), ["3 sequences", "9", "global batch of at most 3"]),
        (lambda: source_of(global_batch=0), ["global_batch=0"]),
        (
            lambda: source_of(objective=SEQ2SEQ, layout=Layout(micro_batch=1, packing=True)),
            ["seq2seq-lm", "packing=False"],
        ),
        (lambda: source_of(objective=MASKED, layout=Layout(micro_batch=1, mask_padding=False)), ["mask_padding=True"]),
        (lambda: next(source_of().batches(Position(batch=2))), ["batch=2", "resume with"]),
        (lambda: Layout(micro_batch=1, rank=2, world_size=2), ["rank=2", "world_size=2"]),
        (lambda: Objective(kind="masked-lm").check_masks(), ["mask_token_id", "causal-lm"]),
        (lambda: cut_sequences(corpus_of([8]), 1), ["sequence_length=1"]),
        (lambda: TokenizedCorpus.from_documents([np.array([3, -100])]), ["-100"]),
        (lambda: LengthHistogram(sequence_length=8, lengths=(), counts=(), num_tokens=0), ["0 lengths"]),
    ],
)
def test_wrong_requests(request_it, words):
    with pytest.raises(RequestError) as caught:
        request_it()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_type_of_tokens_holds_their_ids():
    assert corpus_of([8]).tokens.dtype == np.uint16
    assert TokenizedCorpus.from_documents([np.array([65536])]).tokens.dtype == np.int32
    assert objective_for("causal-lm", None, vocab_size=5).pad_token_id == 0


def test_planning_batches_needs_no_torch():
    code = "import sys, upshift.training.batches.sampler; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
