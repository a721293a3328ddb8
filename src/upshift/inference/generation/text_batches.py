"""Generate with an engine that takes whole requests: texts for the user, and the tokens and times that a race compares."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from upshift.errors import EngineEnded
from upshift.inference.generation.engines.text_engine import TextEngine, TextRequest, check_taken
from upshift.inference.generation.sequence import GeneratedSequence


def generate_texts(engine: TextEngine, sequences: Sequence[GeneratedSequence]) -> Iterator[tuple[GeneratedSequence, int]]:
    """Yield each sequence with each of its tokens, as they come. The engine decides how many sequences run at once.

    Raise RequestError if a sequence is longer than the engine's positions, and EngineEnded if the engine ends."""
    for sequence in sequences:
        engine.check(len(sequence.prompt), sequence.tokens_left, f"prompt {sequence.index + 1}")
    longest_first = sorted(sequences, key=lambda sequence: (-len(sequence.prompt), sequence.index))
    numbers = engine.add(TextRequest(sequence.prompt, engine.sampling(sequence)) for sequence in longest_first)
    live = dict(zip(numbers, longest_first, strict=True))
    try:
        while live:
            for progress in engine.step():
                running = live.get(progress.request)
                if running is None:  # it ended on our side
                    continue
                check_taken(progress)
                yield from _add_tokens(running, progress.tokens)
                if running.ending is not None:
                    del live[progress.request]
                if running.ending == "stop":  # the engine does not know of it
                    engine.abort([progress.request])
    except EngineEnded:
        raise
    except BaseException:  # the caller needs no more tokens
        engine.abort(live)
        raise


def _add_tokens(sequence: GeneratedSequence, tokens: Sequence[int]) -> Iterator[tuple[GeneratedSequence, int]]:
    """Add tokens to a sequence until it ends. Yield the sequence with each token."""
    for token in tokens:
        sequence.add(token)
        yield sequence, token
        if sequence.ending is not None:
            return


def follow_texts(engine: TextEngine, prompts: Sequence[Sequence[int]], tokens: np.ndarray) -> np.ndarray:
    """Return the logits [T, N, V] fp32 of the engine while each text follows ``tokens`` [T, N].

    The engine chooses its likeliest tokens. If one differs from the token to follow, a new request begins after the token to
    follow."""
    followed: list[list[np.ndarray]] = [[] for _ in prompts]
    count = len(tokens)
    while unfinished := [row for row in range(len(prompts)) if len(followed[row]) < count]:
        requests = [
            TextRequest(
                [*prompts[row], *tokens[: len(followed[row]), row].tolist()],
                engine.greedy(count - len(followed[row])),
                logits=True,
            )
            for row in unfinished
        ]
        answers = _complete(engine, requests)
        for row, answer in zip(unfinished, answers, strict=True):
            targets = tokens[len(followed[row]) :, row]
            agreed = next((index for index, token in enumerate(answer.tokens) if token != targets[index]), len(answer.tokens) - 1)
            followed[row] += answer.logits[: agreed + 1]
    return np.stack([np.stack(rows) for rows in followed], axis=1)


class _Answer(NamedTuple):
    tokens: list[int]
    logits: list[np.ndarray]  # [V] of each token


def _complete(engine: TextEngine, requests: Sequence[TextRequest]) -> list[_Answer]:
    """Return the tokens and the logits of requests that run to their ends."""
    answers = {number: _Answer([], []) for number in engine.add(requests)}
    running = set(answers)
    while running:
        for progress in engine.step():
            answer = answers.get(progress.request)
            if answer is None:
                continue
            check_taken(progress)
            answer.tokens.extend(progress.tokens)
            if progress.logits is not None:
                answer.logits.extend(progress.logits)
            if progress.has_ended:
                running.discard(progress.request)
    return list(answers.values())


def time_texts(engine: TextEngine, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
    """Return the seconds until all texts have one token, then until each next token of all of them, ``count`` in all.

    The engine forgets what it has computed of the prompts before."""
    engine.reset()
    start = time.perf_counter()
    lengths = dict.fromkeys(engine.add(TextRequest(prompt, engine.greedy(count)) for prompt in prompts), 0)
    running = set(lengths)
    ends: list[float] = []
    while running:
        for progress in engine.step():
            if progress.request not in lengths:
                continue
            lengths[progress.request] += len(progress.tokens)
            if progress.has_ended:
                running.discard(progress.request)
        now = time.perf_counter() - start
        ends += [now] * (min(lengths.values()) - len(ends))
    return [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
