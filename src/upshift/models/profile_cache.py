"""Keep on disk what was found out about a model: one JSON file per config and library versions. Safe to delete."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from upshift.atomic_file import write_whole
from upshift.errors import MissingExtra, RequestError
from upshift.importing import importing
from upshift.models.profile import Isolation, Segment
from upshift.models.source import ModelSource
from upshift.settings import read_settings
from upshift.value import Value

FORMAT = "19"  # raise when the meaning of a stored profile changes

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Value)


class Positions(Value):
    tokens: int | None  # None: the model sets no limit
    apart: bool  # an encoder reads the prompt, and its decoder counts the answer's positions from the first


def isolation_of(source: ModelSource, *, states: bool = False) -> Isolation:
    """Return what a text's results depend on, from the cache or as tested now (a second, imports torch).

    ``states``: test the model that gives states alone, without its head."""

    def test() -> Isolation:
        with importing():
            from upshift.models.isolation.check import test_source

        return test_source(source, states=states)

    return remembered("isolation", (source.model_hash, versions_of(source), states), Isolation, test)


def positions_of(source: ModelSource) -> int | None:
    """Return the tokens that the model has positions for, or None if it sets no limit. Every command asks this function, and no
    other.

    The answer comes from the cache, or from the model's modules (imports torch)."""

    return _positions(source).tokens


def positions_are_apart(source: ModelSource) -> bool:
    """Return whether an encoder reads the prompt, so that prompt and answer do not share the positions."""
    return _positions(source).apart


def _positions(source: ModelSource) -> Positions:
    def count() -> Positions:
        with importing():
            from upshift.models.describe import empty_positions

        return Positions(tokens=empty_positions(source), apart=source.hf_config.is_encoder_decoder)

    return remembered("positions", (source.model_hash, versions_of(source)), Positions, count)


def remembered(folder: str, of: tuple[Any, ...], kind: type[Answer], find: Callable[[], Answer]) -> Answer:
    """Return a value from the cache. If it is not there, ``find`` makes it."""
    path = read_settings().cache_dir / folder / f"{key_of(*of)}.json"
    if path.is_file():
        try:
            return kind.from_file(path)
        except RequestError:
            _drop(path)  # written by another version, or cut short
    value = find()
    _write(path, value.to_json().encode())
    return value


class SegmentStore:
    """Traced segments of one model at one length, so that a profile of more variants traces only those."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._form = TypeAdapter(dict[str, list[Segment]])

    @classmethod
    def of(cls, source: ModelSource, sequence_length: int) -> SegmentStore:
        key = key_of(source.model_hash, versions_of(source), sequence_length)
        return cls(read_settings().cache_dir / "segments" / key)

    def get(self, name: str) -> dict[str, list[Segment]] | None:
        path = self._path(name)
        try:
            return self._form.validate_json(path.read_bytes())
        except OSError:  # most often it was not traced yet
            return None
        except ValidationError:
            _drop(path)  # cut short: trace again
            return None

    def put(self, name: str, segments: dict[str, list[Segment]]) -> None:
        _write(self._path(name), self._form.dump_json(segments))

    def _path(self, name: str) -> Path:
        return self._folder / f"{_hash(name)}.json"


def key_of(*parts: Any) -> str:
    """Return the name under which the cache keeps what belongs to these parts."""
    return _hash(repr((FORMAT, *parts)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _drop(path: Path) -> None:
    with suppress(OSError):  # of a folder that can only be read
        path.unlink()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        _warn(read_settings().cache_dir, str(error.strerror))


@cache
def _warn(folder: Path, reason: str) -> None:
    """Warn once, however many files there are."""
    logger.warning("what was traced is not kept in %s: %s; UPSHIFT_CACHE names another folder", folder, reason)


def versions_of(source: ModelSource) -> dict[str, str]:
    """Return the versions of the libraries that decide which operators run."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    needed = {"peft": source.adapter is not None, "bitsandbytes": source.quantized_from is not None}
    for name in (name for name, is_needed in needed.items() if is_needed):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            raise MissingExtra(library=name, extra=name, purpose="a model with an adapter around such weights") from None
    return versions
