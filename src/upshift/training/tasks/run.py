"""Run ``upshift train`` for a task of its own, such as chats with images, or words with tags: check, prepare, train, and save.

``upshift.Trainer`` runs the steps. It makes the plan where it can, and says where it keeps the settings as they are.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from upshift.benchmarking.environment import environment
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.hardware.detect import detect
from upshift.importing import quiet_logger
from upshift.loading.load import load_source
from upshift.loading.output_lock import claimed
from upshift.models.adapter import adapter_beside_images, base_of, check_names_in, complete_model, name_base, train_head_whole
from upshift.models.build import build_model, name_padding
from upshift.models.config import padding_of
from upshift.models.source import ModelSource, fetch_weights, source_of_files
from upshift.record import Numbers, Record, Spread
from upshift.settings import read_ranks
from upshift.training.arguments import LOSS, Arguments, TrainRequest
from upshift.training.batches.sampler import count_steps
from upshift.training.checkpoint.checkpoint import check_output_directory, save_model
from upshift.training.checkpoint.directory import TASK_CHECKPOINTS as CHECKPOINTS
from upshift.training.checkpoint.directory import TASK_RUN_NAME as RUN_FILE
from upshift.training.checkpoint.directory import TENSORBOARD_FOLDER, step_of
from upshift.training.checkpoint.model import read_adapter
from upshift.training.job.job import check_evaluations
from upshift.training.job.rendezvous import meet
from upshift.training.learning_rate_finder import LAST_RATE, FoundRate, RangeTest
from upshift.training.loop.events import EARLY_STOPPING, Finished, OnEvent, Saved, Started
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import CHANGEABLE_ARGUMENTS
from upshift.training.tasks.metrics.trainer import (
    MICRO_BATCH_FIELD,
    NO_PLAN,
    LabelTrainer,
    TaskTrainer,
    UnplannedLabelTrainer,
    UnplannedTrainer,
)
from upshift.training.tasks.prepare import TaskKind, TaskModel, prepare_task, refuse_given
from upshift.training.tasks.progress import EVALUATED_LOSS, EarlyStopping, RisingRate, RunEvents, measured_numbers
from upshift.training.tasks.ranks import joined, telling_others, wait_for_rank_0
from upshift.training.tasks.rows import TaskData, check_held_out_labels
from upshift.training.tasks.run_file import check_same_data, checkpoint_to_resume, found_rate_of, write_run_file
from upshift.units import FLOP_CONVENTION

OWN_FILES = (CHECKPOINTS, RUN_FILE, f"{RUN_FILE}.tmp", TENSORBOARD_FOLDER)
LARGEST_MICRO_BATCH = 8  # rows
CHATS: TaskKind = "image-text-to-text"
UNPLANNED: tuple[TaskKind, ...] = (CHATS, "object-detection", "image-segmentation")
UNPLANNED_PRECISIONS = ("fp32", "bf16")
OF_OPTIMIZER = ("weight_decay", "max_grad_norm", "seed", "adam_beta1", "adam_beta2", "adam_epsilon")
LOSS_STEPS = 10  # the last steps, whose mean loss the record has
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TaskWatcher:
    """Callbacks that show progress."""

    checked: Callable[[], None]
    reading: Progress
    finding_rate: Progress
    found_rate: Callable[[FoundRate], None]
    event: OnEvent


def run_task(request: TrainRequest, task: TaskModel, watcher: TaskWatcher) -> Record | None:
    """Train, save the model with its processor into the output folder, and return the Record.

    Each rank of a launcher calls this function, and rank 0 returns the Record."""
    ranks = read_ranks()
    if ranks is None or ranks.size == 1:
        with claimed(request.output):
            return _train(request, task, _prepare(request, task, watcher, num_processes=1), watcher.event)
    store = meet(ranks)
    if ranks.rank == 0:
        with claimed(request.output):
            with telling_others(store):
                prepared = _prepare(request, task, watcher, num_processes=ranks.size)
            with joined(ranks, store):
                return _train(request, task, prepared, watcher.event)
    wait_for_rank_0(store)
    with quiet_logger("upshift"):  # rank 0 has said what there is to say
        prepared = _prepare(request, task, None, num_processes=ranks.size)
    with joined(ranks, store):
        _train(request, task, prepared, lambda event: None, leads=False)
    return None


@dataclass(frozen=True)
class Settings:
    """Hold what the user fixes of a run: the rows that are computed at once, and other fields of the plan."""

    micro_batch: int
    accumulation: int
    num_processes: int
    precision: str
    fixed: tuple[str, ...]

    @property
    def is_parallel(self) -> bool:
        """Return whether ranks share the rows of a step."""
        return self.num_processes > 1


@dataclass(frozen=True, eq=False)
class PreparedTask:
    """Hold what a run needs before its first step."""

    settings: Settings
    data: TaskData
    model: nn.Module
    arguments: Arguments
    checkpoint: str | None  # from which the run resumes
    identity: dict[str, Any]  # what the run file has


def _prepare(request: TrainRequest, task: TaskModel, watcher: TaskWatcher | None, *, num_processes: int) -> PreparedTask:
    """Check the request, and read the data and the model. ``watcher``: None on a rank that only follows rank 0."""
    check_request(request, task.kind)
    settings = read_settings_of(request, task.kind, num_processes)
    source = request.source()
    output = request.output
    if watcher is not None:
        check_output_directory(
            output, overwrite=request.overwrite, resume=request.resume, own_files=OWN_FILES, checkpoints=output / CHECKPOINTS
        )
    identity = _identity(request, source, task.kind)
    if request.find_learning_rate and request.resume:
        identity["arguments"] |= found_rate_of(output)
    checkpoint = checkpoint_to_resume(output, identity, _paths_of(request)) if request.resume else None
    if watcher is not None:
        watcher.checked()
    _check_weights(source, from_config=request.from_config)
    data = prepare_task(
        source,
        task,
        request.data,
        request.as_options,
        eval_data=request.eval_data,
        sequence_length=request.sequence_length,
        progress=(lambda done, total: None) if watcher is None else watcher.reading,
        identifying=None if watcher is None else watcher.reading,
    )
    if checkpoint is not None:
        check_same_data(output, data.data_identity, _paths_of(request))
    identity |= data.data_identity
    steps = request.max_steps or count_steps(request.epochs, num_sequences=len(data.training), global_batch=request.global_batch)
    arguments = request.arguments_for(steps).changed(learning_rate=identity["arguments"]["learning_rate"])
    check_arguments(arguments, data, request, task.kind)
    check_held_out_labels(data)
    if request.find_learning_rate and checkpoint is None and watcher is not None:
        found = _find_rate(request, task, settings, data, arguments, watcher.finding_rate)
        watcher.found_rate(found)
        arguments = arguments.changed(learning_rate=found.learning_rate)
        identity["arguments"]["learning_rate"] = found.learning_rate
    model = load_task_model(source, task, data, request)
    if watcher is not None:
        write_run_file(output, identity, finished=False)
    return PreparedTask(settings, data, model, arguments, checkpoint, identity)


def _find_rate(
    request: TrainRequest, task: TaskModel, settings: Settings, data: TaskData, arguments: Arguments, on_step: Progress
) -> FoundRate:
    """Return a learning rate for the run: train a copy of the model for some steps, as ``find_learning_rate`` does."""
    test = RangeTest(arguments.max_steps, on_step)
    of_test = Arguments(
        max_steps=test.steps,
        learning_rate=LAST_RATE,
        lr_scheduler_type="constant",
        save_steps=0,
        **{name: getattr(arguments, name) for name in OF_OPTIMIZER},
    )
    with tempfile.TemporaryDirectory(prefix="upshift-learning-rate-") as folder, StopRequest() as stop:
        elsewhere = request.changed(output=Path(folder))
        trainer = _make_trainer(
            elsewhere,
            task,
            settings,
            data,
            is_planned=False,
            model=load_task_model(request.source(), task, data, request),
            args=training_arguments(elsewhere, of_test, settings, data),
            data_collator=data.collate,
            metrics=None,
            early_stopping=None,
            train_dataset=data.training,
            callbacks=[RisingRate(test, stop)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        try:
            trainer.train()
        except JobFailed:
            if not test.has_risen:
                raise  # the rate was not too high yet: another fault ended it
        del trainer  # with the copy and the states of its optimizer, before the model of the run is loaded
    gc.collect()
    return test.found()


def check_request(request: TrainRequest, kind: TaskKind) -> None:
    """Raise RequestError with the first option that such a training does not take."""
    given = {
        "--plan": request.plan_file,
        "--heal": request.heal,
        "--mup-base": request.mup_base,
        "--load-in-4bit": request.load_in_4bit,
        "--neftune-noise-alpha": request.arguments.neftune_noise_alpha,
        "tokenizer": request.tokenizer,
    }
    refuse_given(given, kind)
    num_processes = next((text.partition("=")[2] for text in request.fixed if text.startswith("num_processes=")), "1")
    if num_processes != "1":
        raise RequestError(
            f"training for {kind} starts no processes; leave --nproc out, and start it with torchrun --nproc-per-node "
            f"{num_processes} -m upshift train"
        )


def check_arguments(arguments: Arguments, data: TaskData, request: TrainRequest, kind: TaskKind) -> None:
    """Raise RequestError for evaluations that cannot take place, and for checkpoints that miss the best of them."""
    arguments.check_metric(data.metrics.larger_is_better if data.metrics else (), kind)
    will_evaluate = arguments.eval_steps > 0
    origin = request.data
    check_evaluations(arguments, will_evaluate=will_evaluate, origin=origin, has_held_out=data.evaluation is not None)
    if arguments.load_best and arguments.save_steps and arguments.save_steps % arguments.eval_steps:
        raise RequestError(
            f"--load-best needs a checkpoint at evaluations alone, and --save-steps {arguments.save_steps} is no multiple of "
            f"--eval-steps {arguments.eval_steps}; make it one, or leave --save-steps out"
        )


def _check_weights(source: ModelSource, *, from_config: bool) -> None:
    if from_config and source.adapter is not None:
        raise RequestError("--from-config draws random weights, which are not saved with an adapter; leave it out")
    if source.directory is None:
        raise RequestError(f"{source.base_reference!r} is a config without a processor beside it; give a model directory")
    if not from_config:
        fetch_weights(source)


def load_task_model(source: ModelSource, task: TaskModel, data: TaskData, request: TrainRequest) -> nn.Module:
    """Return the model in training mode, with a new head for new labels and with the adapter."""
    torch.manual_seed(request.arguments.seed)
    stored = source_of_files(source)
    head = data.new_head
    new_weights: set[str] = set()
    if head is not None and source.adapter_directory is not None:
        raise RequestError(
            f"the labels of {request.data} need a new head, and {source.reference!r} has one for its own labels; give the model "
            f"that it was made for ({source.base_reference!r}), with --lora-rank"
        )
    if head is not None:
        stored = stored.changed(config=stored.config | head.changes_of(task.model_class.__name__))
    dtype = getattr(torch, source.base_dtype) if source.adapter is not None else torch.float32
    if request.from_config:
        model: Any = build_model(stored.hf_config, task.model_class, dtype=dtype)
    elif head is not None or source.new_head_on is not None:
        model, new_weights = _with_new_head(stored, task, dtype)
    else:
        model = load_source(stored, dtype=dtype, model_class=task.model_class)
    name_padding_of(model, data)
    if source.adapter is None:
        return model.train()  # type: ignore[no-any-return]
    if head is not None:
        source = source.changed(adapter=train_head_whole(source.adapter, model, new_weights))
    check_names_in(model, source, request)
    complete = complete_model(model, adapter_beside_images(source, model))
    name_base(complete, source)
    if source.adapter_directory is not None:
        read_adapter(source.adapter_directory, complete)
    return complete


def name_padding_of(model: Any, data: TaskData) -> None:
    """Name the padding token in the config of a classifier of texts, which looks for the end of a text by it."""
    tokenizer = next((part for part in data.preprocessors.parts if hasattr(part, "get_vocab")), None)
    if tokenizer is not None and padding_of(model.config.get_text_config()) is None:
        name_padding(model.config, tokenizer.pad_token_id)


def _with_new_head(stored: ModelSource, task: TaskModel, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """Return the classifier with the weights of the files below a new head, and the names of the head's weights: random ones."""
    loader: Any = task.model_class
    with quiet_logger("transformers"):  # it would list the head that is new
        model, report = loader.from_pretrained(
            stored.directory,
            config=stored.hf_config,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    other_sizes = [entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"]]
    new_weights = {*report["missing_keys"], *other_sizes}
    below = (name for name in sorted(new_weights) if name.startswith(f"{model.base_model_prefix}."))
    lacking = next((name for name in below if "pooler" not in name), None)  # some classifiers have a pooler, and use none
    if lacking is not None:
        raise RequestError(f"the files of {stored.reference!r} lack {lacking} of {loader.__name__}; save the whole model")
    return model, new_weights


def _identity(request: TrainRequest, source: ModelSource, kind: TaskKind) -> dict[str, Any]:
    """Return what a run that resumes must have in common with the run before, beside its data."""
    return {
        "adapter": request.as_adapter_options.model_dump(mode="json"),
        "model": source.model_hash,
        "global_batch": request.global_batch,
        "sequence_length": request.sequence_length,
        "data_options": request.as_options.model_dump(mode="json") | {"objective": kind},  # given, or found in the data
        "arguments": request.arguments.model_dump(mode="json", exclude=set(CHANGEABLE_ARGUMENTS)),
    }


def _paths_of(request: TrainRequest) -> dict[str, str]:
    """Return the paths of the data as a user gave them, by the name of their option."""
    return {"data": request.data, **({} if request.eval_data is None else {"eval_data": request.eval_data})}


def read_settings_of(request: TrainRequest, kind: TaskKind, num_processes: int) -> Settings:
    """Return what --set fixes. Raise RequestError for a field of a plan where there is none, and for a wrong value."""
    given = dict(text.split("=", 1) for text in request.fixed if "=" in text)
    given.pop("num_processes", None)
    total, left = divmod(request.global_batch, num_processes)
    if left or not total:
        raise RequestError(
            f"--global-batch {request.global_batch} cannot be divided among {num_processes} ranks; give a multiple of their "
            "number"
        )
    largest = max(size for size in range(1, min(total, LARGEST_MICRO_BATCH) + 1) if total % size == 0)
    text = given.pop(MICRO_BATCH_FIELD, str(largest))
    if not text.isdecimal() or not int(text) or total % int(text):
        raise RequestError(
            f"--set {MICRO_BATCH_FIELD}={text} does not divide the {total} rows of a rank's step; use a divisor of them"
        )
    counts = int(text), total // int(text), num_processes
    if kind not in UNPLANNED and num_processes == 1:
        return Settings(*counts, "", tuple(f"{name}={value}" for name, value in given.items()))
    precision = given.pop("precision", "fp32")
    other = next((f"--set {name}={value}" for name, value in given.items()), None) or (
        f"--allow {','.join(request.allow)}" if request.allow else None
    )
    if other is not None:
        where = " on several ranks" if num_processes > 1 else ""
        raise RequestError(
            f"{other} is of a plan, and {kind} runs without one{where}; set {MICRO_BATCH_FIELD} and precision alone"
        )
    if precision not in UNPLANNED_PRECISIONS:
        raise RequestError(f"--set precision={precision} is not for {kind}; use {' or '.join(UNPLANNED_PRECISIONS)}")
    return Settings(*counts, precision, ())


def training_arguments(request: TrainRequest, arguments: Arguments, settings: Settings, data: TaskData) -> TrainingArguments:
    """Return transformers' arguments for the run."""
    save_steps = arguments.save_steps or (arguments.eval_steps if arguments.load_best else 0)
    same_names = ("max_steps", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed", "save_total_limit")
    adam_names = ("adam_beta1", "adam_beta2", "adam_epsilon")
    return TrainingArguments(
        output_dir=str(request.output / CHECKPOINTS),
        per_device_train_batch_size=settings.micro_batch,
        per_device_eval_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation,
        dataloader_pin_memory=torch.cuda.is_available(),
        bf16=settings.precision == "bf16",
        warmup_steps=arguments.num_warmup_steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if data.evaluation is not None and arguments.eval_steps else "no",
        eval_steps=arguments.eval_steps or None,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        load_best_model_at_end=arguments.load_best,
        metric_for_best_model=f"eval_{arguments.metric_for_best_model}",
        greater_is_better=_is_larger_better(arguments.metric_for_best_model, data),
        prediction_loss_only=data.metrics is None,
        remove_unused_columns=False,
        label_names=list(data.label_inputs),
        report_to=[],
        disable_tqdm=True,
        **{name: getattr(arguments, name) for name in (*same_names, *adam_names)},
    )


def _train(
    request: TrainRequest, task: TaskModel, prepared: PreparedTask, on_event: OnEvent, *, leads: bool = True
) -> Record | None:
    """Train and save. ``leads``: False on all ranks but the first, which alone saves and returns the Record."""
    data, model, arguments, checkpoint = prepared.data, prepared.model, prepared.arguments, prepared.checkpoint
    start = time.perf_counter()
    with StopRequest(notice=leads) as stop:
        events = RunEvents(on_event, stop, global_batch=request.global_batch, logging_steps=arguments.logging_steps)
        patience = arguments.early_stopping_patience
        trainer = _make_trainer(
            request,
            task,
            prepared.settings,
            data,
            model=model,
            args=training_arguments(request, arguments, prepared.settings, data),
            data_collator=data.collate,
            metrics=data.metrics if data.evaluation is not None else None,
            early_stopping=None if patience is None else EarlyStopping(patience),
            train_dataset=data.training,
            eval_dataset=data.evaluation,
            callbacks=[events],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        on_event(
            Started(
                step=0 if checkpoint is None else step_of(Path(checkpoint)) or 0,
                max_steps=arguments.max_steps,
                tokens=0,
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
                plan_label="",
                resumed_from=checkpoint,
            )
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        step = trainer.state.global_step
        if events.is_stopped and step < arguments.max_steps:
            raise Interrupted(
                f"interrupted after step {step} of {arguments.max_steps}; a checkpoint is saved in {request.output}, continue "
                "with the same command and --resume"
            )
        if leads:  # before the evaluation, which may fail
            save_model(request.output, model, data.preprocessors)
        evaluation = _held_out_numbers(trainer, arguments) if data.evaluation is not None else {}
    evaluation_loss = evaluation.get(LOSS)
    if evaluation_loss is not None and not math.isfinite(evaluation_loss):
        raise JobFailed(f"the held-out loss is {evaluation_loss}; use a smaller --learning-rate. {request.output} has the model")
    if not leads:
        return None
    write_run_file(request.output, prepared.identity, finished=True)
    with suppress(OSError):  # it holds checkpoints
        (request.output / CHECKPOINTS).rmdir()
    on_event(Saved(str(request.output), step))
    end = "finished" if step == arguments.max_steps else EARLY_STOPPING
    on_event(Finished(step, step * request.global_batch, time.perf_counter() - start, end))
    return _record(request, task, prepared.settings, trainer, arguments, events, evaluation, time.perf_counter() - start)


def _held_out_numbers(trainer: TaskTrainer, arguments: Arguments) -> dict[str, float]:
    """Return the loss and the metrics of the final model, which are measured unless they were already."""
    state = trainer.state
    step = state.best_global_step if arguments.load_best and state.best_global_step else state.global_step
    logged = [log for log in state.log_history if log["step"] == step and EVALUATED_LOSS in log]
    return measured_numbers(logged[-1] if logged else trainer.evaluate())


def _is_larger_better(metric: str, data: TaskData) -> bool:
    return metric != LOSS and data.metrics is not None and data.metrics.larger_is_better[metric]


def _make_trainer(
    request: TrainRequest, task: TaskModel, settings: Settings, data: TaskData, *, is_planned: bool = True, **arguments: Any
) -> TaskTrainer:
    arguments["batch_loss"] = data.batch_loss
    has_labels = data.batch_loss == "mean over labels" and task.kind != CHATS
    if has_labels:
        arguments["ignored_label"] = data.ignored_label
    if settings.is_parallel or task.kind in UNPLANNED or not is_planned:
        arguments["reason"] = NO_PLAN if is_planned else ""
        trainer: TaskTrainer = UnplannedLabelTrainer(**arguments) if has_labels else UnplannedTrainer(**arguments)
    else:
        planned = {"fixed": settings.fixed, "allow": request.allow, "trial_seconds": request.trial_seconds, **arguments}
        trainer = LabelTrainer(**planned) if has_labels else TaskTrainer(**planned)
    if data.batch_loss != "mean over labels":
        trainer.model_accepts_loss_kwargs = False  # the mean of micro-batches is that of their rows
    if trainer.args.world_size != settings.num_processes:
        raise RequestError(
            f"accelerate finds {trainer.args.world_size} of {settings.num_processes} ranks; start them with torchrun, which sets "
            "RANK, WORLD_SIZE and LOCAL_RANK"
        )
    return trainer


def _record(
    request: TrainRequest,
    task: TaskModel,
    settings: Settings,
    trainer: Any,
    arguments: Arguments,
    events: RunEvents,
    evaluation: dict[str, float],
    seconds: float,
) -> Record:
    losses = events.losses[-LOSS_STEPS:]
    choice = trainer.upshift_choice
    plan = choice.plan
    best = trainer.state.best_global_step if arguments.load_best else None
    measured = Numbers(
        step_ms=Spread.of([1000 * seconds for seconds in events.seconds[1:] or events.seconds]) if events.seconds else None,
        loss=sum(losses) / len(losses) if losses else None,
        evaluation_loss=evaluation.get(LOSS),
    )
    return Record(
        kind="train",
        name=str(base_of(trainer.model).config.model_type),
        plan=plan.changed(precision=settings.precision or plan.precision).model_dump(),
        predicted=choice.predicted,
        measured=measured,
        flop_convention=f"model FLOPs: {FLOP_CONVENTION}",
        environment=environment(detect()),
        checkpoint=str(request.output),
        details={
            "arguments": arguments.model_dump(),
            "global_batch": request.global_batch,
            "objective": task.kind,
            "end": "finished" if trainer.state.global_step == arguments.max_steps else EARLY_STOPPING,
            "steps": trainer.state.global_step,
            "total_seconds": seconds,
            "loss_curve": [[step * request.global_batch, loss] for step, loss in zip(events.steps, events.losses, strict=True)],
            "evaluations": [[each.tokens, each.loss] for each in events.evaluations],
            "evaluation_metrics": [[each.step, each.metrics] for each in events.evaluations if each.metrics],
            "metrics": {name: value for name, value in evaluation.items() if name != LOSS},
            "model_step": best or trainer.state.global_step,
        },
    )
