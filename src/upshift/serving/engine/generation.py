"""Generate text in an engine's process: race the engines, prove what the server can promise, then answer requests.

Check token ids: an engine fails at ids without a vector, or reads memory that is not its own.

Turn tokens into text that may be shown: whole characters, and nothing of a stop string.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import RequestError
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.grammar import Grammars
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prompts import check_prompts, read_prompts
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.loading.placement.memory_limits import read_max_memory
from upshift.models.sequence_length import prompt_and_answer_lengths
from upshift.serving.engine.scheduler import Likely, Pace, Scheduler, Ticket
from upshift.serving.engine.warmup import PROOF_TOKENS, prove
from upshift.serving.messages import EXPECTED, Beat, Cancel, Ending, EngineRequest, Generate, Piece, Ready, Refused, TokenScore
from upshift.value import Value


def check_ids(ids: Iterable[int], vocabulary: int | None) -> None:
    """Raise RequestError if a token id is not below ``vocabulary``. None: the model does not say."""
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise RequestError(f"token {largest} is not one of the model's {vocabulary:,}; leave out what it stands for")


BROKEN = "\N{REPLACEMENT CHARACTER}"  # the first bytes of a character


class TextStream:
    """The text of one answer. ``decode`` turns tokens into text. The text ends before the first of the ``stops``.
    Characters that may begin a stop string are held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._said = self._read = (
            0  # tokens that are shown; those before them that the next ones are read together with start here
        )
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Add tokens, and return the text that can be shown now. ``last`` says that no more tokens come."""
        if self._stopped:
            return ""
        self._tokens += tokens
        before, now = self._decode(self._tokens[self._read : self._said]), self._decode(self._tokens[self._read :])
        if len(now) > len(before) and (last or not now.endswith(BROKEN)):
            self._held += now[len(before) :]
            self._read, self._said = self._said, len(self._tokens)
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._stopped = True
            return self._held[: min(places)]
        kept = 0 if last else max((_begun(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown


def _begun(text: str, stop: str) -> int:
    """Return how many of the last characters may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


SAMPLED = 64  # prompts of a file
BEAT_SECONDS = 1.0
TOGETHER_SECONDS = 1 / 60  # a screen shows no more pictures; saying a token takes 0.3 ms of a core
DEFAULT_ANSWER = 1024  # tokens, where a request does not say and the model has positions for more


class Open(NamedTuple):
    """A request that is being answered. ``spelled`` returns the bytes of a token."""

    ticket: Ticket
    stream: TextStream
    spelled: Callable[[int], bytes]


class NewToken(NamedTuple):
    of: Open
    token: int
    ending: str | None
    first: bool  # of its text
    likely: Likely | None

    @property
    def is_awaited(self) -> bool:
        return self.first or self.ending is not None


def pieces(new: list[NewToken]) -> list[Piece | Refused]:
    """Return one piece for each request, in the order of their first tokens."""
    found: dict[int, list[NewToken]] = {}
    for one in new:
        found.setdefault(one.of.ticket.id, []).append(one)
    return [_piece(tokens) for tokens in found.values()]


def _piece(new: list[NewToken]) -> Piece | Refused:
    (ticket, stream, spelled), ending = new[-1].of, new[-1].ending
    try:
        text = stream.add([one.token for one in new], last=ending is not None)
        scores = tuple(_score(one.likely, spelled) for one in new if one.likely is not None and one.ending != "eos")
    except Exception as error:  # of the tokenizer at these tokens: the server cancels this request alone
        return Refused.failed(ticket.id, error)
    how: Ending | None = None if ending is None else "length" if ending == "length" else "stop"
    prompt = len(ticket.sequence.prompt)
    return Piece(
        id=ticket.id, text=text, tokens=len(new), prompt_tokens=prompt, cached_tokens=ticket.known, scores=scores, ending=how
    )


def _score(likely: Likely, spelled: Callable[[int], bytes]) -> TokenScore:
    top = tuple(TokenScore(spelled=tuple(spelled(token)), logprob=logprob) for token, logprob in likely.top)
    return TokenScore(spelled=tuple(spelled(likely.token)), logprob=likely.logprob, top=top)


class Generating:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        start = time.perf_counter()
        memory = read_max_memory(list(request.max_memory) or None)
        self.generator = Generator(
            request.model, quality=request.quality, engine=request.engine, max_ttft_ms=request.max_ttft_ms,
            max_tpot_ms=request.max_tpot_ms, max_memory=memory, race_seconds=request.race_seconds,
        )  # fmt: skip
        self.prompt_length, self.output_length = prompt_and_answer_lengths(
            self.generator.source, request.prompt_length, request.output_length, defaults=EXPECTED,
            options=("--prompt-length", "--output-length"),
        )  # fmt: skip
        self.seconds = {"reading": time.perf_counter() - start}
        self._open: dict[int, Open] = {}
        self._text = deepcopy(self.generator.prompts).text  # a tokenizer is not for two threads at once
        ends = self.generator.options().eos_token_id
        self._grammars = Grammars(self.generator.prompts.tokenizer, self.generator.vocabulary, ends)

    def prepare(self) -> Ready:
        start = time.perf_counter()
        prompts = self._expected()
        options = self.generator.options(max_new_tokens=self.output_length)
        race = self.generator.prepare(prompts, options)
        self.seconds["racing and loading"] = time.perf_counter() - start
        rows = min(race.chosen.batch, self.request.concurrency)
        start = time.perf_counter()
        self.scheduler = Scheduler(
            self.generator.decoder, rows, self._cache_tokens(),
            Pace(token_seconds=0.0, step_seconds=0.0, output_length=0.0),
            max_waiting=self.request.max_waiting,
        )  # fmt: skip
        first, token, step = prove(self.scheduler, prompts, self.generator.prompts.tokenizer, rows)
        self.seconds["proving"] = time.perf_counter() - start
        output = self.output_length
        self.scheduler.pace = Pace(token_seconds=token, step_seconds=step, output_length=output)
        limit = self.request.max_ttft_ms
        self.scheduler.max_ttft = None if limit is None else limit / 1e3
        chosen = next((run for run in race.runs if run.setup == race.chosen), None)
        predicted = None
        if chosen is not None and chosen.first_seconds and chosen.step_seconds:
            predicted = race.chosen.batch / (chosen.first_seconds + chosen.step_seconds * (output - 1))
        mean = sum(map(len, prompts)) / len(prompts)
        steps = output - (not self.scheduler.decoder.mixes)  # a first token comes by itself, or in a pass of the others
        return Ready(
            task="generate", setup=race.chosen.label(), rows=rows, cache_tokens=self.scheduler.cache_tokens,
            positions=self.generator.longest, resident_bytes=resident_bytes(), seconds=self.seconds,
            predicted_capacity=predicted, capacity=rows / (rows * mean * token + step * steps), ttft_ms=1e3 * first,
            tpot_ms=1e3 * step,
        )  # fmt: skip

    def _cache_tokens(self) -> int | None:
        """Return the tokens that the cache holds, or None if no limit is known. Replicas on the CPU share its memory."""
        found = self.generator.cache_tokens()
        shared = self.generator.host.device == "cpu"
        return found // self.request.replicas if shared and found is not None else found

    def take(self, asked: Generate | Cancel) -> Value | None:
        """Add the request to the queue, or cancel a request. Return the refusal of a rejected request at once."""
        if isinstance(asked, Cancel):
            self.scheduler.cancel(asked.id)
            self._open.pop(asked.id, None)
            return None
        try:
            sequence = self._sequence(asked)
        except Exception as error:  # of a template, a tokenizer, an option: of this request alone
            return Refused.failed(asked.id, error)
        goes_on = not isinstance(asked.prompt, str) and not _is_ids(asked.prompt)
        ticket = Ticket(asked.id, sequence, time.perf_counter(), goes_on=goes_on, top=asked.top)
        refused = self.scheduler.add(ticket)
        if refused is None:
            stream = TextStream(self._text, sequence.options.stop_strings)
            self._open[asked.id] = Open(ticket, stream, self._grammars.spelled)
        return refused

    def work(self) -> list[NewToken]:
        """Run one pass, and return the new tokens of requests whose answers are still wanted."""
        found: list[NewToken] = []
        for ticket, token in self.scheduler.step():
            if (open_ := self._open.get(ticket.id)) is not None:
                first = len(ticket.sequence.tokens) == 1
                found.append(NewToken(open_, token, ticket.sequence.ending, first, ticket.likely))
                if ticket.sequence.ending is not None:
                    del self._open[ticket.id]
        return found

    def failures(self) -> list[Refused]:
        """Return the refusals of requests for which the last pass could not choose a token."""
        failed, self.scheduler.failed = self.scheduler.failed, []
        for ticket, _ in failed:
            self._open.pop(ticket.id, None)
        return [Refused.failed(ticket.id, error) for ticket, error in failed]

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def beat(self) -> Beat:
        return Beat(live=len(self.scheduler.live), waiting=len(self.scheduler.waiting), resident_bytes=resident_bytes())

    def _sequence(self, asked: Generate) -> GeneratedSequence:
        generator = self.generator
        said: Any = asked.prompt
        ids: list[int] = list(said) if _is_ids(said) else generator.prompts.of([said])[0]
        check_ids(ids, generator.vocabulary)
        given = dict(asked.options)
        if given.get("max_new_tokens") is None:
            room = None if generator.longest is None else generator.longest - len(ids)
            given["max_new_tokens"] = max(min(DEFAULT_ANSWER, room if room is not None else DEFAULT_ANSWER), 1)
        options: GenerationOptions = generator.options(**given)
        generator.check_positions(ids, options, "the prompt")
        if asked.top is not None:
            self._grammars.check()
        grammar = None if asked.json_schema is None else self._grammars.of_json(asked.json_schema)
        return GeneratedSequence(0, ids, options, generator.prompts.tokenizer, start=generator.start, grammar=grammar)

    def _expected(self) -> list[list[int]]:
        """Return token ids of prompts like the expected ones, at least as many as may run at once.

        Each prompt is cut to the positions that the model has. Made-up prompts all differ, because a beginning that
        prompts share would be computed only once."""
        chance, vocabulary = random.Random(0), min(len(self.generator.prompts.tokenizer), self.generator.vocabulary)
        found: list[list[int]] = []
        if self.request.prompts is not None:
            path = Path(self.request.prompts)
            check_prompts(path, "--prompts")
            found = self.generator.prompts.of(list(islice(read_prompts(path), SAMPLED)))
            for ids in found:
                check_ids(ids, self.generator.vocabulary)
        lengths = [len(prompt) for prompt in found] or [self.prompt_length]
        for place in range(len(found), self.request.concurrency):
            found.append([chance.randrange(vocabulary) for _ in range(lengths[place % len(lengths)])])
        longest = self.generator.longest
        most = None if longest is None else max(longest - max(self.output_length, PROOF_TOKENS), 1)
        return [prompt[:most] for prompt in found]


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and all(isinstance(one, int) for one in prompt)


