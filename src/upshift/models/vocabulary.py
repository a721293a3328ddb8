"""Recognize a tokenizer without a vocabulary.

transformers builds some tokenizers without any file of a vocabulary, and does not say so: those of T5, mBART and DeBERTa have
then only special tokens and a mark for spaces, and turn every text into unknown tokens.
"""

from __future__ import annotations

from typing import Any

NO_VOCABULARY = "it has no vocabulary and turns every text into unknown tokens"


def has_words(tokenizer: Any) -> bool:
    """Return whether a token that is not special has a letter or a digit, as in every vocabulary of words, pieces or bytes."""
    special_tokens = set(map(str, tokenizer.all_special_tokens))
    return any(any(map(str.isalnum, token)) for token in tokenizer.get_vocab() if token not in special_tokens)
