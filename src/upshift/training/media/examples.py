"""Define what the Trainer trains on: the examples of a run, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.training.data.data_files import say_once
from upshift.training.media.rows import MediaRow, MediaRows

Collate = Callable[[Sequence[Any]], dict[str, Any]]
Progress = Callable[[int, int], None]  # rows that are read, and all of them


class Examples(Dataset[Any]):
    """The examples of a split. Their images and sounds are read when a batch is made."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Any:
        return self._members[index]


class Preprocessors(NamedTuple):
    """The processors of a model, which are saved beside it."""

    parts: tuple[Any, ...]

    def __len__(self) -> int:
        """Return the entries of the vocabulary, by which the size of the saved files is estimated."""
        tokenizers = (getattr(part, "tokenizer", part) for part in self.parts)
        return sum(len(tokenizer) for tokenizer in tokenizers if hasattr(tokenizer, "get_vocab"))

    def save_pretrained(self, directory: Path) -> None:
        for part in self.parts:
            part.save_pretrained(directory)


@dataclass(frozen=True, kw_only=True)
class MediaData:
    """The examples of a run, and what makes batches of them."""

    training: Examples
    evaluation: Examples | None
    collate: Collate
    preprocessors: Preprocessors
    describe: Callable[[Any], list[tuple[str, bool]]]  # the parts of an example, and whether each is learned
    label_names: tuple[str, ...] = ()  # of a classifier


def load_processor(source: ModelSource, auto_class: str) -> Any:
    """Return a processor of the model's files. ``auto_class``: its Auto class. Raise RequestError if none loads."""
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(source.directory)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        reason = one_line(error, limit=200)
        raise RequestError(
            f"{source.base_reference!r} has no {auto_class} that loads ({reason}); save one beside the model"
        ) from None


def join_places(places: Sequence[str]) -> str:
    """Return the places of the rows of a batch, for an error of all of them."""
    return places[0] if len(places) == 1 else f"one of {', '.join(places[:8])}"


def read_splits(rows: MediaRows, read: Callable[[MediaRow], Any | None], progress: Progress) -> tuple[list[Any], list[Any]]:
    """Return the examples that ``read`` makes of the rows of both splits. Tell the user of how many it makes none."""
    total = len(rows.training) + len(rows.evaluation)
    splits: tuple[list[Any], list[Any]] = ([], [])
    done = 0
    for split, examples in zip((rows.training, rows.evaluation), splits, strict=True):
        for row in split:
            example = read(row)
            if example is not None:
                examples.append(example)
            done += 1
            progress(done, total)
    num_left_out = total - sum(map(len, splits))
    if num_left_out:
        say_once(f"{rows.origin}: {num_left_out} rows are left out, because nothing is learned of them")
    if not splits[0]:
        raise RequestError(f"{rows.origin} has no row of which something is learned; give at least one")
    return splits
