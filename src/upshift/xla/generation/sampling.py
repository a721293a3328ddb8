"""Choose the next token of each row from its logits: transformers' processors and warpers, as arithmetic of fixed
shapes.

Thresholds of top-k and top-p are found by halving the range of the scores' bits, not by sorting: 32 passes over the
vocabulary whatever the options are. So temperature, top_k, top_p and the seed are inputs, and a change of them
compiles nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from upshift.xla.generation.options import XlaGeneration

NEVER = float("-inf")


class Sampling(NamedTuple):
    """The inputs of sampling. All are scalars but ``uniform`` [R, N]: a number in [0, 1) for each token to come."""

    temperature: Any
    top_k: Any
    top_p: Any
    uniform: Any


def process(scores: Any, number: Any, options: XlaGeneration) -> Any:
    """Return scores [R, V] of the token ``number`` (from 0 on) after transformers' processors, in its order."""
    words = tf.range(scores.shape[-1])
    if options.min_new_tokens and options.eos_token_id:
        early = _among(words, options.eos_token_id) & (number < options.min_new_tokens)
        scores = tf.where(early, NEVER, scores)
    if options.forced_bos_token_id is not None:
        scores = _force(scores, words, (options.forced_bos_token_id,), number == 0)
    if options.forced_eos_token_id is not None:
        scores = _force(scores, words, options.forced_eos_token_id, number == options.max_new_tokens - 1)
    if options.suppress_tokens:
        scores = tf.where(_among(words, options.suppress_tokens), NEVER, scores)
    return scores


def _among(words: Any, tokens: tuple[int, ...]) -> Any:
    return tf.reduce_any(words[:, None] == tf.constant(tokens, words.dtype)[None], axis=1)


def _force(scores: Any, words: Any, tokens: tuple[int, ...], when: Any) -> Any:
    forced = tf.where(_among(words, tokens), 0.0, NEVER)
    return tf.where(when, tf.broadcast_to(forced, tf.shape(scores)), scores)


def greedy(scores: Any) -> Any:
    return tf.argmax(scores, axis=-1, output_type=tf.int64)


def sample(scores: Any, number: Any, sampling: Sampling) -> Any:
    """Return tokens [R] from scores [R, V] fp32, each with the probability that temperature, then top-k, then top-p
    leave it."""
    scores = scores / sampling.temperature
    scores = _top_k(scores, sampling.top_k)
    chances = _top_p(tf.nn.softmax(scores), sampling.top_p)
    below = tf.cumsum(chances, axis=-1)
    # Rounding may lift the sum over words of no chance by a bit; none of them may be chosen.
    reached = tf.where(chances > 0, below, 0.0)
    uniform = tf.gather(sampling.uniform, number, axis=1)[:, None]
    mark = uniform * tf.reduce_max(reached, axis=-1, keepdims=True)
    return tf.argmax(tf.cast(reached > mark, tf.int32), axis=-1, output_type=tf.int64)


def _top_k(scores: Any, top_k: Any) -> Any:
    """Exclude all scores but the ``top_k`` largest, and those that are equal to the last of them."""
    keys = _ordered(scores)
    least = _largest(lambda limit: tf.reduce_sum(tf.cast(keys >= limit, tf.int32), axis=-1, keepdims=True) >= top_k, keys)
    return tf.where(keys >= least, scores, NEVER)


def _top_p(chances: Any, top_p: Any) -> Any:
    """Keep a word if the words of more probability than it have less than ``top_p`` together."""
    keys = _ordered(chances)

    def enough_above(limit: Any) -> Any:
        return tf.reduce_sum(tf.where(keys > limit, chances, 0.0), axis=-1, keepdims=True) >= top_p

    last_dropped = _largest(enough_above, keys)
    return tf.where((keys > last_dropped) | (top_p >= 1.0), chances, 0.0)


def _ordered(values: Any) -> Any:
    """Return int32 that compare as these fp32 do."""
    bits = tf.bitcast(values, tf.int32)
    return tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, tf.int32.max), bits)


def _largest(holds: Any, keys: Any) -> Any:
    """Return [R, 1]: the largest int32 for which ``holds`` is true. It must be true for the least, and for all below
    one for which it is true."""
    first = tf.zeros_like(keys[:, :1])
    start = tf.where(holds(first), first, tf.int32.min)  # the sign, then 31 bits from the highest on

    def halve(bit: Any, found: Any) -> Any:
        tried = found + tf.bitwise.left_shift(tf.constant(1, tf.int32), bit)
        return bit - 1, tf.where(holds(tried), tried, found)

    _, found = tf.while_loop(lambda bit, _: bit >= 0, halve, (tf.constant(30), start))
    return found
