"""Which optimizers and precisions a plan may have, and what they are predicted to cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.errors import MissingExtra, RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Cpu, Host, Measured, Rates
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import find_model
from upshift.models.tensor_parallel_plan import keep_slice
from upshift.models.tracing.profile_model import profile_model
from upshift.planning import optimizers as named
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.planner import plan
from upshift.planning.programs.job import Job
from upshift.planning.programs.write import write_training
from upshift.planning.search import space
from upshift.planning.search.enumerate import enumerate_plans
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.space import check_allow, parse_fixed
from upshift.planning.workload import Workload

EIGHT = Rates(fp32=1.6e11, bf16=4e11, memory_bytes_per_second=2e10)
CPU = Host(
    name="two cores",
    cpu=Cpu(
        model_name="x", architecture="x86_64", physical_cores=2, usable_cores=2, numa_nodes=1, l2_total_bytes=2**21,
        l3_total_bytes=2**25, isa=("avx512_bf16",), memory_bytes=2**34, free_memory_bytes=2**34,
    ),
    measured=Measured(
        torch_version="2", transformers_version="5", num_threads=2, cpu=EIGHT, dispatch_seconds=3e-6,
        first_touch_seconds_per_byte=1e-10, base_resident_bytes=2**28, compiler=None, probe_seconds=1.0,
    ),
)  # fmt: skip
H100, A100 = describe("1xh100"), describe("1xa100-80gb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 500}
    LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=4, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def profile(folder: Path) -> ModelProfile:
    variants = tuple(Variant(name, "sdpa", False) for name in ("fp32", "bf16", "bf16-pure"))  # type: ignore[arg-type]
    return profile_model(find_model(str(folder)), sequence_length=128, variants=variants)


def a_workload(*allow: str, **changes: Any) -> Workload:
    return Workload(**{"sequence_length": 128, "global_batch": 8, "allow": check_allow(allow), **changes})


def cost(profile: ModelProfile, host: Host, **choices: Any) -> Candidate:
    plain = {
        "device": host.device, "host": "", "model": "", "sequence_length": 128, "per_device_train_batch_size": 8,
        "threads_per_process": 2,
    }  # fmt: skip
    workload = a_workload(clips_gradients=False)
    candidate = cost_plan(Plan(**(plain | choices)), host=host, profile=profile, workload=workload)
    assert isinstance(candidate, Candidate), candidate
    return candidate


def test_nothing_that_changes_the_mathematics_is_in_the_default_space(profile: ModelProfile) -> None:
    for host in (CPU, H100):
        plans = list(enumerate_plans(host, profile, a_workload()))
        assert {p.optim for p in plans} == {"adamw_torch_fused", "adamw_torch"}
        assert not any(p.changes_mathematics or p.optimizer_in_backward or p.optim_offload for p in plans)


@pytest.mark.parametrize(
    ("allow", "optim"),
    [("muon", "muon"), ("sgd", "sgd"), ("adagrad", "adagrad"), ("rmsprop", "rmsprop"), ("adafactor", "adafactor"),
     ("8bit-optimizer", "adamw_torch_8bit"), ("4bit-optimizer", "adamw_torch_4bit")],
)  # fmt: skip
def test_an_allowed_optimizer_is_in_the_space(
    allow: str, optim: str, profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "find_spec", lambda library: None if library == "bitsandbytes" else object())
    plans = list(enumerate_plans(CPU, profile, a_workload(allow)))
    assert {p.optim for p in plans} == {"adamw_torch_fused", "adamw_torch", optim}
    assert {p.changes_mathematics for p in plans} == {(), (allow,)}
    with pytest.raises(RequestError, match=f"it changes the mathematics; add --allow {allow}"):
        parse_fixed((f"optim={optim}",), CPU, profile, a_workload())


def test_wrong_requests(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    for assignment, words in (
        ("optim=lion_8bit", "optim=lion_8bit is not offered: of bitsandbytes only"),
        ("optim=adam", "use one of adamw_torch_fused, adamw_torch"),
        ("optim_args=momentum=0.9", "takes none"),
        ("precision=fp8", "it changes the mathematics; add --allow fp8"),
        ("optimizer_in_backward=true", "add --max-grad-norm 0"),
        ("optim_offload=true", "needs a CUDA device"),
        ("activation_offload=true", "needs a CUDA device"),
    ):
        with pytest.raises(RequestError, match=words):
            parse_fixed((assignment,), CPU, profile, a_workload())
    with pytest.raises(RequestError, match="bitsandbytes is for CUDA devices"):
        parse_fixed(("optim=adamw_8bit",), CPU, profile, a_workload("8bit-optimizer"))
    for module in (space, named):
        monkeypatch.setattr(module, "find_spec", lambda library: None)
    for assignment, allow, library in (
        ("optim=adamw_torch_4bit", "4bit-optimizer", "torchao"), ("optim=adamw_8bit", "8bit-optimizer", "bitsandbytes"),
        ("precision=fp8", "fp8", "torchao"),
    ):  # fmt: skip
        with pytest.raises(MissingExtra, match=f"needs {library}: run  pip install"):
            parse_fixed((assignment,), H100, profile, a_workload(allow))
    with pytest.raises(RequestError, match="use one of fp32"):
        parse_fixed(("precision=fp8",), A100, profile, a_workload("fp8"))


@pytest.mark.parametrize("works", [True, False, None])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_optimizer_that_compiles_its_update_needs_a_compiler(device: str, works: bool | None, profile: ModelProfile) -> None:
    """torchao calls torch.compile in each step, whatever the plan's torch_compile is. None: nothing is known."""
    assert CPU.measured is not None
    measured = CPU.measured.changed(compiler=works if device == "cpu" else True, gpu_compiler=works if device == "cuda" else True)
    host = (CPU if device == "cpu" else H100).changed(measured=measured)
    workload = a_workload("8bit-optimizer", "4bit-optimizer")
    planned = {candidate.optim for candidate in enumerate_plans(host, profile, workload)}
    for optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        assert (optim in planned) is (works is not False)
        if works is False:
            with pytest.raises(RequestError, match="torchao compiles its update, and no compiler works here"):
                parse_fixed((f"optim={optim}",), host, profile, workload)
        else:
            parse_fixed((f"optim={optim}",), host, profile, workload)


