"""When growing memory is called a leak."""

from __future__ import annotations

import pytest

from upshift.debugging.step_faults import LEAK_STEPS, SETTLING, Signs, Step
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


def test_what_a_new_size_adds_is_none() -> None:
    """oneDNN keeps code for each size: packed chats in bf16 were said to leak 6 MiB a step."""
    assert growth_with_new_sizes(0) is None


def test_a_leak_beside_new_sizes_is_found() -> None:
    assert growth_with_new_sizes(2 * MIB) == pytest.approx(5 / 3 * MIB, rel=0.1)  # 2, 2, and what is above 16 of 17


def test_a_large_leak_is_found_though_each_step_has_a_new_size() -> None:
    signs = Signs(data_fix="")
    for number in range(SETTLING + LEAK_STEPS + 1):
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=HELD + number * 20 * MIB, has_new_size=True))
    assert signs.growth() == pytest.approx(4 * MIB)


def growth_with_new_sizes(leak: int) -> float | None:
    """Return the growth that is found where every third step has a new size, for which 15 MiB of code are kept."""
    signs = Signs(data_fix="")
    for number in range(SETTLING + LEAK_STEPS + 1):
        held = HELD + number * leak + number // 3 * 15 * MIB
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=held, has_new_size=number % 3 == 0))
    return signs.growth()
