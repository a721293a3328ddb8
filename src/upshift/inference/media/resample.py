"""Change the number of samples a second of a sound, with a filter that keeps out what the new rate cannot hold."""

from __future__ import annotations

from math import gcd

import numpy as np

CROSSINGS = 32  # of the filter's zeros on each side: a longer filter cuts more sharply
PASSED = 0.95  # of the lower rate's half: where the filter begins to cut
BLOCK = 65_536  # new samples at once: their windows are copied
MAX_PHASES = 4096  # the filter is computed once for each place of a new sample between two old ones


def can_resample(rate: int, new_rate: int) -> bool:
    """Return whether the rates have a large common divisor, as all usual ones have."""
    return new_rate // gcd(rate, new_rate) <= MAX_PHASES


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Return the samples [T'] in fp32 at ``new_rate`` samples a second, of samples [T] at ``rate``.

    The filter is a sinc under Hann's window (Smith, Digital Audio Resampling), computed exactly at each of its phases. See
    ``can_resample``."""
    if rate == new_rate:
        return samples
    divisor = gcd(rate, new_rate)
    up = new_rate // divisor
    down = rate // divisor
    cutoff = PASSED * min(1.0, new_rate / rate)  # in halves of the old rate
    reach = int(np.ceil(CROSSINGS / cutoff))
    num_samples = -(-len(samples) * up // down)
    padded = np.pad(samples.astype(np.float64), (reach, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    offsets = np.arange(-reach, reach + 1)
    output = np.empty(num_samples, dtype=np.float32)
    for phase in range(min(up, num_samples)):  # the new samples phase, phase + up, and so on lie alike between old ones
        start, fraction = divmod(phase * down, up)
        distance = offsets - fraction / up
        window = np.where(np.abs(distance) <= reach, np.cos(np.pi * distance / (2 * reach)) ** 2, 0.0)
        kernel = cutoff * np.sinc(cutoff * distance) * window
        places = output[phase::up]
        inputs = windows[start::down][: len(places)]
        for begin in range(0, len(places), BLOCK):
            places[begin : begin + BLOCK] = inputs[begin : begin + BLOCK] @ kernel
    return output
