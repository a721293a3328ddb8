# needs torch
"""Read a GGUF file, llama.cpp's format of a model, with the names and shapes of transformers.

The gguf package reads the file, and transformers maps its tensors to weights. Functions of transformers undo, one tensor at a
time, what llama.cpp permuted, merged or shifted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import MissingExtra, RequestError
from upshift.internals.transformers_names import (
    GGUF_CHECKPOINT,
    GGUF_METADATA,
    GGUF_NAMES,
    GGUF_PROCESSOR,
    GGUF_PROCESSORS,
    MODEL_MAPPING,
)
from upshift.loading.files.checkpoint import CONFIG, METADATA
from upshift.loading.files.safetensors_header import quote
from upshift.loading.files.safetensors_writer import NewTensor
from upshift.loading.files.tensors import COMPUTE_DTYPES, DTYPE_NAMES, bytes_of
from upshift.loading.rewrite.rewrite import Progress, Rewrite, Rewritten, rewrite
from upshift.models.build import find_architecture
from upshift.models.config import config_text
from upshift.versions import installed_version

SUFFIX = ".gguf"


class GgufFile:
    """An opened GGUF file.

    ``config`` is made from the file's metadata. ``shapes``: the shape of each weight in the file, by transformers' name."""

    def __init__(self, file: Path, reader: Any, config: PretrainedConfig, processor: Any, model: PreTrainedModel) -> None:
        self.file = file
        self.config = config
        self.model_class = type(model)
        self._processor = processor
        self._names: dict[str, str] = GGUF_NAMES.get()(model, processor)
        self._sources: dict[str, list[Any]] = {}
        for tensor in reader.tensors:
            # The names of experts have .weight in the file, but not in the mapping.
            name = self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                self._sources.setdefault(name, []).append(tensor)
        empty = model.state_dict()
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(empty[name].shape) for name in self._sources}
        tied = set(model.all_tied_weights_keys)
        missing = sorted(name for name, _ in model.named_parameters() if name not in self._sources and name not in tied)
        if missing:
            raise RequestError(f"{file} has no tensor for {quote(missing[0])} of {type(model).__name__}; take another file of it")

    def stored_bytes(self, name: str) -> int:
        """Return the bytes in the file that a weight is made of."""
        return sum(int(tensor.n_bytes) for tensor in self._sources[name])

    def read(self, name: str) -> Tensor:
        """Return a weight in fp32. Raise RequestError if its shape is not that of the config."""
        from gguf import dequantize

        tensors: dict[str, Tensor] = {}
        for stored in self._sources[name]:
            try:
                result = self._processor.process(
                    weights=dequantize(stored.data, stored.tensor_type),
                    name=stored.name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": tensors},
                )
            except Exception as error:  # gguf and transformers check little, and the file may be anything
                raise _damaged_error(self.file, f"tensor {quote(stored.name)}: {error}") from None
            if result.name is not None:
                tensors[name] = torch.from_numpy(result.weights.copy())
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != self.shapes[name]:
            actual = "no such weight" if tensor is None else f"the shape {tuple(tensor.shape)}"
            raise _damaged_error(self.file, f"its tensor for {quote(name)} of the shape {self.shapes[name]} has {actual}")
        return tensor


class _ReadBytes:
    """Count the bytes of the tensors that were read, and report them. Several threads may read."""

    def __init__(self, file: GgufFile, progress: Progress) -> None:
        self._unread = {name: file.stored_bytes(name) for name in file.shapes}
        self._total = sum(self._unread.values())
        self._done = 0
        self._progress = progress
        self._lock = Lock()

    def add(self, name: str) -> None:
        """Count a tensor. One that is read again does not count again."""
        with self._lock:
            self._done += self._unread.pop(name, 0)
            self._progress(self._done, self._total)


class _LazyTensor:
    """A tensor of the file for from_pretrained, which reads it by indexing it."""

    def __init__(self, file: GgufFile, name: str, read_bytes: _ReadBytes | None) -> None:
        self._file = file
        self._name = name
        self._read_bytes = read_bytes
        self.shape = file.shapes[name]

    def __getitem__(self, _: Any) -> Tensor:
        tensor = self._file.read(self._name)
        if self._read_bytes is not None:
            self._read_bytes.add(self._name)
        return tensor


def open_gguf(file: Path) -> GgufFile:
    """Open a file and read only its metadata.

    Raise RequestError for a damaged file, and for an architecture that transformers does not know."""
    if installed_version("gguf") is None:
        raise MissingExtra(library="gguf", extra="gguf", purpose=f"reading {file.name}")
    if not file.is_file():
        raise RequestError(f"there is no file {str(file)!r}; give the path of a {SUFFIX} file")
    from gguf import GGUFReader

    try:
        metadata, _ = GGUF_METADATA.get()(str(file))  # read this first: on a damaged file the gguf package may loop forever
        config_fields = GGUF_CHECKPOINT.get()(str(file), return_tensors=False)["config"]
        config = transformers.AutoConfig.for_model(**config_fields)
        model = _build_empty(config, file)
        processor = GGUF_PROCESSORS.get().get(metadata["general.architecture"], GGUF_PROCESSOR.get())
        return GgufFile(file, GGUFReader(file), config, processor(config=config_fields), model)
    except RequestError:
        raise
    except Exception as error:  # gguf and transformers check little, and the file may be anything
        raise _damaged_error(file, str(error) or type(error).__name__) from None


def load_gguf(file: Path, *, dtype: str | torch.dtype | None = None, progress: Progress | None = None) -> PreTrainedModel:
    """Return the model in evaluation mode, in ``dtype`` or fp32. ``progress`` counts the bytes of the file's tensors.

    Besides the model's weights, only the few that are being read are in memory."""
    if dtype not in (None, "auto", *COMPUTE_DTYPES, *map(partial(getattr, torch), COMPUTE_DTYPES)):
        raise RequestError(f"dtype {dtype!r} cannot compute a model; use one of auto, {', '.join(COMPUTE_DTYPES)}")
    opened = open_gguf(file)
    dtype = torch.float32 if dtype in (None, "auto") else dtype
    read_bytes = None if progress is None else _ReadBytes(opened, progress)
    state_dict = {name: _LazyTensor(opened, name, read_bytes) for name in opened.shapes}
    model: PreTrainedModel = opened.model_class.from_pretrained(None, config=opened.config, state_dict=state_dict, dtype=dtype)
    return model


