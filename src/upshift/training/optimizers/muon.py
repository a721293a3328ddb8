"""Combine Muon and fused AdamW into one optimizer with one state and one list of groups.

Muon updates the matrices of the layers. AdamW updates everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.models.build import find_stacks
from upshift.training.optimizers.closure import Closure, evaluate_closure


def split_for_muon(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group in two: the matrices of the layers that are no embeddings, for Muon, and the rest, for AdamW."""
    layers = [layer for _, stack in find_stacks(model) for layer in stack]
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden = {p for layer in layers for p in layer.parameters() if p.ndim == 2 and p not in tables}
    if not hidden.intersection(p for group in groups for p in group["params"]):
        raise RequestError("optim=muon needs trained matrices in the model's layers and found none; use adamw_torch_fused")
    split = []
    for group in groups:
        for muon in (True, False):
            split.append({**group, "params": [p for p in group["params"] if (p in hidden) == muon], "muon": muon})
    return split


class MuonWithAdamW(torch.optim.Optimizer):
    """Update each group by Muon or AdamW, as its option ``muon`` says.

    At the same learning rate both make updates of the same size: Muon's are scaled by 0.2 * sqrt(largest side), so AdamW's
    learning rate and weight decay apply. See Liu et al., Muon is Scalable for LLM Training, 2025, section 2.2.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        adam = self._groups(muon=False)
        muon = self._groups(muon=True)
        # Each optimizer writes its own options into the groups, which are the same objects as those of this optimizer.
        self._optimizers: dict[bool, torch.optim.Optimizer] = {
            True: torch.optim.Muon(muon, lr=lr, adjust_lr_fn="match_rms_adamw")
        }
        if adam:
            self._optimizers[False] = torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True)

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        for muon, optimizer in self._optimizers.items():
            optimizer.state = self.state
            optimizer.param_groups = self._groups(muon=muon)
            optimizer.step()
        return loss
