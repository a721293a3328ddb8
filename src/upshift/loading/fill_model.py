# needs torch
"""Fill an empty model from its files, and check that the files hold the model's weights.

Each weight is read once, into its final dtype and device. Weights that keep their stored dtype are private mappings of the
files: writing to a page copies it. Others are converted in chunks while they are read. Weights that are made of several tensors,
or quantized, are made one group at a time.

transformers draws missing weights at random and reports them in its log. Upshift does not compute with such weights: every
command first compares the model with the files' headers, before it reads a weight.

Files may lack a weight that the result does not need: a pooler for the states of tokens, or the mask vector of a speech model.
To find the weights that are needed, the model runs once without values. If its code looks at values, as Longformer's does, it
runs on zeros, and each weight is a single zero that is repeated, so that the run needs no memory for weights.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.torch_names import FAKE_TENSOR_MODE
from upshift.internals.transformers_names import (
    DTYPE_PLAN,
    IGNORED_MISSING,
    IGNORED_UNEXPECTED,
    LOADING_REPORT,
    NAME_PATTERN,
    SET_TENSOR,
    WEIGHT_CONVERSIONS,
)
from upshift.loading.files.checkpoint import Checkpoint, find_checkpoint
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import SharedMappings, Staging, dtype_of, read_into, read_tensor, shape_of
from upshift.loading.key_mapping import Group, NameMapping, convert_group, filled_shapes, map_names
from upshift.models.source import ModelSource
from upshift.models.tracing.segments import fake_masks

READERS = 2  # threads; one waits for the disk while the other converts
CPU = torch.device("cpu")
UNUSED_WARNING_SHARE = 0.01  # of the numbers in the files
UNUSED_ERROR_SHARE = 0.5
MAX_NAMES = 3  # names of weights in a message

DeviceOf = Callable[[str], torch.device | None]  # from a weight's name to its device; None: the weight stays empty
Progress = Callable[[int, int], None]  # bytes done, bytes in total
Run = Callable[[nn.Module], Tensor]  # computes an answer from the model

logger = logging.getLogger(__name__)


class Filling:
    """Fills one empty model from stored tensors.

    ``dtype``: the dtype of weights that the model does not keep in another dtype. ``quantizer``: a quantizer of transformers
    that has preprocessed the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, StoredTensor],
        names: NameMapping,
        *,
        dtype: torch.dtype,
        quantizer: Any = None,
    ) -> None:
        self.model = model
        self.tensors = tensors
        self.names = names
        self._dtype = dtype
        self.quantizer = quantizer
        self._empty = model.state_dict()
        self._staging = Staging()
        self._mappings = SharedMappings([])
        self._shapes = {name: torch.Size(shape_of(stored)) for name, stored in tensors.items()}
        self._dtypes = DTYPE_PLAN.of(model)(dtype)
        self._dtype_patterns = NAME_PATTERN.get()(list(self._dtypes)) if self._dtypes else None
        self.info = LOADING_REPORT.get()(
            missing_keys=set(self._empty),
            unexpected_keys=set(names.unexpected),
            mismatched_keys=set(),
            conversion_errors={},
            error_msgs=[],
            skipped_pp_keys=set(),
        )

    def run(self, device_of: DeviceOf = lambda name: CPU, progress: Progress | None = None) -> None:
        """Fill the model in the order of the files' bytes. Afterwards ``info`` lists the weights that no tensor fills.

        Raise RequestError for weights of another shape before anything is read."""
        targets_by_group = self._check_shapes()
        self._mappings = SharedMappings(self._mappable_tensors(device_of))
        total = sum(self._num_bytes(group) for group in self.names.groups if device_of(group.target) is not None)
        bytes_done = 0
        for group, weights in self._read_groups(device_of, targets_by_group):
            for name, tensor in weights.items():
                SET_TENSOR.get()(self.model, name, tensor, self.info, self.quantizer)
            bytes_done += self._num_bytes(group)
            if progress is not None:
                progress(bytes_done, total)
        self._mappings = SharedMappings([])
        WEIGHT_CONVERSIONS.put(self.model, list(self.names.used_transforms))

    def _num_bytes(self, group: Group) -> int:
        """Return the bytes of the stored tensors of a group."""
        return sum(self.tensors[name].nbytes for _, name in group.sources)

    def _mappable_tensors(self, device_of: DeviceOf) -> Iterator[StoredTensor]:
        """Yield the stored tensors that keep their dtype and stay on the CPU, so that they can be mapped."""
        for group in self.names.groups:
            stored = self.tensors[group.sources[0][1]]
            device = device_of(group.target)
            if self._is_plain(group) and device is not None and self._can_map(stored, group.target, device):
                yield stored

    def _can_map(self, stored: StoredTensor, target: str, device: torch.device) -> bool:
        return device.type == "cpu" and dtype_of(stored) == self.dtype_of(target)

    def filled_shapes(self, group: Group) -> dict[str, torch.Size]:
        """Return the shapes of the weights that a group fills, by name, without reading anything."""
        return filled_shapes(group, self._shapes, self.model)

    def read_group(self, group: Group, device: torch.device, pool: ThreadPoolExecutor | None = None) -> dict[str, Tensor]:
        """Return the weights that a group fills, in the model's dtype. The tensors from which they are made are freed."""
        names = [name for _, name in group.sources]
        if not self._is_plain(group):
            map_function = map if pool is None else pool.map
            loaded = map_function(lambda name: self._load(name, group.target, device), names)
            tensors = dict(zip(names, loaded, strict=True))
            quantizer = self.quantizer if self._is_quantized(group.target) else None
            return convert_group(group, tensors, self.model, quantizer=quantizer, info=self.info if quantizer else None)
        return {group.target: self._load(names[0], group.target, device)}

    def dtype_of(self, target: str) -> torch.dtype:
        """Return the dtype of a weight, as transformers chooses it.

        A weight that the model creates in another dtype stays in that dtype. Weights of some modules stay in fp32."""
        if self._dtype_patterns is not None:
            alternation, by_group, _ = self._dtype_patterns
            match = alternation.search(target)
            if match is not None and match.lastgroup is not None:
                dtype: torch.dtype = self._dtypes[by_group[match.lastgroup]]
                return dtype
        return self._dtype if self._is_quantized(target) else self._empty[target].dtype

    def _read_groups(
        self, device_of: DeviceOf, fills: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[Group, dict[str, Tensor]]]:
        """Yield each group with its weights.

        Plain weights are read ahead, because they take no extra memory. Other groups are read one at a time."""
        ahead: list[tuple[Group, Future[dict[str, Tensor]]]] = []
        pool = ThreadPoolExecutor(READERS)
        try:
            for group in sorted(self.names.groups, key=self._position):
                device = device_of(group.target)
                if device is None:
                    self.info.missing_keys.difference_update(fills[group.target])
                elif self._is_plain(group):
                    ahead.append((group, pool.submit(self.read_group, group, device)))
                else:
                    yield group, self.read_group(group, device, pool)
            for group, future in ahead:
                yield group, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _position(self, group: Group) -> tuple[str, int]:
        first = self.tensors[group.sources[0][1]]
        return str(first.file), first.offset

    def _load(self, name: str, target: str, device: torch.device) -> Tensor:
        stored = self.tensors[name]
        if self._can_map(stored, target, device):
            return self._mappings.tensor(stored) if stored in self._mappings else read_tensor(stored)
        weight = torch.empty(shape_of(stored), dtype=self.dtype_of(target), device=device)
        if device.type == "cuda":
            self._staging.read_into(stored, weight)
        else:
            read_into(stored, weight)
        return weight

    def _is_plain(self, group: Group) -> bool:
        return group.converter is None and not self._is_quantized(group.target)

    def _is_quantized(self, target: str) -> bool:
        return self.quantizer is not None and bool(self.quantizer.param_needs_quantization(self.model, target))

    def _check_shapes(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the weights that each group fills, by the name of the group's first weight.

        Raise RequestError if a stored shape differs from the model's."""
        fills = {group.target: self.filled_shapes(group) for group in self.names.groups}
        mismatches = [
            f"{name} is {list(shape)} in the files and {list(self._empty[name].shape)} in the model"
            for shapes in fills.values()
            for name, shape in shapes.items()
            if name in self._empty and shape != self._empty[name].shape and not self._is_quantized(name)
        ]
        if mismatches:
            more = f", and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
            raise RequestError(
                f"{mismatches[0]}{more} ({type(self.model).__name__}); the config.json is not that of these files: take both "
                "from one model"
            )
        return {target: tuple(shapes) for target, shapes in fills.items()}


@dataclass(frozen=True)
class Coverage:
    """The weights that the files lack, and the tensors that the model does not use."""

    missing: dict[str, int]  # the numbers in each weight that no file fills
    unused: dict[str, int]  # the numbers in each stored tensor that fills no weight
    num_weights: int  # the numbers in all floating-point weights of the model
    num_stored: int  # the numbers in all stored tensors


def measure_coverage(filling: Filling) -> Coverage:
    """Compare an empty model with the headers of its files, under transformers' names, ties and exceptions."""
    model: Any = filling.model
    filled_names = {name for group in filling.names.groups for name in filling.filled_shapes(group)}
    weights = {name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()}
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
    missing = {}
    for name, weight in weights.items():
        tied_names = {tied_name for pair in tied.items() if name in pair for tied_name in pair}
        prefixed_name = f"{model.base_model_prefix}.{name}"  # its name in classes with a head, whose exceptions apply, too
        if (
            name not in filled_names
            and not tied_names & filled_names
            and not _matches((name, prefixed_name), IGNORED_MISSING.read(model))
        ):
            missing[name] = weight.numel()
    used_sources = {source for group in filling.names.groups for _, source in group.sources}
    ignored = IGNORED_UNEXPECTED.read(model)
    unused = {
        name: prod(tensor.shape)
        for name, tensor in filling.tensors.items()
        if name not in used_sources and not _matches((name,), ignored)
    }
    return Coverage(
        missing=missing,
        unused=unused,
        num_weights=sum(weight.numel() for weight in weights.values()),
        num_stored=sum(prod(tensor.shape) for tensor in filling.tensors.values()),
    )


def check_coverage(filling: Filling, source: ModelSource, *, run: Run | None = None, all_used: bool = True) -> None:
    """Raise RequestError if the files lack a weight that the answer depends on, or mostly belong to another model.

    ``run``: computes the answer from the model. None means that the answer depends on every weight. ``all_used``: False for a
    part of the model that the config names, because then the other tensors are for the other parts. The same holds for a model
    with a new head."""
    coverage = measure_coverage(filling)
    name = type(filling.model).__name__
    missing = _without_new_head(coverage.missing, filling.model, source)
    all_used = all_used and source.new_head_on is None
    if missing and run is not None:
        missing = {weight: missing[weight] for weight in _weights_used_by(filling.model, list(missing), run)}
    unused = sum(coverage.unused.values())
    share_unused = unused / max(coverage.num_stored, 1)
    if missing:
        share = sum(missing.values()) / max(coverage.num_weights, 1)
        unused_note = f", and {share_unused:.1%} of the files is used by none" if unused else ""
        raise RequestError(
            f"the files of {source.reference!r} lack {share:.1%} of the weights of {name} ({_shorten_list(missing)}){unused_note}"
            "; give the files of the whole model, or name the class that they are of under architectures in config.json. For "
            f"weights that start at random, load {name} with transformers, save it, and give that"
        )
    if not all_used or share_unused <= UNUSED_WARNING_SHARE:
        return
    text = (
        f"{share_unused:.1%} of the weights in the files of {source.reference!r} belong to no part of {name} "
        f"({_shorten_list(coverage.unused)})"
    )
    if share_unused > UNUSED_ERROR_SHARE:
        raise RequestError(f"{text}; name the class that the files are of under architectures in config.json")
    logger.warning(text)


def _without_new_head(missing: dict[str, int], model: PreTrainedModel, source: ModelSource) -> dict[str, int]:
    """Return the missing weights without those of a new head, which the class of the files does not have."""
    if source.new_head_on is None:
        return missing
    files_class: Any = getattr(transformers, source.new_head_on)
    with torch.device("meta"):
        of_files: PreTrainedModel = files_class(source.hf_config)
    names = {_name_in_base(name, of_files) for name in of_files.state_dict()}
    return {name: size for name, size in missing.items() if _name_in_base(name, model) in names}


def _name_in_base(name: str, model: PreTrainedModel) -> str:
    """Return the name of a weight in the model without its head."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def check_missing(missing: set[str], model: PreTrainedModel, source: ModelSource) -> None:
    """Raise RequestError if ``missing``, the weights that ``from_pretrained`` found in no file, is more than a new head."""
    names = _without_new_head(dict.fromkeys(sorted(missing), 0), model, source)
    if names:
        raise RequestError(
            f"the files of {source.reference!r} lack {len(names)} weights of {type(model).__name__} "
            f"({_shorten_list(names)}); give the files of the whole model"
        )


def check_files(source: ModelSource, model: PreTrainedModel, *, run: Run | None = None, all_used: bool = True) -> None:
    """Call ``check_coverage`` for an empty model on the meta device. Only the headers of its files are read."""
    assert source.directory is not None
    checkpoint: Checkpoint = find_checkpoint(source.directory)
    filling = Filling(model, checkpoint.tensors, map_names(model, checkpoint.tensors), dtype=model.dtype)
    check_coverage(filling, source, run=run, all_used=all_used)


def _matches(names: tuple[str, ...], patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or () for name in names)


def _shorten_list(names: dict[str, int]) -> str:
    shown = list(names)[:MAX_NAMES]
    num_more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")


def _weights_used_by(model: PreTrainedModel, names: list[str], run: Run) -> list[str]:
    """Return those of the named weights of an empty model that the answer of ``run`` depends on.

    Buffers and frozen parameters count as used, because no gradient shows their use. Return all names if the model runs neither
    without values nor on zeros."""
    for find_connected in (_connected_without_values, _connected_on_zeros):
        try:
            connected = find_connected(model, run)
        except Exception as error:  # any operator may reject tensors without values, or zeros
            logger.debug("which weights %s depends on is not known: %s", type(model).__name__, error)
        else:
            trained = {name for name, weight in _parameters(model) if weight.requires_grad}
            return [name for name in names if name in connected or name not in trained]
    return names


def _connected_without_values(model: PreTrainedModel, run: Run) -> set[str]:
    """Return the names of the parameters that autograd connects to the answer, on the meta device."""
    # With a fake mode, a mask that the model makes itself is fake, and transformers does not read its values.
    with fake_masks(masked=False), FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True), torch.enable_grad():
        return _connected(model, run(model))


def _connected_on_zeros(model: PreTrainedModel, run: Run) -> set[str]:
    """Return the names of the parameters that autograd connects to the answer of a copy on the CPU.

    Zeros choose a way through the model. Other values may choose another expert or layer of the same kind, so a parameter whose
    name differs only in numbers from that of a connected one is connected, too."""
    zeros = _on_zeros(model)
    with torch.enable_grad():
        connected = _connected(zeros, run(zeros))
    kinds = {_kind(name) for name in connected}
    return {name for name, _ in _parameters(model) if _kind(name) in kinds}


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _connected(model: nn.Module, answer: Tensor) -> set[str]:
    """Return the names of the parameters that are leaves of the answer's graph of gradients.

    Raise RuntimeError if the answer has none, because the model computes it without gradients."""
    if answer.grad_fn is None:
        raise RuntimeError("the answer has no gradients")
    names: dict[int, list[str]] = {}
    for name, weight in _parameters(model):
        names.setdefault(id(weight), []).append(name)
    connected: set[str] = set()
    nodes: list[Any] = [answer.grad_fn]
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        connected.update(names.get(id(getattr(node, "variable", None)), ()))
        above = {next_node for next_node, _ in getattr(node, "next_functions", ()) if next_node is not None} - seen
        seen |= above
        nodes += above
    return connected


def _on_zeros(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model on the CPU with real buffers. Each parameter is one zero, repeated to the parameter's shape."""
    with _parameters_on_meta():
        copied: PreTrainedModel = type(model)(copy.deepcopy(model.config)).eval()
    for module in copied.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
    return copied


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module registers on the meta device, while the context is open. Buffers get their values."""
    register = nn.Module.register_parameter
    this_thread = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        if weight is not None and threading.get_ident() == this_thread:  # another thread may build a model that it keeps
            weight = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
        register(module, name, weight)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield
