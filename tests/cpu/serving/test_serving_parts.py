"""Parts of the server by themselves: who is computed next, what is promised, where a text ends, which model is unloaded."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Listed
from os.path import commonprefix
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.inference.generation.engines.base import ComputedRows, NoExtension, Prefix
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prefix import MIN_PREFIX_TOKENS
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.app import Server, make_app
from upshift.serving.engine.admission import Ticket, TtftEstimator
from upshift.serving.engine.answer_pieces import TextStream
from upshift.serving.engine.scheduler import MAX_CACHED_PROMPTS, PromptCache, Scheduler
from upshift.serving.engine_process import EngineDied, RequestRefused
from upshift.serving.load_test.client import RequestResult
from upshift.serving.load_test.run import summarize_phase
from upshift.serving.load_test.traffic import Traffic, arrivals
from upshift.serving.messages import EngineRequest, Generate, Heartbeat, Piece, Ready, Refused
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool, NoRoom
from upshift.serving.replicas import ReplicaSet
from upshift.serving.request_checks import Limits

VOCABULARY, PASS_SECONDS, TOKEN_SECONDS = 16, 0.01, 0.001


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Toy(NoExtension):
    """The next token follows from all before; takes time by a made-up clock."""

    weight_bytes = 0

    def __init__(self, clock: Clock, *, joins: bool = True, mixes: bool = False, chunks: bool = False) -> None:
        self.joins, self.mixes, self.chunks, self.clock = joins, mixes, chunks, clock
        self.rows: list[list[int]] = []

    def compute(self, tokens: Listed[int]) -> Prefix:
        raise AssertionError("requests are not known beforehand")

    def prefix_of_row(self, row: int) -> Prefix:
        return Prefix(len(self.rows[row]), list(self.rows[row]))

    def admit(self, prompts: Listed[Listed[int]], prefix: Prefix | None = None) -> np.ndarray:
        assert not self.mixes and (self.joins or not self.rows)
        known = prefix.length if prefix else 0
        assert all(known < len(prompt) for prompt in prompts)
        self.clock.now += TOKEN_SECONDS * sum(len(prompt) - known for prompt in prompts)
        self.rows += [[*(prefix.states[:known] if prefix else ()), *prompt[known:]] for prompt in prompts]
        return self._said(self.rows[-len(prompts) :])

    def compute_chunks(self, prompts: Listed[Listed[int]], prefix: Prefix | None, next_width: Any) -> Any:
        assert self.chunks
        known = prefix.length if prefix else 0
        left = sum(len(prompt) - known for prompt in prompts)
        while left > 0:
            width = next_width()
            self.clock.now += TOKEN_SECONDS * min(left, width)
            left -= width
            if left > 0:
                yield None
        rows = [[*(prefix.states[:known] if prefix else ()), *prompt[known:]] for prompt in prompts]
        yield ComputedRows(np.zeros(0), rows, self._said(rows), 0)

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        self.rows += computed.cache
        return computed.logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        assert not self.mixes
        self.clock.now += PASS_SECONDS
        self.rows = [[*row, token] for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        return self._said(self.rows)

    def join(self, prefix: Prefix | None = None) -> None:
        assert self.mixes
        self.rows.append(list(prefix.states[: prefix.length]) if prefix else [])

    def advance(self, tokens: Listed[Listed[int]]) -> np.ndarray:
        assert self.mixes and all(tokens)
        self.clock.now += PASS_SECONDS + TOKEN_SECONDS * (sum(map(len, tokens)) - len(tokens))
        self.rows = [[*row, *part] for row, part in zip(self.rows, tokens, strict=True)]
        return self._said(self.rows)

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def _said(self, rows: list[list[int]]) -> np.ndarray:
        return np.eye(VOCABULARY, dtype=np.float32)[[following(row) for row in rows]]


def following(tokens: Listed[int]) -> int:
    return sum(place * token for place, token in enumerate(tokens, start=1)) % VOCABULARY


def answer(prompt: Listed[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def made(clock: Clock, *, joins: bool = True, mixes: bool = False, chunks: bool | None = None, **more: Any) -> Scheduler:
    """Return a scheduler whose engine has chunks if it can have some, as torch."""
    chunks = joins and not mixes if chunks is None else chunks
    pace = TtftEstimator(token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=8)
    options: dict[str, Any] = {"rows": 2, "cache_tokens": None, **more}
    return Scheduler(Toy(clock, joins=joins, mixes=mixes, chunks=chunks), estimator=pace, clock=clock, **options)


def ticket(number: int, clock: Clock, *, prompt: int = 3, new: int = 4) -> Ticket:
    tokens = [(number + place) % VOCABULARY for place in range(prompt)]
    return Ticket(number, GeneratedSequence(0, tokens, GenerationOptions(max_new_tokens=new), None), clock())


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    rows=st.integers(1, 4), kind=st.sampled_from([{"joins": False}, {}, {"mixes": True}, {"mixes": True, "chunk_tokens": 4},
                                                 {"chunks": False, "chunk_tokens": 4}, {"chunk_tokens": 4}]),
    cancelled=st.sets(st.integers(0, 11)),
)  # fmt: skip
def test_every_request_gets_its_tokens(
    lengths: list[tuple[int, int]], rows: int, kind: dict[str, Any], cancelled: set[int]
) -> None:
    """Of an engine that mixes, long prompts in parts."""
    clock = Clock()
    scheduler = made(clock, rows=rows, cache_tokens=40, **kind)
    tickets = [ticket(number, clock, prompt=prompt, new=new) for number, (prompt, new) in enumerate(lengths)]
    assert all(scheduler.add(one) is None for one in tickets)
    said: dict[int, list[int]] = {}
    first: list[int] = []
    for step in itertools.count():
        if step == 2:
            for number in cancelled:
                scheduler.cancel(number)
        if not scheduler.is_busy:
            break
        for one, token in scheduler.step():
            first += [one.id] if one.id not in said else []
            said.setdefault(one.id, []).append(token)
        assert len(scheduler.live) <= rows and sum(one.reserved_tokens for one in scheduler.live) <= 40
    if kind != {"chunk_tokens": 4}:  # between the chunks of a long prompt, short ones go before it
        assert first == sorted(first), "first come, first served"
    for one, (_, new) in zip(tickets, lengths, strict=True):
        if one.id not in cancelled:
            assert said[one.id] == answer(one.sequence.prompt, new)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_conversation_goes_on_from_what_was_computed(mixes: bool) -> None:
    """Three turns; another conversation between them does not disturb; what is asked twice is kept for the third."""
    clock = Clock()
    scheduler = made(clock, rows=4, cache_tokens=2000, mixes=mixes)

    def ask(prompt: list[int], *, is_conversation: bool) -> tuple[int, list[int]]:
        sequence = GeneratedSequence(0, prompt, GenerationOptions(max_new_tokens=4), None)
        one = Ticket(0, sequence, clock(), is_conversation=is_conversation)
        assert scheduler.add(one) is None
        while scheduler.is_busy:
            scheduler.step()
        assert one.sequence.tokens == answer(prompt, 4)
        return one.cached_tokens, one.sequence.tokens

    history: list[int] = [9] * 40
    known = []
    for turn in range(3):
        found, tokens = ask(history, is_conversation=True)
        known.append(found)
        ask([7] * 30 + [turn] * 40, is_conversation=True)
        history = [*history, *tokens, *[8] * 20]
    assert known == [0, 43, 67]  # all but the last token of each answer, which was never given to the engine
    assert [ask([5] * 50 + [turn], is_conversation=False)[0] for turn in range(3)] == [0, 0, 50]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.booleans()), max_size=12))
def test_what_is_kept_is_the_longest_that_a_prompt_begins_with(prompts: list[tuple[list[int], bool]]) -> None:
    cache, added = PromptCache(10_000), list[list[int]]()
    for tail, keep in prompts:
        tokens = [0] * 20 + tail
        found = cache.find(tokens)
        longest = max((len(commonprefix([one, tokens[:-1]])) for one in added), default=0)
        assert (found.length if found else 0) == (longest if longest >= MIN_PREFIX_TOKENS else 0)
        if found is not None:
            assert found.states[: found.length] == tokens[: found.length]
        if keep:
            cache.add(tokens, Prefix(len(tokens), tokens))
            added.append(tokens)


def test_what_was_not_used_for_longest_is_dropped() -> None:
    cache = PromptCache(150)
    first, second, third = ([letter] * 70 for letter in range(3))
    cache.add(first, Prefix(70, first))
    cache.add(second, Prefix(70, second))
    assert cache.find([*first, 9]) is not None  # and used
    cache.add(third, Prefix(70, third))
    assert [cache.find([*one, 9]) is not None for one in (first, second, third)] == [True, False, True]
    cache.add([4] * 151, Prefix(151, None))
    assert cache.find([4] * 160) is None and cache.find([*first, 9]) is not None


def test_many_small_conversations_are_not_all_kept() -> None:
    """A new prompt is compared with all of them, so that their number would slow each request down, and they take memory."""
    cache = PromptCache(10**9)
    prompts = [[number % 300, number // 300] + [7] * 40 for number in range(2 * MAX_CACHED_PROMPTS)]
    for tokens in prompts:
        cache.add(tokens, Prefix(len(tokens), None))
    found = [cache.find([*tokens, 9]) is not None for tokens in prompts]
    assert found == [False] * MAX_CACHED_PROMPTS + [True] * MAX_CACHED_PROMPTS


def test_what_never_fits_and_what_would_wait_too_long() -> None:
    clock = Clock()
    scheduler = made(clock, cache_tokens=20, max_ttft=0.05, max_waiting=3)
    large = scheduler.add(ticket(0, clock, prompt=12, new=9))
    assert large is not None and large.status == 413 and large.retry_after is None and "21 tokens" in large.why
    answers = [scheduler.add(ticket(number, clock)) for number in range(1, 8)]
    assert answers[:2] == [None, None]
    late = [answer for answer in answers if answer is not None]
    assert late and all(answer.status == 429 and answer.retry_after is not None for answer in late)
    unlimited = made(clock, max_waiting=3)
    answers = [unlimited.add(ticket(number, clock)) for number in range(8)]
    assert [answer is None for answer in answers] == [True] * 5 + [False] * 3, "two of them have a row as soon as it steps"
    assert "5 requests wait already" in str(answers[-1])


@pytest.mark.parametrize("mixes", [False, True])
def test_a_token_that_cannot_be_chosen_ends_its_own_request(mixes: bool) -> None:
    clock = Clock()
    scheduler = made(clock, rows=3, mixes=mixes)
    tickets = [ticket(number, clock) for number in range(3)]
    tickets[1].sequence = Broken(0, tickets[1].sequence.prompt, tickets[1].sequence.options, None)
    assert all(scheduler.add(one) is None for one in tickets)
    while scheduler.is_busy:
        scheduler.step()
    assert [(one.id, str(error)) for one, error in scheduler.failed] == [(1, "no scores")]
    for one in (tickets[0], tickets[2]):
        assert one.sequence.tokens == answer(one.sequence.prompt, 4)


class Broken(GeneratedSequence):
    is_greedy = property(lambda self: False)

    def choose(self, logits: np.ndarray) -> int:
        if self.tokens:
            raise ValueError("no scores")
        return 1


@pytest.mark.parametrize("mixes", [False, True])
def test_admitted_requests_keep_what_was_promised(mixes: bool) -> None:
    """Twice what it holds, for minutes of a made-up clock: those that are admitted have their first token in time, and as many
    are answered so as where nobody waits."""
    goodput = []
    for load in (None, 2.0):
        clock, chance = Clock(), np.random.default_rng(0)
        scheduler = made(clock, rows=4, max_ttft=0.2 if load else None, max_waiting=1000, mixes=mixes)
        due, waited = 0.0, list[float]()
        for number in range(3000):
            due = due + chance.exponential(1 / (load * goodput[0])) if load else clock.now
            while scheduler.is_busy and (clock.now < due if load else len(scheduler.waiting) + len(scheduler.live) == 4):
                waited += [clock.now - one.arrival for one, _ in scheduler.step() if len(one.sequence.tokens) == 1]
            clock.now = max(clock.now, due)
            new = ticket(number, clock, prompt=int(chance.integers(1, 12)), new=int(chance.integers(2, 16)))
            new.arrival = due
            scheduler.add(new)
        kept = sum(one <= 0.2 for one in waited)
        goodput.append(kept / clock.now)
    assert kept > 0.95 * len(waited), np.quantile(waited, [0.5, 0.9, 0.95, 0.99])
    assert goodput[1] > 0.9 * goodput[0]


def decode(tokens: Listed[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@example("one stop two stop three", ["stop"], [9, 5, 5])
@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=2), st.lists(st.integers(1, 5)))
def test_a_text_is_shown_up_to_its_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    tokens, stream, shown = list(text.encode()), TextStream(decode, stops), ""
    expected = text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
    sizes = [*sizes, len(tokens) or 1]
    while tokens or not shown:
        size = sizes.pop(0) if sizes else len(tokens)
        now, tokens = tokens[:size], tokens[size:]
        shown += stream.add(now, last=not tokens)
        assert expected.startswith(shown)
        if not tokens:
            break
    assert shown == expected
    first_stops = [stop for stop in stops if text.startswith(stop, len(expected))]
    assert stream.stop_string in (first_stops or [None])


class Asleep:
    """An engine that says it is ready. ``size``: bytes that it then has."""

    has_failed, pids, spare_bytes = False, (1,), 0

    def __init__(self, size: int) -> None:
        self.request = EngineRequest(model="m", max_waiting=2)
        self.state, self.last_used, self.in_flight, self.ready = "asleep", 0.0, 0, None
        self.size, self.starts = size, 0
        self.heartbeat = type("Beat", (), {"resident_bytes": 0, "live": 0, "waiting": 0})()

    def call_on_restart(self, tell: Any) -> None: ...

    def keep_no_spares(self) -> None: ...

    async def start(self) -> Ready:
        self.state, self.starts = "ready", self.starts + 1
        self.ready: Any = Ready(
            task="generate", setup="", rows=1, cache_tokens=None, positions=None, resident_bytes=self.size, seconds={}
        )
        found: Ready = self.ready
        return found

    async def stop(self) -> None:
        self.state, self.ready = "asleep", None


def test_the_least_recently_used_model_is_unloaded() -> None:
    engines: dict[str, Any] = {name: Asleep(10) for name in "abc"}

    async def use() -> None:
        served = ModelPool(engines, Metrics(), sizes=dict.fromkeys("abc", 10), memory_bytes=25)
        await served.start()
        assert [engine.state for engine in engines.values()] == ["ready", "ready", "asleep"]
        async with served.using("a"):
            time.sleep(0.01)
            async with served.using("c"):  # a is in use
                assert [engine.state for engine in engines.values()] == ["ready", "asleep", "ready"]
                with pytest.raises(NoRoom, match="b has no room"):
                    async with served.using("b"):
                        pass
        async with served.using("b"):
            assert engines["b"].state == "ready" and [engines["a"].state, engines["c"].state].count("ready") == 1

    asyncio.run(use())


def test_memory_is_limited_by_what_models_turn_out_to_take() -> None:
    """They are expected to take their weights alone."""
    engines: dict[str, Any] = {"a": Asleep(10), "b": Asleep(12), "large": Asleep(40)}
    served = ModelPool(engines, Metrics(), sizes=dict.fromkeys(engines, 4), memory_bytes=20)

    async def ask(name: str) -> list[str]:
        async with served.using(name):
            return [one for one, engine in engines.items() if engine.state == "ready"]

    async def use() -> None:
        with pytest.raises(RequestError, match=r"large takes 40 B of memory or more, and --total-memory allows 20 B"):
            await served.start()
        assert await ask("a") == ["a"] and await ask("b") == ["b"] and await ask("a") == ["a"]
        async with served.using("a"):
            with pytest.raises(NoRoom):
                await ask("b")
            with pytest.raises(RequestError, match="large takes"):
                await ask("large")
        assert await ask("b") == ["b"]
        with pytest.raises(RequestError, match="large takes"):
            await ask("large")
        assert engines["b"].state == "ready" and engines["large"].starts == 1, "nobody is unloaded for what never fits"

    asyncio.run(use())


def test_a_model_whose_weights_alone_are_too_large_is_refused_at_once() -> None:
    engines: dict[str, Any] = {"a": Asleep(10), "large": Asleep(40)}
    with pytest.raises(RequestError, match="large takes 40 B"):
        asyncio.run(ModelPool(engines, Metrics(), sizes={"large": 40}, memory_bytes=20).start())
    assert engines["a"].starts == 0


class Slow(Asleep):
    async def start(self) -> Ready:
        await asyncio.sleep(30)
        raise AssertionError


def served_by(engine: Any, seconds: float, path: str, body: dict[str, Any]) -> httpx2.Response:
    metrics = Metrics()
    app = make_app(Server(ModelPool({"m": engine}, metrics), metrics, Limits(request_seconds=seconds)))

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return await client.post(path, json={"model": "m", **body})

    return asyncio.run(ask())


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})])
def test_loading_is_of_the_seconds_that_a_request_may_take(path: str, body: dict[str, Any]) -> None:
    found = served_by(Slow(1), 0.1, path, body)
    assert found.status_code == 504 and "m was still being loaded after 0.1 s" in found.text


class Counted:
    """An engine of several, which says who asked it."""

    pid, heartbeat = 1, Heartbeat(live=0, waiting=0, resident_bytes=5)
    spare = SimpleNamespace(resident_bytes=0)

    def __init__(self, in_flight: int = 0, *, refuses: int | None = None, dies_after: int | None = None) -> None:
        self.state, self.in_flight, self.refuses, self.asked = "ready", in_flight, refuses, list[Any]()
        self.dies_after = dies_after  # pieces
        self.ready = Ready(task="generate", setup="", rows=4, cache_tokens=None, positions=None, resident_bytes=5, seconds={})

    async def pieces(self, asked: Generate) -> AsyncGenerator[Piece]:
        if self.refuses:
            raise RequestRefused(Refused(id=1, status=self.refuses, why="no"))
        self.asked.append(asked.prompt)
        if self.dies_after is not None:
            for _ in range(self.dies_after):
                yield Piece(id=1, text="y", tokens=1, prompt_tokens=1)
            raise EngineDied("gone")
        yield Piece(id=1, text="yes", tokens=1, prompt_tokens=1, ending="stop")


def of_several(*engines: Any) -> ReplicaSet:
    found = ReplicaSet(EngineRequest(model="m"), len(engines))
    found.engines = list(engines)
    return found


def ask_all(replicas: ReplicaSet, prompts: Listed[Any]) -> list[str]:
    async def ask() -> list[str]:
        return [piece.text for prompt in prompts async for piece in replicas.pieces(Generate(prompt=prompt))]

    return asyncio.run(ask())


def test_replicas_share_the_work() -> None:
    first, second = Counted(), Counted()
    replicas = of_several(first, second)
    prompts = [f"{number} " + "x" * 300 for number in range(40)]
    assert len(ask_all(replicas, [*prompts, *(prompt + " and more" for prompt in prompts)])) == 80
    assert 10 < len(set(first.asked)) < 70 and not {one[:300] for one in first.asked} & {one[:300] for one in second.asked}
    busy, idle = Counted(3), Counted()
    ask_all(of_several(busy, idle), prompts)
    assert len(idle.asked) == 40 and not busy.asked  # more than half of its rows ahead
    full, free = Counted(refuses=429), Counted()
    assert len(ask_all(of_several(full, free), [(1, 2), prompts[0], prompts[1]])) == 3 and len(free.asked) == 3
    with pytest.raises(RequestRefused):
        ask_all(of_several(Counted(refuses=429), Counted(refuses=429)), prompts[:1])
    with pytest.raises(RequestRefused):
        ask_all(of_several(Counted(refuses=413), Counted(refuses=413)), prompts[:1])
    full.state = "starting"
    assert of_several(full, free).state == "ready" and len(ask_all(of_several(full, free), prompts)) == 40
    told = of_several(free, first).ready
    assert told is not None and (told.rows, told.replicas, told.resident_bytes) == (8, 2, 10)


def test_a_request_without_a_token_survives_its_engine() -> None:
    """A text that has begun does not: its client has a part of it."""
    other = Counted(in_flight=9)  # so that it is asked last
    assert ask_all(of_several(Counted(dies_after=0), other), [(1, 2)]) == ["yes"] and len(other.asked) == 1
    with pytest.raises(EngineDied):
        ask_all(of_several(Counted(dies_after=1), other), [(1, 2)])
    with pytest.raises(EngineDied):
        ask_all(of_several(Counted(dies_after=0), Counted(1, dies_after=0)), [(1, 2)])
    assert len(other.asked) == 1


def test_arrivals_are_a_poisson_process() -> None:
    traffic = Traffic(rates=(5.0,), seconds=400.0, prompt_words=10, seed=3)
    found = list(arrivals(traffic, 5.0))
    assert found == list(arrivals(traffic, 5.0)) != list(arrivals(traffic.changed(seed=4), 5.0))
    gaps = np.diff([one.due for one in found])
    assert 1850 < len(found) < 2150 and abs(gaps.mean() / gaps.std() - 1) < 0.1
    assert {len(one.prompt.split()) for one in found} == set(range(5, 16))


def test_a_phase_counts_what_was_promised() -> None:
    done = [RequestResult(status=200, due=0.0, first_seconds=at, seconds=1.0 + at, tokens=11) for at in (0.1, 0.2, 0.3, 0.6)]
    other = [
        RequestResult(status=429, due=0.0, seconds=0.1, why="later", retry_after=True),
        RequestResult(status=0, due=0.0, seconds=0.1, why="gone"),
    ]
    phase = summarize_phase(3.0, 2.0, [*done, *other], 500.0)
    assert phase.statuses == {"200": 4, "429": 1, "0": 1} and phase.asked == 6
    assert (phase.answered_per_second, phase.goodput, phase.within_promise) == (2.0, 1.5, 0.75)
    assert phase.first_token["p99"] == 0.6 and phase.token["p50"] == pytest.approx(0.1) and phase.without_retry_after == 0


@pytest.mark.parametrize("mixes", [False, True])
def test_the_promise_is_kept_under_twice_the_load(mixes: bool) -> None:
    """Prompts and answers of mixed lengths, one answer of 50 much longer than all others."""
    chance = np.random.default_rng(5)
    clock, rows, promise, steps = Clock(), 8, 1.0, 40
    scheduler = made(clock, mixes=mixes, rows=rows, max_ttft=promise, chunk_tokens=16)
    scheduler.estimator = TtftEstimator(token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=steps)
    capacity = rows / (rows * 20 * TOKEN_SECONDS + PASS_SECONDS * steps)
    arrival, waits, late = 0.0, 0, 0
    coming: list[Ticket] = []
    for number in range(700):
        arrival += chance.exponential(1 / (2 * capacity))
        new = 400 if number % 50 == 7 else int(min(chance.lognormal(3.2, 0.7), 200)) + 1
        one = ticket(number, clock, prompt=int(min(chance.lognormal(2.6, 0.8), 100)) + 1, new=new)
        one.arrival = arrival
        coming.append(one)
    coming.reverse()
    while coming or scheduler.is_busy:
        while coming and coming[-1].arrival <= clock.now:
            scheduler.add(coming.pop())
        if not scheduler.is_busy:
            clock.now = coming[-1].arrival
        for one, _ in scheduler.step():
            if len(one.sequence.tokens) == 1:
                waits += 1
                late += clock.now - one.arrival > promise
    assert waits > 250 and late / waits <= 0.02, f"{late} of {waits} came late"
