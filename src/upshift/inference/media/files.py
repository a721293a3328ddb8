"""Read which images, sounds and texts to encode.

The input is a folder of images and sounds, with folders in it, or JSON lines that name them: {"image": PATH}, {"audio": PATH} or
{"text": "..."}. Read the labels that the user names for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.inference.resumable_output import first_record, is_text, parse_object, read_lines
from upshift.loading.media_files import IMAGE_SUFFIXES, SOUND_SUFFIXES, MediaItem, Modality, modality_of

MODALITIES: tuple[Modality, ...] = ("image", "audio", "text")
LABELS_SUFFIX = ".txt"  # of a file with one label in each line
TABLE_SUFFIXES = (".csv", ".jsonl", ".parquet")  # of a file "metadata" in a folder of images or sounds
FORMS = '{"image": "a.png"}, {"audio": "a.wav"} or {"text": "..."}'


def holds_media(path: Path) -> bool:
    """Return whether an input is a folder, or JSON lines whose first line names an image or a sound."""
    if path.is_dir():
        return True
    record = first_record(path)
    return record is not None and any(key in record for key in ("image", "audio"))


def read_media(path: Path, *, option: str = "--input") -> list[MediaItem]:
    """Return the items of an input: the files of a folder by name, or the lines of a .jsonl file, or of a .txt file of texts.

    ``option`` names the input in messages. Raise RequestError with the file or the line that is no item. Paths in a .jsonl file
    are relative to its folder."""
    if path.is_dir():
        return _read_folder(path, option)
    if path.suffix == ".txt":
        texts = read_lines(path, lambda line, name: line)
        return [MediaItem("text", text, f"{path} line {number}") for number, text in enumerate(texts, start=1)]
    items = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path} line {number}"
            record = parse_object(line) or {}
            modality = next((modality for modality in MODALITIES if modality in record), None)
            if modality is None or len(record) != 1 or not is_text(record[modality]):
                raise RequestError(f"{origin} is no image, sound or text; write {FORMS} on each line")
            content = record[modality] if modality == "text" else str(path.parent / record[modality])
            items.append(MediaItem(modality, content, origin))
    return items


def with_whole_paths(items: Iterable[MediaItem]) -> list[MediaItem]:
    """Return the items with whole paths, because a worker may have another working folder."""
    return [item if item.modality == "text" else item._replace(content=str(Path(item.content).resolve())) for item in items]


def _read_folder(folder: Path, option: str) -> list[MediaItem]:
    """Return the images and sounds of a folder and of those within it, without the tables that ``datasets`` reads beside them."""
    items = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or file.is_dir() or (file.stem == "metadata" and file.suffix in TABLE_SUFFIXES):
            continue
        modality = modality_of(file)
        if modality is None or not file.is_file():
            suffixes = ", ".join((*IMAGE_SUFFIXES, *SOUND_SUFFIXES))
            raise RequestError(f"{option} {folder} has {name}, which is no image or sound ({suffixes}); move it elsewhere")
        items.append(MediaItem(modality, str(file), str(file)))
    if not items:
        raise RequestError(f"{option} {folder} has no files; give a folder of images or sounds")
    return items


class GivenLabels(NamedTuple):
    """Labels that the user names, and the sentence with {} in the place of a label. None: the sentence of the pipeline."""

    names: tuple[str, ...]
    template: str | None


def read_labels(labels: Sequence[str] | None, template: str | None) -> GivenLabels | None:
    """Return the labels of the values of an option, or None if there are none.

    One value has names with commas between them, or names a .txt file with one in each line. Each of several values is one label.
    Raise RequestError for an empty label or one given twice, and for a sentence without a place for a label."""
    if not labels:
        if template is not None:
            raise RequestError(f"--label-template {template!r} is for --labels; add them, such as --labels cat,dog")
        return None
    names = tuple(name.strip() for name in _names_of(labels))
    shown = f"--labels {' --labels '.join(map(repr, labels))}"
    if not all(names) or not names:
        raise RequestError(f"{shown} has an empty label; give names such as cat,dog, or one in each line of a file")
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise RequestError(f"{shown} has {twice!r} twice; leave one out")
    if template is not None and not _takes_one_label(template):
        raise RequestError(
            f"--label-template {template!r} must have one {{}} in the place of the label: 'This is a photo of {{}}.'"
        )
    return GivenLabels(names, template)


def _names_of(labels: Sequence[str]) -> list[str]:
    files = [label for label in labels if label.endswith(LABELS_SUFFIX)]
    if not files:
        return list(labels) if len(labels) > 1 else labels[0].split(",")
    if len(labels) > 1:
        raise RequestError(f"--labels {files[0]} is a file, and another --labels is given; write all labels into the file")
    if not Path(files[0]).is_file():
        raise RequestError(f"--labels {files[0]} does not exist; write a file with one label in each line, or give cat,dog")
    lines = read_lines(Path(files[0]), lambda line, name: line)
    return [line for line in lines if line.strip()]


def _takes_one_label(template: str) -> bool:
    """Return whether ``format`` puts one label into a template, as transformers' pipelines do."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
        return fields == [""] and template.format("a label") != template.format("another label")
    except (ValueError, LookupError):  # a single brace, or a format that texts do not have
        return False
