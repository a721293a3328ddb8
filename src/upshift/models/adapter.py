# needs torch
"""Put a peft adapter around a transformers model, get the model inside it, and freeze parameters that are not trained."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.errors import MissingExtra, RequestError
from upshift.models.build import build_model, choose_class, explain_build_errors
from upshift.models.quantized import check_quantization, four_bit_layers, keep_trainable, quantize
from upshift.models.source import ALL_LINEAR, HEADS_OF_TASK, TASK_OF_HEAD, AdapterOptions, ModelSource
from upshift.models.tracing.images import choose_image_class
from upshift.text import one_line

logger = logging.getLogger(__name__)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they have no forward pass of their own


def complete_model(model: PreTrainedModel, source: ModelSource) -> nn.Module:
    """Return ``model`` in training mode, with the source's adapter (with random weights) and its frozen parameters.

    The weights below an adapter are quantized if the config says so. Raise MissingExtra if the source has an adapter and peft
    is not installed.
    """
    if source.quantized_from is not None:
        if not getattr(model, "is_quantized", False):
            quantize(model, dtype=getattr(torch, source.quantized_from))
        keep_trainable(model)
    complete: nn.Module = model if source.adapter is None else _attach_adapter(model, source.adapter, source.adapter_name)
    if source.frozen is not None:
        freeze_parameters(complete, source.frozen)
    return complete.train()


def adapter_beside_images(source: ModelSource, model: Any) -> ModelSource:
    """Return the source with LoRA in the linear layers of the language model alone, if the user named no modules."""
    if source.adapter is None:
        return source
    decoder = model.get_decoder() if "text_config" in source.config else model
    if source.adapter.get("target_modules") != ALL_LINEAR or decoder is None or decoder is model:
        return source
    inside = {id(module) for module in decoder.modules()}
    head = model.get_output_embeddings()
    names = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and module is not head
    ]
    return source.changed(adapter=source.adapter | {"target_modules": names})


def _attach_adapter(model: PreTrainedModel, adapter: dict[str, Any], name: str) -> nn.Module:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError:
        raise MissingExtra(library="peft", extra="peft", purpose=f"a model with a {adapter['peft_type']} adapter") from None
    for path, _ in four_bit_layers(model):
        for saved in adapter.get("modules_to_save") or ():
            if any(_is_saved(parent, saved) for parent in _path_and_parents(path)):
                raise RequestError(
                    f"--lora-modules-to-save {saved}: {path} is stored in 4 bits, and such weights are never trained themselves; "
                    "leave it out, or train without --load-in-4bit"
                )
    adapter = _without_lora_in_head(adapter, [path for path, _ in model.named_modules()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about a property that transformers renamed, and about unknown layer types
        try:
            peft_model: nn.Module = get_peft_model(model, PeftConfig.from_peft_type(**adapter), adapter_name=name)
        except (ValueError, TypeError) as error:  # peft raises TypeError for a module that it cannot train whole
            reason = one_line(error, limit=None)
            option = "--lora-target; target_modules in peft"
            if isinstance(error, TypeError):
                option = "--lora-modules-to-save; modules_to_save in peft"
            raise RequestError(
                f"peft puts no such {adapter['peft_type']} adapter around {type(model).__name__}: {reason}; "
                f"name other modules ({option})"
            ) from None
    return peft_model


def _without_lora_in_head(adapter: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Return a peft config that names every module that peft trains whole for the adapter's task.

    peft puts no LoRA into the modules that the config names. Without these names it would put LoRA into the head, and could then
    not train the head whole. Some tasks add the head too late, and ``pre_classifier`` also ends in ``classifier``."""
    if not adapter.get("target_modules"):  # such as prefix tuning, which puts no layers into the model
        return adapter
    saved = adapter.get("modules_to_save") or []
    added = [name for name in _heads_trained_whole(adapter, paths) if name not in saved]
    return adapter | {"modules_to_save": [*saved, *added]} if added else adapter


def _heads_trained_whole(adapter: dict[str, Any], paths: list[str]) -> list[str]:
    """Return the paths of the modules that peft trains whole for the adapter's task, because their ends are names of heads."""
    names = HEADS_OF_TASK.get(adapter.get("task_type") or "", ())
    return [path for path in paths if any(_is_saved(path, name) for name in names)]


def _class_to_train(source: ModelSource) -> type[PreTrainedModel]:
    if source.images_per_row:
        return choose_image_class(source.hf_config, source.reference)
    return choose_class(source.hf_config, source.reference)[0]


def check_module_names(source: ModelSource, options: AdapterOptions) -> None:
    """Raise RequestError if the model lacks a module that the options name, or if peft has no adapter for one.

    Builds the model and its adapter on the meta device."""
    if not options.names_modules or source.adapter is None:
        return
    if "quantization_config" in source.config:
        check_quantization(source.config["quantization_config"], source.reference, adapter=True)
    config = source.hf_config
    model_class = _class_to_train(source)
    with explain_build_errors(repr(source.reference)), torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
        check_names_in(model, source, options)
        complete_model(model, source)


