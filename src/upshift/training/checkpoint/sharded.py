"""Write and read a checkpoint of ranks that have the model in parts: each writes its own, and any ranks with any layout read
them.

Beside what every checkpoint has, `checkpoint-<step>` holds for each rank `weights-<rank>.safetensors`,
`optimizer-<rank>.safetensors` and `pieces-<rank>.json`, which says for each tensor where in the whole it belongs. A part that
several ranks have alike is written by the first of them. Tensors carry the names of the whole model. Tied weights carry the
one name that they are saved under.

Describe the part of a tensor that a rank has, and turn parts of one layout into those of another.

A part is, in every dimension, some intervals of the whole put behind each other: rows that fully_shard deals, columns of
tensor parallelism, both halves of a packed weight.
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
from upshift.internals.transformers_names import NOT_SAVED
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.tensors import dtype_of, read_tensor
from upshift.models.adapter import base_of
from upshift.planning.plan import Plan
from upshift.training.checkpoint.async_save import HostCopies
from upshift.training.checkpoint.model import saved_state
from upshift.training.checkpoint.optimizer import placed, plain_name
from upshift.training.checkpoint.state import checksums_of
from upshift.training.distributed.mesh import all_gather_objects
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.sharded import ShardedOptimizer
from upshift.value import Value

Interval = tuple[int, int]  # begin, end
Run = tuple[int, int, int]  # begin in one part, begin in another, length


class Piece(Value):
    """A part of a tensor. ``kept`` has the intervals of each dimension that is divided; all of any other dimension is there."""

    shape: tuple[int, ...]  # of the whole tensor
    kept: dict[int, tuple[Interval, ...]] = {}

    def of(self, dimension: int) -> tuple[Interval, ...]:
        return self.kept.get(dimension, ((0, self.shape[dimension]),))

    @property
    def numel(self) -> int:
        count = 1
        for dimension in range(len(self.shape)):
            count *= sum(end - begin for begin, end in self.of(dimension))
        return count


class Pieces(Value):
    """The contents of the files of one rank."""

    tensors: dict[str, Piece]
    checksums: dict[str, str] = {}  # SHA-256 of the rank's own files by name


def piece_of(tensor: Tensor, *, rows: Interval | None = None) -> Piece:
    """Return the piece of a parameter that this rank has. With ``rows``, return only these rows of its first dimension."""
    shape = tuple(tensor.shape)
    places: dict[int, Tensor] = {}
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "a rank has parts of its own meshes' tensors alone"
        # From the inside out: fully_shard divides the rows that tensor parallelism has left to the rank.
        for number, placement in reversed(list(enumerate(tensor.placements))):
            if placement.is_replicate():
                continue
            dimension: int = placement.dim  # type: ignore[attr-defined]
            before = places.get(dimension, torch.arange(shape[dimension]))
            placement = Shard(dimension) if dimension in places else placement
            # As the placement itself divides the whole: packed weights, and rows of columns, are not one interval.
            along = before.view([-1 if one == dimension else 1 for one in range(len(shape))])
            parts, _ = SPLIT_TENSOR.of(placement)(along, tensor.device_mesh.size(number), with_padding=False, contiguous=False)
            places[dimension] = parts[coordinates[number]].reshape(-1)
    if rows is not None and shape:
        places[0] = places.get(0, torch.arange(shape[0]))[rows[0] : rows[1]]
    return Piece(shape=shape, kept={dimension: _intervals(found) for dimension, found in places.items()})


def copy_shared(target: Tensor, own: Piece, source: Tensor, other: Piece) -> int:
    """Copy the elements that both pieces have from ``source`` into ``target``. Return how many elements that was."""
    copied = 0
    runs = [list(_runs(own.of(dimension), other.of(dimension))) for dimension in range(len(own.shape))]
    for one in product(*runs):
        into, out_of = target, source
        for dimension, (here, there, length) in enumerate(one):
            into, out_of = into.narrow(dimension, here, length), out_of.narrow(dimension, there, length)
        into.copy_(out_of)
        copied += into.numel()
    return copied


def _runs(own: tuple[Interval, ...], other: tuple[Interval, ...]) -> Iterator[Run]:
    here = 0
    for begin, end in own:
        there = 0
        for first, last in other:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield here + low - begin, there + low - first, high - low
            there += last - first
        here += end - begin


def _intervals(places: Tensor) -> tuple[Interval, ...]:
    """Return the intervals of places that come in rising runs."""
    if not places.numel():
        return ()
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    runs = places.tensor_split(breaks.tolist()) if breaks.numel() else (places,)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


KINDS = ("weights", "optimizer")
MASTER = "master_weight"  # a part's fp32 copy, where the model has bf16
Here = dict[str, tuple[Piece, Tensor]]


@dataclass(frozen=True)
class Own:
    """The parts that this rank writes, by kind."""

    rank: int
    found: dict[str, Here]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for here in self.found.values() for _, tensor in here.values())

    def copied(self) -> Own:
        """Return a copy in host memory, where training does not change it."""
        copies = HostCopies()
        found: dict[str, Here] = {}
        for kind, here in self.found.items():
            found[kind] = {name: (piece, copies.of(tensor)) for name, (piece, tensor) in here.items()}
        return Own(self.rank, found)

    def write(self, directory: Path) -> None:
        pieces = {f"{kind}/{name}": piece for kind, here in self.found.items() for name, (piece, _) in here.items()}
        written = []
        for kind, here in self.found.items():
            if here:
                tensors = {name: tensor.detach().contiguous() for name, (_, tensor) in here.items()}
                written.append(f"{kind}-{self.rank:05d}.safetensors")
                save_file(tensors, directory / written[-1])
        document = Pieces(tensors=pieces, checksums=checksums_of(directory, written)).to_json()
        (directory / f"pieces-{self.rank:05d}.json").write_text(document, encoding="utf-8")


def own_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: Plan, rank: int) -> Own:
    """Return the parts that this rank writes. All ranks call it together. Without an optimizer these are weights alone."""
    here = {"weights": weights_here(model), "optimizer": {} if optimizer is None else dict(state_here(model, optimizer))}
    said = {(kind, name): piece for kind, found in here.items() for name, (piece, _) in found.items() if piece.numel}
    first: dict[tuple[str, str, str], int] = {}
    for number, known in enumerate(all_gather_objects(said, plan)):
        for (kind, name), piece in known.items():
            first.setdefault((kind, name, piece.to_json()), number)
    found = {
        kind: {name: one for name, one in tensors.items() if first.get((kind, name, one[0].to_json())) == rank}
        for kind, tensors in here.items()
    }
    return Own(rank, found)


def whole_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the names of this rank's parameters in the whole model."""
    found: dict[Tensor, str] = {}
    for part in parts_of(model):
        tied = tied_names(part)
        for name, parameter in part.named_parameters():
            found.setdefault(parameter, tied.get(plain_name(name), plain_name(name)))
    return found


