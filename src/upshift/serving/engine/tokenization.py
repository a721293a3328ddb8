"""Answer requests for token ids, and for the text of token ids. A long answer has several messages, because a line has a maximum
length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.serving.messages import DecodedText, Detokenize, Refused, Tokenize, Tokens
from upshift.value import Value

TOKENS_PER_MESSAGE = 2048
CHARACTERS_PER_MESSAGE = 2**15


def token_replies(
    request: Tokenize | Detokenize, tokenizer: Any, read_chat: Callable[[Tokenize], list[int]], vocabulary: int | None
) -> list[Value]:
    """Return the messages that answer a request, or its refusal. ``read_chat`` returns the token ids of a chat."""
    try:
        if isinstance(request, Detokenize):
            check_token_ids(request.tokens, vocabulary)
            text: str = tokenizer.decode(list(request.tokens), skip_special_tokens=False)
            return [
                DecodedText(id=request.id, text=text[start:end], last=end >= len(text))
                for start, end in _spans(len(text), CHARACTERS_PER_MESSAGE)
            ]
        if isinstance(request.prompt, str):
            ids: Sequence[int] = tokenizer(request.prompt, add_special_tokens=request.add_special_tokens).input_ids
        else:
            ids = read_chat(request)
        texts = tokenizer.convert_ids_to_tokens(ids) if request.with_texts else []
    except Exception as error:  # from the tokenizer, or from its template, at this request
        return [Refused.from_error(request.id, error)]
    return [
        Tokens(id=request.id, ids=tuple(ids[start:end]), texts=tuple(texts[start:end]), last=end >= len(ids))
        for start, end in _spans(len(ids), TOKENS_PER_MESSAGE)
    ]


def check_token_ids(ids: Iterable[int], vocabulary: int | None) -> None:
    """Raise RequestError if a token id is not below ``vocabulary``. With None, the size is unknown, and nothing is checked.

    An engine fails at an id without a vector, or reads memory that is not its own."""
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise RequestError(f"token {largest} is not one of the model's {vocabulary:,}; leave out what it stands for")


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and ends of parts of at most ``size``. There is at least one part."""
    for start in range(0, max(length, 1), size):
        yield start, start + size
