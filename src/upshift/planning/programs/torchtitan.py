"""Write a plan as a configuration of torchtitan (0.3), which is a Python module with a function that returns it.

The model is one of transformers', through torchtitan's own backend for such models (experiments/transformers_modeling_backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshift.planning.plan import Plan
from upshift.planning.programs.job import ONLY_HERE, Job, check_expressible, comment_lines, launch_words, refuse_adapter

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
WEIGHTS = {"bf16": "bfloat16", "fp32": "float32"}
IMPLEMENTATIONS = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
RECOMPUTED = {"full": "FullAC.Config()", "alternate": "SelectiveAC.Config()"}
INTERLEAVED_STAGES = 2  # of a rank, in torchtitan's looped schedules
FLEX_BLOCK = 128  # tokens of a block of flex attention's mask
IMPORTS = """\
import dataclasses

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments.transformers_modeling_backend import (
    HFTransformerModel,
    TitanModelConfig,
    TitanMoeModelConfig,
    model_registry,
)
from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
"""


def config_of(plan: Plan, job: Job) -> str:
    """Return the module's text. Raise RequestError for choices that torchtitan's backend for transformers has no word for."""
    refuse_adapter("torchtitan", job)
    _check(plan, job)
    model = "TitanMoeModelConfig" if job.has_experts else "TitanModelConfig"
    implementation = IMPLEMENTATIONS[plan.optim]
    checkpoints = RECOMPUTED[plan.recompute_granularity] if plan.activation_checkpointing else "None"
    body = f"""
HF_MODEL = {job.model!r}
HF_ASSETS = {job.model!r}  # a folder with its weights and its tokenizer


def planned() -> TransformersBackendConfig:
    model = HFTransformerModel.Config(model_config={model}())
    return TransformersBackendConfig(
        hf_model=HF_MODEL,
        hf_assets_path=HF_ASSETS,
        model_spec=dataclasses.replace(model_registry("full"), model=model),
        loss=CrossEntropyLoss.Config(),
        optimizer=dataclasses.replace(default_adamw(lr=2e-5), implementation={implementation!r}),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(enable=True, initial_load_in_hf=True),
        training={_call("TrainingConfig", _training(plan, job))},
        parallelism={_call("ParallelismConfig", _parallelism(plan))},
        activation_checkpoint={checkpoints},
        compile={_call("CompileConfig", {"enable": plan.torch_compile == "layer", "components": ["model", "loss"]})},
    )
"""
    return f"{_comments(plan, job)}\n{IMPORTS}{body}"


def _check(plan: Plan, job: Job) -> None:
    layout = plan.layout
    degrees = range(1, plan.num_processes + 1)
    # Ranks of expert parallelism are those that divide weights, sequences and matrices.
    borrowed = _shards(plan) * layout.context_parallel * layout.tensor_parallel
    check_expressible(
        "torchtitan",
        plan,
        {
            "device": ("cuda",),
            "precision": tuple(WEIGHTS),
            "fully_shard": ("weights", "gradients") if layout.context_parallel > 1 else ("weights", "gradients", "no"),
            "activation_checkpointing": (job.num_layers, 0) if plan.activation_checkpointing else (0,),
            "recompute_granularity": tuple(RECOMPUTED),
            "torch_compile": ("off", "layer"),
            "optim": tuple(IMPLEMENTATIONS),
            "optim_args": ("",),
            "optim_offload": (False,),
            # The loss is compiled with the layers.
            "loss_kernel": ("eager",) if plan.torch_compile == "off" else ("compiled", "eager"),
            "sequence_parallel": (True,) if layout.tensor_parallel > 1 else (False, True),
            "context_kind": ("ring",),
            "shard_size": [size for size in degrees if size % layout.context_parallel == 0 or not layout.gathers],
            "expert_parallel": [degree for degree in degrees if borrowed % degree == 0],
            "pipeline_schedule": ("1f1b", "gpipe", "interleaved_1f1b"),
            "virtual_stages": (1, INTERLEAVED_STAGES),
            "overlap": (True,),
            **{name: values for name, values in ONLY_HERE.items() if name not in ("loss_kernel", "vocabulary_parallel")},
        },
    )


def _training(plan: Plan, job: Job) -> Mapping[str, Any]:
    # A pipeline cuts the batch of a step into micro-batches itself.
    parts = plan.gradient_accumulation_steps if plan.layout.pipeline_parallel > 1 else 1
    return {
        "local_batch_size": plan.per_device_train_batch_size * parts,
        "global_batch_size": plan.global_batch,
        "seq_len": plan.sequence_length,
        "max_norm": 1.0 if job.clips_gradients else float("inf"),
        "steps": job.steps,
        "mixed_precision_param": WEIGHTS[plan.precision],
        "disable_cuda_graphs": True,
    }


def _parallelism(plan: Plan) -> Mapping[str, Any]:
    layout = plan.layout
    shards = _shards(plan)
    # Only whole blocks of the mask can be dealt out so that each rank has equal work.
    deals = plan.sequence_length % (FLEX_BLOCK * layout.context_parallel) == 0
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.data_parallel // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if layout.fully_shard == "weights" else "never",
        "tensor_parallel_degree": layout.tensor_parallel,
        "context_parallel_degree": layout.context_parallel,
        "context_parallel_load_balancer": "ptrr" if deals else None,
        "pipeline_parallel_degree": layout.pipeline_parallel,
        "expert_parallel_degree": layout.expert_parallel,
    }
    if layout.pipeline_parallel > 1:
        fields["pipeline_parallel_schedule"] = SCHEDULES[layout.pipeline_schedule]
        fields["pipeline_parallel_microbatch_size"] = plan.per_device_train_batch_size
    return fields


def _shards(plan: Plan) -> int:
    """Return the number of ranks that divide the weights and have their own sequences."""
    return max(plan.layout.shard_size // plan.layout.context_parallel, 1) if plan.layout.gathers else 1


def _comments(plan: Plan, job: Job) -> str:
    notes = [
        "data set, learning rate and its schedule: they are examples",
        f"attention: this backend runs flex attention (planned: {plan.attention})",
        "CUDA graphs: they are off, as the plan does not count them",
    ]
    if plan.layout.pipeline_parallel > 1:
        notes.append("the layers of each pipeline stage: torchtitan divides them by itself")
    if plan.layout.context_parallel > 1:
        notes.append("context parallelism: this backend gathers the keys (planned: they go round in a ring)")
    if job.data is not None:
        notes.append(f"the texts in {job.data!r}: give torchtitan a data loader for them")
    lines = [
        f"A configuration of torchtitan 0.3 for the plan {plan.label()}",
        "",
        "Run it from this folder, with the stem of this file's name as the module:",
        f"    {launch_words(plan, job)} -m torchtitan.train --module torchtitan_config --config planned",
        "",
        "What the plan does not decide, or what torchtitan does in another way:",
        *(f"- {note}" for note in notes),
    ]
    return comment_lines(lines)


def _call(name: str, fields: Mapping[str, Any]) -> str:
    """Return the text of a call with keyword arguments, one a line."""
    lines = [f"            {field}={_literal(value)}," for field, value in fields.items()]
    return "\n".join([f"{name}(", *lines, "        )"])


def _literal(value: Any) -> str:
    return 'float("inf")' if value == float("inf") else repr(value)
