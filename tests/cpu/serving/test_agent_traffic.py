"""Agents' traffic by a made-up clock: long instructions that many share, turns, more than the engine holds, and its death."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
from test_serving_parts import PASS_SECONDS, TOKEN_SECONDS, Clock, Toy, answer, made

from upshift.inference.generation.engines.base import ComputedRows, Prefix
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.engine.admission import Ticket, TtftEstimator
from upshift.serving.engine.scheduler import Scheduler
from upshift.serving.engine_process import EngineDied, EngineProcess, RequestRefused
from upshift.serving.messages import EngineRequest, Ready, Tokenize
from upshift.serving.refusals import Refusal, error_response, refusal_of

INSTRUCTIONS = 500  # tokens
PROMISE, AWAY, SECONDS, ROWS = 1.0, 4.0, 120.0, 8
LENGTH_LIMIT = 1000


class Counting(Toy):
    """Counts the tokens of prompts that it computes."""

    prompt_tokens = 0

    def admit(self, prompts: Any, prefix: Any = None) -> np.ndarray:
        self.prompt_tokens += sum(len(prompt) - (prefix.length if prefix else 0) for prompt in prompts)
        return super().admit(prompts, prefix)

    def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
        self.prompt_tokens += sum(len(prompt) - (prefix.length if prefix else 0) for prompt in prompts)
        return super().compute_chunks(prompts, prefix, next_width)

    def advance(self, tokens: Any) -> np.ndarray:
        self.prompt_tokens += sum(len(part) for part in tokens if len(part) > 1)
        return super().advance(tokens)


class Silent(Toy):
    """Takes the time of an engine, and says nothing: a text ends by its length. Its rows are their lengths alone."""

    def __init__(self, clock: Clock, *, mixes: bool) -> None:
        super().__init__(clock, mixes=mixes, chunks=not mixes)
        self.rows: Any = []

    def prefix_of_row(self, row: int) -> Prefix:
        return Prefix(self.rows[row], self)

    def admit(self, prompts: Any, prefix: Any = None) -> np.ndarray:
        self.clock.now += TOKEN_SECONDS * sum(len(prompt) - (prefix.length if prefix else 0) for prompt in prompts)
        self.rows += map(len, prompts)
        return np.zeros((len(prompts), 2))

    def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
        left = sum(len(prompt) - (prefix.length if prefix else 0) for prompt in prompts)
        while left > (width := next_width()):
            self.clock.now += TOKEN_SECONDS * width
            left -= width
            yield None
        self.clock.now += TOKEN_SECONDS * left
        yield ComputedRows(np.zeros(0), [len(prompt) for prompt in prompts], np.zeros((len(prompts), 2)), 0)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        return self.advance([[token] for token in tokens])

    def join(self, prefix: Any = None) -> None:
        self.rows.append(prefix.length if prefix else 0)

    def advance(self, tokens: Any) -> np.ndarray:
        self.clock.now += PASS_SECONDS + TOKEN_SECONDS * (sum(map(len, tokens)) - len(tokens))
        self.rows = [row + len(part) for row, part in zip(self.rows, tokens, strict=True)]
        return np.zeros((len(self.rows), 2))


class Text(GeneratedSequence):
    """Ends by itself, so that its limit does not say when."""

    length = 1

    def add(self, token: int) -> None:
        super().add(token)
        if len(self.tokens) >= self.length:
            self.ending = "eos"


@pytest.mark.parametrize("mixes", [False, True])
def test_what_arrives_together_computes_its_beginning_once(mixes: bool) -> None:
    """Four prompts of 300 shared tokens and 10 of their own, one without them, and one whose first tokens alone are shared."""
    clock = Clock()
    scheduler = made(clock, rows=8, cache_tokens=20_000, mixes=mixes)
    engine = scheduler.engine = Counting(clock, mixes=mixes, chunks=not mixes)
    shared = [place % 7 for place in range(300)]
    prompts = [[*shared, *[8 + number] * 10] for number in range(4)]
    prompts += [[9] * 40, [*shared[:20], *[11] * 50]]
    tickets = [Ticket(number, GeneratedSequence(0, prompt, GenerationOptions(max_new_tokens=4), None), clock())
               for number, prompt in enumerate(prompts)]  # fmt: skip
    assert all(scheduler.add(one) is None for one in tickets)
    assert [one.uncached_tokens for one in tickets] == [310, 10, 10, 10, 40, 70], "as estimated"
    while scheduler.is_busy:
        scheduler.step()
    assert [one.sequence.tokens for one in tickets] == [answer(prompt, 4) for prompt in prompts]
    assert engine.prompt_tokens == 310 + 3 * 10 + 40 + 70


def test_who_waits_for_the_prompt_of_another_goes_on_when_that_one_leaves() -> None:
    clock = Clock()
    scheduler = made(clock, rows=8, cache_tokens=20_000, mixes=True, chunk_tokens=100)
    prompts = [[*[3] * 300, number] for number in range(2)]
    for number, prompt in enumerate(prompts):
        scheduler.add(Ticket(number, GeneratedSequence(0, prompt, GenerationOptions(max_new_tokens=4), None), clock()))
    scheduler.step()
    assert len(scheduler.live) == len(scheduler.waiting) == 1
    scheduler.cancel(0)
    found = [token for _ in range(10) for one, token in scheduler.step() if one.id == 1]
    assert found == answer(prompts[1], 4)


def test_an_engine_goes_on_from_what_the_one_before_it_learned() -> None:
    before = TtftEstimator(token_seconds=0.1, step_seconds=0.1, output_length=4)
    for number in range(40):
        before.record_answer(10 + number)
        before.record_first_token(1.0, 2.0)
    after = TtftEstimator(token_seconds=0.1, step_seconds=0.1, output_length=4, learned=before.learned)
    arguments: dict[str, Any] = {"free_rows": 0, "live": [(5, 100)], "requests_before": 1}
    assert after.correction == before.correction == 2.0
    assert after.estimate(8, **arguments) == before.estimate(8, **arguments) > 15 * 0.1


def start_engine(clock: Clock, *, mixes: bool, before: Scheduler | None = None) -> Scheduler:
    scheduler = made(clock, rows=ROWS, cache_tokens=20_000, max_ttft=PROMISE, mixes=mixes)
    scheduler.engine = Silent(clock, mixes=mixes)
    learned = None if before is None else before.estimator.learned
    scheduler.estimator = TtftEstimator(
        token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=128, learned=learned
    )
    return scheduler


@pytest.mark.parametrize("mixes", [False, True])
def test_the_promise_to_agents_is_kept_while_their_engine_dies_twice(mixes: bool) -> None:
    """Three times what it holds; a request that the dead engine had admitted without a token is a promise that was broken."""
    chance, clock, numbers = np.random.default_rng(0), Clock(), count()
    instructions = [chance.integers(0, 16, INSTRUCTIONS).tolist() for _ in range(3)]
    scheduler = start_engine(clock, mixes=mixes)
    deaths, back_at = [SECONDS / 3, 2 * SECONDS / 3], 0.0
    turns_at = [(float(at), next(numbers), instructions[int(chance.integers(3))], 3)
                for at in np.cumsum(chance.exponential(0.15, int(SECONDS / 0.15))) if at < SECONDS]  # fmt: skip
    heapq.heapify(turns_at)
    turns_left: dict[int, int] = {}
    admitted, in_time = 0, 0
    while turns_at or scheduler.is_busy:
        if deaths and clock.now >= deaths[0]:
            deaths.pop(0)
            back_at = clock.now = clock.now + AWAY
            scheduler = start_engine(clock, mixes=mixes, before=scheduler)
        while turns_at and turns_at[0][0] <= clock.now:
            arrival, number, history, turns = heapq.heappop(turns_at)
            if back_at - AWAY <= arrival < back_at:
                continue  # 503
            prompt = [*history, *chance.integers(0, 16, int(chance.integers(5, 50))).tolist()]
            text = Text(0, prompt, GenerationOptions(max_new_tokens=LENGTH_LIMIT), None)
            text.length = 900 if chance.random() < 0.02 else int(min(chance.lognormal(3.5, 0.8), 500)) + 1
            turns_left[number] = turns
            admitted += scheduler.add(Ticket(number, text, arrival, is_conversation=True)) is None
        if not scheduler.is_busy:
            clock.now = max(clock.now, turns_at[0][0]) if turns_at else clock.now
        for one, _ in scheduler.step():
            in_time += len(one.sequence.tokens) == 1 and clock.now - one.arrival <= PROMISE
            if one.sequence.ending is not None and turns_left[one.id] > 1 and clock.now < SECONDS:
                history = [*one.sequence.prompt, *one.sequence.tokens]
                turn = (clock.now + chance.exponential(2), next(numbers), history, turns_left[one.id] - 1)
                heapq.heappush(turns_at, turn)
    assert admitted > 500 and in_time >= 0.985 * admitted, f"{in_time} of {admitted} were in time"


def queue_of(
    chance: np.random.Generator, clock: Clock, *, count: int, mixes: bool, **more: Any
) -> tuple[Scheduler, list[Ticket]]:
    """Return an engine whose answers all have 40 tokens, and requests that reserve some to many tokens of its cache."""
    scheduler = made(clock, rows=int(chance.integers(4, 7)), cache_tokens=int(chance.integers(200, 700)), mixes=mixes, **more)
    scheduler.engine = Silent(clock, mixes=mixes)
    scheduler.estimator = TtftEstimator(token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=40)
    tickets = []
    for number in range(count):
        options = GenerationOptions(max_new_tokens=int(chance.integers(40, 150)))
        text = Text(0, chance.integers(0, 16, int(chance.integers(3, 12))).tolist(), options, None)
        text.length = 40
        tickets.append(Ticket(number, text, 0.0))
    return scheduler, tickets


@pytest.mark.parametrize("mixes", [False, True])
def test_who_waits_for_room_in_the_cache_is_told_so(mixes: bool) -> None:
    """The estimate agrees with when the first token comes, although there are free rows."""
    for seed in range(10):
        clock = Clock()
        scheduler, tickets = queue_of(np.random.default_rng(seed), clock, count=9, mixes=mixes)
        assert all(scheduler.add(one) is None for one in tickets)
        first: dict[int, float] = {}
        while scheduler.is_busy:
            for one, _ in scheduler.step():
                first.setdefault(one.id, clock.now)
        for one in tickets:
            assert first[one.id] == pytest.approx(one.expected_seconds, rel=0.15, abs=12 * PASS_SECONDS), (seed, one.id)
        assert max(first.values()) > 0.4


@pytest.mark.parametrize("limit", [{"max_ttft": 1.0}, {"max_waiting": 3}])
@pytest.mark.parametrize("mixes", [False, True])
def test_who_comes_again_when_told_to_is_taken(limit: dict[str, Any], mixes: bool) -> None:
    """And not long before that."""
    waited, taken_sooner = [], 0
    for seed in range(12):
        clock = Clock()
        scheduler, tickets = queue_of(np.random.default_rng(seed), clock, count=14, mixes=mixes, **limit)
        answers = [scheduler.add(one) for one in tickets]
        number = next((number for number, one in enumerate(answers) if one is not None), None)
        if number is None:
            continue
        refused = answers[number]
        for one in tickets[number + 1 :]:
            scheduler.cancel(one.id)
        assert refused is not None and refused.status == 429 and refused.retry_after is not None
        refusal = refusal_of(RequestRefused(refused))
        assert refusal is not None
        again = [0.3 * refused.retry_after, int(error_response(refusal, "/").headers["retry-after"])]
        for share, at in enumerate(again):
            while clock.now < at and scheduler.is_busy:
                scheduler.step()
            taken = scheduler.add(Ticket(90 + share, tickets[number].sequence, clock.now)) is None
            scheduler.cancel(90 + share)
            if share:
                assert taken, seed
            else:
                taken_sooner += taken
        waited.append(refused.retry_after)
    assert len(waited) >= 8 and taken_sooner <= len(waited) / 2, (waited, taken_sooner)


def test_wrong_estimates_of_milliseconds_refuse_no_one() -> None:
    """They were wrong by a factor of 20, which once made every wait of a quarter of the promise one that breaks it."""
    clock = Clock()
    scheduler = made(clock, max_ttft=1.0)
    for number in range(40):
        one = Ticket(number, GeneratedSequence(0, [number % 16] * 3, GenerationOptions(max_new_tokens=1), None), clock.now)
        assert scheduler.add(one) is None
        clock.now += 0.1  # as the engine did something else
        while scheduler.is_busy:
            scheduler.step()
    running, long, longer = (
        Ticket(length, GeneratedSequence(0, list(range(length)), GenerationOptions(max_new_tokens=40), None), clock.now)
        for length in (3, 300, 1200)
    )
    assert scheduler.add(running) is None
    scheduler.step()
    assert scheduler.add(long) is None
    refused = scheduler.add(longer)
    assert refused is not None and refused.status == 429


@pytest.mark.parametrize(("restart", "expected"), [(None, 5.0), (9.0, 9.0)])
def test_the_503_of_an_engine_that_starts_again_says_when_it_will_be_ready(restart: float | None, expected: float) -> None:
    """As long as the last restart took, or the first start without its race."""
    engine = EngineProcess(EngineRequest(model="m"))
    seconds = {"importing": 4.0, "racing and loading": 60.0, "proving": 2.0}
    engine.ready = Ready(task="generate", setup="s", rows=1, cache_tokens=None, positions=None, resident_bytes=0, seconds=seconds)
    engine.state, engine._start_time, engine._restart_seconds = "starting", time.monotonic() - 1.0, restart

    async def ask() -> None:
        await engine.tokens(Tokenize(prompt="a"))

    with pytest.raises(EngineDied) as caught:
        asyncio.run(ask())
    refusal = refusal_of(caught.value)
    assert refusal is not None and refusal.status == 503
    assert refusal.retry_after == pytest.approx(expected if restart is None else expected - 1.0, abs=0.5)
    assert refusal_of(EngineDied("the model was unloaded")) == Refusal(503, "the model was unloaded", retry_after=1.0)
