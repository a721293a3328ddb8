"""Share the matrices of every layer among ranks (tensor parallelism), as the model itself declares.

The model's plan names modules and their styles (transformers.distributed.tensor_parallel). Weights are divided as transformers
divides them, into DTensors, so that fully_shard and checkpoints know the whole weight.

Modules with plain styles get a forward pass from this file, which runs the module's own forward pass on the rank's part of the
weight, as a plain tensor. All other modules of the plan run as in transformers.

A region is a part of a layer whose matrices ranks share: its attention, or its feed-forward network. The input of a region with
only plain styles is exchanged once, however many matrices read it; transformers would sum its gradient once for every matrix.

With sequence parallelism each rank has its own tokens between the regions. The unmodified model gets whole sequences. From its
first layer on each rank has its part of the tokens, which regions gather. After the last layer all ranks have all tokens again
(Korthikanti et al. 2022, section 4.2). Modules that work on every token by itself (norms, sums, dropout) see the rank's own
tokens, so their weights get partial gradients.
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
    """Replace a module's DTensors by this rank's parts while open."""
    parameters = dict(PARAMETERS.of(module))
    try:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                PARAMETERS.of(module)[name] = parameter.to_local()
        if without_bias and "bias" in parameters:
            PARAMETERS.of(module)["bias"] = None
        yield
    finally:
        PARAMETERS.of(module).update(parameters)


def colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with this rank's rows of the weight. It computes this rank's part of the output."""
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module):
            out: torch.Tensor = run(*args, **kwargs)
        return out

    return forward


def rowwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with this rank's columns of the weight. It computes a term, and sums the terms of all ranks.

    Each rank gets the whole sum or, with sequence parallelism, its own tokens of it.
    """
    run = module.forward
    group = tensor_mesh.get_group()
    forward_op: Collective = all_reduce
    backward_op: Collective = identity
    if sequence:
        forward_op = reduce_scatter_tokens
        backward_op = all_gather_tokens
        mark_partial(module, ["bias"])

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module, without_bias=True):
            term = run(*args, **kwargs)
        if sequence and term.ndim != 3:
            raise RequestError("a layer of this model flattens its tokens before it ends; use sequence_parallel=False")
        out: torch.Tensor = Exchange.apply(term, group, forward_op, backward_op)  # type: ignore[no-untyped-call]
        bias = PARAMETERS.of(module).get("bias")
        return out if bias is None else out + bias.to(out.dtype)

    return forward


def standalone_colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return ``colwise_forward`` for a module outside of a plain region: it also sums the gradient of its input."""
    run = colwise_forward(module, tensor_mesh, sequence=sequence)
    group = tensor_mesh.get_group()
    return lambda hidden: run(Exchange.apply(hidden, group, identity, all_reduce))  # type: ignore[no-untyped-call]


def gathered_colwise_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass with this rank's rows of the weight, which gathers the output of all ranks."""
    run = standalone_colwise_forward(module, tensor_mesh, sequence=sequence)
    group = tensor_mesh.get_group()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Exchange.apply(run(hidden), group, all_gather_features, local_features)  # type: ignore[no-untyped-call]
        return out

    return forward


