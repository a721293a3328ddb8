"""Turn rows of segments into token ids and labels.

Each segment is tokenized alone, as Axolotl and LLaMA-Factory do it, so that no token goes across a border of what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.training.data.rows.segments import Segment, SegmentRow
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.text_files import check_text

Tokenize = Callable[[Sequence[str]], list[list[int]]]


class SegmentEncoder:
    """Turns rows of segments into token ids and labels."""

    def __init__(self, tokenizer: Any, tokenize: Tokenize, around: tuple[list[int], list[int]]) -> None:
        self._tokenizer = tokenizer
        self._tokenize = tokenize
        self._before, self._after = around

    def encode(self, rows: Sequence[SegmentRow], *, learns_all: bool) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids and the labels of each row."""
        texts = [segment.text for row in rows for segment in row.segments if segment.kind == "text" and segment.text]
        for row in rows:
            check_text("".join(segment.text for segment in row.segments), row.place)
        encoded = iter(self._tokenize(texts))
        for row in rows:
            yield self._encode_row(row, encoded, learns_all=learns_all)

    def _encode_row(self, row: SegmentRow, encoded: Iterator[list[int]], *, learns_all: bool) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        closes_turn = False
        eos_id = self._eos_id(row)
        for segment in row.segments:
            if segment.kind == "closing":
                closes_turn = True
                continue
            added = self._ids_of(segment, ids, encoded, eos_id, row.place)
            is_learned = segment.is_learned or learns_all
            added_labels = added if is_learned else [IGNORED] * len(added)
            if closes_turn and added and eos_id is not None:
                added_labels = [eos_id, *added_labels[1:]]
                closes_turn = False
            ids += added
            labels += added_labels
        return ids, labels

    def _ids_of(
        self, segment: Segment, ids: list[int], encoded: Iterator[list[int]], eos_id: int | None, place: str
    ) -> list[int]:
        """Return the ids of a segment that follows other ids."""
        if segment.kind == "text":
            return next(encoded) if segment.text else []
        if segment.kind == "start":
            return self._before
        if segment.kind == "end":
            after = self._after
            return after[1:] if ids and after and ids[-1] == after[0] else after
        if segment.kind == "token":
            return [self._id_of_token(segment.text, place)]
        special_id = self._tokenizer.bos_token_id if segment.kind == "bos" else eos_id
        return [] if special_id is None else [special_id]

    def _eos_id(self, row: SegmentRow) -> int | None:
        if row.eos_token is not None:
            return self._id_of_token(row.eos_token, row.place)
        eos_id: int | None = self._tokenizer.eos_token_id
        return eos_id

    def _id_of_token(self, token: str, place: str) -> int:
        """Return the id of a special token. Raise RequestError if the tokenizer does not have it."""
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise RequestError(
                f"{place}: the template writes the special token {token}, which the tokenizer does not have; use the template of "
                "this model, or add the token and resize the model's embeddings"
            )
        return int(token_id)
