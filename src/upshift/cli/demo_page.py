"""Fills the report page from what the demo found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from upshift.benchmarking.page import (
    Candidate,
    ComparisonRow,
    Fact,
    LossCurve,
    MemoryLife,
    MemorySample,
    PredictionRow,
    Reason,
    RunPage,
    Sample,
    write_run_page,
)
from upshift.cli.show import prediction_rows
from upshift.record import Numbers, Record
from upshift.units import GIB, format_count

LASTING = ("weights", "optimizer")


def write_page(result: Any, path: Path) -> Path:
    prepared, baseline, chosen = result.prepared, result.baseline, result.chosen
    planning = prepared.planning
    equal = chosen.measured.changed(evaluation_loss=result.chosen_loss_at_equal_tokens)
    speedup = chosen.measured.tokens_per_second / baseline.measured.tokens_per_second
    limit = planning.host.cpu.free_memory_bytes if planning.host.cpu else None
    page = RunPage(
        title="Upshift demo",
        summary=f"The chosen plan trains {speedup:.2f}x as fast as the plain default on this machine: {prepared.plan.label()}.",
        facts=_facts(result),
        comparison=(
            _comparison("plain default", "default", baseline.measured),
            _comparison(prepared.plan.label(), "chosen", equal),
        ),
        predictions=tuple(
            PredictionRow(quantity=name, predicted=predicted, measured=measured)
            for name, predicted, measured in prediction_rows(chosen.predicted, chosen.measured)
        ),
        reasons=tuple(Reason(**reason.model_dump()) for reason in planning.reasons_for(prepared.plan)),
        candidates=_candidates(prepared),
        memory_limit_gib=limit / GIB if limit else None,
        memory=_memory(chosen),
        loss_curves=(_curve("plain default", baseline), _curve("chosen plan", chosen)),
        samples=(Sample(prompt="", text=result.text),),
        commands=("make demo", "upshift plan MODEL --train", "upshift train MODEL --data PATH"),
        environment=tuple(Fact(label=k, text=v) for k, v in chosen.environment.versions.items()),
        flop_convention=chosen.flop_convention,
    )
    write_run_page(path, page)
    return path


def _facts(result: Any) -> tuple[Fact, ...]:
    planning, environment = result.prepared.planning, result.chosen.environment
    return (
        Fact(label="machine", text=f"{environment.processor}, {environment.num_cores} cores"),
        Fact(
            label="model", text=f"{planning.profile.architecture}, {format_count(planning.profile.parameters.total)} parameters"
        ),
        Fact(label="data", text=f"{result.prepared.data.summary.num_documents} files of Python's standard library"),
        Fact(
            label="global batch",
            text=f"{planning.workload.global_batch} sequences of up to {planning.workload.sequence_length} tokens",
        ),
    )


def _comparison(name: str, role: Any, numbers: Numbers) -> ComparisonRow:
    step_ms = numbers.step_ms.p50 if numbers.step_ms else None
    return ComparisonRow(
        plan=name, role=role, tokens_per_second=numbers.tokens_per_second, step_ms=step_ms,
        peak_gib=numbers.peak_gib, resident_gib=numbers.resident_gib, held_out_loss=numbers.evaluation_loss,
    )  # fmt: skip


def _candidates(prepared: Any) -> tuple[Candidate, ...]:
    """Every plan of the space; those tried carry what was measured."""
    proof = prepared.proof
    tried = {t.candidate.plan.label(): t for t in (proof.tried if proof else ())}
    rows = []
    for status, group in (("candidate", prepared.planning.ranking.candidates), ("rejected", prepared.planning.ranking.too_big)):
        for candidate in group:
            label = candidate.plan.label()
            entry = tried.pop(label, None)
            measured = entry.numbers() if entry is not None and entry.ok else None
            rows.append(
                Candidate(
                    label=label,
                    status="chosen" if entry is not None and entry is proof.chosen else "tried" if entry is not None else status,  # type: ignore[arg-type]
                    tokens_per_second=candidate.tokens_per_second,
                    peak_gib=candidate.memory.peak / GIB,
                    measured_tokens_per_second=measured.tokens_per_second if measured else None,
                    measured_peak_gib=measured.peak_gib if measured else None,
                    changes_mathematics=bool(candidate.plan.changes_mathematics),
                    reason="" if entry is None or entry.ok else entry.failure or "",
                )
            )
    return tuple(rows)


def _memory(record: Record) -> MemoryLife:
    """Parts as predicted for the phase that ran; the process's memory as measured."""
    predicted = record.predicted
    phases = predicted.memory if predicted else {}
    highest = max(phases.values(), key=lambda row: sum(row.values()), default={})
    lasting = {part: highest.get(part, 0.0) for part in LASTING}
    held = predicted.resident_gib if predicted else None
    samples = []
    base = min((resident for _, _, resident in record.details["memory_samples"]), default=0) / GIB
    for seconds, phase, resident in record.details["memory_samples"]:
        parts = {"load": {"weights": lasting.get("weights", 0.0)}, "first step": highest, "steady": highest}.get(phase, lasting)
        samples.append(
            MemorySample(seconds=seconds, phase=phase, parts={"process base": base, **parts}, resident_gib=resident / GIB)
        )
    return MemoryLife(samples=tuple(samples), predicted_peak_gib=held)


def _curve(name: str, record: Record) -> LossCurve:
    return LossCurve(
        name=name,
        training=tuple((int(tokens), loss) for tokens, loss in record.details["loss_curve"]),
        held_out=tuple((int(tokens), loss) for tokens, loss in record.details["evaluations"]),
    )
