"""XLA's three rules, checked on the traced program rather than by eye: no branch and no shape that depends on data, and no more
programs than planned shapes (the last one in step.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from upshift.errors import RequestError

BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase", "Switch", "RefSwitch"}
SHAPES_OF_DATA = {"Where", "Unique", "UniqueV2", "DynamicPartition", "SetDiff1D", "ListDiff", "NonMaxSuppressionV3"}


def check_rules(operations: Iterable[Any]) -> None:
    """Check the ``operations`` of a traced graph. Raise RequestError naming the first that breaks a rule."""
    for operation in operations:
        if operation.type in BRANCHES:
            raise RequestError(f"{operation.name} branches on data ({operation.type}); XLA compiles it for every step anew")
        unknown = [out for out in operation.outputs if out.dtype != tf.resource and not out.shape.is_fully_defined()]
        if operation.type in SHAPES_OF_DATA or unknown:
            shown = f"{operation.name} has a shape that depends on data ({operation.type})"
            raise RequestError(f"{shown}; XLA needs every shape before it runs")


def dynamic_dimensions(stablehlo: str) -> int:
    return len(re.findall(r"tensor<[^>]*\?", stablehlo))


def custom_calls(stablehlo: str) -> list[str]:
    """Return the work that XLA hands to a kernel outside of the program, which a TPU may not have."""
    return re.findall(r"custom_call @(\w+)", stablehlo)
