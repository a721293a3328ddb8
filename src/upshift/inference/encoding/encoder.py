"""Define ``upshift.Encoder``: it turns texts into vectors, class scores or token scores, by the setup that won the
race on the user's own texts.

Turn texts into token ids with the model's own tokenizer, on all cores at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tokenizers import normalizers

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.encoding.engines.base import check_encodes
from upshift.inference.encoding.model_config import Recipe, read_recipe
from upshift.inference.encoding.run import Encoding, TokenScores, token_counts
from upshift.inference.race.forecast import forecast_encoding
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, Run, read_limit, read_quality, read_seconds, pick_evenly
from upshift.inference.registry import Hint
from upshift.inference.resumable_output import is_text
from upshift.inference.tokenizer import load_tokenizer
from upshift.inference.weights import check_asked, computing_host, find_weights, stored_for
from upshift.models.config import padding_of
from upshift.models.profile_cache import isolation_of, positions_of
from upshift.models.source import ModelSource

UNSET_LENGTH = 10**9  # transformers' "very large integer" of a tokenizer that does not know is above it


class Tokens:
    """The model's tokenizer. ``longest``: tokens kept of a text; None: all. ``alone``: a text must be a batch of its own."""

    def __init__(self, source: ModelSource, recipe: Recipe) -> None:
        tokenizer = load_tokenizer(source)
        self.pad, self.alone = tokenizer.pad_token_id or 0, False
        if recipe.output == "class scores":  # a decoder's scores are of the last token that is not the config's own padding
            known = _padding(source)
            self.pad, self.alone = (self.pad, True) if known is None else (known, False)
        self.alone = self.alone or reads_alone(source, recipe)
        self.longest = _longest(tokenizer, source, recipe)
        self._prompt = recipe.prompt
        self._backend = tokenizer.backend_tokenizer
        if recipe.lower_case:
            own = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest, direction=tokenizer.truncation_side)

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast([self._prompt + text for text in texts])]

    def located(self, texts: Sequence[str]) -> list[Any]:
        """Return encodings, with ``tokens`` and with ``offsets``: the characters of the text that each token is made of."""
        found: list[Any] = self._backend.encode_batch(list(texts))
        return found

    def special(self) -> tuple[int, int]:
        """Return how many special tokens come before the tokens of a text, and how many come after them."""
        mask = self._backend.encode("a").special_tokens_mask
        own = [place for place, is_special in enumerate(mask) if not is_special] or [len(mask)]
        return own[0], max(len(mask) - 1 - own[-1], 0)


def reads_alone(source: ModelSource, recipe: Recipe) -> bool:
    """Return whether a text must be a batch of its own: padding would change its vector, or nothing proves that it would not."""
    isolation = isolation_of(source, states=recipe.output == "embeddings")
    return not isolation.proven or isolation.padding == "none"


def _padding(source: ModelSource) -> int | None:
    return padding_of(source.hf_config.get_text_config())


def _longest(tokenizer: Any, source: ModelSource, recipe: Recipe) -> int | None:
    limits = (recipe.max_length or tokenizer.model_max_length, positions_of(source))
    known = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known, default=None)


# Of a race: texts at least, and of short ones so many that its largest batch comes so often: with 128 texts of six words, which
# are four batches of one engine and two of another, the last one's gaps chose an engine that is 10 % slower (docs/log.md).
SAMPLE_TEXTS, SAMPLE_BATCHES = 128, 8
# Tokens of a batch: caches against overheads, and how long it takes. On CPUs 256 were up to 1.3 times as fast as 1,024, or 512 as
# fast as 256 (1.08), and 2,048 never faster (docs/log.md); a GPU is not full with them.
BUDGETS_CPU, BUDGETS_GPU = (256, 512, 1024), (1024, 4096)
BUDGETS_LATENCY = (1, 64, 256, 1024, 4096)  # 1: a text alone


