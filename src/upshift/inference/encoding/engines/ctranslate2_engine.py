"""Run BERT-like encoders in CTranslate2 on the CPU, in fp32 or with int8 products. It skips padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from upshift.atomic_file import make_once, sync_and_rename
from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import Batch, EncoderBuild, gives_states, load_forward, run_in_order
from upshift.inference.torch_settings import inference_settings

CONVERTED = ("bert", "camembert", "distilbert", "roberta", "xlm-roberta")  # encoders that its converter supports
MAX_STREAMS = 4  # batches at once: the matrix products of one batch are too small for many cores
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8_float32"}  # precision of products, everything else in fp32


class CTranslate2Engine:
    """CTranslate2 on the CPU. Several batches run at once, each on a share of the cores."""

    def __init__(self, build: EncoderBuild) -> None:
        import ctranslate2

        if build.config.expand_to and not build.config.attend_expansion:
            raise RequestError("ctranslate2 computes no tokens that the others do not attend to; use another engine")
        self.library: Any = ctranslate2
        path = build.folder / build.setup.precision
        make_once(path, lambda: _convert(build, path))
        threads = build.setup.threads
        max_streams = 1 if build.setup.hint == "latency" else MAX_STREAMS
        self.streams = max(count for count in range(1, max_streams + 1) if threads % count == 0)
        self.encoder = ctranslate2.Encoder(
            str(path),
            device="cpu",
            compute_type=COMPUTE_TYPES[build.setup.precision],
            inter_threads=self.streams,
            intra_threads=threads // self.streams,
        )
        self.head = None
        if not gives_states(build.config):
            self.head = _ClassifierHead(build)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with its output. One more batch than there are streams is started, so that no stream waits.

        The library releases Python's lock while it computes."""
        with ThreadPoolExecutor(self.streams) as threads:

            def start_batch(batch: Batch) -> Callable[[], np.ndarray]:
                return threads.submit(self._states, batch).result

            for batch, states in run_in_order(batches, start_batch, concurrent=self.streams + 1):
                yield batch, states if self.head is None else self.head(batch, states)

    def _states(self, batch: Batch) -> np.ndarray:
        """Return the token states of a batch. An empty text gets a padding token, because the library fails on empty texts."""
        ids = batch.ids.astype(np.int32)
        lengths = np.maximum(batch.mask.sum(1), 1).astype(np.int32)
        view = self.library.StorageView.from_array  # without a copy
        segments = None if batch.segments is None else batch.segments.tolist()
        return np.array(self.encoder.forward_batch(view(ids), view(lengths), segments).last_hidden_state)


class _ClassifierHead:
    """A classifier without its encoder. transformers' own modules compute it from the token states of CTranslate2."""

    def __init__(self, build: EncoderBuild) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.config)
        model = self.forward.model
        self.encoder = _GivenStates(getattr(model.base_model, "pooler", None))
        setattr(model, model.base_model_prefix, self.encoder)

    def __call__(self, batch: Batch, states: np.ndarray) -> np.ndarray:
        """Return class scores [B, C], or logits of tokens [B, S, L], from states [B, S, H]."""
        self.encoder.states = torch.from_numpy(states)
        with inference_settings(self.setup):
            output: np.ndarray = self.forward(*map(torch.from_numpy, batch.arrays())).numpy()
        return output


class _GivenStates(torch.nn.Module):
    """A module in place of the encoder. It returns given token states, and pools them as the encoder does."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)


def _convert(build: EncoderBuild, path: Path) -> None:
    """Convert the model. The folder ``path`` appears only when it is complete."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]  # ctranslate2 has no types
        def load_model(self, model_class: Any, model_name_or_path: str, **options: Any) -> Any:
            model = super().load_model(model_class, model_name_or_path, **{**options, "dtype": torch.float32})
            if not hasattr(model.config, "position_embedding_type"):  # transformers 5 has only this kind
                model.config.position_embedding_type = "absolute"
            return model

    temporary = path.with_name(f"writing-{path.name}")
    Converter(str(build.source.directory)).convert(str(temporary), quantization=COMPUTE_TYPES[build.setup.precision], force=True)
    sync_and_rename(temporary, path)
