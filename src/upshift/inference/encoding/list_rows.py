"""Write results whose rows have different lengths: token scores, sparse vectors, and a vector for each token.

Rows are JSON lines until the output is complete, so that a stopped run can continue. Then they become Parquet if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from upshift.inference.encoding.files import removed_on_failure
from upshift.inference.encoding.model_config import Output
from upshift.inference.encoding.run import SparseVector, TokenScores
from upshift.inference.resumable_output import UnfinishedLines, read_blocks

DIGITS = 7  # after the decimal point: the precision of fp32 near 1


class ListRows:
    """An output of one JSON object for each text, with ``identity`` as for ``Rows``.

    The columns of token scores are lists of one length: the tokens, the offsets where each starts and ends in the text, its
    likeliest label and that label's score. Those of sparse vectors are the indices and the values. Token vectors have one
    column: a list of vectors."""

    def __init__(self, output: Path, total: int, identity: str, result: Output, labels: tuple[str, ...] = ()) -> None:
        self.block = 256 if result == "sparse vectors" else 4096  # texts in memory at once, with the scores of all labels
        self._lines = UnfinishedLines(output, total, identity)
        self._result = result
        self._labels = labels

    @property
    def done(self) -> int:
        return self._lines.done

    def add(self, results: list[Any]) -> None:
        rows: dict[str, Callable[[Any], dict[str, list[Any]]]]
        rows = {"token scores": self._scored, "sparse vectors": _sparse_row, "token vectors": _vectors_row}
        self._lines.add(map(rows[self._result], results))

    def close(self) -> None:
        self._lines.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        output = self._lines.output
        partial = self._lines.partial
        if output.suffix != ".parquet":
            self._lines.finish()
            return
        complete_file = partial.with_name(f"{output.name}.writing")
        with self._lines.writing(), partial.open("rb") as lines, removed_on_failure(complete_file):
            _write_parquet(read_blocks(lines, size=self.block), complete_file, self._result)
        self._lines.finish(complete_file)

    def _scored(self, result: TokenScores) -> dict[str, list[Any]]:
        likeliest = result.scores.argmax(axis=1)
        return {
            "token": result.tokens,
            "start": result.offsets[:, 0].tolist(),
            "end": result.offsets[:, 1].tolist(),
            "label": [self._labels[index] for index in likeliest],
            "score": _rounded(result.scores.max(axis=1)),
        }


def _sparse_row(result: SparseVector) -> dict[str, list[Any]]:
    return {"index": result.indices.tolist(), "value": _rounded(result.values)}


def _vectors_row(result: np.ndarray) -> dict[str, list[Any]]:
    return {"vectors": _rounded(result)}


def _rounded(numbers: np.ndarray) -> list[Any]:
    rounded: list[Any] = np.round(numbers.astype(np.float64), DIGITS).tolist()
    return rounded


def _write_parquet(blocks: Iterator[list[bytes]], path: Path, result: Output) -> None:
    """Write blocks of JSON lines as Parquet."""
    import pyarrow
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    strings = pyarrow.list_(pyarrow.string())
    numbers = pyarrow.list_(pyarrow.int32())
    values = pyarrow.list_(pyarrow.float32())
    columns = {
        "token scores": [("token", strings), ("start", numbers), ("end", numbers), ("label", strings), ("score", values)],
        "sparse vectors": [("index", numbers), ("value", values)],
        "token vectors": [("vectors", pyarrow.list_(values))],
    }
    schema = pyarrow.schema(columns[result])
    parse = arrow_json.ParseOptions(explicit_schema=schema)
    with parquet.ParquetWriter(path, schema) as writer:
        for lines in blocks:
            data = b"".join(lines)
            options = arrow_json.ReadOptions(block_size=len(data) + 1)  # one block: a line in two blocks is an error
            writer.write_table(arrow_json.read_json(BytesIO(data), read_options=options, parse_options=parse))
