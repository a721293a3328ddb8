"""Run ONNX Runtime on the CPU. The model is exported once, in fp32, or with int8 weights and activations that are
quantized at run time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from upshift.atomic_file import make_once, sync_and_rename
from upshift.inference.encoding.engines.base import Batch, EncoderBuild, input_names, load_forward


class OnnxRuntimeEngine:
    """ONNX Runtime on the CPU."""

    def __init__(self, build: EncoderBuild) -> None:
        import onnxruntime

        path = build.folder / f"{build.setup.precision}.onnx"
        make_once(path, lambda: _export(build, path), beside=path.with_name("fp32.onnx"))
        self.names = input_names(build.config)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = build.setup.threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            (output,) = self.session.run(None, dict(zip(self.names, batch.arrays(), strict=True)))
            yield batch, output


def _export(build: EncoderBuild, path: Path) -> None:
    """Write the model of the setup's precision to ``path``, and the fp32 model beside it."""
    import torch

    example = max(build.examples, key=lambda batch: batch.ids.size)
    tensors = tuple(map(torch.from_numpy, example.arrays()))
    dynamic = {0: torch.export.Dim("batch", min=1, max=2**16), 1: torch.export.Dim("tokens", min=1, max=2**16)}
    fp32_path = path.with_name("fp32.onnx")
    if not fp32_path.is_file():
        temporary = path.with_name("writing.onnx")
        torch.onnx.export(
            load_forward(build.source, build.config),
            tensors,
            temporary,
            input_names=list(input_names(build.config)),
            output_names=["found"],
            dynamic_shapes=(dynamic,) * len(tensors),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        sync_and_rename(temporary, fp32_path)
    if build.setup.precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        temporary = path.with_name("writing-int8.onnx")
        quantize_dynamic(fp32_path, temporary, weight_type=QuantType.QInt8, per_channel=True)
        sync_and_rename(temporary, path)
