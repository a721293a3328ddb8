"""How text is chosen, by transformers' own names: as the model's generation_config.json says, where the user says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from upshift.models.generation_config import merge_options, unused_options
from upshift.models.source import ModelSource
from upshift.value import Value

ONLY_ASKED = ("prompt_lookup_num_tokens",)  # changes speed alone, and one engine has it


class GenerationOptions(Value):
    """``seed``: the text of a prompt depends on it and on the prompt's place alone, however prompts are batched."""

    max_new_tokens: int = Field(128, gt=0)
    min_new_tokens: int = Field(0, ge=0)
    do_sample: bool = False
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(50, ge=0)  # transformers' own default of sampling; 0: all
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    epsilon_cutoff: float = Field(0.0, ge=0, lt=1)
    eta_cutoff: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0)
    no_repeat_ngram_size: int = Field(0, ge=0)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()  # the text ends with the one that was met
    eos_token_id: tuple[int, ...] = ()
    seed: int = Field(0, ge=0)
    prompt_lookup_num_tokens: int | None = Field(None, gt=0)  # most that are guessed at once (lookup.py)


def read_options(source: ModelSource, given: Mapping[str, Any]) -> GenerationOptions:
    """Raises RequestError for a name or a value that is not possible, with what is."""
    return merge_options(GenerationOptions, source, given, only_asked=ONLY_ASKED)


def unused(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json asks for and is not done: beams, other processors."""
    return unused_options(GenerationOptions, source)
