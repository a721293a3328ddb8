# needs torch
"""Find a model's class and objective from its config, build the model, and cut its stacks to the layers that differ."""

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
from upshift.models.config import text_configs
from upshift.models.profile import Objective
from upshift.models.tasks import FEATURES, TASKS, TRAINED, ModelTask, find_task, names_in, tasks_of
from upshift.text import one_line

PLANNED_WITH_IMAGES = "; upshift plan --images 1 predicts other programs' runs of it"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """A model's class and its task, or None if transformers lists the class for no task."""

    model_class: type[PreTrainedModel]
    task: ModelTask | None

    @property
    def objective(self) -> Objective | None:
        """Return the loss that Upshift trains the model with, or None if it trains no model of this class."""
        return None if self.task is None else self.task.objective


def find_architecture(config: PretrainedConfig, reference: str) -> Architecture:
    """Return the class that a model's config names, and its task. Every command gets the class from this function.

    For a config without ``architectures``, assume the first class of TRAINED that transformers has for its model_type, else the
    class without a head, and log this once. Raise RequestError for a class that transformers does not have, or whose model_type
    is not the config's."""
    class_names = tuple(config.architectures or ()) or _remote_code_classes(config)
    if class_names:
        model_class = _find_class(class_names[0], config, reference)
        return Architecture(model_class, _task_of(model_class, config))
    assumed_architecture = _assume_architecture(config)
    if assumed_architecture is None:
        raise RequestError(
            f"the config of {reference!r} names no class (architectures), and transformers has none for "
            f"{config.model_type!r} that Upshift uses; write the class's name into its config.json"
        )
    name = assumed_architecture.model_class.__name__
    _warn_once(
        f"the config of {reference!r} names no class; it is taken for {name}. If that is wrong, write "
        f'"architectures": ["..."] into its config.json'
    )
    return assumed_architecture


def choose_class(config: PretrainedConfig, reference: str) -> tuple[type[PreTrainedModel], Objective]:
    """Return the model's class and objective. Raise RequestError if the class has no loss that Upshift trains."""
    architecture = find_architecture(config, reference)
    if architecture.objective is not None:
        return architecture.model_class, architecture.objective
    name = architecture.model_class.__name__
    if architecture.task is not None and architecture.task.name == "multiple-choice":
        raise RequestError(
            f"{reference!r} ({name}) takes several rows for each example, and how many its config does not say; "
            "Upshift plans for one row an example"
        )
    if architecture.task is not None and architecture.task.trained_on:
        raise RequestError(
            f"{reference!r} ({name}) works on {architecture.task.trained_on}, for which Upshift makes no plan before a run; "
            f"upshift train trains it without one, and upshift inspect {reference} --placement says what of it goes where"
            f"{PLANNED_WITH_IMAGES if architecture.task.name == 'image-text-to-text' else ''}"
        )
    objectives = ", ".join(dict.fromkeys(str(task.objective or task.name) for task in TASKS if task.objective or task.trained_on))
    raise RequestError(
        f"{reference!r} ({name}) has no loss that Upshift trains; the kinds are {objectives}{_trainable_alternatives(config)}; "
        f"upshift inspect {reference} --placement says what of it goes where"
    )


def has_own_loss(model: PreTrainedModel) -> bool:
    """Return whether a live model has a head with a loss that Upshift trains."""
    return Architecture(type(model), _task_of(type(model), model.config)).objective is not None


def choose_text_classifier(config: PretrainedConfig, reference: str, *, purpose: str) -> type[PreTrainedModel]:
    """Return the class that puts a head for labels of texts on a model. Raise RequestError if transformers has none.

    ``purpose`` says in the message what needs the head."""
    for model_class, task in _trainable_classes(config):
        if task.objective == "sequence-classification":
            return model_class
    raise RequestError(
        f"transformers has no classifier of texts for {reference!r} (model_type {config.model_type!r}), which {purpose} "
        "needs for its head; use another model"
    )


