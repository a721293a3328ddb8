"""Write a plan as a Python module that divides a model with torch's own FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

from upshift.planning.plan import Plan
from upshift.planning.programs.job import (
    ONLY_HERE,
    Job,
    check_expressible,
    comment_lines,
    launch_words,
    refuse_adapter,
    trainer_arguments,
)

POLICIES = {
    "bf16": "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    "fp32": "MixedPrecisionPolicy()",
}
CHECKPOINTING = '    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
IMPORTS = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
"""
SIGNATURE = "\n\ndef shard(model: torch.nn.Module) -> torch.nn.Module:"


def config_of(plan: Plan, job: Job) -> str:
    """Return the module's text. Raise RequestError for choices that it does not make."""
    refuse_adapter("fsdp2", job)
    layout = plan.layout
    check_expressible(
        "fsdp2",
        plan,
        {
            "device": ("cuda",),
            "precision": tuple(POLICIES),
            "fully_shard": ("weights", "gradients"),
            "activation_checkpointing": (job.num_layers, 0) if plan.activation_checkpointing else (0,),
            "recompute_granularity": ("full",),
            "attention": ("sdpa", "eager"),
            "optim_offload": (False,),
            "tensor_parallel": (1,),
            "context_parallel": (1,),
            "pipeline_parallel": (1,),
            "expert_parallel": (1,),
            **ONLY_HERE,
        },
    )
    replicas = plan.num_processes // layout.shard_size
    mesh = f'init_device_mesh("cuda", ({replicas}, {layout.shard_size}), mesh_dim_names=("replicate", "shard"))'
    if replicas == 1:
        mesh = f'init_device_mesh("cuda", ({layout.shard_size},))'
    options = f"mesh=mesh, mp_policy=policy, reshard_after_forward={layout.fully_shard == 'weights'}"
    body = [
        f"    mesh = {mesh}",
        f"    policy = {POLICIES[plan.precision]}",
        *([CHECKPOINTING] if plan.activation_checkpointing else []),
        "    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]",
        "    for layer in layers:",
        *(["        layer.compile()"] if plan.torch_compile == "layer" else []),
        f"        fully_shard(layer, {options})",
        f"    fully_shard(model, {options})",
        *(["    model.compile()"] if plan.torch_compile == "model" else []),
        "    return model",
    ]
    return "\n".join([_comments(plan, job) + IMPORTS, f"LAYERS = {job.layer_classes!r}", SIGNATURE, *body, ""])


def _comments(plan: Plan, job: Job) -> str:
    arguments = ", ".join(
        f"{name}={value}" for name, value in trainer_arguments(plan).items() if name != "gradient_checkpointing"
    )
    lines = [
        f"FSDP2 for the plan {plan.label()}",
        "",
        "Call shard(model) with weights in fp32 before the optimizer is made, in a script that is started with",
        f"    {launch_words(plan, job)} SCRIPT",
        "",
        "What this module leaves to the script:",
        f"- {arguments}, sequences of {plan.sequence_length} tokens",
        f"- gradients clipped to a norm of 1: {'yes' if job.clips_gradients else 'no'}",
    ]
    return comment_lines(lines)
