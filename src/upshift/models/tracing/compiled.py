# needs torch
"""Calculate the bytes that a compiled layer saves for its backward pass, without compiling it.

torch.compile cuts the joint graph of a layer's forward and backward where the fewest bytes cross (Inductor's partition_fn).
This module runs the same partition on fake tensors whose batch and length are primes, so that each saved tensor shows how it
depends on both. On CPUs the result equals the bytes that compiled layers save (tests/cpu/planning/test_memory.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from upshift.importing import importing
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
from upshift.models.tracing.symbolic_sizes import PrimeSizes, polynomial

Call = tuple[tuple[Any, ...], dict[str, Any]]


def load_partition() -> None:
    """Load Inductor's passes once, so that forked copies of this process do not each load them."""
    with importing():
        LOAD_PASSES.get()()


def compiled_saved_bytes(layer: nn.Module, call: Call, sizes: PrimeSizes, *, autocast: bool) -> Polynomial:
    """Return the bytes that stay allocated between the passes of ``layer``, its results included.

    ``call`` has fake tensors of a prime batch and length. Raise NotPolynomial, or torch's own error if torch cannot trace both
    passes as one graph."""
    parameters = dict(layer.named_parameters())
    leaves, structure = TREE.get().tree_flatten(call)
    tensor_positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensor_arguments = [leaves[index].detach().requires_grad_(leaves[index].requires_grad) for index in tensor_positions]
    num_results = 0

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_results
        substituted = list(leaves)
        for position, tensor in zip(tensor_positions, inputs[len(parameters) :], strict=True):
            substituted[position] = tensor
        args, kwargs = TREE.get().tree_unflatten(substituted, structure)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            result = torch.func.functional_call(layer, dict(zip(parameters, inputs, strict=False)), args, kwargs)
        tensors = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        num_results = len(tensors)
        return tensors

    inputs = (*parameters.values(), *tensor_arguments)
    joint = JOINT_GRAPH.get()(run, inputs, trace_joint=True, decompositions=DECOMPOSITIONS.get()())
    with VIRTUALIZED.get().set_fake_mode(tensor_arguments[0].fake_mode):
        forward, _ = PARTITION.get()(joint, inputs, num_fwd_outputs=num_results)
    return polynomial(sum((sizes.number(size) for size in _saved_bytes(forward)), sizes.zero))


def call_signature(call: Call) -> str:
    """Return a text that is equal for equal calls. Tensors are equal if shape, dtype and ``requires_grad`` are."""
    leaves, structure = TREE.get().tree_flatten(call)
    described = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    return f"{described} {structure}"


def _saved_bytes(forward: GraphModule) -> list[int]:
    """Return the bytes of every storage that the forward pass returns: results and saved tensors, without the inputs."""
    nodes = list(forward.graph.nodes)
    input_storages = {STORAGE.of(node.meta["val"].untyped_storage()) for node in nodes if node.op == "placeholder"}
    bytes_by_storage: dict[int, int] = {}
    for node in nodes[-1].args[0]:
        value = node.meta.get("val") if node is not None else None
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if STORAGE.of(storage) not in input_storages:
                bytes_by_storage[STORAGE.of(storage)] = storage.nbytes()
    return list(bytes_by_storage.values())
