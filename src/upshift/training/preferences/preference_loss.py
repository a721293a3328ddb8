"""Compute the loss of preferences: of pairs by DPO or by the rewards of a reward model, and of rated answers by KTO.

DPO: Rafailov et al., "Direct Preference Optimization", 2023 (arXiv:2305.18290), equation 7. An answer's reward is beta times the
logarithm of how much more probable the trained model makes it than the reference. The loss of a pair is
-log(sigmoid(reward of the chosen answer - reward of the rejected answer)), or another one of pair_losses.py.

KTO: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024 (arXiv:2402.01306), equation 7. Each
answer is rated as good or bad. Its reward is compared with beta times the KL term, which is estimated from mismatched answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from upshift.training.arguments import BETA, Arguments
from upshift.training.preferences.loss_names import read_losses
from upshift.training.preferences.pair_losses import Answers, Pairs, PairSettings, mean_pair_loss, rewards_of


@dataclass(frozen=True)
class Rewards:
    """The means over answers of what TRL calls rewards/accuracies, rewards/margins, rewards/chosen, rewards/rejected and kl.

    A mean is None if no answer was of its kind, as may be in a batch of rated answers.
    """

    # Share of the pairs whose chosen answer has the larger reward. Of rated answers: the share of those whose reward is larger
    # than beta times the KL term if they are good, and smaller if they are bad.
    accuracy: float
    margin: float | None
    chosen: float | None
    rejected: float | None
    kl: float | None = None  # of rated answers; None: the loss has no KL term, or answers are not rated

    @classmethod
    def of_sums(cls, sums: list[float]) -> Rewards | None:
        """Return the means, or None if no answer was computed. The sums are those of ``PreferenceLoss.sum_over_ranks``."""
        num_chosen, num_rejected, num_compared, num_correct, chosen, rejected, num_with_kl, kl = sums
        if not num_chosen + num_rejected:
            return None
        mean_chosen = chosen / num_chosen if num_chosen else None
        mean_rejected = rejected / num_rejected if num_rejected else None
        return cls(
            accuracy=num_correct / num_compared,
            margin=None if mean_chosen is None or mean_rejected is None else mean_chosen - mean_rejected,
            chosen=mean_chosen,
            rejected=mean_rejected,
            kl=kl / num_with_kl if num_with_kl else None,
        )


NUM_SUMS = 8  # of PreferenceLoss


@dataclass(frozen=True)
class RatingSettings:
    """The settings of KTO, by the names of TRL's KTOConfig."""

    beta: float = BETA
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    has_kl: bool = True  # False: rewards are compared with 0, as by TRL's loss_type apo_zero_unpaired


