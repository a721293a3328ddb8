"""Find the largest size that fits with as few questions as possible: every question is a search."""

from __future__ import annotations

from collections.abc import Callable


def largest_multiple(fits: Callable[[int], bool], *, step: int, start: int, ceiling: int) -> int:
    """Return the largest multiple of ``step`` up to ``ceiling`` that fits, 0 where none does.

    ``fits`` must hold up to some value and not beyond. Strides that double lead away from ``start`` until the border is passed.
    Then the border is bisected. The nearer ``start`` is to the border, the fewer sizes are tested.
    """
    low, high = 0, ceiling // step + 1  # fits at low, not at high
    probe, stride = min(max(start // step, 1), high - 1), 1
    found_low = found_high = False
    while high - low > 1:
        if fits(probe * step):
            low, found_low = probe, True
        else:
            high, found_high = probe, True
        if found_low and found_high:
            probe = (low + high) // 2
        else:
            probe = min(low + stride, high - 1) if found_low else max(high - stride, low + 1)
            stride *= 2
    return low * step
