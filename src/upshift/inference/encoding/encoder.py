"""Define ``upshift.Encoder``: it turns texts into vectors, class scores or token scores, by the setup that won the race on
the user's own texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from upshift.errors import RequestError
from upshift.inference.encoding.model_config import EncodingConfig, Task, read_encoding_config, read_task
from upshift.inference.encoding.raced_model import RacedModel, check_texts
from upshift.inference.encoding.run import SparseVector, TokenScores, token_counts
from upshift.inference.race.types import RaceSeconds, Run
from upshift.models.source import ModelSource

SPARSE_BLOCK = 256  # texts whose weights of the whole vocabulary are in memory at once


class Encoder(RacedModel):
    """Encode texts with a Hugging Face or sentence-transformers model.

    The first call races the installed engines on some of the texts, or recalls the result of an earlier race. All calls use the
    fastest setup within the quality and the limit. Weights that are quantized already, by transformers or by
    ``upshift quantize``, run in the engine that they were written for.

    Args:
        model: directory or hub id.
        task: "query" or "document", for models that encode the two in different ways: their prompts, lengths and tokens. None:
            the model's default.
        quality: "exact" (fp32, within 1e-4 of transformers), or the lowest cosine to transformers that a text may have, such
            as 0.99.
        engine: the only engine to use.
        max_latency_ms: longest time of a batch that runs alone.
        race_seconds: time of the race. "run": no longer than the run of the first call takes.
        tensor_parallel: devices of this machine that share each layer. Above 1 the engine is "torch".
        on_run: called after each run of the race.

    Raises:
        RequestError: a request is not possible. The message names what is possible.
        NothingFits: no setup keeps the limit.
    """

    def __init__(
        self,
        model: str,
        *,
        task: Task | None = None,
        quality: str | float = "exact",
        engine: str | None = None,
        max_latency_ms: float | None = None,
        race_seconds: RaceSeconds = None,
        tensor_parallel: int = 1,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self._task = read_task(task)
        super().__init__(
            model,
            quality=quality,
            engine=engine,
            max_latency_ms=max_latency_ms,
            race_seconds=race_seconds,
            tensor_parallel=tensor_parallel,
            on_run=on_run,
        )

    def _read_config(self, source: ModelSource) -> EncodingConfig:
        return read_encoding_config(source, task=self._task)

    def encode(self, texts: Sequence[str]) -> np.ndarray | list[np.ndarray] | list[SparseVector]:
        """Return one result for each text, in the order of the texts, in fp32.

        The results are embeddings [N, H], or class scores [N, C] of a classifier. A token classifier gives an array [T, L]
        for each text: the scores of ``token_scores`` without tokens and offsets. A model like SPLADE gives a SparseVector for
        each text, and one like ColBERT a matrix [T, H]. The first call runs the race."""
        if self.config.output == "token scores":
            return [result.scores for result in self.token_scores(texts)]
        check_texts(texts)
        if self.config.output == "sparse vectors":
            return self._sparse_vectors(texts)
        if self.config.output == "token vectors":
            return self._token_vectors(texts)
        return self.rows(texts)

    def _sparse_vectors(self, texts: Sequence[str]) -> list[SparseVector]:
        encoding = self.prepare(texts) if len(texts) else None
        vectors: list[SparseVector] = []
        for start in range(0, len(texts), SPARSE_BLOCK):
            assert encoding is not None
            rows = encoding.rows(self.tokenizer.tokenize(texts[start : start + SPARSE_BLOCK], first=start))
            vectors += [SparseVector.of(row) for row in rows]
        return vectors

    def _token_vectors(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not len(texts):
            return []
        encoding = self.prepare(texts)
        ids = self.tokenizer.tokenize(texts)
        counts = [int(encoding.keeps(row).sum()) for row in ids]
        return np.split(encoding.rows(ids), np.cumsum(counts)[:-1])

    def token_scores(self, texts: Sequence[str]) -> list[TokenScores]:
        """Return, for each text, its tokens, their offsets in the text, and the scores of their labels.

        Only token classifiers have them. The scores are those of transformers' pipeline with aggregation_strategy="none"."""
        if self.config.output != "token scores":
            raise RequestError(f"{self.source.reference!r} gives {self.config.output}; token scores are a token classifier's")
        check_texts(texts)
        if not len(texts):
            return []
        encoded_texts = self.tokenizer.tokenize_with_offsets(texts)
        ids = [encoded.ids for encoded in encoded_texts]
        counts = token_counts([len(row) for row in ids], self.config)
        scores_by_text = np.split(self.prepare(texts).rows(ids), np.cumsum(counts)[:-1])
        first = self.config.special[0]
        results = []
        for encoded, count, scores in zip(encoded_texts, counts, scores_by_text, strict=True):
            scored = slice(first, first + count)
            offsets = np.asarray(encoded.offsets[scored], dtype=np.int64).reshape(-1, 2)
            results.append(TokenScores(encoded.tokens[scored], offsets, scores))
        return results
