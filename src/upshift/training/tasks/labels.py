"""Find the labels of a classifier: those of its config if they have all labels of the data, else new ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from upshift.errors import RequestError
from upshift.models.config import label_names
from upshift.models.source import ModelSource
from upshift.text import join_names
from upshift.training.data.data_files import say_once
from upshift.training.tasks.rows import NewHead

NO_LABEL = -1  # as datasets marks a row without a label
SHOWN_LABELS = 8
Label = str | int


@dataclass(frozen=True)
class Labels:
    """The names of a classifier's labels, in their order. ``are_new``: the classifier gets a new head for them."""

    names: tuple[str, ...]
    are_new: bool

    def number(self, value: Label, place: str) -> int:
        """Return the number of a label. Raise RequestError for one that the classifier does not have."""
        number = value if isinstance(value, int) else self._numbers.get(value, -1)
        if not 0 <= number < len(self.names):
            raise RequestError(f"{place} has the label {value!r}, and the labels are {self.shown()}")
        return number

    @property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def shown(self) -> str:
        """Return the first names, for a message."""
        return join_names(self.names[:SHOWN_LABELS]) + (", ..." if len(self.names) > SHOWN_LABELS else "")

    def new_head(self, source: ModelSource, *, problem_type: str | None = None) -> NewHead | None:
        """Return the new head, of which the user is told, or None if the model's own head has the labels."""
        if not self.are_new:
            return None
        say_once(
            f"{source.base_reference} gets a new head for {len(self.names)} labels ({self.shown()}), whose weights are random"
        )
        return NewHead(self.names, problem_type)


def check_label(value: Any, place: str, class_names: Sequence[str] = ()) -> Label:
    """Return a label: a name, or a number that ``class_names`` does not name. Raise RequestError for other values."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        if not class_names:
            return value
        if value < len(class_names):
            return class_names[value]
        raise RequestError(f"{place} has the label {value}, and the data names {len(class_names)}; correct it")
    raise RequestError(f"{place} has the label {value!r:.60}; give a name, or a number from 0")


def find_labels(
    source: ModelSource, values: Collection[Label], *, has_head: bool, class_names: Sequence[str] = (), least: int = 2
) -> Labels:
    """Return the labels of the classifier. Raise RequestError for names beside numbers, and for too few labels.

    Args:
        source: the model, whose config may have the labels.
        values: the labels of the data, as ``check_label`` returns them.
        has_head: whether the model's files have a head with labels.
        class_names: the names that the data gives its numbers, in their order. New names are in alphabetical order without them.
        least: the fewest labels with which something is learned.
    """
    known = label_names(source.hf_config) if has_head else ()
    texts = {value for value in values if isinstance(value, str)}
    numbers = {value for value in values if not isinstance(value, str)}
    if texts and numbers:
        raise RequestError(f"the labels are names ({min(texts)!r}) and numbers ({min(numbers)}); give one of the two")
    if texts <= set(known) and max(numbers, default=0) < len(known):
        return Labels(known, are_new=False)
    if class_names and known == _unnamed(len(class_names)):
        return Labels(tuple(class_names), are_new=False)  # the head is of as many labels, which nobody named
    names = tuple(class_names or sorted(texts)) or _unnamed(max(numbers) + 1)
    if len(names) < least:
        raise RequestError(f"all rows have the label {join_names(names)}, and a classifier needs at least two")
    return Labels(names, are_new=True)


def _unnamed(number: int) -> tuple[str, ...]:
    """Return the names that transformers gives labels without names."""
    return tuple(f"LABEL_{number}" for number in range(number))
