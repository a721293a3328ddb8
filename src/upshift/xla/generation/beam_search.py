"""Search with beams as arithmetic on tensors of fixed shapes, equal to transformers' GenerationMixin._beam_search.

There are B prompts with K beams each, and texts have up to N tokens of a vocabulary of V. Running beams are texts that have not
ended. The K best finished texts of each prompt are stored beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.sampling import process

UNLIKELY = -1.0e9  # transformers uses it in place of minus infinity


class Beams(NamedTuple):
    running: Any  # [B, K, N] tokens
    running_scores: Any  # [B, K] sums of log-probabilities
    finished: Any  # [B, K, N]
    finished_scores: Any  # [B, K], divided by the length penalty
    is_finished: Any  # [B, K]
    can_improve: Any  # [B, 1]
    can_continue: Any  # []: a candidate of the last step had not ended


def first_beams(prompts: int, options: XlaGeneration, fill: int) -> Beams:
    """Return the beams before the first token. ``fill``: the token that unwritten positions hold."""
    beams = options.num_beams
    texts = tf.fill([prompts, beams, options.max_new_tokens], tf.constant(fill, tf.int64))
    scores = tf.constant([[0.0] + [UNLIKELY] * (beams - 1)])  # all beams start as the same text, so only the first one counts
    return Beams(
        running=texts,
        running_scores=tf.repeat(scores, prompts, axis=0),
        finished=texts,
        finished_scores=tf.fill([prompts, beams], UNLIKELY),
        is_finished=tf.zeros([prompts, beams], tf.bool),
        can_improve=tf.ones([prompts, 1], tf.bool),
        can_continue=tf.constant(True),
    )


def advance(beams: Beams, logits: Any, position: Any, options: XlaGeneration) -> tuple[Beams, Any, Any]:
    """Add the token at a position. ``logits`` are [B * K, V].

    Return the new beams, the row [B * K] that each of them continues, and their new tokens [B * K]."""
    prompts, count = beams.running_scores.shape
    vocabulary = logits.shape[-1]
    scores = process(tf.nn.log_softmax(tf.cast(logits, tf.float32)), position, options)
    totals = tf.reshape(scores, [prompts, count, vocabulary]) + beams.running_scores[:, :, None]
    scores = tf.reshape(totals, [prompts, -1])
    num_candidates = max(2, 1 + len(options.eos_token_id)) * count  # K of them continue even if all others end
    best, flat_indices = tf.math.top_k(scores, k=num_candidates)
    parents = flat_indices // vocabulary
    tokens = tf.cast(flat_indices % vocabulary, tf.int64)
    texts = _write(_take(beams.running, parents), tokens, position)
    ended = _has_ended(tokens, position, options)
    running_scores, selected = tf.math.top_k(best + tf.where(ended, UNLIKELY, 0.0), k=count)
    running = _take(texts, selected)
    rows = _take(parents, selected) + tf.range(prompts)[:, None] * count
    finished = _finish(beams, texts, best, ended, position, options)
    can_improve = _can_improve(beams.can_improve, running_scores, finished, position, options)
    advanced = Beams(running, running_scores, *finished, can_improve, tf.logical_not(tf.reduce_all(ended)))
    return advanced, tf.reshape(rows, [-1]), tf.reshape(_take(tokens, selected), [-1])


def continues_search(beams: Beams, options: XlaGeneration) -> Any:
    """Return whether another token can change the result."""
    stops_early = tf.constant(False)
    if options.early_stopping is True:
        stops_early = tf.reduce_all(beams.is_finished)
    return tf.reduce_any(beams.can_improve) & tf.logical_not(stops_early) & beams.can_continue


def _has_ended(tokens: Any, position: Any, options: XlaGeneration) -> Any:
    ended = tf.fill(tf.shape(tokens), position + 1 >= options.max_new_tokens)
    for token in options.eos_token_id:
        ended |= tokens == token
    return ended


def _finish(beams: Beams, texts: Any, best: Any, ended: Any, position: Any, options: XlaGeneration) -> tuple[Any, Any, Any]:
    """Return the K best texts that finished, before or now: texts, scores, whether each is finished.

    Only the K best candidates may finish."""
    count = beams.running_scores.shape[1]
    newly_finished = ended & (tf.range(best.shape[1]) < count)[None]
    scores = best / _penalty(position + 1, options)
    if options.early_stopping is True:
        scores += tf.where(tf.reduce_all(beams.is_finished, axis=-1, keepdims=True), UNLIKELY, 0.0)
    scores += tf.where(beams.can_improve, 0.0, UNLIKELY)
    scores += tf.where(newly_finished, 0.0, UNLIKELY)
    merged, selected = tf.math.top_k(tf.concat([beams.finished_scores, scores], axis=1), k=count)
    finished = _take(tf.concat([beams.finished, texts], axis=1), selected)
    return finished, merged, _take(tf.concat([beams.is_finished, newly_finished], axis=1), selected)


def _can_improve(
    could_improve: Any, running_scores: Any, finished: tuple[Any, Any, Any], position: Any, options: XlaGeneration
) -> Any:
    _, scores, is_finished = finished
    assumes_longest = options.early_stopping == "never" and options.length_penalty > 0
    length = options.max_new_tokens if assumes_longest else position + 1
    possible = running_scores[:, :1] / _penalty(length, options)
    worst = tf.where(is_finished, tf.reduce_min(scores, axis=1, keepdims=True), UNLIKELY)
    return could_improve & tf.reduce_any(possible > worst, axis=-1, keepdims=True)


def _penalty(length: Any, options: XlaGeneration) -> Any:
    return tf.cast(length, tf.float32) ** options.length_penalty


def _take(values: Any, indices: Any) -> Any:
    return tf.gather(values, indices, axis=1, batch_dims=1)


def _write(texts: Any, tokens: Any, position: Any) -> Any:
    """Write ``tokens`` [B, C] at a position of ``texts`` [B, C, N]."""
    is_position = tf.range(texts.shape[-1]) == position
    return tf.where(is_position[None, None], tokens[:, :, None], texts)
