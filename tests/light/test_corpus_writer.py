"""Rows are cut or left out before they are written: what is written is what plain Python keeps, and nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from upshift.training.data.tokens import CorpusWriter, RowLimit, TokenFile

ROWS = st.lists(st.lists(st.lists(st.integers(0, 70_000), max_size=7), max_size=4), min_size=1, max_size=20)


@pytest.mark.parametrize("long_rows", ["cut", "split", "drop"])
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS, length=st.integers(1, 12), has_labels=st.booleans())
def test_only_the_tokens_that_are_kept_are_written(long_rows, rows, length, has_labels, monkeypatch):
    added: list[int] = []
    add = TokenFile.add

    def counting_add(file: TokenFile, numbers: Any) -> None:
        added.append(len(numbers))
        add(file, numbers)

    monkeypatch.setattr(TokenFile, "add", counting_add)
    writer = CorpusWriter(RowLimit(length, long_rows))
    for row in rows:
        for part in row:
            writer.add_part(part, [-token for token in part] if has_labels else None)
        writer.end_row()
    written = writer.finish()
    whole = [sum(row, []) for row in rows]
    kept = [row if long_rows == "split" else row[:length] for row in whole if long_rows != "drop" or len(row) <= length]
    spans = list(zip(written.offsets[:-1].tolist(), written.offsets[1:].tolist(), strict=True))
    assert [written.tokens[start:end].tolist() for start, end in spans] == kept
    if has_labels and any(rows):
        assert written.labels is not None
        assert [(-written.labels[start:end]).tolist() for start, end in spans] == kept
    assert written.num_long == sum(len(row) > length for row in whole)
    assert sum(added) == sum(map(len, kept)) * (2 if has_labels else 1)
    monkeypatch.undo()


def test_data_of_which_all_rows_are_left_out_still_has_labels():
    writer = CorpusWriter(RowLimit(2, "drop"))
    writer.add_part([1, 2, 3], [1, 2, 3])
    writer.end_row()
    written = writer.finish()
    assert (written.num_documents, written.num_long) == (0, 1) and written.labels is not None
