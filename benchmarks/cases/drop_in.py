"""The same training script with one import changed: upshift.Trainer against transformers.Trainer, on three tasks.

    python benchmarks/cases/drop_in.py [--quick] [--tasks causal-lm,classification,lora] [--rounds 3]

plain    transformers.Trainer with its defaults: fp32, padding to the longest of a batch
careful  with what a careful person sets by hand: bf16, torch_compile, fused AdamW, widths in steps of 64
upshift  upshift.Trainer with the arguments of plain

All sequences have mixed lengths: functions and classes of the Python standard library, each a row. Contenders run in turn,
each time in a fresh process with an empty compilation cache, on the same rows in the same order; Upshift's trials are made
once before, as in a user's first run. Speed counts real tokens. Steady: the second half of the steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer import LOSS_GOAL, TIMEOUT_SECONDS, compare, numbers, speeds, table
from trainer_data import cached_tokenizer, definitions
from transformers import BertConfig, LlamaConfig

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import interleave, run_fresh
from upshift.planning.planner import find_host
from upshift.training.data.corpus import read_corpus

CLAIMS = (
    Claim(
        name="causal-lm",
        text="one changed import makes a language model's training script faster",
        ours="upshift.Trainer",
        baseline="transformers.Trainer, its defaults",
        options="--rounds 2 --tasks causal-lm",
        goal=4.0,
        of=Source(row="summary", value="details.ratios.upshift/plain tokens_per_second.value", where={"task": "causal-lm"}),
    ),
    Claim(
        name="causal-lm-careful",
        text="and faster than with the best flags by hand",
        ours="upshift.Trainer",
        baseline="Trainer with bf16, torch_compile, fused AdamW",
        options="--rounds 2 --tasks causal-lm",
        goal=1.2,
        of=Source(row="summary", value="details.ratios.upshift/careful tokens_per_second.value", where={"task": "causal-lm"}),
    ),
    Claim(
        name="classification",
        text="the same of BERT classification",
        ours="upshift.Trainer",
        baseline="transformers.Trainer, its defaults",
        options="--rounds 2 --tasks classification",
        goal=4.0,
        of=Source(row="summary", value="details.ratios.upshift/plain tokens_per_second.value", where={"task": "classification"}),
    ),
    Claim(
        name="classification-careful",
        text="and over the best flags by hand",
        ours="upshift.Trainer",
        baseline="Trainer with bf16, torch_compile, fused AdamW",
        options="--rounds 2 --tasks classification",
        goal=1.2,
        of=Source(
            row="summary", value="details.ratios.upshift/careful tokens_per_second.value", where={"task": "classification"},
        ),
    ),
    Claim(
        name="lora",
        text="the same of LoRA fine-tuning",
        ours="upshift.Trainer",
        baseline="transformers.Trainer, its defaults",
        options="--rounds 2 --tasks lora",
        goal=4.0,
        of=Source(row="summary", value="details.ratios.upshift/plain tokens_per_second.value", where={"task": "lora"}),
    ),
    Claim(
        name="lora-careful",
        text="and over the best flags by hand",
        ours="upshift.Trainer",
        baseline="Trainer with bf16, torch_compile, fused AdamW",
        options="--rounds 2 --tasks lora",
        goal=1.2,
        of=Source(row="summary", value="details.ratios.upshift/careful tokens_per_second.value", where={"task": "lora"}),
    ),
)  # fmt: skip
FIGURES = (
    Figure(
        name="causal-lm-loss-apart",
        scale=100.0,
        of=Source(row="summary", value="details.evaluation_loss_over_plain.upshift", where={"task": "causal-lm"}),
    ),
    Figure(
        name="classification-loss-apart",
        scale=100.0,
        of=Source(row="summary", value="details.evaluation_loss_over_plain.upshift", where={"task": "classification"}),
    ),
    Figure(
        name="lora-loss-apart",
        scale=100.0,
        of=Source(row="summary", value="details.evaluation_loss_over_plain.upshift", where={"task": "lora"}),
    ),
)
PEERS = {"transformers.Trainer": "--contenders plain,upshift", "careful": "--contenders careful,upshift"}

SUITE = "--rounds 1 --tasks classification"
ROOT = Path(__file__).parents[1]
NAMES = ("plain", "careful", "upshift")
TASKS = ("causal-lm", "classification", "lora")
PLANNED_STEPS = 1000  # of the run that is planned for; compilation is spread over it
HELD_OUT_ROWS, BATCH = 32, 8


@dataclass(frozen=True)
class Size:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    sequence_length: int
    steps: int


FULL = Size(16384, 768, 6, 12, 512, 8)
QUICK = Size(4096, 64, 2, 2, 64, 6)


def write_inputs(folder: Path, size: Size, task: str) -> tuple[str, str]:
    """(model directory, data file): tokenized once, a definition labelled by whether it returns something. Without dropout:
    with it every contender draws other numbers, and losses differ by those."""
    import sysconfig

    files = list(read_corpus(sysconfig.get_paths()["stdlib"], pattern="*.py").documents)
    tokenizer = cached_tokenizer(files, size.vocab_size)
    rows = []
    for text in files:
        for part in definitions(text):
            ids = tokenizer(part, truncation=True, max_length=size.sequence_length)["input_ids"]
            label = {"label": int("return " in part)} if task == "classification" else {}
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), **label})
        if len(rows) > HELD_OUT_ROWS + BATCH * 200:
            break
    data = folder / "data.json"
    data.write_text(json.dumps({"train": rows[HELD_OUT_ROWS:], "evaluation": rows[:HELD_OUT_ROWS]}))
    common = {
        "vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads, "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if task == "classification":
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config: Any = BertConfig(**common, **drops, intermediate_size=4 * size.hidden_size, num_labels=2)
    else:
        config = LlamaConfig(**common, intermediate_size=8 * size.hidden_size // 3 // 64 * 64, tie_word_embeddings=False)
    config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model"), str(data)


def run_contender(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    with tempfile.TemporaryDirectory(prefix="inductor-", dir=folder) as cache:
        answer = run_fresh(
            [sys.executable, str(Path(__file__).with_name("drop_in_run.py")), str(path)], timeout_seconds=TIMEOUT_SECONDS,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "UPSHIFT_CACHE": str(folder / "cache")},
        )  # fmt: skip
    return answer | speeds(answer["seconds"], answer["tokens"])


def run_task(case: Case, options: Any, size: Size, task: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="upshift-drop-in-") as name:
        folder = Path(name)
        model, data = write_inputs(folder, size, task)
        common = {"task": task, "model": model, "data": data, "steps": size.steps, "seed": options.seed}
        requests = {n: common | {"contender": n, "planned_steps": PLANNED_STEPS} for n in options.contenders.split(",")}
        if "upshift" in requests:  # its trials, which the rounds recall
            first = run_contender(requests["upshift"], folder)
            print_progress(f"{task}: {first['plan_label']}")

        def keep(number: int, name: str, answer: dict[str, Any]) -> None:
            print_progress(f"{task} round {number + 1} {name}: {answer['tokens_per_second']:.0f} tokens/s")
            shown = requests[name] | {"model": None, "data": None}
            details = {"round": number, "task": task} | answer
            case.add(name, plan=answer["plan"] or shown, measured=numbers(answer), details=details)

        runs = {name: partial(run_contender, request, folder) for name, request in requests.items()}
        results = interleave(runs, rounds=options.rounds, on_result=keep)
    outcome = compare(results) | {"case": "drop_in", "task": task, "rounds": options.rounds, "loss_goal": LOSS_GOAL}
    case.add("summary", plan={"task": task}, measured=None, details=outcome)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    unknown = [task for task in options.tasks.split(",") if task not in TASKS]
    if unknown:
        parser.error(f"--tasks {unknown[0]} is unknown; use {', '.join(TASKS)}")
    size = QUICK if options.quick else FULL
    case = Case("drop_in", options.results, find_host(None), options.quick, {"seed": options.seed, **vars(size)})
    outcomes = [run_task(case, options, size, task) for task in options.tasks.split(",")]
    for outcome in outcomes:
        print(outcome["task"], table(outcome), "", sep="\n")
    print(json.dumps({"case": "drop_in", "tasks": {outcome["task"]: outcome["ratios"] for outcome in outcomes}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
