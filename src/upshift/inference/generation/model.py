"""Load the model of transformers that all engines start from, and check that Upshift can generate with it.

Run a model that has no room in transformers, as it is stored, with weights on the disk. Nothing is raced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.inference.race.types import Quality
from upshift.inference.registry import Device, EngineSetup, Precision, Task
from upshift.inference.weights import free_memory, needed_memory, stored_for, weights_size
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.load import place_source
from upshift.loading.placement.apply import PlacementOptions
from upshift.loading.placement.memory_limits import USABLE_SHARE, read_device, read_size
from upshift.models.build import find_architecture
from upshift.models.config import heads_of, window_of
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource
from upshift.units import format_bytes

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
    from upshift.loading.fill import check_files
    from upshift.loading.load import build_empty_model

    if stored_for(source) is None:  # other weights are in a form that only one engine knows
        check_files(source, build_empty_model(source))


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


def load_model(
    source: ModelSource, precision: Precision, device: Device = "cpu", *, where: PlacementOptions | None = None
) -> Any:
    from upshift.inference.torch_settings import DTYPES
    from upshift.loading.load import load_source

    generation_task(source)
    if where is not None:
        return load_source(source, placement_options=where)
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


UNMEASURED = 0.99  # the highest cosine that may be asked of 16 bits where there is no room for fp32 to compare them with
STORED: dict[str, Precision] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def room(host: Host, max_memory: Mapping[str | int, str | int] | None) -> int | None:
    """Return the bytes for the model and its work."""
    if max_memory is not None:
        said = {read_device(device, host): read_size(size) for device, size in max_memory.items()}
        if "cpu" in said:
            return said["cpu"]
    return free_memory(host)


def is_too_large(source: ModelSource, host: Host, max_memory: Mapping[str | int, str | int] | None) -> bool:
    """Return whether the CPU has no room for a race, which begins with transformers in fp32, although the model's
    parts have some."""
    free = room(host, max_memory)
    return host.gpu is None and stored_for(source) is None and free is not None and needed_memory(source, "fp32") > free


def divide(
    source: ModelSource, host: Host, quality: Quality, max_memory: Mapping[str | int, str | int] | None, *, rows: int, tokens: int
) -> tuple[EngineSetup, PlacementOptions, str]:
    """Return the setup, where its weights go, and why. Raise NothingFits if not even one layer at a time fits, or if
    the requested quality is one that the files' dtype may not have."""
    assert source.directory is not None
    stored = {STORED.get(tensor.dtype) for tensor in find_checkpoint(source.directory).tensors.values()} - {None}
    precision = next((name for name in ("fp16", "bf16", "fp32") if name in stored), "fp32")
    free = room(host, max_memory)
    if precision != "fp32" and (quality == "exact" or quality > UNMEASURED):
        raise NothingFits(
            f"{source.reference!r} in fp32 does not fit into {format_bytes(free or 0)}; in {precision}, as it is stored, it runs "
            f"partly from the disk, and how near that is was not measured: allow it with --quality {UNMEASURED}, or free memory"
        )
    limits = max_memory or {"cpu": int(USABLE_SHARE * free) if free is not None else 0}
    where = PlacementOptions("auto", limits, batch=rows, sequence_length=tokens)
    placement = place_source(source, placement_options=where)
    speed = "unknown" if placement.tokens_per_second is None else f"{placement.tokens_per_second:,.2f}"
    reason = (
        f"no race: transformers in fp32 takes {format_bytes(needed_memory(source, 'fp32'))}, and {format_bytes(free or 0)} is "
        f"there for it. It runs in {precision}, as it is stored, {format_bytes(placement.disk_bytes)} of it on the disk: {speed} "
        f"tokens/s to expect, {rows} at once, bound by {placement.bound or 'what is not known'}"
    )
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    return EngineSetup(engine="torch", precision=precision, threads=threads, batch=rows, hint="latency"), where, reason
