"""Run one training job, from a checked request to a Record, in this process or in several. The training loop does the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from upshift.benchmarking.environment import environment
from upshift.benchmarking.meters import MemorySample
from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.output_lock import claimed
from upshift.models.profile import num_sides
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource
from upshift.models.tracing.segments import Tracer
from upshift.planning.plan import ALONE
from upshift.planning.search.constraints import conflict_with_pairs, warning_about_splits, why_not_isolated
from upshift.record import Record
from upshift.settings import read_settings
from upshift.training.arguments import LOSS, Arguments
from upshift.training.batches.sampler import check_enough_data
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.distributed.parallelize import why_cannot_run
from upshift.training.elastic.supervisor import check_healing, run_healing
from upshift.training.job.processes import main, run_in_processes
from upshift.training.job.request import Job
from upshift.training.loop.events import Event, OnEvent
from upshift.training.loop.loop import RunResult, train
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import OWN_FILES, open_run
from upshift.training.mup import check_random
from upshift.training.neftune import check_neftune
from upshift.training.prepare import weight_dtype
from upshift.units import FLOP_CONVENTION

__all__ = ["Job", "TrainingData", "append_record", "prepare_data", "run_job"]

logger = logging.getLogger(__name__)

RECORDS_NAME = "records.jsonl"
MAX_MEMORY_SAMPLES = 400


def _ignore_event(event: Event) -> None:
    pass


def run_job(job: Job, data: TrainingData, *, on_event: OnEvent = _ignore_event, fresh_process: bool = False) -> Record:
    """Train, save the final model into ``job.output``, and return the measured Record.

    ``fresh_process`` runs the job in a new process, so that its memory is measured alone and this process keeps its settings.

    Raise RequestError before anything is written, Interrupted after SIGINT or SIGTERM, and JobFailed with what is saved.
    """
    with claimed(Path(job.output)):
        job = open_job(job, data)
        if job.heal:
            record = run_healing(job, data, on_event)
        elif fresh_process or job.plan.num_processes > 1:
            record = run_in_processes(job, data, on_event)
        else:
            with StopRequest() as stop:
                record = run_rank(job, data, on_event, stop)
    append_record(record)
    return record


def open_job(job: Job, data: TrainingData) -> Job:
    """Check the job, and then its output directory. Return the job as ``open_run`` does."""
    check_job(job, data)
    check_output_directory(Path(job.output), overwrite=job.overwrite, resume=job.resume, own_files=OWN_FILES)
    return open_run(job, data)


def run_rank(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest) -> Record:
    return make_record(job, data, train(job, data, on_event=on_event, stop=stop))


def check_job(job: Job, data: TrainingData) -> None:
    """Raise RequestError for every problem that can be found before files are written."""
    if job.plan.mup_base:
        check_random(from_config=job.from_config)
    problem = why_cannot_run(job.plan)
    if problem is not None:
        raise RequestError(problem)
    will_evaluate = bool(job.arguments.eval_steps or job.evaluate_at_steps or job.evaluate_at_tokens)
    has_held_out = data.evaluation is not None
    check_evaluations(job.arguments, will_evaluate=will_evaluate, origin=data.summary.origin, has_held_out=has_held_out)
    check_neftune(job.plan, job.arguments.neftune_noise_alpha)
    if job.heal:
        check_healing(job.plan)
    problem = conflict_with_pairs(job.plan) if data.objective.has_pairs else None
    if problem is not None:
        raise RequestError(problem)
    if job.plan.fused_kernels or job.plan.loss_kernel != "eager" or job.plan.rounds_to_nearest:
        raise RequestError("this version plans fused kernels and does not train with them yet; leave them out of the plan")
    source = job.source()
    _check_isolation(source, job, data)
    if job.plan.layout != ALONE:
        problem = why_cannot_run(job.plan, Tracer(source).full_model(weight_dtype(source, job.plan)))
        if problem is not None:
            raise RequestError(problem)
    if not job.from_config and source.directory is not None:
        find_safetensors(source.directory)
    planned_length = job.plan.sequence_length
    data_length = data.training.sequence_length // num_sides(data.objective.kind)
    if planned_length != data_length:
        raise RequestError(f"the plan's sequence_length={planned_length} is not the data's {data_length}; use the same for both")
    check_enough_data(data.training, job.global_batch, data.objective)


def _check_isolation(source: ModelSource, job: Job, data: TrainingData) -> None:
    """Raise RequestError if the plan lets texts of the data change each other's results, and warn if every plan does."""
    isolation = isolation_of(source)
    longest = int(data.training.lengths.max())
    problem = why_not_isolated(isolation, job.plan, longest=longest)
    if problem is not None:
        raise RequestError(problem)
    warning = warning_about_splits(isolation, longest)
    if warning is not None:
        logger.warning("%s", warning)


