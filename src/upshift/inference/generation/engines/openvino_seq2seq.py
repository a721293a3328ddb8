"""Run an encoder-decoder in OpenVINO on the CPU: the encoder, and a decoder that keeps its own keys and values
inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.generation.engines.decoder import DecoderBuild, NoExtension
from upshift.inference.generation.engines.openvino_decoder import compile_file, made, weight_bytes
from upshift.inference.generation.model import load_model
from upshift.inference.padding import padded_rows
from upshift.inference.weights import OPENVINO_PARTS
from upshift.models.generation_config import start_token

MASK = "encoder_attention_mask"


class OpenVinoSeq2Seq(NoExtension):
    """An encoder-decoder in OpenVINO. Rows are not admitted beside others, as in torch_seq2seq."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        encoder, self._compiled, self.weight_bytes = _stored(build) if build.setup.precision == "stored" else _made(build)
        self._encoder, self._decoder = encoder.create_infer_request(), self._compiled.create_infer_request()
        self._encoded = [port.any_name for port in encoder.outputs]
        self._start = start_token(build.source)
        self._order = np.zeros(0, dtype=np.int32)  # rows of the decoder's states that the next step goes on with

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        ids, mask = padded_rows(prompts)
        self._encoder.infer({"input_ids": ids, "attention_mask": mask}, share_inputs=True)
        self._decoder = self._compiled.create_infer_request()  # one with states of fewer rows before gives NaN with 8 bits
        self._order = np.arange(len(ids), dtype=np.int32)
        self._attend({MASK: mask, **{name: self._encoder.get_tensor(name).data for name in self._encoded}})
        return self.step(np.full(len(ids), self._start))

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self._decoder.infer({"decoder_input_ids": tokens[:, None], "beam_idx": self._order}, share_inputs=True)
        self._order = np.arange(len(tokens), dtype=np.int32)
        found: np.ndarray = self._decoder.get_tensor("logits").data[:, -1].copy()
        return found

    def keep(self, rows: list[int]) -> None:
        if rows:
            self._order = self._order[rows]
            self._attend({name: values[rows] for name, values in self._attended.items()})

    def _attend(self, attended: dict[str, np.ndarray]) -> None:
        """Set once, as they are the same in every step."""
        import openvino

        self._attended = attended
        for name, values in attended.items():
            self._decoder.set_tensor(name, openvino.Tensor(values, shared_memory=True))


def _stored(build: DecoderBuild) -> tuple[Any, Any, int]:
    """Return encoder, decoder, and bytes of the decoder's weights, as ``upshift quantize`` wrote them."""
    assert build.source.directory is not None
    paths = [build.source.directory / name for name in OPENVINO_PARTS]
    if not all(path.is_file() for path in paths):
        raise RequestError(
            f"{build.source.reference!r} is an encoder-decoder without *.safetensors or {' and '.join(OPENVINO_PARTS)}; "
            "give one that has them"
        )
    return _compiled(paths[0], paths[1], build)


def _made(build: DecoderBuild) -> tuple[Any, Any, int]:
    from upshift.inference.generation.engines.openvino_seq2seq_export import export_decoder, export_encoder

    model = cache(lambda: load_model(build.source, "fp32"))  # once for both, and not where both are made already
    encoder = made(build.folder / "encoder", lambda: export_encoder(model()), build.setup)
    return _compiled(encoder, made(build.folder / "decoder", lambda: export_decoder(model()), build.setup), build)


def _compiled(encoder: Path, decoder: Path, build: DecoderBuild) -> tuple[Any, Any, int]:
    return compile_file(encoder, build.setup), compile_file(decoder, build.setup), weight_bytes(decoder)
