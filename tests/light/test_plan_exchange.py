"""Plans as configurations of other programs: what is written is what the plan says, and no choice is left out in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from upshift.cli.main import app
from upshift.cli.plan.exchange import SAME_IN_TRAINING
from upshift.errors import RequestError
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.programs import accelerate
from upshift.planning.programs.job import Job
from upshift.planning.programs.write import read_choices, read_target, write_training

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
    assert document["datasets"][0]["path"] == "chats.jsonl" and document["base_model"] == "some/model"


INEXPRESSIBLE: dict[str, Any] = {
    "loss_chunk_tokens": 512, "precision": "bf16-weights", "activation_checkpointing": 7, "optimizer_in_backward": True,
    "mup_base": "hidden_size=64", "weight_offload": "host", "fused_kernels": True,
}  # fmt: skip


@pytest.mark.parametrize("program", ["accelerate", "deepspeed", "axolotl"])
@pytest.mark.parametrize("field", INEXPRESSIBLE)
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
    for text, serves in (("vllm", False), ("axolotl", True), ("nothing", False)):
        with pytest.raises(RequestError, match="use one of"):
            read_target(text, serves=serves)


def test_the_next_command_keeps_every_option_that_training_has() -> None:
    """An option that is new in both commands, and that the line to type next would leave out, changes what is trained."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {option.name: option.opts for option in commands[name].params} for name in ("plan", "train")}
    same = {name for name, flags in options["plan"].items() if options["train"].get(name) == flags}
    assert same - {"model", "as_json"} == set(SAME_IN_TRAINING)
