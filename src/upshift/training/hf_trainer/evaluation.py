"""Evaluate and predict with a transformers.Trainer whose outputs may be larger than memory.

The loop is that of transformers. Upshift replaces only the container in which it collects losses, outputs, labels and inputs.
The container keeps arrays in memory up to a limit, and then in files without a name. Such a file takes disk space only while an
array or this process uses it, so nothing is left behind, whatever ends the process.
"""

from __future__ import annotations

import errno
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput

from upshift.errors import JobFailed, RequestError
from upshift.training.hf_trainer.patching import LibraryTrainer, with_global
from upshift.training.out_of_memory import is_out_of_memory
from upshift.units import MIB, format_bytes

logger = logging.getLogger(__name__)

LIBRARIES = ("upshift", "transformers")  # whose methods compute the loss of the model

# Fields of configs whose values make a loss no mean over labels or rows: a sum, or one with a part that counts over the batch.
OTHER_LOSSES = {"ctc_loss_reduction": "sum", "output_router_logits": True}

BUFFER_BYTES = 32 * MIB  # the process needs twice that, because the heap has gaps between such tensors
IN_MEMORY_SYSTEMS = frozenset({"tmpfs", "ramfs"})  # a file there takes memory


def spool_directory(output_dir: Path) -> Path:
    """Return the system's temporary directory, or the nearest existing directory above `output_dir` if that one is in memory."""
    temporary = Path(tempfile.gettempdir()).resolve()
    file_systems = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    file_system = next((file_systems[path] for path in (temporary, *temporary.parents) if path in file_systems), "")
    if file_system not in IN_MEMORY_SYSTEMS:
        return temporary
    output_dir = output_dir.resolve()
    return next(path for path in (output_dir, *output_dir.parents) if path.is_dir())


class Spool:
    """The columns of one evaluation, which together keep at most `buffer_bytes` in memory."""

    def __init__(self, directory: Path, buffer_bytes: int) -> None:
        self.directory = directory
        self.buffer_bytes = buffer_bytes
        self._columns: list[Column] = []

    def column(self) -> Column:
        column = Column(self)
        self._columns.append(column)
        return column

    def spill_if_full(self) -> None:
        if sum(column.buffered_bytes for column in self._columns) > self.buffer_bytes:
            for column in self._columns:
                column.spill()


