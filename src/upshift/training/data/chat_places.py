"""Find the assistant's turns in a chat whose template writes earlier turns in another way than the last one.

Many templates of models that think leave the thoughts of earlier turns out, so the text up to a turn is not the beginning of the
whole chat. Here the content of a turn is replaced by two words in turn. Where the two texts differ is the place of the content.
The turn begins behind what the template writes for the assistant to go on from, and ends behind what it writes after the content
of a last turn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat
from upshift.training.data.chat_template import Span, TemplateWriter

# They differ in their first and in their last letter, so what two texts share ends at them.
STAND_INS = ("Xylographer", "quintessence")


@dataclass(frozen=True)
class _Content:
    """The place of a turn's content in a text."""

    start: int
    end: int


def find_turns(writer: TemplateWriter, chat: Chat) -> tuple[str, list[Span]] | None:
    """Return the text of a chat, and where the turns that are learned stand in it. Return None if a turn cannot be placed."""
    text = writer.write(chat)
    spans = []
    for index, message in enumerate(chat.messages):
        if message["role"] != ASSISTANT or message.get(WEIGHT, 1) == 0:
            continue
        span = _find_turn(writer, chat, index, text)
        if span is None:
            return None
        spans.append(span)
    return text, spans


def _find_turn(writer: TemplateWriter, chat: Chat, index: int, text: str) -> Span | None:
    """Return where the turn with this number stands in the text of the whole chat."""
    before = writer.write(chat, index)
    content = _find_content(writer, chat, index, len(chat.messages))
    content_as_last = _find_content(writer, chat, index, index + 1)
    if content is None or content_as_last is None or not text.startswith(before) or content.start < len(before):
        return None
    opening = writer.write(chat, index, adds_prompt=True).removeprefix(before)
    shared_opening = os.path.commonprefix([opening, text[len(before) : content.start]])
    closing = writer.write(chat, index + 1)[content_as_last.end :]
    shared_closing = os.path.commonprefix([closing, text[content.end :]])
    if opening and not shared_opening:
        return None
    return len(before) + len(shared_opening), content.end + len(shared_closing)


def _find_content(writer: TemplateWriter, chat: Chat, index: int, num_messages: int) -> _Content | None:
    """Return where the content of a message stands in the text of the first messages, or None if that is not clear."""
    content = chat.messages[index].get("content")
    if not content:
        return None
    text = writer.write(chat, num_messages)
    first, second = (writer.write(_with_content(chat, index, word), num_messages) for word in STAND_INS)
    start = len(os.path.commonprefix([first, second]))
    num_after = len(os.path.commonprefix([first[::-1], second[::-1]]))
    end = len(text) - num_after
    has_same_frame = text[:start] == first[:start] and text[end:] == first[len(first) - num_after :]
    if not has_same_frame or start > end or text[start:end].strip() not in _text_of(content):
        return None
    return _Content(start, end)


def _with_content(chat: Chat, index: int, word: str) -> Chat:
    """Return the chat with a word as the content of one message, in the form that the content has."""
    messages = list(chat.messages)
    has_parts = not isinstance(messages[index]["content"], str)
    messages[index] = {**messages[index], "content": [{"type": "text", "text": word}] if has_parts else word}
    return replace(chat, messages=messages)


def _text_of(content: str | Sequence[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
