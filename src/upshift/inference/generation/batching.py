"""Decode with continuous batching: prompts are admitted as sequences end, so that the engine's rows stay filled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from upshift.inference.generation.engines.base import Decoder, Prefix
from upshift.inference.generation.prefix import PASS_TOKENS, common_prefix
from upshift.inference.generation.prompt_lookup import Lookup
from upshift.inference.generation.sequence import GeneratedSequence

ADMIT_SHARE = 4  # of the rows: admission copies the cache, so a quarter of them is awaited


def decode(
    decoder: Decoder, waiting: list[GeneratedSequence], *, rows: int, lookup: Lookup | None = None
) -> Iterator[tuple[GeneratedSequence, int]]:
    """Yield each sequence with each of its tokens, as they come.

    At most ``rows`` sequences run at once, longest prompts first, so that those that are admitted together are alike.
    ``lookup`` is for a decoder that extends: it guesses while there is one sequence."""
    queue = deque(sorted(waiting, key=lambda sequence: (-len(sequence.prompt), sequence.place)))
    common = common_prefix([sequence.prompt for sequence in waiting]) if decoder.joins else []
    known = decoder.compute(common) if common else None
    live: list[GeneratedSequence] = []
    while queue or live:
        coming = _coming(decoder, queue, live, rows, len(common))
        if lookup is not None and not coming and len(live) == 1 and not (decoder.mixes and live[0].pending):
            yield from _looked_up(decoder, live[0], lookup)
        else:
            if decoder.mixes:
                join(decoder, live, [(sequence, known) for sequence in coming])
                told, logits = advance(decoder, live, PASS_TOKENS)
            elif coming:
                live += coming
                told, logits = coming, decoder.admit([sequence.prompt for sequence in coming], *((known,) if known else ()))
            else:
                told, logits = live, decoder.step(np.array([sequence.tokens[-1] for sequence in live], dtype=np.int64))
            for sequence, token in zip(told, next_tokens(logits, told), strict=True):
                sequence.add(token)
                yield sequence, token
        kept = [row for row, sequence in enumerate(live) if sequence.ending is None]
        if len(kept) < len(live):
            decoder.keep(kept)
            live = [live[row] for row in kept]


def _coming(
    decoder: Decoder, queue: deque[GeneratedSequence], live: list[GeneratedSequence], rows: int, known: int
) -> list[GeneratedSequence]:
    """Take the sequences to admit now out of the queue. If admission copies nothing, a sequence comes as soon as
    there is a row."""
    free = rows - len(live)
    if decoder.mixes:
        most = PASS_TOKENS - sum(sequence.pending for sequence in live)
    elif queue and (not live or (decoder.joins and free * ADMIT_SHARE >= rows)):
        most, free = PASS_TOKENS, min(free, max(PASS_TOKENS // (len(queue[0].prompt) - known), 1))
    else:
        return []
    coming: list[GeneratedSequence] = []
    while queue and len(coming) < free and most > 0:
        coming.append(queue.popleft())
        most -= len(coming[-1].prompt) - known
    return coming


def join(decoder: Decoder, live: list[GeneratedSequence], coming: list[tuple[GeneratedSequence, Prefix | None]]) -> None:
    """Add rows for these sequences to an engine that mixes, each behind the beginning of its prompt that is known."""
    for sequence, prefix in coming:
        decoder.join(prefix)
        sequence.computed = prefix.length if prefix else 0
        live.append(sequence)


def advance(decoder: Decoder, live: list[GeneratedSequence], most: int) -> tuple[list[GeneratedSequence], np.ndarray]:
    """Run one pass of an engine that mixes, with at most so many tokens of prompts (Sarathi, arXiv:2308.16369).
    Return the sequences that get a next token, and its logits."""
    parts, told = list[list[int]](), list[int]()
    for row, sequence in enumerate(live):
        part = sequence.prompt[sequence.computed :][: max(most, 1)]
        most -= len(part)
        sequence.computed += len(part)
        parts.append(part or sequence.tokens[-1:])
        told += [] if sequence.pending else [row]
    logits = decoder.advance(parts)
    return [live[row] for row in told], logits if len(told) == len(live) else logits[told]


def _looked_up(decoder: Decoder, sequence: GeneratedSequence, lookup: Lookup) -> Iterator[tuple[GeneratedSequence, int]]:
    """Yield a token of the only sequence, and those behind it that were guessed right."""
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


def next_tokens(logits: np.ndarray, sequences: list[GeneratedSequence]) -> list[int]:
    likeliest = logits.argmax(1).tolist()
    return [next_token(row, token, sequence) for row, token, sequence in zip(logits, likeliest, sequences, strict=True)]


def next_token(logits: np.ndarray, likeliest: int, sequence: GeneratedSequence) -> int:
    return likeliest if sequence.plain else sequence.choose(logits)
