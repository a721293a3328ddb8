"""When growing memory is called a leak."""

from __future__ import annotations

import pytest

from upshift.debugging.step_signs import LEAK_STEPS, SETTLING, Signs, Step
from upshift.units import GIB, KIB, MIB

HELD = 1 * GIB


def growth(held: list[int]) -> float | None:
    signs = Signs(data_fix="")
    for size in [held[0]] * (SETTLING + 1) + held[1:]:
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=size))
    return signs.growth()


def test_what_grows_with_every_step_is_a_leak() -> None:
    assert growth([HELD + MIB * step for step in range(LEAK_STEPS + 1)]) == pytest.approx(MIB)


@pytest.mark.parametrize(
    "held",
    [
        [HELD] * (LEAK_STEPS + 1),
        [HELD] * (LEAK_STEPS // 2) + [HELD + 64 * MIB] * (LEAK_STEPS // 2 + 1),  # an evaluation
        [HELD + 3 * KIB * step for step in range(LEAK_STEPS)] + [HELD + 64 * MIB],  # a checkpoint is written
    ],
)
def test_one_jump_is_none(held: list[int]) -> None:
    assert growth(held) is None
