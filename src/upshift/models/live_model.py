"""Write down a live model as a ModelSource: class, config, adapter and frozen parameters, so that it can be planned for.

The record is checked by building the model again from it, without memory: every module and parameter must come out the same.
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
from upshift.models.build import build_model, building, choose_class
from upshift.models.quantized import check_quantization, four_bit_layers
from upshift.models.source import ADAPTER_HISTORY, ADAPTER_INITIAL, BaseDtype, ModelSource, QuantizedFrom

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


def source_of(model: nn.Module) -> ModelSource:
    """Return the source that builds this model again, with random weights.

    ``model``: a class of transformers, or a peft model around one. Raise RequestError with the reason for any other.
    """
    base = _transformers_model(model)
    adapter, adapter_name = (None, "default") if model is base else _adapter_of(model)
    _check_weights(model)
    dtype = next(parameter.dtype for parameter in base.parameters() if parameter.is_floating_point())
    below: BaseDtype = "bfloat16" if adapter is not None and dtype == torch.bfloat16 else "float32"
    source = ModelSource(
        reference=type(base).__name__, directory=None, config=_config_of(base), adapter=adapter, adapter_name=adapter_name,
        base_dtype=below, quantized_from=_quantized_from(base),
    )  # fmt: skip
    rebuilt = _rebuild(source, type(base), dtype=dtype)
    _check_modules(model, rebuilt)
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
    if ADAPTER_LOADED.read(base, False):
        raise RequestError(f"{name} has adapters added with add_adapter; wrap it with peft.get_peft_model instead")
    return base


def _adapter_of(model: nn.Module) -> tuple[dict[str, Any], str]:
    """Return (peft config as plain JSON, its name). This works on any object with peft's interface; peft is not imported."""
    configs: dict[str, Any] = model.peft_config  # type: ignore[assignment]
    active = model.active_adapters
    if len(configs) != 1 or list(configs) != list(active):  # type: ignore[arg-type]
        raise RequestError(f"the model has adapters {sorted(configs)}, active {active}; plans are made for one that is active")
    ((name, config),) = configs.items()
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise RequestError(f"a {config.peft_type.value} adapter lengthens the sequence, which plans do not know; use LoRA")
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise RequestError("the adapter is merged into the weights; call unmerge_adapter() before training")
    kept = {key: value for key, value in config.to_dict().items() if key not in ADAPTER_HISTORY}
    if isinstance(kept.get(ADAPTER_INITIAL), str):
        kept[ADAPTER_INITIAL] = True
    return _plain(kept, f"the {config.peft_type.value} config"), name


def _quantized_from(base: PreTrainedModel) -> QuantizedFrom | None:
    dtypes = {str(module.weight.quant_state.dtype).removeprefix("torch.") for _, module in four_bit_layers(base)}
    if len(dtypes) > 1:
        raise RequestError(f"the 4-bit weights were made of {' and '.join(sorted(dtypes))}; load the model with one dtype")
    return cast("QuantizedFrom | None", next(iter(dtypes), None))  # bitsandbytes quantizes weights of these dtypes alone


def _config_of(base: PreTrainedModel) -> dict[str, Any]:
    """Return the config as plain JSON that reads back the same. Raise RequestError if it does not."""
    known = transformers.CONFIG_MAPPING
    model_type = base.config.model_type
    if model_type not in known or known[model_type] is not type(base.config):
        raise RequestError(f"the config class {type(base.config).__name__} is not transformers' own for {model_type!r}")
    config = _plain(base.config.to_dict(), f"the config of {type(base).__name__}")
    again = _plain(known[model_type].from_dict(dict(config)).to_dict(), "its copy")
    # Trainer sets use_cache on any config; training never keeps a cache.
    changed = sorted(key for key in (config.keys() | again.keys()) - {"use_cache"} if config.get(key) != again.get(key))
    if changed:
        raise RequestError(f"the config of {type(base).__name__} reads back with another {', '.join(changed)}")
    return {key: value for key, value in config.items() if key != "use_cache"} | {"architectures": [type(base).__name__]}


def _plain(document: dict[str, Any], what: str) -> dict[str, Any]:
    def listed(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        if isinstance(value, enum.Enum):
            return value.value
        raise TypeError(f"a {type(value).__name__}")

    try:
        plain: dict[str, Any] = json.loads(json.dumps(document, default=listed))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what} cannot be written as JSON: it holds {error}") from None
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
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RequestError(f"the weights are {found}; load the model with dtype float32 or bfloat16")


def _rebuild(source: ModelSource, model_class: type[PreTrainedModel], *, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device."""
    config = source.hf_config
    choose_class(config, source.reference)  # refuses a class without a loss that Upshift plans
    with building(source.reference), torch.device("meta"):
        return complete_model(build_model(config, model_class, dtype=dtype), source)


def _check_modules(model: nn.Module, rebuilt: nn.Module) -> None:
    """Raise RequestError for modules replaced, added or patched by hand: they run code that a rebuilt model does not."""
    built = {path: _kind(module) for path, module in rebuilt.named_modules()}
    found = {path: _kind(module) for path, module in model.named_modules()}
    for path in {**built, **found}:
        if built.get(path) != found.get(path):
            raise RequestError(
                f"module {path or 'the model'!r} is {found.get(path, 'missing')} where its config makes {built.get(path, 'none')}"
            )
    for path, module in model.named_modules():
        if "forward" in vars(module):
            raise RequestError(f"the forward of {path or 'the model'!r} was replaced by another; plans know the class's own")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _check_parameters(model: nn.Module, rebuilt: nn.Module) -> None:
    built, found = ({name: (tuple(p.shape), p.dtype) for name, p in m.named_parameters()} for m in (rebuilt, model))
    for name in {**built, **found}:
        if built.get(name) != found.get(name):
            raise RequestError(
                f"parameter {name!r} is {found.get(name, 'missing')} where its config makes {built.get(name, 'none')}"
            )
