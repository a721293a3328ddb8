"""Counts what a rank's collectives move, by operation and by the ranks that take part, as torch's dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class Moved(NamedTuple):
    operation: str
    ranks: tuple[int, ...]


# The bytes of a collective are those of the tensor that all ranks have together; of a rank's own where all send to all, or one
# to one. By the name of the operator: which operation it is, and which argument holds that tensor.
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
UNCOUNTED = {"c10d::barrier", "c10d::recv_", "c10d::recv_any_source_", "_c10d_functional::wait_tensor",
             "_c10d_functional::_wrap_tensor_autograd"}  # fmt: skip


class ExchangedBytes(TorchDispatchMode):
    """While open. ``bytes`` and ``calls`` by operation and group."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[Moved] = Counter()
        self.calls: Counter[Moved] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in OPERATORS:
            operation, place = OPERATORS[name]
            key = Moved(operation, ranks_of(args))
            self.bytes[key] += bytes_of(result if place is None else args[place])
            self.calls[key] += 1
        elif name.startswith(("c10d::", "_c10d_functional")) and name not in UNCOUNTED:
            raise RuntimeError(f"nobody counts what {name} moves")
        return result


def ranks_of(args: Any) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except RuntimeError:  # another kind of boxed value, such as a reduction
                continue
    named = [value for value in args if isinstance(value, str) and value not in ("sum", "avg")]
    return tuple(dist.get_process_group_ranks(_resolve_process_group(named[-1])))


def bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value))
