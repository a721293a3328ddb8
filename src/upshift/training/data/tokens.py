"""Hold tokens and cut them into sequences.

Token ids lie in one flat array with document borders. A sequence is a part (start, length) of it, of at most
``sequence_length`` tokens of one document. Long documents are cut into consecutive pieces. A piece shorter than two tokens is
dropped, because it predicts nothing.

The flat array is in memory or, if it is large, in a file of the cache that is mapped into memory. The file has no name, so
nothing is left of it when the process ends.
"""

from __future__ import annotations

import sys
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.planning.workload import MAX_BUCKETS, LengthHistogram
from upshift.settings import read_settings
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import LongRows
from upshift.training.data.rows.token_rows import IGNORED
from upshift.units import MIB

Numbers = Sequence[int] | NDArray[Any]
EVALUATION_SHARE = 0.02
MAX_EVALUATION_SEQUENCES = 64
PARTNER_SEED = 0  # of the order in which each row gets the answer of the one before it


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedCorpus:
    """The token ids of documents in one flat array."""

    tokens: NDArray[Any]  # uint16 if every id fits, else int32
    offsets: NDArray[np.int64]  # document d is tokens[offsets[d]:offsets[d + 1]]
    labels: NDArray[Any] | None = None  # one for each token, -100: not learned; None: the tokens are the labels
    # The tokens of each document that an encoder reads; the labels after them are those of the decoder. None: see Objective.
    source_lengths: NDArray[np.int64] | None = None
    margins: NDArray[np.float32] | None = None  # of the pair that each document belongs to; None: the data has no margins
    ratings: NDArray[np.bool_] | None = None  # whether the answer of each document is a good one; None: the data rates none
    num_long: int = 0  # documents that were longer than the limit of the writer, which cut them or left them out

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_documents(cls, documents: Iterable[NDArray[Any]]) -> TokenizedCorpus:
        """Join documents. Raise RequestError for ids that no vocabulary has."""
        arrays = [np.asarray(document) for document in documents]
        lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        filled = [array for array in arrays if len(array)]
        lowest = min((int(array.min()) for array in filled), default=0)
        highest = max((int(array.max()) for array in filled), default=0)
        if lowest < 0 or highest >= 2**31:
            raise RequestError(
                f"the data holds token id {lowest if lowest < 0 else highest}; ids are 0 to the vocabulary size - 1: "
                "tokenize the text again, padding is added here"
            )
        dtype = np.uint16 if highest < 2**16 else np.int32
        tokens = np.empty(int(offsets[-1]), dtype)
        for document, start in zip(arrays, offsets[:-1].tolist(), strict=True):
            tokens[start : start + len(document)] = document
        return cls(tokens=tokens, offsets=offsets)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sequences as parts of a flat array of token ids."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sequence_length: int
    labels: NDArray[Any] | None = None  # as in TokenizedCorpus
    source_lengths: NDArray[np.int64] | None = None  # as in TokenizedCorpus, for each sequence
    # Of pairs: the log-probability of each sequence's labels by the model before the training. None: not computed yet.
    reference: NDArray[np.float32] | None = None
    margins: NDArray[np.float32] | None = None  # as in TokenizedCorpus, for each sequence
    ratings: NDArray[np.bool_] | None = None  # as in TokenizedCorpus, for each sequence

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the fields that are arrays, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def num_labels(self, members: NDArray[np.int64], *, first: int) -> NDArray[np.int64]:
        """Return how many labels of each sequence count, from position ``first`` on, which is 1 if labels are shifted."""
        if self.labels is None:
            return np.maximum(self.lengths[members] - first, 0)
        spans = zip(self.starts[members].tolist(), self.lengths[members].tolist(), strict=True)
        counts = [np.count_nonzero(self.labels[start + first : start + length] != IGNORED) for start, length in spans]
        return np.array(counts, np.int64)

    def select(self, members: NDArray[np.int64]) -> Sequences:
        source_lengths = None if self.source_lengths is None else self.source_lengths[members]
        reference = None if self.reference is None else self.reference[members]
        margins = None if self.margins is None else self.margins[members]
        ratings = None if self.ratings is None else self.ratings[members]
        return replace(
            self,
            starts=self.starts[members],
            lengths=self.lengths[members],
            source_lengths=source_lengths,
            reference=reference,
            margins=margins,
            ratings=ratings,
        )

    def without_other_tokens(self) -> Sequences:
        """Return the same sequences over arrays that have no other tokens."""
        spans = [slice(start, start + length) for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)]
        tokens = np.concatenate([self.tokens[span] for span in spans])
        labels = None if self.labels is None else np.concatenate([self.labels[span] for span in spans])
        return replace(self, tokens=tokens, labels=labels, starts=np.cumsum(self.lengths) - self.lengths)


