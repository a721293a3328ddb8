"""Write a plan as a YAML file of overrides for a recipe of Megatron-Bridge (0.6).

The sections are those of ``megatron.bridge.training.config.ConfigContainer``. ``process_config_with_overrides`` of
``megatron.bridge.training.utils.omegaconf_utils`` merges the file into a recipe.
"""

from __future__ import annotations

from typing import Any

from upshift.planning.plan import Plan
from upshift.planning.programs.job import ONLY_HERE, Job, check_expressible, launch_words, refuse_adapter, yaml_text

# Recipes of megatron.bridge.training.mixed_precision. Current scaling: one scale for each tensor, found at each product.
PRECISIONS = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_current_scaling_mixed"}
CONTEXT_KINDS = {"ring": "p2p", "ulysses": "a2a"}
# Megatron does this in any case, whether the plan has it or not.
ALWAYS = ("fused_kernels", "loss_kernel", "gather_again", "vocabulary_parallel", "master_weights")


def config_of(plan: Plan, job: Job) -> str:
    """Return the file's text. Raise RequestError for choices that Megatron has no word for."""
    refuse_adapter("megatron-bridge", job)
    _check(plan, job)
    layout = plan.layout
    document: dict[str, Any] = {
        "model": _model(plan, job),
        "train": {
            "global_batch_size": plan.global_batch,
            "micro_batch_size": plan.per_device_train_batch_size,
            "train_iters": job.steps,
        },
        "dataset": {"seq_length": plan.sequence_length},
        "ddp": {
            "use_distributed_optimizer": True,
            "num_distributed_optimizer_instances": _instances(plan),
            "overlap_grad_reduce": layout.overlap,
            "overlap_param_gather": layout.overlap,
            "grad_reduce_in_fp32": True,
            "use_megatron_fsdp": False,
        },
        "optimizer": {
            "optimizer": "adam",
            "use_distributed_optimizer": True,
            "clip_grad": 1.0 if job.clips_gradients else 0.0,
        },
        "mixed_precision": PRECISIONS[plan.precision],
    }
    return yaml_text(_comments(plan, job), document)


def _model(plan: Plan, job: Job) -> dict[str, Any]:
    layout = plan.layout
    is_pipelined = layout.pipeline_parallel > 1
    fields: dict[str, Any] = {
        "seq_length": plan.sequence_length,
        "tensor_model_parallel_size": layout.tensor_parallel,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": layout.virtual_stages if layout.virtual_stages > 1 else None,
        "context_parallel_size": layout.context_parallel,
        "cp_comm_type": CONTEXT_KINDS[layout.context_kind] if layout.context_parallel > 1 else None,
        "expert_model_parallel_size": layout.expert_parallel,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    if job.has_experts:
        fields["expert_tensor_parallel_size"] = 1
    if plan.activation_checkpointing:
        stages = layout.pipeline_parallel * (layout.virtual_stages if is_pipelined else 1)
        fields["recompute_granularity"] = "full"
        fields["recompute_method"] = "block"
        fields["recompute_num_layers"] = plan.activation_checkpointing // stages
    return fields


def _check(plan: Plan, job: Job) -> None:
    layout = plan.layout
    stages = layout.pipeline_parallel * layout.virtual_stages
    counts = [count for count in range(job.num_layers, -1, -1) if count % stages == 0]
    data_ranks = plan.data_parallel * layout.context_parallel
    check_expressible(
        "megatron-bridge",
        plan,
        {
            "device": ("cuda",),
            "precision": tuple(PRECISIONS),
            "fully_shard": ("optimizer",) if data_ranks > 1 else ("optimizer", "no"),
            "shard_size": [size for size in range(data_ranks, 0, -1) if data_ranks % size == 0],
            "master_weights": (True,),
            "activation_checkpointing": counts if plan.activation_checkpointing else (0,),
            "recompute_granularity": ("full",),
            "attention": ("sdpa", "flash_attention_2", "flash_attention_3"),
            "torch_compile": ("off",),
            "optim": ("adamw_torch_fused",),
            "optim_args": ("",),
            "optim_offload": (False,),
            "pipeline_parallel": [degree for degree in range(1, plan.num_processes + 1) if job.num_layers % degree == 0],
            "pipeline_schedule": ("1f1b", "interleaved_1f1b") if layout.pipeline_parallel > 1 else (layout.pipeline_schedule,),
            **{name: values for name, values in ONLY_HERE.items() if name not in ALWAYS},
        },
    )


def _instances(plan: Plan) -> int:
    """Return the number of groups of ranks that each have the whole state of the optimizer."""
    return plan.data_parallel * plan.layout.context_parallel // plan.layout.shard_size


def _comments(plan: Plan, job: Job) -> list[str]:
    notes = [
        "the model, its checkpoint, the data set, the learning rate and its schedule: they are those of the recipe",
        "Megatron fuses norms, rotary embedding, gated activations and the loss in any case",
        f"attention: Transformer Engine takes its own kernel (planned: {plan.attention})",
    ]
    if job.data is not None:
        notes.append(f"the texts in {job.data!r}: give the recipe a data set of them")
    return [
        f"Overrides for a recipe of Megatron-Bridge 0.6, for the plan {plan.label()}",
        "",
        "In a script, with a recipe of megatron.bridge.recipes for this model:",
        "    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides",
        '    config = process_config_with_overrides(recipe(), config_filepath="megatron_bridge.yaml")',
        f"For another model of Hugging Face: config.model = AutoBridge.from_hf_pretrained({job.model!r}).to_megatron_provider()",
        f"Run the script: {launch_words(plan, job)} SCRIPT",
        "",
        "What the plan does not decide, or what Megatron does in another way:",
        *(f"- {note}" for note in notes),
    ]
