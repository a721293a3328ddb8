"""Load the transformers model that all engines start from, and check that Upshift can generate with it.

A model that does not fit into memory runs in transformers in its stored precision, partly from the disk, without a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.inference.computing_device import available_memory
from upshift.inference.race.types import Quality
from upshift.inference.registry import Device, EngineSetup, Precision, Task
from upshift.inference.weights import MAX_UNMEASURED_QUALITY, needed_memory, stored_for, weights_size
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.load import place_source
from upshift.loading.offload.disk_store import converted_folder
from upshift.loading.placement.apply import PlacementOptions
from upshift.loading.placement.memory_limits import USABLE_SHARE, memory_limits
from upshift.models.build import find_architecture, is_causal_class
from upshift.models.config import window_of
from upshift.models.kv_cache import has_states, states_cache
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource
from upshift.models.tasks import inputs_of, writes_text
from upshift.units import format_bytes

FULL_ATTENTION = {"full_attention", "global"}


def generation_task(source: ModelSource) -> Task:
    """Return the task of a model: which of Upshift's engines can hold its state between two tokens.

    "states" is for states of a fixed size beside keys and values, "as-transformers" for those that only transformers' own
    generate() holds. Raise RequestError if the model writes no text after a text."""
    config: Any = source.hf_config
    architecture = find_architecture(config, source.reference)
    model_class = architecture.model_class
    if architecture.objective == "seq2seq-lm" and config.is_encoder_decoder and reads_text(config, model_class):
        return "seq2seq"
    if not writes_text(model_class):
        kind = "transformers lists it for no task" if architecture.task is None else f"its task is {architecture.task.name}"
        raise RequestError(
            f"{source.reference!r} is a {model_class.__name__}, which writes no text ({kind}); give a model whose task is "
            "text-generation, image-text-to-text or text2text-generation"
        )
    if not reads_text(config, model_class):
        inputs = " and ".join(name for name in inputs_of(model_class) if name != "text")
        raise RequestError(
            f"{source.reference!r} is a {model_class.__name__}, which reads {inputs} and no text; "
            'for sounds give --prompts with {"audio": "a.wav"} on each line'
        )
    if config.is_encoder_decoder:
        return "as-transformers"
    isolation = isolation_of(source)
    if isolation.reads_ahead and "prepare_inputs_for_generation" not in vars(model_class):
        raise RequestError(
            f"{source.reference!r} ({model_class.__name__}) cannot generate token by token: {isolation.by_token}; "
            "use a model that reads from left to right, or write is_decoder: true into its config.json if it was trained as one"
        )
    if isolation.by_token:
        return "as-transformers"
    if is_causal_class(model_class) and not has_states(config):
        return "generate"
    return "states" if isolation.proven and states_cache(config) is not None else "as-transformers"


def reads_text(config: Any, model_class: Any) -> bool:
    """Return whether a model reads a text. A decoder's own tokens, which speech models count as text, are none."""
    inputs = inputs_of(model_class)
    encodes_sound = config.is_encoder_decoder and "audio" in inputs and model_class.main_input_name != "input_ids"
    return "text" in inputs and not encodes_sound


def pads_safely(source: ModelSource) -> bool:
    """Return whether prompts of different lengths may share a batch.

    The prompts of a causal language model are padded on the left, so the model's isolation test must have shown that this changes
    nothing. Encoder-decoders are padded on the right of the encoder's texts, under a mask."""
    return source.hf_config.is_encoder_decoder or not isolation_of(source).left_padding


def check_weights(source: ModelSource) -> None:
    """Raise RequestError if the files lack weights of the model. Only the headers of the files are read."""
    from upshift.loading.fill_model import check_files
    from upshift.loading.load import build_empty_model

    if stored_for(source) is None:  # other weights have a format that only one engine reads
        check_files(source, build_empty_model(source))


def attends_to_all(source: ModelSource) -> bool:
    """Return whether each token attends to all tokens before it: the config has no window, no chunks and no ALiBi slopes."""
    text_config: Any = source.hf_config.get_text_config(decoder=True)
    layer_types = set(getattr(text_config, "layer_types", None) or ()) | set(getattr(text_config, "attention_layers", None) or ())
    has_slopes = any(getattr(text_config, name, None) for name in ("alibi", "attn_config"))
    return layer_types <= FULL_ATTENTION and window_of(text_config) is None and not has_slopes


class CacheBytes(NamedTuple):
    """The bytes of one sequence in fp32: of each token's keys and values, and of its states of a fixed size."""

    token: int
    row: int


def cache_bytes(source: ModelSource) -> CacheBytes | None:
    """Return the bytes that a sequence keeps, or None if they are unknown.

    They are measured without weights, because configs do not say them for every kind of layer. Windows do not count."""
    from upshift.loading.load import build_empty_model
    from upshift.loading.placement import modules

    model = build_empty_model(source)
    one_token = modules.cache_bytes(model, 1)
    two_tokens = modules.cache_bytes(model, 2)
    if not one_token or not two_tokens:
        return None
    token_bytes = sum(two_tokens.values()) - sum(one_token.values())
    return CacheBytes(token_bytes, sum(one_token.values()) - token_bytes)


