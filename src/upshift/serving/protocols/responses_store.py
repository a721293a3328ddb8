"""Keep responses in memory, with the items of their conversations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from upshift.serving.protocols.responses_requests import Item, describe_item

MAX_STORED = 1024  # responses in memory
MAX_STORED_CHARACTERS = 64 * 2**20  # of all of them together
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class StoredResponse(NamedTuple):
    """A response, and the items that it was computed from, without instructions. ``inputs`` has those as OpenAI lists them."""

    body: dict[str, Any]
    inputs: list[dict[str, Any]]
    characters: int

    @property
    def items(self) -> list[Item]:
        """Return the items of the conversation up to this response, with its own output."""
        return ITEMS.validate_python([*self.inputs, *self.body["output"]])


class ResponseStore:
    """The last responses, in memory. The oldest ones are dropped first."""

    def __init__(self, max_responses: int = MAX_STORED, max_characters: int = MAX_STORED_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._characters = 0

    def add(self, body: dict[str, Any], inputs: list[dict[str, Any]]) -> None:
        """Keep a response, in the place of one with its id. Drop old ones if there are too many."""
        self.remove(body["id"])
        characters = len(repr(inputs)) + len(repr(body))
        self._responses[body["id"]] = StoredResponse(body, inputs, characters)
        self._characters += characters
        while len(self._responses) > self._max_responses or self._characters > self._max_characters:
            _, dropped = self._responses.popitem(last=False)
            self._characters -= dropped.characters

    def find(self, id: str) -> StoredResponse | None:
        return self._responses.get(id)

    def find_item(self, id: str) -> Item | None:
        """Return the item with this id, of the input or the output of a response that is kept, or None."""
        for stored in reversed(self._responses.values()):
            for item in (*stored.inputs, *stored.body["output"]):
                if item["id"] == id:
                    return ITEMS.validate_python([item])[0]
        return None

    def remove(self, id: str) -> bool:
        """Drop a response. Return whether there was one."""
        dropped = self._responses.pop(id, None)
        self._characters -= 0 if dropped is None else dropped.characters
        return dropped is not None


def describe_inputs(items: Sequence[Item], earlier: StoredResponse | None) -> list[dict[str, Any]]:
    """Return the items that a response is computed from, as OpenAI lists them: those of earlier responses first."""
    before = [] if earlier is None else [*earlier.inputs, *earlier.body["output"]]
    return [*before, *map(describe_item, items)]
