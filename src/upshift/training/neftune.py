"""Add noise to the input embeddings in training, as transformers.Trainer does (NEFTune, https://arxiv.org/abs/2310.05914).

The noise of a number is uniform within plus and minus alpha / sqrt(tokens of a row * hidden size). So it depends on how long rows
are: packed rows, and rows that ranks share, would have other noise than the Trainer's. Such plans are rejected.
"""

from __future__ import annotations

from torch import nn

from upshift.errors import RequestError
from upshift.internals.transformers_names import ACTIVATE_NEFTUNE
from upshift.planning.plan import Plan
from upshift.planning.search.space import fixed_value

WHOLE_ROWS = {"packing": False, "tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1}


def fixed_for_neftune(fixed: tuple[str, ...]) -> tuple[str, ...]:
    """Return assignments of ``--set`` under which every plan has the Trainer's noise.

    Raise RequestError if the user's own assignments allow no such plan.
    """
    user_values = dict(text.partition("=")[::2] for text in fixed)
    for name, value in WHOLE_ROWS.items():
        if fixed_value(fixed, name) not in (None, value):
            raise RequestError(
                f"--neftune-noise-alpha needs {name}={str(value).lower()}, and {name}={user_values[name]} is set: packed or "
                "divided rows have other noise than the Trainer's; leave one of the two out"
            )
    return (*fixed, *(f"{name}={str(value).lower()}" for name, value in WHOLE_ROWS.items() if name not in user_values))


def check_neftune(plan: Plan, alpha: float | None) -> None:
    """Raise RequestError if the noise would be another one than that of transformers.Trainer."""
    if alpha is None:
        return
    if plan.packing:
        raise RequestError(
            f"--neftune-noise-alpha {alpha:g} depends on the length of a row, and the plan packs several texts into one; use "
            "--set packing=false"
        )
    layout = plan.layout
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        degree = getattr(layout, name)
        if degree > 1:
            raise RequestError(
                f"--neftune-noise-alpha {alpha:g} needs the embeddings of a whole row on one rank, and {name}={degree} divides "
                f"the model or the row; use --{name.replace('_', '-')} 1"
            )


def add_embedding_noise(model: nn.Module, alpha: float | None) -> None:
    """Add noise to the input embeddings whenever the model is in training mode. None adds none."""
    if alpha is not None:
        ACTIVATE_NEFTUNE.get()(model, alpha)
