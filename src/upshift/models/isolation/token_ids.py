# needs torch
"""Find the token ids that a model's config leaves unset, and without which the model cannot train.

Some encoder-decoders put decoder_start_token_id before the labels. Some classifiers find the end of a text by pad_token_id.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from upshift.models.build import build_model, sample_inputs
from upshift.models.isolation.memory_shortage import raise_if_out_of_memory
from upshift.models.profile import Objective

ROWS = 2  # some models need a token id for several rows only
WIDTH = 32  # tokens
TOKEN = 3  # the one that all texts consist of
FILLED = 0  # a token id that every vocabulary has

logger = logging.getLogger(__name__)


def missing_token_ids(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective) -> tuple[str, ...]:
    """Return the unset token ids that a training step needs, such as ``decoder.pad_token_id``, for a small copy's config.

    The step is run with and without them. Return nothing if it does not run with all of them either."""
    unset = [path for path, _ in _unset_token_ids(config)]
    if not unset or _runs(config, model_class, objective) or not _runs(_fill(config, unset), model_class, objective):
        return ()
    needed = list(unset)
    for path in unset:
        others = [name for name in needed if name != path]
        if _runs(_fill(config, others), model_class, objective):
            needed = others
    return tuple(needed)


def _unset_token_ids(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield the path of each token id that is None or missing, and the config that should have it.

    The names are those of the config, and those that transformers generates with."""
    names = {name for name in (*vars(config), *vars(GenerationConfig())) if name.endswith("_token_id")}
    for name in sorted(names):
        if getattr(config, name, None) is None:
            yield f"{prefix}{name}", config
    for name, value in sorted(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            yield from _unset_token_ids(value, f"{prefix}{name}.")


def _fill(config: PretrainedConfig, paths: Sequence[str]) -> PretrainedConfig:
    """Return a copy of the config with a value for these token ids."""
    filled = copy.deepcopy(config)
    for path, owner in list(_unset_token_ids(filled)):
        if path in paths:
            setattr(owner, path.rpartition(".")[2], FILLED)
    return filled


def _runs(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective) -> bool:
    """Return whether the loss of a few equal texts can be computed."""
    try:
        model = build_model(copy.deepcopy(config), model_class, dtype=torch.float32)
        inputs = sample_inputs(model, objective, batch=ROWS, sequence=WIDTH, masked=False)
        if "input_ids" in inputs:
            inputs["input_ids"] = torch.full_like(inputs["input_ids"], TOKEN)
        with torch.no_grad():
            return model(**inputs).loss is not None
    except Exception as error:  # each class fails in its own way without a token id
        raise_if_out_of_memory(error)
        logger.debug("%s does not run: %s", model_class.__name__, error)
        return False
