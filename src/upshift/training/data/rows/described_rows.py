"""Read the rows of a described data set: rename columns, fields and roles, and write the row by the data set's template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from upshift.errors import RequestError
from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat, PreferencePair, PromptCompletion, decode_json, read_chat
from upshift.training.data.row_formats import PREFERENCE, Columns, list_columns
from upshift.training.data.rows.data_set import DataSet
from upshift.training.data.rows.segments import SegmentRow

Answer = Chat | PromptCompletion | SegmentRow
ChatDocument = Chat | PromptCompletion | PreferencePair | SegmentRow
MESSAGE_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
QUESTION_COLUMNS = ("instruction", "input", "history", "messages", "system")  # that the prompt of a pair is made from


class RowReader:
    """Reads the rows of one data set as documents."""

    def __init__(self, data_set: DataSet) -> None:
        self._data_set = data_set
        self._prompt = data_set.instruction_prompt
        self._pair_prompt = data_set.pair_prompt
        self._writer = data_set.turn_writer

    @property
    def prompt_columns(self) -> tuple[str, ...] | None:
        """Return the columns that the prompt reads, the needed ones first, or None without a prompt."""
        return None if self._prompt is None else self._prompt.columns

    def check_columns(self, names: Collection[str], origin: str) -> None:
        """Raise RequestError if the data has no column that is renamed, or that the prompt needs."""
        needed = () if self._prompt is None else self._prompt.needed
        missing = next((name for name in needed if name not in names), None)
        if missing is not None:
            raise RequestError(
                f"{origin} has no column {missing!r}, which the template reads; {list_columns(names)}; rename it, or use another "
                "template"
            )

    def renamed(self, names: Collection[str]) -> dict[str, str]:
        """Return our names of the columns that are read, by the data's names."""
        columns = self._columns_of(names)
        if not columns:
            return {name: name for name in names}
        return {theirs: ours for ours, theirs in columns.items() if theirs in names}

    def _columns_of(self, names: Collection[str]) -> dict[str, str]:
        """Return the data's names of columns by ours, or nothing if they have our names."""
        if self._pair_prompt is not None and not self._data_set.columns:
            return self._pair_prompt.columns_of(names)
        return self._data_set.columns

    def makes_prompt_of(self, name: str) -> bool:
        """Return whether the prompt of a pair of answers is made from this column, by our name."""
        return self._data_set.format == PREFERENCE and name in QUESTION_COLUMNS

    def needed_of(self, names: Collection[str], columns: Columns) -> list[str]:
        """Return the data's names of the columns that a row is read from."""
        used = set(self._columns_of(names) or columns.of_chat(list(names)))
        return [theirs for theirs, ours in self.renamed(names).items() if ours in used]

    def rename(self, record: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a row with our names of columns, fields of messages, and roles."""
        row = {ours: record[theirs] for theirs, ours in self.renamed(record).items()}
        if self._pair_prompt is not None:
            return self._pair_prompt.texts_of(row, place)
        if self._data_set.message_fields or self._data_set.roles:
            for name in MESSAGE_COLUMNS:
                if name in row:
                    row[name] = self._rename_messages(row[name])
        if any(self.makes_prompt_of(name) for name in row):
            row = _with_prompt(row, place)
        return row

    def read(self, record: Mapping[str, Any], columns: Columns, place: str) -> ChatDocument | None:
        """Return the document of a renamed row, or None if it is empty."""
        row = self._read(record, columns, place)
        loss_on = self._data_set.loss_on
        return row if row is None or loss_on is None or isinstance(row, PreferencePair) else replace(row, loss_on=loss_on)

    def _read(self, record: Mapping[str, Any], columns: Columns, place: str) -> ChatDocument | None:
        if self._prompt is not None:
            self.check_columns(record, place)
            return self._prompt.segments_of(record, place)
        row = read_chat(record, columns, place)
        if isinstance(row, Chat):
            row = replace(row, learned_contents=self._data_set.learned_contents)
        if self._data_set.answer_ends == "eos" and isinstance(row, PreferencePair):
            row = replace(row, chosen=_with_eos(row.chosen), rejected=_with_eos(row.rejected))
        if self._data_set.learns_last_only and isinstance(row, Chat):
            row = _with_last_turn_learned(row)
        if self._writer is not None and isinstance(row, PreferencePair):
            return self._writer.segments_of_pair(row)
        if self._writer is not None and isinstance(row, Chat):
            return self._writer.segments_of(row) if row.has_answer else row
        if self._writer is not None and row is not None:
            raise RequestError(f"{place} holds plain texts, and the template writes messages; leave the template out")
        return row

    def _rename_messages(self, value: Any) -> Any:
        messages = decode_json(value)
        if isinstance(messages, dict):
            return [self._rename_message(messages)]
        return [self._rename_message(message) for message in messages] if isinstance(messages, list) else value

    def _rename_message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        fields = self._data_set.message_fields
        theirs = set(fields.values())
        renamed = {name: value for name, value in message.items() if name not in theirs and name not in fields}
        renamed |= {ours: message[name] for ours, name in fields.items() if name in message}
        role = renamed.get("role")
        if isinstance(role, str):
            renamed["role"] = self._data_set.roles.get(role, role)
        if isinstance(renamed.get("weight"), bool):
            renamed["weight"] = int(renamed["weight"])
        return renamed


def _with_eos(answer: Answer) -> Answer:
    return replace(answer, ends_with_eos=True) if isinstance(answer, Chat) else answer


def _with_last_turn_learned(chat: Chat) -> Chat:
    """Return a chat of which the last turn of the assistant alone is learned."""
    answers = [index for index, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
    messages = [{**message, WEIGHT: 0} if index in answers[:-1] else message for index, message in enumerate(chat.messages)]
    return replace(chat, messages=messages, num_prompt_messages=None)


def _with_prompt(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a pair of answers with a prompt of messages, made from an instruction, or from the messages before the answers."""
    question = {name: row.pop(name) for name in QUESTION_COLUMNS if name in row}
    if "messages" in question:
        messages = decode_json(question["messages"])
        if not isinstance(messages, list):
            raise RequestError(f"{place}: column 'messages' holds {json.dumps(messages, default=str)[:60]}; it must be a list")
    else:
        columns = Columns(format="alpaca", name="instruction")
        chat = read_chat(question | {"instruction": question.get("instruction") or "", "output": ""}, columns, place)
        messages = chat.messages[:-1] if isinstance(chat, Chat) else []
    if "messages" in question and question.get("system"):
        messages = [{"role": "system", "content": question["system"]}, *messages]
    answers = {name: _as_messages(row.get(name)) for name in ("chosen", "rejected")}
    return row | {"prompt": messages} | answers


def _as_messages(answer: Any) -> Any:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
