"""Load the model of transformers that all engines start from, and check that Upshift can generate with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.inference.setup import Device, Precision, Task
from upshift.inference.weights import stored_for, weights_size
from upshift.loading.placed import Where
from upshift.models.build import find_architecture
from upshift.models.config_sizes import heads_of, window_of
from upshift.models.source import ModelSource
from upshift.models.store import isolation_of

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
WHOLE = {"full_attention", "global"}


def generation_task(source: ModelSource) -> Task:
    """Return the task of a model. Raise RequestError if it generates no text, keeps another state than keys and values, or gives
    other results token by token than whole (isolation.py)."""
    config: Any = source.hf_config
    text = config.get_text_config(decoder=True)
    found = find_architecture(config, source.reference)
    if found.objective == "seq2seq-lm":
        return "seq2seq"
    if found.objective != "causal-lm" or config.is_encoder_decoder:
        raise RequestError(
            f"{source.reference!r} is a {found.model_class.__name__}, which generates no text from text; "
            f"give a causal language model or an encoder-decoder"
        )
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION_LAYERS))
    if other or heads_of(text) is None:
        kind = other[0] if other else config.model_type
        raise RequestError(
            f"{source.reference!r} has layers of {kind}, whose state is not keys and values; upshift cannot generate "
            f"with it yet; use transformers' generate()"
        )
    isolation = isolation_of(source)
    if isolation.by_token:
        raise RequestError(
            f"{source.reference!r} ({found.model_class.__name__}) cannot generate token by token: {isolation.by_token}; "
            "use transformers' generate(), or a model that reads from left to right"
        )
    return "generate"


def check_weights(source: ModelSource) -> None:
    """Raise RequestError if the files lack weights of the model. Only the headers of the files are read."""
    from upshift.loading.coverage import check_files
    from upshift.loading.load import empty_of

    if stored_for(source) is None:  # other weights are in a form that only one engine knows
        check_files(source, empty_of(source))


def attends_to_all(source: ModelSource) -> bool:
    """Return whether each token looks at all tokens before it. The config then declares no window, chunks or slopes of ALiBi."""
    text: Any = source.hf_config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "attention_layers", None) or ())
    slopes = any(getattr(text, name, None) for name in ("alibi", "attn_config"))
    return kinds <= WHOLE and window_of(text) is None and not slopes


def cache_bytes(source: ModelSource) -> int:
    """Return the bytes of the keys and values of one token of one sequence, in fp32."""
    text: Any = source.hf_config.get_text_config(decoder=True)
    heads = heads_of(text)
    assert heads is not None and heads.width is not None  # generation_task has refused models without
    return 2 * 4 * int(text.num_hidden_layers * heads.keys * heads.width)


def load_model(source: ModelSource, precision: Precision, device: Device = "cpu", *, where: Where | None = None) -> Any:
    from upshift.inference.torch_computing import DTYPES
    from upshift.loading.load import load_source

    generation_task(source)
    if where is not None:
        return load_source(source, where=where)
    model: Any = load_source(source, dtype=DTYPES.get(precision, "auto"))  # the type of transformers' ``to`` takes no device
    return model.to(device)


def weight_bytes(source: ModelSource, model: Any) -> int:
    """Return the bytes of weights that a step reads."""
    if stored_for(source) is not None:  # tensors of quantized weights do not say their size
        return weights_size(source)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def plain_cache(past: Sequence[Any] = ()) -> Any:
    """Return a cache that keeps the keys and values of all tokens, also for a layer with a window, which its mask applies.

    ``past``: keys and values of the first layer, then of the next.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(past[0::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
