"""Scale learning rates and initial weights of a model by muP, so that hyper-parameters of a narrower base hold for it.

The shapes show which dimensions grow with the width: those in which a parameter differs from the base's. The kind of a module
shows the role of its parameters. m is the number of a parameter's inputs over that of the base's (Yang et al., Tensor Programs
V, 2022, arXiv:2203.03466, table 3, Adam):

    both sides grow (hidden)      initial deviation 1/sqrt(m)    learning rate 1/m
    inputs alone (output)         initial deviation 1/m          learning rate 1/m
    outputs alone, and vectors    as in the base                 as in the base

Weight decay is multiplied by m where the learning rate is divided by m: their product is the share of a weight that a step
takes away.
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

COSMETIC = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INPUT_AXIS: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.Linear, 1), (Conv1D, 0), *((convolution, 1) for convolution in CONVOLUTIONS),
)  # fmt: skip


@dataclass(frozen=True)
class MupScale:
    """The factors of one parameter, against the base's."""

    rate: float = 1.0
    deviation: float = 1.0
    kept: bool = True  # its initial values depend on no dimension that grows


def base_widths(source: ModelSource, base: str) -> str:
    """Return Plan.mup_base for a directory, a config.json or a hub id.

    Raise RequestError if the base differs from the model in more than widths, or in no width.
    """
    ours, theirs = (_comparable_fields(one.hf_config) for one in (source, find_model(base)))
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    other = next((name for name in names if not all(_is_width(one.get(name)) for one in (ours, theirs))), None)
    if other is not None:
        raise RequestError(
            f"--mup-base {base}: its {other} is {theirs.get(other)!r}, the model's {ours.get(other)!r}; a base differs in widths "
            "alone, such as hidden_size, intermediate_size and num_attention_heads"
        )
    if not names:
        raise RequestError(f"--mup-base {base} is as wide as the model: leave it out")
    return base_text({name: theirs[name] for name in names})


def add_base_widths(source: ModelSource, fixed: tuple[str, ...], base: str | None, *, from_config: bool) -> tuple[str, ...]:
    """Return ``fixed`` with the widths of ``base``. Raise RequestError if muP, by either option, does not fit the model."""
    text = next((one.partition("=")[2] for one in fixed if one.startswith("mup_base=")), "")
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
    if not from_config:
        raise RequestError("muP scales random weights and their learning rates, not weights that are trained; add --from-config")


def check_base(source: ModelSource, text: str) -> None:
    """Raise RequestError for a base that does not fit the model."""
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    with torch.device("meta"):
        scales_of_parameters(build_model(config, model_class, dtype=torch.float32), text)


def scales_of_parameters(model: PreTrainedModel, text: str) -> dict[str, MupScale]:
    """Return the scale of each parameter, by its name. Raise RequestError for a parameter that the rule does not cover."""
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
    found = {}
    for name, parameter in model.named_parameters():
        if name not in shapes or len(shapes[name]) != parameter.ndim:
            raise RequestError(f"the base of muP has no {name} like the model's; it is the same model with fewer widths alone")
        found[name] = _scale_of(name, owners[name], tuple(parameter.shape), shapes[name])
    _check_tied(model, found)
    return found


def narrow_config(config: PretrainedConfig, fields: dict[str, int]) -> PretrainedConfig:
    """Return a copy of the config with these fields. Raise RequestError for a field that the config does not have."""
    plain = config.to_dict()
    unknown = next((name for name in fields if not isinstance(plain.get(name), int)), None)
    if unknown is not None:
        raise RequestError(f"mup_base: {unknown!r} is no width of this model's config; it has {', '.join(_width_fields(plain))}")
    return type(config).from_dict({**plain, **fields})


def scale_initial_weights(model: PreTrainedModel, text: str) -> None:
    """Multiply random weights so that their deviations follow from the base's. Both are measured, as models draw by own rules."""
    found = scales_of_parameters(model, text)
    with torch.random.fork_rng():
        base = dict(FROM_CONFIG.of(type(model))(narrow_config(model.config, read_base(text))).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours, theirs = (float(one.float().std()) if one.numel() > 1 else 0.0 for one in (parameter, base[name]))
            if not found[name].kept and ours > 0 and theirs > 0:
                parameter.mul_(found[name].deviation * theirs / ours)


def split_by_rate(model: nn.Module, text: str, groups: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups, each split into several with one learning rate. Those with the requested rate come first."""
    whole = base_of(model)
    found = scales_of_parameters(whole, text)
    shares = {parameter: found[name].rate for name, parameter in whole.named_parameters()}
    return [
        {
            **group, "params": [parameter for parameter in group["params"] if shares[parameter] == share],
            "lr": rate * share, "weight_decay": group["weight_decay"] / share,
        }
        for share in sorted(set(shares.values()), key=lambda share: share != 1)
        for group in groups
    ]  # fmt: skip


def _scale_of(name: str, module: nn.Module, shape: tuple[int, ...], base: tuple[int, ...]) -> MupScale:
    wide = [axis for axis, (ours, theirs) in enumerate(zip(shape, base, strict=True)) if ours != theirs]
    if not wide or sum(size > 1 for size in shape) < 2:
        return MupScale()
    if isinstance(module, nn.Embedding):
        if wide != [1]:
            raise RequestError(f"the base of muP has another number of rows in {name}; vocabulary and positions must be the same")
        return MupScale(kept=False)
    axis = next((axis for kind, axis in INPUT_AXIS if isinstance(module, kind)), None)
    if axis is None:
        raise RequestError(
            f"muP: which side of {name} ({type(module).__name__}) is its input is not known, so its learning rate is not; train "
            "without --mup-base"
        )
    if axis not in wide:
        return MupScale(kept=False)
    wider = shape[axis] / base[axis]
    hidden = len(wide) > 1
    return MupScale(rate=1 / wider, deviation=1 / math.sqrt(wider) if hidden else 1 / wider, kept=False)


def _check_tied(model: PreTrainedModel, found: dict[str, MupScale]) -> None:
    """Raise RequestError if one table that grows is both input and output.

    The table would need a multiplier in the forward pass, and the saved model could not hold one.
    """
    table = model.get_output_embeddings()
    weight = None if table is None else getattr(table, "weight", None)
    tied = {name for name, parameter in model.named_parameters() if parameter is weight}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if weight is not None and id(weight) in embeddings and any(not found[name].kept for name in tied):
        raise RequestError(
            "muP needs a head of its own: this model's is tied to its embedding, which has another learning rate; set "
            "tie_word_embeddings to false in its config"
        )


def _check_heads(config: PretrainedConfig, base: PretrainedConfig) -> None:
    ours = _head_size(config)
    theirs = _head_size(base)
    if ours != theirs:
        raise RequestError(
            f"the base of muP has heads of {theirs} numbers, the model of {ours}; wider models have more heads, not larger ones: "
            "attention divides by the square root of their size"
        )


def _head_size(config: PretrainedConfig) -> int | None:
    heads = heads_of(config.get_text_config())
    return None if heads is None else heads.width


def _comparable_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in COSMETIC}


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _width_fields(plain: dict[str, Any]) -> list[str]:
    return [name for name, value in plain.items() if _is_width(value)]
