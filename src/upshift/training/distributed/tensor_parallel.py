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
    Exchanged,
    Regathered,
    Way,
    gathered,
    gathered_last,
    own,
    own_last,
    same,
    sum_shared,
    summed,
)
from upshift.training.distributed.mesh import Place
from upshift.training.distributed.partial_gradients import mark_partial, of_its_size
from upshift.training.distributed.pipeline_stage import Absent

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
    run = module.forward
    group = mesh.get_group()
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
    run = columns(module, mesh, sequence=sequence)
    group = mesh.get_group()
    return lambda hidden: run(Exchanged.apply(hidden, group, same, summed))  # type: ignore[no-untyped-call]


def gathered_columns(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    run = entered_columns(module, mesh, sequence=sequence)
    group = mesh.get_group()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Exchanged.apply(run(hidden), group, gathered_last, own_last)  # type: ignore[no-untyped-call]
        return out

    return forward


def words(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Forward:
    """Return a forward pass of an embedding: rows of zeros for the words of other ranks, then the sum."""
    embedding: Any = module  # an nn.Embedding, or a class of the model's with the same attributes
    run = module.forward
    group = mesh.get_group()
    count = len(embedding.weight.to_local())
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


PLAIN = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_IN_PART = re.compile(r"((.*?\.\d+)\.[^.]+)\.")  # the name of the part in its layer, which has a number


@dataclass(frozen=True)
class Part:
    """A part of a layer. ``plain`` says that every weight in it belongs to a module with a plain style."""

    layer: str
    module: nn.Module
    plain: bool


def find_parts(model: nn.Module, styles: dict[str, str]) -> dict[str, Part]:
    modules = dict(model.named_modules())
    found = {match[1]: match[2] for match in map(_IN_PART.match, styles) if match}
    return {name: Part(layer, modules[name], _is_plain(name, modules[name], styles)) for name, layer in found.items()}


def part_of(name: str, parts: dict[str, Part]) -> Part | None:
    """Return the part that contains a module or weight, or None."""
    match = _IN_PART.match(name)
    return parts.get(match[1]) if match else None


def _is_plain(name: str, part: nn.Module, styles: dict[str, str]) -> bool:
    owners = {path.rpartition(".")[0] for path, _ in part.named_parameters()}
    inside = [style for path, style in styles.items() if path.startswith(f"{name}.")]
    return all(styles.get(f"{name}.{owner}") in PLAIN for owner in owners) and all(style in PLAIN for style in inside)


def enter(part: nn.Module, group: dist.ProcessGroup, *, plain: bool, sequence: bool) -> None:
    """Exchange the input of a part.

    The input of a plain part enters as it is, and its gradient is summed. If ranks share tokens, the tokens are gathered, and
    their gradient is summed and shared. Any other part gives each rank the whole gradient, and a result that is whole.
    """
    there: Way = gathered if sequence else same
    back: Way = (sum_shared if sequence else summed) if plain else own

    def arrive(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        entered = Exchanged.apply(_as_read(hidden) if plain else hidden, group, there, back)  # type: ignore[no-untyped-call]
        return _given(args, kwargs, {hidden: entered}, group, plain=plain)

    if plain or sequence:
        part.register_forward_pre_hook(arrive, with_kwargs=True)
    if sequence and not plain:
        part.register_forward_hook(_share_result(group), with_kwargs=True)


def _share_result(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a hook that keeps this rank's tokens of a result. Some feed-forward networks return [batch x tokens, hidden]."""

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = output[0] if isinstance(output, tuple) else output
        tokens = result.reshape(*_hidden(args, kwargs).shape[:-1], result.shape[-1])
        shared = Exchanged.apply(tokens, group, own, gathered)  # type: ignore[no-untyped-call]
        shared = shared.flatten(0, 1) if result.ndim == 2 else shared
        return (shared, *output[1:]) if isinstance(output, tuple) else shared

    return leave


def enter_and_let_go(layer: nn.Module, part: nn.Module, group: dist.ProcessGroup) -> None:
    """Exchange the input of a plain part with shared tokens as ``enter`` does, but keep only the rank's own tokens of it.

    A recomputed layer keeps nothing anyway.
    """
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        own_tokens = _as_read(hidden)
        whole = Exchanged.apply(own_tokens, group, gathered, sum_shared)  # type: ignore[no-untyped-call]
        args, kwargs = _given(args, kwargs, {hidden: whole}, group, plain=True)
        if getattr(layer, "gradient_checkpointing", False) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        kept = Regathered(own_tokens, whole, group)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return run(*args, **kwargs)

    part.forward = forward


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _given(
    args: Any, kwargs: Any, instead: dict[torch.Tensor, torch.Tensor], group: dist.ProcessGroup, *, plain: bool
) -> tuple[Any, Any]:
    """Return the arguments with replaced tensors. Each rank of a plain part has a term of the gradient of every tensor that
    enters it."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in instead:
            return instead[tensor]
        if not (plain and tensor.requires_grad):
            return tensor
        return Exchanged.apply(tensor, group, same, summed)  # type: ignore[no-any-return,no-untyped-call]

    args, kwargs = tree_map(torch.Tensor, moved, (args, kwargs))
    return args, kwargs


def _as_read(hidden: torch.Tensor) -> torch.Tensor:
    """Return the input in the dtype that autocast gives every matrix of a plain part: fewer bytes are exchanged, and kept
    once."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def leaving(group: dist.ProcessGroup, there: Way, back: Way) -> Callable[..., Any]:
    """Return a hook on the output of a layer or a part: hidden states, or several values with the hidden states first."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Exchanged.apply(output[0], group, there, back), *output[1:])  # type: ignore[no-untyped-call]
        return Exchanged.apply(output, group, there, back)  # type: ignore[no-untyped-call]

    return leave


Stacks = list[nn.ModuleList]


def reason_not_sequence(model: nn.Module, plan: Plan, parts: dict[str, Part]) -> str | None:
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


def stacks_of(model: nn.Module, parts: dict[str, Part]) -> Stacks:
    """Return every list of layers that holds the layer of a part."""
    names = dict.fromkeys(part.layer.rpartition(".")[0] for part in parts.values())
    return [stack for stack in map(model.get_submodule, names) if isinstance(stack, nn.ModuleList)]


def share_tokens(model: nn.Module, parts: dict[str, Part], group: dist.ProcessGroup) -> None:
    """Add hooks to the first and the last layer of every stack, and around modules of a layer that do not work token by token."""
    known = {id(part.module) for part in parts.values()}
    for stack in stacks_of(model, parts):
        for layer in stack:
            mark_partial(layer)
            for child in layer.children():
                if id(child) in known:
                    continue
                if _by_token(child):
                    for module in child.modules():
                        mark_partial(module)
                else:
                    enter(child, group, plain=False, sequence=True)
        stack[0].register_forward_pre_hook(_sharing(group), with_kwargs=True)
        stack[-1].register_forward_hook(leaving(group, gathered, own))


def _by_token(child: nn.Module) -> bool:
    """Return whether a module works token by token.

    Norms and scales have a number for every feature. Modules that mix tokens, or have matrices, have more.
    """
    return all(parameter.ndim <= 1 for parameter in child.parameters())


def _sharing(group: dist.ProcessGroup) -> Any:
    def share(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (Exchanged.apply(args[0], group, own, gathered), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        shared = Exchanged.apply(kwargs["hidden_states"], group, own, gathered)  # type: ignore[no-untyped-call]
        return args, kwargs | {"hidden_states": shared}

    return share


INSTEAD = "use fully_shard=weights, which divides the weights of any model, or tensor_parallel=1"
PARTIAL = "replicated_with_grad_allreduce"  # transformers sums what was accumulated, after every micro-batch


def reason_not_tensor(model: nn.Module, plan: Plan) -> str | None:
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
    problem = _why_not_vocabulary(base, degree) if plan.layout.vocabulary_parallel else None
    if problem is None and plan.layout.sequence_parallel:
        problem = reason_not_sequence(base, plan, find_parts(base, planned(base, plan)))
    return problem


def planned(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Return the style of every module and weight that the ranks share.

    Experts that are shared whole have a plan of their own. A tied weight is divided if all its owners are, and none of them is
    in another pipeline stage.
    """
    found = _of_vocabulary(model, plan) | EXPAND_PLAN.of(model)(model.tp_plan)
    if plan.layout.expert_parallel > 1:
        experts = tuple(f"{name}." for name in EXPAND_PLAN.of(model)(model.ep_plan))
        found = {name: style for name, style in found.items() if not f"{name}.".startswith(experts)}
    inside = tuple(f"{part}." for part in find_parts(model, found))
    for name, module in model.named_modules():  # an activation with weights sees this rank's features
        if type(module).__module__ == activations.__name__ and name.startswith(inside) and any(True for _ in module.parameters()):
            found[name] = PARTIAL
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    whole = {name for names in owners.values() if not found.keys() >= set(names) for name in names} & found.keys()
    stage: Any = getattr(model, "pipeline_stage", None)
    whole |= found.keys() & ([] if stage is None else stage.shared)
    whole |= {name.rpartition(".")[0] for name in whole}
    return {name: style for name, style in found.items() if name not in whole}


def _of_vocabulary(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Return styles of embedding and head, which not every plan names, if each rank is to have words of its own."""
    if not plan.layout.vocabulary_parallel:
        return {}
    styles = {id(model.get_input_embeddings()): "embedding_rowwise", id(model.get_output_embeddings()): "colwise_gather_output"}
    known = {name: (module, styles[id(module)]) for name, module in model.named_modules() if id(module) in styles}
    weights = {f"{name}.{own}": style for name, (module, style) in known.items() for own, _ in module.named_parameters()}
    return weights | {name: style for name, (_, style) in known.items()}


def _why_not_vocabulary(model: PreTrainedModel, degree: int) -> str | None:
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return "vocabulary_parallel shares a plain embedding and a plain linear head, which this model has not; leave it out"
    if any(len(module.weight) % degree for module in (embedding, head)):
        return f"vocabulary_parallel: tensor_parallel={degree} does not divide {len(head.weight)} words evenly; leave it out"
    return None


def divide_tensors(model: nn.Module, place: Place) -> None:
    """Divide the model in place: keep this rank's part of every divided weight, and exchange tensors around them."""
    if place.mesh is None or place.plan.layout.tensor_parallel == 1:
        return
    base = base_of(model)
    mesh = place.mesh["tensor"]
    sequence = place.plan.layout.sequence_parallel
    styles = planned(base, place.plan)
    parts = find_parts(base, styles)
    _divide_weights(base, styles, mesh)
    modules = dict(base.named_modules())
    for name, style in styles.items():
        if name in modules and not isinstance(modules[name], Absent):
            _install(name, modules[name], style, base, parts, mesh, sequence=sequence)
    for part in parts.values():
        if part.plain and place.plan.layout.gather_again:
            enter_and_let_go(base.get_submodule(part.layer), part.module, mesh.get_group())
        else:
            enter(part.module, mesh.get_group(), plain=part.plain, sequence=sequence)
    if sequence:
        share_tokens(base, parts, mesh.get_group())


def _divide_weights(model: PreTrainedModel, styles: dict[str, str], mesh: DeviceMesh) -> None:
    divided: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        style = styles.get(name)
        path, _, own = name.rpartition(".")
        added_after_the_sum = style == "rowwise" and own == "bias"
        if style is None or added_after_the_sum:
            continue
        module = model.get_submodule(path)
        if id(parameter) not in divided:
            PARALLEL_STYLES.get()[style].shard_param(module, own, mesh)
            divided[id(parameter)] = of_its_size(PARAMETERS.of(module)[own])
        PARAMETERS.of(module)[own] = divided[id(parameter)]


def _install(
    name: str, module: nn.Module, style: str, model: PreTrainedModel, parts: dict[str, Part], mesh: DeviceMesh, *, sequence: bool
) -> None:
    part = part_of(name, parts)
    if style == PARTIAL:
        mark_partial(module)
    elif style in STYLES:
        plain = part is None or part.plain
        styles = STYLES if plain else ALONE
        module.forward = styles[style](module, mesh, sequence=sequence and plain)
    else:
        if style == "mla_kv_a_proj":
            module.config = model.config.get_text_config()  # type: ignore[assignment]
        PARALLEL_STYLES.get()[style].install_forward(module, mesh)
