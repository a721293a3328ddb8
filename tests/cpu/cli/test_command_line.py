"""The command line through its own door: results, and every wrong request as one clear line with its exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command import Answer
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.settings import read_settings
from upshift.training.data.tokenizer import train_byte_level_bpe

TEXT = "def add(first, second):\n    return first + second\n\n\nfor number in range(10):\n    print(add(number, 1))\n"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny model directory: config and tokenizer, no weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_byte_level_bpe([TEXT * 20], 300)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text(TEXT * (1 + number % 4))
    return folder


PLAN = ("--sequence-length", 32, "--global-batch", 4)
CHEAP = ("--set", "torch_compile=off", "--set", "precision=fp32", "--set", "attention=sdpa")  # little is traced
FEW = ("--set", "per_device_train_batch_size=2", "--set", "activation_checkpointing=0")  # few plans are worth a trial
PATIENCE_SECONDS = 600.0  # with a process: a busy machine takes minutes to import, measure and trace


def one_line(answer: Answer, *words: str) -> None:
    lines = [line for line in answer.err.splitlines() if line.startswith("upshift: ")]
    assert len(lines) == 1, answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in lines[0], lines[0]


def test_plan_prints_one_json_document(upshift, model):
    answer = upshift("plan", model, "--train", *PLAN, "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert {"host", "model", "workload", "plans", "rejected"} <= document.keys()
    best, *others = document["plans"]
    assert best["reasons"]
    assert {"load", "forward", "backward", "optimizer", "evaluation", "resume"} <= set(best["predicted"]["memory"])
    speeds = [entry["predicted"]["tokens_per_second"] for entry in document["plans"]]
    assert speeds == sorted(speeds, reverse=True) and others
    for entry in document["plans"]:
        plan = entry["plan"]
        assert plan["per_device_train_batch_size"] * plan["gradient_accumulation_steps"] * plan["num_processes"] == 4


TASKS = (("--train", *PLAN), ("--generate", "--prompt-length", 8), ("--encode", "--sequence-length", 16))


@pytest.mark.parametrize("task", TASKS)
def test_rows_says_how_many_plans_a_document_has(upshift, model, task):
    document = json.loads(upshift("plan", model, *task, "--on", "1xh100", "--json", "--rows", 2).out)
    assert len(document["plans"]) == 2 < document["num_candidates"]


def test_plan_for_a_described_host_needs_no_accelerator(upshift, model):
    answer = upshift("plan", model, *PLAN, "--on", "1xh100", "--json")
    assert answer.code == 0, answer.err
    assert {entry["plan"]["device"] for entry in json.loads(answer.out)["plans"]} == {"cuda"}


def test_set_fixes_a_field_and_allow_opens_others(upshift, model):
    fixed = json.loads(upshift("plan", model, *PLAN, "--set", "activation_checkpointing=2", "--json").out)
    assert {entry["plan"]["activation_checkpointing"] for entry in fixed["plans"]} == {2}
    refused = upshift("plan", model, *PLAN, "--set", "optim=adafactor")
    assert refused.code == 2
    one_line(refused, "--allow adafactor")
    allowed = upshift("plan", model, *PLAN, "--allow", "adafactor", "--set", "optim=adafactor", "--json")
    assert allowed.code == 0, allowed.err


def test_inspect(upshift, model):
    document = json.loads(upshift("inspect", model, "--sequence-length", 32, "--json").out)
    assert document["num_layers"] == 3
    assert document["kv_bytes_per_token"] == 3 * 2 * 32 * 2  # layers x (keys, values) x hidden x bf16


def test_train_saves_a_model_that_transformers_loads(upshift, model, data, tmp_path):
    from transformers import AutoModelForCausalLM

    answer = upshift(
        "train", model, "--data", data, "--from-config", *PLAN, "--max-steps", 3, "-o", tmp_path / "out", "--trial-seconds", 0,
        *CHEAP, "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    record = json.loads(answer.out)
    assert record["measured"]["loss"] > 0 and record["predicted"]["peak_gib"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = upshift("train", model, "--data", data, "--from-config", *PLAN, "--max-steps", 3, "-o", tmp_path / "out")
    assert again.code == 2
    one_line(again, "--overwrite", "--resume")


def test_trials_prove_the_plan(upshift, model, data, tmp_path):
    answer = upshift(
        "train", model, "--data", data, "--from-config", *PLAN, "--max-steps", 2, "-o", tmp_path / "out", "--trial-seconds", 6,
        *CHEAP, *FEW,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert "tried fp32" in answer.err
    assert "Predicted against measured" in answer.out


def test_a_run_teaches_the_next_plan(upshift, model, data, tmp_path, monkeypatch):
    """Measured for the plan that ran, transferred for others here, and nothing for a host that is described."""
    known = read_settings().cache_dir  # of other tests: what was traced, and what the machine is
    shutil.copytree(known, tmp_path / "cache", ignore=lambda folder, names: ["calibration.jsonl", "records.jsonl"])
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    chosen = ("--set", "torch_compile=off", "--set", "precision=fp32", "--set", "num_processes=1")
    answer = upshift(
        "train", model, "--data", data, "--from-config", *PLAN, *chosen, "--max-steps", 7, "-o", tmp_path / "out",
        "--trial-seconds", 0, "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    ran = json.loads(answer.out)
    assert ran["predicted"]["tier"] == "formula"
    (line,) = filter(None, (tmp_path / "cache" / "calibration.jsonl").read_text().splitlines())
    assert "torch" not in line.replace("torch_compile", "") and str(tmp_path) not in line
    document = json.loads(upshift("plan", model, "--data", data, *PLAN, *chosen, "--json").out)
    mine = [row["predicted"] for row in document["plans"] if row["plan"] == ran["plan"]]
    others = [row["predicted"] for row in document["plans"] if row["plan"] != ran["plan"]]
    assert all(row["tier"] == "measured" and row["num_records"] == 1 for row in mine)
    assert {row["tier"] for row in others} == {"transferred"}
    elsewhere = json.loads(upshift("plan", model, *PLAN, *chosen, "--on", "epyc-9654-768gb", "--json").out)
    assert {row["predicted"]["tier"] for row in elsewhere["plans"]} == {"formula"}


@pytest.fixture
def in_process_of_its_own(tmp_path):
    """The installed command, as a user runs it."""

    def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "upshift.cli.main", *map(str, arguments)]
        return subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )

    return start


def test_ctrl_c_and_resume_give_the_undisturbed_curve(in_process_of_its_own, upshift, model, data, tmp_path):
    base = ("train", model, "--data", data, "--from-config", *PLAN, "--max-steps", 60, "--trial-seconds", 0,
            *CHEAP, "--save-steps", 5, "--json")  # fmt: skip
    calibration = read_settings().cache_dir / "calibration.jsonl"  # what a run teaches may change the next plan
    calibration.unlink(missing_ok=True)
    child = in_process_of_its_own(*base, "-o", tmp_path / "two")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list((tmp_path / "two").glob("checkpoint-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=PATIENCE_SECONDS)
    if child.returncode == 0:
        pytest.skip("60 steps ended before the signal came")
    assert child.returncode == 130 and "--resume" in said and "Traceback" not in said, said
    curves = []
    for arguments in (("-o", tmp_path / "two", "--resume"), ("-o", tmp_path / "one")):
        calibration.unlink(missing_ok=True)
        answer = upshift(*base, *arguments)
        assert answer.code == 0, answer.err
        curves.append(json.loads(answer.out)["details"]["loss_curve"])
    assert len(curves[1]) == 60 and curves[0] == curves[1]


def test_a_hub_model_trains_from_its_own_weights(in_process_of_its_own, model, data, tmp_path):
    """The hub's cache as the hub fills it, and no network: config, weights and tokenizer are found by their id."""
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(snapshot)
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text("abc")
    child = in_process_of_its_own(
        "train", "org/tiny", "--data", data, *PLAN, *CHEAP, "--max-steps", 2, "--trial-seconds", 0,
        "-o", tmp_path / "out", "--json", HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    out, said = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode == 0, said
    trained, started = (LlamaForCausalLM.from_pretrained(folder).lm_head.weight for folder in (tmp_path / "out", snapshot))
    assert 0 < (trained - started).abs().max() < 0.01


def wrong_requests(model: Path, data: Path, folder: Path) -> dict[str, tuple[list[object], list[str]]]:
    """name -> (arguments, words that the one line must hold)."""
    empty = folder / "empty"
    empty.mkdir()
    unknown = folder / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no-such-architecture"}')
    (folder / "no-type.json").write_text("{}")
    (folder / "empty.txt").write_text("")
    (folder / "numbers.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    broken = folder / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((model / name).read_bytes())
    (broken / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    train = ["train", model, *PLAN, "--from-config", "-o", folder / "out", "--data"]
    return {
        "a directory with no config": (["plan", empty], ["config.json"]),
        "no such model": (["plan", folder / "nothing"], ["does not exist"]),
        "a config without a type": (["plan", folder / "no-type.json"], ["model_type"]),
        "an unknown architecture": (["plan", unknown], ["no-such-architecture", "transformers"]),
        "truncated weights": (["train", broken, "--data", data, "-o", folder / "o"], ["safetensors"]),
        "no weights": (["train", model, "--data", data, "-o", folder / "o"], ["--from-config"]),
        "no text column": ([*train, folder / "numbers.jsonl"], ["a"]),
        "an empty file": ([*train, folder / "empty.txt"], ["empty"]),
        "no such data": ([*train, folder / "nothing"], ["nothing"]),
        "too long a sequence": (["plan", model, "--sequence-length", 128], ["128", "64"]),
        "no micro-batch": (["plan", model, *PLAN, "--set", "per_device_train_batch_size=3"], ["3", "4", "1, 2, 4"]),
        "an unknown field": (["plan", model, *PLAN, "--set", "colour=blue"], ["colour", "precision"]),
        "an unknown value": (["plan", model, *PLAN, "--set", "precision=fp7"], ["fp7", "bf16"]),
        "an unknown allowance": (["plan", model, *PLAN, "--allow", "magic"], ["magic", "8bit-optimizer"]),
        "an unknown host": (["plan", model, *PLAN, "--on", "1xh1000"], ["h1000", "h100"]),
        "an unknown command": (["paint"], ["paint", "--help"]),
        "an unknown option": (["plan", model, "--colour", "blue"], ["--colour", "plan --help-all"]),
        "too small a number": (["plan", model, "--sequence-length", 1], ["--sequence-length", "2"]),
        "no number": (["plan", model, "--rows", "many"], ["--rows many", "a whole number of at least 1"]),
        "epochs that are no number": ([*train, data, "--epochs", "nan"], ["--epochs"]),
        "epochs without end": (["tune", model, "--data", data, "--space", data, "--epochs", "inf"], ["--epochs inf is not"]),
        "a budget without end": ([*train, data, "--trial-seconds", "inf"], ["--trial-seconds inf is not a number of at least 0"]),
        "a seed below zero": ([*train, data, "--seed", -1], ["--seed", "0"]),
        "too large a seed": (["tune", model, "--data", data, "--space", data, "--seed", 2**32], ["--seed", "4294967295"]),
        "no word behind": (["train", model], ["--data"]),
        "4 bits that are trained": (["plan", model, "--load-in-4bit"], ["--lora-rank"]),
        "an adapter that generates": (["plan", model, "--generate", "--lora-rank", 8], ["--lora-rank"]),
    }


NAMES = (
    "a directory with no config", "no such model", "a config without a type", "an unknown architecture", "truncated weights",
    "no weights", "no text column", "an empty file", "no such data", "too long a sequence", "no micro-batch", "an unknown field",
    "an unknown value", "an unknown allowance", "an unknown host", "an unknown command", "an unknown option",
    "too small a number", "no number", "epochs that are no number", "epochs without end", "a budget without end",
    "a seed below zero", "too large a seed", "no word behind", "4 bits that are trained", "an adapter that generates",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_request_is_one_line_and_exit_2(name, upshift, model, data, tmp_path):
    requests = wrong_requests(model, data, tmp_path)
    assert set(requests) == set(NAMES)
    arguments, words = requests[name]
    answer = upshift(*arguments)
    assert answer.code == 2, (answer.code, answer.err, answer.out)
    one_line(answer, *words)


@pytest.mark.parametrize("change", ["key", "host", "model"])
def test_a_plan_file_that_does_not_belong_here(change, upshift, model, data, tmp_path):
    document = json.loads(upshift("plan", model, *PLAN, "--json").out)
    plan = document["plans"][0]["plan"]
    plan["colour" if change == "key" else change] = "something else"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    answer = upshift("train", model, "--data", data, *PLAN, "--from-config", "--plan", path, "-o", tmp_path / "out")
    assert answer.code == 2
    one_line(answer, {"key": "colour", "host": "other hardware", "model": "another model"}[change])


def test_nothing_fits_is_exit_3_with_the_nearest_plan(upshift, model, tmp_path):
    from upshift.hardware import describe

    host = describe("1xh100")
    assert host.gpu is not None
    tiny = host.changed(gpu=host.gpu.changed(memory_bytes=2**20, free_memory_bytes=2**20))
    path = tmp_path / "host.json"
    path.write_text(tiny.to_json())
    answer = upshift("plan", model, *PLAN, "--on", path)
    assert answer.code == 3
    one_line(answer, "nearest plan", "needs")


def test_a_run_goes_on_with_its_own_model_and_with_what_set_asks_for(upshift, model, data, tmp_path):
    """The plan of the checkpoint skips the search, and must not hide that the request is another one."""
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(model, other)
    LlamaConfig.from_pretrained(model, hidden_size=16).save_pretrained(other)

    def train(trained, *more):
        request = ("train", trained, "--data", data, "--from-config", *PLAN, "-o", out, "--trial-seconds", 0, *CHEAP, "--json")
        return upshift(*request, *more)

    assert train(model, "--max-steps", 2, "--save-steps", 2).code == 0
    answer = train(other, "--max-steps", 4, "--resume")
    assert answer.code == 2
    one_line(answer, "'" + str(other) + "' is not the model of", "checkpoint-2", "resume with the model of that run")
    answer = train(model, "--max-steps", 4, "--resume", "--allow", "adafactor", "--set", "optim=adafactor")
    assert answer.code == 2
    one_line(answer, "was trained with AdamW, this run uses Adafactor")
    answer = train(model, "--max-steps", 4, "--resume", "--set", "per_device_train_batch_size=1")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["plan"]["per_device_train_batch_size"] == 1


def test_a_plan_file_and_set_that_say_two_things(upshift, model, data, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(upshift("plan", model, *PLAN, *CHEAP, "--json").out)
    request = ("train", model, "--data", data, *PLAN, "--from-config", "--plan", path, "-o", tmp_path / "out")
    answer = upshift(*request, "--set", "precision=tf32")
    assert answer.code == 2
    one_line(answer, "--set precision=tf32 is not what --plan", "leave one of them out")
