"""Generate text of any Hugging Face model that generates, by programs that XLA compiles whole.

Define ``upshift.xla.generate``: the one call. Programs that were compiled before are found again.

Choose which prompts are generated together, and how wide. Shapes are few, as each compiles a program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from upshift.errors import RequestError
from upshift.models.describe import max_positions
from upshift.models.generation_config import start_token
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource
from upshift.value import Value
from upshift.xla.generation.options import XlaGeneration, read_options
from upshift.xla.generation.passes import DecoderOnly, EncoderDecoder
from upshift.xla.generation.program import Passes, generate_tokens
from upshift.xla.generation.sampling import Sampling
from upshift.xla.lowering.program import lower
from upshift.xla.model import XlaModel, build
from upshift.xla.tensorflow import keep_programs

NARROWEST = 32
MANY = 8  # prompts at once


class Group(NamedTuple):
    places: tuple[int, ...]  # of its prompts, among all
    width: int


def width_of(length: int, *, multiple: int | None) -> int:
    """Return a power of two from 32 on, so that any lengths need few programs, or the next multiple."""
    if multiple is not None:
        return -(-length // multiple) * multiple
    return max(NARROWEST, 1 << (length - 1).bit_length())


def groups(lengths: Sequence[int], *, rows: int, multiple: int | None = None) -> Iterator[Group]:
    """Return groups of at most ``rows`` prompts of one width. A width of few prompts joins the next one that there
    is, so that no program is compiled for less than a group."""
    by_width: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_width.setdefault(width_of(length, multiple=multiple), []).append(place)
    waiting: list[int] = []
    widths = sorted(by_width)
    for width in widths:
        waiting += by_width[width]
        whole = len(waiting) // rows * rows if width != widths[-1] else len(waiting)
        for start in range(0, whole, rows):
            yield Group(tuple(waiting[start : min(start + rows, whole)]), width)
        waiting = waiting[whole:]


BELOW_ONE = 1.0 - 2.0**-23  # a draw times a sum stays below that sum in fp32


class CompiledShape(Value):
    """The shape of one program. ``seconds`` is the time of its first call, with export, tracing and compilation."""

    rows: int
    width: int
    max_new_tokens: int
    seconds: float


class XlaGenerator:
    """``model``: as upshift.xla.model gives it. ``pad_to_multiple_of``: of prompts; None: to powers of two from 32 on.

    ``compiled``: the programs so far, and ``num_traces`` how often TensorFlow traced: the same number, or shapes changed that
    should not have.
    """

    def __init__(self, model: XlaModel, *, pad_to_multiple_of: int | None = None) -> None:
        self.model = model
        self.compiled: list[CompiledShape] = []
        self._multiple = pad_to_multiple_of
        self._functions: dict[XlaGeneration, Any] = {}
        self._passes = passes_of(model.torch_model, model.source)
        self._longest = max_positions(model.torch_model)

    @property
    def num_traces(self) -> int:
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())

    def options(self, **given: Any) -> XlaGeneration:
        return read_options(self.model.source, given, decodes_beside=not self._passes.left)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Return the token ids of each text behind its prompt of token ids, up to its end. ``options`` are
        XlaGeneration's, by transformers' names."""
        asked = self.options(**options)
        found: dict[int, list[int]] = dict(self.generate_each(prompts, asked))
        return [found[place] for place in range(len(prompts))]

    def generate_each(
        self, prompts: Sequence[Sequence[int]], options: XlaGeneration, *, first: int = 0
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield places of prompts with their texts, as they are done. ``first`` is the place of the first of them
        among all."""
        self._check(prompts, options)
        rows = min(len(prompts), MANY)
        for group in groups([len(prompt) for prompt in prompts], rows=rows, multiple=self._multiple):
            full = (*group.places, *[group.places[-1]] * (rows - len(group.places)))  # one more of a row ends when it does
            tokens = self._run([prompts[place] for place in full], [first + place for place in full], group.width, options)
            for place, row in zip(group.places, tokens, strict=False):
                yield place, _text(row.tolist(), options)

    def warm_up(self, *, width: int, rows: int = 1, **options: Any) -> CompiledShape:
        """Compile for prompts of up to ``width`` tokens before the first of them comes."""
        asked = self.options(**options)
        (group,) = groups([width], rows=1, multiple=self._multiple)
        known = len(self.compiled)
        self._run([[0]] * rows, list(range(rows)), group.width, asked)
        return self.compiled[known] if len(self.compiled) > known else self._shape(rows, group.width, asked, 0.0)

    def _run(self, prompts: Sequence[Sequence[int]], places: Sequence[int], width: int, options: XlaGeneration) -> np.ndarray:
        function = self._function(options.program())
        ids, mask = _padded(prompts, width, left=self._passes.left)
        inputs = (tf.constant(ids), tf.constant(mask), _sampling(options, places))
        before = self.num_traces
        start = time.perf_counter()
        tokens: np.ndarray = function(*inputs).numpy()
        if self.num_traces > before:
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
        fill = program.eos_token_id[0] if program.eos_token_id else 0

        def run(ids: Any, mask: Any, sampling: Sampling) -> Any:
            return generate_tokens(self._passes, program, fill, self.model.weights, ids, mask, sampling)

        return run

    def _check(self, prompts: Sequence[Sequence[int]], options: XlaGeneration) -> None:
        """Raise RequestError for a prompt that is empty, or too long for the model."""
        for number, prompt in enumerate(prompts, start=1):
            if not len(prompt):
                raise RequestError(f"prompt {number} is empty; write what the text begins with")
            new = options.max_new_tokens
            needed = len(prompt) + new if self._passes.left else max(len(prompt), new + 1)  # an encoder has its own positions
            if self._longest is not None and needed > self._longest:
                raise RequestError(
                    f"prompt {number} has {len(prompt):,} tokens, with max_new_tokens={new:,} more than the {self._longest:,} "
                    f"positions of {self.model.source.reference!r}; shorten it, or ask for fewer tokens"
                )


def passes_of(model: Any, source: ModelSource) -> Passes:
    """Return the passes of a model. Raise RequestError for a model that generates no text, or another one with padding before its
    prompt or token by token (models/isolation/check.py)."""
    if not model.can_generate():
        raise RequestError(f"{type(model).__name__} generates no text; give a causal language model or an encoder-decoder")
    if not model.config.is_encoder_decoder:
        isolation = isolation_of(source)
        if isolation.by_token:
            raise RequestError(
                f"{type(model).__name__} cannot generate token by token: {isolation.by_token}; use transformers' generate()"
            )
        if isolation.left_padding:  # every prompt is padded to the width of a program
            raise RequestError(
                f"{type(model).__name__} cannot generate by XLA, which pads prompts: {isolation.left_padding}; "
                "use upshift.Generator"
            )
        return DecoderOnly(model, lower)
    return EncoderDecoder(model, lower, start_token(source))


def _sampling(options: XlaGeneration, places: Sequence[int]) -> Sampling:
    """Make the random draws on the host: they are the same on every device, however prompts are batched."""
    draws = np.zeros((len(places), options.max_new_tokens), np.float32)
    if options.do_sample:
        for row, place in enumerate(places):
            draws[row] = np.random.default_rng((options.seed, place)).random(options.max_new_tokens)
    top_k = options.top_k or np.iinfo(np.int32).max
    return Sampling(
        tf.constant(options.temperature, tf.float32), tf.constant(top_k, tf.int32), tf.constant(options.top_p, tf.float32),
        tf.constant(np.minimum(draws, np.float32(BELOW_ONE))),
    )  # fmt: skip


def _padded(prompts: Sequence[Sequence[int]], width: int, *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = np.zeros((2, len(prompts), width), np.int64)
    for number, prompt in enumerate(prompts):
        places = slice(width - len(prompt), width) if left else slice(len(prompt))
        ids[number, places] = prompt
        mask[number, places] = 1
    return ids, mask


def _text(tokens: list[int], options: XlaGeneration) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in options.eos_token_id), len(tokens) - 1)
    return tokens[: end + 1]


def generate(model: str | XlaModel, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """Return texts behind prompts that are texts, or token ids behind token ids. ``options`` have transformers'
    names, such as max_new_tokens, do_sample, temperature, top_k, top_p, num_beams, seed. For several calls keep an
    XlaGenerator."""
    if isinstance(prompts, str):
        raise RequestError("generate() takes a list of prompts and was given one text; use generate(model, [text])")
    keep_programs()
    generator = XlaGenerator(build(model) if isinstance(model, str) else model)
    if not any(isinstance(prompt, str) for prompt in prompts):
        return generator.generate(prompts, **options)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(generator.model.source.directory)
    found = generator.generate([tokenizer(prompt).input_ids for prompt in prompts], **options)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
