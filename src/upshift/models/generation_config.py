"""Merge the user's options for choosing text with those of generation_config.json. All have transformers' names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.profile_cache import positions_of
from upshift.models.source import ModelSource
from upshift.value import Value, first_problem

CONFIG = "generation_config.json"
# Fields of transformers' GenerationConfig that Upshift reads where it needs them: the first token of a decoder (``start_token``).
READ_ELSEWHERE = {"decoder_start_token_id", "bos_token_id"}
# Fields that never change a text: they say where a file comes from, with what generate() fills rows that have ended, what it
# returns, how it keeps keys and values, or how an assistant model guesses tokens, which are then checked.
WITHOUT_EFFECT = {
    "_from_model_config", "transformers_version", "pad_token_id",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "disable_compile",
    "continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "prompt_lookup_num_tokens",
}  # fmt: skip
# Values that change nothing. All other fields change nothing if they are None, False or empty.
NEUTRAL = {
    "num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": 1.0,
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "min_length": 0, "min_new_tokens": 0, "penalty_alpha": 0.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}  # fmt: skip
BEAM_OPTIONS = ("length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups")  # without beams they change nothing
QUANTIZED_CACHE = "quantized"  # the only value of cache_implementation that changes a text
# Lists for which transformers also takes a single item.
LIST_OPTIONS = ("eos_token_id", "stop_strings", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
START_TOKENS = ("decoder_start_token_id", "bos_token_id")  # the first one that is set
# Options that only sampling uses.
WARPERS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
NEUTRAL_WARPERS = (("temperature", 1), ("top_k", 0), ("top_p", 1))  # these keep the probabilities of all tokens
LENGTHS = ("max_new_tokens", "max_length")

Options = TypeVar("Options", bound=Value)


@dataclass(frozen=True)
class FileDefaults:
    """The options of a model's files for choosing text, and what they depend on. They are read once, and serve every request."""

    options: Mapping[str, Any]
    file_name: str  # the file that has the options
    reference: str  # the user's name of the model
    has_encoder: bool  # max_length counts the decoder's start token
    positions: int | None  # the most tokens that the model takes; None: no limit, or no option depends on it


def read_defaults(source: ModelSource) -> FileDefaults:
    """Return the options of generation_config.json, or, without it, those of config.json, as transformers does.

    Early BART models have their options only there."""
    options = _read_file(source)
    file_name = CONFIG if options else "config.json"
    if not options:
        names = _config_fields()
        options = {name: value for name, value in source.config.items() if name in names}
    limits_length = _is_length(options.get("max_length"))
    return FileDefaults(
        options=options,
        file_name=file_name,
        reference=str(source.reference),
        has_encoder=limits_length and source.hf_config.is_encoder_decoder,
        positions=positions_of(source) if limits_length else None,
    )


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def merge_options(
    options_class: type[Options], file_defaults: FileDefaults, user_options: Mapping[str, Any], *, user_only: tuple[str, ...] = ()
) -> Options:
    """Return the merged options. The user's options come first. No file is read.

    ``user_only``: names that are ignored in the file.

    Raises:
        RequestError: an unknown name, an impossible value, or an option of the file that ``options_class`` does not have and
            that would change the text. The message says what is possible."""
    option_names = options_class.model_fields.keys()
    replaced = {name for name, value in user_options.items() if name not in option_names and _replaces_file(name, value)}
    requested = {name: value for name, value in user_options.items() if value is not None and name not in replaced}
    file_options = {name: value for name, value in file_defaults.options.items() if name not in replaced}
    defaults = {name: value for name, value in file_options.items() if name in option_names and value is not None}
    defaults = {name: value for name, value in defaults.items() if name not in user_only}
    _set_length(defaults, requested, file_defaults, file_options.get("max_length"))
    requests_sampling = any(name in requested for name in WARPERS)
    merged = {**defaults, **requested}
    if requests_sampling and "do_sample" not in requested:
        merged["do_sample"] = True
    if not merged.get("do_sample"):
        # Without sampling the file's warpers are not used, so an impossible value is no error.
        for name in WARPERS:
            if name in defaults and not _is_possible(options_class, name, defaults[name]):
                del merged[name]
    _check_file(file_options, option_names, merged, file_defaults)
    for name in LIST_OPTIONS:
        takes_list = name in merged and "tuple" in str(options_class.model_fields[name].annotation)
        if takes_list and isinstance(merged[name], int | str):
            merged[name] = (merged[name],)
    try:
        return options_class.model_validate(merged)
    except ValidationError as error:
        raise RequestError(f"generation: {first_problem(options_class, error)}") from None


def _set_length(defaults: dict[str, Any], requested: Mapping[str, Any], file_defaults: FileDefaults, length: int | None) -> None:
    """Leave one limit of the length in ``defaults``, or none if the user gives one. ``length``: max_length of the file.

    As in transformers, ``max_new_tokens`` comes before ``max_length``. Beside an encoder, ``max_length`` counts the decoder's
    start token. A ``max_length`` of the file that is above the model's positions ends where they end."""
    if all(name in requested for name in LENGTHS):
        shown = " and ".join(f"{name}={requested[name]!r}" for name in LENGTHS)
        raise RequestError(f"{shown} both limit the length of a text; give one of them")
    if any(name in requested for name in LENGTHS):
        for name in LENGTHS:
            defaults.pop(name, None)
        return
    if length is not None and _is_length(length):
        length = length if file_defaults.positions is None else min(length, file_defaults.positions)
        if file_defaults.has_encoder:
            defaults.pop("max_length", None)
            defaults.setdefault("max_new_tokens", length - 1)
        elif "max_length" in defaults:
            defaults["max_length"] = length
    if "max_new_tokens" in defaults:
        defaults.pop("max_length", None)


def _is_possible(options_class: type[Value], name: str, value: Any) -> bool:
    try:
        options_class.model_validate({name: value})
    except ValidationError:
        return False
    return True


def _replaces_file(name: str, value: Any) -> bool:
    """Return whether a user's option switches off an option of the file that Upshift does not have."""
    return name in _config_fields() and _is_neutral(name, value)


@cache
def _config_fields() -> Collection[str]:
    """Return the names that transformers' generate() reads from generation_config.json. It ignores all others."""
    from transformers import GenerationConfig

    return vars(GenerationConfig()).keys()


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an option with this value changes nothing."""
    if name in NEUTRAL and value == NEUTRAL[name]:
        return True
    return value is None or value is False or (isinstance(value, list | tuple | dict | str) and not value)


def changes_sampling(name: str, value: Any) -> bool:
    """Return whether an option of ``WARPERS`` with this value changes the probabilities of a sampled token."""
    return not _is_neutral(name, value) and (name, value) not in NEUTRAL_WARPERS


def _check_file(
    file_options: Mapping[str, Any], option_names: Collection[str], merged: Mapping[str, Any], file_defaults: FileDefaults
) -> None:
    """Raise RequestError for an option of the file that would change the text and that ``option_names`` lack.

    Fields that transformers' GenerationConfig does not have are ignored, as in transformers."""
    config_fields = _config_fields()
    unsupported = {
        name: value
        for name, value in file_options.items()
        if name in config_fields and name not in option_names and not _is_neutral(name, value)
    }
    has_length = any(name in merged for name in LENGTHS)
    for name, value in unsupported.items():
        is_idle = (
            name in READ_ELSEWHERE
            or name in WITHOUT_EFFECT
            or (name in WARPERS and not merged.get("do_sample"))
            or (name in BEAM_OPTIONS and merged.get("num_beams", 1) == 1)
            or (name == "max_length" and has_length)
            or (name == "cache_implementation" and value != QUANTIZED_CACHE)
        )
        if not is_idle:
            raise RequestError(_describe_unsupported(name, value, file_defaults))


def _describe_unsupported(name: str, value: Any, file_defaults: FileDefaults) -> str:
    remedy = f"{name}={json.dumps(NEUTRAL.get(name))}"
    if name == "max_length":
        remedy = "max_new_tokens=128"
    return (
        f"{file_defaults.file_name} of {file_defaults.reference!r} says {name}={value!r}, which Upshift does not do here; "
        f"to generate without it, give --set {remedy} ({remedy.replace('null', 'None')} in Python) or remove it from the file; "
        "to do it, use transformers' generate()"
    )


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


def _read_file(source: ModelSource) -> dict[str, Any]:
    path = None if source.directory is None else source.directory / CONFIG
    if path is None or not path.is_file():
        return {}
    options: Any = read_json(path)
    if not isinstance(options, dict):
        raise RequestError(f"{path} is no JSON object; save the model again, or remove it")
    return options
