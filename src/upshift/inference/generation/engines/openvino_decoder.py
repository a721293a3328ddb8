"""Run causal language models in OpenVINO on the CPU.

Keys and values are in pages if OpenVINO knows the model's attention (openvino_paged.py). Otherwise the compiled model keeps them
as states, which are copied when rows are added or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.engine_errors import PromptsFailed, computing
from upshift.inference.generation.engines.base import ComputedRows, Decoder, DecoderBuild, NoExtension, Padding, Prefix
from upshift.inference.generation.engines.openvino_paged import OpenVinoPagedDecoder, convert_to_paged
from upshift.inference.generation.model import attends_to_all
from upshift.inference.generation.prefix import PASS_TOKENS, remaining_tokens
from upshift.inference.openvino_runtime import core, fp16_weights, int8_weights, make_model_file
from upshift.inference.registry import EngineSetup, Precision
from upshift.inference.weights import OPENVINO_FILE

NO_ROUNDING = "0"
GROUPS_OF_128 = "128"


class PrecisionSettings(NamedTuple):
    """A precision in OpenVINO's terms. On a CPU without instructions for bf16, f32 replaces bf16."""

    weights: str  # name of the model file
    products: str  # precision of matrix products
    cache: str  # precision of keys and values
    activation_groups: str = NO_ROUNDING  # activations beside rounded weights: as they are, or in 8 bits by groups


PRECISIONS: dict[Precision, PrecisionSettings] = {
    "fp32": PrecisionSettings("fp32", "f32", "f32"),
    "bf16": PrecisionSettings("fp32", "bf16", "bf16"),
    "fp16-weights": PrecisionSettings("fp16", "f32", "f32"),
    "mixed-weights": PrecisionSettings("mixed", "f32", "f32"),
    "mixed": PrecisionSettings("mixed", "f32", "f32", GROUPS_OF_128),
    "int8-weights": PrecisionSettings("int8", "bf16", "bf16"),
    "int8": PrecisionSettings("int8", "f32", "u8", GROUPS_OF_128),
    "int4-weights": PrecisionSettings("int4", "bf16", "bf16"),
    "int4": PrecisionSettings("int4", "f32", "u8", GROUPS_OF_128),
    "stored": PrecisionSettings("", "f32", "f32"),
}


def build_decoder(build: DecoderBuild) -> Decoder:
    """Build the decoder with pages, or with states if the model's attention is not one that OpenVINO converts to pages."""
    path = _model_file(build)
    paged_model = convert_to_paged(core().read_model(path)) if attends_to_all(build.source) else None
    if paged_model is None:
        return OpenVinoStatefulDecoder(compile_file(path, build.setup), weight_bytes(path))
    compiled = core().compile_model(paged_model, "CPU", compile_settings(build.setup))
    return OpenVinoPagedDecoder(compiled, weight_bytes(path))


def _model_file(build: DecoderBuild) -> Path:
    from upshift.inference.generation.engines.openvino_export import export

    if build.setup.precision == "stored":
        assert build.source.directory is not None
        return build.source.directory / OPENVINO_FILE
    return make_precision_file(build.folder, partial(export, build.source), build.setup)


def make_precision_file(folder: Path, export: Callable[[], Any], setup: EngineSetup) -> Path:
    """Return the model file of the setup's precision in ``folder``. Write it if it does not exist.

    ``export`` returns the model in fp32."""
    from upshift.inference.generation.engines.openvino_export import int4_weights, mixed_weights

    name = PRECISIONS[setup.precision].weights
    path = folder / f"{name}.xml"
    quantizers = {"fp16": fp16_weights, "mixed": mixed_weights, "int8": int8_weights, "int4": int4_weights}
    make_model_file(path, export, quantizers.get(name))
    return path


def compile_file(path: Path, setup: EngineSetup) -> Any:
    return core().compile_model(path, "CPU", compile_settings(setup))


def weight_bytes(path: Path) -> int:
    return path.with_suffix(".bin").stat().st_size


def compile_settings(setup: EngineSetup) -> dict[str, str]:
    """Return OpenVINO's properties for compiling a model under this setup."""
    precision = PRECISIONS[setup.precision]
    supports_bf16 = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    products, cache = ("f32" if name == "bf16" and not supports_bf16 else name for name in (precision.products, precision.cache))
    return {
        "INFERENCE_PRECISION_HINT": products,
        "KV_CACHE_PRECISION": cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": precision.activation_groups,
        "PERFORMANCE_HINT": setup.hint.upper(),
        "INFERENCE_NUM_THREADS": str(setup.threads),
    }


