"""Guesses from the prompt change how fast a text comes, never the text; and stop where they do not pay."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import CONFIGS, NEW, by_transformers, decoder_of, ids_of, save
from transformers import AutoTokenizer

import upshift
from upshift.errors import RequestError
from upshift.inference.generation.batching import decode
from upshift.inference.generation.draft import DraftModel, find_draft, load_draft
from upshift.inference.generation.options import read_options
from upshift.inference.generation.prompt_lookup import MAX_MATCH, PAUSE_PASSES, TRIAL_PASSES, Lookup, find_continuation
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.models.generation_config import read_defaults

PROMPTS = ["the same words " * 6, "nothing again"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kinds = ("llama", "gemma2, sliding", "bloom, alibi")
    return {kind: save(tmp_path_factory.mktemp("models"), CONFIGS[kind]) for kind in kinds}


class Oracle:
    """Guesses what the reference said, with one wrong token at its end: what is taken, and what is not, is known."""

    def __init__(self, prompt: list[int], expected: list[int]) -> None:
        self.start, self.expected, self.taken = len(prompt), expected, list[int]()

    def guess(self, tokens: list[int], most: int) -> list[int]:
        known = self.expected[len(tokens) - self.start :][:3]
        return [*known, (known[-1] + 1) % 260][:most] if known else []

    def add(self, tokens: int, seconds: float, *, guessed: bool) -> None:
        self.taken.append(tokens)


@pytest.mark.parametrize(
    ("engine", "kind"), [("torch", "llama"), ("torch", "gemma2, sliding"), ("torch", "bloom, alibi"), ("openvino", "llama")]
)
def test_the_text_is_that_without_guesses(made: dict[str, str], engine: str, kind: str) -> None:
    model, decoder = made[kind], decoder_of(made[kind], engine)
    prompts = ids_of(PROMPTS, model)
    expected = by_transformers(model, prompts)
    options = read_options(read_defaults(find_weights(model)), {"max_new_tokens": NEW})
    for prompt, tokens in zip(prompts, expected, strict=True):
        for lookup in (Oracle(prompt, tokens), Lookup(4)):
            decoder.keep([])
            sequence = GeneratedSequence(0, prompt, options, None)
            found = [token for _, token in decode(decoder, [sequence], rows=1, lookup=lookup)]  # type: ignore[arg-type]
            assert found == sequence.tokens == tokens
            if isinstance(lookup, Oracle):  # three guessed right and the one behind them, of each pass
                assert lookup.taken == [4, 4, 4, 1] and sum(lookup.taken) == NEW - 1


def test_a_sampled_text_is_that_without_guesses(made: dict[str, str]) -> None:
    generator = upshift.Generator(made["llama"], engine="torch", race_seconds=1)
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.7, "seed": 3}
    plain = generator.generate(PROMPTS[:1], **asked)
    assert generator.generate(PROMPTS[:1], **asked, prompt_lookup_num_tokens=5) == plain
    ended = generator.generate(PROMPTS[:1], **{**asked, "eos_token_id": plain[0].tokens[6]}, prompt_lookup_num_tokens=5)
    assert ended[0].tokens == plain[0].tokens[: plain[0].tokens.index(plain[0].tokens[6]) + 1]


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30), most=st.integers(0, 6))
def test_a_guess_followed_the_same_tokens(tokens: list[int], most: int) -> None:
    found = find_continuation(tokens, most)
    assert len(found) <= most
    if found:
        before = [start for start in range(1, len(tokens)) if tokens[start : start + len(found)] == found]
        assert any(tokens[start - 1] == tokens[-1] for start in before)
    elif most:
        assert tokens[-1] not in tokens[:-1]


def test_the_longest_match_is_taken() -> None:
    assert MAX_MATCH == 3
    assert find_continuation([1, 2, 3, 9, 7, 3, 8, 1, 2, 3], 2) == [9, 7]
    assert find_continuation([5, 6], 4) == []


def test_guesses_rest_where_they_do_not_pay() -> None:
    lookup, tokens = Lookup(4), [1, 2, 1, 2]
    assert lookup.guess(tokens, 9) == []  # what a step takes is not known yet
    lookup.add(1, 1.0, guessed=False)
    for _ in range(TRIAL_PASSES):
        assert lookup.guess(tokens, 9) == [1, 2]
        lookup.add(1, 1.5, guessed=True)
    assert [lookup.guess(tokens, 9) for _ in range(PAUSE_PASSES + 1)] == [[]] * (PAUSE_PASSES + 1)
    for _ in range(2 * TRIAL_PASSES):  # tried again, and paying now
        assert lookup.guess(tokens, 1) == [1]
        lookup.add(2, 1.5, guessed=True)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_several_tokens_of_a_text_at_once(made: dict[str, str], engine: str) -> None:
    assert not decoder_of(made["llama"], "nothing").extends
    extended = decoder_of(made["llama"], engine)
    (prompt,) = ids_of(PROMPTS[:1], made["llama"])
    extended.admit([prompt[:-3]])
    several = extended.extend(prompt[-3:])
    assert extended.extends and several.shape == (3, 260)
    extended.cut(2)
    assert np.allclose(extended.step(np.array(prompt[-2:-1]))[0], several[1], atol=1e-4)


def test_what_does_not_extend_says_so(made: dict[str, str]) -> None:
    model = next(path for kind, path in made.items() if "alibi" in kind)
    with pytest.raises(RequestError, match="ask for --engine torch"):
        upshift.Generator(model, engine="openvino", race_seconds=30).generate(["a"], max_new_tokens=2, prompt_lookup_num_tokens=5)


class CountingDraft(DraftModel):
    """A draft model that counts the tokens of its guesses."""

    guessed = 0

    def find(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        guess = super().find(tokens, max_tokens)
        self.guessed += len(guess)
        return guess


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_draft_model_guesses_what_it_would_write(made: dict[str, str], engine: str) -> None:
    """One text after the other, longer ones, shorter ones and others: each guess is transformers' own greedy text."""
    model = made["llama"]
    draft = DraftModel(find_weights(model), EngineSetup(engine=engine, precision="fp32", threads=1, batch=4))
    (text,) = by_transformers(model, ids_of(PROMPTS[1:], model))
    (prompt,) = ids_of(PROMPTS[1:], model)
    texts = [prompt, [*prompt, *text[:1]], [*prompt, *text[:4]], prompt[:2], [9, 8, 7], [9, 8, 7], [9, 8, 1, 2], prompt]
    expected = by_transformers(model, texts)
    assert [draft.find(tokens, 4) for tokens in texts] == [tokens[:4] for tokens in expected]
    positions = CONFIGS["llama"].max_position_embeddings
    assert draft.find(prompt, 0) == [] and draft.find([5] * (positions - 3), 4) == []


