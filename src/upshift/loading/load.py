"""``upshift.load_model``: build a transformers model empty and fill it straight from its files.

transformers decides the class, names, dtypes, the initialization of weights that no tensor fills, ties, buffers, and the report
of missing and unexpected weights. Models that are stored quantized are loaded by its ``from_pretrained``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from upshift.errors import MissingExtra, RequestError
from upshift.hardware.detect import detect
from upshift.hardware.probe import memory_rate
from upshift.internals.transformers_names import FINISH_LOADING, GET_MODEL_CLASS, LOADING_OPTIONS, MODEL_MAPPING, PATCH_RECORDERS
from upshift.loading.files.checkpoint import INDEX, WEIGHTS, Checkpoint, find_checkpoint
from upshift.loading.files.tensors import COMPUTE_DTYPES, dtype_of
from upshift.loading.fill import Filling, Progress, Run, check_coverage, check_missing
from upshift.loading.gguf import SUFFIX, load_gguf
from upshift.loading.key_mapping import map_names
from upshift.loading.placement.apply import PlacementOptions, check_not_quantized, fill_and_dispatch, plan_placement
from upshift.loading.placement.place import Placement
from upshift.models.build import explain_build_errors, find_architecture
from upshift.models.source import ModelSource, fetch_weights, find_model

Quantized = Literal["int8", "int4"]
QUANTIZERS: dict[Quantized, tuple[str, str]] = {  # library, extra of pip install 'upshift[...]'
    "int8": ("torchao", "quant"),
    "int4": ("bitsandbytes", "bitsandbytes"),  # torchao 0.18 packs 4 bits for GPUs alone
}


def load_model(
    model: str, *, dtype: str | torch.dtype | None = None, device_map: str | int | Mapping[str, str | int] | None = None,
    max_memory: Mapping[str | int, str | int] | None = None, offload_folder: str | Path | None = None,
    quantize: Quantized | None = None, model_class: type | None = None, progress: Progress | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Return the model, ready to evaluate. Weights on the disk are read when their module runs, from the files themselves.

    ``dtype``: None means the config's dtype, else the stored one. ``device_map``: None puts all on the CPU; else "auto", or a
    map as transformers takes it, under ``max_memory``. ``offload_folder`` holds weights on the disk that must be converted.
    ``model_class``: a class of transformers, an Auto class too; None means the class that the config names.

    Raise RequestError for a model without weights, damaged files, and weights that are not those of the config."""
    if Path(model).suffix == SUFFIX:
        if (device_map, max_memory, offload_folder, quantize, model_class) != (None, None, None, None, None):
            raise RequestError(f"{model!r} is loaded as a whole onto the CPU; for anything else write it first: upshift convert")
        return load_gguf(Path(model), dtype=dtype)
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} is an adapter; load the model that it was made for, then peft.PeftModel.from_pretrained")
    fetch_weights(source)
    if device_map is None and (max_memory is not None or offload_folder is not None):
        raise RequestError('max_memory and offload_folder are for a model that is divided; give device_map="auto" with them')
    folder = None if offload_folder is None else Path(offload_folder)
    where = None if device_map is None else PlacementOptions(device_map, max_memory, folder)
    return load_source(
        source, dtype=dtype, where=where, quantize=quantize, model_class=model_class, progress=progress,
        may_lack=model_class is not None,
    )  # fmt: skip


def load_source(
    source: ModelSource, *, dtype: str | torch.dtype | None = None, where: PlacementOptions | None = None, quantize: Quantized | None = None,
    model_class: type | None = None, progress: Progress | None = None, may_lack: bool = False, run: Run | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Return the model of a source. ``model_class``: None means the class that the config names.

    ``may_lack``: transformers initializes, and reports, weights that no file holds. Otherwise RequestError is raised if the
    result of ``run`` depends on such a weight (None: the answer depends on all)."""
    if quantize is not None and quantize not in QUANTIZERS:
        raise RequestError(f"quantize={quantize!r} is not known; use {' or '.join(QUANTIZERS)}")
    if source.directory is None:
        raise RequestError(f"{source.reference!r} is a config without weights; give a directory written by save_pretrained")
    check_not_quantized(quantize, None if where is None else where.device_map)
    config = source.hf_config
    kind = class_of(config, source, model_class)
    if source.config.get("quantization_config"):
        if quantize is not None:
            raise RequestError(f"the weights of {source.reference!r} are quantized already; leave out quantize={quantize!r}")
        if where is not None:
            raise RequestError(f"the weights of {source.reference!r} are quantized and are loaded whole; leave out device_map")
        return _load_quantized(source, kind, dtype, may_lack=may_lack or run is not None)
    checkpoint = find_checkpoint(source.directory)
    config.name_or_path = str(source.directory)
    made = _set_dtype(config, dtype, checkpoint)
    quantizer = None if quantize is None else _quantizer(quantize)
    model = build_empty(kind, config, made)
    if quantizer is not None:
        quantizer.preprocess_model(model=model, dtype=made, device_map={"": "cpu"}, checkpoint_files=None, use_kernels=False)
    filling = Filling(model, checkpoint.tensors, map_names(model, checkpoint.tensors, quantizer), dtype=made, quantizer=quantizer)
    if not may_lack:
        check_coverage(filling, source, run=run, all_used=run is None)
    if where is not None:
        fill_and_dispatch(filling, checkpoint, where, lambda devices: finish(filling, source, devices), progress)
        return model
    filling.run(progress=progress)
    finish(filling, source, {"": "cpu"}, quantizer)
    return model


def _load_quantized(
    source: ModelSource, kind: type[PreTrainedModel], dtype: str | torch.dtype | None, *, may_lack: bool
) -> PreTrainedModel:
    """Load with from_pretrained.

    Only transformers and the library know how scales belong to codes, for each of some twenty methods."""
    try:
        loaded: Any = kind.from_pretrained(  # returns loading information, too, which its type does not show
            source.directory, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
    except ImportError as error:
        raise RequestError(f"{source.reference!r} does not load: {' '.join(str(error).split())}") from None
    model: PreTrainedModel
    model, told = loaded
    if not may_lack:
        check_missing(set(told["missing_keys"]), model, source)
    return model


def place_source(source: ModelSource, *, dtype: str | None = None, where: PlacementOptions) -> Placement:
    """Return where ``load_source`` would put each module."""
    return place_empty(*empty_with_files(source, dtype), where)


def empty_with_files(source: ModelSource, dtype: str | None = None) -> tuple[PreTrainedModel, Checkpoint | None]:
    """Return the empty model as ``load_source`` builds it, with the headers of its files, or None if there are no files."""
    config = source.hf_config
    kind = class_of(config, source)
    folder = source.directory
    stored = folder is not None and any((folder / name).exists() for name in (WEIGHTS, INDEX))
    checkpoint = find_checkpoint(folder) if stored and folder is not None else None
    made = _set_dtype(config, dtype, checkpoint)
    return build_empty(kind, config, made), checkpoint


def place_empty(model: PreTrainedModel, checkpoint: Checkpoint | None, where: PlacementOptions) -> Placement:
    """Measure this machine and return where each module of an empty model would be placed."""
    return plan_placement(model, checkpoint, where, memory_rate(detect()))


def build_empty(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on the meta device, untied, as from_pretrained builds it."""
    with explain_build_errors(kind.__name__), ExitStack() as contexts:
        for context in kind.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        model = kind(config)
        PATCH_RECORDERS.get()(model)
    return model


def empty_of(source: ModelSource) -> PreTrainedModel:
    """Return the empty model in fp32, built from the config alone."""
    config = source.hf_config
    return build_empty(class_of(config, source), config, torch.float32)


def finish(filling: Filling, source: ModelSource, device_map: dict[str, Any], quantizer: Any = None) -> None:
    """Initialize weights that no tensor fills, compute buffers, tie weights, and report what was missing."""
    model: Any = filling.model
    how = LOADING_OPTIONS.get()(
        pretrained_model_name_or_path=str(source.directory), device_map=device_map, dtype=model.dtype, hf_quantizer=quantizer
    )
    FINISH_LOADING.of(model)(model, how, filling.info)
    model.eval()
    if model.can_generate():
        assert source.directory is not None
        own = (source.directory / "generation_config.json").is_file()
        beside: dict[str, Any] = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(source.directory, **beside)
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)


def class_of(config: PretrainedConfig, source: ModelSource, asked: type | None = None) -> type[PreTrainedModel]:
    if asked is None:
        return find_architecture(config, source.reference).model_class
    mapping = MODEL_MAPPING.read(asked)
    if mapping is None:
        return asked
    if type(config) not in mapping:
        raise RequestError(f"{asked.__name__} has no class for {source.reference!r} ({config.model_type}); give its own class")
    found: type[PreTrainedModel] = GET_MODEL_CLASS.get()(config, mapping)
    return found


def _set_dtype(config: PretrainedConfig, asked: str | torch.dtype | None, checkpoint: Checkpoint | None) -> torch.dtype:
    """Set and return the dtype as transformers chooses it: the config's, else that of the first stored floating-point tensor."""
    if isinstance(asked, torch.dtype):
        asked = str(asked).removeprefix("torch.")
    if asked not in (None, "auto", *COMPUTE_DTYPES):
        raise RequestError(f"dtype {asked!r} is none that models are computed in; use one of auto, {', '.join(COMPUTE_DTYPES)}")
    stored = () if checkpoint is None else checkpoint.tensors.values()
    floats = (dtype for dtype in map(dtype_of, stored) if dtype.is_floating_point)
    said = getattr(config, "dtype", None) if asked in (None, "auto") else getattr(torch, str(asked))
    made: torch.dtype = said or next(floats, torch.float32)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = made
    return made


def _quantizer(kind: Quantized) -> Any:
    from transformers.quantizers import AutoHfQuantizer

    library, extra = QUANTIZERS[kind]
    if find_spec(library) is None:
        raise MissingExtra(library=library, extra=extra, purpose=f"quantize={kind}")
    quantizer = AutoHfQuantizer.from_config(quantized_config(kind), pre_quantized=False)
    quantizer.validate_environment(device_map={"": "cpu"})
    return quantizer


def quantized_config(kind: Quantized) -> Any:
    """Return transformers' config: 8 bits with a scale for each output, or 4 bits as NF4."""
    if kind == "int4":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())
