"""Run OpenVINO on images and sounds. The model of each modality is converted once for each shape of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from upshift.inference.media.engines.base import Arrays, MediaBuild
from upshift.inference.media.model import MediaForward, load_encoder
from upshift.inference.openvino_runtime import core, make_model_file
from upshift.loading.media_files import Modality

HINTS = {"fp32": "f32", "bf16": "bf16"}


class OpenVinoMediaEngine:
    """OpenVINO on the CPU."""

    def __init__(self, build: MediaBuild) -> None:
        self.build = build
        self._compiled: dict[str, Any] = {}

    def rows(self, modality: Modality, arrays: Arrays) -> np.ndarray:
        shapes = "-".join("x".join(map(str, array.shape[1:])) for array in arrays.values())
        name = f"{modality}-{shapes}"
        if name not in self._compiled:
            self._compiled[name] = self._compile(name, modality, arrays)
        request = self._compiled[name].create_infer_request()
        output: np.ndarray = request.infer(list(arrays.values()))[0].copy()
        return output

    def _compile(self, name: str, modality: Modality, arrays: Arrays) -> Any:
        path = self.build.folder / name / "fp32.xml"

        def export() -> Any:
            import openvino

            forward = MediaForward(
                load_encoder(self.build.source, self.build.config), self.build.config, modality, tuple(arrays)
            ).eval()
            example = tuple(map(torch.from_numpy, arrays.values()))
            shapes = [[-1, *array.shape[1:]] for array in arrays.values()]
            with torch.no_grad():
                return openvino.convert_model(forward, example_input=example, input=shapes)

        make_model_file(path, export, None)
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[self.build.setup.precision],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": str(self.build.setup.threads),
        }
        return core().compile_model(core().read_model(path), "CPU", settings)
