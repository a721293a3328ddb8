"""Build OpenAI's answers from pieces of text: a whole answer, or server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

from upshift.serving.log_probabilities import Places, of_chat, of_completion
from upshift.serving.messages import Piece, TokenScore
from upshift.serving.requests import ChatRequest, CompletionRequest, Usage

Asked = ChatRequest | CompletionRequest
KINDS: dict[type[Any], tuple[str, str]] = {
    ChatRequest: ("chatcmpl", "chat.completion"),
    CompletionRequest: ("cmpl", "text_completion"),
}


class Choice(NamedTuple):
    place: int  # its index among the choices
    piece: Piece


async def together(choices: list[AsyncIterator[Piece]], seconds: float) -> AsyncGenerator[Choice]:
    """Yield the pieces of several texts as they come. When the consumer stops, all texts end. An exception of one
    text ends all texts and is raised. Raise TimeoutError after ``seconds``."""
    found: asyncio.Queue[Choice | BaseException | None] = asyncio.Queue()

    async def follow(index: int, pieces: AsyncIterator[Piece]) -> None:
        try:
            async for piece in pieces:
                found.put_nowait(Choice(index, piece))
            found.put_nowait(None)
        except Exception as error:  # whatever it is, the listener raises it
            found.put_nowait(error)

    tasks = [asyncio.create_task(follow(index, pieces)) for index, pieces in enumerate(choices)]
    ending = asyncio.get_running_loop().call_later(seconds, found.put_nowait, TimeoutError())
    try:
        left = len(tasks)
        while left:
            said = await found.get()
            if isinstance(said, BaseException):
                raise said
            if said is None:
                left -= 1
            else:
                yield said
    finally:
        ending.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Answer:
    """An answer with one or several choices. The whole answer has one ``id``. Pass every piece to ``add`` once."""

    def __init__(self, asked: Asked) -> None:
        short, self.kind = KINDS[type(asked)]
        self.id, self.created = f"{short}-{uuid.uuid4().hex}", int(time.time())
        self.asked = asked
        self._texts: dict[int, list[str]] = {}
        self._last: dict[int, Piece] = {}
        self._tokens: dict[int, int] = {}
        self._scores: defaultdict[int, list[TokenScore]] = defaultdict(list)
        self._places: defaultdict[int, Places] = defaultdict(Places)

    def add(self, choice: Choice) -> None:
        index, piece = choice
        self._texts.setdefault(index, []).append(piece.text)
        self._last[index] = piece
        self._tokens[index] = self._tokens.get(index, 0) + piece.tokens
        for score in piece.scores:
            self._scores[index].append(score)
            self._places[index].add(score)

    @property
    def usage(self) -> Usage:
        prompts = {index // self.asked.n: self._last[index] for index in sorted(self._last, reverse=True)}
        return Usage.of(list(prompts.values()), sum(self._tokens.values()))

    def whole(self) -> dict[str, Any]:
        chat = isinstance(self.asked, ChatRequest)
        choices = []
        for index in sorted(self._texts):
            text = "".join(self._texts[index])
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            told = self._likely(index, self._scores[index])
            choices.append({"index": index, **said, "logprobs": told, "finish_reason": self._last[index].ending})
        return self._head(self.kind) | {"choices": choices, "usage": self.usage.model_dump()}

    def event(self, choice: Choice, *, first: bool) -> bytes:
        """Return a piece as a server-sent event. ``first`` says that the piece is the first one of its choice."""
        index, piece = choice
        if isinstance(self.asked, ChatRequest):
            delta = {"content": piece.text} | ({"role": "assistant"} if first else {})
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": piece.text}
        told = self._likely(index, piece.scores)
        one = {"index": index, **said, "logprobs": told, "finish_reason": piece.ending}
        return _event(self._head(self._chunk) | {"choices": [one]})

    def end(self) -> bytes:
        asked = self.asked.stream_options
        usage = b""
        if asked is not None and asked.include_usage:
            usage = _event(self._head(self._chunk) | {"choices": [], "usage": self.usage.model_dump()})
        return usage + b"data: [DONE]\n\n"

    def _likely(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's last tokens, or None if the request does not ask for them."""
        if self.asked.top is None:
            return None
        if isinstance(self.asked, ChatRequest):
            return of_chat(scores)
        places = self._places[index].found
        return of_completion(scores, places[len(places) - len(scores) :])

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if isinstance(self.asked, ChatRequest) else self.kind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}


def error_event(error: dict[str, Any]) -> bytes:
    """Return the events that end an answer with an error after its status has been sent."""
    return _event(error) + b"data: [DONE]\n\n"


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
