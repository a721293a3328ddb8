# needs torch
"""Describe a live model by a ModelSource (class, config, adapter and frozen parameters), so that Upshift can plan for it.

To check the source, the model is built again from it on the meta device. Every module and parameter must be the same.
"""

from __future__ import annotations

import enum
import json
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import ADAPTER_LOADED
from upshift.models.adapter import base_of, complete_model, frozen_paths
from upshift.models.build import (
    build_model,
    choose_class,
    choose_text_classifier,
    explain_build_errors,
    find_stacks,
    has_own_loss,
    name_padding,
)
from upshift.models.quantized import check_quantization, four_bit_layers
from upshift.models.source import ADAPTER_HISTORY, ADAPTER_INITIAL, ONE_LABEL, BaseDtype, ModelSource, QuantizedFrom

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


def source_of(model: nn.Module, *, allows_other_forward: bool = False) -> ModelSource:
    """Return the source from which this model can be built again, with random weights.

    ``model`` is a transformers model, or a peft model around one. Raise RequestError with the reason for any other.
    ``allows_other_forward`` accepts a ``forward`` that a library or a script has replaced, a model without a loss, and an adapter
    of ``add_adapter``. The source then describes the layers of the model, and not what its forward returns: a model without a
    loss gets a small head.
    """
    base = _transformers_model(model)
    has_added_adapter = bool(ADAPTER_LOADED.read(base, False))
    if has_added_adapter and not allows_other_forward:
        raise RequestError(f"{type(base).__name__} has adapters added with add_adapter; wrap it with peft.get_peft_model instead")
    adapter, adapter_name = (None, "default") if model is base and not has_added_adapter else _adapter_of(model)
    _check_weights(model)
    dtype = next(parameter.dtype for parameter in base.parameters() if parameter.is_floating_point())
    base_dtype: BaseDtype = "bfloat16" if adapter is not None and dtype == torch.bfloat16 else "float32"
    source = ModelSource(
        reference=type(base).__name__,
        directory=None,
        config=_config_of(base),
        adapter=adapter,
        adapter_name=adapter_name,
        base_dtype=base_dtype,
        quantized_from=_quantized_from(base),
    )
    if has_added_adapter or allows_other_forward and not has_own_loss(base):
        return _source_of_layers(source, base, dtype=dtype)
    rebuilt = _rebuild_on_meta(source, type(base), dtype=dtype)
    _check_modules(model, rebuilt)
    if not allows_other_forward:
        _check_forwards(model)
    _check_parameters(model, rebuilt)
    if [p.requires_grad for p in model.parameters()] != [p.requires_grad for p in rebuilt.parameters()]:
        return source.changed(frozen=frozen_paths(model))
    return source


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    base = base_of(model)
    name = type(base).__name__
    if not isinstance(base, PreTrainedModel):
        raise RequestError(f"{name} is no transformers model; give a PreTrainedModel, or a peft model around one")
    if getattr(transformers, name, None) is not type(base):
        raise RequestError(f"{name} is defined outside transformers ({type(base).__module__}), so it cannot be built to plan")
    if getattr(base.config, "quantization_config", None) is not None:
        check_quantization(base.config.quantization_config, name, adapter=model is not base)
    return base


def _adapter_of(model: nn.Module) -> tuple[dict[str, Any], str]:
    """Return the peft config as plain JSON, and the adapter's name. Only peft's interface is needed, not peft itself."""
    configs: dict[str, Any] = model.peft_config  # type: ignore[assignment]
    active: Any = model.active_adapters
    active = active() if callable(active) else active  # a method of transformers, and a property of peft
    if len(configs) != 1 or list(configs) != list(active):
        raise RequestError(f"the model has adapters {sorted(configs)}, active {active}; plans are made for one that is active")
    ((name, config),) = configs.items()
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise RequestError(f"a {config.peft_type.value} adapter lengthens the sequence, which plans do not know; use LoRA")
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise RequestError("the adapter is merged into the weights; call unmerge_adapter() before training")
    settings = {key: value for key, value in config.to_dict().items() if key not in ADAPTER_HISTORY}
    if isinstance(settings.get(ADAPTER_INITIAL), str):
        settings[ADAPTER_INITIAL] = True
    return _plain_json(settings, f"the {config.peft_type.value} config"), name


def _quantized_from(base: PreTrainedModel) -> QuantizedFrom | None:
    dtypes = {str(module.weight.quant_state.dtype).removeprefix("torch.") for _, module in four_bit_layers(base)}
    if len(dtypes) > 1:
        raise RequestError(f"the 4-bit weights were made of {' and '.join(sorted(dtypes))}; load the model with one dtype")
    return cast("QuantizedFrom | None", next(iter(dtypes), None))  # bitsandbytes quantizes weights of these dtypes only


def _config_of(base: PreTrainedModel) -> dict[str, Any]:
    """Return the config as plain JSON that reads back the same. Raise RequestError if it does not."""
    config_classes = transformers.CONFIG_MAPPING
    model_type = base.config.model_type
    if model_type not in config_classes or config_classes[model_type] is not type(base.config):
        raise RequestError(f"the config class {type(base.config).__name__} is not transformers' own for {model_type!r}")
    config = _plain_json(base.config.to_dict(), f"the config of {type(base).__name__}")
    reread = _plain_json(config_classes[model_type].from_dict(dict(config)).to_dict(), "its copy")
    # Trainer sets use_cache on any config, and training never uses a cache.
    changed = sorted(key for key in (config.keys() | reread.keys()) - {"use_cache"} if config.get(key) != reread.get(key))
    if changed:
        raise RequestError(f"the config of {type(base).__name__} reads back with another {', '.join(changed)}")
    return {key: value for key, value in config.items() if key != "use_cache"} | {"architectures": [type(base).__name__]}


def _plain_json(document: dict[str, Any], subject: str) -> dict[str, Any]:
    def to_json(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        if isinstance(value, enum.Enum):
            return value.value
        raise TypeError(f"a {type(value).__name__}")

    try:
        plain: dict[str, Any] = json.loads(json.dumps(document, default=to_json))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{subject} cannot be written as JSON: it holds {error}") from None
    return plain


def _check_weights(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise RequestError("no parameter requires a gradient; unfreeze some, or load the adapter with is_trainable=True")
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1 or devices == ["meta"]:
        raise RequestError(f"the weights are on {' and '.join(devices)}; plans are made for a whole model on one device")
    dtypes = {parameter.dtype for parameter in parameters if not hasattr(parameter, "quant_state")}
    if not dtypes <= set(WEIGHT_DTYPES):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RequestError(f"the weights are {names}; load the model with dtype float32 or bfloat16")


def _source_of_layers(source: ModelSource, base: PreTrainedModel, *, dtype: torch.dtype) -> ModelSource:
    """Return the source of a model with the layers of ``base``. Without a loss of its own, it is a classifier of texts.

    Raise RequestError if transformers has no class with these layers."""
    model_class = type(base)
    if not has_own_loss(base):
        config = source.hf_config
        model_class = choose_text_classifier(config, source.reference, purpose="a plan for a loss of your own")
        name_padding(config)
        head = {"architectures": [model_class.__name__], **ONE_LABEL}
        source = source.changed(config=_plain_json(config.to_dict(), f"the config of {source.reference}") | head)
    rebuilt = _rebuild_on_meta(source, model_class, dtype=dtype)
    layers = cast("PreTrainedModel", base.base_model)
    rebuilt_layers = cast("PreTrainedModel", base_of(rebuilt).base_model)
    _check_layers(layers, rebuilt_layers)
    is_trained = {name: parameter.requires_grad for name, parameter in layers.named_parameters()}
    changed = [
        parameter.requires_grad_(is_trained[name])
        for name, parameter in rebuilt_layers.named_parameters()
        if is_trained.get(name, parameter.requires_grad) != parameter.requires_grad
    ]
    return source.changed(frozen=frozen_paths(rebuilt)) if changed else source


def _check_layers(layers: PreTrainedModel, rebuilt: PreTrainedModel) -> None:
    """Raise RequestError if the stacks of layers differ, or a weight that both models have.

    Outside its stacks, one of them may have a module that the other lacks, such as a pooler."""
    stacks = tuple(f"{path}." for each in (layers, rebuilt) for path, _ in find_stacks(each))

    def described(model: nn.Module) -> dict[str, Any]:
        modules = {path: _type_name(module) for path, module in model.named_modules() if path.startswith(stacks)}
        return modules | {name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()}

    actual = described(layers)
    expected = described(rebuilt)
    for name in {**expected, **actual}:
        is_in_both = name in actual and name in expected
        if actual.get(name) != expected.get(name) and (is_in_both or name.startswith(stacks)):
            raise RequestError(
                f"{name!r} of {type(layers).__name__} is {actual.get(name, 'missing')} where its config makes "
                f"{expected.get(name, 'none')}"
            )


def _rebuild_on_meta(source: ModelSource, model_class: type[PreTrainedModel], *, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device."""
    config = source.hf_config
    choose_class(config, source.reference)  # raises RequestError for a class without a loss that Upshift trains
    with explain_build_errors(source.reference), torch.device("meta"):
        return complete_model(build_model(config, model_class, dtype=dtype), source)


def _check_modules(model: nn.Module, rebuilt: nn.Module) -> None:
    """Raise RequestError for modules that were replaced or added, because a rebuilt model would run other code."""
    rebuilt_types = {path: _type_name(module) for path, module in rebuilt.named_modules()}
    model_types = {path: _type_name(module) for path, module in model.named_modules()}
    for path in {**rebuilt_types, **model_types}:
        actual = model_types.get(path, "missing")
        expected = rebuilt_types.get(path, "none")
        if rebuilt_types.get(path) != model_types.get(path):
            raise RequestError(f"module {path or 'the model'!r} is {actual} where its config makes {expected}")


def _check_forwards(model: nn.Module) -> None:
    """Raise RequestError for a module whose ``forward`` was replaced, because a rebuilt model would run other code."""
    for path, module in model.named_modules():
        if "forward" in vars(module):
            raise RequestError(f"the forward of {path or 'the model'!r} was replaced by another; plans know the class's own")


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _check_parameters(model: nn.Module, rebuilt: nn.Module) -> None:
    expected = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in rebuilt.named_parameters()}
    actual = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in model.named_parameters()}
    for name in {**expected, **actual}:
        if expected.get(name) != actual.get(name):
            raise RequestError(
                f"parameter {name!r} is {actual.get(name, 'missing')} where its config makes {expected.get(name, 'none')}"
            )