def weights_here(model: nn.Module) -> Here:
    """Return the saved parameters and buffers of the model."""
    found: Here = {}
    for part in parts_of(model):
        tied = tied_names(part)
        for name, tensor in saved_state(part).items():
            known = tied.get(plain_name(name), plain_name(name))
            if known not in found:
                found[known] = (piece_of(tensor), _local(tensor))
    return found


def state_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, tuple[Piece, Tensor]]]:
    """Yield tensors of the optimizer state by ``<parameter>.<state>``. Raise RequestError for state that is not made of plain
    tensors."""
    names = whole_names(model)
    for part, parameter, piece in _updated(optimizer):
        for key, value in optimizer.state.get(part, {}).items():
            if isinstance(value, Tensor):
                if type(value) is not Tensor:
                    raise RequestError(f"the optimizer keeps {type(value).__name__} of parts of weights, which cannot be saved")
                whole = Piece(shape=tuple(value.shape))
                yield f"{names[parameter]}.{key}", (piece if value.shape == part.shape else whole, value)
        if part.data_ptr() != _local(parameter).data_ptr() and part.dtype != parameter.dtype:
            yield f"{names[parameter]}.{MASTER}", (piece, part)


def updated_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return, for each tensor that the optimizer updates here, the name of its parameter."""
    names = whole_names(model)
    return {part: names[parameter] for part, parameter in _parts(optimizer)}


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor that is updated here, with its parameter."""
    if isinstance(optimizer, ShardedOptimizer):
        yield from optimizer.shards.items()
    elif isinstance(optimizer, HostOptimizer):
        yield from optimizer.copies.items()
    else:
        yield from ((parameter, parameter) for group in optimizer.param_groups for parameter in group["params"])


def _updated(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor, Piece]]:
    """Yield each tensor that is updated here and not empty, with its parameter and its piece of it."""
    for part, parameter in _parts(optimizer):
        if part.numel():
            yield part, parameter, piece_of(parameter, rows=_rows(optimizer, parameter))


