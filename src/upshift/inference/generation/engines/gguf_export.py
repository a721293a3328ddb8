"""Write a model's weights as llama.cpp's GGUF file, tensor by tensor of safetensors. llama.cpp itself rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from upshift.atomic_file import make_once
from upshift.errors import JobFailed, RequestError
from upshift.inference.generation.engines.gguf_families import describe, family_of, rope_factors
from upshift.inference.generation.engines.llamacpp_library import load_llamacpp
from upshift.inference.weights import weight_files
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.tensors import read_tensor
from upshift.models.source import ModelSource

MASKS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # that older files keep, and are computed anew
HEAD = "lm_head.weight"
FACTORS = "rope_freqs.weight"
WHOLE = "ALL_F32"


def make_gguf(source: ModelSource, folder: Path, weights: str, threads: int) -> Path:
    """Return the model's file of this llama_ftype, which llama.cpp makes from the fp32 file. Each file is put in
    place whole."""
    text: Any = source.hf_config.get_text_config(decoder=True)
    family_of(text)  # refused before anything is loaded
    plain, path = folder / f"{WHOLE}.gguf", folder / f"{weights}.gguf"

    def write() -> None:
        if not plain.is_file():
            _write(source, text, folder / f"writing-{plain.name}")
            (folder / f"writing-{plain.name}").replace(plain)
        if path != plain:
            _round(plain, folder / f"writing-{path.name}", weights, threads)
            (folder / f"writing-{path.name}").replace(path)

    make_once(path, write, beside=plain)
    return path


def _write(source: ModelSource, text: Any, path: Path) -> None:
    import gguf
    import torch

    family = family_of(text)
    architecture = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, text.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family.architecture)
    describe(writer, text, family)
    factors = rope_factors(text)
    if factors is not None:
        _add(writer, FACTORS, factors.shape)
    with ExitStack() as stack:
        stack.callback(writer.close)
        tensors = list(_stored(weight_files(source), text))
        for tensor in tensors:
            name = tensor.name
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None:
                raise RequestError(f"GGUF has no name for {name!r} of a {text.model_type!r}")
            _add(writer, known, family.change(name, torch.empty(tensor.shape, device="meta"), text).shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for tensor in tensors:
            writer.write_tensor_data(family.change(tensor.name, read_tensor(tensor).float(), text).contiguous().numpy())


def _stored(files: list[Path], text: Any) -> Iterator[StoredTensor]:
    for file in files:
        for tensor in read_header(file).tensors:
            if not tensor.name.endswith(MASKS) and not (tensor.name == HEAD and text.tie_word_embeddings):
                yield tensor


def _add(writer: Any, name: str, shape: Any) -> None:
    writer.add_tensor_info(name, tuple(shape), np.dtype(np.float32), 4 * prod(shape))


def _round(plain: Path, path: Path, weights: str, threads: int) -> None:
    library = load_llamacpp()
    settings = library.api.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(library.api, f"LLAMA_FTYPE_{weights}"), threads
    if library.api.llama_model_quantize(str(plain).encode(), str(path).encode(), byref(settings)):
        raise JobFailed(f"llama.cpp could not round {plain.name}: {library.said}")
