"""Read the model's matrix products off its parameters' shapes: what each computes and reads for a number of tokens."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from upshift.models.profile import ModelProfile
from upshift.planning.inference.formats import WeightFormat


class Product(NamedTuple):
    """Matrices of one shape, in the layers of the whole model.

    ``matrices``: the number of layers that have one such matrix, or a mixture of ``experts`` of which a token meets
    ``per_token``. Without a mixture both are 1.
    """

    outputs: int
    inputs: int
    matrices: int
    experts: int = 1
    per_token: int = 1

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * self.matrices * self.experts

    def stored_bytes(self, weights: WeightFormat, group_size: int) -> float:
        """Return the bytes of all matrices with their scales."""
        groups = ceil(self.inputs / group_size) if weights.grouped else 1
        scales = self.outputs * groups * self.matrices * self.experts * weights.scale_bytes
        return self.elements * weights.weight_bytes + scales

    def touched(self, tokens: float) -> float:
        """Return the expected number of a mixture's matrices that ``tokens`` meet, if each token goes to any ``per_token`` of
        them alike."""
        if self.experts == 1:
            return 1.0
        missed: float = (1.0 - self.per_token / self.experts) ** tokens
        return self.experts * (1.0 - missed)


def products_of(profile: ModelProfile) -> tuple[Product, ...]:
    """Return the products of the layers, without the head and without tables of embeddings, wherever they stand."""
    parameters, found = profile.parameters, []
    outside = {parameters.embedding, parameters.head} - {0}
    for entry in parameters.product_shapes:
        shape = entry.shape
        if entry.elements in outside:
            continue
        if len(shape) == 3 and profile.experts is not None and shape[0] == profile.experts.count:
            found.append(Product(shape[1], shape[2], entry.count, shape[0], profile.experts.per_token))
        else:
            found.append(Product(shape[0], prod(shape[1:]), entry.count))
    return tuple(found)
