"""Find the tokens of turns' contents in a chat, as Axolotl does, and the ends of turns after them.

The content of a turn is replaced by two words in turn. The part of the chat that differs from one of the two is learned, with the
tool calls and thoughts of the turn. The end of a turn, such as EOS, is one of the next tokens
(axolotl/prompt_strategies/chat_template.py, ``_find_turn_from_text`` and ``_tokenize_single_prompt``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from upshift.training.data.chat_rows import WEIGHT, Chat
from upshift.training.data.chat_template import Span, TemplateWriter
from upshift.training.data.chat_turns import num_shared
from upshift.training.data.data_options import LearnedEnds, LossOn

STAND_INS = ("[[another content]]", "zzanother contentzz")  # their ends differ, so that a template hides none of the two
MAX_BEFORE_END = 3  # tokens that a template may write between a content and the end of its turn


class Content(NamedTuple):
    """The characters of a turn's content, and whether it is learned."""

    start: int
    end: int
    is_learned: bool


def find_contents(writer: TemplateWriter, chat: Chat, text: str, loss_on: LossOn) -> list[Content]:
    """Return the contents that are learned, or whose ends are. ``text`` is that of the whole chat."""
    contents = []
    for index, message in enumerate(chat.messages):
        is_asked = loss_on == "content" or message["role"] in chat.learned_contents.roles
        is_learned = is_asked and message.get(WEIGHT, 1) != 0
        if is_learned or chat.learned_contents.ends == "all":
            contents.append(Content(*_content_span(writer, chat, index, text), is_learned))
    return [content for content in contents if content.end > content.start]


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


def content_tokens(
    ids: Sequence[int],
    offsets: Sequence[Span],
    contents: Sequence[Content],
    end_ids: Sequence[Collection[int]],
    ends: LearnedEnds,
) -> list[Span]:
    """Return the tokens of contents that are learned, and the ends of turns. Each of ``end_ids`` holds the ids of one kind."""
    token_starts = [start for start, _ in offsets]
    token_ends = [end for _, end in offsets]
    tokens = []
    last_ends: dict[int, int] = {}
    for content in contents:
        start = bisect_right(token_ends, content.start)
        end = bisect_left(token_starts, content.end)
        if start >= end:
            continue
        if content.is_learned:
            tokens.append((start, end))
        following = range(end, min(end + MAX_BEFORE_END + 1, len(ids)))
        for kind, ending in enumerate(end_ids):
            place = next((place for place in following if ids[place] in ending), None)
            if place is None:
                continue
            last_ends[kind] = place
            if ends == "all" or (ends == "turn" and content.is_learned):
                tokens.append((place, place + 1))
    if ends == "last":
        tokens += [(place, place + 1) for place in last_ends.values()]
    return tokens
