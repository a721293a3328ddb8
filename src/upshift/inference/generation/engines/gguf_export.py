"""Write a model's weights as llama.cpp's GGUF file, tensor by tensor from safetensors. llama.cpp itself rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from upshift.atomic_file import make_once, sync_and_rename
from upshift.errors import JobFailed, RequestError
from upshift.inference.generation.engines.gguf_families import describe, family_of, rope_divisors
from upshift.inference.generation.engines.llamacpp_library import load_llamacpp
from upshift.inference.weights import weight_files
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.tensors import read_tensor
from upshift.models.source import ModelSource

IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files; llama.cpp computes them
HEAD = "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"
FP32_FILE_TYPE = "ALL_F32"


def make_gguf(source: ModelSource, folder: Path, file_type: str, threads: int) -> Path:
    """Return the model's GGUF file of this llama_ftype. Write it if it does not exist.

    llama.cpp makes it from the fp32 file. Each file appears only when it is complete."""
    config: Any = source.hf_config.get_text_config(decoder=True)
    family_of(config)  # raises before anything is loaded
    fp32_path = folder / f"{FP32_FILE_TYPE}.gguf"
    path = folder / f"{file_type}.gguf"

    def write_files() -> None:
        if not fp32_path.is_file():
            _write(source, config, folder / f"writing-{fp32_path.name}")
            sync_and_rename(folder / f"writing-{fp32_path.name}", fp32_path)
        if path != fp32_path:
            _quantize(fp32_path, folder / f"writing-{path.name}", file_type, threads)
            sync_and_rename(folder / f"writing-{path.name}", path)

    make_once(path, write_files, beside=fp32_path)
    return path


def _write(source: ModelSource, config: Any, path: Path) -> None:
    """Write the fp32 file. The tensors are read one after the other."""
    import gguf
    import torch

    family = family_of(config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family.architecture)
    describe(writer, config, family)
    divisors = rope_divisors(config)
    if divisors is not None:
        _add_tensor(writer, ROPE_DIVISORS, divisors.shape)
    with ExitStack() as stack:
        stack.callback(writer.close)
        tensors = list(_stored_tensors(weight_files(source), config))
        for tensor in tensors:
            gguf_name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise RequestError(f"GGUF has no name for {tensor.name!r} of a {config.model_type!r}")
            changed = family.change(tensor.name, torch.empty(tensor.shape, device="meta"), config)
            _add_tensor(writer, gguf_name, changed.shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors.numpy())
        for tensor in tensors:
            changed = family.change(tensor.name, read_tensor(tensor).float(), config)
            writer.write_tensor_data(changed.contiguous().numpy())


def _stored_tensors(files: list[Path], config: Any) -> Iterator[StoredTensor]:
    """Yield the tensors to write. A head that is tied to the embeddings is left out."""
    for file in files:
        for tensor in read_header(file).tensors:
            if not tensor.name.endswith(IGNORED) and not (tensor.name == HEAD and config.tie_word_embeddings):
                yield tensor


def _add_tensor(writer: Any, name: str, shape: Any) -> None:
    writer.add_tensor_info(name, tuple(shape), np.dtype(np.float32), 4 * prod(shape))


def _quantize(fp32_path: Path, path: Path, file_type: str, threads: int) -> None:
    library = load_llamacpp()
    settings = library.api.llama_model_quantize_default_params()
    settings.ftype = getattr(library.api, f"LLAMA_FTYPE_{file_type}")
    settings.nthread = threads
    if library.api.llama_model_quantize(str(fp32_path).encode(), str(path).encode(), byref(settings)):
        raise JobFailed(f"llama.cpp could not round {fp32_path.name}: {library.last_error}")
