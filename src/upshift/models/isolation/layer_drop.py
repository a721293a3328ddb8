# needs torch
"""Test whether a model leaves out whole layers at random in training (LayerDrop)."""

from __future__ import annotations

import inspect
import logging
from copy import deepcopy

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from upshift.internals.torch_names import FAKE_TENSOR_MODE
from upshift.models.build import build_model, cut_stacks, find_stacks, sample_inputs
from upshift.models.profile import Objective
from upshift.models.tracing.random_draws import KEEPS_LAYERS, SKIPS_LAYERS, lone_draws
from upshift.models.tracing.segments import fake_masks, materialize_on_cpu

WIDTH = 64  # tokens; some models pool tokens, and need several

logger = logging.getLogger(__name__)


def drops_layers(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Return whether other layers run if every lone random number is 0 than if it is 1. The model has no weights.

    It has one layer of a kind. Layers that a text never reaches, such as those for images, run in neither case. Return False for
    a model that does not run without weights. Such a model cannot be traced either.
    """
    try:
        with torch.device("meta"):
            model = build_model(deepcopy(config), model_class, dtype=torch.float32)  # cutting changes the config
        cut_stacks(model)
        fake = FAKE_TENSOR_MODE.get()()
        with fake:
            materialize_on_cpu(model)
        layers = [layer for _, stack in find_stacks(model) for layer in stack]
        layers_of_draw = []
        for draw in (KEEPS_LAYERS, SKIPS_LAYERS):
            with fake, torch.no_grad(), fake_masks(masked=False), lone_draws(draw):
                layers_of_draw.append(_layers_that_run(model, layers))
        return layers_of_draw[0] != layers_of_draw[1]
    except Exception as error:  # any operator may fail on tensors without values, in many ways
        logger.debug("%s does not run without weights: %s", model_class.__name__, error)
        return False


def _layers_that_run(model: PreTrainedModel, layers: list[nn.Module]) -> set[nn.Module]:
    """Return the layers that a forward pass in training mode calls."""
    called: set[nn.Module] = set()
    handles = [layer.register_forward_pre_hook(lambda module, args: called.add(module)) for layer in layers]
    objective: Objective = "image-classification" if model.main_input_name == "pixel_values" else "causal-lm"
    parameters = inspect.signature(model.forward).parameters
    inputs = sample_inputs(model, objective, batch=1, sequence=WIDTH, masked=False)
    del inputs["labels"]
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    model.train()(**inputs)
    for handle in handles:
        handle.remove()
    return called
