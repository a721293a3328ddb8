"""Run the training loop. CPU, GPU, one process and several processes use the same loop and differ only by the Plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from upshift.benchmarking.meters import MemoryRecorder, MemorySample
from upshift.debugging.finding import Finding
from upshift.debugging.step_faults import LOOP_DATA_FIX
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.models.adapter import base_of
from upshift.models.build import name_padding
from upshift.models.ops.sequence_loss import turn_off_dropout
from upshift.models.source import ModelSource, find_model
from upshift.planning.cost.uncertainty import VARYING_HELD_INTERVAL
from upshift.planning.workload import forward_share
from upshift.record import Numbers
from upshift.training.batches.layout import layout_for
from upshift.training.batches.sampler import BatchSource, evaluation_batches, look_ahead
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.directory import still_loadable
from upshift.training.checkpoint.rng import seed_rng
from upshift.training.checkpoint.sharded import is_sharded
from upshift.training.data.dataset import TrainingData
from upshift.training.distributed.mesh import all_gather_objects, all_reduce_max, gather_errors, init_mesh, rank_0_first
from upshift.training.distributed.watchdog import watching
from upshift.training.elastic.replica import ReplicaGroup, RetryStep
from upshift.training.evaluate import estimate_held_out_kl, evaluate
from upshift.training.held_memory import HeldMemory
from upshift.training.job.request import Job
from upshift.training.loop.best_evaluation import Evaluation, checkpoint_of_step, choose_best, find_checkpoint_damage
from upshift.training.loop.events import (
    EARLY_STOPPING,
    Doubted,
    Event,
    Finished,
    Healed,
    OnEvent,
    OutOfMemory,
    Referenced,
    ReferenceStarted,
    Saved,
    Started,
    Waited,
)
from upshift.training.loop.metrics import MAX_WATCHED_STEP, NUM_WARMUP, StepMeter
from upshift.training.loop.monitor import RunMonitor, explaining_out_of_memory, reporting_death, warnings_before_start
from upshift.training.loop.save import CheckpointSaver, load_training_state
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import KlRow, LoggedStep, Progress, RewardRow
from upshift.training.loop.stop_vote import StopVote
from upshift.training.neftune import add_embedding_noise
from upshift.training.out_of_memory import Halved, make_autopsy, read_memory
from upshift.training.preferences.preference_loss import PreferenceLoss, Rewards
from upshift.training.preferences.reference_model import ReferencePass
from upshift.training.prepare import configure_process, load_or_build, load_shards, prepare_model
from upshift.training.rank_processes import rank_environment
from upshift.training.sharded_init import read_generation_config
from upshift.training.step import QueuedStep, StepResult, TrainStep, check_finite
from upshift.units import GIB, gib

HELD_LIMIT_FACTOR = VARYING_HELD_INTERVAL[1]  # times the predicted memory; above it, free heap memory goes back to the system
LOSS_STEPS = 10  # the Record's loss is the mean of this many last steps


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run that ended without an error. Every rank has one, with its own numbers."""

    reason: str  # finished, tokens or seconds
    measured: Numbers
    loss_curve: list[tuple[int, float]]  # tokens, loss
    evaluations: tuple[tuple[int, int, float], ...]  # step, tokens, loss
    logged_steps: tuple[LoggedStep, ...]
    model_step: int  # the final model has the weights after this step
    memory_samples: list[MemorySample]
    resumed_step: int
    seconds: float
    waited_share: float  # of the steady steps' time: waiting for a core that another program used
    cpu_seconds: float  # CPU time of this process in a steady step
    rewards: tuple[RewardRow, ...] = ()  # of the pairs of each step
    evaluation_rewards: tuple[RewardRow, ...] = ()
    kl_terms: tuple[KlRow, ...] = ()  # of the rated completions of each step
    reference_seconds: float = 0.0


