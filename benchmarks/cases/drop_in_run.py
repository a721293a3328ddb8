"""One contender of the drop-in case, in this process: python drop_in_run.py REQUEST.json. Its last line is the answer.

The script is one that is written for transformers.Trainer. Contenders differ in the import of Trainer, and in the arguments
that a careful person sets by hand.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, TrainerCallback, TrainingArguments

import upshift
from upshift.benchmarking.meters import resident_peak_bytes

CAREFUL = {"bf16": True, "torch_compile": True, "optim": "adamw_torch_fused"}
PAD_MULTIPLE = 64  # of a careful person's collator: torch.compile compiles anew for each width


class StopAt(TrainerCallback):
    """Ends a run that is planned for longer, and times its steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.start, self.ends = steps, 0.0, []  # type: ignore[var-annotated]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        control.should_training_stop = len(self.ends) >= self.steps


def build_model(task: str, folder: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    if task == "classification":
        return transformers.AutoModelForSequenceClassification.from_config(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if task == "lora":
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, adapter)
    return model


def collator(task: str, tokenizer: Any, *, careful: bool) -> Any:
    multiple = PAD_MULTIPLE if careful else None
    if task == "classification":
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    return DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=multiple)


def run(request: dict[str, Any]) -> dict[str, Any]:
    task, careful = request["task"], request["contender"] == "careful"
    data = json.loads(Path(request["data"]).read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    model = build_model(task, request["model"])
    clock = StopAt(request["steps"])
    kind = upshift.Trainer if request["contender"] == "upshift" else transformers.Trainer
    with tempfile.TemporaryDirectory(prefix="trainer-out-") as output:
        arguments = TrainingArguments(
            output_dir=output, max_steps=request["planned_steps"], seed=request["seed"], report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True, train_sampling_strategy="sequential",
            **(CAREFUL if careful else {}),
        )  # fmt: skip
        trainer = kind(
            model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["evaluation"],
            data_collator=collator(task, tokenizer, careful=careful), callbacks=[clock],
        )  # fmt: skip
        trainer.train()
        resident = resident_peak_bytes()
        torch._dynamo.reset()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        evaluation = held_out_loss(trainer.model, data["evaluation"], collator(task, tokenizer, careful=False))
    batch = arguments.per_device_train_batch_size
    lengths = [len(row["input_ids"]) for row in data["train"][: batch * request["steps"]]]
    tokens = [sum(lengths[: batch * (step + 1)]) for step in range(request["steps"])]
    choice = getattr(trainer, "choice", None)
    return {
        "seconds": [end - clock.start for end in clock.ends], "losses": losses, "tokens": tokens,
        "evaluation_loss": evaluation, "resident_gib": resident / 2**30, "peak_gib": None,
        "plan": choice.plan.model_dump() if choice else None, "plan_label": choice.plan.label() if choice else None,
    }  # fmt: skip


def held_out_loss(model: Any, rows: list[dict[str, Any]], collate: Any) -> float:
    """In fp32, row by row, by nobody's trainer."""
    model.train(False)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            batch = collate([row])
            weight = int((batch["labels"] != -100).sum()) - (batch["labels"].ndim > 1)
            total += float(model(**batch).loss) * weight
            count += weight
    return total / count


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_bytes()))))
