"""Which sequences share the engine's rows: first come, first served, as long as what was promised to the others is kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from upshift.inference.generation.decode import next_tokens
from upshift.inference.generation.engines.decoder import Decoder
from upshift.inference.generation.prefill import PASS_TOKENS
from upshift.inference.generation.sequence import Sequence
from upshift.serving.messages import Refused
from upshift.serving.pace import Pace


@dataclass(eq=False)
class Ticket:
    """A request. ``expected``: seconds to its first token when it was admitted, the factor left out."""

    id: int
    sequence: Sequence
    came: float
    expected: float = 0.0

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
        ticket.expected = self.pace.first_token(
            len(ticket.sequence.prompt), free=self.rows - len(self.live), left=[one.sequence.left for one in self.live],
            before=[len(one.sequence.prompt) for one in self.waiting],
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
        coming = self._next() if self.waiting and (not self.live or self.decoder.joins) else []
        if not (coming or self.live):
            return []
        start = self.clock()
        if coming:
            logits = self.decoder.admit([ticket.sequence.prompt for ticket in coming])
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
        self._keep([ticket for ticket in self.live if ticket.sequence.ending is None])
        return found

    def _next(self) -> list[Ticket]:
        """Of those that wait, in their order, the ones that fit now."""
        coming: list[Ticket] = []
        held, most = sum(ticket.tokens for ticket in self.live), PASS_TOKENS
        while self.waiting and len(self.live) + len(coming) < self.rows:
            ticket = self.waiting[0]
            held, most = held + ticket.tokens, most - len(ticket.sequence.prompt)
            if (self.cache_tokens is not None and held > self.cache_tokens) or (coming and most < 0):
                break
            coming.append(self.waiting.popleft())
        return coming

    def _learn(self, done: list[Ticket], start: float) -> None:
        now = self.clock()
        if done is self.live:
            self.pace.stepped(now - start)
            return
        self.pace.admitted(sum(len(ticket.sequence.prompt) for ticket in done), now - start)
        for ticket in done:
            self.pace.came(ticket.expected, now - ticket.came)

    def _keep(self, kept: list[Ticket]) -> None:
        if len(kept) < len(self.live):
            rows = [place for place, ticket in enumerate(self.live) if ticket in kept]
            self.decoder.keep(rows)
            self.live = kept
