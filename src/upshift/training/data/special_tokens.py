"""Find the special tokens around a text: those that a tokenizer adds (BOS, CLS .. SEP), and EOS."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def ids_around_document(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids before and after a document. They are found by encoding a letter with and without special tokens."""
    letter: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    starts = (index for index in range(len(full) - len(letter) + 1) if full[index : index + len(letter)] == letter)
    start = next(starts, None)
    ids_before: list[int] = []
    ids_after: list[int] = []
    if start is not None and letter:
        ids_before = full[:start]
        ids_after = full[start + len(letter) :]
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in ids_after:
        ids_after = [*ids_after, eos]
    return ids_before, ids_after


def overlap(first: list[int], second: list[int]) -> int:
    """Return how many ids at the end of the first list are also the beginning of the second."""
    longest = min(len(first), len(second))
    return next((count for count in range(longest, 0, -1) if first[-count:] == second[:count]), 0)


def with_special_tokens(ids: list[int], ids_before: list[int], ids_after: list[int]) -> list[int]:
    """Return a document's ids with those around it. Ids with which it begins or ends already are not added again."""
    before = ids_before[: len(ids_before) - overlap(ids_before, ids)]
    after = ids_after[overlap(ids, ids_after) :]
    return [*before, *ids, *after]
