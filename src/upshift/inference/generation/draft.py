"""Guess the next tokens of a text with a smaller model, so that the model itself checks them in one pass.

Leviathan, Kalman and Matias 2023 (arXiv:2211.17192), with the greedy guesses of transformers' ``assistant_model``. Each token is
still chosen from the model's own logits, so the text is the same, sampled or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.engine_environment import EngineEnvironment
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.model import attends_to_all, generation_task
from upshift.inference.generation.prompts import Prompts
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import engine_folder, find_weights
from upshift.models.profile_cache import positions_of
from upshift.models.source import ModelSource

ENGINES = ("torch", "openvino", "vllm")  # that check guesses of a model
NO_PAGES = "keeps its keys and values in states there, and computes one token at a time; use --engine torch"
GUESSED_TOKENS = 5  # transformers guesses up to 20 and adapts; the rate decides here whether to guess at all


def find_draft(model: str, source: ModelSource, tokenizer: Any, engine: str | None, *, option: str = "--draft") -> ModelSource:
    """Return the source of a draft model. Raise RequestError if it cannot guess for the model of ``source``.

    ``tokenizer``: of that model. ``engine``: the only engine to use. ``option``: what names the draft model."""
    if engine not in ENGINES:
        raise RequestError(f"{option} {model} is for --engine {', '.join(ENGINES)}, and --engine is {engine}; add one of them")
    if engine == "openvino" and not attends_to_all(source):
        raise RequestError(f"{option} {model} is not possible with --engine openvino: {source.reference!r} {NO_PAGES}")
    if generation_task(source) != "generate":
        raise RequestError(f"{option} {model} continues texts, and {source.reference!r} is an encoder-decoder; leave it out")
    draft = find_weights(model)
    if generation_task(draft) != "generate":
        raise RequestError(f"{option} {model} is no causal language model; give a smaller one of the same family")
    if Prompts(draft).tokenizer.get_vocab() != tokenizer.get_vocab():
        raise RequestError(
            f"{option} {model} has other tokens than {source.reference!r}, so that its guesses mean other texts; give a smaller "
            "model of the same family"
        )
    return draft


def add_draft(environment: EngineEnvironment, draft: ModelSource) -> EngineEnvironment:
    """Return the environment with vLLM's argument for a draft model.

    Raise RequestError if the user fixed that argument, too."""
    if environment.arguments.speculative_config is not None:
        raise RequestError(
            f"--draft {draft.reference} and --engine-set speculative_config are two ways to guess; leave out one of them"
        )
    config = json.dumps({"method": "draft_model", "model": str(draft.directory), "num_speculative_tokens": GUESSED_TOKENS})
    return environment.changed(arguments=environment.arguments.changed(speculative_config=config))


def load_draft(draft: ModelSource, source: ModelSource, setup: EngineSetup, decoder: Decoder) -> DraftModel:
    """Return the loaded draft model for the model of ``source``, which runs in ``decoder`` under the setup.

    Raise RequestError if the decoder cannot check several tokens at once."""
    if not decoder.extends:
        raise RequestError(f"--draft {draft.reference} is not possible with {setup.label()}: {source.reference!r} {NO_PAGES}")
    return DraftModel(draft, setup)


class DraftModel:
    """A smaller model that continues a text greedily. It keeps the keys and values of one text."""

    def __init__(self, source: ModelSource, setup: EngineSetup) -> None:
        """Load the draft model in the engine and the precision of the setup, for one text at a time.

        If that engine computes one token of this model at a time, it runs in torch in fp32."""
        setup = setup.changed(batch=1, tensor_parallel=1)
        self._decoder = _build_decoder(source, setup)
        if not self._decoder.extends:
            self._decoder = _build_decoder(source, setup.changed(engine="torch", precision="fp32"))
        self._positions = positions_of(source)
        self._cached: list[int] = []  # the tokens whose keys and values the decoder has

    def find(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the ``max_tokens`` likeliest tokens after the text, one by one, or none beyond the model's positions."""
        if max_tokens < 1 or (self._positions is not None and len(tokens) + max_tokens > self._positions):
            return []
        logits = self._compute(list(tokens))
        guess = [int(logits.argmax())]
        while len(guess) < max_tokens:
            logits = self._decoder.step(np.array(guess[-1:], dtype=np.int64))[0]
            self._cached.append(guess[-1])
            guess.append(int(logits.argmax()))
        return guess

    def _compute(self, tokens: list[int]) -> np.ndarray:
        """Return the logits [V] after the text. Only tokens that differ from those of the last text are computed."""
        pairs = zip(self._cached, tokens[:-1], strict=False)
        shared = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(self._cached), len(tokens) - 1))
        surplus = len(self._cached) - shared
        self._cached = tokens
        logits: np.ndarray
        if not shared:
            self._decoder.keep([])
            logits = self._decoder.admit([tokens])[0]
            return logits
        self._decoder.cut(surplus)
        logits = self._decoder.extend(tokens[shared:])[-1]
        return logits


def _build_decoder(source: ModelSource, setup: EngineSetup) -> Decoder:
    folder = engine_folder("generate", source, setup.engine)
    decoder: Decoder = build_engine("generate", setup.engine, DecoderBuild(source, setup, folder))
    return decoder