def cut_sequences(tokenized: TokenizedCorpus, sequence_length: int) -> Sequences:
    """Cut documents into sequences of at most ``sequence_length`` tokens.

    A document with a source length is never longer, because the tokenizer cuts its two sides. It becomes one sequence.
    """
    if sequence_length < 2:
        raise RequestError(f"sequence_length={sequence_length} is not usable; choose at least 2")
    num_pieces = _count_pieces(tokenized, sequence_length)
    document = np.repeat(np.arange(tokenized.num_documents), num_pieces)
    piece_in_document = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = tokenized.offsets[document] + piece_in_document * sequence_length
    lengths = np.minimum(sequence_length, tokenized.offsets[document + 1] - starts)
    return Sequences(
        tokens=tokenized.tokens,
        starts=starts,
        lengths=lengths,
        sequence_length=sequence_length,
        labels=tokenized.labels,
        source_lengths=None if tokenized.source_lengths is None else tokenized.source_lengths[document],
    )


def view_sequences(tokenized: TokenizedCorpus, side_length: int, num_sides: int, long_rows: LongRows) -> Sequences:
    """Return the sequences that training cuts from whole documents, without copying tokens.

    ``side_length`` is the sequence length of the model, or of each of its two sides. In a pair only the labels are cut.
    """
    lengths = np.diff(tokenized.offsets)
    sequence_length = side_length * num_sides
    source_lengths = tokenized.source_lengths
    if source_lengths is not None:
        lengths = source_lengths + np.minimum(lengths - source_lengths, side_length)
    elif long_rows == "split":
        return cut_sequences(tokenized, sequence_length)
    elif long_rows == "cut":
        lengths = np.minimum(lengths, sequence_length)
    else:
        lengths = np.where(lengths > sequence_length, 0, lengths)
    sequences = Sequences(
        tokens=tokenized.tokens,
        starts=tokenized.offsets[:-1],
        lengths=lengths,
        sequence_length=sequence_length,
        labels=tokenized.labels,
        source_lengths=source_lengths,
    )
    return sequences.select(np.flatnonzero(lengths >= 2))


def num_held_out(total: int, size: float | None) -> int:
    """Return how many of the sequences, or of the pairs, are held out for evaluation.

    Raise RequestError if none would be left to train on.

    Args:
        total: all of them.
        size: a share below 1, or a number. None: about 2 %, at least 1, at most 64, and none of fewer than two.
    """
    if size is None:
        return min(max(round(total * EVALUATION_SHARE), 1), MAX_EVALUATION_SEQUENCES) if total > 1 else 0
    number = int(size) if size >= 1 else max(round(total * size), int(size > 0))
    if number and number >= total:
        raise RequestError(
            f"--eval-size {size:g} holds out {number} of {total} sequences or pairs, and leaves none to train on; give a smaller "
            "one"
        )
    return number


