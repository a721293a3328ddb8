"""Compute the loss of pairs of answers: by DPO, with the rewards that it implies, or by the rewards of a reward model.

DPO: Rafailov et al., "Direct Preference Optimization", 2023 (arXiv:2305.18290), equation 7. An answer's reward is beta times the
logarithm of how much more probable the trained model makes it than the reference. The loss of a pair is
-log(sigmoid(reward of the chosen answer - reward of the rejected answer)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from upshift.training.arguments import BETA


@dataclass(frozen=True)
class Rewards:
    """The means over pairs of what TRL calls rewards/accuracies, rewards/margins, rewards/chosen and rewards/rejected."""

    accuracy: float  # share of the pairs whose chosen answer has the larger reward
    margin: float
    chosen: float
    rejected: float

    @classmethod
    def of_sums(cls, sums: list[float]) -> Rewards | None:
        """Return the means, or None if no pair was computed. The sums are those of ``PreferenceLoss.sum_over_ranks``."""
        num_pairs, num_correct, chosen, rejected = sums
        if not num_pairs:
            return None
        return cls(num_correct / num_pairs, (chosen - rejected) / num_pairs, chosen / num_pairs, rejected / num_pairs)


class PreferenceLoss:
    """Computes the loss of pairs, and adds up their rewards until they are read."""

    def __init__(self, beta: float = BETA, center_coefficient: float = 0.0) -> None:
        self.beta = beta
        self.center_coefficient = center_coefficient
        self._sums: torch.Tensor | None = None  # pairs, correct ones, rewards of the chosen and of the rejected answers

    def mean_loss(self, log_probabilities: torch.Tensor, reference: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the mean loss of pairs whose rows follow each other: chosen, rejected.

        Args:
            log_probabilities: of the labels of each row [rows], by the trained model.
            reference: the same by the model before the training. NaN: unknown, as in trials, which then compute the loss and the
                gradient of a run's first step.
            counts: whether the rewards of these pairs are added up.
        """
        reference = torch.where(reference.isnan(), log_probabilities.detach(), reference)
        rewards = self.beta * (log_probabilities - reference)
        chosen = rewards[0::2]
        rejected = rewards[1::2]
        if counts:
            self._add(chosen.detach(), rejected.detach())
        return -functional.logsigmoid(chosen - rejected).mean()

    def mean_loss_of_rewards(self, rewards: torch.Tensor, margins: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the mean loss of pairs whose rewards [rows] the model gives: -log(sigmoid(chosen - rejected - margin)).

        Touvron et al., "Llama 2", 2023 (arXiv:2307.09288), equation 2, as in TRL. With a coefficient, it times the mean of
        (chosen + rejected)^2 is added: Eisenstein et al., "Helping or Herding?", 2023 (arXiv:2312.09244), section 2.
        ``margins``: one for each pair [rows / 2]. ``counts``: whether the rewards of these pairs are added up.
        """
        chosen = rewards[0::2]
        rejected = rewards[1::2]
        if counts:
            self._add(chosen.detach(), rejected.detach())
        loss = -functional.logsigmoid(chosen - rejected - margins).mean()
        if self.center_coefficient:
            loss = loss + self.center_coefficient * (chosen + rejected).square().mean()
        return loss

    def _add(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        num_pairs = torch.full((), float(len(chosen)), device=chosen.device)
        sums = torch.stack([num_pairs, (chosen > rejected).sum().float(), chosen.sum(), rejected.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def reset(self) -> None:
        """Forget the rewards that were added up."""
        self._sums = None

    def read(self, *, device: str, num_processes: int) -> Rewards | None:
        """Return the mean rewards of all ranks since the last call, or None if no pair was computed. All ranks call it."""
        return Rewards.of_sums(self.sum_over_ranks(device=device, num_processes=num_processes).tolist())

    def sum_over_ranks(self, *, device: str, num_processes: int) -> torch.Tensor:
        """Return what all ranks have added up since the last call: pairs, correct ones, rewards of the chosen and the rejected.

        All ranks call it.
        """
        sums = torch.zeros(4, device=device) if self._sums is None else self._sums
        self.reset()
        if num_processes > 1:
            dist.all_reduce(sums)
        return sums
