"""Run OpenVINO on the CPU. The model is converted once, with products in fp32, bf16, or int8 calibrated on the user's
own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import Batch, EncoderBuild, input_names, load_forward, run_in_order
from upshift.inference.openvino_runtime import core, int8_weights, make_model_file
from upshift.inference.weights import OPENVINO_FILE

# SmoothQuant's alpha: the share of the channels' differences that moves from inputs to weights before rounding. With NNCF's
# default of 0.95 MiniLM's worst text had a cosine of 0.976, with 0.65 0.987, and with 0.75 and four times the texts 0.995
# (docs/log.md).
SMOOTHING = 0.75
HINTS = {"fp32": "f32", "bf16": "bf16", "int8-weights": "f32", "int8": "f32", "stored": "f32"}
# Of the batch that is traced. With one token, or without padding, transformers takes branches that hold for such texts alone: for
# grouped-query attention they do not convert.
EXAMPLE_SHAPE = (2, 8)
MODEL_INPUTS: dict[str, Callable[[Batch], np.ndarray]] = {
    "ids": lambda batch: batch.ids,
    "input_ids": lambda batch: batch.ids,
    "mask": lambda batch: batch.mask,
    "attention_mask": lambda batch: batch.mask,
    "segments": lambda batch: batch.arrays()[2],
    "token_type_ids": lambda batch: np.zeros_like(batch.ids) if batch.segments is None else batch.segments,
}


class OpenVinoEngine:
    """OpenVINO on the CPU."""

    def __init__(self, build: EncoderBuild) -> None:
        if build.setup.precision == "stored":
            assert build.source.directory is not None
            path = build.source.directory / OPENVINO_FILE
        else:
            path = build.folder / f"{_file_name(build)}.xml"
            make_model_file(path, partial(export, build), partial(_quantize, build))
        model = core().read_model(path)
        self.names = [port.any_name for port in model.inputs]
        unknown = [name for name in self.names if name not in MODEL_INPUTS]
        if unknown:
            raise RequestError(f"{path} takes {', '.join(unknown)}, which no text gives; export the model of transformers again")
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[build.setup.precision],
            "PERFORMANCE_HINT": build.setup.hint.upper(),
            "INFERENCE_NUM_THREADS": str(build.setup.threads),
        }
        compiled = core().compile_model(model, "CPU", settings)
        number = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        self.requests = [compiled.create_infer_request() for _ in range(number)]

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with its output. Each batch runs on a share of the cores.

        There are no Python callbacks: a thread that needs Python's lock for a callback while the model is being deleted
        would wait forever (OpenVINO 2026.4)."""
        requests = cycle(self.requests)  # batches end in order, so the next request is free

        def start_batch(batch: Batch) -> Callable[[], np.ndarray]:
            request = next(requests)
            request.start_async([MODEL_INPUTS[name](batch) for name in self.names])
            return partial(_result, request)

        return run_in_order(batches, start_batch, concurrent=len(self.requests))


def _file_name(build: EncoderBuild) -> str:
    """Return the name of the model's file. Every choice that the conversion depends on is part of it.

    A calibration serves as many texts of the same length, both rounded up to a power of two. More texts, or longer ones, get
    their own. Other words do not: the race measures the quality on the user's texts, whatever the engine was calibrated on."""
    if build.setup.precision == "int8-weights":
        return "int8-weights"
    if build.setup.precision != "int8":
        return "fp32"
    num_texts = 1 << (len(build.examples) - 1).bit_length()
    num_tokens = 1 << (int(median(batch.ids.size for batch in build.examples)) - 1).bit_length()
    return f"int8-smooth-{SMOOTHING}-{num_texts}x{num_tokens}"


def _result(request: Any) -> np.ndarray:
    request.wait()
    output: np.ndarray = request.get_output_tensor(0).data.copy()
    return output


def export(build: EncoderBuild) -> Any:
    """Return the OpenVINO model in fp32."""
    import openvino
    import torch

    names = input_names(build.config)
    example = {name: torch.zeros(EXAMPLE_SHAPE, dtype=torch.long) for name in names}
    example["mask"][:, :-1] = 1
    forward = load_forward(build.source, build.config)
    return openvino.convert_model(forward, example_input=example, input=[(name, [-1, -1]) for name in names])


def _quantize(build: EncoderBuild, model: Any) -> Any:
    return int8_weights(model) if build.setup.precision == "int8-weights" else calibrate(model, build.examples)


def calibrate(model: Any, examples: list[Batch]) -> Any:
    """Return the model with weights and activations of matrix products in 8 bits, calibrated on the examples."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, AdvancedSmoothQuantParameters

    names = [port.any_name for port in model.inputs]
    data = nncf.Dataset(examples, lambda batch: {name: MODEL_INPUTS[name](batch) for name in names})
    smooth = AdvancedQuantizationParameters(smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=SMOOTHING))
    return nncf.quantize(
        model,
        data,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(examples),
        preset=nncf.QuantizationPreset.MIXED,
        advanced_parameters=smooth,
    )
