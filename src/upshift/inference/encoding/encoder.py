"""Define ``upshift.Encoder``: it turns texts into vectors, class scores or token scores, by the setup that won the race on
the user's own texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tokenizers import normalizers

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.encoding.engines.base import check_encodes
from upshift.inference.encoding.model_config import EncodingConfig, read_encoding_config
from upshift.inference.encoding.run import Encoding, TokenScores, token_counts
from upshift.inference.race.forecast import forecast_encoding
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, Run, pick_evenly, read_limit, read_quality, read_seconds
from upshift.inference.registry import Hint
from upshift.inference.resumable_output import is_text, read_blocks
from upshift.inference.tokenizer import load_tokenizer
from upshift.inference.weights import check_requested_engine, computing_host, find_weights, stored_for
from upshift.models.config import padding_of
from upshift.models.profile_cache import isolation_of, positions_of
from upshift.models.source import ModelSource

# A race runs at least SAMPLE_TEXTS texts. Of short texts it runs more: SAMPLE_BATCHES of its largest batch. With 128 texts of six
# words, which are four batches of one engine and two of another, gaps in the last batch chose an engine that is 10 % slower
# (docs/log.md).
SAMPLE_TEXTS = 128
SAMPLE_BATCHES = 8
# Tokens of a batch. Small batches stay in the caches of a CPU, large ones have less overhead. On CPUs 256 were up to 1.3 times as
# fast as 1,024, or 512 as fast as 256 (1.08), and 2,048 never faster (docs/log.md). A GPU needs more tokens.
CPU_BATCHES = (256, 512, 1024)
GPU_BATCHES = (1024, 4096)
CHECKED_TEXTS = 4096  # that are in memory at once
LATENCY_BATCHES = (1, 64, 256, 1024, 4096)  # 1: each text alone


class Encoder:
    """Encode texts with a Hugging Face or sentence-transformers model.

    The first call races the installed engines on some of the texts, or recalls the result of an earlier race. All calls use the
    fastest setup within the quality and the limit. Weights that are quantized already, by transformers or by
    ``upshift quantize``, run in the engine that they were written for.

    Args:
        model: directory or hub id.
        quality: "exact" (fp32, within 1e-4 of transformers), or the lowest cosine to transformers that a text may have, such
            as 0.99.
        engine: the only engine to use.
        max_latency_ms: longest time of a batch that runs alone.
        race_seconds: time of the race.
        on_run: called after each run of the race.

    Raises:
        RequestError: a request is not possible. The message names what is possible.
        NothingFits: no setup keeps the limit.
    """

    def __init__(
        self,
        model: str,
        *,
        quality: str | float = "exact",
        engine: str | None = None,
        max_latency_ms: float | None = None,
        race_seconds: float | None = None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.quality = read_quality(str(quality))
        self.limits = Limits(ttft_ms=read_limit("max-latency-ms", max_latency_ms))
        self.source = find_weights(model)
        self.host: Host = computing_host(stored_for(self.source))
        self._engine = check_requested_engine("encode", self.source, engine, self.host)
        self.config = read_encoding_config(self.source)
        check_encodes(self.source, self.config)
        self.tokenizer = TextTokenizer(self.source, self.config)
        if self.config.output == "token scores":
            self.config = self.config.changed(special=self.tokenizer.special())
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._encoding: Encoding | None = None
        self.race: Race | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's columns of scores, or nothing for other models."""
        if self.config.output == "embeddings":
            return ()
        label_names: dict[Any, str] = self.source.hf_config.id2label or {}
        return tuple(label_names[index] for index in sorted(label_names))

    def encode(self, texts: Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """Return one result for each text, in the order of the texts, in fp32.

        The results are embeddings [N, H], or class scores [N, C] of a classifier. A token classifier gives an array [T, L]
        for each text: the scores of ``token_scores`` without tokens and offsets. The first call runs the race."""
        if self.config.output == "token scores":
            return [result.scores for result in self.token_scores(texts)]
        _check_texts(texts)
        if not len(texts):
            return np.empty((0, 0), dtype=np.float32)
        return self.prepare(texts).rows(self.tokenizer.tokenize(texts))

    def token_scores(self, texts: Sequence[str]) -> list[TokenScores]:
        """Return, for each text, its tokens, their offsets in the text, and the scores of their labels.

        Only token classifiers have them. The scores are those of transformers' pipeline with aggregation_strategy="none"."""
        if self.config.output != "token scores":
            raise RequestError(f"{self.source.reference!r} gives {self.config.output}; token scores are a token classifier's")
        _check_texts(texts)
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

    def check_lengths(self, texts: Iterable[str]) -> None:
        """Raise RequestError with the number of the first text that is too short. Most models compute every text."""
        if self.tokenizer.shortest > 1:
            first = 0
            for block in read_blocks(iter(texts), size=CHECKED_TEXTS):
                self.tokenizer.tokenize(block, first=first)
                first += len(block)

    def prepare(self, texts: Sequence[str]) -> Encoding:
        """Return the engine that wins a race on some of ``texts``, or that won before."""
        return self.prepare_from(partial(pick_evenly, texts), len(texts))

    def prepare_from(self, take: Callable[[int], Sequence[str]], total: int) -> Encoding:
        """Return the engine as ``prepare`` does, for ``total`` texts that need not be in memory.

        ``take`` returns a given number of them, evenly spread from the first to the last."""
        if self._encoding is not None:
            return self._encoding
        pad = self.tokenizer.pad
        hint: Hint = "latency" if self.limits else "throughput"
        batches = self._race_batches()
        sample = self._sample(take, total, 0 if self.limits else SAMPLE_BATCHES * batches[-1])
        contest = Contest(task="encode", source=self.source, asked=self.config.to_json(), pad=pad, batches=batches, hint=hint)
        forecast = partial(forecast_encoding, self.source, self.host, [len(row) for row in sample])
        policy = RacePolicy(self.quality, self.limits, total, engine=self._engine, seconds=self._race_seconds)
        self.race = race(contest, self.host, sample, policy, forecast=forecast, on_run=self._on_run)
        self._encoding = Encoding(self.source, self.config, self.race.chosen, sample, pad=pad)
        return self._encoding

    def _race_batches(self) -> tuple[int, ...]:
        """Return the batches to race, in tokens."""
        if self.tokenizer.alone:
            return (1,)
        if self.limits:
            return LATENCY_BATCHES
        return CPU_BATCHES if self.host.device == "cpu" else GPU_BATCHES

    def _sample(self, take: Callable[[int], Sequence[str]], total: int, min_tokens: int) -> list[list[int]]:
        """Return the token ids of SAMPLE_TEXTS texts, or of as many texts as have ``min_tokens`` tokens."""
        sample = self.tokenizer.tokenize(take(SAMPLE_TEXTS))
        needed = math.ceil(len(sample) * min_tokens / max(sum(map(len, sample)), 1))
        if needed > len(sample) < total:
            return self.tokenizer.tokenize(take(min(needed, total)))
        return sample


def _check_texts(texts: Sequence[str]) -> None:
    """Raise RequestError if ``texts`` is not a list of texts."""
    if isinstance(texts, str | Mapping) or not isinstance(texts, Collection):
        value = "one text" if isinstance(texts, str) else f"{texts!r:.80}"
        raise RequestError(f"encode() takes a list of texts and was given {value}; use encode([text])")
    for number, text in enumerate(texts, start=1):
        if not is_text(text):
            raise RequestError(f"text {number} is {text!r:.80}; give a text of Unicode characters")


UNSET_LENGTH = 10**9  # transformers' "very large integer" for an unknown maximum length is larger


class TextTokenizer:
    """The model's own tokenizer, on all cores at once.

    ``longest`` is the maximum number of tokens of a text, or None. ``alone`` says that a text must be a batch of its own."""

    def __init__(self, source: ModelSource, config: EncodingConfig) -> None:
        tokenizer = load_tokenizer(source)
        self.pad: int = tokenizer.pad_token_id or 0
        self.alone = False
        if config.output == "class scores":  # a decoder scores its last token that is not the config's own padding
            config_pad = padding_of(source.hf_config.get_text_config())
            if config_pad is None:
                self.alone = True
            else:
                self.pad = config_pad
        self.alone = self.alone or must_be_alone(source, config)
        self.shortest = isolation_of(source, states=config.output == "embeddings").shortest
        self._reference = source.reference
        self.longest = _max_length(tokenizer, source, config)
        self._prompt = config.prompt
        self._backend = tokenizer.backend_tokenizer
        if config.lower_case:
            own_normalizers = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_normalizers])
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest, direction=tokenizer.truncation_side)

    def tokenize(self, texts: Sequence[str], *, first: int = 0) -> list[list[int]]:
        """Return the token ids of the texts, with the model's prompt before each text.

        ``first`` is the index of the first text among all, for the message about a text that is too short."""
        ids = [encoded.ids for encoded in self._backend.encode_batch_fast([self._prompt + text for text in texts])]
        self._check_shortest(texts, ids, first)
        return ids

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[Any]:
        """Return encodings with ``ids``, ``tokens``, and ``offsets``: the characters of the text that each token covers."""
        encoded_texts: list[Any] = self._backend.encode_batch(list(texts))
        self._check_shortest(texts, [encoded.ids for encoded in encoded_texts], 0)
        return encoded_texts

    def _check_shortest(self, texts: Sequence[str], ids: list[list[int]], first: int) -> None:
        """Raise RequestError for a text that is too short for the model's layers, such as those that pool tokens."""
        if self.shortest == 1:
            return
        for number, (text, row) in enumerate(zip(texts, ids, strict=True), start=first + 1):
            if len(row) < self.shortest:
                raise RequestError(
                    f"text {number}, {text!r:.60}, has {len(row)} tokens, and {self._reference!r} computes texts of "
                    f"{self.shortest} or more; make it longer, or leave it out"
                )

    def special(self) -> tuple[int, int]:
        """Return how many special tokens come before the tokens of a text, and how many come after them."""
        mask = self._backend.encode("a").special_tokens_mask
        text_positions = [position for position, is_special in enumerate(mask) if not is_special] or [len(mask)]
        return text_positions[0], max(len(mask) - 1 - text_positions[-1], 0)


def must_be_alone(source: ModelSource, config: EncodingConfig) -> bool:
    """Return whether a text must be a batch of its own: padding changes its vector, or it is not proven that it does not."""
    isolation = isolation_of(source, states=config.output == "embeddings")
    return not isolation.proven or isolation.padding == "none"


def _max_length(tokenizer: Any, source: ModelSource, config: EncodingConfig) -> int | None:
    """Return the maximum number of tokens of a text, or None if nothing limits it."""
    limits = (config.max_length or tokenizer.model_max_length, positions_of(source))
    known_limits = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known_limits, default=None)
