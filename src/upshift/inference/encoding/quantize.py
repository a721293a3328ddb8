"""Round encoders with OpenVINO. With 8 bits, weights and what they are multiplied with are rounded, calibrated on the
user's own texts. With 4 bits, weights are rounded by groups, fitted to the texts."""

from __future__ import annotations

from functools import partial
from typing import Any

from upshift.inference.encoding.contest import run
from upshift.inference.encoding.encoder import Tokens
from upshift.inference.encoding.engines.base import Build, model_class
from upshift.inference.encoding.engines.openvino_engine import calibrated, export
from upshift.inference.encoding.model_config import read_recipe
from upshift.inference.encoding.run import examples
from upshift.inference.generation.engines.openvino_export import int4_weights
from upshift.inference.quantize import Bits, Part, Rounding
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import OPENVINO_FILE, engine_folder
from upshift.models.source import ModelSource

HELD_OUT_TOKENS, BATCH_TOKENS = 512, 1024


def rounding_of(source: ModelSource, texts: list[str]) -> Rounding:
    recipe = read_recipe(source)
    tokens = Tokens(source, recipe)
    if recipe.output == "token scores":
        recipe = recipe.changed(special=tokens.special())
    ids = tokens.of(texts)
    batch = 1 if tokens.alone else BATCH_TOKENS
    setup = EngineSetup(engine="openvino", precision="fp32", threads=1, batch=batch)
    build = Build(source, recipe, setup, engine_folder("encode", source, "openvino"), examples(ids, tokens.pad))
    part = Part(OPENVINO_FILE, partial(export, build), partial(_rounded, tokens.pad))
    return Rounding(
        task="encode", ids=ids, held_out_tokens=HELD_OUT_TOKENS, asked=recipe.to_json(), pad=tokens.pad, batch=batch,
        run=run, model_class=model_class(source, recipe), parts=(part,), fitted=(4, 8),
    )  # fmt: skip


def _rounded(pad: int, bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    """Return the rounded model. Its inputs get the names that transformers' inputs have."""
    for port, name in zip(model.inputs, ("input_ids", "attention_mask"), strict=True):
        port.get_tensor().set_names({name})
    return int4_weights(model, texts) if bits == 4 else calibrated(model, examples(texts, pad))
