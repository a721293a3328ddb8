"""Tell the reasoning of a model from its answer, and limit it.

The chat template itself shows the form, as with calls of tools. It writes a made-up answer with made-up reasoning, and the texts
around the two are the form. A template that only removes the reasoning of earlier answers shows the tag that ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.grammar import Form, Grammar
from upshift.serving.engine.chat_template import QUESTION, ChatTemplate
from upshift.serving.engine.tool_calls import partial_length

ANSWER = "zqx_answer"
REASON = "zqx_reason"
KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, in which templates look for the reasoning
TAG = r"[<\[][^<>\[\]\s]+[>\]]"
LAST_TAG = re.compile(rf"({TAG})\s*\Z")
FIRST_TAG = re.compile(rf"\s*({TAG})")
CLOSING_TAG = re.compile(r"<(/)[\w:.-]+>|\[(/)[\w:.-]+\]")
END_TOKENS = 8  # beside the bytes of the text that ends the reasoning, which are decoded to find that text


class ReasoningForm(NamedTuple):
    """The form of an answer with reasoning: ``begin`` + reasoning + ``end`` + ``after`` + answer.

    ``plain`` is the text before an answer without reasoning. ``key`` is the field of a message in which the template expects the
    reasoning, or None if it writes none."""

    begin: str
    end: str
    after: str
    plain: str
    key: str | None

    @property
    def markers(self) -> str:
        return self.begin + self.end + self.after + self.plain


def find_reasoning_form(template: ChatTemplate) -> ReasoningForm | None:
    """Return the form of reasoning, or None if the template shows none."""
    prompt = template.try_write([QUESTION])
    plain_chat = template.try_write([QUESTION, {"role": "assistant", "content": ANSWER}], answers=True)
    if prompt is None or plain_chat is None or ANSWER not in plain_chat:
        return None
    plain = plain_chat[len(commonprefix([prompt, plain_chat])) :].partition(ANSWER)[0]
    for key in KEYS:
        text = template.try_write([QUESTION, {"role": "assistant", "content": ANSWER, key: REASON}], answers=True)
        before, has_reason, rest = (text or "").partition(REASON)
        between, has_answer, _ = rest.partition(ANSWER)
        begin = before[len(commonprefix([prompt, before])) :].strip() or _last_tag(before)
        if has_reason and has_answer and begin and between.strip():
            first = FIRST_TAG.match(between)
            end = between.strip() if first is None else first[1]
            after = between.partition(end)[2]
            return ReasoningForm(begin, end, after, plain if FIRST_TAG.match(plain) or plain.strip() else "", key)
    return _find_removed_form(template)


def _find_removed_form(template: ChatTemplate) -> ReasoningForm | None:
    """Return the form if the template removes what stands before a closing tag in earlier answers."""
    for tag in dict.fromkeys(match[0] for match in CLOSING_TAG.finditer(template.source)):
        begin = tag.replace("/", "", 1)
        text = template.try_write([QUESTION, {"role": "assistant", "content": f"{begin}{REASON}{tag}{ANSWER}"}], answers=True)
        if text is not None and ANSWER in text and REASON not in text:
            return ReasoningForm(begin, tag, "", "", None)
    return None


def begins_reasoning(form: ReasoningForm, prompt_end: str) -> bool | None:
    """Return whether a prompt with this end begins the reasoning. Return None if it ends the reasoning, so that there is none."""
    text = prompt_end.rstrip()
    if text.endswith((form.end + form.after).rstrip()):
        return None
    return text.endswith(form.begin)


def _last_tag(text: str) -> str:
    match = LAST_TAG.search(text)
    return "" if match is None else match[1]


def template_reasoning(messages: Sequence[Any], form: ReasoningForm | None) -> list[dict[str, Any]]:
    """Return messages with the reasoning of earlier answers in the field that the template reads. Without one, leave it out."""
    converted = []
    for message in messages:
        new_message = {name: value for name, value in message.items() if name != KEYS[0]}
        if KEYS[0] in message and form is not None and form.key is not None:
            new_message[form.key] = message[KEYS[0]]
        converted.append(new_message)
    return converted


class ReasoningStream:
    """Divide the text of one answer into its reasoning and the rest. ``is_open`` says that the prompt begins the reasoning."""

    def __init__(self, form: ReasoningForm, *, is_open: bool) -> None:
        self._form = form
        self._buffer = ""
        self._openings = {form.begin: True, **({form.plain.strip(): False} if form.plain.strip() else {})}
        self._stage = "reasoning" if is_open else "begin"
        self._is_bare = True  # nothing of the reasoning, or of the answer, has come

    @property
    def is_reasoning(self) -> bool:
        return self._stage == "reasoning"

    @property
    def is_over(self) -> bool:
        """Return whether all further text belongs to the answer."""
        return self._stage == "answer"

    def add(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add a piece. Return the reasoning and the text of the answer that are certain now."""
        self._buffer += text
        if self._stage == "begin":
            self._read_begin(last=last)
        reasoning = self._read_reasoning(last=last) if self._stage == "reasoning" else ""
        if self._stage == "after":
            self._read_after(last=last)
        answer = ""
        if self._stage == "answer":
            answer = self._buffer
            self._buffer = ""
        return reasoning, answer

    def _read_begin(self, *, last: bool) -> None:
        """Find out whether the text begins with reasoning. White space before that is left out."""
        text = self._buffer.lstrip()
        for opening, is_reasoning in self._openings.items():
            if text.startswith(opening):
                self._buffer = text[len(opening) :]
                self._stage = "reasoning" if is_reasoning else "answer"
                return
        if last or not any(opening.startswith(text) for opening in self._openings):
            self._stage = "answer"

    def _read_reasoning(self, *, last: bool) -> str:
        """Return the next part of the reasoning, without white space at its ends."""
        if self._is_bare:
            self._buffer = self._buffer.lstrip()
        place = self._buffer.find(self._form.end)
        if place >= 0:
            reasoning = self._buffer[:place].rstrip()
            self._buffer = self._buffer[place + len(self._form.end) :]
            self._stage = "after"
            return reasoning
        length = len(self._buffer) if last else len(self._buffer) - partial_length(self._buffer, self._form.end)
        length = len(self._buffer[:length].rstrip())
        reasoning = self._buffer[:length]
        self._buffer = "" if last else self._buffer[length:]
        self._is_bare = self._is_bare and not reasoning
        return reasoning

    def _read_after(self, *, last: bool) -> None:
        """Leave out as much of the text before the answer as the model writes: all of it, or its beginning before a call."""
        after = self._form.after.strip()
        text = self._buffer.lstrip()
        is_undecided = after.startswith(text) and text != after if after else not text
        if is_undecided and not last:
            return
        self._buffer = text[len(commonprefix([after, text])) :]
        self._stage = "answer"


