"""Run OpenVINO on the CPU. The model is converted once, with products in fp32, bf16, or int8 calibrated on the user's
own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import Batch, Build, in_order, load_forward
from upshift.inference.openvino_runtime import core, int8_weights, make
from upshift.inference.weights import OPENVINO_FILE

# Of how far channels differ, what is moved from inputs to weights before rounding (SmoothQuant's alpha): with NNCF's own 0.95
# MiniLM's worst text was at a cosine of 0.976, with 0.65 at 0.987, and with 0.75 of four times the texts at 0.995 (docs/log.md).
SMOOTHING = 0.75
FILES = {"int8-weights": "int8-weights", "int8": f"int8-smooth-{SMOOTHING}"}  # what is kept is made anew when that changes
HINTS = {"fp32": "f32", "bf16": "bf16", "int8-weights": "f32", "int8": "f32", "stored": "f32"}
NAMES = ("ids", "mask")  # of models made here for a race
GIVEN: dict[str, Callable[[Batch], np.ndarray]] = {
    "ids": lambda batch: batch.ids,
    "input_ids": lambda batch: batch.ids,
    "mask": lambda batch: batch.mask,
    "attention_mask": lambda batch: batch.mask,
    "token_type_ids": lambda batch: np.zeros_like(batch.ids),
}


class OpenVinoEngine:
    def __init__(self, build: Build) -> None:
        if build.setup.precision == "stored":
            assert build.source.directory is not None
            path = build.source.directory / OPENVINO_FILE
        else:
            path = build.folder / f"{FILES.get(build.setup.precision, 'fp32')}.xml"
            make(path, partial(export, build), partial(_rounded, build))
        model = core().read_model(path)
        self.names = [port.any_name for port in model.inputs]
        unknown = [name for name in self.names if name not in GIVEN]
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
        """Yield each batch with its output, each computed on a part of the cores.

        No Python callbacks are used: a thread that wants the interpreter's lock for one while the model is being
        deleted waits for ever (OpenVINO 2026.4)."""
        requests = cycle(self.requests)  # the next one is the one that ended last

        def start(batch: Batch) -> Callable[[], np.ndarray]:
            request = next(requests)
            request.start_async([GIVEN[name](batch) for name in self.names])
            return partial(_result, request)

        return in_order(batches, start, at_once=len(self.requests))


def _result(request: Any) -> np.ndarray:
    request.wait()
    found: np.ndarray = request.get_output_tensor(0).data.copy()
    return found


def export(build: Build) -> Any:
    import openvino
    import torch

    example = {"ids": torch.from_numpy(build.examples[0].ids), "mask": torch.from_numpy(build.examples[0].mask)}
    forward = load_forward(build.source, build.recipe)
    return openvino.convert_model(forward, example_input=example, input=[(name, [-1, -1]) for name in NAMES])


def _rounded(build: Build, model: Any) -> Any:
    return int8_weights(model) if build.setup.precision == "int8-weights" else calibrated(model, build.examples)


def calibrated(model: Any, examples: list[Batch]) -> Any:
    """Return the model with weights, and what they are multiplied with, in 8 bits."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, AdvancedSmoothQuantParameters

    names = [port.any_name for port in model.inputs]
    data = nncf.Dataset(examples, lambda batch: {name: GIVEN[name](batch) for name in names})
    smooth = AdvancedQuantizationParameters(smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=SMOOTHING))
    return nncf.quantize(
        model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(examples), preset=nncf.QuantizationPreset.MIXED,
        advanced_parameters=smooth,
    )  # fmt: skip