def log_ratios(log_probabilities: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of how much more probable each row [rows] is than by the reference. NaN is unknown and gives 0."""
    return log_probabilities - torch.where(reference.isnan(), log_probabilities.detach(), reference)


def kl_term(sums: torch.Tensor, *, num_processes: int) -> torch.Tensor:
    """Return KTO's KL term of a global batch: the mean log-ratio of the mismatched answers of all ranks, at least 0.

    ``sums``: those of this rank, as ``sum_log_ratios`` returns them. All ranks call it.
    """
    if num_processes > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1.0)).clamp(min=0.0)


class PreferenceLoss:
    """Computes the loss of pairs and of rated answers, and adds up their rewards until they are read.

    ``kl`` is the KL term of the global batch whose rated answers come next, 0 or larger. ``mean_tokens`` is the mean number of
    tokens of the chosen answers in the global batch whose pairs come next.
    """

    def __init__(
        self,
        beta: float = BETA,
        center_coefficient: float = 0.0,
        *,
        pairs: PairSettings | None = None,
        ratings: RatingSettings | None = None,
    ) -> None:
        self.beta = beta
        self.center_coefficient = center_coefficient
        self.pairs = pairs or PairSettings()
        self.ratings = ratings or RatingSettings()
        self.kl = torch.zeros(())
        self.mean_tokens = 1.0
        # In this order: the numbers of chosen (or good) and of rejected (or bad) answers, of pairs or rated answers, and of the
        # correct ones; the rewards of chosen and of rejected answers; the number of answers with a KL term, and the terms' sum.
        self._sums: torch.Tensor | None = None

    @classmethod
    def of(cls, arguments: Arguments) -> PreferenceLoss:
        """Return the loss with the settings of a run."""
        ratings = RatingSettings(
            arguments.kto_beta, arguments.desirable_weight, arguments.undesirable_weight, has_kl=arguments.has_kl_pass
        )
        pairs = PairSettings(read_losses(arguments.dpo_loss), arguments.dpo_label_smoothing, arguments.simpo_gamma)
        return cls(arguments.dpo_beta, arguments.center_rewards_coefficient, pairs=pairs, ratings=ratings)

    def mean_loss(
        self, log_probabilities: torch.Tensor, reference: torch.Tensor, num_tokens: torch.Tensor, *, counts: bool = True
    ) -> torch.Tensor:
        """Return the mean loss of pairs whose rows follow each other: chosen, rejected.

        Args:
            log_probabilities: of the labels of each row [rows], by the trained model.
            reference: the same by the model before the training. NaN: unknown, as in trials, which then compute the loss and the
                gradient of a run's first step.
            num_tokens: the number of labels of each row, and how many of them the model predicts [2, rows]. It does not predict
                the first token of a row.
            counts: whether the rewards of these pairs are added up. It is False for stand-ins, which only keep ranks in step.
                The reference belongs to other tokens than theirs, so it is not used.
        """
        ratios = log_ratios(log_probabilities, reference if counts else torch.full_like(reference, torch.nan))
        num_labels, num_predicted = num_tokens.clamp(min=1)
        rows = [log_probabilities, ratios, num_labels, num_predicted]
        chosen = Answers(*(values[0::2] for values in rows))
        rejected = Answers(*(values[1::2] for values in rows))
        settings = self.pairs
        if counts:
            names = settings.names
            own = [rewards_of(answers, self.beta, names).detach() for answers in (chosen, rejected)]
            self._add(*own)
        pairs = Pairs(chosen, rejected, self.beta, settings.label_smoothing, settings.simpo_gamma, self.mean_tokens)
        return mean_pair_loss(pairs, settings.losses)

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

    def mean_loss_of_ratings(
        self, log_probabilities: torch.Tensor, reference: torch.Tensor, ratings: torch.Tensor, *, counts: bool = True
    ) -> torch.Tensor:
        """Return the mean loss of rated answers by KTO, as in TRL: weight * (1 - sigmoid(beta * (ratio - KL))) of a good one.

        The ratio is that of the log-probabilities of an answer. A bad answer has KL - ratio in its place.

        Args:
            log_probabilities, reference: as in ``mean_loss`` [rows], of rated answers alone.
            ratings: whether each answer is a good one [rows].
            counts: whether the rewards of these answers are added up.
        """
        settings = self.ratings
        ratios = log_ratios(log_probabilities, reference)
        above = ratios - self.kl.to(ratios)
        gains = torch.where(ratings, above, -above)
        weights = torch.where(ratings, settings.desirable_weight, settings.undesirable_weight)
        if counts:
            rewards = settings.beta * ratios.detach()
            num_rated = torch.full((), float(len(ratings)), device=rewards.device)
            num_good = ratings.sum().float()
            good = (rewards * ratings).sum()
            num_with_kl = num_rated * settings.has_kl
            correct = (gains > 0).sum().float()
            numbers = [num_good, num_rated - num_good, num_rated, correct, good, rewards.sum() - good]
            self._add_sums([*numbers, num_with_kl, self.kl.to(rewards) * num_with_kl])
        return (weights * (1.0 - torch.sigmoid(settings.beta * gains))).mean()

    def _add(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        num_pairs = torch.full((), float(len(chosen)), device=chosen.device)
        none = torch.zeros_like(num_pairs)
        correct = (chosen > rejected).sum().float()
        self._add_sums([num_pairs, num_pairs, num_pairs, correct, chosen.sum(), rejected.sum(), none, none])

    def _add_sums(self, numbers: list[torch.Tensor]) -> None:
        sums = torch.stack(numbers)
        self._sums = sums if self._sums is None else self._sums + sums

    def start_from_here(self) -> Callable[[], None]:
        """Return a function that forgets the rewards that are added up from now on, for a pass that is repeated."""
        sums = self._sums

        def forget() -> None:
            self._sums = sums

        return forget

    def reset(self) -> None:
        """Forget the rewards that were added up."""
        self._sums = None

    def read(self, *, device: str, num_processes: int) -> Rewards | None:
        """Return the mean rewards of all ranks since the last call, or None if no answer was computed. All ranks call it."""
        return Rewards.of_sums(self.sum_over_ranks(device=device, num_processes=num_processes).tolist())

    def sum_over_ranks(self, *, device: str, num_processes: int) -> torch.Tensor:
        """Return what all ranks have added up since the last call, for ``Rewards.of_sums``. All ranks call it."""
        sums = torch.zeros(NUM_SUMS, device=device) if self._sums is None else self._sums
        self.reset()
        if num_processes > 1:
            dist.all_reduce(sums)
        return sums
