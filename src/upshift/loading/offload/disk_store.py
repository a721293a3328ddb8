# needs torch
"""Convert weights that stay on the disk, once, to the model's dtype and layout, into one file of the offload folder.

The file's name is a hash of its input files and of the names, shapes and dtypes of its weights, so that the next run finds it.
The file gets this name when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
from torch import Tensor

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.safetensors_writer import NewTensor, write_file
from upshift.loading.files.tensors import DTYPE_NAMES, bytes_of, dtype_of
from upshift.loading.fill_model import CPU, Filling
from upshift.loading.key_mapping import Group
from upshift.loading.placement.place import DISK, Placement
from upshift.settings import read_settings
from upshift.units import format_bytes


def converted_folder() -> Path:
    """Return the folder in the cache for weights whose dtype or layout differs from that of the model's files."""
    return read_settings().cache_dir / "offload"


def find_or_convert(filling: Filling, placement: Placement, folder: Path | None) -> dict[str, StoredTensor]:
    """Return the stored tensor, in the model's dtype and layout, of each weight that stays on the disk.

    Convert weights that are stored otherwise. Raise RequestError if this needs a folder and none is given, and JobFailed if the
    disk has no room."""
    stored_tensors: dict[str, StoredTensor] = {}
    converted: list[Group] = []
    for group in filling.names.groups:
        if placement.device_of(group.target) != DISK:
            continue
        stored = filling.tensors[group.sources[0][1]]
        if group.converter is None and dtype_of(stored) == filling.dtype_of(group.target):
            stored_tensors[group.target] = stored
        else:
            converted.append(group)
    if not converted:
        return stored_tensors
    if folder is None:
        raise RequestError(
            f"{converted[0].target} and {len(converted) - 1} other weights stay on the disk and must be converted first; give an "
            "offload_folder to keep the converted ones in, or leave out dtype"
        )
    return stored_tensors | {tensor.name: tensor for tensor in _convert_groups(filling, converted, folder)}


def _convert_groups(filling: Filling, groups: Sequence[Group], folder: Path) -> tuple[StoredTensor, ...]:
    making = _Conversion(filling, groups)
    path = folder / f"{making.identity()}.safetensors"
    if not path.is_file():
        _write(path, making.tensors())
    return read_header(path).tensors


class _Conversion:
    """The conversion of groups. A group is converted when its first tensor is written, and freed after its last."""

    def __init__(self, filling: Filling, groups: Sequence[Group]) -> None:
        self._filling = filling
        self._converted = dict[str, Tensor]()
        self._groups = {name: (group, shape) for group in groups for name, shape in filling.filled_shapes(group).items()}

    def identity(self) -> str:
        files_used = {self._filling.tensors[name].file for group, _ in self._groups.values() for _, name in group.sources}
        files = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(files_used)]
        outputs = [(name, tuple(shape), str(self._filling.dtype_of(name))) for name, (_, shape) in self._groups.items()]
        return hashlib.sha256(repr((files, outputs)).encode()).hexdigest()[:24]

    def tensors(self) -> list[NewTensor]:
        return [
            NewTensor(name, DTYPE_NAMES[self._filling.dtype_of(name)], tuple(shape), partial(self._tensor_bytes, name))
            for name, (_, shape) in self._groups.items()
        ]

    def _tensor_bytes(self, name: str) -> Iterator[memoryview]:
        if name not in self._converted:
            self._converted |= self._filling.read_group(self._groups[name][0], CPU)
        yield bytes_of(self._converted.pop(name).to(self._filling.dtype_of(name)))


def _write(path: Path, tensors: Sequence[NewTensor]) -> None:
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_files(path)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise RequestError(f"offload_folder {path.parent} cannot be written to: {error.strerror}; give another one") from None
    if num_bytes > free:
        raise JobFailed(
            f"the weights that stay on the disk take {format_bytes(num_bytes)} converted, and {path.parent} has "
            f"{format_bytes(free)} left; nothing was written: give an offload_folder on another disk (UPSHIFT_CACHE to a command)"
        )
    partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write_file(partial_file, tensors, {}, lambda num_bytes: None)
        partial_file.replace(path)
    except OSError as error:
        raise JobFailed(
            f"cannot write {path}: {error.strerror}; nothing of it was kept: free some room, or give another offload_folder "
            "(UPSHIFT_CACHE to a command)"
        ) from None
    finally:
        partial_file.unlink(missing_ok=True)


def _remove_stale_files(path: Path) -> None:
    """Remove the partial files of processes that were killed while they wrote this file."""
    for partial_file in path.parent.glob(f"{path.name}.*.part"):
        process = partial_file.name.split(".")[-2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            partial_file.unlink(missing_ok=True)


def check_groups_undivided(filling: Filling, placement: Placement) -> None:
    """Raise RequestError if a device map puts weights that come from the same stored tensors on several devices."""
    for group in filling.names.groups:
        if group.converter is None:
            continue
        devices = {placement.device_of(name): name for name in filling.filled_shapes(group)}
        if len(devices) > 1:
            devices_by_name = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise RequestError(
                f"device_map divides what is made of the same stored weights ({devices_by_name}); give them one device"
            )
