"""Decide which requests share the engine's rows: first come, first served, while the promised times are kept.

``Scheduler`` runs engines that compute token by token, with a cache of earlier prompts. Requests are admitted by
``RequestQueue`` (admission.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.batching import TokenLogprob, choose_token, join_sequences, run_mixed_pass
from upshift.inference.generation.engines.base import ApartDecoder, ComputedRows, Decoder, Prefix
from upshift.inference.generation.prefix import MIN_PREFIX_TOKENS, PASS_TOKENS
from upshift.serving.engine.admission import RequestQueue, Ticket

CACHED_PROMPT_SHARE = 2  # the prompt cache may hold the number of the engine's cache tokens divided by this
PROMPT_CHUNK_TOKENS = 256  # of prompts in one pass: more would delay the sequences whose next tokens the pass computes
UNLIMITED_TOKENS = 65_536  # in the prompt cache, if the memory is unknown


class ComputingApart(NamedTuple):
    """The computation of a prompt in another thread, by an engine, and when it began."""

    decoder: ApartDecoder
    rows: Future[ComputedRows]
    start: float


class Admitted(NamedTuple):
    """A request that joins the rows in the next pass, and the cached beginning of its prompt."""

    ticket: Ticket
    prefix: Prefix | None


@dataclass
class Scheduler(RequestQueue[Decoder]):
    """The requests of an engine that computes the next token of each row when it is told to.

    ``chunk_tokens``: maximum tokens of prompts in a pass that also computes the next tokens of other sequences.
    ``assign_adapters``: receives the adapters of the rows that the next ``admit`` of the engine adds."""

    chunk_tokens: int = PROMPT_CHUNK_TOKENS
    assign_adapters: Callable[[Sequence[str | None]], None] = lambda adapters: None
    _prompt_cache: PromptCache = field(init=False)
    _apart: ComputingApart | None = None

    def __post_init__(self) -> None:
        max_tokens = UNLIMITED_TOKENS if self.cache_tokens is None else self.cache_tokens // CACHED_PROMPT_SHARE
        self._prompt_cache = PromptCache(max_tokens)

    @property
    def decoder(self) -> Decoder:
        return self.engine

    def _count_cached(self, ticket: Ticket) -> int:
        """Return how many tokens of a new request's prompt are cached, or are computed for a request before it."""
        cached_tokens = _length(self._find_prefix(ticket))
        earlier = self._find_earlier(ticket, cached_tokens, [*self.live, *self.waiting])
        return cached_tokens if earlier is None else _shared_length(earlier.prompt_ids, ticket.prompt_ids[:-1])

    def _steps_beside(self, prompt_tokens: int) -> int:
        return prompt_tokens // self.chunk_tokens if self.decoder.mixes else 0

    def step(self) -> list[tuple[Ticket, int]]:
        """Run one pass of the engine. Return the requests that got a new token, each with its token.

        While a prompt is scored, the tokens of the prompt count as new ones. The first of them does not, as nothing comes before
        it."""
        if self._canceled_ids:
            self._keep_live([ticket for ticket in self.live if ticket.id not in self._canceled_ids])
            self._canceled_ids &= {self.apart.id} if self.apart else set()
        admitted: list[Admitted] = []
        if self.apart is None and self.waiting and (not self.live or self.decoder.joins):
            admitted = self._admit_waiting()
        if admitted and admitted[0].ticket.has_inputs and isinstance(self.decoder, ApartDecoder):
            self._begin_apart(admitted.pop().ticket, self.decoder)
        joined = self._join_apart()
        if joined is None and not (admitted or self.live):
            return []
        tickets, logits = joined or self._run_pass(admitted)
        failures_before = len(self.failed)
        new_tokens = self._choose_tokens(tickets, logits)
        for ticket, _ in new_tokens:
            if len(ticket.sequence.tokens) == 1 and not ticket.sequence.scores_prompt:
                self._record_first_token(ticket)
            if ticket.sequence.ending is not None:
                self._record_ending(ticket)
        failed = [ticket for ticket, _ in self.failed[failures_before:]]
        self._keep_live([ticket for ticket in self.live if ticket.sequence.ending is None and ticket not in failed])
        return new_tokens

    def _begin_apart(self, ticket: Ticket, decoder: ApartDecoder) -> None:
        """Begin to compute a prompt with pictures in a thread. Meanwhile the running requests take steps; none is admitted."""
        executor = ThreadPoolExecutor(1, "apart")
        computed = executor.submit(decoder.compute_apart, [ticket.sequence.prompt])
        executor.shutdown(wait=False)  # the thread ends with this work
        self.apart = ticket
        self._apart = ComputingApart(decoder, computed, self.clock())

    def _join_apart(self) -> tuple[list[Ticket], np.ndarray] | None:
        """Make the request that was computed apart a row, and return it with its logits. Wait for it if no other request runs.

        Return None if it is not ready, and for one that was canceled or whose prompt failed."""
        ticket = self.apart
        if ticket is None or self._apart is None or (self.live and not self._apart.rows.done()):
            return None
        decoder, rows, start = self._apart
        try:
            computed = rows.result()
        except Exception as error:  # from this request's own pictures
            self.failed.append((ticket, error))
            return None
        finally:
            self.apart = self._apart = None
        if ticket.id in self._canceled_ids:
            self._canceled_ids.remove(ticket.id)
            return None
        self.estimator.record_prompts(ticket.uncached_tokens, self.clock() - start, input_bytes=ticket.input_bytes)
        self.live = [*self.live, ticket]
        return [ticket], decoder.join_computed(computed)

    def _record_ending(self, ticket: Ticket) -> None:
        sequence = ticket.sequence
        self.estimator.record_answer(len(sequence.tokens))
        if ticket.is_cached_later or any(self._find_earlier(waiting, 0, [ticket]) for waiting in islice(self.waiting, self.rows)):
            self._cache_row(ticket)

    def _cache_row(self, ticket: Ticket) -> None:
        """Add a row to the prompt cache. Prompts that the next requests need are dropped last."""
        for waiting in islice(self.waiting, self.rows):
            self._find_prefix(waiting)
        prefix = self.decoder.prefix_of_row(self.live.index(ticket))
        self._prompt_cache.add(ticket.sequence.prompt + ticket.sequence.tokens, prefix, ticket.adapter)

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
            input_bytes = sum(new.ticket.input_bytes for new in admitted)
            self.estimator.record_prompts(prompt_tokens, prompt_seconds, input_bytes=input_bytes)
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
            earlier = self._find_earlier(ticket, _length(prefix), [*self.live, *(new.ticket for new in admitted)])
            if earlier is not None:
                if not earlier.sequence.tokens:  # to wait for its prompt is sooner than to compute the same tokens beside it
                    break
                self._cache_row(earlier)
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
            is_repeated = self._prompt_cache.is_repeated(ticket.prompt_ids, ticket.cached_tokens, ticket.adapter)
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
        return self._prompt_cache.find(ticket.prompt_ids, ticket.adapter)

    def _find_earlier(self, ticket: Ticket, cached_tokens: int, tickets: Sequence[Ticket]) -> Ticket | None:
        """Return the one of these requests whose prompt shares the longest beginning with that of ``ticket``.

        None if none shares MIN_PREFIX_TOKENS tokens more than the cached ones, or if the engine has no prefixes."""
        if not self._has_prefixes or ticket.sequence.scores_prompt:
            return None
        prompt = ticket.prompt_ids[:-1]
        longest = cached_tokens + MIN_PREFIX_TOKENS - 1
        found = None
        for other in tickets:
            if other.adapter != ticket.adapter or other.sequence.scores_prompt or not self._prompt_cache.holds(other.prompt_ids):
                continue
            length = _shared_length(other.prompt_ids, prompt)
            if length > longest:
                longest = length
                found = other
        return found

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

    def find(self, prompt: Sequence[int] | np.ndarray, adapter: str | None = None) -> Prefix | None:
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

    def is_repeated(self, prompt: Sequence[int] | np.ndarray, cached_tokens: int, adapter: str | None = None) -> bool:
        """Return whether a recent prompt shares a longer beginning with this prompt than the cached one.

        The prompt counts as recent from then on."""
        ids = np.asarray(prompt)
        lengths = [_shared_length(recent, ids) for recent, other_adapter in self._recent if other_adapter == adapter]
        longest = max(lengths, default=0)
        self._recent.append((ids, adapter))
        return longest >= cached_tokens + MIN_PREFIX_TOKENS

    def holds(self, tokens: np.ndarray) -> bool:
        """Return whether a prompt [T] has a length that can be cached."""
        return MIN_PREFIX_TOKENS <= len(tokens) <= self._max_tokens

    def add(self, tokens: Sequence[int], prefix: Prefix, adapter: str | None = None) -> None:
        """Add a prompt. Drop the prompts that it contains, and old prompts if there are too many tokens."""
        ids = np.asarray(tokens)[: prefix.length]
        if not self.holds(ids):
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
