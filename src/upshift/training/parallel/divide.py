"""Cut a model down to one rank's part: apply the ways to share a model in order, before it is set up to run.

The model is divided by depth first, then within layers. Data-parallel ranks divide last of all (fully_shard.py), when layers
recompute and are compiled already (prepare.py).
"""

from __future__ import annotations

from torch import nn

from upshift.errors import RequestError
from upshift.training.parallel.experts import divide_experts
from upshift.training.parallel.place import Place
from upshift.training.parallel.refusals import cannot_run
from upshift.training.parallel.stage import modules_of, stage_of
from upshift.training.parallel.tensor import divide_tensors


def divide(model: nn.Module, place: Place) -> nn.Module:
    """Return this rank's part of ``model``, which every rank built alike. Raise RequestError if it cannot be shared so."""
    problem = cannot_run(place.plan, model)
    if problem is not None:
        raise RequestError(problem)
    model = stage_of(model, place)
    for module in modules_of(model):
        divide_tensors(module, place)
        divide_experts(module, place)
    return model
