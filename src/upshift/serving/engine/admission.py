"""Decide whether a request is admitted: with 429 if its first token would come later than promised, with 413 if it never fits.

``RequestQueue`` holds the waiting and the running requests of one engine, of every kind. ``TtftEstimator`` estimates the time to
a first token from the times of the engine's passes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from upshift.inference.generation.batching import TokenLogprob
from upshift.inference.generation.media import MediaPrompt
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.messages import CONTEXT_CODE, LearnedLoad, Refused


@dataclass(eq=False)
class Ticket:
    """A request in the queue of an engine.

    ``arrival``: the time when the request came, by the queue's clock. ``admission``: the time when it was admitted, which is
    after the pass that ran meanwhile.
    ``is_conversation``: the next prompt of the conversation begins with this prompt and its answer.
    ``top``: the number of likeliest tokens to report. None reports no log-probabilities.
    ``expected_seconds``: the estimated time from admission to the first token, before the correction.
    ``cached_tokens``: tokens of the prompt that are taken from the prompt cache.
    ``shares_with``: the id of an earlier request whose prompt this request waits for, as both begin alike, or None.
    ``is_cached_later``: the prompt and its answer go into the prompt cache when the answer ends.
    ``prompt_top``: as ``top``, for the tokens of the prompt.
    ``adapter``: the key of the adapter that computes the request, or None.
    ``logprob``: the log-probability of the last token, or of the last token of the prompt while the prompt is scored."""

    id: int
    sequence: GeneratedSequence
    arrival: float
    is_conversation: bool = False
    top: int | None = None
    prompt_top: int | None = None
    adapter: str | None = None
    expected_seconds: float = 0.0
    admission: float = 0.0
    cached_tokens: int = 0
    shares_with: int | None = None
    is_cached_later: bool = False
    logprob: TokenLogprob | None = None

    @property
    def reserved_tokens(self) -> int:
        """Return the number of cache tokens that are reserved for the request."""
        return len(self.sequence.prompt) + self.sequence.options.new_tokens

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """Return the token ids of the prompt, [T]."""
        return np.asarray(self.sequence.prompt)

    @property
    def has_inputs(self) -> bool:
        """Return whether the prompt has other inputs than its tokens, so that it is computed in a pass of its own."""
        return isinstance(self.sequence.prompt, MediaPrompt)

    @property
    def input_bytes(self) -> int:
        """Return the bytes of the prompt's other inputs, such as the pixels of pictures."""
        return self.sequence.prompt.input_bytes if isinstance(self.sequence.prompt, MediaPrompt) else 0

    @property
    def uncached_tokens(self) -> int:
        """Return the number of the prompt's tokens that the engine has to compute together: not those that are scored one by
        one."""
        return 1 if self.sequence.scores_prompt else len(self.sequence.prompt) - self.cached_tokens


E = TypeVar("E")


