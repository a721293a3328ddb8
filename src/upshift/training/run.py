"""Train a model: prepare the data, find or make a plan, try plans, run, and return the Record.

``upshift train`` and ``upshift.train`` call this module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.output_lock import claimed
from upshift.models.adapter import check_module_names
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource, fetch_weights
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning, find_host, plan_training, read_plan
from upshift.planning.search.constraints import conflict, conflict_with_pairs
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.space import check_allow, parse_value, read_assignments, settable_fields
from upshift.planning.trials.runner import TrialRequest
from upshift.planning.trials.select import Proof, Tried, after_trial, remember_run
from upshift.planning.trials.store import proof_path
from upshift.planning.workload import Workload
from upshift.record import Numbers, Record
from upshift.settings import Ranks, read_ranks
from upshift.training.arguments import Arguments, PlanOptions, Tracker, TrainRequest
from upshift.training.batches.sampler import check_enough_data, count_steps
from upshift.training.checkpoint.checkpoint import check_output_directory, find_checkpoints
from upshift.training.checkpoint.state import SavedState
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import ObjectiveName
from upshift.training.elastic.supervisor import fixed_for_healing
from upshift.training.job.job import Job, TrainingData, check_evaluations, prepare_data, run_job
from upshift.training.job.launched import is_restart, run_launched
from upshift.training.learning_rate_finder import FoundRate, check_finder, find_learning_rate
from upshift.training.loop.events import OnEvent
from upshift.training.loop.state import (
    OWN_FILES,
    another_run,
    check_resumed_data,
    check_resumed_options,
    check_run_file,
    learning_rate_of,
    length_of,
)
from upshift.training.mup import add_base_widths
from upshift.training.neftune import fixed_for_neftune
from upshift.training.prepare import check_weights
from upshift.training.tasks.prepare import TaskModel, find_task_model
from upshift.training.trials.trials import recall_earlier_proof, reject_unrunnable_plans, try_plans


def requested_processes(fixed: tuple[str, ...]) -> int | None:
    """Return the number of processes that ``--nproc`` or ``--set`` asks for, or None."""
    value = next((text.partition("=")[2] for text in fixed if text.startswith("num_processes=")), "")
    return int(value) if value.isdecimal() else None


def find_existing_plan(
    plan_file: Path | None, resume_from: Path | None, fixed: tuple[str, ...], host: Host, source: Any
) -> Plan | None:
    """Return the plan in a file, or that of the checkpoint from which the run resumes, if it was made for this machine.

    Return None if a plan has to be made.
    """
    if plan_file is not None:
        plan = read_plan(plan_file, host=host, source=source)
        difference = _first_difference(plan, fixed)
        if difference is not None:
            raise RequestError(f"--set {difference} is not what --plan {plan_file} says; leave one of them out, or plan again")
        return plan
    earlier_plan = _plan_of_checkpoint(resume_from, source)
    if earlier_plan is None:
        return None
    fits_request = earlier_plan.host == host.fingerprint and _first_difference(earlier_plan, fixed) is None
    return earlier_plan if fits_request else None


def _plan_of_checkpoint(resume_from: Path | None, source: ModelSource) -> Plan | None:
    """Return the plan of the newest checkpoint, or None if there is none. Raise RequestError if it is of another model."""
    checkpoint = None
    if resume_from is not None and resume_from.is_dir():
        checkpoint = find_checkpoints(resume_from).newest
    if checkpoint is None:
        return None
    plan = Plan.model_validate(SavedState.read(checkpoint).train.plan)
    if plan.model != source.model_hash:
        raise RequestError(
            f"{source.reference!r} is not the model of {checkpoint}: its config or its adapter is another one; resume with the "
            "model of that run, or start anew in another output directory"
        )
    return plan


def _first_difference(plan: Plan, fixed: tuple[str, ...]) -> str | None:
    """Return the first ``field=value`` of --set that differs from the plan, or None."""
    assignments = read_assignments(fixed, settable_fields(), parse_value)
    planned = {**vars(plan), **vars(plan.layout)}
    return next((f"{name}={value}" for name, value in assignments.items() if planned[name] != value), None)


def check_existing_plan(plan: Plan, workload: Workload) -> None:
    """Raise RequestError if an existing plan does not fit the request."""
    for name, planned, requested in (
        ("--sequence-length", plan.sequence_length, workload.sequence_length),
        ("--global-batch", plan.global_batch / workload.rows_together, workload.num_units),
    ):
        if planned != requested:
            raise RequestError(
                f"{name} {requested} is not what the plan was made for ({planned:g}); use {name} {planned:g}, or plan again"
            )
    missing = [name for name in plan.changes_mathematics if name not in workload.allow]
    if missing:
        raise RequestError(f"the plan changes the mathematics; add --allow {','.join(missing)}")
    conflict_message = conflict(plan, clips_gradients=workload.clips_gradients)
    if conflict_message is None and workload.rows_together > 1:
        conflict_message = conflict_with_pairs(plan)
    if conflict_message is not None:
        raise RequestError(conflict_message)


@dataclass(frozen=True)
class Watcher:
    """Callbacks that show progress. By default they do nothing."""

    checked: Callable[[], None] = lambda: None  # the output folder is checked, and nothing slow has started
    tokenizing: Callable[[int, int], None] = lambda done, total: None
    tracing: Callable[[int, int], None] = lambda done, total: None
    planned: Callable[[Planning], None] = lambda planning: None
    trying: Callable[[Plan], None] = lambda plan: None
    tried: Callable[[Tried], None] = lambda tried: None
    proved: Callable[[Proof], None] = lambda proof: None
    finding_rate: Callable[[int, int], None] = lambda done, total: None
    found_rate: Callable[[FoundRate], None] = lambda found: None
    ready: Callable[[PreparedRun], None] = lambda prepared: None
    event: OnEvent = lambda event: None


@dataclass(frozen=True)
class PreparedRun:
    """A run that is planned and, if there were trials, proven, but not started."""

    request: TrainRequest
    source: ModelSource
    data: TrainingData
    planning: Planning
    proof: Proof | None
    plan: Plan
    predicted: Numbers

    def job(
        self,
        arguments: Arguments,
        *,
        output: Path,
        overwrite: bool = False,
        resume: bool = False,
        heal: bool = False,
        stop_after_seconds: float | None = None,
        evaluate_at_tokens: tuple[int, ...] = (),
        evaluate_at_steps: tuple[int, ...] = (),
    ) -> Job:
        """Return the job of this run. The fields of ``Job`` with these names explain the arguments."""
        default_trial = self.proof.default if self.proof else None
        baseline = default_trial.numbers() if default_trial and default_trial.ok else None
        return Job(
            **self.request.model_choice,
            plan=self.plan,
            arguments=arguments,
            data=self.request.data,
            data_options=self.request.as_options,
            global_batch=self.planning.workload.global_batch,
            output=str(output),
            overwrite=overwrite,
            resume=resume,
            heal=heal,
            stop_after_seconds=stop_after_seconds,
            evaluate_at_tokens=evaluate_at_tokens,
            evaluate_at_steps=evaluate_at_steps,
            predicted=self.predicted,
            baseline=baseline,
            baseline_name="plain default (trial)" if default_trial else None,
        )


def prepare_run(request: TrainRequest, *, host: Host | None = None, watcher: Watcher | None = None) -> tuple[PreparedRun, int]:
    """Return the prepared run and its number of steps. There are no trials if the plan comes from a file or a checkpoint.

    Args:
        request: the run. Trials compute its first batches, by its seed.
        host: the host of a launcher's ranks, or the part of it that the run may use; None: this machine.
        watcher: callbacks that show progress.
    """
    watcher = watcher or Watcher()
    check_allow(request.allow)
    source = request.source()
    sequence_length = _length_of(request, source)
    fixed = add_base_widths(source, request.fixed, request.mup_base, from_config=request.from_config)
    if request.resume:
        _check_resumed(request, source, sequence_length, fixed)
    check_module_names(source, request)
    _check_trainable(source, from_config=request.from_config)
    if request.has_pairs:
        _check_pairs(request, source)
    if request.arguments.neftune_noise_alpha is not None:
        fixed = fixed_for_neftune(fixed)
    data = prepare_data(
        source, request.data, eval_data=request.eval_data, tokenizer=request.tokenizer, sequence_length=sequence_length,
        options=request.as_options, progress=watcher.tokenizing,
    )  # fmt: skip
    has_held_out = data.evaluation is not None
    check_evaluations(request.arguments, will_evaluate=True, origin=data.summary.origin, has_held_out=has_held_out)
    global_batch = request.global_batch * request.rows_together
    check_enough_data(data.training, global_batch, data.objective)
    host = host or _host_for_processes(find_host(None), fixed)
    existing_plan = find_existing_plan(request.plan_file, request.resume_from, fixed, host, source)
    num_sequences = len(data.training)
    steps = request.max_steps or count_steps(request.epochs, num_sequences=num_sequences, global_batch=global_batch)
    if request.resume:
        check_resumed_data(request.output, data, request.as_options, request.arguments_for(steps))
    workload = Workload(
        sequence_length=sequence_length,
        global_batch=global_batch,
        rows_together=request.rows_together,
        has_ratings=request.has_ratings,
        has_kl_pass=request.arguments.has_kl_pass,
        lengths=data.histogram.unless_full(),
        total_steps=steps,
        allow=request.allow,
        clips_gradients=request.clips_gradients,
    )
    planning = reject_unrunnable_plans(plan_training(source, host, workload, fixed=fixed, progress=watcher.tracing), source)
    watcher.planned(planning)
    proof = None
    if existing_plan is None and request.trial_seconds > 0:
        proof = _prove(request, data, planning, fixed, watcher)
    candidate = _choose_candidate(planning, proof, existing_plan)
    plan = Plan.model_validate(candidate.plan.model_dump())
    return PreparedRun(request, source, data, planning, proof, plan, planning.numbers(candidate)), steps


def train(
    model: str | Path,
    data: str | Path,
    *,
    output: str | Path,
    overwrite: bool = False,
    resume: bool = False,
    heal: bool = False,
    find_learning_rate: bool = False,
    report_to: tuple[Tracker, ...] = (),
    objective: ObjectiveName | None = None,
    arguments: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
    **options: Unpack[PlanOptions],
) -> Record | None:
    """Plan, prove, train and save.

    If a launcher started several ranks, each calls this function, and rank 0 returns the Record.

    Args:
        model: a local Hugging Face directory, a config.json, or a hub id.
        data: text, JSON, CSV, Parquet, a folder of them, or a saved datasets directory.
        output: the folder of the trained model.
        overwrite: train although the folder has a model.
        resume: go on from the folder's newest checkpoint.
        heal: restart a process that is killed, while the others go on.
        find_learning_rate: try rising learning rates before the run, and take one of them.
        report_to: the trackers that get the numbers of the run: tensorboard, wandb, mlflow, trackio.
        objective: what is learned. "dpo": to prefer chosen answers to rejected ones. "kto": to give good answers and not bad
            ones. "reward": to score answers. None: the model's own objective.
        arguments: fields of ``Arguments``.
        watcher: callbacks that show progress.
        options: fields of ``TrainRequest``.
    """
    fields = {
        **options, "model": model, "data": data, "output": output, "overwrite": overwrite, "resume": resume, "heal": heal,
        "find_learning_rate": find_learning_rate,
        "report_to": report_to, "objective": objective,
    }  # fmt: skip
    return run_training(TrainRequest.of(fields, arguments or {}), watcher or Watcher())


def run_training(request: TrainRequest, watcher: Watcher) -> Record | None:
    """Plan, prove, train and save, as ``train`` does."""
    check_evaluations(request.arguments, will_evaluate=request.arguments.eval_steps > 0)
    _check_output_is_no_input(request)
    ranks = read_ranks()
    if ranks is not None and is_restart(ranks, request.output):
        request = request.changed(overwrite=False, resume=True)
    if request.heal:
        request = request.changed(fixed=fixed_for_healing(request.fixed, launched=ranks is not None))
    with ExitStack() as output_lock:  # of several ranks, the first makes the job and holds the lock
        if request.report_to:
            watcher = _with_trackers(request, watcher, output_lock)
        task = find_task_model(request.source(), request.data, request)
        if request.find_learning_rate:
            check_finder(is_launched=ranks is not None)
        if task is not None:
            return _train_task(request, task, watcher)
        request.arguments.check_metric((), "text")
        if ranks is not None:
            return _train_launched(ranks, request, watcher, output_lock)
        job, prepared = _prepare_job(request, watcher, output_lock)
        record = run_job(job, prepared.data, on_event=watcher.event, fresh_process=True)
        remember_run(record, prepared.planning)
        return record


def _check_output_is_no_input(request: TrainRequest) -> None:
    """Raise RequestError if the run would write into the folder that it reads: --overwrite would delete what is there."""
    for what, reference in (("model", request.model), ("data", request.data)):
        path = Path(reference)
        if not request.resume and path.exists() and request.output.exists() and path.samefile(request.output):
            raise RequestError(f"output directory {request.output} is that of the {what}; give another, which keeps the {what}")


def _train_task(request: TrainRequest, task: TaskModel, watcher: Watcher) -> Record | None:
    from upshift.training.tasks.run import TaskWatcher, run_task  # it imports accelerate, which text does not need

    of_task = TaskWatcher(watcher.checked, watcher.tokenizing, watcher.finding_rate, watcher.found_rate, watcher.event)
    return run_task(request, task, of_task)


def _with_trackers(request: TrainRequest, watcher: Watcher, stack: ExitStack) -> Watcher:
    """Return callbacks that also send the numbers of the run to its trackers, until ``stack`` closes."""
    from upshift.training.trackers import RunTrackers  # it imports transformers' TrainingArguments, which takes a second

    trackers = stack.enter_context(RunTrackers(request, watcher.event))

    def begin() -> None:
        watcher.checked()
        trackers.begin()

    return replace(watcher, checked=begin, event=trackers.event)


def _prepare_job(
    request: TrainRequest, watcher: Watcher, output_lock: ExitStack, host: Host | None = None
) -> tuple[Job, PreparedRun]:
    """Return the job and the prepared run. ``output_lock`` then holds the lock of the output folder."""
    output = request.output
    output_lock.enter_context(claimed(output))
    check_output_directory(output, overwrite=request.overwrite, resume=request.resume, own_files=OWN_FILES)
    check_run_file(output, resume=request.resume, adapter=request.as_adapter_options)
    watcher.checked()
    request = _with_rate_of_run(request)
    prepared, steps = prepare_run(request, host=host, watcher=watcher)
    watcher.ready(prepared)
    job = prepared.job(
        request.arguments_for(steps), output=output, overwrite=request.overwrite, resume=request.resume, heal=request.heal
    )
    return (_with_found_rate(job, prepared.data, watcher) if request.find_learning_rate else job), prepared


def _with_rate_of_run(request: TrainRequest) -> TrainRequest:
    """Return the request with the learning rate that was found before the run's first checkpoint, if there is one."""
    rate = learning_rate_of(request.output) if request.find_learning_rate and request.resume else None
    if rate is None:
        return request
    return request.changed(find_learning_rate=False, arguments=request.arguments.changed(learning_rate=rate))


