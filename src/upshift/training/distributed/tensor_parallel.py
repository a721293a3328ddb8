"""Share the matrices of every layer among ranks (tensor parallelism), as the model's own plan declares.

The plan names modules and styles (transformers.distributed.tensor_parallel). Weights are divided as transformers does it, into
DTensors. Parts of layers with plain styles alone, embedding and head run by styles.py. Everything else that a plan names runs
as transformers has it.

Compute a module's output from its part of a weight, for the plain styles of transformers' tensor-parallel plans.

The weight is a DTensor, so that fully_shard and checkpoints know all of it. The module's own forward pass runs on this rank's
part, as a plain tensor.

Handle the parts of a layer whose matrices ranks share: its attention, and its feed-forward network.

A part with plain styles alone is entered once, however many matrices read its input, and left where its last matrix ends.
transformers would sum the gradient of the input for every matrix. Other parts run as transformers has them.

Give each rank its own tokens between the matrices that ranks of tensor parallelism share (sequence parallelism).

The unmodified model sees whole sequences. From its first layer on each rank has its part of the tokens, which a part of a
layer gathers (layer_parts.py). After the last layer all ranks have all tokens again (Korthikanti et al. 2022, section 4.2).
Modules that read every token by itself (norms, sums, dropout) work on the rank's own tokens, so their weights get a part of
their gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, activations

from upshift.errors import RequestError
from upshift.internals.torch_names import PARAMETERS, tree_map
from upshift.internals.transformers_names import EXPAND_PLAN, PARALLEL_STYLES
from upshift.models.adapter import base_of
from upshift.models.tensor_parallel_plan import describe_tensor_parallel
from upshift.planning.plan import Plan
from upshift.training.distributed.collectives import (
    Collective,
    Exchange,
    RegatherInBackward,
    all_gather_features,
    all_gather_tokens,
    all_reduce,
    identity,
    local_features,
    local_tokens,
    reduce_scatter_tokens,
)
from upshift.training.distributed.mesh import Mesh
from upshift.training.distributed.partial_gradients import mark_partial, trim_storage
from upshift.training.distributed.pipeline_stage import FirstStagePlaceholder

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


def colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with rows of the weight: it gives this rank's part of the output."""
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module):
            out: torch.Tensor = run(*args, **kwargs)
        return out

    return forward


def rowwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with columns of the weight: it gives a term of the sum over ranks.

    Each rank then has all of the sum or, if ranks share tokens, its own tokens of it.
    """
    run = module.forward
    group = tensor_mesh.get_group()
    there, back = (reduce_scatter_tokens, all_gather_tokens) if sequence else (all_reduce, identity)
    if sequence:
        mark_partial(module, ["bias"])

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module, without_bias=True):
            term = run(*args, **kwargs)
        if sequence and term.ndim != 3:
            raise RequestError("a layer of this model flattens its tokens before it ends; use sequence_parallel=False")
        out: torch.Tensor = Exchange.apply(term, group, there, back)  # type: ignore[no-untyped-call]
        bias = PARAMETERS.of(module).get("bias")
        return out if bias is None else out + bias.to(out.dtype)

    return forward


def standalone_colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass for columns in a part that is not entered as one (layer_parts.py)."""
    run = colwise_forward(module, tensor_mesh, sequence=sequence)
    group = tensor_mesh.get_group()
    return lambda hidden: run(Exchange.apply(hidden, group, identity, all_reduce))  # type: ignore[no-untyped-call]


def gathered_colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    run = standalone_colwise_forward(module, tensor_mesh, sequence=sequence)
    group = tensor_mesh.get_group()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Exchange.apply(run(hidden), group, all_gather_features, local_features)  # type: ignore[no-untyped-call]
        return out

    return forward


