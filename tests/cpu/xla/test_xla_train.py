"""Training under XLA against torch, against itself in several layouts, and after an interruption."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, get_scheduler

from upshift.errors import JobFailed, RequestError
from upshift.training.arguments import LearningRateSchedule
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.xla.tensorflow import need_tensorflow

need_tensorflow()
import tensorflow as tf  # noqa: E402
from xla_batches import KILLED, as_batches, ragged_batches  # noqa: E402

from upshift.xla.data.tfrecord import read_index, record_batches, write_records  # noqa: E402
from upshift.xla.model import build  # noqa: E402
from upshift.xla.training.arguments import XlaArguments  # noqa: E402
from upshift.xla.training.optimizers import Optimizer, learning_rates  # noqa: E402
from upshift.xla.training.step import (  # noqa: E402
    Step,  # noqa: E402
    check_rules,
    custom_calls,
    dynamic_dimensions,
)
from upshift.xla.training.strategy import Devices, choose_devices  # noqa: E402
from upshift.xla.training.train import train  # noqa: E402

HELPERS = Path(__file__).parents[1] / "helpers"

REPLICAS = HELPERS / "xla_replicas" / "run_replicas.py"
BATCHES = HELPERS / "xla_batches.py"
STEPS = 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return saved_llama(tmp_path_factory, num_layers=2)


@pytest.fixture(scope="module")
def shallow_llama(tmp_path_factory) -> Path:
    """For programs that several processes compile."""
    return saved_llama(tmp_path_factory, num_layers=1)


def saved_llama(tmp_path_factory, *, num_layers: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    return saved(LlamaForCausalLM(config), tmp_path_factory)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory) -> Path:
    """A model with dropout."""
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.2)
    return saved(GPT2LMHeadModel(config), tmp_path_factory)


def saved(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def mean_loss(model, made):
    """Over all labels that are predicted."""
    batches = [{name: torch.tensor(value) for name, value in batch.items()} for batch in made]
    numbers = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    return sum(float(model(**batch).loss) * number for batch, number in zip(batches, numbers, strict=True)) / sum(numbers)


def torch_losses(folder, made, *, optim, rate, decay):
    model = LlamaForCausalLM.from_pretrained(folder)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate) if optim == "adamw" else torch.optim.SGD(groups, lr=rate, momentum=0.9)
    schedule, losses = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=len(made)), []
    for batch in made:
        loss = model(**{name: torch.tensor(value) for name, value in batch.items()}, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("optim, rate, parts", [("adamw", 1e-3, 1), ("sgd", 0.1, 2)])
def test_twenty_steps_are_those_of_torch(optim, rate, parts, llama, tmp_path):
    """Lengths of 29 to 123, one program; in parts that hold unequal numbers of labels, too."""
    made = ragged_batches(STEPS)
    expected, reference = torch_losses(llama, made, optim=optim, rate=rate, decay=0.01)
    trained = train(
        str(llama), as_batches(made, 128), output=tmp_path / "out", max_steps=STEPS, learning_rate=rate, warmup_steps=2,
        weight_decay=0.01, lr_scheduler_type="cosine", optim=optim, momentum=0.9, gradient_accumulation_steps=parts,
    )  # fmt: skip
    assert trained.losses == pytest.approx(expected, abs=1e-4)
    assert trained.num_traces == 1
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, weight in reference.state_dict().items():
        assert (again.state_dict()[name] - weight).abs().max() < 1e-4, name


def test_bfloat16_over_float32_weights_learns_the_same(dropping, tmp_path):
    """With biases, whose products have a gradient of their own in half precision."""
    made = ragged_batches(6, 8, 60)
    losses = {
        precision: train(
            str(dropping), as_batches(made, 64), output=tmp_path / precision, max_steps=6, learning_rate=1e-3, precision=precision
        ).losses
        for precision in ("fp32", "bf16")
    }
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2)


def test_killed_and_resumed_is_undisturbed(dropping, tmp_path):
    """By SIGKILL. With dropout: its numbers are drawn by the step, not by what ran before, and evaluation, without any, changes
    nothing."""
    made, held_out = ragged_batches(6, 8, 30), ragged_batches(2, 8, 30)
    held_out[1] = {name: value[:3] for name, value in held_out[1].items()}
    command = [sys.executable, str(BATCHES), str(dropping), str(tmp_path / "killed"), "5"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as killed:
        with pytest.raises(RequestError, match="no held-out data"):
            train(str(dropping), as_batches(made, 32), output=tmp_path / "refused", eval_steps=4, **KILLED)
        data = as_batches(made, 32, held_out=held_out)
        whole = train(str(dropping), data, output=tmp_path / "whole", eval_steps=4, **KILLED)
        _, err = killed.communicate(timeout=600)
    assert killed.returncode == -signal.SIGKILL, err
    assert sorted(path.name for path in (tmp_path / "killed").glob("checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(RequestError, match="learning_rate=0.001, not 0.002"):
        changed = KILLED | {"learning_rate": 2e-3}
        train(str(dropping), as_batches(made, 32), output=tmp_path / "killed", resume=True, **changed)
    (tmp_path / "killed" / "checkpoint-4" / "optimizer.safetensors").write_bytes(b"cut")  # as a full disk leaves it
    resumed = train(str(dropping), as_batches(made, 32), output=tmp_path / "killed", resume=True, **KILLED)
    assert resumed.resumed_from is not None and resumed.resumed_from.endswith("checkpoint-2")
    assert resumed.losses == whole.losses and resumed.evaluations == ()
    assert [step for step, _ in whole.evaluations] == [4, 6]
    assert whole.evaluations[-1][1] == pytest.approx(mean_loss(GPT2LMHeadModel.from_pretrained(tmp_path / "whole"), held_out))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.fixture(scope="module")
def step(llama):
    model = build(str(llama))
    return Step(model, Optimizer(model.weights, XlaArguments(max_steps=1)), Devices(None, "one"), max_traces=1)


def test_the_program_is_static_and_whole(step):
    (batch,) = ragged_batches(1, 32, 32)
    scalars = {name: tf.constant(value, tf.float32) for name, value in step.optimizer.scalars(0, 1e-3).items()}
    given = {name: tf.constant(value) for name, value in batch.items()}, scalars, tf.constant([0, 0])
    text = step.function.experimental_get_compiler_ir(*given)(stage="stablehlo")
    assert "stablehlo.dot_general" in text
    assert dynamic_dimensions(text) == 0 and custom_calls(text) == []


def test_a_shape_that_was_not_planned_is_an_error(step):
    scalars = step.optimizer.scalars(0, 1e-3)
    with pytest.raises(JobFailed, match="1 shapes were planned"):
        for length in (32, 48):
            (batch,) = ragged_batches(1, length, length)
            step(batch, scalars, (0, 0))


def test_a_branch_on_data_is_an_error():
    graph = tf.function(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x)).get_concrete_function(tf.zeros(3)).graph
    with pytest.raises(RequestError, match="branches on data"):
        check_rules(graph.get_operations())
    graph = tf.function(lambda x: tf.boolean_mask(x, x > 0)).get_concrete_function(tf.zeros(3)).graph
    with pytest.raises(RequestError, match="shape that depends on data"):
        check_rules(graph.get_operations())


def test_one_device_says_why():
    assert "no TPU answers" in choose_devices().reason


def test_replicas_are_one_device(shallow_llama, tmp_path):
    """Two logical CPUs, and two processes: SGD too, whose result a gradient counted twice changes and AdamW's hides."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{held.getsockname()[1]}" for held in (one, other)]
    runs: dict = {"mirrored": None} | {
        f"worker {rank}": {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}} for rank in (0, 1)
    }
    started = {}
    for name, cluster in runs.items():
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"TF_CONFIG": json.dumps(cluster)} if cluster else {})
        command = [sys.executable, str(REPLICAS), name, str(shallow_llama), str(tmp_path / name)]
        started[name] = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = {}
    try:
        found["single"] = runpy.run_path(str(REPLICAS))["train_both"](str(shallow_llama), tmp_path / "single")
        for name, process in started.items():
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, f"{name}: {err[-2000:]}"
            found[name] = json.loads(out.splitlines()[-1])
    finally:
        for process in started.values():
            process.kill()
    assert [found[name]["replicas"] for name in ("single", *runs)] == [1, 2, 2, 2]
    assert "MirroredStrategy" in found["mirrored"]["reason"] and "TF_CONFIG" in found["worker 0"]["reason"]
    for optim in ("sgd", "adamw"):
        expected = load_file(tmp_path / "single" / optim / "model.safetensors")
        for name in ("mirrored", "worker 0"):
            assert found[name]["losses"][optim] == pytest.approx(found["single"]["losses"][optim], abs=1e-5)
            weights = load_file(tmp_path / name / optim / "model.safetensors")
            assert max(np.abs(weights[key] - expected[key]).max() for key in expected) < 1e-5
    assert not (tmp_path / "worker 1" / "sgd").exists()  # the chief alone writes


def test_records_come_back_each_once_an_epoch(tmp_path):
    rng = np.random.RandomState(0)
    examples = [{"input_ids": (ids := rng.randint(5, 90, length)), "labels": ids} for length in range(10, 40)]
    write_records(examples, str(tmp_path / "records"), pad_token_id=7, shards=3)
    assert (read_index(str(tmp_path / "records")).num_examples, len(list((tmp_path / "records").glob("*.tfrecord")))) == (30, 3)
    with pytest.raises(RequestError, match="records already"):
        write_records(examples, str(tmp_path / "records"))
    found = record_batches(str(tmp_path / "records"), global_batch=4, num_steps=5)
    stream = found.from_step(0)
    batches = [next(stream) for _ in range(10)]  # 8 an epoch: the last has 2 examples, and 2 rows that fill it
    assert {batch["input_ids"].shape for batch in batches} <= {(4, width) for width in found.buckets.widths}
    rows = [tuple(ids[ids >= 0]) for b in batches[:8] for ids in b["labels"] if (ids >= 0).any()]
    assert len(rows) == 30 and set(rows) == {tuple(example["input_ids"]) for example in examples}
    assert all((batch["input_ids"][batch["attention_mask"] == 0] == 7).all() for batch in batches)
    assert all((batch["labels"][batch["attention_mask"] == 0] == -100).all() for batch in batches)
    assert not np.array_equal(batches[0]["input_ids"], batches[8]["input_ids"])
    again = next(found.from_step(9))
    assert all(np.array_equal(again[name], batches[9][name]) for name in again)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Path, Path]:
    """(a model's config and tokenizer, texts)."""
    text = "def add(first, second):\n    return first + second\n\n\nfor number in range(10):\n    print(add(number, 1))\n"
    folder, texts = tmp_path_factory.mktemp("told"), tmp_path_factory.mktemp("text")
    tokenizer = train_byte_level_bpe([text * 20], 300)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    for number in range(12):
        (texts / f"{number}.txt").write_text(text * (1 + number % 4))
    return folder, texts


def test_the_command_trains_from_text_and_from_records(upshift, told, tmp_path):
    model, texts = told
    records = tmp_path / "records"
    answer = upshift("data", "to-tfrecord", model, "--data", texts, "--output", records, "--sequence-length", 32)
    assert answer.code == 0 and "sequences" in answer.out, answer.err
    given = ("--backend", "xla", "--global-batch", 4, "--max-steps", 3, "--from-config", "--json")
    for number, path in enumerate((texts, records)):
        often = () if path == records else ("--eval-steps", 2, "--sequence-length", 32)
        answer = upshift("train", model, "--data", path, "--output", tmp_path / f"out{number}", *given, *often)
        assert answer.code == 0, answer.err
        record = json.loads(answer.out)
        assert record["details"]["num_traces"] == 1 and record["measured"]["loss"] < 7
        held_out = [step for step, _ in record["details"]["evaluations"]]
        assert held_out == ([] if path == records else [2, 3])
        LlamaForCausalLM.from_pretrained(tmp_path / f"out{number}")


@pytest.mark.parametrize(
    "asked, words",
    [
        (("--backend", "xla", "--lora-rank", 4), ("--lora-rank", "--backend torch")),
        (("--backend", "jax"), ("--backend 'jax'", "torch, xla")),
        (("--backend", "xla", "--set", "zero=3"), ("--set zero", "gradient_accumulation_steps")),
    ],
)
def test_what_is_not_possible_is_said_in_one_line(asked, words, upshift, told, tmp_path):
    model, texts = told
    answer = upshift("train", model, "--data", texts, "--output", tmp_path / "out", "--from-config", *asked)
    lines = [line for line in answer.err.splitlines() if line.startswith("upshift: ")]
    assert answer.code == 2 and len(lines) == 1 and "Traceback" not in answer.err, answer.err
    assert all(word in lines[0] for word in words)


def test_a_run_keeps_its_newest_checkpoints_and_goes_on_with_its_own_data(dropping, tmp_path):
    data = as_batches(ragged_batches(6, 8, 30), 32)
    named = replace(data, identity="ragged")
    train(str(dropping), named, output=tmp_path / "run", **KILLED | {"save_steps": 1, "save_total_limit": 3})
    newest = sorted(path.name for path in (tmp_path / "run").glob("checkpoint*"))
    assert newest == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    for other in (data, replace(data, identity="another")):
        with pytest.raises(RequestError, match=r"of a run on other data \(ragged, not"):
            train(str(dropping), other, output=tmp_path / "run", resume=True, **KILLED | {"save_steps": 1})


def test_learning_rates_are_those_of_transformers():
    given = {"max_steps": 7, "learning_rate": 1e-3, "warmup_steps": 2}
    for name in get_args(LearningRateSchedule):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        schedule = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=7)
        expected = []
        for _ in range(7):
            expected.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert learning_rates(XlaArguments(**given, lr_scheduler_type=name)) == pytest.approx(expected, rel=1e-12), name
    with pytest.raises(RequestError, match="1e-08 is not above 1e-07, where polynomial ends"):
        learning_rates(XlaArguments(max_steps=2, learning_rate=1e-8, lr_scheduler_type="polynomial"))
