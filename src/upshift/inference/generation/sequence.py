"""Define a text that is being generated: its tokens so far, how its next token is chosen, and when it ends.

The end of the file lists the processors of logits: transformers' own, and OpenAI's two penalties, which transformers does
not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as process

from upshift.inference.generation.grammar import Form, TokenGuide
from upshift.inference.generation.options import GenerationOptions

Ending = Literal["eos", "stop", "length"]
# Stop strings are searched in this many last tokens beside the bytes of the longest one, which has at most a token per byte. The
# extra tokens are decoded before it, so that its first characters are whole.
STOP_CONTEXT_TOKENS = 8


class GeneratedSequence:
    """A text that is being generated.

    ``index``: the position of its prompt in the input.
    ``tokenizer``: decodes the text to search for stop strings.
    ``start``: the first token of a decoder beside an encoder. None: the text continues the prompt.
    ``grammar``: the grammar that the text must match.
    ``scores_prompt``: the prompt is computed token by token, because the logits before each of its tokens are wanted."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        options: GenerationOptions,
        tokenizer: Any,
        *,
        start: int | None = None,
        grammar: TokenGuide | None = None,
        scores_prompt: bool = False,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.options = options
        self.tokens: list[int] = []
        self.scores_prompt = scores_prompt
        self.computed = 0  # tokens of the prompt that an engine that mixes has computed, or any engine if the prompt is scored
        self.ending: Ending | None = None
        self._decoder_prompt = prompt if start is None else [start]
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._processors = logits_processors(options, prompt, self._decoder_prompt)
        self._random = _random_generator(options.seed, index) if options.do_sample else None
        self._stop_tokens = max((len(stop.encode()) for stop in options.stop_strings), default=0) + STOP_CONTEXT_TOKENS

    @property
    def is_greedy(self) -> bool:
        """Return whether the next token is simply the likeliest one."""
        return not self._processors and self._random is None and self._grammar is None

    @property
    def form(self) -> Form | None:
        """Return the form that the text has to keep to, for an engine that takes whole requests."""
        return None if self._grammar is None else self._grammar.form

    @property
    def tokens_left(self) -> int:
        """Return how many more tokens the text may have."""
        return self.options.new_tokens - len(self.tokens)

    @property
    def pending_tokens(self) -> int:
        """Return the number of the prompt's tokens that are still to be computed."""
        return len(self.prompt) - self.computed

    @property
    def is_scoring(self) -> bool:
        """Return whether the next logits are those before a token of the prompt."""
        return self.scores_prompt and self.pending_tokens > 0

    def take_input(self) -> int:
        """Return the token that the engine computes next, in a pass that computes one token of each row."""
        if not self.is_scoring:
            return self.tokens[-1] if self.tokens else self.prompt[-1]
        self.computed += 1
        return self.prompt[self.computed - 1]

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token from logits [V] fp32."""
        if self._grammar is not None:
            logits = self._grammar.mask(logits)
        ids: Any = torch.tensor([self._decoder_prompt + self.tokens])
        scores: torch.Tensor = self._processors(ids, torch.from_numpy(logits[None].copy()))
        if self._random is None:
            return int(scores.argmax() if scores.max().isfinite() else logits.argmax())
        probabilities = scores.softmax(-1)
        if not probabilities.isfinite().all():  # no token is allowed, or a number is too large for fp32
            return int(logits.argmax())
        return int(torch.multinomial(probabilities, 1, generator=self._random))

    def add(self, token: int) -> None:
        """Append a token, and set ``ending`` if the text ends with it."""
        self.tokens.append(token)
        if token in self.options.eos_token_id:
            self.ending = "eos"
        elif self._ends_grammar(token) or (self.options.stop_strings and self._ends_with_stop()):
            self.ending = "stop"
        elif len(self.tokens) >= self.options.new_tokens:
            self.ending = "length"

    def _ends_grammar(self, token: int) -> bool:
        return self._grammar is not None and self._grammar.accept(token)

    def _ends_with_stop(self) -> bool:
        tail = self._tokenizer.decode(self.tokens[-self._stop_tokens :])
        return any(stop in tail for stop in self.options.stop_strings)


def _random_generator(seed: int, index: int) -> torch.Generator:
    """Return a random generator that depends on both numbers. Torch itself uses only the lower 32 bits of a seed."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, index)).generate_state(1)[0]))


