"""Decide which sequences share the engine's rows: first come, first served, as long as promises to the others are
kept. The part of a prompt that was computed before is not computed again.

Estimate how long a new request would wait for its first token, from the times of the engine's own passes.

Passes are measured as they run: prompts by their tokens, steps by their rows. Each estimate is compared with the time
that the request really waited. The next estimate is multiplied by the factor with which nine in ten admitted requests
would have been promised right.

Keep keys and values of earlier prompts, for conversations that go on and for beginnings that prompts share.

Compute the log-probability of a token, and the likeliest tokens in its place.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.batching import advance, join, next_token
from upshift.inference.generation.engines.base import Decoder, Prefix
from upshift.inference.generation.prefix import PASS_TOKENS, SHORTEST
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.messages import Refused

MEMORY = 0.9  # of what was known, when a pass more is measured
KEPT = 64  # requests that the factor, and answers that their length, is taken from
SURE = 0.9  # of them, that the estimate is to hold for
LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0


class Pace:
    def __init__(self, *, token_seconds: float, step_seconds: float, output_length: float) -> None:
        """Start from values that the race or the proof measured. ``token_seconds`` is for one token of a prompt.
        ``step_seconds`` is for one more token of all rows. ``output_length`` is the number of tokens of an answer."""
        self.token_seconds, self.step_seconds = token_seconds, step_seconds
        self._lengths: deque[float] = deque([output_length], maxlen=KEPT)
        self._ratios: deque[float] = deque(maxlen=KEPT)

    def admitted(self, prompt_tokens: int, seconds: float) -> None:
        self.token_seconds = _moved(self.token_seconds, seconds / max(prompt_tokens, 1))

    def stepped(self, seconds: float) -> None:
        self.step_seconds = _moved(self.step_seconds, seconds)

    def ended(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def came(self, expected: float, seconds: float) -> None:
        """Record the expected and the real seconds to a first token."""
        self._ratios.append(seconds / max(expected, 1e-3))

    @property
    def factor(self) -> float:
        if len(self._ratios) < KEPT // 4:
            return 1.0
        ordered = sorted(self._ratios)
        return min(max(ordered[int(SURE * (len(ordered) - 1))], LEAST_FACTOR), MOST_FACTOR)

    def first_token(self, prompt_tokens: int, *, free: int, live: Iterable[tuple[int, int]], before: int) -> float:
        """Return the expected seconds to the first token, before the factor.

        ``prompt_tokens`` are those of this request and of the ``before`` requests that wait already. ``free`` is the
        number of free rows. ``live`` holds, for each sequence, the tokens that it has and the most that it may still
        get."""
        ends, length = [self._still(told, most) for told, most in live], fmean(self._lengths)  # in steps from now
        heapq.heapify(ends)
        waited = 0.0
        for _ in range(free, before + 1):
            waited = ends[0] if ends else 0.0
            heapq.heappushpop(ends, waited + length)
        return waited * self.step_seconds + self.token_seconds * prompt_tokens + self.step_seconds / 2

    def _still(self, told: int, most: int) -> float:
        """Return the steps that a sequence still stays: the mean of the recent answers that were longer than it is
        now."""
        longer = [length for length in self._lengths if length > told]
        return min(fmean(longer) - told if longer else 1.0, most)


def _moved(known: float, found: float) -> float:
    return MEMORY * known + (1.0 - MEMORY) * found


RECENT = 64  # prompts that new ones are held against


class Kept(NamedTuple):
    tokens: np.ndarray  # [T]
    prefix: Prefix


class PromptCache:
    """Kept prompts with at most ``most_tokens`` tokens together. The least recently used ones are dropped first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._kept: list[Kept] = []  # the last one was used last
        self._recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """Return the longest kept beginning of the prompt, or None. The last token is left out, because the first
        logits come from it."""
        ids = np.asarray(prompt)
        lengths = [_shared(kept.tokens, ids[:-1]) for kept in self._kept]
        longest = max(lengths, default=0)
        if longest < SHORTEST:
            return None
        found = self._kept.pop(lengths.index(longest))
        self._kept.append(found)
        return found.prefix._replace(length=longest)

    def repeats(self, prompt: Sequence[int], known: int) -> bool:
        """Return whether a recent prompt shares more of this prompt's beginning than is known of it. The prompt then
        counts as recent."""
        ids = np.asarray(prompt)
        longest = max((_shared(one, ids) for one in self._recent), default=0)
        self._recent.append(ids)
        return longest >= known + SHORTEST

    def add(self, tokens: Sequence[int], prefix: Prefix) -> None:
        ids = np.asarray(tokens)[: prefix.length]
        if len(ids) > self._most:
            return
        self._kept = [kept for kept in self._kept if _shared(kept.tokens, ids) < len(kept.tokens)]  # what it holds, too
        self._kept.append(Kept(ids, prefix))
        held = 0
        for place in reversed(range(len(self._kept))):
            held += len(self._kept[place].tokens)
            if held > self._most:
                del self._kept[: place + 1]
                break


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


