"""Get the profile of a model, from the cache or from a trace now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from upshift.importing import collecting_rarely, importing
from upshift.models.profile import ModelProfile, Variant
from upshift.models.profile_cache import SegmentStore, key_of, load_or_compute, versions_of
from upshift.models.source import ModelSource


class Profiler(Protocol):
    """Makes the profile of a model: by a trace, or by an estimate."""

    def __call__(
        self,
        source: ModelSource,
        *,
        sequence_length: int,
        variants: tuple[Variant, ...],
        progress: Callable[[int, int], None] = ...,
    ) -> ModelProfile: ...


def profile_model(
    source: ModelSource,
    *,
    sequence_length: int,
    variants: tuple[Variant, ...],
    progress: Callable[[int, int], None] = lambda done, total: None,
    chunked: bool = True,
) -> ModelProfile:
    """Return the profile from the cache, or trace it now (seconds, imports torch) and store it.

    ``chunked``: also trace the loss in chunks, which takes a third of the time. Plans need it."""
    versions = versions_of(source)
    identity = (source.model_hash, versions, sequence_length, sorted(variants), *(() if chunked else ("no chunks",)))

    def trace() -> ModelProfile:
        with importing():
            from upshift.models.tracing.trace import trace_model

        store = SegmentStore.for_source(source, sequence_length)
        with collecting_rarely():
            return trace_model(
                source,
                key=key_of(*identity),
                versions=versions,
                sequence_length=sequence_length,
                variants=variants,
                store=store,
                progress=progress,
                chunked=chunked,
            )

    def is_final(profile: ModelProfile) -> bool:
        return not profile.isolation.short_of_memory

    return load_or_compute("profiles", identity, ModelProfile, trace, is_final=is_final)
