"""Find the tokens of turns' contents in a chat, as Axolotl does, and EOS after each of them.

The content of a turn is replaced by two words in turn. The part of the chat that differs from one of the two is learned, with the
tool calls and thoughts of the turn. EOS is learned if it is one of the next tokens
(axolotl/prompt_strategies/chat_template.py, ``_find_turn_from_text`` and ``_tokenize_single_prompt``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from upshift.training.data.chat_places import num_shared
from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat
from upshift.training.data.chat_template import Span, TemplateWriter
from upshift.training.data.data_options import LossOn

STAND_INS = ("[[another content]]", "zzanother contentzz")  # their ends differ, so that a template hides none of the two
MAX_BEFORE_EOS = 3  # tokens that a template may write between a content and EOS


def content_spans(writer: TemplateWriter, chat: Chat, text: str, loss_on: LossOn) -> list[Span]:
    """Return the characters of the contents that are learned. ``text`` is that of the whole chat."""
    spans = []
    for index, message in enumerate(chat.messages):
        is_asked = loss_on == "content" or message["role"] == ASSISTANT
        if is_asked and message.get(WEIGHT, 1) != 0:
            spans.append(_content_span(writer, chat, index, text))
    return [(start, end) for start, end in spans if end > start]


def _content_span(writer: TemplateWriter, chat: Chat, index: int, text: str) -> Span:
    starts = []
    ends = []
    for word in STAND_INS:
        messages = list(chat.messages)
        messages[index] = {"role": messages[index]["role"], "content": word}
        other = writer.write(replace(chat, messages=messages))
        limit = min(len(text), len(other))
        start = num_shared(text, other)
        starts.append(start)
        ends.append(len(text) - min(num_shared(text[::-1], other[::-1]), limit - start))
    return min(starts), max(ends)


def content_tokens(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], eos_id: int | None) -> list[Span]:
    """Return the tokens of spans of characters, and EOS after each of them."""
    token_starts = [start for start, _ in offsets]
    token_ends = [end for _, end in offsets]
    tokens = []
    for first_character, last_character in spans:
        start = bisect_right(token_ends, first_character)
        end = bisect_left(token_starts, last_character)
        if start >= end:
            continue
        tokens.append((start, end))
        following = list(ids[end : end + MAX_BEFORE_EOS + 1])
        if eos_id in following:
            place = end + following.index(eos_id)
            tokens.append((place, place + 1))
    return tokens
