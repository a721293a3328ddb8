"""Decide which requests share the engine's rows: first come, first served, while the promised times are kept.

``RequestQueue`` admits requests for every kind of engine. ``Scheduler`` runs engines that compute token by token. It uses the
parts that follow it: an estimate of the time to a first token, a cache of earlier prompts, and the log-probabilities of
tokens."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from upshift.inference.generation.batching import choose_token, join_sequences, run_mixed_pass
from upshift.inference.generation.engines.base import Decoder, Prefix
from upshift.inference.generation.media import MediaPrompt
from upshift.inference.generation.prefix import MIN_PREFIX_TOKENS, PASS_TOKENS
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.messages import CONTEXT_CODE, Refused

CACHED_PROMPT_SHARE = 2  # the prompt cache may hold the number of the engine's cache tokens divided by this
PROMPT_CHUNK_TOKENS = 256  # of prompts in one pass: more would delay the sequences whose next tokens the pass computes
UNLIMITED_TOKENS = 65_536  # in the prompt cache, if the memory is unknown


@dataclass(eq=False)
class Ticket:
    """A request in the scheduler.

    ``arrival``: the time when the request came, by the scheduler's clock.
    ``is_conversation``: the next prompt of the conversation begins with this prompt and its answer.
    ``top``: the number of likeliest tokens to report. None reports no log-probabilities.
    ``expected_seconds``: the estimated time to the first token at admission, before the correction.
    ``cached_tokens``: tokens of the prompt that are taken from the prompt cache.
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
    cached_tokens: int = 0
    is_cached_later: bool = False
    logprob: TokenLogprob | None = None

    @property
    def reserved_tokens(self) -> int:
        """Return the number of cache tokens that are reserved for the request."""
        return len(self.sequence.prompt) + self.sequence.options.new_tokens

    @property
    def has_inputs(self) -> bool:
        """Return whether the prompt has other inputs than its tokens, so that it is computed in a pass of its own."""
        return isinstance(self.sequence.prompt, MediaPrompt)

    @property
    def uncached_tokens(self) -> int:
        """Return the number of the prompt's tokens that the engine has to compute together: not those that are scored one by
        one."""
        return 1 if self.sequence.scores_prompt else len(self.sequence.prompt) - self.cached_tokens


class Admitted(NamedTuple):
    """A request that joins the rows in the next pass, and the cached beginning of its prompt."""

    ticket: Ticket
    prefix: Prefix | None


E = TypeVar("E")


