"""TOY: what it computes with, on which hardware, and what it does not do.

Copy to src/upshift/inference/encoding/engines/NAME_engine.py; for text, to generation/engines/NAME_decoder.py with the methods of
torch_decoder.py. Nothing else needs to know of it: --engine, the race, its quality check and `upshift bench` find it by ENGINE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from upshift.inference.encoding.engines.base import Batch, EncoderBuild

ENGINE = {"name": "toy", "task": "encode", "class": "ToyEngine", "libraries": ("numpy",), "precisions": ("fp32",)}


class ToyEngine:
    """Built in a process of its own; libraries are imported here, so that naming the engine imports none."""

    def __init__(self, build: EncoderBuild) -> None:
        config: Any = build.source.hf_config
        self.width: int = config.hidden_size

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """For each batch the last hidden state: rows x tokens x width. The race refuses what does not agree with transformers."""
        for batch in batches:
            yield batch, np.zeros((*batch.ids.shape, self.width), dtype=np.float32)
