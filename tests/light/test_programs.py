"""Plans for another program have what it has and nothing else, and the user hears of every choice that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_profile import LAYERS, make_profile

from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.planning.analysis.compare_hosts import factor_notes
from upshift.planning.cost.optimizer import workspace_bytes
from upshift.planning.cost.uncertainty import step_interval
from upshift.planning.inference.plan import PROGRAMS as ENGINES
from upshift.planning.inference.plan import InferenceWorkload
from upshift.planning.inference.space import legal_values
from upshift.planning.plan import Plan
from upshift.planning.program import PROGRAM_NAMES, ProgramName
from upshift.planning.search.ranking import Candidate
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.workload import Workload

LENGTH = 4096
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
    "num_hidden_layers": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip


def plans_of(program: ProgramName, *, on: str = "8xh100", **fixed: Any) -> list[Candidate]:
    host, profile = describe(on), make_profile(longest=LENGTH)
    workload = Workload(sequence_length=LENGTH, global_batch=16, program=program)
    texts = tuple(f"{name}={value}" for name, value in fixed.items())
    return search(host, profile, workload, fixed=parse_fixed(texts, host, profile, workload)).candidates


@pytest.mark.parametrize("program", ["transformers", "axolotl", "llama-factory"])
def test_trainers_of_transformers_divide_weights_and_nothing_else(program: ProgramName) -> None:
    plans = [candidate.plan for candidate in plans_of(program)]
    assert {plan.layout.ranks_per_replica * plan.layout.expert_parallel for plan in plans} == {1}
    assert {plan.layout.fully_shard for plan in plans} == {"no", "optimizer", "gradients", "weights"}
    assert {plan.activation_checkpointing for plan in plans} <= {0, LAYERS} and not any(plan.loss_chunk_tokens for plan in plans)
    assert {plan.torch_compile for plan in plans} == {"off", "model"} | ({"layer"} if program != "axolotl" else set())


def test_torchtitan_compiles_its_loss_with_its_layers() -> None:
    plans = [candidate.plan for candidate in plans_of("torchtitan")]
    assert {(plan.torch_compile, plan.loss_kernel) for plan in plans} == {("off", "eager"), ("layer", "compiled")}
    assert not any(plan.layout.fully_shard == "optimizer" for plan in plans)
    tensor = [plan.layout for plan in plans if plan.layout.tensor_parallel > 1]
    assert tensor and all(layout.vocabulary_parallel and layout.sequence_parallel for layout in tensor)
    replicated = [plan.layout.ranks_per_replica for plan in plans if plan.layout.fully_shard == "no"]
    assert set(replicated) <= {1, 8}  # plain replicas have no other parallelism


@pytest.mark.parametrize("on", ["8xh100", "h100"])
def test_megatron_has_fused_kernels_and_master_weights_on_any_number_of_gpus(on: str) -> None:
    plans = [candidate.plan for candidate in plans_of("megatron", on=on)]
    assert plans and all(plan.fused_kernels and plan.loss_kernel == "fused" and plan.torch_compile == "off" for plan in plans)
    assert all(plan.layout.master_weights and plan.layout.fully_shard == "optimizer" for plan in plans)
    assert {plan.precision for plan in plans} == {"bf16"}


def test_our_own_plans_have_no_choice_of_another_program() -> None:
    plans = [candidate.plan for candidate in plans_of("upshift")]
    assert not any(plan.fused_kernels or plan.layout.master_weights or plan.rounding == "nearest" for plan in plans)
    assert {plan.loss_kernel for plan in plans} == {"eager"}


def test_attention_is_the_kernel_that_the_program_runs() -> None:
    """torchtitan runs FlashAttention 2 on an H100, and Upshift cuDNN's kernel: 0.32 and 0.52 of the peak."""
    plain = {"torch_compile": "off", "loss_chunk_tokens": 0, "fully_shard": "weights", "per_device_train_batch_size": 2}
    seconds = {}
    for program in ("upshift", "torchtitan"):
        candidates = plans_of(program, **plain, tensor_parallel=1, context_parallel=1, pipeline_parallel=1, shard_size=8)
        chosen = next(one for one in candidates if not one.plan.activation_checkpointing and one.plan.precision == "bf16")
        seconds[program] = chosen.time.terms["attention"]
    assert seconds["torchtitan"] == pytest.approx(seconds["upshift"] * 0.52 / 0.32)


def test_bf16_weights_that_are_rounded_to_nearest_need_a_copy_of_all_for_adamw_torch() -> None:
    profile = make_profile()
    plan = Plan(
        device="cuda", host="h", model="m", sequence_length=LENGTH, per_device_train_batch_size=1, precision="bf16-weights",
        optim="adamw_torch",
    )  # fmt: skip
    nearest = workspace_bytes(profile, plan.changed(rounding="nearest"))
    assert nearest == 2.0 * profile.parameters.trainable > workspace_bytes(profile, plan)


WRONG = (
    ("--program megatro", "'megatro' is no program that trains; did you mean megatron.; use one of upshift, transformers"),
    ("--program vllm", "'vllm' is no program that trains"),
    ("--program megatron --set fused_kernels=false", "fused_kernels=false is not possible with Megatron .*; use true"),
    ("--program transformers --set tensor_parallel=2", "tensor_parallel=2 is not possible with transformers' Trainer; use 1"),
    ("--program torchtitan --lora-rank 8", "torchtitan is not planned with an adapter; use one of upshift, transformers"),
    ("--program megatron --on 8xv100-32gb", "has precision bf16 or fp8, and here it can be fp32 or fp16"),
    ("--program megatron --on epyc-9654-768gb", "is planned for GPUs, and epyc-9654-768gb has none"),
    ("--generate --program megatron", "'megatron' is no program that serves; use one of upshift, vllm"),
    ("--generate --program llama.cpp --set tensor_parallel=2", "tensor_parallel=2 is not .*; use one of 1 .of --program"),
    ("--generate --program vllm --set kv_cache=int8", "kv_cache=int8 is not possible here.*of --program vllm"),
    ("--encode --program vllm", "--encode does not use --program"),
)


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_a_program_lacks_is_said_at_once(words: str, message: str, tmp_path: Path) -> None:
    arguments = words.split() if "--on" in words else [*words.split(), "--on", "8xh100"]
    with pytest.raises(RequestError, match=message):
        run(tmp_path, *arguments)


def run(folder: Path, *arguments: str) -> None:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    app(["plan", str(folder), "--quick", *arguments], standalone_mode=False)


def test_the_output_names_the_program_and_no_command_that_trains_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--on", "8xh100", "--program", "axolotl")
    said = capsys.readouterr().out
    assert "Predicted for Axolotl (--program axolotl)" in said and "--write axolotl" in said and "upshift train" not in said
    run(tmp_path, "--on", "8xh100", "--program", "megatron", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["program"] == "megatron" and document["plans"][0]["plan"]["fused_kernels"]
    assert document["plans"][0]["predicted"]["interval"] == pytest.approx([0.67 * 0.9, 1.54 * 1.1])


def test_intervals_are_wider_on_gpus_that_nobody_measured() -> None:
    for program in PROGRAM_NAMES:
        (low, high), (lower, higher) = (step_interval(program, describe(on)) for on in ("h100", "rtx-4090"))
        assert lower < low < 1.0 < high < higher


def test_the_interval_is_wider_where_only_the_hosts_pcie_tells() -> None:
    cards, workstations = describe("2xrtx-4090"), describe("2xrtx-a6000")
    alone, together = (step_interval("upshift", cards, exchanges=exchanges) for exchanges in (False, True))
    assert together == (alone[0], 2.8) and alone[1] < 2.8
    assert step_interval("upshift", workstations, exchanges=True) == alone
    assert step_interval("upshift", describe("8xh100"), exchanges=True) == step_interval("upshift", describe("8xh100"))


def test_a_comparison_says_that_the_factors_are_of_different_programs() -> None:
    assert factor_notes((describe("8xh100"), describe("8xa100-80gb"))) == ()
    (note,) = factor_notes((describe("8xh100"), describe("8xb200"), describe("rtx-4090")))
    assert "for 8xh100, from runs of LLM Foundry; for 8xb200, from runs of Megatron" in note
    assert note.endswith("for rtx-4090, the mean of other GPUs")


@pytest.mark.parametrize("program", [name for name in ENGINES if name != "upshift"])
def test_engines_have_only_their_own_choices(program: Any) -> None:
    host, profile = describe("8xh100"), make_profile()
    allow = ("fp8-weights", "int8-weights", "int4-weights", "fp8-kv", "int8-kv")
    workload = InferenceWorkload(prompt_length=8, output_length=8, allow=allow)
    everything = legal_values(host, profile, workload)
    left = legal_values(host, profile, workload.changed(program=program))
    lacking = {name: sorted(set(everything[name]) - set(left[name])) for name in left if left[name] != everything[name]}
    assert (
        lacking
        == {
            "vllm": {"kv_cache": ["int8"]},
            "tensorrt-llm": {"execution": ["eager"]},
            "llama.cpp": {"weights": ["fp8"], "kv_cache": ["fp8"], "tensor_parallel": [2, 4, 8]},
            "mlc": {"weights": ["int8"], "kv_cache": ["fp8", "int8"], "execution": ["eager"]},
        }[program]
    )
