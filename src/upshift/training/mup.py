"""Scale the learning rates and initial weights of a model by muP, so that the hyper-parameters of a narrower base hold for it.

A dimension grows with the width if a parameter's shape differs there from the base's. The class of a module shows the role of
its parameters. m is the number of inputs of a parameter, divided by that in the base (Yang et al., Tensor Programs V, 2022,
arXiv:2203.03466, table 3, Adam):

    both sides grow (hidden)      initial deviation 1/sqrt(m)    learning rate 1/m
    only inputs (output)          initial deviation 1/m          learning rate 1/m
    only outputs, and vectors     as in the base                 as in the base

Weight decay is multiplied by m if the learning rate is divided by m, because their product is the share of a weight that a step
removes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from upshift.errors import RequestError
from upshift.internals.transformers_names import FROM_CONFIG
from upshift.models.adapter import base_of
from upshift.models.build import build_model, choose_class
from upshift.models.config import heads_of
from upshift.models.source import ModelSource, find_model
from upshift.planning.search.constraints import base_text, read_base

IGNORED_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INPUT_AXIS: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.Linear, 1),
    (Conv1D, 0),
    *((convolution, 1) for convolution in CONVOLUTIONS),
)


@dataclass(frozen=True)
class MupScale:
    """The factors of one parameter, relative to the base."""

    rate: float = 1.0  # learning rate
    deviation: float = 1.0  # standard deviation of the initial weights
    has_fixed_init: bool = True  # initial values depend on no dimension that grows


def base_widths(source: ModelSource, base: str) -> str:
    """Return Plan.mup_base for a directory, a config.json or a hub id.

    Raise RequestError if the base differs from the model in more than widths, or in no width.
    """
    model_fields = _comparable_fields(source.hf_config)
    base_fields = _comparable_fields(find_model(base).hf_config)
    names = [name for name in {**base_fields, **model_fields} if model_fields.get(name) != base_fields.get(name)]
    for name in names:
        if _is_width(model_fields.get(name)) and _is_width(base_fields.get(name)):
            continue
        raise RequestError(
            f"--mup-base {base}: its {name} is {base_fields.get(name)!r}, the model's {model_fields.get(name)!r}; "
            "a base differs in widths alone, such as hidden_size, intermediate_size and num_attention_heads"
        )
    if not names:
        raise RequestError(f"--mup-base {base} is as wide as the model: leave it out")
    return base_text({name: base_fields[name] for name in names})


def add_base_widths(source: ModelSource, fixed: tuple[str, ...], base: str | None, *, from_config: bool) -> tuple[str, ...]:
    """Return ``fixed`` with the widths of ``base``. Raise RequestError if muP, from either option, does not fit the model."""
    text = next((setting.partition("=")[2] for setting in fixed if setting.startswith("mup_base=")), "")
    if base is not None:
        if text:
            raise RequestError(f"--mup-base {base} and --set mup_base={text} fix the same field; give one of them")
        text = base_widths(source, base)
        fixed = (*fixed, f"mup_base={text}")
    if text:
        check_random(from_config=from_config)
        check_base(source, text)
    return fixed


def check_random(*, from_config: bool) -> None:
    """Raise RequestError if the weights are not random."""
    if not from_config:
        raise RequestError("muP scales random weights and their learning rates, not weights that are trained; add --from-config")


def check_base(source: ModelSource, text: str) -> None:
    """Raise RequestError for a base that does not fit the model."""
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    with torch.device("meta"):
        scales_of_parameters(build_model(config, model_class, dtype=torch.float32), text)


def scales_of_parameters(model: PreTrainedModel, text: str) -> dict[str, MupScale]:
    """Return the factors of each parameter, by name. Raise RequestError for a parameter that the rules do not cover."""
    base_config = narrow_config(model.config, read_base(text))
    _check_heads(model.config, base_config)
    with torch.device("meta"):
        base = FROM_CONFIG.of(type(model))(base_config)
    shapes = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    owners = {
        f"{path}.{name}" if path else name: module
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    scales = {}
    for name, parameter in model.named_parameters():
        if name not in shapes or len(shapes[name]) != parameter.ndim:
            raise RequestError(f"the base of muP has no {name} like the model's; it is the same model with fewer widths alone")
        scales[name] = _scale_of(name, owners[name], tuple(parameter.shape), shapes[name])
    _check_tied(model, scales)
    return scales


def narrow_config(config: PretrainedConfig, fields: dict[str, int]) -> PretrainedConfig:
    """Return a copy of the config with these fields. Raise RequestError for a field that the config does not have."""
    config_fields = config.to_dict()
    unknown = next((name for name in fields if not isinstance(config_fields.get(name), int)), None)
    if unknown is not None:
        raise RequestError(
            f"mup_base: {unknown!r} is no width of this model's config; it has {', '.join(_width_fields(config_fields))}"
        )
    return type(config).from_dict({**config_fields, **fields})


def scale_initial_weights(model: PreTrainedModel, text: str) -> None:
    """Multiply random weights so that their standard deviations follow from the base's.

    Both deviations are measured, because models have different rules for initial weights.
    """
    scales = scales_of_parameters(model, text)
    with torch.random.fork_rng():
        base = dict(FROM_CONFIG.of(type(model))(narrow_config(model.config, read_base(text))).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = _deviation(parameter)
            base_deviation = _deviation(base[name])
            if not scales[name].has_fixed_init and deviation > 0 and base_deviation > 0:
                parameter.mul_(scales[name].deviation * base_deviation / deviation)


def _deviation(tensor: torch.Tensor) -> float:
    return float(tensor.float().std()) if tensor.numel() > 1 else 0.0


def split_by_rate(model: nn.Module, text: str, groups: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Split each of an optimizer's groups into groups with one learning rate. Those with the requested rate come first."""
    whole = base_of(model)
    scales = scales_of_parameters(whole, text)
    factors = {parameter: scales[name].rate for name, parameter in whole.named_parameters()}
    return [
        {
            **group,
            "params": [parameter for parameter in group["params"] if factors[parameter] == factor],
            "lr": rate * factor,
            "weight_decay": group["weight_decay"] / factor,
        }
        for factor in sorted(set(factors.values()), key=lambda factor: factor != 1)
        for group in groups
    ]


