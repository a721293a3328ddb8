"""One contender of the tuning case, in this process: python tuning_run.py REQUEST.json. Its last line is the answer.

Plain and upshift try the same points, from the same weights, with the same sequences in each step, and are judged by the
same held-out loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import optuna
import psutil
import torch
from optuna.trial import TrialState
from trainer_run import RecordingTrainer, held_out_loss, ordered_rows
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)  # fmt: skip

import upshift
from upshift.hardware.spec import Host
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.planning.planner import find_host
from upshift.training.data.dataset import prepare_data
from upshift.training.prepare import load_or_build
from upshift.tuning.tune import Progress, TrialRow, tune

NAME, EVALUATIONS, REDUCTION = "study", 18, 3  # a trial may end after 1, 3 and 9 evaluations of 18
FORK_SERVER = "upshift.fork_server_process"
GIB = 2**30
Answer = dict[str, Any]


def make_study(folder: str, points: list[dict[str, Any]]) -> tuple[optuna.Study, str]:
    """Both contenders' study: the points wait in it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(study_name=NAME, storage=storage)
    for point in points:
        study.enqueue_trial(point)
    return study, storage


def plain(request: dict[str, Any], folder: str) -> Answer:
    """What a user of Optuna writes: one process, every trial to its end."""
    study, _ = make_study(folder, request["points"])
    trial_of = {"lm": lm_trial, "classifier": classifier_trial}[request["task"]](request, folder)

    def objective(trial: optuna.Trial) -> float:
        return float(trial_of(suggested(trial, request["space"])))

    study.optimize(objective, n_trials=len(request["points"]))
    return {"values": {trial.number: trial.value for trial in study.trials}, "steps": len(study.trials) * request["steps"]}


def suggested(trial: optuna.Trial, space: dict[str, Any]) -> dict[str, Any]:
    return {
        name: trial.suggest_categorical(name, one)
        if isinstance(one, list)
        else trial.suggest_float(name, one["low"], one["high"], log=one.get("log", False))
        for name, one in space.items()
    }


def arguments_of(request: dict[str, Any], folder: str, values: dict[str, Any], **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=f"{folder}/out", max_steps=request["steps"], seed=request["seed"], report_to="none", save_strategy="no",
        per_device_train_batch_size=request["global_batch"], per_device_eval_batch_size=request["global_batch"],
        disable_tqdm=True, logging_strategy="no", use_cpu=True, **values, **more,
    )  # fmt: skip


def lm_trial(request: dict[str, Any], folder: str) -> Any:
    source, length = find_model(request["model"]), request["sequence_length"]
    data = prepare_data(source, request["data"], sequence_length=length)
    as_it_is = Plan(device="cpu", host="", model="", sequence_length=length, per_device_train_batch_size=request["global_batch"],
                    threads_per_process=torch.get_num_threads())  # fmt: skip
    rows, _ = ordered_rows(request, data, as_it_is)
    collate = DataCollatorForLanguageModeling(data.tokenizer, mlm=False)

    def run(values: dict[str, Any]) -> float:
        model = load_or_build(source, as_it_is, from_config=True, seed=request["seed"])
        arguments = arguments_of(request, folder, values)
        trainer = RecordingTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.step_losses = []
        trainer.train()
        return held_out_loss(model, data, as_it_is) or 0.0

    return run


def classifier_trial(request: dict[str, Any], folder: str) -> Any:
    rows = json.loads(Path(request["data"]).read_bytes())

    def run(values: dict[str, Any]) -> float:
        trainer = Trainer(**of_classifier(request, rows), args=arguments_of(request, folder, values))
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])

    return run


def of_classifier(request: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    folder, seed = request["model"], request["seed"]

    def model_init(trial: Any = None) -> Any:
        set_seed(seed)
        return AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))

    named = {"train_dataset": rows["train"], "eval_dataset": rows["evaluation"], "data_collator": default_data_collator}
    return {"model_init": model_init, **named}