def logits_processors(options: GenerationOptions, prompt: Sequence[int], decoder_prompt: Sequence[int]) -> LogitsProcessorList:
    """Return the processors in transformers' own order (GenerationMixin._get_logits_processor and, for sampling, its
    warpers).

    ``prompt``: the tokens that an encoder reads, or else the decoder. ``decoder_prompt``: the tokens before the answer."""
    processors = LogitsProcessorList()
    if options.sequence_bias:
        processors.append(process.SequenceBiasLogitsProcessor([[list(ids), bias] for ids, bias in options.sequence_bias]))
    processors.extend(_repetition_processors(options, prompt, len(decoder_prompt)))
    processors.extend(_end_processors(options, len(decoder_prompt)))
    if options.suppress_tokens:
        processors.append(process.SuppressTokensLogitsProcessor(list(options.suppress_tokens)))
    if options.begin_suppress_tokens:
        follows_forced = len(decoder_prompt) == 1 and options.forced_bos_token_id is not None
        begin = len(decoder_prompt) + follows_forced
        processors.append(process.SuppressTokensAtBeginLogitsProcessor(list(options.begin_suppress_tokens), begin))
    if options.do_sample:
        processors.extend(_warpers(options))
    if options.renormalize_logits:
        processors.append(process.LogitNormalization())
    return processors


def _repetition_processors(options: GenerationOptions, prompt: Sequence[int], prompt_length: int) -> list[Any]:
    """Return the processors of tokens that occurred before, or that must not occur."""
    processors: list[Any] = []
    prompt_ids: Any = torch.tensor([list(prompt)])
    if options.encoder_repetition_penalty != 1.0:
        processors.append(process.EncoderRepetitionPenaltyLogitsProcessor(options.encoder_repetition_penalty, prompt_ids))
    if options.repetition_penalty != 1.0:
        processors.append(process.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.frequency_penalty or options.presence_penalty:
        processors.append(FrequencyPresencePenalty(options.frequency_penalty, options.presence_penalty, prompt_length))
    if options.no_repeat_ngram_size:
        processors.append(process.NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.encoder_no_repeat_ngram_size:
        processors.append(process.EncoderNoRepeatNGramLogitsProcessor(options.encoder_no_repeat_ngram_size, prompt_ids))
    if options.bad_words_ids:
        bad_words = [list(ids) for ids in options.bad_words_ids]
        processors.append(process.NoBadWordsLogitsProcessor(bad_words, list(options.eos_token_id) or None))
    return processors


def _end_processors(options: GenerationOptions, prompt_length: int) -> list[Any]:
    """Return the processors of the first and the last token of a text."""
    processors: list[Any] = []
    eos_ids = list(options.eos_token_id)
    if options.min_length and not options.min_new_tokens and eos_ids:
        processors.append(process.MinLengthLogitsProcessor(options.min_length, eos_ids))
    if options.min_new_tokens and eos_ids:
        processors.append(process.MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, eos_ids))
    if options.forced_bos_token_id is not None:
        processors.append(process.ForcedBOSTokenLogitsProcessor(options.forced_bos_token_id))
    if options.forced_eos_token_id:
        max_length = prompt_length + options.new_tokens
        processors.append(process.ForcedEOSTokenLogitsProcessor(max_length, list(options.forced_eos_token_id)))
    if options.remove_invalid_values:
        processors.append(process.InfNanRemoveLogitsProcessor())
    if options.exponential_decay_length_penalty is not None:
        penalty = options.exponential_decay_length_penalty
        processors.append(process.ExponentialDecayLengthPenalty(penalty, eos_ids, prompt_length))
    return processors


def _warpers(options: GenerationOptions) -> list[Any]:
    """Return the processors that only sampling uses."""
    warpers: list[Any] = []
    if options.temperature != 1.0:
        warpers.append(process.TemperatureLogitsWarper(options.temperature))
    if options.top_h is not None:
        warpers.append(process.TopHLogitsWarper(options.top_h))
    if options.top_k:
        warpers.append(process.TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        warpers.append(process.TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        warpers.append(process.MinPLogitsWarper(options.min_p))
    if options.typical_p < 1.0:
        warpers.append(process.TypicalLogitsWarper(options.typical_p))
    if options.epsilon_cutoff:
        warpers.append(process.EpsilonLogitsWarper(options.epsilon_cutoff))
    if options.eta_cutoff:
        warpers.append(process.EtaLogitsWarper(options.eta_cutoff))
    return warpers


class FrequencyPresencePenalty(LogitsProcessor):
    """Lower the scores of tokens that the answer has already (OpenAI, "Frequency and presence penalties").

    ``frequency`` is subtracted for each occurrence, ``presence`` once. ``prompt_length`` is the number of tokens before the
    answer, which do not count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self._frequency = frequency
        self._presence = presence
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores [1, V] from input_ids [1, T] and scores [1, V]."""
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1])
        lowered = scores - self._frequency * counts - self._presence * (counts > 0)
        return cast("torch.FloatTensor", lowered)  # torch types the results of operators as Tensor
