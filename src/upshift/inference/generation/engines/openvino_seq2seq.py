"""Run an encoder-decoder in OpenVINO on the CPU, as an encoder model and a decoder model with states, and export both.

The encoder takes input_ids and attention_mask [R, S]. It returns the keys and values for the decoder's cross attention, so that
steps do not compute them again. The decoder takes them with encoder_attention_mask [R, S], decoder_input_ids [R, 1] and beam_idx
[R]. It returns logits [R, 1, V], and keeps the keys and values of its self attention as states."""

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

MASK_INPUT = "encoder_attention_mask"


class OpenVinoSeq2Seq(NoExtension):
    """An encoder-decoder in OpenVINO. Rows are not admitted beside others, as in ``TorchSeq2Seq``."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        is_stored = build.setup.precision == "stored"
        encoder_path, decoder_path = _stored_files(build) if is_stored else _make_files(build)
        encoder = compile_file(encoder_path, build.setup)
        self._compiled = compile_file(decoder_path, build.setup)
        self.weight_bytes = weight_bytes(decoder_path)
        self._encoder = encoder.create_infer_request()
        self._decoder = self._compiled.create_infer_request()
        self._encoder_outputs = [port.any_name for port in encoder.outputs]
        self._start = start_token(build.source)
        self._order = np.zeros(0, dtype=np.int32)  # rows of the decoder's states that the next step continues

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        ids, mask = padded_rows(prompts)
        self._encoder.infer({"input_ids": ids, "attention_mask": mask}, share_inputs=True)
        self._decoder = self._compiled.create_infer_request()  # a request with states of fewer rows gives NaN with 8 bits
        self._order = np.arange(len(ids), dtype=np.int32)
        self._set_fixed_inputs(
            {MASK_INPUT: mask, **{name: self._encoder.get_tensor(name).data for name in self._encoder_outputs}}
        )
        return self.step(np.full(len(ids), self._start))

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self._decoder.infer({"decoder_input_ids": tokens[:, None], "beam_idx": self._order}, share_inputs=True)
        self._order = np.arange(len(tokens), dtype=np.int32)
        logits: np.ndarray = self._decoder.get_tensor("logits").data[:, -1].copy()
        return logits

    def keep(self, rows: list[int]) -> None:
        if rows:
            self._order = self._order[rows]
            self._set_fixed_inputs({name: values[rows] for name, values in self._fixed_inputs.items()})

    def _set_fixed_inputs(self, inputs: dict[str, np.ndarray]) -> None:
        """Set the inputs that stay the same in every step."""
        import openvino

        self._fixed_inputs = inputs
        for name, values in inputs.items():
            self._decoder.set_tensor(name, openvino.Tensor(values, shared_memory=True))


def _stored_files(build: DecoderBuild) -> tuple[Path, Path]:
    """Return the files of encoder and decoder that ``upshift quantize`` wrote. Raise RequestError if they are missing."""
    assert build.source.directory is not None
    paths = [build.source.directory / name for name in OPENVINO_PARTS]
    if not all(path.is_file() for path in paths):
        raise RequestError(
            f"{build.source.reference!r} is an encoder-decoder without *.safetensors or {' and '.join(OPENVINO_PARTS)}; "
            "give one that has them"
        )
    return paths[0], paths[1]


def _make_files(build: DecoderBuild) -> tuple[Path, Path]:
    """Return the files of encoder and decoder in the setup's precision. Write them if they do not exist."""
    load_once = cache(lambda: load_model(build.source, "fp32"))  # not loaded if both files exist
    encoder = make_precision_file(build.folder / "encoder", lambda: export_encoder(load_once()), build.setup)
    decoder = make_precision_file(build.folder / "decoder", lambda: export_decoder(load_once()), build.setup)
    return encoder, decoder


ENCODER_STATES = "encoder_key_values"  # prefix of the names of the cross attention's keys and values


