"""Define a finding: one diagnosis, as `upshift doctor` prints it. Each error, warning and hint says what to type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from upshift.value import Value

Severity = Literal["error", "warning", "hint", "ok", "unknown"]
"""error: a run fails or is wrong. warning: a run is slow or at risk. hint: an improvement is possible. ok: examined, and fine.
unknown: it cannot be examined here; `what` says why."""


class Finding(Value):
    severity: Severity
    subject: str = Field(description="what was looked at, in a word or two: GPU 0, swap, NCCL, rank 2")
    what: str = Field(description="the diagnosis, one line")
    evidence: str = Field("", description="what was read or measured, with its number and where it comes from")
    cause: str | None = Field(None, description="why it is so, where that is known and is not the diagnosis itself")
    fix: str | None = Field(None, description="what a person types or sets; there for every error, warning and hint")

    @model_validator(mode="after")
    def _check_fix(self) -> Self:
        if self.severity in ("error", "warning", "hint") and not self.fix:
            raise ValueError(f"a finding of severity {self.severity} needs a fix")
        return self


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by severity, errors first."""
    order = get_args(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def error(subject: str, *, what: str, fix: str, evidence: str = "", cause: str | None = None) -> Finding:
    return Finding(severity="error", subject=subject, what=what, evidence=evidence, cause=cause, fix=fix)


def warning(subject: str, *, what: str, fix: str, evidence: str = "", cause: str | None = None) -> Finding:
    return Finding(severity="warning", subject=subject, what=what, evidence=evidence, cause=cause, fix=fix)


def hint(subject: str, *, what: str, fix: str, evidence: str = "", cause: str | None = None) -> Finding:
    return Finding(severity="hint", subject=subject, what=what, evidence=evidence, cause=cause, fix=fix)


def ok(subject: str, *, what: str, evidence: str = "") -> Finding:
    return Finding(severity="ok", subject=subject, what=what, evidence=evidence)


def unknown(subject: str, *, what: str, evidence: str = "") -> Finding:
    return Finding(severity="unknown", subject=subject, what=what, evidence=evidence)
