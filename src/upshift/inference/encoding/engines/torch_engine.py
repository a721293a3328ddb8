"""transformers and PyTorch, kernel by kernel: the reference of every other engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build, load_forward

MATMUL = {"tf32": "medium"}  # oneDNN's fp32 products in place of MKL's, on CPUs without AMX of the same precision


class TorchEngine:
    def __init__(self, build: Build) -> None:
        self.precision, self.threads = build.setup.precision, build.setup.threads
        self.forward = load_forward(build.source, build.recipe)
        if self.precision == "bf16":
            self.forward = self.forward.to(torch.bfloat16)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        before = torch.get_float32_matmul_precision(), torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(MATMUL.get(self.precision, "highest"))
        try:
            for batch in batches:
                with torch.inference_mode():
                    found = self.forward(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask))
                yield batch, found.float().numpy()
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.set_num_threads(before[1])
