"""Run the training loop. There is one; CPU, GPU, one process and several differ only by the Plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from upshift.benchmarking.meters import MemoryRecorder, MemorySample
from upshift.debugging.finding import Finding
from upshift.debugging.step_signs import LOOP_DATA_FIX
from upshift.errors import Interrupted, JobFailed
from upshift.models.source import find_model
from upshift.record import Numbers
from upshift.training.batches.plan_layout import layout_for
from upshift.training.batches.sampler import BatchSource, evaluation_batches, look_ahead
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.directory import still_loadable
from upshift.training.checkpoint.rng import seed_rng
from upshift.training.checkpoint.sharded import is_sharded
from upshift.training.data.dataset import TrainingData
from upshift.training.distributed.mesh import all_reduce_max, init_mesh, rank_0_first
from upshift.training.distributed.watchdog import watching
from upshift.training.elastic.replica import ReplicaGroup, RetryStep
from upshift.training.evaluate import evaluate
from upshift.training.held_memory import HeldMemory
from upshift.training.job.request import Job
from upshift.training.loop.events import (
    Doubted,
    Evaluated,
    Event,
    Finished,
    Healed,
    OnEvent,
    OutOfMemory,
    Saved,
    Started,
    StepDone,
    Waited,
)
from upshift.training.loop.metrics import MAX_WATCHED_STEP, NUM_WARMUP, StepMeter
from upshift.training.loop.monitor import RunMonitor, explaining_out_of_memory, reporting_death, warnings_before_start
from upshift.training.loop.save import CheckpointSaver
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import Progress
from upshift.training.out_of_memory import make_autopsy
from upshift.training.prepare import configure_process, load_or_build, load_shards, prepare_model
from upshift.training.process_group import rank_environment
from upshift.training.step import Shape, TrainStep
from upshift.units import GIB, gib

REASONS = ("", "tokens", "seconds", "interrupted", "not saved")  # why to stop before max_steps; the later one wins
HELD_LIMIT_FACTOR = 1.05  # of the predicted memory: above it, what the heap holds free goes back to the system
LOSS_STEPS = 10  # the loss of the Record is the mean of this many last steps


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run that ended as it should, on every rank. The numbers are the rank's own."""

    reason: str  # finished, tokens or seconds
    measured: Numbers
    loss_curve: list[tuple[int, float]]  # tokens, loss
    evaluations: tuple[tuple[int, int, float], ...]  # step, tokens, loss
    memory_samples: list[MemorySample]
    resumed_step: int
    seconds: float
    waited_share: float  # of the steady steps' time, for a core that another program had
    cpu_seconds: float  # of this process in a steady step


def train(job: Job, data: TrainingData, *, on_event: OnEvent, stop: StopRequest, copies: ReplicaGroup | None = None) -> RunResult:
    """Run the job in this process, as one rank, or one of several ``copies``.

    Raise Interrupted after a checkpoint, JobFailed if the run fails, and RequestError if the request cannot be met.
    """
    (rank, ranks) = rank_environment()
    recorder = MemoryRecorder()
    output = Path(job.output)
    with explaining_out_of_memory(output, rank=rank, ranks=ranks), recorder if rank == 0 else nullcontext():
        loop = TrainingLoop(job, data, rank=rank, on_event=on_event, stop=stop, recorder=recorder, copies=copies)
        with reporting_death(output, lambda: loop.progress.step + 1, rank=rank, ranks=ranks):
            return loop.run()


