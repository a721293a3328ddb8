"""Prepare the examples of images and sounds for a run, and for ``upshift data show``. Refuse options of other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.training.data.data_options import DataOptions
from upshift.training.media.chats import prepare_chats
from upshift.training.media.classification import prepare_classification
from upshift.training.media.examples import MediaData, Progress
from upshift.training.media.kinds import MediaKind, MediaModel
from upshift.training.media.rows import read_media_rows
from upshift.training.media.speech import prepare_speech


def prepare_media(
    source: ModelSource,
    media: MediaModel,
    data: str,
    options: DataOptions,
    *,
    eval_data: str | None = None,
    sequence_length: int | None = None,
    progress: Progress = lambda done, total: None,
) -> MediaData:
    """Return the examples of the data. Raise RequestError for an option of other data, and for a row that cannot be used."""
    _check_options(options, media.kind, sequence_length)
    if source.directory is None:
        raise RequestError(f"{source.base_reference!r} is a config without a processor beside it; give a model directory")
    rows = read_media_rows(data, options, eval_data=eval_data, are_sorted=media.kind == "image-classification")
    if media.kind == "image-text-to-text":
        return prepare_chats(source, rows, options, sequence_length=sequence_length, progress=progress)
    if media.kind == "image-classification":
        return prepare_classification(source, rows, has_head=media.new_head_on is None, progress=progress)
    return prepare_speech(source, rows, writes=media.model_class.can_generate(), progress=progress)


def _check_options(options: DataOptions, kind: MediaKind, sequence_length: int | None) -> None:
    refuse_given({"--objective": options.objective, "--text-column": options.text_column}, kind)
    if kind != "image-text-to-text":
        of_chats = {
            "--data-format": options.data_format, "--loss-on": options.loss_on, "--chat-template": options.chat_template,
            "--sequence-length": sequence_length, "--long-rows": options.long_rows,
        }  # fmt: skip
        refuse_given(of_chats, kind)
    if options.long_rows in ("cut", "split"):
        raise RequestError(f"--long-rows {options.long_rows} would cut an image in two; use drop, or leave it out")
    if options.long_rows == "drop" and sequence_length is None:
        raise RequestError("--long-rows drop needs the length of the longest row; add --sequence-length")


def refuse_given(given: Mapping[str, Any], kind: MediaKind) -> None:
    """Raise RequestError with the first of these options that has a value."""
    for option, value in given.items():
        if value not in (None, False):
            raise RequestError(f"{option} is not for training on images and sounds ({kind}); leave it out")
