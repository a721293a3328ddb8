"""Send the numbers of a run to TensorBoard, Weights & Biases, MLflow or Trackio, by transformers' own callbacks.

The callbacks run in the process that gets the events of a run, which need not be a rank of it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, get_args

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from upshift.errors import RequestError
from upshift.internals.transformers_names import TRACKER_CALLBACKS
from upshift.training.arguments import Tracker, TrainRequest
from upshift.training.loop.events import Evaluated, Event, Finished, OnEvent, Started, StepDone
from upshift.training.loop.state import TENSORBOARD_FOLDER

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
    """The trackers of one run. Its events are sent to them, and then passed on.

    A logged step is sent, or every step if the run logs none.
    """

    def __init__(self, request: TrainRequest, on_event: OnEvent) -> None:
        self._request = request
        self._on_event = on_event
        self._callbacks: dict[str, Any] = {}
        self._state = TrainerState()
        self._control = TrainerControl()
        self._began_wandb = False

    def __enter__(self) -> RunTrackers:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        with redirect_stdout(sys.stderr):
            for callback in self._callbacks.values():
                callback.on_train_end(self._arguments, self._state, self._control)
            if self._began_wandb:  # its callback leaves the run open until the process ends
                importlib.import_module("wandb").finish(exit_code=int(error_class is not None))

    def begin(self) -> None:
        """Begin the run in each tracker. Raise RequestError if one is not installed or cannot begin, such as without a key.

        TensorBoard begins with the first event: its files are in the output folder, which is checked before.
        """
        if not self._request.report_to:
            return
        for name in self._request.report_to:
            check_installed(name)
        with redirect_stdout(sys.stderr):  # transformers prints when it imports them, and standard output is for the record
            self._arguments = _RequestArguments(self._request)
            classes = TRACKER_CALLBACKS.get()(list(self._request.report_to))
        for name, callback_class in zip(self._request.report_to, classes, strict=True):
            callback = callback_class()
            self._callbacks[name] = callback
            if name == "wandb":
                self._began_wandb = importlib.import_module("wandb").run is None
            if name != "tensorboard":
                self._run(name, callback.on_train_begin)
            elif callback.logging_dir is None:  # no environment variable names it
                callback.logging_dir = str(self._request.output / TENSORBOARD_FOLDER)

    def event(self, event: Event) -> None:
        if isinstance(event, Started):
            self._state.max_steps = event.max_steps
            if "tensorboard" in self._callbacks:
                self._run("tensorboard", self._callbacks["tensorboard"].on_train_begin)
        elif isinstance(event, StepDone):
            self._send_step(event)
        elif isinstance(event, Evaluated):
            rewards = _reward_logs(event.reward_accuracy, event.reward_margin, prefix="eval_")
            self._send(event.step, {"eval_loss": event.loss, "num_input_tokens_seen": event.tokens, **rewards})
        elif isinstance(event, Finished):
            self._send(event.step, {"train_runtime": event.seconds})
        self._on_event(event)

    def _send_step(self, event: StepDone) -> None:
        is_logged = event.logged_loss is not None
        if self._request.arguments.logging_steps and not is_logged:
            return
        logs = {
            "loss": event.logged_loss if event.logged_loss is not None else event.loss,
            "learning_rate": event.learning_rate,
            "tokens_per_second": event.tokens_per_second,
            "num_input_tokens_seen": event.tokens,
        }
        if event.gradient_norm is not None:
            logs["grad_norm"] = event.gradient_norm
        if is_logged:
            logs |= _reward_logs(event.logged_reward_accuracy, event.logged_reward_margin)
        else:
            logs |= _reward_logs(event.reward_accuracy, event.reward_margin)
        self._send(event.step, logs)

    def _send(self, step: int, logs: dict[str, Any]) -> None:
        self._state.global_step = step
        for name, callback in self._callbacks.items():
            self._run(name, callback.on_log, logs=dict(logs))

    def _run(self, name: str, callback: Callable[..., Any], **options: Any) -> None:
        try:
            with redirect_stdout(sys.stderr):
                callback(self._arguments, self._state, self._control, **options)
        except Exception as error:  # each tracker raises its own classes
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise RequestError(f"--report-to {name}: {name} failed ({reason[:200]}); set {name} up, or leave it out") from error


def _reward_logs(accuracy: float | None, margin: float | None, *, prefix: str = "") -> dict[str, float]:
    """Return the rewards of pairs under the names of TRL's DPOTrainer, or nothing for other sequences."""
    if accuracy is None or margin is None:
        return {}
    return {f"{prefix}rewards/accuracies": accuracy, f"{prefix}rewards/margins": margin}


def check_installed(name: Tracker) -> None:
    """Raise RequestError if the package of a tracker is not installed."""
    if not any(importlib.util.find_spec(package) for package in PACKAGES[name]):
        raise RequestError(
            f"--report-to {name} needs the package {PACKAGES[name][0]}; pip install {PACKAGES[name][0]}, or leave it out"
        )