class TrainingLoop:
    def __init__(
        self, job: Job, data: TrainingData, *, rank: int, on_event: OnEvent, stop: StopRequest, recorder: MemoryRecorder,
        copies: ReplicaGroup | None = None,
    ) -> None:  # fmt: skip
        self.start = time.perf_counter()
        self.copies = copies
        self.job = job
        self.data = data
        self.rank = rank
        self.stop = stop
        self.recorder = recorder
        self.plan = job.plan
        self.arguments = job.arguments
        self.output = Path(job.output)
        self._on_event = on_event
        configure_process(self.plan)
        self.place = init_mesh(self.plan)
        self.layout = layout_for(self.plan, data.objective, data_rank=self.place.data_rank)
        self.source = BatchSource(
            sequences=data.training, global_batch=job.global_batch, layout=self.layout,
            objective=data.objective, seed=self.arguments.seed,
        )  # fmt: skip
        self.progress = Progress(job)
        self.checkpoint = Path(job.checkpoint) if job.checkpoint else newest_checkpoint(self.output) if job.resume else None
        self._load()
        self.resumed_step = self.progress.step
        self.saved_step = self.progress.step
        self.meter = self._new_meter()
        held = job.predicted.resident_gib if job.predicted and self.plan.device == "cpu" else None
        self.held_memory = HeldMemory(HELD_LIMIT_FACTOR * held * GIB if held else None)
        keep = self.arguments.save_total_limit
        self.saves = CheckpointSaver(self.place, self.stepper, keep=keep, meter=self.meter, on_saved=self._tell)
        self.signs = RunMonitor(self.output, rank=rank, device=self.plan.device, data_fix=LOOP_DATA_FIX, tell=self._found)

    def _new_meter(self) -> StepMeter:
        """Return a meter that watches the step with the longest micro-batch of the first few."""
        done = self.progress.step
        left = self.arguments.max_steps - self.progress.step
        looked_at = min(left // 2, MAX_WATCHED_STEP) - NUM_WARMUP
        if looked_at < 1:
            return StepMeter(self.plan, planned_steps=left)
        ahead = look_ahead(self.source, first_step=done + NUM_WARMUP, num_steps=looked_at)
        return StepMeter(self.plan, planned_steps=left, longest_step=NUM_WARMUP + 1 + ahead.longest_step)

    def _load(self) -> None:
        seed = self.arguments.seed
        source = self.job.source()
        from_config = self.job.from_config
        if self.checkpoint is not None and source.adapter is None:
            in_one = not is_sharded(self.checkpoint)
            source, from_config = (find_model(str(self.checkpoint)), False) if in_one else (source, True)
        found = None if from_config else load_shards(source, self.plan, self.place, seed=seed)
        if found is None:
            whole = load_or_build(source, self.plan, from_config=from_config, seed=seed)
            count = sum(parameter.numel() for parameter in whole.parameters())
            found = prepare_model(whole, self.plan, self.place), count
            del whole
        model, self.num_parameters = found
        self.stepper = TrainStep(model, self.place, self.arguments, on_halved=self._ran_out, copies=self.copies)
        if self.checkpoint is None:
            seed_rng(seed, 0, self.rank // self.plan.layout.tensor_parallel)  # its ranks drop out the same of what they all have
            return
        self.progress.go_on_from(self.checkpoint, self.stepper, self.place)

    def write_to(self, folder: Path) -> None:
        self.progress.write_to(folder, self.stepper)

    def read_from(self, folder: Path) -> None:
        self.progress.read_from(folder, self.stepper, self.place)
        self._batches = self.source.batches(self.progress.position)
        if self.copies is not None:
            self._on_event(Healed(self.progress.step))

    @property
    def leads(self) -> bool:
        """Return whether this process reports and writes for all processes that do the same."""
        return self.rank == 0 if self.copies is None else self.copies.is_leader

    def run(self) -> RunResult:
        done = self.progress
        most = self.arguments.max_steps
        resumed = str(self.checkpoint) if self.checkpoint else None
        self._batches = self.source.batches(self.progress.position)
        if self.copies is not None:
            self.copies.join(self, device=self.plan.device)
        self._tell(Started(done.step, most, done.tokens[-1], self.num_parameters, self.plan.label(), resumed))
        for words in warnings_before_start(self.stepper.model, self.plan):
            self._tell(Doubted(words))
        with watching(self.plan, lambda step, words: self._on_event(Waited(step, words)), self.output) as self._watched:
            reason = self._steps()
        if reason == "interrupted":
            self._interrupt()
        self.saves.finish()
        self._evaluate()
        self._save_model()
        seconds = time.perf_counter() - self.start
        self._tell(Finished(self.progress.step, self.progress.tokens[-1], seconds, reason))
        return RunResult(
            reason=reason, measured=self._numbers(), loss_curve=self.progress.loss_curve,
            evaluations=tuple(self.progress.evaluations), memory_samples=self.recorder.samples,
            resumed_step=self.resumed_step, seconds=seconds, waited_share=self.meter.waited_share,
            cpu_seconds=self.meter.cpu_seconds / max(len(self.meter.steady), 1),
        )  # fmt: skip

    def _steps(self) -> str:
        self.recorder.phase = "first step"
        while self.progress.step < self.arguments.max_steps:
            self.saves.notice()
            reason = self._reason_to_stop()
            if reason:
                return reason
            try:
                self._one_step()
            except RetryStep:
                self.stepper.forget_gradients()
                self._batches = self.source.batches(self.progress.position)
                continue
            self.recorder.phase = "steady"
            if self.progress.evaluation_is_due:
                self._evaluate()
            if self.arguments.save_steps and self.progress.step % self.arguments.save_steps == 0:
                self._save()
        return "finished"

    def _one_step(self) -> None:
        start = self.signs.begin()
        self.meter.begin()
        if self.copies is not None:
            self.copies.start_step()
        with self.signs.fetching():
            batch = next(self._batches)
        if self.copies is not None:
            batch = self.copies.select_micro_batches(batch)
        try:
            with self._watched(self.progress.step + 1):
                outcome = self.meter.step(self.stepper, batch)
        except JobFailed as error:
            raise JobFailed(f"step {self.progress.step + 1}: {error}; {still_loadable(self.output)}") from None
        self.meter.add(outcome.num_tokens, time.perf_counter() - start)
        self.progress.add(batch, outcome)
        resident = self.meter.held_now()
        self.held_memory.after_step(resident)
        done = StepDone(
            step=self.progress.step, max_steps=self.arguments.max_steps, tokens=self.progress.tokens[-1], loss=outcome.loss,
            learning_rate=outcome.learning_rate, gradient_norm=outcome.gradient_norm,
            tokens_per_second=self.meter.recent_tokens_per_second, seconds_left=self.progress.seconds_left(self.meter),
            resident_bytes=resident,
        )  # fmt: skip
        self._tell(done)

    def _ran_out(self, largest: Shape, smaller: Shape, words: str) -> None:
        autopsy = make_autopsy(
            self.stepper.scene, step=self.progress.step + 1, plan=self.plan, model=self.stepper.model,
            optimizer=self.stepper.optimizer, predicted=self.job.predicted, free_when_planned=None, shape=largest,
            smaller=smaller, words=words,
        )  # fmt: skip
        if self.leads:
            path = autopsy.write(self.output)
            self._tell(OutOfMemory(autopsy.step, largest, smaller, autopsy.verdict, str(path)))

    def _reason_to_stop(self) -> str:
        """Return the reason to stop, the same on every rank: the clock and the signals of rank 0 decide."""
        number = 0
        if self.job.stop_after_tokens and self.progress.tokens[-1] >= self.job.stop_after_tokens:
            number = 1
        if self.job.stop_after_seconds and self.rank == 0 and self.meter.seconds >= self.job.stop_after_seconds:
            number = 2
        if self.stop.requested and self.rank == 0:
            number = 3
        if self.saves.has_failed:
            number = 4
        return REASONS[all_reduce_max(number, self.plan) if self.copies is None else self.copies.agreed_max(number)]

    def _evaluate(self) -> None:
        done = self.progress
        if self.data.evaluation is None or (done.evaluations and done.evaluations[-1][0] == done.step):
            return
        batches = evaluation_batches(
            self.data.evaluation, global_batch=self.job.global_batch, layout=self.layout, objective=self.data.objective
        )
        with self._phase("evaluation"):
            loss = evaluate(self.stepper.model, self.plan, batches)
        done.evaluations.append((done.step, done.tokens[-1], loss))
        self._tell(Evaluated(done.step, done.tokens[-1], loss))

    def _interrupt(self) -> None:
        done = f"interrupted after step {self.progress.step} of {self.arguments.max_steps}"
        if self.progress.step == 0:
            raise Interrupted(f"{done}; nothing is saved, start again")
        self._save()
        self.saves.finish()
        raise Interrupted(f"{done}; checkpoint-{self.progress.step} is saved in {self.output}, continue with --resume")

    def _save(self) -> None:
        """Save a checkpoint. Wait only for the copies to host memory, if that has room."""
        if self.saved_step == self.progress.step or self._is_silent:
            return
        self.saves.finish()
        with rank_0_first(self.plan):
            if self.rank == 0:
                self.progress.write_run(self.output)
        with self._phase("save"):
            self.saves.save(self.output, self.progress.state, self.data.tokenizer)
        self.saved_step = self.progress.step

    @property
    def _is_silent(self) -> bool:
        """Return whether another copy writes for this one."""
        return self.copies is not None and not self.leads

    def _save_model(self) -> None:
        if self._is_silent:
            return
        with self._phase("save"):
            self.saves.save_model(self.output, self.job.source(), self.data.tokenizer)
        with rank_0_first(self.plan):
            if self.rank == 0:
                self.progress.write_run(self.output, finished=True)
                self._tell(Saved(str(self.output), self.progress.step))

    def _numbers(self) -> Numbers:
        speed = self.meter.tokens_per_second
        per_token = self.job.model_flops_per_token
        last = self.progress.losses[-LOSS_STEPS:]
        return Numbers(
            peak_gib=gib(self.meter.peak_bytes) if self.meter.peak_bytes else None,
            resident_gib=gib(self.meter.held_peak()), step_ms=self.meter.step_ms, tokens_per_second=speed,
            loss=sum(last) / len(last) if last else None,
            evaluation_loss=self.progress.evaluations[-1][2] if self.progress.evaluations else None,
            model_flops_per_second=speed * per_token if speed and per_token else None,
            one_time_seconds=self.meter.one_time_seconds,
        )  # fmt: skip

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        before = self.recorder.phase
        self.recorder.phase = phase
        yield
        self.recorder.phase = before

    def _found(self, finding: Finding) -> None:
        self._tell(Waited(self.progress.step, f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}"))

    def _tell(self, event: Event) -> None:
        if self.leads:
            self._on_event(event)
