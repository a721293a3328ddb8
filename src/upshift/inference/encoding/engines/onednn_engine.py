"""Run oneDNN's fused products under PyTorch: the model is exported once, its weights are in oneDNN's own order, and
several batches run at once.

A batch of a few hundred tokens stays in one core's caches. So each core computes a batch of its own, by one thread,
and no core waits for another inside of a layer.

Rewrite a model's exported graph for oneDNN on a CPU: the same numbers by fewer and quicker kernels.

Weights are put once into the order that oneDNN's kernels read. Products of one input become one. An activation or a
residual sum is computed while a product is still in registers. In bf16, attention over short rows is two batched
products, which take half of what PyTorch's flash kernel takes there. The rest of the graph stays as it is.
"""

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
from upshift.inference.encoding.engines.base import Batch, Build, in_order, load_forward
from upshift.inference.torch_settings import DTYPES, UNLIKE, computing
from upshift.internals.torch_names import ERASED, EXPORT_ERROR, LINEAR_POINTWISE, METADATA_CHECK, REORDER_WEIGHT

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
NO_WORK = (aten.dropout.default, aten.detach.default)  # of a model that does not train
ACTIVATIONS = {aten.gelu.default: "gelu", aten.relu.default: "relu", aten.tanh.default: "tanh", aten.silu.default: "swish"}
VECTOR = 32  # numbers of bf16 in a register of AVX-512
SHORT = 512  # tokens of a row: longer ones' scores would not stay in a core's caches


def for_onednn(module: GraphModule, *, batch_tokens: int) -> GraphModule:
    """Rewrite ``module`` (of ``torch.export``, on the CPU) in place. ``batch_tokens`` is the number of tokens of the
    usual input."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is METADATA_CHECK.get():
            graph.erase_node(node)
        elif node.target in NO_WORK:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in _products(graph):
        if not ERASED.of(node):
            _join(module, node)
    packed = _Packed(module, batch_tokens)
    for node in _products(graph):
        _fuse(packed, node)
    biases: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        _attend(node, biases)
    graph.eliminate_dead_code()
    _drop_unused(module)
    graph.lint()
    module.recompile()
    return module


def _products(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=aten.linear.default))


def _join(module: GraphModule, first: Node) -> None:
    """Replace products of one input, such as queries, keys and values, by one product of all their weights, and parts
    of its output. ``first`` is the first of them in the graph's order."""
    source: Any = first.args[0]  # torch's type of an argument is a union of all that a graph may hold
    products = [user for user in source.users if user.target is aten.linear.default and user.args[0] is source]
    given: list[list[Any]] = [[one for one in product.args[1:] if one is not None] for product in products]
    if len(products) == 1 or len({*map(len, given)}) > 1:
        return
    weights: list[Any] = [product.args[1] for product in products]
    sizes = [_tensor(module, weight).shape[0] for weight in weights]
    graph = module.graph
    with graph.inserting_before(first):
        nodes = [_joined(module, ones) for ones in zip(*given, strict=True)]
        whole = graph.call_function(aten.linear.default, (source, *nodes))
        whole.meta = first.meta  # of another width
        parts = graph.call_function(aten.split_with_sizes.default, (whole, sizes, -1))
        for place, product in enumerate(products):
            part = graph.call_function(operator.getitem, (parts, place))
            part.meta = product.meta
            product.replace_all_uses_with(part)
    for product in products:
        graph.erase_node(product)


def _joined(module: GraphModule, weights: tuple[Node, ...]) -> Node:
    """Join weights once, however many layers share them."""
    name = "_".join(("joined", *(str(weight.target).replace(".", "_") for weight in weights)))
    if not hasattr(module, name):
        module.register_buffer(name, torch.cat([_tensor(module, weight) for weight in weights]))
    return module.graph.get_attr(name)


class _Packed:
    """Weights in oneDNN's order. Each is packed once, however many layers share it."""

    def __init__(self, module: GraphModule, batch_tokens: int) -> None:
        self.module, self.batch_tokens = module, batch_tokens
        self._names: dict[str, str] = {}

    def product(self, product: Node, residual: Node | None, activation: str, form: str) -> Node:
        """Insert one kernel for the product and what follows it, at the current place of the graph."""
        arguments: tuple[Any, ...] = product.args
        source, weight, *bias = arguments
        graph, given = self.module.graph, bias[0] if bias else None
        packed = graph.get_attr(self._packed(weight))
        if residual is not None:
            return graph.call_function(LINEAR_POINTWISE.get().binary, (source, residual, packed, given, "add"))
        return graph.call_function(LINEAR_POINTWISE.get().default, (source, packed, given, activation, [], form))

    def _packed(self, weight: Node) -> str:
        stored_name = str(weight.target)
        if stored_name not in self._names:
            self._names[stored_name] = f"onednn_{len(self._names)}"
            stored = _tensor(self.module, weight).contiguous()
            try:
                tensor = REORDER_WEIGHT.get()(stored, self.batch_tokens)
            except RuntimeError as error:  # bf16 without the instructions for it
                raise RequestError(f"engine onednn cannot compute in {stored.dtype} on this CPU: {error}; use fp32") from None
            self.module.register_buffer(self._names[stored_name], tensor)
        return self._names[stored_name]


def _fuse(packed: _Packed, product: Node) -> None:
    """Replace ``product``, with the activation or the sum that alone takes its output, by one kernel."""
    graph, last, activation, form = packed.module.graph, product, "none", ""
    residual: Any = None
    follower = next(iter(product.users)) if len(product.users) == 1 else None
    if follower is not None and follower.target in ACTIVATIONS:
        last, activation = follower, ACTIVATIONS[follower.target]
        form = str(follower.kwargs.get("approximate", "none")) if activation == "gelu" else ""
    elif follower is not None and _adds_alike(follower):
        last, residual = follower, next(one for one in follower.args if one is not product)
    with graph.inserting_before(last):
        fused = packed.product(product, residual, activation, form)
    fused.meta = last.meta
    last.replace_all_uses_with(fused)
    graph.erase_node(last)
    if last is not product:
        graph.erase_node(product)


def _adds_alike(node: Node) -> bool:
    """Return whether the node adds two different tensors of one shape and dtype."""
    terms = [one for one in node.args if isinstance(one, Node)]
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != len(node.args):
        return False
    left, right = (one.meta["val"] for one in terms)
    return terms[0] is not terms[1] and left.shape == right.shape and left.dtype == right.dtype


def _attend(node: Node, biases: dict[Node, Node]) -> None:
    """Replace attention in bf16 with a mask and as many heads of keys as of queries. Other attention stays PyTorch's
    own."""
    arguments: list[Any] = [*node.args, *[None] * max(0, 4 - len(node.args))]
    query, key, _, mask, *more = arguments
    plain = not any(more) and not {*node.kwargs} - {"scale", "attn_mask"}
    mask = node.kwargs.get("attn_mask", mask)
    heads = query.meta["val"].shape[1] == key.meta["val"].shape[1] and query.meta["val"].dim() == 4
    if not (plain and heads and isinstance(mask, Node) and query.meta["val"].dtype is torch.bfloat16):
        return
    graph = node.graph
    with graph.inserting_before(node):
        if mask not in biases:
            biases[mask] = graph.call_function(_score_bias, (mask, query))
        own = graph.call_function(_attention, (*node.args[:3], mask, biases[mask], node.kwargs.get("scale")))
    own.meta = node.meta
    node.replace_all_uses_with(own)
    graph.erase_node(node)


def _score_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """Return the bias of scores, [B * H, S, S]. ``mask`` can be broadcast to [B, H, S, S]. It is False where nothing
    is seen, or holds numbers that are added to scores."""
    rows, heads, length, _ = query.shape
    if length > SHORT:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return mask.expand(rows, heads, length, length).reshape(rows * heads, length, length)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return attention [B, H, S, D] of queries, keys and values [B, H, S, D]. ``bias`` is from ``_score_bias``. With
    None PyTorch's own kernel computes."""
    if bias is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    rows, heads, length, width = query.shape
    queries, keys, values = (one.reshape(rows * heads, length, -1) for one in (query, key, value))
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=width**-0.5 if scale is None else scale)
    return torch.bmm(_softmax(scores), values).view(rows, heads, length, -1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of bf16 scores. PyTorch's kernel goes through rows that are shorter than a register one by
    one, in twice the time of this."""
    if scores.shape[-1] >= VECTOR:
        return scores.softmax(-1)
    found = scores.float()
    found = found.sub_(found.amax(-1, keepdim=True)).exp_()
    return found.div_(found.sum(-1, keepdim=True)).to(scores.dtype)


def _tensor(module: GraphModule, node: Node) -> torch.Tensor:
    owner: Any = module
    found: torch.Tensor = reduce(getattr, str(node.target).split("."), owner)
    return found.detach()


def _drop_unused(module: GraphModule) -> None:
    """Delete the weights that the graph does not read any more, which would be held twice."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if name not in used:
            owner, _, last = name.rpartition(".")
            delattr(module.get_submodule(owner), last)


ENGINE = {"name": "onednn", "task": "encode", "class": "OneDnnEngine", "libraries": ("torch",), "precisions": ("fp32", "bf16")}


class OneDnnEngine:
    def __init__(self, build: Build) -> None:
        self.setup = build.setup
        if not torch.backends.mkldnn.is_available():
            raise RequestError("this build of torch has no oneDNN; use --engine torch")
        self.forward = for_onednn(_exported(build), batch_tokens=build.setup.batch)

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        at_once = self.setup.threads if self.setup.hint == "throughput" else 1
        threads = self.setup.threads // at_once
        with (
            computing(self.setup.changed(threads=threads)),
            ThreadPoolExecutor(at_once, initializer=partial(torch.set_num_threads, threads)) as pool,
        ):

            def start(batch: Batch) -> Callable[[], np.ndarray]:
                return pool.submit(self._output, batch).result

            yield from in_order(batches, start, at_once=2 * at_once)  # the next one is there when a core is free

    def _output(self, batch: Batch) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = self.forward(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)).float().numpy()
        return found


def _exported(build: Build) -> torch.fx.GraphModule:
    """Return the model exported for any number of rows and tokens. Raise RequestError if the model's code does not
    allow that."""
    forward = load_forward(build.source, build.recipe).to(DTYPES[build.setup.precision])
    ids = torch.zeros(UNLIKE, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            return torch.export.export(forward, (ids, mask), dynamic_shapes=(sizes, sizes), strict=False).module()
    except (EXPORT_ERROR.get(), RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RequestError(f"torch.export cannot take {build.source.reference!r} with batches of any size: {reason}") from None