def check_evaluations(arguments: Arguments, *, will_evaluate: bool, origin: str = "", has_held_out: bool = True) -> None:
    """Raise RequestError if an argument needs evaluations during the run, and there are none.

    ``origin``: the data, once it is read, of which rows are held out, or none.
    """
    argument = arguments.option_for_evaluations()
    if argument is None and arguments.metric_for_best_model != LOSS:
        raise RequestError(
            f"--metric-for-best-model {arguments.metric_for_best_model} chooses no checkpoint without --load-best or "
            "--early-stopping-patience; add one, or leave it out"
        )
    if argument is None:
        return
    option = f"--{argument.replace('_', '-')}"
    if not will_evaluate:
        raise RequestError(f"{option} needs evaluations during the run, and --eval-steps is 0; add for example --eval-steps 100")
    if not has_held_out:
        raise RequestError(f"{option} needs held-out data, and none of {origin} is held out; add --eval-data PATH")


def make_record(job: Job, data: TrainingData, outcome: RunResult) -> Record:
    return Record(
        kind="train",
        name=str(job.source().config["model_type"]),
        plan=job.recorded_plan.model_dump(),
        predicted=job.predicted,
        measured=outcome.measured,
        baseline=job.baseline,
        baseline_name=job.baseline_name,
        flop_convention=f"model FLOPs: {FLOP_CONVENTION}",
        environment=environment(detect()),
        checkpoint=job.output,
        details=_details(job, data, outcome),
    )


def _details(job: Job, data: TrainingData, outcome: RunResult) -> dict[str, Any]:
    return {
        "arguments": job.arguments.model_dump(),
        "global_batch": job.global_batch // data.objective.rows_together,
        "objective": data.objective.name,
        "end": outcome.reason,
        "steps": len(outcome.loss_curve),
        "resumed_from_step": outcome.resumed_step,
        "total_seconds": outcome.seconds,
        "waited_share": outcome.waited_share,
        "cpu_seconds_per_step": outcome.cpu_seconds,
        "loss_curve": [list(point) for point in outcome.loss_curve],
        "evaluations": [[tokens, loss] for _, tokens, loss in outcome.evaluations],
        **_reward_details(data, outcome),
        "logged_steps": [logged.model_dump() for logged in outcome.logged_steps],
        "model_step": outcome.model_step,
        "memory_samples": [[sample.seconds, sample.phase, sample.resident] for sample in thin_samples(outcome.memory_samples)],
    }


def _reward_details(data: TrainingData, outcome: RunResult) -> dict[str, Any]:
    """Return the rewards of pairs for the record: [step, accuracy, margin] of each step and evaluation."""
    if not data.objective.has_pairs:
        return {}
    return {
        "rewards": [list(row) for row in outcome.rewards],
        "evaluation_rewards": [list(row) for row in outcome.evaluation_rewards],
        **({"kl_terms": [list(row) for row in outcome.kl_terms]} if outcome.kl_terms else {}),
        "reference_seconds": outcome.reference_seconds,
    }


def thin_samples(samples: list[MemorySample]) -> list[MemorySample]:
    """Return at most MAX_MEMORY_SAMPLES samples: the highest of each stretch, so that peaks stay."""
    length = -(-len(samples) // MAX_MEMORY_SAMPLES) or 1
    return [max(samples[start : start + length], key=lambda sample: sample.resident) for start in range(0, len(samples), length)]


def append_record(record: Record) -> None:
    """Append the record, without paths of the user, to the records that calibrate the planner on this host.

    If the cache cannot be written, log a warning. The job does not fail.
    """
    path = read_settings().cache_dir / RECORDS_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(record.changed(checkpoint=None).to_json() + "\n")
    except OSError as error:
        logger.warning("the record was not kept in %s: %s", path, error.strerror)


def run_folder(folder: Path) -> None:
    """Run the job that is written in ``folder``, in the process that was started for it."""
    main(folder, run_rank)
