"""Keep weights on the disk that the files hold in another form: they are converted once, into one file of the offload folder.

The file's name is a hash of the files it was made from, and of the names, shapes and dtypes of its weights. So the next run
finds it. The file gets that name when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from torch import Tensor

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.safetensors_writer import NewTensor, write_file
from upshift.loading.files.tensors import DTYPE_NAMES, bytes_of, dtype_of
from upshift.loading.fill import CPU, Filling
from upshift.loading.key_mapping import Group
from upshift.loading.placement.place import DISK, Placement
from upshift.units import format_bytes


def find_or_convert(filling: Filling, placement: Placement, folder: Path | None) -> dict[str, StoredTensor]:
    """Return where each weight that stays on the disk lies in the model's dtype and layout.

    Raise RequestError if some must be converted and there is no folder for it, JobFailed if the disk has no room."""
    found: dict[str, StoredTensor] = {}
    converted: list[Group] = []
    for group in filling.names.groups:
        if placement.device_of(group.target) != DISK:
            continue
        stored = filling.tensors[group.sources[0][1]]
        if group.converter is None and dtype_of(stored) == filling.dtype_of(group.target):
            found[group.target] = stored
        else:
            converted.append(group)
    if not converted:
        return found
    if folder is None:
        raise RequestError(
            f"{converted[0].target} and {len(converted) - 1} other weights stay on the disk and must be converted first; give an "
            "offload_folder to keep the converted ones in, or leave out dtype"
        )
    return found | {tensor.name: tensor for tensor in _converted(filling, converted, folder)}


def _converted(filling: Filling, groups: Sequence[Group], folder: Path) -> tuple[StoredTensor, ...]:
    making = _Conversion(filling, groups)
    path = folder / f"{making.identity()}.safetensors"
    if not path.is_file():
        _write(path, making.tensors())
    return read_header(path).tensors


class _Conversion:
    """The conversion of groups. A group is made when the first of its tensors is written, and kept until the last one is."""

    def __init__(self, filling: Filling, groups: Sequence[Group]) -> None:
        self._filling = filling
        self._made = dict[str, Tensor]()
        self._groups = {name: (group, shape) for group in groups for name, shape in filling.filled(group).items()}

    def identity(self) -> str:
        used = {self._filling.tensors[name].file for group, _ in self._groups.values() for _, name in group.sources}
        files = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(used)]
        made = [(name, tuple(shape), str(self._filling.dtype_of(name))) for name, (_, shape) in self._groups.items()]
        return hashlib.sha256(repr((files, made)).encode()).hexdigest()[:24]

    def tensors(self) -> list[NewTensor]:
        return [
            NewTensor(name, DTYPE_NAMES[self._filling.dtype_of(name)], tuple(shape), lambda name=name: self._pieces(name))  # type: ignore[misc]
            for name, (_, shape) in self._groups.items()
        ]

    def _pieces(self, name: str) -> Iterator[memoryview]:
        if name not in self._made:
            self._made |= self._filling.read_group(self._groups[name][0], CPU)
        yield bytes_of(self._made.pop(name).to(self._filling.dtype_of(name)))


def _write(path: Path, tensors: Sequence[NewTensor]) -> None:
    need = sum(tensor.nbytes for tensor in tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_left_over(path)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise RequestError(f"offload_folder {path.parent} cannot be written to: {error.strerror}; give another one") from None
    if need > free:
        raise JobFailed(
            f"the weights that stay on the disk take {format_bytes(need)} converted, and {path.parent} has {format_bytes(free)} "
            "left; nothing was written: give an offload_folder on another disk"
        )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write_file(part, tensors, {}, lambda num_bytes: None)
        part.replace(path)
    except OSError as error:
        raise JobFailed(
            f"cannot write {path}: {error.strerror}; nothing of it was kept: free some room, or give another offload_folder"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _drop_left_over(path: Path) -> None:
    """Remove partial files of processes that were killed while they wrote this file."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        process = part.name.split(".")[-2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            part.unlink(missing_ok=True)


def check_groups_undivided(filling: Filling, placement: Placement) -> None:
    """Raise RequestError if a map divides weights that are made of the same stored tensors."""
    for group in filling.names.groups:
        if group.converter is None:
            continue
        devices = {placement.device_of(name): name for name in filling.filled(group)}
        if len(devices) > 1:
            apart = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise RequestError(f"device_map divides what is made of the same stored weights ({apart}); give them one device")
