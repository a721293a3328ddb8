"""Search by beams as arithmetic of fixed shapes: transformers' own (GenerationMixin._beam_search), with all prompts
at once.

There are B prompts with K beams each. Running beams are texts that have not ended. Finished ones are kept beside
them, by their scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.sampling import process

UNLIKELY = -1.0e9  # transformers' own, in place of minus infinity


class Beams(NamedTuple):
    running: Any  # [B, K, N] tokens
    running_scores: Any  # [B, K] sums of log-probabilities
    finished: Any  # [B, K, N]
    finished_scores: Any  # [B, K], by the length penalty
    is_finished: Any  # [B, K]
    may_improve: Any  # [B, 1]
    may_go_on: Any  # []: some candidate of the last step had not ended


def first_beams(prompts: int, options: XlaGeneration, fill: int) -> Beams:
    beams = options.num_beams
    texts = tf.fill([prompts, beams, options.max_new_tokens], tf.constant(fill, tf.int64))
    one = tf.constant([[0.0] + [UNLIKELY] * (beams - 1)])  # all beams begin as the same text: only one of them counts
    return Beams(
        running=texts, running_scores=tf.repeat(one, prompts, axis=0), finished=texts,
        finished_scores=tf.fill([prompts, beams], UNLIKELY), is_finished=tf.zeros([prompts, beams], tf.bool),
        may_improve=tf.ones([prompts, 1], tf.bool), may_go_on=tf.constant(True),
    )  # fmt: skip


def advance(beams: Beams, logits: Any, number: Any, options: XlaGeneration) -> tuple[Beams, Any, Any]:
    """Return the beams with the token of this number, the rows [B K] that they go on from, and their last tokens [B
    K]. ``logits`` are [B K, V]."""
    prompts, count = beams.running_scores.shape
    words = logits.shape[-1]
    scores = process(tf.nn.log_softmax(tf.cast(logits, tf.float32)), number, options)
    scores = tf.reshape(tf.reshape(scores, [prompts, count, words]) + beams.running_scores[:, :, None], [prompts, -1])
    kept = max(2, 1 + len(options.eos_token_id)) * count  # so that enough of them go on where all others end
    best, places = tf.math.top_k(scores, k=kept)
    origin = places // words
    tokens = tf.cast(places % words, tf.int64)
    texts = _write(_take(beams.running, origin), tokens, number)
    ended = _ended(tokens, number, options)
    alive, chosen = tf.math.top_k(best + tf.where(ended, UNLIKELY, 0.0), k=count)
    running = _take(texts, chosen)
    rows = _take(origin, chosen) + tf.range(prompts)[:, None] * count
    finished = _finish(beams, texts, best, ended, number, options)
    may_improve = _may_improve(beams.may_improve, alive, finished, number, options)
    after = Beams(running, alive, *finished, may_improve, tf.logical_not(tf.reduce_all(ended)))
    return after, tf.reshape(rows, [-1]), tf.reshape(_take(tokens, chosen), [-1])


def unfinished(beams: Beams, options: XlaGeneration) -> Any:
    full = tf.reduce_all(beams.is_finished) if options.early_stopping is True else tf.constant(False)
    return tf.reduce_any(beams.may_improve) & tf.logical_not(full) & beams.may_go_on


def _ended(tokens: Any, number: Any, options: XlaGeneration) -> Any:
    found = tf.fill(tf.shape(tokens), number + 1 >= options.max_new_tokens)
    for token in options.eos_token_id:
        found |= tokens == token
    return found


def _finish(beams: Beams, texts: Any, best: Any, ended: Any, number: Any, options: XlaGeneration) -> tuple[Any, Any, Any]:
    """Return the best of those that had finished and of those that have now. Only the first K candidates may finish."""
    count = beams.running_scores.shape[1]
    now = ended & (tf.range(best.shape[1]) < count)[None]
    scores = best / _penalty(number + 1, options)
    if options.early_stopping is True:
        scores += tf.where(tf.reduce_all(beams.is_finished, axis=-1, keepdims=True), UNLIKELY, 0.0)
    scores += tf.where(beams.may_improve, 0.0, UNLIKELY)
    scores += tf.where(now, 0.0, UNLIKELY)
    merged, chosen = tf.math.top_k(tf.concat([beams.finished_scores, scores], axis=1), k=count)
    finished = _take(tf.concat([beams.finished, texts], axis=1), chosen)
    return finished, merged, _take(tf.concat([beams.is_finished, now], axis=1), chosen)


def _may_improve(before: Any, alive: Any, finished: tuple[Any, Any, Any], number: Any, options: XlaGeneration) -> Any:
    _, scores, is_finished = finished
    hopeful = options.early_stopping == "never" and options.length_penalty > 0
    length = options.max_new_tokens if hopeful else number + 1
    possible = alive[:, :1] / _penalty(length, options)
    worst = tf.where(is_finished, tf.reduce_min(scores, axis=1, keepdims=True), UNLIKELY)
    return before & tf.reduce_any(possible > worst, axis=-1, keepdims=True)


def _penalty(length: Any, options: XlaGeneration) -> Any:
    return tf.cast(length, tf.float32) ** options.length_penalty


def _take(values: Any, places: Any) -> Any:
    return tf.gather(values, places, axis=1, batch_dims=1)


def _write(texts: Any, tokens: Any, number: Any) -> Any:
    """Write ``tokens`` [B, C] at place ``number`` of ``texts`` [B, C, N]."""
    here = tf.range(texts.shape[-1]) == number
    return tf.where(here[None, None], tokens[:, :, None], texts)
