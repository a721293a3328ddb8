"""Write a plan as a configuration of Hugging Face Accelerate (1.15) with FSDP2, and read the choices that one states.

The keys are those of ``accelerate.commands.config.config_args.ClusterConfig`` and of the options of ``accelerate launch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.planning.programs.job import ONLY_HERE, Job, check_expressible

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
SHARD = "parallelism_config_"
ZERO_STAGES = {0: "no", 1: "optimizer", 2: "gradients", 3: "weights"}
# Keys that change nothing of what a plan chooses.
WITHOUT_EFFECT = (
    "compute_environment",
    "debug",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "use_cpu",
    "enable_cpu_affinity",
    "gpu_ids",
    "num_machines",
    "num_processes",
)


def config_of(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the configuration. Raise RequestError for choices that it has no word for."""
    layout = plan.layout
    is_sharded = layout.gathers
    degrees = range(1, plan.num_processes + 1) if is_sharded else (1,)
    check_expressible(
        "accelerate",
        plan,
        {
            "precision": tuple(PRECISIONS),
            "fully_shard": ("no", "gradients", "weights"),
            "activation_checkpointing": (job.num_layers, 0) if plan.activation_checkpointing else (0,),
            "recompute_granularity": ("full",),
            "attention": ("sdpa", "eager"),
            "optim_offload": (False,),
            "tensor_parallel": degrees,
            "sequence_parallel": (False,),
            "context_parallel": degrees,
            "context_kind": ("ring",),
            "pipeline_parallel": (1,),
            "expert_parallel": (1,),
            **ONLY_HERE,
        },
    )
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU" if plan.num_processes > 1 else "NO",
        "mixed_precision": PRECISIONS[plan.precision],
        "num_machines": job.num_nodes,
        "num_processes": plan.num_processes,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": plan.device == "cpu",
    }
    if plan.torch_compile != "off":
        document["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": plan.torch_compile == "layer",
        }
    if is_sharded:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.fully_shard == "weights",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(job.layer_classes),
            "fsdp_activation_checkpointing": plan.activation_checkpointing > 0,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        replicas = plan.num_processes // (layout.shard_size * layout.tensor_parallel)
        sizes = {"dp_replicate_size": replicas, "tp_size": layout.tensor_parallel, "cp_size": layout.context_parallel}
        if any(size > 1 for size in sizes.values()):
            sizes["dp_shard_size"] = layout.shard_size // layout.context_parallel
            document["parallelism_config"] = {SHARD + name: size for name, size in sizes.items()}
    return document


def read(document: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the plan's fields that a configuration states. Raise RequestError for what Upshift does not plan.

    ``origin``: the name of the file, for messages.
    """
    kind = _word(document.get("distributed_type"))
    plain = dict.fromkeys(("NO", "MULTI_GPU", "MULTI_CPU"), _read_plain)
    readers = {"FSDP": _read_fsdp, "DEEPSPEED": _read_deepspeed, **plain}
    if kind not in readers:
        raise RequestError(f"{origin} has distributed_type {kind}, which is not planned; use one of {', '.join(readers)}")
    known = {*WITHOUT_EFFECT, "distributed_type", "mixed_precision", "dynamo_config", "dynamo_backend", "downcast_bf16"}
    sections = {"fsdp_config", "deepspeed_config", "parallelism_config"}
    for key, value in document.items():
        if key not in known | sections and value not in (None, {}, False, "no", "NO", [], ""):
            raise RequestError(f"{origin} has {key}: {value}, which is not planned; take it out to plan the rest")
    fields: dict[str, Any] = {"precision": _read_precision(document, origin), "torch_compile": _read_compile(document)}
    if isinstance(document.get("num_processes"), int) and document["num_processes"] > 0:
        fields["num_processes"] = document["num_processes"]
    return fields | readers[kind](document, origin)


def _read_precision(document: Mapping[str, Any], origin: str) -> str:
    deepspeed = document.get("deepspeed_config") or {}
    named = _word(document.get("mixed_precision") or deepspeed.get("mixed_precision")).lower()
    precision = {name: precision for precision, name in PRECISIONS.items()}.get(named)
    if precision is None:
        raise RequestError(f"{origin} has mixed_precision {named}; use one of {', '.join(PRECISIONS.values())}")
    return precision


def _read_compile(document: Mapping[str, Any]) -> str:
    dynamo = document.get("dynamo_config") or {}
    backend = _word(dynamo.get("dynamo_backend", document.get("dynamo_backend")))
    if backend == "NO":
        return "off"
    return "layer" if _is_on(dynamo.get("dynamo_use_regional_compilation")) else "model"


def _read_plain(document: Mapping[str, Any], origin: str) -> dict[str, Any]:
    return {} if document.get("num_processes", 1) == 1 else {"fully_shard": "no"}


def _read_fsdp(document: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields of FSDP 1 and 2. Its first version names a sharding strategy, by name or by torch's number."""
    config = document.get("fsdp_config") or {}
    if _is_on(config.get("fsdp_offload_params")):
        raise RequestError(f"{origin} has fsdp_offload_params, and Upshift plans no weights of FSDP in host memory; turn it off")
    fields: dict[str, Any] = {}
    reshard = config.get("fsdp_reshard_after_forward", True)
    strategy = str(reshard if isinstance(reshard, str) else config.get("fsdp_sharding_strategy", "")).upper()
    strategies = {
        "FULL_SHARD": "weights",
        "1": "weights",
        "SHARD_GRAD_OP": "gradients",
        "2": "gradients",
        "NO_SHARD": "no",
        "3": "no",
        "HYBRID_SHARD": "weights",
        "4": "weights",
        "HYBRID_SHARD_ZERO2": "gradients",
        "5": "gradients",
    }
    fields["fully_shard"] = strategies.get(strategy, "weights" if _is_on(reshard) else "gradients")
    if not _is_on(config.get("fsdp_activation_checkpointing")):
        fields["activation_checkpointing"] = 0
    parallel = {name.removeprefix(SHARD): size for name, size in (document.get("parallelism_config") or {}).items()}
    for name, field in (("tp_size", "tensor_parallel"), ("cp_size", "context_parallel")):
        if int(parallel.get(name, 1)) > 1:
            fields[field] = int(parallel[name])
    if int(parallel.get("dp_shard_size", 1)) > 1:
        fields["shard_size"] = int(parallel["dp_shard_size"]) * int(parallel.get("cp_size", 1))
    return fields


def _read_deepspeed(document: Mapping[str, Any], origin: str) -> dict[str, Any]:
    config = document.get("deepspeed_config") or {}
    if config.get("deepspeed_config_file"):
        raise RequestError(
            f"{origin} names {config['deepspeed_config_file']}; give its zero_stage and batches in the file itself"
        )
    if str(config.get("offload_param_device", "none")) != "none":
        raise RequestError(f"{origin} has offload_param_device, and Upshift plans no weights of ZeRO on the host; leave it out")
    stage = int(config.get("zero_stage", 2))
    if stage not in ZERO_STAGES:
        raise RequestError(f"{origin} has zero_stage {stage}; use 0, 1, 2 or 3")
    fields: dict[str, Any] = {"fully_shard": ZERO_STAGES[stage]}
    if str(config.get("offload_optimizer_device", "none")) == "cpu":
        fields["optim_offload"] = True
    if isinstance(config.get("gradient_accumulation_steps"), int):
        fields["gradient_accumulation_steps"] = config["gradient_accumulation_steps"]
    return fields


def _word(value: Any) -> str:
    """Return a name in capitals. YAML reads NO without quotes as false."""
    return str(value).upper() if value else "NO"


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")
