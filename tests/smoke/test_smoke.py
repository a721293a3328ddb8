"""Every road of the package once, as a user takes it: a process of its own, a tiny model, results that another program reads.

`make test-newest` runs these with the newest libraries. Standard error holds only lines that Upshift wrote: what a library prints
there stands in front of the result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest

ROOT = Path(__file__).parents[2]
WITNESS = Path(__file__).with_name("witness")
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards watch the moon".split()  # noqa: SIM905
SECONDS = 600
TRAINER_SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from upshift import Trainer

rows = [{"input_ids": torch.arange(3, 19) + number, "labels": torch.arange(3, 19) + number} for number in range(32)]
model = LlamaForCausalLM(LlamaConfig.from_pretrained(sys.argv[1]))
arguments = TrainingArguments(sys.argv[2], max_steps=3, per_device_train_batch_size=4, report_to=[], disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
print("loss", trainer.train().training_loss)
trainer.save_model()
"""
BY_TRANSFORMERS = """
import json
import sys
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

kind, folder, new_tokens, *prompts = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = (AutoModelForCausalLM if kind == "decoder" else AutoModelForSeq2SeqLM).from_pretrained(folder).eval()
texts = []
for prompt in prompts:
    given = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**given, max_new_tokens=int(new_tokens), do_sample=False)[0]
    answer = tokens[given["input_ids"].shape[1] :] if kind == "decoder" else tokens[1:]
    texts.append({"tokens": len(answer), "text": tokenizer.decode(answer, skip_special_tokens=True)})
print(json.dumps(texts))
"""
FAST = ("--trial-seconds", "0", "--set", "torch_compile=off")  # no trial, no compiler: the road is what is tested


class Ended(NamedTuple):
    out: str
    err: str
    written: list[dict[str, str]]  # to standard error by Python, each with its author


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, an encoder and texts."""
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    from upshift.training.data.tokenizer import train_byte_level_bpe

    folder = tmp_path_factory.mktemp("smoke")
    draws = numpy.random.default_rng(0)
    texts = [" ".join(draws.choice(WORDS, size=12)) for _ in range(64)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "texts.txt").write_text("\n".join(texts[:8]))
    (folder / "space.yaml").write_text("learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}\n")
    tokenizer = train_byte_level_bpe(texts, 300)
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320}
    tokenizer.save_pretrained(folder / "llama")
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256)).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "t5")
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "vocab_size": 320, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(**t5, eos_token_id=None)).save_pretrained(folder / "t5")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "bert")
    BertModel(BertConfig(**sizes, max_position_embeddings=64)).save_pretrained(folder / "bert")
    return folder


def environment(home: Path, notes: Path) -> dict[str, str]:
    own = {
        "PYTHONPATH": os.pathsep.join([str(WITNESS), str(ROOT / "src")]), "UPSHIFT_TEST_WITNESS": str(notes),
        "UPSHIFT_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return {**os.environ, **own}


def run(home: Path, *command: str | Path) -> Ended:
    """Run ``python ...`` and check that it succeeds."""
    notes = home / f"written-{time.monotonic_ns()}.jsonl"
    arguments = [sys.executable, *map(str, command)]
    ended = subprocess.run(
        arguments, capture_output=True, text=True, cwd=home, env=environment(home, notes), timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    written = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return Ended(ended.stdout, ended.stderr, written)


def by_transformers(home: Path, kind: str, model: str, new_tokens: int, *prompts: str) -> list[dict[str, Any]]:
    """Return what transformers alone generates from each prompt, one at a time."""
    texts: list[dict[str, Any]] = json.loads(run(home, "-c", BY_TRANSFORMERS, kind, model, str(new_tokens), *prompts).out)
    return texts


def upshift(home: Path, *arguments: str | Path) -> Ended:
    """Run a command of Upshift, and check that nobody else wrote to standard error."""
    ended = run(home, "-m", "upshift.cli.main", *arguments)
    check_only_our_lines(ended)
    return ended


def check_only_our_lines(ended: Ended) -> None:
    package = str(ROOT / "src" / "upshift")
    shown = [note for note in ended.written if note["text"].strip() and note["text"].strip() in ended.err]  # not a child's log
    foreign = [note for note in shown if not note["author"].startswith(package)]
    assert foreign == []
    written = "".join(note["text"] for note in ended.written)
    unseen = [line for line in ended.err.splitlines() if line.strip() and line not in written]
    assert unseen == [], "printed by no Python code: by a library's C++"


def test_a_foreign_line_is_seen(home: Path) -> None:
    """The check above sees a library's logger and what is written beside Python."""
    logged = run(home, "-c", "import logging, transformers; transformers.utils.logging.get_logger('transformers').error('x')")
    beside = run(home, "-c", "import os; os.write(2, b'from C++')")
    with pytest.raises(AssertionError):
        check_only_our_lines(logged)
    with pytest.raises(AssertionError, match="printed by no Python code"):
        check_only_our_lines(beside)


