"""Make batches of questions and contexts, and of where their answers stand, as transformers' run_qa.py does.

A long context becomes several rows that overlap. A row without the answer learns the place of the first special token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from upshift.errors import RequestError
from upshift.training.data.chat_rows import decode_json
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.tasks.metrics.answers import ContextRow, Question, answer_metrics
from upshift.training.tasks.rows import NewHead, Preprocessors, TaskData, TaskInputs, TaskRow, make_task_data, read_splits
from upshift.training.tasks.texts import TextExample, TextReader, text_of

COLUMNS = ("question", "context", "answers")
DEFAULT_LENGTH = 384  # tokens of a row, as in run_qa.py
STRIDE = 128  # tokens that two rows of a context have in common
ENDS = ("start_positions", "end_positions")  # inputs of the model


class Answer(NamedTuple):
    """The text of an answer, and the first character of it in the context."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class EncodedQuestion(NamedTuple):
    """The context of a row, its answers, and the encodings of the rows of the context."""

    context: str
    answers: list[Answer]
    encodings: Any


def has_questions(names: Collection[str]) -> bool:
    """Return whether rows have questions with contexts and answers."""
    return all(name in names for name in COLUMNS)


def prepare_question_answering(inputs: TaskInputs) -> TaskData:
    """Return the examples of questions."""
    rows = inputs.rows
    text_reader = TextReader(inputs.source, inputs.options, inputs.sequence_length)
    text_reader.need_fast("question answering")
    length = text_reader.length if inputs.sequence_length else min(text_reader.length, DEFAULT_LENGTH)
    reader = QuestionReader(text_reader, length)
    say_once(
        f"{rows.origin}: question answering, the places of 'answers' in 'context' ({reader.length} tokens a row, {reader.stride} "
        "of which two rows of a context have in common)"
    )
    splits = read_splits(rows, lambda row: _with_row(row, reader.read(row)), inputs.progress)
    training, evaluation = ([example for _, examples in split for example in examples] for split in splits)
    questions = [question for row, _ in splits[1] if (question := reader.question(row)) is not None]
    new_head = None
    if not inputs.has_head:
        say_once(
            f"{inputs.source.base_reference} gets a new head for the start and the end of an answer, whose weights are random"
        )
        new_head = NewHead(("LABEL_0", "LABEL_1"))
    return make_task_data(
        (training, evaluation),
        collate=reader.collate,
        preprocessors=Preprocessors((text_reader.tokenizer,)),
        describe=reader.describe,
        new_head=new_head,
        label_inputs=ENDS,
        batch_loss="mean over rows",
        metrics=answer_metrics(questions),
    )


def _with_row(row: TaskRow, examples: list[TextExample] | None) -> tuple[TaskRow, list[TextExample]] | None:
    return None if examples is None else (row, examples)


