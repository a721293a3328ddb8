"""Run encoders in the form of BERT in CTranslate2 on the CPU, in fp32 or with int8 products. It computes no padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from upshift.atomic_file import make_once
from upshift.inference.encoding.engines.base import Batch, Build, in_order

CONVERTED = ("bert", "camembert", "distilbert", "roberta", "xlm-roberta")  # encoders that its converter knows
MOST_STREAMS = 4  # batches at once: products of one are too small for many cores
TYPES = {"fp32": "float32", "int8": "int8_float32"}  # of products, in its words: what is not a product stays in fp32


class CTranslate2Engine:
    def __init__(self, build: Build) -> None:
        import ctranslate2

        self.library: Any = ctranslate2
        path = build.folder / build.setup.precision
        make_once(path, lambda: _convert(build, path))
        threads, most = build.setup.threads, 1 if build.setup.hint == "latency" else MOST_STREAMS
        self.streams = max(count for count in range(1, most + 1) if threads % count == 0)
        self.encoder = ctranslate2.Encoder(
            str(path), device="cpu", compute_type=TYPES[build.setup.precision],
            inter_threads=self.streams, intra_threads=threads // self.streams,
        )  # fmt: skip
        self.head = None
        if build.recipe.output != "embeddings":
            from upshift.inference.encoding.engines.classifier_head import Head

            self.head = Head(build)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Each on a part of the cores, and one that waits for the first that is free. The library lets other threads run."""
        with ThreadPoolExecutor(self.streams) as threads:
            for batch, states in in_order(
                batches, lambda batch: threads.submit(self._states, batch).result, at_once=self.streams + 1
            ):
                yield batch, states if self.head is None else self.head(batch, states)

    def _states(self, batch: Batch) -> np.ndarray:
        """Return the states of a batch. A text without any token gets one of padding: the library fails on an empty one."""
        ids, lengths = batch.ids.astype(np.int32), np.maximum(batch.mask.sum(1), 1).astype(np.int32)
        view = self.library.StorageView.from_array  # of arrays that it reads where they are
        return np.array(self.encoder.forward_batch(view(ids), view(lengths)).last_hidden_state)


def _convert(build: Build, path: Path) -> None:
    """Put in place whole."""
    import torch
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]  # ctranslate2 has no types
        def load_model(self, model_class: Any, model_name_or_path: str, **options: Any) -> Any:
            model = super().load_model(model_class, model_name_or_path, **{**options, "dtype": torch.float32})
            if not hasattr(model.config, "position_embedding_type"):  # transformers 5 has this kind alone and no longer says so
                model.config.position_embedding_type = "absolute"
            return model

    temporary = path.with_name(f"writing-{path.name}")
    Converter(str(build.source.directory)).convert(str(temporary), quantization=TYPES[build.setup.precision], force=True)
    temporary.replace(path)
