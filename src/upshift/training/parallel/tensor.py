"""Share the matrices of every layer among ranks (tensor parallelism), as the model's own plan declares.

The plan names modules and styles (transformers.distributed.tensor_parallel). Weights are divided as transformers does it, into
DTensors. Parts of layers with plain styles alone, embedding and head run by styles.py. Everything else that a plan names runs
as transformers has it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, activations

from upshift.internals.torch_names import PARAMETERS
from upshift.internals.transformers_names import EXPAND_PLAN, PARALLEL_STYLES
from upshift.models.adapter import base_of
from upshift.models.tensor_parallel import describe_tensor_parallel
from upshift.planning.plan import Plan
from upshift.training.parallel.divided import of_its_size
from upshift.training.parallel.layer_parts import Part, enter, enter_and_let_go, find_parts, part_of
from upshift.training.parallel.partial import mark_partial
from upshift.training.parallel.place import Place
from upshift.training.parallel.sequence import reason_not_sequence, share_tokens
from upshift.training.parallel.stage import Absent
from upshift.training.parallel.styles import ALONE, STYLES

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
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return "vocabulary_parallel shares a plain embedding and a plain linear head, which this model has not; leave it out"
    if any(len(module.weight) % degree for module in (embedding, head)):
        return f"vocabulary_parallel: tensor_parallel={degree} does not divide {len(head.weight)} words evenly; leave it out"
    return None


def divide_tensors(model: nn.Module, place: Place) -> None:
    """Divide the model in place: keep this rank's part of every divided weight, and exchange tensors around them."""
    if place.mesh is None or place.plan.layout.tensor_parallel == 1:
        return
    base, mesh, sequence = base_of(model), place.mesh["tensor"], place.plan.layout.sequence_parallel
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
