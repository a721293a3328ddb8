# needs torch
"""Find how the numbers of a traced run depend on its batch and its length, from a run in which both are primes.

Bytes and FLOPs are sums of products of dimensions. If the batch and the length are primes that divide no dimension of the
model, a product shows its factors: 131 x 1021 x 4096 is b x s x 4096. A second run with other primes must give the same
polynomials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import isqrt, prod

import numpy as np
import torch

from upshift.models.profile import Polynomial

POWERS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))  # of batch and length, in the order of a Polynomial's terms
NEARBY = 2  # labels are one shorter than their tokens, and some models put a token or two before the text
SHORTEST = 7
SMALLEST_BATCH = 127
NO_LENGTH = 2**61 - 1  # a prime that no size is a multiple of

Number = np.ndarray  # six coefficients


class NotPolynomial(Exception):
    """Raised for a number that is not a sum of products of batch, length and constants."""


class PlainSizes:
    """Calculate sizes as plain numbers."""

    zero = 0

    def storage(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def elements(self, dimensions: Iterable[int], size: int) -> int:
        return prod(dimensions) * size

    def number(self, value: int) -> int:
        return value


class PrimeSizes:
    """Calculate sizes as coefficients of polynomials of batch and length. The methods raise NotPolynomial."""

    def __init__(self, batch: int, sequence: int) -> None:
        self.batch = batch
        self.sequence = sequence
        self.zero = np.zeros(len(POWERS))
        self._cached: dict[tuple[tuple[int, ...], int], Number] = {}

    def storage(self, tensor: torch.Tensor) -> Number:
        num_bytes = tensor.untyped_storage().nbytes()
        size = tensor.element_size()
        if tensor.numel() * size == num_bytes:
            return self.elements(tensor.shape, size)
        return self.number(num_bytes)

    def elements(self, dimensions: Iterable[int], size: int) -> Number:
        key = (tuple(dimensions), size)
        if key not in self._cached:
            self._cached[key] = self._product(*key)
        return self._cached[key]

    def number(self, value: int) -> Number:
        return self.elements((value,), 1)

    def _product(self, dimensions: tuple[int, ...], size: int) -> Number:
        """Multiply the polynomials of all dimensions, and ``size``. Terms map (power of batch, power of length) to a factor."""
        terms = {(0, 0): float(size)}
        for dimension in dimensions:
            factor = self._dimension(dimension)
            product = dict[tuple[int, int], float]()
            for (b, s), coefficient in terms.items():
                for (factor_b, factor_s), value in factor.items():
                    power = (b + factor_b, s + factor_s)
                    product[power] = product.get(power, 0.0) + coefficient * value
            terms = product
        if not set(terms) <= set(POWERS):
            raise NotPolynomial(f"{dimensions} with batch {self.batch} and length {self.sequence}")
        return np.array([terms.get(power, 0.0) for power in POWERS])

    def _dimension(self, number: int) -> dict[tuple[int, int], float]:
        """Return one dimension as terms of batch and length."""
        if number == 0:
            return {(0, 0): 0.0}
        cofactor, b = _divide_out(number, self.batch)
        cofactor, s = _divide_out(cofactor, self.sequence)
        if s == 0 and 0 < abs(cofactor - self.sequence) <= NEARBY:
            return {(b, 1): 1.0, (b, 0): float(cofactor - self.sequence)}
        return {(b, s): float(cofactor)}


def prime_batch(others: Collection[int]) -> int:
    """Return a prime batch that divides none of the ``others`` and is not close to one of them, or 0 if there is none."""
    batches = range(SMALLEST_BATCH, 2 * SMALLEST_BATCH)
    return next((number for number in batches if _is_identifiable(number, others)), 0)


def prime_points(sequence_length: int, widths: Collection[int]) -> list[tuple[int, int]]:
    """Return (batch, length) of two runs, all primes that divide none of the ``widths`` and are not close to one of them.

    The lengths are at most ``sequence_length``. Return an empty list if it is too short for such primes."""
    lengths = [_largest_prime(sequence_length, widths), _largest_prime(sequence_length // 2, widths)]
    batches = [
        prime for prime in range(SMALLEST_BATCH, 2 * SMALLEST_BATCH) if prime not in lengths and _is_identifiable(prime, widths)
    ]
    return list(zip(batches, lengths, strict=False)) if all(lengths) and len(batches) > 1 else []


def _largest_prime(number: int, widths: Collection[int]) -> int:
    return next((prime for prime in range(number, SHORTEST - 1, -1) if _is_identifiable(prime, widths)), 0)


def _is_identifiable(number: int, widths: Collection[int]) -> bool:
    """Return whether the number is a prime that divides none of the widths, so that it shows as a factor of a product."""
    if any(number % divisor == 0 for divisor in range(2, isqrt(number) + 1)):
        return False
    return all(width % number and abs(width - number) > NEARBY for width in widths if width > NEARBY)


def polynomial(number: Number) -> Polynomial:
    """Return the polynomial of these coefficients. Sizes are whole bytes, so rounding errors are cut off."""
    return Polynomial(*(float(round(value, 6)) + 0.0 for value in number))


def _divide_out(number: int, prime: int) -> tuple[int, int]:
    """Return the number without its factors ``prime``, and how many there were."""
    power = 0
    while number % prime == 0:
        number = number // prime
        power = power + 1
    return number, power
