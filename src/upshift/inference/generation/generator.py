"""Define ``upshift.Generator``: prompts to texts, by the setup that won the race on the user's own prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.inference.computing_device import available_memory, computing_host
from upshift.inference.engine_environment import EngineEnvironment, choose_environment
from upshift.inference.generation.batching import decode
from upshift.inference.generation.draft import GUESSED_TOKENS, DraftModel, add_draft, find_draft, load_draft
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.engines.text_engine import TextEngine
from upshift.inference.generation.engines.vllm_engine import check_environment, check_supported, find_unsupported
from upshift.inference.generation.media import MediaPrompt
from upshift.inference.generation.model import (
    CacheBytes,
    cache_bytes,
    check_max_memory,
    check_weights,
    generation_task,
    is_too_large,
    pads_safely,
    pass_bytes,
    plan_offload,
)
from upshift.inference.generation.options import GenerationOptions, check_tokens, read_options
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.inference.generation.prompt_lookup import Lookup
from upshift.inference.generation.prompts import BLOCK_PROMPTS, Prompt, Prompts
from upshift.inference.generation.raced_setup import GenerationTask
from upshift.inference.generation.sequence import Ending, GeneratedSequence
from upshift.inference.generation.text_batches import generate_texts
from upshift.inference.race.forecast import forecast_generation
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, RaceSeconds, Run, pick_evenly, read_limit, read_quality, read_seconds
from upshift.inference.registry import EngineSetup, Task, build_engine
from upshift.inference.resumable_output import read_blocks
from upshift.inference.tensor_parallel import check_divides
from upshift.inference.weights import check_requested_engine, engine_folder, find_weights, stored_for
from upshift.loading.load import build_empty_model
from upshift.models.config import stable_positions_in
from upshift.models.generation_config import read_defaults, start_token
from upshift.models.profile_cache import positions_of
from upshift.models.sequence_length import check_border
from upshift.units import format_bytes

SAMPLE_PROMPTS = 8  # prompts of a race
MAX_ROWS = 32  # sequences at once: each step reads the weights once for all of them
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the text of the first bytes of a character
CACHE_SHARE = 0.25  # the share of the free memory that caches may take
LONG_TEXT_ENGINE = "torch"  # the only engine that chooses longrope's factors by the length of each text


class Completion(NamedTuple):
    """A generated text, its tokens, the number of tokens of its prompt, and why it ended."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    ending: Ending


class PromptKind(NamedTuple):
    """The engine for prompts of one kind: of text alone, or with images. None: no call has had such prompts."""

    task: Task
    race: Race | None = None
    decoder: Decoder | None = None
    draft: DraftModel | None = None
    text_engine: TextEngine | None = None


def _has_inputs(prompt: list[int]) -> bool:
    """Return whether a prompt has other inputs than its token ids, so that it is computed alone."""
    return isinstance(prompt, MediaPrompt)