def _with_found_rate(job: Job, data: TrainingData, watcher: Watcher) -> Job:
    """Return the job with the learning rate that is found for it."""
    found = find_learning_rate(job, data, on_step=watcher.finding_rate)
    watcher.found_rate(found)
    return job.changed(arguments=job.arguments.changed(learning_rate=found.learning_rate))


def _request_for_ranks(request: TrainRequest, processes: int) -> TrainRequest:
    """Return the request for a launcher's ranks. It has no trials, which would need the cores of ranks that wait."""
    if requested_processes(request.fixed) not in (None, processes):
        raise RequestError(f"the launcher's ranks make {processes} processes; leave num_processes (--nproc) to the launcher")
    return request.changed(fixed=(*request.fixed, f"num_processes={processes}"), trial_seconds=0.0)


def _train_launched(ranks: Ranks, request: TrainRequest, watcher: Watcher, output_lock: ExitStack) -> Record | None:
    plannings: list[Planning] = []

    def make_job(host: Host, processes: int) -> tuple[Job, TrainingData]:
        job, prepared = _prepare_job(_request_for_ranks(request, processes), watcher, output_lock, host)
        plannings[:] = [prepared.planning]
        return job, prepared.data

    record = run_launched(ranks, make_job=make_job, global_batch=request.global_batch, on_event=watcher.event)
    if record is not None:
        remember_run(record, plannings[0])
    return record


