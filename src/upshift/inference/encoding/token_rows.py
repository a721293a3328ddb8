"""Write scores of tokens to a file, a row a text, block by block, so that a stopped run can continue."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from upshift.inference.encoding.token_scores import TokenScores
from upshift.inference.lines import blocks
from upshift.inference.unfinished_lines import UnfinishedLines

DIGITS = 7  # behind the point: what fp32 tells apart near 1


class TokenRows:
    """Rows with lists of one length each: the tokens, where each starts and ends in the text, its likeliest label and
    that label's score. They are JSON lines until the output is whole. ``made_of`` says which input and setup they
    belong to."""

    block = 4096  # texts at once in memory, with the scores of all labels

    def __init__(self, output: Path, total: int, made_of: str, labels: tuple[str, ...]) -> None:
        self._lines = UnfinishedLines(output, total, made_of)
        self._labels = labels

    @property
    def done(self) -> int:
        return self._lines.done

    def add(self, found: list[TokenScores]) -> None:
        self._lines.add(map(self._row, found))

    def close(self) -> None:
        self._lines.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        output, partial = self._lines.output, self._lines.partial
        if output.suffix != ".parquet":
            self._lines.finish()
            return
        whole = partial.with_name(f"{output.name}.writing")
        with self._lines.writing(), partial.open("rb") as lines:
            _write_parquet(blocks(lines, size=self.block), whole)
        self._lines.finish(whole)

    def _row(self, one: TokenScores) -> dict[str, list[Any]]:
        likeliest = one.scores.argmax(axis=1)
        return {
            "token": one.tokens,
            "start": one.offsets[:, 0].tolist(),
            "end": one.offsets[:, 1].tolist(),
            "label": [self._labels[place] for place in likeliest],
            "score": np.round(one.scores.max(axis=1).astype(np.float64), DIGITS).tolist(),
        }


def _write_parquet(rows: Iterator[list[bytes]], path: Path) -> None:
    """Write ``rows``, blocks of JSON lines, as Parquet."""
    import pyarrow
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    text, place, score = pyarrow.list_(pyarrow.string()), pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    schema = pyarrow.schema([("token", text), ("start", place), ("end", place), ("label", text), ("score", score)])
    parse = arrow_json.ParseOptions(explicit_schema=schema)
    with parquet.ParquetWriter(path, schema) as writer:
        for block in rows:
            data = b"".join(block)
            whole = arrow_json.ReadOptions(block_size=len(data) + 1)  # a row that crosses two blocks is an error
            writer.write_table(arrow_json.read_json(BytesIO(data), read_options=whole, parse_options=parse))
