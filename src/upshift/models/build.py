"""Builds the real, unmodified Hugging Face model from its config, and cuts its stacks of layers down to the few that differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import CLASS_NAMES, FROM_CONFIG
from upshift.models.profile import Objective
from upshift.models.source import ModelSource

# Which auto class serves which objective, in the order tried for a config that names no architecture.
OBJECTIVES: tuple[tuple[Objective, str], ...] = (
    ("seq2seq-lm", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("masked-lm", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("causal-lm", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("image-classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("sequence-classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("token-classification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("question-answering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
)


def read_config(source: ModelSource) -> PretrainedConfig:
    """The typed config. Raises RequestError for an architecture that this transformers does not know."""
    model_type = source.config["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise RequestError(
            f"model_type {model_type!r} of {source.reference!r} is unknown to transformers {transformers.__version__}; "
            "use a model that it supports, or upgrade transformers"
        )
    try:
        return transformers.CONFIG_MAPPING[model_type].from_dict(dict(source.config))
    except Exception as error:  # each config class raises its own kinds; every one means: this file is not usable
        raise RequestError(f"the config of {source.reference!r} is not valid for {model_type}: {_one_line(error)}") from error


def named_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The first that the config names and transformers has."""
    name = next((name for name in config.architectures or () if hasattr(transformers, name)), None)
    return None if name is None else getattr(transformers, name)


def choose_class(config: PretrainedConfig, reference: str) -> tuple[type[PreTrainedModel], Objective]:
    """The class that trains: the one the config names, else the first auto mapping that knows the config."""
    tables = {objective: getattr(CLASS_NAMES.get(), name) for objective, name in OBJECTIVES}
    for name in config.architectures or ():
        if name in CLASS_NAMES.get().MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values():
            raise RequestError(
                f"{reference!r} ({name}) takes several rows for each example, and how many its config does not say; "
                "Upshift plans for one row an example"
            )
        for objective, table in tables.items():
            if name in table.values() and hasattr(transformers, name):
                return getattr(transformers, name), objective
    for objective, table in tables.items():
        fits = config.is_encoder_decoder == (objective == "seq2seq-lm") or objective in ("sequence-classification",)
        decoder = objective == "masked-lm" and getattr(config, "is_decoder", False)
        if fits and not decoder and config.model_type in table:
            return getattr(transformers, table[config.model_type]), objective
    named = ", ".join(config.architectures or ()) or config.model_type
    placed = "" if named_class(config) is None else f"; upshift inspect {reference} --placement says what of it goes where"
    raise RequestError(
        f"{reference!r} ({named}) has no class with a loss that Upshift trains; the kinds are "
        + ", ".join(objective for objective, _ in OBJECTIVES)
        + placed
    )


@contextmanager
def building(what: str) -> Iterator[None]:
    """Raises RequestError for a config of which its class makes no model."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # model and adapter classes raise their own kinds; every one means: no model of this config
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise RequestError(f"{what} cannot be built from its config: {reason}; check the config's sizes") from error


def build_model(config: PretrainedConfig, model_class: type[PreTrainedModel], *, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights in ``dtype``, training mode. Under FakeTensorMode no memory is used."""
    model: PreTrainedModel = FROM_CONFIG.of(model_class)(config, dtype=dtype)
    return model.train()


@dataclass(frozen=True)
class LayerStack:
    """A ModuleList of the model: where it stands, which original layers were kept, and which kept one stands for each."""

    path: str
    kept: tuple[int, ...]
    assignment: tuple[int, ...]
    layer_trainable: tuple[int, ...]


