"""Translate a space into Ray Tune's domains.

If Ray's own distribution of that name differs from Optuna's, one that does not is used."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

from upshift.tuning.space import Choices, Range, Space


def domains(space: Space) -> dict[str, Any]:
    return {name: _domain(one) for name, one in space.searched.items()} | space.fixed


def _domain(one: Range | Choices) -> Any:
    from ray import tune

    if isinstance(one, Choices):
        return tune.choice(list(one.choices))
    if one.grid is not None:  # tune.qrandint counts from 0, not from low
        return tune.choice(list(one.grid))
    if one.whole and one.log:  # tune.lograndint rounds down: high would be almost never drawn
        return tune.sample_from(partial(_whole_log, int(one.low), int(one.high)))
    if one.whole:
        return tune.randint(int(one.low), int(one.high) + 1)
    return (tune.loguniform if one.log else tune.uniform)(one.low, one.high)


def _whole_log(low: int, high: int, spec: Any = None) -> int:
    """Draw as Optuna does: the nearest whole number of a logarithmic draw between low - 1/2 and high + 1/2."""
    drawn = round(math.exp(random.uniform(math.log(low - 0.5), math.log(high + 0.5))))
    return min(max(drawn, low), high)
