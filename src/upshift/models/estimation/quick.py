"""Choose what makes a model's profile: a trace, or an estimate from the sizes in its config (``quick``)."""

from __future__ import annotations

from collections.abc import Callable

from upshift.errors import RequestError
from upshift.loading.files.safetensors_header import read_header
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.estimation.sizes import positions_in_config
from upshift.models.profile import ModelProfile, Variant
from upshift.models.sequence_length import default_length
from upshift.models.source import ModelSource
from upshift.models.tracing.profile_model import Profiler, profile_model


def choose_profiler(source: ModelSource, *, quick: bool) -> Profiler:
    """Return what makes the model's profile: a trace, or with ``quick`` the sizes in its config."""
    if not quick:
        return profile_model
    shapes = shapes_in_files(source)

    def estimate(
        source: ModelSource,
        *,
        sequence_length: int,
        variants: tuple[Variant, ...],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ModelProfile:
        return estimate_profile(source, sequence_length=sequence_length, shapes=shapes)

    return estimate


def shapes_in_files(source: ModelSource) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the model's safetensors files, from their headers. Empty: there are none."""
    if source.directory is None:
        return {}
    files = sorted(source.directory.glob("model*.safetensors"))
    return {tensor.name: tensor.shape for file in files for tensor in read_header(file).tensors}


def length_in_config(source: ModelSource, length: int | None) -> int:
    """Return the length of sequences: the user's, or the default. Raise RequestError for more tokens than the config has."""
    limit = positions_in_config(source)
    if length is not None and limit is not None and length > limit:
        raise RequestError(f"--sequence-length {length} is longer than the {limit} positions in the config; use at most {limit}")
    return default_length(limit) if length is None else length
