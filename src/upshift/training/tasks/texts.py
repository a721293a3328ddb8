"""Load the tokenizer of a task on texts, and pad its rows to one width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upshift.errors import RequestError
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.tokenizer import load_tokenizer
from upshift.training.tasks.rows import Preprocessors, Progress, TaskData, TaskRow, TaskRows, make_task_data, read_splits

TYPES = "token_type_ids"
MASK = "attention_mask"
Numbers = Sequence[int]


class TextExample(NamedTuple):
    """The tokens [T] of a text, the part of each of them (None: of all, the first), and what is learned of them."""

    ids: np.ndarray
    types: np.ndarray | None
    learned: Any


class TextReader:
    """Makes tokens of the texts of rows, and counts those that are longer than the model reads."""

    def __init__(self, source: ModelSource, options: DataOptions, sequence_length: int | None) -> None:
        self.tokenizer: Any = load_tokenizer(source.directory or source.reference)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        own_limit = min(int(self.tokenizer.model_max_length), 2**30)
        self.length = min(sequence_length_of(source, sequence_length), own_limit)
        self.drops = options.long_rows == "drop"
        self.num_long = 0

    def need_fast(self, purpose: str) -> None:
        """Raise RequestError for a tokenizer that does not say where its tokens are in a text."""
        if not self.tokenizer.is_fast:
            raise RequestError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} has no tokenizer.json, which {purpose} needs; save one with "
                "transformers' fast tokenizer"
            )

    def take_words(self) -> None:
        """Load the tokenizer so that it takes single words. One of bytes then puts a space before each."""
        if getattr(self.tokenizer, "add_prefix_space", None) is False:
            self.tokenizer = type(self.tokenizer).from_pretrained(self.tokenizer.name_or_path, add_prefix_space=True)

    def encode(self, *texts: Any, **options: Any) -> Any | None:
        """Return the encoding of a text, of two, or of words. Cut a text that is longer than the model reads, and count it.

        Return None if such texts are left out."""
        encoding = self.tokenizer(*texts, truncation=True, max_length=self.length + 1, **options)
        if len(encoding["input_ids"]) <= self.length:
            return encoding
        self.num_long += 1
        return None if self.drops else self.tokenizer(*texts, truncation=True, max_length=self.length, **options)

    def read_data(self, rows: TaskRows, read: Callable[[TaskRow], Any | None], progress: Progress, **parts: Any) -> TaskData:
        """Return the data of the examples that ``read`` makes of rows. ``parts``: other fields of TaskData.

        Tell the user how many rows are longer than the model reads."""
        splits = read_splits(rows, read, progress)
        if self.num_long:
            outcome = "left out" if self.drops else "cut at the end"
            say_once(f"{rows.origin}: {self.num_long} rows with more than {self.length} tokens are {outcome}")
        return make_task_data(splits, preprocessors=Preprocessors((self.tokenizer,)), **parts)

    def example(self, encoding: Mapping[str, Any], learned: Any) -> TextExample:
        """Return the example of an encoding."""
        types = encoding.get(TYPES)
        return TextExample(
            np.array(encoding["input_ids"], np.int32), None if types is None else np.array(types, np.int8), learned
        )

    def pad(self, examples: Sequence[TextExample], width: int | None = None) -> dict[str, Tensor]:
        """Return the inputs [rows, width] of examples, padded where the tokenizer pads. Without ``width`` it is the longest."""
        width = width or max(len(example.ids) for example in examples)
        inputs = {"input_ids": self.pad_side([example.ids for example in examples], width, self.tokenizer.pad_token_id or 0)}
        if MASK in self.tokenizer.model_input_names:
            inputs[MASK] = self.pad_side([np.ones_like(example.ids) for example in examples], width, 0)
        if examples[0].types is not None:
            types = [example.types for example in examples]
            inputs[TYPES] = self.pad_side(types, width, self.tokenizer.pad_token_type_id)
        return inputs

    def pad_side(self, rows: Sequence[Any], width: int, value: int = IGNORED) -> Tensor:
        """Return rows of numbers as one tensor [rows, width], padded where the tokenizer pads."""
        padded = torch.full((len(rows), width), value, dtype=torch.long)
        for number, row in enumerate(rows):
            start = self.start_of(len(row), width)
            padded[number, start : start + len(row)] = torch.as_tensor(row)
        return padded

    def start_of(self, length: int, width: int) -> int:
        """Return the place of the first token of a row of ``length`` tokens."""
        return width - length if self.tokenizer.padding_side == "left" else 0


def text_of(value: Any, column: str, place: str) -> str | None:
    """Return a text, or None for an empty one. Raise RequestError for another value."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise RequestError(f"{place} has {column} {value!r:.60}; it must be text")
    return value
