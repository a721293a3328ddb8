"""Train a model from data to Record: prepare data, plan, try plans, run. ``upshift train`` and ``upshift.train`` call this."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.loading.checkpoint import find_safetensors
from upshift.loading.output_lock import claimed
from upshift.models.lengths import sequence_length_of
from upshift.models.source import ModelSource, fetch_weights, find_model, find_to_train
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning, find_host, plan_training
from upshift.planning.proof_store import proof_path
from upshift.planning.prove import Proof, Tried, after_trial, remember_run
from upshift.planning.rank import Candidate, cost_plan
from upshift.planning.space import check_allow
from upshift.planning.trial import TrialRequest
from upshift.planning.workload import Workload
from upshift.record import Numbers, Record
from upshift.settings import Ranks, read_ranks
from upshift.training.arguments import Arguments, RunNumbers
from upshift.training.batches.source import steps_of
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.given_plan import check_given_plan, find_given_plan, processes_asked_for
from upshift.training.heal.heal import fixed_to_heal
from upshift.training.job.job import Job, TrainingData, prepare_data, run_job
from upshift.training.job.launched import is_restart, run_launched
from upshift.training.loop.events import OnEvent
from upshift.training.loop.run import OWN_FILES, check_run_file
from upshift.training.mup import with_base
from upshift.training.prepare import check_weights
from upshift.training.runnable import runnable
from upshift.training.trials import known_proof, try_plans

TRIAL_SECONDS = 60.0


@dataclass(frozen=True)
class Watcher:
    """Callbacks for showing progress. Each does nothing by default."""

    tokenizing: Callable[[int, int], None] = lambda done, total: None
    tracing: Callable[[int, int], None] = lambda done, total: None
    planned: Callable[[Planning], None] = lambda planning: None
    trying: Callable[[Plan], None] = lambda plan: None
    tried: Callable[[Tried], None] = lambda tried: None
    proved: Callable[[Proof], None] = lambda proof: None
    ready: Callable[[Prepared], None] = lambda prepared: None
    event: OnEvent = lambda event: None


@dataclass(frozen=True)
class Prepared:
    """A run that is planned and proven, but not started."""

    source: ModelSource
    data: TrainingData
    planning: Planning
    proof: Proof | None
    plan: Plan
    predicted: Numbers
    of_model: dict[str, Any]  # the fields of a Job and of a TrialRequest that say which model to train
    data_path: str
    text_column: str | None

    def job(self, arguments: Arguments, *, output: Path, overwrite: bool = False, resume: bool = False, **more: Any) -> Job:
        workload, default = self.planning.workload, self.proof.default if self.proof else None
        return Job(
            **self.of_model,
            plan=self.plan,
            arguments=arguments,
            data=self.data_path,
            text_column=self.text_column,
            global_batch=workload.global_batch,
            output=str(output),
            overwrite=overwrite,
            resume=resume,
            predicted=self.predicted,
            baseline=default.numbers() if default and default.ok else None,
            baseline_name="plain default (trial)" if default else None,
            **more,
        )


def prepare_run(
    model: str,
    data_path: str,
    *,
    sequence_length: int | None = None,
    global_batch: int,
    max_steps: int | None = None,
    epochs: float = 1.0,
    plan_file: Path | None = None,
    resume_from: Path | None = None,
    fixed: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    from_config: bool = False,
    lora_rank: int | None = None,
    load_in_4bit: bool = False,
    text_column: str | None = None,
    tokenizer: Any = None,
    clips_gradients: bool = True,
    seed: int = 42,
    trial_seconds: float = TRIAL_SECONDS,
    host: Host | None = None,
    mup_base: str | None = None,
    watcher: Watcher | None = None,
) -> tuple[Prepared, int]:
    """Return (the prepared run, its number of steps). A plan that is given or resumed skips the trials.
    ``sequence_length``: None takes the default for the model.
    ``lora_rank``: train LoRA of this rank around every linear layer but the head; ``load_in_4bit``: below an adapter (QLoRA).
    ``host``: the host of a launcher's ranks; None: this machine. ``mup_base``: a narrower model whose learning rates hold.
    ``seed``: the seed of the run. Trials compute the run's first batches."""
    watcher = watcher or Watcher()
    numbers = {"epochs": epochs, "global_batch": global_batch, "sequence_length": sequence_length}
    RunNumbers.from_fields(numbers | {"trial_seconds": trial_seconds})  # the rank is checked with the source
    check_allow(allow)
    source = find_to_train(model, lora_rank=lora_rank, load_in_4bit=load_in_4bit)
    sequence_length = sequence_length_of(source, sequence_length)
    _check_trainable(source, from_config=from_config)
    fixed = with_base(source, fixed, mup_base, from_config=from_config)
    of_model = {"model_reference": model, "from_config": from_config, "lora_rank": lora_rank, "load_in_4bit": load_in_4bit}
    how = {"tokenizer": tokenizer, "sequence_length": sequence_length, "text_column": text_column}
    data = prepare_data(source, data_path, progress=watcher.tokenizing, **how)
    host = host or _devices_asked_for(find_host(None), fixed)
    given = find_given_plan(plan_file, resume_from, fixed, host, source)
    steps = max_steps or steps_of(epochs, num_sequences=len(data.training), global_batch=global_batch)
    workload = Workload(
        sequence_length=sequence_length, global_batch=global_batch, lengths=_lengths(data), total_steps=steps, allow=allow,
        clips_gradients=clips_gradients,
    )  # fmt: skip
    planning = runnable(plan_training(source, host, workload, fixed=fixed, progress=watcher.tracing), source)
    watcher.planned(planning)
    proof = _prove(of_model, data, planning, fixed, trial_seconds, seed, watcher) if given is None and trial_seconds > 0 else None
    candidate = _candidate(planning, proof, given)
    plan = Plan.model_validate(candidate.plan.model_dump())
    prepared = Prepared(source, data, planning, proof, plan, planning.numbers(candidate), of_model, data_path, text_column)
    return prepared, steps


def train(
    model: str,
    data: str,
    *,
    output: str | Path,
    sequence_length: int | None = None,
    global_batch: int = 8,
    overwrite: bool = False,
    resume: bool = False,
    heal: bool = False,
    arguments: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
    **request: Any,
) -> Record | None:
    """Plan, prove, train and save. ``arguments``: fields of ``Arguments``. ``request``: options of ``prepare_run``. ``heal``:
    a process that is killed is started again, and the others go on.
    If a launcher started several ranks, each calls this function, and rank 0 returns the Record."""
    watcher, output, given = watcher or Watcher(), Path(output), dict(arguments or {})
    max_steps, ranks = given.pop("max_steps", None), read_ranks()
    asked = Arguments.from_fields(given | {"max_steps": 1 if max_steps is None else max_steps})
    if ranks is not None and is_restart(ranks, output):
        overwrite, resume = False, True
    if heal:
        request["fixed"] = fixed_to_heal(tuple(request.get("fixed", ())), launched=ranks is not None)

    def make_job(host: Host | None = None, processes: int | None = None) -> tuple[Job, Prepared]:
        writing.enter_context(claimed(output))
        check_output_directory(output, overwrite=overwrite, resume=resume, own_files=OWN_FILES)
        check_run_file(output)
        prepared, steps = prepare_run(
            model, data, sequence_length=sequence_length, global_batch=global_batch, max_steps=max_steps,
            resume_from=output if resume else None, watcher=watcher, clips_gradients=asked.max_grad_norm > 0,
            seed=asked.seed, host=host, **(request if processes is None else _for_ranks(request, processes)),
        )  # fmt: skip
        watcher.ready(prepared)
        job = prepared.job(asked.changed(max_steps=steps), output=output, overwrite=overwrite, resume=resume, heal=heal)
        return job, prepared

    with ExitStack() as writing:  # if there are several ranks, the first makes the job and holds the output's lock
        if ranks is not None:
            return _train_launched(ranks, make_job, global_batch, watcher)
        job, prepared = make_job()
        record = run_job(job, prepared.data, on_event=watcher.event, fresh_process=True)
        remember_run(record, prepared.planning)
        return record


