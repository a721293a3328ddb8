"""Evaluate and predict with a transformers.Trainer whose outputs need not fit into memory.

The loop is transformers' own. Only the container in which it collects losses, outputs, labels and inputs is another one.

Hold arrays that arrive batch by batch and may be larger than memory: in memory up to a limit, then in files without a name.

A file without a name takes disk space only while an array, or this process, holds it. Nothing is left behind, whatever ends
the process.
"""

from __future__ import annotations

import errno
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from upshift.errors import JobFailed, RequestError
from upshift.training.hf_trainer.patching import LibraryTrainer, with_global
from upshift.units import MIB, format_bytes

BUFFER_BYTES = 32 * MIB  # with the holes that a heap has between such tensors, twice that
IN_MEMORY_SYSTEMS = frozenset({"tmpfs", "ramfs"})  # a file there takes memory


def spool_directory(output_dir: Path) -> Path:
    """Return the system's temporary directory. If that is memory, return the nearest existing directory above `output_dir`."""
    temporary = Path(tempfile.gettempdir()).resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[place] for place in (temporary, *temporary.parents) if place in mounts), "")
    if kind not in IN_MEMORY_SYSTEMS:
        return temporary
    return next(place for place in (output_dir.resolve(), *output_dir.resolve().parents) if place.is_dir())


class Spool:
    """The columns of one evaluation, which together hold at most `held_bytes` outside of files."""

    def __init__(self, directory: Path, held_bytes: int) -> None:
        self.directory, self.held_bytes = directory, held_bytes
        self._columns: list[Column] = []

    def column(self) -> Column:
        column = Column(self)
        self._columns.append(column)
        return column

    def keep_to_limit(self) -> None:
        if sum(column.held_bytes for column in self._columns) > self.held_bytes:
            for column in self._columns:
                column.spill()


