"""Write the results of pipelines as JSON lines. Images and arrays in them become files in a folder beside the lines.

Until all results are computed, the files are in a folder of their own, so that an older output keeps its files as long as it is
there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.resumable_output import UnfinishedLines
from upshift.loading.media_files import MediaItem

SUFFIX = ".jsonl"
FILE = re.compile(r"\d{6,}-.*\.(png|npy)")  # the name of a file of a result: the number of the item, and the part of its result


def files_folder(output: Path) -> Path:
    """Return the folder of the images and arrays of an output."""
    return output.with_name(f"{output.stem}_files")


def check_files_folder(output: Path, input_path: Path, *, overwrite: bool) -> None:
    """Raise RequestError if the images and arrays cannot have their folder: it exists, or is a part of the input."""
    folder = files_folder(output)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--output {output}: {folder} is no folder, and the images of the results go there; give another name")
    places = (folder.resolve(), input_path.resolve())
    if input_path.is_dir() and any(place.is_relative_to(other) for place, other in (places, places[::-1])):
        raise RequestError(
            f"--output {output}: the images of the results go to {folder}, and --input {input_path} would hold them; give an "
            "output elsewhere"
        )
    if folder.exists() and not overwrite:
        raise RequestError(f"--output {output}: the folder {folder} of its images exists; give another name, or --overwrite")


def check_no_item_within(output: Path, items: Sequence[MediaItem]) -> None:
    """Raise RequestError if an item is a file in the folder of the output's images and arrays."""
    folder = files_folder(output).resolve()
    for item in items:
        if item.modality != "text" and Path(item.content).resolve().is_relative_to(folder):
            raise RequestError(f"{item.origin} is in {folder}, where --output {output} puts its images; give an output elsewhere")


class ResultLines:
    """An output of one JSON object for each item: {"item": ..., "result": ...}, with ``identity`` as for ``Rows``.

    The result has the form of the pipeline's. An image or an array in it is the name of a file, relative to the output."""

    def __init__(self, output: Path, total: int, identity: str) -> None:
        self._lines = UnfinishedLines(output, total, identity)
        self._output = output
        self._folder = files_folder(output)
        self._unfinished = self._folder.with_name(f"{self._folder.name}.partial")
        if not self._lines.done:
            self._remove_unfinished()

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
        if not self.done:
            self._remove_unfinished()

    def finish(self) -> None:
        """Put the whole output in place: the files of an older output go, and other files of its folder stay."""
        with self._lines.writing():
            self._remove_files_of_older()
            if self._unfinished.is_dir():
                self._folder.mkdir(exist_ok=True)
                for file in self._unfinished.iterdir():
                    os.replace(file, self._folder / file.name)
                self._unfinished.rmdir()
        self._lines.finish()

    def _remove_files_of_older(self) -> None:
        """Remove the files that an output of this name mentions."""
        if not self._output.is_file() or not self._folder.is_dir():
            return
        mentioned = re.compile(rf'"{re.escape(self._folder.name)}/(\d{{6,}}-[^"/]*)"')
        with self._output.open(encoding="utf-8", errors="replace") as lines:
            names = {match[1] for line in lines for match in mentioned.finditer(line)}
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it has other files
            self._folder.rmdir()

    def _remove_unfinished(self) -> None:
        """Remove the files of an output that was stopped before its first line."""
        if not self._unfinished.is_dir():
            return
        for file in self._unfinished.iterdir():
            if FILE.fullmatch(file.name):
                file.unlink()
        with suppress(OSError):  # it has other files
            self._unfinished.rmdir()

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
        self._unfinished.mkdir(exist_ok=True)
        save(self._unfinished / name)
        return f"{self._folder.name}/{name}"