@dataclass
class RequestQueue(Generic[E]):
    """The waiting and the running requests of one engine, and the decision whether a new one is admitted.

    ``cache_tokens``: tokens that the cache holds for all rows together. None: unknown.
    ``max_ttft``: promised seconds to the first token.
    ``failed``: requests for which no token could be chosen, until the caller takes them out."""

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
    _canceled_ids: set[int] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.waiting)

    @property
    def is_prefilling(self) -> bool:
        """Return whether a request has no token yet."""
        return bool(self.waiting) or any(not ticket.sequence.tokens for ticket in self.live)

    def add(self, ticket: Ticket) -> Refused | None:
        """Add a request to the queue and return None, or return why it is rejected.

        The status is 413 if the request can never fit, and 429 if it would wait too long."""
        if self.cache_tokens is not None and ticket.reserved_tokens > self.cache_tokens:
            message = (
                f"prompt and answer take {ticket.reserved_tokens:,} tokens of the cache, which holds {self.cache_tokens:,}; "
                "ask for fewer"
            )
            return Refused(id=ticket.id, status=413, why=message, code=CONTEXT_CODE)
        ticket.cached_tokens = self._count_cached(ticket)
        ticket.expected_seconds = self._estimate_ttft(ticket)
        wait = ticket.expected_seconds * self.estimator.correction
        if self.max_ttft is not None and wait > self.max_ttft and self.is_busy:
            message = (
                f"its first token would come after about {wait:.1f} s, and {self.max_ttft:g} s are promised; try again later"
            )
            return Refused(id=ticket.id, status=429, why=message, retry_after=wait - self.max_ttft)
        if len(self.live) + len(self.waiting) >= self.rows + self.max_waiting:  # a request with a free row does not wait
            message = f"{len(self.waiting):,} requests wait already"
            return Refused(id=ticket.id, status=429, why=message, retry_after=wait)
        self.waiting.append(ticket)
        return None

    def _count_cached(self, ticket: Ticket) -> int:
        """Return how many tokens of a new request's prompt need not be computed. 0: unknown."""
        return 0

    def _estimate_ttft(self, ticket: Ticket) -> float:
        """Return the estimated seconds to the first token of a new request, before the correction."""
        sequences = [live_ticket.sequence for live_ticket in self.live]
        waiting_tokens = sum(waiting_ticket.uncached_tokens for waiting_ticket in self.waiting)
        pending_tokens = sum(sequence.pending_tokens for sequence in sequences if not (sequence.tokens or sequence.scores_prompt))
        prompt_tokens = ticket.uncached_tokens + waiting_tokens + pending_tokens
        steps = self._steps_beside(prompt_tokens) + (len(ticket.sequence.prompt) if ticket.sequence.scores_prompt else 0)
        return self.estimator.step_seconds * steps + self.estimator.estimate(
            prompt_tokens,
            free_rows=self.rows - len(self.live),
            live=[(len(sequence.tokens), sequence.tokens_left) for sequence in sequences],
            requests_before=len(self.waiting),
        )

    def _steps_beside(self, prompt_tokens: int) -> int:
        """Return how many steps of the other rows the tokens of prompts wait for."""
        return 0

    def cancel(self, id: int) -> None:
        """Remove a request from the queue, or from the rows before the next pass."""
        if any(ticket.id == id for ticket in self.live):
            self._canceled_ids.add(id)
        self.waiting = deque(ticket for ticket in self.waiting if ticket.id != id)

    def step(self) -> Iterable[tuple[Ticket, int]]:
        """Wait for the next tokens of the engine. Yield each with its request, whose state is that after this token."""
        raise NotImplementedError


