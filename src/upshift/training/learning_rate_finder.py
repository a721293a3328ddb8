"""Find a learning rate: train a copy for some steps while the rate rises, and see at which rate the loss is lowest.

Source: Smith, Cyclical Learning Rates for Training Neural Networks (2017), section 3.3.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.training.arguments import LOSS
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import Job, run_job
from upshift.training.loop.events import Event, StepDone
from upshift.value import Value

FIRST_RATE = 1e-7
LAST_RATE = 1.0
FEWEST_STEPS, MOST_STEPS = 40, 100
STEPS_AFTER = 2  # the test ends before the last step, which is followed by saving. On a GPU a loss is read one step later
RISEN_STEPS = 3
FIRST_DECADE = 10.0  # times the first rate
NOISE = 3.0  # standard errors: the lowest of a hundred means lies about 2.5 below their mean
SHARE_OF_RUN = 0.2  # of the steps of the run, so that a short run does not take twice as long
BELOW_LOWEST = 0.1  # times the rate of the lowest loss: there the loss still falls
DIVERGED = 4.0  # times the loss, as in fastai


class FoundRate(Value):
    """The learning rate that was found, with the rates that were tried and the loss of the step at each."""

    learning_rate: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]


class _RangeEnded(Exception):
    """End a range test: every rate was tried, or the loss diverged."""


class RangeTest:
    """The rates that a range test has tried, and the loss of the step at each."""

    def __init__(self, run_steps: int, on_step: Callable[[int, int], None]) -> None:
        self.steps = num_range_steps(run_steps)
        self._on_step = on_step
        self._rates: list[float] = []
        self._losses: list[float] = []

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step that is counted from 0."""
        return float(FIRST_RATE * (LAST_RATE / FIRST_RATE) ** (step / (self.steps - 1)))

    def add(self, rate: float, loss: float) -> bool:
        """Add a step. Return whether it was the last one, because every rate was tried or the loss has diverged."""
        self._rates.append(rate)
        self._losses.append(loss)
        self._on_step(len(self._losses), self.steps)
        return len(self._losses) == self.steps or has_diverged(self._losses)

    @property
    def has_risen(self) -> bool:
        """Return whether the loss was lowest before the last steps."""
        return len(self._losses) > RISEN_STEPS and int(smoothed(self._losses).argmin()) < len(self._losses) - RISEN_STEPS

    def found(self) -> FoundRate:
        """Return the rate that ``pick_rate`` picks."""
        rates, losses = self._rates, self._losses
        return FoundRate(learning_rate=pick_rate(rates, losses), rates=tuple(rates), losses=tuple(losses))


def find_learning_rate(job: Job, data: TrainingData, *, on_step: Callable[[int, int], None]) -> FoundRate:
    """Return a learning rate for a job. The model of the job and its output folder stay as they are.

    Args:
        job: the job, whose steps are tried with rising rates.
        data: its data.
        on_step: receives the number of steps that are done, and of all.

    Raise JobFailed if the steps fail before the loss falls at any rate.
    """
    test = RangeTest(job.arguments.max_steps, on_step)

    def watch(event: Event) -> None:
        if isinstance(event, StepDone) and test.add(event.learning_rate, event.loss):
            raise _RangeEnded

    # A rank that was killed with the test may still write.
    with tempfile.TemporaryDirectory(prefix="upshift-learning-rate-", ignore_cleanup_errors=True) as folder:
        test_job = _range_test(job, Path(folder), test.steps)
        rows = rows_of_test(data, test_job.arguments.max_steps * test_job.global_batch, seed=test_job.arguments.seed)
        try:
            run_job(test_job, rows, on_event=watch, fresh_process=True)
        except _RangeEnded:
            pass
        except Interrupted:
            raise Interrupted("interrupted while a learning rate was sought; nothing is saved, start again") from None
        except JobFailed:
            if not test.has_risen:
                raise  # the rate was not too high yet: another fault ended it
    return test.found()


