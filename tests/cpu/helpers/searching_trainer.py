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


def make_trainer(output: Path, report_to: list[str], *, population: bool = False, **steps: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 6, "eval_steps": 3} | steps
    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=4, eval_strategy="steps",
        save_strategy="steps" if population else "no", save_steps=3, report_to=report_to, disable_tqdm=True,
        logging_strategy="no", **settings,
    )  # fmt: skip
    return Trainer(args=arguments, model_init=model_init, train_dataset=rows(32, 0), eval_dataset=rows(8, 1), trial_seconds=0)


def options_of(backend: str, output: Path) -> dict[str, Any]:
    """What only that backend has: of Optuna a sampler that runs out of points and a pruner, of Ray a population."""
    if backend == "optuna":
        from optuna.pruners import ThresholdPruner
        from optuna.samplers import GridSampler

        grid = {"learning_rate": [1e-6, 3e-2], "per_device_train_batch_size": [2]}
        return {"sampler": GridSampler(grid, seed=0), "pruner": ThresholdPruner(upper=4.1)}
    if backend == "ray":
        from ray.tune.schedulers import PopulationBasedTraining

        return {
            "storage_path": str(output / "ray"),
            "stop": {"training_iteration": 2},
            "reuse_actors": True,  # else each trial that goes on imports everything again
            "scheduler": PopulationBasedTraining(
                metric="objective", mode="min", time_attr="training_iteration", perturbation_interval=1,
                quantile_fraction=0.5, synch=True, hyperparam_mutations={"learning_rate": rates},
            ),
        }  # fmt: skip
    return {}


def rates() -> float:
    return 0.02


def main(backend: str, output: Path) -> None:
    trainer = make_trainer(output, ["wandb"] if backend == "wandb" else [], population=backend == "ray")
    if backend != "ray":
        output.mkdir(parents=True, exist_ok=True)  # the Trainer has made it where it keeps checkpoints
        trainer.add_callback(Tells(output / "told"))
    trials = 2 if backend == "ray" else 3
    best = trainer.hyperparameter_search(hp_space=SPACE, n_trials=trials, backend=backend, **options_of(backend, output))
    print(FOUND + json.dumps({"objective": best.objective, "hyperparameters": best.hyperparameters}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
