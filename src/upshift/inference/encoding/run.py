"""Run token ids through an engine, and turn its outputs into vectors or scores in the order of the input.

Texts of similar lengths are batched together, because padding costs as much as tokens do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.encoding.dense import Dense
from upshift.inference.encoding.engines.base import Batch, EncoderBuild, Engine, batch_by_length, export_folder, pad_batches
from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.engine_errors import computing
from upshift.inference.registry import EngineSetup, build_engine
from upshift.models.config import stable_positions_in, text_configs
from upshift.models.source import ModelSource

Array = np.ndarray

# Texts, spread over the lengths of the sample, a batch each. With 32 of them the worst text had a cosine of 0.987, not 0.995.
CALIBRATION_BATCHES = 128


class Encoding:
    """One model under one setup.

    ``sample`` holds token ids of the user's own texts, on which a quantized engine is calibrated."""

    def __init__(
        self, source: ModelSource, config: EncodingConfig, setup: EngineSetup, sample: list[list[int]], *, pad: int
    ) -> None:
        self.config = config
        self.setup = setup
        self.pad = pad
        self._border = stable_positions_in(text_configs(source.hf_config)[0])
        folder = export_folder(source, config, setup.engine)
        build = EncoderBuild(source, config, setup, folder, example_batches(sample, pad, segments=config.segments))
        self._dense = [Dense(source.directory / name) for name in config.dense] if source.directory is not None else []
        self.engine: Engine = build_engine("encode", setup.engine, build)

    def rows(self, ids: list[list[int]], *, raw: bool = False) -> np.ndarray:
        """Return the results for texts, in their order, as fp32.

        They are embeddings [N, H], class scores [N, C], or the scores of the tokens of all texts, text by text, [T, L].
        With ``raw``, the scores of pairs have no activation."""
        result: np.ndarray | None = None
        lengths = [len(row) for row in ids]
        counts = np.ones(len(ids), dtype=int)  # rows of the result for each text
        vector_masks: list[Array] = []
        if self.config.output == "token scores":
            counts = token_counts(lengths, self.config)
        elif self.config.output == "token vectors":
            vector_masks = [self.keeps(row) for row in ids]
            counts = np.array([row.sum() for row in vector_masks], dtype=int)
        ends = np.cumsum(counts)
        indices = batch_by_length(lengths, self.setup.batch, border=self._border)
        batches = pad_batches(ids, indices, pad=self.pad, segments=self.config.segments)
        for batch, output in self._outputs(batches):
            if raw and self.config.pairs:
                rows = output
            elif vector_masks:
                states = [output[row, : len(vector_masks[index])][vector_masks[index]] for row, index in enumerate(batch.indices)]
                rows = self._token_vectors(np.concatenate(states))
            else:
                rows = self._results(batch, output)
            if result is None:
                result = np.empty((ends[-1], rows.shape[1]), dtype=np.float32)
            row_indices = [np.arange(ends[index] - counts[index], ends[index]) for index in batch.indices]
            result[np.concatenate(row_indices)] = rows
        return np.empty((0, 0), dtype=np.float32) if result is None else result

    def _outputs(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with its output. Raise JobFailed if the engine fails at one."""
        outputs = iter(self.engine.outputs(batches))
        while True:
            with computing():
                computed = next(outputs, None)
            if computed is None:
                return
            yield computed

    def keeps(self, ids: list[int]) -> Array:
        """Return which tokens [S] of a text get a vector."""
        row = np.array(ids, dtype=np.int64)
        return ~np.isin(np.where(row < 0, -1 - row, row), self.config.skipped)

    def _token_vectors(self, vectors: Array) -> Array:
        for dense in self._dense:
            vectors = dense(vectors)
        return normalized(vectors) if self.config.normalize else vectors

    def _results(self, batch: Batch, output: np.ndarray) -> np.ndarray:
        if self.config.output == "embeddings":
            return self._pooled(output, batch)
        if self.config.output == "sparse vectors":
            return output
        if self.config.output == "class scores":
            return activate(output, self.config)
        return score_tokens(output, batch.mask, self.config)

    def _pooled(self, states: Array, batch: Batch) -> Array:
        if not self._dense:
            return pool(states, batch.mask, self.config)
        vectors = pool(states, batch.mask, self.config.changed(normalize=False))
        for dense in self._dense:
            vectors = dense(vectors)
        return normalized(vectors) if self.config.normalize else vectors


def example_batches(sample: list[list[int]], pad: int, *, segments: bool = False) -> list[Batch]:
    """Return batches of one text each to calibrate on, evenly spread over the lengths of the sample."""
    ordered = sorted((row for row in sample if row), key=len) or [[pad, pad]]
    step = max(len(ordered) // CALIBRATION_BATCHES, 1)
    examples = ordered[::step][:CALIBRATION_BATCHES]
    return list(pad_batches(examples, [[index] for index in range(len(examples))], pad=pad, segments=segments))


def activate(scores: Array, config: EncodingConfig) -> Array:
    """Return class scores [B, C] fp32 after the activation of the model's files."""
    if config.activation == "Identity":
        return scores
    import torch

    activation = getattr(torch.nn, config.activation)()
    result: Array = activation(torch.from_numpy(scores)).numpy()
    return result


def pool(states: Array, mask: Array, config: EncodingConfig) -> Array:
    """Return vectors [B, H] fp32 from token states [B, S, H] fp32 and mask [B, S] of 0 and 1.

    Texts are padded on the right. The vector of a text without tokens is 0."""
    if config.pooling == "cls":
        pooled = states[:, 0]
    elif config.pooling == "last":
        pooled = states[np.arange(len(states)), mask.sum(1) - 1]
    elif config.pooling == "max":
        pooled = np.where(mask[:, :, None] > 0, states, -np.inf).max(1)
    else:
        weights = mask.astype(np.float32)
        pooled = np.einsum("bsh,bs->bh", states, weights) / np.maximum(weights.sum(1, keepdims=True), 1e-9)
    pooled = np.where(mask.any(1, keepdims=True), pooled, 0.0)
    if config.normalize:
        pooled = normalized(pooled)
    return pooled.astype(np.float32, copy=False)


def normalized(vectors: Array) -> Array:
    """Return vectors [N, H] of length 1."""
    result: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return result


class SparseVector(NamedTuple):
    """The tokens of the vocabulary that a text has a weight for, in rising order, and their weights."""

    indices: Array  # [K] int32
    values: Array  # [K] fp32

    @classmethod
    def of(cls, weights: Array) -> SparseVector:
        """Return the weights [V] that are not 0."""
        indices = np.flatnonzero(weights)
        return cls(indices.astype(np.int32), weights[indices])


class TokenScores(NamedTuple):
    """The scores of the T tokens of one text. ``offsets`` [T, 2] holds the first character of each token and the one
    after its last."""

    tokens: list[str]
    offsets: Array
    scores: Array  # [T, L] fp32; the scores of a token's labels add up to 1


def token_counts(lengths: Sequence[int], config: EncodingConfig) -> Array:
    """Return how many tokens of each text get scores: all but the special tokens."""
    counts: Array = np.maximum(np.asarray(lengths, dtype=int) - sum(config.special), 0)
    return counts


def score_tokens(logits: Array, mask: Array, config: EncodingConfig) -> Array:
    """Return the scores of all tokens that are not special, [T, L] fp32, text by text.

    ``logits`` are [B, S, L]. ``mask`` is [B, S] of 0 and 1. Texts are padded on the right."""
    special_before, special_after = config.special
    positions = np.arange(mask.shape[1])
    lengths = mask.sum(1, keepdims=True)
    is_scored = (positions >= special_before) & (positions < lengths - special_after)
    token_logits = logits[is_scored].astype(np.float32, copy=False)
    exponentials = np.exp(token_logits - token_logits.max(axis=1, keepdims=True))
    scores: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
    return scores
