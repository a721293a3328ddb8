"""OpenVINO on the CPU, which keeps keys and values inside the compiled model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.engines.decoder import DecoderBuild, NoExtension, Padding, Prefix
from upshift.inference.generation.prefill import Remainder, remainder
from upshift.inference.openvino_core import core
from upshift.inference.openvino_model import fp16_weights, int8_weights, make
from upshift.inference.setup import EngineSetup, Precision
from upshift.inference.weights import OPENVINO_FILE

WHOLE, ROUNDED = "0", "32"  # activations beside rounded weights: as they are, or in 8 bits by groups of so many


class Kind(NamedTuple):
    weights: str  # the file's name
    products: str
    cache: str  # keys and values
    groups: str = WHOLE


KINDS: dict[Precision, Kind] = {
    "fp32": Kind("fp32", "f32", "f32"),
    "bf16": Kind("fp32", "bf16", "bf16"),
    "fp16-weights": Kind("fp16", "f32", "f32"),
    "int8-weights": Kind("int8", "f32", "f32"),
    "int8": Kind("int8", "f32", "u8", ROUNDED),
    "int4-weights": Kind("int4", "f32", "f32"),
    "int4": Kind("int4", "f32", "u8", ROUNDED),
    "stored": Kind("", "f32", "f32"),
}


def load(folder: Path, export: Callable[[], Any], setup: EngineSetup) -> tuple[Any, int]:
    """The compiled model, made where ``folder`` has none of this precision, and the bytes of its weights."""
    from upshift.inference.generation.engines.openvino_export import int4_weights

    kind = KINDS[setup.precision]
    path = folder / f"{kind.weights}.xml"
    rounded = {"fp16": fp16_weights, "int8": int8_weights, "int4": int4_weights}
    make(path, export, rounded.get(kind.weights))
    return compile_file(path, setup)


def compile_file(path: Path, setup: EngineSetup) -> tuple[Any, int]:
    return core().compile_model(path, "CPU", settings_of(setup)), path.with_suffix(".bin").stat().st_size


def settings_of(setup: EngineSetup) -> dict[str, str]:
    kind = KINDS[setup.precision]
    return {
        "INFERENCE_PRECISION_HINT": kind.products,
        "KV_CACHE_PRECISION": kind.cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": kind.groups,
        "PERFORMANCE_HINT": setup.hint.upper(),
        "INFERENCE_NUM_THREADS": str(setup.threads),
    }


class OpenVinoDecoder(NoExtension):
    joins = True

    def __init__(self, build: DecoderBuild) -> None:
        from upshift.inference.generation.engines.openvino_export import export

        if build.setup.precision == "stored":
            assert build.source.directory is not None
            compiled, self.weight_bytes = compile_file(build.source.directory / OPENVINO_FILE, build.setup)
        else:
            compiled, self.weight_bytes = load(build.folder, partial(export, build.source), build.setup)
        self.names = {name for port in compiled.inputs for name in port.names}
        self._compiled, self._request = compiled, compiled.create_infer_request()
        self.padding = Padding()
        self._order = np.zeros(0, dtype=np.int32)  # rows of the cache that the next step goes on with

    def compute(self, tokens: Sequence[int]) -> Prefix:
        request = self._compiled.create_infer_request()
        self._compute(request, remainder([tokens], 0))
        return _prefix(request, 0, len(tokens))

    def of_row(self, row: int) -> Prefix:
        return _prefix(self._request, int(self._order[row]), int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        several = self.padding.rows > 0
        request = self._compiled.create_infer_request()  # one with states of fewer rows before gives NaN with 8 bits
        left = remainder(prompts, prefix.length if prefix else 0)
        for state in request.query_state() if prefix else ():
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
    """[R, heads, T, width]: rows of the old, in this order and without the places that are dropped, then the new, each with so
    many places more on the left. Each number is copied once: a copy of all takes as long as a step."""
    kept = len(order)
    found = np.zeros((kept + len(new), *new.shape[1:2], behind + new.shape[2], *new.shape[3:]), dtype=new.dtype)
    for place, row in enumerate(order):
        found[place, :, before:] = old[row, :, dropped:]
    found[kept:, :, behind:] = new
    return found


def _tensor(values: np.ndarray) -> Any:
    import openvino

    return openvino.Tensor(np.ascontiguousarray(values))
