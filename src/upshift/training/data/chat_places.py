"""Find the assistant's turns in a chat whose template writes earlier turns in another way than the last one.

Many templates of models that think leave the thoughts of earlier turns out, so the text up to a turn is not the beginning of the
whole chat. Here the content of a turn is replaced by two words in turn. Where the two texts differ is the place of the content.
The turn begins behind what the template writes for the assistant to go on from, and ends behind what it writes after the content
of a last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upshift.training.data.chat_rows import Chat
from upshift.training.data.chat_template import STAND_INS, Span, TemplateWriter, learned_turns, text_of, with_content


@dataclass(frozen=True)
class _Content:
    """The place of a turn's content in a text."""

    start: int
    end: int


def find_turns(writer: TemplateWriter, chat: Chat, text: str) -> list[Span] | None:
    """Return where the turns that are learned stand in the text of a chat. Return None if a turn cannot be placed."""
    spans = []
    for index in learned_turns(chat):
        span = _find_turn(writer, chat, index, text)
        if span is None:
            return None
        spans.append(span)
    return spans


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


def _find_turn(writer: TemplateWriter, chat: Chat, index: int, text: str) -> Span | None:
    """Return where the turn with this number stands in the text of the whole chat."""
    before = writer.write(chat, index)
    content = _find_content(writer, chat, index, len(chat.messages))
    content_as_last = _find_content(writer, chat, index, index + 1)
    if content is None or content_as_last is None or not text.startswith(before) or content.start < len(before):
        return None
    opening = writer.write(chat, index, adds_prompt=True).removeprefix(before)
    num_opening = num_shared(opening, text[len(before) : content.start])
    closing = writer.write(chat, index + 1)[content_as_last.end :]
    if opening and not num_opening:
        return None
    return len(before) + num_opening, content.end + num_shared(closing, text[content.end :])


def _find_content(writer: TemplateWriter, chat: Chat, index: int, num_messages: int) -> _Content | None:
    """Return where the content of a message stands in the text of the first messages, or None if that is not clear."""
    content = chat.messages[index].get("content")
    if not content:
        return None
    text = writer.write(chat, num_messages)
    first, second = (writer.write(with_content(chat, index, word), num_messages) for word in STAND_INS)
    start = num_shared(first, second)
    num_after = num_shared(first[::-1], second[::-1])
    end = len(text) - num_after
    has_same_frame = text[:start] == first[:start] and text[end:] == first[len(first) - num_after :]
    if not has_same_frame or start > end or text[start:end].strip() not in text_of(content):
        return None
    return _Content(start, end)
