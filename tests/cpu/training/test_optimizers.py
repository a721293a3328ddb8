"""Every optimizer against plain usage of its library, its checkpoints, bf16 rounding, updates in the backward pass."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.training_args import OptimizerNames

import upshift
from upshift.errors import MissingExtra, RequestError
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.planning import optimizers as named
from upshift.planning.optimizers import REFUSED, optimizers, read_optim_args
from upshift.planning.plan import Plan, changes_of_mathematics
from upshift.training.arguments import Arguments, LearningRateSchedule
from upshift.training.batches.sampler import Position
from upshift.training.checkpoint.async_save import BackgroundWriter
from upshift.training.checkpoint.checkpoint import TrainState, load_checkpoint, newest_checkpoint, save_checkpoint
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.distributed.mesh import Mesh
from upshift.training.optimizers.build import build_optimizer, parameter_groups, update_in_backward
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.schedule import build_schedule, learning_rate_factor
from upshift.training.prepare import convert_to_fp8, offload_activations
from upshift.training.step import TrainStep

STEPS = 10
ROOT = Path(__file__).parents[3]
CHEAP = ("torch_compile=off", "precision=fp32", "attention=sdpa")  # little is traced
OFFERED = {
    "adamw_torch_fused": "", "adamw_torch": "", "adafactor": "", "adamw_torch_8bit": "", "adamw_torch_4bit": "",
    "sgd": "momentum=0.9,nesterov=true", "adagrad": "lr_decay=0.01", "rmsprop": "momentum=0.5,centered=true",
}  # fmt: skip
ALL = [*OFFERED, "muon"]


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """torchao's compiled step takes 15 s to build; what it computes is the same."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, **changes})).to(dtype).train()


def a_plan(**choices: Any) -> Plan:
    plain = {"device": "cpu", "host": "", "model": "", "sequence_length": 16, "per_device_train_batch_size": 4}
    return Plan(**(plain | choices))


def arguments(**changes: Any) -> Arguments:
    return Arguments(**({"max_steps": STEPS, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1} | changes))


class Run:
    """A model, its optimizer and its schedule, in a plain loop."""

    def __init__(self, plan: Plan, *, optimizer: Any = None, model: Any = None, **changes: Any) -> None:
        self.plan = plan
        self.model = model if model is not None else llama(torch.bfloat16 if plan.precision == "bf16-weights" else torch.float32)
        self.optimizer = optimizer(self.model) if optimizer else build_optimizer(self.model, plan, arguments(**changes))
        self.schedule = build_schedule(self.optimizer, arguments(**changes))
        if plan.optimizer_in_backward:
            update_in_backward(self.optimizer)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(step % 3))
            loss = self.model(tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]
        ordered = [value for state in states for _, value in sorted(state.items()) if torch.is_tensor(value)]
        plain = [value if type(value) is torch.Tensor else value.dequantize() for value in ordered]
        return [*self.model.state_dict().values(), *plain]


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


TINY: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
T5_SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
MODELS: dict[str, PretrainedConfig] = {
    "matrices named bias": T5Config(**T5_SIZES),
    "norms by class": GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2),
    "vectors that are no norms": MambaConfig(**TINY, state_size=4),
    "norms of queries": Qwen3Config(**TINY, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=8),
    "biases": BertConfig(**TINY, intermediate_size=32, num_attention_heads=2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_weight_decay_is_of_the_parameters_that_transformers_decays(kind: str, tmp_path: Path) -> None:
    model = AutoModel.from_config(MODELS[kind])
    trainer = Trainer(model, TrainingArguments(str(tmp_path), weight_decay=0.1, optim="adamw_torch", use_cpu=True))
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected, found = (
        {names[parameter]: group["weight_decay"] for group in groups for parameter in group["params"]}
        for groups in (trainer.create_optimizer().param_groups, parameter_groups(model, a_plan(), arguments()))
    )
    assert found == expected and set(found.values()) == {0.0, 0.1}


@pytest.mark.parametrize("name", OFFERED)
def test_it_is_the_optimizer_of_that_name_in_transformers(name: str, tmp_path: Path) -> None:
    if optimizers()[name].library:
        pytest.importorskip(optimizers()[name].library)
    plan, given = a_plan(optim=name, optim_args=OFFERED[name]), arguments()
    theirs = TrainingArguments(output_dir=str(tmp_path), optim=name, optim_args=OFFERED[name], learning_rate=given.learning_rate)

    def of_transformers(model: Any) -> Any:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(theirs, model)
        return kind(parameter_groups(model, plan, given), **options)

    ours, plain = Run(plan), Run(plan, optimizer=of_transformers)
    assert type(ours.optimizer) is type(plain.optimizer)
    curve, expected = ours.train(range(STEPS)), plain.train(range(STEPS))
    difference = max(abs(a - b) for a, b in zip(curve, expected, strict=True))
    print(f"{name}: {difference:.1e}, loss {curve[0]:.3f} to {curve[-1]:.3f}")
    assert difference < 1e-5 and curve[0] - curve[-1] > 0.01


@pytest.mark.parametrize("name", get_args(LearningRateSchedule))
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 7), (6, 7), (0, 1)])
def test_schedules_are_those_of_transformers(name: LearningRateSchedule, warmup: int, steps: int) -> None:
    """To the bit, at every step and beyond the last; and a checkpoint of one goes into the other."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-3) for _ in range(2)]
    ours = build_schedule(optimizers[0], arguments(max_steps=steps, warmup_steps=warmup, lr_scheduler_type=name))
    theirs = get_scheduler(name, optimizers[1], num_warmup_steps=warmup, num_training_steps=steps)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for _ in range(steps + 3):
        assert ours.get_last_lr() == theirs.get_last_lr()
        for optimizer, schedule in zip(optimizers, (ours, theirs), strict=True):
            optimizer.step()
            schedule.step()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.last_epoch == ours.last_epoch


def test_a_share_of_the_steps_is_the_same_warm_up_as_their_number() -> None:
    by_number, by_share = (
        arguments(max_steps=20, warmup_steps=steps, warmup_ratio=share) for steps, share in ((3, None), (0, 0.13))
    )
    factors = [[learning_rate_factor(step, name="linear", arguments=of) for step in range(20)] for of in (by_number, by_share)]
    assert factors[0] == factors[1] and factors[0][:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_muon_is_torch_muon_for_the_layers_matrices_and_adamw_for_the_rest() -> None:
    run, plain = Run(a_plan(optim="muon")), llama()
    given, matrices = arguments(), [p for p in plain.model.layers.parameters() if p.ndim == 2]
    tables, vectors = [plain.model.embed_tokens.weight, plain.lm_head.weight], [p for p in plain.parameters() if p.ndim == 1]
    rest = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    both = [
        torch.optim.Muon(matrices, lr=given.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=given.learning_rate, fused=True),
    ]
    schedules = [build_schedule(optimizer, given) for optimizer in both]
    expected = []
    for step in range(STEPS):
        tokens = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(step % 3))
        loss = plain(tokens, labels=tokens).loss
        loss.backward()
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    curve = run.train(range(STEPS))
    assert curve == expected
    rates = {group["lr"] for group in run.optimizer.param_groups}
    assert rates == {both[0].param_groups[0]["lr"]} and len(run.optimizer.param_groups) == 3
    assert {tuple(p.shape) for group in run.optimizer.param_groups if group["muon"] for p in group["params"]} == {
        (64, 64), (96, 64), (64, 96),
    }  # fmt: skip
    with pytest.raises(RequestError, match="found none"):
        model = llama()
        model.model.layers.requires_grad_(False)
        build_optimizer(model, a_plan(optim="muon"), given)


def test_state_dict_of_muon_goes_round() -> None:
    run, other = Run(a_plan(optim="muon")), Run(a_plan(optim="muon"))
    run.train(range(3))
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.schedule.load_state_dict(run.schedule.state_dict())
    assert other.train(range(3, 6)) == run.train(range(3, 6)) and same(run, other)


def save(directory: Path, run: Run, step: int, writer: BackgroundWriter | None = None) -> None:
    state = TrainState(step=step, position=Position(epoch=0, batch=step), seed=3, tokens_seen=step, plan=run.plan.model_dump())
    save_checkpoint(
        directory, model=run.model, tokenizer=None, optimizer=run.optimizer, scaler_state=None, state=state,
        scheduler_state=run.schedule.state_dict(), writer=writer,
    )  # fmt: skip


RESUMED: dict[str, dict[str, Any]] = {
    **{name: {"optim": name, "optim_args": OFFERED.get(name, "")} for name in ALL},
    "bf16-weights": {"precision": "bf16-weights"},
    "bf16-weights, 4bit": {"precision": "bf16-weights", "optim": "adamw_torch_4bit"},
    "in backward": {"optimizer_in_backward": True},
    "in backward, muon": {"optimizer_in_backward": True, "optim": "muon"},
    "on host": {"optim_offload": True},
    "on host, bf16-weights": {"optim_offload": True, "precision": "bf16-weights"},
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact(name: str, tmp_path: Path) -> None:
    plan = a_plan(**RESUMED[name])
    whole, first, second = Run(plan), Run(plan), Run(plan)
    torch.manual_seed(1)
    expected = whole.train(range(6))
    torch.manual_seed(1)
    losses = first.train(range(3))
    writer = BackgroundWriter()
    save(tmp_path, first, 3, writer)
    assert writer._thread is not None, "it was not written in the background"
    first.train(range(3, 4))  # the state in the checkpoint is a copy
    writer.wait()
    torch.manual_seed(99)
    second.model.load_state_dict({key: torch.zeros_like(value) for key, value in second.model.state_dict().items()})
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    load_checkpoint(newest, model=second.model, optimizer=second.optimizer, scheduler=second.schedule)
    assert losses + second.train(range(3, 6)) == expected and same(whole, second)


@pytest.mark.parametrize("name", ["in backward", "on host"])
def test_where_the_update_runs_is_no_part_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    moved, plain = Run(a_plan(**RESUMED[name])), Run(a_plan())
    moved.train(range(3))
    save(tmp_path, moved, 3)
    load_checkpoint(tmp_path / "checkpoint-3", model=plain.model, optimizer=plain.optimizer, scheduler=plain.schedule)
    assert moved.train(range(3, 6)) == plain.train(range(3, 6)) and same(moved, plain)


@pytest.mark.parametrize("name", [*ALL, "bf16-weights"])
def test_in_backward_is_bit_for_bit_and_keeps_no_gradients(name: str) -> None:
    choices = RESUMED[name]
    plain, moved = Run(a_plan(**choices)), Run(a_plan(**choices, optimizer_in_backward=True))
    assert moved.train(range(STEPS)) == plain.train(range(STEPS)) and same(plain, moved)
    tokens = torch.zeros((1, 4), dtype=torch.long)
    moved.model(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is None for parameter in moved.model.parameters())


def test_in_backward_with_tied_weights_and_recomputed_layers() -> None:
    runs = []
    for in_backward in (False, True):
        model = llama(tie_word_embeddings=True)
        recompute_layers(model, 2)
        runs.append(Run(a_plan(optimizer_in_backward=in_backward), model=model))
    plain, moved = runs
    assert moved.train(range(4)) == plain.train(range(4)) and same(plain, moved)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "muon", "sgd", "adafactor"])
def test_on_host_is_bit_for_bit(name: str) -> None:
    choices = RESUMED[name]
    plain, moved = Run(a_plan(**choices)), Run(a_plan(**choices, optim_offload=True))
    assert isinstance(moved.optimizer, HostOptimizer)
    assert moved.train(range(STEPS)) == plain.train(range(STEPS)) and same(plain, moved)


def test_bf16_weights_follow_fp32_where_nearest_rounding_stalls() -> None:
    """One weight in 4,096 copies, a gradient of 1, a learning rate whose step is a 40th of what bf16 tells apart."""
    rate, steps = 1e-4, 60

    def trained(make: Any, dtype: torch.dtype) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = make([weight])
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    from upshift.training.optimizers.stochastic_adamw import StochasticAdamW

    options: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.999), "eps": 1e-8}
    fp32 = trained(lambda p: torch.optim.AdamW(p, weight_decay=0.0, **options), torch.float32)
    nearest = trained(lambda p: torch.optim.AdamW(p, weight_decay=0.0, **options), torch.bfloat16)
    rounded = trained(lambda p: StochasticAdamW(p, seed=0, **options), torch.bfloat16)
    moved = 1 - fp32.mean()
    assert nearest.eq(1).all(), "nothing below half of 2^-8 arrives"
    assert abs(rounded.mean() - fp32.mean()) < 0.05 * moved and rounded.unique().numel() > 1
    again = trained(lambda p: StochasticAdamW(p, seed=0, **options), torch.bfloat16)
    other = trained(lambda p: StochasticAdamW(p, seed=1, **options), torch.bfloat16)
    assert torch.equal(rounded, again) and not torch.equal(rounded, other)


def test_the_second_moment_falls_again() -> None:
    """It changes by a thousandth a step, which is less than bf16 tells apart."""
    from upshift.training.optimizers.stochastic_adamw import StochasticAdamW

    moments = {}
    for name, make, dtype in (
        ("fp32", torch.optim.AdamW, torch.float32), ("nearest", torch.optim.AdamW, torch.bfloat16),
        ("stochastic", lambda p, lr: StochasticAdamW(p, lr=lr, betas=(0.9, 0.999), eps=1e-8, seed=0), torch.bfloat16),
    ):  # fmt: skip
        weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        optimizer = make([weight], lr=1e-3)  # type: ignore[operator]
        for step in range(200):
            weight.grad = torch.full_like(weight, 1.0 if step == 0 else 1e-3)
            optimizer.step()
        moments[name] = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    assert moments["stochastic"] == pytest.approx(moments["fp32"], rel=0.02)
    assert moments["nearest"] > 1.15 * moments["fp32"]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit"])
def test_bf16_weights_stay_near_fp32(optim: str) -> None:
    if optimizers()[optim].library:
        pytest.importorskip("torchao")
    expected = Run(a_plan(optim=optim)).train(range(STEPS))
    curve = Run(a_plan(optim=optim, precision="bf16-weights")).train(range(STEPS))
    assert max(abs(a - b) for a, b in zip(curve, expected, strict=True)) < 0.05
    assert all(later < earlier + 0.1 for earlier, later in pairwise(curve))


def test_activations_on_host_change_nothing() -> None:
    losses, gradients = [], []
    for moved in (False, True):
        model, tokens = llama(hidden_size=128), torch.arange(4 * 64).view(4, 64) % 96
        with offload_activations(model) if moved else torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == losses[1] and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_fp8_converts_the_layers_linears_that_fit() -> None:
    pytest.importorskip("torchao")
    model = llama(num_hidden_layers=3, intermediate_size=100)  # 100 is no multiple of 16
    before = {name: parameter for name, parameter in model.named_parameters()}
    assert convert_to_fp8(model, emulate=True) == 3 * 4
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert type(model.lm_head) is nn.Linear
    plain, tokens = llama(num_hidden_layers=3, intermediate_size=100), torch.arange(64).view(4, 16) % 96
    losses = [m(tokens, labels=tokens).loss for m in (model, plain)]
    for loss in losses:
        loss.backward()
    assert 0 < abs(losses[0].item() - losses[1].item()) < 0.01 * losses[1].item()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_name_of_transformers_is_offered_or_refused_in_words() -> None:
    theirs, ours = {name.value for name in OptimizerNames}, set(optimizers())
    assert theirs - ours == set(REFUSED) and ours - theirs == {"muon"}
    assert all(facts.allow in changes_of_mathematics() for facts in optimizers().values() if facts.allow)
    for name in REFUSED:
        with pytest.raises(RequestError, match=f"optim={name} is not offered: .* use "):
            named.check_name(name)


def test_options_of_optimizers() -> None:
    assert read_optim_args("sgd", "momentum=0.9, nesterov=True") == {"momentum": 0.9, "nesterov": True}
    assert read_optim_args("adamw_torch_4bit", "block_size=128") == {"block_size": 128}
    for optim, text, words in (
        ("sgd", "alpha=1", "takes momentum, dampening, nesterov"),
        ("muon", "momentum=1", "takes none"),
        ("sgd", "momentum=fast", "give momentum a float"),
        ("sgd", "nesterov=perhaps", "give nesterov a bool"),
    ):
        with pytest.raises(RequestError, match=words):
            read_optim_args(optim, text)  # type: ignore[arg-type]


def test_a_missing_library_is_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"optim=adamw_8bit needs bitsandbytes: run  pip install '.*\[bitsandbytes\]'"):
        build_optimizer(llama(), a_plan(optim="adamw_8bit", device="cuda"), arguments())


def test_in_backward_refuses_what_it_cannot_do() -> None:
    for choices, given, words in (
        ({}, {}, "without clipping"),
        ({"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}, "one micro-batch of one process"),
        ({"precision": "fp16"}, {"max_grad_norm": 0.0}, "cannot skip a step"),
    ):
        with pytest.raises(RequestError, match=words):
            TrainStep(llama(), Mesh(a_plan(optimizer_in_backward=True, **choices)), arguments(**given))
    with pytest.raises(RequestError, match="rounds its updates of bf16 weights to the nearest"):
        TrainStep(llama(), Mesh(a_plan(optim="sgd", precision="bf16-weights")), arguments())


def test_an_optimizer_of_one_file_trains(tmp_path: Path) -> None:
    """The template, where it says that it goes: its losses fall, and are the same where ranks divide its state."""
    package = tmp_path / "upshift"
    shutil.copytree(Path(upshift.__file__).parent, package)  # with what is compiled, else each process compiles it
    shutil.copy(ROOT / "templates" / "optimizer.py", package / "training" / "optimizers" / "toy.py")
    llama().config.save_pretrained(tmp_path / "llama")
    train_byte_level_bpe(["a text of a few words"] * 9, 300).save_pretrained(tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text()) | {"vocab_size": 320}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": f"text {number} of a few words"}) for number in range(99)))
    curves = {}
    for layout in (("num_processes=1",), ("num_processes=2", "fully_shard=weights")):
        command = [
            sys.executable, "-m", "upshift.cli.main", "train", "llama", "--data", "data.jsonl", "--from-config", "-o", layout[-1],
            "--sequence-length", "16", "--global-batch", "4", "--max-steps", "6", "--trial-seconds", "0", "--json",
            "--allow", "toy", *(f"--set={one}" for one in ("optim=toy", "optim_args=beta1=0.8", *CHEAP, *layout)),
        ]  # fmt: skip
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        record = json.loads(ended.stdout)
        assert record["plan"]["optim"] == "toy"
        curves[layout] = [loss for _, loss in record["details"]["loss_curve"]]
    one, divided = curves.values()
    assert one[-1] < one[0] - 0.01 and divided == pytest.approx(one, abs=1e-5)