def check_names_in(model: PreTrainedModel, source: ModelSource, options: AdapterOptions) -> None:
    """Raise RequestError if a model lacks a module that the options name, or if peft trains it in another way than they say."""
    _check_names({path: module for path, module in model.named_modules(remove_duplicate=False) if path}, source, options)
    _warn_of_tied_copies(model, options)


def train_head_whole(adapter: dict[str, Any], model: PreTrainedModel, new_weights: Collection[str]) -> dict[str, Any]:
    """Return a peft config that also trains, and saves, the modules of a head that the model's files lack.

    ``new_weights``: the names of the weights of that head, which are random. Raise RequestError if peft cannot train them."""
    modules = _modules_of(model, new_weights)
    saved = {*modules, *(adapter.get("modules_to_save") or ())}
    task = next((task for suffix, task in TASK_OF_HEAD.items() if type(model).__name__.endswith(suffix)), None)
    return adapter | {"modules_to_save": sorted(saved), "task_type": task}


def _modules_of(model: PreTrainedModel, weights: Collection[str]) -> list[str]:
    """Return the paths of the largest modules whose parameters are all among the named weights.

    Raise RequestError if a named weight is in no such module. Raise it also if peft would train other modules, too, because it
    compares the ends of paths."""
    paths: list[str] = []
    others: list[str] = []
    for path, module in model.named_modules():
        names = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if not path or any(path.startswith(f"{parent}.") for parent in paths):
            continue
        if names and names <= set(weights) and not isinstance(module, CONTAINERS):
            paths.append(path)
        else:
            others.append(path)
    alone = next((name for name in weights if not any(name.startswith(f"{path}.") for path in paths)), None)
    also = next((path for path in others if any(_is_saved(path, name) for name in paths)), None)
    if alone is not None or also is not None:
        reason = f"{alone} is in no module of its own" if also is None else f"{also} would be trained whole, too"
        raise RequestError(
            f"peft cannot train the new head of {type(model).__name__} beside LoRA: {reason}; train the whole model: leave "
            "--lora-rank out"
        )
    return paths


def _check_names(modules: dict[str, nn.Module], source: ModelSource, options: AdapterOptions) -> None:
    """Raise RequestError if an option names no module, or modules that peft trains in another way than the option says."""
    paths = list(modules)
    targets = _target_names(paths, source, options)
    for option, names in (("--lora-target", targets), ("--lora-modules-to-save", options.lora_modules_to_save)):
        for name in names:
            if not any(_has_name(path, name) for path in paths):
                raise RequestError(
                    f"{option} {name}: {source.base_reference!r} has no such module; it has {_list_names(modules)}"
                )
    for name in options.lora_modules_to_save:
        _check_saved(name, modules)
    for name in targets:
        _check_target(name, modules)
        _check_not_whole(name, paths, source.adapter or {}, options)


def _check_not_whole(target: str, paths: list[str], adapter: dict[str, Any], options: AdapterOptions) -> None:
    """Raise RequestError if a target is in a module that is trained whole: one that the user named, or the model's head."""
    inside = next((saved for saved in options.lora_modules_to_save if _is_inside(paths, target, saved)), None)
    if inside is not None:
        raise RequestError(
            f"--lora-target {target} is within --lora-modules-to-save {inside}, which is trained whole; leave out one"
        )
    heads = [*(adapter.get("modules_to_save") or ()), *_heads_trained_whole(adapter, paths)]
    head = next((name for name in heads if _is_inside(paths, target, name)), None)
    if head is not None:
        raise RequestError(
            f"--lora-target {target} is in the head {head}, which is trained whole beside LoRA; leave {target} out"
        )


def _target_names(paths: list[str], source: ModelSource, options: AdapterOptions) -> tuple[str, ...]:
    """Return the names of modules with LoRA: for a regular expression, the paths that it matches, as in peft.

    Raise RequestError if it matches none."""
    if options.target_pattern is None:
        return () if options.targets_all else options.lora_target
    matched = tuple(path for path in paths if re.fullmatch(options.target_pattern, path))
    if not matched:
        raise RequestError(
            f"--lora-target {options.target_pattern} matches the path of no module of {source.base_reference!r}; a path of it is "
            f"{max(paths, key=lambda path: path.count('.'))}"
        )
    return matched


