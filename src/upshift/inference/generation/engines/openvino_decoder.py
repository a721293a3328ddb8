"""Run OpenVINO on the CPU. Keys and values are in pages where OpenVINO knows the model's attention, and in the
model's own states elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from upshift.inference.generation.engines.decoder import Decoder, DecoderBuild
from upshift.inference.generation.engines.openvino_pages import OpenVinoPages, paged
from upshift.inference.generation.engines.openvino_states import OpenVinoStates
from upshift.inference.generation.model import attends_to_all
from upshift.inference.openvino_core import core
from upshift.inference.openvino_model import fp16_weights, int8_weights, make
from upshift.inference.setup import EngineSetup, Precision
from upshift.inference.weights import OPENVINO_FILE

WHOLE, ROUNDED = "0", "128"  # activations beside rounded weights: as they are, or in 8 bits by groups of so many


class Kind(NamedTuple):
    weights: str  # the file's name
    products: str  # where the CPU has no instructions for bf16: f32
    cache: str  # keys and values
    groups: str = WHOLE


KINDS: dict[Precision, Kind] = {
    "fp32": Kind("fp32", "f32", "f32"),
    "bf16": Kind("fp32", "bf16", "bf16"),
    "fp16-weights": Kind("fp16", "f32", "f32"),
    "mixed-weights": Kind("mixed", "f32", "f32"),
    "mixed": Kind("mixed", "f32", "f32", ROUNDED),
    "int8-weights": Kind("int8", "bf16", "bf16"),
    "int8": Kind("int8", "f32", "u8", ROUNDED),
    "int4-weights": Kind("int4", "bf16", "bf16"),
    "int4": Kind("int4", "f32", "u8", ROUNDED),
    "stored": Kind("", "f32", "f32"),
}


def decoder(build: DecoderBuild) -> Decoder:
    path = _file(build)
    model = paged(core().read_model(path)) if attends_to_all(build.source) else None
    if model is None:
        return OpenVinoStates(compile_file(path, build.setup), weight_bytes(path))
    return OpenVinoPages(core().compile_model(model, "CPU", settings_of(build.setup)), weight_bytes(path))


def _file(build: DecoderBuild) -> Path:
    from upshift.inference.generation.engines.openvino_export import export

    if build.setup.precision == "stored":
        assert build.source.directory is not None
        return build.source.directory / OPENVINO_FILE
    return made(build.folder, partial(export, build.source), build.setup)


def made(folder: Path, export: Callable[[], Any], setup: EngineSetup) -> Path:
    """Return the model of this precision. Make it if ``folder`` has none."""
    from upshift.inference.generation.engines.openvino_export import int4_weights
    from upshift.inference.generation.engines.openvino_mixed import mixed_weights

    kind = KINDS[setup.precision]
    path = folder / f"{kind.weights}.xml"
    rounded = {"fp16": fp16_weights, "mixed": mixed_weights, "int8": int8_weights, "int4": int4_weights}
    make(path, export, rounded.get(kind.weights))
    return path


def compile_file(path: Path, setup: EngineSetup) -> Any:
    return core().compile_model(path, "CPU", settings_of(setup))


def weight_bytes(path: Path) -> int:
    return path.with_suffix(".bin").stat().st_size


def settings_of(setup: EngineSetup) -> dict[str, str]:
    kind = KINDS[setup.precision]
    able = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    products, cache = ("f32" if name == "bf16" and not able else name for name in (kind.products, kind.cache))
    return {
        "INFERENCE_PRECISION_HINT": products,
        "KV_CACHE_PRECISION": cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": kind.groups,
        "PERFORMANCE_HINT": setup.hint.upper(),
        "INFERENCE_NUM_THREADS": str(setup.threads),
    }