def hold_out_evaluation(
    tokenized: TokenizedCorpus, *, sequence_length: int, size: float | None = None
) -> tuple[TokenizedCorpus, TokenizedCorpus | None]:
    """Split the last documents off for evaluation, as many sequences as ``num_held_out`` says.

    Hold out whole documents if they fit into that number, else the end of the last document. Return None in place of the
    evaluation corpus if there is none.
    """
    num_pieces = _count_pieces(tokenized, sequence_length)
    total = int(num_pieces.sum())
    number = num_held_out(total, size)
    if not number:
        return tokenized, None
    from_the_end = np.cumsum(num_pieces[::-1])
    whole_documents = int(np.searchsorted(from_the_end, number, side="right"))
    if whole_documents and from_the_end[whole_documents - 1] > 0:
        document = tokenized.num_documents - whole_documents
        return _slice_documents(tokenized, 0, document), _slice_documents(tokenized, document, tokenized.num_documents)
    last = int(np.flatnonzero(num_pieces)[-1])
    cut = int(tokenized.offsets[last] + (num_pieces[last] - number) * sequence_length)
    train = _slice_corpus(tokenized, 0, cut, np.append(tokenized.offsets[: last + 1], cut).astype(np.int64))
    evaluation = _slice_corpus(tokenized, cut, tokenized.num_tokens, np.concatenate([[0], tokenized.offsets[last + 1 :] - cut]))
    return train, evaluation


def hold_out_rows(
    tokenized: TokenizedCorpus, size: float | None = None, *, documents_per_row: int
) -> tuple[TokenizedCorpus, TokenizedCorpus | None]:
    """Split the last rows of the data off for evaluation, as many as ``num_held_out`` says. The answers of a pair are one row."""
    num_rows = tokenized.num_documents // documents_per_row
    number = num_held_out(num_rows, size)
    if not number:
        return tokenized, None
    first = documents_per_row * (num_rows - number)
    return _slice_documents(tokenized, 0, first), _slice_documents(tokenized, first, tokenized.num_documents)


def pair_sequences(tokenized: TokenizedCorpus, sequence_length: int, long_rows: LongRows, origin: str) -> Sequences:
    """Return documents 2 i and 2 i + 1 as sequences 2 i and 2 i + 1: a chosen and a rejected answer after their prompt.

    Long documents are cut at their end, as TRL does by default. A pair without a label in one of its sequences is left out. The
    user is told how many pairs are cut and left out.
    """
    whole_lengths = np.diff(tokenized.offsets)
    sequences = Sequences(
        tokens=tokenized.tokens,
        starts=tokenized.offsets[:-1],
        lengths=np.minimum(whole_lengths, sequence_length),
        sequence_length=sequence_length,
        labels=tokenized.labels,
        margins=tokenized.margins,
    )
    is_long = np.asarray((whole_lengths > sequence_length).reshape(-1, 2).any(axis=1))
    num_labels = sequences.num_labels(np.arange(len(sequences)), first=1)
    has_labels = np.asarray((num_labels > 0).reshape(-1, 2).all(axis=1))
    words = ("pairs", " in a row", "an answer")
    is_used = _choose_used(is_long, has_labels, long_rows, f"{origin}: ", words, sequence_length)
    return sequences.select(np.flatnonzero(np.repeat(is_used, 2)))


def _choose_used(
    is_long: NDArray[Any], has_labels: NDArray[Any], long_rows: LongRows, start: str, words: tuple[str, str, str], length: int
) -> NDArray[Any]:
    """Return which pairs or rows are learned from. Tell the user how many are cut or left out.

    Args:
        is_long, has_labels: for each pair or row, whether it is longer than ``length``, and has a label within it.
        start: the beginning of the messages.
        words: the name of the pairs or rows, what follows "tokens" in a message, and the name of what is learned.
        length: the longest sequence, in tokens.
    """
    rows, of_each, answer = words
    is_used = has_labels & ~is_long if long_rows == "drop" else has_labels
    if is_long.any():
        outcome = "left out" if long_rows == "drop" else "cut at the end"
        say_once(f"{start}{int(is_long.sum())} {rows} with more than {length} tokens{of_each} are {outcome}")
    num_without_answer = int((~has_labels & (is_used == has_labels)).sum())
    if num_without_answer:
        reason = f"{answer} has nothing to learn in the first {length} tokens of its row"
        say_once(f"{start}{num_without_answer} {rows} are left out, because {reason}")
    return is_used