def export_encoder(model: Any) -> Any:
    """Return the OpenVINO model of the encoder in fp32."""
    example = _make_example(model, rows=2, length=5, cached=3)
    other_example = _make_example(model, rows=3, length=11, cached=4)
    converted = convert(_Encoder(model), example.prompt, other_example.prompt)
    input_shapes = dict.fromkeys(("input_ids", "attention_mask"), [ANY, ANY])
    name_ports(converted, input_shapes, list(state_shapes(example.cross_states, ENCODER_STATES)))
    return converted


def export_decoder(model: Any) -> Any:
    """Return the OpenVINO model of the decoder in fp32."""
    example = _make_example(model, rows=2, length=5, cached=3)  # no two sizes are equal: none becomes another in the trace
    other_example = _make_example(model, rows=3, length=11, cached=4)
    return convert_stateful(
        _Decoder(model, example.encoder_output_type, len(example.states)),
        example.step,
        other_example.step,
        token_inputs=("decoder_input_ids", "encoder_attention_mask"),
        states=example.states,
        other_inputs=state_shapes(example.cross_states, ENCODER_STATES),
    )


class _FirstStates(DynamicLayer):
    """A layer of a cache for a single call. To join its states to an empty tensor would change the rank in the trace."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = key_states
        self.values = value_states
        self.is_initialized = True
        return key_states, value_states


class _Example(NamedTuple):
    """Inputs for a trace."""

    prompt: tuple[torch.Tensor, ...]  # token ids, and their mask
    tokens: torch.Tensor  # the decoder's next tokens
    states: tuple[torch.Tensor, ...]  # keys and values of self attention
    cross_states: tuple[torch.Tensor, ...]  # keys and values of cross attention
    encoder_output_type: type

    @property
    def step(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.prompt[1], *self.states, *self.cross_states


def _make_example(model: Any, *, rows: int, length: int, cached: int) -> _Example:
    """Return inputs with different tokens. The last token of the first prompt is padding."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt_ids = torch.arange(rows * length).reshape(rows, -1) % vocabulary
    mask = torch.ones_like(prompt_ids)
    mask[0, -1] = 0
    tokens = torch.arange(rows * (cached + 1)).reshape(rows, -1) % vocabulary
    with torch.no_grad():
        output, cache = _run_first_step(model, prompt_ids, mask, tokens[:, :cached])
    states = keys_and_values(cache.self_attention_cache)
    cross_states = keys_and_values(cache.cross_attention_cache)
    return _Example((prompt_ids, mask), tokens[:, cached:], states, cross_states, type(output))


def _run_first_step(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> tuple[Any, Any]:
    """Run the model. Return the encoder's output for ``ids``, and the cache with the decoder's ``tokens``."""
    cache = EncoderDecoderCache(*(Cache(layer_class_to_replicate=_FirstStates) for _ in range(2)))
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
    model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=tokens, **with_cache(model, cache))
    return encoded, cache


class _Encoder(torch.nn.Module):
    """The encoder to trace."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return the keys and values of cross attention. They do not depend on the decoder's tokens, so it gets any token."""
        _, cache = _run_first_step(self.model, ids, mask, ids[:, :1])
        return keys_and_values(cache.cross_attention_cache)


class _Decoder(torch.nn.Module):
    """The decoder to trace.

    ``output_type`` is the class of the encoder's output. ``num_states`` is the number of keys and values of self attention.
    Those of cross attention follow them."""

    def __init__(self, model: Any, output_type: type, num_states: int) -> None:
        super().__init__()
        self.model = model
        self.output_type = output_type
        self.num_states = num_states

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *states: torch.Tensor) -> Any:
        self_cache = full_cache(states[: self.num_states])
        cross_cache = full_cache(states[self.num_states :])
        placeholder = states[self.num_states][:, 0, :, :1]  # [R, S, 1] in place of the encoder's output: only its shape is used
        encoder_outputs = self.output_type(last_hidden_state=placeholder)
        cache = EncoderDecoderCache(self_cache, cross_cache)
        output = self.model(
            encoder_outputs=encoder_outputs, attention_mask=mask, decoder_input_ids=ids, **with_cache(self.model, cache)
        )
        return output.logits, *keys_and_values(self_cache)
