"""Keep responses in memory, with the items of their conversations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from upshift.serving.protocols.responses_requests import Item, describe_item, new_item_id

MAX_STORED = 1024  # responses in memory
MAX_STORED_CHARACTERS = 64 * 2**20  # of all of them together
UNFINISHED = ("queued", "in_progress")  # statuses of answers that are still computed
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class Inputs(NamedTuple):
    """The items that a response is computed from, without instructions, as OpenAI lists them.

    Each item has an id of its own. ``made_ids`` are the ids that this server made. Clients made the others."""

    items: Sequence[dict[str, Any]] = ()
    made_ids: frozenset[str] = frozenset()


class StoredResponse(NamedTuple):
    """A response, and what it was computed from."""

    body: dict[str, Any]
    inputs: Inputs
    characters: int

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return the items of the conversation up to this response, with its own output, as OpenAI lists them."""
        return [*self.inputs.items, *self.body["output"]]

    @property
    def items(self) -> list[Item]:
        """Return the items of ``conversation`` as those of a request."""
        return ITEMS.validate_python(self.conversation)

    @property
    def made_ids(self) -> frozenset[str]:
        """Return the ids of ``conversation`` that this server made."""
        return self.inputs.made_ids | {item["id"] for item in self.body["output"]}

    @property
    def is_unfinished(self) -> bool:
        return self.body["status"] in UNFINISHED


class ResponseStore:
    """The last responses, in memory. The oldest ones are dropped first, and none that is still computed."""

    def __init__(self, max_responses: int = MAX_STORED, max_characters: int = MAX_STORED_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._characters = 0
        self._kept_items: dict[str, dict[str, dict[str, Any]]] = {}  # by ids that this server made, then by ids of responses

    def add(self, body: dict[str, Any], inputs: Inputs) -> None:
        """Keep a response, in the place of one with its id. Drop old ones if there are too many."""
        self.remove(body["id"])
        stored = StoredResponse(body, inputs, len(repr(inputs.items)) + len(repr(body)))
        self._responses[body["id"]] = stored
        self._characters += stored.characters
        made_ids = stored.made_ids
        for item in stored.conversation:
            if item["id"] in made_ids:
                self._kept_items.setdefault(item["id"], {})[body["id"]] = item
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop the oldest responses while there are too many, but none that is still computed."""
        if self._is_too_large:
            for id in [id for id, stored in self._responses.items() if not stored.is_unfinished]:
                self.remove(id)
                if not self._is_too_large:
                    return

    @property
    def _is_too_large(self) -> bool:
        return len(self._responses) > self._max_responses or self._characters > self._max_characters

    @property
    def is_full(self) -> bool:
        """Return whether the answers that are still computed take all the room."""
        unfinished = [stored for stored in self._responses.values() if stored.is_unfinished]
        characters = sum(stored.characters for stored in unfinished)
        return len(unfinished) >= self._max_responses or characters >= self._max_characters

    def find(self, id: str) -> StoredResponse | None:
        return self._responses.get(id)

    def find_item(self, id: str) -> Item | None:
        """Return the item of a kept response with an id that this server made, or None.

        The ids that clients made are not found, because another client may have made the same one."""
        kept = self._kept_items.get(id)
        return None if kept is None else ITEMS.validate_python([next(reversed(kept.values()))])[0]

    def remove(self, id: str) -> bool:
        """Drop a response. Return whether there was one."""
        dropped = self._responses.pop(id, None)
        if dropped is None:
            return False
        self._characters -= dropped.characters
        for item_id in dropped.made_ids:
            kept = self._kept_items[item_id]
            del kept[id]
            if not kept:
                del self._kept_items[item_id]
        return True


def describe_inputs(items: Sequence[Item], earlier: StoredResponse | None) -> Inputs:
    """Return the items that a response is computed from: those of earlier responses first.

    An item gets a new id if it has none, or if an item before it has the same."""
    described = [] if earlier is None else earlier.conversation
    made_ids = set() if earlier is None else set(earlier.made_ids)
    used_ids = {item["id"] for item in described}
    for item in items:
        one = describe_item(item)
        if one["id"] in used_ids:
            one["id"] = new_item_id(item.type)
        if one["id"] != item.id:
            made_ids.add(one["id"])
        used_ids.add(one["id"])
        described.append(one)
    return Inputs(described, frozenset(made_ids))