def test_the_text_is_that_without_a_draft_model(made: dict[str, str], tmp_path: Path) -> None:
    other = save(tmp_path, CONFIGS["llama"].__class__(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 1}))
    expected = by_transformers(made["llama"], ids_of(PROMPTS, made["llama"]))
    for draft in (made["llama"], other):
        generator = upshift.Generator(made["llama"], engine="torch", race_seconds=1, draft=draft)
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert generator.generate([prompt], max_new_tokens=NEW)[0].tokens == tokens


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_draft_model_that_guesses_right_saves_passes(made: dict[str, str], engine: str) -> None:
    model, decoder = made["llama"], decoder_of(made["llama"], engine)
    (prompt,) = ids_of(PROMPTS[1:], model)
    draft = CountingDraft(find_weights(model), EngineSetup(engine=engine, precision="fp32", threads=1, batch=4))
    options = read_options(read_defaults(find_weights(model)), {"max_new_tokens": NEW})
    passes = []
    extend = decoder.extend
    decoder.extend = lambda tokens: passes.append(len(tokens)) or extend(tokens)
    sequence = GeneratedSequence(0, prompt, options, None)
    assert [token for _, token in decode(decoder, [sequence], rows=1, lookup=Lookup(4, draft.find))] == sequence.tokens
    assert draft.guessed == sum(passes) - len(passes) and len(passes) < NEW / 3


def test_an_engine_that_cannot_check_guesses_is_refused(made: dict[str, str]) -> None:
    model = made["gemma2, sliding"]
    source = find_weights(model)
    with pytest.raises(RequestError, match="keeps its keys and values in states there"):
        find_draft(model, source, None, "openvino")
    setup = EngineSetup(engine="openvino", precision="fp32", threads=1, batch=4)
    with pytest.raises(RequestError, match="computes one token at a time"):
        load_draft(source, source, setup, decoder_of(model, "nothing"))


def test_drafts_that_cannot_guess_are_refused(made: dict[str, str], upshift: Command, tmp_path: Path) -> None:
    other = shutil.copytree(made["llama"], tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    for text, draft, *words in (
        ("add one of them", made["llama"]), ("add one of them", made["llama"], "--engine", "torch-compiled"),
        ("nowhere", "nowhere", "--engine", "torch"), ("has other tokens", other, "--engine", "torch"),
    ):  # fmt: skip
        answer = upshift("generate", made["llama"], "--prompt", "a", "--draft", draft, *words)
        assert answer.code == 2 and text in answer.err and len(answer.err.strip().splitlines()) == 1, answer.err
