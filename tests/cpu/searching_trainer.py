"""A script for transformers.Trainer with one import changed: searches with a backend. Run as a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from upshift import Trainer

FOUND = "found: "  # beside what Ray passes on of its workers
CONFIG = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
SPACE = {"learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}, "per_device_train_batch_size": [2, 4]}


class Tells(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with self.path.open("a") as file:
            file.write("begin\n")


def model_init(trial: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=64, max_position_embeddings=32))


def rows(count: int, seed: int) -> Dataset:
    chance = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, 8, (count, 1), generator=chance) + torch.arange(16)) % 64
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def make_trainer(output: Path, report_to: list[str]) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=6, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=3,
        save_strategy="no", report_to=report_to, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return Trainer(args=arguments, model_init=model_init, train_dataset=rows(32, 0), eval_dataset=rows(8, 1), trial_seconds=0)


def main(backend: str, output: Path) -> None:
    trainer = make_trainer(output, ["wandb"] if backend == "wandb" else [])
    if backend != "ray":
        output.mkdir(parents=True, exist_ok=True)  # the Trainer has made it where it keeps checkpoints
        trainer.add_callback(Tells(output / "told"))
    best = trainer.hyperparameter_search(hp_space=SPACE, n_trials=3, backend=backend)
    print(FOUND + json.dumps({"objective": best.objective, "hyperparameters": best.hyperparameters}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
