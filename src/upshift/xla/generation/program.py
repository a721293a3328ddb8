"""Build all of generation as one function of tensors: the prompts are read, and a loop writes token after token.

Nothing in it depends on the data but the number of turns of the loop, which ends when all texts have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from upshift.xla.generation.beam_search import advance, first_beams, unfinished
from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.passes import DecoderOnly, EncoderDecoder, Weights
from upshift.xla.generation.sampling import Sampling, greedy, process, sample

Passes = DecoderOnly | EncoderDecoder


def generate_tokens(
    passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any, sampling: Sampling
) -> Any:
    """Return tokens [R, N] of prompts [R, P], with ``fill`` behind the tokens that end a text."""
    if options.num_beams > 1:
        return _searched(passes, options, fill, weights, ids, mask)
    return _chosen(passes, options, fill, weights, ids, mask, sampling)


def _chosen(passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any, sampling: Sampling) -> Any:
    new = options.max_new_tokens

    def choose(logits: Any, number: Any, done: Any) -> tuple[Any, Any]:
        scores = process(tf.cast(logits, tf.float32), number, options)
        token = sample(scores, number, sampling) if options.do_sample else greedy(scores)
        token = tf.where(done, tf.constant(fill, tf.int64), token)
        for end in options.eos_token_id:
            done |= token == end
        return token, done

    begun = passes.begin(weights, ids, mask, new)
    first = tf.constant(0)
    token, done = choose(begun.logits, first, tf.zeros(ids.shape[:1], tf.bool))
    tokens = _write(tf.fill([ids.shape[0], new], tf.constant(fill, tf.int64)), token, first)
    if new == 1:
        return tokens

    def body(number: Any, token: Any, tokens: Any, done: Any, *states: Any) -> tuple[Any, ...]:
        logits, states = passes.step(weights, token, number, states, begun.context)
        token, done = choose(logits, number, done)
        return number + 1, token, _write(tokens, token, number), done, *states

    def goes_on(number: Any, token: Any, tokens: Any, done: Any, *states: Any) -> Any:
        return (number < new) & tf.logical_not(tf.reduce_all(done))

    return tf.while_loop(goes_on, body, (tf.constant(1), token, tokens, done, *begun.states))[2]


def _searched(passes: Passes, options: XlaGeneration, fill: int, weights: Weights, ids: Any, mask: Any) -> Any:
    count = options.num_beams
    new = options.max_new_tokens
    begun = passes.begin(weights, ids, mask, new)
    # The prompts are read once; their beams are the same until the first token of each is chosen.
    logits, *context = (tf.repeat(one, count, axis=0) for one in (begun.logits, *begun.context))
    first = tf.constant(0)
    beams, _, token = advance(first_beams(ids.shape[0], options, fill), logits, first, options)
    states = tuple(tf.repeat(one, count, axis=0) for one in begun.states)  # of a prompt's beams all are the first's

    def body(number: Any, token: Any, beams: Any, states: Any) -> tuple[Any, ...]:
        logits, states = passes.step(weights, token, number, states, tuple(context))
        beams, rows, token = advance(beams, logits, number, options)
        return number + 1, token, beams, tuple(tf.gather(one, rows) for one in states)

    def goes_on(number: Any, token: Any, beams: Any, states: Any) -> Any:
        return (number < new) & unfinished(beams, options)

    if new > 1:
        beams = tf.while_loop(goes_on, body, (tf.constant(1), token, beams, states))[2]
    return beams.finished[:, 0]


def _write(tokens: Any, token: Any, number: Any) -> Any:
    return tf.where((tf.range(tokens.shape[1]) == number)[None], token[:, None], tokens)
