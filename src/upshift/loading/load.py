# needs torch
"""Load a model: build it empty, and fill it directly from its files (``upshift.load_model``).

transformers decides the class, the names, the dtypes, the initialization of missing weights, ties and buffers, and reports
missing and unexpected weights. Its ``from_pretrained`` loads models whose files are quantized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from upshift.errors import MissingExtra, RequestError
from upshift.hardware.detect import detect
from upshift.hardware.probe import memory_rate
from upshift.internals.transformers_names import FINISH_LOADING, GET_MODEL_CLASS, LOADING_OPTIONS, MODEL_MAPPING, PATCH_RECORDERS
from upshift.loading.files.checkpoint import INDEX, WEIGHTS, Checkpoint, find_checkpoint
from upshift.loading.files.tensors import COMPUTE_DTYPES, dtype_of
from upshift.loading.fill_model import Filling, Progress, Run, check_coverage, check_missing
from upshift.loading.gguf import SUFFIX, load_gguf
from upshift.loading.key_mapping import map_names
from upshift.loading.placement.apply import PlacementOptions, fill_and_dispatch, plan_placement
from upshift.loading.placement.place import Placement
from upshift.models.build import explain_build_errors, find_architecture
from upshift.models.source import ModelSource, fetch_weights, find_model

logger = logging.getLogger(__name__)

Quantized = Literal["int8", "int4"]
QUANTIZERS: dict[Quantized, tuple[str, str]] = {  # library, extra of Upshift
    "int8": ("torchao", "quant"),
    "int4": ("bitsandbytes", "bitsandbytes"),  # torchao 0.18 packs 4 bits for GPUs only
}


def load_model(
    model: str,
    *,
    dtype: str | torch.dtype | None = None,
    device_map: str | int | Mapping[str, str | int] | None = None,
    max_memory: Mapping[str | int, str | int] | None = None,
    offload_folder: str | Path | None = None,
    quantize: Quantized | None = None,
    model_class: type | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Return the model in evaluation mode. Weights on the disk are read from the model's files when their module runs.

    ``dtype``: None means the config's dtype, or the stored one if the config has none. ``device_map``: None puts the whole
    model on the CPU; "auto", or a map as transformers takes it, divides the model under ``max_memory``. ``offload_folder``
    holds weights on the disk that must be converted. ``model_class``: a class of transformers, or one of its Auto classes; None
    means the class that the config names. ``progress`` is called with the bytes that are loaded, and with all bytes.

    Raise RequestError for a model without weights, for damaged files, and for weights that are not those of the config."""
    if Path(model).suffix == SUFFIX:
        if (device_map, max_memory, offload_folder, quantize, model_class) != (None, None, None, None, None):
            raise RequestError(f"{model!r} is loaded as a whole onto the CPU; for anything else write it first: upshift convert")
        return load_gguf(Path(model), dtype=dtype, progress=progress)
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} is an adapter; load the model that it was made for, then peft.PeftModel.from_pretrained")
    fetch_weights(source)
    if device_map is None and (max_memory is not None or offload_folder is not None):
        raise RequestError('max_memory and offload_folder are for a model that is divided; give device_map="auto" with them')
    can_miss = model_class is not None
    if device_map is None:
        return load_source(
            source, dtype=dtype, quantize=quantize, model_class=model_class, progress=progress, allow_missing=can_miss
        )
    if quantize is not None:
        _check_quantize(quantize)
        raise RequestError(f"quantize={quantize!r} is for models that are loaded whole; leave out device_map, or quantize")
    options = PlacementOptions(device_map, max_memory, None if offload_folder is None else Path(offload_folder))
    return load_placed(source, options, dtype=dtype, model_class=model_class, progress=progress, allow_missing=can_miss)


def load_source(
    source: ModelSource,
    *,
    dtype: str | torch.dtype | None = None,
    quantize: Quantized | None = None,
    model_class: type | None = None,
    progress: Progress | None = None,
    allow_missing: bool = False,
    run: Run | None = None,
    all_used: bool = True,
) -> PreTrainedModel:
    """Return the model of a source, whole on the CPU. ``model_class``: None means the class that the config names.

    ``allow_missing``: let transformers initialize, and report, weights that no file holds. Otherwise raise RequestError if the
    answer of ``run`` depends on such a weight. Without ``run``, the answer depends on all weights. ``all_used``: False if the
    files may hold more than the model, such as a head, and quantized files less."""
    _check_quantize(quantize)
    _check_has_weights(source)
    resolved_class = resolve_class(source.hf_config, source, model_class)
    if source.config.get("quantization_config"):
        if quantize is not None:
            raise RequestError(f"the weights of {source.reference!r} are quantized already; leave out quantize={quantize!r}")
        can_miss = allow_missing or not all_used
        return _load_quantized(source, resolved_class, dtype, allow_missing=can_miss, progress=progress)
    filling, _ = _empty_filling(source, resolved_class, dtype, quantize)
    if not allow_missing:
        check_coverage(filling, source, run=run, all_used=all_used)
    filling.run(progress=progress)
    finish_loading(filling, source, {"": "cpu"})
    return filling.model


