"""Merge the options of generation_config.json for choosing text with the user's, under transformers' names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.source import ModelSource
from upshift.value import Value, first_problem

CONFIG = "generation_config.json"
ELSEWHERE = {  # names of transformers' GenerationConfig that do not say how text is chosen
    "_from_model_config", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation",
}  # fmt: skip
ONE = ("num_beams", "num_return_sequences")  # options that change nothing if they are 1
SEVERAL = ("eos_token_id", "stop_strings", "suppress_tokens", "forced_eos_token_id")  # transformers takes one for a list of one
STARTS = ("decoder_start_token_id", "bos_token_id")
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")

Options = TypeVar("Options", bound=Value)


def merge_options(
    kind: type[Options], source: ModelSource, given: Mapping[str, Any], *, only_asked: tuple[str, ...] = ()
) -> Options:
    """Return the merged options. ``only_asked``: names that count if the user says them, and not in the file.

    Raise RequestError for a name or a value that is not possible. The message says what is possible."""
    said = _said(source)
    asked = {name: value for name, value in given.items() if value is not None}
    ours = kind.model_fields.keys() - {*only_asked}
    known = {name: value for name, value in said.items() if name in ours and value is not None}
    if (length := _new_tokens(said, source)) is not None:
        known.setdefault("max_new_tokens", length)
    sampling = any(name in asked for name in WARPERS)
    if not (sampling or (known | asked).get("do_sample")):  # what the file says of it beside is not used
        known = {name: value for name, value in known.items() if name not in WARPERS or _is_possible(kind, name, value)}
    merged = {**known, **asked}
    if sampling and "do_sample" not in asked:
        merged["do_sample"] = True
    for name in SEVERAL:
        wants_several = name in merged and "tuple" in str(kind.model_fields[name].annotation)
        if wants_several and isinstance(merged[name], int | str):
            merged[name] = (merged[name],)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise RequestError(f"generation cannot use {first_problem(kind, error)}") from None


def _is_possible(kind: type[Value], name: str, value: Any) -> bool:
    try:
        kind.model_validate({name: value})
    except ValidationError:
        return False
    return True


def unused_options(kind: type[Value], source: ModelSource, given: Collection[str]) -> dict[str, Any]:
    """Return the options of generation_config.json that ``kind`` has no name for. ``given``: names that the user gave."""
    known = {*kind.model_fields, *ELSEWHERE}
    said = _said(source)
    if "max_new_tokens" in {*given, *said} or _new_tokens(said, source) is not None:
        known.add("max_length")
    found = {name: value for name, value in said.items() if name not in known and value not in (None, False)}
    return {name: value for name, value in found.items() if name not in ONE or value != 1}


def start_token(source: ModelSource) -> int:
    """Return the token that the decoder of an encoder-decoder begins with, as transformers finds it."""

    said = _config(source)
    if not said:
        config = source.hf_config
        said = {name: getattr(config, name, None) for name in STARTS}
    start = next((said[name] for name in STARTS if said.get(name) is not None), None)
    if start is None:
        raise RequestError(f"{source.reference!r} does not say decoder_start_token_id; put it into its generation_config.json")
    return int(start[0] if isinstance(start, list) else start)


def _new_tokens(said: Mapping[str, Any], source: ModelSource) -> int | None:
    """Return the new tokens of max_length, behind the token that a decoder starts with.

    None: there is no room for one, or no encoder reads the prompt, so that max_length counts the prompt, too."""

    length = said.get("max_length")
    if not isinstance(length, int) or length <= 1 or not source.hf_config.is_encoder_decoder:
        return None
    return length - 1


def _said(source: ModelSource) -> dict[str, Any]:
    """Return the file's options. Without the file, return the same names of config.json, as transformers does.

    BART's options once had no other place."""
    found = _config(source)
    if found:
        return found
    from transformers import GenerationConfig

    names = GenerationConfig().to_dict().keys()
    return {name: value for name, value in source.config.items() if name in names}


def _config(source: ModelSource) -> dict[str, Any]:
    path = None if source.directory is None else source.directory / CONFIG
    if path is None or not path.is_file():
        return {}
    found: Any = read_json(path)
    if not isinstance(found, dict):
        raise RequestError(f"{path} is no JSON object; save the model again, or remove it")
    return found
