"""A script for transformers.Trainer, on ranks that torchrun's agent starts: each trains one model after the other, and writes
what it saw."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import TrainerCallback, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.settings import read_ranks
from upshift.training.hf_trainer import step

WIDTHS = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = WIDTHS | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **BERT))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **WIDTHS))


def data_of(kind: str, count: int, *, equal: bool = False) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = draw.integers(3, 96, size=12 if equal else draw.integers(4, 24)).tolist()
        found.append({"input_ids": ids, "labels": len(ids) % 3 if kind == "bert" else ids})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    if isinstance(rows[0]["labels"], int):
        labels = torch.tensor([row["labels"] for row in rows])
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.zero = 0, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.zero = self.steps + 1, state.is_world_process_zero


def a_plan(case: dict[str, Any], world: int) -> Plan:
    shared = Layout(**case["layout"])
    return Plan(
        device="cpu", host="test", model="test", sequence_length=24, per_device_train_batch_size=4, num_processes=world,
        gradient_accumulation_steps=4 * shared.ranks_per_replica // world, layout=shared, optim="adamw_torch",
        loss_chunk_tokens=case.get("loss_chunk_tokens", 0),
    )  # fmt: skip


def run_out_once(model: Any) -> None:
    """Of the next rows of more than two, in the last layer, on this rank alone."""
    failed: list[int] = []

    def refuse(module: Any, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if module.training and len(hidden) > 2 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("made up by the test")

    model.model.layers[-1].register_forward_hook(refuse)


def by_hand(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """A training_step that goes backward itself."""
    model.train()
    loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
    self.accelerator.backward(loss)
    return loss.detach()


def twice(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """One that goes backward twice, and looks at the gradients in between."""
    loss = super(type(self), self).training_step(model, inputs, num_items_in_batch)
    assert all(bool(parameter.grad.any()) for parameter in self.model.parameters())
    super(type(self), self).training_step(model, inputs, num_items_in_batch)
    return loss


def without_labels(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = collate(rows)
    return found | {"labels": torch.full_like(found["labels"], -100)}


STEPS = {"by hand": by_hand, "twice": twice}


def train(case: dict[str, Any], output: Path) -> dict[str, Any]:
    kind = case.get("kind", "llama")
    if case.get("refused"):
        try:
            return train(case | {"refused": False}, output)
        except RequestError as error:
            return {"refused": str(error)}
    given = {
        "output_dir": str(output), "max_steps": 10, "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": [],
        "learning_rate": 3e-3, "disable_tqdm": True, "save_steps": 5, "per_device_eval_batch_size": 4, "seed": 1,
    }  # fmt: skip
    arguments = TrainingArguments(**(given | case.get("arguments", {})))
    ranks = read_ranks()
    world = ranks.size if ranks else 1
    arguments.per_device_train_batch_size = 8 // world
    plan = a_plan(case, world) if "layout" in case else None
    model = model_of(kind)
    if case.get("adapter"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if case.get("fails") and ranks is not None and ranks.rank == 1:
        run_out_once(model)
    bare = case.get("unlabelled") and ranks is not None and ranks.rank == 1
    seen = Seen()
    own = {"training_step": STEPS[case["step"]]} if "step" in case else {}
    trainer = type("Own", (upshift.Trainer,), own)(
        model=model, args=arguments, train_dataset=data_of(kind, 64), eval_dataset=data_of(kind, 16, equal=True),
        data_collator=without_labels if bare else collate, callbacks=[seen], plan=plan, fixed=tuple(case.get("fixed", ())),
    )  # fmt: skip
    step.can_overlap = lambda plan: bool(case.get("overlaps"))  # as on GPUs
    trainer.train(resume_from_checkpoint=case.get("resume"))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    predicted = trainer.predict(data_of(kind, 13, equal=True))
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "final"))
    return {
        "losses": [entry["loss"] for entry in history], "norms": [entry["grad_norm"] for entry in history], "loss": loss,
        "steps": seen.steps, "zero": seen.zero, "predicted": np.asarray(predicted.predictions).tolist(),
        "rows": int(trainer.upshift_choice.plan.per_device_train_batch_size), "label": trainer.upshift_choice.plan.label(),
    }  # fmt: skip


def train_all(folder: Path, name: str, cases: dict[str, Any]) -> None:
    """Train the cases on this rank, and write what it saw to ``NAME-RANK.json``."""
    torch.set_num_threads(1)
    ranks = read_ranks()
    rank = ranks.rank if ranks else 0
    results = {case: train(fields, folder / case) for case, fields in cases.items()}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(results))


def run_world(folder: Path, name: str, size: int, cases: dict[str, Any]) -> None:
    """Train the cases in this process, or in ``size`` forks of it, which torchrun's agent starts."""
    if size == 1:
        train_all(folder, name, cases)
        return
    standalone = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=name,
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(standalone, train_all)(folder, name, cases)


def main(folder: Path) -> None:
    """Run each world of ``worlds.json`` in a fork of this process, which has computed nothing. ``NAME.out`` is what it prints."""
    os.environ["UPSHIFT_CACHE"] = str(folder / "cache")  # here, so that the process that forks this one serves other tests, too
    for name, (size, cases) in json.loads((folder / "worlds.json").read_text()).items():
        child = os.fork()
        if not child:
            code = 1
            try:
                with (folder / f"{name}.out").open("w") as output:
                    os.dup2(output.fileno(), 1)
                run_world(folder, name, size, cases)
                code = 0
            except BaseException:  # a fork must not go on as its parent
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            sys.exit(f"{name} ended with exit code {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
