"""Find the assistant's turns in a chat whose template writes earlier turns in another way than the last one.

Many templates of models that think leave the thoughts of earlier turns out, so the text up to a turn is not the beginning of the
whole chat. Here the content of a turn is replaced by two words in turn. The content is where the two texts differ. The turn
begins behind what the template writes for the assistant to go on from, and ends behind what it writes after the content of a
last turn, as far as the whole chat has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upshift.training.data.chat_rows import Chat
from upshift.training.data.chat_template import STAND_INS, Span, TemplateWriter, text_of, with_content


@dataclass(frozen=True)
class _Content:
    """The place of a turn's content in a text."""

    start: int
    end: int


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many characters, or tokens, at the beginning of both are the same.

    Parts are compared, and not one character after another, because two texts may share a million.
    """
    num_equal = 0
    limit = min(len(first), len(second))
    while num_equal < limit:
        middle = (num_equal + limit + 1) // 2
        if first[num_equal:middle] == second[num_equal:middle]:
            num_equal = middle
        else:
            limit = middle - 1
    return num_equal


def find_turn(writer: TemplateWriter, chat: Chat, index: int, text: str) -> Span | None:
    """Return where the turn with this number stands in the text of the whole chat. Return None if it cannot be placed."""
    before = writer.write(chat, index)
    content = _find_content(writer, chat, index, text)
    if content is None or not text.startswith(before) or content.start < len(before):
        return None
    opening = writer.write(chat, index, adds_prompt=True).removeprefix(before)
    num_opening = num_shared(opening, text[len(before) : content.start])
    if opening and not num_opening:
        return None
    first, second = (writer.write(with_content(chat, index, word), index + 1) for word in STAND_INS)
    closing = first[len(first) - num_shared(first[::-1], second[::-1]) :]
    return len(before) + num_opening, content.end + num_shared(closing, text[content.end :])


def _find_content(writer: TemplateWriter, chat: Chat, index: int, text: str) -> _Content | None:
    """Return where the content of a message stands in the text of the chat, or None if that is not clear."""
    content = chat.messages[index].get("content")
    if not content:
        return None
    first, second = (writer.write(with_content(chat, index, word)) for word in STAND_INS)
    start = num_shared(first, second)
    num_after = num_shared(first[::-1], second[::-1])
    end = len(text) - num_after
    has_same_frame = text[:start] == first[:start] and text[end:] == first[len(first) - num_after :]
    if not has_same_frame or start > end or text[start:end].strip() not in text_of(content):
        return None
    return _Content(start, end)
