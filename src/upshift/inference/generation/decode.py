"""Continuous batching: prompts are admitted as sequences end, so that the engine's rows stay filled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from upshift.inference.generation.engines.decoder import Decoder
from upshift.inference.generation.lookup import Lookup
from upshift.inference.generation.prefill import PASS_TOKENS, common_prefix
from upshift.inference.generation.sequence import Sequence

ADMIT_SHARE = 4  # of the rows: admission copies the cache, so a quarter of them is awaited


def decode(
    decoder: Decoder, waiting: list[Sequence], *, rows: int, lookup: Lookup | None = None
) -> Iterator[tuple[Sequence, int]]:
    """Each sequence with each of its tokens, as they come; at most ``rows`` sequences at once, longest prompts first, so that
    those that are admitted together are alike. ``lookup``: of a decoder that extends; guesses while one sequence is there."""
    queue = deque(sorted(waiting, key=lambda sequence: (-len(sequence.prompt), sequence.place)))
    common = common_prefix([sequence.prompt for sequence in waiting]) if decoder.joins else []
    known = (decoder.compute(common),) if common else ()
    live: list[Sequence] = []
    while queue or live:
        free = rows - len(live)
        if queue and (not live or (decoder.joins and free * ADMIT_SHARE >= rows)):
            fitting = max(PASS_TOKENS // (len(queue[0].prompt) - len(common)), 1)
            coming = [queue.popleft() for _ in range(min(free, len(queue), fitting))]
            logits = decoder.admit([sequence.prompt for sequence in coming], *known)
            live += coming
        elif lookup is not None and len(live) == 1:
            yield from _looked_up(decoder, live[0], lookup)
            coming = []
        else:
            coming = live
            logits = decoder.step(np.array([sequence.tokens[-1] for sequence in live], dtype=np.int64))
        for sequence, token in zip(coming, next_tokens(logits, coming) if coming else (), strict=True):
            sequence.add(token)
            yield sequence, token
        kept = [row for row, sequence in enumerate(live) if sequence.ending is None]
        if len(kept) < len(live):
            decoder.keep(kept)
            live = [live[row] for row in kept]


def _looked_up(decoder: Decoder, sequence: Sequence, lookup: Lookup) -> Iterator[tuple[Sequence, int]]:
    """A token of one sequence, and those behind it that were guessed right."""
    guess = lookup.guess([*sequence.prompt, *sequence.tokens], sequence.left - 1)
    start = time.perf_counter()
    logits = decoder.extend([sequence.tokens[-1], *guess])
    seconds = time.perf_counter() - start
    taken = 0
    for place in range(len(logits)):
        (token,) = next_tokens(logits[place : place + 1], [sequence])
        sequence.add(token)
        taken += 1
        yield sequence, token
        if sequence.ending is not None or place == len(guess) or token != guess[place]:
            break
    decoder.cut(len(logits) - taken)
    lookup.add(taken, seconds, guessed=bool(guess))


def next_tokens(logits: np.ndarray, sequences: list[Sequence]) -> list[int]:
    likeliest = logits.argmax(1)
    return [int(likeliest[row]) if sequence.plain else sequence.choose(logits[row]) for row, sequence in enumerate(sequences)]
