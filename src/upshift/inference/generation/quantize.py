"""Round models that generate: OpenVINO's 8 bits scaled by output, or 4 bits by groups, fitted to the user's own texts
(AWQ, arXiv:2306.00978, and scale estimation, both of NNCF). In an encoder-decoder only the encoder is fitted: a
decoder would be fitted to the answers, which are not there."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from upshift.inference.generation.contest import GenerationTask, run
from upshift.inference.generation.engines.openvino_export import export, int4_weights
from upshift.inference.generation.model import generation_task, load_model
from upshift.inference.generation.prompts import Prompts
from upshift.inference.openvino_runtime import int8_weights
from upshift.inference.quantize import HELD_OUT, Bits, Part, Rounding
from upshift.inference.weights import OPENVINO_FILE, OPENVINO_PARTS
from upshift.models.source import ModelSource

HELD_OUT_TOKENS, FOLLOWED = 64, 16  # before those that are compared, and those


def rounding_of(source: ModelSource, texts: list[str]) -> Rounding:
    task = generation_task(source)
    alone = task == "generate"
    return Rounding(
        task=task, ids=Prompts(source).tokenizer(texts).input_ids, held_out_tokens=HELD_OUT_TOKENS,
        asked=GenerationTask(new_tokens=FOLLOWED).to_json(), pad=0, batch=HELD_OUT, run=run,
        model_class=None,
        parts=(Part(OPENVINO_FILE, partial(export, source), _rounded),) if alone else _two_parts(source), fitted=(4,),
    )  # fmt: skip


def _two_parts(source: ModelSource) -> tuple[Part, ...]:
    from upshift.inference.generation.engines.openvino_seq2seq import export_decoder, export_encoder

    model = cache(partial(load_model, source, "fp32"))  # once for both
    encoder, decoder = OPENVINO_PARTS
    return (
        Part(encoder, lambda: export_encoder(model()), _rounded, "encoder"),
        Part(decoder, lambda: export_decoder(model()), _rounded_alone, "decoder"),
    )


def _rounded(bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    return int8_weights(model) if bits == 8 else int4_weights(model, texts)


def _rounded_alone(bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    return _rounded(bits, model, [])
