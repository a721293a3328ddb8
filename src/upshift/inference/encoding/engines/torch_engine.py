"""Run transformers and PyTorch kernel by kernel. This is the reference of every other engine.

Run transformers and PyTorch with compiled layers: one compilation for all layers that are alike, and for all
lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from upshift.inference.encoding.engines.base import Batch, Build, load_forward
from upshift.inference.torch_settings import DTYPES, UNLIKE, computing, layers_to_compile


class TorchEngine:
    def __init__(self, build: Build) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.recipe).to(build.setup.device, DTYPES.get(build.setup.precision))

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            with computing(self.setup):
                ids, mask = (torch.from_numpy(array).to(self.setup.device) for array in (batch.ids, batch.mask))
                found = self.forward(ids, mask)
            yield batch, found.float().cpu().numpy()


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
