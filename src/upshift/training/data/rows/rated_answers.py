"""Give each rated answer a second sequence: its prompt with the answer of another row, from which KTO estimates its KL term.

Sequences 2 i and 2 i + 1 belong together: the rated answer after its prompt, and the mismatched one. Which rows are put together
depends on the data alone, so a mismatched sequence is the same in every epoch, whatever the batches are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import LongRows
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.tokens import CorpusWriter, RowLimit, Sequences, TokenizedCorpus

Ids = NDArray[np.int64]
ORDER_SEED = 0  # of the order in which each row gets the answer of the one before it


def rated_sequences(tokenized: TokenizedCorpus, sequence_length: int, long_rows: LongRows, origin: str) -> Sequences:
    """Return two sequences for each document: itself, and its prompt with the answer of another document.

    Both are cut at their end, as TRL does. A document without a label in its sequence is left out. The user is told how many
    documents are cut and left out, and how many answers are good and bad.
    """
    assert tokenized.labels is not None and tokenized.ratings is not None
    lengths = np.diff(tokenized.offsets)
    answer_starts = _answer_starts(tokenized)
    is_long = lengths > sequence_length
    has_labels = answer_starts < np.minimum(lengths, sequence_length)
    is_used = has_labels & ~is_long if long_rows == "drop" else has_labels
    if is_long.any():
        outcome = "left out" if long_rows == "drop" else "cut at the end"
        say_once(f"{origin}: {int(is_long.sum())} rows with more than {sequence_length} tokens are {outcome}")
    num_without_answer = int((~has_labels & (is_used == has_labels)).sum())
    if num_without_answer:
        reason = f"the completion has nothing to learn in the first {sequence_length} tokens of its row"
        say_once(f"{origin}: {num_without_answer} rows are left out, because {reason}")
    members = np.flatnonzero(is_used)
    ratings = tokenized.ratings[members]
    _report_ratings(ratings, origin)
    writer = CorpusWriter(RowLimit(sequence_length, "cut"))
    partners = members[find_partners(_prompt_numbers(tokenized, members, answer_starts))] if len(members) else members
    for member, partner in zip(members.tolist(), partners.tolist(), strict=True):
        start, end = tokenized.offsets[member : member + 2].tolist()
        middle = start + int(answer_starts[member])
        writer.add_part(tokenized.tokens[start:end], tokenized.labels[start:end])
        writer.end_row()
        writer.add_part(tokenized.tokens[start:middle], np.full(middle - start, IGNORED))
        answer = slice(int(tokenized.offsets[partner] + answer_starts[partner]), int(tokenized.offsets[partner + 1]))
        writer.add_part(tokenized.tokens[answer], tokenized.labels[answer])
        writer.end_row()
    whole = writer.finish()
    return Sequences(
        tokens=whole.tokens,
        starts=whole.offsets[:-1],
        lengths=np.diff(whole.offsets),
        sequence_length=sequence_length,
        labels=whole.labels,
        ratings=np.repeat(ratings, 2),
    )


def find_partners(prompts: Ids) -> Ids:
    """Return for each row the row whose answer follows its prompt in the mismatched sequence. Each answer is of another prompt.

    It is the next one before it, in an order that is drawn once, whose prompt differs: answers to one prompt are often neighbours
    in the data. With one prompt alone it is the one before it. ``prompts`` [rows] are equal for equal prompts.
    """
    order = np.random.default_rng(ORDER_SEED).permutation(len(prompts))
    ordered = prompts[order]
    places = np.arange(len(order))
    is_first = ordered != np.roll(ordered, 1)  # of a run of rows with one prompt
    if not is_first.any():
        before = places - 1
    else:  # places before the first run belong to the last one, which goes on from the end
        run_starts = np.maximum.accumulate(np.where(is_first, places, -1))
        before = np.where(run_starts < 0, int(np.flatnonzero(is_first)[-1]), run_starts) - 1
    partners = np.empty(len(order), np.int64)
    partners[order] = order[before]
    return partners


def _answer_starts(tokenized: TokenizedCorpus) -> Ids:
    """Return how many tokens of each document stand before its first label, at least 1: all of them without a label."""
    assert tokenized.labels is not None
    learned = np.flatnonzero(tokenized.labels != IGNORED)
    starts, ends = tokenized.offsets[:-1], tokenized.offsets[1:]
    first = np.append(learned, len(tokenized.labels))[np.searchsorted(learned, starts + 1)]
    return np.asarray(np.minimum(first, ends) - starts, np.int64)


def _prompt_numbers(tokenized: TokenizedCorpus, members: Ids, answer_starts: Ids) -> Ids:
    """Return a number for the prompt of each member [members], the same for equal prompts."""
    numbers: dict[bytes, int] = {}
    starts = tokenized.offsets[members]
    prompts = (
        np.ascontiguousarray(tokenized.tokens[start : start + length]).tobytes()
        for start, length in zip(starts.tolist(), answer_starts[members].tolist(), strict=True)
    )
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int64)


def _report_ratings(ratings: NDArray[np.bool_], origin: str) -> None:
    """Tell the user how many answers are good and bad, if they are not equally many, and that one kind is missing."""
    num_good = int(ratings.sum())
    num_bad = len(ratings) - num_good
    if num_good and num_bad:
        say_once(f"{origin}: {num_good:,} good and {num_bad:,} bad completions")
    elif len(ratings):
        kind, missing = ("good", "bad") if num_good else ("bad", "good")
        say_once(
            f"{origin}: all {len(ratings):,} completions are {kind}; without {missing} ones the model does not learn to tell "
            "them apart"
        )
