"""Divide experts among ranks: each rank has some whole experts of each layer, and tokens go to the ranks of their experts.

This follows the plan that the model declares and transformers' all-to-all (transformers.distributed.expert_parallel).
Data-parallel ranks, which have different sequences, share the experts. With tensor parallelism the ranks of their
tensor-parallel groups share them too, and each sends its part of the tokens. An expert's gradient already covers the tokens of
all these ranks, so only ranks that have the same experts (``expert_mesh["replicas"]``) sum it.
"""

from __future__ import annotations

from torch import nn

from upshift.internals.torch_names import PARAMETERS
from upshift.internals.transformers_names import DIVIDE_EXPERTS, EXPAND_PLAN
from upshift.models.adapter import base_of
from upshift.planning.plan import Plan
from upshift.training.distributed.mesh import Mesh
from upshift.training.distributed.partial_gradients import trim_storage
from upshift.training.distributed.pipeline_stage import stage_modules

DISPATCH_STYLE = "ep_dispatch_experts"  # modules that exchange tokens
SHARDED_STYLE = "grouped_gemm"  # weights with one row for each expert
INSTEAD = "use fully_shard=weights, which divides all weights among all ranks, or expert_parallel=1"


def why_not_expert_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot share this model's experts as the plan says and what to use instead, or None if they can.

    The model may be on the meta device.
    """
    layout = plan.layout
    if layout.expert_parallel == 1:
        return None
    base = base_of(model)
    setting = f"expert_parallel={layout.expert_parallel}"
    declared = dict(getattr(base, "ep_plan", None) or {})
    unknown = sorted(set(declared.values()) - {DISPATCH_STYLE, SHARDED_STYLE})
    if not declared or DISPATCH_STYLE not in declared.values():
        return f"{setting}: the model declares no expert-parallel plan; {INSTEAD}"
    if unknown:
        return f"{setting}: the model's expert-parallel plan has {', '.join(unknown)}, which is not run here; {INSTEAD}"
    if base is not model:
        return f"{setting}: the model has an adapter, and what it declares to share are plain weights; {INSTEAD}"
    ranks = layout.expert_parallel * layout.tensor_parallel
    styles = EXPAND_PLAN.of(base)(declared)
    counts = {len(parameter) for name, parameter in base.named_parameters() if styles.get(name) == SHARDED_STYLE}
    uneven = sorted(count for count in counts if count % ranks)
    if uneven:
        tensor_setting = f" x tensor_parallel={layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
        return f"{setting}{tensor_setting} does not divide {uneven[0]} experts a layer evenly; use degrees whose product does"
    return None


def shard_experts(model: nn.Module, mesh: Mesh) -> None:
    """Divide the experts in place: keep this rank's experts of every layer, and exchange tokens around them."""
    if mesh.expert_mesh is None or mesh.device_mesh is None:
        return
    base = base_of(model)
    styles = EXPAND_PLAN.of(base)(base.ep_plan)
    DIVIDE_EXPERTS.get()(base, mesh.expert_mesh["experts"], mesh.device_mesh["tensor"], styles)
    for name, style in styles.items():
        if style == SHARDED_STYLE:
            path, _, parameter_name = name.rpartition(".")
            parameters = PARAMETERS.of(base.get_submodule(path))
            parameters[parameter_name] = trim_storage(parameters[parameter_name])


def expert_modules(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Return the modules that hold only this rank's experts. The list is empty if ranks do not share experts."""
    if mesh.expert_mesh is None:
        return []
    bases = [base_of(module) for module in stage_modules(model)]
    plans = [(base, EXPAND_PLAN.of(base)(base.ep_plan)) for base in bases]
    return [base.get_submodule(name) for base, plan in plans for name, style in plan.items() if style == DISPATCH_STYLE]
