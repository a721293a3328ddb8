"""Profiles on disk: one JSON file per config, library versions and traced variants. Safe to delete."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from upshift.errors import MissingExtra, RequestError
from upshift.models.profile import ModelProfile, TracedPrecision
from upshift.models.source import ModelSource
from upshift.settings import read_settings

FORMAT = "12"  # raise when the meaning of a stored profile changes


class Variant(NamedTuple):
    """One way to run the step: what must be traced apart because kernels or saved tensors differ."""

    precision: TracedPrecision
    attention: str
    masked: bool
    divided: bool = False  # also as one of two ranks of tensor parallelism
    selective: bool = False  # recomputed selectively too


def profile_model(
    source: ModelSource,
    *,
    sequence_length: int,
    variants: tuple[Variant, ...],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """The profile from the cache, else traced now (seconds, imports torch) and stored."""
    versions = _versions(source)
    text = repr((FORMAT, source.model_hash, versions, sequence_length, sorted(variants)))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    path = read_settings().cache_dir / "profiles" / f"{key}.json"
    if path.is_file():
        try:
            return ModelProfile.from_file(path)
        except RequestError:
            path.unlink()  # written by another version, or cut short: trace again
    from upshift.models.trace import trace_model

    profile = trace_model(
        source, key=key, versions=versions, sequence_length=sequence_length, variants=variants, progress=progress
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(profile.to_json())
    temporary.replace(path)
    return profile


def _versions(source: ModelSource) -> dict[str, str]:
    """Of the libraries that decide which operators run."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    needed = {"peft": source.adapter is not None, "bitsandbytes": source.quantized_from is not None}
    for name in (name for name, is_needed in needed.items() if is_needed):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            raise MissingExtra(library=name, extra=name, purpose="a model with an adapter around such weights") from None
    return versions
