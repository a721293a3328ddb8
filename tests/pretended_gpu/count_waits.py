"""Train some steps of two micro-batches on a pretended GPU, by the training loop itself. Print a line of JSON for each case.

It says how often the host waited for the GPU in a step in the middle, in which order steps were queued, read, reported and saved,
and what the steps were.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pretended_cuda

STEPS = 6
COUNTED_STEP = 4
LENGTH = 64
CASES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "save_steps": 2},
    "fp32": {"save_steps": 2},
    "bf16": {"precision": "bf16"},
    "bf16-weights": {"precision": "bf16-weights"},
    "fp16": {"precision": "fp16"},
    "fp16, fused": {"precision": "fp16", "optim": "adamw_torch_fused"},
    "chunked loss": {"loss_chunk_tokens": 64},
    "optimizer in the backward pass": {"optimizer_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "not finite in step 3": {"not_finite_in": 3, "save_steps": 2},
    "not finite in step 4": {"not_finite_in": 4, "save_steps": 2},
}
TRAINERS: dict[str, dict[str, Any] | None] = {
    "Trainer": None,
    "planned Trainer": {},
    "planned Trainer, chunked loss": {"loss_chunk_tokens": 64},
}


class Notes:
    """Hold in order what happened in a run. A loss of the step ``not_finite_in`` is NaN."""

    def __init__(self) -> None:
        self.not_finite_in: int | None = None
        self.begin(None)

    def begin(self, not_finite_in: int | None) -> None:
        self.not_finite_in = not_finite_in
        self.happened: list[str] = []
        self.waits: list[dict[str, int]] = []

    def add(self, word: str, step: int) -> None:
        self.happened.append(f"{word} {step}")


def watch_runs(notes: Notes) -> None:
    """Note what every run of this process does from now on."""
    from upshift.training import step as step_module
    from upshift.training.loop.loop import TrainingLoop
    from upshift.training.loop.save import CheckpointSaver
    from upshift.training.step import QueuedStep, TrainStep

    queue, read, save, run_step = TrainStep.queue, QueuedStep.read, CheckpointSaver.save, TrainingLoop._run_step
    compute_loss = step_module.compute_loss

    def noted_queue(self: Any, *arguments: Any, **options: Any) -> Any:
        step = len(notes.waits) + 1
        notes.add("queue", step)
        queued = queue(self, *arguments, **options)
        queued.number = step
        return queued

    def noted_read(self: Any) -> Any:
        notes.add("read", self.number)
        return read(self)

    def noted_save(self: Any, output: Any, state: Any, *arguments: Any, **options: Any) -> None:
        notes.add("save", state.step)
        save(self, output, state, *arguments, **options)

    def counted_step(self: Any) -> None:
        pretended_cuda.clear_counters()
        run_step(self)
        notes.waits.append(dict(pretended_cuda.host_waits()))

    def breakable_loss(*arguments: Any, **options: Any) -> Any:
        loss = compute_loss(*arguments, **options)
        return loss * float("nan") if len(notes.waits) + 1 == notes.not_finite_in else loss

    TrainStep.queue, QueuedStep.read, CheckpointSaver.save = noted_queue, noted_read, noted_save  # type: ignore[method-assign]
    TrainingLoop._run_step = counted_step  # type: ignore[method-assign]
    step_module.compute_loss = breakable_loss


def run_case(
    folder: Path, output: Path, data: Any, notes: Notes, *, save_steps: int = 0, max_grad_norm: float = 1.0, **choices: Any
) -> dict[str, Any]:
    from upshift.debugging.run_report import FOLDER, RankReport
    from upshift.errors import JobFailed
    from upshift.planning.plan import Plan
    from upshift.training.arguments import Arguments
    from upshift.training.job.job import Job, run_job
    from upshift.training.loop.events import StepDone

    plain = {"device": "cuda", "optim": "adamw_torch", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    plan = Plan(**(plain | {"host": "test", "model": "test", "sequence_length": LENGTH} | choices))
    job = Job(
        model_reference=str(folder / "model"), data=str(folder / "data.jsonl"), output=str(output), plan=plan,
        global_batch=plan.per_device_train_batch_size * plan.gradient_accumulation_steps,
        arguments=Arguments(max_steps=STEPS, learning_rate=1e-3, max_grad_norm=max_grad_norm, save_steps=save_steps),
    )  # fmt: skip
    done: list[StepDone] = []

    def note(event: Any) -> None:
        if isinstance(event, StepDone):
            notes.add("done", event.step)
            done.append(event)

    failure = None
    output.mkdir()
    try:
        run_job(job, data, on_event=note)
    except JobFailed as error:
        failure = str(error)
    return {
        "failure": failure,
        "checkpoints": sorted(path.name for path in output.glob("checkpoint-*")),
        "reported_step": [RankReport.from_json(path.read_text()).step for path in (output / FOLDER).glob("*.json")],
        "steps": [[event.step, event.tokens, event.learning_rate] for event in done],
        "losses": [event.loss for event in done],
        "norms": [event.gradient_norm for event in done],
    }


def run_trainer(folder: Path, output: Path, plan: dict[str, Any] | None) -> dict[str, Any]:
    """Train by ``upshift.Trainer`` with a plan, or by transformers' own without one, on rows with masks."""
    import torch
    import transformers

    import upshift
    from upshift.planning.plan import Plan

    rows = [json.loads(line)["input_ids"] for line in (folder / "data.jsonl").read_text().splitlines()]
    waits: list[dict[str, int]] = []

    def collate(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in given)
        padded = torch.tensor([row["input_ids"] + [-100] * (length - len(row["input_ids"])) for row in given])
        return {"input_ids": padded.clamp(min=0), "attention_mask": (padded >= 0).long(), "labels": padded}

    class Counting(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            waits.append(dict(pretended_cuda.host_waits()))
            pretended_cuda.clear_counters()

    arguments = transformers.TrainingArguments(
        str(output), per_device_train_batch_size=8, max_steps=STEPS, logging_steps=STEPS, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    options: dict[str, Any] = {
        "model": transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), "args": arguments,
        "train_dataset": [{"input_ids": row} for row in rows], "data_collator": collate, "callbacks": [Counting()],
    }  # fmt: skip
    if plan is None:
        trainer = transformers.Trainer(**options)
    else:
        two = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch_fused"}
        given = Plan(**({"device": "cuda", "host": "", "model": "", "sequence_length": LENGTH} | two | plan))
        trainer = upshift.Trainer(plan=given, **options)
    trained = trainer.train()
    return {"waits": waits[COUNTED_STEP], "losses": [trained.training_loss], "failure": None}


def main(folder: Path, output: Path) -> None:
    from upshift.models.source import find_model
    from upshift.training.job.job import prepare_data

    notes = Notes()
    watch_runs(notes)
    data = prepare_data(find_model(str(folder / "model")), folder / "data.jsonl", sequence_length=LENGTH)
    for number, (name, options) in enumerate(CASES.items()):
        choices = dict(options)
        notes.begin(choices.pop("not_finite_in", None))
        outcome = run_case(folder, output / str(number), data, notes, **choices)
        waits = notes.waits[COUNTED_STEP - 1] if len(notes.waits) >= COUNTED_STEP else None
        print(json.dumps({"case": name, "waits": waits, "happened": notes.happened, **outcome}))
    for name, plan in TRAINERS.items():
        print(json.dumps({"case": name, **run_trainer(folder, output / name.replace(" ", "-"), plan)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
