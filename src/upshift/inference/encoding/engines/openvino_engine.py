"""OpenVINO on the CPU: the model converted once, products in fp32, bf16, or int8 calibrated on the user's own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from upshift.inference.encoding.batches import Batch
from upshift.inference.encoding.engines.engine import Build, in_order, load_forward
from upshift.inference.openvino_core import core
from upshift.inference.openvino_model import int8_weights, make
from upshift.inference.setup import QUANTIZED

HINTS = {"fp32": "f32", "bf16": "bf16", "int8-weights": "f32", "int8": "f32"}
NAMES = ("ids", "mask")


class OpenVinoEngine:
    def __init__(self, build: Build) -> None:
        path = build.folder / f"{build.setup.precision if build.setup.precision in QUANTIZED else 'fp32'}.xml"
        make(path, partial(_export, build), partial(_rounded, build))
        model = core().read_model(path)
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[build.setup.precision],
            "PERFORMANCE_HINT": build.setup.hint.upper(),
            "INFERENCE_NUM_THREADS": str(build.setup.threads),
        }
        compiled = core().compile_model(model, "CPU", settings)
        number = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        self.requests = [compiled.create_infer_request() for _ in range(number)]

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Each on a part of the cores. Without Python callbacks: a thread that wants the interpreter's lock for one while the
        model is being deleted waits for ever (OpenVINO 2026.4)."""
        requests = cycle(self.requests)  # the next one is the one that ended last

        def start(batch: Batch) -> Callable[[], np.ndarray]:
            request = next(requests)
            request.start_async(dict(zip(NAMES, (batch.ids, batch.mask), strict=True)))
            return partial(_result, request)

        return in_order(batches, start, at_once=len(self.requests))


def _result(request: Any) -> np.ndarray:
    request.wait()
    found: np.ndarray = request.get_output_tensor(0).data.copy()
    return found


def _export(build: Build) -> Any:
    import openvino
    import torch

    example = {"ids": torch.from_numpy(build.examples[0].ids), "mask": torch.from_numpy(build.examples[0].mask)}
    forward = load_forward(build.source, build.recipe)
    return openvino.convert_model(forward, example_input=example, input=[(name, [-1, -1]) for name in NAMES])


def _rounded(build: Build, model: Any) -> Any:
    import nncf

    if build.setup.precision == "int8-weights":
        return int8_weights(model)
    data = nncf.Dataset(build.examples, lambda batch: {"ids": batch.ids, "mask": batch.mask})
    return nncf.quantize(
        model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(build.examples), preset=nncf.QuantizationPreset.MIXED
    )
