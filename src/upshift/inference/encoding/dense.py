"""Apply the Dense modules of sentence-transformers to vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.encoding.model_config import ACTIVATION_MODULES
from upshift.models.config import read_json

DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"  # sentence-transformers'


class Dense:
    """A linear layer with an activation, from the folder of such a module. It computes in fp32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        config = read_json(folder / "config.json")
        name = str(config.get("activation_function", DEFAULT_ACTIVATION))
        if not name.startswith(ACTIVATION_MODULES):
            raise RequestError(f"{folder} has the activation {name!r}, which is Python code that Upshift does not run")
        self.activation = getattr(torch.nn, name.rsplit(".", 1)[-1])()
        weights = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
        self.weight = weights["linear.weight"]
        self.bias = weights.get("linear.bias")
        self.adds_input = bool(config.get("use_residual"))
        self.residual = weights.get("residual.weight")

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Return vectors [N, out] of vectors [N, in]."""
        import torch

        inputs = torch.from_numpy(np.ascontiguousarray(vectors))
        with torch.inference_mode():
            outputs: Any = self.activation(torch.nn.functional.linear(inputs, self.weight, self.bias))
            if self.adds_input:
                outputs = outputs + (inputs if self.residual is None else torch.nn.functional.linear(inputs, self.residual))
        result: np.ndarray = outputs.numpy()
        return result
