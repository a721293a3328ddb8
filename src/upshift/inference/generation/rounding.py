"""How language models are rounded: OpenVINO's 8 bits scaled by output; 4 bits by groups, fitted to the user's own texts (AWQ,
arXiv:2306.00978, and scale estimation, both of NNCF)."""

from __future__ import annotations

from functools import partial
from typing import Any

from upshift.errors import RequestError
from upshift.inference.generation.contest import run
from upshift.inference.generation.engines.openvino_export import export, int4_weights
from upshift.inference.generation.model import generation_task
from upshift.inference.generation.prompts import Prompts
from upshift.inference.generation.task import GenerationTask
from upshift.inference.openvino_model import int8_weights
from upshift.inference.quantize import HELD_OUT, Bits, Rounding
from upshift.models.source import ModelSource

HELD_OUT_TOKENS, FOLLOWED = 64, 16  # before those that are compared, and those


def rounding_of(source: ModelSource, texts: list[str]) -> Rounding:
    """Raises RequestError for an encoder-decoder."""
    from transformers import AutoModelForCausalLM

    if generation_task(source) != "generate":
        raise RequestError(
            f"{source.reference!r} is an encoder-decoder; upshift quantize takes causal language models and encoders"
        )
    return Rounding(
        task="generate", ids=Prompts(source).tokenizer(texts).input_ids, held_out_tokens=HELD_OUT_TOKENS,
        asked=GenerationTask(new_tokens=FOLLOWED).to_json(), pad=0, batch=HELD_OUT, run=run, model_class=AutoModelForCausalLM,
        export=partial(export, source), rounded=_rounded, fitted=(4,),
    )  # fmt: skip


def _rounded(bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    return int8_weights(model) if bits == 8 else int4_weights(model, texts)
