"""Run transformers in PyTorch on one device, or divided among several by its own tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from upshift.inference.generation.engines.base import DecoderBuild, NoMixing, Prefix
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.tensor_parallel import load_part
from upshift.inference.torch_settings import DTYPES
from upshift.inference.workers.dispatcher import Job
from upshift.inference.workers.rank_group import RankGroup


def build_decoder(build: DecoderBuild) -> TorchDecoder | DividedDecoder:
    return DividedDecoder(build) if build.setup.tensor_parallel > 1 else TorchDecoder(build)


class PartDecoder(TorchDecoder):
    """The part of a causal language model that one rank computes. Its cache has the heads of this rank alone."""

    def load(self, build: DecoderBuild) -> Any:
        from upshift.models.build import find_architecture

        model_class = find_architecture(build.source.hf_config, build.source.reference).model_class
        return load_part(build.source, model_class, DTYPES[build.setup.precision])

    def read_weight_bytes(self) -> int:
        return self.weight_bytes


class DividedDecoder(NoMixing):
    """A causal language model of transformers that several ranks compute together.

    Rows do not start from prefixes, because each rank would have to keep its own part of each prefix."""

    joins = True
    extends = True
    prefixes = False

    def __init__(self, build: DecoderBuild) -> None:
        part = build._replace(setup=build.setup.of_a_rank())
        job = Job(f"{PartDecoder.__module__}:{PartDecoder.__name__}", {"build": part})
        self.ranks = RankGroup(job, build.setup.tensor_parallel, build.setup.device)
        self.weight_bytes: int = self.ranks.compute("read_weight_bytes")

    def compute(self, tokens: Sequence[int]) -> Prefix:
        raise NotImplementedError

    def prefix_of_row(self, row: int) -> Prefix:
        raise NotImplementedError

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        logits: np.ndarray = self.ranks.compute("admit", prompts)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        logits: np.ndarray = self.ranks.compute("step", tokens)
        return logits

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        logits: np.ndarray = self.ranks.compute("extend", tokens)
        return logits

    def cut(self, tokens: int) -> None:
        self.ranks.compute("cut", tokens)

    def keep(self, rows: list[int]) -> None:
        self.ranks.compute("keep", rows)