def embedding_forward(module: nn.Module, tensor_mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass of a divided embedding: zeros for the tokens of other ranks, then the sum over ranks."""
    embedding: Any = module  # an nn.Embedding, or the model's own class with the same attributes
    run = module.forward
    group = tensor_mesh.get_group()
    count = len(embedding.weight.to_local())
    first = tensor_mesh.get_local_rank() * count
    if embedding.padding_idx is not None:
        is_local = first <= embedding.padding_idx < first + count
        embedding.padding_idx = embedding.padding_idx - first if is_local else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        is_elsewhere = (ids < first) | (ids >= first + count)
        with local_weights(module):
            vectors = run((ids - first).masked_fill(is_elsewhere, 0))
        local_vectors = vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        out: torch.Tensor = Exchange.apply(local_vectors, group, all_reduce, identity)  # type: ignore[no-untyped-call]
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
_REGION_NAME = re.compile(r"((.*?\.\d+)\.[^.]+)\.")  # the name of a module in a layer, which has a number


@dataclass(frozen=True)
class TPRegion:
    """A part of a layer whose matrices ranks share, such as its attention."""

    layer: str  # path of the layer
    module: nn.Module
    is_plain: bool  # every weight in it belongs to a module with a plain style


def find_regions(model: nn.Module, styles: dict[str, str]) -> dict[str, TPRegion]:
    """Return the regions that contain modules with styles, by their names."""
    modules = dict(model.named_modules())
    layers = {match[1]: match[2] for match in map(_REGION_NAME.match, styles) if match}
    return {name: TPRegion(layer, modules[name], _is_plain(name, modules[name], styles)) for name, layer in layers.items()}


def region_of(name: str, regions: dict[str, TPRegion]) -> TPRegion | None:
    """Return the region that contains a module or weight, or None."""
    match = _REGION_NAME.match(name)
    return regions.get(match[1]) if match else None


def _is_plain(name: str, region: nn.Module, styles: dict[str, str]) -> bool:
    owners = {path.rpartition(".")[0] for path, _ in region.named_parameters()}
    inner_styles = [style for path, style in styles.items() if path.startswith(f"{name}.")]
    if any(styles.get(f"{name}.{owner}") not in PLAIN_STYLES for owner in owners):
        return False
    return all(style in PLAIN_STYLES for style in inner_styles)


def exchange_region_input(region: nn.Module, group: dist.ProcessGroup, *, plain: bool, sequence: bool) -> None:
    """Exchange the input of a region.

    The input of a plain region stays as it is, and its gradient is summed. With sequence parallelism the tokens are gathered,
    and their gradient is reduced and scattered. Any other region computes the whole gradient and the whole result on each rank.
    """
    forward_op: Collective = all_gather_tokens if sequence else identity
    backward_op: Collective = local_tokens
    if plain:
        backward_op = reduce_scatter_tokens if sequence else all_reduce

    def exchange_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        sent = _cast_for_autocast(hidden) if plain else hidden
        exchanged = Exchange.apply(sent, group, forward_op, backward_op)  # type: ignore[no-untyped-call]
        return _replace_tensors(args, kwargs, {hidden: exchanged}, group, plain=plain)

    if plain or sequence:
        region.register_forward_pre_hook(exchange_input, with_kwargs=True)
    if sequence and not plain:
        region.register_forward_hook(_scatter_result_hook(group), with_kwargs=True)


def _scatter_result_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a hook that keeps this rank's tokens of a result. Some feed-forward networks return [batch x tokens, hidden]."""

    def scatter_result(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = output[0] if isinstance(output, tuple) else output
        tokens = result.reshape(*_hidden_states(args, kwargs).shape[:-1], result.shape[-1])
        local = Exchange.apply(tokens, group, local_tokens, all_gather_tokens)  # type: ignore[no-untyped-call]
        local = local.flatten(0, 1) if result.ndim == 2 else local
        return (local, *output[1:]) if isinstance(output, tuple) else local

    return scatter_result


def regather_region_input(layer: nn.Module, region: nn.Module, group: dist.ProcessGroup) -> None:
    """Exchange the input of a plain region as ``exchange_region_input`` does with sequence parallelism, to save memory.

    Only the rank's own tokens of the input are kept for the backward pass, which gathers them again. A layer with activation
    checkpointing keeps nothing anyway.
    """
    run = region.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        local = _cast_for_autocast(hidden)
        gathered = Exchange.apply(local, group, all_gather_tokens, reduce_scatter_tokens)  # type: ignore[no-untyped-call]
        args, kwargs = _replace_tensors(args, kwargs, {hidden: gathered}, group, plain=True)
        if getattr(layer, "gradient_checkpointing", False) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        regather = RegatherInBackward(local, gathered, group)
        with torch.autograd.graph.saved_tensors_hooks(regather.pack, regather.unpack):
            return run(*args, **kwargs)

    region.forward = forward


def _hidden_states(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _replace_tensors(
    args: Any, kwargs: Any, replacements: dict[torch.Tensor, torch.Tensor], group: dist.ProcessGroup, *, plain: bool
) -> tuple[Any, Any]:
    """Return the arguments with replaced tensors.

    In a plain region each rank computes a term of the gradient of every input, so these terms are summed.
    """

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in replacements:
            return replacements[tensor]
        if not (plain and tensor.requires_grad):
            return tensor
        return Exchange.apply(tensor, group, identity, all_reduce)  # type: ignore[no-any-return,no-untyped-call]

    args, kwargs = tree_map(torch.Tensor, replace, (args, kwargs))
    return args, kwargs


def _cast_for_autocast(hidden: torch.Tensor) -> torch.Tensor:
    """Return the input in the dtype to which autocast would cast it for every matrix.

    So fewer bytes are exchanged, and one cast is kept instead of several.
    """
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def exchange_output_hook(group: dist.ProcessGroup, forward_op: Collective, backward_op: Collective) -> Callable[..., Any]:
    """Return a hook that exchanges the output of a layer: hidden states, or several values with the hidden states first."""

    def exchange_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Exchange.apply(output[0], group, forward_op, backward_op), *output[1:])  # type: ignore[no-untyped-call]
        return Exchange.apply(output, group, forward_op, backward_op)  # type: ignore[no-untyped-call]

    return exchange_output


def why_not_sequence_parallel(model: nn.Module, plan: Plan, regions: dict[str, TPRegion]) -> str | None:
    """Return why ranks cannot share tokens between the matrices of this model and what to use instead, or None if they can."""
    degree = plan.layout.tensor_parallel
    instead = "use sequence_parallel=False"
    tokens = plan.sequence_length // plan.layout.context_parallel
    if tokens % degree or plan.pad_multiple % degree:
        return (
            f"sequence_parallel shares micro-batches that are multiples of {plan.pad_multiple} tokens, at most {tokens}, among "
            f"tensor_parallel={degree} ranks, which does not divide them; use a sequence length and a degree that do, or "
            "sequence_parallel=False"
        )
    for layer in (layer for stack in stacks_of(model, regions) for layer in stack):
        for name, child in layer.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
                return f"sequence_parallel: the model's layers have a list of modules ({name}), not one with one input; {instead}"
    return None


def stacks_of(model: nn.Module, regions: dict[str, TPRegion]) -> list[nn.ModuleList]:
    """Return the lists of layers that contain regions."""
    names = dict.fromkeys(region.layer.rpartition(".")[0] for region in regions.values())
    return [stack for stack in map(model.get_submodule, names) if isinstance(stack, nn.ModuleList)]


def apply_sequence_parallel(model: nn.Module, regions: dict[str, TPRegion], group: dist.ProcessGroup) -> None:
    """Divide the tokens among ranks between the regions.

    Add hooks to the first and the last layer of every stack, and to modules of a layer that do not work token by token.
    """
    region_ids = {id(region.module) for region in regions.values()}
    for stack in stacks_of(model, regions):
        for layer in stack:
            mark_partial(layer)
            for child in layer.children():
                if id(child) in region_ids:
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

    Norms and scales have only vectors, with a number for every feature. Modules that mix tokens have matrices.
    """
    return all(parameter.ndim <= 1 for parameter in child.parameters())


def _scatter_tokens_hook(group: dist.ProcessGroup) -> Any:
    """Return a hook that gives a layer only this rank's tokens of its input."""

    def scatter_tokens(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (Exchange.apply(args[0], group, local_tokens, all_gather_tokens), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        local = Exchange.apply(kwargs["hidden_states"], group, local_tokens, all_gather_tokens)  # type: ignore[no-untyped-call]
        return args, kwargs | {"hidden_states": local}

    return scatter_tokens


INSTEAD = "use fully_shard=weights, which divides the weights of any model, or tensor_parallel=1"
PARTIAL_STYLE = "replicated_with_grad_allreduce"  # transformers sums such gradients after every micro-batch


def why_not_tensor_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot share this model's matrices as the plan says and what to use instead, or None if they can.

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

    Whole experts that ranks share have their own plan. A tied weight is divided if all its owners are divided and none of them
    is in another pipeline stage.
    """
    styles = _vocabulary_styles(model, plan) | EXPAND_PLAN.of(model)(model.tp_plan)
    if plan.layout.expert_parallel > 1:
        experts = tuple(f"{name}." for name in EXPAND_PLAN.of(model)(model.ep_plan))
        styles = {name: style for name, style in styles.items() if not f"{name}.".startswith(experts)}
    region_prefixes = tuple(f"{region}." for region in find_regions(model, styles))
    for name, module in model.named_modules():
        is_activation = type(module).__module__ == activations.__name__
        if is_activation and name.startswith(region_prefixes) and any(True for _ in module.parameters()):
            styles[name] = PARTIAL_STYLE  # an activation with weights sees only this rank's features
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    undivided: set[str] = set()
    for names in owners.values():
        if not styles.keys() >= set(names):
            undivided.update(names)
    stage: Any = getattr(model, "pipeline_stage", None)
    if stage is not None:
        undivided.update(stage.tied_names)
    undivided &= styles.keys()
    undivided |= {name.rpartition(".")[0] for name in undivided}
    return {name: style for name, style in styles.items() if name not in undivided}


def _vocabulary_styles(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Return the styles of embedding and head if ranks divide the vocabulary. Not every model's plan names them."""
    if not plan.layout.vocabulary_parallel:
        return {}
    styles = {id(model.get_input_embeddings()): "embedding_rowwise", id(model.get_output_embeddings()): "colwise_gather_output"}
    weight_styles = {}
    module_styles = {}
    for name, module in model.named_modules():
        if id(module) in styles:
            style = styles[id(module)]
            module_styles[name] = style
            for parameter_name, _ in module.named_parameters():
                weight_styles[f"{name}.{parameter_name}"] = style
    return weight_styles | module_styles


def _why_not_vocabulary_parallel(model: PreTrainedModel, degree: int) -> str | None:
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return "vocabulary_parallel shares a plain embedding and a plain linear head, which this model has not; leave it out"
    if any(len(module.weight) % degree for module in (embedding, head)):
        return f"vocabulary_parallel: tensor_parallel={degree} does not divide {len(head.weight)} words evenly; leave it out"
    return None


def shard_tensors(model: nn.Module, mesh: Mesh) -> None:
    """Divide the model in place: keep this rank's parts of the divided weights, and exchange tensors around them."""
    if mesh.device_mesh is None or mesh.plan.layout.tensor_parallel == 1:
        return
    base = base_of(model)
    tensor_mesh = mesh.device_mesh["tensor"]
    sequence = mesh.plan.layout.sequence_parallel
    styles = parallel_styles(base, mesh.plan)
    regions = find_regions(base, styles)
    _shard_weights(base, styles, tensor_mesh)
    modules = dict(base.named_modules())
    for name, style in styles.items():
        if name in modules and not isinstance(modules[name], FirstStagePlaceholder):
            _install_style(name, modules[name], style, base, regions, tensor_mesh, sequence=sequence)
    for region in regions.values():
        if region.is_plain and mesh.plan.layout.gather_again:
            regather_region_input(base.get_submodule(region.layer), region.module, tensor_mesh.get_group())
        else:
            exchange_region_input(region.module, tensor_mesh.get_group(), plain=region.is_plain, sequence=sequence)
    if sequence:
        apply_sequence_parallel(base, regions, tensor_mesh.get_group())


def _shard_weights(model: PreTrainedModel, styles: dict[str, str], tensor_mesh: DeviceMesh) -> None:
    divided: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        style = styles.get(name)
        path, _, parameter_name = name.rpartition(".")
        is_added_after_sum = style == "rowwise" and parameter_name == "bias"
        if style is None or is_added_after_sum:
            continue
        module = model.get_submodule(path)
        if id(parameter) not in divided:
            PARALLEL_STYLES.get()[style].shard_param(module, parameter_name, tensor_mesh)
            divided[id(parameter)] = trim_storage(PARAMETERS.of(module)[parameter_name])
        PARAMETERS.of(module)[parameter_name] = divided[id(parameter)]


def _install_style(
    name: str,
    module: nn.Module,
    style: str,
    model: PreTrainedModel,
    regions: dict[str, TPRegion],
    tensor_mesh: DeviceMesh,
    *,
    sequence: bool,
) -> None:
    region = region_of(name, regions)
    if style == PARTIAL_STYLE:
        mark_partial(module)
    elif style in STYLES:
        is_plain = region is None or region.is_plain
        styles = STYLES if is_plain else STANDALONE_STYLES
        module.forward = styles[style](module, tensor_mesh, sequence=sequence and is_plain)
    else:
        if style == "mla_kv_a_proj":
            module.config = model.config.get_text_config()  # type: ignore[assignment]
        PARALLEL_STYLES.get()[style].install_forward(module, tensor_mesh)
