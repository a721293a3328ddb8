"""Rewrite one pickle of weights as safetensors: python -m upshift.loading.files.bin_process FROM TO.

The process limits its memory, time and file sizes before it opens the file. If it rejects the file or fails, it prints one line
of JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import re
import resource
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.safetensors_header import BITS, METADATA, quote
from upshift.loading.files.safetensors_writer import CHUNK_BYTES, NewTensor, check_file, sort_tensors, write_file
from upshift.units import GIB, KIB, MIB, format_bytes

CLONE_NEWUSER = 0x10000000  # from sched.h of Linux
CLONE_NEWNET = 0x40000000
# Limits of processor time. Reading, writing and hashing twice takes a fifth of it.
CPU_SECONDS = 120
MIN_BYTES_PER_SECOND = 20 * MIB
SPARE_MEMORY_BYTES = GIB  # besides imported libraries and twice the file: as it is mapped, and a copy
MAX_SIZE_RATIO = 4  # bytes of all tensors to bytes of the file: several names may share a tensor
ZIP_MAGIC = b"PK\x03\x04"


def main(source: Path, destination: Path) -> None:
    _leave_network()
    import torch

    torch.set_num_threads(1)
    _set_limits(source.stat().st_size)
    tensors = [_to_new_tensor(source, name, tensor) for name, tensor in _load_pickle(source).items()]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    max_bytes = MAX_SIZE_RATIO * source.stat().st_size
    if nbytes > max_bytes:
        raise RequestError(
            f"{source} has {format_bytes(max_bytes / MAX_SIZE_RATIO)} and would be tensors of {format_bytes(nbytes)}"
        )
    check_file(destination, write_file(destination, sort_tensors(tensors), {"format": "pt"}, lambda _: None), lambda _: None)


def _leave_network() -> None:
    """Move the process to a network without devices, if the system allows it. A container often does not."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "unshare") and library.unshare(CLONE_NEWNET) != 0:
        library.unshare(CLONE_NEWUSER | CLONE_NEWNET)


def _set_limits(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_CPU, CPU_SECONDS + nbytes // MIN_BYTES_PER_SECOND)
    _lower(resource.RLIMIT_FSIZE, MAX_SIZE_RATIO * nbytes + MIB)
    status = Path("/proc/self/status")
    if status.is_file():
        data_segment = re.search(r"VmData:\s*(\d+) kB", status.read_text(encoding="ascii"))
        _lower(
            resource.RLIMIT_DATA, SPARE_MEMORY_BYTES + 2 * nbytes + (0 if data_segment is None else int(data_segment[1]) * KIB)
        )


def _lower(kind: int, limit: int) -> None:
    highest = resource.getrlimit(kind)[1]
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(kind, (limit, limit))


def _load_pickle(source: Path) -> dict[str, Any]:
    import torch

    with source.open("rb") as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC  # torch uses the same test
    try:
        if is_zip and any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(source).infolist()):
            raise RequestError(f"{source} is compressed, and torch.save compresses nothing; save the model as safetensors")
        weights = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except RequestError:
        raise
    except MemoryError:
        raise RequestError(f"{source} takes more memory than its weights would; save the model as safetensors") from None
    except Exception as error:  # the loader checks little, and the file may be anything
        raise RequestError(_refusal_message(source, str(error) or type(error).__name__)) from None
    if not isinstance(weights, dict) or not weights:
        raise RequestError(
            f"{source} holds no tensors by name but {quote(type(weights).__name__)}; save the model's state_dict()"
        )
    return weights


def _refusal_message(source: Path, message: str) -> str:
    code_name = re.search(r"GLOBAL (\S+)|whose module (\S+) is blocked|must be imported", message)
    if code_name:
        quoted_name = quote(code_name[1] or message.splitlines()[0])
        return f"{source} holds code ({quoted_name}), not weights alone, and none of it was run; save the model as safetensors"
    reason = next((line for line in reversed(message.splitlines()) if "WeightsUnpickler error" in line), message.splitlines()[0])
    return f"{source} is no whole file of torch.save ({quote(reason.strip())}); copy it, or save the model as safetensors"


def _to_new_tensor(source: Path, name: Any, tensor: Any) -> NewTensor:
    import torch

    from upshift.loading.files.tensors import DTYPE_NAMES

    if not isinstance(name, str) or name == METADATA or not _is_text(name):
        raise RequestError(f"{source} has a tensor of the name {quote(name)}; names are text; save the model's state_dict()")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        type_name = type(tensor).__name__
        raise RequestError(f"{source} has {quote(name)} of the type {type_name}, and not a tensor; save the model's state_dict()")
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or BITS[dtype] < 8 or tensor.layout != torch.strided or tensor.device.type != "cpu":
        layout = f"{tensor.dtype}, {tensor.layout} and {tensor.device.type}"
        raise RequestError(f"{source} has the tensor {quote(name)} in {layout}, which safetensors does not store")
    return NewTensor(name, dtype, tuple(tensor.shape), lambda: _byte_chunks(tensor.detach()))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _byte_chunks(tensor: Any) -> Iterator[memoryview]:
    from upshift.loading.files.tensors import bytes_of

    content = bytes_of(tensor)
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def run_command(arguments: list[str]) -> int:
    try:
        main(Path(arguments[0]), Path(arguments[1]))
    except RequestError as error:
        report = {"refused": str(error)}
    except JobFailed as error:
        report = {"failed": str(error)}
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        report = {"failed": f"{arguments[0]} could not be rewritten as safetensors: {reason}; free some of the disk, or look why"}
    else:
        return 0
    sys.stdout.write(json.dumps(report) + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