class Column:
    """Tensors of any device, which become one numpy array, or one array for each tensor."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[torch.dtype] = []
        self._buffer: list[Tensor] = []
        self._file: SpoolFile | None = None
        self.buffered_bytes = 0

    def add(self, tensor: Tensor) -> int:
        """Append a tensor. Return its number."""
        tensor = _with_own_memory(tensor.detach())
        self._shapes.append(tuple(tensor.shape))
        self._dtypes.append(tensor.dtype)
        self._buffer.append(tensor)
        self.buffered_bytes += tensor.nbytes
        self._spool.spill_if_full()
        return len(self._shapes) - 1

    def to_host(self) -> None:
        self._buffer = [tensor.cpu() for tensor in self._buffer]

    def spill(self) -> None:
        """Write the tensors in memory to the column's file. Raise JobFailed when the disk is full."""
        self._file = self._file or SpoolFile(self._spool.directory)
        for tensor in self._buffer:
            self._file.append(numpy_array(tensor))
        self._buffer = []
        self.buffered_bytes = 0

    def arrays(self) -> list[np.ndarray]:
        """Return one array for each tensor, in order. The arrays of one column share its file."""
        if self._file is None:
            return [numpy_array(tensor) for tensor in self._buffer]
        self.spill()
        file_bytes = self._file.mapped()
        start = 0
        arrays = []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            end = start + math.prod(shape) * numpy_dtype(dtype).itemsize
            arrays.append(file_bytes[start:end].view(numpy_dtype(dtype)).reshape(shape))
            start = end
        return arrays

    def concatenated(self, padding: int) -> np.ndarray:
        """Return all tensors along the first dimension. The second is as wide as the widest tensor, filled up with `padding`."""
        if len(self._shapes) == 1:
            return self.arrays()[0]
        shape, dtype = self._concatenated_shape()
        if self._file is None:
            rows = [_as_rows(numpy_array(tensor), shape, dtype, padding) for tensor in self._buffer]
            return np.concatenate(rows)
        self.spill()
        has_one_width = all(_at_least_1d(tensor_shape)[1:] == shape[1:] for tensor_shape in self._shapes)
        is_uniform = has_one_width and len(set(self._dtypes)) == 1
        file = self._file if is_uniform else self._padded_file(shape, dtype, padding)
        return file.mapped().view(dtype).reshape(shape)

    def _padded_file(self, shape: tuple[int, ...], dtype: np.dtype[Any], padding: int) -> SpoolFile:
        """Return a file with all tensors padded to the width of `shape`, as `dtype`."""
        assert self._file is not None
        file = SpoolFile(self._spool.directory)
        self._file.rewind()
        for tensor_shape, tensor_dtype in zip(self._shapes, self._dtypes, strict=True):
            array = self._file.read(tensor_shape, numpy_dtype(tensor_dtype))
            file.append(_as_rows(array, shape, dtype, padding))
        return file

    def _concatenated_shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and type of all tensors as one array, by the rules of nested_concat of transformers."""
        shape = list(_at_least_1d(self._shapes[0]))
        dtype = self._dtypes[0]
        for next_shape, next_dtype in zip(self._shapes[1:], self._dtypes[1:], strict=True):
            following = _at_least_1d(next_shape)
            if len(following) != len(shape) or list(following[2:]) != shape[2:]:
                raise RequestError(
                    f"outputs of shapes {self._shapes[0]} and {next_shape} cannot be one array, only the first two dimensions "
                    "may differ; leave them out with ignore_keys or preprocess_logits_for_metrics"
                )
            if len(shape) > 1 and following[1] != shape[1]:
                shape[1] = max(shape[1], following[1])  # nested_concat keeps the first type here
            else:
                dtype = torch.promote_types(dtype, next_dtype)
            shape[0] += following[0]
        return tuple(shape), numpy_dtype(dtype)


class SpoolFile:
    """A file without a name that holds arrays one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size = 0
        with self._explained_errors():
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - its arrays hold it

    def append(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._explained_errors():
            while data:
                num_written = self._file.write(data)
                data = data[num_written:]
                self._size += num_written

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
        """Return the bytes of the file as a writable array.

        The array outlives this object. The disk space is free when the last array that uses it is gone.
        """
        if self._size == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.memmap(self._file, np.uint8, "r+", shape=(self._size,))

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
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
    """Return a tensor that owns its memory. A view would keep the whole tensor under it."""
    return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()


def _at_least_1d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)


def _as_rows(array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any], padding: int) -> np.ndarray:
    """Return the array as rows of a larger array of this shape and type."""
    array = np.atleast_1d(array)
    if array.shape[1:] == shape[1:]:
        return array.astype(dtype, copy=False)
    rows = np.full((len(array), *shape[1:]), padding, dtype)
    rows[:, : array.shape[1]] = array
    return rows


CONTAINER_NAME = "EvalLoopContainer"  # the class that the loop of transformers uses for its containers


