"""Export a torch module as core ATen, for one shape of its inputs. Data-dependent branches and shapes end here, in
one line.

The first two rules of XLA hold by construction: torch.export refuses a branch or a shape that depends on data, and
every shape of the result is a number."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from upshift.errors import RequestError
from upshift.internals.torch_names import tree_map


def export(module: nn.Module, example: Mapping[str, Any]) -> ExportedProgram:
    """Export a module. ``example`` holds arguments by name, tensors or nested lists of them. Raise RequestError if a
    branch or a shape depends on data, or if torch cannot trace the module."""
    # The same tensor twice would be one input of the graph.
    distinct = tree_map(torch.Tensor, torch.clone, dict(example))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, (), kwargs=distinct, strict=False)
            table = torch.export.default_decompositions()
            # Decomposed it is a scatter, in whose layout XLA keeps, and copies, all keys and values at every step.
            table.pop(torch.ops.aten.index_copy.default)
            decomposed: ExportedProgram = exported.run_decompositions(table)
            return decomposed
    except Exception as error:  # torch.export raises dozens of kinds; each means: this module has no static graph
        raise RequestError(
            f"{type(module).__name__} has no static graph ({type(error).__name__}: {_first_line(error)}); XLA needs one: run "
            "this model without --backend xla"
        ) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