def _check_target(name: str, modules: dict[str, nn.Module]) -> None:
    """Raise RequestError if a target has no weights of its own, so that peft has no adapter for it."""
    for path in (path for path in modules if _has_name(path, name)):
        module = modules[path]
        inside = next((child for child, other in modules.items() if child.startswith(f"{path}.") and _is_leaf(other)), None)
        if inside is not None and not any(True for _ in module.parameters(recurse=False)):
            raise RequestError(
                f"--lora-target {name}: {path} is a {type(module).__name__}, which only holds modules; name modules within it, "
                f"such as {inside.rpartition('.')[2]}"
            )


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module has weights and no modules."""
    return not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False))


def _check_saved(name: str, modules: dict[str, nn.Module]) -> None:
    """Raise RequestError if peft cannot train the modules of this name whole, or would train others, too."""
    named = [path for path in modules if _has_name(path, name)]
    for path in named:
        if isinstance(modules[path], CONTAINERS):
            inside = next((child for child in modules if child.startswith(f"{path}.")), None)
            advice = "leave it out" if inside is None else f"name modules within it, such as {inside}"
            raise RequestError(
                f"--lora-modules-to-save {name}: {path} is a {type(modules[path]).__name__}, which only holds modules; {advice}"
            )
    others = [path for path in modules if _is_saved(path, name) and path not in named]
    if others:
        longer = _longer_names(named, list(modules))
        advice = f"give {longer}" if longer is not None else f"name {others[0].rpartition('.')[2]}, too, or leave {name} out"
        raise RequestError(
            f"--lora-modules-to-save {name}: peft looks at the end of each path only, and would also train {others[0]}; {advice}"
        )


def _longer_names(named: list[str], paths: list[str]) -> str | None:
    """Return the shortest ends of these paths, with commas, by which peft saves these modules and no others; None: no ends do."""
    for length in range(2, max(path.count(".") for path in named) + 2):
        ends = sorted({".".join(path.split(".")[-length:]) for path in named})
        if [path for path in paths if any(_is_saved(path, end) for end in ends)] == named:
            return ",".join(ends)
    return None


def _warn_of_tied_copies(model: PreTrainedModel, options: AdapterOptions) -> None:
    """Log a warning for each weight that two modules share, and of which an option trains a copy."""
    for tied, name in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        copied = [
            path
            for path in (tied, name)
            if any(_is_saved(parent, saved) for parent in _path_and_parents(path) for saved in options.lora_modules_to_save)
        ]
        if copied:
            logger.warning(
                "%s and %s are one weight; --lora-modules-to-save trains a copy of %s, so they differ afterwards",
                tied,
                name,
                "each" if len(copied) == 2 else copied[0],
            )


def _has_name(path: str, name: str) -> bool:
    """Return whether a name means the module at this path, by peft's rule for targets: it is the whole path, or its end."""
    return path == name or path.endswith(f".{name}")


def _is_saved(path: str, name: str) -> bool:
    """Return whether peft trains the module at this path whole for a name in modules_to_save (peft.utils.other._set_trainable).

    The name need not begin after a dot: ``norm`` is also the end of ``input_layernorm``.
    """
    return path.endswith(name)


def _is_inside(paths: list[str], name: str, saved: str) -> bool:
    """Return whether every module of this name is a saved module, or within one."""
    named = [path for path in paths if _has_name(path, name)]
    return all(any(_is_saved(parent, saved) for parent in _path_and_parents(path)) for path in named)


def _list_names(modules: dict[str, nn.Module]) -> str:
    """Return the last names of all modules, without the numbers of layers and the names of their lists."""
    names = {path.rpartition(".")[2] for path, module in modules.items() if not isinstance(module, CONTAINERS)}
    return ", ".join(sorted(name for name in names if not name.isdecimal()))


def name_base(model: Any, source: ModelSource) -> None:
    """Set the model's name in the adapter's config: a hub id, or the directory as an absolute path."""
    name = source.base_reference
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(Path(name).resolve()) if Path(name).exists() else name


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a peft model. Return any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,return-value]


def planned_part(model: nn.Module) -> nn.Module:
    """Return the part of a trained model that plans are made for: the model itself, or the one transformers model that it holds.

    The part may have a peft adapter around it. Return a model that holds no transformers model, or several, unchanged."""
    parts = list(_transformers_parts(model))
    return parts[0] if len(parts) == 1 else model


def _transformers_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost transformers models, or peft models around them, in a model."""
    if isinstance(base_of(model), PreTrainedModel):
        yield model
        return
    for child in dict.fromkeys(model.children()):
        yield from _transformers_parts(child)


def freeze_parameters(model: nn.Module, frozen: tuple[str, ...]) -> None:
    """Freeze the parameters at or under one of these paths, and make all others trainable."""
    paths = set(frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(paths.isdisjoint(_path_and_parents(name)))


def frozen_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the fewest module and parameter paths that hold all frozen parameters and no trainable one."""
    trained: set[str] = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained.update(_path_and_parents(name))
    paths = [
        next(path for path in _path_and_parents(name) if path not in trained)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    return tuple(dict.fromkeys(paths))


def _path_and_parents(name: str) -> list[str]:
    """Return ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