@dataclass
class RequestQueue(Generic[E]):
    """The waiting and the running requests of one engine, and the decision whether a new one is admitted.

    ``cache_tokens``: tokens that the cache holds for all rows together. None: unknown.
    ``max_ttft``: promised seconds to the first token.
    ``failed``: requests for which no token could be chosen, until the caller takes them out.
    ``apart``: the requests whose prompts are computed between or beside the steps of the running ones, until they join them.
    ``reading``: ids of the requests whose prompts a thread reads, or will read, before they are added. These prompts have
    pictures or are long. Some of the requests want token ids alone, and are never added."""

    engine: E
    rows: int
    cache_tokens: int | None
    estimator: TtftEstimator
    max_ttft: float | None = None
    max_waiting: int = 256
    clock: Callable[[], float] = time.perf_counter
    live: list[Ticket] = field(default_factory=list)
    waiting: deque[Ticket] = field(default_factory=deque)
    failed: list[tuple[Ticket, Exception]] = field(default_factory=list)
    apart: list[Ticket] = field(default_factory=list)
    reading: set[int] = field(default_factory=set)
    _canceled_ids: set[int] = field(default_factory=set)

    @property
    def tickets(self) -> list[Ticket]:
        """Return all requests: those that run, those whose prompts are computed, and those that wait."""
        return [*self.live, *self.apart, *self.waiting]

    @property
    def is_busy(self) -> bool:
        return bool(self.tickets)

    @property
    def is_prefilling(self) -> bool:
        """Return whether a request has no token yet."""
        return bool(self.waiting or self.apart) or any(not ticket.sequence.tokens for ticket in self.live)

    def add(self, ticket: Ticket) -> Refused | None:
        """Add a request to the queue and return None, or return why it is rejected.

        The status is 413 if the request can never fit, and 429 if it would wait too long."""
        if self.cache_tokens is not None and ticket.reserved_tokens > self.cache_tokens:
            message = (
                f"prompt and answer take {ticket.reserved_tokens:,} tokens of the cache, which holds {self.cache_tokens:,}; "
                "ask for fewer"
            )
            return Refused(id=ticket.id, status=413, why=message, code=CONTEXT_CODE)
        self._expect_cached(ticket)
        ticket.expected_seconds = self._estimate_ttft(ticket)
        ticket.admission = self.clock()
        wait = ticket.admission - ticket.arrival + self._correct(ticket.expected_seconds)
        refused = self._refuse_waiting(ticket.id, wait)
        if refused is None:
            self.waiting.append(ticket)
        return refused

    def begin_reading(self, id: int, waited: float) -> Refused | None:
        """Count a request whose prompt a thread will read, or return why it is rejected before that.

        ``waited`` is the time in seconds since it came. The computation of its prompt is estimated when it is added."""
        wait = waited + (len(self.reading) + 1) * self.estimator.reading_seconds
        refused = self._refuse_waiting(id, wait)
        if refused is None:
            self.reading.add(id)
        return refused

    def end_reading(self, id: int, seconds: float) -> bool:
        """Record that the prompt of a request was read. Return whether the request was not canceled meanwhile."""
        self.estimator.record_reading(seconds)
        is_open = self.is_reading(id)
        self.reading.discard(id)
        return is_open

    def is_reading(self, id: int) -> bool:
        """Return whether a request still waits for its prompt to be read. The thread that reads prompts calls this, too."""
        return id in self.reading

    def _refuse_waiting(self, id: int, wait: float) -> Refused | None:
        """Return why a request that would wait for ``wait`` seconds is rejected, or None."""
        if self.max_ttft is not None and wait > self.max_ttft and (self.is_busy or self.reading):
            message = (
                f"its first token would come after about {wait:.1f} s, and {self.max_ttft:g} s are promised; try again later"
            )
            return Refused(id=id, status=429, why=message, retry_after=wait - self.max_ttft)
        requests = len(self.live) + len(self.waiting) + len(self.reading) + len(self.apart)
        if requests >= self.rows + self.max_waiting:  # a request with a free row does not wait
            message = f"{len(self.waiting) + len(self.reading):,} requests wait already"
            return Refused(id=id, status=429, why=message, retry_after=self._seconds_to_place())
        return None

    def _seconds_to_place(self) -> float:
        """Return the estimated seconds until the first of the running requests ends, which makes room for another one.

        Until one runs, that is the first waiting one with an answer like the recent ones."""
        live = [(len(ticket.sequence.tokens), ticket.sequence.tokens_left) for ticket in self.live]
        next_tickets = islice(self.waiting, max(self.rows - len(live) - len(self.apart), 0))
        prompt_tokens = self._tokens_apart + sum(ticket.uncached_tokens for ticket in next_tickets)
        return self.estimator.estimate(prompt_tokens, free_rows=0, live=live or [(0, UNKNOWN_TOKENS)], requests_before=0)

    @property
    def _offset(self) -> float:
        """Return the seconds that are added to estimated and real times before they are compared.

        An estimate of some milliseconds may be wrong by a factor that says nothing about estimates near the promise."""
        return 0.0 if self.max_ttft is None else OFFSET_SHARE * self.max_ttft

    def _correct(self, expected_seconds: float) -> float:
        return (expected_seconds + self._offset) * self.estimator.correction - self._offset

    def _record_first_token(self, ticket: Ticket) -> None:
        seconds = self.clock() - ticket.admission
        self.estimator.record_first_token(ticket.expected_seconds + self._offset, seconds + self._offset)

    def _expect_cached(self, ticket: Ticket) -> None:
        """Set how many tokens of a new request's prompt need not be computed, and which request computes them first."""

    def _estimate_ttft(self, ticket: Ticket) -> float:
        """Return the estimated seconds to the first token of a new request, before the correction."""
        sequences = [live_ticket.sequence for live_ticket in self.live]
        before = [*self.apart, *self.waiting]
        input_bytes = sum(one.input_bytes for one in (*before, ticket))
        cache = self._cache_use(before, ticket)
        has_row = len(self.live) + len(before) < self.rows and cache is None
        prompt_tokens, steps = self._count_work(ticket, has_row=has_row)
        steps += len(ticket.sequence.prompt) if ticket.sequence.scores_prompt else 0
        return (
            self.estimator.step_seconds * steps
            + self.estimator.byte_seconds * input_bytes
            + self.estimator.estimate(
                prompt_tokens,
                free_rows=self.rows - len(self.live),
                live=[(len(sequence.tokens), sequence.tokens_left) for sequence in sequences],
                requests_before=len(before),
                cache=cache,
            )
        )

    def _cache_use(self, before: list[Ticket], ticket: Ticket) -> CacheUse | None:
        """Return how a request and those before it use the cache, or None if all of them fit at once or the size is unknown."""
        live = [one.reserved_tokens for one in self.live]
        waiting = [one.reserved_tokens for one in before]
        if self.cache_tokens is None or sum(live) + sum(waiting) + ticket.reserved_tokens <= self.cache_tokens:
            return None
        return CacheUse(self.cache_tokens, live, waiting, ticket.reserved_tokens)

    @property
    def _tokens_apart(self) -> int:
        """Return how many tokens of the prompts apart are still to be computed."""
        return sum(ticket.uncached_tokens for ticket in self.apart)

    def _count_work(self, ticket: Ticket, *, has_row: bool) -> Work:
        """Return what is computed before the first token of a new request. ``has_row``: it need not wait for a row."""
        return Work(self._tokens_apart + sum(one.uncached_tokens for one in (*self.waiting, ticket)), 0)

    def cancel(self, id: int) -> None:
        """Remove a request from the queue, or from the rows before the next pass."""
        self.reading.discard(id)
        if any(ticket.id == id for ticket in (*self.live, *self.apart)):
            self._canceled_ids.add(id)
        self.waiting = deque(ticket for ticket in self.waiting if ticket.id != id)

    def step(self) -> Iterable[tuple[Ticket, int]]:
        """Wait for the next tokens of the engine. Yield each with its request, whose state is that after this token."""
        raise NotImplementedError


