"""Express generation as one function of tensors: a pass over the prompts, then a loop that writes token after token.

Only the number of iterations depends on the data: the loop ends when all texts have ended."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from upshift.xla.generation.beam_search import advance, continues_search, first_beams
from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.passes import DecoderOnly, EncoderDecoder, Weights
from upshift.xla.generation.sampling import Sampling, greedy, process, sample

Passes = DecoderOnly | EncoderDecoder


def generate_tokens(
    passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any, sampling: Sampling
) -> Any:
    """Return the new tokens [R, N] of prompts [R, P], with ``fill`` after the token that ends a text."""
    if options.num_beams > 1:
        return _search_beams(passes, options, fill, weights, ids, mask)
    return _generate_texts(passes, options, fill, weights, ids, mask, sampling)


def _generate_texts(
    passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any, sampling: Sampling
) -> Any:
    length = options.max_new_tokens

    def choose(logits: Any, position: Any, ended: Any) -> tuple[Any, Any]:
        scores = process(tf.cast(logits, tf.float32), position, options)
        token = sample(scores, position, sampling) if options.do_sample else greedy(scores)
        token = tf.where(ended, tf.constant(fill, tf.int64), token)
        for end in options.eos_token_id:
            ended |= token == end
        return token, ended

    prefilled = passes.prefill(weights, ids, mask, length)
    first = tf.constant(0)
    token, ended = choose(prefilled.logits, first, tf.zeros(ids.shape[:1], tf.bool))
    tokens = _write(tf.fill([ids.shape[0], length], tf.constant(fill, tf.int64)), token, first)
    if length == 1:
        return tokens

    def body(position: Any, token: Any, tokens: Any, ended: Any, *states: Any) -> tuple[Any, ...]:
        logits, states = passes.step(weights, token, position, states, prefilled.context)
        token, ended = choose(logits, position, ended)
        return position + 1, token, _write(tokens, token, position), ended, *states

    def continues(position: Any, token: Any, tokens: Any, ended: Any, *states: Any) -> Any:
        return (position < length) & tf.logical_not(tf.reduce_all(ended))

    return tf.while_loop(continues, body, (tf.constant(1), token, tokens, ended, *prefilled.states))[2]


def _search_beams(passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any) -> Any:
    count = options.num_beams
    length = options.max_new_tokens
    prefilled = passes.prefill(weights, ids, mask, length)
    # The prompts are read once. All beams of a prompt are the same until their first tokens are chosen.
    logits, *context = (tf.repeat(value, count, axis=0) for value in (prefilled.logits, *prefilled.context))
    first = tf.constant(0)
    beams, _, token = advance(first_beams(ids.shape[0], options, fill), logits, first, options)
    states = tuple(tf.repeat(value, count, axis=0) for value in prefilled.states)

    def body(position: Any, token: Any, beams: Any, states: Any) -> tuple[Any, ...]:
        logits, states = passes.step(weights, token, position, states, tuple(context))
        beams, rows, token = advance(beams, logits, position, options)
        return position + 1, token, beams, tuple(tf.gather(value, rows) for value in states)

    def continues(position: Any, token: Any, beams: Any, states: Any) -> Any:
        return (position < length) & continues_search(beams, options)

    if length > 1:
        beams = tf.while_loop(continues, body, (tf.constant(1), token, beams, states))[2]
    return beams.finished[:, 0]


def _write(tokens: Any, token: Any, position: Any) -> Any:
    return tf.where((tf.range(tokens.shape[1]) == position)[None], token[:, None], tokens)
