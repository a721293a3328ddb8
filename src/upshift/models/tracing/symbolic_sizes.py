"""Find how numbers of a traced run depend on its batch and its length, from runs in which both are primes.

Bytes and FLOPs are sums of products of dimensions. If the batch and the length are primes that divide no width of the model, a
product shows its factors: 131 x 1021 x 4096 is b x s x 4096. Two runs with other primes must give the same polynomials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import isqrt, prod

import numpy as np
import torch

from upshift.models.profile import Polynomial

POWERS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))  # of batch and length: the terms of a Polynomial, in their order
NEAR = 2  # labels are one shorter than their tokens, some models put a token or two before them
SHORTEST = 7
SMALLEST_BATCH = 127

Number = np.ndarray  # six coefficients


class NotPolynomial(Exception):
    """An error for a number that is no sum of products of batch, length and constants."""


class Counted:
    """Sizes as plain numbers."""

    zero = 0

    def storage(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def elements(self, dimensions: Iterable[int], size: int) -> int:
        return prod(dimensions) * size

    def number(self, value: int) -> int:
        return value


class OfPrimes:
    """Sizes as polynomials. Its methods raise NotPolynomial."""

    def __init__(self, batch: int, sequence: int) -> None:
        self.batch = batch
        self.sequence = sequence
        self.zero = np.zeros(len(POWERS))
        self._known: dict[tuple[tuple[int, ...], int], Number] = {}

    def storage(self, tensor: torch.Tensor) -> Number:
        num_bytes = tensor.untyped_storage().nbytes()
        size = tensor.element_size()
        if tensor.numel() * size == num_bytes:
            return self.elements(tensor.shape, size)
        return self.number(num_bytes)

    def elements(self, dimensions: Iterable[int], size: int) -> Number:
        key = (tuple(dimensions), size)
        if key not in self._known:
            self._known[key] = self._product(*key)
        return self._known[key]

    def number(self, value: int) -> Number:
        return self.elements((value,), 1)

    def _product(self, dimensions: tuple[int, ...], size: int) -> Number:
        terms = {(0, 0): float(size)}
        for dimension in dimensions:
            factor = self._dimension(dimension)
            found = dict[tuple[int, int], float]()
            for (b, s), coefficient in terms.items():
                for (more_b, more_s), value in factor.items():
                    power = (b + more_b, s + more_s)
                    found[power] = found.get(power, 0.0) + coefficient * value
            terms = found
        if not set(terms) <= set(POWERS):
            raise NotPolynomial(f"{dimensions} with batch {self.batch} and length {self.sequence}")
        return np.array([terms.get(power, 0.0) for power in POWERS])

    def _dimension(self, number: int) -> dict[tuple[int, int], float]:
        if number == 0:
            return {(0, 0): 0.0}
        rest, b = _divided(number, self.batch)
        rest, s = _divided(rest, self.sequence)
        if s == 0 and 0 < abs(rest - self.sequence) <= NEAR:
            return {(b, 1): 1.0, (b, 0): float(rest - self.sequence)}
        return {(b, s): float(rest)}


def prime_points(sequence_length: int, widths: Collection[int]) -> list[tuple[int, int]]:
    """Return (batch, length) of two runs with primes that divide no width and are not close to one.

    The lengths are at most ``sequence_length``. Return none if it is too short for such primes."""
    lengths = [_longest(sequence_length, widths), _longest(sequence_length // 2, widths)]
    batches = [prime for prime in range(SMALLEST_BATCH, 2 * SMALLEST_BATCH) if prime not in lengths and _tells(prime, widths)]
    return list(zip(batches, lengths, strict=False)) if all(lengths) and len(batches) > 1 else []


def _longest(number: int, widths: Collection[int]) -> int:
    return next((prime for prime in range(number, SHORTEST - 1, -1) if _tells(prime, widths)), 0)


def _tells(number: int, widths: Collection[int]) -> bool:
    """Return whether a product shows that this number is a factor of it: a prime that is in no width."""
    if any(number % divisor == 0 for divisor in range(2, isqrt(number) + 1)):
        return False
    return all(width % number and abs(width - number) > NEAR for width in widths if width > NEAR)


def polynomial(number: Number) -> Polynomial:
    """Return the polynomial. Sizes are whole multiples of a byte, so the rest of rounding is cut off."""
    return Polynomial(*(float(round(value, 6)) + 0.0 for value in number))


def _divided(number: int, prime: int) -> tuple[int, int]:
    power = 0
    while number % prime == 0:
        number = number // prime
        power = power + 1
    return number, power
