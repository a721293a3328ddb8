"""How text is chosen, by transformers' own names: as the model's generation_config.json says, where the user says nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.value import Value, first_problem

CONFIG = "generation_config.json"
ELSEWHERE = {  # names of transformers' GenerationConfig that do not say how text is chosen
    "_from_model_config", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "transformers_version",
    "use_cache", "cache_implementation",
}  # fmt: skip
ONE = ("num_beams", "num_return_sequences")  # that ask for nothing where they are 1


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
    said = _config(source) or {"eos_token_id": source.config.get("eos_token_id")}  # as transformers does, without that file
    asked = {name: value for name, value in given.items() if value is not None}
    ours = set(GenerationOptions.model_fields) - {"prompt_lookup_num_tokens"}  # which changes speed alone, and one engine has
    known = {name: value for name, value in said.items() if name in ours and value is not None}
    merged = {**known, **asked}
    for name in ("eos_token_id", "stop_strings", "suppress_tokens"):  # transformers takes one for a list of one
        if name in merged and isinstance(merged[name], int | str):
            merged[name] = (merged[name],)
    try:
        options = GenerationOptions.model_validate(merged)
    except ValidationError as error:
        raise RequestError(f"generation cannot use {first_problem(GenerationOptions, error)}") from None
    sampling = [name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p") if name in asked]
    if sampling and not options.do_sample and "do_sample" not in asked:
        return options.changed(do_sample=True)
    return options


def unused(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json asks for and is not done: beams, other processors."""
    known = {*GenerationOptions.model_fields, *ELSEWHERE}
    said = {name: value for name, value in _config(source).items() if name not in known and value not in (None, False)}
    return {name: value for name, value in said.items() if name not in ONE or value != 1}


def _config(source: ModelSource) -> dict[str, Any]:
    path = None if source.directory is None else source.directory / CONFIG
    if path is None or not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {path} ({error}); save the model again, or remove it") from None
    return found