class ReasoningGuide:
    """Hold a text to a grammar from the end of its reasoning on, and end the reasoning after ``budget`` tokens.

    ``is_open`` says that the prompt begins the reasoning. Otherwise the model may begin it, or answer at once."""

    form: Form | None = None  # what may follow depends on where the reasoning ends

    def __init__(
        self,
        tokenizer: Any,
        form: ReasoningForm,
        *,
        is_open: bool,
        budget: int | None,
        grammar: Grammar | None,
        eos_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._budget = budget
        self._grammar = grammar
        self._eos_ids = list(eos_ids)
        self._stage = "reasoning" if is_open else "begin"
        self._tokens: list[int] = []  # of the stage
        self._forced_ids: list[int] = []  # the only tokens that may come next
        self._begin_ids = self._encode(form.begin)

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """Return logits [V] in which the tokens that must not come next are -inf."""
        if not self._forced_ids and self._stage == "reasoning" and self._budget is not None and len(self._tokens) >= self._budget:
            self._forced_ids = self._encode(self._form.end)
        if self._forced_ids:
            forced = np.full_like(logits, -np.inf)
            forced[self._forced_ids[0]] = 0.0
            return forced
        if self._grammar is None:
            return logits
        if self._stage == "reasoning":
            masked = logits.copy()
            masked[self._eos_ids] = -np.inf
            return masked
        masked = self._grammar.mask(logits)
        if self._stage == "begin" and self._is_beginning(masked):
            masked[self._begin_ids[0]] = logits[self._begin_ids[0]]
        return masked

    def accept(self, token: int) -> bool:
        """Append a token. Return whether no token can follow it."""
        is_forced = bool(self._forced_ids)
        self._forced_ids = self._forced_ids[1:]
        if self._stage == "answer":
            return self._grammar is not None and not is_forced and self._grammar.accept(token)
        self._tokens.append(token)
        if self._stage == "begin":
            return self._accept_beginning(token, is_forced=is_forced)
        length = len(self._form.end.encode()) + END_TOKENS
        if self._form.end in self._tokenizer.decode(self._tokens[-length:], skip_special_tokens=False):
            self._stage = "answer"
            self._forced_ids = [] if self._grammar is None else self._encode(self._form.after)
        return False

    def _accept_beginning(self, token: int, *, is_forced: bool) -> bool:
        """Append a token before it is known whether there is reasoning."""
        if self._grammar is not None and not is_forced:
            if token != self._begin_ids[0]:
                self._stage = "answer"
                return self._grammar.accept(token)
            self._forced_ids = self._begin_ids[1:]
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=False).lstrip()
        if text.startswith(self._form.begin):
            self._stage = "reasoning"
            self._tokens = []
        elif not self._form.begin.startswith(text):
            self._stage = "answer"
        return False

    def _is_beginning(self, masked: np.ndarray) -> bool:
        """Return whether the first token of the reasoning's form begins no text of the grammar."""
        return self._budget != 0 and bool(masked[self._begin_ids[0]] == -np.inf)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