def train(job: Job, data: TrainingData, *, on_event: OnEvent, stop: StopRequest, copies: ReplicaGroup | None = None) -> RunResult:
    """Run the job in this process, as one rank, or one of several ``copies``.

    Raise Interrupted after a checkpoint, JobFailed if the run fails, and RequestError if the request cannot be met.
    """
    rank, num_ranks = rank_environment()
    recorder = MemoryRecorder()
    output = Path(job.output)
    recording = recorder if rank == 0 else nullcontext()
    with explaining_out_of_memory(output, rank=rank, ranks=num_ranks), recording:
        loop = TrainingLoop(job, data, rank=rank, on_event=on_event, stop=stop, recorder=recorder, copies=copies)
        with reporting_death(output, lambda: loop.current_step, rank=rank, ranks=num_ranks):
            return loop.run()


class TrainingLoop:
    """One rank's training run, from loading the model to saving it."""

    def __init__(
        self,
        job: Job,
        data: TrainingData,
        *,
        rank: int,
        on_event: OnEvent,
        stop: StopRequest,
        recorder: MemoryRecorder,
        copies: ReplicaGroup | None = None,
    ) -> None:
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
        self._free_before = self._free_memory()
        self.mesh = init_mesh(self.plan)
        self.layout = layout_for(self.plan, data.objective, data_rank=self.mesh.data_rank)
        self.source = BatchSource(
            sequences=data.training,
            global_batch=job.global_batch,
            layout=self.layout,
            objective=data.objective,
            seed=self.arguments.seed,
        )
        self.progress = Progress(job)
        # On a GPU the loss and the norm of a step are read while the next step runs, so that it never waits for the host. A copy
        # that heals waits in each step for the others anyway.
        self._reads_late = self.plan.device == "cuda" and copies is None
        self._unread: QueuedStep | None = None
        self._is_reading = False
        self._stop_vote = StopVote(self.plan, copies)
        self.checkpoint: Path | None = None
        if job.checkpoint:
            self.checkpoint = Path(job.checkpoint)
        elif job.resume:
            self.checkpoint = newest_checkpoint(self.output)
        self._unread_checkpoint: str | None = None  # why a copy that came back has no state yet
        self._load_or_wait_for_copy()
        self.reference_seconds = 0.0
        self.resumed_step = self.progress.step
        self.saved_step = self.progress.step
        self.meter = self._new_meter()
        predicted_gib = job.predicted.resident_gib if job.predicted and self.plan.device == "cpu" else None
        self.held_memory = HeldMemory(HELD_LIMIT_FACTOR * predicted_gib * GIB if predicted_gib else None)
        self.saver = CheckpointSaver(
            self.mesh, self.train_step, keep=self.arguments.save_total_limit, meter=self.meter, on_saved=self._send_event
        )
        self.monitor = RunMonitor(
            self.output, rank=rank, device=self.plan.device, data_fix=LOOP_DATA_FIX, on_finding=self._report_finding
        )

    def _new_meter(self) -> StepMeter:
        """Return a meter that measures the memory of the step with the longest micro-batch among the first steps."""
        remaining_steps = self.arguments.max_steps - self.progress.step
        num_candidates = min(remaining_steps, MAX_WATCHED_STEP) - NUM_WARMUP
        if num_candidates < 1:
            return StepMeter(self.plan, planned_steps=remaining_steps)
        ahead = look_ahead(self.source, first_step=self.progress.step + NUM_WARMUP, num_steps=num_candidates)
        return StepMeter(self.plan, planned_steps=remaining_steps, longest_step=NUM_WARMUP + 1 + ahead.longest_step)

    def _load_or_wait_for_copy(self) -> None:
        """Load the model and the checkpoint. A copy that comes back may go on without its checkpoint.

        Another copy may delete the checkpoint meanwhile. It passes on its own state, which is newer, before the first step.
        """
        try:
            self._load()
        except (RequestError, OSError) as error:
            if self.copies is None or self.copies.first or self.checkpoint is None:
                raise
            self._unread_checkpoint = str(error)
            self.checkpoint = None
            self._load()

    def _load(self) -> None:
        """Load the model, make the optimizer, and read the checkpoint that the run resumes from."""
        seed = self.arguments.seed
        source = self.job.source()
        from_config = self.job.from_config
        if self.checkpoint is not None and source.adapter is None:
            if is_sharded(self.checkpoint):
                from_config = True
            else:
                source = self._source_of_checkpoint(self.checkpoint, source)
                from_config = False
        loaded = None if from_config else load_shards(source, self.plan, self.mesh, seed=seed)
        if loaded is None:
            whole = load_or_build(source, self.plan, from_config=from_config, seed=seed)
            if from_config and not self.job.from_config:  # a checkpoint in parts has the weights, and no generation options
                read_generation_config(whole, source)
            count = sum(parameter.numel() for parameter in whole.parameters())
            loaded = prepare_model(whole, self.plan, self.mesh), count
            del whole
        model, self.num_parameters = loaded
        if self.data.objective.has_pairs:
            turn_off_dropout(model)
        if self.data.objective.has_rewards:
            name_padding(base_of(model).config, self.data.objective.pad_token_id)
        add_embedding_noise(model, self.arguments.neftune_noise_alpha)
        self.train_step = TrainStep(model, self.mesh, self.arguments, on_halved=self._report_out_of_memory, copies=self.copies)
        if self.checkpoint is None:
            # Tensor-parallel ranks need the same dropout for the activations that they all have.
            seed_rng(seed, 0, self.rank // self.plan.layout.tensor_parallel)
            return
        self.progress.resume_from(self.checkpoint, self.train_step, self.mesh)

    def _source_of_checkpoint(self, checkpoint: Path, source: ModelSource) -> ModelSource:
        """Return the source of a checkpoint's model.

        The checkpoint of a reward model names the padding token, whose embedding would then get no gradient. ``source``, the
        model before the training, may name none.
        """
        saved = find_model(str(checkpoint))
        if not self.data.objective.has_rewards:
            return saved
        return saved.changed(config=source.config)

    def _add_reference(self) -> None:
        """Compute what the model before the training makes of each pair, or read it if the run has computed it already."""
        if not (self.data.objective.needs_reference and self.train_step.preference.pairs.needs_reference):
            return
        with self._phase("reference"):
            reference = ReferencePass(
                passes=self.train_step.passes,
                mesh=self.mesh,
                layout=self.layout,
                objective=self.data.objective,
                global_batch=self.job.global_batch,
                output=self.output,
                run_id=self.progress.run.id,
                check_stop=self._stop_reference,
                has_kl_pass=self.arguments.has_kl_pass,
            )
            data = reference.read(self.data) if self.checkpoint is not None else reference.recall(self.data)
            if data is None:
                data = self._compute_reference(reference)
        self.data = data
        self.source = replace(self.source, sequences=data.training)

    def _compute_reference(self, reference: ReferencePass) -> TrainingData:
        """Return the data with the log-probabilities. Tell the user before how long that takes, and then how long it took."""
        start = time.perf_counter()
        predicted = self.job.predicted
        seconds = None
        if predicted is not None and predicted.step_ms is not None:
            steps_per_epoch = len(self.data.training) / self.job.global_batch
            kind = {"has_ratings": self.data.objective.has_ratings, "has_kl_pass": self.arguments.has_kl_pass}
            share = forward_share(**kind, has_adapter=self.job.source().adapter is not None)
            seconds = predicted.step_ms.p50 / 1000 * steps_per_epoch * share + (predicted.one_time_seconds or 0.0)
        num_pairs = len(self.data.training) // 2
        self._send_event(ReferenceStarted(num_pairs, seconds, self.data.objective.examples))
        data = reference.compute(self.data)
        self.reference_seconds = time.perf_counter() - start
        self._send_event(Referenced(num_pairs, self.reference_seconds, self.data.objective.examples))
        return data

    def _stop_reference(self) -> None:
        """Raise Interrupted on all ranks if one of them was asked to stop."""
        if all_reduce_max(int(self.stop.requested), self.plan):
            raise Interrupted("interrupted before the first step; nothing is saved, start again")

    def write_to(self, folder: Path) -> None:
        """Write the state that a restarted copy needs."""
        self.progress.write_to(folder, self.train_step)

    def read_from(self, folder: Path) -> None:
        """Go on from the state that another copy wrote."""
        self.progress.read_from(folder, self.train_step, self.mesh)
        self._unread_checkpoint = None
        self._batches = self.source.batches(self.progress.position)
        if self.copies is not None:
            self._on_event(Healed(self.progress.step))

    @property
    def current_step(self) -> int:
        """Return the step that this rank is at: the next one, or the one whose result it reads."""
        return self.progress.read_step + 1 if self._is_reading else self.progress.step + 1

    @property
    def leads(self) -> bool:
        """Return whether this process reports and writes for all processes that do the same work."""
        return self.rank == 0 if self.copies is None else self.copies.is_leader

    def run(self) -> RunResult:
        self._add_reference()
        self._batches = self.source.batches(self.progress.position)
        if self.copies is not None:
            self.copies.join(self, device=self.plan.device)
        self._send_started()
        for warning in warnings_before_start(self.train_step.model, self.plan):
            self._send_event(Doubted(warning))
        with watching(self.plan, lambda step, warning: self._on_event(Waited(step, warning)), self.output) as self._watch_step:
            reason = self._run_steps()
            self._read_last_step()
        if reason == "interrupted":
            self._interrupt()
        self.saver.finish()
        self._evaluate()
        best_evaluation = self._load_best()
        model_step = best_evaluation[0] if best_evaluation else self.progress.step
        self._save_model(model_step)
        seconds = time.perf_counter() - self.start
        self._send_event(Finished(self.progress.step, self.progress.tokens[-1], seconds, reason))
        return RunResult(
            reason=reason,
            measured=self._numbers(best_evaluation),
            loss_curve=self.progress.loss_curve,
            evaluations=tuple(self.progress.evaluations),
            logged_steps=tuple(self.progress.logged_steps),
            model_step=model_step,
            memory_samples=self.recorder.samples,
            resumed_step=self.resumed_step,
            seconds=seconds,
            waited_share=self.meter.waited_share,
            cpu_seconds=self.meter.cpu_seconds / max(len(self.meter.steady), 1),
            rewards=tuple(self.progress.rewards),
            evaluation_rewards=tuple(self.progress.evaluation_rewards),
            kl_terms=tuple(self.progress.kl_terms),
            reference_seconds=self.reference_seconds,
        )

    def _send_started(self) -> None:
        progress = self.progress
        event = Started(
            step=progress.step,
            max_steps=self.arguments.max_steps,
            tokens=progress.tokens[-1],
            num_parameters=self.num_parameters,
            plan_label=self.plan.label(),
            resumed_from=str(self.checkpoint) if self.checkpoint else None,
        )
        self._send_event(event)

    def _run_steps(self) -> str:
        """Run steps until one of the ends is reached. Return the reason for the end."""
        self.recorder.phase = "first step"
        while self.progress.step < self.arguments.max_steps:
            self.saver.report_if_written()
            reason = self._reason_to_stop()
            if reason:
                return reason
            try:
                self._run_step()
            except RetryStep:
                self.train_step.forget_gradients()
                self._batches = self.source.batches(self.progress.position)
                continue
            self.recorder.phase = "steady"
            if self.progress.evaluation_is_due:
                self._read_last_step()
                self._evaluate()
                is_last = self.progress.step == self.arguments.max_steps
                if self.progress.best_step == self.progress.step and not is_last:
                    self._save()
            if self.arguments.save_steps and self.progress.step % self.arguments.save_steps == 0:
                self._read_last_step()
                self._save()
        return "finished"

    def _run_step(self) -> None:
        self.monitor.begin_step()
        self.meter.begin()
        if self.copies is not None:
            self.copies.start_step()
            if self._unread_checkpoint is not None:
                problem = "no other copy is left, and this one could not read its checkpoint"
                raise JobFailed(f"{problem}: {self._unread_checkpoint}; {still_loadable(self.output)}")
        with self.monitor.fetching_batch():
            batch = next(self._batches)
        self.monitor.note_sizes(micro_batch.shape for micro_batch in batch.micro_batches)
        if self.copies is not None:
            batch = self.copies.select_micro_batches(batch)
        with self._watch_step(self.progress.step + 1):
            with self._naming_step():
                queued = self.meter.queue_step(self.train_step, batch)
            self.progress.add(batch)
            due = self._unread if self._reads_late else queued
            self._unread = queued if self._reads_late else None
            result = None if due is None else self._read(due)
        if result is not None:
            self._report_step(result)

    def _read_last_step(self) -> None:
        """Read and report the last step, if it is only queued."""
        if self._unread is None:
            return
        with self._watch_step(self.progress.step):
            result = self._read(self._unread)
        self._unread = None
        self._report_step(result)

    def _read(self, queued: QueuedStep) -> StepResult:
        """Return the result of the oldest step that was not read. Raise JobFailed if its loss is not finite."""
        self._is_reading = True
        with self._naming_step():
            result = queued.read()
        self._is_reading = False
        self.meter.end_step(result.num_tokens)
        self.progress.add_result(result)
        return result

    @contextmanager
    def _naming_step(self) -> Iterator[None]:
        """Put the step before the words of a failure, and what can still be loaded after them."""
        try:
            yield
        except JobFailed as error:
            raise JobFailed(f"step {self.current_step}: {error}; {still_loadable(self.output)}") from None

    def _report_step(self, result: StepResult) -> None:
        """Log the step of the last result, and send its event."""
        logged = self.progress.log(result, self.meter.recent_tokens_per_second)
        resident = self.meter.held_bytes()
        self.held_memory.after_step(resident)
        self._send_event(self.progress.step_done(result, logged, self.meter, resident))

    def _free_memory(self) -> float | None:
        """Return the bytes that this process has or could take, or None on a CPU with other ranks, which take their part."""
        if self.plan.device == "cpu" and self.plan.num_processes > 1:
            return None
        readings = read_memory(self.plan.device)
        return float(readings.free + readings.own)

    def _report_out_of_memory(self, halved: Halved) -> None:
        """Write an autopsy of the step or the pass, and send an event with its verdict."""
        autopsy = make_autopsy(
            self.train_step.memory_at_failure,
            step=self.progress.step if halved.failed == "evaluation" else self.progress.step + 1,
            plan=self.plan,
            model=self.train_step.model,
            optimizer=self.train_step.optimizer,
            predicted=self.job.predicted,
            free_before=self._free_before,
            halved=halved,
        )
        if self.leads:
            path = autopsy.write(self.output)
            event = OutOfMemory(autopsy.step, halved.largest, halved.smaller, autopsy.verdict, str(path), halved.failed)
            self._send_event(event)

    def _reason_to_stop(self) -> str:
        """Return the reason to stop, or an empty text. All ranks return the same.

        A signal to any rank stops all. Time is that of rank 0's clock.
        """
        shared = ""
        own = ""
        if self.job.stop_after_tokens and self.progress.tokens[-1] >= self.job.stop_after_tokens:
            shared = "tokens"
        if self.progress.patience_is_over:
            shared = EARLY_STOPPING
        if self.job.stop_after_seconds and self.rank == 0 and self.meter.seconds_with_queued >= self.job.stop_after_seconds:
            own = "seconds"
        if self.stop.requested:
            own = "interrupted"
        if self.saver.has_failed:
            own = "not saved"
        return self._stop_vote.agree(shared=shared, own=own)

    def _evaluate(self) -> None:
        """Compute the held-out loss, unless this step is evaluated already. Raise JobFailed if it is NaN or infinite."""
        progress = self.progress
        if self.data.evaluation is None or (progress.evaluations and progress.evaluations[-1][0] == progress.step):
            return
        make_batches = partial(
            evaluation_batches,
            self.data.evaluation,
            global_batch=self.job.global_batch,
            layout=self.layout,
            objective=self.data.objective,
        )
        preference = PreferenceLoss.of(self.arguments)
        rewards: Rewards | None = None
        with self._phase("evaluation"):
            preference.mean_tokens = self.data.objective.mean_answer_tokens(self.data.evaluation)
            if self.data.objective.has_ratings and preference.ratings.has_kl:
                preference.kl = estimate_held_out_kl(self.train_step.passes, make_batches())
            loss = evaluate(self.train_step.passes, make_batches(), preference)
            if self.data.objective.has_pairs:
                rewards = preference.read(device=self.plan.device, num_processes=self.plan.num_processes)
        try:
            check_finite(loss)
        except JobFailed as error:
            evaluation = f"evaluation of the held-out data after step {progress.step}"
            raise JobFailed(f"{evaluation}: {error}; {still_loadable(self.output)}") from None
        self._send_event(progress.add_evaluation(loss, rewards))

    def _interrupt(self) -> None:
        interrupted = f"interrupted after step {self.progress.step} of {self.arguments.max_steps}"
        if self.progress.step == 0:
            raise Interrupted(f"{interrupted}; nothing is saved, start again")
        self._save()
        self.saver.finish()
        checkpoint = f"checkpoint-{self.progress.step}"
        raise Interrupted(f"{interrupted}; {checkpoint} is saved in {self.output}, continue with the same command and --resume")

    def _save(self) -> None:
        """Start to save a checkpoint. If host memory has room, wait only until the tensors are copied there."""
        if self.saved_step == self.progress.step or self._is_silent:
            return
        self.saver.finish()
        with rank_0_first(self.plan):
            if self.rank == 0:
                self.progress.write_run(self.output)
        with self._phase("save"):
            self.saver.save(self.output, self.progress.state, self.data.tokenizer, best_step=self.progress.best_step)
        self.saved_step = self.progress.step

    @property
    def _is_silent(self) -> bool:
        """Return whether another copy writes for this one."""
        return self.copies is not None and not self.leads

    def _save_model(self, model_step: int) -> None:
        """Save the final model, which has the weights after ``model_step``."""
        if self._is_silent:
            return
        with self._phase("save"):
            self.saver.save_model(self.output, self.job.source(), self.data.tokenizer)
        with rank_0_first(self.plan):
            if self.rank == 0:
                self.progress.write_run(self.output, finished=True)
                self._send_event(Saved(str(self.output), model_step))

    def _load_best(self) -> Evaluation | None:
        """Load the checkpoint of the lowest held-out loss, if the run asks for it and has gone on since.

        If that checkpoint is missing or damaged, load the one of the next lowest loss, and send an event that says so. Return
        the evaluation that is loaded, or None if the model stays as it is. Raise JobFailed if a whole checkpoint cannot be read.
        """
        if not self.arguments.load_best or self._is_silent:
            return None
        step = self.progress.step
        best = choose_best(self.progress.evaluations, step=step, find_damage=self._find_damage)
        if best.lost:
            model_step = best.evaluation[0] if best.evaluation else step
            self._send_event(Doubted(f"{best.loss_message}; the final model is that of step {model_step}"))
        if best.evaluation is None or best.evaluation[0] == step:
            return None
        try:
            with gather_errors(self.plan):
                load_training_state(checkpoint_of_step(self.output, best.evaluation[0]), self.train_step, self.mesh)
        except RequestError as error:
            raise JobFailed(f"the best checkpoint cannot be loaded: {error}; {still_loadable(self.output)}") from None
        return best.evaluation

    def _find_damage(self, step: int) -> str | None:
        """Return why the checkpoint of a step cannot be loaded on some rank, or None. All ranks return the same."""
        damage = find_checkpoint_damage(self.output, step, contents=self.rank == 0)  # one rank reads the bytes for all
        return next((reason for reason in all_gather_objects(damage, self.plan) if reason is not None), None)

    def _numbers(self, best_evaluation: Evaluation | None) -> Numbers:
        """Return the measured numbers. ``best_evaluation``: of the checkpoint that was loaded at the end, or None."""
        tokens_per_second = self.meter.tokens_per_second
        flops_per_token = self.job.model_flops_per_token
        last_losses = self.progress.losses[-LOSS_STEPS:]
        evaluation = best_evaluation or next(reversed(self.progress.evaluations), None)
        return Numbers(
            peak_gib=gib(self.meter.peak_bytes) if self.meter.peak_bytes else None,
            resident_gib=gib(self.meter.held_peak()),
            step_ms=self.meter.step_ms,
            tokens_per_second=tokens_per_second,
            loss=sum(last_losses) / len(last_losses) if last_losses else None,
            evaluation_loss=evaluation[2] if evaluation else None,
            model_flops_per_second=tokens_per_second * flops_per_token if tokens_per_second and flops_per_token else None,
            one_time_seconds=self.meter.one_time_seconds,
        )

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        previous = self.recorder.phase
        self.recorder.phase = phase
        yield
        self.recorder.phase = previous

    def _report_finding(self, finding: Finding) -> None:
        self._send_event(Waited(self.progress.step, f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}"))

    def _send_event(self, event: Event) -> None:
        if self.leads:
            self._on_event(event)
