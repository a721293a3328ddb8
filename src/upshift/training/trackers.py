"""Send the numbers of a run to TensorBoard, Weights & Biases, MLflow or Trackio, by transformers' own callbacks.

The callbacks run in the process that gets the events of a run, which need not be a rank of it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, get_args

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from upshift.errors import RequestError
from upshift.internals.transformers_names import TRACKER_CALLBACKS
from upshift.settings import unusable_tracker_variables
from upshift.training.arguments import Tracker, TrainRequest
from upshift.training.checkpoint.directory import TENSORBOARD_FOLDER
from upshift.training.loop.events import Evaluated, Event, Finished, OnEvent, Started, StepDone

logger = logging.getLogger(__name__)

PACKAGES: dict[Tracker, tuple[str, ...]] = {name: (name,) for name in get_args(Tracker)} | {
    "tensorboard": ("tensorboard", "tensorboardX")
}


class _RequestArguments(TrainingArguments):
    """The arguments of a run as a callback reads them: its configuration is the request."""

    def __init__(self, request: TrainRequest) -> None:
        self.request_fields: dict[str, Any] = json.loads(request.model_dump_json(exclude={"tokenizer"}))
        super().__init__(output_dir=str(request.output), report_to=[], save_strategy="no")

    @property
    def device(self) -> torch.device:
        """Return a device without starting accelerate, which would join the group of a launcher's ranks."""
        return torch.device("cpu")

    def to_dict(self) -> dict[str, Any]:
        return self.request_fields

    def to_json_string(self) -> str:
        return json.dumps(self.request_fields, indent=2)


class RunTrackers:
    """The trackers of one run. Its events are passed on, and then sent to them.

    A logged step is sent, or every step if the run logs none. A tracker that fails after the start gets a warning and no more
    numbers. The run goes on.
    """

    def __init__(self, request: TrainRequest, on_event: OnEvent) -> None:
        self._request = request
        self._names = tuple(dict.fromkeys(request.report_to))
        self._on_event = on_event
        self._callbacks: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._state = TrainerState()
        self._control = TrainerControl()
        self._began_wandb = False

    def __enter__(self) -> RunTrackers:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        for name, callback in self._callbacks.items():
            self._call_or_drop(name, callback.on_train_end)
        if self._began_wandb:  # its callback leaves the run open until the process ends
            with _warning_of_failure(self._failed, "wandb"):
                importlib.import_module("wandb").finish(exit_code=int(error_class is not None))

    def begin(self) -> None:
        """Begin the run in each tracker.

        Raise RequestError if one is not installed or cannot begin, such as without a key, or if an environment variable asks for
        what it cannot do here. TensorBoard begins with the first event: its files are in the output folder, which is checked
        before.
        """
        if not self._names:
            return
        for name in self._names:
            check_installed(name)
            check_variables(name)
        with redirect_stdout(sys.stderr):  # transformers prints when it imports them, and standard output is for the record
            self._arguments = _RequestArguments(self._request)
            classes = TRACKER_CALLBACKS.get()(list(self._names))
        for name, callback_class in zip(self._names, classes, strict=True):
            with _refusing_failure(name):
                self._begin(name, callback_class)

    def _begin(self, name: str, callback_class: type[Any]) -> None:
        callback = callback_class()
        if name == "wandb":
            self._began_wandb = importlib.import_module("wandb").run is None
        if name == "tensorboard":
            if callback.logging_dir is None:  # no environment variable names it
                callback.logging_dir = str(self._request.output / TENSORBOARD_FOLDER)
        else:
            callback.on_train_begin(self._arguments, self._state, self._control)
        self._callbacks[name] = callback

    def event(self, event: Event) -> None:
        self._on_event(event)
        if isinstance(event, Started):
            self._state.max_steps = event.max_steps
            if "tensorboard" in self._callbacks:
                self._call_or_drop("tensorboard", partial(self._begin_tensorboard, event.step))
        elif isinstance(event, StepDone):
            self._send_step(event)
        elif isinstance(event, Evaluated):
            rewards = _reward_logs(event.reward_accuracy, event.reward_margin, event.kl, prefix="eval_")
            metrics = {f"eval_{name}": value for name, value in event.metrics.items()}
            self._send(event.step, {"eval_loss": event.loss, _seen_name(event.unit): event.tokens, **rewards, **metrics})
        elif isinstance(event, Finished):
            self._send(event.step, {"train_runtime": event.seconds})

    def _begin_tensorboard(self, step: int, *arguments: Any) -> None:
        """Begin the run in TensorBoard. It then hides what an earlier run in the folder sent after the checkpoint.

        A run without one begins again in its folder without --resume, too."""
        callback = self._callbacks["tensorboard"]
        own_folder = self._request.output / TENSORBOARD_FOLDER
        begins_again = callback.logging_dir == str(own_folder) and any(own_folder.glob("events.out.tfevents.*"))
        if self._request.resume or begins_again:
            callback.tb_writer = _summary_writer_class()(log_dir=callback.logging_dir, purge_step=step + 1)
        callback.on_train_begin(*arguments)

    def _send_step(self, event: StepDone) -> None:
        is_logged = event.logged_loss is not None
        if self._request.arguments.logging_steps and not is_logged:
            return
        logs = {
            "loss": event.logged_loss if event.logged_loss is not None else event.loss,
            "learning_rate": event.learning_rate,
            f"{event.unit}_per_second": event.tokens_per_second,
            _seen_name(event.unit): event.tokens,
        }
        if event.gradient_norm is not None:
            logs["grad_norm"] = event.gradient_norm
        if is_logged:
            logs |= _reward_logs(event.logged_reward_accuracy, event.logged_reward_margin, event.logged_kl)
        else:
            logs |= _reward_logs(event.reward_accuracy, event.reward_margin, event.kl)
        self._send(event.step, logs)

    def _send(self, step: int, logs: dict[str, Any]) -> None:
        self._state.global_step = step
        for name, callback in self._callbacks.items():
            if name not in self._failed:
                self._call_or_drop(name, callback.on_log, logs=dict(logs))

    def _call_or_drop(self, name: str, method: Callable[..., Any], **options: Any) -> None:
        """Call a method of a tracker's callback. If it fails, the tracker gets no more numbers."""
        with _warning_of_failure(self._failed, name):
            method(self._arguments, self._state, self._control, **options)


def _summary_writer_class() -> Any:
    """Return TensorBoard's writer from the package that transformers takes it from."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return importlib.import_module("tensorboardX").SummaryWriter


@contextmanager
def _refusing_failure(name: str) -> Iterator[None]:
    """Raise RequestError if the tracker fails in this block. The tracker's output goes to standard error."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # each tracker raises its own classes
        raise RequestError(f"--report-to {name}: {name} failed ({_reason(error)}); set {name} up, or leave it out") from error


@contextmanager
def _warning_of_failure(failed: set[str], name: str) -> Iterator[None]:
    """Log a warning if the tracker fails in this block and is not in ``failed``, and add it. Output goes to standard error."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # each tracker raises its own classes, and none of them may end a training
        if name not in failed:
            logger.warning("--report-to %s: %s failed (%s); it gets no more numbers, the run goes on", name, name, _reason(error))
        failed.add(name)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or its class if there is none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _seen_name(unit: str) -> str:
    """Return the name of the number of tokens that were seen, as transformers has it, or of another unit."""
    return f"num_input_{unit}_seen"


def _reward_logs(accuracy: float | None, margin: float | None, kl: float | None, *, prefix: str = "") -> dict[str, float]:
    """Return the rewards under the names of TRL's DPOTrainer and KTOTrainer, or nothing for other sequences."""
    logs = {"rewards/accuracies": accuracy, "rewards/margins": margin, "kl": kl}
    return {f"{prefix}{name}": value for name, value in logs.items() if value is not None}


def check_installed(name: Tracker) -> None:
    """Raise RequestError if the package of a tracker is not installed."""
    if not any(importlib.util.find_spec(package) for package in PACKAGES[name]):
        raise RequestError(
            f"--report-to {name} needs the package {PACKAGES[name][0]}; pip install {PACKAGES[name][0]}, or leave it out"
        )


def check_variables(name: Tracker) -> None:
    """Raise RequestError if an environment variable asks the tracker for the model, or switches the tracker off.

    The callbacks run in a process that has neither the model nor the moment of a save.
    """
    for variable, value in unusable_tracker_variables(name).items():
        raise RequestError(
            f"{variable}={value} does not work with --report-to {name}: Upshift sends numbers only, not the model; "
            f"unset {variable}, and upload the output folder after the run if you need it there"
        )