def embedding_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass of an embedding: rows of zeros for the words of other ranks, then the sum."""
    embedding: Any = module  # an nn.Embedding, or a class of the model's with the same attributes
    run = module.forward
    group = tensor_mesh.get_group()
    count = len(embedding.weight.to_local())
    first = tensor_mesh.get_local_rank() * count
    if embedding.padding_idx is not None:
        inside = first <= embedding.padding_idx < first + count
        embedding.padding_idx = embedding.padding_idx - first if inside else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        others = (ids < first) | (ids >= first + count)
        with local_weights(module):
            vectors = run((ids - first).masked_fill(others, 0))
        own_words = vectors.masked_fill(others.unsqueeze(-1), 0.0)
        out: torch.Tensor = Exchange.apply(own_words, group, all_reduce, identity)  # type: ignore[no-untyped-call]
        return out

    return forward


STYLES: dict[str, Callable[..., Forward]] = {
    "colwise": colwise_forward,
    "rowwise": rowwise_forward,
    "colwise_gather_output": gathered_colwise_forward,
    "colwise_rep": gathered_colwise_forward,
    "embedding_rowwise": embedding_forward,
}
STANDALONE_STYLES = STYLES | {"colwise": standalone_colwise_forward}


PLAIN_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_REGION_NAME = re.compile(r"((.*?\.\d+)\.[^.]+)\.")  # the name of the part in its layer, which has a number


@dataclass(frozen=True)
class TPRegion:
    """A part of a layer. ``plain`` says that every weight in it belongs to a module with a plain style."""

    layer: str
    module: nn.Module
    plain: bool


def find_regions(model: nn.Module, styles: dict[str, str]) -> dict[str, TPRegion]:
    modules = dict(model.named_modules())
    found = {match[1]: match[2] for match in map(_REGION_NAME.match, styles) if match}
    return {name: TPRegion(layer, modules[name], _is_plain(name, modules[name], styles)) for name, layer in found.items()}


def region_of(name: str, parts: dict[str, TPRegion]) -> TPRegion | None:
    """Return the part that contains a module or weight, or None."""
    match = _REGION_NAME.match(name)
    return parts.get(match[1]) if match else None


def _is_plain(name: str, part: nn.Module, styles: dict[str, str]) -> bool:
    owners = {path.rpartition(".")[0] for path, _ in part.named_parameters()}
    inside = [style for path, style in styles.items() if path.startswith(f"{name}.")]
    return all(styles.get(f"{name}.{owner}") in PLAIN_STYLES for owner in owners) and all(
        style in PLAIN_STYLES for style in inside
    )


def exchange_region_input(part: nn.Module, group: dist.ProcessGroup, *, plain: bool, sequence: bool) -> None:
    """Exchange the input of a part.

    The input of a plain part enters as it is, and its gradient is summed. If ranks share tokens, the tokens are gathered, and
    their gradient is summed and shared. Any other part gives each rank the whole gradient, and a result that is whole.
    """
    there: Collective = all_gather_tokens if sequence else identity
    back: Collective = (reduce_scatter_tokens if sequence else all_reduce) if plain else local_tokens

    def arrive(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        entered = Exchange.apply(_cast_for_autocast(hidden) if plain else hidden, group, there, back)  # type: ignore[no-untyped-call]
        return _replace_tensors(args, kwargs, {hidden: entered}, group, plain=plain)

    if plain or sequence:
        part.register_forward_pre_hook(arrive, with_kwargs=True)
    if sequence and not plain:
        part.register_forward_hook(_scatter_result_hook(group), with_kwargs=True)


def _scatter_result_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a hook that keeps this rank's tokens of a result. Some feed-forward networks return [batch x tokens, hidden]."""

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = output[0] if isinstance(output, tuple) else output
        tokens = result.reshape(*_hidden_states(args, kwargs).shape[:-1], result.shape[-1])
        shared = Exchange.apply(tokens, group, local_tokens, all_gather_tokens)  # type: ignore[no-untyped-call]
        shared = shared.flatten(0, 1) if result.ndim == 2 else shared
        return (shared, *output[1:]) if isinstance(output, tuple) else shared

    return leave


def regather_region_input(layer: nn.Module, part: nn.Module, group: dist.ProcessGroup) -> None:
    """Exchange the input of a plain part with shared tokens as ``enter`` does, but keep only the rank's own tokens of it.

    A recomputed layer keeps nothing anyway.
    """
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        own_tokens = _cast_for_autocast(hidden)
        whole = Exchange.apply(own_tokens, group, all_gather_tokens, reduce_scatter_tokens)  # type: ignore[no-untyped-call]
        args, kwargs = _replace_tensors(args, kwargs, {hidden: whole}, group, plain=True)
        if getattr(layer, "gradient_checkpointing", False) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        kept = RegatherInBackward(own_tokens, whole, group)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return run(*args, **kwargs)

    part.forward = forward