@pytest.mark.parametrize("padding", [None, 0, 249, 250, 499])
def test_the_slice_of_a_rank_runs_wherever_the_padding_token_is(padding: int | None, folder: Path) -> None:
    """A rank of two has 250 of 500 rows. torch refuses an embedding whose padding row is beyond its rows."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, pad_token_id=padding, num_hidden_layers=1))
    keep_slice(model, 2)
    assert model.get_input_embeddings()(torch.arange(250)).shape == (250, 128)


def test_two_names_for_one_thing_are_one_plan(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "find_spec", lambda library: object())
    workload = a_workload("8bit-optimizer", "bf16-weights")
    plans = list(enumerate_plans(H100, profile, workload))
    assert "adamw_8bit" not in {p.optim for p in plans}
    assert {p.optim for p in plans if p.precision == "bf16-weights"} == {"adamw_torch_fused", "adamw_torch_8bit"}
    fixed = parse_fixed(("optim=adamw_8bit",), H100, profile, workload)
    assert {p.optim for p in enumerate_plans(H100, profile, workload, fixed=fixed)} == {"adamw_8bit"}
    fixed = parse_fixed(("optim=adamw_torch", "precision=bf16-weights"), H100, profile, workload)
    assert len(list(enumerate_plans(H100, profile, workload, fixed=fixed))) > 0


def test_what_excludes_each_other_is_said(profile: ModelProfile) -> None:
    for assignments, workload, words in (
        (("optim=sgd", "precision=bf16-weights"), a_workload("sgd", "bf16-weights"), "loses small ones"),
        (("optimizer_in_backward=true", "gradient_accumulation_steps=2"), a_workload(clips_gradients=False), "one micro-batch"),
        (("optimizer_in_backward=true", "num_processes=2"), a_workload(clips_gradients=False), "one process"),
    ):
        fixed = parse_fixed(assignments, CPU, profile, workload)
        with pytest.raises(RequestError, match=words):
            list(enumerate_plans(CPU, profile, workload, fixed=fixed))


def test_updates_in_the_backward_pass_are_a_choice_where_nothing_is_clipped(profile: ModelProfile) -> None:
    plans = list(enumerate_plans(CPU, profile, a_workload(clips_gradients=False)))
    moved = [p for p in plans if p.optimizer_in_backward]
    assert moved and all(p.gradient_accumulation_steps == 1 and p.num_processes == 1 for p in moved)
    small: dict[str, Any] = {"per_device_train_batch_size": 1, "activation_checkpointing": 4}
    plain, saved = cost(profile, CPU, **small), cost(profile, CPU, **small, optimizer_in_backward=True)
    gradients = 4 * profile.parameters.total
    assert 0.6 * gradients < plain.memory.peak - saved.memory.peak <= gradients
    assert saved.time.terms["update"] > plain.time.terms["update"]


def test_state_and_one_time_costs(profile: ModelProfile) -> None:
    total = profile.parameters.total
    held = {
        optim: cost(profile, CPU, optim=optim, optim_args=args).memory.phases["optimizer"].parts["optimizer"]
        for optim, args in (
            ("adamw_torch_fused", ""), ("adamw_torch_8bit", ""), ("adamw_torch_4bit", ""), ("muon", ""), ("sgd", ""),
            ("adafactor", ""),
        )
    }  # fmt: skip
    assert (
        held["sgd"] == 0
        and cost(profile, CPU, optim="sgd", optim_args="momentum=0.9").memory.phases["optimizer"].parts["optimizer"] == 4 * total
    )
    for optim, share in (("adamw_torch_fused", 8), ("adamw_torch_8bit", 2), ("adamw_torch_4bit", 1)):
        assert held[optim] == pytest.approx(share * total, rel=0.2)
    assert held["adafactor"] < 0.1 * total * 4 < held["muon"] < held["adamw_torch_fused"]
    shapes = len([shape for shape in profile.parameters.trainable_shapes if shape.elements >= 4096])
    assert 5 * shapes <= cost(profile, CPU, optim="adamw_torch_8bit").time.one_time < 5 * shapes + 2
    assert cost(profile, CPU).time.one_time == 0
    ordered = ("sgd", "adamw_torch_fused", "muon", "adamw_torch_4bit")
    updates = [cost(profile, CPU, optim=optim).time.terms["update"] for optim in ordered]
    assert updates == sorted(set(updates))


def test_fp8_is_planned_where_the_chip_has_it(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "find_spec", lambda library: object())
    precisions = [
        {p.precision for p in enumerate_plans(host, profile, a_workload(*allow))}
        for host, allow in ((H100, ("fp8",)), (H100, ()), (A100, ("fp8",)), (CPU, ("fp8",)))
    ]
    assert [("fp8" in found) for found in precisions] == [True, False, False, False]
    fp8, bf16 = cost(profile, H100, precision="fp8"), cost(profile, H100, precision="bf16")
    assert fp8.plan.changes_mathematics == ("fp8",) and fp8.memory.peak == bf16.memory.peak
    layers, outside = fp8.time.terms["matrix products"], bf16.time.terms["matrix products"]
    assert 0.5 * outside < layers < outside and fp8.time.terms["memory traffic"] > bf16.time.terms["memory traffic"]


def test_offload_is_predicted_from_the_link_to_the_host_and_only_when_asked_for(profile: ModelProfile) -> None:
    workload = a_workload()
    fixed = parse_fixed(("activation_offload=true",), H100, profile, workload)
    plans = list(enumerate_plans(H100, profile, workload, fixed=fixed))
    assert plans and all(p.activation_offload for p in plans)
    plain, moved = cost(profile, H100), cost(profile, H100, activation_offload=True)
    assert moved.memory.peak < plain.memory.peak and moved.time.terms["activations to the host and back"] > 0
    unknown = H100.changed(host_to_device=None)
    with pytest.raises(RequestError, match="memory of its own, whose connection to the host is known"):
        parse_fixed(("optim_offload=true",), unknown, profile, workload)
    offloaded = Plan(
        device="cuda", host="", model="", sequence_length=128, per_device_train_batch_size=8, optim_offload=True
    )  # fmt: skip
    assert not isinstance(cost_plan(offloaded, host=H100, profile=profile, workload=workload), Candidate)  # its memory's rate
    measured = CPU.measured
    assert measured is not None
    here = H100.changed(measured=measured.changed(gpu=H100.gpu.peak, gpu_dispatch_seconds=5e-6).model_dump())  # type: ignore[union-attr]
    kept, held = cost(profile, here, optim_offload=True), cost(profile, here)
    assert kept.memory.phases["optimizer"].parts["optimizer"] == 0 and kept.time.terms["update"] > held.time.terms["update"]


def test_a_whole_plan_for_a_described_gpu(folder: Path) -> None:
    pytest.importorskip("torchao")
    fixed = ("precision=fp8", "optim=muon")
    planning = plan(str(folder), sequence_length=128, global_batch=8, on="1xh100", allow=("fp8", "muon"), fixed=fixed)
    assert planning.best.precision == "fp8" and planning.best.optim == "muon"
    assert planning.best.changes_mathematics == ("fp8", "muon")


def test_accelerate_takes_the_configuration_of_a_plan(tmp_path: Path) -> None:
    parser = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    layout = Layout(fully_shard="weights", shard_size=4, tensor_parallel=2)
    written = Plan(
        device="cuda", host="h", model="m", sequence_length=512, precision="bf16", num_processes=8, layout=layout,
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    write_training("accelerate", tmp_path / "a.yaml", written, Job(model="m", num_layers=2, layer_classes=("Layer",)))
    config = parser.load_config_from_file(str(tmp_path / "a.yaml"))
    assert config.num_processes == 8 and config.fsdp_config["fsdp_version"] == 2
    assert config.parallelism_config["parallelism_config_tp_size"] == 2