def _for_ranks(request: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return the request for a launcher's ranks. It has no trials: they would take the cores of ranks that wait."""
    fixed = request.get("fixed", ())
    if processes_asked_for(fixed) not in (None, processes):
        raise RequestError(f"the launcher's ranks make {processes} processes; leave num_processes (--nproc) to the launcher")
    return request | {"fixed": (*fixed, f"num_processes={processes}"), "trial_seconds": 0.0}


def _train_launched(
    ranks: Ranks, make_job: Callable[[Host, int], tuple[Job, Prepared]], global_batch: int, watcher: Watcher
) -> Record | None:
    planned: list[Planning] = []

    def make(host: Host, processes: int) -> tuple[Job, TrainingData]:
        job, prepared = make_job(host, processes)
        planned[:] = [prepared.planning]
        return job, prepared.data

    record = run_launched(ranks, make_job=make, global_batch=global_batch, on_event=watcher.event)
    if record is not None:
        remember_run(record, planned[0])
    return record


def _devices_asked_for(host: Host, fixed: tuple[str, ...]) -> Host:
    """Return the host with one GPU for each process, if fewer processes are asked for than it has GPUs; else the host."""
    count = processes_asked_for(fixed) or host.gpus_per_node
    if not 0 < count < host.gpus_per_node:
        return host
    return host.one_device() if count == 1 else host.changed(gpus_per_node=count)


def _check_trainable(source: ModelSource, *, from_config: bool) -> None:
    """Check that the weights are whole, unless they are to be random. Raise RequestError for random weights with an adapter."""
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


def lengths_of(
    model: str, data_path: str, *, sequence_length: int, tokenizer: str | None = None, text_column: str | None = None
) -> Any:
    """Return the histogram of the sequence lengths of data for a model, for planning, or None if all sequences are full."""
    data = prepare_data(
        find_model(model), data_path, tokenizer=tokenizer, sequence_length=sequence_length, text_column=text_column
    )
    return _lengths(data)


def _lengths(data: TrainingData) -> Any:
    """Return the histogram, or None if every sequence is full: nothing to pad or pack, and no mask to plan for."""
    histogram = data.histogram
    return None if histogram.mean >= histogram.sequence_length else histogram


def _prove(
    of_model: dict[str, Any],
    data: TrainingData,
    planning: Planning,
    fixed: tuple[str, ...],
    seconds: float,
    seed: int,
    watcher: Watcher,
) -> Proof:
    path = proof_path(planning, fixed=fixed, from_config=of_model["from_config"])
    proof = known_proof(planning, path, tried=watcher.tried)
    if proof is None:
        workload = planning.workload
        trial = TrialRequest(
            **of_model, plan=planning.default.plan, global_batch=workload.global_batch, seconds=seconds,
            limit_seconds=seconds, data=str(data.folder), seed=seed, total_steps=workload.total_steps,
            clips_gradients=workload.clips_gradients,
        )  # fmt: skip
        proof = try_plans(planning, path, trial, seconds=seconds, trying=watcher.trying, tried=watcher.tried, fixed=fixed)
    watcher.proved(proof)
    return proof


def _candidate(planning: Planning, proof: Proof | None, given: Plan | None) -> Candidate:
    if given is not None:
        check_given_plan(given, planning.workload)
        candidate = cost_plan(given, host=planning.host, profile=planning.profile, workload=planning.workload)
        if not isinstance(candidate, Candidate):
            raise RequestError(f"the given plan cannot run here: {candidate.reason}")
        return planning.calibration.of(candidate, planning.workload)
    return after_trial(proof.chosen, planning) if proof is not None else planning.ranking.candidates[0]
