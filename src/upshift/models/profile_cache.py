"""Cache measurements of a model on disk, in one JSON file for each config and set of library versions.

The files may be deleted at any time.
"""

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
from upshift.models.profile import Images, Isolation, ModelRuns, Segment
from upshift.models.source import ModelSource
from upshift.settings import read_settings
from upshift.value import Value

FORMAT = "26"  # raise when the meaning of a stored profile changes
MODEL_RUNS = "model runs"  # no segments have this name
ISOLATION_FORMAT = "6"  # raise when the meaning of a stored isolation changes, and that of profiles does not

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Value)


class Positions(Value):
    """The positions that a model has for tokens."""

    tokens: int | None  # None: the model sets no limit
    apart: bool  # an encoder reads the prompt, and the decoder's positions begin with the answer


def isolation_of(source: ModelSource, *, states: bool = False) -> Isolation:
    """Return which tokens a text's results depend on, from the cache or from a test now (a second, imports torch).

    ``states``: test the model without its head, which outputs hidden states."""

    def compute() -> Isolation:
        with importing():
            from upshift.models.isolation.check import test_source

        return test_source(source, states=states)

    identity = (source.model_hash, versions_of(source), states, ISOLATION_FORMAT)
    return load_or_compute("isolation", identity, Isolation, compute, is_final=lambda isolation: not isolation.short_of_memory)


def images_of(source: ModelSource) -> Images:
    """Return the size of the images of ``source.images_per_row``, and the places that each takes in a row (imports torch).

    Raise RequestError for a model that is not planned with images."""

    def compute() -> Images:
        with importing():
            from upshift.models.tracing.image_sizes import images_of_source

        return images_of_source(source)

    return load_or_compute("images", (source.model_hash, versions_of(source)), Images, compute)


def check_token_ids(source: ModelSource, isolation: Isolation) -> None:
    """Raise RequestError for a model whose training step needs token ids that its config does not have."""
    if isolation.missing_token_ids:
        names = " and ".join(isolation.missing_token_ids)
        raise RequestError(
            f"the config of {source.reference!r} does not say {names}, and a training step of {source.hf_config.model_type} "
            "needs it; write the token's id into its config.json"
        )


def positions_of(source: ModelSource) -> int | None:
    """Return the number of tokens that the model has positions for, or None if it sets no limit.

    Every command gets the number from this function. It comes from the cache, or from the model's modules (imports torch)."""
    return _positions(source).tokens


def encoder_has_prompt(source: ModelSource) -> bool:
    """Return whether an encoder reads the prompt, so that prompt and answer do not share the positions."""
    return _positions(source).apart


def _positions(source: ModelSource) -> Positions:
    def compute() -> Positions:
        with importing():
            from upshift.models.describe import source_max_positions

        return Positions(tokens=source_max_positions(source), apart=source.hf_config.is_encoder_decoder)

    return load_or_compute("positions", (source.model_hash, versions_of(source)), Positions, compute)


def load_or_compute(
    folder: str,
    identity: tuple[Any, ...],
    value_type: type[Answer],
    compute: Callable[[], Answer],
    *,
    is_final: Callable[[Answer], bool] = lambda value: True,
) -> Answer:
    """Return the cached value for this identity. If there is none, compute it, and store it if it ``is_final``."""
    path = read_settings().cache_dir / folder / f"{key_of(*identity)}.json"
    if path.is_file():
        try:
            return value_type.from_file(path)
        except RequestError:
            _delete(path)  # written by another version, or cut short
    value = compute()
    if is_final(value):
        _write(path, value.to_json().encode())
    return value


class SegmentStore:
    """Store what was traced of one model at one length, so that a profile of more variants traces only the new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._adapter = TypeAdapter(dict[str, list[Segment]])

    @classmethod
    def for_source(cls, source: ModelSource, sequence_length: int) -> SegmentStore:
        key = key_of(source.model_hash, versions_of(source), sequence_length)
        return cls(read_settings().cache_dir / "segments" / key)

    def get(self, name: str) -> dict[str, list[Segment]] | None:
        path = self._path(name)
        try:
            return self._adapter.validate_json(path.read_bytes())
        except OSError:  # usually it was not traced yet
            return None
        except ValidationError:
            _delete(path)  # cut short: trace again
            return None

    def put(self, name: str, segments: dict[str, list[Segment]]) -> None:
        _write(self._path(name), self._adapter.dump_json(segments))

    def get_runs(self) -> ModelRuns | None:
        path = self._path(MODEL_RUNS)
        try:
            return ModelRuns.from_file(path)
        except RequestError:  # usually there is none; or it was cut short
            _delete(path)
            return None

    def put_runs(self, runs: ModelRuns) -> None:
        _write(self._path(MODEL_RUNS), runs.to_json().encode())

    def _path(self, name: str) -> Path:
        return self._folder / f"{_hash(name)}.json"


def key_of(*parts: Any) -> str:
    """Return the cache key for an identity, as a file name."""
    return _hash(repr((FORMAT, *parts)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _delete(path: Path) -> None:
    with suppress(OSError):  # the folder may be read-only
        path.unlink()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        _warn_once(read_settings().cache_dir, str(error.strerror))


@cache
def _warn_once(folder: Path, reason: str) -> None:
    """Warn once for all files."""
    logger.warning("what was traced is not kept in %s: %s; UPSHIFT_CACHE names another folder", folder, reason)


def versions_of(source: ModelSource) -> dict[str, str]:
    """Return the versions of the libraries that decide which operators run."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    optional = {"peft": source.adapter is not None, "bitsandbytes": source.quantized_from is not None}
    for name, is_needed in optional.items():
        if not is_needed:
            continue
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            raise MissingExtra(library=name, extra=name, purpose="a model with an adapter around such weights") from None
    return versions
