"""Check that a model's files hold its weights: find weights that no file fills, and stored tensors that the model does not use.

transformers draws missing weights at random and reports them in its log. Upshift computes nothing with weights that nobody gave:
every command checks the files' headers first, before it reads a weight.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.torch_names import FAKE_TENSOR_MODE
from upshift.internals.transformers_names import IGNORED_MISSING, IGNORED_UNEXPECTED
from upshift.loading.checkpoint import Checkpoint, find_checkpoint
from upshift.loading.fill import Filling
from upshift.loading.names import map_names
from upshift.models.measure import fake_masks
from upshift.models.source import ModelSource

UNUSED_SAID, UNUSED_REFUSED = 0.01, 0.5  # shares of the numbers in the files
NAMED = 3  # weights in a message

logger = logging.getLogger(__name__)

Run = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Coverage:
    """The weights that the files lack, and the tensors that the model does not use.

    ``missing``: how many numbers each weight has that no file fills. ``unused``: how many each stored tensor has that fills
    none."""

    missing: dict[str, int]
    unused: dict[str, int]
    num_weights: int
    num_stored: int


def coverage_of(filling: Filling) -> Coverage:
    """Compare an empty model with the headers of its files, by transformers' own names, ties and exceptions."""
    model: Any = filling.model
    filled = {name for group in filling.names.groups for name in filling.filled(group)}
    weights = {name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()}
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
    missing = {}
    for name, weight in weights.items():
        twins = {other for pair in tied.items() if name in pair for other in pair}
        inside = f"{model.base_model_prefix}.{name}"  # as classes around this one name it, whose exceptions it has, too
        if name not in filled and not twins & filled and not _matches((name, inside), IGNORED_MISSING.read(model)):
            missing[name] = weight.numel()
    used = {source for group in filling.names.groups for _, source in group.sources}
    ignored = IGNORED_UNEXPECTED.read(model)
    unused = {
        name: prod(tensor.shape)
        for name, tensor in filling.tensors.items()
        if name not in used and not _matches((name,), ignored)
    }
    return Coverage(
        missing=missing,
        unused=unused,
        num_weights=sum(weight.numel() for weight in weights.values()),
        num_stored=sum(prod(tensor.shape) for tensor in filling.tensors.values()),
    )


def check_coverage(filling: Filling, source: ModelSource, *, run: Run | None = None, all_used: bool = True) -> None:
    """Raise RequestError if a weight that the answer depends on is in no file, or if most of the files belongs to another model.

    ``run``: computes the answer from the model. None: the answer depends on every weight. ``all_used``: False for a part of the
    model that the config names, because then the rest of the files is known to serve other parts."""
    found = coverage_of(filling)
    name = type(filling.model).__name__
    needed = found.missing
    if needed and run is not None:
        needed = {weight: needed[weight] for weight in _depended_on(filling.model, list(needed), run)}
    unused = sum(found.unused.values())
    share_unused = unused / max(found.num_stored, 1)
    if needed:
        share = sum(needed.values()) / max(found.num_weights, 1)
        beside = f", and {share_unused:.1%} of the files is used by none" if unused else ""
        raise RequestError(
            f"the files of {source.reference!r} lack {share:.1%} of the weights of {name} ({_some(needed)}){beside}; give the "
            "files of the whole model, or name the class that they are of under architectures in config.json. For weights that "
            f"start at random, load {name} with transformers, save it, and give that"
        )
    if not all_used or share_unused <= UNUSED_SAID:
        return
    text = (
        f"{share_unused:.1%} of the weights in the files of {source.reference!r} belong to no part of {name} "
        f"({_some(found.unused)})"
    )
    if share_unused > UNUSED_REFUSED:
        raise RequestError(f"{text}; name the class that the files are of under architectures in config.json")
    logger.warning(text)


def check_missing(missing: set[str], model: PreTrainedModel, source: ModelSource) -> None:
    """Raise RequestError if transformers' own ``from_pretrained`` reports weights that are in no file."""
    if missing:
        named = dict.fromkeys(sorted(missing), 0)
        raise RequestError(
            f"the files of {source.reference!r} lack {len(missing)} weights of {type(model).__name__} ({_some(named)}); give the "
            "files of the whole model"
        )


def check_files(source: ModelSource, model: PreTrainedModel, *, run: Run | None = None, all_used: bool = True) -> None:
    """Call ``check_coverage`` for an empty model on the meta device, whose files are not read otherwise."""
    assert source.directory is not None
    checkpoint: Checkpoint = find_checkpoint(source.directory)
    filling = Filling(model, checkpoint.tensors, map_names(model, checkpoint.tensors), dtype=model.dtype)
    check_coverage(filling, source, run=run, all_used=all_used)


def _matches(names: tuple[str, ...], patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or () for name in names)


def _some(names: dict[str, int]) -> str:
    first = list(names)[:NAMED]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _depended_on(model: PreTrainedModel, names: list[str], run: Run) -> list[str]:
    """Return the weights that an answer depends on, as autograd sees it on the meta device.

    Return all of them if the model does not run there."""
    watched = {name: weight for name, weight in model.named_parameters(remove_duplicate=False) if name in names}
    buffers = [name for name in names if name not in watched]
    try:
        # A mask that a model makes itself is a fake tensor there, whose values transformers does not look for.
        with fake_masks(masked=False), FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True), torch.enable_grad():
            answer = run(model)
        gradients = torch.autograd.grad(answer.sum(), list(watched.values()), allow_unused=True)
    except Exception as error:  # any operator may refuse tensors without numbers; then nothing is known of the weights
        logger.debug("which weights %s depends on is not known: %s", type(model).__name__, error)
        return names
    return buffers + [name for name, gradient in zip(watched, gradients, strict=True) if gradient is not None]
