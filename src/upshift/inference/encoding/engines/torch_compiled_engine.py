"""Run transformers and PyTorch with compiled layers: one compilation for all layers that are alike, and for all
lengths."""

from __future__ import annotations

import numpy as np

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build
from upshift.inference.encoding.engines.torch_engine import TorchEngine
from upshift.inference.torch_computing import UNLIKE, layers_to_compile


class TorchCompiledEngine(TorchEngine):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        for layer in layers_to_compile(self.forward.model):
            layer.compile(dynamic=True)
        several, length = UNLIKE
        for rows in (1, several):  # torch compiles one row apart, and rows without any padding, when it meets them
            ids = np.zeros((rows, length), dtype=np.int64)
            mask = np.ones_like(ids)
            mask[1:, -1] = 0
            list(self.outputs([Batch(ids, mask, [])]))
