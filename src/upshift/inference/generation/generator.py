"""Define ``upshift.Generator``: prompts to texts, by the setup that won the race on the user's own prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.inference.generation.batching import decode
from upshift.inference.generation.contest import GenerationTask
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.model import cache_bytes, check_weights, divide, generation_task, is_too_large, room
from upshift.inference.generation.options import GenerationOptions, check_tokens, read_options, unused
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.inference.generation.prompt_lookup import Lookup
from upshift.inference.generation.prompts import Prompt, Prompts
from upshift.inference.generation.sequence import Ending, GeneratedSequence
from upshift.inference.race.forecast import forecast_generation
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, Run, read_limit, read_quality, read_seconds, pick_evenly
from upshift.inference.registry import build_engine
from upshift.inference.weights import check_asked, computing_host, engine_folder, find_weights, stored_for
from upshift.models.config import alike_positions_in
from upshift.models.generation_config import start_token
from upshift.models.profile_cache import isolation_of, positions_of

logger = logging.getLogger(__name__)

SAMPLE_PROMPTS = 8  # of a race
MANY = 32  # sequences at once, where there are that many: matrices are read once for all of them
BROKEN = "\N{REPLACEMENT CHARACTER}"  # the first bytes of a character
CACHE_SHARE = 0.25  # of the free memory


class Completion(NamedTuple):
    text: str
    tokens: list[int]
    prompt_tokens: int
    ending: Ending


class Generator:
    """``model``: a Hugging Face directory or hub id of a causal language model or an encoder-decoder, with its
    tokenizer.

    ``quality``: ``exact`` (fp32; logits within 1e-4 of transformers'), or the lowest cosine of logits to it, such as 0.999.
    ``engine``: only this one. ``max_ttft_ms``: longest until the first tokens of prompts that are admitted together;
    ``max_tpot_ms``: longest for a token more of each sequence, in the mean. ``chat``: a text is what a user says, by the model's
    chat template. ``race_seconds``: of the race.
    ``max_memory``: such as {"cpu": "8GiB"}, else what is free; a model that is larger runs in transformers, as it is
    stored, partly from the disk.

    Raises RequestError for what is not possible, with what is, and NothingFits where no setup is as quick.
    """

    def __init__(
        self,
        model: str,
        *,
        quality: str | float = "exact",
        engine: str | None = None,
        max_ttft_ms: float | None = None,
        max_tpot_ms: float | None = None,
        chat: bool = False,
        max_memory: Mapping[str | int, str | int] | None = None,
        race_seconds: float | None = None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.quality = read_quality(str(quality))
        self.limits = Limits(ttft_ms=read_limit("max-ttft-ms", max_ttft_ms), tpot_ms=read_limit("max-tpot-ms", max_tpot_ms))
        self.source = find_weights(model)
        self._max_memory = max_memory
        self.task = generation_task(self.source)
        check_weights(self.source)
        self.host = computing_host(stored_for(self.source))
        self._engine = check_asked(self.task, self.source, engine, self.host)
        self.start = start_token(self.source) if self.task == "seq2seq" else None
        self.prompts = Prompts(self.source, chat=chat)
        self.race: Race | None = None
        whole, alike = positions_of(self.source), alike_positions_in(self.source.hf_config.get_text_config(decoder=True))
        self.longest = min((limit for limit in (whole, alike) if limit is not None), default=None)
        self._positions = "positions" if self.longest == whole else "positions up to the next factor of longrope"
        self._untold: set[str] | None = None  # names of generation_config.json that are not done here; None: it is not read yet
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._decoder: Decoder | None = None
        self._reading: object | None = None  # the one call whose rows the decoder has

    def options(self, **given: Any) -> GenerationOptions:
        found = read_options(self.source, given)
        check_tokens(found, given, self.vocabulary)
        if self._untold is None:
            self._untold = {*unused(self.source)}
        if self._untold:  # the file is not read again for each request of a server
            for name, value in unused(self.source, given).items():
                if name in self._untold:
                    self._untold.remove(name)
                    logger.warning("generation_config.json says %s=%r, which is not done here", name, value)
        return found

    def generate(self, prompts: list[Prompt], **options: Any) -> list[Completion]:
        """Return the texts in the order of the prompts. ``options`` are GenerationOptions by their transformers
        names."""
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Collection):
            said = "one text" if isinstance(prompts, str) else f"{prompts!r:.80}"
            raise RequestError(f"generate() takes a list of prompts and was given {said}; use generate([text]), or stream(text)")
        return self.complete(prompts, self.options(**options))

    def complete(self, prompts: list[Prompt], options: GenerationOptions, *, first: int = 0) -> list[Completion]:
        """Return the completions of the prompts. ``first`` is the place of the first of them among all, which its
        seed depends on."""
        ids = self.read(prompts, options, first=first)
        found: dict[int, Completion] = {}
        for sequence, _ in self._tokens(ids, options, first=first):
            if sequence.ending is not None:
                text = self.prompts.text(sequence.tokens)
                found[sequence.place] = Completion(text, sequence.tokens, len(sequence.prompt), sequence.ending)
        return [found[first + place] for place in range(len(ids))]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the text of one prompt, piece by piece."""
        return self.pieces(prompt, self.options(**options))

    def pieces(self, prompt: Prompt, options: GenerationOptions) -> Iterator[str]:
        """Yield pieces of the text. A character comes as soon as all of its bytes are there."""
        tokens: list[int] = []
        said, shown = 0, 0  # tokens that are shown; those among them that the next ones are read together with start here
        for sequence, token in self._tokens(self.read([prompt], options), options):
            tokens.append(token)
            before, now = self.prompts.text(tokens[said:shown]), self.prompts.text(tokens[said:])
            if len(now) > len(before) and (sequence.ending or not now.endswith(BROKEN)):
                yield now[len(before) :]
                said, shown = shown, len(tokens)

    def prepare(self, ids: list[list[int]], options: GenerationOptions, *, total: int | None = None) -> Race:
        """Race on some of the first call's prompts, or recall what won before. Later calls use the same setup.
        ``total`` is the number of prompts, if these are only some of them."""
        options = self._within_positions(max(ids, key=len), options)
        beyond = self.race is None and is_too_large(self.source, self.host, self._max_memory)
        too_large = beyond and self._engine in (None, "torch")
        if beyond and self._max_memory is not None:
            if not too_large:
                raise RequestError(
                    f"--engine {self._engine} runs {self.source.reference!r} in memory alone, and its race takes more than "
                    "--max-memory; leave out --engine, which then runs partly from the disk, or give more"
                )
            self.race = self._divide(ids, options)
        if self.race is None:
            sample = pick_evenly(ids, max(min(SAMPLE_PROMPTS, PASS_TOKENS // max(len(prompt) for prompt in ids)), 1))
            task = GenerationTask.of(options, self._positions_left(ids))
            contest = Contest(
                task=self.task, source=self.source, asked=task.to_json(), pad=0,
                batches=self._batches(len(sample), self._room(ids, options)), hint="latency",
            )  # fmt: skip
            lengths = [len(prompt) for prompt in sample]
            forecast = partial(forecast_generation, self.source, self.host, lengths, task.new_tokens)
            amount = (total or len(ids)) * options.max_new_tokens
            policy = RacePolicy(self.quality, self.limits, amount, engine=self._engine, seconds=self._race_seconds)
            no_room = partial(self._divide, ids, options) if too_large else None
            self.race = race(contest, self.host, sample, policy, forecast=forecast, no_room=no_room, on_run=self._on_run)
        if self._decoder is None:
            folder = engine_folder(self.task, self.source, self.race.chosen.engine)
            build = DecoderBuild(self.source, self.race.chosen, folder)
            self._decoder = build_engine(self.task, self.race.chosen.engine, build)
        if options.prompt_lookup_num_tokens and not self._decoder.extends:
            raise RequestError(
                f"prompt_lookup_num_tokens is not possible with {self.race.chosen.label()}, which computes one token of a text "
                "at a time; leave it out, or ask for --engine torch (engine='torch')"
            )
        return self.race

    def _divide(self, ids: list[list[int]], options: GenerationOptions) -> Race:
        if self.limits:
            raise RequestError(
                f"{self.source.reference!r} has no room in memory, and where it runs partly from the disk nothing is raced, so "
                "--max-ttft-ms and --max-tpot-ms cannot be held; leave them out, or give more --max-memory"
            )
        tokens = max(len(prompt) for prompt in ids) + options.max_new_tokens
        rows = self._room(ids, options)
        chosen, where, reason = divide(self.source, self.host, self.quality, self._max_memory, rows=rows, tokens=tokens)
        folder = engine_folder(self.task, self.source, chosen.engine)
        self._decoder = build_engine(self.task, chosen.engine, DecoderBuild(self.source, chosen, folder, where))
        return Race(runs=(), chosen=chosen, file=None, divided=reason)

    def _batches(self, sampled: int, room: int) -> tuple[int, ...]:
        """Return the batches to race. Under a limit they are every power of two below what memory holds, because more
        rows make each wait longer. If padding before a prompt would change the text after it, it is one prompt at a
        time."""
        if isolation_of(self.source).left_padding:
            return (1,)
        doubled = {2**power for power in range(room.bit_length())} if self.limits else set[int]()
        return tuple(sorted({sampled, room} | doubled))

    def _room(self, ids: list[list[int]], options: GenerationOptions) -> int:
        """Return the number of sequences whose cache fits beside the model. If memory is short it is a power of two,
        so that the remembered race stays the same while free memory goes a little up and down."""
        tokens, one = self.cache_tokens(), max(len(prompt) for prompt in ids) + options.max_new_tokens
        most = MANY if tokens is None else max(min(tokens // one, MANY), 1)
        return min(len(ids), 1 << (most.bit_length() - 1))

    def _positions_left(self, ids: list[list[int]]) -> int | None:
        """Return the positions that are left for new tokens of each prompt."""
        if self.longest is None:
            return None
        return self.longest - (max(len(prompt) for prompt in ids) if self.start is None else 1)

    def cache_tokens(self) -> int | None:
        """Return the tokens of all sequences together that have room beside the model, or None if nothing says how
        much memory there is."""
        known = room(computing_host(stored_for(self.source)), self._max_memory)
        return None if known is None else int(CACHE_SHARE * known / cache_bytes(self.source))

    @cached_property
    def vocabulary(self) -> int:
        """Return the number that all token ids are below."""
        return int(self.source.hf_config.get_text_config(decoder=True).vocab_size)

    @property
    def decoder(self) -> Decoder:
        """Return the decoder that ``prepare`` has built."""
        assert self._decoder is not None
        return self._decoder

    def read(self, prompts: list[Prompt], options: GenerationOptions, *, first: int = 0) -> list[list[int]]:
        """Return token ids. Raise RequestError for a prompt that is empty, or too long for the model."""
        ids = self.prompts.of(prompts, first=first)
        for number, prompt in enumerate(ids, start=first + 1):
            self.check_positions(prompt, options, f"prompt {number}")
        return ids

    def check_positions(self, prompt: list[int], options: GenerationOptions, name: str) -> None:
        """Raise RequestError if prompt and answer are longer than the model allows."""
        new = self._within_positions(prompt, options).max_new_tokens
        needed = len(prompt) + new if self.start is None else max(len(prompt), new + 1)  # an encoder has its own positions
        if self.longest is not None and needed > self.longest:
            raise RequestError(
                f"{name} has {len(prompt):,} tokens, with max_new_tokens={new:,} more than the "
                f"{self.longest:,} {self._positions} of {self.source.reference!r}; shorten it, or ask for fewer tokens"
            )

    def _within_positions(self, prompt: list[int], options: GenerationOptions) -> GenerationOptions:
        """Return the options for one prompt. Where neither the user nor the model's files say how long an answer may be, it ends
        where the model's positions end."""
        left = self._positions_left([prompt])
        if left is None or left < 1 or left >= options.max_new_tokens or "max_new_tokens" in options.model_fields_set:
            return options
        return options.changed(max_new_tokens=left)

    def _tokens(
        self, ids: list[list[int]], options: GenerationOptions, *, first: int = 0
    ) -> Iterator[tuple[GeneratedSequence, int]]:
        if not ids:
            return
        chosen = self.prepare(ids, options).chosen
        assert self._decoder is not None
        tokenizer = self.prompts.tokenizer
        waiting = [
            GeneratedSequence(place, prompt, self._within_positions(prompt, options), tokenizer, start=self.start)
            for place, prompt in enumerate(ids, start=first)
        ]
        self._decoder.keep([])
        self._reading = reading = object()
        lookup = Lookup(options.prompt_lookup_num_tokens) if options.prompt_lookup_num_tokens else None
        for found in decode(self._decoder, waiting, rows=min(chosen.batch, self._room(ids, options)), lookup=lookup):
            yield found
            if self._reading is not reading:  # what it has computed is gone
                raise RequestError(
                    "this Generator began another text before this stream had ended; read one after the other, or give each a "
                    "Generator of its own"
                )
