"""Profiles on disk: one JSON file per config, library versions and traced variants. Safe to delete."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.models.profile import ModelProfile, TracedPrecision
from upshift.models.source import ModelSource
from upshift.settings import read_settings

FORMAT = "7"  # raise when the meaning of a stored profile changes


class Variant(NamedTuple):
    """One way to run the step: what must be traced apart because kernels or saved tensors differ."""

    precision: TracedPrecision
    attention: str
    masked: bool


def profile_model(
    source: ModelSource,
    *,
    sequence_length: int,
    variants: tuple[Variant, ...],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """The profile from the cache, else traced now (seconds, imports torch) and stored."""
    versions = {name: version(name) for name in ("torch", "transformers")}
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
