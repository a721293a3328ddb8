"""Quantize encoders with OpenVINO.

With 8 bits, weights and the inputs of their matrix products are rounded, calibrated on the user's own texts. With 4 bits,
weights are rounded by groups and fitted to the texts."""

from __future__ import annotations

from functools import partial
from typing import Any

from upshift.inference.encoding.engines.base import EncoderBuild, model_class
from upshift.inference.encoding.engines.openvino_engine import calibrate, export
from upshift.inference.encoding.model_config import read_encoding_config
from upshift.inference.encoding.raced_setup import run_setup
from upshift.inference.encoding.run import example_batches
from upshift.inference.encoding.text_tokenizer import TextTokenizer
from upshift.inference.generation.engines.openvino_export import int4_weights
from upshift.inference.quantize import Bits, ModelFile, Rounding
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import OPENVINO_FILE, engine_folder
from upshift.models.source import ModelSource

HELD_OUT_TOKENS = 512
BATCH_TOKENS = 1024


def rounding_of(source: ModelSource, texts: list[str]) -> Rounding:
    """Return the inputs of quantization for an encoder."""
    config = read_encoding_config(source)
    tokenizer = TextTokenizer(source, config)
    if config.output == "token scores":
        config = config.changed(special=tokenizer.special())
    ids = tokenizer.tokenize(texts)
    batch = 1 if tokenizer.alone else BATCH_TOKENS
    setup = EngineSetup(engine="openvino", precision="fp32", threads=1, batch=batch)
    folder = engine_folder("encode", source, "openvino")
    build = EncoderBuild(source, config, setup, folder, example_batches(ids, tokenizer.pad))
    model_file = ModelFile(OPENVINO_FILE, partial(export, build), partial(_quantize, tokenizer.pad))
    return Rounding(
        task="encode",
        ids=ids,
        held_out_tokens=HELD_OUT_TOKENS,
        task_options=config.to_json(),
        pad=tokenizer.pad,
        batch=batch,
        run_setup=run_setup,
        model_class=model_class(source, config),
        files=(model_file,),
        fitted_bits=(4, 8),
    )


def _quantize(pad: int, bits: Bits, model: Any, texts: list[list[int]]) -> Any:
    """Return the quantized model. Its inputs get the names of transformers' inputs."""
    for port, name in zip(model.inputs, ("input_ids", "attention_mask"), strict=True):
        port.get_tensor().set_names({name})
    return int4_weights(model, texts) if bits == 4 else calibrate(model, example_batches(texts, pad))