def generate(request: EngineRequest, inbox: queue.Queue[Any], tell: Callable[[list[Value]], None]) -> None:
    """Answer requests until the inbox gives None.

    Tokens become text and are sent while the next pass computes. The first and the last token of a text are sent at
    once, others together with those that follow soon."""
    engine = Generating(request)
    tell([engine.prepare()])
    beat = spoke = time.monotonic()
    new: list[NewToken] = []
    with ThreadPoolExecutor(1, "tell") as telling:
        told: Future[None] | None = None
        while True:
            said: list[Value] = []
            if not engine.busy:
                telling.submit(tell, [engine.beat()]).result()
                asked = inbox.get()
                if asked is None:
                    return
                said += filter(None, [engine.take(asked)])
            while not inbox.empty():
                asked = inbox.get_nowait()
                if asked is None:
                    return
                said += filter(None, [engine.take(asked)])
            new += engine.work()
            said += engine.failures()
            now = time.monotonic()
            if now - beat > BEAT_SECONDS:
                said.append(engine.beat())
                beat = now
            if not said and now - spoke < TOGETHER_SECONDS and not any(one.is_awaited for one in new):
                continue
            if told is not None:
                told.result()
            told, new, spoke = telling.submit(_tell, tell, said, new), [], now


def _tell(tell: Callable[[list[Value]], None], said: list[Value], new: list[NewToken]) -> None:
    tell([*said, *pieces(new)])