def _scale_of(name: str, module: nn.Module, shape: tuple[int, ...], base: tuple[int, ...]) -> MupScale:
    growing_axes = [axis for axis, (size, base_size) in enumerate(zip(shape, base, strict=True)) if size != base_size]
    if not growing_axes or sum(size > 1 for size in shape) < 2:
        return MupScale()
    if isinstance(module, nn.Embedding):
        if growing_axes != [1]:
            raise RequestError(f"the base of muP has another number of rows in {name}; vocabulary and positions must be the same")
        return MupScale(has_fixed_init=False)
    input_axis = next((axis for module_class, axis in INPUT_AXIS if isinstance(module, module_class)), None)
    if input_axis is None:
        raise RequestError(
            f"muP: which side of {name} ({type(module).__name__}) is its input is not known, so its learning rate is not; train "
            "without --mup-base"
        )
    if input_axis not in growing_axes:
        return MupScale(has_fixed_init=False)
    multiplier = shape[input_axis] / base[input_axis]  # m
    is_hidden = len(growing_axes) > 1
    deviation = 1 / math.sqrt(multiplier) if is_hidden else 1 / multiplier
    return MupScale(rate=1 / multiplier, deviation=deviation, has_fixed_init=False)


def _check_tied(model: PreTrainedModel, scales: dict[str, MupScale]) -> None:
    """Raise RequestError if a matrix that grows is both embedding and head.

    It would need a multiplier in the forward pass, which a saved model cannot store.
    """
    head = model.get_output_embeddings()
    weight = None if head is None else getattr(head, "weight", None)
    tied = {name for name, parameter in model.named_parameters() if parameter is weight}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if weight is not None and id(weight) in embeddings and any(not scales[name].has_fixed_init for name in tied):
        raise RequestError(
            "muP needs a head of its own: this model's is tied to its embedding, which has another learning rate; set "
            "tie_word_embeddings to false in its config"
        )


def _check_heads(config: PretrainedConfig, base: PretrainedConfig) -> None:
    """Raise RequestError if the base has attention heads of another size."""
    head_size = _head_size(config)
    base_head_size = _head_size(base)
    if head_size != base_head_size:
        raise RequestError(
            f"the base of muP has heads of {base_head_size} numbers, the model of {head_size}; "
            "wider models have more heads, not larger ones: attention divides by the square root of their size"
        )


def _head_size(config: PretrainedConfig) -> int | None:
    heads = heads_of(config.get_text_config())
    return None if heads is None else heads.width


def _comparable_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in IGNORED_FIELDS}


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _width_fields(plain: dict[str, Any]) -> list[str]:
    return [name for name, value in plain.items() if _is_width(value)]