def name_padding(config: PretrainedConfig, pad_token_id: int | None = None) -> None:
    """Name the padding token in a model's config, in which classifiers of texts look for the end of a text.

    Without ``pad_token_id``, token 0 is named if the config names none. It is no text's last token in a trace or a test."""
    text_config = config.get_text_config()
    if pad_token_id is not None:
        text_config.pad_token_id = pad_token_id
    elif getattr(text_config, "pad_token_id", None) is None:
        text_config.pad_token_id = 0


def _trainable_alternatives(config: PretrainedConfig) -> str:
    """Return the end of a message: the classes of this model_type that Upshift trains, and how to get their weights."""
    class_names = ", ".join(dict.fromkeys(model_class.__name__ for model_class, _ in _trainable_classes(config)))
    if not class_names:
        return ""
    return (
        f"; of {config.model_type} they are {class_names}: load one of them with transformers, which makes the weights that "
        "these files lack, save it, and give that"
    )


def encoder_class(config: PretrainedConfig, reference: str) -> type[PreTrainedModel]:
    """Return the class without a head, which outputs the hidden states of a text's tokens."""
    model_class = find_architecture(config, reference).model_class
    with explain_build_errors(model_class.__name__), torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    return cast("type[PreTrainedModel]", type(model.base_model))  # transformers annotates it as a Module only


