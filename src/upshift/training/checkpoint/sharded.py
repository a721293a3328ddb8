"""Write and read sharded checkpoints: each rank writes its own shards, and ranks of any layout read them.

A sharded `checkpoint-<step>` has the files of every checkpoint, and for each rank `weights-<rank>.safetensors`,
`optimizer-<rank>.safetensors` and `pieces-<rank>.json`, which gives the position of each tensor in the whole tensor. A shard
that several ranks have is written by the first of them. Tensors have the names of the full model. Tied weights have the one
name under which they are saved.

A Piece describes which elements of a tensor a rank has: in every dimension, some intervals of the whole tensor one behind the
other. This covers the rows of fully_shard, the columns of tensor parallelism, and both halves of a packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from upshift.errors import RequestError
from upshift.internals.torch_names import SPLIT_TENSOR
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.tensors import dtype_of, read_tensor
from upshift.models.adapter import base_of
from upshift.planning.plan import Plan
from upshift.training.checkpoint.async_save import HostCopies
from upshift.training.checkpoint.model import never_saved_names, saved_state
from upshift.training.checkpoint.optimizer import place_state, plain_name
from upshift.training.checkpoint.state import checksums_of
from upshift.training.distributed.mesh import all_gather_objects
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.sharded import ShardedOptimizer
from upshift.value import Value

Interval = tuple[int, int]  # start, end
Overlap = tuple[int, int, int]  # start in one piece, start in the other, length


class Piece(Value):
    """The part of a tensor that a rank has. ``kept`` has the intervals of each divided dimension. Other dimensions are whole."""

    shape: tuple[int, ...]  # of the whole tensor
    kept: dict[int, tuple[Interval, ...]] = {}

    def intervals(self, dimension: int) -> tuple[Interval, ...]:
        return self.kept.get(dimension, ((0, self.shape[dimension]),))

    @property
    def numel(self) -> int:
        count = 1
        for dimension in range(len(self.shape)):
            count *= sum(end - start for start, end in self.intervals(dimension))
        return count


class Pieces(Value):
    """The description of the files of one rank."""

    tensors: dict[str, Piece]
    checksums: dict[str, str] = {}  # SHA-256 of the rank's own files by name


def piece_of(tensor: Tensor, *, rows: Interval | None = None) -> Piece:
    """Return which piece of a parameter this rank has. ``rows`` restricts it to these rows of the first dimension."""
    shape = tuple(tensor.shape)
    indices: dict[int, Tensor] = {}
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "a rank has parts of its own meshes' tensors alone"
        # From the last mesh dimension to the first: fully_shard divides the rows that tensor parallelism gave to the rank.
        for number, placement in reversed(list(enumerate(tensor.placements))):
            if placement.is_replicate():
                continue
            dimension: int = placement.dim  # type: ignore[attr-defined]
            remaining = indices.get(dimension, torch.arange(shape[dimension]))
            placement = Shard(dimension) if dimension in indices else placement
            # Let the placement divide the indices: packed weights, and rows of columns, are not one interval.
            shaped = remaining.view([-1 if axis == dimension else 1 for axis in range(len(shape))])
            chunks, _ = SPLIT_TENSOR.of(placement)(shaped, tensor.device_mesh.size(number), with_padding=False, contiguous=False)
            indices[dimension] = chunks[coordinates[number]].reshape(-1)
    if rows is not None and shape:
        indices[0] = indices.get(0, torch.arange(shape[0]))[rows[0] : rows[1]]
    return Piece(shape=shape, kept={dimension: _to_intervals(kept_indices) for dimension, kept_indices in indices.items()})


def copy_overlap(target: Tensor, target_piece: Piece, source: Tensor, source_piece: Piece) -> int:
    """Copy the elements that both pieces have from ``source`` into ``target``. Return the number of copied elements."""
    num_copied = 0
    overlaps = [
        list(_overlaps(target_piece.intervals(dimension), source_piece.intervals(dimension)))
        for dimension in range(len(target_piece.shape))
    ]
    for block in product(*overlaps):
        target_block = target
        source_block = source
        for dimension, (target_start, source_start, length) in enumerate(block):
            target_block = target_block.narrow(dimension, target_start, length)
            source_block = source_block.narrow(dimension, source_start, length)
        target_block.copy_(source_block)
        num_copied += target_block.numel()
    return num_copied


def _overlaps(target: tuple[Interval, ...], source: tuple[Interval, ...]) -> Iterator[Overlap]:
    """Yield the ranges that both lists of intervals have, each as a start in either list and a length."""
    target_offset = 0
    for target_start, target_end in target:
        source_offset = 0
        for source_start, source_end in source:
            low = max(target_start, source_start)
            high = min(target_end, source_end)
            if low < high:
                yield target_offset + low - target_start, source_offset + low - source_start, high - low
            source_offset += source_end - source_start
        target_offset += target_end - target_start


def _to_intervals(indices: Tensor) -> tuple[Interval, ...]:
    """Return the intervals of consecutive indices."""
    if not indices.numel():
        return ()
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    runs = indices.tensor_split(breaks.tolist()) if breaks.numel() else (indices,)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


KINDS = ("weights", "optimizer")
MASTER_KEY = "master_weight"  # the fp32 copy of a shard, if the model has bf16
NamedShards = dict[str, tuple[Piece, Tensor]]


@dataclass(frozen=True)
class LocalShards:
    """The shards that this rank writes, by kind."""

    rank: int
    shards: dict[str, NamedShards]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for shards in self.shards.values() for _, tensor in shards.values())

    def copied(self) -> LocalShards:
        """Return a copy in host memory, which training does not change."""
        copies = HostCopies()
        copied: dict[str, NamedShards] = {}
        for kind, shards in self.shards.items():
            copied[kind] = {name: (piece, copies.copy(tensor)) for name, (piece, tensor) in shards.items()}
        return LocalShards(self.rank, copied)

    def write(self, directory: Path) -> None:
        pieces: dict[str, Piece] = {}
        files: list[str] = []
        for kind, shards in self.shards.items():
            pieces |= {f"{kind}/{name}": piece for name, (piece, _) in shards.items()}
            if shards:
                tensors = {name: tensor.detach().contiguous() for name, (_, tensor) in shards.items()}
                files.append(f"{kind}-{self.rank:05d}.safetensors")
                save_file(tensors, directory / files[-1])
        document = Pieces(tensors=pieces, checksums=checksums_of(directory, files)).to_json()
        (directory / f"pieces-{self.rank:05d}.json").write_text(document, encoding="utf-8")


def shards_to_write(model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: Plan, rank: int) -> LocalShards:
    """Return the shards that this rank writes. All ranks call this function together.

    Without an optimizer these are only weights. If several ranks have the same shard, the first one writes it.
    """
    local_shards = {
        "weights": local_weights(model),
        "optimizer": {} if optimizer is None else dict(local_optimizer_state(model, optimizer)),
    }
    local_pieces: dict[tuple[str, str], Piece] = {}
    for kind, shards in local_shards.items():
        local_pieces |= {(kind, name): piece for name, (piece, _) in shards.items() if piece.numel}
    writer: dict[tuple[str, str, str], int] = {}
    for number, rank_pieces in enumerate(all_gather_objects(local_pieces, plan)):
        for (kind, name), piece in rank_pieces.items():
            writer.setdefault((kind, name, piece.to_json()), number)
    written: dict[str, NamedShards] = {}
    for kind, shards in local_shards.items():
        written[kind] = {
            name: (piece, tensor) for name, (piece, tensor) in shards.items() if writer.get((kind, name, piece.to_json())) == rank
        }
    return LocalShards(rank, written)


def full_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the names of this rank's parameters in the full model."""
    names: dict[Tensor, str] = {}
    for stage in stages_of(model):
        tied = tied_names(stage)
        for name, parameter in stage.named_parameters():
            names.setdefault(parameter, tied.get(plain_name(name), plain_name(name)))
    return names