def with_upshift(request: dict[str, Any], folder: str) -> Answer:
    study, storage = make_study(folder, request["points"])
    if request["task"] == "lm":
        search_lm(request, folder, storage)
    else:
        search_classifier(request, folder, storage)
    every = request["steps"] // EVALUATIONS if request["task"] == "lm" else 1  # there evaluations are counted, not steps
    steps = {
        trial.number: request["steps"] if is_complete(trial) else every * max(trial.intermediate_values, default=0)
        for trial in study.trials
    }
    values = {trial.number: trial.value if is_complete(trial) else None for trial in study.trials}
    seen = {trial.number: trial.intermediate_values for trial in study.trials}
    return {"values": values, "steps": sum(steps.values()), "steps_of": steps, "seen": seen}


def is_complete(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state is TrialState.COMPLETE


def search_lm(request: dict[str, Any], folder: str, storage: str) -> None:
    tune(
        request["model"], request["data"], space=request["space"], output=folder, trials=len(request["points"]),
        storage=storage, study_name=NAME, evaluations=EVALUATIONS, from_config=True, trial_seconds=0.0,
        sequence_length=request["sequence_length"], global_batch=request["global_batch"],
        arguments={"max_steps": request["steps"], "seed": request["seed"]},
    )  # fmt: skip


def search_classifier(request: dict[str, Any], folder: str, storage: str) -> None:
    every = request["steps"] // EVALUATIONS
    arguments = arguments_of(request, folder, {}, eval_strategy="steps", eval_steps=every)
    trainer = upshift.Trainer(
        **of_classifier(request, json.loads(Path(request["data"]).read_bytes())), args=arguments, trial_seconds=0
    )
    trainer.hyperparameter_search(
        hp_space=request["space"], n_trials=len(request["points"]), backend="optuna", storage=storage, study_name=NAME,
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=every, reduction_factor=REDUCTION),
    )  # fmt: skip


def failures(request: dict[str, Any], folder: str) -> Answer:
    """Trials that would not fit, that crash, and one that is killed; the parent's memory after each."""
    _, storage = make_study(folder, request["points"])
    resident: list[int] = []
    fatal = {number: signal.SIGSEGV for number in request["crash"]} | {number: signal.SIGKILL for number in request["kill"]}

    def on_step(number: int, event: Any) -> None:
        if number in fatal and type(event).__name__ == "StepDone":
            os.kill(trial_process(), fatal.pop(number))

    def on_end(row: TrialRow) -> None:
        resident.append(psutil.Process().memory_info().rss)

    found = tune(
        request["model"], request["data"], space=request["space"], output=folder, trials=len(request["points"]),
        storage=storage, study_name=NAME, pruner="none", evaluations=1, from_config=True, trial_seconds=0.0,
        host=small_host(request), arguments={"max_steps": request["steps"], "seed": request["seed"]},
        progress=Progress(step=on_step, ended=on_end),
    )  # fmt: skip
    alone = tune(
        request["model"], request["data"], space={name: [value] for name, value in found.best[0].parameters.items()},
        output=f"{folder}/alone", trials=1, pruner="none", evaluations=1, from_config=True, trial_seconds=0.0,
        arguments={"max_steps": request["steps"], "seed": request["seed"]},
    )  # fmt: skip
    return {
        "rows": [row.model_dump(mode="json") for row in found.trials], "resident": resident, "best": found.best[0].number,
        "best_loss": (found.best[0].values or {})["eval_loss"], "alone": (alone.best[0].values or {})["eval_loss"],
    }  # fmt: skip


def small_host(request: dict[str, Any]) -> Host:
    host = find_host(None)
    assert host.cpu is not None
    size = int(request["memory_gib"] * GIB)
    return host.changed(cpu=host.cpu.changed(memory_bytes=size, free_memory_bytes=size))


def trial_process() -> int:
    """The child of the process that trials are forked from."""
    for one in psutil.Process().children(recursive=True):
        parent = one.parent()
        if parent is not None and parent.pid != os.getpid() and FORK_SERVER in parent.cmdline():
            return int(one.pid)
    raise LookupError("no trial runs")


def main(path: str) -> None:
    request = json.loads(Path(path).read_bytes())
    run = {"plain": plain, "upshift": with_upshift, "failures": failures}[request["contender"]]
    with tempfile.TemporaryDirectory(prefix="upshift-tuning-") as folder:
        answer = run(request, folder)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