class OpenVinoStatefulDecoder(NoExtension):
    """A model that keeps keys and values as its states, a cache with padding that each step copies."""

    joins = True
    chunks = True

    def __init__(self, compiled: Any, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
        self.input_names = {name for port in compiled.inputs for name in port.names}
        self.padding = Padding()
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._order = np.zeros(0, dtype=np.int32)  # rows of the states that the next step continues

    def compute(self, tokens: Sequence[int]) -> Prefix:
        return _prefix_of(self._compute_whole([tokens], None).cache, 0, len(tokens))

    def prefix_of_row(self, row: int) -> Prefix:
        return _prefix_of(self._request, int(self._order[row]), int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        return self.join_computed(self._compute_whole(prompts, prefix))

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        request = self._compiled.create_infer_request()  # a request with states of fewer rows gives NaN with 8 bits
        remainder = remaining_tokens(prompts, prefix.length if prefix else 0)
        if prefix is not None:
            for state in request.query_state():
                state.state = _to_tensor(remainder.pad_states(prefix.states[state.name]))
        order = np.arange(len(remainder.ids), dtype=np.int32)
        for chunk in remainder.chunks(next_width):
            logits = self._run(request, chunk.ids, chunk.mask, chunk.positions, order)
            if chunk.mask.shape[1] < remainder.mask.shape[1]:
                yield None
        yield ComputedRows(remainder.mask, request, logits, 0)

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        has_rows = self.padding.rows > 0
        request = computed.cache
        dropped, present_padding, new_padding = self.padding.admit(computed.mask)
        if has_rows:
            new_states = {state.name: state.state.data for state in request.query_state()}
            for state in self._request.query_state():
                present = PresentStates(state.state.data, self._order, dropped, present_padding)
                state.state = _to_tensor(_join_states(present, new_states[state.name], new_padding))
        else:
            self._request = request
        self._order = np.arange(self.padding.rows, dtype=np.int32)
        return computed.logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        positions = self.padding.step()
        logits = self._run(self._request, tokens[:, None], self.padding.mask, positions, self._order)
        self._order = np.arange(self.padding.rows, dtype=np.int32)
        return logits

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        self._order = self._order[rows]

    def _compute_whole(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None) -> ComputedRows:
        """Compute prompts apart from the rows, in chunks that only limit the memory of a pass."""
        with computing(PromptsFailed):
            *_, computed = self.compute_chunks(prompts, prefix, lambda: PASS_TOKENS)
        assert computed is not None, "the last chunk gives the rows"
        return computed

    def _run(self, request: Any, ids: np.ndarray, mask: np.ndarray, positions: np.ndarray, order: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "beam_idx": order}
        request.infer({name: value for name, value in inputs.items() if name in self.input_names}, share_inputs=True)
        logits: np.ndarray = request.get_tensor("logits").data[:, -1].copy()
        return logits


def _prefix_of(request: Any, row: int, length: int) -> Prefix:
    """Return the last ``length`` tokens of a row as a prefix.

    Its ``states`` are keys and values [1, heads, T, width] by the names of the model's states."""
    states = {state.name: state.state.data[row : row + 1, :, -length:].copy() for state in request.query_state()}
    return Prefix(length, states)


class PresentStates(NamedTuple):
    """The keys or values of the present rows, [R, heads, T, width], and how they change when rows are added."""

    states: np.ndarray
    order: np.ndarray  # rows to keep
    dropped: int  # positions to drop on the left
    padding: int  # positions to add on the left


def _join_states(present: PresentStates, new: np.ndarray, new_padding: int) -> np.ndarray:
    """Return the keys or values of present and new rows, [R, heads, T, width].

    Each number is copied only once, because a copy of all states takes as long as a step."""
    num_present = len(present.order)
    length = new_padding + new.shape[2]
    joined = np.zeros((num_present + len(new), *new.shape[1:2], length, *new.shape[3:]), dtype=new.dtype)
    for index, row in enumerate(present.order):
        joined[index, :, present.padding :] = present.states[row, :, present.dropped :]
    joined[num_present:, :, new_padding:] = new
    return joined


def _to_tensor(values: np.ndarray) -> Any:
    import openvino

    return openvino.Tensor(np.ascontiguousarray(values))
