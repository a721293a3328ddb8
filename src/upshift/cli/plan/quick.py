"""Plan from the sizes in a model's config (``--quick``): no trace, no torch, about a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from upshift.cli.options import command_line_options, option
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.loading.files.safetensors_header import read_header
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.estimation.sizes import positions_in_config
from upshift.models.profile import ModelProfile, Variant
from upshift.models.sequence_length import default_length
from upshift.models.source import ModelSource
from upshift.models.tracing.profile_model import Profiler, profile_model

Quick = Annotated[
    bool,
    option(
        "--quick", panel=Panel.PLAN,
        text="Estimate from the config alone, without a trace.",
    ),
]  # fmt: skip
ESTIMATED = "From the sizes in the config, without a trace (--quick). Leave --quick out for the model's own operations."
UNUSED = ("data", "objective", "lock", "check", "largest")  # they need a trace, or the model's own tokenizer


def check_options(context: typer.Context, *, quick: bool) -> None:
    """Raise RequestError for an option that ``--quick`` does not use, if it is given."""
    if not quick:
        return
    options = command_line_options(context)
    unused = [options[name] for name in UNUSED if name in options]
    if unused:
        raise RequestError(f"--quick does not use {', '.join(unused)}; leave --quick out, or leave out {', '.join(unused)}")


def profiler(source: ModelSource, *, quick: bool) -> Profiler:
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


def length_of(source: ModelSource, length: int | None) -> int:
    """Return the length of sequences: the user's, or the default. Raise RequestError for more tokens than the config has."""
    limit = positions_in_config(source)
    if length is not None and limit is not None and length > limit:
        raise RequestError(f"--sequence-length {length} is longer than the {limit} positions in the config; use at most {limit}")
    return default_length(limit) if length is None else length
