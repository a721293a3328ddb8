"""Decide by its columns what a table holds: texts, token ids, chats, prompts with completions, or preferences.

The columns of a table decide, never its name. A table that can be read in two ways is rejected. Preferences are read only if the
user asks for the objective that learns from them. docs/data.md states the rules.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from upshift.errors import RequestError
from upshift.text import join_names

TEXT_COLUMN = "text"
TOKEN_COLUMN = "input_ids"
TOOLS = "tools"
FUNCTIONS = "functions"  # tools as OpenAI's API had them before ``tools``
SYSTEM = "system"
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
MARGIN = "margin"  # of a pair: by how much the reward of the chosen answer shall be larger, as in TRL

RowFormat = Literal[
    "text",
    "input_ids",
    "messages",
    "conversations",
    "prompt-completion",
    "alpaca",
    "segments",
    "preference",
    "unpaired-preference",
]
LABEL = "label"  # beside a prompt and a completion: whether the completion is a good one
REQUIRED: Mapping[RowFormat, tuple[str, ...]] = {  # the columns that a table must have to be of this format
    "text": (TEXT_COLUMN,),
    "input_ids": (TOKEN_COLUMN,),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "segments": ("segments",),
    "preference": ("chosen", "rejected"),
    "unpaired-preference": ("prompt", "completion", LABEL),
}
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")  # a value in them is rejected, with its row
OPTIONAL: Mapping[RowFormat, tuple[str, ...]] = {  # beside MEDIA_COLUMNS
    "messages": (SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS),
    "conversations": (SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS),
    "prompt-completion": (SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS),
    "alpaca": ("input", "history", SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS),
    "segments": (),
    "preference": ("prompt", SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS, MARGIN),
    "unpaired-preference": (SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS),
}
DESCRIPTIONS: Mapping[RowFormat, str] = {
    "messages": "chats (messages)",
    "conversations": "chats (conversations)",
    "prompt-completion": "prompts and completions",
    "alpaca": "instructions and outputs (Alpaca)",
    "segments": "texts in segments",
    "preference": "preferences (chosen and rejected)",
    "unpaired-preference": f"completions and whether they are good (completion and {LABEL})",
}
PREFERENCE: RowFormat = "preference"
UNPAIRED: RowFormat = "unpaired-preference"
PairObjective = Literal["dpo", "kto", "reward"]  # the objectives that learn from preferences
FORMATS_OF: Mapping[PairObjective, tuple[RowFormat, ...]] = {  # what each of them reads
    "dpo": (PREFERENCE,),
    "kto": (UNPAIRED, PREFERENCE),
    "reward": (PREFERENCE,),
}
SIMILAR_COLUMNS = frozenset((  # of other layouts of chats and pairs, for the message of a rejection
    "messages", "conversations", "conversation", "dialog", "dialogue", "turns", "prompt", "completion", "response", "instruction",
    "input", "output", "question", "answer", "query", "context", "chosen", "rejected", "system", "user", "assistant",
))  # fmt: skip
QUESTIONS = ("prompt", "instruction", "question", "query", "user", "human", "request", "problem", "input", "q")
ANSWERS = ("completion", "output", "answer", "response", "assistant", "reply", "gpt", "bot", "solution", "target", "a")
MESSAGE_FIELDS = (("role", "content"), ("from", "value"))  # of a message alone, in place of a chat
_COLUMN_OF = dict(zip(MESSAGE_FIELDS, ("messages", "conversations"), strict=True))
LAYOUTS = "messages, conversations, prompt and completion, instruction and output, or chosen and rejected"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table that are read, and how."""

    format: RowFormat
    name: str  # of the text or the token ids; of other formats, the first column that they need
    has_labels: bool = False  # of token ids, as is the next
    has_mask: bool = False
    is_pair: bool = False  # the labels are those of a decoder, so they may be more or fewer than the token ids
    objective: PairObjective | None = None  # of preferences
    fields: tuple[str, ...] | None = None  # the columns that a template reads; None: those of the format
    writes_turns: bool = False  # the chat template writes a prompt and an answer of plain text as turns; False: they are joined

    @property
    def is_chat(self) -> bool:
        """Return whether a row has turns or a completion, so that a part of it is learned."""
        return self.format in OPTIONAL

    def of_chat(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` that a chat or a completion is read from."""
        if self.fields is not None:
            return [name for name in names if name in self.fields]
        used = {*REQUIRED[self.format], *OPTIONAL[self.format], *MEDIA_COLUMNS}
        if self.objective != "reward":
            used.discard(MARGIN)  # the loss of DPO has none
        return [name for name in names if name in used]


def find_format(
    names: Collection[str],
    *,
    text_column: str | None,
    data_format: RowFormat | None,
    empty: Collection[str],
    origin: str,
    pair_objective: PairObjective | None = None,
    sample: Mapping[str, Any] | None = None,
) -> Columns:
    """Return what the columns of a table hold. Raise RequestError if they do not say it.

    Args:
        names: all columns.
        text_column: the column of texts or token ids that the user names.
        data_format: the format that the user names.
        empty: the columns without a value.
        origin: the file or the row, for messages.
        pair_objective: the objective that learns from preferences, and so from no other rows. None: another one.
        sample: the values of a row, for messages.
    """
    if pair_objective is not None:
        return _preference_columns(names, pair_objective, data_format, origin)
    if text_column is not None:
        if text_column in names:
            return Columns(format="text", name=text_column)
        raise RequestError(f"{origin} has no column {text_column!r}; {list_columns(names)}; name one that holds text")
    if data_format is not None:
        missing = [name for name in REQUIRED[data_format] if name not in names]
        if missing:
            raise RequestError(
                f"{origin} has no column {missing[0]!r}, which --data-format {data_format} needs; {list_columns(names)}; "
                "name another format, or leave --data-format out"
            )
        return Columns(format=data_format, name=REQUIRED[data_format][0])
    candidates = possible_formats(set(names) - set(empty)) or possible_formats(names)
    formats = [name for name in candidates if name not in (PREFERENCE, UNPAIRED)]
    _refuse_preferences(names, formats, origin)
    if len(formats) > 1:
        columns = " and ".join(", ".join(REQUIRED[name]) for name in formats)
        options = " or ".join(f"--data-format {name}" for name in formats)
        raise RequestError(f"{origin} has the columns {columns}, each of which could be trained on; choose with {options}")
    if not formats:
        raise RequestError(_no_known_columns(names, origin, sample or {}))
    return Columns(format=formats[0], name=REQUIRED[formats[0]][0])


def _preference_columns(names: Collection[str], objective: PairObjective, data_format: RowFormat | None, origin: str) -> Columns:
    """Return the columns of preferences. Raise RequestError for a table of other rows, or of two kinds."""
    candidates = FORMATS_OF[objective] if data_format is None else (data_format,)
    formats = [name for name in candidates if all(column in names for column in REQUIRED[name])]
    if len(formats) > 1:
        options = " or ".join(f"--data-format {name}" for name in formats)
        raise RequestError(
            f"{origin} has the columns {_learned_columns(objective)}, each of which could be trained on; choose with {options}"
        )
    if not formats:
        likely = max(candidates, key=lambda name: sum(column in names for column in REQUIRED[name]))
        missing = next(name for name in REQUIRED[likely] if name not in names)
        raise RequestError(
            f"{origin} has no column {missing!r}, and --objective {objective} learns from the columns "
            f"{_learned_columns(objective)}; {list_columns(names)}; rename them, or leave --objective out"
        )
    return Columns(format=formats[0], name=REQUIRED[formats[0]][0], objective=objective)


def _learned_columns(objective: PairObjective) -> str:
    """Return the columns that an objective learns from, for messages."""
    lists = [REQUIRED[name] for name in FORMATS_OF[objective]]
    return ", or ".join(f"{', '.join(columns[:-1])} and {columns[-1]}" for columns in lists)


def no_table_of_preferences(path: Path, objective: PairObjective) -> RequestError:
    """Return the error about plain text where rows of preferences are needed."""
    return RequestError(
        f"--objective {objective} learns from rows with the columns {_learned_columns(objective)}, and {path} is plain text; "
        "give a table (JSON, CSV, Parquet, Arrow), or leave --objective out"
    )


def check_data_format(text_column: str | None, data_format: str | None, *, pair_objective: PairObjective | None = None) -> None:
    """Raise RequestError for an unknown format, for two answers to what is read, and for a format that is not the objective's."""
    if pair_objective is not None and text_column is not None:
        raise RequestError(
            f"--text-column {text_column} names a column of texts, and --objective {pair_objective} learns from the columns "
            f"{_learned_columns(pair_objective)}; leave one of them out"
        )
    if pair_objective is not None and data_format not in (None, *FORMATS_OF[pair_objective]):
        raise RequestError(
            f"--data-format {data_format} is not for --objective {pair_objective}, which learns from the columns "
            f"{_learned_columns(pair_objective)}; leave one of them out"
        )
    if data_format in (PREFERENCE, UNPAIRED) and pair_objective is None:
        *others, last = (name for name, formats in FORMATS_OF.items() if data_format in formats)
        names = f"{', '.join(others)} or {last}" if others else last
        raise RequestError(f"--data-format {data_format} is for --objective {names}; add one of them, or name another format")
    if data_format is not None and data_format not in get_args(RowFormat):
        raise RequestError(f"--data-format {data_format} is not known; use {', '.join(get_args(RowFormat))}")
    if text_column is not None and data_format is not None:
        raise RequestError(
            f"--text-column {text_column} and --data-format {data_format} both say what to train on; give one of them"
        )


def list_columns(names: Collection[str]) -> str:
    return f"its columns are {join_names(names)}"


def possible_formats(names: Collection[str]) -> list[RowFormat]:
    """Return the formats whose columns a table has. Token ids go before the text that they were made from."""
    formats = [name for name, required in REQUIRED.items() if all(column in names for column in required)]
    return ["input_ids"] if set(formats) == {"text", "input_ids"} else formats


def refuse_wrapped(row: Mapping[str, Any], place: str) -> None:
    """Raise RequestError for a JSON object that is no record, but holds the records in one of its fields."""
    lists = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    candidates = (name for name in lists if name not in SIMILAR_COLUMNS and possible_formats(row[name][0]))
    name = next(candidates, None)
    if name is not None and not possible_formats(row):
        raise RequestError(
            f"{place} is one object, whose field {name!r} holds the records; write that list alone into the file, for example "
            f"with jq .{name}"
        )


def _refuse_preferences(names: Collection[str], formats: list[RowFormat], origin: str) -> None:
    """Raise RequestError for pairs of a chosen and a rejected answer, and for completions with a label."""
    if all(name in names for name in REQUIRED[PREFERENCE]):
        others = " or ".join(f"--data-format {name}" for name in formats)
        advice = f"; to train on the other columns alone, add {others}" if formats else ""
        raise RequestError(
            f"{origin} holds preferences (chosen and rejected), and as texts it would teach the bad answers, too; to learn from "
            f"the preferences, use upshift train with --objective dpo, kto or reward{advice}; {list_columns(names)}"
        )
    if formats == ["prompt-completion"] and LABEL in names:
        raise RequestError(
            f"{origin} holds preferences (completion and {LABEL}), and as texts it would teach the bad answers, too; to learn "
            f"from the preferences, use upshift train with --objective kto; to train on all completions, add --data-format "
            f"{formats[0]}; {list_columns(names)}"
        )


def _no_known_columns(names: Collection[str], origin: str, sample: Mapping[str, Any]) -> str:
    fields = next((fields for fields in MESSAGE_FIELDS if all(name in names for name in fields)), None)
    if fields is not None:
        column = _COLUMN_OF[fields]
        return f'{origin} is one message ({join_names(fields)}), and a row is a chat; write {{"{column}": [..]}} for each chat'
    renames = _similar_names(names, sample)
    if renames:
        changes = " and ".join(f"{theirs!r} to {ours!r}" for ours, theirs in renames.items())
        columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in renames.items())
        return (
            f"{origin} has no column that Upshift knows by its name; {list_columns(names)}; rename {changes}, or keep the names "
            f"and write columns: {{{columns}}} into a YAML file for --data (docs/data.md, columns with other names)"
        )
    similar = [name for name in names if name in SIMILAR_COLUMNS]
    if similar:
        return (
            f"{origin} has columns of chats or pairs ({', '.join(similar)}) that do not say which is which; "
            f"{list_columns(names)}; rename them to {LAYOUTS}, or name a column of plain text with --text-column"
        )
    return (
        f"{origin} has no column 'text'; {list_columns(names)}; name the one that holds the text with --text-column "
        "(text_column in Python)"
    )


def _similar_names(names: Collection[str], sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the data's names of columns by ours, where a name or the value of a row says what a column holds. Else nothing.

    It may be a name in capital letters, a column of chats, or a column of questions and one of answers."""
    by_small_letters = {name.strip().casefold(): name for name in names}
    formats = [name for name in possible_formats(by_small_letters) if name not in (PREFERENCE, UNPAIRED)]
    if formats:
        return {ours: by_small_letters[ours] for ours in REQUIRED[formats[0]] if ours not in names}
    for name in names:
        fields = _fields_of_messages(sample.get(name))
        if fields is not None:
            return {_COLUMN_OF[fields]: name}
    question = next((by_small_letters[name] for name in QUESTIONS if name in by_small_letters), None)
    answer = next((by_small_letters[name] for name in ANSWERS if name in by_small_letters), None)
    if question is None or answer is None:
        return {}
    is_pair = {"prompt", "completion"} & {question, answer}
    pair = REQUIRED["prompt-completion"] if is_pair else REQUIRED["alpaca"]
    return {ours: theirs for ours, theirs in zip(pair, (question, answer), strict=True) if ours != theirs}


def _fields_of_messages(value: Any) -> tuple[str, str] | None:
    """Return the fields of the messages in a value, or None if it is no list of messages. A text may hold the list as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, Mapping):
        return None
    return next((fields for fields in MESSAGE_FIELDS if all(name in first for name in fields)), None)
