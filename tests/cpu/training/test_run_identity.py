"""A run that resumes notices any other data."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from upshift.training.data.tokens import Sequences
from upshift.training.loop.state import fingerprint

COMPARED_APART = {"sequence_length"}  # by the run file, under its own name
FOLLOWS = {"reference"}  # from the data and the model
NAMES = {field.name for field in fields(Sequences)} - COMPARED_APART - FOLLOWS


def some_sequences() -> Sequences:
    values: dict[str, Any] = {
        "tokens": np.arange(12, dtype=np.int32), "starts": np.array([0, 5]), "lengths": np.array([5, 7]), "sequence_length": 8,
        "labels": np.arange(12, dtype=np.int32), "source_lengths": np.array([2, 3]), "reference": np.zeros(2, np.float32),
        "margins": np.array([0.5, 0.5], np.float32), "ratings": np.array([True, True]),
    }  # fmt: skip
    assert {*values} == {field.name for field in fields(Sequences)}
    return Sequences(**values)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_array_of_the_data_is_in_its_fingerprint(name: str) -> None:
    """A value that changes, and an array that is missing."""
    sequences = some_sequences()
    changed = getattr(sequences, name).copy()
    changed[-1] = not changed[-1] if changed.dtype == np.bool_ else changed[-1] + 1
    others = [replace(sequences, **{name: changed})]
    if name not in ("tokens", "starts", "lengths"):
        others.append(replace(sequences, **{name: None}))
    found = [fingerprint(other) for other in (sequences, *others)]
    assert len({*found}) == len(found) and fingerprint(some_sequences()) == found[0]
    assert fingerprint(replace(sequences, reference=np.ones(2, np.float32))) == found[0]
