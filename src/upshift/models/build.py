"""Find a model's class and objective from its config, build it unmodified, and cut its stacks to the few layers that differ."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upshift.errors import RequestError
from upshift.internals.transformers_names import CLASS_NAMES, FROM_CONFIG, WHOLE_MODULES
from upshift.models.hf_config import one_line
from upshift.models.profile import Objective

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Architecture:
    """A model's class and objective. ``objective``: what its loss trains; None if Upshift trains no model of this class."""

    model_class: type[PreTrainedModel]
    objective: Objective | None


def find_architecture(config: PretrainedConfig, reference: str) -> Architecture:
    """Return the class that a model's config names, and its objective. Every command asks this function, and no other.

    A config without ``architectures`` is taken for the first class of OBJECTIVES that transformers has for its model_type,
    else for the class without a head. The log says so once. Raise RequestError for a class that transformers does not have, or
    that is not of the config's model_type."""
    names = tuple(config.architectures or ()) or _classes_beside_weights(config)
    if names:
        model_class = _class_named(names[0], config, reference)
        return Architecture(model_class, _objective_of(model_class.__name__, config))
    assumed = _assumed(config)
    if assumed is None:
        raise RequestError(
            f"the config of {reference!r} names no class (architectures), and transformers has none for "
            f"{config.model_type!r} that Upshift uses; write the class's name into its config.json"
        )
    _say_once(
        f"the config of {reference!r} names no class; it is taken for {assumed.model_class.__name__}. If that is wrong, write "
        f'"architectures": ["..."] into its config.json'
    )
    return assumed


def choose_class(config: PretrainedConfig, reference: str) -> tuple[type[PreTrainedModel], Objective]:
    """Return the model's class and what it trains on. Raise RequestError if the class has no loss that Upshift trains."""
    found = find_architecture(config, reference)
    if found.objective is not None:
        return found.model_class, found.objective
    name = found.model_class.__name__
    if name in _names_of("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"):
        raise RequestError(
            f"{reference!r} ({name}) takes several rows for each example, and how many its config does not say; "
            "Upshift plans for one row an example"
        )
    kinds = ", ".join(objective for objective, _ in OBJECTIVES)
    raise RequestError(
        f"{reference!r} ({name}) has no loss that Upshift trains; the kinds are {kinds}{_instead(config)}; "
        f"upshift inspect {reference} --placement says what of it goes where"
    )


def _instead(config: PretrainedConfig) -> str:
    """Name the classes of this model_type that are trained, and how to get their weights."""
    others = [kind.__name__ for kind, _ in _candidates(config)]
    if not others:
        return ""
    return (
        f"; of {config.model_type} they are {', '.join(dict.fromkeys(others))}: load one of them with transformers, which makes "
        "the weights that these files lack, save it, and give that"
    )


def encoder_class(config: PretrainedConfig, reference: str) -> type[PreTrainedModel]:
    """Return the class whose outputs are the states of a text's tokens: the model inside the one that the config names."""
    named = find_architecture(config, reference).model_class
    with building(named.__name__), torch.device("meta"):
        model = named(copy.deepcopy(config))
    return cast("type[PreTrainedModel]", type(model.base_model))  # transformers says no more than that it is a Module


