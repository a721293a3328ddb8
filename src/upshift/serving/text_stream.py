"""Turn tokens into text that may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the first bytes of a character


class TextStream:
    """The text of one answer. ``decode`` turns tokens into text. The text ends before the first of the ``stops``.
    Characters that may begin a stop string are held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._said = self._read = (
            0  # tokens that are shown; those before them that the next ones are read together with start here
        )
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Add tokens, and return the text that can be shown now. ``last`` says that no more tokens come."""
        if self._stopped:
            return ""
        self._tokens += tokens
        before, now = self._decode(self._tokens[self._read : self._said]), self._decode(self._tokens[self._read :])
        if len(now) > len(before) and (last or not now.endswith(BROKEN)):
            self._held += now[len(before) :]
            self._read, self._said = self._said, len(self._tokens)
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._stopped = True
            return self._held[: min(places)]
        kept = 0 if last else max((_begun(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown


def _begun(text: str, stop: str) -> int:
    """Return how many of the last characters may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
