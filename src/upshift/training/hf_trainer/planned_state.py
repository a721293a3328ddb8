"""Define PlannedState: what the mix-ins of ``upshift.Trainer`` share about the plan."""

from __future__ import annotations

from dataclasses import dataclass

from upshift.planning.plan import Plan
from upshift.training.hf_trainer.choose_plan import Choice
from upshift.training.hf_trainer.loss_split import Split


@dataclass(frozen=True)
class PlannedState:
    """The user's options for the plan, and what the last training chose by them."""

    plan: Plan | None  # the one to run
    fixed: tuple[str, ...]  # fields of the plan, as "field=value"
    allow: tuple[str, ...]  # changes of the mathematics that the plan may make
    trial_seconds: float | None  # None: by the length of the run
    memory_limit_gib: float | None  # None: all that is free
    last_choice: tuple[Choice, Split] | None = None

    @property
    def is_demanded(self) -> bool:
        """Return whether the user asks for more than a faster plan, so that a plan that cannot be made is an error."""
        return bool(self.fixed or self.allow or self.memory_limit_gib is not None)
