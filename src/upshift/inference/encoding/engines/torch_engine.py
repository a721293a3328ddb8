"""Run transformers in PyTorch: kernel by kernel, as the reference of every other engine, or with compiled layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from upshift.inference.encoding.engines.base import Batch, EncoderBuild, load_forward
from upshift.inference.torch_settings import COMPILE_SHAPE, DTYPES, inference_settings, layers_to_compile


class TorchEngine:
    """transformers in PyTorch, kernel by kernel."""

    def __init__(self, build: EncoderBuild) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.config).to(build.setup.device, DTYPES.get(build.setup.precision))

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            with inference_settings(self.setup):
                output = self.forward(*(torch.from_numpy(array).to(self.setup.device) for array in batch.arrays()))
            yield batch, output.float().cpu().numpy()


class TorchCompiledEngine(TorchEngine):
    """transformers in PyTorch with compiled layers. Equal layers and all lengths share one compilation."""

    def __init__(self, build: EncoderBuild) -> None:
        super().__init__(build)
        for layer in layers_to_compile(self.forward.model):
            layer.compile(dynamic=True)
        many_rows, length = COMPILE_SHAPE
        for rows in (1, many_rows):  # torch compiles again for a single row, and for rows without padding
            ids = np.zeros((rows, length), dtype=np.int64)
            mask = np.ones_like(ids)
            mask[1:, -1] = 0
            segments = np.zeros_like(ids) if build.config.segments else None
            list(self.outputs([Batch(ids, mask, [], segments)]))