def test_plan_and_inspect(home: Path) -> None:
    assert "Best of" in upshift(home, "plan", "llama", "--on", "h100", "--sequence-length", "64", "--global-batch", "8").out
    assert "Llama" in upshift(home, "inspect", "llama", "--sequence-length", "64").out
    assert "256 tokens" in upshift(home, "inspect", "llama").out  # as many as the model has positions for


def test_train_and_load(home: Path) -> None:
    upshift(
        home, "train", "llama", "--data", "data.jsonl", "-o", "trained", "--sequence-length", "64", "--global-batch", "8",
        "--max-steps", "3", *FAST,
    )  # fmt: skip
    assert (home / "trained" / "model.safetensors").is_file()
    answer = upshift(home, "generate", "trained", "--prompt", "the quick", "--max-new-tokens", "4", "--engine", "torch", "--json")
    assert by_transformers(home, "decoder", "trained", 4, "the quick") == [{"tokens": 4, "text": json.loads(answer.out)["text"]}]


def test_trials_of_plans(home: Path) -> None:
    upshift(
        home, "train", "llama", "--data", "data.jsonl", "-o", "tried", "--sequence-length", "64", "--global-batch", "8",
        "--max-steps", "3", "--trial-seconds", "10", "--set", "torch_compile=off",
    )  # fmt: skip


def test_trainer(home: Path) -> None:
    script = home / "script.py"
    script.write_text(TRAINER_SCRIPT)
    assert "loss" in run(home, script, "llama", home / "by-trainer").out
    assert (home / "by-trainer" / "model.safetensors").is_file()


def test_encode(home: Path) -> None:
    upshift(home, "encode", "bert", "--input", "texts.txt", "-o", "rows.npy", "--engine", "torch")
    assert numpy.load(home / "rows.npy").shape == (8, 32)


@pytest.mark.parametrize(("kind", "model"), [("decoder", "llama"), ("seq2seq", "t5")])
def test_generate_by_a_race(home: Path, kind: str, model: str) -> None:
    answers = home / f"{model}.jsonl"
    upshift(home, "generate", model, "--prompts", "texts.txt", "-o", answers, "--max-new-tokens", "4")
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    prompts = (home / "texts.txt").read_text().splitlines()
    assert texts == [answer["text"] for answer in by_transformers(home, kind, model, 4, *prompts)]


def test_shard(home: Path) -> None:
    upshift(home, "shard", "llama", "-o", "sharded", "--max-shard-size", "50KB")
    assert (home / "sharded" / "model.safetensors.index.json").is_file()


def test_tune(home: Path) -> None:
    upshift(
        home, "tune", "llama", "--data", "data.jsonl", "--space", "space.yaml", "-o", "tuned", "--trials", "2",
        "--sequence-length", "64", "--max-steps", "2", *FAST,
    )  # fmt: skip
    assert any((home / "tuned").iterdir())


@pytest.fixture
def server(home: Path) -> Iterator[str]:
    """The address of `upshift serve`."""
    log, notes = home / "serve.log", home / "serve-written.jsonl"
    command = [sys.executable, "-m", "upshift.cli.main", "serve", "llama", "--engine", "torch", "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=home, env=environment(home, notes))
    try:
        deadline = time.monotonic() + SECONDS
        while "Serving at" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield next(word for word in log.read_text().split() if word.startswith("http://"))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()


def test_serve(home: Path, server: str) -> None:
    import httpx2

    request: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4}
    answer = httpx2.post(f"{server}/v1/chat/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    log = (home / "serve.log").read_text()
    written = [json.loads(line) for line in (home / "serve-written.jsonl").read_text().splitlines()]
    check_only_our_lines(Ended("", "", written)._replace(err="\n".join(note["text"] for note in written if note["text"] in log)))


def test_demo(home: Path) -> None:
    upshift(home, "demo", "--quick", "-o", "demo")
    assert (home / "demo" / "report.html").is_file()
