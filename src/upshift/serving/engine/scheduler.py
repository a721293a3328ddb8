"""Decide which requests share the engine's rows: first come, first served, while the promised times are kept.

``Scheduler`` runs engines that compute token by token, with a cache of earlier prompts. Requests are admitted by
``RequestQueue`` (admission.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from upshift.errors import EngineEnded, EngineFailed, RequestError, UpshiftError
from upshift.inference.engine_errors import ComputationFailed, PromptsFailed, computing, describe_error
from upshift.inference.generation.batching import TokenLogprob, choose_token, join_sequences, run_mixed_pass
from upshift.inference.generation.engines.base import ApartDecoder, ComputedRows, Decoder, Prefix
from upshift.inference.generation.prefix import MIN_PREFIX_TOKENS, PASS_TOKENS
from upshift.inference.tokenizer import panics_as_errors
from upshift.serving.engine.admission import MAX_FAILURES, RequestQueue, Ticket, Turns, Work

CACHED_PROMPT_SHARE = 2  # the prompt cache may hold the number of the engine's cache tokens divided by this
PROMPT_CHUNK_TOKENS = 256  # of prompts in one pass: more would delay the sequences whose next tokens the pass computes
LONE_CHUNK_TOKENS = 1024  # of a prompt without other requests: a request that comes waits for the end of the chunk
UNLIMITED_TOKENS = 65_536  # in the prompt cache, if the memory is unknown

Pass = tuple[list[Ticket], np.ndarray]  # the requests that get a next token from a pass [N], and their logits [N, V]
NO_PASS: Pass = ([], np.zeros((0, 0), dtype=np.float32))  # a pass that gives no token, or none at all


class ComputedInThread(NamedTuple):
    """The computation of prompts in another thread, while the rows take steps. No row is admitted meanwhile."""

    rows: Future[ComputedRows]


@dataclass
class ComputedInChunks:
    """The computation of prompts in chunks. The rows take steps between them, and short prompts are admitted.

    ``width``: the number of tokens of the next or the last chunk."""

    chunks: Iterator[ComputedRows | None]
    width: int
    left_tokens: int
    seconds: float = 0.0


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
    _apart: ComputedInThread | ComputedInChunks | None = None
    _apart_start: float = 0.0
    _unstepped_tokens: int = 0  # of prompts that were computed since the last step of the rows
    _failures: int = 0  # passes in a row that failed
    _is_chunk_next: bool = True  # else a short prompt that waits goes before the next chunk

    def __post_init__(self) -> None:
        max_tokens = UNLIMITED_TOKENS if self.cache_tokens is None else self.cache_tokens // CACHED_PROMPT_SHARE
        self._prompt_cache = PromptCache(max_tokens)

    @property
    def decoder(self) -> Decoder:
        return self.engine

    def _expect_cached(self, ticket: Ticket) -> None:
        ticket.cached_tokens = _length(self._find_prefix(ticket))
        earlier = self._find_earlier(ticket, ticket.cached_tokens, self.tickets)
        if earlier is not None:
            ticket.cached_tokens = _shared_length(earlier.prompt_ids, ticket.prompt_ids[:-1])
            ticket.shares_with = earlier.id

    @property
    def _tokens_apart(self) -> int:
        return self._apart.left_tokens if isinstance(self._apart, ComputedInChunks) else super()._tokens_apart

    def _count_work(self, ticket: Ticket, *, has_row: bool) -> Work:
        work = super()._count_work(ticket, has_row=has_row)
        if self.decoder.mixes:
            unscored = [live.sequence for live in self.live if not (live.sequence.tokens or live.sequence.scores_prompt)]
            tokens = work.tokens + sum(sequence.pending_tokens for sequence in unscored)
            return Work(tokens, tokens // self._chunk_width)
        if not self.decoder.chunks:
            return work
        width = self._chunk_width
        room = width - self._unstepped_tokens if self.live else width
        apart = {one.id for one in self.apart}
        turns = Turns(width, room, self._tokens_apart, apart, has_rows=bool(self.live), is_chunk_next=self._is_chunk_next)
        for one in (*self.waiting, ticket):
            turns.add(one, has_row=has_row)
        if ticket.id in turns.apart:
            turns.finish_apart()
        return Work(turns.tokens, turns.steps)

    @property
    def _chunk_width(self) -> int:
        """Return how many tokens of prompts are computed between two steps of the rows.

        A chunk of an engine that does not mix takes as long as a step where that is more, because small passes are slow."""
        step, token = self.estimator.step_seconds, self.estimator.token_seconds
        if self.decoder.mixes or not token:
            return self.chunk_tokens
        return max(self.chunk_tokens, min(int(step / token), PASS_TOKENS))

    def step(self) -> list[tuple[Ticket, int]]:
        """Run one pass of the engine. Return the requests that got a new token, each with its token.

        Raise EngineFailed if the engine fails at the rows: then the requests that have no token yet fail with it. While a prompt
        is scored, the tokens of the prompt count as new ones. The first of them does not, as nothing comes before it."""
        self._remove_canceled()
        try:
            tickets, logits = self._next_pass()
        except EngineFailed as error:  # another engine would end at the same prompts
            self._fail_with_engine(self.live, error)
            raise
        except EngineEnded:
            raise
        except Exception as error:  # of the engine's library, or a fault of ours
            ended = EngineFailed(describe_error(error))
            self._fail_with_engine(self.live, ended)
            raise ended from error
        if not tickets:
            return []
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

    def _remove_canceled(self) -> None:
        """Remove canceled requests from the rows, and give up the prompts of those that are computed in chunks."""
        if not self._canceled_ids:
            return
        self._keep_live([ticket for ticket in self.live if ticket.id not in self._canceled_ids])
        if isinstance(self._apart, ComputedInChunks) and all(ticket.id in self._canceled_ids for ticket in self.apart):
            self._end_apart()
        self._canceled_ids &= {ticket.id for ticket in self.apart}

    def _next_pass(self) -> Pass:
        """Run the next pass: of new prompts, of a chunk of those that are computed apart, or of the running rows.

        Between two steps of the rows, an engine that does not mix computes at most a chunk of prompts."""
        if not self.live:
            self._unstepped_tokens = 0
        computes_prompts = self._unstepped_tokens < self._chunk_width
        admitted = self._admit_waiting() if computes_prompts and self._may_admit else []
        if admitted and self._is_apart(admitted):
            self._begin_apart(admitted)
        elif admitted:
            self._is_chunk_next = True
            return self._begin(admitted)
        if isinstance(self._apart, ComputedInThread):
            joined = self._join_thread(self._apart)
            if joined is not None:
                return joined
        elif self._apart is not None and not self._unstepped_tokens:
            return self._compute_chunk(self._apart)
        if not self.live:
            return NO_PASS
        with computing(), panics_as_errors():
            return self._run_pass([])

    @property
    def _may_admit(self) -> bool:
        if not self.waiting or isinstance(self._apart, ComputedInThread) or (self.live and not self.decoder.joins):
            return False
        return self._apart is None or not self._is_chunk_next

    def _is_apart(self, admitted: list[Admitted]) -> bool:
        """Return whether prompts are computed apart: those with pictures, and those that are longer than a chunk."""
        if admitted[0].ticket.has_inputs:
            return isinstance(self.decoder, ApartDecoder)
        is_long = sum(new.ticket.uncached_tokens for new in admitted) > self._chunk_width
        return is_long and (self.decoder.chunks or (bool(self.live) and isinstance(self.decoder, ApartDecoder)))

    def _begin_apart(self, admitted: list[Admitted]) -> None:
        """Begin to compute prompts in chunks, or in a thread if the engine has no chunks."""
        self.apart = [new.ticket for new in admitted]
        self._apart_start = self.clock()
        prompts = _next_prompts(self.apart)
        if isinstance(self.decoder, ApartDecoder) and not self.decoder.chunks:
            executor = ThreadPoolExecutor(1, "apart")
            self._apart = ComputedInThread(executor.submit(self.decoder.compute_apart, prompts))
            executor.shutdown(wait=False)  # the thread ends with this work
            return
        self.assign_adapters([ticket.adapter for ticket in self.apart])
        chunks = self.decoder.compute_chunks(prompts, admitted[0].prefix, self._choose_width)
        self._apart = ComputedInChunks(chunks, self._chunk_width, sum(ticket.uncached_tokens for ticket in self.apart))
        self._is_chunk_next = True

    def _choose_width(self) -> int:
        """Return the tokens of the next chunk of the prompts apart. Without other requests, a chunk has more of them, because
        each one copies the cache."""
        is_alone = not (self.live or self.waiting or self.reading)
        width = max(self._chunk_width, LONE_CHUNK_TOKENS if is_alone else 0)
        if isinstance(self._apart, ComputedInChunks):
            self._apart.width = width
        return width

    def _end_apart(self) -> list[Ticket]:
        """Forget the prompts that are computed apart. Return their requests."""
        tickets = self.apart
        if isinstance(self._apart, ComputedInChunks) and isinstance(self._apart.chunks, Generator):
            self._apart.chunks.close()
        self.apart = []
        self._apart = None
        return tickets

    def _join_thread(self, work: ComputedInThread) -> Pass | None:
        """Make the requests that a thread computed rows. Return them with their logits. Wait for them if no other request runs.

        Return None if they are not ready, and if their prompts failed."""
        if self.live and not work.rows.done():
            return None
        try:
            with computing(PromptsFailed), panics_as_errors():
                computed = work.rows.result()
        except UpshiftError as error:
            self._fail_apart(error)
            return None
        self._failures = 0
        return self._join_computed(computed, self.clock() - self._apart_start)

    def _compute_chunk(self, work: ComputedInChunks) -> Pass:
        """Compute the next chunk of the prompts apart. Return the requests with their logits after the last one."""
        start = self.clock()
        try:
            with computing(PromptsFailed), panics_as_errors():
                computed = next(work.chunks)
        except UpshiftError as error:
            self._fail_apart(error)
            return NO_PASS
        self._failures = 0
        work.seconds += self.clock() - start
        work.left_tokens = max(work.left_tokens - work.width, 0)
        self._unstepped_tokens += work.width
        self._is_chunk_next = False
        return NO_PASS if computed is None else self._join_computed(computed, work.seconds)

    def _join_computed(self, computed: ComputedRows, seconds: float) -> Pass:
        """Make the requests that were computed apart rows. Return those that were not canceled, with their logits."""
        tickets = self._end_apart()
        prompt_tokens = sum(ticket.uncached_tokens for ticket in tickets)
        self.estimator.record_prompts(prompt_tokens, seconds, input_bytes=sum(ticket.input_bytes for ticket in tickets))
        self.live = [*self.live, *tickets]
        logits = self.decoder.join_computed(computed)
        kept = [row for row, ticket in enumerate(tickets) if ticket.id not in self._canceled_ids]
        return [tickets[row] for row in kept], logits[kept]

    def _fail_apart(self, error: UpshiftError) -> None:
        """Let the requests whose prompts are computed apart fail with ``error``. Raise it if the engine has ended.

        Another error is from their prompts or pictures, such as a lack of memory: the rows are as they were."""
        if not isinstance(error, EngineEnded):
            self._fail(self._end_apart(), error)
            return
        if isinstance(error, EngineFailed):
            self._fail_with_engine(self._end_apart(), error)
        raise error

    def _fail_with_engine(self, tickets: list[Ticket], error: EngineFailed) -> None:
        """Let the requests that have no token yet fail with an engine that ended at what it computed."""
        failed = [ticket for ticket, _ in self.failed]
        self.failed += [(ticket, error) for ticket in tickets if not ticket.sequence.tokens and ticket not in failed]

    def _fail(self, tickets: list[Ticket], error: UpshiftError) -> None:
        """Let requests fail alone. Raise EngineFailed after MAX_FAILURES failed passes in a row, because the engine is broken.

        A request that is not possible, such as one with a broken picture, does not count."""
        self.failed += [(ticket, error) for ticket in tickets]
        if isinstance(error, RequestError):
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise EngineFailed(f"{self._failures} passes failed in a row, the last one with: {error}") from error

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
                with panics_as_errors():
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

    def _begin(self, admitted: list[Admitted]) -> Pass:
        """Run one pass with new prompts. If it fails and the other rows are as they were, only these requests fail."""
        earlier = self.live
        try:
            with computing(), panics_as_errors():
                return self._run_pass(admitted)
        except (ComputationFailed, RequestError) as error:
            if earlier and not isinstance(error, PromptsFailed):
                raise
            self.live = earlier
            if not earlier:
                self.decoder.keep([])
            self._fail([new.ticket for new in admitted], error)
            return NO_PASS

    def _run_pass(self, admitted: list[Admitted]) -> Pass:
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
            self.assign_adapters([ticket.adapter for ticket in tickets])
            logits = self.decoder.admit(_next_prompts(tickets), *([prefix] if prefix else []))
            self._unstepped_tokens += prompt_tokens
        else:
            tickets = earlier
            prompt_tokens = self._unstepped_tokens = 0
            logits = self.decoder.step(np.array([ticket.sequence.take_input() for ticket in tickets], dtype=np.int64))
        self._failures = 0
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

        An engine that does not mix takes only requests that begin with the same cached prefix. Between chunks, and between
        prompts that no step separates, it takes one that is short enough for what is left of a chunk."""
        admitted: list[Admitted] = []
        mixes = self.decoder.mixes
        token_budget = self._chunk_width if self.decoder.chunks else PASS_TOKENS
        is_between = bool(self.apart or self._unstepped_tokens)
        if mixes:
            token_budget = self.chunk_tokens - sum(ticket.sequence.pending_tokens for ticket in self.live)
        elif is_between:
            token_budget = self._chunk_width - self._unstepped_tokens
        present = [*self.live, *self.apart]
        reserved_tokens = sum(ticket.reserved_tokens for ticket in present)
        while self.waiting and len(present) + len(admitted) < self.rows:
            ticket = self.waiting[0]
            prefix = self._find_prefix(ticket)
            earlier = self._find_earlier(ticket, _length(prefix), [*present, *(new.ticket for new in admitted)])
            if earlier is not None:
                if not earlier.sequence.tokens:  # to wait for its prompt is sooner than to compute the same tokens beside it
                    break
                self._cache_row(earlier)
                prefix = self._find_prefix(ticket)
            ticket.cached_tokens = _length(prefix)
            reserved_tokens += ticket.reserved_tokens
            fits_cache = self.cache_tokens is None or reserved_tokens <= self.cache_tokens
            fits_pass = token_budget > 0 or not (mixes or admitted)
            if not mixes and is_between:
                fits_pass = not admitted and not ticket.has_inputs and ticket.uncached_tokens <= token_budget
            elif not mixes and admitted:
                is_alone = ticket.has_inputs or admitted[0].ticket.has_inputs
                is_same = _states(prefix) is _states(admitted[0].prefix)
                is_beside = is_same and token_budget >= ticket.uncached_tokens
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


def _next_prompts(tickets: list[Ticket]) -> list[Sequence[int]]:
    """Return the prompts of requests that begin. A prompt that is scored begins with its first token alone."""
    return [[ticket.sequence.take_input()] if ticket.sequence.scores_prompt else ticket.sequence.prompt for ticket in tickets]


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
