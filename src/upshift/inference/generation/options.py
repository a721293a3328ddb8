"""Define the options of generation by transformers' names, and read them: the user's options first, then those of the
model's generation_config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from upshift.errors import RequestError
from upshift.models.generation_config import FileDefaults, merge_options
from upshift.value import Value

USER_ONLY = ("prompt_lookup_num_tokens",)  # only from the user: it changes nothing but speed, and not every engine has it
DEFAULT_NEW_TOKENS = 128  # for an answer whose length neither the user nor the model's files limit
MIN_DIVISOR = 1e-6  # logits divided by a smaller number exceed fp32; files of models write it for 0
TOKEN_OPTIONS = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "eos_token_id",
)  # fmt: skip
TokenSequence = Annotated[tuple[int, ...], Field(min_length=1)]
Bias = tuple[TokenSequence, float]


class GenerationOptions(Value):
    """The options of generation.

    The sampled text of a prompt depends only on ``seed`` and on the prompt's position in the input, not on how prompts
    are batched."""

    max_new_tokens: int | None = Field(None, gt=0)  # None: nobody limits it; see ``new_tokens``
    max_length: int | None = Field(None, gt=0)  # tokens of prompt and answer together, unless max_new_tokens is set
    min_new_tokens: int = Field(0, ge=0)
    min_length: int = Field(0, ge=0)  # of prompt and answer; behind an encoder, the decoder's first token is the prompt
    do_sample: bool = False
    temperature: float = Field(1.0, ge=MIN_DIVISOR)
    top_k: int = Field(50, ge=0)  # transformers' default for sampling; 0: all tokens
    top_p: float = Field(1.0, gt=0, le=1)
    top_h: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    epsilon_cutoff: float = Field(0.0, ge=0, lt=1)
    eta_cutoff: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, ge=MIN_DIVISOR)
    encoder_repetition_penalty: float = Field(1.0, ge=MIN_DIVISOR)  # raises the scores of the prompt's tokens
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # OpenAI's, like presence_penalty
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    sequence_bias: tuple[Bias, ...] = ()  # for a token, or for the last token of a sequence after the others
    no_repeat_ngram_size: int = Field(0, ge=0)
    encoder_no_repeat_ngram_size: int = Field(0, ge=0)  # n-grams of the prompt do not occur in the answer
    bad_words_ids: tuple[TokenSequence, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()  # not as the first token of the answer
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None  # after how many tokens it begins, and its factor
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    stop_strings: tuple[str, ...] = ()  # the text ends with the stop string that was found
    eos_token_id: tuple[int, ...] = ()
    seed: int = Field(0, ge=0)
    prompt_lookup_num_tokens: int | None = Field(None, gt=0)  # maximum tokens of a guess

    @property
    def new_tokens(self) -> int:
        """Return the most tokens of an answer: ``max_new_tokens``, or the default."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens


def read_options(defaults: FileDefaults, arguments: Mapping[str, Any]) -> GenerationOptions:
    """Return the user's options, completed by those of the model's files.

    Raise RequestError for a name or a value that is not possible, and name what is possible."""
    return merge_options(GenerationOptions, defaults, arguments, user_only=USER_ONLY)


def check_tokens(options: GenerationOptions, arguments: Mapping[str, Any], vocabulary: int) -> None:
    """Raise RequestError for token ids that are not below ``vocabulary``.

    ``arguments`` are the user's options. The eos_token_id of a model's file may have such ids."""
    token_options = {name: getattr(options, name) for name in TOKEN_OPTIONS}
    biased = tuple(ids for ids, _ in options.sequence_bias)
    check_token_ids({"sequence_bias": biased, **token_options}, arguments, vocabulary)
    if options.bad_words_ids and {*options.bad_words_ids} <= {(token,) for token in options.eos_token_id}:
        raise RequestError("bad_words_ids has nothing but the token that ends a text; ask for min_new_tokens, or for other words")
    if options.exponential_decay_length_penalty is not None and not options.eos_token_id:
        raise RequestError(
            "exponential_decay_length_penalty raises the score of the token that ends a text, and the model names none; give "
            "eos_token_id, or leave it out"
        )


def check_token_ids(options: Mapping[str, Any], arguments: Mapping[str, Any], vocabulary: int) -> None:
    """Raise RequestError if an option, by its name, has a token id that is not below ``vocabulary``.

    ``arguments`` are the user's options. The eos_token_id of a model's file may have such ids."""
    for name, value in options.items():
        unknown = [token for token in _flatten(value) if not 0 <= token < vocabulary]
        if unknown and (name in arguments or name != "eos_token_id"):
            raise RequestError(
                f"{name} has {unknown[0]}, which is no token of the model; give some of 0 to {vocabulary - 1:,}, as it has "
                f"{vocabulary} tokens"
            )


def _flatten(value: Any) -> Iterator[int]:
    """Yield the token ids of an option: one id, a tuple of ids, or a tuple of such tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _flatten(item)
    elif value is not None:
        yield value