class Generator:
    """Generate texts with a causal language model, an encoder-decoder, or a model that reads images beside text.

    The first call races the installed engines on some of the prompts, or recalls the result of an earlier race. All calls
    use the fastest setup within the quality and the limits.

    Args:
        model: Hugging Face directory or hub id, with its tokenizer.
        quality: "exact" (fp32, logits within 1e-4 of transformers'), or the lowest cosine of logits to those, such as 0.999.
        engine: the only engine to use.
        max_ttft_ms: longest time until the first tokens of prompts that are admitted together.
        max_tpot_ms: longest mean time of one more token of each sequence.
        chat: read a text as the message of a user, by the model's chat template.
        max_memory: the memory limit of a CPU: {"cpu": "8GiB"}. Without it, the free memory is the limit. A model that is
            larger runs in transformers in its stored precision, partly from the disk.
        race_seconds: time of the race. "run": no longer than the run of the first call takes.
        engine_python: the Python interpreter of an environment that has vLLM. With it, vLLM races, too.
        tensor_parallel: devices of this machine that share each layer. Above 1 the engine is "torch".
        draft: a smaller model that guesses tokens, which the model checks. The engine is then "torch", "openvino" or "vllm".
        adapters: the folders of LoRA adapters that a server's requests may name. Only vLLM computes them.
        serves: a server uses the engine, so that it gives log-probabilities and holds texts to a form.
        engine_arguments: the engine arguments of vLLM to fix, by vLLM's names, such as {"tensor_parallel_size": 2}.
        on_run: called after each run of the race.

    Raises:
        RequestError: a request is not possible. The message names what is possible.
        NothingFits: no setup keeps the limits.
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
        race_seconds: RaceSeconds = None,
        engine_python: str | Path | None = None,
        engine_arguments: Mapping[str, Any] | None = None,
        serves: bool = False,
        adapters: Sequence[str] = (),
        tensor_parallel: int = 1,
        draft: str | None = None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self._environment = choose_environment(engine, engine_python, engine_arguments, tensor_parallel=tensor_parallel)
        self._serves = serves
        self._adapters = tuple(adapters)
        self.quality = read_quality(str(quality))
        self.limits = Limits(ttft_ms=read_limit("max-ttft-ms", max_ttft_ms), tpot_ms=read_limit("max-tpot-ms", max_tpot_ms))
        self.source = find_weights(model)
        self._max_memory = max_memory
        self.task = generation_task(self.source)
        check_weights(self.source)
        self.host = computing_host(stored_for(self.source))
        check_max_memory(self.source, self.host, max_memory)
        self._engine = check_requested_engine(self.task, self.source, engine, self.host, self._environment)
        self._tensor_parallel = tensor_parallel
        if tensor_parallel != 1:
            check_divides(tensor_parallel, self.source, self.task, engine, self.host, lambda: build_empty_model(self.source))
            self._engine = "torch"
        if self._environment is not None:
            check_environment(self._environment, self.source, self.host, self._engine, self.quality)
        self.start = start_token(self.source) if self.source.hf_config.is_encoder_decoder else None
        self.prompts = Prompts(self.source, chat=chat)
        self._draft = None if draft is None else find_draft(draft, self.source, self.prompts.tokenizer, self._engine)
        if self._environment is not None and self._draft is not None:
            self._environment = add_draft(self._environment, self._draft)
        elif self._environment is not None and self._environment.arguments.draft is not None:
            option = "--engine-set speculative_config: the model"
            find_draft(self._environment.arguments.draft, self.source, self.prompts.tokenizer, "vllm", option=option)
        self.race: Race | None = None
        self._defaults = read_defaults(self.source)
        self._positions = positions_of(self.source)
        self._border = stable_positions_in(self.source.hf_config.get_text_config(decoder=True))
        limits = [limit for limit in (self._positions, self._border) if limit is not None]
        self.longest = min(limits, default=None)  # tokens of sequences of any lengths that run together; None: unknown
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._decoder: Decoder | None = None
        self._draft_model: DraftModel | None = None
        self.text_engine: TextEngine | None = None  # instead of a decoder
        self._current_call: object | None = None  # identifies the call whose rows the decoder has
        self._reads_images = False  # whether the fields above are those of prompts with images
        self._other_kind = PromptKind("as-transformers")  # of the prompts that the last call did not have

    def options(self, **arguments: Any) -> GenerationOptions:
        """Return the options of generation. Raise RequestError for an option that is not possible.

        An option of generation_config.json that Upshift does not have is not possible, either, unless the user replaces it."""
        options = read_options(self._defaults, arguments)
        check_tokens(options, arguments, self.vocabulary)
        return options

    def generate(self, prompts: list[Prompt], **options: Any) -> list[Completion]:
        """Return the texts in the order of the prompts. ``options`` are GenerationOptions by transformers' names."""
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Collection):
            value = "one text" if isinstance(prompts, str) else f"{prompts!r:.80}"
            raise RequestError(f"generate() takes a list of prompts and was given {value}; use generate([text]), or stream(text)")
        return self.complete(prompts, self.options(**options))

    def complete(self, prompts: list[Prompt], options: GenerationOptions, *, first: int = 0) -> list[Completion]:
        """Return the completions of the prompts.

        ``first`` is the index of the first prompt among all prompts of the user. The random numbers of a prompt depend on
        its index."""
        prompt_ids = self.read(prompts, options, first=first)
        completions: dict[int, Completion] = {}
        for sequence, _ in self._generate_tokens(prompt_ids, options, first=first):
            if sequence.ending is not None:
                text = self.prompts.decode(sequence.tokens)
                completions[sequence.index] = Completion(text, sequence.tokens, len(sequence.prompt), sequence.ending)
        return [completions[first + number] for number in range(len(prompt_ids))]

    def complete_blocks(
        self, blocks: Iterable[list[Prompt]], options: GenerationOptions, *, first: int
    ) -> Iterator[tuple[list[Prompt], list[Completion]]]:
        """Yield each block of prompts with its completions. ``first`` is the index of the first prompt."""
        for block in blocks:
            yield block, self.complete(block, options, first=first)
            first += len(block)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the text of one prompt, piece by piece."""
        return self.pieces(prompt, self.options(**options))

    def pieces(self, prompt: Prompt, options: GenerationOptions) -> Iterator[str]:
        """Yield the text of one prompt, piece by piece. A character comes when all of its bytes are there."""
        tokens: list[int] = []
        context_start = 0  # the tokens from here on are decoded together with the next ones
        shown = 0  # tokens whose text has been yielded
        for sequence, token in self._generate_tokens(self.read([prompt], options), options):
            tokens.append(token)
            old_text = self.prompts.decode(tokens[context_start:shown])
            text = self.prompts.decode(tokens[context_start:])
            if len(text) > len(old_text) and (sequence.ending or not text.endswith(REPLACEMENT)):
                yield text[len(old_text) :]
                context_start = shown
                shown = len(tokens)

    def prepare(
        self, ids: list[list[int]], options: GenerationOptions, *, total: int | None = None, result: Race | None = None
    ) -> Race:
        """Return the result of the race on some of the first call's prompts, or of an earlier race. Load the winner.

        Later calls use the same setup. ``total`` is the number of prompts, if ``ids`` has only some of them. ``result`` is that
        of a race in another process, and then nothing is raced here."""
        options = self.limit_options(max(ids, key=len), options)
        self._select_kind(any(map(_has_inputs, ids)))
        self.race = result or self.race
        chosen_engine = self._engine if self.race is None else self.race.chosen.engine
        if chosen_engine not in (None, LONG_TEXT_ENGINE) and any(map(self._is_beyond, ids)):
            raise RequestError(
                f"a prompt has more than {self._border:,} tokens, where the factors of longrope change, and {chosen_engine} "
                f"computes with those of shorter texts; ask for --engine {LONG_TEXT_ENGINE} (engine={LONG_TEXT_ENGINE!r})"
            )
        if self.race is None:
            self.race = self._race_or_offload(ids, options, total or len(ids))
        if self.race.chosen.environment is not None:
            check_supported(options)
        self._load(self.race.chosen)
        if options.prompt_lookup_num_tokens and (self._decoder is None or not self._decoder.extends):
            raise RequestError(
                f"prompt_lookup_num_tokens is not possible with {self.race.chosen.label()}, which computes one token of a text "
                "at a time; leave it out, or ask for --engine torch (engine='torch')"
            )
        return self.race

    def _select_kind(self, reads_images: bool) -> None:
        """Compute the prompts of this call as those of the earlier calls with the same kind of prompts.

        Prompts with images are computed by transformers' own generate(), which takes a model's other inputs. Both kinds share
        the weights where both engines are torch. Otherwise an engine is loaded again at each change."""
        if reads_images and self._engine not in (None, "torch"):
            raise RequestError(f"the engine {self._engine} computes text alone; use --engine torch for prompts with images")
        if reads_images and self._tensor_parallel > 1:
            raise RequestError(f"--tensor-parallel {self._tensor_parallel} is for prompts of text alone; leave it out for images")
        if reads_images == self._reads_images or self.task == self._other_kind.task:
            return
        if self._decoder is not None:
            self._decoder.keep([])
        other = self._other_kind
        self._other_kind = PromptKind(self.task, self.race, self._decoder, self._draft_model, self.text_engine)
        self.task, self.race, self._decoder, self._draft_model, self.text_engine = other
        self._reads_images = reads_images

    def _load(self, setup: EngineSetup) -> None:
        """Load the engine of a setup, unless it is loaded."""
        if self._decoder is not None or self.text_engine is not None:
            return
        folder = engine_folder(self.task, self.source, setup.engine)
        model = self._shared_model(setup)
        build = DecoderBuild(self.source, setup, folder, serves=self._serves, adapters=self._adapters, model=model)
        engine = build_engine(self.task, setup.engine, build)
        if setup.environment is None:
            self._decoder = engine
            self._draft_model = None if self._draft is None else load_draft(self._draft, self.source, setup, engine)
            return
        self.text_engine = engine
        if self._serves:  # requests are then checked against what the engine has
            self._positions = min(limit for limit in (self._positions, engine.positions) if limit is not None)
            self.longest = min(limit for limit in (self.longest, self._positions) if limit is not None)

    def _shared_model(self, setup: EngineSetup) -> Any:
        """Return the loaded model of the other kind of prompts if this setup can use it. Otherwise free its memory, and return
        None."""
        decoder: Any = self._other_kind.decoder
        other_race = self._other_kind.race
        if decoder is None or other_race is None:
            return None
        other = other_race.chosen
        if other_race.divided is None and all(
            getattr(setup, name) == getattr(other, name) for name in ("engine", "precision", "device")
        ):
            return decoder.model
        self._other_kind = self._other_kind._replace(decoder=None, draft=None)
        return None

    def _race_or_offload(self, ids: list[list[int]], options: GenerationOptions, total: int) -> Race:
        """Return the result of a race. If the model does not fit into memory, run it partly from the disk without a race."""
        exceeds_memory = is_too_large(self.source, self.host, self._max_memory)
        can_offload = exceeds_memory and self._engine in (None, "torch") and self._tensor_parallel == 1
        if exceeds_memory and self._max_memory is not None:
            if not can_offload:
                option = (
                    f"--engine {self._engine}" if self._tensor_parallel == 1 else f"--tensor-parallel {self._tensor_parallel}"
                )
                raise RequestError(
                    f"{option} runs {self.source.reference!r} in memory alone, and its race takes more than --max-memory; leave "
                    f"out {option.partition(' ')[0]}, so that it runs partly from the disk, or give more"
                )
            return self._offload(ids, options)
        sample_size = min(SAMPLE_PROMPTS, PASS_TOKENS // max(len(prompt) for prompt in ids))
        sample = pick_evenly(self._larger_side(ids), max(sample_size, 1))
        positions_left = [left for prompt in ids if (left := self.positions_left(prompt)) is not None]
        task = GenerationTask.from_options(options, min(positions_left, default=None), pads=self._pads_safely)
        contest = Contest(
            task=self.task,
            source=self.source,
            asked=task.to_json(),
            pad=0,
            batches=self._batches(len(sample), self._max_rows(ids, options)),
            hint="latency",
            environment=self._racing_environment(options),
            tensor_parallel=self._tensor_parallel,
        )
        forecast = partial(forecast_generation, self.source, self.host, [len(prompt) for prompt in sample], task.new_tokens)
        engine = self._engine or (LONG_TEXT_ENGINE if any(map(self._is_beyond, ids)) else None)
        policy = RacePolicy(self.quality, self.limits, total * options.new_tokens, engine=engine, seconds=self._race_seconds)
        no_room = partial(self._offload, ids, options) if can_offload else None
        return race(contest, self.host, sample, policy, forecast=forecast, no_room=no_room, on_run=self._on_run)

    def _racing_environment(self, options: GenerationOptions) -> EngineEnvironment | None:
        """Return the environment of the engine that has its own, or None if the engine does not race.

        It does not race if it lacks an option of the user, or if the user asks for another engine. Raise RequestError if the
        user asks for this engine and for an option that it lacks."""
        if self._environment is None or self.task != "generate" or self._engine not in (None, "vllm"):
            return None
        if self._engine == "vllm":
            check_supported(options)
        return None if find_unsupported(options) else self._environment

    def _offload(self, ids: list[list[int]], options: GenerationOptions) -> Race:
        """Load the model partly on the disk. Return its setup as the result of a race without runs."""
        if self._draft is not None:
            raise RequestError(
                f"{self.source.reference!r} does not fit in memory, and --draft takes more; leave --draft out, or give more "
                "--max-memory"
            )
        if self.limits:
            raise RequestError(
                f"{self.source.reference!r} does not fit in memory. It can run partly from the disk, but there Upshift does not "
                "race engines and cannot keep --max-ttft-ms or --max-tpot-ms; leave them out, or give more --max-memory"
            )
        tokens = max(len(prompt) for prompt in ids) + options.new_tokens
        rows = self._max_rows(ids, options)
        chosen, where, reason = plan_offload(self.source, self.host, self.quality, self._max_memory, rows=rows, tokens=tokens)
        folder = engine_folder(self.task, self.source, chosen.engine)
        self._decoder = build_engine(self.task, chosen.engine, DecoderBuild(self.source, chosen, folder, where))
        return Race(runs=(), chosen=chosen, file=None, divided=reason)

    def _batches(self, sample_size: int, max_rows: int) -> tuple[int, ...]:
        """Return the batches to race.

        Under a limit they include every power of two that fits into memory, because more rows make each sequence wait
        longer. If prompts must not share a batch, there is only the batch 1."""
        if not self._pads_safely:
            return (1,)
        batches = {sample_size, max_rows}
        if self.limits:
            batches |= {2**power for power in range(max_rows.bit_length())}
        return tuple(sorted(batches))

    def _max_rows(self, ids: list[list[int]], options: GenerationOptions) -> int:
        """Return the number of sequences whose cache fits beside the model, or 1 if prompts must not share a batch.

        If memory is short it is a power of two, so that the race stays the same while the free memory changes a little."""
        if not self._pads_safely or any(map(_has_inputs, ids)):
            return 1
        budget = self._cache_budget()
        rows = MAX_ROWS
        if budget is not None and self._cache_bytes is not None:
            sequence_tokens = max(len(prompt) + self._new_tokens(prompt, options) for prompt in ids)
            sequence_bytes = self._cache_bytes.row + self._cache_bytes.token * sequence_tokens
            rows = max(min(budget // max(sequence_bytes, 1), MAX_ROWS), 1)
        return min(len(ids), 1 << (rows.bit_length() - 1))

    def positions_left(self, prompt: list[int]) -> int | None:
        """Return how many tokens may follow a prompt, or None if the limit is unknown.

        A text that longrope's border divides would need all its keys again. The last token of a text is not computed."""
        if self.start is not None:
            return None if self.longest is None else self.longest - 1
        limits = []
        if self._positions is not None:
            limits.append(self._positions - len(prompt))
        if self._border is not None and not self._is_beyond(prompt):
            limits.append(self._border + 1 - len(prompt))
        return min(limits, default=None)

    def _is_beyond(self, prompt: list[int]) -> bool:
        """Return whether longrope rotates all tokens of a decoder's prompt by its factors for long texts."""
        return self._border is not None and self.start is None and len(prompt) > self._border

    def _larger_side(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the prompts on the side of longrope's border that has more of them. Both are never in one batch."""
        beyond = [prompt for prompt in ids if self._is_beyond(prompt)]
        others = [prompt for prompt in ids if not self._is_beyond(prompt)]
        return max(others, beyond, key=len)

    def check_prompts(self, prompts: Iterable[Prompt], options: GenerationOptions) -> tuple[int, list[list[int]]]:
        """Read all prompts, block by block. Raise RequestError with the number of the first one that ``read`` refuses.

        Return the number of prompts, and the token ids of the longest prompt beyond longrope's border as the only item of a
        list. Only one engine computes such a prompt, so the race must know of it. Without one the list is empty."""
        first = 0
        longest: list[int] = []
        for block in read_blocks(iter(prompts), size=BLOCK_PROMPTS):
            longest = max(longest, *self.read(block, options, first=first), key=len)
            first += len(block)
        return first, [longest] if self._is_beyond(longest) else []

    def cache_tokens(self) -> int | None:
        """Return how many tokens of all sequences together fit into memory beside the model and MAX_ROWS sequences' states of a
        fixed size. None: unknown, or the model keeps nothing for each token."""
        budget = self._cache_budget()
        if budget is None or self._cache_bytes is None or not self._cache_bytes.token:
            return None
        return max(budget - MAX_ROWS * self._cache_bytes.row, 0) // self._cache_bytes.token

    def _cache_budget(self) -> int | None:
        """Return the bytes for what all sequences keep, or None if the free memory is unknown."""
        free_bytes = available_memory(computing_host(stored_for(self.source)), self._max_memory)
        return None if free_bytes is None else int(CACHE_SHARE * free_bytes)

    @cached_property
    def _pads_safely(self) -> bool:
        """Return whether prompts of different lengths may share a batch."""
        return pads_safely(self.source)

    @cached_property
    def _cache_bytes(self) -> CacheBytes | None:
        """Return the bytes that a sequence keeps, or None if they are unknown."""
        return cache_bytes(self.source)

    @cached_property
    def _pass_bytes(self) -> int:
        """Return the fewest bytes that a token takes in one pass."""
        return pass_bytes(self.source)

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
        """Return the token ids of prompts. Raise RequestError for a prompt that is empty, or too long for the model."""
        prompt_ids = self.prompts.tokenize(prompts, first=first)
        for number, prompt in enumerate(prompt_ids, start=first + 1):
            self.check_positions(prompt, options, f"prompt {number}")
        return prompt_ids

    def check_positions(self, prompt: list[int], options: GenerationOptions, name: str, *, serves: bool = False) -> None:
        """Raise RequestError if prompt and answer are longer than the model allows. ``name`` names the prompt.

        ``serves``: a client of a server sent it, so that texts of any length run beside it."""
        new_tokens = self._new_tokens(prompt, options, name, serves=serves)
        shown = f"{name} has {len(prompt):,} tokens"
        length = f"max_{'' if serves else 'new_'}tokens={new_tokens:,}"
        if options.max_length is not None:
            length = f"max_length={options.max_length:,}"
        self._check_limit(prompt, new_tokens, shown, length)
        if self._border is None or self.start is not None:
            return
        reference = self.source.reference
        if self._is_beyond(prompt) and serves:
            raise RequestError(
                f"{shown}. Above {self._border:,} tokens {reference!r} rotates positions by other factors (longrope), and the "
                f"server runs all requests together, so it takes at most {self._border:,}; shorten it, or use upshift generate"
            )
        check_border(len(prompt), new_tokens, self._border, shown=shown, length=length, reference=reference)
        if self._is_beyond(prompt):
            self._check_one_pass(prompt, shown)

    def _check_one_pass(self, prompt: list[int], shown: str) -> None:
        """Raise RequestError if a prompt beyond longrope's border, which is one pass, takes more than the free memory."""
        free_bytes = available_memory(self.host, self._max_memory)
        needed_bytes = len(prompt) * (self._pass_bytes + (self._cache_bytes.token if self._cache_bytes is not None else 0))
        if free_bytes is not None and needed_bytes > free_bytes:
            raise RequestError(
                f"{shown}. Above {self._border:,} tokens {self.source.reference!r} computes a prompt in one pass (longrope). "
                f"It takes at least {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} is free; shorten it"
            )

    def exceeded_positions(self, prompt: list[int], new_tokens: int) -> tuple[int, bool] | None:
        """Return the model's positions, and whether the prompt alone exceeds them.

        Return None if they suffice for prompt and answer, or are unknown."""
        has_encoder = self.start is not None  # encoder and decoder count their positions apart
        limit = self.longest if has_encoder else self._positions
        if limit is None:
            return None
        if len(prompt) > (limit if has_encoder else limit - 1):
            return limit, True
        needed_positions = new_tokens + 1 if has_encoder else len(prompt) + new_tokens
        return (limit, False) if needed_positions > limit else None

    def _check_limit(self, prompt: list[int], new_tokens: int, shown: str, length: str) -> None:
        """Raise RequestError if the model has too few positions for a prompt, or for a prompt with an answer of ``new_tokens``.

        ``shown`` and ``length`` are the words for both."""
        exceeded = self.exceeded_positions(prompt, new_tokens)
        if exceeded is None:
            return
        limit, by_prompt = exceeded
        if by_prompt:
            use = "them" if self.start is not None else "them and the answer"
            raise RequestError(f"{shown}, and {self.source.reference!r} has {limit:,} positions for {use}; shorten it")
        raise RequestError(
            f"{shown}, with {length} more than the {limit:,} positions of {self.source.reference!r}; shorten it, or ask for "
            "fewer tokens"
        )

    def limit_options(
        self, prompt: list[int], options: GenerationOptions, name: str = "a prompt", *, serves: bool = False
    ) -> GenerationOptions:
        """Return the options for one prompt. ``max_length`` includes the prompt. If neither the user nor the model's files limit
        the length of answers, an answer ends where the model's positions end."""
        new_tokens = self._new_tokens(prompt, options, name, serves=serves)
        return options if new_tokens == options.max_new_tokens else options.changed(max_new_tokens=new_tokens, max_length=None)

    def _new_tokens(self, prompt: list[int], options: GenerationOptions, name: str = "a prompt", *, serves: bool = False) -> int:
        """Return the most tokens that may be generated after a prompt. Raise RequestError if max_length has no room for one."""
        if options.max_length is not None:
            limit = options.max_length - (len(prompt) if self.start is None else 1)
            if limit < 1:
                remedy = "max_tokens" if serves else "--max-new-tokens 128 (max_new_tokens=128 in Python)"
                raise RequestError(
                    f"{name} has {len(prompt):,} tokens, and max_length={options.max_length} counts "
                    f"{'them' if self.start is None else 'the start token of the decoder'} and the answer; give {remedy}, or a "
                    "greater max_length"
                )
            return limit
        left = None if options.max_new_tokens is not None else self.positions_left(prompt)
        return options.new_tokens if left is None or left < 1 else min(left, options.new_tokens)

    def _generate_tokens(
        self, ids: list[list[int]], options: GenerationOptions, *, first: int = 0
    ) -> Iterator[tuple[GeneratedSequence, int]]:
        """Yield each sequence with each of its tokens. Raise RequestError if another call has started meanwhile."""
        if not ids:
            return
        chosen = self.prepare(ids, options).chosen
        tokenizer = self.prompts.tokenizer
        sequences = [
            GeneratedSequence(index, prompt, self.limit_options(prompt, options), tokenizer, start=self.start)
            for index, prompt in enumerate(ids, start=first)
        ]
        self._current_call = this_call = object()
        if self.text_engine is not None:
            yield from generate_texts(self.text_engine, sequences)
            return
        self.decoder.keep([])
        lookup = Lookup(options.prompt_lookup_num_tokens) if options.prompt_lookup_num_tokens else None
        if self._draft_model is not None:
            lookup = Lookup(GUESSED_TOKENS, self._draft_model.find)
        rows = min(chosen.batch, self._max_rows(ids, options))
        for sequence, token in self._decode_by_length(self.decoder, sequences, rows, lookup):
            yield sequence, token
            if self._current_call is not this_call:  # the decoder's rows belong to the other call
                raise RequestError(
                    "this Generator began another text before this stream had ended; read one after the other, or give each a "
                    "Generator of its own"
                )

    def _decode_by_length(
        self, decoder: Decoder, sequences: list[GeneratedSequence], rows: int, lookup: Lookup | None
    ) -> Iterator[tuple[GeneratedSequence, int]]:
        """Yield each sequence with each of its tokens. Prompts on both sides of longrope's border are never in one batch,
        because the longest row decides by which factors all rows are rotated."""
        beyond = [sequence for sequence in sequences if self._is_beyond(sequence.prompt)]
        others = [sequence for sequence in sequences if not self._is_beyond(sequence.prompt)]
        if beyond:
            yield from decode(decoder, beyond, rows=rows, lookup=lookup, shares_prefix=False)
        if others:
            yield from decode(decoder, others, rows=rows, lookup=lookup)
