"""transformers and PyTorch, kernel by kernel: the reference of every other engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build, load_forward
from upshift.inference.torch_computing import computing


class TorchEngine:
    def __init__(self, build: Build) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.recipe)
        if build.setup.precision == "bf16":
            self.forward = self.forward.to(torch.bfloat16)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            with computing(self.setup):
                found = self.forward(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask))
            yield batch, found.float().numpy()
