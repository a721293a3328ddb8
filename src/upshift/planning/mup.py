"""Support muP, with which learning rates of a narrow model hold for a wide one: read its base, and check the plan's other
choices.

Yang et al., Tensor Programs V, 2022 (arXiv:2203.03466), table 3: the form that needs no multiplier in the forward pass, so that
the trained model is a model like any other.
"""

from __future__ import annotations

from upshift.errors import RequestError
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import ALONE, Plan

ADAM = (None, "8bit-optimizer", "4bit-optimizer")  # the rule applies to the optimizers with these names for --allow


def read_base(text: str) -> dict[str, int]:
    """Return the fields of the config in which the base differs, from ``hidden_size=64,num_attention_heads=2``."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals and name and value.isdecimal() and int(value) > 0 for name, equals, value in pairs):
        raise RequestError(f"mup_base={text!r}: write the widths of the base, such as hidden_size=64,num_attention_heads=2")
    return {name: int(value) for name, _, value in pairs}


def base_text(fields: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


def conflict_with_mup(plan: Plan) -> str | None:
    """Return why muP cannot run with the plan's other choices, or None."""
    if optimizers()[plan.optim].allow not in ADAM:
        return f"muP's learning rates are those of AdamW's updates, not of optim={plan.optim}; use optim=adamw_torch_fused"
    if plan.layout != ALONE:
        return "muP compares whole parameters with its base's; ranks may have parts of the batch (--nproc), not of the model"
    return None
