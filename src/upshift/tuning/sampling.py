"""Choose the next trial's values by Optuna's TPE, with random numbers from the seed and the trial's number.

So processes that share a study, and a study that goes on, do not draw the same points twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState


class ByNumber(BaseSampler):
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_running: dict[int, TPESampler] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:  # fmt: skip
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:  # fmt: skip
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._of(trial).after_trial(study, trial, state, values)
        del self._of_running[trial.number]

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number not in self._of_running:
            seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
            self._of_running[trial.number] = TPESampler(seed=seed, constant_liar=True)  # others may run beside it
        return self._of_running[trial.number]