def local_weights(model: nn.Module) -> NamedShards:
    """Return this rank's shards of the saved parameters and buffers of the model."""
    shards: NamedShards = {}
    for stage in stages_of(model):
        tied = tied_names(stage)
        for name, tensor in saved_state(stage).items():
            saved_name = tied.get(plain_name(name), plain_name(name))
            if saved_name not in shards:
                shards[saved_name] = (piece_of(tensor), _local_tensor(tensor))
    return shards


def local_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, tuple[Piece, Tensor]]]:
    """Yield this rank's tensors of the optimizer state by ``<parameter>.<state>``.

    Raise RequestError for state that is not made of plain tensors.
    """
    names = full_names(model)
    for updated, piece in _updated_pieces(optimizer):
        name = names[updated.parameter]
        shard = updated.shard
        for key, value in optimizer.state.get(updated.state_key, {}).items():
            if isinstance(value, Tensor):
                if type(value) is not Tensor:
                    raise RequestError(f"the optimizer keeps {type(value).__name__} of parts of weights, which cannot be saved")
                value_piece = piece if value.shape == shard.shape else Piece(shape=tuple(value.shape))
                yield f"{name}.{key}", (value_piece, value)
        if shard.data_ptr() != _local_tensor(updated.parameter).data_ptr() and shard.dtype != updated.parameter.dtype:
            yield f"{name}.{MASTER_KEY}", (piece, shard)


