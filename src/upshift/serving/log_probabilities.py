"""Write the log-probabilities of an answer's tokens in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from upshift.serving.messages import TokenScore


class Places:
    """The number of characters before each token of a text. Tokens that share a character all begin where it begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self.found: list[int] = []

    def add(self, score: TokenScore) -> None:
        begun = bool(self._decoder.getstate()[0])
        breaks = begun and bool(score.spelled) and score.spelled[0] & 0xC0 != 0x80  # no byte that goes on with a character
        self.found.append(self._length + breaks)
        self._length += len(self._decoder.decode(bytes(score.spelled)))


def of_chat(scores: Sequence[TokenScore]) -> dict[str, Any]:
    told = [_one(score) | {"top_logprobs": [_one(other) for other in score.top]} for score in scores]
    return {"content": told, "refusal": None}


def of_completion(scores: Sequence[TokenScore], places: Sequence[int]) -> dict[str, Any]:
    """Return log-probabilities in the form of completions.

    ``places`` holds the character at which each token begins. The chosen token is among the likeliest, as in OpenAI's
    answers."""
    tokens = [score.text for score in scores]
    tops = [{one.text: one.logprob for one in (*score.top, score)} for score in scores]
    likely = [score.logprob for score in scores]
    return {"tokens": tokens, "token_logprobs": likely, "top_logprobs": tops, "text_offset": list(places)}


def _one(score: TokenScore) -> dict[str, Any]:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.spelled)}
