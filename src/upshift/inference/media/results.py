"""Write the results of pipelines as JSON lines. Images and arrays in them become files in a folder beside the lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.resumable_output import UnfinishedLines
from upshift.loading.media_files import MediaItem

SUFFIX = ".jsonl"
FILES = ("[0-9][0-9][0-9][0-9][0-9][0-9]-*.png", "[0-9][0-9][0-9][0-9][0-9][0-9]-*.npy")  # the names of the files of results


def files_folder(output: Path) -> Path:
    """Return the folder of the images and arrays of an output."""
    return output.with_name(f"{output.stem}_files")


def check_files_folder(output: Path, *, overwrite: bool) -> None:
    """Raise RequestError if the folder of the images and arrays exists, and belongs to no unfinished output."""
    folder = files_folder(output)
    if folder.exists() and not overwrite and not output.with_name(f"{output.name}.partial").exists():
        raise RequestError(f"--output {output}: the folder {folder} of its images exists; give another name, or --overwrite")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--output {output}: {folder} is no folder, and the images of the results go there; give another name")


class ResultLines:
    """An output of one JSON object for each item: {"item": ..., "result": ...}, with ``identity`` as for ``Rows``.

    The result has the form of the pipeline's. An image or an array in it is the name of a file, relative to the output."""

    def __init__(self, output: Path, total: int, identity: str) -> None:
        self._lines = UnfinishedLines(output, total, identity)
        self._folder = files_folder(output)
        if not self._lines.done and self._folder.is_dir():
            for file in (file for pattern in FILES for file in self._folder.glob(pattern)):
                file.unlink()
            with suppress(OSError):  # the user has files there
                self._folder.rmdir()

    @property
    def done(self) -> int:
        return self._lines.done

    def add(self, items: Sequence[MediaItem], results: Iterator[Any]) -> None:
        """Write the results of items. ``results`` are computed one by one."""
        for item, result in zip(items, results, strict=True):
            with self._lines.writing():
                written = self._written(result, f"{self.done + 1:06}")
            self._lines.add([{"item": item.content, "result": written}])

    def close(self) -> None:
        self._lines.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        self._lines.finish()

    def _written(self, value: Any, name: str) -> Any:
        """Return a value as JSON takes it. ``name`` is that of its file, if it becomes one."""
        if isinstance(value, Mapping):
            return {key: self._written(part, f"{name}-{key}") for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._written(part, f"{name}-{number}") for number, part in enumerate(value)]
        if hasattr(value, "save"):  # an image of Pillow
            return self._save(f"{name}.png", value.save)
        if hasattr(value, "numpy"):  # a tensor of torch
            return self._save(f"{name}.npy", lambda path: np.save(path, value.float().cpu().numpy()))
        return value.item() if isinstance(value, np.generic) else value

    def _save(self, name: str, save: Any) -> str:
        self._folder.mkdir(exist_ok=True)
        save(self._folder / name)
        return f"{self._folder.name}/{name}"