@dataclass(frozen=True)
class UpdatedTensor:
    """Describe what the optimizer of this rank updates of one parameter."""

    parameter: Tensor
    shard: Tensor  # the parameter's memory itself, or an fp32 copy
    state_key: Tensor  # the tensor to which the optimizer's state belongs: the shard, or its copy on the host


def updated_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the parameter name of each tensor to which this rank's optimizer has a state."""
    names = full_names(model)
    return {updated.state_key: names[updated.parameter] for updated in _updated_tensors(optimizer)}


def _updated_tensors(optimizer: torch.optim.Optimizer) -> Iterator[UpdatedTensor]:
    shards: dict[Tensor, Tensor] = {}  # the parameter of each shard
    if isinstance(optimizer, ShardedOptimizer):
        shards = optimizer.shards
        optimizer = optimizer.inner
    if isinstance(optimizer, HostOptimizer):
        state_keys = dict(optimizer.copies)
    else:
        state_keys = {tensor: tensor for group in optimizer.param_groups for tensor in group["params"]}
    for state_key, shard in state_keys.items():
        yield UpdatedTensor(shards.get(shard, shard), shard, state_key)


def _updated_pieces(optimizer: torch.optim.Optimizer) -> Iterator[tuple[UpdatedTensor, Piece]]:
    """Yield each non-empty shard that the optimizer of this rank updates, and the piece that it is of the parameter."""
    for updated in _updated_tensors(optimizer):
        if updated.shard.numel():
            yield updated, piece_of(updated.parameter, rows=_updated_rows(optimizer, updated.parameter))


