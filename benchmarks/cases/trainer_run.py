"""One contender of the trainer case, in this process: python trainer_run.py REQUEST.json. Its last line is the answer.

Every contender starts from the same weights, takes the same sequences in each optimizer step, and is timed by the same
clock: the moments at which its optimizer steps end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

from upshift.benchmarking.meters import resident_peak_bytes
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.planning.workload import pack_rows
from upshift.training.batches.layout import layout_for
from upshift.training.batches.sampler import BatchSource, evaluation_batches
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.evaluate import evaluate
from upshift.training.forward_passes import ForwardPasses
from upshift.training.loop.events import Event, Started, StepDone
from upshift.training.prepare import load_or_build
from upshift.training.run import Watcher, train

IGNORED = -100
CAREFUL = {"bf16": True, "torch_compile": True, "optim": "adamw_torch_fused"}


def run_upshift(request: dict[str, Any]) -> dict[str, Any]:
    """The chosen plan, through the door that users take."""
    ends, losses, tokens, start = [], [], [], [0.0]

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            start[0] = time.perf_counter()
        if isinstance(event, StepDone):
            ends.append(time.perf_counter())
            losses.append(event.loss)
            tokens.append(event.tokens)

    with tempfile.TemporaryDirectory(prefix="upshift-out-") as output:
        record = train(
            request["model"], request["data"], output=output, sequence_length=request["sequence_length"],
            global_batch=request["global_batch"], overwrite=True, from_config=True, plan_file=Path(request["plan"]),
            arguments={"max_steps": request["steps"], "seed": request["seed"], "learning_rate": request["learning_rate"]},
            watcher=Watcher(event=on_event),
        )  # fmt: skip
    measured = record.measured
    assert measured is not None
    resident = measured.resident_gib or 0.0
    return {
        "seconds": [end - start[0] for end in ends], "losses": losses, "tokens": tokens,
        "evaluation_loss": measured.evaluation_loss,
        "resident_gib": resident * record.plan["num_processes"] or None, "peak_gib": measured.peak_gib,
    }  # fmt: skip


class RecordingTrainer(Trainer):
    """Takes the data in the given order, and keeps each step's loss; changes nothing that computes."""

    step_losses: list[torch.Tensor]

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.step_losses.append(loss.detach())
        return loss


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.start = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


class PackRows:
    """Each step's sequences in as few rows as hold them, each attending to itself only: positions restart."""

    def __init__(self, length: int, pad_token_id: int) -> None:
        self.length, self.pad_token_id = length, pad_token_id

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = pack_rows([len(feature["input_ids"]) for feature in features], capacity=self.length)
        shape = (len(rows), self.length)
        ids, labels = torch.full(shape, self.pad_token_id), torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.long)
        for number, members in enumerate(rows):
            filled = 0
            for member in members:
                piece = torch.tensor(features[member]["input_ids"])
                end = filled + len(piece)
                ids[number, filled:end] = piece
                labels[number, filled + 1 : end] = piece[1:]
                positions[number, filled:end] = torch.arange(len(piece))
                filled = end
            positions[number, filled:] = torch.arange(self.length - filled)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def collator(kind: str, tokenizer: Any, length: int) -> Any:
    if kind == "flatten":
        return DataCollatorWithFlattening()
    if kind == "rows":
        return PackRows(length, tokenizer.pad_token_id)
    return DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=64 if kind == "pad-64" else None)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_trainer(request: dict[str, Any]) -> dict[str, Any]:
    """transformers.Trainer with the request's flags and collator, everything else its default."""
    source = find_model(request["model"])
    data = prepare_data(source, request["data"], sequence_length=request["sequence_length"])
    plain = Plan(device=device(), host="", model="", sequence_length=request["sequence_length"],
                 per_device_train_batch_size=request["global_batch"], threads_per_process=torch.get_num_threads())  # fmt: skip
    rows, tokens = ordered_rows(request, data, plain)
    model = load_or_build(source, plain, from_config=True, seed=request["seed"])
    if request["collator"] in ("rows", "flatten"):
        model.config.use_cache = False  # with a cache, transformers ignores that positions restart
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="trainer-out-") as output:
        arguments = TrainingArguments(
            output_dir=output, max_steps=request["steps"], seed=request["seed"], report_to="none", save_strategy="no",
            per_device_train_batch_size=request["global_batch"], learning_rate=request["learning_rate"],
            disable_tqdm=True, use_cpu=device() == "cpu", **request["flags"],
        )  # fmt: skip
        collate = collator(request["collator"], data.tokenizer, request["sequence_length"])
        trainer = RecordingTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[clock])
        trainer.step_losses = []
        trainer.train()
    resident = resident_peak_bytes()
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device() == "cuda" else None
    return {
        "seconds": [end - clock.start for end in clock.ends], "losses": [float(loss) for loss in trainer.step_losses],
        "tokens": tokens, "evaluation_loss": held_out_loss(model, data, plain), "resident_gib": resident / 2**30,
        "peak_gib": peak_gib,
    }  # fmt: skip


def ordered_rows(request: dict[str, Any], data: TrainingData, plain: Plan) -> tuple[list[dict[str, Any]], list[int]]:
    """The sequences in Upshift's order, and the tokens seen after each step."""
    sequences = data.training
    source = BatchSource(
        sequences=sequences, global_batch=request["global_batch"], layout=layout_for(plain, data.objective),
        objective=data.objective, seed=request["seed"],
    )  # fmt: skip
    rows, tokens = [], [0]
    for step in range(request["steps"]):
        ids = source.sequence_ids(source.position_of_step(step)).tolist()
        starts, lengths = sequences.starts[ids].tolist(), sequences.lengths[ids].tolist()
        parts = [sequences.tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
        rows += [{"input_ids": part} for part in parts]
        tokens.append(tokens[-1] + sum(lengths))
    return rows, tokens[1:]


def held_out_loss(model: Any, data: TrainingData, plain: Plan) -> float | None:
    if data.evaluation is None:
        return None
    torch._dynamo.reset()
    layout = layout_for(plain, data.objective)
    global_batch = plain.per_device_train_batch_size
    batches = evaluation_batches(data.evaluation, global_batch=global_batch, layout=layout, objective=data.objective)
    return evaluate(ForwardPasses(model, plain), batches)


def main(path: str) -> None:
    request = json.loads(Path(path).read_bytes())
    answer = run_upshift(request) if request["contender"] == "upshift" else run_trainer(request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
