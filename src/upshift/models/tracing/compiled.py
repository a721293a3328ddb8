"""Find what a compiled layer keeps for its backward pass, by torch.compile's own partition of the layer, without compiling it.

torch.compile cuts a layer's forward and backward where the fewest bytes cross (Inductor's partition_fn), on the graph of both.
The same is done here on fake tensors, once, with sizes by which every kept tensor's dependence on the batch and the length can
be told apart. On CPUs it agrees with what compiled layers keep to the byte (tests/cpu/test_compiled_memory.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from upshift.internals.torch_names import (
    DECOMPOSITIONS,
    JOINT_GRAPH,
    LOAD_PASSES,
    PARTITION,
    STORAGE,
    TREE,
    VIRTUALIZED,
    tree_leaves,
)
from upshift.models.profile import Polynomial
from upshift.models.tracing.symbolic_sizes import OfPrimes, polynomial

Call = tuple[tuple[Any, ...], dict[str, Any]]


def load_partition() -> None:
    """Load the passes once that every forked copy of this process would otherwise load for itself."""

    LOAD_PASSES.get()()


def kept_when_compiled(layer: nn.Module, call: Call, sizes: OfPrimes, *, autocast: bool) -> Polynomial:
    """Return the bytes that stay between the passes of ``layer``, its results included.

    The call is on fake tensors of a prime batch and length. Raise NotPolynomial, or torch's own error if it cannot trace both
    passes as one graph."""

    parameters = dict(layer.named_parameters())
    leaves, form = TREE.get().tree_flatten(call)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[index].detach().requires_grad_(leaves[index].requires_grad) for index in places]
    results = 0

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal results
        filled = list(leaves)
        for place, tensor in zip(places, inputs[len(parameters) :], strict=True):
            filled[place] = tensor
        args, kwargs = TREE.get().tree_unflatten(filled, form)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            result = torch.func.functional_call(layer, dict(zip(parameters, inputs, strict=False)), args, kwargs)
        found = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        results = len(found)
        return found

    inputs = (*parameters.values(), *given)
    joint = JOINT_GRAPH.get()(run, inputs, trace_joint=True, decompositions=DECOMPOSITIONS.get()())
    with VIRTUALIZED.get().set_fake_mode(given[0].fake_mode):
        forward, _ = PARTITION.get()(joint, inputs, num_fwd_outputs=results)
    return polynomial(sum((sizes.number(size) for size in _kept_bytes(forward)), sizes.zero))


def call_kind(call: Call) -> str:
    """Return a text that is equal for calls with tensors of the same shapes, types and need of gradients, and else equal
    arguments."""
    leaves, form = TREE.get().tree_flatten(call)
    described = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    return f"{described} {form}"


def _kept_bytes(forward: GraphModule) -> list[int]:
    """Return the bytes of every storage that the forward pass hands out: its results and tensors for the backward pass, without
    inputs."""
    nodes = list(forward.graph.nodes)
    given = {STORAGE.of(node.meta["val"].untyped_storage()) for node in nodes if node.op == "placeholder"}
    kept: dict[int, int] = {}
    for node in nodes[-1].args[0]:
        value = node.meta.get("val") if node is not None else None
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if STORAGE.of(storage) not in given:
                kept[STORAGE.of(storage)] = storage.nbytes()
    return list(kept.values())
