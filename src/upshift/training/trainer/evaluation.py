"""Evaluate and predict with a transformers.Trainer whose outputs need not fit into memory.

The loop is transformers' own. Only the container in which it collects losses, outputs, labels and inputs is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from upshift.errors import RequestError
from upshift.training.trainer.borrowed import with_global
from upshift.training.trainer.library import LibraryTrainer
from upshift.training.trainer.spool import HELD_BYTES, Column, Spool, spool_directory

CONTAINER = "EvalLoopContainer"  # the name by which transformers' loop makes its containers


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
        spool = Spool(spool_directory(Path(self.args.output_dir)), HELD_BYTES)

        def container(do_nested_concat: bool = True, padding_index: int = -100) -> Outputs:
            return Outputs(spool, concatenated=do_nested_concat, padding=padding_index)

        loop = with_global(Trainer.evaluation_loop, CONTAINER, container)
        with self._upshift_predict_in_step():
            output: EvalLoopOutput = loop(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return output

    def _upshift_predict_in_step(self) -> AbstractContextManager[None]:
        """Return a context that is open around a loop. A Trainer of several ranks overrides it."""
        return nullcontext()


class Outputs:
    """One kind of output over all batches, with the methods of transformers' EvalLoopContainer."""

    def __init__(self, spool: Spool, *, concatenated: bool, padding: int) -> None:
        self._spool, self._concatenated, self._padding = spool, concatenated, padding
        self._structure: Any = None
        self._columns: list[Column] = []  # one a tensor
        self._batches: list[tuple[Any, list[tuple[torch.dtype, int]]]] = []  # structure; column and piece of each tensor
        self._by_dtype: dict[torch.dtype, Column] = {}  # so that pieces of one column are aligned

    def add(self, tensors: Any) -> None:
        leaves: list[torch.Tensor] = []
        structure = _take_apart(tensors, leaves)
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
                _put_together(structure, iter([pieces[dtype][number] for dtype, number in places]))
                for structure, places in self._batches
            ]
        if self._structure is None:
            return None
        return _put_together(self._structure, iter([column.whole(self._padding) for column in self._columns]))


def _take_apart(tree: Any, leaves: list[torch.Tensor]) -> Any:
    """Append the tensors of nested lists, tuples and mappings to `leaves`. Return the structure that held them."""
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        return torch.Tensor
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(_take_apart(item, leaves) for item in tree)
    if isinstance(tree, Mapping):
        return type(tree), {key: _take_apart(item, leaves) for key, item in tree.items()}
    raise RequestError(
        f"an output of the evaluation is a {type(tree).__name__}, not a tensor or tensors in lists, tuples and dicts; "
        "leave it out with ignore_keys or preprocess_logits_for_metrics"
    )


def _put_together(structure: Any, arrays: Any) -> Any:
    if structure is torch.Tensor:
        return next(arrays)
    kind, inner = structure
    if isinstance(inner, dict):
        return kind({key: _put_together(item, arrays) for key, item in inner.items()})
    return kind(_put_together(item, arrays) for item in inner)
