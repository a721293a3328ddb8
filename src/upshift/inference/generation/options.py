"""Read how text is chosen, by transformers' own names: the user's options, and else those of the model's
generation_config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from upshift.errors import RequestError
from upshift.models.generation_config import merge_options, unused_options
from upshift.models.source import ModelSource
from upshift.value import Value

ONLY_ASKED = ("prompt_lookup_num_tokens",)  # changes speed alone, and one engine has it
LEAST = 1e-6  # of what logits are divided by, which files of models say for 0: less gives numbers that fp32 does not have
TOKENS = ("bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "eos_token_id")
Words = Annotated[tuple[int, ...], Field(min_length=1)]
Bias = tuple[Words, float]


class GenerationOptions(Value):
    """The options of generation. The text of a prompt depends on ``seed`` and on the prompt's place alone, however
    prompts are batched."""

    max_new_tokens: int = Field(128, gt=0)
    min_new_tokens: int = Field(0, ge=0)
    min_length: int = Field(0, ge=0)  # with the prompt, or with the token that a decoder beside an encoder starts with
    do_sample: bool = False
    temperature: float = Field(1.0, ge=LEAST)
    top_k: int = Field(50, ge=0)  # transformers' own default of sampling; 0: all
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    epsilon_cutoff: float = Field(0.0, ge=0, lt=1)
    eta_cutoff: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, ge=LEAST)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # OpenAI's, as the next one
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    sequence_bias: tuple[Bias, ...] = ()  # of tokens, or of the last one of several, behind the others
    no_repeat_ngram_size: int = Field(0, ge=0)
    bad_words_ids: tuple[Words, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()  # the text ends with the one that was met
    eos_token_id: tuple[int, ...] = ()
    seed: int = Field(0, ge=0)
    prompt_lookup_num_tokens: int | None = Field(None, gt=0)  # most that are guessed at once (lookup.py)


def read_options(source: ModelSource, given: Mapping[str, Any]) -> GenerationOptions:
    """Return the options. Raise RequestError for a name or a value that is not possible, with what is possible."""
    return merge_options(GenerationOptions, source, given, user_only=ONLY_ASKED)


def check_tokens(options: GenerationOptions, given: Mapping[str, Any], vocabulary: int) -> None:
    """Raise RequestError for tokens that the model does not have. Files of models may name such ends. ``given`` are
    the user's options."""
    biased = tuple(words for words, _ in options.sequence_bias)
    for name, said in (("sequence_bias", biased), *((name, getattr(options, name)) for name in TOKENS)):
        wrong = [token for token in _tokens(said) if not 0 <= token < vocabulary]
        if wrong and (name in given or name != "eos_token_id"):
            raise RequestError(f"{name} has {wrong[0]}, which is no token of the model; give some of 0 to {vocabulary - 1:,}")
    if options.bad_words_ids and {*options.bad_words_ids} <= {(end,) for end in options.eos_token_id}:
        raise RequestError("bad_words_ids has nothing but the token that ends a text; ask for min_new_tokens, or for other words")


def _tokens(said: Any) -> Iterator[int]:
    """Yield the tokens of one, of several, or of several words."""
    if isinstance(said, tuple):
        for part in said:
            yield from _tokens(part)
    elif said is not None:
        yield said


def unused(source: ModelSource, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of generation_config.json that Upshift does not apply: beams, other processors. ``given``
    are the user's options."""
    return unused_options(GenerationOptions, source, given)