class QuestionReader:
    """Reads rows of questions, and makes batches of them."""

    def __init__(self, reader: TextReader, length: int) -> None:
        self._reader = reader
        self._tokenizer = reader.tokenizer
        self._question_is_first = self._tokenizer.padding_side == "right"
        self._context_part = 1 if self._question_is_first else 0
        self.length = length
        self.stride = min(STRIDE, length // 3)
        self.width = 0  # of the longest row; all are as wide, because the loss is over all places, padding too

    def read(self, row: TaskRow) -> list[TextExample] | None:
        """Return the examples of a row, or None for an empty one. Raise RequestError for one that cannot be used."""
        encoded = self._encode(row)
        if encoded is None:
            return None
        numbers = range(len(encoded.encodings["input_ids"]))
        return [self._example(encoded.encodings, number, next(iter(encoded.answers), None)) for number in numbers]

    def question(self, row: TaskRow) -> Question | None:
        """Return a row's question and the texts of its answers, or None for an empty row. All rows of the data were read before,
        because the longest says how wide their batches are."""
        encoded = self._encode(row)
        if encoded is None:
            return None
        rows = [self._context_row(encoded.encodings, number) for number in range(len(encoded.encodings["input_ids"]))]
        return Question(encoded.context, rows, tuple(answer.text for answer in encoded.answers))

    def _context_row(self, encodings: Any, number: int) -> ContextRow:
        is_context = np.array(encodings.sequence_ids(number)) == self._context_part
        spans = np.where(is_context[:, None], np.array(encodings["offset_mapping"][number]), -1)
        return ContextRow(
            spans, self._reader.start_of(len(spans), self.width), self._place_without_answer(encodings["input_ids"][number])
        )

    def _encode(self, row: TaskRow) -> EncodedQuestion | None:
        missing = next((name for name in COLUMNS if name not in row.fields), None)
        if missing is not None:
            raise RequestError(
                f"{row.place} has no column {missing!r}; {list_columns(row.fields)}; question answering learns question, context "
                "and answers"
            )
        question, context = (text_of(row.fields[name], name, row.place) for name in COLUMNS[:2])
        if question is None or context is None:
            return None
        answers = _read_answers(row, context)
        question = question.lstrip()
        self._check_question(question, row)
        encodings = self._tokenizer(
            *((question, context) if self._question_is_first else (context, question)),
            truncation="only_second" if self._question_is_first else "only_first",
            max_length=self.length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        self.width = max(self.width, *map(len, encodings["input_ids"]))
        return EncodedQuestion(context, answers, encodings)

    def _check_question(self, question: str, row: TaskRow) -> None:
        """Raise RequestError for a question that leaves no room for its context."""
        number = len(self._tokenizer(question, add_special_tokens=False)["input_ids"])
        room = self.length - number - self._tokenizer.num_special_tokens_to_add(pair=True)
        if room <= self.stride:
            raise RequestError(
                f"{row.place} has a question of {number} tokens, which leaves {max(room, 0)} of {self.length} for its "
                "context; give a longer --sequence-length, or a shorter question"
            )

    def _example(self, encodings: Any, number: int, answer: Answer | None) -> TextExample:
        """Return one row of a context, with the places of the first and the last token of the answer."""
        encoding = {name: encodings[name][number] for name in encodings if name != "overflow_to_sample_mapping"}
        places = [place for place, part in enumerate(encodings.sequence_ids(number)) if part == self._context_part]
        offsets = encoding["offset_mapping"]
        without_answer = self._place_without_answer(encoding["input_ids"])
        ends = without_answer, without_answer
        is_inside = answer is not None and offsets[places[0]][0] <= answer.start and offsets[places[-1]][1] >= answer.end
        if answer is not None and is_inside:
            start = max(place for place in places if offsets[place][0] <= answer.start)
            end = min(place for place in places if offsets[place][1] >= answer.end)
            ends = start, end
        return self._reader.example(encoding, ends)

    def _place_without_answer(self, ids: Sequence[int]) -> int:
        special = (self._tokenizer.cls_token_id, self._tokenizer.bos_token_id)
        return next((ids.index(token) for token in special if token is not None and token in ids), 0)

    def collate(self, examples: Sequence[TextExample]) -> dict[str, Any]:
        """Return the model's inputs for some rows, and the places [rows] of the ends of their answers."""
        inputs = self._reader.pad(examples, self.width)
        for number, name in enumerate(ENDS):
            inputs[name] = torch.tensor(
                [example.learned[number] + self._reader.start_of(len(example.ids), self.width) for example in examples]
            )
        return inputs

    def describe(self, example: TextExample) -> list[tuple[str, bool]]:
        """Return the parts of a row: what is before the answer, the answer, and the rest."""
        start, end = example.learned
        ids = example.ids.tolist()
        parts = ((ids[:start], False), (ids[start : end + 1], True), (ids[end + 1 :], False))
        return [(f"{self._tokenizer.decode(part)} ", is_learned) for part, is_learned in parts if part]


def _read_answers(row: TaskRow, context: str) -> list[Answer]:
    """Return the answers of a row. The first is learned, so raise RequestError if it is not in the context."""
    value = decode_json(row.fields["answers"])
    if value is None:
        return []
    if not isinstance(value, Mapping) or "text" not in value or "answer_start" not in value:
        raise RequestError(f"{row.place} has answers {value!r:.60}; give text and answer_start, as SQuAD has them")
    texts = _list_of(value["text"])
    starts = _list_of(value["answer_start"])
    if len(texts) != len(starts):
        raise RequestError(
            f"{row.place} has {len(texts)} texts of answers and {len(starts)} of answer_start; give as many of both"
        )
    if not texts:
        return []
    other = next((text for text in texts if not isinstance(text, str) or not text), None)
    if other is not None:
        raise RequestError(f"{row.place} has the answer {other!r:.60}; it must be text")
    text = texts[0]
    start = starts[0]
    if not isinstance(start, int) or isinstance(start, bool):
        raise RequestError(f"{row.place} has answer_start {start!r:.60}; it must be the number of a character, from 0")
    found = context[start : start + len(text)] if start >= 0 else ""
    if found != text:
        raise RequestError(
            f"{row.place} has the answer {text!r:.60} at character {start}, where its context has {found!r:.60}; correct "
            "answer_start, or leave the row out"
        )
    return [Answer(text, start) for text, start in zip(texts, starts, strict=True)]


def _list_of(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, list | tuple) else [value]
