"""Build answers in OpenAI's form: whole answers, server-sent events and log-probabilities."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from upshift.serving.messages import Piece, TokenScore, ToolCall
from upshift.serving.openai_requests import ChatRequest, CompletionRequest

TextRequest = ChatRequest | CompletionRequest
ANSWER_KINDS: dict[type[Any], tuple[str, str]] = {  # by request type: the prefix of ids, and the name of the object
    ChatRequest: ("chatcmpl", "chat.completion"),
    CompletionRequest: ("cmpl", "text_completion"),
}


class PromptTokens(BaseModel):
    cached_tokens: int = Field(0, description="that were computed for an earlier request")


class CompletionTokens(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()
    completion_tokens: int = 0
    completion_tokens_details: CompletionTokens = CompletionTokens()
    total_tokens: int

    @classmethod
    def from_pieces(cls, prompts: list[Piece], completion_tokens: int, reasoning_tokens: int = 0) -> Usage:
        """Return the token counts. ``prompts`` holds one piece per prompt, even if the prompt has several choices.
        ``completion_tokens`` counts the tokens of all choices, and ``reasoning_tokens`` those of them in reasoning."""
        prompt_tokens = sum(piece.prompt_tokens for piece in prompts)
        cached_tokens = sum(piece.cached_tokens for piece in prompts)
        return cls(
            prompt_tokens=prompt_tokens,
            prompt_tokens_details=PromptTokens(cached_tokens=cached_tokens),
            completion_tokens=completion_tokens,
            completion_tokens_details=CompletionTokens(reasoning_tokens=reasoning_tokens),
            total_tokens=prompt_tokens + completion_tokens,
        )


class Choice(NamedTuple):
    """A piece of one of an answer's texts. ``number`` is the text's index among the choices."""

    number: int
    piece: Piece


async def merge_choices(choices: list[AsyncIterator[Piece]], seconds: float) -> AsyncGenerator[Choice]:
    """Yield the pieces of several texts as they come.

    When the consumer stops, all texts end. An exception of one text ends all texts and is raised. Raise TimeoutError
    after ``seconds``."""
    events: asyncio.Queue[Choice | BaseException | None] = asyncio.Queue()  # None: one text has ended

    async def follow(index: int, pieces: AsyncIterator[Piece]) -> None:
        try:
            async for piece in pieces:
                events.put_nowait(Choice(index, piece))
            events.put_nowait(None)
        except Exception as error:  # of any type: the consumer raises it
            events.put_nowait(error)

    tasks = [asyncio.create_task(follow(index, pieces)) for index, pieces in enumerate(choices)]
    timeout = asyncio.get_running_loop().call_later(seconds, events.put_nowait, TimeoutError())
    try:
        open_texts = len(tasks)
        while open_texts:
            event = await events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                open_texts -= 1
            else:
                yield event
    finally:
        timeout.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def add_prompt(pieces: Any, request: TextRequest, prompt: str) -> AsyncGenerator[Piece]:
    """Yield the pieces of a text as the client wants them: after its ``prompt`` (``echo``), or without any answer.

    The log-probabilities of the prompt come with the first piece of the answer."""
    echoes = request.echo
    is_prompt_only = isinstance(request, CompletionRequest) and request.max_tokens == 0
    prompt_scores: list[TokenScore] = []
    is_first = True
    async with aclosing(pieces):
        async for piece in pieces:
            prompt_scores += piece.prompt_scores
            if piece.prompt_scores and not (piece.tokens or piece.ending):
                continue
            if is_prompt_only:
                nothing = {"text": "", "tokens": 0, "scores": (), "ending": None if piece.ending is None else "length"}
                piece = piece.model_copy(update=nothing)
            if is_first and (echoes or prompt_scores):
                shown = tuple(prompt_scores) if echoes and request.top_count is not None else ()
                text = prompt + piece.text if echoes else piece.text
                update = {"text": text, "scores": (*shown, *piece.scores), "prompt_scores": tuple(prompt_scores)}
                piece = piece.model_copy(update=update)
            is_first = False
            yield piece


class Answer:
    """An answer with one or several choices, all under one ``id``. Pass every piece to ``add`` exactly once."""

    def __init__(self, request: TextRequest) -> None:
        id_prefix, self.kind = ANSWER_KINDS[ChatRequest if isinstance(request, ChatRequest) else CompletionRequest]
        self.id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.request = request
        self._texts: dict[int, list[str]] = {}
        self._last_pieces: dict[int, Piece] = {}
        self._reasoning: defaultdict[int, list[str]] = defaultdict(list)
        self._token_counts: dict[int, int] = {}
        self._reasoning_tokens = 0
        self._calls: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._scores: defaultdict[int, list[TokenScore]] = defaultdict(list)
        self._prompt_scores: defaultdict[int, list[TokenScore]] = defaultdict(list)
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._prompt_ids: dict[int, list[int]] = {}
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)

    def add(self, choice: Choice) -> list[dict[str, Any]]:
        """Append a piece to its choice. Return the calls of tools in the piece, in OpenAI's form."""
        index, piece = choice
        self._texts.setdefault(index, []).append(piece.text)
        self._reasoning[index].append(piece.reasoning)
        self._reasoning_tokens += piece.reasoning_tokens
        self._last_pieces[index] = piece
        self._token_counts[index] = self._token_counts.get(index, 0) + piece.tokens
        self._prompt_scores[index] += piece.prompt_scores
        self._token_ids[index] += piece.token_ids
        if piece.prompt_ids:
            self._prompt_ids[index] = list(piece.prompt_ids)
        for score in piece.scores:
            self._scores[index].append(score)
            self._offsets[index].add(score)
        calls = [_format_call(call) for call in piece.calls]
        self._calls[index] += calls
        return calls

    @property
    def usage(self) -> Usage:
        """Return the token counts so far. Choices of the same prompt count the prompt once."""
        first_choices = {index // self.request.n: self._last_pieces[index] for index in sorted(self._last_pieces, reverse=True)}
        return Usage.from_pieces(list(first_choices.values()), sum(self._token_counts.values()), self._reasoning_tokens)

    def body(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        is_chat = isinstance(self.request, ChatRequest)
        choices = []
        for index in sorted(self._texts):
            text = "".join(self._texts[index])
            content: dict[str, Any] = {"message": self._message(index, text)} if is_chat else {"text": text}
            logprobs = self._format_logprobs(index, self._scores[index])
            body = {"index": index, **content, "logprobs": logprobs, "finish_reason": self._finish_reason(index)}
            body |= self._format_token_ids(self._token_ids[index])
            choices.append(body if is_chat else body | self._format_prompt(index))
        prompt = self._format_prompt(0) if is_chat else {}
        return self._head(self.kind) | {"choices": choices, "usage": self.usage.model_dump(), **prompt}

    def _format_token_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return vLLM's field with the token ids of a text, or nothing if nobody asks for them."""
        return {"token_ids": list(ids)} if self.request.return_token_ids else {}

    def _format_prompt(self, index: int) -> dict[str, Any]:
        """Return vLLM's fields about the prompt of a choice. A chat has one prompt for all its choices."""
        ids = {"prompt_token_ids": self._prompt_ids.get(index, [])} if self.request.return_token_ids else {}
        return ids | self._format_prompt_logprobs(index)

    def _format_prompt_logprobs(self, index: int) -> dict[str, Any]:
        """Return vLLM's field with the log-probabilities of a choice's prompt, or nothing if nobody asks for them."""
        count = self.request.prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": [_format_prompt_token(score, count) for score in self._prompt_scores[index]]}

    def _message(self, index: int, text: str) -> dict[str, Any]:
        """Return the message of a choice. Beside calls or reasoning, a text of white space is no content."""
        more: dict[str, Any] = self._format_reasoning("".join(self._reasoning[index]))
        more |= self._format_calls([{name: call[name] for name in call if name != "index"} for call in self._calls[index]])
        return {"role": "assistant", "content": text if text.strip() or not more else None, **more}

    def _format_calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field of a message, or of a part of one, for its calls: in the form in which the request has its tools."""
        if not calls:
            return {}
        has_functions = isinstance(self.request, ChatRequest) and self.request.functions
        return {"function_call": calls[0]["function"]} if has_functions else {"tool_calls": calls}

    def _format_reasoning(self, reasoning: str) -> dict[str, str]:
        """Return the fields of a message, or of a part of one, for its reasoning: under both names that clients read."""
        is_wanted = isinstance(self.request, ChatRequest) and self.request.include_reasoning
        return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning and is_wanted else {}

    def _finish_reason(self, index: int) -> str | None:
        """Return why a choice ended, or None if it goes on."""
        ending = self._last_pieces[index].ending
        if ending != "stop" or not self._calls[index]:
            return ending
        return "function_call" if isinstance(self.request, ChatRequest) and self.request.functions else "tool_calls"

    def event(self, choice: Choice, calls: list[dict[str, Any]], *, first: bool) -> bytes:
        """Return a piece with its calls as a server-sent event. ``first`` marks the first piece of its choice."""
        index, piece = choice
        content: dict[str, Any]
        if isinstance(self.request, ChatRequest):
            delta: dict[str, Any] = self._format_reasoning(piece.reasoning)
            if piece.text or not (calls or delta):
                delta["content"] = piece.text
            delta |= self._format_calls(calls)
            content = {"delta": delta | ({"role": "assistant"} if first else {})}
        else:
            content = {"text": piece.text}
        logprobs = self._format_logprobs(index, piece.scores)
        body = {"index": index, **content, "logprobs": logprobs, "finish_reason": self._finish_reason(index)}
        body |= self._format_token_ids(piece.token_ids)
        is_chat = isinstance(self.request, ChatRequest)
        prompt = {"prompt_token_ids": list(piece.prompt_ids)} if piece.prompt_ids and not (is_chat and index) else {}
        options = self.request.stream_options
        is_counted = options is not None and options.include_usage and options.continuous_usage_stats
        counts = {"usage": self.usage.model_dump()} if is_counted else {}
        event = {"choices": [body if is_chat else body | prompt]} | (prompt if is_chat else {})
        return _format_event(self._head(self._chunk_kind) | event | counts)

    def last_events(self) -> bytes:
        """Return the events after the last piece: the token counts, if the request asks for them, and the end mark."""
        options = self.request.stream_options
        usage = b""
        if options is not None and options.include_usage:
            usage = _format_event(self._head(self._chunk_kind) | {"choices": [], "usage": self.usage.model_dump()})
        return usage + b"data: [DONE]\n\n"

    def _format_logprobs(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's last tokens, or None if the request does not ask for them."""
        if self.request.top_count is None:
            return None
        write = _write_id if self.request.return_tokens_as_token_ids else _write_token
        if isinstance(self.request, ChatRequest):
            return chat_logprobs(scores, write)
        offsets = self._offsets[index].offsets
        return completion_logprobs(scores, offsets[len(offsets) - len(scores) :], self.request.top_count, write)

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if isinstance(self.request, ChatRequest) else self.kind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}


def _format_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of a stream, which has an index."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def error_event(error: dict[str, Any]) -> bytes:
    """Return the events that end an answer with an error after its status has been sent."""
    return _format_event(error) + b"data: [DONE]\n\n"


def _format_event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TextOffsets:
    """The number of characters before each token of a text. Tokens that share a character have the same offset."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self.offsets: list[int] = []

    def add(self, score: TokenScore) -> None:
        """Append the offset of the next token."""
        is_within_character = bool(self._decoder.getstate()[0])
        continues_character = not score.spelled or score.spelled[0] & 0xC0 == 0x80  # a continuation byte of UTF-8
        breaks_character = is_within_character and not continues_character
        self.offsets.append(self._length + breaks_character)
        self._length += len(self._decoder.decode(bytes(score.spelled)))


def _write_token(score: TokenScore) -> str:
    return score.text


def _write_id(score: TokenScore) -> str:
    return f"token_id:{score.token}"


def chat_logprobs(scores: Sequence[TokenScore], write: Callable[[TokenScore], str] = _write_token) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions. ``write`` returns the name of a token."""
    content = [
        _format_token(score, write) | {"top_logprobs": [_format_token(token, write) for token in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore], offsets: Sequence[int], count: int, write: Callable[[TokenScore], str] = _write_token
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions, with ``count`` likeliest tokens at each position.

    ``offsets`` holds the number of characters before each token. The likeliest tokens include the chosen token, as in
    OpenAI's answers."""
    return {
        "tokens": [write(score) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [
            None if score.logprob is None else {write(token): token.logprob for token in (*score.top[:count], score)}
            for score in scores
        ],
        "text_offset": list(offsets),
    }


def _format_prompt_token(score: TokenScore, count: int) -> dict[str, Any] | None:
    """Return a token of a prompt and the ``count`` likeliest tokens at its position by their ids, in vLLM's form."""
    if score.logprob is None:
        return None
    return {
        str(token.token): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
        for token in (*score.top[:count], score)
    }


def _format_token(score: TokenScore, write: Callable[[TokenScore], str]) -> dict[str, Any]:
    return {"token": write(score), "logprob": score.logprob, "bytes": list(score.spelled)}
