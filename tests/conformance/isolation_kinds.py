"""Every kind of AutoModelForCausalLM of the installed transformers, small: what the test of the property says of packing, and
what a reference that shares no code with it says. As a program: a table of all, or of the kinds that are named."""

from __future__ import annotations

import sys
import time
import warnings
from typing import NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from upshift.models.build import build_model, disable_cache
from upshift.models.isolation.check import measure_isolation
from upshift.models.isolation.small_copy import narrow_copies
from upshift.models.profile import Isolation

LENGTHS = (9, 25)
SAME = 1e-3


class Row(NamedTuple):
    """``difference``: of a packed row's gradient to that of its texts alone, relative; None: it takes no positions, or fails."""

    kind: str
    isolation: Isolation
    kernel: str
    difference: float | None
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether the reference sees what the test saw."""
        if self.difference is None:
            return self.isolation.why_not_packed(self.kernel) is not None
        return (self.isolation.why_not_packed(self.kernel) is None) == (self.difference < SAME)

    def line(self) -> str:
        packing = self.isolation.why_not_packed(self.kernel) or "isolated"
        difference = "-" if self.difference is None else f"{self.difference:.1e}"
        agrees = "agrees" if self.agrees else "DIFFERS"
        return f"{self.kind:28s} {self.seconds:5.1f} s  {self.kernel:5s} {difference:>8s} {agrees:8s} {packing[:90]}"


def kinds() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def measure(kind: str, config: PretrainedConfig | None = None) -> Row | None:
    """Return the row of a kind, or None where transformers' own default makes no config or class."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    start = time.process_time()
    try:
        config = transformers.CONFIG_MAPPING[kind]() if config is None else config
        model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    except Exception:  # a default that its own class refuses, in any way
        return None
    isolation = measure_isolation(config, model_class, "causal-lm")
    kernel = "sdpa" if isolation.packing.get("sdpa") is not None else "eager"
    difference = _difference(config, model_class, kernel) if isolation.proven else None
    return Row(kind, isolation, kernel, difference, time.process_time() - start)


def _difference(config: PretrainedConfig, model_class: type[PreTrainedModel], kernel: str) -> float | None:
    """By gradients of all weights in fp32, with weights as the class draws them, but larger."""
    copy = next(narrow_copies(config, model_class))
    torch.manual_seed(1)
    model = build_model(copy, model_class, dtype=torch.float32).eval()
    disable_cache(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    if "position_ids" not in model_class.forward.__code__.co_varnames and not hasattr(model_class.forward, "__wrapped__"):
        return None
    model.set_attn_implementation(kernel)
    low, high = 10, model.config.get_text_config().vocab_size
    texts = [torch.randint(low, high, (1, length)) for length in LENGTHS]
    labels = [text.clone() for text in texts]
    for label in labels:
        label[:, 0] = -100
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    try:
        packed = _gradient(model, [(torch.cat(texts, 1), torch.cat(labels, 1), {"position_ids": positions})])
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None
    alone = _gradient(model, [(text, label, {}) for text, label in zip(texts, labels, strict=True)])
    return float((packed - alone).norm() / alone.norm())


def _gradient(
    model: PreTrainedModel, batches: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
) -> torch.Tensor:
    """Of the mean loss of all labels, over all weights."""
    counts = [int((labels[:, 1:] != -100).sum()) for _, labels, _ in batches]
    model.zero_grad()
    for (ids, labels, given), count in zip(batches, counts, strict=True):
        (model(input_ids=ids, labels=labels, **given).loss * (count / sum(counts))).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def main(named: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for kind in named or kinds():
        try:
            row = measure(kind)
        except Exception as error:  # the table goes on
            print(f"{kind:28s} {type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
            continue
        print(row.line() if row else f"{kind:28s} transformers' default makes no model", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
