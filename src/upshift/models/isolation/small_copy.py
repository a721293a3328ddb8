# needs torch
"""Make a small copy of a model's config, with the same class, kinds of layers and settings, but small sizes.

A small copy treats the tokens of a row as the model does: sizes decide how much is computed, not which token affects which.
The copy must have every kind of layer that the model has. Config fields have no common names, so a copy may fail to build.
Then a larger copy is tried, until none is left.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from upshift.models.build import build_model, find_stacks, layer_kind

MAX_PARAMETERS = 40_000_000  # a copy of this size takes a second to fill, and 160 MB
VOCABULARY = 128
SHORT_WINDOW = 8  # tokens of windows and chunks; shorter than the texts of the test, so that they take effect
POSITIONS = 2048  # maximum; a longer learned table only costs memory
EXPERTS = 8
SMALLEST_HEAD = 16
SMALLEST_WIDTH = 64
MULTIPLE = 8  # widths are multiples of this, as the products of experts require
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim")
UNCHANGED = re.compile(r"token|vocab|position|layers|experts|per_tok|top_?k|seed|kernel|conv|state|group|length|labels|version")
HEADS = re.compile(r"heads$|(n|num)_head$")
HEAD_SIZES = re.compile(r"head_dim|d_head|d_kv|lora_rank|head_size")
WINDOWS = re.compile(r"window|chunk")

Fields = dict[str, Any]

logger = logging.getLogger(__name__)


def narrow_copies(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Iterator[PretrainedConfig]:
    """Yield configs from which ``model_class`` can be built, smallest first. Skip those that are too large or fail to build."""
    for fields in (*_narrow_candidates(config.to_dict()), None):
        try:
            narrow = copy.deepcopy(config) if fields is None else _to_config(fields)
            shallow = _drop_layers(narrow, model_class)
            size = _num_parameters(shallow, model_class)
        except Exception as error:  # config and model classes raise errors of many kinds if they do not accept these sizes
            logger.debug("no copy of %s with these sizes: %s", model_class.__name__, error)
            continue
        if size <= MAX_PARAMETERS:
            yield shallow


def plain_token_ids(config: PretrainedConfig) -> torch.Tensor:
    """Return the token ids of the vocabulary that the config names for no purpose, such as the end of a text."""
    text_config = config.get_text_config()
    named_ids = [value for name, value in vars(text_config).items() if name.endswith("_token_id")]
    special_ids = {number for value in named_ids for number in (value if isinstance(value, list) else [value])}
    return torch.tensor([number for number in range(text_config.vocab_size) if number not in special_ids])


def _narrow_candidates(fields: Fields) -> Iterator[Fields]:
    fields = {name: value for name, value in fields.items() if name not in ("quantization_config", "dtype", "torch_dtype")}
    num_divisor, size_divisor = _head_divisors(fields)
    tried: list[tuple[int, int]] = []
    for divisors in ((num_divisor, size_divisor), (1, size_divisor), (num_divisor, 1), (1, 1)):
        if divisors not in tried:
            tried.append(divisors)
            yield _narrow_fields(fields, *divisors)
            yield _narrow_fields(fields, *divisors, shorten_windows=False)


def _integer_fields(fields: Fields) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if _is_config(value):
            yield from _integer_fields(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _is_config(value: Any) -> bool:
    """Return whether a value holds fields by their names, and not a table by numbers."""
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _head_divisors(fields: Fields) -> tuple[int, int]:
    """Return the divisor for numbers of heads, and the divisor for head sizes."""
    integers = list(_integer_fields(fields))
    counts = [value for name, value in integers if HEADS.search(name) and value > 1]
    num_divisor = math.gcd(*counts) if counts else 1
    if counts and num_divisor == min(counts) == max(counts):  # a single head would hide differences between heads
        num_divisor //= next((prime for prime in (2, 3, 5, 7) if num_divisor % prime == 0), num_divisor)
    sizes = [value for name, value in integers if HEAD_SIZES.search(name) and value > 0]
    hidden_size = next((value for name, value in integers if name in WIDTHS), None)
    max_heads = max(counts, default=0)
    if hidden_size and not max_heads:
        return 1, max(1 << (hidden_size // SMALLEST_WIDTH).bit_length() - 1, 1) if hidden_size >= SMALLEST_WIDTH else 1
    if hidden_size and hidden_size % max_heads == 0 and not any("head_dim" in name for name, _ in integers):
        sizes.append(hidden_size // max_heads)
    if hidden_size:
        num_divisor = math.gcd(num_divisor, hidden_size)
    size_divisor = 1
    while sizes and all(size % (4 * size_divisor) == 0 and size // (2 * size_divisor) >= SMALLEST_HEAD for size in sizes):
        size_divisor *= 2
    return num_divisor, size_divisor


def _narrow_fields(fields: Fields, num_divisor: int, size_divisor: int, *, shorten_windows: bool = True) -> Fields:
    """Return the fields with smaller numbers.

    ``num_divisor`` divides the numbers of heads, ``size_divisor`` the size of each head, and both divide widths.
    ``shorten_windows``: also shorten windows and chunks."""
    narrow_integer = partial(
        _narrow_integer, fields=fields, num_divisor=num_divisor, size_divisor=size_divisor, shorten_windows=shorten_windows
    )
    narrow: Fields = {}
    for name, value in fields.items():
        if _is_config(value):
            narrow[name] = _narrow_fields(value, num_divisor, size_divisor, shorten_windows=shorten_windows)
        elif isinstance(value, list) and name == "mrope_section":
            narrow[name] = [entry // size_divisor for entry in value]
        elif isinstance(value, list) and name in ("short_factor", "long_factor"):  # one for each pair of a head's dimensions
            narrow[name] = value[: len(value) // size_divisor]
        elif isinstance(value, list) and value and all(type(entry) is int for entry in value):
            narrow[name] = [narrow_integer(name, entry) for entry in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            narrow[name] = narrow_integer(name, value)
        else:
            narrow[name] = value
    return narrow


def _narrow_integer(name: str, value: int, fields: Fields, num_divisor: int, size_divisor: int, *, shorten_windows: bool) -> int:
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name.endswith("_token_id") or name.endswith("_index"):
        return value % VOCABULARY
    if "position" in name and value > POSITIONS:
        return POSITIONS
    if WINDOWS.search(name):
        return min(value, SHORT_WINDOW) if shorten_windows and value > 0 else value
    if "experts" in name and "per_tok" not in name and value > EXPERTS:
        return _num_experts(value, fields)
    if HEADS.search(name) and value > 1:
        return value // num_divisor if value % num_divisor == 0 else value
    if HEAD_SIZES.search(name):
        return value // size_divisor if value % size_divisor == 0 else value
    if UNCHANGED.search(name) or value < 32:
        return value
    divisor = num_divisor * size_divisor
    divisors = (size for size in range(divisor, 1, -1) if divisor % size == 0 and value % (MULTIPLE * size) == 0)
    return value // next(divisors, 1)


def _num_experts(value: int, fields: Fields) -> int:
    """Return a small number of experts that is enough for the groups and for the experts of a token."""
    group_fields = re.compile(r"per_tok|top_?k|group")
    group_counts = [count for name, count in _integer_fields(fields) if group_fields.search(name) and 0 < count < value]
    target = max(EXPERTS, 2 * max(group_counts, default=1))
    return next((count for count in range(target, value) if value % count == 0), value)


def _to_config(fields: Fields) -> PretrainedConfig:
    config: PretrainedConfig = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    return config


def _drop_layers(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """Return a config of the first layers only, as many as include every kind of layer.

    Return the config unchanged if the shorter model would not have the same kinds."""
    all_kinds = _layer_kinds(config, model_class)
    if not all_kinds:
        return config
    length = max(len(kinds) for kinds in all_kinds)
    first_depth = max(max(kinds.index(kind) for kind in kinds) + 1 for kinds in all_kinds)
    depth = max(first_depth, 2)
    if depth >= length or any(len(kinds) != length for kinds in all_kinds):
        return config
    try:
        shallow = _to_config(_shorten_layers(config.to_dict(), length, depth))
        if [set(kinds) for kinds in _layer_kinds(shallow, model_class)] == [set(kinds) for kinds in all_kinds]:
            return shallow
    except Exception as error:  # config classes check their lists in many ways
        logger.debug("%s keeps all its layers: %s", model_class.__name__, error)
    return config


def _layer_kinds(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> list[list[str]]:
    with torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
    return [[layer_kind(layer) for layer in layers] for _, layers in find_stacks(model)]


def _shorten_layers(fields: Fields, length: int, depth: int) -> Fields:
    """Cut the number of layers to ``depth`` in all fields.

    These are numbers of layers, lists with one entry for each layer, and sorted lists of layer numbers."""
    shortened: Fields = {}
    for name, value in fields.items():
        if _is_config(value):
            shortened[name] = _shorten_layers(value, length, depth)
        elif value == length and not isinstance(value, bool) and "layer" in name:
            shortened[name] = depth
        elif isinstance(value, list) and len(value) == length:
            shortened[name] = value[:depth]
        elif isinstance(value, list) and value and all(isinstance(entry, int) and 0 <= entry < length for entry in value):
            shortened[name] = [entry for entry in value if entry < depth] if value == sorted({*value}) else value
        else:
            shortened[name] = value
    return shortened


def _num_parameters(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> int:
    with torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def randomize_weights(model: PreTrainedModel) -> None:
    """Draw weights that are large enough for every visible token to change the output.

    The embedding of padding is drawn, too, because it is not zero in every checkpoint. Biases and norms change only a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
