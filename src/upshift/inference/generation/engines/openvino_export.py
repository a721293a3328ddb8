"""Export a causal language model of transformers as an OpenVINO model that keeps its keys and values between calls.

Inputs: input_ids [R, S], attention_mask [R, T], position_ids [R, S] where the model takes them, beam_idx [R]: rows of
the cache that these rows go on with. Output: logits [R, 1, V] of the last token. OpenVINO's generation library reads
it, too."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from upshift.inference.generation.engines.openvino_stateful import convert_stateful, keys_and_values
from upshift.inference.generation.model import load_model, plain_cache
from upshift.models.cache import returned_cache, with_cache
from upshift.models.source import ModelSource

GROUP_SIZE = 128  # weights that share a scale, of int4


def int4_weights(model: Any, texts: Sequence[Sequence[int]] = ()) -> Any:
    """``texts``: token ids that the rounding is fitted to."""
    import nncf

    fallback = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    names = {name for port in model.inputs for name in port.names}
    fitted = {"dataset": nncf.Dataset([_inputs(ids, names) for ids in texts]), "awq": True, "scale_estimation": True}
    return nncf.compress_weights(
        model, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=GROUP_SIZE, ratio=1.0, advanced_parameters=fallback,
        **(fitted if texts else {}),
    )  # fmt: skip


def _inputs(ids: Sequence[int], names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the inputs of one text from its first token on."""
    row = np.array([ids], dtype=np.int64)
    given: dict[str, np.ndarray] = {
        "input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.size)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }  # fmt: skip
    return {name: value for name, value in given.items() if name in names}


def export(source: ModelSource) -> Any:
    model = load_model(source, "fp32")
    example = _example(model, rows=2, cached=3, new=2)  # no number that is taken for a constant is another's
    other = _example(model, rows=3, cached=7, new=4)
    plain = ("input_ids", "attention_mask", "position_ids")
    return convert_stateful(_step(model), example, other, plain=plain, past=example[3:], beside={})


def _example(model: Any, *, rows: int, cached: int, new: int) -> tuple[Any, ...]:
    """Return inputs of tokens that differ, so that a mixture of experts sends them different ways. The first cached
    token is padding."""
    import torch

    tokens = torch.arange(rows * (cached + new)).reshape(rows, -1) % model.config.get_text_config(decoder=True).vocab_size
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with torch.no_grad():
        cache = returned_cache(model(input_ids=tokens[:, :cached], attention_mask=mask[:, :cached], use_cache=True))
    positions = torch.arange(cached, cached + new).expand(rows, -1)
    return tokens[:, cached:], mask, positions, *keys_and_values(cache)


def _step(model: Any) -> Any:
    import torch

    takes = inspect.signature(model.forward).parameters

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> Any:
            more = {"position_ids": positions, "logits_to_keep": 1}
            known = {name: value for name, value in more.items() if name in takes}
            cache = plain_cache(past)
            found = self.model(input_ids=ids, attention_mask=mask, **with_cache(self.model, cache), **known)
            return found.logits[:, -1:], *keys_and_values(cache)

    return Step()