def load_placed(
    source: ModelSource,
    options: PlacementOptions,
    *,
    dtype: str | torch.dtype | None = None,
    model_class: type | None = None,
    progress: Progress | None = None,
    allow_missing: bool = False,
) -> PreTrainedModel:
    """Return the model of a source on several devices and the disk. ``load_source`` explains the arguments."""
    _check_has_weights(source)
    resolved_class = resolve_class(source.hf_config, source, model_class)
    if source.config.get("quantization_config"):
        raise RequestError(f"the weights of {source.reference!r} are quantized and are loaded whole; leave out device_map")
    filling, checkpoint = _empty_filling(source, resolved_class, dtype)
    if not allow_missing:
        check_coverage(filling, source)
    fill_and_dispatch(filling, checkpoint, options, partial(finish_loading, filling, source), progress)
    return filling.model


def _check_quantize(quantize: Quantized | None) -> None:
    if quantize is not None and quantize not in QUANTIZERS:
        raise RequestError(f"quantize={quantize!r} is not known; use {' or '.join(QUANTIZERS)}")


def _check_has_weights(source: ModelSource) -> None:
    if source.directory is None:
        raise RequestError(f"{source.reference!r} is a config without weights; give a directory written by save_pretrained")


def _empty_filling(
    source: ModelSource,
    model_class: type[PreTrainedModel],
    dtype: str | torch.dtype | None,
    quantize: Quantized | None = None,
) -> tuple[Filling, Checkpoint]:
    """Return the empty model with the stored tensor of each of its weights, and the headers of its files."""
    assert source.directory is not None
    config = source.hf_config
    checkpoint = find_checkpoint(source.directory)
    config.name_or_path = str(source.directory)
    resolved_dtype = _set_dtype(config, dtype, checkpoint)
    quantizer = None if quantize is None else _quantizer(quantize)
    model = build_empty(model_class, config, resolved_dtype)
    if quantizer is not None:
        quantizer.preprocess_model(
            model=model, dtype=resolved_dtype, device_map={"": "cpu"}, checkpoint_files=None, use_kernels=False
        )
    names = map_names(model, checkpoint.tensors, quantizer)
    return Filling(model, checkpoint.tensors, names, dtype=resolved_dtype, quantizer=quantizer), checkpoint


