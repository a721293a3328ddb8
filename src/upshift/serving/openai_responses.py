"""Build OpenAI's answers from pieces of text: a whole answer, or server-sent events.

Write the log-probabilities of an answer's tokens in OpenAI's two forms.

Turn errors into a status of HTTP and an error in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from upshift.errors import JobFailed, RequestError
from upshift.serving.engine_client import RequestRefused
from upshift.serving.messages import Piece, TokenScore
from upshift.serving.openai_requests import ChatRequest, CompletionRequest, ErrorAnswer, Usage


class Places:
    """The number of characters before each token of a text. Tokens that share a character all begin where it begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self.found: list[int] = []

    def add(self, score: TokenScore) -> None:
        begun = bool(self._decoder.getstate()[0])
        breaks = begun and bool(score.spelled) and score.spelled[0] & 0xC0 != 0x80  # no byte that goes on with a character
        self.found.append(self._length + breaks)
        self._length += len(self._decoder.decode(bytes(score.spelled)))


def of_chat(scores: Sequence[TokenScore]) -> dict[str, Any]:
    told = [_one(score) | {"top_logprobs": [_one(other) for other in score.top]} for score in scores]
    return {"content": told, "refusal": None}


def of_completion(scores: Sequence[TokenScore], places: Sequence[int]) -> dict[str, Any]:
    """Return log-probabilities in the form of completions.

    ``places`` holds the character at which each token begins. The chosen token is among the likeliest, as in OpenAI's
    answers."""
    tokens = [score.text for score in scores]
    tops = [{one.text: one.logprob for one in (*score.top, score)} for score in scores]
    likely = [score.logprob for score in scores]
    return {"tokens": tokens, "token_logprobs": likely, "top_logprobs": tops, "text_offset": list(places)}


def _one(score: TokenScore) -> dict[str, Any]:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.spelled)}


Asked = ChatRequest | CompletionRequest
ANSWER_KINDS: dict[type[Any], tuple[str, str]] = {
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
        short, self.kind = ANSWER_KINDS[type(asked)]
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


ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
WORDS = {
    400: "the request is not possible",
    401: "the key is missing or unknown",
    404: "the model is not served here",
    408: "the body came too slowly",
    413: "the body, or prompt and answer, are too long",
    415: "the body is compressed, or a browser's and not named as JSON",
    429: "it would wait too long",
    500: "the engine failed at this request alone",
    503: "the engine died, or starts again",
    504: "it took longer than a request may",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "model": ErrorAnswer} for status, said in WORDS.items()
}
RETRY_SECONDS = 1.0


class Refusal(NamedTuple):
    status: int
    why: str
    param: str | None = None
    retry_after: float | None = None

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.why, "type": kind, "param": self.param, "code": None}}


def refusal(error: BaseException) -> Refusal | None:
    """Return the refusal for an error, or None if the error is a fault of the server itself."""
    if isinstance(error, RequestRefused):
        return Refusal(error.status, str(error), retry_after=error.retry_after)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail))
    if isinstance(error, TimeoutError):
        return Refusal(504, "the answer took longer than a request may take here; ask for fewer tokens")
    if isinstance(error, RequestError):
        return Refusal(400, str(error))
    if isinstance(error, JobFailed):
        return Refusal(503, str(error), retry_after=RETRY_SECONDS)
    return None


def answer_of(found: Refusal | None) -> JSONResponse:
    found = found or Refusal(500, "the server failed at this request; its log says how")
    headers = {} if found.retry_after is None else {"Retry-After": str(max(math.ceil(found.retry_after), 1))}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(found.body(), status_code=found.status, headers=headers)


def _invalid(error: RequestValidationError) -> Refusal:
    """Return the first problem, without what the client sent. For a field with several types, prefer a problem that
    is not about the type."""
    problems = error.errors()
    problem = next((one for one in problems if not one["type"].endswith(("_type", "_parsing"))), problems[0])
    where = [str(part) for part in problem["loc"] if part != "body"]
    name = ".".join(where).encode(errors="backslashreplace").decode()
    if problem["type"] == "extra_forbidden":
        return Refusal(400, f"{name} is not possible here; leave it out", name)
    if problem["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON")
    return Refusal(400, f"{name or 'the body'}: {problem['msg']}", name or None)
