"""Run oneDNN's fused products under PyTorch: the model is exported once, its weights are in oneDNN's own order, and
several batches run at once.

A batch of a few hundred tokens stays in one core's caches. So each core computes a batch of its own, by one thread,
and no core waits for another inside of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from upshift.errors import RequestError
from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build, in_order, load_forward
from upshift.inference.encoding.engines.onednn_graph import for_onednn
from upshift.inference.torch_computing import DTYPES, UNLIKE, computing
from upshift.internals.torch_names import EXPORT_ERROR

ENGINE = {"name": "onednn", "task": "encode", "class": "OneDnnEngine", "libraries": ("torch",), "precisions": ("fp32", "bf16")}


class OneDnnEngine:
    def __init__(self, build: Build) -> None:
        self.setup = build.setup
        if not torch.backends.mkldnn.is_available():
            raise RequestError("this build of torch has no oneDNN; use --engine torch")
        self.forward = for_onednn(_exported(build), batch_tokens=build.setup.batch)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        at_once = self.setup.threads if self.setup.hint == "throughput" else 1
        threads = self.setup.threads // at_once
        with (
            computing(self.setup.changed(threads=threads)),
            ThreadPoolExecutor(at_once, initializer=partial(torch.set_num_threads, threads)) as pool,
        ):

            def start(batch: Batch) -> Callable[[], np.ndarray]:
                return pool.submit(self._output, batch).result

            yield from in_order(batches, start, at_once=2 * at_once)  # the next one is there when a core is free

    def _output(self, batch: Batch) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = self.forward(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)).float().numpy()
        return found


def _exported(build: Build) -> torch.fx.GraphModule:
    """Return the model exported for any number of rows and tokens. Raise RequestError if the model's code does not
    allow that."""
    forward = load_forward(build.source, build.recipe).to(DTYPES[build.setup.precision])
    ids = torch.zeros(UNLIKE, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            return torch.export.export(forward, (ids, mask), dynamic_shapes=(sizes, sizes), strict=False).module()
    except (EXPORT_ERROR.get(), RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RequestError(f"torch.export cannot take {build.source.reference!r} with batches of any size: {reason}") from None
