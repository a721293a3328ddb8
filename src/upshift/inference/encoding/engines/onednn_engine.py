"""Run encoders with oneDNN's fused kernels under PyTorch on a CPU.

The model is exported once, and its graph is rewritten to compute the same numbers with fewer and faster kernels. Weights are
stored in the order that oneDNN's kernels read. Matrix products of the same input become one product. An activation or a residual
sum is computed while the product is still in registers. In bf16, attention over short rows becomes two batched products, which
take half the time of PyTorch's flash kernel. The rest of the graph stays as it is.

Several batches run at once. A batch of a few hundred tokens stays in one core's caches, so each core computes a batch of its
own with one thread, and no core waits for another inside a layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node

from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import Batch, EncoderBuild, load_forward, run_in_order
from upshift.inference.torch_settings import COMPILE_SHAPE, DTYPES, inference_settings
from upshift.internals.torch_names import ERASED, EXPORT_ERROR, LINEAR_POINTWISE, METADATA_CHECK, REORDER_WEIGHT

aten = torch.ops.aten
mkldnn = torch.ops.mkldnn
IDENTITIES = (aten.dropout.default, aten.detach.default)  # they change nothing in a model that does not train
ACTIVATIONS = {aten.gelu.default: "gelu", aten.relu.default: "relu", aten.tanh.default: "tanh", aten.silu.default: "swish"}
REGISTER_NUMBERS = 32  # numbers in bf16 that a register of AVX-512 holds
MAX_SHORT_ROW = 512  # tokens; the scores of longer rows do not fit into a core's caches


def for_onednn(module: GraphModule, *, batch_tokens: int) -> GraphModule:
    """Rewrite ``module``, exported by ``torch.export`` for the CPU, in place. Return it.

    ``batch_tokens`` is the usual number of tokens of a batch."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is METADATA_CHECK.get():
            graph.erase_node(node)
        elif node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in _find_products(graph):
        if not ERASED.of(node):
            _join_products(module, node)
    weights = _PackedWeights(module, batch_tokens)
    for node in _find_products(graph):
        _fuse(weights, node)
    biases: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        _replace_attention(node, biases)
    graph.eliminate_dead_code()
    _drop_unused(module)
    graph.lint()
    module.recompile()
    return module


def _find_products(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=aten.linear.default))


def _join_products(module: GraphModule, first: Node) -> None:
    """Replace the products of one input, such as queries, keys and values, by one product with all their weights, whose
    output is split. ``first`` is the first of these products in the graph's order."""
    source: Any = first.args[0]  # torch types arguments as a union of everything in a graph
    products = [user for user in source.users if user.target is aten.linear.default and user.args[0] is source]
    arguments: list[list[Any]] = [[node for node in product.args[1:] if node is not None] for product in products]
    if len(products) == 1 or len({*map(len, arguments)}) > 1:
        return
    weights: list[Any] = [product.args[1] for product in products]
    sizes = [_tensor(module, weight).shape[0] for weight in weights]
    graph = module.graph
    with graph.inserting_before(first):
        joined_arguments = [_join_weights(module, nodes_to_join) for nodes_to_join in zip(*arguments, strict=True)]
        joined = graph.call_function(aten.linear.default, (source, *joined_arguments))
        joined.meta = first.meta  # its width differs
        outputs = graph.call_function(aten.split_with_sizes.default, (joined, sizes, -1))
        for index, product in enumerate(products):
            output = graph.call_function(operator.getitem, (outputs, index))
            output.meta = product.meta
            product.replace_all_uses_with(output)
    for product in products:
        graph.erase_node(product)


def _join_weights(module: GraphModule, weights: tuple[Node, ...]) -> Node:
    """Return a node of the joined weights. Weights that several layers share are joined once."""
    name = "_".join(("joined", *(str(weight.target).replace(".", "_") for weight in weights)))
    if not hasattr(module, name):
        module.register_buffer(name, torch.cat([_tensor(module, weight) for weight in weights]))
    return module.graph.get_attr(name)


