"""Quantize models that generate with OpenVINO: 8 bits scaled by output channel, or 4 bits by groups.

The 4 bits are fitted to the user's own texts (AWQ, arXiv:2306.00978, and scale estimation, both of NNCF). In an
encoder-decoder only the encoder is fitted: a decoder would be fitted to the answers, which are not there."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from upshift.inference.generation.engines.openvino_export import export, int4_weights
from upshift.inference.generation.model import generation_task, load_model, pads_safely
from upshift.inference.generation.prompts import Prompts
from upshift.inference.generation.raced_setup import GenerationTask, run_setup
from upshift.inference.openvino_runtime import int8_weights
from upshift.inference.quantize import HELD_OUT, Bits, ModelFile, Rounding
from upshift.inference.weights import OPENVINO_FILE, OPENVINO_PARTS
from upshift.models.source import ModelSource

HELD_OUT_TOKENS = 64  # before the tokens that are compared
COMPARED_TOKENS = 16


def rounding_of(source: ModelSource, texts: list[str]) -> Rounding:
    """Return the inputs of quantization for a model that generates."""
    task = generation_task(source)
    pads = pads_safely(source)
    files: tuple[ModelFile, ...] = (ModelFile(OPENVINO_FILE, partial(export, source), _quantize),)
    if task == "seq2seq":
        files = _encoder_and_decoder(source)
    return Rounding(
        task=task,
        ids=Prompts(source).tokenizer(texts).input_ids,
        held_out_tokens=HELD_OUT_TOKENS,
        task_options=GenerationTask(new_tokens=COMPARED_TOKENS, pads=pads).to_json(),
        pad=0,
        batch=HELD_OUT if pads else 1,
        run_setup=run_setup,
        model_class=None,
        files=files,
        fitted_bits=(4,),
    )


def _encoder_and_decoder(source: ModelSource) -> tuple[ModelFile, ...]:
    from upshift.inference.generation.engines.openvino_seq2seq import export_decoder, export_encoder

    load_once = cache(partial(load_model, source, "fp32"))
    encoder, decoder = OPENVINO_PARTS
    return (
        ModelFile(encoder, lambda: export_encoder(load_once()), _quantize, "encoder"),
        ModelFile(decoder, lambda: export_decoder(load_once()), _quantize_without_texts, "decoder"),
    )


def _quantize(bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    return int8_weights(model) if bits == 8 else int4_weights(model, texts)


def _quantize_without_texts(bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    return _quantize(bits, model, [])
