"""Define ``upshift.xla.train``: from a Hugging Face directory and batches to a trained Hugging Face directory.

The held-out loss is the mean over all labels with dropout off, as in the torch backend.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import tensorflow as tf

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.loading.output_lock import LOCK_NAME, claimed
from upshift.models.source import ModelSource
from upshift.xla.data.batches import Batches
from upshift.xla.data.tfrecord import record_batches
from upshift.xla.model import Dtype, XlaModel, build
from upshift.xla.training.arguments import XlaArgumentFields, XlaArguments
from upshift.xla.training.checkpoint import RunState, newest_checkpoint, restore, write_checkpoint
from upshift.xla.training.loss import loss_program, loss_sum, shapes_of, shifts_labels
from upshift.xla.training.optimizers import Optimizer, learning_rates
from upshift.xla.training.step import Step, as_tf_function
from upshift.xla.training.strategy import Devices, choose_devices, divide_rows

LossSum = tuple[tf.Tensor, tf.Tensor]  # sum of the labels' losses, and the number of labels
CHANGEABLE = ("eval_steps", "save_steps", "save_total_limit")  # arguments that may differ in a resumed run


@dataclass(frozen=True)
class StepDone:
    step: int
    max_steps: int
    loss: float
    gradient_norm: float
    seconds: float
    width: int
    num_traces: int
    evaluation_loss: float | None  # None: not evaluated after this step


@dataclass(frozen=True)
class Trained:
    losses: tuple[float, ...]  # the loss of every step of the run, with those before a resume
    evaluations: tuple[tuple[int, float], ...]  # (step, held-out loss)
    model_directory: str
    devices: str  # with the reason for the choice
    num_traces: int
    widths: tuple[int, ...]
    padded_share: float  # expected, of the computed tokens
    resumed_from: str | None


def train(
    model: str | ModelSource,
    data: Batches | str,
    *,
    output: str | Path,
    global_batch: int = 8,
    resume: bool = False,
    from_config: bool = False,
    devices: Devices | None = None,
    on_step: Callable[[StepDone], None] = lambda done: None,
    **arguments: Unpack[XlaArgumentFields],
) -> Trained:
    """Train a model, and save it in the folder ``output``.

    Raise RequestError for a wrong argument. Raise Interrupted after SIGINT or SIGTERM; ``resume`` continues its checkpoint.

    Args:
        model: the name or the directory of a model.
        data: a folder of TFRecord files, or batches.
        output: an empty or new folder, or with ``resume`` the folder of the run.
        global_batch: the rows of a batch if ``data`` is a folder.
        resume: continue from the newest checkpoint of the folder.
        from_config: start with random weights.
        devices: None: those that ``choose_devices`` finds.
        on_step: called after each step.
        arguments: the fields of ``XlaArguments``. ``max_steps`` is required.
    """
    checked = XlaArguments.from_fields(dict(arguments))
    checked = checked.for_steps(checked.max_steps)
    output = Path(output)
    rates = learning_rates(checked)
    devices = devices or choose_devices()
    with claimed(output) if devices.is_chief else nullcontext():
        return _train_on_devices(model, data, output, global_batch, resume, from_config, devices, on_step, checked, rates)


def _train_on_devices(
    model: str | ModelSource,
    data: Batches | str,
    output: Path,
    global_batch: int,
    resume: bool,
    from_config: bool,
    devices: Devices,
    on_step: Callable[[StepDone], None],
    arguments: XlaArguments,
    rates: list[float],
) -> Trained:
    checkpoint = _find_checkpoint(output, resume=resume)
    if isinstance(data, str):
        data = record_batches(data, global_batch=global_batch, num_steps=arguments.max_steps, seed=arguments.seed)
    if arguments.eval_steps and data.evaluation is None:
        raise RequestError(f"eval_steps={arguments.eval_steps} and no held-out data; leave it out, or give data that has some")
    _check_batch_divides(data.global_batch, devices, arguments)
    with devices.strategy.scope() if devices.strategy else nullcontext():
        dtype: Dtype = "bfloat16" if arguments.precision == "bf16" else "float32"
        built = build(model, dtype=dtype, weights_dtype="float32", from_config=from_config, seed=arguments.seed)
        optimizer = Optimizer(built.weights, arguments)
    state = None if checkpoint is None else _restore_run(checkpoint, built, optimizer, data, arguments)
    run = _Run(built, optimizer, data, devices, arguments, rates, output, state)
    run.run_steps(on_step)
    if devices.is_chief:
        built.save(output)
    return Trained(
        losses=tuple(run.losses),
        evaluations=tuple(run.evaluations),
        model_directory=str(output),
        devices=devices.reason,
        num_traces=run.step.num_traces,
        widths=data.buckets.widths,
        padded_share=data.buckets.padded_share,
        resumed_from=str(checkpoint[0]) if checkpoint else None,
    )


def _find_checkpoint(output: Path, *, resume: bool) -> tuple[Path, RunState] | None:
    """Return the checkpoint to continue from, or None to start from the beginning.

    Raise RequestError for a folder that is not empty, unless its run is resumed. So nothing in it is ever overwritten."""
    contents: list[Path] = []
    if output.is_dir():
        contents = sorted(path for path in output.iterdir() if path.name != LOCK_NAME)
    if contents and not resume:
        raise RequestError(f"{output} is not empty ({contents[0].name}); resume its run (--resume), or give another directory")
    checkpoint = newest_checkpoint(output)
    if contents and checkpoint is None:
        raise RequestError(f"{output} has no whole checkpoint to resume from; give the directory of an earlier run")
    return checkpoint


def _check_batch_divides(global_batch: int, devices: Devices, arguments: XlaArguments) -> None:
    num_parts = devices.num_replicas * arguments.gradient_accumulation_steps
    if global_batch % num_parts:
        raise RequestError(
            f"global_batch={global_batch} is not divided by {devices.num_replicas} replicas x gradient_accumulation_steps="
            f"{arguments.gradient_accumulation_steps}; use a multiple of {num_parts}"
        )


def _restore_run(
    checkpoint: tuple[Path, RunState], model: XlaModel, optimizer: Optimizer, data: Batches, arguments: XlaArguments
) -> RunState:
    """Restore weights and optimizer. Raise RequestError if the checkpoint's arguments, batch or data differ from this run's."""
    path, state = checkpoint
    for name, value in arguments.model_dump().items():
        saved = state.arguments.get(name, XlaArguments.model_fields[name].default)  # an older version did not know every argument
        if name not in CHANGEABLE and saved != value:
            raise RequestError(f"{path.name} is of a run with {name}={saved}, not {value}; resume it as it was started")
    if state.global_batch != data.global_batch:
        raise RequestError(f"{path.name} is of a run with global_batch={state.global_batch}; resume it as it was started")
    if state.data != data.identity:
        raise RequestError(
            f"{path.name} is of a run on other data ({state.data or 'unnamed'}, not {data.identity or 'unnamed'}); "
            "resume it with its own data"
        )
    restore(path, model.weights, optimizer.state)
    return state


class _Run:
    """Run the steps of a training run, with evaluations and checkpoints in between."""

    def __init__(
        self,
        model: XlaModel,
        optimizer: Optimizer,
        data: Batches,
        devices: Devices,
        arguments: XlaArguments,
        rates: list[float],
        output: Path,
        state: RunState | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.devices = devices
        self.arguments = arguments
        self.rates = rates
        self.output = output
        self.losses = list(state.losses) if state else []
        self.evaluations = list(state.evaluations) if state else []
        self.evaluation = Evaluation(model, devices)
        self.step = Step(model, optimizer, devices, max_traces=len(data.buckets.widths))

    def run_steps(self, on_step: Callable[[StepDone], None]) -> None:
        first = len(self.losses)
        last = self.arguments.max_steps
        batches = self.data.from_step(first)
        with _stop_signals(self.devices) as received:
            for index in range(first, last):
                batch = next(batches)
                start = time.perf_counter()
                loss, norm = self._run_step(index, batch)
                self.losses.append(loss)
                seconds = time.perf_counter() - start
                num_done = index + 1
                held_out = self._evaluate(num_done)
                on_step(StepDone(num_done, last, loss, norm, seconds, _width(batch), self.step.num_traces, held_out))
                self._save(num_done, received)

    def _run_step(self, index: int, batch: dict[str, np.ndarray]) -> tuple[float, float]:
        """Run the step of this index, counted from 0. Return its loss and the norm of its gradients."""
        seed = (self.arguments.seed & 0x7FFFFFFF, index)
        scalars = self.optimizer.scalars(index, self.rates[index])
        loss, norm = (float(value) for value in self.step(batch, scalars, seed))
        if not math.isfinite(loss):
            raise JobFailed(f"the loss of step {index + 1} is {loss}; lower the learning rate, or train in fp32")
        return loss, norm

    def _evaluate(self, num_done: int) -> float | None:
        """Evaluate after every eval_steps steps, and after the last step."""
        interval = self.arguments.eval_steps
        is_due = num_done == self.arguments.max_steps or (interval and num_done % interval == 0)
        if self.data.evaluation is None or not is_due:
            return None
        loss = self.evaluation(self.data.held_out())
        self.evaluations.append((num_done, loss))
        return loss

    def _save(self, num_done: int, received: list[int]) -> None:
        """Write a checkpoint after every save_steps steps. If a signal was received, write one and raise Interrupted."""
        interval = self.arguments.save_steps
        if not received and not (interval and num_done % interval == 0):
            return
        if self.devices.is_chief:
            state = RunState(
                step=num_done,
                losses=tuple(self.losses),
                evaluations=tuple(self.evaluations),
                arguments=self.arguments.model_dump(),
                global_batch=self.data.global_batch,
                data=self.data.identity,
            )
            keep = self.arguments.save_total_limit
            write_checkpoint(self.output, state, self.model.weights, self.optimizer.state, keep=keep)
        if received:
            raise Interrupted(
                f"stopped after step {num_done}; checkpoint-{num_done} in {self.output} is whole: continue with the same "
                "command and --resume"
            )


def _width(batch: Mapping[str, np.ndarray]) -> int:
    """Return the tokens of a row; 1 if the batch has no token ids."""
    if "input_ids" not in batch:
        return 1
    return max(int(value.shape[1]) for value in batch.values() if value.ndim == 2)


class Evaluation:
    """Compute the held-out loss, with one program for each width of the batches."""

    def __init__(self, model: XlaModel, devices: Devices) -> None:
        self.model = model
        self.devices = devices
        self._of_replica = as_tf_function(self._loss_sum, jit=not devices.on_tpu)
        if devices.strategy is None:
            self._function = self._of_replica
        else:
            self._function = as_tf_function(self._run_on_replicas, jit=False)

    def __call__(self, batches: Iterable[Mapping[str, Any]]) -> float:
        total = 0.0
        num_labels = 0.0
        for batch in batches:
            batch_total, batch_number = self._function(divide_rows(batch, self.devices))
            total += float(batch_total)
            num_labels += float(batch_number)
        return total / max(num_labels, 1.0)

    def _loss_sum(self, batch: Mapping[str, Any]) -> LossSum:
        program = loss_program(self.model.torch_model, shapes_of(batch), training=False)
        shifted = shifts_labels(self.model.torch_model)
        return loss_sum(program, batch, self.model.weights, tf.constant([0, 0]), shifted=shifted)

    def _run_in_replica(self, batch: Mapping[str, Any]) -> LossSum:
        """Call the compiled function. strategy.run must not get it directly, because it would compile around it."""
        sums: LossSum = self._of_replica(batch)
        return sums

    def _run_on_replicas(self, batch: Mapping[str, Any]) -> LossSum:
        strategy = self.devices.strategy
        assert strategy is not None
        loss, num_labels = strategy.run(self._run_in_replica, args=(batch,))
        total = tf.distribute.ReduceOp.SUM
        return strategy.reduce(total, loss, axis=None), strategy.reduce(total, num_labels, axis=None)


@contextmanager
def _stop_signals(devices: Devices) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the list that is yielded, instead of ending the process.

    With several hosts no host can stop alone. Then signals end the process, and the run is resumed from its newest checkpoint."""
    received: list[int] = []
    is_single_host = not isinstance(devices.strategy, tf.distribute.MultiWorkerMirroredStrategy)
    signals = (signal.SIGINT, signal.SIGTERM) if is_single_host else ()
    try:
        previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in signals}
    except ValueError:  # only the main thread may handle signals
        previous = {}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
