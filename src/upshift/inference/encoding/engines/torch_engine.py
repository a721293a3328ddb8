"""Run transformers and PyTorch kernel by kernel. This is the reference of every other engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build, load_forward
from upshift.inference.torch_computing import DTYPES, computing


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
