"""Write the report page of ``upshift demo``: copy the demo's predictions and measurements into a RunPage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from upshift.record import Numbers, Record, compared_numbers
from upshift.reports.plots import Candidate, Status
from upshift.reports.run.content import (
    ComparisonRow,
    Fact,
    LossCurve,
    MemoryHistory,
    MemorySample,
    PredictionRow,
    Role,
    RunPage,
    Sample,
)
from upshift.reports.run.page import write_run_page
from upshift.units import GIB, format_count

LASTING = ("weights", "optimizer")
COMMANDS = ("make demo", "upshift plan MODEL --train", "upshift train MODEL --data PATH")


def write_demo_page(result: Any, path: Path) -> Path:
    """Write the page of a DemoResult. Raise RequestError when the file cannot be written."""
    prepared = result.prepared
    baseline = result.baseline
    chosen = result.chosen
    planning = prepared.planning
    at_equal_tokens = chosen.measured.changed(evaluation_loss=result.chosen_loss_at_equal_tokens)
    limit = planning.host.cpu.free_memory_bytes if planning.host.cpu else None
    label = prepared.plan.label()
    write_run_page(
        path,
        RunPage(
            title="Upshift demo",
            summary=summary_of(result),
            facts=_facts(result),
            comparison=(
                _comparison("plain default", "default", baseline.measured),
                _comparison(label, "chosen", at_equal_tokens),
            ),
            predictions=tuple(
                PredictionRow(quantity=name, predicted=predicted, measured=measured)
                for name, predicted, measured in compared_numbers(chosen.predicted, chosen.measured)
            ),
            reasons=planning.reasons_for(prepared.plan),
            candidates=_candidates(prepared),
            memory_limit_gib=limit / GIB if limit else None,
            memory=_memory(chosen),
            loss_curves=(_curve("plain default", baseline), _curve("chosen plan", chosen)),
            samples=(Sample(prompt="", text=result.text),),
            commands=COMMANDS,
            environment=tuple(Fact(label=name, text=version) for name, version in chosen.environment.versions.items()),
            flop_convention=chosen.flop_convention,
        ),
    )
    return path


def summary_of(result: Any) -> str:
    """Return the first sentences of the page of a DemoResult: how much faster the chosen plan was."""
    label = result.prepared.plan.label()
    if result.chose_the_default:
        return f"In the trials no plan was faster than the plain default: {label}. Both runs have this plan."
    speeds = (result.chosen.measured.tokens_per_second, result.baseline.measured.tokens_per_second)
    if not all(speeds):  # a run of one or two steps is all warm-up: it has no speed
        return f"This machine was too slow, or too busy, to compare speeds in the time of a demo. The chosen plan is {label}."
    return f"The chosen plan trains {speeds[0] / speeds[1]:.2f}x as fast as the plain default on this machine: {label}."


def _facts(result: Any) -> tuple[Fact, ...]:
    planning = result.prepared.planning
    environment = result.chosen.environment
    profile = planning.profile
    workload = planning.workload
    facts = {
        "machine": f"{environment.processor}, {environment.num_cores} cores",
        "model": f"{profile.architecture}, {format_count(profile.parameters.total)} parameters",
        "data": f"{result.prepared.data.summary.num_documents} files of Python's standard library",
        "global batch": f"{workload.global_batch} sequences of up to {workload.sequence_length} tokens",
    }
    return tuple(Fact(label=label, text=text) for label, text in facts.items())


def _comparison(plan: str, role: Role, numbers: Numbers) -> ComparisonRow:
    return ComparisonRow(
        plan=plan,
        role=role,
        tokens_per_second=numbers.tokens_per_second,
        step_ms=numbers.step_ms.p50 if numbers.step_ms else None,
        peak_gib=numbers.peak_gib,
        resident_gib=numbers.resident_gib,
        held_out_loss=numbers.evaluation_loss,
    )


def _candidates(prepared: Any) -> tuple[Candidate, ...]:
    """Return all plans of the space. Tried plans have their measurements, or the reason of their failure."""
    proof = prepared.proof
    ranking = prepared.planning.ranking
    trials = {trial.candidate.plan.label(): trial for trial in (proof.tried if proof else ())}
    rows = []
    groups: tuple[tuple[Status, Any], ...] = (("candidate", ranking.candidates), ("rejected", ranking.too_big))
    for status, group in groups:
        for candidate in group:
            label = candidate.plan.label()
            row = Candidate(
                label=label,
                status=status,
                tokens_per_second=candidate.tokens_per_second,
                peak_gib=candidate.memory.peak / GIB,
                changes_mathematics=bool(candidate.plan.changes_mathematics),
            )
            trial = trials.pop(label, None)
            rows.append(row if trial is None else _tried(row, trial, is_chosen=trial is proof.chosen))
    return tuple(rows)


def _tried(row: Candidate, trial: Any, *, is_chosen: bool) -> Candidate:
    measured = trial.numbers() if trial.ok else Numbers()
    return row.changed(
        status="chosen" if is_chosen else "tried",
        measured_tokens_per_second=measured.tokens_per_second,
        measured_peak_gib=measured.peak_gib,
        reason="" if trial.ok else trial.failure or "",
    )


def _memory(record: Record) -> MemoryHistory:
    """Return the measured memory of the process over time, with the predicted parts of each phase."""
    predicted = record.predicted
    memory_samples = record.details["memory_samples"]
    phases = predicted.memory if predicted else {}
    highest_parts = max(phases.values(), key=lambda row: sum(row.values()), default={})
    lasting_parts = {part: highest_parts.get(part, 0.0) for part in LASTING}
    parts_of = {"load": {"weights": lasting_parts["weights"]}, "first step": highest_parts, "steady": highest_parts}
    base = min((resident for _, _, resident in memory_samples), default=0) / GIB
    samples = tuple(
        MemorySample(
            seconds=seconds,
            phase=phase,
            resident_gib=resident / GIB,
            parts={"process base": base, **parts_of.get(phase, lasting_parts)},
        )
        for seconds, phase, resident in memory_samples
    )
    return MemoryHistory(samples=samples, predicted_peak_gib=predicted.resident_gib if predicted else None)


def _curve(name: str, record: Record) -> LossCurve:
    training, held_out = (
        tuple((int(tokens), loss) for tokens, loss in record.details[series]) for series in ("loss_curve", "evaluations")
    )
    return LossCurve(name=name, training=training, held_out=held_out)
