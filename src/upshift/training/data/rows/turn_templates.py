"""Write a chat by a template of turns, as LLaMA-Factory does: each part of a turn is a segment that is tokenized alone.

The rules are those of llamafactory/data/template.py (``Template._encode``, ``encode_multiturn``) and
llamafactory/data/processor/supervised.py. Calls of tools are rejected, because each of its templates writes them in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from upshift.errors import RequestError
from upshift.training.data.chat_rows import ASSISTANT, TOOL_CALLS, WEIGHT, Chat, Message, PreferencePair
from upshift.training.data.row_formats import SYSTEM
from upshift.training.data.rows.segments import Segment, SegmentRow

Slots = tuple[str, ...]

BOS = "{bos}"
EOS = "{eos}"
CONTENT = "{content}"
THOUGHTS = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, kw_only=True)
class TurnTemplate:
    """Describe how the turns of a chat are written. A slot is a text with ``{content}`` in it, or BOS, or EOS."""

    user: Slots
    assistant: Slots = (CONTENT, EOS)
    system: Slots = (CONTENT,)
    prefix: Slots = ()  # before the whole chat
    default_system: str = ""
    eos_token: str | None = None  # the token that stands for EOS; None: that of the tokenizer
    closes_chat: bool = False  # EOS stands at the end of the chat alone, and is the label of the token after each turn
    joins_system: bool = False  # the system message is the beginning of the user's first message
    thoughts: tuple[str, str] | None = None  # around the thoughts of an answer; an answer without thoughts gets empty ones


@dataclass(frozen=True)
class TurnWriter:
    """Writes chats by a template.

    ``system``: the system message of chats without one, in place of the template's. ``thinks``: keep the thoughts of answers, and
    learn the empty ones of an answer without any.
    """

    template: TurnTemplate
    system: str | None = None
    thinks: bool = True
    learns_last_only: bool = False  # earlier answers are history: they are not learned, and have no thoughts

    def segments_of(self, chat: Chat) -> SegmentRow:
        """Return a chat in segments. Raise RequestError, with its place, for turns that do not alternate."""
        system, messages = _split_system(chat)
        num_prompt = chat.num_prompt_messages
        if num_prompt is not None:
            num_prompt -= len(chat.messages) - len(messages)
        _check_turns(messages, chat.place)
        segments: list[Segment] = []
        for number in range(0, len(messages), 2):
            answer = messages[number + 1]
            is_last = number + 2 == len(messages)
            is_history = not is_last if self.learns_last_only else num_prompt is not None and number + 1 < num_prompt
            closes = not is_last if self.learns_last_only else bool(number)  # LLaMA-Factory counts from the last turn then
            if closes and self.template.closes_chat and num_prompt is None:
                segments.append(Segment("", kind="closing"))
            segments += self._write_question(messages[number], system if number == 0 else None)
            segments += self._write_answer(
                str(answer["content"]), is_learned=answer.get(WEIGHT, 1) != 0 and not is_history, is_history=is_history
            )
        if self.template.closes_chat:
            segments.append(Segment("", True, "eos"))
        return SegmentRow(place=chat.place, segments=tuple(segments), eos_token=self.template.eos_token)

    def segments_of_pair(self, pair: PreferencePair) -> PreferencePair:
        """Return a pair of chats in segments."""
        chosen, rejected = (
            answer if not isinstance(answer, Chat) or pair.problem else self.segments_of(answer)
            for answer in (pair.chosen, pair.rejected)
        )
        return PreferencePair(place=pair.place, chosen=chosen, rejected=rejected, problem=pair.problem, margin=pair.margin)

    def _write_question(self, question: Message, system: str | None) -> Iterator[Segment]:
        """Yield the segments up to an answer. ``system`` is not None in the first turn."""
        template = self.template
        before = ""
        if system is not None:
            yield from _fill(template.prefix, "")
            system = system or (template.default_system if self.system is None else self.system)
            if system and template.joins_system:
                before = "".join(segment.text for segment in _fill(template.system, system))
            elif system:
                yield from _fill(template.system, system)
        yield from _fill(template.user, before + str(question["content"]))

    def _write_answer(self, content: str, *, is_learned: bool, is_history: bool) -> Iterator[Segment]:
        """Yield the segments of an answer. An answer of the history has no thoughts."""
        thoughts = self.template.thoughts
        if thoughts is not None and (is_history or not self.thinks):
            opening, closing = map(re.escape, thoughts)
            content = re.sub(f"{opening}(.*?){closing}", "", content, flags=re.DOTALL).lstrip("\n")
        if thoughts is not None and not is_history and not any(word.strip() in content for word in thoughts):
            yield Segment("".join(thoughts), is_learned and self.thinks)
        for segment in _fill(self.template.assistant, content):
            yield replace(segment, is_learned=is_learned)


def _split_system(chat: Chat) -> tuple[str, Sequence[Message]]:
    """Return the system message of a chat, or nothing, and the other messages."""
    if chat.tools:
        raise RequestError(f"{chat.place} has tools, which only a chat template writes; leave the template out, or the tools")
    if chat.messages and chat.messages[0]["role"] == SYSTEM:
        return str(chat.messages[0]["content"]), chat.messages[1:]
    return "", chat.messages


def _check_turns(messages: Sequence[Message], place: str) -> None:
    """Raise RequestError for messages that are not turns of the user and the assistant, one after the other."""
    for number, message in enumerate(messages):
        expected = ASSISTANT if number % 2 else "user"
        if message["role"] != expected or message.get(TOOL_CALLS):
            found = "calls of tools" if message.get(TOOL_CALLS) else f"role {message['role']!r}"
            raise RequestError(
                f"{place}: message {number + 1} after the system's has {found}, and the template needs a text of role "
                f"{expected!r} there; leave the row out, or use a chat template"
            )
    if len(messages) % 2 or not messages:
        raise RequestError(f"{place} does not end with a turn of the assistant, which the template needs; leave the row out")


def _fill(slots: Slots, content: str) -> Iterator[Segment]:
    for slot in slots:
        if slot in (BOS, EOS):
            yield Segment("", kind="bos" if slot == BOS else "eos")
        else:
            yield Segment(slot.replace(CONTENT, content, 1))