def _host_for_processes(host: Host, fixed: tuple[str, ...]) -> Host:
    """Return the host with as many GPUs as processes, if fewer processes are requested than it has GPUs; else the host."""
    count = requested_processes(fixed) or host.gpus_per_node
    if not 0 < count < host.gpus_per_node:
        return host
    return host.one_device() if count == 1 else host.changed(gpus_per_node=count)


def _length_of(request: TrainRequest, source: ModelSource) -> int:
    """Return the length of sequences: the user's, or that of the run that resumes, or the default."""
    of_run = length_of(request.output) if request.resume and request.sequence_length is None else None
    if of_run is not None:
        say_once(f"--sequence-length is {of_run}, as in the run in {request.output}")
    return sequence_length_of(source, request.sequence_length or of_run)


def _check_resumed(request: TrainRequest, source: ModelSource, sequence_length: int, fixed: tuple[str, ...]) -> None:
    """Raise RequestError if a run that resumes has another model or option than it had. Read no data."""
    plan = _plan_of_checkpoint(request.resume_from, source)
    if plan is None:
        return
    mup_base = next((setting.partition("=")[2] for setting in fixed if setting.startswith("mup_base=")), "")
    if plan.mup_base != mup_base:
        raise another_run(request.output, "mup_base", plan.mup_base or None, mup_base or None)
    check_resumed_options(
        request.output,
        request.arguments,
        request.as_options,
        max_steps=request.max_steps,
        values={
            "global_batch": request.global_batch,
            "sequence_length": sequence_length,
            "objective": request.pair_objective,
        },
    )


