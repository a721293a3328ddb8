"""Keep a text that is being generated: its tokens so far, how the next one is chosen, and when it ends.

Lower the logits of tokens that a text has already: OpenAI's two penalties, which transformers does not have.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as process

from upshift.inference.generation.grammar import Grammar
from upshift.inference.generation.options import GenerationOptions


class SaidPenalty(LogitsProcessor):
    """A penalty on every token of the answer so far: ``frequency`` for each time that it came, ``presence`` once
    (OpenAI, "Frequency and presence penalties"). ``prompt_length`` is the number of tokens before the answer, which
    do not count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self._frequency, self._presence, self._before = frequency, presence, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores [1, V] from input_ids [1, T] and scores [1, V]."""
        counts = torch.bincount(input_ids[0, self._before :], minlength=scores.shape[-1])
        lowered = scores - self._frequency * counts - self._presence * (counts > 0)
        return cast("torch.FloatTensor", lowered)  # torch types what operators give as Tensor


Ending = Literal["eos", "stop", "length"]
STOP_TOKENS = 8  # beside the bytes of the longest stop string, a token each at most: tokens are decoded with some before them


class GeneratedSequence:
    """A text that is being generated.

    ``place``: the position of its prompt in the input. ``tokenizer``: to look for stop strings in the text.
    ``start``: the first token of a decoder beside an encoder. None: the text goes on from the prompt. ``grammar``:
    the form that the text keeps to."""

    def __init__(
        self,
        place: int,
        prompt: list[int],
        options: GenerationOptions,
        tokenizer: Any,
        *,
        start: int | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.place, self.prompt, self.options = place, prompt, options
        self._before = prompt if start is None else [start]
        self.tokens: list[int] = []
        self.computed = 0  # tokens of the prompt, of an engine that mixes
        self.ending: Ending | None = None
        self._tokenizer, self._grammar = tokenizer, grammar
        self._processors = processors(options, len(self._before))
        self._generator = _generator(options.seed, place) if options.do_sample else None
        self._stop_tokens = max((len(stop.encode()) for stop in options.stop_strings), default=0) + STOP_TOKENS

    @property
    def plain(self) -> bool:
        """Return whether the next token is simply the likeliest one."""
        return not self._processors and self._generator is None and self._grammar is None

    @property
    def left(self) -> int:
        """Return how many more tokens the text may have."""
        return self.options.max_new_tokens - len(self.tokens)

    @property
    def pending(self) -> int:
        """Return the number of the prompt's tokens that are still to be computed."""
        return len(self.prompt) - self.computed

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token from logits [V] fp32."""
        if self._grammar is not None:
            logits = self._grammar.allowed(logits)
        ids: Any = torch.tensor([self._before + self.tokens])
        scores: torch.Tensor = self._processors(ids, torch.from_numpy(logits[None].copy()))
        if self._generator is None:
            return int(scores.argmax() if scores.max().isfinite() else logits.argmax())
        shares = scores.softmax(-1)
        if not shares.isfinite().all():  # nothing is left to draw from, or a number is beyond fp32
            return int(logits.argmax())
        return int(torch.multinomial(shares, 1, generator=self._generator))

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.options.eos_token_id:
            self.ending = "eos"
        elif self._grammar_ends(token) or (self.options.stop_strings and self._stops()):
            self.ending = "stop"
        elif len(self.tokens) >= self.options.max_new_tokens:
            self.ending = "length"

    def _grammar_ends(self, token: int) -> bool:
        return self._grammar is not None and self._grammar.ends_with(token)

    def _stops(self) -> bool:
        tail = self._tokenizer.decode(self.tokens[-self._stop_tokens :])
        return any(stop in tail for stop in self.options.stop_strings)


def _generator(seed: int, place: int) -> torch.Generator:
    """Return a generator that depends on both numbers. Torch itself takes only the lower 32 bits of a seed."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, place)).generate_state(1)[0]))


def processors(options: GenerationOptions, prompt_length: int) -> LogitsProcessorList:
    """Return the processors in transformers' own order (GenerationMixin._get_logits_processor and, for sampling, its
    warpers)."""
    found = LogitsProcessorList()
    if options.sequence_bias:
        found.append(process.SequenceBiasLogitsProcessor([[list(words), bias] for words, bias in options.sequence_bias]))
    if options.repetition_penalty != 1.0:
        found.append(process.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.frequency_penalty or options.presence_penalty:
        found.append(SaidPenalty(options.frequency_penalty, options.presence_penalty, prompt_length))
    if options.no_repeat_ngram_size:
        found.append(process.NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.bad_words_ids:
        words = [list(word) for word in options.bad_words_ids]
        found.append(process.NoBadWordsLogitsProcessor(words, list(options.eos_token_id) or None))
    ends = list(options.eos_token_id)
    if options.min_length and not options.min_new_tokens and ends:
        found.append(process.MinLengthLogitsProcessor(options.min_length, ends))
    if options.min_new_tokens and ends:
        found.append(process.MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, ends))
    if options.forced_bos_token_id is not None:
        found.append(process.ForcedBOSTokenLogitsProcessor(options.forced_bos_token_id))
    if options.forced_eos_token_id is not None:
        found.append(process.ForcedEOSTokenLogitsProcessor(prompt_length + options.max_new_tokens, options.forced_eos_token_id))
    if options.suppress_tokens:
        found.append(process.SuppressTokensLogitsProcessor(list(options.suppress_tokens)))
    if options.do_sample:
        found.extend(_warpers(options))
    return found


def _warpers(options: GenerationOptions) -> list[Any]:
    found: list[Any] = []
    if options.temperature != 1.0:
        found.append(process.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        found.append(process.TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        found.append(process.TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        found.append(process.MinPLogitsWarper(options.min_p))
    if options.typical_p < 1.0:
        found.append(process.TypicalLogitsWarper(options.typical_p))
    if options.epsilon_cutoff:
        found.append(process.EpsilonLogitsWarper(options.epsilon_cutoff))
    if options.eta_cutoff:
        found.append(process.EtaLogitsWarper(options.eta_cutoff))
    return found
