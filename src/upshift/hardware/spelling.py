"""Find the product that a text names, however its words are joined: rtx-4090, RTX 4090, rtx_4090, rtx4090 and 4090 are one.

A product's words are those of its key in the table, which must all be written, and those of its full name and its memory,
which may be. A text that has only some of a key's words means that product if no other product has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LONGEST = 60  # characters of a name that is looked at
MEMORY_TOLERANCE = 0.1  # of the memory that the driver reports: a 48 GB card reports 45.0 GiB


class Product(NamedTuple):
    """The words of a product. ``key``: of the table. ``name``: the vendor's. ``memory_gib``: of one device, where a row has it.
    """

    key: str
    name: str
    memory_gib: float | None


class Matches(NamedTuple):
    """The keys that the text names: ``whole`` with all words of the key, ``partial`` with some of them."""

    whole: tuple[str, ...]
    partial: tuple[str, ...]


def join_words(text: str) -> str:
    """Return the letters and digits of a text, in lower case: what stays the same however words are joined."""
    return "".join(_words(text))


def match_products(text: str, products: Mapping[str, Product]) -> Matches:
    """Return the names of ``products`` that ``text`` may mean."""
    joined = join_words(text)
    if not joined or len(joined) > LONGEST:
        return Matches((), ())
    whole = []
    partial = []
    for name, product in products.items():
        needed = _words(name)
        optional = [word for word in _words(f"{product.key} {product.name}") if word not in needed]
        counts = [len(used.intersection(needed)) for used in _used_words(joined, (*needed, *optional), product)]
        most = max(counts, default=0)
        if most == len(needed):
            whole.append(name)
        elif most > 0:
            partial.append(name)
    return Matches(tuple(whole), tuple(partial))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _used_words(joined: str, words: tuple[str, ...], product: Product) -> Iterator[frozenset[str]]:
    """Yield every set of words that ``joined`` can be cut into, each word at most once."""
    if not joined:
        yield frozenset()
        return
    for place, word in enumerate(words):
        for spelling in _spellings(word):
            if joined.startswith(spelling):
                others = words[:place] + words[place + 1 :]
                yield from (used | {word} for used in _used_words(joined[len(spelling) :], others, product))
    memory = re.match(r"([0-9]{1,4})(?:gib|gb|g)", joined)
    if memory and _has_memory(product, int(memory[1]), words):
        without = product._replace(memory_gib=None)
        yield from _used_words(joined[memory.end() :], words, without)


def _has_memory(product: Product, gigabytes: int, words: tuple[str, ...]) -> bool:
    """Return whether a product whose own words name no memory has about ``gigabytes``."""
    if product.memory_gib is None or any(re.fullmatch(r"[0-9]+gb", word) for word in words):
        return False
    return abs(gigabytes - product.memory_gib) <= MEMORY_TOLERANCE * product.memory_gib


def _spellings(word: str) -> list[str]:
    """Return the ways to write a word: 80gb, 80gib and 80g; sxm with the number of its generation."""
    if re.fullmatch(r"[0-9]+gb", word):
        return [word, f"{word[:-2]}gib", word[:-1]]
    if re.fullmatch(r"sxm[0-9]?", word):
        return ["sxm", *(f"sxm{generation}" for generation in range(2, 7))]
    return [word]
