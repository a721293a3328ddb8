"""Run OpenVINO on the CPU with paged attention (Kwon and others, arXiv:2309.06180).

Keys and values are stored in pages, which sequences take as they grow. So nothing is copied when a sequence joins or leaves, and
rows of different lengths need no padding. The model is the one with states, with its attention replaced by OpenVINO's attention
over pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from upshift.inference.generation.engines.base import NoChunks, Prefix
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.internals.openvino_names import PAGES

CACHE_INPUTS = ("key_cache.", "value_cache.")
POSITION_INPUT = "position_ids"
LOGITS_INPUT = "last_tokens"  # an input that convert_to_paged adds: the tokens whose logits are computed
FIRST_PAGES = 64


class Row:
    """A sequence: the number of its tokens with keys and values, and the pages that hold them."""

    def __init__(self) -> None:
        self.length = 0
        self.pages: list[int] = []


class OpenVinoPagedDecoder(NoChunks):
    """A model with paged attention."""

    joins = True
    prefixes = True
    extends = True
    mixes = True

    def __init__(self, compiled: Any, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
        self._request = compiled.create_infer_request()
        self._input_names = {name for port in compiled.inputs for name in port.names}
        # OpenVINO's conversion may add an input of positions, [tokens], beside the model's own, [tokens, 1].
        position_ports = [port for port in compiled.inputs if port.any_name.startswith(POSITION_INPUT)]
        self._position_axes = {port: len(port.get_partial_shape()) for port in position_ports}
        cache_ports = [port for port in compiled.inputs if any(name.startswith(CACHE_INPUTS) for name in port.names)]
        self._pools = [PagePool(port) for port in cache_ports]
        self._page_tokens = min(pool.page_tokens for pool in self._pools)  # pages of rounded keys also hold their scales
        self._rows: list[Row] = []
        self._free_pages: list[int] = []
        self._tensors: dict[Any, np.ndarray] = {}  # arrays of the inputs of the last pass
        self._grow(FIRST_PAGES)

    def compute(self, tokens: Sequence[int]) -> Prefix:
        row = Row()
        self._run([row], [tokens])
        prefix = self._prefix_from(row)
        self._free_pages += row.pages
        return prefix

    def prefix_of_row(self, row: int) -> Prefix:
        return self._prefix_from(self._rows[row])

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        num_present = len(self._rows)
        prefix_length = prefix.length if prefix else 0
        for _ in prompts:
            self.join(prefix)
        return self._run(self._rows[num_present:], [prompt[prefix_length:] for prompt in prompts])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        return self._run(self._rows, [[int(token)] for token in tokens])

    def join(self, prefix: Prefix | None = None) -> None:
        row = Row()
        self._rows.append(row)
        if prefix is not None:
            row.length = prefix.length
            self._take_pages(row, 0)
            for pool, states in zip(self._pools, prefix.states, strict=True):
                pool.data[row.pages] = states[: len(row.pages)]

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        return self._run(self._rows, tokens)

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        return self._run_pass(self._rows, [tokens], np.arange(len(tokens)))

    def cut(self, tokens: int) -> None:
        (row,) = self._rows
        row.length -= tokens

    def keep(self, rows: list[int]) -> None:
        kept_rows = [self._rows[index] for index in rows]
        for row in self._rows:
            if row not in kept_rows:
                self._free_pages += row.pages
        self._rows = kept_rows

    def _prefix_from(self, row: Row) -> Prefix:
        """Return a row as a prefix, with copies of its pages in each pool."""
        pages = row.pages[: self._count_pages(row.length)]
        return Prefix(row.length, [pool.data[pages] for pool in self._pools])

    def _run(self, rows: list[Row], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute new tokens of each row, long ones in chunks. Return the logits after each row's last token, [R, V]."""
        width = max(PASS_TOKENS // len(rows), 1)
        longest = max(map(len, tokens))
        if longest <= width:
            return self._run_pass(rows, tokens)
        logits_by_row: dict[int, np.ndarray] = {}
        for start in range(0, longest, width):
            indices = [index for index, row_tokens in enumerate(tokens) if len(row_tokens) > start]
            chunks = [tokens[index][start : start + width] for index in indices]
            logits = self._run_pass([rows[index] for index in indices], chunks)
            logits_by_row.update(zip(indices, logits, strict=True))
        return np.stack([logits_by_row[index] for index in range(len(rows))])

    def _run_pass(self, rows: list[Row], tokens: Sequence[Sequence[int]], logits_indices: np.ndarray | None = None) -> np.ndarray:
        """Run one pass. Return logits [N, V].

        ``logits_indices`` holds the indices, among the tokens of all rows, after which logits are computed. None: the last
        token of each row."""
        old_lengths = [row.length for row in rows]
        sizes = [len(row_tokens) for row_tokens in tokens]
        for row, size in zip(rows, sizes, strict=True):
            self._take_pages(row, size)
        lengths = [old_length + size for old_length, size in zip(old_lengths, sizes, strict=True)]
        page_counts = [self._count_pages(length) for length in lengths]
        used_pages = [row.pages[:page_count] for row, page_count in zip(rows, page_counts, strict=True)]
        ends = list(accumulate(sizes))
        if logits_indices is None:
            logits_indices = np.array(ends, dtype=np.int64) - 1
        inputs: dict[str, np.ndarray] = {
            "input_ids": np.array([*chain.from_iterable(tokens)], dtype=np.int64),
            "past_lens": np.array(old_lengths, dtype=np.int32),
            "subsequence_begins": np.array([0, *ends], dtype=np.int32),
            LOGITS_INPUT: logits_indices.astype(np.int64),
            "block_indices": np.array([*chain.from_iterable(used_pages)], dtype=np.int32),
            "block_indices_begins": np.array([0, *accumulate(page_counts)], dtype=np.int32),
            "max_context_len": np.array(max(lengths), dtype=np.int32),
        }
        positions = np.array([*chain.from_iterable(map(range, old_lengths, lengths))], dtype=np.int64)
        values: list[tuple[Any, np.ndarray]] = []
        for port, axes in self._position_axes.items():
            values.append((port, positions.reshape(-1, *[1] * (axes - 1))))
        values += [(name, value) for name, value in inputs.items() if name in self._input_names]
        self._infer(values)
        for row, length in zip(rows, lengths, strict=True):
            row.length = length
        logits: np.ndarray = self._request.get_tensor("logits").data[:, -1].copy()
        return logits

    def _infer(self, inputs: list[tuple[Any, np.ndarray]]) -> None:
        """Run the model. Inputs whose shapes stay the same are written into the arrays of the pass before: to set a tensor
        takes a hundredth of a millisecond, and delays the pass."""
        import openvino

        for name, value in inputs:
            array = self._tensors.get(name)
            if array is not None and array.shape == value.shape:
                array[...] = value
            else:
                self._tensors[name] = value
                self._request.set_tensor(name, openvino.Tensor(value, shared_memory=True))
        self._request.start_async()
        self._request.wait()

    def _count_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _take_pages(self, row: Row, new_tokens: int) -> None:
        """Give a row pages for ``new_tokens`` more tokens."""
        missing = self._count_pages(row.length + new_tokens) - len(row.pages)
        while missing > len(self._free_pages):
            self._grow(2 * self._pools[0].pages)
        row.pages += [self._free_pages.pop() for _ in range(missing)]

    def _grow(self, pages: int) -> None:
        """Enlarge all pools to ``pages`` pages."""
        self._free_pages += range(self._pools[0].pages, pages)
        for pool in self._pools:
            pool.grow(pages)
            self._request.set_tensor(pool.port, pool.tensor)


class PagePool:
    """The pages of one layer's keys or values, [pages, heads, tokens, width], in the layout of the compiled model."""

    tensor: Any
    data: np.ndarray

    def __init__(self, port: Any) -> None:
        self.port = port
        _, *self._page_shape = (size.get_length() if size.is_static else 0 for size in port.get_partial_shape())
        self.page_tokens = self._page_shape[1]
        self.pages = 0

    def grow(self, pages: int) -> None:
        """Enlarge the pool to ``pages`` pages, with its content."""
        import openvino

        tensor = openvino.Tensor(self.port.get_element_type(), openvino.Shape([pages, *self._page_shape]))
        if self.pages:
            tensor.data[: self.pages] = self.data
        self.tensor = tensor
        self.data = tensor.data
        self.pages = pages


def convert_to_paged(model: Any) -> Any | None:
    """Replace the attention of a stateful model in place by attention over pages, and return the model.

    Return None if OpenVINO does not know the model's attention, or not all of it."""
    from openvino import PartialShape, opset13

    num_states = len(model.get_variables())
    try:
        PAGES.get()(model)
    except RuntimeError:  # OpenVINO's way to say that it does not know the attention
        return None
    parameters = {name: parameter for parameter in model.get_parameters() for name in parameter.output(0).names}
    if sum(name.startswith(CACHE_INPUTS) for name in parameters) != num_states:
        return None
    parameters["input_ids"].set_partial_shape(PartialShape([-1]))
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":  # skip what scales or caps the logits of each token by itself
        head = head.input_value(0).get_node()
    model.validate_nodes_and_infer_types()
    hidden_shape = head.input_value(0).get_partial_shape()  # [tokens, 1, width]
    if hidden_shape[1].is_dynamic or hidden_shape[1].get_length() != 1:
        return None  # the model arranges its tokens into rows
    logits_indices = opset13.parameter([-1], np.int64, name=LOGITS_INPUT)
    logits_indices.output(0).get_tensor().set_names({LOGITS_INPUT})
    selected = opset13.gather(head.input_value(0), logits_indices, opset13.constant(np.int64(0)))
    head.input(0).replace_source_output(selected.output(0))
    model.add_parameters([logits_indices])
    model.validate_nodes_and_infer_types()
    return model
