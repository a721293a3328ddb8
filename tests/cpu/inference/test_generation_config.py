"""Every field of transformers' GenerationConfig in generation_config.json: done as generate() does it, or refused by its name."""

from __future__ import annotations

import builtins
import copy
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import CONFIGS, SEQ2SEQ, ids_of, save
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

import upshift
from upshift.errors import RequestError
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.options import GenerationOptions
from upshift.models.generation_config import READ_ELSEWHERE, START_TOKENS, WITHOUT_EFFECT, read_defaults
from upshift.models.source import find_model
from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.options import read_options as read_xla_options

NEW = 12
TEXTS = ("one two one two one", "x")
BASE: dict[str, Any] = {"eos_token_id": [30, 31], "pad_token_id": 0, "max_new_tokens": NEW, "decoder_start_token_id": 2}
# A value of every field that is not its default. A list: the fields that it needs beside it come second.
VALUES: dict[str, Any] = {
    "max_length": 25, "max_new_tokens": 5, "min_length": 14, "min_new_tokens": 9, "max_time": 1e-9, "stop_strings": ["a", "q"],
    "early_stopping": True, "do_sample": True, "num_beams": 3, "use_mtp": True, "use_cache": False,
    "cache_implementation": "static", "cache_config": {"backend": "quanto"}, "max_cache_len": 99, "temperature": 0.6, "top_k": 3,
    "top_p": 0.4, "min_p": 0.3, "top_h": 0.4, "typical_p": 0.4, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02,
    "repetition_penalty": 3.0, "encoder_repetition_penalty": 3.0, "length_penalty": 3.0, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[7], [8, 9]], "renormalize_logits": True, "forced_bos_token_id": 9, "forced_eos_token_id": 30,
    "remove_invalid_values": True, "exponential_decay_length_penalty": [2, 3.0], "suppress_tokens": [2, 70, 32, *range(40, 200)],
    "begin_suppress_tokens": [2, *range(40, 250)], "sequence_bias": [[[7], 30.0]], "token_healing": True, "guidance_scale": 2.0,
    "watermarking_config": {"bias": 5.0, "greenlist_ratio": 0.25}, "num_return_sequences": 2, "output_attentions": True,
    "output_hidden_states": True, "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
    "pad_token_id": 5, "bos_token_id": 6, "eos_token_id": [*range(100)], "encoder_no_repeat_ngram_size": 1,
    "decoder_start_token_id": 8, "is_assistant": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9, "prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 3, "assistant_early_exit": 1,
    "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash",
    "compile_config": {"mode": "default"}, "disable_compile": True, "continuous_batching_config": {"block_size": 8},
    "low_memory": True, "penalty_alpha": 0.6, "dola_layers": "low", "diversity_penalty": 1.5, "num_beam_groups": 2,
    "constraints": [[7]], "force_words_ids": [[7]], "prefill_chunk_size": 2,
}  # fmt: skip
NOT_OF_GENERATING = {"_from_model_config", "transformers_version"}  # where a file comes from
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
REFUSED = {
    "max_time", "use_mtp", "num_beams", "token_healing", "guidance_scale", "watermarking_config", "num_return_sequences",
    "is_assistant", "assistant_early_exit", "compile_config", "speculation_type", "penalty_alpha", "dola_layers", "constraints",
    "force_words_ids",
}  # fmt: skip
CHANGES = {  # the text of the first prompt, beside that of BASE, in both kinds of models
    "max_new_tokens", "min_new_tokens", "repetition_penalty", "forced_eos_token_id", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "eos_token_id", "encoder_repetition_penalty",
}  # fmt: skip


