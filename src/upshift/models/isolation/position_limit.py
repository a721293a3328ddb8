# needs torch
"""Find the length from which on the longest text of a batch changes the results of the other texts.

Some rotary embeddings choose their frequencies by the highest position of a batch. Examples are dynamic NTK and LongRoPE of
transformers' modeling_rope_utils.py. Up to a length that the config states, nothing changes. A small copy whose config states a
length between those of two texts shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import transformers
from transformers import PretrainedConfig

from upshift.models.isolation.memory_shortage import raise_if_out_of_memory

LOW_LIMIT = 16  # tokens; between the lengths of the two texts of the test
POSITION_NAME = "position"  # part of the name of each field that states a number of positions

Path = tuple[str, ...]
Fields = dict[str, Any]

logger = logging.getLogger(__name__)


def exact_tokens(
    config: PretrainedConfig, small_config: PretrainedConfig, is_independent: Callable[[PretrainedConfig], bool]
) -> int | None:
    """Return the tokens of the longest text that leaves the results of other texts unchanged, or None if there is no limit.

    ``is_independent`` returns whether a short text has the same results beside a long one as alone, in a model of a config."""
    limits = {path: value for path, value in _position_limits(config.to_dict()) if value > LOW_LIMIT}
    small_limits = dict(_position_limits(small_config.to_dict()))
    paths = [path for path in limits if small_limits.get(path, 0) > LOW_LIMIT]
    if not paths or _is_independent(small_config, paths, is_independent):
        return None
    if not _is_independent(small_config, [], is_independent):  # then no length is exact, and padding says so
        return None
    deciding = [path for path in paths if not _is_independent(small_config, [path], is_independent)]
    return min(limits[path] for path in deciding or paths)


def _is_independent(
    small_config: PretrainedConfig, paths: Collection[Path], is_independent: Callable[[PretrainedConfig], bool]
) -> bool:
    """Return whether the texts of a copy with low limits are independent. A copy that computes no long text mixes none."""
    try:
        return is_independent(_with_low_limits(small_config, paths))
    except Exception as error:  # a table of positions ends at the limit, and each class fails in its own way
        raise_if_out_of_memory(error)
        logger.debug("a copy with few positions does not run: %s", error)
        return True


def _position_limits(fields: Fields, prefix: Path = ()) -> Iterator[tuple[Path, int]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _position_limits(value, (*prefix, name))
        elif isinstance(value, int) and not isinstance(value, bool) and POSITION_NAME in name:
            yield (*prefix, name), value


def _with_low_limits(small_config: PretrainedConfig, paths: Collection[Path]) -> PretrainedConfig:
    fields = small_config.to_dict()
    for *folders, name in paths:
        owner = fields
        for folder in folders:
            owner = owner[folder]
        owner[name] = LOW_LIMIT
    config: PretrainedConfig = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    return config
