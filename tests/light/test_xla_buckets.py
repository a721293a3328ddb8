"""The widths that batches are padded to under XLA."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upshift.xla.data.batches import MAX_BUCKETS, MULTIPLE, plan_buckets


def test_a_short_run_has_one_width_and_a_long_one_several() -> None:
    lengths, counts = (20, 60, 500), (100, 100, 2)
    short = plan_buckets(lengths, counts, longest=500, batch_size=4, num_steps=10)
    long = plan_buckets(lengths, counts, longest=500, batch_size=4, num_steps=10_000)
    assert short.widths == (512,)
    assert long.widths == (32, 64, 512)
    assert long.padded_share < short.padded_share


def test_a_batch_is_as_wide_as_its_longest() -> None:
    found = plan_buckets((29, 123), (1, 1), longest=123, batch_size=8, num_steps=100)
    assert found.widths == (128,)
    assert found.width_of(29) == 128


@given(
    lengths=st.lists(st.integers(2, 2000), min_size=1, max_size=20, unique=True),
    batch_size=st.integers(1, 16),
    num_steps=st.integers(1, 100_000),
)
def test_every_length_has_a_width(lengths: list[int], batch_size: int, num_steps: int) -> None:
    longest = max(lengths)
    found = plan_buckets(sorted(lengths), [1] * len(lengths), longest=longest, batch_size=batch_size, num_steps=num_steps)
    assert found.widths == tuple(sorted(set(found.widths))) and len(found.widths) <= MAX_BUCKETS
    assert all(width % MULTIPLE == 0 for width in found.widths)
    assert longest <= found.widths[-1] < longest + MULTIPLE
    assert 0 <= found.padded_share < 1