@pytest.fixture(scope="module", params=["decoder", "encoder-decoder"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and the class that transformers loads it with."""
    folder = tmp_path_factory.mktemp("model")
    config, kind, layers = CONFIGS["gpt2"], AutoModelForCausalLM, {"n_layer": 1}
    if request.param == "encoder-decoder":
        config, kind = SEQ2SEQ["bart, absolute positions"], AutoModelForSeq2SeqLM
        layers = {"encoder_layers": 1, "decoder_layers": 1}
    # The fields are about what follows the layers, and XLA compiles each program's layers anew.
    save(folder, type(config)(**config.to_diff_dict() | layers), kind)
    return folder, kind


class RereadingGenerator(Generator):
    """Reads generation_config.json in each call, so that the tests need one generator for all fields."""

    def options(self, **arguments: Any) -> GenerationOptions:
        self._defaults = read_defaults(self.source)
        return super().options(**arguments)


@pytest.fixture(scope="module")
def generator(model: tuple[Path, Any]) -> upshift.Generator:
    write(model[0], {})
    generator = RereadingGenerator(str(model[0]), engine="torch")
    generator.generate(list(TEXTS))
    return generator


def write(folder: Path, changed: dict[str, Any]) -> None:
    fields = {name: value for name, value in {**BASE, **changed}.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(fields))


def write_field(folder: Path, name: str) -> dict[str, Any]:
    """Write a file with a field's value. Return the fields beside it without which it could not change a text."""
    base = {"eos_token_id": [*range(1, 250)]} if name in ("min_length", "min_new_tokens") else {}
    beside = {"max_new_tokens": None} if name == "max_length" else {}
    write(folder, base | {name: VALUES[name]} | beside)
    return base


@cache
def loaded(folder: Path, kind: Any) -> tuple[Any, Any, list[list[int]]]:
    """Return the model and the tokenizer, and the tokens of the prompts: they are the same for every field."""
    return kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), ids_of(list(TEXTS), str(folder))


def by_transformers(folder: Path, kind: Any) -> list[list[int]]:
    """Return the tokens that transformers writes with the file's fields. Two tests of a field compute them once."""
    return by_transformers_with(folder, kind, (folder / "generation_config.json").read_text())


@cache
def by_transformers_with(folder: Path, kind: Any, fields: str) -> list[list[int]]:
    return generate_by_transformers(folder, kind)  # the file has these fields


def generate_by_transformers(folder: Path, kind: Any) -> list[list[int]]:
    """Return what a model writes that was just loaded."""
    model, tokenizer, prompts = loaded(folder, kind)
    reference = copy.deepcopy(model)  # generate() keeps a cache in a model
    reference.generation_config = GenerationConfig.from_pretrained(folder)
    answers = []
    for ids in prompts:
        mask = torch.ones(1, len(ids), dtype=torch.long)
        output = reference.generate(torch.tensor([ids]), attention_mask=mask, tokenizer=tokenizer)
        sequence = (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()
        answers.append(sequence[1:] if reference.config.is_encoder_decoder else sequence[len(ids) :])
    return answers


def test_every_field_has_a_value_here() -> None:
    """A new version's fields are tried, too: until they stand in VALUES, this fails."""
    fields = set(vars(GenerationConfig())) - NOT_OF_GENERATING
    assert fields - set(VALUES) == set()


@pytest.mark.parametrize("name", sorted(set(VALUES) - set(SAMPLING) - {"do_sample"}))
def test_a_field_is_done_as_by_transformers_or_refused(name: str, model: tuple[Path, Any], generator: upshift.Generator) -> None:
    folder, kind = model
    base = write_field(folder, name)
    fresh = name == "decoder_start_token_id"  # read once, when a model is read
    ours = upshift.Generator(str(folder), engine="torch") if fresh else generator
    if name in REFUSED:
        with pytest.raises(RequestError, match=rf"generation_config.json of .* says {name}=.*remove it from the file"):
            ours.options()
        return
    texts = [answer.tokens for answer in ours.generate(list(TEXTS))]
    assert texts == by_transformers(folder, kind)
    if name in CHANGES:
        write(folder, base)
        assert texts != [answer.tokens for answer in generator.generate(list(TEXTS))], "this value changes nothing"


@pytest.mark.parametrize("name", [*SAMPLING, "renormalize_logits", "repetition_penalty"])
def test_sampling_draws_from_transformers_probabilities(
    name: str, model: tuple[Path, Any], generator: upshift.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kind = model
    write(folder, {"do_sample": True, "max_new_tokens": 1, name: VALUES[name]})
    probabilities: list[torch.Tensor] = []

    def draw_likeliest(weights: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        probabilities.append(weights.reshape(-1).clone())
        return weights.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", draw_likeliest)
    generator.generate([TEXTS[0]])
    generate_by_transformers(folder, kind)
    ours, theirs = probabilities[0], probabilities[1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ((ours == 0) == (theirs == 0)).all()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_user_may_set_aside_what_is_refused(name: str, model: tuple[Path, Any], generator: upshift.Generator) -> None:
    folder, _ = model
    write(folder, {name: VALUES[name]})
    neutral = {"num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1.0, "penalty_alpha": 0.0}.get(name)
    texts = [answer.tokens for answer in generator.generate(list(TEXTS), **{name: neutral})]
    write(folder, {})
    assert texts == [answer.tokens for answer in generator.generate(list(TEXTS))]


def test_a_users_value_of_what_is_not_done_is_refused(generator: upshift.Generator) -> None:
    for name in REFUSED:
        with pytest.raises(RequestError, match=f"unknown key '{name}'"):
            generator.options(**{name: VALUES[name]})


def test_without_beams_and_samples_their_options_change_nothing(model: tuple[Path, Any], generator: upshift.Generator) -> None:
    folder, kind = model
    write(folder, {name: VALUES[name] for name in (*SAMPLING, "length_penalty", "early_stopping", "num_beam_groups")})
    assert [answer.tokens for answer in generator.generate(list(TEXTS))] == by_transformers(folder, kind)


def test_a_max_length_counts_the_prompt(model: tuple[Path, Any], generator: upshift.Generator) -> None:
    folder, kind = model
    write(folder, {"max_length": 8, "max_new_tokens": None, "eos_token_id": None})
    if kind is AutoModelForCausalLM:
        with pytest.raises(RequestError, match="prompt 1 has 19 tokens, and max_length=8 counts them and the answer"):
            generator.generate(list(TEXTS))
    texts = [answer.tokens for answer in generator.generate([TEXTS[1]])]
    assert texts == by_transformers_of_one(folder, kind) and len(texts[0]) == 7
    assert len(generator.generate([TEXTS[1]], max_length=5)[0].tokens) == 4
    assert len(generator.generate([TEXTS[1]], max_new_tokens=5)[0].tokens) == 5
    for name in ("max_new_tokens", "max_length"):  # above all positions
        with pytest.raises(RequestError, match=f"prompt 1 has 1 tokens, with {name}=900 more than the (128|256) positions"):
            generator.generate([TEXTS[1]], **{name: 900})
    write(folder, {"max_length": 900, "max_new_tokens": None, "eos_token_id": None})
    assert len(generator.generate([TEXTS[1]])[0].tokens) == (255 if kind is AutoModelForCausalLM else 127)
    with pytest.raises(RequestError, match="max_new_tokens=5 and max_length=9 both limit the length of a text; give one of them"):
        generator.options(max_new_tokens=5, max_length=9)


def by_transformers_of_one(folder: Path, kind: Any) -> list[list[int]]:
    reference = kind.from_pretrained(folder).eval()
    (ids,) = ids_of([TEXTS[1]], str(folder))
    row = reference.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))[0].tolist()
    return [row[1:] if reference.config.is_encoder_decoder else row[len(ids) :]]


@pytest.fixture(scope="module")
def compiled(model: tuple[Path, Any]) -> Any:
    """A generator of XLA, which compiles a program for all fields that leave its options equal."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    write(model[0], {})
    return compiled_generator(model[0])


def compiled_generator(folder: Path) -> Any:
    from upshift.xla.generation.generator import XlaGenerator
    from upshift.xla.model import build

    class RereadingXlaGenerator(XlaGenerator):
        def options(self, **options: Any) -> Any:
            self._defaults = read_defaults(self.model.source)
            return super().options(**options)

    return RereadingXlaGenerator(build(str(folder)))


@pytest.mark.parametrize("name", sorted(set(VALUES) - set(SAMPLING) - {"do_sample"}))
def test_a_compiled_generator_writes_the_texts_of_transformers_or_refuses_a_field(
    name: str, model: tuple[Path, Any], compiled: Any
) -> None:
    folder, kind = model
    write_field(folder, name)
    ours = compiled_generator(folder) if name == "decoder_start_token_id" else compiled  # read once, when a model is read
    try:
        ours.options()
    except RequestError as error:
        assert f"says {name}=" in str(error)
        return
    assert ours.generate(loaded(folder, kind)[2]) == by_transformers(folder, kind)


@pytest.mark.parametrize("name", [*SAMPLING, "do_sample"])
def test_a_compiled_generator_reads_a_field_of_sampling_or_refuses_it(name: str, model: tuple[Path, Any]) -> None:
    """Which probabilities it draws from stands in test_xla_generation.py."""
    folder, _ = model
    plain = {} if name == "do_sample" else {"do_sample": True}
    write(folder, plain)
    before = read_xla_options(read_defaults(find_model(str(folder))), {})
    write(folder, {**plain, name: VALUES[name]})
    try:
        after = read_xla_options(read_defaults(find_model(str(folder))), {})
    except RequestError as error:
        assert f"says {name}=" in str(error)
        return
    assert getattr(after, name) == VALUES[name] != getattr(before, name)


def test_options_of_beams_need_another_program_only_with_beams() -> None:
    plain = XlaGeneration()
    for changed in ({"length_penalty": 3.0}, {"early_stopping": True}):
        assert plain.changed(**changed).program() == plain.program()
        searched = plain.changed(num_beams=2)
        assert searched.changed(**changed).program() != searched.program()


def test_a_request_reads_no_file(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are many, and a file on a network costs milliseconds."""
    folder, _ = model
    write(folder, {"max_length": 30, "max_new_tokens": None})
    ours = upshift.Generator(str(folder), engine="torch")
    expected = ours.generate(list(TEXTS))
    opened: list[str] = []

    def counting_open(file: Any, *arguments: Any, **named: Any) -> Any:
        opened.append(str(file))
        return io_open(file, *arguments, **named)

    io_open = io.open
    monkeypatch.setattr(io, "open", counting_open)
    monkeypatch.setattr(builtins, "open", counting_open)
    assert (folder / "config.json").read_text() and opened  # else nothing is counted
    opened.clear()
    assert ours.generate(list(TEXTS)) == expected
    assert ours.options(max_new_tokens=3).max_new_tokens == 3
    assert [path for path in opened if not path.startswith(("/proc", "/sys"))] == []  # those say how much memory is free now


def test_the_first_token_of_a_decoder_is_read_and_not_without_effect() -> None:
    assert set(START_TOKENS) == READ_ELSEWHERE and not READ_ELSEWHERE & WITHOUT_EFFECT