def _updated_rows(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Interval | None:
    return optimizer.sharding.rows(parameter) if isinstance(optimizer, ShardedOptimizer) else None


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's pipeline stages on this rank, each with the names of the full model, or the model itself."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the name under which each tied weight is saved."""
    return dict(getattr(base_of(model), "all_tied_weights_keys", None) or {})


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


StoredPieces = dict[str, list[tuple[Piece, StoredTensor]]]


def is_sharded(directory: Path) -> bool:
    """Return whether the checkpoint in ``directory`` is sharded."""
    return any(directory.glob("pieces-*.json"))


def checksums_of_ranks(directory: Path) -> dict[str, str]:
    """Return the checksums that ranks computed of their own files, by file name."""
    checksums: dict[str, str] = {}
    for path in sorted(directory.glob("pieces-*.json")):
        checksums |= Pieces.from_file(path).checksums
    return checksums


def read_pieces(directory: Path) -> dict[str, StoredPieces]:
    """Return the stored tensors by kind and name, from a sharded checkpoint or one that one process wrote."""
    stored: dict[str, StoredPieces] = {kind: {} for kind in KINDS}
    if not is_sharded(directory):
        optimizer_files = sorted(directory.glob("optimizer*.safetensors"))
        tensors = {
            "weights": list(find_safetensors(directory).tensors.values()),
            "optimizer": [tensor for path in optimizer_files for tensor in read_header(path).tensors],
        }
        for kind in KINDS:
            for tensor in tensors[kind]:
                stored[kind][tensor.name] = [(Piece(shape=tensor.shape), tensor)]
        return stored
    for path in sorted(directory.glob("pieces-*.json")):
        pieces = Pieces.from_file(path).tensors
        for kind in KINDS:
            file = path.with_name(path.name.replace("pieces-", f"{kind}-")).with_suffix(".safetensors")
            if not file.is_file():
                continue
            for tensor in read_header(file).tensors:
                stored[kind].setdefault(tensor.name, []).append((pieces[f"{kind}/{tensor.name}"], tensor))
    return stored


def fill(target: Tensor, piece: Piece, name: str, stored: StoredPieces, directory: Path, *, allow_rounding: bool = False) -> None:
    """Fill this rank's shard of a tensor from the stored pieces.

    ``allow_rounding`` allows rounding to bf16, for a model that keeps fp32 weights in its optimizer. Raise RequestError if the
    pieces belong to another model or precision.
    """
    num_copied = 0
    for source_piece, stored_tensor in stored.get(name, ()):
        source = read_tensor(stored_tensor)
        if source_piece.shape != piece.shape or (source.dtype != target.dtype and not allow_rounding):
            raise RequestError(
                f"{directory} has {name} as {source_piece.shape} {source.dtype}, this run as {piece.shape} {target.dtype}; "
                "resume with the model and precision of that run"
            )
        num_copied += copy_overlap(target, piece, source, source_piece)
    if num_copied != piece.numel:
        contents = f"{num_copied} of the {piece.numel} numbers of {name}" if num_copied else f"no {name}"
        raise RequestError(f"{directory} has {contents}; resume with the model and the optimizer that the run was started with")


@torch.no_grad()
def load_weights(
    directory: Path, model: nn.Module, stored: dict[str, StoredPieces] | None = None, *, allow_rounding: bool = False
) -> None:
    """Load weights from a checkpoint of any layout into this rank's shards. ``fill`` explains ``allow_rounding``."""
    stored = stored or read_pieces(directory)
    never_saved = never_saved_names(stages_of(model)[0])
    for name, (piece, tensor) in local_weights(model).items():
        if name in never_saved:
            continue
        master_name = f"{name}.{MASTER_KEY}"
        if tensor.dtype == torch.float32 and master_name in stored["optimizer"]:
            fill(tensor, piece, master_name, stored["optimizer"], directory)
        else:
            fill(tensor, piece, name, stored["weights"], directory, allow_rounding=allow_rounding)


@torch.no_grad()
def load_shards(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: Callable[[str], dict[str, Any]],
    *,
    stored: dict[str, StoredPieces] | None = None,
) -> None:
    """Load weights and optimizer state into this rank's shards.

    ``numbers`` returns the values of a parameter's state that are not tensors. ``stored`` replaces the result of
    ``read_pieces``.
    """
    stored = stored or read_pieces(directory)
    has_masters = any(updated.shard.dtype != updated.parameter.dtype for updated, _ in _updated_pieces(optimizer))
    load_weights(directory, model, stored, allow_rounding=has_masters)
    names = full_names(model)
    keys: dict[str, list[str]] = {}
    for full_name in stored["optimizer"]:
        name, _, key = full_name.rpartition(".")
        keys.setdefault(name, []).append(key)
    groups = {state_key: group for group in optimizer.param_groups for state_key in group["params"]}
    optimizer.state.clear()
    for updated, piece in _updated_pieces(optimizer):
        name = names[updated.parameter]
        state_key = updated.state_key
        state: dict[str, Any] = dict(numbers(name))
        for key in keys.get(name, ()):
            full_name = f"{name}.{key}"
            if key == MASTER_KEY:
                continue
            state[key] = _read_state(state_key, piece, full_name, stored["optimizer"], directory, groups[state_key])
        if state:
            optimizer.state[state_key] = state
        if updated.shard.dtype != updated.parameter.dtype:
            master = f"{name}.{MASTER_KEY}"
            kind = "optimizer" if master in stored["optimizer"] else "weights"
            fill(updated.shard, piece, master if kind == "optimizer" else name, stored[kind], directory)


def _read_state(
    state_key: Tensor, piece: Piece, full_name: str, stored: StoredPieces, directory: Path, group: dict[str, Any]
) -> Tensor:
    """Return one tensor of the state of a shard, where the shard or its copy on the host is."""
    first_piece, first_tensor = stored[full_name][0]
    if first_piece.shape != piece.shape:  # a number for the whole parameter, such as its count of steps
        return place_state(read_tensor(first_tensor).clone(), full_name.rpartition(".")[2], state_key, group)
    state = torch.empty_like(state_key, dtype=dtype_of(first_tensor), requires_grad=False)
    fill(state, piece, full_name, stored, directory)
    return state
