# needs torch
"""Write a model's weights in another dtype (``upshift convert``), as transformers has them after loading in that dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from upshift.errors import RequestError
from upshift.loading.files.checkpoint import CONFIG, METADATA, Checkpoint, find_checkpoint, find_model_folder, small_files
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.safetensors_writer import NewTensor, copy_tensor, read_chunks
from upshift.loading.files.tensors import COMPUTE_DTYPES, DTYPE_NAMES, DTYPES, bytes_of
from upshift.loading.fill_model import Filling, check_coverage
from upshift.loading.gguf import SUFFIX, convert_gguf
from upshift.loading.key_mapping import map_names
from upshift.loading.load import build_empty, resolve_class
from upshift.loading.rewrite.rewrite import Progress, Rewrite, Rewritten, rewrite
from upshift.models.config import config_text
from upshift.models.source import ModelSource

CONVERTED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
DTYPE_KEYS = ("dtype", "torch_dtype")  # the current name in a config.json, and the former one


def convert(model: str, output: Path, *, dtype: str, progress: Progress) -> Rewritten:
    """Write a model's folder with its weights in another dtype.

    Integer tensors stay as they are. Tensors that the model's class keeps in fp32 stay in fp32."""
    if dtype not in COMPUTE_DTYPES:
        raise RequestError(f"--dtype {dtype!r} cannot store weights; use one of {', '.join(sorted(COMPUTE_DTYPES))}")
    if Path(model).suffix == SUFFIX:
        return convert_gguf(Path(model), output, dtype=dtype, progress=progress)
    source, folder = find_model_folder(model)
    if "quantization_config" in source.config:
        raise RequestError(f"the weights of {model!r} are quantized; give the model that they were made from")
    checkpoint = find_checkpoint(folder)
    new_dtypes = _new_dtypes(source, checkpoint, getattr(torch, dtype))
    noted: dict[str, int] = {}
    copies = small_files(folder)
    config = copies.pop(CONFIG)
    job = Rewrite(
        description=f"convert {model} to {dtype}",
        folder=folder,
        tensors=[_to_new_tensor(tensor, new_dtypes.get(name), noted) for name, tensor in checkpoint.tensors.items()],
        sources=(*checkpoint.files, config),
        metadata={**METADATA, **checkpoint.metadata},
        copies=copies,
        documents={CONFIG: config_with_dtype(source.config, dtype)},
        noted=noted,
    )
    return rewrite(job, output, progress)


def config_with_dtype(config: Mapping[str, Any], dtype: str) -> bytes:
    """Return the config.json with this dtype at the top level, and in every part that names a dtype."""

    def replace_dtype(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        replaced = {}
        for key, value in part.items():
            names_dtype = key in DTYPE_KEYS and value is not None
            replaced[key] = dtype if names_dtype else replace_dtype(value)
        return replaced

    new_config = replace_dtype(dict(config))
    if not any(new_config.get(key) for key in DTYPE_KEYS):
        new_config[DTYPE_KEYS[0]] = dtype
    return config_text(new_config).encode()


def _new_dtypes(source: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the new dtype of every tensor to convert.

    Tensors that stay in fp32 are only known for classes of transformers."""
    new_dtypes = {name: dtype for name, tensor in checkpoint.tensors.items() if tensor.dtype in CONVERTED_DTYPES}
    if source.config["model_type"] in transformers.CONFIG_MAPPING:
        config = source.hf_config
        model = build_empty(resolve_class(config, source), config, dtype)
        names = map_names(model, checkpoint.tensors)
        filling = Filling(model, checkpoint.tensors, names, dtype=dtype)
        check_coverage(filling, source)
        for group in names.groups:
            new_dtypes |= {name: filling.dtype_of(group.target) for _, name in group.sources if name in new_dtypes}
    return new_dtypes


def _to_new_tensor(stored: StoredTensor, dtype: torch.dtype | None, noted: dict[str, int]) -> NewTensor:
    if dtype is None or DTYPES[stored.dtype] == dtype:
        return copy_tensor(stored)
    return NewTensor(stored.name, DTYPE_NAMES[dtype], stored.shape, partial(_converted_chunks, stored, dtype, noted))


def _converted_chunks(stored: StoredTensor, dtype: torch.dtype, noted: dict[str, int]) -> Iterator[memoryview]:
    """Yield the converted bytes of a tensor in chunks.

    Add to ``noted`` how many numbers became infinite: fp16 has no finite number above 65,504."""
    infinite = 0
    for chunk in read_chunks(stored):
        original = torch.frombuffer(chunk, dtype=DTYPES[stored.dtype])
        converted = original.to(dtype)
        if dtype == torch.float16 and original.itemsize > 1:  # numbers of 8 bits fit into fp16
            infinite += int(converted.isinf().sum() - original.isinf().sum())
        yield bytes_of(converted)
    if infinite:
        noted[stored.name] = infinite
