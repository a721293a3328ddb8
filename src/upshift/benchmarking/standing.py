"""Compare each claim's newest number with its goal, the worst first."""

from __future__ import annotations

from collections.abc import Mapping

from upshift.benchmarking.figures import CaseFile, Claim, Reading
from upshift.value import Value


class Standing(Value):
    name: str  # case/claim
    claim: Claim
    command: str
    readings: tuple[Reading, ...]

    @classmethod
    def of(cls, case: CaseFile, claim: Claim) -> Standing:
        readings = tuple(case.readings(claim))
        return cls(name=f"{case.name}/{claim.name}", claim=claim, command=case.command(claim), readings=readings)

    @property
    def value(self) -> float | None:
        return self.readings[-1].value if self.readings else None

    @property
    def share(self) -> float | None:
        """Return the share of the goal that is reached: 1 and more if it is. None: no rows, or no goal."""
        if self.value is None or self.claim.goal is None or min(self.value, self.claim.goal) <= 0:
            return None
        return self.value / self.claim.goal if self.claim.better == "higher" else self.claim.goal / self.value

    @property
    def is_reached(self) -> bool | None:
        if self.value is None or self.claim.goal is None:
            return None
        return self.value >= self.claim.goal if self.claim.better == "higher" else self.value <= self.claim.goal

    def written(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f} {self.claim.unit}" if abs(value) >= 100 else f"{value:.3g} {self.claim.unit}"


def standings(cases: Mapping[str, CaseFile]) -> list[Standing]:
    """Return the claims, the furthest from its goal first; then those without a goal, then those without rows."""
    found = [Standing.of(case, claim) for case in cases.values() for claim in case.claims]
    return sorted(found, key=lambda one: (not one.readings, one.share is None, one.share or 0.0, one.name))