def rated_sequences(tokenized: TokenizedCorpus, sequence_length: int, long_rows: LongRows, origin: str) -> Sequences:
    """Return two sequences for each document: a rated answer after its prompt, and this prompt with the answer of another one.

    KTO estimates its KL term from the second ones. They depend on the data alone, so they are the same in each epoch. Both are
    cut at their end, as TRL does. A document without a label in its sequence is left out. The user is told how many are cut
    and left out.
    """
    assert tokenized.labels is not None and tokenized.ratings is not None
    lengths = np.diff(tokenized.offsets)
    answer_starts = _answer_starts(tokenized)
    is_long = lengths > sequence_length
    has_labels = answer_starts < np.minimum(lengths, sequence_length)
    words = ("rows", "", "the completion")
    is_used = _choose_used(is_long, has_labels, long_rows, f"{origin}: ", words, sequence_length)
    members = np.flatnonzero(is_used)
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
        ratings=np.repeat(tokenized.ratings[members], 2),
    )


def find_partners(prompts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row the row whose answer follows its prompt in the mismatched sequence. Each answer is of another prompt.

    It is the next one before it, in an order that is drawn once, whose prompt differs: answers to one prompt are often neighbours
    in the data. With one prompt alone it is the one before it. ``prompts`` [rows] are equal for equal prompts.
    """
    order = np.random.default_rng(PARTNER_SEED).permutation(len(prompts))
    ordered = prompts[order]
    # Where runs of rows with one prompt begin. The last run may go on at the start of the order.
    run_starts = np.flatnonzero(ordered != np.roll(ordered, 1))
    places = np.arange(len(order))
    before = run_starts[np.searchsorted(run_starts, places, side="right") - 1] - 1 if len(run_starts) else places - 1
    partners = np.empty(len(order), np.int64)
    partners[order] = order[before]
    return partners


def _answer_starts(tokenized: TokenizedCorpus) -> NDArray[np.int64]:
    """Return how many tokens of each document stand before its first label, at least 1: all of them without a label."""
    assert tokenized.labels is not None
    learned = np.flatnonzero(tokenized.labels != IGNORED)
    starts, ends = tokenized.offsets[:-1], tokenized.offsets[1:]
    first = np.append(learned, len(tokenized.labels))[np.searchsorted(learned, starts + 1)]
    return np.asarray(np.minimum(first, ends) - starts, np.int64)


def _prompt_numbers(
    tokenized: TokenizedCorpus, members: NDArray[np.int64], answer_starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a number for the prompt of each member [members], the same for equal prompts."""
    numbers: dict[bytes, int] = {}
    starts = tokenized.offsets[members]
    prompts = (
        np.ascontiguousarray(tokenized.tokens[start : start + length]).tobytes()
        for start, length in zip(starts.tolist(), answer_starts[members].tolist(), strict=True)
    )
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int64)


def highest_id(tokens: NDArray[Any], labels: NDArray[Any] | None) -> int:
    """Return the highest token id of tokens and labels."""
    highest = int(tokens.max(initial=0))
    return highest if labels is None else max(highest, int(labels.max(initial=0)))


def count_single_tokens(tokenized: TokenizedCorpus, sequence_length: int) -> int:
    """Return how many pieces of one token ``cut_sequences`` drops."""
    return int(np.count_nonzero(np.diff(tokenized.offsets) % sequence_length == 1))


