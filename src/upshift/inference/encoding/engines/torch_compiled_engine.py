"""transformers and PyTorch with compiled layers: one compilation for all that are alike, and for all lengths."""

from __future__ import annotations

import numpy as np

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build
from upshift.inference.encoding.engines.torch_engine import TorchEngine
from upshift.inference.torch_computing import UNLIKE
from upshift.models.build import find_stacks


class TorchCompiledEngine(TorchEngine):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        for _, stack in find_stacks(self.forward.model):
            for layer in stack:
                layer.compile(dynamic=True)
        several, length = UNLIKE
        for rows in (1, several):  # torch compiles one row apart; before any text waits for it
            ids = np.zeros((rows, length), dtype=np.int64)
            list(self.outputs([Batch(ids, np.ones_like(ids), [])]))
