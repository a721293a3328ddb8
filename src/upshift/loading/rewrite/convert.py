"""``upshift convert``: write the same weights in another dtype, as transformers has them after it loads them in that dtype."""

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
from upshift.loading.fill import Filling, check_coverage
from upshift.loading.gguf import SUFFIX, convert_gguf
from upshift.loading.key_mapping import map_names
from upshift.loading.load import build_empty, class_of
from upshift.loading.rewrite.rewrite import Progress, Rewrite, Rewritten, rewrite
from upshift.models.config import config_text
from upshift.models.source import ModelSource

FRACTIONS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")  # what is converted
DTYPE_KEYS = ("dtype", "torch_dtype")  # in a config.json: the name of today, and the one before


def convert(model: str, output: Path, *, dtype: str, progress: Progress) -> Rewritten:
    """Write a model's folder with its weights in another dtype.

    Tensors of whole numbers stay as they are. Tensors that the model's class keeps in fp32 stay in fp32."""
    if dtype not in COMPUTE_DTYPES:
        raise RequestError(f"--dtype {dtype!r} is none that weights are kept in; use one of {', '.join(sorted(COMPUTE_DTYPES))}")
    if Path(model).suffix == SUFFIX:
        return convert_gguf(Path(model), output, dtype=dtype, progress=progress)
    source, folder = find_model_folder(model)
    if "quantization_config" in source.config:
        raise RequestError(f"the weights of {model!r} are quantized, which is no dtype; give the model that they were made from")
    checkpoint = find_checkpoint(folder)
    chosen = _chosen(source, checkpoint, getattr(torch, dtype))
    noted: dict[str, int] = {}
    copies = small_files(folder)
    config = copies.pop(CONFIG)
    job = Rewrite(
        words=f"convert {model} to {dtype}",
        folder=folder,
        tensors=[_converted(tensor, chosen.get(name), noted) for name, tensor in checkpoint.tensors.items()],
        sources=(*checkpoint.files, config),
        metadata={**METADATA, **checkpoint.metadata},
        copies=copies,
        documents={CONFIG: said_in(source.config, dtype)},
        noted=noted,
    )
    return rewrite(job, output, progress)


def said_in(config: Mapping[str, Any], dtype: str) -> bytes:
    """Return config.json with this dtype at its top and in every part of it that names a dtype."""

    def said(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {key: dtype if key in DTYPE_KEYS and value is not None else said(value) for key, value in part.items()}

    found = said(dict(config))
    if not any(found.get(key) for key in DTYPE_KEYS):
        found[DTYPE_KEYS[0]] = dtype
    return config_text(found).encode()


def _chosen(source: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the new dtype of every tensor that is converted.

    For a class that transformers does not have, the tensors that it keeps in fp32 cannot be known."""
    chosen = {name: dtype for name, tensor in checkpoint.tensors.items() if tensor.dtype in FRACTIONS}
    if source.config["model_type"] in transformers.CONFIG_MAPPING:
        config = source.hf_config
        model = build_empty(class_of(config, source), config, dtype)
        names = map_names(model, checkpoint.tensors)
        filling = Filling(model, checkpoint.tensors, names, dtype=dtype)
        check_coverage(filling, source)
        for group in names.groups:
            chosen |= {name: filling.dtype_of(group.target) for _, name in group.sources if name in chosen}
    return chosen


def _converted(stored: StoredTensor, dtype: torch.dtype | None, noted: dict[str, int]) -> NewTensor:
    if dtype is None or DTYPES[stored.dtype] == dtype:
        return copy_tensor(stored)
    return NewTensor(stored.name, DTYPE_NAMES[dtype], stored.shape, partial(_pieces, stored, dtype, noted))


def _pieces(stored: StoredTensor, dtype: torch.dtype, noted: dict[str, int]) -> Iterator[memoryview]:
    """Yield the converted bytes of a tensor, piece by piece.

    ``noted`` receives how many numbers became infinite: fp16 has no finite number above 65,504."""
    infinite = 0
    for piece in read_chunks(stored):
        before = torch.frombuffer(piece, dtype=DTYPES[stored.dtype])
        after = before.to(dtype)
        if dtype == torch.float16 and before.itemsize > 1:  # numbers of 8 bits fit into fp16
            infinite += int(after.isinf().sum() - before.isinf().sum())
        yield bytes_of(after)
    if infinite:
        noted[stored.name] = infinite
