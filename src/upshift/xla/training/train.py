"""Define ``upshift.xla.train``: a Hugging Face directory and batches in, a trained Hugging Face directory out.

Compute the held-out loss under XLA: the mean over all labels, dropout off, as the torch backend has it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.loading.output_lock import LOCK_NAME, claimed
from upshift.models.source import ModelSource
from upshift.xla.data.batches import Batches
from upshift.xla.data.tfrecord import record_batches
from upshift.xla.model import Dtype, XlaModel, build
from upshift.xla.training.arguments import XlaArguments
from upshift.xla.training.checkpoint import RunState, newest_checkpoint, restore, write_checkpoint
from upshift.xla.training.loss import loss_program, loss_sum, shapes_of, shifts_labels
from upshift.xla.training.optimizers import Optimizer, learning_rates
from upshift.xla.training.step import Step, as_tf_function
from upshift.xla.training.strategy import Devices, choose_devices, divide_rows

Sums = tuple[tf.Tensor, tf.Tensor]  # of the labels' losses, and their number


class Evaluation:
    """The evaluation of a run, with one program for each width of the batches."""

    def __init__(self, model: XlaModel, devices: Devices) -> None:
        self.model = model
        self.devices = devices
        self._of_replica = as_tf_function(self._sums, jit=not devices.on_tpu)
        self._function = self._of_replica if devices.strategy is None else as_tf_function(self._on_replicas, jit=False)

    def __call__(self, batches: Iterable[Mapping[str, Any]]) -> float:
        loss = 0.0
        number = 0.0
        for batch in batches:
            found = self._function(divide_rows(batch, self.devices))
            loss = loss + float(found[0])
            number = number + float(found[1])
        return loss / max(number, 1.0)

    def _sums(self, batch: Mapping[str, Any]) -> Sums:
        program = loss_program(self.model.torch_model, shapes_of(batch), training=False)
        shifted = shifts_labels(self.model.torch_model)
        return loss_sum(program, batch, self.model.weights, tf.constant([0, 0]), shifted=shifted)

    def _in_replica(self, batch: Mapping[str, Any]) -> Sums:
        """Not the compiled function itself: strategy.run would compile around what it does with it."""
        sums: Sums = self._of_replica(batch)
        return sums

    def _on_replicas(self, batch: Mapping[str, Any]) -> Sums:
        strategy = self.devices.strategy
        assert strategy is not None
        loss, number = strategy.run(self._in_replica, args=(batch,))
        total = tf.distribute.ReduceOp.SUM
        return strategy.reduce(total, loss, axis=None), strategy.reduce(total, number, axis=None)


CHANGEABLE = ("eval_steps", "save_steps", "save_total_limit")  # arguments that a resumed run may have anew


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
    losses: tuple[float, ...]  # of every step of the run, those before a resume included
    evaluations: tuple[tuple[int, float], ...]  # (step, held-out loss)
    model_directory: str
    devices: str  # with the reason
    num_traces: int
    widths: tuple[int, ...]
    padded_share: float  # of the computed tokens, expected
    resumed_from: str | None


def train(
    model: str | ModelSource, data: Batches | str, *, output: str | Path, global_batch: int = 8, resume: bool = False,
    from_config: bool = False, devices: Devices | None = None, on_step: Callable[[StepDone], None] = lambda done: None,
    **arguments: Any,
) -> Trained:  # fmt: skip
    """Train a model.

    ``data``: a folder of TFRecord files, or batches. ``arguments``: the fields of ``XlaArguments``, max_steps at
    least. Raise RequestError for a wrong argument, and Interrupted after SIGINT or SIGTERM, with a checkpoint that
    ``resume`` continues."""
    given = XlaArguments.from_fields(arguments)
    output = Path(output)
    rates = learning_rates(given)
    devices = devices or choose_devices()
    with claimed(output) if devices.is_chief else nullcontext():
        return _train_on_devices(model, data, output, global_batch, resume, from_config, devices, on_step, given, rates)


def _train_on_devices(
    model: str | ModelSource, data: Batches | str, output: Path, global_batch: int, resume: bool, from_config: bool,
    devices: Devices, on_step: Callable[[StepDone], None], given: XlaArguments, rates: list[float],
) -> Trained:  # fmt: skip
    found = _start_of(output, resume=resume)
    if isinstance(data, str):
        data = record_batches(data, global_batch=global_batch, num_steps=given.max_steps, seed=given.seed)
    if given.eval_steps and data.evaluation is None:
        raise RequestError(f"eval_steps={given.eval_steps} and no held-out data; leave it out, or give data that has some")
    _check_divides(data.global_batch, devices, given)
    with devices.strategy.scope() if devices.strategy else nullcontext():
        dtype: Dtype = "bfloat16" if given.precision == "bf16" else "float32"
        built = build(model, dtype=dtype, weights_dtype="float32", from_config=from_config, seed=given.seed)
        optimizer = Optimizer(built.weights, given)
    standing = None if found is None else _restored(found, built, optimizer, data, given)
    run = _Run(built, optimizer, data, devices, given, rates, output, standing)
    run.to_the_end(on_step)
    if devices.is_chief:
        built.save(output)
    return Trained(
        losses=tuple(run.losses), evaluations=tuple(run.evaluations), model_directory=str(output),
        devices=devices.reason, num_traces=run.step.num_traces, widths=data.buckets.widths,
        padded_share=data.buckets.padded_share, resumed_from=str(found[0]) if found else None,
    )  # fmt: skip


def _start_of(output: Path, *, resume: bool) -> tuple[Path, RunState] | None:
    """Return the checkpoint to go on from. None: from the beginning. Nothing that is in the directory is ever written
    over otherwise."""
    inside = sorted(path for path in output.iterdir() if path.name != LOCK_NAME) if output.is_dir() else []
    if inside and not resume:
        raise RequestError(f"{output} is not empty ({inside[0].name}); resume its run (--resume), or give another directory")
    found = newest_checkpoint(output)
    if inside and found is None:
        raise RequestError(f"{output} has no whole checkpoint to resume from; give the directory of an earlier run")
    return found


def _check_divides(global_batch: int, devices: Devices, arguments: XlaArguments) -> None:
    parts = devices.num_replicas * arguments.gradient_accumulation_steps
    if global_batch % parts:
        raise RequestError(
            f"global_batch={global_batch} is not divided by {devices.num_replicas} replicas x gradient_accumulation_steps="
            f"{arguments.gradient_accumulation_steps}; use a multiple of {parts}"
        )


def _restored(
    found: tuple[Path, RunState], model: XlaModel, optimizer: Optimizer, data: Batches, arguments: XlaArguments
) -> RunState:
    path, standing = found
    asked = arguments.model_dump()
    other = next((name for name in asked if name not in CHANGEABLE and standing.arguments.get(name) != asked[name]), None)
    if other is not None:
        was = standing.arguments.get(other)
        raise RequestError(f"{path.name} is of a run with {other}={was}, not {asked[other]}; resume it as it was started")
    if standing.global_batch != data.global_batch:
        raise RequestError(f"{path.name} is of a run with global_batch={standing.global_batch}; resume it as it was started")
    if standing.data != data.identity:
        raise RequestError(
            f"{path.name} is of a run on other data ({standing.data or 'unnamed'}, not {data.identity or 'unnamed'}); "
            "resume it with its own data"
        )
    restore(path, model.weights, optimizer.state)
    return standing


class _Run:
    def __init__(
        self, model: XlaModel, optimizer: Optimizer, data: Batches, devices: Devices, arguments: XlaArguments, rates: list[float],
        output: Path, standing: RunState | None,
    ) -> None:  # fmt: skip
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.devices = devices
        self.arguments = arguments
        self.rates = rates
        self.output = output
        self.losses = list(standing.losses) if standing else []
        self.evaluations = list(standing.evaluations) if standing else []
        self.evaluation = Evaluation(model, devices)
        self.step = Step(model, optimizer, devices, max_traces=len(data.buckets.widths))

    def to_the_end(self, on_step: Callable[[StepDone], None]) -> None:
        last = self.arguments.max_steps
        first = len(self.losses)
        batches = self.data.from_step(first)
        with _stop_asked(self.devices) as stop:
            for number in range(first, last):
                batch = next(batches)
                start = time.perf_counter()
                seed = (self.arguments.seed & 0x7FFFFFFF, number)
                scalars = self.optimizer.scalars(number, self.rates[number])
                loss, norm = (float(value) for value in self.step(batch, scalars, seed))
                if not math.isfinite(loss):
                    raise JobFailed(f"the loss of step {number + 1} is {loss}; lower the learning rate, or train in fp32")
                self.losses.append(loss)
                width = max(value.shape[1] for value in batch.values() if value.ndim == 2) if "input_ids" in batch else 1
                seconds = time.perf_counter() - start
                held_out = self._evaluated(number + 1)
                on_step(StepDone(number + 1, last, loss, norm, seconds, width, self.step.num_traces, held_out))
                self._save_at(number + 1, stop)

    def _evaluated(self, done: int) -> float | None:
        """Evaluate after every eval_steps, and after the last step."""
        every = self.arguments.eval_steps
        if self.data.evaluation is None or not (done == self.arguments.max_steps or (every and done % every == 0)):
            return None
        loss = self.evaluation(self.data.held_out())
        self.evaluations.append((done, loss))
        return loss

    def _save_at(self, done: int, stop: list[int]) -> None:
        every = self.arguments.save_steps
        if not stop and not (every and done % every == 0):
            return
        if self.devices.is_chief:
            standing = RunState(
                step=done, losses=tuple(self.losses), evaluations=tuple(self.evaluations), arguments=self.arguments.model_dump(),
                global_batch=self.data.global_batch, data=self.data.identity,
            )  # fmt: skip
            keep = self.arguments.save_total_limit
            write_checkpoint(self.output, standing, self.model.weights, self.optimizer.state, keep=keep)
        if stop:
            raise Interrupted(f"stopped after step {done}; checkpoint-{done} in {self.output} is whole: continue with --resume")


@contextmanager
def _stop_asked(devices: Devices) -> Iterator[list[int]]:
    """Yield a list that has a number once SIGINT or SIGTERM came. With several hosts none can stop alone: there
    signals end the process, and the run goes on from the newest checkpoint."""
    asked: list[int] = []
    is_alone = not isinstance(devices.strategy, tf.distribute.MultiWorkerMirroredStrategy)
    signals = (signal.SIGINT, signal.SIGTERM) if is_alone else ()
    try:
        before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in signals}
    except ValueError:  # not the main thread, which alone may take signals
        before = {}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
