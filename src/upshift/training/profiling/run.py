"""Profile a training run: run a few steps with its data, plan and loop, and compare them with the planner's prediction."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from upshift.debugging.run_report import FOLDER as REPORT_FOLDER
from upshift.errors import RequestError
from upshift.loading.output_lock import LOCK_NAME, claimed
from upshift.planning.analysis.bottleneck import HEAD, Change, Measured, find_changes, roofline
from upshift.planning.cost.memory import PHASES
from upshift.planning.cost.time import tokens_per_step
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Ranking, Rejected, cost_plan
from upshift.settings import read_ranks
from upshift.training.arguments import LOSS, TrainRequest
from upshift.training.checkpoint.directory import REFERENCE_NAME, RUN_NAME
from upshift.training.job.job import check_job
from upshift.training.job.processes import run_in_processes
from upshift.training.loop.state import open_run
from upshift.training.profiling.report import (
    NUM_CHANGES,
    RANK_FILE,
    REPORT_FILE,
    TRACE_FILE,
    PhaseMemory,
    ProfileReport,
    RankProfile,
    find_binding_kind,
    find_problems,
    mean_kinds,
    summarize_kinds,
)
from upshift.training.run import PreparedRun, Watcher, prepare_run
from upshift.training.trials.trials import reject_unrunnable_plans

WORKER = "upshift.training.profiling.worker"


def profile(request: TrainRequest, *, output: Path, steps: int, watcher: Watcher | None = None) -> ProfileReport:
    """Profile a run, and return the report.

    Args:
        request: the run. If it resumes one, the plan comes from there.
        output: the folder for traces and the report.
        steps: the steps that are measured before the profiler runs.
        watcher: callbacks that show progress.
    """
    if read_ranks() is not None:
        raise RequestError("profile starts its own processes: leave the launcher out and give --nproc N to train")
    watcher = watcher or Watcher()
    with claimed(output):
        _remove_old_profile(output)
        prepared, _ = prepare_run(request, watcher=watcher)
        arguments = request.arguments_for(steps).changed(
            eval_steps=0, save_steps=0, logging_steps=0, early_stopping_patience=None, load_best=False, metric_for_best_model=LOSS
        )
        job = prepared.job(arguments, output=output)
        check_job(job, prepared.data)
        watcher.ready(prepared)
        open_run(job, prepared.data)
        run_in_processes(job, prepared.data, watcher.event, module=WORKER)
        (output / RUN_NAME).unlink()  # there is no run to resume
        ranks = tuple(RankProfile.from_file(output / RANK_FILE.format(rank)) for rank in range(job.plan.num_processes))
        fixed_names = tuple(text.partition("=")[0] for text in request.fixed)
        report = _make_report(prepared, ranks, output, fixed_names)
        (output / REPORT_FILE).write_text(report.to_json(indent=1), encoding="utf-8")
        return report


def _remove_old_profile(output: Path) -> None:
    """Remove the files of an earlier profile. Raise RequestError if the folder has any other file."""
    for path in output.iterdir() if output.is_dir() else ():
        if not _is_profile_file(path.name):
            raise RequestError(f"--output {output} has {path.name}, which no profile wrote; give another folder")
    for path in output.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_NAME:
            path.unlink()


def _is_profile_file(name: str) -> bool:
    if name in (REPORT_FILE, RUN_NAME, REFERENCE_NAME, REPORT_FOLDER, LOCK_NAME):
        return True
    for pattern in (RANK_FILE, TRACE_FILE):
        start, _, end = pattern.partition("{}")
        if name.startswith(start) and name.endswith(end):
            return True
    return False


def _make_report(prepared: PreparedRun, ranks: tuple[RankProfile, ...], output: Path, fixed: tuple[str, ...]) -> ProfileReport:
    planning = prepared.planning
    plan = prepared.plan
    profile = planning.profile
    candidate = cost_plan(plan, host=planning.host, profile=profile, workload=planning.workload)
    if isinstance(candidate, Rejected):
        raise RequestError(f"the planner has no prediction for this plan: {candidate.reason}")
    bound = roofline(candidate, host=planning.host, profile=profile, workload=planning.workload)
    kinds = summarize_kinds(ranks, bound)
    step_ms = sum(rank.step_ms for rank in ranks) / len(ranks)
    memory = _compare_memory(prepared, ranks)
    binding_kind, binding_words = find_binding_kind(kinds)
    predicted = prepared.predicted
    return ProfileReport(
        model=str(prepared.source.config["model_type"]),
        host=planning.host.name,
        plan=plan,
        label=plan.label(),
        step_ms=step_ms,
        roofline_ms=1000 * sum(bound.values()),
        predicted_ms=predicted.step_ms.p50 if predicted.step_ms else None,
        tokens_per_second=1000 * tokens_per_step(profile, planning.workload) / step_ms,
        kinds=kinds,
        binding_term=binding_kind,
        binding_words=binding_words,
        changes=tuple(_changes(prepared, candidate, ranks, fixed)[:NUM_CHANGES]),
        memory=memory,
        resident_gib=max(rank.resident_gib for rank in ranks),
        predicted_resident_gib=predicted.resident_gib,
        ranks=ranks,
        folder=str(output),
        findings=tuple(find_problems(ranks, kinds, memory)),
    )


def _changes(prepared: PreparedRun, candidate: Candidate, ranks: tuple[RankProfile, ...], fixed: tuple[str, ...]) -> list[Change]:
    planning = prepared.planning
    seconds = {kind: ms / 1000 for kind, ms in mean_kinds(ranks).items() if kind != HEAD}
    for rank in ranks:  # the planner counts the head's work among the products
        for kind, ms in rank.head_ms.items():
            seconds[kind] += ms / 1000 / len(ranks)
    measured = Measured(planning.host, planning.profile, planning.workload, candidate, seconds)
    return find_changes(measured, fixed=fixed, legal=lambda plan: _can_run(prepared, planning, candidate, plan))


def _can_run(prepared: PreparedRun, planning: Planning, candidate: Candidate, plan: Plan) -> bool:
    ranking = Ranking(candidates=[replace(candidate, plan=plan)])
    try:
        reject_unrunnable_plans(replace(planning, ranking=ranking), prepared.source)
    except RequestError:
        return False
    return True


def _compare_memory(prepared: PreparedRun, ranks: tuple[RankProfile, ...]) -> tuple[PhaseMemory, ...]:
    """Return the measured memory of each phase, of the rank that holds most, beside the prediction."""
    predicted = {phase: sum(parts.values()) for phase, parts in prepared.predicted.memory.items()}
    predicted["step"] = max((predicted[phase] for phase in PHASES if phase in predicted), default=0.0)
    return tuple(
        PhaseMemory(phase=phase, measured_gib=max(rank.memory_gib[phase] for rank in ranks), predicted_gib=predicted.get(phase))
        for phase in ranks[0].memory_gib
    )
