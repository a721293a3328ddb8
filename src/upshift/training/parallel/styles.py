"""Compute a module's output from its part of a weight, for the plain styles of transformers' tensor-parallel plans.

The weight is a DTensor, so that fully_shard and checkpoints know all of it. The module's own forward pass runs on this rank's
part, as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from upshift.errors import RequestError
from upshift.internals.torch_names import PARAMETERS
from upshift.training.parallel.exchanged import Exchanged, gathered, gathered_last, own_last, same, sum_shared, summed
from upshift.training.parallel.partial import mark_partial

Forward = Callable[..., torch.Tensor]


@contextmanager
def local_weights(module: nn.Module, *, without_bias: bool = False) -> Iterator[None]:
    whole = dict(PARAMETERS.of(module))
    try:
        for name, parameter in whole.items():
            if isinstance(parameter, DTensor):
                PARAMETERS.of(module)[name] = parameter.to_local()
        if without_bias and "bias" in whole:
            PARAMETERS.of(module)["bias"] = None
        yield
    finally:
        PARAMETERS.of(module).update(whole)


def columns(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with rows of the weight: it gives this rank's part of the output."""
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module):
            out: torch.Tensor = run(*args, **kwargs)
        return out

    return forward


def rows(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with columns of the weight: it gives a term of the sum over ranks.

    Each rank then has all of the sum or, if ranks share tokens, its own tokens of it.
    """
    run, group = module.forward, mesh.get_group()
    there, back = (sum_shared, gathered) if sequence else (summed, same)
    if sequence:
        mark_partial(module, ["bias"])

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module, without_bias=True):
            term = run(*args, **kwargs)
        if sequence and term.ndim != 3:
            raise RequestError("a layer of this model flattens its tokens before it ends; use sequence_parallel=False")
        out: torch.Tensor = Exchanged.apply(term, group, there, back)  # type: ignore[no-untyped-call]
        bias = PARAMETERS.of(module).get("bias")
        return out if bias is None else out + bias.to(out.dtype)

    return forward


def entered_columns(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass for columns in a part that is not entered as one (layer_parts.py)."""
    run, group = columns(module, mesh, sequence=sequence), mesh.get_group()
    return lambda hidden: run(Exchanged.apply(hidden, group, same, summed))  # type: ignore[no-untyped-call]


def gathered_columns(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    run, group = entered_columns(module, mesh, sequence=sequence), mesh.get_group()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Exchanged.apply(run(hidden), group, gathered_last, own_last)  # type: ignore[no-untyped-call]
        return out

    return forward


def words(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass of an embedding: rows of zeros for the words of other ranks, then the sum."""
    embedding: Any = module  # an nn.Embedding, or a class of the model's with the same attributes
    run, group, count = module.forward, mesh.get_group(), len(embedding.weight.to_local())
    first = mesh.get_local_rank() * count
    if embedding.padding_idx is not None:
        inside = first <= embedding.padding_idx < first + count
        embedding.padding_idx = embedding.padding_idx - first if inside else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        others = (ids < first) | (ids >= first + count)
        with local_weights(module):
            vectors = run((ids - first).masked_fill(others, 0))
        own_words = vectors.masked_fill(others.unsqueeze(-1), 0.0)
        out: torch.Tensor = Exchanged.apply(own_words, group, summed, same)  # type: ignore[no-untyped-call]
        return out

    return forward


STYLES: dict[str, Callable[..., Forward]] = {
    "colwise": columns, "rowwise": rows,
    "colwise_gather_output": gathered_columns, "colwise_rep": gathered_columns, "embedding_rowwise": words,
}  # fmt: skip
ALONE = STYLES | {"colwise": entered_columns}
