"""A sample of all kinds of causal language models: packing is allowed where, and only where, it changes no gradient."""

from __future__ import annotations

import pytest
from isolation_kinds import kinds, measure

EVERY = 12  # kinds; all of them: python tests/conformance/isolation_kinds.py
SLOW = {"gemma3n_text", "zamba", "zamba2", "blt", "flint"}  # their defaults have tens of different layers
LEAKED = ["biogpt", "openai-gpt", "xglm", "afmoe", "jamba", "qwen3_next", "recurrent_gemma", "opt"]  # that were packed by default


@pytest.mark.parametrize("kind", [*LEAKED, "granitemoe", *(kind for kind in kinds()[::EVERY] if kind not in (*LEAKED, *SLOW))])
def test_packing_is_allowed_where_gradients_are_those_of_texts_alone(kind):
    row = measure(kind)
    if row is None or not row.isolation.proven:
        pytest.skip(f"{kind}: {'no default config' if row is None else row.isolation.reason}")
    assert row.agrees, row.line()
    if kind in LEAKED:
        assert row.isolation.why_not_packed(row.kernel) is not None
