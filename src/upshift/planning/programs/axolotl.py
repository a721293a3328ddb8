"""Write a plan as a configuration of Axolotl (0.19)."""

from __future__ import annotations

from typing import Any

from upshift.planning.plan import Plan
from upshift.planning.programs.job import ONLY_HERE, Job, check_expressible

ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex_attention", "flash_attention_2": "flash_attention_2"}
WORDS_HERE = ("packing", "activation_offload")  # which Axolotl has, too


def config_of(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the configuration. Raise RequestError for choices that it has no word for."""
    layout = plan.layout
    degrees = range(1, plan.num_processes + 1) if layout.gathers else (1,)
    check_expressible(
        "axolotl",
        plan,
        {
            "precision": ("bf16", "fp16", "fp32", "tf32"),
            "fully_shard": ("no", "gradients", "weights"),
            "activation_checkpointing": (job.num_layers, 0) if plan.activation_checkpointing else (0,),
            "recompute_granularity": ("full",),
            "attention": tuple(ATTENTION),
            "optim_offload": (False,),
            "torch_compile": ("off", "model"),
            "tensor_parallel": degrees,
            "sequence_parallel": (False,),
            "context_parallel": degrees,
            "context_kind": ("ring",),
            "pipeline_parallel": (1,),
            "expert_parallel": (1,),
            **{name: values for name, values in ONLY_HERE.items() if name not in WORDS_HERE},
        },
    )
    document: dict[str, Any] = {
        "base_model": job.model,
        "datasets": [{"path": job.data or "DATA", "type": "chat_template"}],
        "output_dir": "trained",
        "sequence_len": plan.sequence_length,
        "micro_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "optimizer": plan.optim,
        "learning_rate": 2e-5,
        "num_epochs": 1,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "tf32": plan.precision == "tf32",
        "attn_implementation": ATTENTION[plan.attention],
        "gradient_checkpointing": plan.activation_checkpointing > 0,
        "sample_packing": plan.packing,
    }
    document |= {"optim_args": plan.optim_args} if plan.optim_args else {}
    document |= {"activation_offloading": True} if plan.activation_offload else {}
    document |= {"torch_compile": True} if plan.torch_compile != "off" else {}
    document |= {"max_grad_norm": 1.0} if job.clips_gradients else {}
    return document | _adapter(job) | _shards(plan, job)


def _adapter(job: Job) -> dict[str, Any]:
    options = job.adapter
    if options.lora_rank is None:
        return {}
    named: dict[str, Any] = {"lora_target_modules": options.target_pattern or list(options.lora_target)}
    if options.targets_all:
        named = {"lora_target_linear": True}
    return {
        "adapter": "qlora" if options.load_in_4bit else "lora",
        "load_in_4bit": options.load_in_4bit,
        "lora_r": options.lora_rank,
        "lora_alpha": options.scale_numerator,
        "lora_dropout": options.lora_dropout,
        **named,
    }


def _shards(plan: Plan, job: Job) -> dict[str, Any]:
    layout = plan.layout
    if not layout.gathers:
        return {}
    document: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": layout.fully_shard == "weights",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ",".join(job.layer_classes),
            "state_dict_type": "FULL_STATE_DICT",
            "offload_params": False,
        },
        "dp_shard_size": layout.shard_size // layout.context_parallel,
    }
    replicas = plan.num_processes // (layout.shard_size * layout.tensor_parallel)
    degrees = {
        "dp_replicate_size": replicas,
        "tensor_parallel_size": layout.tensor_parallel,
        "context_parallel_size": layout.context_parallel,
    }
    return document | {name: degree for name, degree in degrees.items() if degree > 1}
