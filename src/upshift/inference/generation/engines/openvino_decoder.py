"""Run OpenVINO on the CPU. Keys and values are in pages where OpenVINO knows the model's attention, and in the
model's own states elsewhere.

Run OpenVINO on the CPU where the compiled model itself keeps keys and values, in the form of a cache that each
step moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.engines.base import Decoder, DecoderBuild, NoExtension, Padding, Prefix
from upshift.inference.generation.engines.openvino_paged import OpenVinoPagedDecoder, convert_to_paged
from upshift.inference.generation.model import attends_to_all
from upshift.inference.generation.prefix import Remainder, remaining_tokens
from upshift.inference.openvino_runtime import core, fp16_weights, int8_weights, make_model_file
from upshift.inference.registry import EngineSetup, Precision
from upshift.inference.weights import OPENVINO_FILE


class OpenVinoStatefulDecoder(NoExtension):
    joins = True

    def __init__(self, compiled: Any, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
        self.names = {name for port in compiled.inputs for name in port.names}
        self._compiled, self._request = compiled, compiled.create_infer_request()
        self.padding = Padding()
        self._order = np.zeros(0, dtype=np.int32)  # rows of the cache that the next step goes on with

    def compute(self, tokens: Sequence[int]) -> Prefix:
        request = self._compiled.create_infer_request()
        self._compute(request, remaining_tokens([tokens], 0))
        return _prefix(request, 0, len(tokens))

    def of_row(self, row: int) -> Prefix:
        return _prefix(self._request, int(self._order[row]), int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        several = self.padding.rows > 0
        request = self._compiled.create_infer_request()  # one with states of fewer rows before gives NaN with 8 bits
        left = remaining_tokens(prompts, prefix.length if prefix else 0)
        if prefix is not None:
            for state in request.query_state():
                state.state = _tensor(left.place(prefix.states[state.name]))
        logits = self._compute(request, left)
        dropped, before, behind = self.padding.admit(left.mask)
        if several:
            new = {state.name: state.state.data for state in request.query_state()}
            for state in self._request.query_state():
                old = (state.state.data, self._order, dropped, before)
                state.state = _tensor(_joined(*old, new[state.name], behind))
        else:
            self._request = request
        self._order = np.arange(self.padding.rows, dtype=np.int32)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        places = self.padding.step()
        logits = self._run(self._request, tokens[:, None], self.padding.mask, places, self._order)
        self._order = np.arange(self.padding.rows, dtype=np.int32)
        return logits

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        self._order = self._order[rows]

    def _compute(self, request: Any, left: Remainder) -> np.ndarray:
        same = np.arange(len(left.ids), dtype=np.int32)
        for part in left.parts():
            logits = self._run(request, part.ids, part.mask, part.positions, same)
        return logits

    def _run(self, request: Any, ids: np.ndarray, mask: np.ndarray, places: np.ndarray, order: np.ndarray) -> np.ndarray:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "beam_idx": order}
        request.infer({name: value for name, value in given.items() if name in self.names}, share_inputs=True)
        found: np.ndarray = request.get_tensor("logits").data[:, -1].copy()
        return found


def _prefix(request: Any, row: int, length: int) -> Prefix:
    """``states``: keys and values [1, heads, T, width] by their states' names."""
    states = {state.name: state.state.data[row : row + 1, :, -length:].copy() for state in request.query_state()}
    return Prefix(length, states)


def _joined(old: np.ndarray, order: np.ndarray, dropped: int, before: int, new: np.ndarray, behind: int) -> np.ndarray:
    """Return [R, heads, T, width]: rows of the old in this order, without the dropped places, then the new, each with
    so many more places on the left. Each number is copied once: a copy of all takes as long as a step."""
    kept = len(order)
    found = np.zeros((kept + len(new), *new.shape[1:2], behind + new.shape[2], *new.shape[3:]), dtype=new.dtype)
    for place, row in enumerate(order):
        found[place, :, before:] = old[row, :, dropped:]
    found[kept:, :, behind:] = new
    return found


def _tensor(values: np.ndarray) -> Any:
    import openvino

    return openvino.Tensor(np.ascontiguousarray(values))


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


def build_decoder(build: DecoderBuild) -> Decoder:
    path = _file(build)
    model = convert_to_paged(core().read_model(path)) if attends_to_all(build.source) else None
    if model is None:
        return OpenVinoStatefulDecoder(compile_file(path, build.setup), weight_bytes(path))
    return OpenVinoPagedDecoder(core().compile_model(model, "CPU", compile_settings(build.setup)), weight_bytes(path))


def _file(build: DecoderBuild) -> Path:
    from upshift.inference.generation.engines.openvino_export import export

    if build.setup.precision == "stored":
        assert build.source.directory is not None
        return build.source.directory / OPENVINO_FILE
    return make_precision_file(build.folder, partial(export, build.source), build.setup)


def make_precision_file(folder: Path, export: Callable[[], Any], setup: EngineSetup) -> Path:
    """Return the model of this precision. Make it if ``folder`` has none."""
    from upshift.inference.generation.engines.openvino_export import int4_weights, mixed_weights

    kind = KINDS[setup.precision]
    path = folder / f"{kind.weights}.xml"
    rounded = {"fp16": fp16_weights, "mixed": mixed_weights, "int8": int8_weights, "int4": int4_weights}
    make_model_file(path, export, rounded.get(kind.weights))
    return path


def compile_file(path: Path, setup: EngineSetup) -> Any:
    return core().compile_model(path, "CPU", compile_settings(setup))


def weight_bytes(path: Path) -> int:
    return path.with_suffix(".bin").stat().st_size


def compile_settings(setup: EngineSetup) -> dict[str, str]:
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
