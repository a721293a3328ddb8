"""Run an encoder-decoder in OpenVINO on the CPU: the encoder, and a decoder that keeps its own keys and values
inside.

Export an encoder-decoder of transformers as two OpenVINO models.

The encoder takes input_ids and attention_mask [R, S]. It gives the keys and values that each layer of the decoder
attends to beside its own: none of them is computed again in a step. The decoder takes them with
encoder_attention_mask [R, S], decoder_input_ids [R, 1] and beam_idx [R], gives logits [R, 1, V], and keeps its own
keys and values inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from upshift.errors import RequestError
from upshift.inference.generation.engines.base import DecoderBuild, NoExtension
from upshift.inference.generation.engines.openvino_decoder import compile_file, make_precision_file, weight_bytes
from upshift.inference.generation.engines.openvino_export import (
    ANY,
    convert,
    convert_stateful,
    keys_and_values,
    name_ports,
    state_shapes,
)
from upshift.inference.generation.model import full_cache, load_model
from upshift.inference.tokenizer import padded_rows
from upshift.inference.weights import OPENVINO_PARTS
from upshift.models.generation_config import start_token
from upshift.models.kv_cache import with_cache

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

    model = cache(lambda: load_model(build.source, "fp32"))  # once for both, and not where both are made already
    encoder = make_precision_file(build.folder / "encoder", lambda: export_encoder(model()), build.setup)
    return _compiled(encoder, make_precision_file(build.folder / "decoder", lambda: export_decoder(model()), build.setup), build)


def _compiled(encoder: Path, decoder: Path, build: DecoderBuild) -> tuple[Any, Any, int]:
    return compile_file(encoder, build.setup), compile_file(decoder, build.setup), weight_bytes(decoder)


ENCODED = "encoder_key_values"  # what the names of the encoder's keys and values begin with


def export_encoder(model: Any) -> Any:
    encoder, example = _Encoder(model), _example(model, rows=2, length=5, cached=3)
    converted = convert(encoder, example.prompt, _example(model, rows=3, length=11, cached=4).prompt)
    name_ports(converted, dict.fromkeys(("input_ids", "attention_mask"), [ANY, ANY]), list(state_shapes(example.encoded, ENCODED)))
    return converted


def export_decoder(model: Any) -> Any:
    example = _example(model, rows=2, length=5, cached=3)  # no number that is taken for a constant is another's
    other = _example(model, rows=3, length=11, cached=4)
    return convert_stateful(
        _Decoder(model, example.output, len(example.past)), example.step, other.step,
        plain=("decoder_input_ids", "encoder_attention_mask"), past=example.past, beside=state_shapes(example.encoded, ENCODED),
    )  # fmt: skip


class _FirstStates(DynamicLayer):
    """A cache with the states of one call alone. Joining them to none before would be of another rank in the trace."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class _Example(NamedTuple):
    prompt: tuple[torch.Tensor, ...]  # token ids, and their mask
    token: torch.Tensor  # the decoder's next ones
    past: tuple[torch.Tensor, ...]
    encoded: tuple[torch.Tensor, ...]
    output: type  # of the encoder

    @property
    def step(self) -> tuple[torch.Tensor, ...]:
        return self.token, self.prompt[1], *self.past, *self.encoded


def _example(model: Any, *, rows: int, length: int, cached: int) -> _Example:
    """Return inputs of tokens that differ. The last token of the first prompt is padding."""
    words = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.arange(rows * length).reshape(rows, -1) % words
    mask = torch.ones_like(prompt)
    mask[0, -1] = 0
    tokens = torch.arange(rows * (cached + 1)).reshape(rows, -1) % words
    with torch.no_grad():
        output, cache = _first_step(model, prompt, mask, tokens[:, :cached])
    past, encoded = keys_and_values(cache.self_attention_cache), keys_and_values(cache.cross_attention_cache)
    return _Example((prompt, mask), tokens[:, cached:], past, encoded, type(output))


def _first_step(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> tuple[Any, Any]:
    """Return the encoder's output, and the keys and values of the decoder's ``tokens`` and of the encoder's ``ids``."""
    cache = EncoderDecoderCache(*(Cache(layer_class_to_replicate=_FirstStates) for _ in range(2)))
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
    model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=tokens, **with_cache(model, cache))
    return encoded, cache


class _Encoder(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return the keys and values of cross attention. They depend on no token of the decoder, so any token is given to it."""
        _, cache = _first_step(self.model, ids, mask, ids[:, :1])
        return keys_and_values(cache.cross_attention_cache)


class _Decoder(torch.nn.Module):
    """The decoder to trace. ``output`` is the class that holds the encoder's output. ``count`` is the number of the
    decoder's own keys and values. Those of the encoder come behind them."""

    def __init__(self, model: Any, output: type, count: int) -> None:
        super().__init__()
        self.model, self.output, self.count = model, output, count

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *states: torch.Tensor) -> Any:
        past, encoded = full_cache(states[: self.count]), full_cache(states[self.count :])
        sized = states[self.count][:, 0, :, :1]  # [R, S, 1] in place of the encoder's output, of which nothing else is read
        cache = EncoderDecoderCache(past, encoded)
        given = {"encoder_outputs": self.output(last_hidden_state=sized), "attention_mask": mask, "decoder_input_ids": ids}
        return self.model(**given, **with_cache(self.model, cache)).logits, *keys_and_values(past)