def pass_bytes(source: ModelSource) -> int:
    """Return the fewest bytes that a token takes while the model computes it in fp32, beside its keys and values: the input and
    the output of the widest matrix product.

    The head does not count, because it computes the last token only."""
    from torch import nn

    from upshift.loading.load import build_empty_model

    model = build_empty_model(source)
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return 4 * max((layer.in_features + layer.out_features for layer in layers), default=0)


def load_model(
    source: ModelSource, precision: Precision, device: Device = "cpu", *, where: PlacementOptions | None = None
) -> Any:
    """Load the model in a precision on a device, or with its weights placed by ``where``."""
    from upshift.inference.torch_settings import DTYPES
    from upshift.loading.load import load_placed, load_source

    generation_task(source)
    dtype = DTYPES.get(precision, "auto")
    if where is not None:
        return load_placed(source, where, dtype=dtype)
    model: Any = load_source(source, dtype=dtype)
    return model.to(device)


def on_model(model: Any, tensor: Any) -> Any:
    """Return an input of a model on its device. Pixels get the dtype of the weights."""
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)


def weight_bytes(source: ModelSource, model: Any) -> int:
    """Return the bytes of the weights, which every step reads."""
    if stored_for(source) is not None:  # quantized tensors do not report their size
        return weights_size(source)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def full_cache(past: Sequence[Any] = ()) -> Any:
    """Return a cache that keeps the keys and values of all tokens, also in a layer with a window, whose mask hides them.

    ``past`` holds keys and values of the first layer, then of the next layers."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(past[0::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.dtype = keys.dtype
        layer.device = keys.device
        layer.is_initialized = True
        layer.keys = keys
        layer.values = values
        cache.layers.append(layer)
    return cache


STORED_PRECISIONS: dict[str, Precision] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def check_max_memory(source: ModelSource, host: Host, max_memory: Mapping[str | int, str | int] | None) -> None:
    """Raise RequestError for limits that would limit nothing here, and NothingFits if the model cannot keep its limit."""
    if max_memory is None:
        return
    limits = memory_limits(host, max_memory)
    if host.gpu is not None:
        raise RequestError(
            f"--max-memory (max_memory) limits a model that runs on the CPU, and {source.reference!r} runs on {host.gpu.name} "
            "here, as a whole; leave it out, hide the GPU (CUDA_VISIBLE_DEVICES=), or divide the model in Python: "
            'upshift.load_model(..., device_map="auto", max_memory=...)'
        )
    if stored_for(source) is not None and needed_memory(source, "fp32") > limits["cpu"]:
        raise NothingFits(
            f"the weights of {source.reference!r} are quantized and are loaded whole, which takes "
            f"{format_bytes(needed_memory(source, 'fp32'))}, and --max-memory gives {format_bytes(limits['cpu'])}; give more"
        )


def is_too_large(source: ModelSource, host: Host, max_memory: Mapping[str | int, str | int] | None) -> bool:
    """Return whether a CPU has too little memory for a race, which begins with transformers in fp32, and could run the
    model partly from the disk."""
    free_bytes = available_memory(host, max_memory)
    if host.gpu is not None or stored_for(source) is not None or free_bytes is None:
        return False
    return needed_memory(source, "fp32") > free_bytes


def plan_offload(
    source: ModelSource, host: Host, quality: Quality, max_memory: Mapping[str | int, str | int] | None, *, rows: int, tokens: int
) -> tuple[EngineSetup, PlacementOptions, str]:
    """Return the setup that runs partly from the disk, the placement of its weights, and the reason for the user.

    Raise NothingFits if not even one layer fits into memory, or if the stored precision may miss the quality."""
    from upshift.inference.torch_settings import DTYPES

    assert source.directory is not None
    tensors = find_checkpoint(source.directory).tensors.values()
    stored_precisions = {STORED_PRECISIONS.get(tensor.dtype) for tensor in tensors} - {None}
    narrowest_first: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
    precision: Precision = next((name for name in narrowest_first if name in stored_precisions), "fp32")
    free_bytes = available_memory(host, max_memory)
    shown_free = format_bytes(free_bytes or 0)
    if precision != "fp32" and (quality == "exact" or quality > MAX_UNMEASURED_QUALITY):
        raise NothingFits(
            f"{source.reference!r} in fp32 does not fit into {shown_free}; in {precision}, as it is stored, it runs partly from "
            f"the disk, and how near that is was not measured: allow it with --quality {MAX_UNMEASURED_QUALITY}, or free memory"
        )
    limits = max_memory or {"cpu": int(USABLE_SHARE * free_bytes) if free_bytes is not None else 0}
    where = PlacementOptions("auto", limits, converted_folder(), batch=rows, sequence_length=tokens)
    placement = place_source(source, dtype=DTYPES[precision], placement_options=where)
    rate = "unknown" if placement.tokens_per_second is None else f"{placement.tokens_per_second:,.2f}"
    reason = (
        f"no race: transformers in fp32 takes {format_bytes(needed_memory(source, 'fp32'))}, and {shown_free} is there for it. "
        f"It runs in {precision}, as it is stored, {format_bytes(placement.disk_bytes)} of it on the disk: {rate} tokens/s to "
        f"expect, {rows} at once, bound by {placement.bound or 'what is not known'}"
    )
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    setup = EngineSetup(engine="torch", precision=precision, threads=threads, batch=rows, hint="latency")
    return setup, where, reason
