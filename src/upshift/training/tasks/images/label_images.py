"""Read label images: each pixel has the number of a class, or the number of a part of the image, whose class another column has.

There are three forms. One channel, or three equal ones, has the number of a class. Red and green have the numbers of a class and
of an object, as in transformers' example of instance segmentation. With a column ``segments_info`` red, green and blue make the
number of a part, as in COCO's panoptic images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from upshift.errors import RequestError
from upshift.training.tasks.contents import RowImage
from upshift.training.tasks.labels import Label, check_label

NO_LABEL = 255  # the number of a pixel without a label in data sets of segmentation
SEGMENTS = "segments_info"
CATEGORIES = ("category_id", "category", "label")  # of a part
LARGEST_TABLE = 1 << 16  # numbers that are counted by a table of them
JPEG_START = b"\xff\xd8\xff"
CODES = 255  # classes or parts that one byte tells apart, beside 0


class LabelRules(NamedTuple):
    """Rules by which numbers of pixels become labels.

    Args:
        reduces: 0 is no label, and the labels begin with 1 (``do_reduce_labels``).
        ignored: the number, then, of a pixel that is not learned beside 255. None: there is none.
        class_names: the names that the data gives the numbers.
        has_objects: red and green are the numbers of a class and of an object.
    """

    reduces: bool
    ignored: int | None
    class_names: tuple[str, ...]
    has_objects: bool

    def label_of(self, number: int, place: str) -> Label | None:
        """Return the label of a number of a class, or None if it is not learned."""
        if number == NO_LABEL or (self.reduces and number == 0):
            return None
        number -= self.reduces
        return None if number == self.ignored else check_label(number, place, self.class_names)


class LabelImage(NamedTuple):
    """The parts of an image: of each pixel [H, W] the number of its part, and of each part its label. None is not learned."""

    parts: np.ndarray
    labels: tuple[Label | None, ...]
    tells_objects: bool = False  # two parts may have one label

    def coded(self, codes: tuple[int, ...]) -> np.ndarray:
        """Return the code of each pixel's part [H, W], one byte each."""
        coded: np.ndarray = np.array(codes, dtype=np.uint8)[self.parts]
        return coded

    def shares(self) -> list[float]:
        """Return the share of the pixels that each part has."""
        counts = np.bincount(self.parts.ravel(), minlength=len(self.labels))
        return [float(count) / self.parts.size for count in counts]


def read_label_image(image: RowImage, segments: list[Mapping[str, Any]] | None, rules: LabelRules) -> LabelImage:
    """Return the parts of a label image. Raise RequestError for an image of another form.

    ``segments``: the entries of the column ``segments_info``, or None if there is none."""
    numbers = _numbers_of(image)
    if segments is not None:
        values, parts = _index(_part_numbers(numbers))
        known = {_integer(entry.get("id"), image.place): _segment_label(entry, rules, image.place) for entry in segments}
        unknown = next((value for value in values if value and value not in known), None)
        if unknown is not None:
            raise RequestError(
                f"{image.place} has the part {unknown}, which {SEGMENTS} does not have; add it there, or make it 0"
            )
        return LabelImage(parts, tuple(known.get(value) for value in values), tells_objects=True)
    if numbers.ndim == 3 and (numbers[..., :1] == numbers).all():
        numbers = numbers[..., 0]
    if numbers.ndim == 2:
        values, parts = _index(numbers)
        return LabelImage(parts, tuple(rules.label_of(value, image.place) for value in values))
    if not rules.has_objects:
        raise RequestError(
            f"{image.place} has a label image of colours; write the number of its class for each pixel, in one channel, or add "
            f"the column {SEGMENTS} with id and category_id of each part"
        )
    values, parts = _index(numbers[..., 0] * 256 + numbers[..., 1])
    return LabelImage(parts, tuple(rules.label_of(value // 256, image.place) for value in values), tells_objects=True)


def _numbers_of(image: RowImage) -> np.ndarray:
    """Return the numbers of the pixels as the file has them, [H, W] or [H, W, 3]."""
    content = image.content
    if (content[:3] if isinstance(content, bytes) else _first_bytes(content)) == JPEG_START:
        raise RequestError(f"{image.place} has a label image in JPEG, which changes the numbers of pixels; write PNG")
    numbers = np.asarray(image.read(as_stored=True))
    if numbers.dtype == bool:
        numbers = numbers.astype(np.uint8)
    if numbers.ndim == 3 and numbers.shape[2] == 2:  # gray, and how opaque it is
        numbers = numbers[..., 0]
    if numbers.dtype.kind not in "iu" or (numbers.ndim == 3 and numbers.shape[2] < 3) or numbers.min(initial=0) < 0:
        raise RequestError(f"{image.place} has a label image of fractions or numbers below 0; write numbers of classes from 0")
    return numbers[..., :3].astype(np.int32) if numbers.ndim == 3 else numbers.astype(np.int32)


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(len(JPEG_START))
    except OSError:  # the reader of the image says why
        return b""


def _part_numbers(numbers: np.ndarray) -> np.ndarray:
    if numbers.ndim == 2:
        return numbers
    whole: np.ndarray = numbers[..., 0] + 256 * numbers[..., 1] + 65536 * numbers[..., 2]
    return whole


def _index(numbers: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the different numbers in order, and the place of each pixel's number among them [H, W]."""
    if numbers.max(initial=0) >= LARGEST_TABLE:
        values, places = np.unique(numbers, return_inverse=True)
        return values.tolist(), places.reshape(numbers.shape)
    values = np.flatnonzero(np.bincount(numbers.ravel()))
    table = np.zeros(int(values.max(initial=0)) + 1, dtype=np.int32)
    table[values] = np.arange(len(values))
    return values.tolist(), table[numbers]


def _segment_label(entry: Mapping[str, Any], rules: LabelRules, place: str) -> Label | None:
    name = next((name for name in CATEGORIES if entry.get(name) is not None), None)
    if name is None:
        raise RequestError(f"{place} has a part without a category; give {SEGMENTS} with id and category_id of each part")
    if entry.get("iscrowd"):
        return None
    value = entry[name]
    return value if isinstance(value, str) and value else rules.label_of(_integer(value, place), place)


def _integer(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise RequestError(f"{place} has {SEGMENTS} with {value!r:.40}; give id and category_id as numbers from 0")
    return int(value)