def check_finder(*, is_launched: bool) -> None:
    """Raise RequestError if learning rates cannot be tried for this run."""
    if is_launched:
        raise RequestError(
            "--find-learning-rate trains a copy of the model before the ranks start, and a launcher has started them; run it "
            "once without the launcher, for example with --max-steps 1 and another -o, and then give the --learning-rate that it "
            "prints"
        )


def num_range_steps(run_steps: int) -> int:
    """Return how many steps a range test takes for a run of so many."""
    return int(np.clip(SHARE_OF_RUN * run_steps, FEWEST_STEPS, MOST_STEPS))


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the last loss is far above the first one and the lowest one, which may be below 0."""
    smooth = smoothed(losses)
    return not np.isfinite(losses[-1]) or smooth[-1] > DIVERGED * max(abs(smooth[0]), abs(smooth.min()))


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Return the means of each loss and its neighbours. A moving average of earlier losses alone would show a fall too late."""
    width = _num_in_mean(losses) // 2
    return np.array([np.mean(losses[max(number - width, 0) : number + width + 1]) for number in range(len(losses))])


def _num_in_mean(losses: Sequence[float]) -> int:
    """Return how many losses are in a smoothed one."""
    return 2 * max(len(losses) // 20, 1) + 1


def _spread(losses: Sequence[float]) -> float:
    """Return the standard deviation of a loss about its trend, from differences of neighbours at the lower half of the rates."""
    differences = np.diff(losses[: max(len(losses) // 2, 2)])
    return float(np.sqrt(np.mean(differences**2) / 2))


def pick_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return a tenth of the rate at which the loss is lowest, with two digits.

    Source: fastai's rule "minimum". It came within a factor of 2.6 of the best of eight rates, with a small model that had been
    trained and with one that had not. The rule "valley" was 13 times too low for the second one.

    Raise JobFailed if the loss falls at no rate by more than its noise at the first rates, which change nothing.
    """
    smooth = smoothed(losses)
    lowest = int(smooth.argmin()) if len(losses) else 0
    first = np.array([loss for rate, loss in zip(rates, losses, strict=True) if rate <= FIRST_DECADE * rates[0]])
    if lowest == 0 or first.mean() - smooth[lowest] <= NOISE * _spread(losses) * np.sqrt(
        1 / _num_in_mean(losses) + 1 / len(first)
    ):
        raise JobFailed(
            f"the loss falls at no learning rate from {FIRST_RATE:g} to {LAST_RATE:g}; give --learning-rate, or look at the data"
        )
    return float(f"{BELOW_LOWEST * rates[lowest]:.2g}")


def _range_test(job: Job, folder: Path, steps: int) -> Job:
    """Return the job whose learning rate rises from the first rate to the last one, and which evaluates and saves nothing."""
    arguments = job.arguments.changed(
        max_steps=steps + STEPS_AFTER,
        learning_rate=LAST_RATE,
        range_test_from=FIRST_RATE,
        logging_steps=0,
        eval_steps=0,
        save_steps=0,
        early_stopping_patience=None,
        load_best=False,
        metric_for_best_model=LOSS,
    )
    return job.changed(arguments=arguments, output=str(folder / "run"), overwrite=False, resume=False, heal=False, predicted=None)


def rows_of_test(data: TrainingData, num_rows: int, *, seed: int) -> TrainingData:
    """Return so many rows of the training data, or all if there are fewer, and no evaluation data.

    DPO and KTO compute a reference for each row."""
    together = data.objective.rows_together
    num_groups = len(data.training) // together
    wanted = -(-num_rows // together)
    if wanted >= num_groups:
        return replace(data, evaluation=None)
    groups = np.sort(np.random.default_rng(seed).permutation(num_groups)[:wanted])
    members = (groups[:, None] * together + np.arange(together)).ravel()
    return replace(data, training=data.training.select(members).without_other_tokens(), evaluation=None)
