"""Run the demo: train a small model on text that every machine has, once by default and once with the chosen plan.

The text is Python's standard library. The tokenizer and the model are made on the spot. The plain default runs first. The chosen
plan runs for longer, and is evaluated when it has seen as many tokens. Both have the same learning-rate schedule, so their
losses can be compared.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from upshift.planning.plan import Plan
from upshift.record import Record
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.job.job import run_job
from upshift.training.loop.events import OnEvent
from upshift.training.run import PreparedRun, Watcher, prepare_run

VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 256
GLOBAL_BATCH = 8
MAX_STEPS = 2000  # the steps of the schedule; the demo stops earlier
TOKENIZER_BYTES = 3_000_000
CORPUS_BYTES = 12_000_000
EXCLUDED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "idlelib")
ARGUMENTS = {"learning_rate": 2e-3, "warmup_steps": 20, "lr_scheduler_type": "constant_with_warmup", "weight_decay": 0.01}
PROMPT = "def read_text(path):\n"
PROMPTS = ("def read_text(path):", "class Reader:", "import os")  # of the file of prompts, one a line


@dataclass(frozen=True)
class Timing:
    """The seconds of each part of the demo."""

    trials: float = 60.0
    baseline: float = 60.0
    training: float = 120.0


@dataclass(frozen=True)
class DemoResult:
    """The records of both runs, and a text that the trained model wrote."""

    prepared: PreparedRun
    baseline: Record
    baseline_tokens: int
    chosen: Record
    text: str
    model_directory: Path

    @property
    def chose_the_default(self) -> bool:
        """Return whether the trials found no faster plan than the plain default: then both runs have one plan."""
        return self.prepared.plan.label() == self.prepared.planning.default.plan.label()

    @property
    def chosen_loss_at_equal_tokens(self) -> float | None:
        """Return the chosen plan's loss when it had seen as many tokens as the default saw, or None."""
        for tokens, loss in self.chosen.details["evaluations"]:
            if tokens >= self.baseline_tokens:
                return float(loss)
        return None


def write_corpus(folder: Path) -> list[str]:
    """Copy the standard library's source, without its tests, into ``folder``. Return the texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for file in sorted(root.rglob("*.py")):
        if not set(EXCLUDED_FOLDERS) & set(file.relative_to(root).parts[:-1]):
            files.append(file)
    random.Random(0).shuffle(files)
    texts: list[str] = []
    size = 0
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        if size + len(text) > CORPUS_BYTES or not text.strip():
            continue
        size += len(text)
        (folder / "-".join(file.relative_to(root).with_suffix(".txt").parts)).write_text(text, encoding="utf-8")
        texts.append(text)
    return texts


def write_model(folder: Path, texts: list[str]) -> Any:
    """Write a Llama-style config of about 10 M parameters and its tokenizer. Return the tokenizer."""
    sample = []
    size = 0
    for text in texts:
        if size < TOKENIZER_BYTES:
            sample.append(text)
            size += len(text)
    tokenizer = train_byte_level_bpe(sample, VOCAB_SIZE)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_prompts(path: Path) -> None:
    """Write a file of prompts that the trained model can continue."""
    path.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")


def prepare_demo(folder: Path, *, timing: Timing, watcher: Watcher) -> PreparedRun:
    """Write text and model into ``folder``, and plan the run."""
    texts = write_corpus(folder / "text")
    write_model(folder / "model", texts)
    request = TrainRequest(
        model=str(folder / "model"),
        data=str(folder / "text"),
        sequence_length=SEQUENCE_LENGTH,
        global_batch=GLOBAL_BATCH,
        max_steps=MAX_STEPS,
        from_config=True,
        trial_seconds=timing.trials,
    )
    prepared, _ = prepare_run(request, watcher=watcher)
    return prepared


def run_demo(prepared: PreparedRun, folder: Path, *, timing: Timing, on_baseline: OnEvent, on_chosen: OnEvent) -> DemoResult:
    """Run the plain default and the chosen plan, and return both results."""
    arguments = Arguments(max_steps=MAX_STEPS, eval_steps=0, **ARGUMENTS)
    default_plan = Plan.model_validate(prepared.planning.default.plan.model_dump())
    measured = prepared.proof.default.numbers() if prepared.proof else None
    predicted = measured or prepared.planning.numbers(prepared.planning.default)
    baseline_run = replace(prepared, plan=default_plan, predicted=predicted)
    baseline = run_job(
        baseline_run.job(arguments, output=folder / "plain", overwrite=True, stop_after_seconds=timing.baseline),
        prepared.data,
        on_event=on_baseline,
        fresh_process=True,
    )
    tokens = int(baseline.details["loss_curve"][-1][0])
    chosen = run_job(
        prepared.job(
            arguments, output=folder / "trained", overwrite=True, stop_after_seconds=timing.training, evaluate_at_tokens=(tokens,)
        ),
        prepared.data,
        on_event=on_chosen,
        fresh_process=True,
    )
    text = generate(folder / "trained")
    return DemoResult(prepared, baseline, tokens, chosen, text, folder / "trained")


def generate(directory: Path) -> str:
    """Load the saved model with transformers, and continue the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).train(False)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, min_new_tokens=48, max_new_tokens=64, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))