class StreamedEvaluation(LibraryTrainer):
    """A mix-in of transformers' Trainer classes. Outputs beyond 32 MiB go to disk, and are returned as memory-mapped arrays.

    evaluate, predict and compute_metrics get the values, types and shapes of transformers. Arrays that were on disk
    are numpy.memmap, which may be written to. The loop raises JobFailed when the disk is full, and RequestError when the
    outputs of two batches cannot be one array. If memory runs out in one process, and the loss is the model's own, they begin
    again with half of per_device_eval_batch_size.
    """

    args: Any
    eval_dataset: Any

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Evaluate as transformers.Trainer.evaluate does. If memory runs out, evaluate again with smaller batches."""
        metrics: dict[str, float] = self._upshift_with_smaller_batches(super().evaluate, *arguments, **named)
        return metrics

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Predict as transformers.Trainer.predict does. If memory runs out, predict again with smaller batches."""
        return self._upshift_with_smaller_batches(super().predict, *arguments, **named)

    def _upshift_with_smaller_batches(self, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return run(*arguments, **named)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or not self._upshift_may_halve_evaluation(*arguments, **named):
                    raise
            # Not in the except block: there the exception still holds the tensors of the failed try.
            rows = self.args.per_device_eval_batch_size
            self.args.per_device_eval_batch_size = rows // 2
            logger.warning(
                "out of memory: an evaluation with per_device_eval_batch_size=%d; it runs again with %d, as do the next ones",
                rows,
                rows // 2,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _upshift_may_halve_evaluation(self, eval_dataset: Any = None, *_: Any, test_dataset: Any = None, **__: Any) -> bool:
        """Return whether an evaluation may begin again with half of the rows in a batch. The data sets are those of its call.

        The loss has to be the mean of the model's own over labels or rows: other losses may compare the rows of a batch, or keep
        a count. Ranks would have to begin again together. A metric of the script that is updated after each batch has counted
        some already. Workers that live on keep their batches. Rows that a script reads one after the other may be gone.
        """
        args = self.args
        keeps_batches = args.world_size > 1 or args.batch_eval_metrics or args.dataloader_persistent_workers
        if args.per_device_eval_batch_size <= 1 or keeps_batches or not self._upshift_has_models_loss():
            return False
        dataset = next((given for given in (eval_dataset, test_dataset) if given is not None), self.eval_dataset)
        datasets = dataset.values() if isinstance(dataset, Mapping) else [dataset]
        return not any(
            isinstance(each, IterableDataset) and type(each).__module__.partition(".")[0] != "datasets" for each in datasets
        )

    def _upshift_has_models_loss(self: Any) -> bool:
        """Return whether an evaluation computes the loss of a model of transformers, as a mean over labels or rows."""
        methods = (getattr(type(self), name) for name in ("compute_loss", "prediction_step"))
        is_own = any(method.__module__.partition(".")[0] not in LIBRARIES for method in methods)
        if is_own or self.can_return_loss or self.compute_loss_func is not None:
            return False
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # of peft
        config = getattr(model, "config", None)
        is_other = any(getattr(config, name, None) == value for name, value in OTHER_LOSSES.items())
        return isinstance(model, PreTrainedModel) and type(model).__module__.partition(".")[0] in LIBRARIES and not is_other

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

        def make_container(do_nested_concat: bool = True, padding_index: int = -100) -> OutputContainer:
            return OutputContainer(spool, concatenated=do_nested_concat, padding=padding_index)

        loop = with_global(Trainer.evaluation_loop, CONTAINER_NAME, make_container)
        with self._upshift_predicting_together():
            output: EvalLoopOutput = loop(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return output

    def _upshift_predicting_together(self) -> AbstractContextManager[None]:
        """Return a context that is open around the loop. DistributedTraining overrides this method."""
        return nullcontext()


class OutputContainer:
    """One kind of output over all batches, with the methods of transformers' EvalLoopContainer."""

    def __init__(self, spool: Spool, *, concatenated: bool, padding: int) -> None:
        self._spool = spool
        self._concatenated = concatenated
        self._padding = padding
        self._structure: Any = None
        self._columns: list[Column] = []  # one for each tensor of a batch
        self._batches: list[tuple[Any, list[tuple[torch.dtype, int]]]] = []  # structure; type and number of each tensor
        self._by_dtype: dict[torch.dtype, Column] = {}  # tensors of one type are aligned in a column

    def add(self, tensors: Any) -> None:
        leaves: list[torch.Tensor] = []
        structure = _flatten(tensors, leaves)
        if not self._concatenated:
            self._batches.append((structure, [self._add_leaf(leaf) for leaf in leaves]))
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

    def _add_leaf(self, tensor: torch.Tensor) -> tuple[torch.dtype, int]:
        if tensor.dtype not in self._by_dtype:
            self._by_dtype[tensor.dtype] = self._spool.column()
        return tensor.dtype, self._by_dtype[tensor.dtype].add(tensor)

    def to_cpu_and_numpy(self) -> None:
        for column in (*self._columns, *self._by_dtype.values()):
            column.to_host()

    def get_arrays(self) -> Any:
        if self._batches:
            arrays = {dtype: column.arrays() for dtype, column in self._by_dtype.items()}
            return [
                _unflatten(structure, iter([arrays[dtype][number] for dtype, number in positions]))
                for structure, positions in self._batches
            ]
        if self._structure is None:
            return None
        return _unflatten(self._structure, iter([column.concatenated(self._padding) for column in self._columns]))


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
    """Return the arrays in the nested structure."""
    if structure is torch.Tensor:
        return next(arrays)
    kind, inner = structure
    if isinstance(inner, dict):
        return kind({key: _unflatten(item, arrays) for key, item in inner.items()})
    return kind(_unflatten(item, arrays) for item in inner)
