"""Run OpenVINO on the CPU with paged attention (Kwon and others, arXiv:2309.06180).

Keys and values lie in pages, which sequences take as they grow. So nothing is moved when one joins or leaves, and
rows of different lengths are computed without padding. The model is the one that keeps states, its attention
exchanged for OpenVINO's own over pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from upshift.inference.generation.engines.base import Prefix
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.internals.openvino_names import PAGES

CACHES = ("key_cache.", "value_cache.")
FIRST_PAGES = 64
LAST, POSITIONS = "last_tokens", "position_ids"


class Row:
    """A sequence: how many of its tokens have keys and values, and the pages that these are in."""

    def __init__(self) -> None:
        self.length = 0
        self.pages: list[int] = []


class OpenVinoPagedDecoder:
    joins = True
    extends = True
    mixes = True

    def __init__(self, compiled: Any, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
        self._request = compiled.create_infer_request()
        # The pass adds positions of its own, [tokens], beside those that a model takes, [tokens, 1], where it does not know them.
        self._positions = {port: len(port.get_partial_shape()) for port in compiled.inputs if port.any_name.startswith(POSITIONS)}
        self._takes = {name for port in compiled.inputs for name in port.names}
        self._pools = [Pool(port) for port in compiled.inputs if any(name.startswith(CACHES) for name in port.names)]
        self._page = min(pool.page_tokens for pool in self._pools)  # beside its scales, where keys are rounded
        self._rows: list[Row] = []
        self._free: list[int] = []
        self._given: dict[Any, np.ndarray] = {}
        self._grow(FIRST_PAGES)

    def compute(self, tokens: Sequence[int]) -> Prefix:
        row = Row()
        self._run([row], [tokens])
        found = self._told(row)
        self._free += row.pages
        return found

    def of_row(self, row: int) -> Prefix:
        return self._told(self._rows[row])

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        before, known = len(self._rows), prefix.length if prefix else 0
        for _ in prompts:
            self.join(prefix)
        return self._run(self._rows[before:], [prompt[known:] for prompt in prompts])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        return self._run(self._rows, [[int(token)] for token in tokens])

    def join(self, prefix: Prefix | None = None) -> None:
        row = Row()
        self._rows.append(row)
        if prefix is not None:
            row.length = prefix.length
            self._take(row, 0)
            for pool, states in zip(self._pools, prefix.states, strict=True):
                pool.data[row.pages] = states[: len(row.pages)]

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        return self._run(self._rows, tokens)

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        return self._pass(self._rows, [tokens], np.arange(len(tokens)))

    def cut(self, tokens: int) -> None:
        (row,) = self._rows
        row.length -= tokens

    def keep(self, rows: list[int]) -> None:
        kept = [self._rows[place] for place in rows]
        for row in self._rows:
            if row not in kept:
                self._free += row.pages
        self._rows = kept

    def _told(self, row: Row) -> Prefix:
        pages = row.pages[: -(-row.length // self._page)]
        return Prefix(row.length, [pool.data[pages] for pool in self._pools])

    def _run(self, rows: list[Row], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute new tokens of each row, long ones in parts. Return the logits behind the last token [R, V]."""
        width, longest = max(PASS_TOKENS // len(rows), 1), max(map(len, tokens))
        if longest <= width:
            return self._pass(rows, tokens)
        found = dict[int, np.ndarray]()
        for start in range(0, longest, width):
            now = [place for place, part in enumerate(tokens) if len(part) > start]
            logits = self._pass([rows[place] for place in now], [tokens[place][start : start + width] for place in now])
            found |= dict(zip(now, logits, strict=True))
        return np.stack([found[place] for place in range(len(rows))])

    def _pass(self, rows: list[Row], tokens: Sequence[Sequence[int]], told: np.ndarray | None = None) -> np.ndarray:
        """Run one pass. ``told`` holds places among the tokens of all rows, behind which logits are wanted. None:
        each row's last."""
        past, sizes = [row.length for row in rows], [len(part) for part in tokens]
        for row, size in zip(rows, sizes, strict=True):
            self._take(row, size)
        lengths = [before + size for before, size in zip(past, sizes, strict=True)]
        used = [-(-length // self._page) for length in lengths]
        ends = list(accumulate(sizes))
        given: dict[str, np.ndarray] = {
            "input_ids": np.array([*chain.from_iterable(tokens)], dtype=np.int64),
            "past_lens": np.array(past, dtype=np.int32), "subsequence_begins": np.array([0, *ends], dtype=np.int32),
            LAST: np.array(ends, dtype=np.int64) - 1 if told is None else told.astype(np.int64),
            "block_indices": np.array(
                [*chain.from_iterable(row.pages[:count] for row, count in zip(rows, used, strict=True))], dtype=np.int32
            ),
            "block_indices_begins": np.array([0, *accumulate(used)], dtype=np.int32),
            "max_context_len": np.array(max(lengths), dtype=np.int32),
        }  # fmt: skip
        places = np.array([*chain.from_iterable(map(range, past, lengths))], dtype=np.int64)
        positions = [(port, places.reshape(-1, *[1] * (axes - 1))) for port, axes in self._positions.items()]
        self._infer([*positions, *((name, value) for name, value in given.items() if name in self._takes)])
        for row, length in zip(rows, lengths, strict=True):
            row.length = length
        found: np.ndarray = self._request.get_tensor("logits").data[:, -1].copy()
        return found

    def _infer(self, given: list[tuple[Any, np.ndarray]]) -> None:
        """Run the model with tensors over arrays that are kept while their shapes stay the same. Each tensor that is
        set takes a hundredth of a millisecond here, and delays the pass."""
        import openvino

        for name, value in given:
            kept = self._given.get(name)
            if kept is not None and kept.shape == value.shape:
                kept[...] = value
            else:
                self._given[name] = value
                self._request.set_tensor(name, openvino.Tensor(value, shared_memory=True))
        self._request.start_async()
        self._request.wait()

    def _take(self, row: Row, more: int) -> None:
        """Take pages for ``more`` tokens."""
        missing = -(-(row.length + more) // self._page) - len(row.pages)
        while missing > len(self._free):
            self._grow(2 * self._pools[0].pages)
        row.pages += [self._free.pop() for _ in range(missing)]

    def _grow(self, pages: int) -> None:
        self._free += range(self._pools[0].pages, pages)
        for pool in self._pools:
            pool.grow(pages)
            self._request.set_tensor(pool.port, pool.tensor)


class Pool:
    """The pages of one layer's keys, or values: [pages, heads, tokens, width], as the compiled model asks for them."""

    tensor: Any
    data: np.ndarray

    def __init__(self, port: Any) -> None:
        self.port = port
        _, *self._shape = (size.get_length() if size.is_static else 0 for size in port.get_partial_shape())
        self.page_tokens, self.pages = self._shape[1], 0

    def grow(self, pages: int) -> None:
        import openvino

        tensor = openvino.Tensor(self.port.get_element_type(), openvino.Shape([pages, *self._shape]))
        if self.pages:
            tensor.data[: self.pages] = self.data
        self.tensor, self.data, self.pages = tensor, tensor.data, pages


def convert_to_paged(model: Any) -> Any | None:
    """Return the model, which is changed in place, or None if OpenVINO finds no attention that it knows, or not all
    of it."""
    from openvino import PartialShape, opset13

    states = len(model.get_variables())
    try:
        PAGES.get()(model)
    except RuntimeError:  # as OpenVINO says it: it is run as it is then
        return None
    parameters = {name: one for one in model.get_parameters() for name in one.output(0).names}
    if sum(name.startswith(CACHES) for name in parameters) != states:
        return None
    parameters["input_ids"].set_partial_shape(PartialShape([-1]))
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":  # behind it: what scales or caps logits, which each token's are by themselves
        head = head.input_value(0).get_node()
    model.validate_nodes_and_infer_types()
    states = head.input_value(0).get_partial_shape()  # [tokens, 1, width]
    if states[1].is_dynamic or states[1].get_length() != 1:
        return None  # tokens that it brings into rows of their own
    last = opset13.parameter([-1], np.int64, name=LAST)
    last.output(0).get_tensor().set_names({LAST})
    head.input(0).replace_source_output(opset13.gather(head.input_value(0), last, opset13.constant(np.int64(0))).output(0))
    model.add_parameters([last])
    model.validate_nodes_and_infer_types()
    return model
