"""Define the options of generation under XLA, by transformers' names, and which of them need another compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pydantic import Field

from upshift.errors import RequestError
from upshift.models.generation_config import FileDefaults, merge_options
from upshift.value import Value

TOKEN_OPTIONS = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "eos_token_id")
INPUTS = ("temperature", "top_k", "top_p", "seed")  # inputs of a program: changing them compiles nothing
OF_BEAMS = ("length_penalty", "early_stopping")  # read only by a search with beams


class XlaGeneration(Value):
    """Hold the options of generation. Sampled texts depend on ``seed`` and the prompt's index, not on the grouping of prompts."""

    max_new_tokens: int = Field(128, gt=0)
    max_length: int | None = Field(None, gt=0)  # replaces max_new_tokens; see ``for_prompt``
    min_new_tokens: int = Field(0, ge=0)
    do_sample: bool = False
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(50, ge=0)  # transformers' default; 0: all tokens
    top_p: float = Field(1.0, gt=0, le=1)
    num_beams: int = Field(1, gt=0)
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    seed: int = Field(0, ge=0)

    def for_prompt(self, length: int, *, has_encoder: bool) -> XlaGeneration:
        """Return the options for a prompt of ``length`` tokens, without ``max_length``.

        ``max_length`` counts the prompt and the answer, or with an encoder the decoder's start token and the answer. transformers
        forces the second token of a text, which most prompts of a decoder already have."""
        before = 1 if has_encoder else length
        changed: dict[str, Any] = {}
        if self.max_length is not None:
            changed = {"max_new_tokens": max(self.max_length - before, 1), "max_length": None}
        if before != 1 and self.forced_bos_token_id is not None:
            changed["forced_bos_token_id"] = None
        return self.changed(**changed) if changed else self

    def program(self) -> XlaGeneration:
        """Return these options with defaults in place of the program's inputs, and of what it does not read.

        The results are equal for all options of one program."""
        names = INPUTS if self.num_beams > 1 else (*INPUTS, *OF_BEAMS)
        plain: dict[str, Any] = {name: type(self).model_fields[name].default for name in names}
        return self.changed(**plain)


class XlaGenerationOptions(TypedDict, total=False):
    """Hold the fields of XlaGeneration as a user may give them. None stands for the model's own value."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    suppress_tokens: Sequence[int] | None
    eos_token_id: int | Sequence[int] | None
    seed: int | None


def read_options(defaults: FileDefaults, requested: Mapping[str, Any]) -> XlaGeneration:
    """Return the requested options, completed by those of the model's files.

    Raise RequestError for a name or a value that is not possible."""
    options = merge_options(XlaGeneration, defaults, requested)
    if options.num_beams > 1 and options.do_sample:
        raise RequestError("num_beams over 1 searches and do_sample draws; ask for one: num_beams=1 or do_sample=False")
    return options