class Encoder:
    """``model``: a Hugging Face or sentence-transformers directory, or a hub id.

    Weights that are quantized already, by transformers or by ``upshift quantize``, are loaded by the engine that they are for.
    ``quality``: ``exact`` (fp32, within 1e-4 of transformers), or the lowest cosine to it that a text may have, such as 0.99.
    ``engine``: only this one. ``max_latency_ms``: longest that a batch may take, alone. ``race_seconds``: of the race.
    Raises RequestError for what is not possible, with what is, and NothingFits where no setup is as quick.
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
        self._engine = check_asked("encode", self.source, engine, self.host)
        recipe = read_recipe(self.source)
        check_encodes(self.source, recipe)
        self.tokens = Tokens(self.source, recipe)
        self.recipe: Recipe = recipe.changed(special=self.tokens.special()) if recipe.output == "token scores" else recipe
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._encoding: Encoding | None = None
        self.race: Race | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's columns of scores, or nothing for other models."""
        if self.recipe.output == "embeddings":
            return ()
        label_names: dict[Any, str] = self.source.hf_config.id2label or {}
        return tuple(label_names[place] for place in sorted(label_names))

    def encode(self, texts: Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """Return one result for each text, in the order of the texts, in fp32.

        The results are embeddings [N, H], or scores [N, C] of a classifier. A token classifier gives an array [T, L]
        for each text: the scores of ``token_scores`` without their places. The first call runs the race."""
        if self.recipe.output == "token scores":
            return [found.scores for found in self.token_scores(texts)]
        _check_list(texts)
        return self.prepare(texts).rows(self.tokens.of(texts)) if len(texts) else np.empty((0, 0), dtype=np.float32)

    def token_scores(self, texts: Sequence[str]) -> list[TokenScores]:
        """Return, for each text, its tokens, their places in the text, and the scores of their labels. Only token
        classifiers have them. The scores are those of transformers' pipeline with aggregation_strategy="none"."""
        if self.recipe.output != "token scores":
            raise RequestError(f"{self.source.reference!r} gives {self.recipe.output}; token scores are a token classifier's")
        _check_list(texts)
        if not len(texts):
            return []
        read = self.tokens.located(texts)
        ids = [text.ids for text in read]
        counts = token_counts([len(row) for row in ids], self.recipe)
        rows = np.split(self.prepare(texts).rows(ids), np.cumsum(counts)[:-1])
        before = self.recipe.special[0]
        own = [slice(before, before + count) for count in counts]
        return [
            TokenScores(text.tokens[part], np.asarray(text.offsets[part], dtype=np.int64).reshape(-1, 2), scores)
            for text, part, scores in zip(read, own, rows, strict=True)
        ]

    def prepare(self, texts: Sequence[str]) -> Encoding:
        """Return the engine that wins a race on some of ``texts``, or that won before."""
        return self.prepare_from(partial(pick_evenly, texts), len(texts))

    def prepare_from(self, take: Callable[[int], Sequence[str]], total: int) -> Encoding:
        """Return the engine as ``prepare`` does, for ``total`` texts that need not be in memory. ``take`` returns a
        given number of them, evenly from first to last."""
        if self._encoding is None:
            pad = self.tokens.pad
            asked = self.recipe.to_json()
            hint: Hint = "latency" if self.limits else "throughput"
            budgets: tuple[int, ...] = BUDGETS_CPU if self.host.device == "cpu" else BUDGETS_GPU
            budgets = (1,) if self.tokens.alone else BUDGETS_LATENCY if self.limits else budgets
            sample = self._sample(take, total, 0 if self.limits else SAMPLE_BATCHES * budgets[-1])
            contest = Contest(task="encode", source=self.source, asked=asked, pad=pad, batches=budgets, hint=hint)
            forecast = partial(forecast_encoding, self.source, self.host, [len(row) for row in sample])
            policy = RacePolicy(self.quality, self.limits, total, engine=self._engine, seconds=self._race_seconds)
            self.race = race(contest, self.host, sample, policy, forecast=forecast, on_run=self._on_run)
            self._encoding = Encoding(self.source, self.recipe, self.race.chosen, sample, pad=pad)
        return self._encoding

    def _sample(self, take: Callable[[int], Sequence[str]], total: int, num_tokens: int) -> list[list[int]]:
        """Return SAMPLE_TEXTS texts, or more of them until they have ``num_tokens`` tokens."""
        sample = self.tokens.of(take(SAMPLE_TEXTS))
        wanted = math.ceil(len(sample) * num_tokens / max(sum(map(len, sample)), 1))
        return self.tokens.of(take(min(wanted, total))) if wanted > len(sample) < total else sample


def _check_list(texts: Sequence[str]) -> None:
    if isinstance(texts, str | Mapping) or not isinstance(texts, Collection):
        said = "one text" if isinstance(texts, str) else f"{texts!r:.80}"
        raise RequestError(f"encode() takes a list of texts and was given {said}; use encode([text])")
    for number, text in enumerate(texts, start=1):
        if not is_text(text):
            raise RequestError(f"text {number} is {text!r:.80}; give a text of Unicode characters")
