"""Make a small copy of a model's config: its class, its kinds of layers and every choice as they are, its sizes small.

A small copy treats the tokens of a row as the model does: sizes decide how much is computed, not which token reaches which. A
copy is only used if it has every kind of layer that the model has. Fields of a config have no common names, so a copy may fail
to build. Then a less small one is tried, and in the end there is none.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from upshift.models.build import build_model, find_stacks, layer_kind

MAX_PARAMETERS = 40_000_000  # of a copy: a second to fill, and 160 MB
VOCABULARY = 128
SHORT_WINDOW = 8  # of windows and chunks: shorter than a text of the test, so that they take effect
POSITIONS = 2048  # at most: a learned table of more only costs memory
EXPERTS = 8
SMALLEST_HEAD = 16
SMALLEST_WIDTH = 64
MULTIPLE = 8  # of widths: products of experts take no others
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim")
UNCHANGED = re.compile(r"token|vocab|position|layers|experts|per_tok|top_?k|seed|kernel|conv|state|group|length|labels|version")
HEADS = re.compile(r"heads$|(n|num)_head$")
HEAD_SIZES = re.compile(r"head_dim|d_head|d_kv|lora_rank|head_size")
WINDOWS = re.compile(r"window|chunk")

Fields = dict[str, Any]

logger = logging.getLogger(__name__)


def narrow_copies(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Iterator[PretrainedConfig]:
    """Yield configs that ``model_class`` can be built from, the smallest first, or none if all are too large or fail to build."""
    for fields in (*_candidates(config.to_dict()), None):
        try:
            small = copy.deepcopy(config) if fields is None else _read(fields)
            shallow = _with_few_layers(small, model_class)
            size = _num_parameters(shallow, model_class)
        except Exception as error:  # each config and model class raises its own kinds; every one means: not with these sizes
            logger.debug("no copy of %s with these sizes: %s", model_class.__name__, error)
            continue
        if size <= MAX_PARAMETERS:
            yield shallow


def _candidates(fields: Fields) -> Iterator[Fields]:
    fields = {name: value for name, value in fields.items() if name not in ("quantization_config", "dtype", "torch_dtype")}
    fewer_heads, smaller_heads = _head_divisors(fields)
    tried: list[tuple[int, int]] = []
    for divisors in ((fewer_heads, smaller_heads), (1, smaller_heads), (fewer_heads, 1), (1, 1)):
        if divisors not in tried:
            tried.append(divisors)
            yield _narrowed(fields, *divisors)
            yield _narrowed(fields, *divisors, shortened=False)


def _integers(fields: Fields) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _head_divisors(fields: Fields) -> tuple[int, int]:
    """Return the divisor for the numbers of heads, and the divisor for the sizes of a head."""
    integers = list(_integers(fields))
    counts = [value for name, value in integers if HEADS.search(name) and value > 1]
    fewer = math.gcd(*counts) if counts else 1
    if counts and fewer == min(counts) == max(counts):  # a single head would hide differences between heads
        fewer //= next((prime for prime in (2, 3, 5, 7) if fewer % prime == 0), fewer)
    sizes = [value for name, value in integers if HEAD_SIZES.search(name) and value > 0]
    hidden = next((value for name, value in integers if name in WIDTHS), None)
    most = max(counts, default=0)
    if hidden and not most:
        return 1, max(1 << (hidden // SMALLEST_WIDTH).bit_length() - 1, 1) if hidden >= SMALLEST_WIDTH else 1
    if hidden and hidden % most == 0 and not any("head_dim" in name for name, _ in integers):
        sizes.append(hidden // most)
    if hidden:
        fewer = math.gcd(fewer, hidden)
    smaller = 1
    while sizes and all(size % (4 * smaller) == 0 and size // (2 * smaller) >= SMALLEST_HEAD for size in sizes):
        smaller *= 2
    return fewer, smaller


def _narrowed(fields: Fields, fewer: int, smaller: int, *, shortened: bool = True) -> Fields:
    """Return the fields with smaller numbers. ``shortened``: windows shrink, too.

    ``fewer`` divides the numbers of heads, ``smaller`` the size of each head, and both divide widths."""
    found: Fields = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _narrowed(value, fewer, smaller, shortened=shortened)
        elif isinstance(value, list) and name == "mrope_section":
            found[name] = [part // smaller for part in value]
        elif isinstance(value, list) and name in ("short_factor", "long_factor"):  # one for each pair of a head's dimensions
            found[name] = value[: len(value) // smaller]
        elif isinstance(value, list) and value and all(type(part) is int for part in value):
            found[name] = [_narrowed_integer(name, part, fields, fewer, smaller, shortened=shortened) for part in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = _narrowed_integer(name, value, fields, fewer, smaller, shortened=shortened)
        else:
            found[name] = value
    return found


def _narrowed_integer(name: str, value: int, fields: Fields, fewer: int, smaller: int, *, shortened: bool) -> int:
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name.endswith("_token_id") or name.endswith("_index"):
        return value % VOCABULARY
    if "position" in name and value > POSITIONS:
        return POSITIONS
    if WINDOWS.search(name):
        return min(value, SHORT_WINDOW) if shortened and value > 0 else value
    if "experts" in name and "per_tok" not in name and value > EXPERTS:
        return _num_experts(value, fields)
    if HEADS.search(name) and value > 1:
        return value // fewer if value % fewer == 0 else value
    if HEAD_SIZES.search(name):
        return value // smaller if value % smaller == 0 else value
    if UNCHANGED.search(name) or value < 32:
        return value
    divisor = fewer * smaller
    possible = (size for size in range(divisor, 1, -1) if divisor % size == 0 and value % (MULTIPLE * size) == 0)
    return value // next(possible, 1)


def _num_experts(value: int, fields: Fields) -> int:
    """Return a small number of experts that is enough for the groups and for the experts of a token."""
    named = [count for name, count in _integers(fields) if re.search(r"per_tok|top_?k|group", name) and 0 < count < value]
    wanted = max(EXPERTS, 2 * max(named, default=1))
    return next((count for count in range(wanted, value) if value % count == 0), value)


def _read(fields: Fields) -> PretrainedConfig:
    config: PretrainedConfig = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    return config


def _with_few_layers(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """Return a config of the first layers alone, as many as have every kind, or of all if those would not have the same kinds."""
    whole = _kinds(config, model_class)
    if not whole:
        return config
    length = max(len(kinds) for kinds in whole)
    needed = max(max(kinds.index(kind) for kind in kinds) + 1 for kinds in whole)
    depth = max(needed, 2)
    if depth >= length or any(len(kinds) != length for kinds in whole):
        return config
    try:
        fewer = _read(_cut_to(config.to_dict(), length, depth))
        if [set(kinds) for kinds in _kinds(fewer, model_class)] == [set(kinds) for kinds in whole]:
            return fewer
    except Exception as error:  # a config class may check its own lists in any way
        logger.debug("%s keeps all its layers: %s", model_class.__name__, error)
    return config


def _kinds(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> list[list[str]]:
    with torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
    return [[layer_kind(layer) for layer in layers] for _, layers in find_stacks(model)]


def _cut_to(fields: Fields, length: int, depth: int) -> Fields:
    """Shorten numbers of layers, lists with an entry for each layer, and lists of layers' numbers."""
    found: Fields = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _cut_to(value, length, depth)
        elif value == length and not isinstance(value, bool) and "layer" in name:
            found[name] = depth
        elif isinstance(value, list) and len(value) == length:
            found[name] = value[:depth]
        elif isinstance(value, list) and value and all(isinstance(entry, int) and 0 <= entry < length for entry in value):
            found[name] = [entry for entry in value if entry < depth] if value == sorted({*value}) else value
        else:
            found[name] = value
    return found


def _num_parameters(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> int:
    with torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())
