"""Decode with continuous batching: new prompts are admitted as sequences end, so that the engine's rows stay used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from upshift.inference.engine_errors import computing
from upshift.inference.generation.engines.base import Decoder, Prefix
from upshift.inference.generation.prefix import PASS_TOKENS, common_prefix
from upshift.inference.generation.prompt_lookup import Lookup
from upshift.inference.generation.sequence import GeneratedSequence

MIN_LOGPROB = -9999.0  # OpenAI's value for a token without any chance
ADMIT_SHARE = 4  # admission copies the cache, so it waits until the rows divided by this are free


def decode(
    decoder: Decoder,
    waiting: list[GeneratedSequence],
    *,
    rows: int,
    lookup: Lookup | None = None,
    shares_prefix: bool = True,
) -> Iterator[tuple[GeneratedSequence, int]]:
    """Yield each sequence with each of its tokens, as they come.

    At most ``rows`` sequences run at once. Longest prompts come first, so that sequences that are admitted together have
    similar lengths. ``lookup`` needs a decoder that extends. It guesses tokens while there is only one sequence.
    ``shares_prefix``: compute a common beginning of the prompts once."""
    queue = deque(sorted(waiting, key=lambda sequence: (-len(sequence.prompt), sequence.index)))
    has_prefixes = decoder.joins and decoder.prefixes and shares_prefix
    prefix_ids = common_prefix([sequence.prompt for sequence in waiting]) if has_prefixes else []
    with computing():
        prefix = decoder.compute(prefix_ids) if prefix_ids else None
    live: list[GeneratedSequence] = []
    while queue or live:
        admitted = _take_admitted(decoder, queue, live, rows, len(prefix_ids))
        is_only = not admitted and len(live) == 1
        if lookup is not None and is_only and not (decoder.mixes and live[0].pending_tokens):
            yield from _look_up(decoder, live[0], lookup)
        else:
            with computing():
                sequences, logits = _run_pass(decoder, live, admitted, prefix)
            for sequence, token in zip(sequences, choose_tokens(logits, sequences), strict=True):
                sequence.add(token)
                yield sequence, token
        live_rows = [row for row, sequence in enumerate(live) if sequence.ending is None]
        if len(live_rows) < len(live):
            with computing():
                decoder.keep(live_rows)
            live = [live[row] for row in live_rows]


def _take_admitted(
    decoder: Decoder, queue: deque[GeneratedSequence], live: list[GeneratedSequence], rows: int, prefix_length: int
) -> list[GeneratedSequence]:
    """Take the sequences to admit now out of the queue.

    In an engine that mixes, admission copies nothing, so a sequence is admitted as soon as there is a free row."""
    free_rows = rows - len(live)
    token_budget = PASS_TOKENS
    if decoder.mixes:
        token_budget -= sum(sequence.pending_tokens for sequence in live)
    elif queue and (not live or (decoder.joins and free_rows * ADMIT_SHARE >= rows)):
        prompt_tokens = len(queue[0].prompt) - prefix_length
        free_rows = min(free_rows, max(PASS_TOKENS // prompt_tokens, 1))
    else:
        return []
    admitted: list[GeneratedSequence] = []
    while queue and len(admitted) < free_rows and token_budget > 0:
        admitted.append(queue.popleft())
        token_budget -= len(admitted[-1].prompt) - prefix_length
    return admitted


def _run_pass(
    decoder: Decoder, live: list[GeneratedSequence], admitted: list[GeneratedSequence], prefix: Prefix | None
) -> tuple[list[GeneratedSequence], np.ndarray]:
    """Run one pass, and add the admitted sequences to ``live``. Return the sequences that get a next token, and their
    logits."""
    if decoder.mixes:
        join_sequences(decoder, live, [(sequence, prefix) for sequence in admitted])
        return run_mixed_pass(decoder, live, PASS_TOKENS)
    if admitted:
        live += admitted
        return admitted, decoder.admit([sequence.prompt for sequence in admitted], *((prefix,) if prefix else ()))
    return live, decoder.step(np.array([sequence.tokens[-1] for sequence in live], dtype=np.int64))


def join_sequences(decoder: Decoder, live: list[GeneratedSequence], new: list[tuple[GeneratedSequence, Prefix | None]]) -> None:
    """Add new sequences to the rows of an engine that mixes, each with the computed beginning of its prompt."""
    for sequence, prefix in new:
        decoder.join(prefix)
        sequence.computed = prefix.length if prefix else 0
        live.append(sequence)


def run_mixed_pass(
    decoder: Decoder, live: list[GeneratedSequence], prompt_tokens: int
) -> tuple[list[GeneratedSequence], np.ndarray]:
    """Run one pass of an engine that mixes, with at most ``prompt_tokens`` tokens of prompts (Sarathi, arXiv:2308.16369).

    Return the sequences that get a next token, and their logits."""
    row_tokens: list[list[int]] = []
    finished_rows: list[int] = []
    for row, sequence in enumerate(live):
        chunk = sequence.prompt[sequence.computed :][: 1 if sequence.scores_prompt else max(prompt_tokens, 1)]
        prompt_tokens -= len(chunk)
        sequence.computed += len(chunk)
        row_tokens.append(chunk or sequence.tokens[-1:])
        if not sequence.pending_tokens or sequence.scores_prompt:
            finished_rows.append(row)
    logits = decoder.advance(row_tokens)
    if len(finished_rows) < len(live):
        logits = logits[finished_rows]
    return [live[row] for row in finished_rows], logits


def _look_up(decoder: Decoder, sequence: GeneratedSequence, lookup: Lookup) -> Iterator[tuple[GeneratedSequence, int]]:
    """Yield the next token of the only sequence, and the tokens after it that were guessed right."""
    start = time.perf_counter()
    guess = lookup.guess([*sequence.prompt, *sequence.tokens], sequence.tokens_left - 1)
    with computing():
        logits = decoder.extend([sequence.tokens[-1], *guess])
    seconds = time.perf_counter() - start
    accepted = 0
    for position in range(len(logits)):
        (token,) = choose_tokens(logits[position : position + 1], [sequence])
        sequence.add(token)
        accepted += 1
        yield sequence, token
        if sequence.ending is not None or position == len(guess) or token != guess[position]:
            break
    decoder.cut(len(logits) - accepted)
    lookup.add(accepted, seconds, guessed=bool(guess))


def choose_tokens(logits: np.ndarray, sequences: list[GeneratedSequence]) -> list[int]:
    """Return the next token of each sequence from logits [N, V]."""
    likeliest = logits.argmax(1).tolist()
    return [choose_token(row, token, sequence) for row, token, sequence in zip(logits, likeliest, sequences, strict=True)]


def choose_token(logits: np.ndarray, likeliest: int, sequence: GeneratedSequence) -> int:
    """Return the next token of a sequence from logits [V], whose largest is at ``likeliest``."""
    return likeliest if sequence.is_greedy else sequence.choose(logits)


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and its rank: 1 for the likeliest. ``top`` holds the likeliest tokens at its position, the
    likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1

    @classmethod
    def from_logits(cls, logits: np.ndarray, token: int, count: int) -> TokenLogprob:
        """Return the log-probability of ``token`` from logits [V], with the ``count`` likeliest tokens."""
        logits64 = logits.astype(np.float64)
        shifted = logits64 - logits64.max()
        logprobs = np.maximum(shifted - np.log(np.exp(shifted).sum()), MIN_LOGPROB)
        count = min(count, len(logprobs))
        candidates = np.argpartition(-logprobs, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
        ordered = candidates[np.argsort(-logprobs[candidates], kind="stable")]
        top = tuple((int(candidate), float(logprobs[candidate])) for candidate in ordered)
        rank = 1 + int((logprobs > logprobs[token]).sum())
        return cls(token, float(logprobs[token]), top, rank)