class Work(NamedTuple):
    """The work of an engine before the first token of a request: tokens of prompts, and steps of the other rows."""

    tokens: int
    steps: int


@dataclass
class Turns:
    """The passes of prompts in an engine with chunks, and the steps of the rows between them, as ``Scheduler`` orders them.

    ``room``: tokens of prompts that are computed before the next step. ``left``: tokens of the prompts apart.
    ``apart``: the ids of their requests. ``is_chunk_next``: else a short prompt goes before the next chunk of them."""

    width: int
    room: int
    left: int
    apart: set[int]
    has_rows: bool
    is_chunk_next: bool
    tokens: int = 0
    steps: int = 0

    def add(self, ticket: Ticket, *, has_row: bool) -> None:
        """Add the prompt of the next request. With ``has_row``, it takes turns with the chunks of a prompt apart."""
        length = ticket.uncached_tokens
        if self.apart and (length > self.width or ticket.shares_with in self.apart or not has_row):
            self.finish_apart()
        if length > self.width:
            self.left = length
            self.apart = {ticket.id}
            self.is_chunk_next = True
            return
        if self.apart and self.is_chunk_next:
            self._compute(min(self.left, self.width), steps=1)
            self.left -= min(self.left, self.width)
            self.room = 0
            if not self.left:
                self.apart = set()
                self.has_rows = True
        self.is_chunk_next = True
        is_next_pass = length > self.room
        self.room = (self.width if is_next_pass else self.room) - length
        self._compute(length, steps=int(is_next_pass))
        self.has_rows = True

    def finish_apart(self) -> None:
        """Compute all chunks of the prompts apart."""
        self._compute(self.left, steps=-(-self.left // self.width))
        self.left = self.room = 0
        self.apart = set()
        self.has_rows = True

    def _compute(self, tokens: int, *, steps: int) -> None:
        self.tokens += tokens
        self.steps += steps if self.has_rows else 0


class CacheUse(NamedTuple):
    """The tokens of an engine's cache, and those that are reserved for requests.

    ``live`` and ``before`` are those of the running requests and of those that wait, in their order. ``own`` are those of the new
    request."""

    capacity: int
    live: list[int]
    before: list[int]
    own: int


MAX_FAILURES = 3  # failed passes in a row, after which an engine starts again
UNKNOWN_TOKENS = 1 << 30  # of an answer, which ends as recent ones did
OFFSET_SHARE = 0.5  # of the promised time
SMOOTHING = 0.9  # share of the old value when a new pass is measured
RECENT_REQUESTS = 256  # for the mean answer length and for the correction
MIN_RATIOS = 16  # until so many first tokens have come, estimates are not corrected
CORRECTION_QUANTILE = 0.99  # of the scenarios, and of the ratios of real to estimated times
MIN_CORRECTION = 0.5
MAX_CORRECTION = 4.0
SCENARIOS = 128  # in which answers end otherwise
DRAWN_ROUNDS = 2  # of all rows, whose answers are drawn; those of further rounds take the mean


class TtftEstimator:
    """An estimate of how long a new request would wait for its first token, from the times of the engine's passes.

    Passes are measured as they run: prompts by their tokens, steps by their rows. Each estimate is compared with the real
    time. The next estimate is multiplied by a correction, with which 99 of 100 recent estimates would have been long enough."""

    def __init__(
        self, *, token_seconds: float, step_seconds: float, output_length: int, learned: LearnedLoad | None = None
    ) -> None:
        """Start from the values that the race or the warm-up measured, and from what an engine before this one ``learned``.

        ``token_seconds`` is the time of one token of a prompt. ``step_seconds`` is the time of one more token of all
        rows. ``output_length`` is the number of tokens of an answer."""
        self.token_seconds = token_seconds
        self.byte_seconds = 0.0  # of a prompt's other inputs, beyond the time of its tokens
        self.step_seconds = step_seconds
        self.reading_seconds = 0.0  # of a prompt that a thread reads
        answer_lengths = (output_length,) if learned is None else learned.answer_lengths
        ratios = () if learned is None else learned.ttft_ratios
        self._answer_lengths: deque[int] = deque(answer_lengths, maxlen=RECENT_REQUESTS)
        self._ratios: deque[float] = deque(ratios, maxlen=RECENT_REQUESTS)  # real to estimated seconds
        self._random = np.random.default_rng(0)

    def record_prompts(self, prompt_tokens: int, seconds: float, *, input_bytes: int = 0) -> None:
        """Record the time of prompts. With other inputs, what is beyond the time of their tokens is that of the inputs."""
        if not input_bytes:
            self.token_seconds = smooth(self.token_seconds, seconds / max(prompt_tokens, 1))
            return
        measured = max(seconds - self.token_seconds * prompt_tokens, 0.0) / input_bytes
        self.byte_seconds = smooth(self.byte_seconds, measured) if self.byte_seconds else measured

    def record_reading(self, seconds: float) -> None:
        """Record the time in which a thread read the prompt of a request."""
        self.reading_seconds = smooth(self.reading_seconds, seconds) if self.reading_seconds else seconds

    def record_step(self, seconds: float) -> None:
        self.step_seconds = smooth(self.step_seconds, seconds)

    def record_answer(self, tokens: int) -> None:
        self._answer_lengths.append(tokens)

    def record_first_token(self, expected: float, seconds: float) -> None:
        """Record the estimated and the real seconds to a first token."""
        self._ratios.append(seconds / max(expected, 1e-3))

    @property
    def learned(self) -> LearnedLoad:
        """Return what an engine after this one goes on from."""
        return LearnedLoad(answer_lengths=tuple(self._answer_lengths), ttft_ratios=tuple(self._ratios))

    @property
    def correction(self) -> float:
        """Return the factor for the next estimate. It is 1 until enough first tokens have come."""
        if len(self._ratios) < MIN_RATIOS:
            return 1.0
        ordered = sorted(self._ratios)
        quantile = ordered[int(CORRECTION_QUANTILE * (len(ordered) - 1))]
        return min(max(quantile, MIN_CORRECTION), MAX_CORRECTION)

    def estimate(
        self,
        prompt_tokens: int,
        *,
        free_rows: int,
        live: Iterable[tuple[int, int]],
        requests_before: int,
        cache: CacheUse | None = None,
    ) -> float:
        """Return the estimated seconds to the first token of a request, before the correction.

        Args:
            prompt_tokens: tokens to compute for this request and for the requests before it.
            free_rows: rows without a sequence.
            live: for each running sequence, its tokens so far and the maximum of its further tokens.
            requests_before: number of requests that wait already.
            cache: how they use the cache, if it does not hold all of them at once.
        """
        steps = self._steps_to_row(free_rows, list(live), requests_before, cache)
        return steps * self.step_seconds + self.token_seconds * prompt_tokens + self.step_seconds / 2

    def _steps_to_row(self, free_rows: int, live: list[tuple[int, int]], requests_before: int, cache: CacheUse | None) -> float:
        """Return the steps until the request has a row and room in the cache, which are enough in CORRECTION_QUANTILE of
        SCENARIOS.

        In each of them, the answers have lengths that are drawn from the recent ones."""
        if free_rows > requests_before and cache is None:
            return 0.0
        lengths = np.sort(np.fromiter(self._answer_lengths, dtype=np.float64))
        rows = free_rows + len(live)
        drawn_requests = min(requests_before, DRAWN_ROUNDS * rows)
        ends = np.zeros((SCENARIOS, rows))  # steps from now
        if live:
            ends[:, : len(live)] = self._draw_remaining(lengths, np.array(live, dtype=np.float64))
        scenarios = np.arange(SCENARIOS)
        drawn_indices = self._random.integers(len(lengths), size=(drawn_requests, SCENARIOS))
        simulated = SimulatedRows(ends, cache)
        for number, answer_lengths in enumerate(lengths[drawn_indices]):
            simulated.start(number, answer_lengths, scenarios)
        steps = float(np.quantile(simulated.next_start(None), CORRECTION_QUANTILE))
        return steps + (requests_before - drawn_requests) * float(lengths.mean()) / simulated.rows_at_once

    def _draw_remaining(self, lengths: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Return the further tokens of running sequences in each scenario, [SCENARIOS, N].

        ``live`` [N, 2] has the tokens of each so far, and the maximum of its further ones. A text ends as one of the recent
        answers that were longer than it is now. One that is longer than all of them doubles in half of the scenarios."""
        tokens, tokens_left = live.T
        first = np.searchsorted(lengths, tokens, side="right")
        drawn = self._random.random((SCENARIOS, len(live)))
        indices = first + (drawn * (len(lengths) - first)).astype(np.int64)
        remaining = lengths[np.minimum(indices, len(lengths) - 1)] - tokens
        beyond_all = np.maximum(tokens, 1.0) * (1.0 / (1.0 - drawn) - 1.0)
        further: np.ndarray = np.minimum(np.where(first == len(lengths), beyond_all, remaining), tokens_left)
        return further


class SimulatedRows:
    """The rows of an engine in several scenarios: when each row and its room in the cache become free, in steps from now.

    Requests start in their order, each when it has a row and room."""

    def __init__(self, ends: np.ndarray, cache: CacheUse | None) -> None:
        """``ends`` [S, R] are those of the running sequences. A free row has 0. ``cache`` None does not limit them."""
        self._ends = ends
        self._cache = cache
        self._last_start = np.zeros(len(ends))
        self._reserved = np.zeros_like(ends)  # tokens of the cache
        if cache is not None:
            self._reserved[:, : len(cache.live)] = cache.live

    @property
    def rows_at_once(self) -> float:
        """Return how many requests run at once if all rows have one, or as many as the cache holds."""
        rows = float(self._ends.shape[1])
        if self._cache is None or not self._cache.before:
            return rows
        return min(rows, max(self._cache.capacity * len(self._cache.before) / sum(self._cache.before), 1.0))

    def next_start(self, number: int | None) -> np.ndarray:
        """Return when a waiting request starts, [S]. None stands for the new request after them."""
        starts: np.ndarray = self._ends.min(1)
        if self._cache is None:
            return starts
        needed = self._cache.own if number is None else self._cache.before[number]
        order = self._ends.argsort(1)
        freed = np.take_along_axis(self._reserved, order, 1).cumsum(1)
        missing = needed + freed[:, -1:] - self._cache.capacity  # tokens to be freed first
        with_room = np.take_along_axis(self._ends, order, 1)[np.arange(len(order)), (freed >= missing).argmax(1)]
        starts = np.maximum(starts, np.where(missing[:, 0] > 0, with_room, 0.0))
        in_order: np.ndarray = np.maximum(starts, self._last_start)
        return in_order

    def start(self, number: int, lengths: np.ndarray, scenarios: np.ndarray) -> None:
        """Give a waiting request the next free row, until its answer of ``lengths`` [S] tokens ends."""
        starts = self.next_start(number)
        row = self._ends.argmin(1)
        if self._cache is not None:
            self._reserved[self._ends <= starts[:, None]] = 0.0
            self._reserved[scenarios, row] = self._cache.before[number]
            self._last_start = starts
        self._ends[scenarios, row] = starts + lengths


def smooth(old: float, measured: float) -> float:
    """Return the mean of measured times in which the newest ones count most."""
    return SMOOTHING * old + (1.0 - SMOOTHING) * measured
