"""Choose the next token of each row from its logits, as transformers' logits processors do, on tensors of fixed shapes.

The thresholds of top-k and top-p are found by a binary search over the bits of the scores, not by sorting. It takes 32 passes
over the vocabulary for all options. So temperature, top_k, top_p and the seed are inputs, and changing them compiles nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from upshift.xla.generation.options import XlaGeneration

NEVER = float("-inf")


class Sampling(NamedTuple):
    """Hold the inputs of sampling. All are scalars except ``uniform`` [R, N]: a number in [0, 1) for each new token."""

    temperature: Any
    top_k: Any
    top_p: Any
    uniform: Any


def process(scores: Any, position: Any, options: XlaGeneration) -> Any:
    """Apply transformers' processors, in its order, to scores [R, V] of the new token at a position, counted from 0."""
    vocabulary = tf.range(scores.shape[-1])
    if options.min_new_tokens and options.eos_token_id:
        early = _is_in(vocabulary, options.eos_token_id) & (position < options.min_new_tokens)
        scores = tf.where(early, NEVER, scores)
    if options.forced_bos_token_id is not None:
        scores = _force(scores, vocabulary, (options.forced_bos_token_id,), position == 0)
    if options.forced_eos_token_id is not None:
        scores = _force(scores, vocabulary, options.forced_eos_token_id, position == options.max_new_tokens - 1)
    if options.suppress_tokens:
        scores = tf.where(_is_in(vocabulary, options.suppress_tokens), NEVER, scores)
    return scores


def _is_in(vocabulary: Any, tokens: tuple[int, ...]) -> Any:
    return tf.reduce_any(vocabulary[:, None] == tf.constant(tokens, vocabulary.dtype)[None], axis=1)


def _force(scores: Any, vocabulary: Any, tokens: tuple[int, ...], condition: Any) -> Any:
    forced = tf.where(_is_in(vocabulary, tokens), 0.0, NEVER)
    return tf.where(condition, tf.broadcast_to(forced, tf.shape(scores)), scores)


def greedy(scores: Any) -> Any:
    return tf.argmax(scores, axis=-1, output_type=tf.int64)


def sample(scores: Any, position: Any, sampling: Sampling) -> Any:
    """Draw tokens [R] from fp32 scores [R, V], after temperature, then top-k, then top-p."""
    scores = scores / sampling.temperature
    scores = _top_k(scores, sampling.top_k)
    probabilities = _top_p(tf.nn.softmax(scores), sampling.top_p)
    cumulative = tf.cumsum(probabilities, axis=-1)
    # Rounding may raise the sum at tokens of probability 0. None of them may be chosen.
    reached = tf.where(probabilities > 0, cumulative, 0.0)
    uniform = tf.gather(sampling.uniform, position, axis=1)[:, None]
    threshold = uniform * tf.reduce_max(reached, axis=-1, keepdims=True)
    return tf.argmax(tf.cast(reached > threshold, tf.int32), axis=-1, output_type=tf.int64)


def _top_k(scores: Any, top_k: Any) -> Any:
    """Keep the ``top_k`` largest scores, and those equal to the smallest of them. Exclude the others."""
    keys = _ordered(scores)
    least = _largest_true(lambda limit: tf.reduce_sum(tf.cast(keys >= limit, tf.int32), axis=-1, keepdims=True) >= top_k, keys)
    return tf.where(keys >= least, scores, NEVER)


def _top_p(probabilities: Any, top_p: Any) -> Any:
    """Keep a token if all more probable tokens together have a probability below ``top_p``."""
    keys = _ordered(probabilities)

    def enough_above(limit: Any) -> Any:
        return tf.reduce_sum(tf.where(keys > limit, probabilities, 0.0), axis=-1, keepdims=True) >= top_p

    last_dropped = _largest_true(enough_above, keys)
    return tf.where((keys > last_dropped) | (top_p >= 1.0), probabilities, 0.0)


def _ordered(values: Any) -> Any:
    """Return int32 numbers in the same order as these fp32 numbers."""
    bits = tf.bitcast(values, tf.int32)
    return tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, tf.int32.max), bits)


def _largest_true(is_true: Any, keys: Any) -> Any:
    """Return [R, 1]: the largest int32 for which ``is_true`` is true.

    It must be true for the smallest int32, and for every number below one for which it is true."""
    first = tf.zeros_like(keys[:, :1])
    start = tf.where(is_true(first), first, tf.int32.min)  # the sign first, then 31 bits from the highest one on

    def halve(bit: Any, largest: Any) -> Any:
        tried = largest + tf.bitwise.left_shift(tf.constant(1, tf.int32), bit)
        return bit - 1, tf.where(is_true(tried), tried, largest)

    _, largest = tf.while_loop(lambda bit, _: bit >= 0, halve, (tf.constant(30), start))
    return largest
