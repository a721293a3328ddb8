"""Read which losses of pairs a run adds up, with their weights, as ``--dpo-loss`` names them.

The names are those of TRL's ``loss_type``: of DPOConfig, and of the trainers without a reference model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from upshift.errors import RequestError

# Each with what it is, for error messages and the documentation.
OF_RATIOS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sigmoid": "DPO, arXiv:2305.18290",
        "sigmoid_norm": "DPO of ratios per token",
        "hinge": "SLiC-HF, arXiv:2305.10425",
        "ipo": "IPO, arXiv:2310.12036",
        "exo_pair": "EXO, arXiv:2402.00856",
        "nca_pair": "NCA, arXiv:2402.05369",
        "robust": "robust DPO, arXiv:2403.00409",
        "bco_pair": "BCO, arXiv:2404.04656",
        "sppo_hard": "SPPO, arXiv:2405.00675",
        "apo_zero": "APO-zero, arXiv:2408.06266",
        "apo_down": "APO-down, arXiv:2408.06266",
        "discopop": "DiscoPOP, arXiv:2406.08414",
    }
)
WITHOUT_REFERENCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "simpo": "SimPO, arXiv:2405.14734",
        "cpo": "CPO, arXiv:2401.08417",
        "orpo": "ORPO, arXiv:2403.07691",
    }
)
OF_TOKENS: Final = "sft"  # the usual loss of the chosen answers, beside another one
PER_TOKEN_REWARDS: Final = frozenset({"simpo", "orpo"})  # the rewards are means over tokens
SMOOTHED: Final = ("robust", "exo_pair", "simpo", "cpo")  # that use a label smoothing
WITH_TOKENS: Final = frozenset({OF_TOKENS, "cpo", "orpo"})  # that have the loss of the chosen answers' tokens in them
NAMES: Final = (*OF_RATIOS, *WITHOUT_REFERENCE, OF_TOKENS)
_SORTED: Final = ("aot", "aot_unpaired")  # TRL's other names


def read_losses(text: str) -> tuple[tuple[str, float], ...]:
    """Return the names and the weights in a text such as ``sigmoid=0.8,sft=0.2``, in the order of the text.

    A name without a weight has weight 1. Raise RequestError for an unknown name, one that stands twice, or a bad weight.
    """
    losses: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = (word.strip() for word in part.partition("="))
        _check_name(name, text)
        if name in losses:
            raise RequestError(f"--dpo-loss {text} names {name} twice; give it once, with the sum of its weights")
        losses[name] = _read_weight(weight, text) if equals else 1.0
    return tuple(losses.items())


def write_losses(losses: tuple[tuple[str, float], ...]) -> str:
    """Return the text that ``read_losses`` reads: the same one for every order of the names."""
    return ",".join(name if weight == 1 else f"{name}={weight!r}" for name, weight in sorted(losses))


def needs_reference(names: frozenset[str]) -> bool:
    """Return whether the losses, or the rewards beside them, need the log-probabilities of the model before the training."""
    compared = names - {OF_TOKENS}
    return not compared or bool(compared - set(WITHOUT_REFERENCE))


def check_smoothing(names: frozenset[str], smoothing: float) -> None:
    """Raise RequestError if no loss uses the label smoothing, or if one of them cannot be computed with it."""
    if smoothing and not names & {*SMOOTHED}:
        raise RequestError(
            f"--dpo-label-smoothing {smoothing:g} is not used by --dpo-loss {','.join(sorted(names))}; leave it out, or use "
            f"one of {', '.join(SMOOTHED)}"
        )
    if "exo_pair" in names and not smoothing:
        raise RequestError("--dpo-loss exo_pair needs a label smoothing above 0; add --dpo-label-smoothing 0.001")
    if "robust" in names and smoothing >= 0.5:
        raise RequestError(
            f"--dpo-label-smoothing {smoothing:g} is too large for --dpo-loss robust: it is the share of wrong pairs; give one "
            "below 0.5"
        )


def _check_name(name: str, text: str) -> None:
    if name in NAMES:
        return
    if name in _SORTED:
        raise RequestError(
            f"--dpo-loss {name} is not supported: it sorts the pairs of a micro-batch by their rewards, so the result depends "
            f"on the micro-batch size, which the plan chooses; use one of {', '.join(NAMES)}, or upshift.trl.DPOTrainer"
        )
    what = f"{name} of --dpo-loss {text}" if name and name != text else f"--dpo-loss {text!r}"
    raise RequestError(f"{what} is unknown; use one of {', '.join(NAMES)}, or several such as sigmoid=0.8,sft=0.2")


def _read_weight(text: str, whole: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise RequestError(f"weight {text!r} in --dpo-loss {whole} is not a number above 0; give such as sigmoid=0.8,sft=0.2")
    return weight
