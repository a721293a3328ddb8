"""When growing memory is called a leak."""

from __future__ import annotations

import pytest

from upshift.debugging.step_faults import CHECK_INTERVAL, LEAK_SHARE, LEAK_STEPS, SETTLING, Signs, Step
from upshift.units import GIB, KIB, MIB

HELD = 1 * GIB
CONFIRMED_STEPS = 2 * LEAK_STEPS


def growth(held: list[int], free: float | None = None) -> float | None:
    signs = Signs(data_fix="")
    for size in [held[0]] * (SETTLING + 1) + held[1:]:
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=size))
    return signs.growth(lambda: free)


def test_what_grows_with_every_step_is_a_leak() -> None:
    assert growth([HELD + MIB * step for step in range(CONFIRMED_STEPS + 1)]) == pytest.approx(MIB)


def test_what_grows_in_the_first_steps_only_is_none() -> None:
    """A demo's heap grew by 0.9 MiB in each of its first 44 steps, and by nothing later: its user read of a leak."""
    series = [HELD + 900 * KIB * min(step, 44) for step in range(200)]
    assert [growth(series[: number + 1], 20 * GIB) for number in range(LEAK_STEPS, 200, CHECK_INTERVAL)] == [None] * 42


def first_growth(series: list[int]) -> tuple[int, float] | None:
    """Return the number of steps after which a leak is found, and its bytes in each step, or None."""
    signs = Signs(data_fix="")
    for number, held in enumerate(series, start=1):
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=held))
        found = signs.growth(lambda: None)
        if found is not None:
            return number, found
    return None


@pytest.mark.parametrize("interval", [50, 70])
@pytest.mark.parametrize("shift", range(0, 50, 10))
def test_a_leak_beside_checkpoints_is_found(interval: int, shift: int) -> None:
    """Each checkpoint is written in the background, from a copy that takes 2 GiB in 6 steps."""
    series = [HELD + 2 * MIB * step + 2 * GIB * ((step + shift) % interval < 6) for step in range(400)]
    found = first_growth(series)
    assert found is not None and found[0] < 4 * interval and found[1] == pytest.approx(2 * MIB, rel=0.2)
    assert first_growth([HELD + 2 * GIB * ((step + shift) % interval < 6) for step in range(400)]) is None


@pytest.mark.parametrize("interval", [40, 50, 60])
def test_what_is_given_back_is_none(interval: int) -> None:
    """Python frees what it finds to be garbage in intervals."""
    assert first_growth([HELD + 2 * MIB * (step % interval) for step in range(400)]) is None


def test_a_small_share_of_what_a_process_holds_is_none() -> None:
    held = 64 * GIB
    just_below, just_above = (int(share * LEAK_SHARE * held / LEAK_STEPS) for share in (0.95, 1.1))
    assert first_growth([held + just_below * step for step in range(100)]) is None
    assert first_growth([held + just_above * step for step in range(100)]) is not None


def test_a_leak_that_fills_the_memory_soon_is_reported_soon() -> None:
    held = [HELD + 16 * MIB * step for step in range(LEAK_STEPS + 1)]
    assert growth(held, 20 * GIB) is None
    assert growth(held, 4 * GIB) == pytest.approx(16 * MIB)


@pytest.mark.parametrize(
    "held",
    [
        [HELD] * (CONFIRMED_STEPS + 1),
        [HELD] * (CONFIRMED_STEPS // 2) + [HELD + 64 * MIB] * (CONFIRMED_STEPS // 2 + 1),  # an evaluation
        [HELD + 3 * KIB * step for step in range(CONFIRMED_STEPS)] + [HELD + 64 * MIB],  # a checkpoint is written
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
    for number in range(SETTLING + CONFIRMED_STEPS + 1):
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=HELD + number * 20 * MIB, has_new_size=True))
    assert signs.growth(lambda: None) == pytest.approx(4 * MIB)


def growth_with_new_sizes(leak: int) -> float | None:
    """Return the growth that is found where every third step has a new size, for which 15 MiB of code are kept."""
    signs = Signs(data_fix="")
    for number in range(SETTLING + CONFIRMED_STEPS + 1):
        held = HELD + number * leak + number // 3 * 15 * MIB
        signs.add(Step(seconds=0.1, data_seconds=0.0, compiled=0, held=held, has_new_size=number % 3 == 0))
    return signs.growth(lambda: None)
