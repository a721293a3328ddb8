"""Rewrite a checkpoint into a new folder, shard by shard, or only divide it into other files (``upshift shard``).

Each shard is read again and compared before it gets its final name.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from upshift.errors import RequestError
from upshift.loading.files.checkpoint import CONFIG, INDEX, METADATA, WEIGHTS, find_checkpoint, find_model_folder, small_files
from upshift.loading.files.safetensors_writer import (
    NewTensor,
    OnBytes,
    check_file,
    copy_tensor,
    encode_header,
    sort_tensors,
    write_file,
)
from upshift.loading.rewrite.output_folder import OutputFolder
from upshift.units import GIGA
from upshift.value import Value

MAX_SHARD_BYTES = 5 * GIGA

Progress = Callable[[int, int], None]  # bytes that were written or read again, bytes in total


@dataclass(frozen=True)
class Rewrite:
    """A request to write tensors and small files into a folder."""

    description: str  # the request, for messages
    folder: Path  # the input's folder
    tensors: Sequence[NewTensor]  # in the order in which they fill the shards
    sources: Sequence[Path]  # all files that the tensors' bytes come from
    metadata: Mapping[str, str]
    documents: Mapping[str, bytes]  # content of new small files, by name
    copies: Mapping[str, Path]  # small files to copy, by their new name
    max_shard_bytes: int = MAX_SHARD_BYTES
    noted: dict[str, int] = field(default_factory=dict)  # numbers to report, which are added while tensors are written

    def identity(self) -> str:
        """Return a hash of the request and its input files.

        A file that was written again counts as another file."""
        stats = [(str(file.absolute()), file.stat()) for file in (*self.sources, *self.copies.values())]
        made_of = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors]
        content = repr((self.max_shard_bytes, made_of, tensors, sorted(self.documents.items())))
        return hashlib.sha256(content.encode()).hexdigest()


class Rewritten(Value):
    """The result of a rewrite."""

    output: Path
    tensors: int
    bytes: int
    shards: int
    kept_shards: int  # an earlier run had finished them
    sha256: str  # a hash of all names, dtypes, shapes and contents, independent of their division into files
    seconds: float
    noted: dict[str, int]


def rewrite(job: Rewrite, output: Path, progress: Progress) -> Rewritten:
    """Write the checkpoint.

    Raise RequestError if ``output`` belongs to another request, and JobFailed if its disk fails or is full."""
    start = time.perf_counter()
    if output.resolve() == job.folder.resolve():
        raise RequestError(f"--output {output} is the input itself; give another folder")
    shards = split(job.tensors, job.max_shard_bytes)
    folder = OutputFolder(output)
    with folder.claimed(request=job.description, made_of=job.identity()):
        num_kept = _count_finished_shards(folder, shards, job.metadata, [*job.copies.values()])
        with folder.report_interruption(len(shards)):
            _write(job, folder, shards, progress)
    return Rewritten(
        output=output,
        tensors=len(job.tensors),
        bytes=_total_bytes(job.tensors),
        shards=len(shards),
        kept_shards=num_kept,
        sha256=_digest(job.tensors, folder.manifest.shards),
        seconds=time.perf_counter() - start,
        noted=folder.manifest.noted,
    )


def split(tensors: Sequence[NewTensor], max_bytes: int) -> dict[str, list[NewTensor]]:
    """Return the tensors of each file, by file name, divided as by transformers' save_pretrained.

    Tensors stay in order. A tensor larger than ``max_bytes`` gets its own file."""
    shards: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > max_bytes:
            shards.append([tensor])
            continue
        if size + tensor.nbytes > max_bytes:
            shards.append(current)
            current = []
            size = 0
        current.append(tensor)
        size += tensor.nbytes
    if current or not shards:
        shards.append(current)
    if len(shards) == 1:
        return {WEIGHTS: sort_tensors(shards[0])}
    stem, suffix = os.path.splitext(WEIGHTS)
    files = {}
    for number, shard_tensors in enumerate(shards, start=1):
        files[f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"] = sort_tensors(shard_tensors)
    return files


def _count_finished_shards(
    folder: OutputFolder, shards: Mapping[str, list[NewTensor]], metadata: Mapping[str, str], copies: Sequence[Path]
) -> int:
    """Return how many shards need not be written again, and check that the disk has room for the others.

    The shards were read again when they were written, so only their headers and sizes are checked now."""
    bytes_to_write = 0
    for name, tensors in shards.items():
        file = folder.path / name
        header = encode_header(tensors, metadata)
        size = len(header) + _total_bytes(tensors)
        if name in folder.manifest.shards and file.is_file() and file.stat().st_size == size:
            with file.open("rb") as handle:
                if handle.read(len(header)) == header:
                    continue
        folder.drop_shard(name)
        bytes_to_write += size
    folder.check_room(bytes_to_write and bytes_to_write + sum(file.stat().st_size for file in copies))
    return len(folder.manifest.shards)


def _total_bytes(tensors: Sequence[NewTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _write(job: Rewrite, folder: OutputFolder, shards: Mapping[str, list[NewTensor]], progress: Progress) -> None:
    total = 2 * _total_bytes(job.tensors)
    bytes_done = 0

    def on_bytes(count: int) -> None:
        nonlocal bytes_done
        bytes_done += count
        progress(bytes_done, total)

    folder.write_manifest()
    for name, tensors in shards.items():
        if name in folder.manifest.shards:
            on_bytes(2 * _total_bytes(tensors))
        else:
            folder.add_shard(name, _write_shard(folder, name, tensors, job.metadata, on_bytes), job.noted)
    if len(shards) > 1:
        folder.write(INDEX, _index(shards))
    for name, source in job.copies.items():
        folder.copy(name, source)
    for name, content in job.documents.items():  # config.json is one of these: a folder that has it has all weights
        folder.write(name, content)


def _write_shard(
    folder: OutputFolder, name: str, tensors: Sequence[NewTensor], metadata: Mapping[str, str], on_bytes: OnBytes
) -> dict[str, str]:
    with folder.new_file(name) as partial:
        hashes = write_file(partial, tensors, metadata, on_bytes)
        check_file(partial, hashes, on_bytes)
    return hashes


def _index(shards: Mapping[str, list[NewTensor]]) -> bytes:
    file_of_tensor = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    size = sum(map(_total_bytes, shards.values()))
    return (
        json.dumps({"metadata": {"total_size": size}, "weight_map": file_of_tensor}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _digest(tensors: Sequence[NewTensor], shards: Mapping[str, Mapping[str, str]]) -> str:
    hashes = {name: digest for hashes_of_shard in shards.values() for name, digest in hashes_of_shard.items()}
    entries = sorted((tensor.name, tensor.dtype, tensor.shape, hashes[tensor.name]) for tensor in tensors)
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def shard(model: str, output: Path, *, max_shard_bytes: int, progress: Progress) -> Rewritten:
    """Write the tensors in their stored order. A tied weight is written as often as it is stored."""
    if max_shard_bytes < 1:
        raise RequestError(f"--max-shard-size {max_shard_bytes} leaves no room for a tensor; give a size such as 5GB")
    _, folder = find_model_folder(model)
    checkpoint = find_checkpoint(folder)
    copies = small_files(folder)
    config = copies.pop(CONFIG)
    job = Rewrite(
        description=f"shard {model}",
        folder=folder,
        tensors=[copy_tensor(tensor) for tensor in checkpoint.tensors.values()],
        sources=checkpoint.files,
        metadata={**METADATA, **checkpoint.metadata},
        copies=copies,
        documents={CONFIG: config.read_bytes()},
        max_shard_bytes=max_shard_bytes,
    )
    return rewrite(job, output, progress)
