"""Choose the evaluation whose weights the final model gets with --load-best: the lowest held-out loss that can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from upshift.training.checkpoint.directory import describe_damage

Evaluation = tuple[int, int, float]  # step, tokens, loss


@dataclass(frozen=True)
class LostEvaluation:
    evaluation: Evaluation
    reason: str  # why its checkpoint cannot be loaded


@dataclass(frozen=True, kw_only=True)
class BestChoice:
    """The evaluation with the lowest loss among those that can be loaded, and the lower ones that cannot."""

    evaluation: Evaluation | None  # None: none can be loaded
    lost: tuple[LostEvaluation, ...]  # lowest loss first

    @property
    def loss_message(self) -> str:
        """Return which evaluation was the lowest, and why its checkpoint cannot be loaded. There has to be a lost one."""
        lowest = self.lost[0]
        others = ", ".join(str(lost.evaluation[0]) for lost in self.lost[1:])
        message = (
            f"the held-out loss was lowest after step {lowest.evaluation[0]} ({lowest.evaluation[2]:.4f}), and its checkpoint "
            f"cannot be loaded ({lowest.reason})"
        )
        return f"{message}; neither can those of the next lowest, after steps {others}" if others else message


def choose_best(evaluations: list[Evaluation], *, step: int, find_damage: Callable[[int], str | None]) -> BestChoice:
    """Return the evaluation with the lowest loss that can be loaded. If losses are equal, the first one counts.

    Args:
        evaluations: all evaluations of the run, in order.
        step: the weights after this step are in memory, and need no checkpoint.
        find_damage: returns why the checkpoint of a step cannot be loaded, or None.
    """
    lost: list[LostEvaluation] = []
    for evaluation in sorted(evaluations, key=lambda evaluation: evaluation[2]):
        reason = None if evaluation[0] == step else find_damage(evaluation[0])
        if reason is None:
            return BestChoice(evaluation=evaluation, lost=tuple(lost))
        lost.append(LostEvaluation(evaluation, reason))
    return BestChoice(evaluation=None, lost=tuple(lost))


def checkpoint_of_step(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step}"


def find_checkpoint_damage(directory: Path, step: int, *, contents: bool = True) -> str | None:
    """Return why the checkpoint of a step cannot be loaded, or None. ``contents``: compare every byte, too."""
    checkpoint = checkpoint_of_step(directory, step)
    if not checkpoint.is_dir():
        return f"{checkpoint} does not exist"
    damage = describe_damage(checkpoint, contents=contents)
    return None if damage is None else damage.partition("; ")[0]