def _rows(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Interval | None:
    return optimizer.sharding.rows(parameter) if isinstance(optimizer, ShardedOptimizer) else None


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the stages of a pipeline's rank that has several, each named like the whole model, or the model itself."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for each weight that is tied to another one, the name that it is saved under."""
    return dict(getattr(base_of(model), "all_tied_weights_keys", None) or {})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


Stored = dict[str, list[tuple[Piece, StoredTensor]]]


def is_divided(directory: Path) -> bool:
    return any(directory.glob("pieces-*.json"))


def checksums_of_ranks(directory: Path) -> dict[str, str]:
    """Return the checksums, by name, of the files that ranks wrote and read themselves."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob("pieces-*.json")):
        found |= Pieces.from_file(path).checksums
    return found


def read_pieces(directory: Path) -> dict[str, Stored]:
    """Return stored tensors by kind and name, from the files of all ranks, or of a checkpoint that one process wrote whole."""
    found: dict[str, Stored] = {kind: {} for kind in KINDS}
    if not is_divided(directory):
        whole = {
            "weights": list(find_safetensors(directory).tensors.values()),
            "optimizer": [one for path in sorted(directory.glob("optimizer*.safetensors")) for one in read_header(path).tensors],
        }
        for kind, tensors in whole.items():
            for stored in tensors:
                found[kind][stored.name] = [(Piece(shape=stored.shape), stored)]
        return found
    for path in sorted(directory.glob("pieces-*.json")):
        pieces = Pieces.from_file(path).tensors
        for kind in KINDS:
            file = path.with_name(path.name.replace("pieces-", f"{kind}-")).with_suffix(".safetensors")
            for stored in read_header(file).tensors if file.is_file() else ():
                found[kind].setdefault(stored.name, []).append((pieces[f"{kind}/{stored.name}"], stored))
    return found


def fill(target: Tensor, piece: Piece, name: str, stored: Stored, directory: Path, *, rounds: bool = False) -> None:
    """Fill this rank's part of a tensor from the parts that were saved.

    ``rounds`` allows rounding to bf16, if fp32 weights are kept beside the tensor. Raise RequestError if the parts are of
    another model or precision.
    """
    copied = 0
    for other, source in stored.get(name, ()):
        found = read_tensor(source)
        if other.shape != piece.shape or (found.dtype != target.dtype and not rounds):
            raise RequestError(
                f"{directory} has {name} as {other.shape} {found.dtype}, this run as {piece.shape} {target.dtype}; "
                "resume with the model and precision of that run"
            )
        copied += copy_shared(target, piece, found, other)
    if copied != piece.numel:
        what = f"{copied} of the {piece.numel} numbers of {name}" if copied else f"no {name}"
        raise RequestError(f"{directory} has {what}; resume with the model and the optimizer that the run was started with")


@torch.no_grad()
def load_weights(directory: Path, model: nn.Module, stored: dict[str, Stored] | None = None, *, rounds: bool = False) -> None:
    """Load weights from a checkpoint of any ranks into this rank's parts. ``rounds`` has the meaning that it has in ``fill``."""
    stored = stored or read_pieces(directory)
    ignored = set(NOT_SAVED.read(base_of(parts_of(model)[0])) or ())
    for name, (piece, tensor) in weights_here(model).items():
        if name in ignored:
            continue
        exact = f"{name}.{MASTER}"
        if tensor.dtype == torch.float32 and exact in stored["optimizer"]:
            fill(tensor, piece, exact, stored["optimizer"], directory)
        else:
            fill(tensor, piece, name, stored["weights"], directory, rounds=rounds)


@torch.no_grad()
def load_parts(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: Callable[[str], dict[str, Any]],
    *,
    stored: dict[str, Stored] | None = None,
) -> None:
    """Load weights and optimizer state into this rank's parts.

    ``numbers`` returns the values of a parameter's state that are no tensors. ``stored`` replaces the result of
    ``read_pieces``.
    """
    stored = stored or read_pieces(directory)
    masters = {part for part, parameter, _ in _updated(optimizer) if part.dtype != parameter.dtype}
    load_weights(directory, model, stored, rounds=bool(masters))
    names = whole_names(model)
    keys: dict[str, list[str]] = {}
    for full_name in stored["optimizer"]:
        name, _, key = full_name.rpartition(".")
        keys.setdefault(name, []).append(key)
    groups = {part: group for group in optimizer.param_groups for part in group["params"]}
    optimizer.state.clear()
    for part, parameter, piece in _updated(optimizer):
        name = names[parameter]
        state: dict[str, Any] = dict(numbers(name))
        for key in keys.get(name, ()):
            full_name = f"{name}.{key}"
            if key == MASTER:
                continue
            state[key] = _state(part, piece, full_name, stored["optimizer"], directory, groups[part])
        if state:
            optimizer.state[part] = state
        if part.dtype != parameter.dtype:
            master = f"{name}.{MASTER}"
            kind = "optimizer" if master in stored["optimizer"] else "weights"
            fill(part, piece, master if kind == "optimizer" else name, stored[kind], directory)


def _state(part: Tensor, piece: Piece, full_name: str, stored: Stored, directory: Path, group: dict[str, Any]) -> Tensor:
    first, source = stored[full_name][0]
    if first.shape != piece.shape:  # a number of the whole parameter, such as its count of steps
        return placed(read_tensor(source).clone(), full_name.rpartition(".")[2], part, group)
    found = torch.empty_like(part, dtype=dtype_of(source), requires_grad=False)
    fill(found, piece, full_name, stored, directory)
    return found
