"""``upshift shard``: write the same tensors into other files."""

from __future__ import annotations

from pathlib import Path

from upshift.errors import RequestError
from upshift.loading.checkpoint import find_checkpoint
from upshift.loading.model_folder import CONFIG, METADATA, find_model_folder, small_files
from upshift.loading.rewriting import Progress, Rewrite, Rewritten, rewrite
from upshift.loading.writing import copy_of


def shard(model: str, output: Path, *, max_shard_bytes: int, progress: Progress) -> Rewritten:
    """Write the tensors in the order in which they are stored. A tied weight is written once or twice, as it was."""
    if max_shard_bytes < 1:
        raise RequestError(f"--max-shard-size {max_shard_bytes} leaves no room for a tensor; give a size such as 5GB")
    _, folder = find_model_folder(model)
    checkpoint = find_checkpoint(folder)
    copies = small_files(folder)
    config = copies.pop(CONFIG)
    job = Rewrite(
        words=f"shard {model}",
        folder=folder,
        tensors=[copy_of(tensor) for tensor in checkpoint.tensors.values()],
        sources=checkpoint.files,
        metadata={**METADATA, **checkpoint.metadata},
        copies=copies,
        documents={CONFIG: config.read_bytes()},
        max_shard_bytes=max_shard_bytes,
    )
    return rewrite(job, output, progress)
