"""Run transformers in PyTorch: kernel by kernel, as the reference of every other engine, divided among several devices, or with
compiled layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from upshift.inference.encoding.engines.base import Batch, EncoderBuild, load_forward, load_forward_part
from upshift.inference.torch_settings import COMPILE_SHAPE, DTYPES, inference_settings, layers_to_compile
from upshift.inference.workers.dispatcher import Job
from upshift.inference.workers.rank_group import RankGroup


def build_encoder(build: EncoderBuild) -> TorchEngine | DividedEngine:
    return DividedEngine(build) if build.setup.tensor_parallel > 1 else TorchEngine(build)


class TorchEngine:
    """transformers in PyTorch, kernel by kernel."""

    def __init__(self, build: EncoderBuild) -> None:
        self.setup = build.setup
        self.forward = self.load(build)

    def load(self, build: EncoderBuild) -> torch.nn.Module:
        """Return the module from the inputs of ``input_names`` to the output."""
        forward: torch.nn.Module = load_forward(build.source, build.config)
        return forward.to(build.setup.device, DTYPES.get(build.setup.precision))

    def output(self, batch: Batch) -> np.ndarray:
        """Return the output of one batch in fp32."""
        with inference_settings(self.setup):
            output = self.forward(*(torch.from_numpy(array).to(self.setup.device) for array in batch.arrays()))
        array: np.ndarray = output.float().cpu().numpy()
        return array

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            yield batch, self.output(batch)


class PartEngine(TorchEngine):
    """The part of a model that one rank computes."""

    def load(self, build: EncoderBuild) -> torch.nn.Module:
        forward: torch.nn.Module = load_forward_part(build.source, build.config, DTYPES[build.setup.precision])
        return forward


class DividedEngine:
    """transformers in PyTorch, divided among several ranks by its own tensor parallelism."""

    def __init__(self, build: EncoderBuild) -> None:
        part = build._replace(setup=build.setup.of_a_rank(), examples=[])
        job = Job(f"{PartEngine.__module__}:{PartEngine.__name__}", {"build": part})
        self.ranks = RankGroup(job, build.setup.tensor_parallel, build.setup.device)

    @property
    def pids(self) -> list[int]:
        return self.ranks.pids

    def wait(self) -> None:
        self.ranks.wait()

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            yield batch, self.ranks.compute("output", batch)


class TorchCompiledEngine(TorchEngine):
    """transformers in PyTorch with compiled layers. Equal layers and all lengths share one compilation."""

    def __init__(self, build: EncoderBuild) -> None:
        super().__init__(build)
        model: Any = self.forward.model
        for layer in layers_to_compile(model):
            layer.compile(dynamic=True)
        many_rows, length = COMPILE_SHAPE
        for rows in (1, many_rows):  # torch compiles again for a single row, and for rows without padding
            ids = np.zeros((rows, length), dtype=np.int64)
            mask = np.ones_like(ids)
            mask[1:, -1] = 0
            segments = np.zeros_like(ids) if build.config.segments else None
            list(self.outputs([Batch(ids, mask, [], segments)]))