def find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The outermost ModuleLists with at least two layers that hold parameters, in the order the model lists them. One that says
    that it ``is_stack``, as a part of one, may have one layer."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(outer + ".") for outer, _ in found)
        if not isinstance(module, nn.ModuleList) or inside:
            continue
        enough = len(module) > 1 or getattr(module, "is_stack", False)
        if enough and all(_is_layer(child) for child in module):
            found.append((path, module))
    return found


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def cut_stacks(model: nn.Module) -> list[LayerStack]:
    """Keep of every stack the first layer, one inner layer of each kind, and the last; drop the rest from ``model``."""
    stacks = []
    for path, layers in find_stacks(model):
        kinds = _kinds(layers)
        last = len(layers) - 1
        inner = {kind: kinds.index(kind, 1) for kind in dict.fromkeys(kinds[1:last])}
        kept = tuple(sorted({0, last, *inner.values()}))
        stands_for = [0, *(inner[kind] for kind in kinds[1:last]), last]
        stacks.append(
            LayerStack(
                path=path,
                kept=kept,
                assignment=tuple(kept.index(index) for index in stands_for),
                layer_trainable=tuple(_num_trainable(layers[index]) for index in kept),
            )
        )
        _keep_layers(model, path, layers, kept)
    return stacks


def _kinds(layers: nn.ModuleList) -> list[str]:
    """Below the first layer that trains there is no backward pass, and that one has no gradient to hand on."""
    trains = [_num_trainable(layer) > 0 for layer in layers]
    first = trains.index(True) if any(trains) else len(trains)
    places = ["below" if number < first else "first" if number == first else "above" for number in range(len(layers))]
    return [f"{place} {layer_kind(layer)}" for place, layer in zip(places, layers, strict=True)]


def _num_trainable(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def layer_kind(layer: nn.Module) -> str:
    """Two layers with the same kind do the same work: same modules, shapes and plain attributes (but for their number)."""
    plain = (bool, int, float, str, type(None))
    described = []
    for name, module in layer.named_modules():
        attributes = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, plain) and not key.startswith("_") and key not in ("layer_idx", "layer_id", "layer_number")
        }
        shapes = [(tuple(parameter.shape), parameter.requires_grad) for parameter in module.parameters(recurse=False)]
        described.append(f"{name} {type(module).__name__} {shapes} {sorted(attributes.items())}")
    return "\n".join(described)


def _keep_layers(model: nn.Module, path: str, layers: nn.ModuleList, kept: tuple[int, ...]) -> None:
    length = len(layers)
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    chosen = [layers[index] for index in kept]
    setattr(parent, name, nn.ModuleList(chosen))
    configs = {id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PretrainedConfig)}
    for config in configs.values():
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == length:  # e.g. layer_types, one entry a layer
                config.__dict__[key] = [value[index] for index in kept]
    for new_index, layer in enumerate(chosen):  # caches are addressed by layer number
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new_index  # type: ignore[assignment]


def sample_inputs(model: PreTrainedModel, objective: Objective, *, batch: int, sequence: int, masked: bool) -> dict[str, Any]:
    """Inputs with labels for one training step, of the shapes and dtypes a real batch has."""
    config = model.config
    if objective == "image-classification":
        seen = getattr(config, "vision_config", config)  # of a model that has a part for text, too
        size = seen.image_size if isinstance(seen.image_size, (list, tuple)) else (seen.image_size, seen.image_size)
        pixels = torch.zeros((batch, seen.num_channels, *size), dtype=model.dtype)
        return {"pixel_values": pixels, "labels": _class_labels(config, batch)}
    ids = torch.zeros((batch, sequence), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids}
    if objective == "sequence-classification":
        inputs["labels"] = _class_labels(config, batch)
    elif objective == "question-answering":
        inputs |= {name: torch.zeros(batch, dtype=torch.long) for name in ("start_positions", "end_positions")}
    else:
        inputs["labels"] = torch.zeros_like(ids)
    if masked:
        inputs["attention_mask"] = torch.ones((batch, sequence), dtype=torch.long)
    return inputs


def _class_labels(config: PretrainedConfig, batch: int) -> torch.Tensor:
    """One class for each row, or what the config's problem_type (None: the number of labels) asks for."""
    num_labels, problem = config.num_labels, config.problem_type
    if problem == "multi_label_classification" or (problem == "regression" and num_labels > 1):
        return torch.zeros(batch, num_labels)
    return torch.zeros(batch, dtype=torch.float32 if problem == "regression" or num_labels == 1 else torch.long)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