def _hidden_states(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _replace_tensors(
    args: Any, kwargs: Any, instead: dict[torch.Tensor, torch.Tensor], group: dist.ProcessGroup, *, plain: bool
) -> tuple[Any, Any]:
    """Return the arguments with replaced tensors. Each rank of a plain part has a term of the gradient of every tensor that
    enters it."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in instead:
            return instead[tensor]
        if not (plain and tensor.requires_grad):
            return tensor
        return Exchange.apply(tensor, group, identity, all_reduce)  # type: ignore[no-any-return,no-untyped-call]

    args, kwargs = tree_map(torch.Tensor, moved, (args, kwargs))
    return args, kwargs


def _cast_for_autocast(hidden: torch.Tensor) -> torch.Tensor:
    """Return the input in the dtype that autocast gives every matrix of a plain part: fewer bytes are exchanged, and kept
    once."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def exchange_output_hook(group: dist.ProcessGroup, there: Collective, back: Collective) -> Callable[..., Any]:
    """Return a hook on the output of a layer or a part: hidden states, or several values with the hidden states first."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Exchange.apply(output[0], group, there, back), *output[1:])  # type: ignore[no-untyped-call]
        return Exchange.apply(output, group, there, back)  # type: ignore[no-untyped-call]

    return leave


Stacks = list[nn.ModuleList]


def why_not_sequence_parallel(model: nn.Module, plan: Plan, parts: dict[str, TPRegion]) -> str | None:
    """Return why the tokens cannot be shared between the matrices of this model, and the next best, or None."""
    degree = plan.layout.tensor_parallel
    instead = "use sequence_parallel=False"
    tokens = plan.sequence_length // plan.layout.context_parallel
    if tokens % degree or plan.pad_multiple % degree:
        return (
            f"sequence_parallel shares micro-batches that are multiples of {plan.pad_multiple} tokens, at most {tokens}, among "
            f"tensor_parallel={degree} ranks, which does not divide them; use a sequence length and a degree that do, or "
            "sequence_parallel=False"
        )
    for layer in (layer for stack in stacks_of(model, parts) for layer in stack):
        for name, child in layer.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
                return f"sequence_parallel: the model's layers have a list of modules ({name}), not one with one input; {instead}"
    return None


def stacks_of(model: nn.Module, parts: dict[str, TPRegion]) -> Stacks:
    """Return every list of layers that holds the layer of a part."""
    names = dict.fromkeys(part.layer.rpartition(".")[0] for part in parts.values())
    return [stack for stack in map(model.get_submodule, names) if isinstance(stack, nn.ModuleList)]


def apply_sequence_parallel(model: nn.Module, parts: dict[str, TPRegion], group: dist.ProcessGroup) -> None:
    """Add hooks to the first and the last layer of every stack, and around modules of a layer that do not work token by token."""
    known = {id(part.module) for part in parts.values()}
    for stack in stacks_of(model, parts):
        for layer in stack:
            mark_partial(layer)
            for child in layer.children():
                if id(child) in known:
                    continue
                if _is_tokenwise(child):
                    for module in child.modules():
                        mark_partial(module)
                else:
                    exchange_region_input(child, group, plain=False, sequence=True)
        stack[0].register_forward_pre_hook(_scatter_tokens_hook(group), with_kwargs=True)
        stack[-1].register_forward_hook(exchange_output_hook(group, all_gather_tokens, local_tokens))


def _is_tokenwise(child: nn.Module) -> bool:
    """Return whether a module works token by token.

    Norms and scales have a number for every feature. Modules that mix tokens, or have matrices, have more.
    """
    return all(parameter.ndim <= 1 for parameter in child.parameters())


def _scatter_tokens_hook(group: dist.ProcessGroup) -> Any:
    def share(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (Exchange.apply(args[0], group, local_tokens, all_gather_tokens), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        shared = Exchange.apply(kwargs["hidden_states"], group, local_tokens, all_gather_tokens)  # type: ignore[no-untyped-call]
        return args, kwargs | {"hidden_states": shared}

    return share


INSTEAD = "use fully_shard=weights, which divides the weights of any model, or tensor_parallel=1"
PARTIAL_STYLE = "replicated_with_grad_allreduce"  # transformers sums what was accumulated, after every micro-batch


def why_not_tensor_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot share this model's matrices as the plan says, and the next best, or None.

    The model may be on the meta device.
    """
    degree = plan.layout.tensor_parallel
    if degree == 1:
        return None
    base = base_of(model)
    if base is not model or getattr(base, "is_quantized", False):
        kind = "an adapter" if base is not model else "quantized weights"
        return f"tensor_parallel={degree}: the model has {kind}, and what it declares to share are plain weights; {INSTEAD}"
    if plan.optimizer_in_backward:
        return f"tensor_parallel={degree} sums some gradients after the backward pass; use optimizer_in_backward=False"
    declared = describe_tensor_parallel(base)
    if isinstance(declared, str):
        return f"tensor_parallel={degree}: {declared}; {INSTEAD}"
    if declared.divisor % degree:
        instead = f"use a degree that divides {declared.divisor}" if declared.divisor > 1 else INSTEAD
        return f"tensor_parallel={degree} does not divide the heads and matrices of this model; {instead}"
    problem = _why_not_vocabulary_parallel(base, degree) if plan.layout.vocabulary_parallel else None
    if problem is None and plan.layout.sequence_parallel:
        problem = why_not_sequence_parallel(base, plan, find_regions(base, parallel_styles(base, plan)))
    return problem


def parallel_styles(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Return the style of every module and weight that the ranks share.

    Experts that are shared whole have a plan of their own. A tied weight is divided if all its owners are, and none of them is
    in another pipeline stage.
    """
    found = _vocabulary_styles(model, plan) | EXPAND_PLAN.of(model)(model.tp_plan)
    if plan.layout.expert_parallel > 1:
        experts = tuple(f"{name}." for name in EXPAND_PLAN.of(model)(model.ep_plan))
        found = {name: style for name, style in found.items() if not f"{name}.".startswith(experts)}
    inside = tuple(f"{part}." for part in find_regions(model, found))
    for name, module in model.named_modules():  # an activation with weights sees this rank's features
        if type(module).__module__ == activations.__name__ and name.startswith(inside) and any(True for _ in module.parameters()):
            found[name] = PARTIAL_STYLE
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    whole = {name for names in owners.values() if not found.keys() >= set(names) for name in names} & found.keys()
    stage: Any = getattr(model, "pipeline_stage", None)
    whole |= found.keys() & ([] if stage is None else stage.shared)
    whole |= {name.rpartition(".")[0] for name in whole}
    return {name: style for name, style in found.items() if name not in whole}


def _vocabulary_styles(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Return styles of embedding and head, which not every plan names, if each rank is to have words of its own."""
    if not plan.layout.vocabulary_parallel:
        return {}
    styles = {id(model.get_input_embeddings()): "embedding_rowwise", id(model.get_output_embeddings()): "colwise_gather_output"}
    known = {name: (module, styles[id(module)]) for name, module in model.named_modules() if id(module) in styles}
    weights = {f"{name}.{own}": style for name, (module, style) in known.items() for own, _ in module.named_parameters()}
    return weights | {name: style for name, (_, style) in known.items()}


def _why_not_vocabulary_parallel(model: PreTrainedModel, degree: int) -> str | None:
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return "vocabulary_parallel shares a plain embedding and a plain linear head, which this model has not; leave it out"
    if any(len(module.weight) % degree for module in (embedding, head)):
        return f"vocabulary_parallel: tensor_parallel={degree} does not divide {len(head.weight)} words evenly; leave it out"
    return None


def shard_tensors(model: nn.Module, mesh: Mesh) -> None:
    """Divide the model in place: keep this rank's part of every divided weight, and exchange tensors around them."""
    if mesh.device_mesh is None or mesh.plan.layout.tensor_parallel == 1:
        return
    base = base_of(model)
    tensor_mesh = mesh.device_mesh["tensor"]
    sequence = mesh.plan.layout.sequence_parallel
    styles = parallel_styles(base, mesh.plan)
    parts = find_regions(base, styles)
    _shard_weights(base, styles, tensor_mesh)
    modules = dict(base.named_modules())
    for name, style in styles.items():
        if name in modules and not isinstance(modules[name], FirstStagePlaceholder):
            _install_style(name, modules[name], style, base, parts, tensor_mesh, sequence=sequence)
    for part in parts.values():
        if part.plain and mesh.plan.layout.gather_again:
            regather_region_input(base.get_submodule(part.layer), part.module, tensor_mesh.get_group())
        else:
            exchange_region_input(part.module, tensor_mesh.get_group(), plain=part.plain, sequence=sequence)
    if sequence:
        apply_sequence_parallel(base, parts, tensor_mesh.get_group())


def _shard_weights(model: PreTrainedModel, styles: dict[str, str], tensor_mesh: DeviceMesh) -> None:
    divided: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        style = styles.get(name)
        path, _, own = name.rpartition(".")
        added_after_the_sum = style == "rowwise" and own == "bias"
        if style is None or added_after_the_sum:
            continue
        module = model.get_submodule(path)
        if id(parameter) not in divided:
            PARALLEL_STYLES.get()[style].shard_param(module, own, tensor_mesh)
            divided[id(parameter)] = trim_storage(PARAMETERS.of(module)[own])
        PARAMETERS.of(module)[own] = divided[id(parameter)]


def _install_style(
    name: str,
    module: nn.Module,
    style: str,
    model: PreTrainedModel,
    parts: dict[str, TPRegion],
    tensor_mesh: DeviceMesh,
    *,
    sequence: bool,
) -> None:
    part = region_of(name, parts)
    if style == PARTIAL_STYLE:
        mark_partial(module)
    elif style in STYLES:
        plain = part is None or part.plain
        styles = STYLES if plain else STANDALONE_STYLES
        module.forward = styles[style](module, tensor_mesh, sequence=sequence and plain)
    else:
        if style == "mla_kv_a_proj":
            module.config = model.config.get_text_config()  # type: ignore[assignment]
        PARALLEL_STYLES.get()[style].install_forward(module, tensor_mesh)
