"""Run transformers in PyTorch on images and sounds: the reference of the other engines."""

from __future__ import annotations

import numpy as np
import torch

from upshift.inference.media.engines.base import Arrays, MediaBuild
from upshift.inference.media.model import MediaForward, load_encoder
from upshift.inference.torch_settings import DTYPES, inference_settings
from upshift.loading.media_files import Modality


class TorchMediaEngine:
    """transformers in PyTorch, kernel by kernel."""

    def __init__(self, build: MediaBuild) -> None:
        self.build = build
        self.dtype = DTYPES.get(build.setup.precision)
        self.model = load_encoder(build.source, build.config).to(build.setup.device, self.dtype)

    def rows(self, modality: Modality, arrays: Arrays) -> np.ndarray:
        forward = MediaForward(self.model, self.build.config, modality, tuple(arrays)).eval()
        with inference_settings(self.build.setup):
            output = forward(*map(self._tensor, arrays.values()))
        result: np.ndarray = output.float().cpu().numpy()
        return result

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array).to(self.build.setup.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor
