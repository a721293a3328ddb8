# needs torch
"""Find the weights that an answer of a model depends on, before any weight is read.

A pooler is not needed for the states of tokens, nor the mask vector of a speech model for its scores. So files may lack them.
The model runs once without values. If its code looks at values, as Longformer's does, it runs on zeros, and each weight is a
single zero that is repeated, so that the run needs no memory for weights.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.internals.torch_names import FAKE_TENSOR_MODE
from upshift.models.tracing.segments import fake_masks

Run = Callable[[nn.Module], Tensor]  # computes an answer from the model

logger = logging.getLogger(__name__)


def weights_used_by(model: PreTrainedModel, names: list[str], run: Run) -> list[str]:
    """Return those of the named weights of an empty model that the answer of ``run`` depends on.

    Buffers and frozen parameters count as used, because no gradient shows their use. Return all names if the model runs neither
    without values nor on zeros."""
    for find_connected in (_connected_without_values, _connected_on_zeros):
        try:
            connected = find_connected(model, run)
        except Exception as error:  # any operator may reject tensors without values, or zeros
            logger.debug("which weights %s depends on is not known: %s", type(model).__name__, error)
        else:
            trained = {name for name, weight in _parameters(model) if weight.requires_grad}
            return [name for name in names if name in connected or name not in trained]
    return names


def _connected_without_values(model: PreTrainedModel, run: Run) -> set[str]:
    """Return the names of the parameters that autograd connects to the answer, on the meta device."""
    # With a fake mode, a mask that the model makes itself is fake, and transformers does not read its values.
    with fake_masks(masked=False), FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True), torch.enable_grad():
        return _connected(model, run(model))


def _connected_on_zeros(model: PreTrainedModel, run: Run) -> set[str]:
    """Return the names of the parameters that autograd connects to the answer of a copy on the CPU.

    Zeros choose a way through the model. Other values may choose another expert or layer of the same kind, so a parameter whose
    name differs only in numbers from that of a connected one is connected, too."""
    zeros = _on_zeros(model)
    with torch.enable_grad():
        connected = _connected(zeros, run(zeros))
    kinds = {_kind(name) for name in connected}
    return {name for name, _ in _parameters(model) if _kind(name) in kinds}


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _connected(model: nn.Module, answer: Tensor) -> set[str]:
    """Return the names of the parameters that are leaves of the answer's graph of gradients."""
    names: dict[int, list[str]] = {}
    for name, weight in _parameters(model):
        names.setdefault(id(weight), []).append(name)
    connected: set[str] = set()
    nodes: list[Any] = [answer.grad_fn]
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        connected.update(names.get(id(getattr(node, "variable", None)), ()))
        above = {next_node for next_node, _ in getattr(node, "next_functions", ()) if next_node is not None} - seen
        seen |= above
        nodes += above
    return connected


def _on_zeros(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model on the CPU with real buffers. Each parameter is one zero, repeated to the parameter's shape."""
    with _parameters_on_meta():
        copied: PreTrainedModel = type(model)(copy.deepcopy(model.config)).eval()
    for module in copied.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
    return copied


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module registers on the meta device, while the context is open. Buffers get their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        on_meta = None if weight is None else nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
        register(module, name, on_meta)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield
