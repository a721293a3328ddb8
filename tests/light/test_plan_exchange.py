"""Plans as configurations of other programs: what is written is what the plan says, and no choice is left out in silence."""

from __future__ import annotations

import ast
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from upshift.cli.main import app
from upshift.cli.plan.exchange import SAME_IN_TRAINING
from upshift.errors import RequestError
from upshift.planning.inference.plan import InferencePlan
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.programs import accelerate, tensorrt_llm
from upshift.planning.programs.job import Job
from upshift.planning.programs.write import TRAINERS, read_choices, read_target, write_training

LAYERS = 32
JOB = Job(model="some/model", num_layers=LAYERS, layer_classes=("DecoderLayer",))
LAYOUTS = {
    "data parallel": Layout(),
    "zero 2": Layout(fully_shard="gradients", shard_size=8),
    "zero 3": Layout(fully_shard="weights", shard_size=8),
    "hybrid": Layout(fully_shard="weights", shard_size=4),
    "tensor": Layout(fully_shard="weights", shard_size=4, tensor_parallel=2),
    "context": Layout(fully_shard="weights", shard_size=8, context_parallel=2),
}


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate(
        {
            "device": "cuda", "host": "h", "model": "m", "sequence_length": 512, "precision": "bf16", "num_processes": 8,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("compiled", ["off", "layer", "model"])
@pytest.mark.parametrize("recomputed", [0, LAYERS])
def test_accelerate_reads_back_what_was_written(name: str, compiled: str, recomputed: int, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    plan = plan_of(layout=layout, torch_compile=compiled, activation_checkpointing=recomputed)
    path = tmp_path / "accelerate.yaml"
    write_training("accelerate", path, plan, JOB)
    stated = read_choices(path)
    expected = {"precision": "bf16", "torch_compile": compiled, "num_processes": 8, "fully_shard": layout.fully_shard}
    assert {field: stated[field] for field in expected} == expected
    degrees = (stated.get("tensor_parallel", 1), stated.get("context_parallel", 1))
    assert degrees == (layout.tensor_parallel, layout.context_parallel)
    assert stated.get("shard_size", layout.shard_size) == layout.shard_size
    assert ("shard_size" in stated) == (name in ("hybrid", "tensor", "context"))
    assert (stated.get("activation_checkpointing") == 0) == (layout.gathers and not recomputed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_configuration_are_those_of_the_plan(name: str) -> None:
    config = accelerate.config_of(plan_of(layout=LAYOUTS[name]), JOB)
    sizes = {key: size for key, size in config.get("parallelism_config", {}).items() if key.endswith("_size")}
    product = 1
    for size in sizes.values():
        product *= size
    assert product == (8 if sizes else 1)


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_has_the_stage_and_the_batch(stage: int, tmp_path: Path) -> None:
    kind = ("no", "optimizer", "gradients", "weights")[stage]
    plan = plan_of(layout=Layout(fully_shard=kind, shard_size=8 if stage else 1))
    write_training("deepspeed", tmp_path / "d.json", plan, JOB)
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["zero_optimization"]["stage"] == stage and document["bf16"] == {"enabled": True}
    batches = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [document[name] for name in batches] == [2, 4, 64]


def test_axolotl_has_the_adapter(tmp_path: Path) -> None:
    job = JOB.changed(adapter=JOB.adapter.changed(lora_rank=8, load_in_4bit=True), data="chats.jsonl")
    write_training("axolotl", tmp_path / "a.yaml", plan_of(num_processes=1, packing=True), job)
    document = yaml.safe_load((tmp_path / "a.yaml").read_text())
    stated = {name: document[name] for name in ("adapter", "lora_r", "lora_alpha", "lora_target_linear", "sample_packing")}
    assert stated == {"adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "sample_packing": True}
    assert "optim_args" not in document
    momentum = plan_of(num_processes=1, optim="sgd", optim_args="momentum=0.9")
    write_training("axolotl", tmp_path / "b.yaml", momentum, job)
    assert yaml.safe_load((tmp_path / "b.yaml").read_text())["optim_args"] == "momentum=0.9"
    assert document["datasets"][0]["path"] == "chats.jsonl" and document["base_model"] == "some/model"


# What the other programs' own parsers accept, as far as it is written.
# torchtitan 0.3.0: the dataclasses of config/configs.py.
TITAN_TRAINING = (
    "local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "enable_cpu_offload", "disable_cuda_graphs", "dtype",
    "mixed_precision_param", "mixed_precision_reduce", "gc_freq", "gc_debug",
)  # fmt: skip
TITAN_PARALLELISM = (
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
    "enable_sequence_parallel", "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
    "context_parallel_degree", "context_parallel_load_balancer", "expert_parallel_degree",
)  # fmt: skip
# Megatron-Bridge 0.6.2: ConfigContainer of training/config.py, with the dataclasses of Megatron Core 0.19.2.
BRIDGE = {
    "model": {
        "seq_length", "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers",
    },
    "train": {"global_batch_size", "micro_batch_size", "train_iters"},
    "dataset": {"seq_length"},
    "ddp": {
        "use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather",
        "grad_reduce_in_fp32", "use_megatron_fsdp",
    },
    "optimizer": {"optimizer", "use_distributed_optimizer", "clip_grad"},
}  # fmt: skip
BRIDGE_PRECISIONS = ("bf16_mixed", "fp16_mixed", "bf16_with_fp8_current_scaling_mixed")
# TensorRT-LLM: tests/unittest/api_stability/references*/llm.yaml (commits 029c15cb and 000a01de), KvCacheConfig, CudaGraphConfig.
TRTLLM = {
    "dtype", "tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len",
    "enable_chunked_prefill", "kv_cache_config", "cuda_graph_config",
}  # fmt: skip
TITAN_LAYOUTS: dict[str, Any] = {
    **{name: (layout, (1, 8, 1, 1, 1, 1)) for name, layout in LAYOUTS.items() if name.startswith("zero")},
    "data parallel": (Layout(), (8, 1, 1, 1, 1, 1)),
    "hybrid": (LAYOUTS["hybrid"], (2, 4, 1, 1, 1, 1)),
    "tensor": (Layout(fully_shard="weights", shard_size=4, tensor_parallel=2, sequence_parallel=True), (1, 4, 2, 1, 1, 1)),
    "context": (LAYOUTS["context"], (1, 4, 1, 2, 1, 1)),
    "pipeline": (Layout(fully_shard="gradients", shard_size=4, pipeline_parallel=2), (1, 4, 1, 1, 2, 1)),
    "experts": (Layout(fully_shard="weights", shard_size=8, expert_parallel=8), (1, 8, 1, 1, 1, 8)),
}


def titan_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of each call in a written module."""
    arguments = {}
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            values = {word.arg: word.value for word in call.keywords if word.arg is not None}
            arguments[call.func.id] = {name: node.value for name, node in values.items() if isinstance(node, ast.Constant)}
    return arguments


@pytest.mark.parametrize("name", TITAN_LAYOUTS)
def test_torchtitan_has_the_degrees_and_the_batch(name: str, tmp_path: Path) -> None:
    layout, expected = TITAN_LAYOUTS[name]
    plan = plan_of(layout=layout, torch_compile="layer", loss_kernel="compiled", activation_checkpointing=LAYERS)
    write_training("torchtitan", tmp_path / "t.py", plan, JOB.changed(has_experts=name == "experts", data='a"""b'))
    config = titan_config(tmp_path / "t.py")
    training = config["TrainingConfig"]
    parallelism = config["ParallelismConfig"]
    assert set(training) <= set(TITAN_TRAINING) and set(parallelism) <= set(TITAN_PARALLELISM)
    kinds = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")
    degrees = [parallelism[f"{kind}_degree"] for kind in (*kinds, "expert_parallel")]
    assert tuple(degrees) == expected and prod(degrees[:5]) == 8
    micro_batches = 4 if layout.pipeline_parallel > 1 else 1
    assert training["local_batch_size"] == 2 * micro_batches and training["global_batch_size"] == plan.global_batch
    assert parallelism.get("pipeline_parallel_microbatch_size", 2) == 2
    assert config["CompileConfig"]["enable"] and "activation_checkpoint=FullAC" in (tmp_path / "t.py").read_text()


def test_megatron_bridge_has_the_layout_and_the_recomputation(tmp_path: Path) -> None:
    layout = Layout(
        fully_shard="optimizer", shard_size=2, master_weights=True, tensor_parallel=2, sequence_parallel=True,
        pipeline_parallel=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2,
    )  # fmt: skip
    plan = plan_of(layout=layout, precision="fp8", activation_checkpointing=8, fused_kernels=True, loss_kernel="fused")
    write_training("megatron-bridge", tmp_path / "m.yaml", plan, JOB)
    text = (tmp_path / "m.yaml").read_text()
    document = yaml.safe_load(text)
    assert document.pop("mixed_precision") in BRIDGE_PRECISIONS and plan.label() in text
    assert all(set(fields) <= BRIDGE[section] for section, fields in document.items())
    model = document["model"]
    sizes = ("tensor_model_parallel", "pipeline_model_parallel", "virtual_pipeline_model_parallel", "context_parallel")
    assert [model[f"{name}_size"] for name in sizes] == [2, 2, 2, 1]
    # 8 of 32 layers: 2 of each of the 4 stages.
    assert (model["recompute_method"], model["recompute_num_layers"]) == ("block", 2)
    assert document["train"]["global_batch_size"] == plan.global_batch
    assert document["ddp"]["num_distributed_optimizer_instances"] == 1
    for wrong, field in ((6, "activation_checkpointing=6"), (8, "fully_shard=weights")):
        other = layout if wrong == 6 else layout.changed(fully_shard="weights", master_weights=False)
        with pytest.raises(RequestError, match=field):
            inexpressible = plan.changed(activation_checkpointing=wrong, layout=other)
            write_training("megatron-bridge", tmp_path / "x.yaml", inexpressible, JOB)


def served(**fields: Any) -> InferencePlan:
    return InferencePlan.model_validate(
        {
            "device": "cuda", "host": "h", "model": "m", "weights": "bf16", "kv_cache": "bf16", "max_concurrency": 64,
            "prefill_chunk_tokens": 2048, "execution": "graphs", **fields,
        }
    )  # fmt: skip


def test_trtllm_has_the_limits_of_the_scheduler() -> None:
    text = tensorrt_llm.config_of(served(tensor_parallel=4, replicas=2, kv_cache="fp8"), longest=4096, is_stored=False)
    document = yaml.safe_load(text)
    assert set(document) <= TRTLLM and "Start 2, each with 4 GPUs of its own" in text
    assert document["max_num_tokens"] == 2048 + 64 and document["max_batch_size"] == 64 and document["max_seq_len"] == 4096
    assert document["kv_cache_config"] == {"dtype": "fp8"} and document["tensor_parallel_size"] == 4
    assert document["cuda_graph_config"] == {"max_batch_size": 64, "enable_padding": True}
    eager = tensorrt_llm.config_of(served(execution="eager"), longest=4096, is_stored=False)
    assert yaml.safe_load(eager)["cuda_graph_config"] is None
    with pytest.raises(RequestError, match="int4 weights"):
        tensorrt_llm.config_of(served(weights="int4"), longest=4096, is_stored=False)
    assert yaml.safe_load(tensorrt_llm.config_of(served(weights="int4"), longest=9, is_stored=True))["dtype"] == "auto"
    with pytest.raises(RequestError, match="kv int8"):
        tensorrt_llm.config_of(served(kv_cache="int8"), longest=4096, is_stored=False)


@pytest.mark.parametrize("name", ["zero 2", "zero 3", "hybrid"])
@pytest.mark.parametrize("compiled", ["off", "layer", "model"])
def test_fsdp2_divides_each_layer_and_the_model(name: str, compiled: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    plan = plan_of(layout=layout, torch_compile=compiled, activation_checkpointing=LAYERS)
    write_training("fsdp2", tmp_path / "f.py", plan, JOB)
    text = (tmp_path / "f.py").read_text()
    calls = [call for call in ast.walk(ast.parse(text)) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    shards = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "fully_shard"]
    freed = [word.value for call in shards for word in call.keywords if word.arg == "reshard_after_forward"]
    assert [isinstance(value, ast.Constant) and value.value for value in freed] == [layout.fully_shard == "weights"] * 2
    assert ("(2, 4)" in text) == (name == "hybrid") and "gradient_checkpointing_enable" in text
    assert {word: word in text for word in ("layer.compile()", "model.compile()")} == {
        "layer.compile()": compiled == "layer",
        "model.compile()": compiled == "model",
    }


@pytest.mark.parametrize("program", ["fsdp2", "torchtitan", "megatron-bridge"])
def test_programs_without_adapters_refuse_lora(program: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="LoRA; leave out --lora-rank"):
        write_training(program, tmp_path / "x", plan_of(), JOB.changed(adapter=JOB.adapter.changed(lora_rank=8)))


INEXPRESSIBLE: dict[str, Any] = {
    "loss_chunk_tokens": 512, "precision": "bf16-weights", "activation_checkpointing": 7, "optimizer_in_backward": True,
    "mup_base": "hidden_size=64", "weight_offload": "host", "fused_kernels": True,
}  # fmt: skip


# Megatron fuses in any case, and recomputes any number of the layers.
IN_MEGATRON = ("fused_kernels", "activation_checkpointing")


@pytest.mark.parametrize(
    ("program", "field"),
    [(name, field) for name in TRAINERS for field in INEXPRESSIBLE if name != "megatron-bridge" or field not in IN_MEGATRON],
)
def test_what_a_program_has_no_word_for_is_refused_by_name(program: str, field: str, tmp_path: Path) -> None:
    value = INEXPRESSIBLE[field]
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    with pytest.raises(RequestError, match=f"of {program} cannot express .*{field}={shown}.*--set {field}="):
        write_training(program, tmp_path / "x.json", plan_of(**{field: value}), JOB)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["accelerate", "deepspeed", "axolotl"])
@pytest.mark.parametrize("degree", ["pipeline_parallel", "expert_parallel"])
def test_layouts_that_a_program_lacks_are_refused(program: str, degree: str, tmp_path: Path) -> None:
    plan = plan_of(layout=Layout.model_validate({degree: 2}))
    with pytest.raises(RequestError, match=f"{degree}=2"):
        write_training(program, tmp_path / "x.json", plan, JOB)


WRONG_FILES = {
    "kind: other": "no distributed_type",
    "distributed_type: MEGATRON_LM": "MEGATRON_LM, which is not planned; use one of FSDP",
    "distributed_type: FSDP\nfp8_config: {backend: te}": "has fp8_config",
    "distributed_type: NO\nmixed_precision: fp8": "mixed_precision fp8; use one of no, bf16, fp16",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 7}": "zero_stage 7; use 0, 1, 2 or 3",
    "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}": "fsdp_offload_params",
    "a: [": "no valid|not valid",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=WRONG_FILES[text]):
        read_choices(path)
    with pytest.raises(RequestError, match="accelerate config"):
        read_choices(tmp_path / "missing.yaml")


def test_first_version_of_fsdp_names_a_strategy(tmp_path: Path) -> None:
    strategies = {"FULL_SHARD": "weights", "SHARD_GRAD_OP": "gradients", "NO_SHARD": "no"}
    for strategy, stage in strategies.items():
        path = tmp_path / f"{strategy}.yaml"
        path.write_text(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{fsdp_sharding_strategy: {strategy}}}\n")
        assert read_choices(path)["fully_shard"] == stage


def test_programs_and_files(tmp_path: Path) -> None:
    assert read_target("deepspeed", serves=False) == ("deepspeed", Path("deepspeed.json"))
    (tmp_path / "there.yaml").write_text("")
    with pytest.raises(RequestError, match="exists; give another file"):
        read_target(f"accelerate={tmp_path / 'there.yaml'}", serves=False)
    with pytest.raises(RequestError, match="there is no folder .*nowhere"):
        read_target(f"accelerate={tmp_path / 'nowhere' / 'a.yaml'}", serves=False)
    with pytest.raises(RequestError, match=r"plan.toml has another ending; give a file that ends in .py"):
        read_target("torchtitan=plan.toml", serves=False)
    for text, serves in (("vllm", False), ("axolotl", True), ("nothing", False)):
        with pytest.raises(RequestError, match="use one of"):
            read_target(text, serves=serves)


def test_the_next_command_keeps_every_option_that_training_has() -> None:
    """An option that is new in both commands, and that the line to type next would leave out, changes what is trained."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {option.name: option.opts for option in commands[name].params} for name in ("plan", "train")}
    same = {name for name, flags in options["plan"].items() if options["train"].get(name) == flags}
    assert same - {"model", "as_json"} == set(SAME_IN_TRAINING)
