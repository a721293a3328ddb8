"""A Hugging Face checkpoint as a tf.Module: variables under their Hugging Face names, tied weights one variable.

Weights go from the files' own pages into variables one by one, so that none is held twice; the torch model stays as an empty
skeleton that programs are exported from. ``weights_dtype`` is what variables are kept in, ``dtype`` what is computed in: Keras'
policy mixed_bfloat16 is bfloat16 over float32. A trained model is saved as transformers names, shards and writes it; the weights
come from TensorFlow.
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
from upshift.xla.skeleton import names_of, set_implementations, untouched

Dtype = Literal["float32", "bfloat16"]
MAX_SHARD_SIZE = "4GB"  # safetensors wants every tensor of one file in host memory at once
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class XlaModel(tf.Module):  # type: ignore[misc]  # tensorflow has no types
    """A model in TensorFlow. ``weights`` holds variables by their first Hugging Face name. ``names`` maps every name
    of the state_dict to that first name."""

    def __init__(self, source: ModelSource, torch_model: PreTrainedModel, weights: dict[str, tf.Variable]) -> None:
        super().__init__(name="xla_model")
        self.source = source
        self.config = torch_model.config
        self._torch_model = [torch_model]  # in a list that tf.Module does not search for variables
        self.weights = weights
        self._names = tuple(names_of(torch_model).items())

    @property
    def torch_model(self) -> PreTrainedModel:
        return self._torch_model[0]

    @property
    def names(self) -> dict[str, str]:
        return dict(self._names)

    def save(self, directory: str | Path) -> None:
        """Save a Hugging Face directory by transformers' own save_pretrained: safetensors, in the names that it is
        published in, and in the dtype of the variables."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        state = _torch_state(self)
        kept = self.config.dtype
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        self.config.dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        try:
            self.torch_model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_SHARD_SIZE, save_original_format=True)
        finally:
            self.config.dtype = kept
            if shown:
                transformers_logging.enable_progress_bar()


def build(
    reference: str | ModelSource, *, dtype: Dtype = "float32", weights_dtype: Dtype | None = None, from_config: bool = False,
    seed: int = 0,
) -> XlaModel:  # fmt: skip
    """Build a model.

    ``weights_dtype``: None is the same as ``dtype``. ``from_config``: random weights, by ``seed``. Raise RequestError
    for adapters, quantized weights, and directories without weights."""
    for name in (dtype, weights_dtype or dtype):
        if name not in DTYPES:
            raise RequestError(f"dtype {name!r} is not computed under XLA here; use {' or '.join(DTYPES)}")
    source = find_model(reference) if isinstance(reference, str) else reference
    _check(source)
    model = _random(source, seed) if from_config else _loaded(source)
    computed = DTYPES[dtype]
    weights = _variables(model, DTYPES[weights_dtype or dtype], computed)
    for module in model.modules():
        for name, buffer in BUFFERS.of(module).items():
            if buffer is not None and buffer.dtype in (torch.bfloat16, torch.float16):
                BUFFERS.of(module)[name] = buffer.to(computed)
    model.config.dtype = computed
    return XlaModel(source, set_implementations(model).eval(), weights)


def _check(source: ModelSource) -> None:
    if source.adapter is not None:
        raise RequestError(f"{source.reference!r} is an adapter; merge it into its model first: upshift merge")
    if source.config.get("quantization_config"):
        raise RequestError(f"the weights of {source.reference!r} are quantized; give the model that it was made from")


def _loaded(source: ModelSource) -> PreTrainedModel:
    """Load the model in the dtype that the config says, so that weights stay the files' own pages."""
    fetch_weights(source)
    return load_source(source)


def _random(source: ModelSource, seed: int) -> PreTrainedModel:
    config = source.hf_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config, choose_class(config, source.reference)[0], dtype=torch.float32)


def _variables(model: PreTrainedModel, dtype: torch.dtype, computed: torch.dtype) -> dict[str, tf.Variable]:
    """Make the variables. Each weight of the model is let go of when its variable is made. An empty one of the
    computed dtype stays in its place."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    variables: dict[str, tf.Variable] = {}
    for name, first in names_of(model).items():
        if name != first:
            continue
        tensor = state[name]
        floating = tensor.is_floating_point()
        made = as_constant(tensor.detach().to(dtype) if floating else tensor.detach())
        variables[name] = tf.Variable(made, trainable=tensor.requires_grad, name=name.replace(".", "/"))
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = untouched(tensor.shape, computed if floating else tensor.dtype)
    return variables


def _torch_state(model: XlaModel) -> dict[str, Tensor]:
    """Return variables as torch's tensors on the same memory, by every name of the state_dict."""
    found = {name: _as_torch(variable.numpy()) for name, variable in model.weights.items()}
    return {name: found[first] for name, first in model.names.items()}


def _as_torch(numbers: object) -> Tensor:
    if getattr(getattr(numbers, "dtype", None), "name", "") == "bfloat16":
        return torch.from_numpy(numbers.view("uint16").copy()).view(torch.bfloat16)  # type: ignore[attr-defined]
    return torch.from_numpy(numbers)
