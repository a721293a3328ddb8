"""Serve with an engine that takes whole requests (vLLM): admit requests as for every engine, and read their tokens as they come.

The engine batches the running requests by itself and chooses their tokens. Everything else is as with the other engines: this
process reads chats, decodes texts, finds stop strings, calls of tools and the end of a form. The alternative, a proxy of vLLM's
own server, would need a second set of fields and messages for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from upshift.errors import JobFailed
from upshift.inference.generation.batching import TokenLogprob
from upshift.inference.generation.engines.text_engine import Progress, ScoredToken, TextEngine, TextRequest, check_taken
from upshift.inference.generation.text_batches import time_texts
from upshift.inference.tokenizer import panics_as_errors
from upshift.serving.engine.admission import RequestQueue, Ticket
from upshift.serving.engine.warmup import WARMUP_TOKENS, PassTimes


@dataclass
class TextScheduler(RequestQueue[TextEngine]):
    """The requests of an engine that takes whole requests. At most ``rows`` of them run in the engine. The others wait here."""

    _numbers: dict[int, Ticket] = field(default_factory=dict)  # the running requests, by the engine's numbers
    _last_step: float = 0.0  # time of the end of the last step, or of the beginning of the first request after a pause
    _prompt_seconds: float = 0.0  # of the steps since the last first token, beyond those of steps without prompts

    def step(self) -> Iterator[tuple[Ticket, int]]:
        """Wait for the next tokens of the engine. Yield each with its request, whose state is that after this token.

        Raise EngineEnded if the engine has ended."""
        self._abort([number for number, ticket in self._numbers.items() if ticket.id in self._canceled_ids])
        self._canceled_ids.clear()
        self._begin_waiting()
        if not self.live:
            return
        steps = self.engine.step()
        self._record_times(steps)
        for progress in steps:
            ticket = self._numbers.get(progress.request)
            if ticket is None:  # it ended on our side
                continue
            try:
                check_taken(progress)
                with panics_as_errors():
                    yield from self._add_tokens(ticket, progress)
                if progress.has_ended and ticket.sequence.ending is None:
                    raise JobFailed("the engine ended the answer before its time")
            except Exception as error:  # from the request's own options: it alone fails
                self.failed.append((ticket, error))
                self._abort([progress.request])
            if ticket.sequence.ending is not None:
                self.estimator.record_answer(len(ticket.sequence.tokens))
                self._abort([progress.request])  # the engine does not know of stop strings

    def _begin_waiting(self) -> None:
        """Give the waiting requests that fit now to the engine, in their order."""
        begun: list[Ticket] = []
        reserved_tokens = sum(ticket.reserved_tokens for ticket in self.live)
        while self.waiting and len(self.live) + len(begun) < self.rows:
            reserved_tokens += self.waiting[0].reserved_tokens
            if self.cache_tokens is not None and reserved_tokens > self.cache_tokens:
                break
            begun.append(self.waiting.popleft())
        if not begun:
            return
        if not self.live:
            self._last_step = self.clock()
        numbers = self.engine.add(self._make_request(ticket) for ticket in begun)
        self._numbers.update(zip(numbers, begun, strict=True))
        self.live += begun

    def _make_request(self, ticket: Ticket) -> TextRequest:
        sequence = ticket.sequence
        prompt_top = ticket.prompt_top if sequence.scores_prompt else None
        sampling = self.engine.sampling(sequence)
        return TextRequest(sequence.prompt, sampling, top=ticket.top, prompt_top=prompt_top, adapter=ticket.adapter)

    def _record_times(self, steps: list[Progress]) -> None:
        """Record the time of a step, and those of the first tokens in it.

        A step with tokens of prompts takes longer than the others. The rest of its time belongs to the prompts."""
        now = self.clock()
        seconds = now - self._last_step
        self._last_step = now
        started = []
        for progress in steps:
            ticket = self._numbers.get(progress.request)
            if ticket is not None and progress.tokens and not ticket.sequence.tokens:
                ticket.cached_tokens = progress.cached_tokens
                started.append(ticket)
        if not any(not ticket.sequence.tokens for ticket in self.live):
            self.estimator.record_step(seconds)
            return
        self._prompt_seconds += max(seconds - self.estimator.step_seconds, 0.0)
        if not started:
            return
        tokens = sum(len(ticket.sequence.prompt) - ticket.cached_tokens for ticket in started)
        self.estimator.record_prompts(tokens, self._prompt_seconds)
        self._prompt_seconds = 0.0
        for ticket in started:
            self._record_first_token(ticket)

    def _add_tokens(self, ticket: Ticket, progress: Progress) -> Iterator[tuple[Ticket, int]]:
        """Add new tokens to a request until its text ends. Yield the request with each of them.

        The tokens of a prompt that is scored come first."""
        sequence = ticket.sequence
        for index, scored in enumerate(progress.prompt_scores, start=1):
            sequence.computed = index
            ticket.logprob = _read_score(scored)
            yield ticket, scored.token
        sequence.computed = len(sequence.prompt)
        for index, token in enumerate(progress.tokens):
            ticket.logprob = _read_score(progress.scores[index]) if progress.scores else None
            sequence.add(token)
            yield ticket, token
            if sequence.ending is not None:
                return

    def _abort(self, numbers: list[int]) -> None:
        """End requests here, and in the engine if they run there."""
        ended = [self._numbers.pop(number) for number in numbers if number in self._numbers]
        if ended:
            self.live = [ticket for ticket in self.live if ticket not in ended]
            self.engine.abort(numbers)


def _read_score(scored: ScoredToken) -> TokenLogprob:
    return TokenLogprob(scored.token, scored.logprob, scored.top, scored.rank)


def measure_texts(engine: TextEngine, prompts: list[list[int]], rows: int) -> PassTimes:
    """Warm an engine that takes whole requests up with one run, and then measure its times."""
    first_seconds = [time_texts(engine, prompts[:1], 2)[0] for _ in range(2)]
    batch_seconds, *step_seconds = time_texts(engine, prompts[:rows], WARMUP_TOKENS)
    return PassTimes(first_seconds[-1], batch_seconds / sum(map(len, prompts[:rows])), median(step_seconds))