@dataclass
class Scheduler(RequestQueue[Decoder]):
    """The requests of an engine that computes the next token of each row when it is told to.

    ``chunk_tokens``: maximum tokens of prompts in a pass that also computes the next tokens of other sequences.
    ``assign_adapters``: receives the adapters of the rows that the next ``admit`` of the engine adds."""

    chunk_tokens: int = PROMPT_CHUNK_TOKENS
    assign_adapters: Callable[[Sequence[str | None]], None] = lambda adapters: None
    _prompt_cache: PromptCache = field(init=False)

    def __post_init__(self) -> None:
        max_tokens = UNLIMITED_TOKENS if self.cache_tokens is None else self.cache_tokens // CACHED_PROMPT_SHARE
        self._prompt_cache = PromptCache(max_tokens)

    @property
    def decoder(self) -> Decoder:
        return self.engine

    def _count_cached(self, ticket: Ticket) -> int:
        return _length(self._find_prefix(ticket))

    def _steps_beside(self, prompt_tokens: int) -> int:
        return prompt_tokens // self.chunk_tokens if self.decoder.mixes else 0

    def step(self) -> list[tuple[Ticket, int]]:
        """Run one pass of the engine. Return the requests that got a new token, each with its token.

        While a prompt is scored, the tokens of the prompt count as new ones. The first of them does not, as nothing comes before
        it."""
        if self._canceled_ids:
            self._keep_live([ticket for ticket in self.live if ticket.id not in self._canceled_ids])
            self._canceled_ids.clear()
        admitted: list[Admitted] = []
        if self.waiting and (not self.live or self.decoder.joins):
            admitted = self._admit_waiting()
        if not (admitted or self.live):
            return []
        tickets, logits = self._run_pass(admitted)
        failures_before = len(self.failed)
        new_tokens = self._choose_tokens(tickets, logits)
        for ticket, _ in new_tokens:
            if len(ticket.sequence.tokens) == 1 and not ticket.sequence.scores_prompt:
                self.estimator.record_first_token(ticket.expected_seconds, self.clock() - ticket.arrival)
            if ticket.sequence.ending is not None:
                self._record_ending(ticket)
        failed = [ticket for ticket, _ in self.failed[failures_before:]]
        self._keep_live([ticket for ticket in self.live if ticket.sequence.ending is None and ticket not in failed])
        return new_tokens

    def _record_ending(self, ticket: Ticket) -> None:
        sequence = ticket.sequence
        self.estimator.record_answer(len(sequence.tokens))
        if ticket.is_cached_later:
            prefix = self.decoder.prefix_of_row(self.live.index(ticket))
            self._prompt_cache.add(sequence.prompt + sequence.tokens, prefix, ticket.adapter)

    def _choose_tokens(self, tickets: list[Ticket], logits: np.ndarray) -> list[tuple[Ticket, int]]:
        """Choose the next token of each request from logits [N, V], and add it to the sequence.

        Return the requests with their tokens. A request that fails here goes to ``failed``, and the others go on."""
        chosen = []
        for ticket, row, likeliest in zip(tickets, logits, logits.argmax(1).tolist(), strict=True):
            try:
                token = self._choose_token(ticket, row, likeliest)
            except Exception as error:  # from the request's own options, or from its logits
                self.failed.append((ticket, error))
            else:
                chosen.append((ticket, token))
        return chosen

    def _choose_token(self, ticket: Ticket, logits: np.ndarray, likeliest: int) -> int:
        """Return the next token of a request from logits [V]: the next one of its prompt, or a new one of its text."""
        sequence = ticket.sequence
        if sequence.is_scoring:
            token = sequence.prompt[sequence.computed]
            ticket.logprob = TokenLogprob.from_logits(logits, token, ticket.prompt_top or 0)
            return token
        token = choose_token(logits, likeliest, sequence)
        ticket.logprob = None if ticket.top is None else TokenLogprob.from_logits(logits, token, ticket.top)
        sequence.add(token)
        return token

    def _run_pass(self, admitted: list[Admitted]) -> tuple[list[Ticket], np.ndarray]:
        """Run one pass of the engine. Return the requests that get a next token from it, and their logits."""
        start = self.clock()
        earlier = self.live
        self.live = [*earlier, *(new.ticket for new in admitted)]
        has_step = bool(earlier) and (self.decoder.mixes or not admitted)
        if self.decoder.mixes:
            sequences = [ticket.sequence for ticket in earlier]
            join_sequences(self.decoder, sequences, [(new.ticket.sequence, new.prefix) for new in admitted])
            unscored = [sequence for sequence in sequences if not sequence.scores_prompt]
            pending_tokens = sum(sequence.pending_tokens for sequence in unscored)
            with_logits, logits = run_mixed_pass(self.decoder, sequences, self.chunk_tokens)
            prompt_tokens = pending_tokens - sum(sequence.pending_tokens for sequence in unscored)
            tickets = [ticket for ticket in self.live if ticket.sequence in with_logits]
        elif admitted:
            tickets = [new.ticket for new in admitted]
            prompt_tokens = sum(ticket.uncached_tokens for ticket in tickets)
            prefix = admitted[0].prefix
            prompts = [
                [ticket.sequence.take_input()] if ticket.sequence.scores_prompt else ticket.sequence.prompt for ticket in tickets
            ]
            self.assign_adapters([ticket.adapter for ticket in tickets])
            logits = self.decoder.admit(prompts, *([prefix] if prefix else []))
        else:
            tickets = earlier
            prompt_tokens = 0
            logits = self.decoder.step(np.array([ticket.sequence.take_input() for ticket in tickets], dtype=np.int64))
        seconds = self.clock() - start
        if prompt_tokens:
            prompt_seconds = max(seconds - self.estimator.step_seconds, 0.0) if has_step else seconds
            self.estimator.record_prompts(prompt_tokens, prompt_seconds)
        else:
            self.estimator.record_step(seconds)
        return tickets, logits

    def _admit_waiting(self) -> list[Admitted]:
        """Take the waiting requests that fit now out of the queue, in their order.

        An engine that does not mix takes only requests that begin with the same cached prefix."""
        admitted: list[Admitted] = []
        mixes = self.decoder.mixes
        token_budget = PASS_TOKENS
        if mixes:
            token_budget = self.chunk_tokens - sum(ticket.sequence.pending_tokens for ticket in self.live)
        reserved_tokens = sum(ticket.reserved_tokens for ticket in self.live)
        while self.waiting and len(self.live) + len(admitted) < self.rows:
            ticket = self.waiting[0]
            prefix = self._find_prefix(ticket)
            ticket.cached_tokens = _length(prefix)
            reserved_tokens += ticket.reserved_tokens
            fits_cache = self.cache_tokens is None or reserved_tokens <= self.cache_tokens
            fits_pass = token_budget > 0 or not (mixes or admitted)
            if not mixes and admitted:
                is_alone = ticket.has_inputs or admitted[0].ticket.has_inputs
                is_beside = token_budget >= ticket.uncached_tokens and _states(prefix) is _states(admitted[0].prefix)
                fits_pass = is_beside and not is_alone
            if not (fits_cache and fits_pass):
                break
            token_budget -= ticket.uncached_tokens
            is_repeated = self._prompt_cache.is_repeated(ticket.sequence.prompt, ticket.cached_tokens, ticket.adapter)
            ticket.is_cached_later = (
                self._has_prefixes and not ticket.sequence.scores_prompt and (ticket.is_conversation or is_repeated)
            )
            admitted.append(Admitted(self.waiting.popleft(), prefix))
        return admitted if mixes else _with_shortest_prefix(admitted)

    @property
    def _has_prefixes(self) -> bool:
        """Return whether the engine can begin a request with the cached beginning of its prompt."""
        return self.decoder.joins and self.decoder.prefixes

    def _find_prefix(self, ticket: Ticket) -> Prefix | None:
        """Return the cached beginning of a request's prompt. A prompt that is scored has none, as its logits are not cached."""
        if not self._has_prefixes or ticket.sequence.scores_prompt:
            return None
        return self._prompt_cache.find(ticket.sequence.prompt, ticket.adapter)

    def _keep_live(self, tickets: list[Ticket]) -> None:
        """Keep only these requests in the engine's rows."""
        if len(tickets) < len(self.live):
            rows = [row for row, ticket in enumerate(self.live) if ticket in tickets]
            self.decoder.keep(rows)
            self.live = tickets


