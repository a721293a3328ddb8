"""Turn the tokens of an engine into the pieces of answers: whole characters, and nothing of a stop string. Reasoning and calls of
tools stand apart from the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from upshift.inference.generation.batching import TokenLogprob
from upshift.inference.tokenizer import panics_as_errors
from upshift.serving.engine.admission import Ticket
from upshift.serving.engine.reasoning import ReasoningStream
from upshift.serving.engine.tool_calls import CallStream, partial_length
from upshift.serving.messages import Ending, Piece, Refused, TokenScore, ToolCall

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character are decoded to


class OpenRequest(NamedTuple):
    """A request that is being answered. ``token_bytes`` returns the bytes of a token. ``calls`` is None without tools, and
    ``reasoning`` is None if there is none. ``unsent_ids`` has the first token of a prompt that is scored, until it is sent.
    ``with_token_ids`` says whether the pieces have token ids."""

    ticket: Ticket
    stream: TextStream
    token_bytes: Callable[[int], bytes]
    calls: CallStream | None
    reasoning: ReasoningStream | None
    unsent_ids: list[int]
    with_token_ids: bool = False


class NewToken(NamedTuple):
    """A token that the last pass added to an answer. ``is_first`` marks the first token of its text. ``is_of_prompt`` marks a
    token of the prompt, with its log-probability."""

    request: OpenRequest
    token: int
    ending: str | None
    is_first: bool
    logprob: TokenLogprob | None
    is_of_prompt: bool = False

    @property
    def is_urgent(self) -> bool:
        """Return whether the client waits for this token: the first and the last one of a text."""
        return self.is_first or self.ending is not None


def make_pieces(new_tokens: list[NewToken]) -> list[Piece | Refused]:
    """Return one piece for each request, in the order of the requests' first tokens."""
    tokens_by_request: dict[int, list[NewToken]] = {}
    for token in new_tokens:
        tokens_by_request.setdefault(token.request.ticket.id, []).append(token)
    return [_make_piece(tokens) for tokens in tokens_by_request.values()]


def _make_piece(tokens: list[NewToken]) -> Piece | Refused:
    """Return the piece of one request's new tokens, or the refusal of the request if its text cannot be decoded."""
    request, last = tokens[-1].request, tokens[-1]
    ticket = request.ticket
    is_last = last.ending is not None
    calls: Sequence[ToolCall] = ()
    try:
        with panics_as_errors():
            prompt_scores = _score_prompt(request, [token.logprob for token in tokens if token.is_of_prompt])
            tokens = [token for token in tokens if not token.is_of_prompt]
            reasoning, text, reasoning_tokens = _read_text(request, [token.token for token in tokens], last=is_last)
            if request.calls is not None:
                text, calls = request.calls.add(text, last=is_last)
            scores = tuple(
                _make_score(token.logprob, request.token_bytes)
                for token in tokens
                if token.logprob is not None and token.ending != "eos"
            )
    except Exception as error:  # from the tokenizer at these tokens: the server cancels this request alone
        return Refused.from_error(ticket.id, error)
    ending: Ending | None = None
    if last.ending is not None:
        ending = "length" if last.ending == "length" else "stop"
    return Piece(
        id=ticket.id,
        text=text,
        reasoning=reasoning,
        tokens=len(tokens),
        reasoning_tokens=reasoning_tokens,
        prompt_tokens=len(ticket.sequence.prompt),
        cached_tokens=ticket.cached_tokens,
        calls=tuple(calls),
        token_ids=tuple(token.token for token in tokens) if request.with_token_ids else (),
        prompt_ids=tuple(ticket.sequence.prompt) if request.with_token_ids and any(token.is_first for token in tokens) else (),
        scores=scores,
        prompt_scores=prompt_scores,
        ending=ending,
        stop_string=request.stream.stop_string if ending == "stop" else None,
    )


def _read_text(request: OpenRequest, tokens: list[int], *, last: bool) -> tuple[str, str, int]:
    """Return the reasoning and the text of an answer's next tokens, and how many of the tokens belong to the reasoning."""
    stream = request.reasoning
    if stream is None or stream.is_over:
        return "", request.stream.add(tokens, last=last), 0
    reasoning = text = ""
    count = 0
    for index, token in enumerate(tokens):  # one by one, to count them
        ends = last and index == len(tokens) - 1
        was_reasoning = stream.is_reasoning
        new_reasoning, new_text = stream.add(request.stream.add([token], last=ends), last=ends)
        count += was_reasoning or stream.is_reasoning
        reasoning += new_reasoning
        text += new_text
    return reasoning, text, count


def _score_prompt(request: OpenRequest, logprobs: list[TokenLogprob | None]) -> tuple[TokenScore, ...]:
    """Return the scores of the next tokens of a prompt. The first token of all has no log-probability."""
    token_bytes = request.token_bytes
    scores = [_make_score(logprob, token_bytes) for logprob in logprobs if logprob is not None]
    if request.unsent_ids:
        (token,) = request.unsent_ids
        scores.insert(0, TokenScore(spelled=tuple(token_bytes(token)), logprob=None, token=token))
        request.unsent_ids.clear()
    return tuple(scores)


def _make_score(logprob: TokenLogprob, token_bytes: Callable[[int], bytes]) -> TokenScore:
    top = tuple(
        TokenScore(spelled=tuple(token_bytes(token)), logprob=value, token=token, rank=rank)
        for rank, (token, value) in enumerate(logprob.top, start=1)
    )
    spelled = tuple(token_bytes(logprob.token))
    return TokenScore(spelled=spelled, logprob=logprob.logprob, top=top, token=logprob.token, rank=logprob.rank)


class TextStream:
    """The text of one answer, up to the first stop string.

    ``decode`` turns tokens into text. Characters that may begin a stop string are held back until more tokens come.
    ``shows_stop``: the text ends with the stop string. ``turn_end`` is the one of the stop strings that ends a turn of the chat
    template. It is not shown."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        *,
        shows_stop: bool = False,
        turn_end: str | None = None,
    ) -> None:
        self._decode = decode
        self._turn_end = turn_end
        self._shows_stop = shows_stop
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._decoded = 0  # tokens whose text is complete
        self._context_start = 0  # the tokens from here on are decoded together with the next ones
        self._held_back = ""
        self._found_stop: str | None = None

    @property
    def stop_string(self) -> str | None:
        """Return the stop string of the request that has ended the text, or None."""
        return None if self._found_stop == self._turn_end else self._found_stop

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Add tokens, and return the text that can be shown now. ``last`` says that no more tokens come."""
        if self._found_stop is not None:
            return ""
        self._tokens += tokens
        old_text = self._decode(self._tokens[self._context_start : self._decoded])
        text = self._decode(self._tokens[self._context_start :])
        if len(text) > len(old_text) and (last or not text.endswith(REPLACEMENT)):
            self._held_back += text[len(old_text) :]
            self._context_start = self._decoded
            self._decoded = len(self._tokens)
        found_stops = [(offset, stop) for stop in self._stops if (offset := self._held_back.find(stop)) >= 0]
        if found_stops:
            offset, self._found_stop = min(found_stops)
            return self._held_back[: offset + (len(self.stop_string or "") if self._shows_stop else 0)]
        held_length = 0
        if not last:
            held_length = max((partial_length(self._held_back, stop) for stop in self._stops), default=0)
        shown_length = len(self._held_back) - held_length
        shown = self._held_back[:shown_length]
        self._held_back = self._held_back[shown_length:]
        return shown