class _PackedWeights:
    """Weights in oneDNN's order. Weights that several layers share are packed once."""

    def __init__(self, module: GraphModule, batch_tokens: int) -> None:
        self.module = module
        self.batch_tokens = batch_tokens
        self._names: dict[str, str] = {}

    def insert_kernel(self, product: Node, residual: Node | None, activation: str, algorithm: str) -> Node:
        """Insert one kernel for the product with a residual sum or an activation, at the current position of the graph."""
        arguments: tuple[Any, ...] = product.args
        source, weight, *bias = arguments
        graph = self.module.graph
        bias_node = bias[0] if bias else None
        packed_weight = graph.get_attr(self._pack(weight))
        if residual is not None:
            return graph.call_function(LINEAR_POINTWISE.get().binary, (source, residual, packed_weight, bias_node, "add"))
        return graph.call_function(LINEAR_POINTWISE.get().default, (source, packed_weight, bias_node, activation, [], algorithm))

    def _pack(self, weight: Node) -> str:
        stored_name = str(weight.target)
        if stored_name not in self._names:
            self._names[stored_name] = f"onednn_{len(self._names)}"
            stored = _tensor(self.module, weight).contiguous()
            try:
                tensor = REORDER_WEIGHT.get()(stored, self.batch_tokens)
            except RuntimeError as error:  # the CPU has no instructions for bf16
                raise RequestError(f"engine onednn cannot compute in {stored.dtype} on this CPU: {error}; use fp32") from None
            self.module.register_buffer(self._names[stored_name], tensor)
        return self._names[stored_name]


def _fuse(weights: _PackedWeights, product: Node) -> None:
    """Replace a product, and the activation or sum that alone reads its output, by one kernel."""
    graph = weights.module.graph
    last = product
    activation = "none"
    algorithm = ""
    residual: Any = None
    follower = next(iter(product.users)) if len(product.users) == 1 else None
    if follower is not None and follower.target in ACTIVATIONS:
        last = follower
        activation = ACTIVATIONS[follower.target]
        algorithm = str(follower.kwargs.get("approximate", "none")) if activation == "gelu" else ""
    elif follower is not None and _adds_equal_shapes(follower):
        last = follower
        residual = next(term for term in follower.args if term is not product)
    with graph.inserting_before(last):
        fused = weights.insert_kernel(product, residual, activation, algorithm)
    fused.meta = last.meta
    last.replace_all_uses_with(fused)
    graph.erase_node(last)
    if last is not product:
        graph.erase_node(product)


def _adds_equal_shapes(node: Node) -> bool:
    """Return whether the node adds two different tensors of the same shape and dtype."""
    terms = [term for term in node.args if isinstance(term, Node)]
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != len(node.args):
        return False
    left, right = (term.meta["val"] for term in terms)
    return terms[0] is not terms[1] and left.shape == right.shape and left.dtype == right.dtype