def _with_shortest_prefix(admitted: list[Admitted]) -> list[Admitted]:
    """Return all requests with the shortest of their prefixes."""
    shortest = min((new.prefix for new in admitted), key=_length, default=None)
    for new in admitted:
        new.ticket.cached_tokens = _length(shortest)
    return [Admitted(new.ticket, shortest) for new in admitted]


def _length(prefix: Prefix | None) -> int:
    return prefix.length if prefix else 0


def _states(prefix: Prefix | None) -> Any:
    return prefix.states if prefix else None


SMOOTHING = 0.9  # share of the old value when a new pass is measured
RECENT_REQUESTS = 256  # for the mean answer length and for the correction
MIN_RATIOS = 16  # until so many first tokens have come, estimates are not corrected
CORRECTION_QUANTILE = 0.98  # of the ratios of real to estimated times
MIN_CORRECTION = 0.5
MAX_CORRECTION = 4.0


class TtftEstimator:
    """An estimate of how long a new request would wait for its first token, from the times of the engine's passes.

    Passes are measured as they run: prompts by their tokens, steps by their rows. Each estimate is compared with the real
    time. The next estimate is multiplied by a correction, with which 98 of 100 recent estimates would have been long enough."""

    def __init__(self, *, token_seconds: float, step_seconds: float, output_length: float) -> None:
        """Start from the values that the race or the warm-up measured.

        ``token_seconds`` is the time of one token of a prompt. ``step_seconds`` is the time of one more token of all
        rows. ``output_length`` is the number of tokens of an answer."""
        self.token_seconds = token_seconds
        self.step_seconds = step_seconds
        self._answer_lengths: deque[float] = deque([output_length], maxlen=RECENT_REQUESTS)
        self._ratios: deque[float] = deque(maxlen=RECENT_REQUESTS)  # real to estimated seconds

    def record_prompts(self, prompt_tokens: int, seconds: float) -> None:
        self.token_seconds = smooth(self.token_seconds, seconds / max(prompt_tokens, 1))

    def record_step(self, seconds: float) -> None:
        self.step_seconds = smooth(self.step_seconds, seconds)

    def record_answer(self, tokens: int) -> None:
        self._answer_lengths.append(tokens)

    def record_first_token(self, expected: float, seconds: float) -> None:
        """Record the estimated and the real seconds to a first token."""
        self._ratios.append(seconds / max(expected, 1e-3))

    @property
    def correction(self) -> float:
        """Return the factor for the next estimate. It is 1 until enough first tokens have come."""
        if len(self._ratios) < MIN_RATIOS:
            return 1.0
        ordered = sorted(self._ratios)
        quantile = ordered[int(CORRECTION_QUANTILE * (len(ordered) - 1))]
        return min(max(quantile, MIN_CORRECTION), MAX_CORRECTION)

    def estimate(self, prompt_tokens: int, *, free_rows: int, live: Iterable[tuple[int, int]], requests_before: int) -> float:
        """Return the estimated seconds to the first token of a request, before the correction.

        Args:
            prompt_tokens: tokens to compute for this request and for the requests before it.
            free_rows: rows without a sequence.
            live: for each running sequence, its tokens so far and the maximum of its further tokens.
            requests_before: number of requests that wait already.
        """
        end_steps = [self._remaining_steps(tokens, tokens_left) for tokens, tokens_left in live]  # from now
        answer_length = fmean(self._answer_lengths)
        heapq.heapify(end_steps)
        steps_to_row = 0.0
        for _ in range(free_rows, requests_before + 1):
            steps_to_row = end_steps[0] if end_steps else 0.0
            heapq.heappushpop(end_steps, steps_to_row + answer_length)
        return steps_to_row * self.step_seconds + self.token_seconds * prompt_tokens + self.step_seconds / 2

    def _remaining_steps(self, tokens: int, tokens_left: int) -> float:
        """Return the expected number of further tokens of a sequence, from the recent answers that were longer than
        the sequence is now. One that is longer than all of them is expected to double."""
        longer = [length for length in self._answer_lengths if length > tokens]
        return min(fmean(longer) - tokens if longer else max(tokens, 1.0), tokens_left)