def _check_pairs(request: TrainRequest, source: ModelSource) -> None:
    """Raise RequestError for an option that is not for pairs, and for a model whose loss of each answer cannot be computed."""
    if request.heal:
        raise RequestError(
            f"--heal is not for --objective {request.objective}; leave it out, and continue after a failure with --resume"
        )
    if request.lora_dropout:
        raise RequestError(
            f"--lora-dropout {request.lora_dropout:g} is not for --objective {request.objective}, which trains without dropout; "
            "leave it out"
        )
    from upshift.models.ops.sequence_loss import check_rewards, check_sequence_losses

    check = check_rewards if request.has_reward_head else partial(check_sequence_losses, objective=request.objective or "")
    check(source)


def _check_trainable(source: ModelSource, *, from_config: bool) -> None:
    """Raise RequestError if weights are missing, or if random weights are requested for a model with an adapter."""
    if not from_config:
        if source.directory is None:
            raise RequestError(f"{source.base_reference!r} is a config without weights; add --from-config for random weights")
        fetch_weights(source)
        find_safetensors(source.directory)
        check_weights(source)
    elif source.adapter is not None:
        raise RequestError(
            "--from-config draws random weights, which are not saved with an adapter; leave it out, or train the whole model"
        )


def _prove(request: TrainRequest, data: TrainingData, planning: Planning, fixed: tuple[str, ...], watcher: Watcher) -> Proof:
    """Return the proof of an earlier run's trials, or try plans.

    ``fixed`` has the fields of the plan that are set, with the widths of muP's base.
    """
    path = proof_path(planning, fixed=fixed, from_config=request.from_config)
    proof = recall_earlier_proof(planning, path, tried=watcher.tried)
    if proof is None:
        workload = planning.workload
        seconds = request.trial_seconds
        trial = TrialRequest(
            **request.model_choice,
            has_reward_head=request.has_reward_head,
            plan=planning.default.plan,
            global_batch=workload.global_batch,
            seconds=seconds,
            limit_seconds=seconds,
            data=str(data.folder),
            seed=request.arguments.seed,
            total_steps=workload.total_steps,
            clips_gradients=workload.clips_gradients,
            has_kl_pass=workload.has_kl_pass,
        )
        proof = try_plans(planning, path, trial, seconds=seconds, trying=watcher.trying, tried=watcher.tried, fixed=fixed)
    watcher.proved(proof)
    return proof


def _choose_candidate(planning: Planning, proof: Proof | None, existing_plan: Plan | None) -> Candidate:
    """Return the existing plan, else the one that the trials chose, else the best by prediction, with its predictions."""
    if existing_plan is not None:
        check_existing_plan(existing_plan, planning.workload)
        candidate = cost_plan(existing_plan, host=planning.host, profile=planning.profile, workload=planning.workload)
        if not isinstance(candidate, Candidate):
            raise RequestError(f"the given plan cannot run here: {candidate.reason}")
        return planning.calibration.of(candidate, planning.workload)
    if proof is not None:
        return after_trial(proof.chosen, planning)
    return planning.ranking.candidates[0]
