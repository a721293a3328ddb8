"""Give a chat template a message without content, such as an assistant's call of tools, as the template takes it.

OpenAI's form of such a message has ``content: null``. Templates differ: some ask whether the content is none, some join it with a
text or search in it, which fails for null, and some print "None".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

PRINTED_NULL = "None"  # as Jinja writes a null


def fill_null_contents(messages: Messages, write: Callable[[Messages], str | None]) -> list[dict[str, Any]]:
    """Return the messages, in which contents that are null or missing have the form that the template takes.

    Null is taken if the template writes it as it writes an empty text, or in a way of its own, but not as a word. Else the
    content is an empty text, or is left out.

    Args:
        messages: with or without such contents.
        write: the text that the template makes of messages, or None if it rejects them.
    """
    if all(message.get("content") is not None for message in messages):
        return [dict(message) for message in messages]
    null, empty, missing = forms = (_fill(messages, content=None), _fill(messages, content=""), _without_contents(messages))
    texts = [write(form) for form in forms]
    words = [text.count(PRINTED_NULL) for text in texts[1:] if text is not None]
    if texts[0] is not None and texts[0].count(PRINTED_NULL) <= min(words, default=0):
        return null
    if texts[1] is not None:
        return empty
    return missing if texts[2] is not None else null


def _fill(messages: Messages, *, content: str | None) -> list[dict[str, Any]]:
    return [{**message, "content": content} if message.get("content") is None else dict(message) for message in messages]


def _without_contents(messages: Messages) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if name != "content" or value is not None} for message in messages]
