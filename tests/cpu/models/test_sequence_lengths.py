"""A length that nobody gave is one that the model has positions for; one that is given and too long is refused first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LEDConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    XGLMConfig,
)

import upshift
from upshift.errors import RequestError
from upshift.models.build import build_model, choose_class
from upshift.models.profile_cache import positions_of
from upshift.models.sequence_length import DEFAULT_SEQUENCE_LENGTH, prompt_and_answer_lengths
from upshift.models.source import find_model
from upshift.models.tracing import trace
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.messages import EngineRequest
from upshift.training.data.dataset import prepare_data
from upshift.training.data.tokenizer import train_byte_level_bpe

FEW = 24
UNREADABLE = "unreadable.parquet"  # data that exists, and that nothing may read before the number of tokens is refused
SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OF_BOTH = {
    "vocab_size": 320, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
TABLES: dict[str, tuple[PretrainedConfig, str]] = {  # of learned positions: one token too many is an error of torch
    "bert": (BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=FEW), "BertForMaskedLM"),
    "roberta": (RobertaConfig(**SMALL, intermediate_size=32, max_position_embeddings=FEW + 2), "RobertaForMaskedLM"),
    "gpt2": (GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=FEW), "GPT2LMHeadModel"),
    "opt": (OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=FEW), "OPTForCausalLM"),
    "bart": (BartConfig(**OF_BOTH, max_position_embeddings=FEW), "BartForConditionalGeneration"),
    "led": (
        LEDConfig(**OF_BOTH, attention_window=4, max_encoder_position_embeddings=2 * FEW, max_decoder_position_embeddings=FEW),
        "LEDForConditionalGeneration",
    ),
}
UNLIMITED: dict[str, tuple[PretrainedConfig, str]] = {
    "bloom": (BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2), "BloomForCausalLM"),
    "t5": (
        T5Config(vocab_size=320, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0),
        "T5ForConditionalGeneration",
    ),
}


def written(folder: Path, config: PretrainedConfig, name: str) -> str:
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", TABLES)
def test_positions_are_the_tokens_that_the_model_takes(kind: str, tmp_path: Path) -> None:
    source = find_model(written(tmp_path, *TABLES[kind]))
    model = build_model(source.hf_config, choose_class(source.hf_config, kind)[0], dtype=torch.float32).eval()
    positions = positions_of(source)
    assert positions == FEW
    ids = torch.full((1, FEW + 1), 5)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        model(input_ids=ids[:, :FEW], **{name: value[:, :FEW] for name, value in more.items()})
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids, **more)


@pytest.mark.parametrize("kind", UNLIMITED)
def test_a_model_without_a_limit_has_none(kind: str, tmp_path: Path) -> None:
    assert positions_of(find_model(written(tmp_path, *UNLIMITED[kind]))) is None


def test_positions_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_model(written(tmp_path, *TABLES["gpt2"]))
    assert positions_of(source) == FEW
    monkeypatch.setattr("upshift.models.describe.source_max_positions", None)
    assert positions_of(source) == FEW


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model of few positions, with weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("few")
    train_byte_level_bpe(["one two three four " * 20], 300).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=FEW, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


CHEAP = ("--set", "torch_compile=off", "--set", "precision=fp32", "--set", "attention=sdpa", "--on", "1xh100")
COMMANDS = {
    "inspect": ("inspect",),
    "inspect --placement": ("inspect", "--placement"),
    "plan": ("plan", *CHEAP),
    "plan --generate": ("plan", "--generate", "--on", "1xh100"),
    "plan --encode": ("plan", "--encode", "--on", "1xh100"),
}


def asked(command: str, model: str, *more: object) -> tuple[object, ...]:
    name, *rest = COMMANDS[command]
    return (name, model, *rest, *more)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_length_that_nobody_gave_fits(command: str, few: str, upshift: Command) -> None:
    answer = upshift(*asked(command, few))
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("command", "more"),
    [
        *((name, ("--sequence-length", FEW + 1)) for name in COMMANDS if name != "plan --generate"),
        ("plan --generate", ("--prompt-length", FEW)),
        ("plan --generate", ("--output-length", FEW)),
        ("plan --generate", ("--prompt-length", FEW - 3, "--output-length", 4)),
    ],
)
def test_too_many_tokens_are_refused_before_any_trace(
    command: str, more: tuple[object, ...], few: str, upshift: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "Tracer", None)
    monkeypatch.setattr(trace, "trace_model", None)
    answer = upshift(*asked(command, few, *more))
    lines = answer.err.strip().splitlines()
    assert answer.code == 2 and len(lines) == 1, answer.err
    assert str(more[1]) in lines[0] and f"{FEW} positions" in lines[0] and f"at most {FEW}" in lines[0]


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--data", UNREADABLE),
        ("tune", "--data", UNREADABLE, "--space", "space.yaml"),
        ("data", "to-tfrecord", "--data", UNREADABLE, "-o", "records"),
        ("xla", "compile", "--topology", "v5e-4"),
    ],
)
def test_too_many_tokens_are_refused_before_data_is_read(
    command: tuple[str, ...], few: str, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upshift.xla.tensorflow.need_tensorflow", lambda purpose: None)
    Path(UNREADABLE).write_bytes(b"no table")
    Path("space.yaml").write_text("learning_rate: {low: 1.0e-5, high: 1.0e-3}\n")
    names = command[: 1 if command[0] in ("train", "tune") else 2]
    answer = upshift(*names, few, *command[len(names) :], "--sequence-length", FEW + 1)
    assert answer.code == 2 and f"{FEW + 1} is longer" in answer.err, answer.err
    assert answer.err.count("upshift: ") == 1


def test_a_space_of_too_many_tokens_is_refused_before_any_trial(few: str, tmp_path: Path) -> None:
    (tmp_path / UNREADABLE).write_bytes(b"no table")
    with pytest.raises(RequestError, match=f"{FEW + 1} is longer"):
        upshift.tune(few, str(tmp_path / UNREADABLE), space={"sequence_length": [8, FEW + 1]}, output=tmp_path / "study")


def test_data_is_cut_to_what_the_model_has(few: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one two three four " * 50)
    assert prepare_data(find_model(few), tmp_path / "data.txt").training.lengths.max() == FEW


def test_the_default_is_kept_where_it_fits(tmp_path: Path) -> None:
    config = XGLMConfig(vocab_size=320, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2, max_position_embeddings=2048)
    model = written(tmp_path, config, "XGLMForCausalLM")
    assert upshift.inspect(model).sequence_length == DEFAULT_SEQUENCE_LENGTH


def test_a_server_expects_what_the_model_has_positions_for(few: str) -> None:
    ready = GenerationWorker(EngineRequest(model=few, engine="torch", concurrency=1)).prepare()
    assert ready.rows == 1
    given = GenerationWorker(EngineRequest(model=few, engine="torch", output_length=FEW - 2))
    assert (given.prompt_length, given.output_length) == (2, FEW - 2)
    with pytest.raises(RequestError, match=f"--prompt-length 5 and --output-length {FEW}"):
        GenerationWorker(EngineRequest(model=few, engine="torch", prompt_length=5, output_length=FEW))


def test_an_encoder_and_a_decoder_have_positions_apart(tmp_path: Path) -> None:
    source = find_model(written(tmp_path, *TABLES["bart"]))
    lengths = {"defaults": (128, 128), "options": ("--prompt-length", "--output-length")}
    assert prompt_and_answer_lengths(source, None, None, **lengths) == (FEW, FEW - 1)
    with pytest.raises(RequestError, match=f"--output-length {FEW} .* at most {FEW - 1}"):
        prompt_and_answer_lengths(source, None, FEW, **lengths)


@pytest.mark.parametrize("lengths", [(), ("--prompt-length", FEW, "--output-length", FEW - 1)])
def test_an_encoder_decoder_is_refused_for_what_it_is(lengths: tuple[Any, ...], tmp_path: Path, upshift: Command) -> None:
    done = upshift("plan", written(tmp_path, *TABLES["bart"]), "--generate", "--on", "h100", *lengths)
    assert done.code == 2 and "one stack and generates with another" in done.err.splitlines()[-1], done.err


def test_an_answer_without_a_length_ends_where_positions_end(few: str, tmp_path: Path) -> None:
    """Each answer by its own prompt, whatever is beside it; a length that is given and too long is refused."""
    generator = upshift.Generator(few, engine="torch")
    prompts = ["one", "one two three four"]
    answers = generator.generate(prompts)
    lengths = [len(ids) for ids in generator.prompts.tokenize(prompts)]
    assert [len(answer.tokens) for answer in answers] == [FEW - length for length in lengths]
    alone = [upshift.Generator(few, engine="torch").generate([prompt])[0].tokens for prompt in prompts]
    assert [answer.tokens for answer in answers] == alone
    sampled = generator.generate(prompts[:1], temperature=0.7)
    assert len(sampled[0].tokens) == FEW - lengths[0]
    with pytest.raises(RequestError, match=f"{FEW} positions"):
        generator.generate(prompts, max_new_tokens=FEW)
