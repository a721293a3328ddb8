"""Write a plan as a configuration of DeepSpeed (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

from typing import Any

from upshift.planning.plan import Plan
from upshift.planning.programs.job import ONLY_HERE, Job, check_expressible

STAGES = {"no": 0, "optimizer": 1, "gradients": 2, "weights": 3}


def config_of(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the configuration. Raise RequestError for choices that it has no word for."""
    layout = plan.layout
    is_divided = layout.fully_shard != "no"
    check_expressible(
        "deepspeed",
        plan,
        {
            "precision": ("bf16", "fp16", "fp32"),
            "activation_checkpointing": (job.num_layers, 0) if plan.activation_checkpointing else (0,),
            "recompute_granularity": ("full",),
            "attention": ("sdpa", "eager"),
            "torch_compile": ("off",),
            "shard_size": (plan.num_processes,) if is_divided else (1,),
            "optim_offload": (False, is_divided),
            "tensor_parallel": (1,),
            "context_parallel": (1,),
            "pipeline_parallel": (1,),
            "expert_parallel": (1,),
            **ONLY_HERE,
        },
    )
    zero: dict[str, Any] = {"stage": STAGES[layout.fully_shard], "overlap_comm": layout.overlap}
    if plan.optim_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "train_batch_size": plan.global_batch,
        "zero_optimization": zero,
    }
    if plan.precision != "fp32":
        document[plan.precision] = {"enabled": True}
    if job.clips_gradients:
        document["gradient_clipping"] = 1.0
    return document
