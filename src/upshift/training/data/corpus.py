"""Read a training corpus from what people have: a text file, a folder, JSON lines, parquet, or a directory saved by
datasets.

Decides what one document is: a text file, a JSON line, a table row. Hidden files and folders (names that start with a
dot) are not read. A column `input_ids` (already tokenized) is used as it is, unless a text column is asked for by
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.training.data.columns import Documents, read_json_lines, read_parquet, read_saved_datasets
from upshift.value import Value

RECORD_SUFFIXES = {".json", ".jsonl"}


class CorpusSummary(Value):
    origin: str
    num_documents: int
    num_evaluation_documents: int
    num_skipped_empty: int
    num_skipped_binary: int  # files that are not UTF-8 text


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    documents: Sequence[str] | Sequence[NDArray[Any]]  # texts, or token ids where the data is already tokenized
    evaluation: Sequence[str] | Sequence[NDArray[Any]] | None
    summary: CorpusSummary

    @property
    def is_tokenized(self) -> bool:
        return not isinstance(self.documents[0], str)


def read_corpus(path: Path | str, *, text_column: str | None = None, pattern: str = "**/*") -> Corpus:
    """Read everything under `path`; `pattern` is a glob that selects the files of a folder of texts."""
    path = Path(path)
    if not path.exists():
        raise RequestError(
            f"{path} does not exist; give a text file, a folder of texts, .jsonl, .parquet, or a datasets directory"
        )
    evaluation = None
    try:
        if path.is_dir():
            documents, evaluation = _read_folder(path, text_column, pattern)
        elif path.suffix.lower() in RECORD_SUFFIXES:
            documents = read_json_lines([path], text_column=text_column)
        elif path.suffix.lower() == ".parquet":
            documents = read_parquet([path], text_column=text_column)
        else:
            documents = _read_text_files([path])
            if documents.num_skipped_binary:
                raise RequestError(f"{path} is not UTF-8 text; convert it, or give .jsonl or .parquet")
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"cannot read {error.filename or path}: {reason}; check the path and its rights") from None
    if not documents.items:
        raise RequestError(
            f"{path} holds no documents ({documents.num_skipped_empty} empty, {documents.num_skipped_binary} binary); "
            "give at least one with text"
        )
    return Corpus(
        documents=documents.items,
        evaluation=evaluation.items if evaluation and evaluation.items else None,
        summary=CorpusSummary(
            origin=str(path),
            num_documents=len(documents.items),
            num_evaluation_documents=len(evaluation.items) if evaluation else 0,
            num_skipped_empty=documents.num_skipped_empty,
            num_skipped_binary=documents.num_skipped_binary,
        ),
    )


def _read_folder(path: Path, text_column: str | None, pattern: str) -> tuple[Documents, Documents | None]:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return read_saved_datasets(path, text_column=text_column)
    files = _visible_files(path, pattern)
    suffixes = {file.suffix.lower() for file in files}
    if ".parquet" in suffixes:
        tables = [file for file in files if file.suffix.lower() == ".parquet"]
        return read_parquet(tables, text_column=text_column), None
    if suffixes == {".jsonl"}:
        return read_json_lines(files, text_column=text_column), None
    documents = _read_text_files(files)
    if not documents.items:
        raise RequestError(
            f"{path} has no readable text: {len(files)} files match {pattern!r}, {documents.num_skipped_empty} empty, "
            f"{documents.num_skipped_binary} not UTF-8 text; give a folder or pattern with text files"
        )
    return documents, None


def _visible_files(folder: Path, pattern: str) -> list[Path]:
    try:
        matches = [(file.relative_to(folder).as_posix(), file) for file in folder.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise RequestError(f"pattern {pattern!r} is not a glob ({error}); use for example '**/*.txt'") from None
    return [file for name, file in sorted(matches) if not any(part.startswith(".") for part in name.split("/"))]


def _read_text_files(files: Sequence[Path]) -> Documents:
    documents = Documents(items=[])
    for file in files:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            documents.num_skipped_binary += 1
            continue
        if "\0" in text:
            documents.num_skipped_binary += 1
        else:
            documents.add_text(text)
    return documents