def _remote_code_classes(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of the model classes in Python code beside the weights, from ``auto_map``."""
    entries = getattr(config, "auto_map", None) or {}
    models = [value for name, value in entries.items() if name.startswith("AutoModel") and isinstance(value, str)]
    return tuple(value.rpartition(".")[2] for value in models)


def _find_class(name: str, config: PretrainedConfig, reference: str) -> type[PreTrainedModel]:
    model_class = getattr(transformers, name, None)
    if not isinstance(model_class, type):
        location = f"is not in transformers {transformers.__version__}"
        if getattr(config, "auto_map", None):
            location = "is Python code beside the weights, which Upshift does not run"
        raise RequestError(f"{reference!r} is a {name}, which {location}{_replacement_advice(config)}")
    if not issubclass(model_class, PreTrainedModel):  # a placeholder for a class whose libraries are not installed
        raise RequestError(f"{reference!r} is a {name}, which transformers builds with libraries that are not installed")
    if not _accepts_config(model_class, config):
        raise RequestError(
            f"the config of {reference!r} says model_type {config.model_type!r} and architectures {name!r}, which is of another "
            f"model_type; correct one of them in its config.json{_replacement_advice(config)}"
        )
    return model_class


def _replacement_advice(config: PretrainedConfig) -> str:
    class_names = list(dict.fromkeys(model_class.__name__ for model_class, _ in _trainable_classes(config)))
    if not class_names:
        return "; use a model whose code is in transformers"
    return (
        f"; of {config.model_type} transformers has {', '.join(class_names)}: if the weights are one's, name it in architectures"
    )


def _accepts_config(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Return whether a class is made for this config, and not for one of its sub-configs."""
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        return True
    if isinstance(config, config_class):
        return True
    sub_config_classes = tuple(getattr(config, "sub_configs", {}).values())
    mapping_names = (name for name in vars(CLASS_NAMES.get()) if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_"))
    is_listed = any(model_class.__name__ in names_in(table, config.model_type) for table in mapping_names)
    return is_listed and config_class not in sub_config_classes


def _task_of(model_class: type[PreTrainedModel], config: PretrainedConfig) -> ModelTask | None:
    return find_task(model_class.__name__, has_encoder=config.is_encoder_decoder)


def is_causal_class(model_class: type[PreTrainedModel]) -> bool:
    """Return whether transformers lists a class among its causal language models. Some are masked language models, too."""
    return any(task.objective == "causal-lm" for task in tasks_of(model_class.__name__))


def _assume_architecture(config: PretrainedConfig) -> Architecture | None:
    """Return the class to assume for a config that names none, or None if transformers has no such class."""
    for trainable, task in _trainable_classes(config):
        objective = task.objective
        fits_kind = config.is_encoder_decoder == (objective == "seq2seq-lm") or objective == "sequence-classification"
        is_decoder = objective == "masked-lm" and getattr(config, "is_decoder", False)
        has_text_part = objective == "image-classification" and hasattr(config, "text_config")  # of texts and images
        if fits_kind and not is_decoder and not has_text_part:
            return Architecture(trainable, task)
    model_class = next(find_classes(FEATURES, config), None)
    return None if model_class is None else Architecture(model_class, FEATURES)


def _trainable_classes(config: PretrainedConfig) -> Iterator[tuple[type[PreTrainedModel], ModelTask]]:
    """Yield the trainable classes that transformers has for this model_type, in the order of TASKS."""
    for task in TRAINED:
        for model_class in find_classes(task, config):
            yield model_class, task


def find_classes(task: ModelTask, config: PretrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Yield the classes that transformers lists for a task and this model_type, and that take its config."""
    for name in task.classes_of(config.model_type):
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel) and _accepts_config(model_class, config):
            yield model_class


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


@contextmanager
def explain_build_errors(subject: str) -> Iterator[None]:
    """Turn any error in the context into a RequestError that says that ``subject`` cannot be built from its config."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # model and adapter classes raise errors of many kinds
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise RequestError(f"{subject} cannot be built from its config: {reason}; check the config's sizes") from error


def build_model(config: PretrainedConfig, model_class: type[PreTrainedModel], *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights in ``dtype``, in training mode. It uses no memory under FakeTensorMode."""
    model: PreTrainedModel = FROM_CONFIG.of(model_class)(config, dtype=dtype)
    model.train()
    return model


def check_depth(config: PretrainedConfig, reference: str) -> None:
    """Raise RequestError for a config of a model without layers. Model classes build it without an error."""
    names = ["num_hidden_layers"]
    if config.is_encoder_decoder:
        names += ["encoder_layers", "decoder_layers", "num_decoder_layers"]
    for part_config in (config, *text_configs(config)):
        for name in names:
            if getattr(part_config, name, None) == 0:
                raise RequestError(f"the config of {reference!r} says {name}=0, a model without layers; give 1 or more")


def encoder_of(model: PreTrainedModel) -> Any:
    """Return the module that outputs the hidden states of a text: the encoder of an encoder-decoder, else the model.

    Raise RequestError for an encoder-decoder that names no encoder."""
    encoder = model.get_encoder()
    if encoder is not model and (model.config.is_encoder_decoder or isinstance(encoder, PreTrainedModel)):
        return encoder
    if model.config.is_encoder_decoder:
        raise RequestError(
            f"{type(model).__name__} has an encoder and a decoder, and does not say which of its parts encodes; "
            "give a model whose class has get_encoder()"
        )
    return model


def disable_cache(model: nn.Module) -> list[PretrainedConfig]:
    """Set ``use_cache=False`` in every config of the model, and return the configs that had it on.

    Some classes read this setting from their config only. With a cache, transformers does not look for packed rows."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    caching_configs = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching_configs:
        config.use_cache = False
    return caching_configs


@dataclass(frozen=True)
class LayerStack:
    """A ModuleList of layers that was cut to the layers that differ."""

    path: str
    traced_layers: tuple[int, ...]  # original indices of the layers that are left
    assignment: tuple[int, ...]  # for each original layer, the position in traced_layers of the layer that represents it
    layer_trainable: tuple[int, ...]  # trainable parameters of each traced layer
    layer_frozen: tuple[int, ...]  # frozen parameters of each traced layer


def find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the outermost ModuleLists of layers with parameters, in the order of the model's modules.

    A list whose modules run after some layers of a longer list, as the mergers of Qwen3-VL's tower do, is no stack. A list of one
    module is a stack only if transformers declares the module a layer, or if the list has ``is_stack`` set, because it is a part
    of a stack."""
    stacks: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        is_nested = any(path.startswith(outer + ".") for outer, _ in stacks)
        if not isinstance(module, nn.ModuleList) or is_nested or _runs_beside_layers(model, path, module):
            continue
        is_stack = len(module) > 1 or getattr(module, "is_stack", False) or _is_declared(model, module)
        if is_stack and all(_is_layer(child) for child in module):
            stacks.append((path, module))
    return stacks


def _is_declared(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether a list holds a module that transformers declares as a layer: it can recompute it, or must not split it."""
    names = WHOLE_MODULES.read(model) or ()
    return any(isinstance(layer, GradientCheckpointingLayer) or type(layer).__name__ in names for layer in layers)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module has submodules and parameters, and is not just a list of modules."""
    if isinstance(module, nn.ModuleList):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def cut_stacks(model: nn.Module) -> list[LayerStack]:
    """Cut every stack of ``model`` to its first layer, one inner layer of each kind, and its last layer."""
    stacks = []
    for path, layers in find_stacks(model):
        owner = model.get_submodule(path.rpartition(".")[0])
        numbered = _lists_of_layers(owner, len(layers))
        marks = [[index in numbers for numbers in numbered.values()] for index in range(len(layers))]
        kinds = [f"{kind} {mark}" for kind, mark in zip(_layer_kinds(layers), marks, strict=True)]
        last = len(layers) - 1
        index_of_kind = {kind: kinds.index(kind, 1) for kind in dict.fromkeys(kinds[1:last])}
        traced_layers = tuple(sorted({0, last, *index_of_kind.values()}))
        representatives = [0, *(index_of_kind[kind] for kind in kinds[1:last]), last][: len(layers)]
        stacks.append(
            LayerStack(
                path=path,
                traced_layers=traced_layers,
                assignment=tuple(traced_layers.index(index) for index in representatives),
                layer_trainable=tuple(_num_trainable(layers[index]) for index in traced_layers),
                layer_frozen=tuple(_num_frozen(layers[index]) for index in traced_layers),
            )
        )
        _keep_layers(model, path, layers, traced_layers)
        for name, numbers in numbered.items():
            setattr(owner, name, [traced_layers.index(index) for index in numbers if index in traced_layers])
    return stacks


def _runs_beside_layers(model: nn.Module, path: str, layers: nn.ModuleList) -> bool:
    """Return whether a list has one module for each of the layers that its owner lists by number."""
    owner = model.get_submodule(path.rpartition(".")[0])
    longest = max(len(child) for child in owner.children() if isinstance(child, nn.ModuleList))
    if len(layers) == longest:
        return False
    return any(len(numbers) == len(layers) for numbers in _lists_of_layers(owner, longest).values())


def _lists_of_layers(owner: nn.Module, num_layers: int) -> dict[str, list[int]]:
    """Return the attributes of a stack's owner that list some of its layers by number, which do other work than the rest."""
    lists = {name: list(value) for name, value in vars(owner).items() if isinstance(value, list | tuple) and value}
    return {
        name: numbers
        for name, numbers in lists.items()
        if all(type(number) is int and 0 <= number < num_layers for number in numbers) and len(set(numbers)) == len(numbers)
    }


def _layer_kinds(layers: nn.ModuleList) -> list[str]:
    """Return each layer's kind and its position relative to the first trainable layer.

    The layers below it have no backward pass, and it passes no gradient on to its inputs."""
    is_trainable = [_num_trainable(layer) > 0 for layer in layers]
    first_trainable = is_trainable.index(True) if any(is_trainable) else len(is_trainable)
    kinds = []
    for number, layer in enumerate(layers):
        position = "above"
        if number <= first_trainable:
            position = "first" if number == first_trainable else "below"
        kinds.append(f"{position} {layer_kind(layer)}")
    return kinds


def _num_trainable(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def _num_frozen(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters() if not parameter.requires_grad)


def layer_kind(layer: nn.Module) -> str:
    """Return a text that is equal for layers that do the same work.

    Their modules, shapes and plain attributes are the same, except for the layer's number."""
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


def _keep_layers(model: nn.Module, path: str, layers: nn.ModuleList, traced_layers: tuple[int, ...]) -> None:
    """Cut one stack, and the lists with one entry a layer in the model's configs, to these layers, and renumber the layers."""
    num_layers = len(layers)
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    layers_to_keep = [layers[index] for index in traced_layers]
    setattr(parent, name, nn.ModuleList(layers_to_keep))
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PretrainedConfig)}
    for config in configs.values():
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == num_layers:  # e.g. layer_types, one entry a layer
                config.__dict__[key] = [value[index] for index in traced_layers]
        _fix_computed_lists(config, num_layers, traced_layers)
    for new_index, layer in enumerate(layers_to_keep):  # caches are addressed by layer number
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new_index  # type: ignore[assignment]
    for module in {id(module): module for layer in layers_to_keep for module in layer.modules()}.values():  # some are shared
        _renumber_keys(module, num_layers, traced_layers)


def _fix_computed_lists(config: PretrainedConfig, num_layers: int, traced_layers: tuple[int, ...]) -> None:
    """Cut the lists with one entry a layer that the config's class computes from other fields, as Jamba's ``layer_types``."""
    own_classes = type(config).__mro__[: type(config).__mro__.index(PretrainedConfig)]
    names = {name for one in own_classes for name, value in vars(one).items() if isinstance(value, property)}
    computed = {name: _read_property(config, name) for name in names}
    lists = {name: value for name, value in computed.items() if isinstance(value, list) and len(value) == num_layers}
    if lists:
        cut = {name: [value[index] for index in traced_layers] for name, value in lists.items()}
        config.__class__ = type(type(config).__name__, (type(config),), cut)


def _read_property(config: PretrainedConfig, name: str) -> Any:
    """Return the value of a config's property, or None if it cannot be read: it is then no list that the model could use."""
    try:
        return getattr(config, name)
    except Exception:  # a config's own code may raise anything, and tracing does not need the value
        return None


def _renumber_keys(module: nn.Module, num_layers: int, traced_layers: tuple[int, ...]) -> None:
    """Renumber the keys of a module's dictionaries by layer number, as a block of Zamba2 has for the layers that share it."""
    for name, value in vars(module).items():
        is_by_layer = isinstance(value, dict) and not name.startswith("_") and value and all(type(key) is int for key in value)
        if is_by_layer and max(value) < num_layers:
            kept = {index: value[old] for index, old in enumerate(traced_layers) if old in value}
            module.__dict__[name] = kept


def sample_inputs(model: PreTrainedModel, objective: Objective, *, batch: int, sequence: int, masked: bool) -> dict[str, Any]:
    """Return inputs with labels for one training step, with the shapes and dtypes of a real batch."""
    config = model.config
    if objective == "image-classification":
        vision_config = getattr(config, "vision_config", config)  # present if the model also has a part for text
        size = vision_config.image_size
        if not isinstance(size, (list, tuple)):
            size = (size, size)
        pixels = torch.zeros((batch, vision_config.num_channels, *size), dtype=model.dtype)
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
    """Return one class label for each row, or labels as the config's problem_type needs them.

    Without a problem_type, one label means regression."""
    num_labels = config.num_labels
    problem = config.problem_type
    assert num_labels is not None, "a classifier without labels is not built"
    if problem == "multi_label_classification" or (problem == "regression" and num_labels > 1):
        return torch.zeros(batch, num_labels)
    return torch.zeros(batch, dtype=torch.float32 if problem == "regression" or num_labels == 1 else torch.long)
