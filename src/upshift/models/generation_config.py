"""Merge the user's options for choosing text with those of generation_config.json. All have transformers' names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.source import ModelSource
from upshift.value import Value, first_problem

CONFIG = "generation_config.json"
NOT_FOR_CHOOSING = {  # fields of transformers' GenerationConfig that do not affect how text is chosen
    "_from_model_config", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation",
}  # fmt: skip
NEUTRAL_AT_ONE = ("num_beams", "num_return_sequences")  # options that change nothing if they are 1
# Lists for which transformers also takes a single item.
LIST_OPTIONS = ("eos_token_id", "stop_strings", "suppress_tokens", "forced_eos_token_id")
START_TOKENS = ("decoder_start_token_id", "bos_token_id")
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")

Options = TypeVar("Options", bound=Value)


def merge_options(
    options_class: type[Options], source: ModelSource, user_options: Mapping[str, Any], *, user_only: tuple[str, ...] = ()
) -> Options:
    """Return the merged options. The user's options come first.

    ``user_only``: names that are ignored in the file. Raise RequestError for an unknown name or an impossible value. The
    message says what is possible."""
    file_options = _file_options(source)
    requested = {name: value for name, value in user_options.items() if value is not None}
    option_names = options_class.model_fields.keys() - {*user_only}
    defaults = {name: value for name, value in file_options.items() if name in option_names and value is not None}
    if (length := _max_new_tokens(file_options, source)) is not None:
        defaults.setdefault("max_new_tokens", length)
    requests_sampling = any(name in requested for name in WARPERS)
    if not (requests_sampling or (defaults | requested).get("do_sample")):
        # Without sampling the file's warpers are not used, so an impossible value is no error.
        for name in WARPERS:
            if name in defaults and not _is_possible(options_class, name, defaults[name]):
                del defaults[name]
    merged = {**defaults, **requested}
    if requests_sampling and "do_sample" not in requested:
        merged["do_sample"] = True
    for name in LIST_OPTIONS:
        takes_list = name in merged and "tuple" in str(options_class.model_fields[name].annotation)
        if takes_list and isinstance(merged[name], int | str):
            merged[name] = (merged[name],)
    try:
        return options_class.model_validate(merged)
    except ValidationError as error:
        raise RequestError(f"generation: {first_problem(options_class, error)}") from None


def _is_possible(options_class: type[Value], name: str, value: Any) -> bool:
    try:
        options_class.model_validate({name: value})
    except ValidationError:
        return False
    return True


def unused_options(options_class: type[Value], source: ModelSource, requested: Collection[str]) -> dict[str, Any]:
    """Return the options of generation_config.json that ``options_class`` does not have and that would change the text.

    ``requested``: names of the options that the user gave."""
    used_names = {*options_class.model_fields, *NOT_FOR_CHOOSING}
    file_options = _file_options(source)
    if "max_new_tokens" in {*requested, *file_options} or _max_new_tokens(file_options, source) is not None:
        used_names.add("max_length")
    unused = {name: value for name, value in file_options.items() if name not in used_names and value not in (None, False)}
    return {name: value for name, value in unused.items() if name not in NEUTRAL_AT_ONE or value != 1}


def start_token(source: ModelSource) -> int:
    """Return the first token of an encoder-decoder's decoder, as transformers finds it."""
    options = _read_file(source)
    if not options:
        config = source.hf_config
        options = {name: getattr(config, name, None) for name in START_TOKENS}
    token = next((options[name] for name in START_TOKENS if options.get(name) is not None), None)
    if token is None:
        raise RequestError(f"{source.reference!r} does not say decoder_start_token_id; put it into its generation_config.json")
    return int(token[0] if isinstance(token, list) else token)


def _max_new_tokens(options: Mapping[str, Any], source: ModelSource) -> int | None:
    """Return the number of new tokens that the file's max_length allows after a decoder's start token.

    Return None if it allows none, or if there is no encoder: then max_length includes the prompt."""
    length = options.get("max_length")
    if not isinstance(length, int) or length <= 1 or not source.hf_config.is_encoder_decoder:
        return None
    return length - 1


def _file_options(source: ModelSource) -> dict[str, Any]:
    """Return the options of the file. Without it, return the same names from config.json, as transformers does.

    Early BART models have their options only there."""
    options = _read_file(source)
    if options:
        return options
    from transformers import GenerationConfig

    names = GenerationConfig().to_dict().keys()
    return {name: value for name, value in source.config.items() if name in names}


def _read_file(source: ModelSource) -> dict[str, Any]:
    path = None if source.directory is None else source.directory / CONFIG
    if path is None or not path.is_file():
        return {}
    options: Any = read_json(path)
    if not isinstance(options, dict):
        raise RequestError(f"{path} is no JSON object; save the model again, or remove it")
    return options
