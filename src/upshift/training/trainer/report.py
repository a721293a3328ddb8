"""Print the Trainer's plan on standard error, because standard output belongs to the script."""

from __future__ import annotations

import sys

from upshift.planning.prove import Tried
from upshift.training.trainer.choose import Choice
from upshift.units import gib


def report(choice: Choice) -> list[str]:
    """Return lines that show the plan, its expected speed beside the plain default, and the reasons."""
    if choice.planning is None or choice.candidate is None:
        return [f"your own settings run: {choice.reason}"]
    planning, candidate = choice.planning, choice.candidate
    plain = choice.proof.default.best.tokens_per_second if choice.proof else planning.default.tokens_per_second
    known = "measured" if choice.proof else "predicted"
    lines = [
        f"plan: {choice.plan.label()}",
        f"{known}: {candidate.tokens_per_second:,.0f} tokens/s, plain Trainer {plain or 0.0:,.0f}; "
        f"peak {gib(candidate.memory.peak):.2f} GiB, held {gib(candidate.resident):.2f} GiB",
    ]
    if choice.proof is not None:
        lines += [f"  {note}" for note in choice.proof.notes]
    for reason in planning.reasons_for(choice.plan):
        lines.append(f"  {reason.choice}={reason.value}: {reason.why} ({reason.runner_up}: {reason.runner_up_cost})")
    lines.append(f"  dataloader_num_workers={choice.num_workers}: {choice.loading}")
    return lines


def trial_line(tried: Tried) -> str:
    speed = tried.best.tokens_per_second
    return f"tried {tried.candidate.plan.label()}: {tried.failure or f'{speed or 0.0:,.0f} tokens/s'}"


def tell(line: str) -> None:
    sys.stderr.write(f"upshift: {line}\n")
    sys.stderr.flush()