def _load_quantized(
    source: ModelSource,
    model_class: type[PreTrainedModel],
    dtype: str | torch.dtype | None,
    *,
    allow_missing: bool,
    progress: Progress | None,
) -> PreTrainedModel:
    """Load a quantized model with from_pretrained, which reports no progress: ``progress`` hears of its start and its end.

    Only transformers and the quantization's library know the layout of scales and codes, for each of about twenty methods."""
    assert source.directory is not None
    method = check_quantization_method(source)
    total_bytes = 0 if progress is None else sum(file.stat().st_size for file in source.directory.glob("*.safetensors"))
    if progress is not None:
        progress(0, total_bytes)
    try:
        loaded: Any = model_class.from_pretrained(  # returns (model, loading information), unlike its annotation
            source.directory, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
    except RequestError:
        raise
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # a library, a GPU, or a field of the config is missing
        raise RequestError(f"{source.reference!r} ({method}) does not load: {' '.join(str(error).split())}") from None
    model: PreTrainedModel
    model, loading_info = loaded
    if getattr(model, "hf_quantizer", None) is None:
        computed = str(model.dtype).removeprefix("torch.")
        text = "the weights of %r are stored in %s and computed in %s: transformers has no kernels for %s on this device"
        logger.warning(text, source.reference, method, computed, method)
    if progress is not None:
        progress(total_bytes, total_bytes)
    if not allow_missing:
        check_missing(set(loading_info["missing_keys"]), model, source)
    return model


def check_quantization_method(source: ModelSource) -> str:
    """Return the method of quantized weights, such as gptq. Raise RequestError for one that transformers does not know.

    transformers only warns of an unknown method, and reads codes as if they were weights."""
    stored: Any = source.config["quantization_config"]
    method = stored.get("quant_method") or ("bitsandbytes" if stored.get("load_in_4bit") or stored.get("load_in_8bit") else None)
    if method is None:
        raise RequestError(
            f"quantization_config of {source.reference!r} has no quant_method, so that its weights cannot be read; add it to "
            "config.json, such as gptq"
        )
    if not AutoHfQuantizer.supports_quant_method({**stored, "quant_method": method}):
        raise RequestError(
            f"the weights of {source.reference!r} are quantized with {method!r}, which transformers {version('transformers')} "
            "does not know; install a newer one, or give the model that it was made from"
        )
    return str(method)


def find_quantization_problem(source: ModelSource) -> str | None:
    """Return why transformers cannot load quantized weights in this environment, or None. Nothing is loaded.

    A library or a GPU may be missing."""
    stored: Any = source.config["quantization_config"]
    try:
        method = check_quantization_method(source)
        quantizer: Any = AutoHfQuantizer.from_config({**stored, "quant_method": method}, pre_quantized=True)
        quantizer.validate_environment(dtype=None, device_map=None, weights_only=True)
    except (ImportError, RuntimeError, TypeError, ValueError, RequestError) as error:
        return " ".join(str(error).split())
    return None


def place_source(
    source: ModelSource, *, dtype: str | torch.dtype | None = None, placement_options: PlacementOptions
) -> Placement:
    """Return the placement that ``load_placed`` would use."""
    return place_empty(*build_empty_with_files(source, dtype), placement_options)


def build_empty_with_files(
    source: ModelSource, dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, Checkpoint | None]:
    """Return the empty model as ``load_source`` builds it, and the headers of its files, or None if it has no files."""
    config = source.hf_config
    model_class = resolve_class(config, source)
    folder = source.directory
    has_weights = folder is not None and any((folder / name).exists() for name in (WEIGHTS, INDEX))
    checkpoint = find_checkpoint(folder) if has_weights and folder is not None else None
    resolved_dtype = _set_dtype(config, dtype, checkpoint)
    return build_empty(model_class, config, resolved_dtype), checkpoint


def place_empty(model: PreTrainedModel, checkpoint: Checkpoint | None, placement_options: PlacementOptions) -> Placement:
    """Measure this machine's memory rate, and return the placement of an empty model."""
    return plan_placement(model, checkpoint, placement_options, memory_rate(detect()))


def build_empty(model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on the meta device as from_pretrained does, with its weights not tied yet."""
    with explain_build_errors(model_class.__name__), ExitStack() as contexts:
        for context in model_class.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        model = model_class(config)
        PATCH_RECORDERS.get()(model)
    return model


def build_empty_model(source: ModelSource) -> PreTrainedModel:
    """Return the empty model in fp32, built from the config only."""
    config = source.hf_config
    return build_empty(resolve_class(config, source), config, torch.float32)


def finish_loading(filling: Filling, source: ModelSource, device_map: dict[str, Any]) -> None:
    """Initialize weights that no tensor fills, compute buffers, tie weights, and report missing weights."""
    model: Any = filling.model
    quantizer = filling.quantizer
    options = LOADING_OPTIONS.get()(
        pretrained_model_name_or_path=str(source.directory), device_map=device_map, dtype=model.dtype, hf_quantizer=quantizer
    )
    FINISH_LOADING.of(model)(model, options, filling.info)
    model.eval()
    if model.can_generate():
        assert source.directory is not None
        has_own_file = (source.directory / "generation_config.json").is_file()
        file_options: dict[str, Any] = {} if has_own_file else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(source.directory, **file_options)
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)


def resolve_class(config: PretrainedConfig, source: ModelSource, requested: type | None = None) -> type[PreTrainedModel]:
    """Return the requested class, the class that a requested Auto class chooses, or the class that the config names."""
    if requested is None:
        return find_architecture(config, source.reference).model_class
    mapping = MODEL_MAPPING.read(requested)
    if mapping is None:
        return requested
    if type(config) not in mapping:
        raise RequestError(
            f"{requested.__name__} has no class for {source.reference!r} ({config.model_type}); give its own class"
        )
    model_class: type[PreTrainedModel] = GET_MODEL_CLASS.get()(config, mapping)
    return model_class


def _set_dtype(config: PretrainedConfig, requested: str | torch.dtype | None, checkpoint: Checkpoint | None) -> torch.dtype:
    """Set and return the dtype: the requested one, else the config's, else that of the first stored floating-point tensor."""
    if isinstance(requested, torch.dtype):
        requested = str(requested).removeprefix("torch.")
    if requested not in (None, "auto", *COMPUTE_DTYPES):
        raise RequestError(f"dtype {requested!r} cannot compute a model; use one of auto, {', '.join(COMPUTE_DTYPES)}")
    stored = () if checkpoint is None else checkpoint.tensors.values()
    floats = (dtype for dtype in map(dtype_of, stored) if dtype.is_floating_point)
    chosen = getattr(config, "dtype", None) if requested in (None, "auto") else getattr(torch, str(requested))
    dtype: torch.dtype = chosen or next(floats, torch.float32)
    for part_config in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part_config is not None:
            part_config.dtype = dtype
    return dtype


def _quantizer(quantize: Quantized) -> Any:
    from transformers.quantizers import AutoHfQuantizer

    library, extra = QUANTIZERS[quantize]
    if find_spec(library) is None:
        raise MissingExtra(library=library, extra=extra, purpose=f"quantize={quantize}")
    quantizer = AutoHfQuantizer.from_config(quantized_config(quantize), pre_quantized=False)
    quantizer.validate_environment(device_map={"": "cpu"})
    return quantizer


def quantized_config(quantize: Quantized) -> Any:
    """Return transformers' config for 8 bits with a scale for each output, or for 4 bits as NF4."""
    if quantize == "int4":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())
