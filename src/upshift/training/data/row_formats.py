"""Decide by its columns what a table holds: texts, token ids, chats, prompts with completions, or preferences.

The columns of a table decide, never its name. A table that can be read in two ways is rejected. Preferences are read only if the
user asks for the objective that learns from them. docs/data.md states the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from upshift.errors import RequestError

TEXT_COLUMN = "text"
TOKEN_COLUMN = "input_ids"
TOOLS = "tools"
SYSTEM = "system"
TEMPLATE_ARGUMENTS = "chat_template_kwargs"

RowFormat = Literal["text", "input_ids", "messages", "conversations", "prompt-completion", "alpaca", "preference"]
REQUIRED: Mapping[RowFormat, tuple[str, ...]] = {  # the columns that a table must have to be of this format
    "text": (TEXT_COLUMN,),
    "input_ids": (TOKEN_COLUMN,),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
}
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")  # a value in them is rejected, with its row
OPTIONAL: Mapping[RowFormat, tuple[str, ...]] = {  # beside MEDIA_COLUMNS
    "messages": (SYSTEM, TOOLS, TEMPLATE_ARGUMENTS),
    "conversations": (SYSTEM, TOOLS, TEMPLATE_ARGUMENTS),
    "prompt-completion": (TOOLS, TEMPLATE_ARGUMENTS),
    "alpaca": ("input", "history", SYSTEM, TOOLS, TEMPLATE_ARGUMENTS),
    "preference": ("prompt", TOOLS, TEMPLATE_ARGUMENTS),
}
DESCRIPTIONS: Mapping[RowFormat, str] = {
    "messages": "chats (messages)",
    "conversations": "chats (conversations)",
    "prompt-completion": "prompts and completions",
    "alpaca": "instructions and outputs (Alpaca)",
    "preference": "preferences (chosen and rejected)",
}
PREFERENCE: RowFormat = "preference"
LABEL = "label"  # beside a prompt and a completion: whether the completion is a good one
SIMILAR_COLUMNS = frozenset((  # of other layouts of chats and pairs, for the message of a rejection
    "messages", "conversations", "conversation", "dialog", "dialogue", "turns", "prompt", "completion", "response", "instruction",
    "input", "output", "question", "answer", "query", "context", "chosen", "rejected", "system", "user", "assistant",
))  # fmt: skip
LAYOUTS = "messages, conversations, prompt and completion, instruction and output, or chosen and rejected"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table that are read, and how."""

    format: RowFormat
    name: str  # of the text or the token ids; of other formats, the first column that they need
    has_labels: bool = False  # of token ids, as is the next
    has_mask: bool = False
    is_pair: bool = False  # the labels are those of a decoder, so they may be more or fewer than the token ids

    @property
    def is_chat(self) -> bool:
        """Return whether a row has turns or a completion, so that a part of it is learned."""
        return self.format in OPTIONAL

    def of_chat(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` that a chat or a completion is read from."""
        used = {*REQUIRED[self.format], *OPTIONAL[self.format], *MEDIA_COLUMNS}
        return [name for name in names if name in used]


def find_format(
    names: Collection[str],
    *,
    text_column: str | None,
    data_format: RowFormat | None,
    empty: Collection[str],
    origin: str,
    with_preferences: bool = False,
) -> Columns:
    """Return what the columns of a table hold. Raise RequestError if they do not say it.

    Args:
        names: all columns.
        text_column: the column of texts or token ids that the user names.
        data_format: the format that the user names.
        empty: the columns without a value.
        origin: the file or the row, for messages.
        with_preferences: whether the objective learns from preferences, and so from no other rows.
    """
    if with_preferences:
        return _preference_columns(names, origin)
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
    formats = [name for name in candidates if name != PREFERENCE]
    _refuse_preferences(names, formats, origin)
    if len(formats) > 1:
        columns = " and ".join(", ".join(REQUIRED[name]) for name in formats)
        options = " or ".join(f"--data-format {name}" for name in formats)
        raise RequestError(f"{origin} has the columns {columns}, each of which could be trained on; choose with {options}")
    if not formats:
        raise RequestError(_no_known_columns(names, origin))
    return Columns(format=formats[0], name=REQUIRED[formats[0]][0])


def _preference_columns(names: Collection[str], origin: str) -> Columns:
    """Return the columns of preferences. Raise RequestError for a table of other rows."""
    missing = next((name for name in REQUIRED[PREFERENCE] if name not in names), None)
    if missing is not None:
        raise RequestError(
            f"{origin} has no column {missing!r}, and --objective dpo learns from the columns chosen and rejected; "
            f"{list_columns(names)}; rename them, or leave --objective out"
        )
    return Columns(format=PREFERENCE, name=REQUIRED[PREFERENCE][0])


def no_table_of_preferences(path: Path) -> RequestError:
    """Return the error about plain text where rows of preferences are needed."""
    return RequestError(
        f"--objective dpo learns from rows with the columns chosen and rejected, and {path} is plain text; give a table "
        "(JSON, CSV, Parquet, Arrow), or leave --objective out"
    )


def check_data_format(text_column: str | None, data_format: str | None, *, with_preferences: bool = False) -> None:
    """Raise RequestError for an unknown format, for two answers to what is read, and for a format that is not the objective's."""
    if with_preferences and text_column is not None:
        raise RequestError(
            f"--text-column {text_column} names a column of texts, and --objective dpo learns from the columns chosen and "
            "rejected; leave one of them out"
        )
    if with_preferences and data_format not in (None, PREFERENCE):
        raise RequestError(
            f"--data-format {data_format} is not for --objective dpo, which learns from the columns chosen and rejected; leave "
            "one of them out"
        )
    if data_format == PREFERENCE and not with_preferences:
        raise RequestError(f"--data-format {PREFERENCE} is for --objective dpo; add --objective dpo, or name another format")
    if data_format is not None and data_format not in get_args(RowFormat):
        raise RequestError(f"--data-format {data_format} is not known; use {', '.join(get_args(RowFormat))}")
    if text_column is not None and data_format is not None:
        raise RequestError(
            f"--text-column {text_column} and --data-format {data_format} both say what to train on; give one of them"
        )


def list_columns(names: Collection[str]) -> str:
    return f"its columns are {', '.join(map(str, names)) or 'none'}"


def possible_formats(names: Collection[str]) -> list[RowFormat]:
    """Return the formats whose columns a table has. Token ids go before the text that they were made from."""
    formats = [name for name, required in REQUIRED.items() if all(column in names for column in required)]
    return ["input_ids"] if set(formats) == {"text", "input_ids"} else formats


def _refuse_preferences(names: Collection[str], formats: list[RowFormat], origin: str) -> None:
    """Raise RequestError for pairs of a chosen and a rejected answer, and for completions with a label."""
    if all(name in names for name in REQUIRED[PREFERENCE]):
        others = " or ".join(f"--data-format {name}" for name in formats)
        advice = f"; to train on the other columns alone, add {others}" if formats else ""
        raise RequestError(
            f"{origin} holds preferences (chosen and rejected), and as texts it would teach the bad answers, too; to learn from "
            f"the preferences, use upshift train with --objective dpo{advice}; {list_columns(names)}"
        )
    if formats == ["prompt-completion"] and LABEL in names:
        raise RequestError(
            f"{origin} holds preferences (completion and {LABEL}), which upshift train does not learn from: it would learn the "
            f"bad answers, too; to train on all completions, add --data-format {formats[0]}; {list_columns(names)}"
        )


def _no_known_columns(names: Collection[str], origin: str) -> str:
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
