"""Find the rows of a folder of images beside a folder of their label images, such as ``images/1.jpg`` and ``masks/1.png``."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from upshift.errors import RequestError
from upshift.loading.media_files import modality_of
from upshift.training.data.corpus import rows_of_files
from upshift.training.data.data_files import EVALUATION_SPLIT, file_kind, find_split, first_names, say_once, split_files
from upshift.training.data.rows.row_slice import pick_split
from upshift.training.tasks.contents import names_image
from upshift.training.tasks.images.label_images import SEGMENTS
from upshift.training.tasks.rows import FolderRows, TaskRow, holds_table, is_hidden

IMAGE_FOLDERS = ("images", "image", "JPEGImages")
LABEL_FOLDERS = ("masks", "mask", "annotations", "labels", "SegmentationClass")
IMAGES = ("image", "pixel_values", "file_name")
LABEL_COLUMNS = (
    "mask",
    "annotation",
    "label",
    "labels",
    "label_image",
    "segmentation_map",
    "segmentation",
    "semantic_segmentation",
)
OF_PARTS = {"annotations", SEGMENTS}  # columns of COCO's tables
NAMES_FILE = "id2label.json"  # the names of classes beside data, as data sets of the Hub have it


def paired_folder(path: Path, wanted: str | None, *, is_evaluation: bool) -> FolderRows | None:
    """Return the rows of the training and of the evaluation split of a folder, or None for another path.

    Raise RequestError for an image without a label image, and for one with several."""
    pairs = _find_pairs(path)
    if pairs is None:
        return None
    splits = split_files(path, list(pairs))
    split = find_split(splits, is_evaluation=is_evaluation) if wanted is None else pick_split(list(splits), wanted, path)
    if split is None:
        raise RequestError(f"{path} has no split to read; its images are of {', '.join(splits)}; name one with --split")
    has_other = EVALUATION_SPLIT in splits and split != EVALUATION_SPLIT and not is_evaluation
    of_splits = (splits[split], splits[EVALUATION_SPLIT] if has_other else [])
    training, evaluation = ([_row(file, pairs[file], path) for file in sorted(files)] for files in of_splits)
    return training, evaluation


def has_pairs(path: Path) -> bool:
    """Return whether a path is a folder with images beside label images, and without a table that names both."""
    return _media_beside_labels(path) is not None


def names_beside(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes that the file ``id2label.json`` of a folder has, in order.

    Raise RequestError for a file of another form."""
    file = folder / NAMES_FILE
    if not file.is_file():
        return ()
    try:
        names = {int(number): name for number, name in json.loads(file.read_bytes()).items()}
        in_order = tuple(names[number] for number in range(len(names)))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        in_order = ()
    if not in_order or not all(isinstance(name, str) and name for name in in_order):
        raise RequestError(f'{file} does not name the numbers of classes from 0 on; write {{"0": "sky", "1": "road"}}')
    return in_order


def find_label_column(row: TaskRow) -> str | None:
    """Return the column of a row with the label image, or None if there is none: by its type, and of several by its name."""
    columns = [name for name, value in row.fields.items() if name not in IMAGES and names_image(value)]
    return next((name for name in LABEL_COLUMNS if name in columns), columns[0] if len(columns) == 1 else None)


def has_named_label_image(row: TaskRow) -> bool:
    """Return whether a row has a label image by its name, and no label of the whole image: for a model that may learn either."""
    label = row.fields.get("label")
    return any(names_image(row.fields.get(name)) for name in LABEL_COLUMNS) and (label is None or names_image(label))


def _find_pairs(path: Path) -> dict[Path, Path] | None:
    """Return the label image of each image, or None if the folder has no folders of both, or has a table of them."""
    files = _media_beside_labels(path)
    if files is None:
        return None
    images = {path / file: place for file in files if (place := _place(file, IMAGE_FOLDERS)) is not None}
    labels: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        place = _place(file, LABEL_FOLDERS)
        if place is not None:
            labels.setdefault(place, []).append(path / file)
    without = [str(file.relative_to(path)) for file, place in images.items() if place not in labels]
    if without:
        raise RequestError(f"{path} has no label image for {first_names(without)}; give both the same name, or remove the image")
    twice = next((found for found in labels.values() if len(found) > 1), None)
    if twice is not None:
        raise RequestError(f"{path} has two label images for one image: {twice[0]} and {twice[1]}; remove one")
    return {file: labels[place][0] for file, place in images.items()}


def _media_beside_labels(path: Path) -> list[Path] | None:
    """Return the images of a folder and of those in it, relative to it, or None if one kind is missing, or a table names both."""
    if not _has_both_folders(path):
        return None
    files = sorted(file for file in path.rglob("*") if not is_hidden(file.relative_to(path)))
    media = [file.relative_to(path) for file in files if modality_of(file) == "image" and file.is_file()]
    stems = {file.stem for file in media}
    if not all(any(_place(file, folders) for file in media) for folders in (IMAGE_FOLDERS, LABEL_FOLDERS)):
        return None
    tables = [file for file in files if holds_table([file]) and not _is_of_one_image(file, stems) and file.is_file()]
    if any(_names_label_images(table) for table in tables):
        return None
    if tables:
        names = first_names([str(table.relative_to(path)) for table in tables])
        say_once(f"{path}: the images are paired with their label images by name; {names} names no label images, and is not read")
    return media


def _names_label_images(table: Path) -> bool:
    """Return whether the first row of a table names an image and its label image, or has the parts of label images, as COCO has.

    Return True for one that cannot be read, so that its reader says why."""
    try:
        rows = rows_of_files((table,), file_kind(table), lambda schema, origin: list(schema.names))
        _, fields = next(rows, ("", {}))
    except RequestError:
        return not _holds_no_rows(table)
    if not OF_PARTS.isdisjoint(fields):
        return True
    return any(name in fields for name in IMAGES) and any(names_image(fields.get(name)) for name in LABEL_COLUMNS)


def _is_of_one_image(file: Path, stems: Collection[str]) -> bool:
    """Return whether a file has the name of an image, as tools such as LabelMe write one for each. None is opened."""
    return file.suffix.lower() == ".json" and file.stem in stems


def _holds_no_rows(table: Path) -> bool:
    """Return whether a JSON file can be read, and has no object for a row, such as a list of the names of classes."""
    try:
        value = json.loads(table.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return not isinstance(value[0] if isinstance(value, list) and value else value, dict)


def _has_both_folders(path: Path) -> bool:
    """Return whether folders have the names of both kinds. No file is looked at: a folder may have millions, on a network."""
    missing = [IMAGE_FOLDERS, LABEL_FOLDERS]
    for _, folders, _ in os.walk(path):
        missing = [names for names in missing if not set(names).intersection(folders)]
        if not missing:
            return True
    return False


def _place(file: Path, folders: Iterable[str]) -> tuple[str, ...] | None:
    """Return the place of a file without the name of its folder and its suffix, or None if it is in none of the folders."""
    parts = file.parts[:-1]
    number = next((number for number, part in enumerate(parts) if part in folders), None)
    return None if number is None else (*parts[:number], *parts[number + 1 :], file.stem)


def _row(image: Path, label_image: Path, path: Path) -> TaskRow:
    fields = {"image": str(image.relative_to(path)), "mask": str(label_image.relative_to(path))}
    return TaskRow(str(image), fields, path)