def convert_gguf(file: Path, output: Path, *, dtype: str, progress: Progress) -> Rewritten:
    """Write the file's weights as safetensors, with a config.json. The tokenizer has another format and is not written."""
    opened = open_gguf(file)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    config = opened.config.to_dict() | {"architectures": [opened.model_class.__name__], "dtype": dtype}
    dtype_name = DTYPE_NAMES[torch_dtype]
    job = Rewrite(
        description=f"convert {file} to {dtype}",
        folder=file.parent,
        tensors=[
            NewTensor(name, dtype_name, shape, partial(_weight_bytes, opened, name, torch_dtype))
            for name, shape in opened.shapes.items()
        ],
        sources=(file,),
        metadata=METADATA,
        copies={},
        documents={CONFIG: config_text(config).encode()},
    )
    return rewrite(job, output, progress)


def _weight_bytes(file: GgufFile, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
    yield bytes_of(file.read(name).to(dtype))


def _build_empty(config: PretrainedConfig, file: Path) -> PreTrainedModel:
    """Return an empty model of the class that the metadata names (as for an encoder of T5), else of the generating class."""
    if config.architectures:
        model_class: Any = find_architecture(config, str(file)).model_class
    else:
        mapping: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        model_class = MODEL_MAPPING.read(mapping)[type(config)]
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    return model


def _damaged_error(file: Path, problem: str) -> RequestError:
    reason = " ".join(problem.split())[:300]
    return RequestError(f"{file} cannot be read ({reason}); it is damaged, or transformers does not know this form of GGUF")
