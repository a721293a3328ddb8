"""Which sequences share the engine's rows: first come, first served, as long as what was promised to the others is kept. What of
a prompt was computed before is not computed again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from upshift.inference.generation.decode import next_tokens
from upshift.inference.generation.engines.decoder import Decoder, Prefix
from upshift.inference.generation.prefill import PASS_TOKENS
from upshift.inference.generation.sequence import Sequence
from upshift.serving.messages import Refused
from upshift.serving.pace import Pace
from upshift.serving.prompt_cache import PromptCache

PROMPT_SHARE = 2  # as many tokens as the cache has places, by this, may be kept of earlier prompts
UNLIMITED_TOKENS = 65_536  # of earlier prompts, where nothing says how much memory there is


@dataclass(eq=False)
class Ticket:
    """A request. ``goes_on``: a conversation, whose next prompt begins as this one and its answer. ``expected``: seconds to its
    first token when it was admitted, the factor left out. ``known``: tokens of its prompt that are not computed for it. ``keep``:
    its keys and values are worth it."""

    id: int
    sequence: Sequence
    came: float
    goes_on: bool = False
    expected: float = 0.0
    known: int = 0
    keep: bool = False

    @property
    def tokens(self) -> int:
        """Places of the cache that are reserved for it."""
        return len(self.sequence.prompt) + self.sequence.options.max_new_tokens


@dataclass
class Scheduler:
    """``cache_tokens``: places of all rows together; None: no limit is known. ``max_ttft``: seconds that are promised."""

    decoder: Decoder
    rows: int
    cache_tokens: int | None
    pace: Pace
    max_ttft: float | None = None
    max_waiting: int = 256
    clock: Callable[[], float] = time.perf_counter
    live: list[Ticket] = field(default_factory=list)
    waiting: deque[Ticket] = field(default_factory=deque)
    _gone: set[int] = field(default_factory=set)
    _cache: PromptCache = field(init=False)

    def __post_init__(self) -> None:
        self._cache = PromptCache(UNLIMITED_TOKENS if self.cache_tokens is None else self.cache_tokens // PROMPT_SHARE)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.waiting)

    def add(self, ticket: Ticket) -> Refused | None:
        """It waits from now on; or why it does not: 413 where it never fits, 429 where it would wait too long."""
        if self.cache_tokens is not None and ticket.tokens > self.cache_tokens:
            why = (
                f"prompt and answer take {ticket.tokens:,} tokens of the cache, which holds {self.cache_tokens:,}; ask for fewer"
            )
            return Refused(id=ticket.id, status=413, why=why)
        if self.decoder.joins:
            ticket.known = _length(self._cache.find(ticket.sequence.prompt))
        ticket.expected = self.pace.first_token(
            _new(ticket), free=self.rows - len(self.live), left=[one.sequence.left for one in self.live],
            before=[_new(one) for one in self.waiting],
        )  # fmt: skip
        wait = ticket.expected * self.pace.factor
        if self.max_ttft is not None and wait > self.max_ttft and self.busy:
            why = f"its first token would come after about {wait:.1f} s, and {self.max_ttft:g} s are promised; try again later"
            return Refused(id=ticket.id, status=429, why=why, retry_after=wait - self.max_ttft)
        if len(self.waiting) >= self.max_waiting:
            return Refused(id=ticket.id, status=429, why=f"{len(self.waiting):,} requests wait already", retry_after=wait)
        self.waiting.append(ticket)
        return None

    def cancel(self, id: int) -> None:
        if any(ticket.id == id for ticket in self.live):
            self._gone.add(id)
        self.waiting = deque(ticket for ticket in self.waiting if ticket.id != id)

    def step(self) -> list[tuple[Ticket, int]]:
        """One pass of the engine: each sequence that was in it, with its new token."""
        if self._gone:
            self._keep([ticket for ticket in self.live if ticket.id not in self._gone])
            self._gone.clear()
        coming, prefix = self._next() if self.waiting and (not self.live or self.decoder.joins) else ([], None)
        if not (coming or self.live):
            return []
        start = self.clock()
        if coming:
            logits = self.decoder.admit([ticket.sequence.prompt for ticket in coming], *([prefix] if prefix else []))
            self.live += coming
        else:
            coming = self.live
            logits = self.decoder.step(np.array([ticket.sequence.tokens[-1] for ticket in coming], dtype=np.int64))
        tokens = next_tokens(logits, [ticket.sequence for ticket in coming])
        self._learn(coming, start)
        found = list(zip(coming, tokens, strict=True))
        for ticket, token in found:
            ticket.sequence.add(token)
            if ticket.sequence.ending is not None:
                self.pace.ended(len(ticket.sequence.tokens))
                if ticket.keep:
                    tokens = [*ticket.sequence.prompt, *ticket.sequence.tokens]
                    self._cache.add(tokens, self.decoder.of_row(self.live.index(ticket)))
        self._keep([ticket for ticket in self.live if ticket.sequence.ending is None])
        return found

    def _next(self) -> tuple[list[Ticket], Prefix | None]:
        """Of those that wait, in their order, the ones that fit now and begin alike, and what they begin with."""
        coming: list[Ticket] = []
        prefix: Prefix | None = None
        held, most = sum(ticket.tokens for ticket in self.live), PASS_TOKENS
        while self.waiting and len(self.live) + len(coming) < self.rows:
            ticket = self.waiting[0]
            found = self._cache.find(ticket.sequence.prompt) if self.decoder.joins else None
            ticket.known = _length(found)
            held, most = held + ticket.tokens, most - _new(ticket)
            if (self.cache_tokens is not None and held > self.cache_tokens) or (coming and most < 0):
                break
            if coming and _states(found) is not _states(prefix):
                break
            prefix = prefix if coming and _length(prefix) <= _length(found) else found
            repeats = self._cache.repeats(ticket.sequence.prompt, ticket.known)
            ticket.keep = self.decoder.joins and (ticket.goes_on or repeats)
            coming.append(self.waiting.popleft())
        for ticket in coming:
            ticket.known = _length(prefix)
        return coming, prefix

    def _learn(self, done: list[Ticket], start: float) -> None:
        now = self.clock()
        if done is self.live:
            self.pace.stepped(now - start)
            return
        self.pace.admitted(sum(_new(ticket) for ticket in done), now - start)
        for ticket in done:
            self.pace.came(ticket.expected, now - ticket.came)

    def _keep(self, kept: list[Ticket]) -> None:
        if len(kept) < len(self.live):
            rows = [place for place, ticket in enumerate(self.live) if ticket in kept]
            self.decoder.keep(rows)
            self.live = kept


def _length(prefix: Prefix | None) -> int:
    return prefix.length if prefix else 0


def _states(prefix: Prefix | None) -> Any:
    return prefix.states if prefix else None


def _new(ticket: Ticket) -> int:
    """Tokens of its prompt that are to be computed."""
    return len(ticket.sequence.prompt) - ticket.known
