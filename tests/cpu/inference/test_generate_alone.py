"""Prompts of a model that padding on the left would change run one by one: in the race, from the disk, in every call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_generate import by_transformers, ids_of, save
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, LlamaConfig, T5Config

import upshift
from upshift.inference.generation import generator as generator_module
from upshift.inference.generation.model import pads_safely
from upshift.inference.generation.quantize import rounding_of
from upshift.inference.generation.raced_setup import GenerationTask, run_setup
from upshift.inference.race.early_stopping import EarlyStopping
from upshift.inference.race.race import Race
from upshift.inference.race.types import UNBOUNDED, Contest, RaceRequest
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.models.isolation import check
from upshift.models.profile_cache import isolation_of

PROMPTS = ["a", "two and three", "a longer prompt than both of them", "x y"]
SETUP = EngineSetup(engine="torch", precision="fp32", threads=1, batch=1, hint="latency")
NEW_TOKENS = 14  # as by_transformers generates


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A decoder that counts positions from the first token of a row, padding or not."""
    config = BartConfig(
        vocab_size=260, d_model=64, decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=256, max_position_embeddings=128,
    )  # fmt: skip
    return save(tmp_path_factory.mktemp("decoder"), config, AutoModelForCausalLM)


def request_of(model: str, folder: Path, **task: Any) -> RaceRequest:
    asked = GenerationTask(new_tokens=4, **task).to_json()
    contest = Contest(task="generate", source=find_weights(model), asked=asked, pad=0, batches=(1,), hint="latency")
    request = RaceRequest(contest=contest, setups=(SETUP,), sample=folder / "sample.json", reference=folder / "reference.npy")
    request.sample.write_text(json.dumps(ids_of(PROMPTS, model)))
    return request


def logits_of_each_alone(model: str) -> np.ndarray:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    rows = []
    for prompt in ids_of(PROMPTS, model):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        output = reference.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
        rows.append(torch.stack(output.logits)[:, 0].numpy())
    return np.stack(rows, axis=1)


@pytest.mark.parametrize(("seconds", "stopped"), [(UNBOUNDED, None), (1e-9, "time")])
def test_the_reference_of_a_race_is_each_prompt_alone(model: str, tmp_path: Path, seconds: float, stopped: str | None) -> None:
    request = request_of(model, tmp_path, pads=False)
    early_stopping = EarlyStopping(request.changed(seconds=seconds))
    runs = run_setup(request, SETUP, early_stopping)
    again = run_setup(request, SETUP, early_stopping)
    expected = logits_of_each_alone(model)
    assert np.abs(np.load(request.reference) - expected).max() < 1e-4 * np.abs(expected).max()
    assert all(run.meets("exact") for run in (*runs, *again))
    assert [(run.setup.batch, run.stopped) for run in (*runs, *again)] == [(1, stopped)] * 2
    (tmp_path / "padded").mkdir()
    padded = request_of(model, tmp_path / "padded", pads=True)
    run_setup(padded, SETUP, EarlyStopping(padded))
    assert np.abs(np.load(padded.reference) - expected).max() > 1e-2 * np.abs(expected).max()  # so the test can fail


def test_every_call_runs_prompts_alone_whatever_the_race_says(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[Contest] = []

    def race(contest: Contest, *_: Any, **__: Any) -> Race:
        raced.append(contest)
        return Race(runs=(), chosen=SETUP.changed(batch=8), file=None)

    monkeypatch.setattr(generator_module, "race", race)
    completions = upshift.Generator(model).generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert raced[0].batches == (1,) and not GenerationTask.from_json(raced[0].asked).pads
    assert [completion.tokens for completion in completions] == by_transformers(model, ids_of(PROMPTS, model))


def test_prompts_run_alone_from_the_disk(model: str) -> None:
    generator = upshift.Generator(model, max_memory={"cpu": "1200KiB"})
    completions = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert generator.race is not None and generator.race.divided is not None and generator.race.chosen.batch == 1
    assert [completion.tokens for completion in completions] == by_transformers(model, ids_of(PROMPTS, model))


def test_a_model_whose_padding_was_not_tested_is_not_padded(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder-decoder is padded under the mask of its encoder, which the test of decoders says nothing about."""
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    small = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = find_weights(save(tmp_path / "decoder", LlamaConfig(**small)))
    assert pads_safely(decoder) and not pads_safely(find_weights(model))
    assert rounding_of(decoder, PROMPTS).batch > 1 == rounding_of(find_weights(model), PROMPTS).batch

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(check, "_Probe", fail)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "other cache"))
    assert "was not tested: no small copy of the model runs: RuntimeError: no such kernel" in isolation_of(decoder).left_padding
    assert not pads_safely(decoder)
    t5 = T5Config(vocab_size=260, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    assert pads_safely(find_weights(save(tmp_path / "t5", t5, AutoModelForSeq2SeqLM)))
