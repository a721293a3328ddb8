"""Build a tf.Module from a Hugging Face checkpoint, and save it as one.

Variables have the Hugging Face names of the weights, and tied weights are one variable. Weights are copied from the mapped files
into variables one by one, so that no more than one is in memory twice. The torch model stays as an empty skeleton that programs
are exported from. Saving uses transformers' save_pretrained with the weights from TensorFlow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tensorflow as tf
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from upshift.errors import RequestError
from upshift.internals.torch_names import BUFFERS
from upshift.loading.load import load_source
from upshift.models.build import build_model, choose_class
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.xla.lowering.program import as_constant
from upshift.xla.model_export import first_names, set_implementations, unbacked_tensor

Dtype = Literal["float32", "bfloat16"]
MAX_SHARD_SIZE = "4GB"  # safetensors needs all tensors of a file in host memory at once
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class XlaModel(tf.Module):  # type: ignore[misc]  # tensorflow has no types
    """Hold a model in TensorFlow.

    ``weights`` has the variables by the first Hugging Face name of each. ``names`` maps every name of the state_dict to the first
    name of its weight."""

    def __init__(self, source: ModelSource, torch_model: PreTrainedModel, weights: dict[str, tf.Variable]) -> None:
        super().__init__(name="xla_model")
        self.source = source
        self.config = torch_model.config
        self._torch_model = [torch_model]  # a list, because tf.Module then does not search it for variables
        self.weights = weights
        self._names = tuple(first_names(torch_model).items())

    @property
    def torch_model(self) -> PreTrainedModel:
        return self._torch_model[0]

    @property
    def names(self) -> dict[str, str]:
        return dict(self._names)

    def save(self, directory: str | Path) -> None:
        """Save the model as a Hugging Face directory: safetensors, with the published names, in the dtype of the variables."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        state = _torch_state(self)
        config_dtype = self.config.dtype
        shows_progress = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        self.config.dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        try:
            self.torch_model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_SHARD_SIZE, save_original_format=True)
        finally:
            self.config.dtype = config_dtype
            if shows_progress:
                transformers_logging.enable_progress_bar()


def build(
    reference: str | ModelSource,
    *,
    dtype: Dtype = "float32",
    weights_dtype: Dtype | None = None,
    from_config: bool = False,
    seed: int = 0,
) -> XlaModel:
    """Build a model. Raise RequestError for adapters, quantized weights, and directories without weights.

    Args:
        reference: the name or the directory of a model.
        dtype: the dtype to compute in.
        weights_dtype: the dtype of the variables; None: the same as ``dtype``. With bfloat16 over float32 this is Keras' policy
            mixed_bfloat16.
        from_config: make random weights from ``seed`` instead of loading them.
        seed: of the random weights.
    """
    for name in (dtype, weights_dtype or dtype):
        if name not in DTYPES:
            raise RequestError(f"dtype {name!r} is not computed under XLA here; use {' or '.join(DTYPES)}")
    source = find_model(reference) if isinstance(reference, str) else reference
    _check_source(source)
    model = _random_model(source, seed) if from_config else _load(source)
    compute_dtype = DTYPES[dtype]
    weights = _make_variables(model, DTYPES[weights_dtype or dtype], compute_dtype)
    for module in model.modules():
        for name, buffer in BUFFERS.of(module).items():
            if buffer is not None and buffer.dtype in (torch.bfloat16, torch.float16):
                BUFFERS.of(module)[name] = buffer.to(compute_dtype)
    model.config.dtype = compute_dtype
    return XlaModel(source, set_implementations(model).eval(), weights)


def _check_source(source: ModelSource) -> None:
    if source.adapter is not None:
        raise RequestError(
            f"{source.reference!r} is an adapter; write one model of both: upshift merge {source.reference} --output DIR, "
            "then give DIR"
        )
    if source.config.get("quantization_config"):
        raise RequestError(f"the weights of {source.reference!r} are quantized; give the model that it was made from")


def _load(source: ModelSource) -> PreTrainedModel:
    """Load the model in the dtype of its files, so that weights stay mapped files."""
    fetch_weights(source)
    return load_source(source)


def _random_model(source: ModelSource, seed: int) -> PreTrainedModel:
    config = source.hf_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config, choose_class(config, source.reference)[0], dtype=torch.float32)


def _make_variables(model: PreTrainedModel, dtype: torch.dtype, compute_dtype: torch.dtype) -> dict[str, tf.Variable]:
    """Make the variables. Each weight of the torch model is replaced by an unbacked tensor once its variable is made."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    variables: dict[str, tf.Variable] = {}
    for name, first in first_names(model).items():
        if name != first:
            continue
        tensor = state[name]
        is_float = tensor.is_floating_point()
        stored = tensor.detach().to(dtype) if is_float else tensor.detach()
        initial = as_constant(stored)
        variables[name] = tf.Variable(initial, trainable=tensor.requires_grad, name=name.replace(".", "/"))
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = unbacked_tensor(tensor.shape, compute_dtype if is_float else tensor.dtype)
    return variables


def _torch_state(model: XlaModel) -> dict[str, Tensor]:
    """Return the variables as torch tensors on the same memory, under every name of the state_dict."""
    tensors = {name: _as_torch(variable.numpy()) for name, variable in model.weights.items()}
    return {name: tensors[first] for name, first in model.names.items()}


def _as_torch(numbers: object) -> Tensor:
    if getattr(getattr(numbers, "dtype", None), "name", "") == "bfloat16":
        return torch.from_numpy(numbers.view("uint16").copy()).view(torch.bfloat16)  # type: ignore[attr-defined]
    return torch.from_numpy(numbers)
