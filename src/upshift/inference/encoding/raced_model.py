"""Define ``RacedModel``: a model that computes texts by the setup that won the race on the user's own texts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.computing_device import computing_host
from upshift.inference.encoding.engines.base import build_empty_encoder, check_encodes
from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.encoding.run import Encoding
from upshift.inference.encoding.text_pair import Item
from upshift.inference.encoding.text_tokenizer import TextTokenizer
from upshift.inference.race.forecast import forecast_encoding
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, RaceSeconds, Run, pick_evenly, read_limit, read_quality, read_seconds
from upshift.inference.registry import Hint
from upshift.inference.resumable_output import is_text, read_blocks
from upshift.inference.weights import check_requested_engine, find_weights, stored_for
from upshift.models.config import label_names
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
CHECKED_TEXTS = 4096  # texts in memory at once
LATENCY_BATCHES = (1, 64, 256, 1024, 4096)  # 1: each text alone


class RacedModel(ABC):
    """A model whose first call races the installed engines on some of the texts, or recalls the result of an earlier race.

    All calls use the fastest setup within the quality and the limit. Weights that are quantized already, by transformers or by
    ``upshift quantize``, run in the engine that they were written for.

    Args:
        model: directory or hub id.
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
        quality: str | float = "exact",
        engine: str | None = None,
        max_latency_ms: float | None = None,
        race_seconds: RaceSeconds = None,
        tensor_parallel: int = 1,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.quality = read_quality(str(quality))
        self.limits = Limits(ttft_ms=read_limit("max-latency-ms", max_latency_ms))
        self.source = find_weights(model)
        self.host: Host = computing_host(stored_for(self.source))
        self._engine = check_requested_engine("encode", self.source, engine, self.host)
        self.config = self._read_config(self.source)
        check_encodes(self.source, self.config)
        self._tensor_parallel = tensor_parallel
        if tensor_parallel != 1:
            from upshift.inference.tensor_parallel import check_divides

            build_empty = partial(build_empty_encoder, self.source, self.config)
            check_divides(tensor_parallel, self.source, "encode", engine, self.host, build_empty)
            self._engine = "torch"
        self.tokenizer = TextTokenizer(self.source, self.config)
        if self.config.output == "token scores":
            self.config = self.config.changed(special=self.tokenizer.special())
        self.config = self.config.changed(segments=self.tokenizer.has_segments, skipped=self.tokenizer.skipped)
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._encoding: Encoding | None = None
        self.race: Race | None = None

    @abstractmethod
    def _read_config(self, source: ModelSource) -> EncodingConfig:
        """Return how the model computes texts."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's columns of scores, or nothing for other models."""
        if self.config.output not in ("class scores", "token scores"):
            return ()
        return label_names(self.source.hf_config)

    def rows(self, texts: Sequence[Item]) -> np.ndarray:
        """Return the rows [N, H] of texts or pairs that are checked already. The first call runs the race."""
        if not len(texts):
            return np.empty((0, 0), dtype=np.float32)
        return self.prepare(texts).rows(self.tokenizer.tokenize(texts))

    def check_lengths(self, texts: Iterable[Item]) -> None:
        """Raise RequestError with the number of the first text that is too short. Most models compute every text."""
        if self.tokenizer.shortest > 1:
            first = 0
            for block in read_blocks(iter(texts), size=CHECKED_TEXTS):
                self.tokenizer.tokenize(block, first=first)
                first += len(block)

    def prepare(self, texts: Sequence[Item]) -> Encoding:
        """Return the engine that wins a race on some of ``texts``, or that won before."""
        return self.prepare_from(partial(pick_evenly, texts), len(texts))

    def prepare_from(self, take: Callable[[int], Sequence[Item]], total: int) -> Encoding:
        """Return the engine as ``prepare`` does, for ``total`` texts that need not be in memory.

        ``take`` returns a given number of them, evenly spread from the first to the last."""
        if self._encoding is None:
            self.prepare_sample(self.take_sample(take, total), total)
        assert self._encoding is not None
        return self._encoding

    def prepare_sample(self, sample: list[list[int]], total: int, *, result: Race | None = None) -> Race:
        """Return the result of the race on a sample of ``total`` texts, or of an earlier race. Load the winner.

        ``result`` is that of a race in another process, and then nothing is raced here."""
        self.race = result or self._run_race(sample, total)
        self._encoding = Encoding(self.source, self.config, self.race.chosen, sample, pad=self.tokenizer.pad)
        return self.race

    def _run_race(self, sample: list[list[int]], total: int) -> Race:
        pad = self.tokenizer.pad
        hint: Hint = "latency" if self.limits else "throughput"
        batches = self._race_batches()
        contest = Contest(
            task="encode",
            source=self.source,
            asked=self.config.to_json(),
            pad=pad,
            batches=batches,
            hint=hint,
            tensor_parallel=self._tensor_parallel,
        )
        forecast = partial(forecast_encoding, self.source, self.host, [len(row) for row in sample])
        policy = RacePolicy(self.quality, self.limits, total, engine=self._engine, seconds=self._race_seconds)
        return race(contest, self.host, sample, policy, forecast=forecast, on_run=self._on_run)

    def _race_batches(self) -> tuple[int, ...]:
        """Return the batches to race, in tokens."""
        if self.tokenizer.alone:
            return (1,)
        if self.limits:
            return LATENCY_BATCHES
        return CPU_BATCHES if self.host.device == "cpu" else GPU_BATCHES

    def take_sample(self, take: Callable[[int], Sequence[Item]], total: int) -> list[list[int]]:
        """Return the token ids of SAMPLE_TEXTS texts, or of as many texts as fill SAMPLE_BATCHES batches.

        ``take`` returns a given number of the ``total`` texts, evenly spread from the first to the last."""
        is_wide = self.config.output == "sparse vectors"  # rows of the vocabulary's size: more texts would fill the memory
        min_tokens = 0 if self.limits or is_wide else SAMPLE_BATCHES * self._race_batches()[-1]
        sample = self.tokenizer.tokenize(take(SAMPLE_TEXTS))
        needed = math.ceil(len(sample) * min_tokens / max(sum(map(len, sample)), 1))
        if needed > len(sample) < total:
            return self.tokenizer.tokenize(take(min(needed, total)))
        return sample


def check_texts(texts: Sequence[str]) -> None:
    """Raise RequestError if ``texts`` is not a list of texts."""
    if isinstance(texts, str | Mapping) or not isinstance(texts, Collection):
        value = "one text" if isinstance(texts, str) else f"{texts!r:.80}"
        raise RequestError(f"encode() takes a list of texts and was given {value}; use encode([text])")
    for number, text in enumerate(texts, start=1):
        if not is_text(text):
            raise RequestError(f"text {number} is {text!r:.80}; give a text of Unicode characters")
