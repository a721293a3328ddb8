"""What only a CUDA GPU can show: steps against the CPU's, memory against the allocator, offloads, kernels, checkpoints.

Each test is skipped, with its reason, where there is no GPU.
"""

from __future__ import annotations

import copy
import json
import os
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, TrainingArguments

import upshift
from upshift.benchmarking.meters import allocated_peak
from upshift.hardware import detect
from upshift.models.adapter import base_of
from upshift.models.live_model import source_of
from upshift.models.profile import Variant
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.cost.memory import predict_memory
from upshift.planning.cost.process_memory import library_bytes
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.training.arguments import Arguments
from upshift.training.checkpoint.rng import capture_rng, read_rng, restore_rng, seed_rng, write_rngs
from upshift.training.distributed.mesh import Mesh
from upshift.training.optimizers.build import build_optimizer
from upshift.training.prepare import autocast, chunked_loss, convert_to_fp8, no_cache, offload_activations, prepare_model

TINY = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=512,
)  # fmt: skip
IS_PRETENDED = "PRETENDED_GPUS" in os.environ
# 50 million parameters, 16 of them in embedding and head. A CPU computes what a pretended GPU does: it gets a seventh of them.
WIDTH = 192 if IS_PRETENDED else 512
SMALL = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=31 * WIDTH, max_position_embeddings=512,
)  # fmt: skip
LEARNING_RATE, STEPS = 1e-3, 4
ROWS = 2 if IS_PRETENDED else 8  # of SMALL, whose memory is predicted


def llama(config: LlamaConfig = TINY) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(config)).train()


def plan_of(**fields: Any) -> Plan:
    given = {"device": "cuda", "host": "", "model": "", "sequence_length": 128, "per_device_train_batch_size": 4}
    return Plan.model_validate(given | fields)


def batch_of(rows: int, length: int, vocabulary: int, device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}


def losses(plan: Plan, *, model: nn.Module | None = None, steps: int = STEPS) -> list[float]:
    """A plain loop on one batch, as the plan says."""
    model = prepare_model(model if model is not None else llama(), plan, Mesh(plan))
    optimizer = build_optimizer(model, plan, Arguments(max_steps=100, learning_rate=LEARNING_RATE))
    scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "fp16")
    inputs = batch_of(plan.per_device_train_batch_size, plan.sequence_length, TINY.vocab_size, plan.device)
    found = []
    for _ in range(steps):
        hooks = offload_activations(model) if plan.activation_offload else nullcontext()
        with chunked_loss(model, plan), autocast(plan), hooks, no_cache(model):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def on_cpu() -> list[float]:
    return losses(plan_of(device="cpu"))


def multiply_once() -> None:
    """Make cuBLAS take its workspaces, which no tensor holds: one thread multiplies forwards, another one backwards."""
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


@pytest.mark.skipif(IS_PRETENDED, reason="a CPU multiplies for a pretended GPU, without cuBLAS")
def test_cublas_takes_what_is_predicted() -> None:
    multiply_once()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    predicted = library_bytes(plan_of(), detect())
    assert before - torch.cuda.memory_allocated() == pytest.approx(predicted, rel=0.02)


TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 1e-2}


@pytest.mark.parametrize("precision", TOLERANCES)
def test_steps_are_those_of_the_cpu_in_fp32(precision: str, on_cpu: list[float]) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("bf16 needs compute capability 8.0")
    medium = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        found = losses(plan_of(precision=precision))
    finally:
        torch.set_float32_matmul_precision(medium)
    assert found == pytest.approx(on_cpu, rel=TOLERANCES[precision])
    assert found[-1] < found[0]


@pytest.mark.parametrize("recomputed", [0, 10])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_peak_is_within_four_percent(precision: str, recomputed: int, tmp_path: Path) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("bf16 needs compute capability 8.0")
    model = llama(SMALL)
    profile = profile_model(source_of(model), sequence_length=256, variants=(Variant(precision, "sdpa", False),))  # type: ignore[arg-type]
    assert profile.parameters.total == sum(parameter.numel() for parameter in model.parameters())
    plan = plan_of(
        precision=precision, sequence_length=256, per_device_train_batch_size=ROWS, activation_checkpointing=recomputed,
        model=profile.model_hash,
    )  # fmt: skip
    predicted = predict_memory(profile, profile.steps[0], plan).peak
    multiply_once()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    prepare_model(model, plan, Mesh(plan))
    optimizer = build_optimizer(model, plan, Arguments(max_steps=100))
    first = batch_of(1, 256, SMALL.vocab_size, "cuda")
    inputs = batch_of(ROWS, 256, SMALL.vocab_size, "cuda")

    def step(inputs: dict[str, torch.Tensor]) -> None:
        with autocast(plan):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(first)  # makes the optimizer's state, for which one row does
    with allocated_peak("cuda", resident_bytes=0) as peak:
        step(inputs)
    assert peak.bytes is not None
    measured = peak.bytes - before
    print(f"{precision}, {recomputed} recomputed: predicted {predicted:.0f}, measured {measured} bytes")
    assert predicted == pytest.approx(measured, rel=0.04)


def test_fused_adamw_is_the_plain_one() -> None:
    assert losses(plan_of()) == pytest.approx(losses(plan_of(optim="adamw_torch")), rel=1e-5)


def test_an_optimizer_on_the_host_updates_alike() -> None:
    assert losses(plan_of(optim_offload=True)) == pytest.approx(losses(plan_of()), rel=1e-5)


def test_the_optimizer_on_the_host_pins_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds each pinned tensor up to a power of two: a vocabulary of 33,000 would take twice its bytes."""
    registered: list[int] = []
    runtime = torch.cuda.cudart()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                registered.extend(arguments[1:2])
                return getattr(runtime, name)(*arguments)

            return call if name == "cudaHostRegister" else getattr(runtime, name)

    monkeypatch.setattr(torch.cuda, "cudart", Counting)
    plan = plan_of(optim_offload=True)
    model = prepare_model(llama(), plan, Mesh(plan))
    optimizer = build_optimizer(model, plan, Arguments(max_steps=100))
    needed = sum(parameter.nbytes for parameter in model.parameters())
    assert needed <= sum(registered) / 2 <= 1.01 * needed
    assert all(copy.is_pinned() and copy.grad.is_pinned() for copy in optimizer.copies)


def test_activations_on_the_host_are_the_same_and_free_the_device() -> None:
    assert losses(plan_of(activation_offload=True)) == losses(plan_of())
    peaks = []
    for offload in (False, True):
        plan, model = plan_of(activation_offload=offload, sequence_length=512), llama()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses(plan, model=model, steps=2)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_weight_goes_to_the_host_with_the_activations(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """autocast makes copies of the weights, which autograd saves as it saves activations."""
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def recording(pack: Any, unpack: Any) -> Any:
        def packed(tensor: torch.Tensor) -> Any:
            result = pack(tensor)
            if result[1].device.type == "cpu":
                moved.append((tensor, result[1]))
            return result

        return hooks(packed, unpack)

    initial = [parameter.detach().clone() for parameter in llama().parameters() if parameter.dim() == 2]
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.graph, "saved_tensors_hooks", recording)
        losses(plan_of(activation_offload=True, precision=precision), steps=1)
    torch.cuda.synchronize()
    assert len(moved) > 10
    for tensor, on_host in moved:
        for weight in (weight.to(tensor.dtype) for weight in initial if weight.numel() == on_host.numel()):
            for side in (weight, weight.t().contiguous()):
                assert not torch.equal(side.reshape(on_host.shape), on_host), tuple(on_host.shape)
    offloaded = losses(plan_of(activation_offload=True, precision=precision))
    assert offloaded == pytest.approx(losses(plan_of(precision=precision)), rel=1e-5)


def test_the_trainer_takes_both_offloads_by_hand(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", plan_of())
    moved, _ = trained(tmp_path / "moved", plan_of(optim_offload=True, activation_offload=True))
    assert moved == pytest.approx(plain, rel=1e-5)


def test_fp8_products_follow_bf16() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"fp8 needs compute capability 8.9; this device has {torch.cuda.get_device_capability()}")
    pytest.importorskip("torchao", reason="precision=fp8 needs torchao")
    assert convert_to_fp8(llama().cuda(), emulate=False) == 14  # seven matrices a layer
    found, expected = losses(plan_of(precision="fp8")), losses(plan_of(precision="bf16"))
    assert found == pytest.approx(expected, rel=5e-2) and found[-1] < found[0]


@pytest.mark.parametrize("name", PACKED_KERNELS)
def test_packed_kernels_are_sdpa_on_packed_rows(name: str) -> None:
    """Two sequences in one row: loss and gradients are those of sdpa, which masks between them."""
    facts = PACKED_KERNELS[name]
    first, past = facts.capabilities
    if not first <= torch.cuda.get_device_capability() < past:
        pytest.skip(f"{name} runs from compute capability {first} to below {past}; this is {torch.cuda.get_device_capability()}")
    if facts.library is not None and find_spec(facts.library) is None:
        pytest.skip(f"{name} needs the library {facts.library}: {facts.install}")
    inputs = batch_of(1, 256, TINY.vocab_size, "cuda")
    inputs["position_ids"] = torch.cat([torch.arange(100), torch.arange(156)])[None].cuda()
    found = {}
    for kernel in ("sdpa", name):
        plan = plan_of(attention=kernel, precision="bf16", packing=True)
        model = prepare_model(llama(), plan, Mesh(plan))
        with autocast(plan), no_cache(model):
            loss = model(**inputs).loss
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in base_of(model).parameters() if p.grad is not None])
        found[kernel] = (loss.item(), gradients)
    assert found[name][0] == pytest.approx(found["sdpa"][0], rel=1e-2)
    cosine = torch.nn.functional.cosine_similarity(found[name][1], found["sdpa"][1], dim=0)
    assert cosine > 0.99


def trained(
    folder: Path, plan: Plan, *, resume: str | None = None, model: nn.Module | None = None, **more: Any
) -> tuple[list[float], Any]:
    """Losses of a short run of the Trainer by a given plan."""
    rows = torch.randint(0, TINY.vocab_size, (32, 64), generator=torch.Generator().manual_seed(2))
    given = {
        "max_steps": 6, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 7,
        "learning_rate": LEARNING_RATE, "per_device_train_batch_size": 4,
    }  # fmt: skip
    trainer = upshift.Trainer(
        model=model or llama(), args=TrainingArguments(str(folder), **given | more), plan=plan.changed(sequence_length=64),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_is_resumed_from_its_checkpoint(precision: str, tmp_path: Path) -> None:
    """Weights, optimizer, loss scale and the device's random numbers: the second half is the same as without a stop."""
    plan, saving = plan_of(precision=precision), {"save_strategy": "steps", "save_steps": 3, "fp16": precision == "fp16"}
    whole, trainer = trained(tmp_path / "run", plan, **saving)
    again, resumed = trained(tmp_path / "run", plan, resume=str(tmp_path / "run" / "checkpoint-3"), **saving)
    assert again[-3:] == pytest.approx(whole[-3:], rel=1e-6)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def seq2seq() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": TINY.vocab_size}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).train()


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (seq2seq, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        (llama, {"per_device_train_batch_size": 2, "packing": True}),
    ],
    ids=["seq2seq", "packed"],
)
def test_a_trainer_cuts_batches_that_lie_on_the_gpu(build: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    """The loader has moved the script's batches before they are cut, or laid end to end. The losses are transformers' own."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(6, 24, (16,), generator=draw).tolist()
    rows = [torch.randint(3, TINY.vocab_size, (length,), generator=draw).tolist() for length in lengths]
    found = []
    for trainer_class, more in ((transformers.Trainer, {}), (upshift.Trainer, {"plan": plan_of(sequence_length=32, **changes)})):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, seed=7,
            learning_rate=LEARNING_RATE, per_device_train_batch_size=4,
        )  # fmt: skip
        trainer = trainer_class(model=build(), args=arguments, train_dataset=rows, data_collator=padded, **more)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_trainer_without_memory_goes_on_in_halves(tmp_path: Path) -> None:
    """The first rows of the third step do not fit, so the gradients that they left are dropped. The losses are the same."""
    whole, _ = trained(tmp_path / "whole", plan_of())
    model, calls = llama(), [0]

    def run_out(module: nn.Module, given: Any, output: Any) -> None:
        calls[0] += module.training
        if module.training and calls[0] == 3:
            raise torch.OutOfMemoryError("made up by the test")

    model.model.layers[-1].register_forward_hook(run_out)
    halved, trainer = trained(tmp_path / "halved", plan_of(), model=model)
    assert halved == pytest.approx(whole, rel=1e-5)
    assert trainer.upshift_choice.plan.per_device_train_batch_size == 2
    (line,) = (tmp_path / "halved" / "upshift_out_of_memory.jsonl").read_text().splitlines()
    assert json.loads(line)["words"] == "made up by the test"


def test_the_devices_random_numbers_come_back(tmp_path: Path) -> None:
    device = torch.device("cuda")

    def draw() -> torch.Tensor:
        return nn.functional.dropout(torch.ones(256, device=device))

    seed_rng(1)
    write_rngs(tmp_path, [capture_rng(device)])
    drawn = draw()
    seed_rng(2)
    assert not torch.equal(draw(), drawn)
    saved = read_rng(tmp_path, rank=0)
    assert saved is not None
    restore_rng(saved, device)
    assert torch.equal(draw(), drawn)


def test_four_bit_weights_train_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes: pip install '.[bitsandbytes]'")
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    multiply_once()
    workspaces = torch.cuda.memory_allocated()
    llama(SMALL).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    torch.cuda.empty_cache()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")).train()
    profile = profile_model(source_of(model), sequence_length=256, variants=(Variant("fp32", "sdpa", False),))
    plan = plan_of(sequence_length=256, per_device_train_batch_size=8)
    optimizer = build_optimizer(model, plan, Arguments(max_steps=100, learning_rate=LEARNING_RATE))
    inputs, found = batch_of(8, 256, SMALL.vocab_size, "cuda"), []
    for _ in range(3):
        with allocated_peak("cuda", resident_bytes=0) as peak:
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    assert found[-1] < found[0]
    assert peak.bytes is not None
    assert predict_memory(profile, profile.steps[0], plan).peak == pytest.approx(peak.bytes - workspaces, rel=0.04)
