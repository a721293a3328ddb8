"""Find a plan that exists already: in a file, or in the checkpoint from which a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.planning.assignments import read_assignments
from upshift.planning.layout import Layout
from upshift.planning.legal import conflict
from upshift.planning.plan import Plan
from upshift.planning.planner import read_plan
from upshift.planning.space import FIXED_BY_REQUEST, parse_value
from upshift.planning.workload import Workload
from upshift.training.checkpoint.checkpoint import find_checkpoints
from upshift.training.checkpoint.state import SavedState


def processes_asked_for(fixed: tuple[str, ...]) -> int | None:
    """Return the number of processes that ``--nproc`` or ``--set`` asks for, or None."""
    asked = next((text.partition("=")[2] for text in fixed if text.startswith("num_processes=")), "")
    return int(asked) if asked.isdecimal() else None


def find_given_plan(
    plan_file: Path | None, resume_from: Path | None, fixed: tuple[str, ...], host: Host, source: Any
) -> Plan | None:
    """Return the plan of a file, or of the checkpoint from which the run goes on, if it was made for this machine.

    Return None if a plan is to be made.
    """
    if plan_file is not None:
        plan = read_plan(plan_file, host=host, source=source)
        other = _unlike(plan, fixed)
        if other is not None:
            raise RequestError(f"--set {other} is not what --plan {plan_file} says; leave one of them out, or plan again")
        return plan
    checkpoint = find_checkpoints(resume_from).newest if resume_from is not None and resume_from.is_dir() else None
    if checkpoint is None:
        return None
    plan = Plan.model_validate(SavedState.read(checkpoint).train.plan)
    if plan.model != source.model_hash:
        raise RequestError(
            f"{source.reference!r} is not the model of {checkpoint}: its config or its adapter is another one; resume with the "
            "model of that run, or start anew in another output directory"
        )
    return plan if plan.host == host.fingerprint and _unlike(plan, fixed) is None else None


def _unlike(plan: Plan, fixed: tuple[str, ...]) -> str | None:
    """Return the first ``field=value`` of --set that the plan has otherwise, or None."""
    hints = get_type_hints(Plan) | get_type_hints(Layout)
    known = [name for name in (*Plan.model_fields, *Layout.model_fields) if name not in FIXED_BY_REQUEST]
    asked = read_assignments(fixed, known, lambda name, text: parse_value(name, text, hints[name]))
    has = {**vars(plan), **vars(plan.layout)}
    return next((f"{name}={value}" for name, value in asked.items() if has[name] != value), None)


def check_given_plan(plan: Plan, workload: Workload) -> None:
    """Raise RequestError if a given plan does not fit the request."""
    for name, planned, asked in (
        ("--sequence-length", plan.sequence_length, workload.sequence_length),
        ("--global-batch", plan.global_batch, workload.global_batch),
    ):
        if planned != asked:
            raise RequestError(
                f"{name} {asked} is not what the plan was made for ({planned}); use {name} {planned}, or plan again"
            )
    missing = [name for name in plan.changes_mathematics if name not in workload.allow]
    if missing:
        raise RequestError(f"the plan changes the mathematics; add --allow {','.join(missing)}")
    excluded = conflict(plan, clips_gradients=workload.clips_gradients)
    if excluded is not None:
        raise RequestError(excluded)
