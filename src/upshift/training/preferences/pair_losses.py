"""Compute the losses of pairs from the log-probabilities of both answers, by the names of TRL's ``loss_type``.

Each function returns the losses of pairs [pairs]. Their sources stand in loss_names.py. No loss of a pair depends on the other
pairs of its micro-batch, so no division into micro-batches changes what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch.nn.functional import logsigmoid

from upshift.training.arguments import SIMPO_GAMMA
from upshift.training.preferences.loss_names import OF_TOKENS, PER_TOKEN_REWARDS, needs_reference

DISCOPOP_TEMPERATURE = 0.05  # tau of the paper and of TRL's default


@dataclass(frozen=True)
class PairSettings:
    """The settings of the losses of pairs, by the names of TRL's DPOConfig and CPOConfig."""

    losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)  # names and weights
    label_smoothing: float = 0.0
    simpo_gamma: float = SIMPO_GAMMA

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the losses."""
        return frozenset(name for name, _ in self.losses)

    @property
    def needs_reference(self) -> bool:
        """Return whether answers are compared with what the model before the training makes of them."""
        return needs_reference(self.names)


@dataclass(frozen=True, eq=False)
class Answers:
    """The chosen or the rejected answers of pairs [pairs]."""

    log_probability: torch.Tensor  # of all tokens of an answer
    ratio: torch.Tensor  # the log-probability minus that by the reference
    num_tokens: torch.Tensor  # of an answer, at least 1
    num_predicted: torch.Tensor  # of an answer, without the first token of the row, which no model predicts; at least 1


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of a micro-batch, and the settings of their losses."""

    chosen: Answers
    rejected: Answers
    beta: float
    label_smoothing: float
    simpo_gamma: float
    mean_tokens: float  # of a chosen answer: the mean over the global batch

    @property
    def difference(self) -> torch.Tensor:
        """Return beta times the difference of the ratios, which is that of the rewards."""
        return self.beta * (self.chosen.ratio - self.rejected.ratio)

    def smoothed(self, difference: torch.Tensor) -> torch.Tensor:
        """Return -log(sigmoid(difference)), with the share ``label_smoothing`` of the pairs turned round."""
        return -(logsigmoid(difference) * (1 - self.label_smoothing) + logsigmoid(-difference) * self.label_smoothing)


def _sigmoid(pairs: Pairs) -> torch.Tensor:
    return -logsigmoid(pairs.difference)


def _sigmoid_norm(pairs: Pairs) -> torch.Tensor:
    return -logsigmoid(pairs.beta * _difference_per_token(pairs))


def _hinge(pairs: Pairs) -> torch.Tensor:
    return torch.relu(1 - pairs.difference)


def _ipo(pairs: Pairs) -> torch.Tensor:
    return (_difference_per_token(pairs) - 1 / (2 * pairs.beta)).square()


def _difference_per_token(pairs: Pairs) -> torch.Tensor:
    return pairs.chosen.ratio / pairs.chosen.num_tokens - pairs.rejected.ratio / pairs.rejected.num_tokens


def _exo_pair(pairs: Pairs) -> torch.Tensor:
    smoothing = torch.tensor(pairs.label_smoothing, device=pairs.difference.device)
    wins, loses = logsigmoid(pairs.difference), logsigmoid(-pairs.difference)
    return wins.exp() * (wins - torch.log1p(-smoothing)) + loses.exp() * (loses - smoothing.log())


def _nca_pair(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.beta * pairs.chosen.ratio, pairs.beta * pairs.rejected.ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pairs: Pairs) -> torch.Tensor:
    right = (1 - pairs.label_smoothing) * logsigmoid(pairs.difference)
    wrong = pairs.label_smoothing * logsigmoid(-pairs.difference)
    return (wrong - right) / (1 - 2 * pairs.label_smoothing)


def _bco_pair(pairs: Pairs) -> torch.Tensor:
    return -logsigmoid(pairs.beta * pairs.chosen.ratio) - logsigmoid(-pairs.beta * pairs.rejected.ratio)


def _sppo_hard(pairs: Pairs) -> torch.Tensor:
    aim = 0.5 / pairs.beta
    return (pairs.chosen.ratio - aim).square() + (pairs.rejected.ratio + aim).square()


def _apo_zero(pairs: Pairs) -> torch.Tensor:
    return torch.sigmoid(-pairs.beta * pairs.chosen.ratio) + torch.sigmoid(pairs.beta * pairs.rejected.ratio)


def _apo_down(pairs: Pairs) -> torch.Tensor:
    return torch.sigmoid(pairs.beta * pairs.chosen.ratio) + torch.sigmoid(-pairs.difference)


def _discopop(pairs: Pairs) -> torch.Tensor:
    """Return a mixture of a logistic and an exponential loss. The latter is computed by its logarithm, so nothing overflows."""
    mixing = pairs.difference / DISCOPOP_TEMPERATURE
    exponential = torch.exp(logsigmoid(mixing) - pairs.difference)
    return -logsigmoid(pairs.difference) * torch.sigmoid(-mixing) + exponential


def _simpo(pairs: Pairs) -> torch.Tensor:
    chosen = pairs.chosen.log_probability / pairs.chosen.num_predicted
    rejected = pairs.rejected.log_probability / pairs.rejected.num_predicted
    return pairs.smoothed(pairs.beta * (chosen - rejected) - pairs.simpo_gamma)


def _cpo(pairs: Pairs) -> torch.Tensor:
    return pairs.smoothed(pairs.beta * (pairs.chosen.log_probability - pairs.rejected.log_probability)) + _sft(pairs)


def _orpo(pairs: Pairs) -> torch.Tensor:
    chosen = pairs.chosen.log_probability / pairs.chosen.num_predicted
    rejected = pairs.rejected.log_probability / pairs.rejected.num_predicted
    log_odds = chosen - rejected - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return _sft(pairs) - pairs.beta * logsigmoid(log_odds)


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p) of log p below 0."""
    return torch.log(-torch.expm1(log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)))


def _sft(pairs: Pairs) -> torch.Tensor:
    """Return losses whose mean over the global batch is that of all tokens of its chosen answers."""
    return -pairs.chosen.log_probability / pairs.mean_tokens


_FUNCTIONS: Final[Mapping[str, Callable[[Pairs], torch.Tensor]]] = MappingProxyType(
    {
        "sigmoid": _sigmoid,
        "sigmoid_norm": _sigmoid_norm,
        "hinge": _hinge,
        "ipo": _ipo,
        "exo_pair": _exo_pair,
        "nca_pair": _nca_pair,
        "robust": _robust,
        "bco_pair": _bco_pair,
        "sppo_hard": _sppo_hard,
        "apo_zero": _apo_zero,
        "apo_down": _apo_down,
        "discopop": _discopop,
        "simpo": _simpo,
        "cpo": _cpo,
        "orpo": _orpo,
        OF_TOKENS: _sft,
    }
)


def mean_pair_loss(pairs: Pairs, losses: tuple[tuple[str, float], ...]) -> torch.Tensor:
    """Return the sum of the mean losses of pairs, each times its weight."""
    return torch.stack([weight * _FUNCTIONS[name](pairs).mean() for name, weight in losses]).sum()


def rewards_of(answers: Answers, beta: float, names: frozenset[str]) -> torch.Tensor:
    """Return the rewards of answers [pairs]: beta times the ratio, or times the log-probability if there is no reference."""
    if needs_reference(names):
        return beta * answers.ratio
    if not names <= {*PER_TOKEN_REWARDS, OF_TOKENS}:
        return beta * answers.log_probability
    return beta * answers.log_probability / answers.num_predicted