def smooth(old: float, measured: float) -> float:
    """Return the mean of measured times in which the newest ones count most."""
    return SMOOTHING * old + (1.0 - SMOOTHING) * measured


RECENT_PROMPTS = 64  # that a new prompt is compared with
MAX_CACHED_PROMPTS = 512  # each new prompt is compared with all of them


class CachedPrompt(NamedTuple):
    """A prompt whose keys and values are cached, as computed with an adapter or without one."""

    tokens: np.ndarray  # [T]
    prefix: Prefix
    adapter: str | None
    beginning: bytes  # the first MIN_PREFIX_TOKENS tokens, which a prompt must share


class PromptCache:
    """The keys and values of earlier prompts, for conversations that go on and for beginnings that prompts share.

    There are at most MAX_CACHED_PROMPTS prompts, with at most ``max_tokens`` tokens together. The least recently used prompts
    are dropped first. Prompts with fewer than MIN_PREFIX_TOKENS tokens are not cached."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prompts: list[CachedPrompt] = []  # the most recently used prompt is the last
        self._recent: deque[tuple[np.ndarray, str | None]] = deque(maxlen=RECENT_PROMPTS)

    def find(self, prompt: Sequence[int], adapter: str | None = None) -> Prefix | None:
        """Return the longest cached beginning of the prompt with this adapter, or None.

        The last token of the prompt is never part of it, because the engine computes the first logits from that
        token."""
        ids = np.asarray(prompt)
        beginning = _beginning(ids[:-1])
        lengths = [
            _shared_length(cached.tokens, ids[:-1]) if cached.beginning == beginning and cached.adapter == adapter else 0
            for cached in self._prompts
        ]
        longest = max(lengths, default=0)
        if longest < MIN_PREFIX_TOKENS:
            return None
        cached = self._prompts.pop(lengths.index(longest))
        self._prompts.append(cached)
        return cached.prefix._replace(length=longest)

    def is_repeated(self, prompt: Sequence[int], cached_tokens: int, adapter: str | None = None) -> bool:
        """Return whether a recent prompt shares a longer beginning with this prompt than the cached one.

        The prompt counts as recent from then on."""
        ids = np.asarray(prompt)
        lengths = [_shared_length(recent, ids) for recent, other_adapter in self._recent if other_adapter == adapter]
        longest = max(lengths, default=0)
        self._recent.append((ids, adapter))
        return longest >= cached_tokens + MIN_PREFIX_TOKENS

    def add(self, tokens: Sequence[int], prefix: Prefix, adapter: str | None = None) -> None:
        """Add a prompt. Drop the prompts that it contains, and old prompts if there are too many tokens."""
        ids = np.asarray(tokens)[: prefix.length]
        if not MIN_PREFIX_TOKENS <= len(ids) <= self._max_tokens:
            return
        beginning = _beginning(ids)
        self._prompts = [
            cached
            for cached in self._prompts[-MAX_CACHED_PROMPTS + 1 :]
            if cached.beginning != beginning
            or cached.adapter != adapter
            or _shared_length(cached.tokens, ids) < len(cached.tokens)
        ]
        self._prompts.append(CachedPrompt(ids, prefix, adapter, beginning))
        token_count = 0
        for index in reversed(range(len(self._prompts))):
            token_count += len(self._prompts[index].tokens)
            if token_count > self._max_tokens:
                del self._prompts[: index + 1]
                break


def _beginning(tokens: np.ndarray) -> bytes:
    """Return the first MIN_PREFIX_TOKENS tokens as bytes, which are quicker to compare."""
    return tokens[:MIN_PREFIX_TOKENS].tobytes()


def _shared_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal tokens at the beginning."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


MIN_LOGPROB = -9999.0  # OpenAI's value for a token without any chance


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and its rank: 1 for the likeliest. ``top`` holds the likeliest tokens at its position, the
    likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1

    @classmethod
    def from_logits(cls, logits: np.ndarray, token: int, count: int) -> TokenLogprob:
        """Return the log-probability of ``token`` from logits [V], with the ``count`` likeliest tokens."""
        logits64 = logits.astype(np.float64)
        shifted = logits64 - logits64.max()
        logprobs = np.maximum(shifted - np.log(np.exp(shifted).sum()), MIN_LOGPROB)
        count = min(count, len(logprobs))
        candidates = np.argpartition(-logprobs, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
        ordered = candidates[np.argsort(-logprobs[candidates], kind="stable")]
        top = tuple((int(candidate), float(logprobs[candidate])) for candidate in ordered)
        rank = 1 + int((logprobs > logprobs[token]).sum())
        return cls(token, float(logprobs[token]), top, rank)
