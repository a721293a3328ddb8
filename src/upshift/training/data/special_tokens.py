"""Find the special tokens around a text: those that a tokenizer adds (BOS, CLS .. SEP), and EOS. Count unknown tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from upshift.errors import RequestError
from upshift.training.data.data_files import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedTokenizerBase

    from upshift.training.data.rows.token_rows import TokenRow


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


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of the unknown token. Return None if it is also the end of a text, as in GPT-2, which knows every byte."""
    other_ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown_id: int | None = tokenizer.unk_token_id
    return None if unknown_id in other_ids else unknown_id


# Shares of unknown tokens. Tokenizers of 3,000 words or pieces, trained on half of this project's pages, have up to 0.8 % in the
# other half, and 15 to 27 % in its pages in Chinese, which are half commands.
NOTICED_UNKNOWN_SHARE = 0.01
MAX_UNKNOWN_SHARE = 0.5
SPACES = ("\u2581", "\u0120")  # tokens for a space, which some tokenizers put before every unknown token
MIN_TOKENS_TO_REFUSE = 16


class UnknownTokens:
    """Counts the tokens of texts that the tokenizer does not know, and the texts of which it knows none.

    Nothing can be learned of an unknown token, and only its name, such as <unk>, is learned as the next token."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._name = "" if tokenizer is None else str(tokenizer.unk_token)
        self._id = None if tokenizer is None else _unknown_id(tokenizer)
        vocabulary = {} if self._id is None or tokenizer is None else tokenizer.get_vocab()
        self._spaces = [vocabulary[token] for token in SPACES if token in vocabulary]
        self._num_tokens = 0
        self._num_unknown = 0
        self._num_lost_texts = 0
        self._text_has_tokens = False
        self._text_has_known_tokens = False

    def add(self, ids: Any) -> None:
        """Count the tokens of a whole text: a list of ids, or an array of them."""
        self.add_piece(ids)
        self.end_text()

    def add_piece(self, ids: Any) -> None:
        """Count the tokens of a piece of a text. ``end_text`` follows the last piece."""
        if self._id is None or not len(ids):
            return
        array = np.asarray(ids)
        num_unknown = int(np.count_nonzero(array == self._id))
        num_tokens = len(array)
        if num_unknown:
            num_tokens -= int(np.isin(array, self._spaces).sum())
        self._num_tokens += num_tokens
        self._num_unknown += num_unknown
        self._text_has_tokens = True
        self._text_has_known_tokens |= num_unknown < num_tokens

    def end_text(self) -> None:
        """Count the text as lost if all tokens of its pieces are unknown."""
        self._num_lost_texts += self._text_has_tokens and not self._text_has_known_tokens
        self._text_has_tokens = False
        self._text_has_known_tokens = False

    def counted(self, rows: Iterable[TokenRow]) -> Iterator[TokenRow]:
        """Yield the rows, and count their tokens."""
        for row in rows:
            self.add(row.ids)
            yield row
        self.check()

    def check(self) -> None:
        """Raise RequestError if most tokens so far are unknown."""
        if self._num_tokens >= MIN_TOKENS_TO_REFUSE and self._num_unknown > MAX_UNKNOWN_SHARE * self._num_tokens:
            raise RequestError(
                f"{self._num_unknown:,} of the first {self._num_tokens:,} tokens are {self._name}: the tokenizer does not know "
                "this text; save the tokenizer that was trained for it with tokenizer.save_pretrained, or give data with a "
                "column input_ids"
            )

    def report(self) -> None:
        """Check the tokens, and say how many are unknown if it is a noticeable share, or a whole text."""
        self.check()
        share = self._num_unknown / max(self._num_tokens, 1)
        if share > NOTICED_UNKNOWN_SHARE or self._num_lost_texts:
            lost = f", and of {self._num_lost_texts:,} texts it knows no token" if self._num_lost_texts else ""
            say_once(
                f"the tokenizer does not know {self._num_unknown:,} of {self._num_tokens:,} tokens ({share:.1%}), which become "
                f"{self._name}{lost}"
            )
