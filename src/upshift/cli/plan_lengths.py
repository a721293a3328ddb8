"""Read the lengths of the sequences of data: as the request cuts them, and cut at other lengths from one reading."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

from upshift.cli import show
from upshift.planning.lengths import LengthHistogram


def read_lengths(
    model: str, data: str | None, *, sequence_length: int, text_column: str | None = None
) -> LengthHistogram | None:
    """Return the lengths of the sequences, or None if every sequence is full or there is no data."""
    if data is None:
        return None
    from upshift.training.run import lengths_of  # reading data needs tokenizers

    with show.step(f"Reading the lengths of {data}"):
        found: LengthHistogram | None = lengths_of(model, data, sequence_length=sequence_length, text_column=text_column)
    return found


def lengths_at(model: str, data: str, *, text_column: str | None = None) -> Callable[[int], LengthHistogram | None]:
    """Return a function that gives the lengths of the data cut at any length, or None if all sequences are full then."""

    @cache
    def documents() -> tuple[int, ...]:
        from upshift.models.source import find_model
        from upshift.training.data.corpus import read_corpus
        from upshift.training.data.tokenizer import load_tokenizer, tokenize

        with show.step(f"Reading the documents of {data}"):
            corpus, source = read_corpus(data, text_column=text_column), find_model(model)
            tokenizer = None if corpus.is_tokenized else load_tokenizer(source.directory or source.reference)
            offsets = tokenize(corpus.documents, tokenizer).offsets.tolist()
        return tuple(end - start for start, end in itertools.pairwise(offsets))

    @cache
    def at(sequence_length: int) -> LengthHistogram | None:
        found = LengthHistogram.of_documents(documents(), sequence_length)
        return None if found.mean >= found.sequence_length else found

    return at
