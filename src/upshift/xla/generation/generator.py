"""Generate text with any Hugging Face model that generates, with programs that XLA compiles as a whole.

Prompts of similar length are grouped and padded to few widths, because each shape is a program to compile. ``generate`` is
``upshift.xla.generate``, which does everything in one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
import tensorflow as tf

from upshift.errors import RequestError
from upshift.inference.generation.options import check_token_ids
from upshift.inference.generation.prompts import Prompts, check_prompt_ids, prompt_vocabulary
from upshift.models.config import stable_positions_in
from upshift.models.describe import max_positions
from upshift.models.generation_config import read_defaults, start_token
from upshift.models.profile_cache import isolation_of
from upshift.models.sequence_length import check_border
from upshift.models.source import ModelSource
from upshift.value import Value
from upshift.xla.generation.options import TOKEN_OPTIONS, XlaGeneration, XlaGenerationOptions, read_options
from upshift.xla.generation.passes import DecoderOnly, EncoderDecoder
from upshift.xla.generation.program import Passes, generate_tokens
from upshift.xla.generation.sampling import Sampling
from upshift.xla.lowering.program import lower
from upshift.xla.model import XlaModel, build
from upshift.xla.tensorflow import keep_programs

MIN_WIDTH = 32
MAX_ROWS = 8  # prompts that are generated together
LARGEST_DRAW = 1.0 - 2.0**-23  # a draw times a sum stays below that sum in fp32


class Group(NamedTuple):
    indices: tuple[int, ...]  # the indices of its prompts among all prompts
    width: int


def padded_width(length: int, *, multiple: int | None) -> int:
    """Return the next multiple, or without one the next power of two from 32 on, so that few programs are needed."""
    if multiple is not None:
        return -(-length // multiple) * multiple
    return max(MIN_WIDTH, 1 << (length - 1).bit_length())


def group_prompts(lengths: Sequence[int], *, rows: int, multiple: int | None = None) -> Iterator[Group]:
    """Yield groups of at most ``rows`` prompts of one width.

    Prompts that do not fill a group join the next wider ones, so that no program is compiled for a part of a group."""
    by_width: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_width.setdefault(padded_width(length, multiple=multiple), []).append(index)
    pending: list[int] = []
    widths = sorted(by_width)
    for width in widths:
        pending += by_width[width]
        num_grouped = len(pending) if width == widths[-1] else len(pending) // rows * rows
        for start in range(0, num_grouped, rows):
            yield Group(tuple(pending[start : min(start + rows, num_grouped)]), width)
        pending = pending[num_grouped:]


class CompiledShape(Value):
    """Describe the shape of a compiled program. ``seconds``: its first call, with export, tracing and compilation."""

    rows: int
    width: int
    max_new_tokens: int
    seconds: float


class XlaGenerator:
    """Generate text with a model from ``upshift.xla.build``, and reuse the compiled programs in later calls.

    ``pad_to_multiple_of``: the width of prompts; None: a power of two from 32 on. ``compiled`` lists the programs so far.
    ``num_traces`` counts how often TensorFlow traced. If it is larger than the number of programs, a shape changed that should
    not change.
    """

    def __init__(self, model: XlaModel, *, pad_to_multiple_of: int | None = None) -> None:
        self.model = model
        self.compiled: list[CompiledShape] = []
        self._multiple = pad_to_multiple_of
        self._defaults = read_defaults(model.source)
        self._functions: dict[XlaGeneration, Any] = {}
        self._passes = passes_of(model.torch_model, model.source)
        self._longest = max_positions(model.torch_model)
        self._vocabulary = prompt_vocabulary(model.torch_model.config)
        decoder_config = model.torch_model.config.get_text_config(decoder=True)
        self._border = stable_positions_in(decoder_config) if self._passes.pads_left else None

    @property
    def num_traces(self) -> int:
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())

    def options(self, **options: Unpack[XlaGenerationOptions]) -> XlaGeneration:
        """Return the options, completed by the model's generation_config.json. Raise RequestError for a wrong option."""
        complete = read_options(self._defaults, options)
        vocabulary = int(self.model.torch_model.config.get_text_config(decoder=True).vocab_size)
        check_token_ids({name: getattr(complete, name) for name in TOKEN_OPTIONS}, options, vocabulary)
        return complete

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[XlaGenerationOptions]) -> list[list[int]]:
        """Return the new token ids of each prompt of token ids, up to the end of its text."""
        request = self.options(**options)
        tokens: dict[int, list[int]] = dict(self.generate_each(prompts, request))
        return [tokens[index] for index in range(len(prompts))]

    def generate_each(
        self, prompts: Sequence[Sequence[int]], options: XlaGeneration, *, first: int = 0
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of each prompt with its new tokens, group by group.

        ``first``: the index of the first of these prompts among all, which the random draws depend on."""
        self.check(prompts, options, first=first)
        rows = min(len(prompts), MAX_ROWS)
        for indices in self._separate([len(prompt) for prompt in prompts], options):
            group_options = self._options_for(len(prompts[indices[0]]), options)
            for group in group_prompts([len(prompts[index]) for index in indices], rows=rows, multiple=self._multiple):
                members = [indices[index] for index in group.indices]
                # A group is filled up with its last prompt, which adds no steps.
                full = (*members, *[members[-1]] * (rows - len(members)))
                draws = [first + index for index in full]
                tokens = self._run([prompts[index] for index in full], draws, group.width, group_options)
                for index, row in zip(members, tokens, strict=False):
                    yield index, _cut_at_end(row.tolist(), group_options)

    def _separate(self, lengths: Sequence[int], options: XlaGeneration) -> list[list[int]]:
        """Return the indices of prompts by what they may share a program's run with.

        The longest row decides by which factors longrope rotates all rows, so its two sides are apart. With ``max_length``, the
        options depend on the length of the prompt."""
        apart: dict[tuple[bool, XlaGeneration], list[int]] = {}
        for index, length in enumerate(lengths):
            apart.setdefault((self._is_beyond(length), self._options_for(length, options)), []).append(index)
        return list(apart.values())

    def _options_for(self, length: int, options: XlaGeneration) -> XlaGeneration:
        """Return the options for a prompt of ``length`` tokens."""
        return options.for_prompt(length, has_encoder=not self._passes.pads_left)

    def _is_beyond(self, length: int) -> bool:
        """Return whether longrope rotates all tokens of a prompt by its factors for long texts."""
        return self._border is not None and length > self._border

    def warm_up(self, *, width: int, rows: int = 1, **options: Unpack[XlaGenerationOptions]) -> CompiledShape:
        """Compile the program for prompts of up to ``width`` tokens, before it is needed."""
        request = self._options_for(width, self.options(**options))
        (group,) = group_prompts([width], rows=1, multiple=self._multiple)
        num_compiled = len(self.compiled)
        self._run([[0]] * rows, list(range(rows)), group.width, request)
        if len(self.compiled) > num_compiled:
            return self.compiled[num_compiled]
        return self._shape(rows, group.width, request, 0.0)

    def _run(self, prompts: Sequence[Sequence[int]], indices: Sequence[int], width: int, options: XlaGeneration) -> np.ndarray:
        function = self._function(options.program())
        ids, mask = _pad_prompts(prompts, width, pads_left=self._passes.pads_left)
        inputs = (tf.constant(ids), tf.constant(mask), _draw_sampling(options, indices))
        traces_before = self.num_traces
        start = time.perf_counter()
        tokens: np.ndarray = function(*inputs).numpy()
        if self.num_traces > traces_before:
            self.compiled.append(self._shape(len(ids), width, options, time.perf_counter() - start))
        return tokens

    @staticmethod
    def _shape(rows: int, width: int, options: XlaGeneration, seconds: float) -> CompiledShape:
        return CompiledShape(rows=rows, width=width, max_new_tokens=options.max_new_tokens, seconds=seconds)

    def _function(self, program: XlaGeneration) -> Any:
        if program not in self._functions:
            self._functions[program] = tf.function(self.traced(program), jit_compile=True, autograph=False)
        return self._functions[program]

    def traced(self, program: XlaGeneration) -> Callable[..., Any]:
        """Return the function that TensorFlow traces: from ids, mask and sampling inputs to tokens."""
        fill = program.eos_token_id[0] if program.eos_token_id else 0

        def run(ids: Any, mask: Any, sampling: Sampling) -> Any:
            return generate_tokens(self._passes, program, fill, self.model.weights, ids, mask, sampling)

        return run

    def check(self, prompts: Sequence[Sequence[int]], options: XlaGeneration, *, first: int = 0) -> None:
        """Raise RequestError for a prompt that is empty, too long, or has tokens that the model does not have.

        ``first``: the index of the first of these prompts among all, for the message."""
        for number, prompt in enumerate(prompts, start=first + 1):
            if not len(prompt):
                raise RequestError(f"prompt {number} is empty; write what the text begins with")
            check_prompt_ids(prompt, f"prompt {number}", self._vocabulary, self.model.source.reference)
            max_length = options.max_length
            if max_length is not None and max_length <= (len(prompt) if self._passes.pads_left else 1):
                raise RequestError(
                    f"prompt {number} has {len(prompt):,} tokens, and max_length={max_length} has no room for an answer; give "
                    "--max-new-tokens 128 (max_new_tokens=128 in Python), or a greater max_length"
                )
            max_new_tokens = self._options_for(len(prompt), options).max_new_tokens
            needed = max(len(prompt), max_new_tokens + 1)  # the encoder and the decoder count positions separately
            if self._passes.pads_left:
                needed = len(prompt) + max_new_tokens
            if self._longest is not None and needed > self._longest:
                raise RequestError(
                    f"prompt {number} has {len(prompt):,} tokens, with max_new_tokens={max_new_tokens:,} more than the "
                    f"{self._longest:,} positions of {self.model.source.reference!r}; shorten it, or ask for fewer tokens"
                )
            if self._border is not None:
                check_border(
                    len(prompt), max_new_tokens, self._border, shown=f"prompt {number} has {len(prompt):,} tokens",
                    length=f"max_new_tokens={max_new_tokens:,}", reference=self.model.source.reference,
                )  # fmt: skip


def passes_of(model: Any, source: ModelSource) -> Passes:
    """Return the passes of a model.

    Raise RequestError for a model that generates no text, or that computes another text if prompts are padded on the left or if
    it generates token by token."""
    if not model.can_generate():
        raise RequestError(f"{type(model).__name__} generates no text; give a causal language model or an encoder-decoder")
    if not model.config.is_encoder_decoder:
        isolation = isolation_of(source)
        if isolation.by_token:
            raise RequestError(
                f"{type(model).__name__} cannot generate token by token: {isolation.by_token}; use transformers' generate()"
            )
        if isolation.left_padding:  # every prompt is padded to the width of its program
            raise RequestError(
                f"{type(model).__name__} cannot generate by XLA, which pads prompts: {isolation.left_padding}; "
                "use upshift.Generator"
            )
        return DecoderOnly(model, lower)
    return EncoderDecoder(model, lower, start_token(source))


def _draw_sampling(options: XlaGeneration, indices: Sequence[int]) -> Sampling:
    """Draw the random numbers on the host, so that they are the same on every device and for every grouping of prompts."""
    draws = np.zeros((len(indices), options.max_new_tokens), np.float32)
    if options.do_sample:
        for row, index in enumerate(indices):
            draws[row] = np.random.default_rng((options.seed, index)).random(options.max_new_tokens)
    top_k = options.top_k or np.iinfo(np.int32).max
    return Sampling(
        tf.constant(options.temperature, tf.float32),
        tf.constant(top_k, tf.int32),
        tf.constant(options.top_p, tf.float32),
        tf.constant(np.minimum(draws, np.float32(LARGEST_DRAW))),
    )


def _pad_prompts(prompts: Sequence[Sequence[int]], width: int, *, pads_left: bool) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = np.zeros((2, len(prompts), width), np.int64)
    for number, prompt in enumerate(prompts):
        positions = slice(width - len(prompt), width) if pads_left else slice(len(prompt))
        ids[number, positions] = prompt
        mask[number, positions] = 1
    return ids, mask


def _cut_at_end(tokens: list[int], options: XlaGeneration) -> list[int]:
    end = next((position for position, token in enumerate(tokens) if token in options.eos_token_id), len(tokens) - 1)
    return tokens[: end + 1]


def generate(
    model: str | XlaModel, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Unpack[XlaGenerationOptions]
) -> list[Any]:
    """Return the new text of each prompt that is a text, or the new token ids of each prompt of token ids.

    Options have transformers' names. For several calls keep an XlaGenerator. Raise RequestError for a wrong option."""
    if isinstance(prompts, str):
        raise RequestError("generate() takes a list of prompts and was given one text; use generate(model, [text])")
    keep_programs()
    generator = XlaGenerator(build(model) if isinstance(model, str) else model)
    if not any(isinstance(prompt, str) for prompt in prompts):
        return generator.generate(prompts, **options)  # type: ignore[arg-type]
    texts = Prompts(generator.model.source)
    prompt_ids = texts.tokenize(list[Any](prompts))
    return [texts.decode(tokens) for tokens in generator.generate(prompt_ids, **options)]