def histogram_of(lengths: NDArray[np.int64], sequence_length: int) -> LengthHistogram:
    """Return the histogram of lengths up to ``sequence_length``, rounded up to at most MAX_BUCKETS values."""
    bucket = -(-sequence_length // MAX_BUCKETS)
    rounded = np.minimum(-(-lengths // bucket) * bucket, sequence_length)
    values, counts = np.unique(rounded, return_counts=True)
    return LengthHistogram(
        sequence_length=sequence_length,
        lengths=tuple(values.tolist()),
        counts=tuple(counts.tolist()),
        num_tokens=int(lengths.sum()),
    )


def _count_pieces(tokenized: TokenizedCorpus, sequence_length: int) -> NDArray[np.int64]:
    """Return how many pieces of at least two tokens each document has. Only its last piece can be shorter."""
    lengths = np.diff(tokenized.offsets)
    num_full, remainder = np.divmod(lengths, sequence_length)
    return np.asarray(num_full + (remainder >= 2), np.int64)


def _slice_documents(tokenized: TokenizedCorpus, first: int, end: int) -> TokenizedCorpus:
    start = int(tokenized.offsets[first])
    stop = int(tokenized.offsets[end])
    part = _slice_corpus(tokenized, start, stop, tokenized.offsets[first : end + 1] - start)
    source_lengths = None if tokenized.source_lengths is None else tokenized.source_lengths[first:end]
    margins = None if tokenized.margins is None else tokenized.margins[first:end]
    ratings = None if tokenized.ratings is None else tokenized.ratings[first:end]
    return replace(part, source_lengths=source_lengths, margins=margins, ratings=ratings)


def _slice_corpus(tokenized: TokenizedCorpus, start: int, stop: int, offsets: NDArray[np.int64]) -> TokenizedCorpus:
    labels = None if tokenized.labels is None else tokenized.labels[start:stop]
    return TokenizedCorpus(tokens=tokenized.tokens[start:stop], offsets=offsets, labels=labels)


@dataclass(frozen=True)
class RowLimit:
    """The tokens that a row may have, and what happens to longer ones. ``split`` keeps them whole for ``cut_sequences``."""

    num_tokens: int = sys.maxsize
    long_rows: LongRows = "split"


NO_LIMIT = RowLimit()


class CorpusWriter:
    """Write the tokens of rows one after another. Long rows are cut or left out before they are written."""

    def __init__(self, limit: RowLimit = NO_LIMIT) -> None:
        self._limit = limit
        self._tokens = TokenFile(np.uint16)
        self._labels: TokenFile | None = None
        self._offsets = array("q", [0])
        self._source_lengths = array("q")
        self._margins = array("f")
        self._ratings = bytearray()
        self._row_length = 0
        self._parts: list[tuple[Numbers, Numbers | None]] = []  # of a row that is perhaps left out
        self._num_long = 0

    def add_part(self, ids: Numbers, labels: Numbers | None = None) -> None:
        """Add the next tokens of the row, and the label of each."""
        if labels is not None and self._labels is None:
            self._labels = TokenFile(np.int32)
        room = max(self._limit.num_tokens - self._row_length, 0)
        self._row_length += len(ids)
        if self._limit.long_rows == "cut":
            self._write(ids[:room], None if labels is None else labels[:room])
        elif self._limit.long_rows == "split":
            self._write(ids, labels)
        elif self._row_length > self._limit.num_tokens:
            self._parts.clear()
        else:
            self._parts.append((ids, labels))

    def end_row(self, source_length: int | None = None, *, margin: float | None = None, rating: bool | None = None) -> None:
        """End the row. The first ``source_length`` tokens are those of an encoder. ``margin`` is that of the row's pair.

        ``rating``: whether the row's answer is a good one.
        """
        is_long = self._row_length > self._limit.num_tokens
        self._row_length = 0
        self._num_long += is_long
        for ids, labels in self._parts:
            self._write(ids, labels)
        self._parts.clear()
        if is_long and self._limit.long_rows == "drop":
            return
        self._offsets.append(self._tokens.length)
        if source_length is not None:
            self._source_lengths.append(source_length)
        if margin is not None:
            self._margins.append(margin)
        if rating is not None:
            self._ratings.append(rating)

    def finish(self) -> TokenizedCorpus:
        """Return the rows. Nothing can be added afterwards."""
        return TokenizedCorpus(
            tokens=self._tokens.finish(),
            offsets=np.array(self._offsets, np.int64),
            labels=None if self._labels is None else self._labels.finish(),
            source_lengths=np.array(self._source_lengths, np.int64) if self._source_lengths else None,
            margins=np.array(self._margins, np.float32) if self._margins else None,
            ratings=np.frombuffer(bytes(self._ratings), np.bool_) if self._ratings else None,
            num_long=self._num_long,
        )

    def _write(self, ids: Numbers, labels: Numbers | None) -> None:
        self._tokens.add(ids)
        if labels is not None and self._labels is not None:
            self._labels.add(labels)


IN_MEMORY_BYTES = 8 * MIB
CHUNK_SIZE = 2**18  # numbers written at once


class TokenFile:
    """A growing flat array of integers. uint16 becomes int32 at the first number that needs it."""

    def __init__(self, dtype: Any) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._pending: list[NDArray[Any]] = []
        self._num_pending = 0
        self._file = self._new_file()

    def add(self, numbers: Numbers) -> None:
        if len(numbers):
            self._pending.append(np.asarray(numbers, np.int32))
            self._num_pending += len(numbers)
            self.length += len(numbers)
            if self._num_pending >= CHUNK_SIZE:
                self._flush()

    def finish(self) -> NDArray[Any]:
        """Return all numbers, read-only. Nothing can be added afterwards."""
        self._flush()
        if self.length * self._dtype.itemsize <= IN_MEMORY_BYTES:
            self._file.seek(0)
            return np.frombuffer(self._file.read(), self._dtype)
        self._write(self._file.flush)
        return np.memmap(self._file, self._dtype, mode="r", shape=(self.length,))

    def _flush(self) -> None:
        if not self._pending:
            return
        numbers = np.concatenate(self._pending)
        self._pending = []
        self._num_pending = 0
        if self._dtype == np.uint16 and int(numbers.max()) >= 2**16:
            self._widen()
        self._write(self._file.write, numbers.astype(self._dtype).tobytes())

    def _widen(self) -> None:
        """Rewrite the file of uint16 numbers as int32."""
        narrow_file = self._file
        self._file = self._new_file()
        self._dtype = np.dtype(np.int32)
        narrow_file.seek(0)
        while chunk := narrow_file.read(CHUNK_SIZE * 2):
            self._write(self._file.write, np.frombuffer(chunk, np.uint16).astype(np.int32).tobytes())
        narrow_file.close()

    def _new_file(self) -> Any:
        return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(make_cache_folder()))  # noqa: SIM115

    def _write(self, write: Any, *arguments: Any) -> Any:
        """Call ``write``. Raise RequestError if it fails, for example because the disk is full."""
        try:
            return write(*arguments)
        except OSError as error:
            raise cannot_write(error, read_settings().cache_dir) from None


def make_cache_folder() -> Path:
    """Return the folder of the cache, which is made if it can be. Writing fails later if it cannot: only much data is written."""
    folder = read_settings().cache_dir
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def cannot_write(error: OSError, folder: Path) -> RequestError:
    """Return the error about tokens that a folder does not take, for example because the disk is full."""
    variable = "UPSHIFT_CACHE" if folder == read_settings().cache_dir else "TMPDIR"
    return RequestError(
        f"the tokens of the data cannot be written to {folder} ({error.strerror or error}); free space there, or name a folder "
        f"with room in {variable}"
    )