class Column:
    """A column takes tensors of any device and returns one numpy array (or one a piece)."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[torch.dtype] = []
        self._held: list[Tensor] = []
        self._file: SpoolFile | None = None
        self.held_bytes = 0

    def add(self, tensor: Tensor) -> int:
        """Append a tensor. Return the number of the piece."""
        tensor = _with_own_memory(tensor.detach())
        self._shapes.append(tuple(tensor.shape))
        self._dtypes.append(tensor.dtype)
        self._held.append(tensor)
        self.held_bytes += tensor.nbytes
        self._spool.keep_to_limit()
        return len(self._shapes) - 1

    def to_host(self) -> None:
        self._held = [tensor.cpu() for tensor in self._held]

    def spill(self) -> None:
        """Write the held tensors to the column's file. Raise JobFailed when the disk is full."""
        self._file = self._file or SpoolFile(self._spool.directory)
        for tensor in self._held:
            self._file.append(numpy_array(tensor))
        self._held, self.held_bytes = [], 0

    def pieces(self) -> list[np.ndarray]:
        """Return one array for each tensor, in order. The arrays of one column share its file."""
        if self._file is None:
            return [numpy_array(tensor) for tensor in self._held]
        self.spill()
        whole, start, views = self._file.mapped(), 0, []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            end = start + math.prod(shape) * numpy_dtype(dtype).itemsize
            views.append(whole[start:end].view(numpy_dtype(dtype)).reshape(shape))
            start = end
        return views

    def whole(self, padding: int) -> np.ndarray:
        """Return all pieces along the first dimension. The second is as wide as the widest, filled up with `padding`."""
        if len(self._shapes) == 1:
            return self.pieces()[0]
        shape, dtype = self._together()
        if self._file is None:
            rows = [_as_rows(numpy_array(tensor), shape, dtype, padding) for tensor in self._held]
            return np.concatenate(rows)
        self.spill()
        same = all(_at_least_1d(one)[1:] == shape[1:] for one in self._shapes) and len(set(self._dtypes)) == 1
        file = self._file if same else self._widened(shape, dtype, padding)
        return file.mapped().view(dtype).reshape(shape)

    def _widened(self, shape: tuple[int, ...], dtype: np.dtype[Any], padding: int) -> SpoolFile:
        assert self._file is not None
        file = SpoolFile(self._spool.directory)
        self._file.rewind()
        for one, kind in zip(self._shapes, self._dtypes, strict=True):
            file.append(_as_rows(self._file.read(one, numpy_dtype(kind)), shape, dtype, padding))
        return file

    def _together(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and type of the whole array, by the rules of transformers' nested_concat."""
        first, dtype = list(_at_least_1d(self._shapes[0])), self._dtypes[0]
        for shape, kind in zip(self._shapes[1:], self._dtypes[1:], strict=True):
            other = _at_least_1d(shape)
            if len(other) != len(first) or list(other[2:]) != first[2:]:
                raise RequestError(
                    f"outputs of shapes {self._shapes[0]} and {shape} cannot be one array, only the first two dimensions may "
                    "differ; leave them out with ignore_keys or preprocess_logits_for_metrics"
                )
            if len(first) > 1 and other[1] != first[1]:
                first[1] = max(first[1], other[1])  # the first type stays, as there
            else:
                dtype = torch.promote_types(dtype, kind)
            first[0] += other[0]
        return tuple(first), numpy_dtype(dtype)


class SpoolFile:
    """A file without a name that holds arrays one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._size = directory, 0
        with self._in_words():
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - its arrays hold it

    def append(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._in_words():
            while data:
                written = self._file.write(data)
                data, self._size = data[written:], self._size + written

    def rewind(self) -> None:
        self._file.seek(0)

    def read(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return the next array."""
        array = np.empty(shape, dtype)
        data = array.reshape(-1).view(np.uint8).data
        while data:
            data = data[self._file.readinto(data) :]  # type: ignore[attr-defined]
        return array

    def mapped(self) -> np.ndarray:
        """Return the bytes of the file, writable. They outlive this object. The disk space is freed with the last array on
        them."""
        if self._size == 0:  # nothing to map
            return np.empty(0, np.uint8)
        return np.memmap(self._file, np.uint8, "r+", shape=(self._size,))

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise JobFailed(
                f"the outputs of the evaluation do not fit into {self._directory}: {reason} after "
                f"{format_bytes(self._size)}; free space, name a larger disk in TMPDIR, or return less from "
                "preprocess_logits_for_metrics"
            ) from error


def numpy_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return numpy_array(torch.empty(0, dtype=dtype)).dtype


def _with_own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that owns its memory: a view would keep all of the tensor that it looks at."""
    return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()


def _at_least_1d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)


def _as_rows(part: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any], padding: int) -> np.ndarray:
    """Return `part` as rows of an array of this shape and type."""
    part = np.atleast_1d(part)
    if part.shape[1:] == shape[1:]:
        return part.astype(dtype, copy=False)
    rows = np.full((len(part), *shape[1:]), padding, dtype)
    rows[:, : part.shape[1]] = part
    return rows


CONTAINER_NAME = "EvalLoopContainer"  # the name by which transformers' loop makes its containers


class StreamedEvaluation(LibraryTrainer):
    """A mix-in for a subclass of transformers.Trainer. Outputs beyond 32 MiB go to disk, and arrive as memory-mapped arrays.

    evaluate, predict and compute_metrics see the values, types and shapes that transformers gives. Arrays that were on disk
    are numpy.memmap, which may be written to. The loop raises JobFailed when the disk is full, and RequestError when the
    outputs of two batches cannot be one array.
    """

    args: Any

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as transformers.Trainer.evaluation_loop does."""
        spool = Spool(spool_directory(Path(self.args.output_dir)), BUFFER_BYTES)

        def container(do_nested_concat: bool = True, padding_index: int = -100) -> OutputContainer:
            return OutputContainer(spool, concatenated=do_nested_concat, padding=padding_index)

        loop = with_global(Trainer.evaluation_loop, CONTAINER_NAME, container)
        with self._upshift_predicting_together():
            output: EvalLoopOutput = loop(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return output

    def _upshift_predicting_together(self) -> AbstractContextManager[None]:
        """Return a context that is open around a loop. A Trainer of several ranks overrides it."""
        return nullcontext()


class OutputContainer:
    """One kind of output over all batches, with the methods of transformers' EvalLoopContainer."""

    def __init__(self, spool: Spool, *, concatenated: bool, padding: int) -> None:
        self._spool, self._concatenated, self._padding = spool, concatenated, padding
        self._structure: Any = None
        self._columns: list[Column] = []  # one a tensor
        self._batches: list[tuple[Any, list[tuple[torch.dtype, int]]]] = []  # structure; column and piece of each tensor
        self._by_dtype: dict[torch.dtype, Column] = {}  # so that pieces of one column are aligned

    def add(self, tensors: Any) -> None:
        leaves: list[torch.Tensor] = []
        structure = _flatten(tensors, leaves)
        if not self._concatenated:
            self._batches.append((structure, [self._add_piece(leaf) for leaf in leaves]))
            return
        if self._structure is None:
            self._structure = structure
            self._columns = [self._spool.column() for _ in leaves]
        if structure != self._structure:
            raise RequestError(
                f"batches of the evaluation differ in their outputs ({self._structure} and {structure}); "
                "leave out what differs with ignore_keys, or set eval_do_concat_batches=False"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)

    def _add_piece(self, tensor: torch.Tensor) -> tuple[torch.dtype, int]:
        if tensor.dtype not in self._by_dtype:
            self._by_dtype[tensor.dtype] = self._spool.column()
        return tensor.dtype, self._by_dtype[tensor.dtype].add(tensor)

    def to_cpu_and_numpy(self) -> None:
        for column in (*self._columns, *self._by_dtype.values()):
            column.to_host()

    def get_arrays(self) -> Any:
        if self._batches:
            pieces = {dtype: column.pieces() for dtype, column in self._by_dtype.items()}
            return [
                _unflatten(structure, iter([pieces[dtype][number] for dtype, number in places]))
                for structure, places in self._batches
            ]
        if self._structure is None:
            return None
        return _unflatten(self._structure, iter([column.whole(self._padding) for column in self._columns]))


def _flatten(tree: Any, leaves: list[torch.Tensor]) -> Any:
    """Append the tensors of nested lists, tuples and mappings to `leaves`. Return the structure that held them."""
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        return torch.Tensor
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(_flatten(item, leaves) for item in tree)
    if isinstance(tree, Mapping):
        return type(tree), {key: _flatten(item, leaves) for key, item in tree.items()}
    raise RequestError(
        f"an output of the evaluation is a {type(tree).__name__}, not a tensor or tensors in lists, tuples and dicts; "
        "leave it out with ignore_keys or preprocess_logits_for_metrics"
    )


def _unflatten(structure: Any, arrays: Any) -> Any:
    if structure is torch.Tensor:
        return next(arrays)
    kind, inner = structure
    if isinstance(inner, dict):
        return kind({key: _unflatten(item, arrays) for key, item in inner.items()})
    return kind(_unflatten(item, arrays) for item in inner)