def _classes_beside_weights(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the model classes that ``auto_map`` finds in code beside the weights."""
    entries = getattr(config, "auto_map", None) or {}
    models = [value for name, value in entries.items() if name.startswith("AutoModel") and isinstance(value, str)]
    return tuple(value.rpartition(".")[2] for value in models)


def _class_named(name: str, config: PretrainedConfig, reference: str) -> type[PreTrainedModel]:
    found = getattr(transformers, name, None)
    if not isinstance(found, type):
        where = (
            "is Python code beside the weights, which Upshift does not run"
            if getattr(config, "auto_map", None)
            else (f"is not in transformers {transformers.__version__}")
        )
        raise RequestError(f"{reference!r} is a {name}, which {where}{_replacement(config)}")
    if not issubclass(found, PreTrainedModel):  # stands for a class whose libraries are not installed
        raise RequestError(f"{reference!r} is a {name}, which transformers builds with libraries that are not installed")
    if not _goes_with(found, config):
        raise RequestError(
            f"the config of {reference!r} says model_type {config.model_type!r} and architectures {name!r}, which is of another "
            f"model_type; correct one of them in its config.json{_replacement(config)}"
        )
    return found


def _replacement(config: PretrainedConfig) -> str:
    others = list(dict.fromkeys(kind.__name__ for kind, _ in _candidates(config)))
    if not others:
        return "; use a model whose code is in transformers"
    return f"; of {config.model_type} transformers has {', '.join(others)}: if the weights are one's, name it in architectures"


def _goes_with(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Return whether a class is made for this config, and not for a part of it."""
    made_for = getattr(model_class, "config_class", None)
    if made_for is None:
        return True
    if isinstance(config, made_for):
        return True
    parts = tuple(getattr(config, "sub_configs", {}).values())
    tables = (name for name in vars(CLASS_NAMES.get()) if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_"))
    listed = any(model_class.__name__ in _names_of(table, config.model_type) for table in tables)
    return listed and made_for not in parts


def _objective_of(name: str, config: PretrainedConfig) -> Objective | None:
    fitting = [objective for objective, table in OBJECTIVES if name in _names_of(table)]
    if "seq2seq-lm" in fitting and not config.is_encoder_decoder:
        fitting = [objective for objective in fitting if objective != "seq2seq-lm"] or fitting
    return fitting[0] if fitting else None


def _assumed(config: PretrainedConfig) -> Architecture | None:
    for model_class, objective in _candidates(config):
        fits = config.is_encoder_decoder == (objective == "seq2seq-lm") or objective == "sequence-classification"
        decoder = objective == "masked-lm" and getattr(config, "is_decoder", False)
        parts = objective == "image-classification" and hasattr(config, "text_config")  # of a model of texts and images
        if fits and not decoder and not parts:
            return Architecture(model_class, objective)
    for name in _names_of("MODEL_MAPPING_NAMES", config.model_type):
        candidate = getattr(transformers, name, None)
        if isinstance(candidate, type) and issubclass(candidate, PreTrainedModel) and _goes_with(candidate, config):
            return Architecture(candidate, None)
    return None


def _candidates(config: PretrainedConfig) -> Iterator[tuple[type[PreTrainedModel], Objective]]:
    """Yield the classes that transformers has for this model_type, in the order of OBJECTIVES."""
    for objective, table in OBJECTIVES:
        for name in _names_of(table, config.model_type):
            model_class = getattr(transformers, name, None)
            if not isinstance(model_class, type) or not issubclass(model_class, PreTrainedModel):
                continue
            if _goes_with(model_class, config):
                yield model_class, objective


@cache
def _names_of(table: str, model_type: str | None = None) -> frozenset[str] | tuple[str, ...]:
    """Return the classes of one of transformers' tables, of one model_type or of all."""
    entries = getattr(CLASS_NAMES.get(), table)
    if model_type is not None:
        found = entries.get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)
    return frozenset(name for found in entries.values() for name in ((found,) if isinstance(found, str) else found))


@cache
def _say_once(text: str) -> None:
    logger.warning(text)


@contextmanager
def building(what: str) -> Iterator[None]:
    """Raise RequestError if an error in the context shows that a class makes no model of its config."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # model and adapter classes raise their own kinds; every one means: no model of this config
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise RequestError(f"{what} cannot be built from its config: {reason}; check the config's sizes") from error


def build_model(config: PretrainedConfig, model_class: type[PreTrainedModel], *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights in ``dtype``, in training mode. Under FakeTensorMode no memory is used."""
    model: PreTrainedModel = FROM_CONFIG.of(model_class)(config, dtype=dtype)
    model.train()
    return model


def check_depth(config: PretrainedConfig, reference: str) -> None:
    """Raise RequestError for a config of a model without layers, which its class builds without a word."""
    names = ["num_hidden_layers"]
    if config.is_encoder_decoder:
        names += ["encoder_layers", "decoder_layers", "num_decoder_layers"]
    for part in (config, config.get_text_config()):
        for name in names:
            if getattr(part, name, None) == 0:
                raise RequestError(f"the config of {reference!r} says {name}=0, a model without layers; give 1 or more")


def encoder_of(model: PreTrainedModel) -> Any:
    """Return the module that gives the states of a text's tokens: the encoder of an encoder-decoder, because its decoder's states
    are those of another text; else the model. Raise RequestError for an encoder-decoder that names no encoder."""
    encoder = model.get_encoder()
    if encoder is not model and (model.config.is_encoder_decoder or isinstance(encoder, PreTrainedModel)):
        return encoder
    if model.config.is_encoder_decoder:
        raise RequestError(
            f"{type(model).__name__} has an encoder and a decoder, and does not say which of its parts encodes; "
            "give a model whose class has get_encoder()"
        )
    return model


def forget_cache(model: nn.Module) -> list[PretrainedConfig]:
    """Tell every config of the model to keep no keys and values, and return the configs that did.

    A class may read this setting from its config alone. With a cache, transformers looks for no texts that share a row."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    return caching


@dataclass(frozen=True)
class LayerStack:
    """A ModuleList of the model: its path, the original layers that were kept, and which kept layer stands for each."""

    path: str
    kept: tuple[int, ...]
    assignment: tuple[int, ...]
    layer_trainable: tuple[int, ...]


def find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the outermost ModuleLists of layers that hold parameters, in the order the model lists them.

    A list of one is a stack if transformers declares its module a layer, or if the list says that it ``is_stack``, as a part
    of one does."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(outer + ".") for outer, _ in found)
        if not isinstance(module, nn.ModuleList) or inside:
            continue
        enough = len(module) > 1 or getattr(module, "is_stack", False) or _is_declared(model, module)
        if enough and all(_is_layer(child) for child in module):
            found.append((path, module))
    return found


def _is_declared(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether a list holds a module that transformers can recompute or must not split: a layer."""
    names = WHOLE_MODULES.read(model) or ()
    return any(isinstance(layer, GradientCheckpointingLayer) or type(layer).__name__ in names for layer in layers)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module computes and holds parameters. A list only holds modules."""
    if isinstance(module, nn.ModuleList):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def cut_stacks(model: nn.Module) -> list[LayerStack]:
    """Keep of every stack the first layer, one inner layer of each kind, and the last; drop the rest from ``model``."""
    stacks = []
    for path, layers in find_stacks(model):
        kinds = _kinds(layers)
        last = len(layers) - 1
        inner = {kind: kinds.index(kind, 1) for kind in dict.fromkeys(kinds[1:last])}
        kept = tuple(sorted({0, last, *inner.values()}))
        stands_for = [0, *(inner[kind] for kind in kinds[1:last]), last][: len(layers)]
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
    """Return each layer's kind and its place relative to the first layer that trains.

    Below that layer there is no backward pass, and that layer has no gradient to hand on."""
    trains = [_num_trainable(layer) > 0 for layer in layers]
    first = trains.index(True) if any(trains) else len(trains)
    places = ["below" if number < first else "first" if number == first else "above" for number in range(len(layers))]
    return [f"{place} {layer_kind(layer)}" for place, layer in zip(places, layers, strict=True)]


def _num_trainable(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def layer_kind(layer: nn.Module) -> str:
    """Return a text that is equal for layers that do the same work: same modules, shapes and plain attributes but for their
    number."""
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
    """Return inputs with labels for one training step, with the shapes and dtypes of a real batch."""
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
    """Return one class for each row, or the labels that the config's problem_type needs (None: by the number of labels)."""
    num_labels = config.num_labels
    problem = config.problem_type
    assert num_labels is not None, "a classifier without labels is not built"
    if problem == "multi_label_classification" or (problem == "regression" and num_labels > 1):
        return torch.zeros(batch, num_labels)
    return torch.zeros(batch, dtype=torch.float32 if problem == "regression" or num_labels == 1 else torch.long)