def _replace_attention(node: Node, biases: dict[Node, Node]) -> None:
    """Replace attention in bf16 that has a mask and as many key heads as query heads. Other attention stays as it is."""
    arguments: list[Any] = [*node.args, *[None] * max(0, 4 - len(node.args))]
    query, key, _, mask, *other_arguments = arguments
    is_plain = not any(other_arguments) and not {*node.kwargs} - {"scale", "attn_mask"}
    mask = node.kwargs.get("attn_mask", mask)
    has_same_heads = query.meta["val"].shape[1] == key.meta["val"].shape[1] and query.meta["val"].dim() == 4
    if not (is_plain and has_same_heads and isinstance(mask, Node) and query.meta["val"].dtype is torch.bfloat16):
        return
    graph = node.graph
    with graph.inserting_before(node):
        if mask not in biases:
            biases[mask] = graph.call_function(_score_bias, (mask, query))
        replacement = graph.call_function(_attention, (*node.args[:3], mask, biases[mask], node.kwargs.get("scale")))
    replacement.meta = node.meta
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _score_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """Return the bias of attention scores, [B * H, S, S], or None for long rows.

    ``mask`` can be broadcast to [B, H, S, S]. It is boolean, False for hidden positions, or holds numbers to add to the
    scores."""
    rows, heads, length, _ = query.shape
    if length > MAX_SHORT_ROW:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return mask.expand(rows, heads, length, length).reshape(rows * heads, length, length)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return attention [B, H, S, D] of queries, keys and values [B, H, S, D].

    ``bias`` comes from ``_score_bias``. If it is None, PyTorch's own kernel computes."""
    if bias is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    rows, heads, length, width = query.shape
    queries, keys, values = (states.reshape(rows * heads, length, -1) for states in (query, key, value))
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=width**-0.5 if scale is None else scale)
    return torch.bmm(_softmax(scores), values).view(rows, heads, length, -1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of bf16 scores.

    For rows that are shorter than a register, PyTorch's kernel computes number by number, and takes twice as long."""
    if scores.shape[-1] >= REGISTER_NUMBERS:
        return scores.softmax(-1)
    values = scores.float()
    values = values.sub_(values.amax(-1, keepdim=True)).exp_()
    return values.div_(values.sum(-1, keepdim=True)).to(scores.dtype)


def _tensor(module: GraphModule, node: Node) -> torch.Tensor:
    owner: Any = module
    tensor: torch.Tensor = reduce(getattr, str(node.target).split("."), owner)
    return tensor.detach()


def _drop_unused(module: GraphModule) -> None:
    """Delete the weights that the graph no longer reads. Their packed copies replace them."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if name not in used:
            module_name, _, attribute = name.rpartition(".")
            delattr(module.get_submodule(module_name), attribute)


ENGINE = {"name": "onednn", "task": "encode", "class": "OneDnnEngine", "libraries": ("torch",), "precisions": ("fp32", "bf16")}


class OneDnnEngine:
    """An encoder whose graph runs with oneDNN's fused kernels."""

    def __init__(self, build: EncoderBuild) -> None:
        self.setup = build.setup
        if not torch.backends.mkldnn.is_available():
            raise RequestError("this build of torch has no oneDNN; use --engine torch")
        self.forward = for_onednn(_export(build), batch_tokens=build.setup.batch)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        concurrent = self.setup.threads if self.setup.hint == "throughput" else 1
        threads = self.setup.threads // concurrent
        with (
            inference_settings(self.setup.changed(threads=threads)),
            ThreadPoolExecutor(concurrent, initializer=partial(torch.set_num_threads, threads)) as pool,
        ):

            def start_batch(batch: Batch) -> Callable[[], np.ndarray]:
                return pool.submit(self._output, batch).result

            yield from run_in_order(batches, start_batch, concurrent=2 * concurrent)  # a free core finds the next batch ready

    def _output(self, batch: Batch) -> np.ndarray:
        with torch.inference_mode():
            output: np.ndarray = self.forward(*map(torch.from_numpy, batch.arrays())).float().numpy()
        return output


def _export(build: EncoderBuild) -> torch.fx.GraphModule:
    """Return the model exported for any number of rows and tokens. Raise RequestError if its code does not allow that."""
    forward = load_forward(build.source, build.config).to(DTYPES[build.setup.precision])
    ids = torch.zeros(COMPILE_SHAPE, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    arguments = (ids, mask, torch.zeros_like(ids)) if build.config.segments else (ids, mask)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            return torch.export.export(forward, arguments, dynamic_shapes=(sizes,) * len(arguments), strict=False).module()
    except (EXPORT_ERROR.get(), RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RequestError(f"torch.export cannot take {build.source.reference!r} with batches of any size: {reason}") from None