LEAST = -9999.0  # as OpenAI says what has no chance


class Likely(NamedTuple):
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest first

    @classmethod
    def of(cls, logits: np.ndarray, token: int, count: int) -> Likely:
        """Return the log-probability of ``token`` from logits [V], with the ``count`` likeliest tokens."""
        whole = logits.astype(np.float64)
        shifted = whole - whole.max()
        found = np.maximum(shifted - np.log(np.exp(shifted).sum()), LEAST)
        count = min(count, len(found))
        places = np.argpartition(-found, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
        top = tuple((int(place), float(found[place])) for place in places[np.argsort(-found[places], kind="stable")])
        return cls(token, float(found[token]), top)


PROMPT_SHARE = 2  # as many tokens as the cache has places, by this, may be kept of earlier prompts
PART_TOKENS = 256  # more of a prompt would hold up those whose next tokens are in the same pass
UNLIMITED_TOKENS = 65_536  # of earlier prompts, where nothing says how much memory there is


@dataclass(eq=False)
class Ticket:
    """A request in the scheduler.

    ``goes_on``: the request is a conversation, whose next prompt begins as this one and its answer. ``top``: the
    number of likeliest tokens to report. None reports no scores. ``expected``: seconds to the first token when the
    request was admitted, without the factor. ``known``: tokens of the prompt that are not computed for it. ``keep``:
    its keys and values are worth keeping. ``likely``: the log-probabilities of its last token."""

    id: int
    sequence: GeneratedSequence
    came: float
    goes_on: bool = False
    top: int | None = None
    expected: float = 0.0
    known: int = 0
    keep: bool = False
    likely: Likely | None = None

    @property
    def tokens(self) -> int:
        """Return the places of the cache that are reserved for the request."""
        return len(self.sequence.prompt) + self.sequence.options.max_new_tokens


class Coming(NamedTuple):
    ticket: Ticket
    prefix: Prefix | None


@dataclass
class Scheduler:
    """The requests of one engine.

    ``cache_tokens``: places of all rows together. None: no limit is known. ``max_ttft``: promised seconds to a first
    token. ``part_tokens``: the most tokens of prompts in one pass with the next tokens of others."""

    decoder: Decoder
    rows: int
    cache_tokens: int | None
    pace: Pace
    max_ttft: float | None = None
    max_waiting: int = 256
    part_tokens: int = PART_TOKENS
    clock: Callable[[], float] = time.perf_counter
    live: list[Ticket] = field(default_factory=list)
    waiting: deque[Ticket] = field(default_factory=deque)
    failed: list[tuple[Ticket, Exception]] = field(default_factory=list)  # until somebody takes them out
    _gone: set[int] = field(default_factory=set)
    _cache: PromptCache = field(init=False)

    def __post_init__(self) -> None:
        self._cache = PromptCache(UNLIMITED_TOKENS if self.cache_tokens is None else self.cache_tokens // PROMPT_SHARE)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.waiting)

    def add(self, ticket: Ticket) -> Refused | None:
        """Admit the request to the queue and return None, or return why not. The status is 413 if the request never
        fits, and 429 if it would wait too long."""
        if self.cache_tokens is not None and ticket.tokens > self.cache_tokens:
            why = (
                f"prompt and answer take {ticket.tokens:,} tokens of the cache, which holds {self.cache_tokens:,}; ask for fewer"
            )
            return Refused(id=ticket.id, status=413, why=why)
        if self.decoder.joins:
            ticket.known = _length(self._cache.find(ticket.sequence.prompt))
        sequences = [one.sequence for one in self.live]
        ticket.expected = self.pace.first_token(
            _new(ticket) + sum(map(_new, self.waiting)) + sum(one.pending for one in sequences if not one.tokens),
            free=self.rows - len(self.live), live=[(len(one.tokens), one.left) for one in sequences], before=len(self.waiting),
        )  # fmt: skip
        wait = ticket.expected * self.pace.factor
        if self.max_ttft is not None and wait > self.max_ttft and self.busy:
            why = f"its first token would come after about {wait:.1f} s, and {self.max_ttft:g} s are promised; try again later"
            return Refused(id=ticket.id, status=429, why=why, retry_after=wait - self.max_ttft)
        if len(self.live) + len(self.waiting) >= self.rows + self.max_waiting:  # a row that is free is not waited for
            return Refused(id=ticket.id, status=429, why=f"{len(self.waiting):,} requests wait already", retry_after=wait)
        self.waiting.append(ticket)
        return None

    def cancel(self, id: int) -> None:
        if any(ticket.id == id for ticket in self.live):
            self._gone.add(id)
        self.waiting = deque(ticket for ticket in self.waiting if ticket.id != id)

    def step(self) -> list[tuple[Ticket, int]]:
        """Run one pass of the engine. Return each sequence that got a new token, with the token."""
        if self._gone:
            self._keep([ticket for ticket in self.live if ticket.id not in self._gone])
            self._gone.clear()
        coming = self._next() if self.waiting and (not self.live or self.decoder.joins) else []
        if not (coming or self.live):
            return []
        told, logits = self._pass(coming)
        failed, found = len(self.failed), self._told(told, logits)
        for ticket, _ in found:
            if len(ticket.sequence.tokens) == 1:
                self.pace.came(ticket.expected, self.clock() - ticket.came)
            if ticket.sequence.ending is not None:
                self.pace.ended(len(ticket.sequence.tokens))
                if ticket.keep:
                    self._cache.add(ticket.sequence.prompt + ticket.sequence.tokens, self.decoder.of_row(self.live.index(ticket)))
        lost = [ticket for ticket, _ in self.failed[failed:]]
        self._keep([ticket for ticket in self.live if ticket.sequence.ending is None and ticket not in lost])
        return found

    def _told(self, told: list[Ticket], logits: np.ndarray) -> list[tuple[Ticket, int]]:
        """Choose the next token of each request, and add it to the sequence. Return the requests with their tokens."""
        found = []
        for ticket, row, likeliest in zip(told, logits, logits.argmax(1).tolist(), strict=True):
            try:
                token = next_token(row, likeliest, ticket.sequence)
                ticket.likely = None if ticket.top is None else Likely.of(row, token, ticket.top)
                ticket.sequence.add(token)
            except Exception as error:  # its own options, or what became of its row: the others go on
                self.failed.append((ticket, error))
            else:
                found.append((ticket, token))
        return found

    def _pass(self, coming: list[Coming]) -> tuple[list[Ticket], np.ndarray]:
        """Run one pass of the engine. Return the requests that get a next token from it, and their logits."""
        start, before = self.clock(), self.live
        self.live = [*before, *(one.ticket for one in coming)]
        stepping = bool(before) and (self.decoder.mixes or not coming)
        if self.decoder.mixes:
            sequences = [ticket.sequence for ticket in before]
            join(self.decoder, sequences, [(one.ticket.sequence, one.prefix) for one in coming])
            new = sum(sequence.pending for sequence in sequences)
            ended, logits = advance(self.decoder, sequences, self.part_tokens)
            new -= sum(sequence.pending for sequence in sequences)
            told = [ticket for ticket in self.live if ticket.sequence in ended]
        elif coming:
            told, new = [one.ticket for one in coming], sum(_new(one.ticket) for one in coming)
            prefix = coming[0].prefix
            logits = self.decoder.admit([ticket.sequence.prompt for ticket in told], *([prefix] if prefix else []))
        else:
            told, new = before, 0
            logits = self.decoder.step(np.array([ticket.sequence.tokens[-1] for ticket in told], dtype=np.int64))
        seconds = self.clock() - start
        if new:
            self.pace.admitted(new, max(seconds - self.pace.step_seconds, 0.0) if stepping else seconds)
        else:
            self.pace.stepped(seconds)
        return told, logits

    def _next(self) -> list[Coming]:
        """Return the waiting requests that fit now, in their order. An engine that does not mix takes only those that
        begin alike."""
        coming: list[Coming] = []
        mixes, most = self.decoder.mixes, PASS_TOKENS
        if mixes:
            most = self.part_tokens - sum(ticket.sequence.pending for ticket in self.live)
        held = sum(ticket.tokens for ticket in self.live)
        while self.waiting and len(self.live) + len(coming) < self.rows:
            ticket = self.waiting[0]
            prefix = self._cache.find(ticket.sequence.prompt) if self.decoder.joins else None
            ticket.known, held = _length(prefix), held + ticket.tokens
            alike = mixes or not coming or (most >= _new(ticket) and _states(prefix) is _states(coming[0].prefix))
            if not alike or (mixes and most <= 0) or (self.cache_tokens is not None and held > self.cache_tokens):
                break
            most -= _new(ticket)
            repeats = self._cache.repeats(ticket.sequence.prompt, ticket.known)
            ticket.keep = self.decoder.joins and (ticket.goes_on or repeats)
            coming.append(Coming(self.waiting.popleft(), prefix))
        return coming if mixes else _from_one(coming)

    @property
    def computing(self) -> bool:
        """Return whether a request has no token yet."""
        return bool(self.waiting) or any(not ticket.sequence.tokens for ticket in self.live)

    def _keep(self, kept: list[Ticket]) -> None:
        if len(kept) < len(self.live):
            rows = [place for place, ticket in enumerate(self.live) if ticket in kept]
            self.decoder.keep(rows)
            self.live = kept


def _from_one(coming: list[Coming]) -> list[Coming]:
    """Return all requests with the shortest of their prefixes."""
    prefix = min((one.prefix for one in coming), key=_length, default=None)
    for one in coming:
        one.ticket.known = _length(prefix)
    return [Coming(one.ticket, prefix) for one in coming]


def _length(prefix: Prefix | None) -> int:
    return prefix.length if prefix else 0


def _states(prefix: Prefix | None) -> Any:
    return prefix.states if prefix else None


def _new(ticket: Ticket) -> int:
    """Return the number of the prompt's tokens that are still to be computed."""
    return len(ticket.sequence.prompt) - ticket.known
