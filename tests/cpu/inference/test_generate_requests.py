"""Generation that is asked for what cannot be, or for what would be lost: one line each, and never another text."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from test_generate import CONFIGS, SEQ2SEQ, SMALL, ids_of, save, shorten_passes
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
)

import upshift
from upshift.cli import generate as generate_command
from upshift.cli import generate_xla
from upshift.errors import NothingFits, RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Measured, Rates
from upshift.inference.generation import generator as generator_module
from upshift.inference.generation.options import GenerationOptions, read_options
from upshift.inference.generation.prompts import (
    BLOCK_PROMPTS,
    Prompts,
    check_files,
    prompt_record,
    prompt_vocabulary,
    read_prompts,
)
from upshift.inference.generation.raced_setup import GenerationTask
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.race.race import Race
from upshift.inference.race.types import Contest, Run
from upshift.inference.registry import EngineSetup
from upshift.inference.resumable_output import UnfinishedLines
from upshift.inference.weights import find_weights, needed_memory, weights_size
from upshift.models.generation_config import read_defaults
from upshift.models.source import find_model

PROMPT = "the quick brown fox jumps over the lazy dog"
FEW = ("--engine", "torch", "--max-new-tokens", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"), CONFIGS["llama"])


@pytest.fixture(scope="module")
def generator(model: str) -> upshift.Generator:
    return upshift.Generator(model, engine="torch")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_a_chat_template_says_what_it_does_not_take(model: str, template: str, said: str) -> None:
    prompts = Prompts(find_weights(model))
    prompts.tokenizer.chat_template = template
    with pytest.raises(RequestError, match=f"prompt 2 is not what the chat template of .* takes .*{said}"):
        prompts.tokenize(["a text", [{"role": "system", "content": "s"}]])


def test_a_tokenizer_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    """Its tokens would be read outside of the embedding, or, under XLA, as other tokens."""
    shutil.copytree(model, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 70}))
    prompts = Prompts(find_model(str(tmp_path / "small")))
    known = next(token for token, number in prompts.tokenizer.get_vocab().items() if 10 < number < 70 and token.isalpha())
    assert max(prompts.tokenize([known])[0]) < 70
    unknown = max(prompts.tokenizer(PROMPT).input_ids)
    assert unknown >= 70
    with pytest.raises(
        RequestError, match=r"prompt 3 has the token id \d+, and .* has 0 to 69: the tokenizer is of another model"
    ):
        prompts.tokenize([known, PROMPT], first=1)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("T5Config", 50), ("LlamaConfig", 60), ("Gemma3Config", 70), ("LlavaConfig", 80), ("EncoderDecoderConfig", 90)],
)
def test_the_vocabulary_of_a_prompt_is_that_of_what_reads_it(kind: str, size: int) -> None:
    if kind == "EncoderDecoderConfig":
        config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(vocab_size=size), BertConfig(vocab_size=7))
    elif kind in ("Gemma3Config", "LlavaConfig"):
        config = getattr(transformers, kind)(text_config={"vocab_size": size})
    else:
        config = getattr(transformers, kind)(vocab_size=size)
    assert prompt_vocabulary(config) == size


@pytest.mark.parametrize("prompts", [[{"role": "user", "content": "hi"}], [None], [3], [[]], [["hi"]], ["\ud800"]])
def test_what_is_no_prompt(generator: upshift.Generator, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt 1 is .*; give a text of Unicode characters, or the messages of a chat"):
        generator.generate(prompts)


@pytest.mark.parametrize("prompts", [5, None, {"role": "user", "content": "hi"}])
def test_what_are_no_prompts(generator: upshift.Generator, prompts: Any) -> None:
    with pytest.raises(RequestError, match="takes a list of prompts and was given"):
        generator.generate(prompts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 1e-40}, "temperature: must be at least 1e-06"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: must be at least 1e-06"),
        ({"bad_words_ids": [[]]}, "bad_words_ids.0: .* at least 1 item"),
        ({"bad_words_ids": [[1], [2, 260]]}, "bad_words_ids has 260, which is no token of the model; give some of 0 to 259"),
        ({"bad_words_ids": [[9]], "eos_token_id": 9}, "nothing but the token that ends a text"),
        ({"suppress_tokens": [-1]}, "suppress_tokens has -1"),
        ({"forced_bos_token_id": 99999}, "forced_bos_token_id has 99999"),
        ({"forced_eos_token_id": 260}, "forced_eos_token_id has 260"),
        ({"eos_token_id": 260}, "eos_token_id has 260"),
    ],
)
def test_options_that_no_text_can_have(generator: upshift.Generator, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        generator.generate(["a text"], **options)


@pytest.mark.parametrize("logits", [[1.0, 3.0, 2.0], [-np.inf, np.inf, 0.0], [1e38, 3e38, 0.0]])
def test_where_nothing_can_be_drawn_the_likeliest_comes(logits: list[float]) -> None:
    options = GenerationOptions(do_sample=True, temperature=1e-6, suppress_tokens=(0, 1, 2) if logits[0] == 1.0 else ())
    assert GeneratedSequence(0, [1], options, None).choose(np.array(logits, dtype=np.float32)) == 1


@pytest.mark.parametrize("stop", ["END", "\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e", "\U0001f642" * 3])
def test_stop_strings_of_characters_that_are_several_tokens(model: str, stop: str) -> None:
    tokenizer = Prompts(find_weights(model)).tokenizer
    ids = tokenizer(f"x {stop} and more").input_ids
    sequence = GeneratedSequence(0, [1], GenerationOptions(stop_strings=(stop,)), tokenizer)
    while sequence.ending is None:
        sequence.add(ids[len(sequence.tokens)])
    assert sequence.ending == "stop" and tokenizer.decode(sequence.tokens) == f"x {stop}"


def test_what_a_file_says_of_sampling_counts_where_it_samples(tmp_path: Path) -> None:
    source = find_weights(save(tmp_path, CONFIGS["llama"], temperature=0.0, do_sample=False, top_k=7))
    assert read_options(read_defaults(source), {}) == GenerationOptions(top_k=7)
    assert read_options(read_defaults(source), {"temperature": 0.5}).top_k == 7
    with pytest.raises(RequestError, match="temperature: must be at least"):
        read_options(read_defaults(source), {"top_p": 0.5})
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(RequestError, match="is no JSON object; save the model again, or remove it"):
        read_options(read_defaults(source), {})


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_a_model_says_how_long_a_text_may_be(tmp_path: Path, place: str) -> None:
    """Of an encoder-decoder with the token that it starts with; older models have no file but config.json for that."""
    model = save(tmp_path, SEQ2SEQ["bart, absolute positions"], AutoModelForSeq2SeqLM)
    (tmp_path / "generation_config.json").unlink()
    more = {
        "max_length": 20, "no_repeat_ngram_size": 2, "forced_eos_token_id": 7, "decoder_start_token_id": 2, "num_beams": 1,
        "repetition_penalty": 1.7,
    }  # fmt: skip
    before = json.loads((tmp_path / "config.json").read_text()) if place == "config.json" else {}
    (tmp_path / place).write_text(json.dumps(before | more))
    reference = AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    prompts = ["one", "two x"]
    expected = [reference.generate(torch.tensor([ids]), pad_token_id=0)[0, 1:].tolist() for ids in ids_of(prompts, model)]
    generator = upshift.Generator(model, engine="torch")
    assert [one.tokens for one in generator.generate(prompts)] == expected and len(expected[0]) == 19
    assert generator.options(max_new_tokens=9).max_new_tokens == 9


def test_only_weights_that_transformers_loads_are_counted(model: str, tmp_path: Path) -> None:
    """Mistral's folders have all of them once more, in a form of their own."""
    files = [Path(model) / "config.json", Path(model) / "model.safetensors"]
    for name, file in (("config.json", files[0]), ("model.safetensors", files[1]), ("consolidated.safetensors", files[1])):
        (tmp_path / name).write_bytes(file.read_bytes())
    one, other = find_weights(model), find_weights(str(tmp_path))
    assert weights_size(one) == weights_size(other) and needed_memory(one, "fp32") == needed_memory(other, "fp32")


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("command", ["generate", "encode", "quantize"])
def test_weights_in_a_pickle_are_refused_with_the_command_that_writes_them(
    model: str, tmp_path: Path, upshift: Command, pickle: str, command: str
) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(Path(model) / "config.json", folder)
    (folder / pickle).write_bytes(b"a pickle")
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\n")
    options = {
        "generate": ("--prompt", "a"),
        "encode": ("--input", texts, "--output", tmp_path / "rows.npy"),
        "quantize": ("--texts", texts, "--output", tmp_path / "small", "--bits", 8),
    }
    answer = upshift(command, folder, *options[command])
    assert answer.code == 2
    assert f"has its weights in {pickle}, a pickle" in answer.err and f"upshift shard {folder} --output DIR" in answer.err


def test_two_streams_of_one_generator(generator: upshift.Generator) -> None:
    first, other = (generator.stream(text, max_new_tokens=9) for text in ("one", "two"))
    next(first), next(other)
    with pytest.raises(RequestError, match="began another text before this stream had ended"):
        list(first)
    rest = "".join(other)
    assert rest and "".join(generator.stream("two", max_new_tokens=9)).endswith(rest)


def asked(monkeypatch: pytest.MonkeyPatch, generator: upshift.Generator, prompts: list[str], new_tokens: int) -> Contest:
    """What would be raced."""
    found: list[Contest] = []

    def race(contest: Contest, *_: Any, **__: Any) -> None:
        found.append(contest)
        raise InterruptedError

    monkeypatch.setattr(generator_module, "race", race)
    with pytest.raises(InterruptedError):
        generator.generate(prompts, max_new_tokens=new_tokens)
    return found[0]


def test_a_race_is_the_same_while_free_memory_goes_up_and_down(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"1050KiB": 8, "1100KiB": 8, "1700KiB": 8, "2MiB": 16}  # a prompt and its answer keep 32 KiB
    generators = {size: upshift.Generator(model, max_memory={"cpu": size}) for size in sizes}
    found = {size: asked(monkeypatch, one, ["a" * 24] * 40, 40).batches for size, one in generators.items()}
    assert found == {size: tuple(sorted({8, rows})) for size, rows in sizes.items()}


@pytest.mark.parametrize(("new_tokens", "raced"), [(3, 4), (12, 8), (13, 8)])
def test_a_race_follows_as_many_tokens_as_there_are_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_tokens: int, raced: int
) -> None:
    model = save(tmp_path, GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    contest = asked(monkeypatch, upshift.Generator(model), ["a" * 19], new_tokens)
    assert GenerationTask.from_json(contest.asked).new_tokens == raced


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_tpot_ms": 1e6}, RequestError, "cannot keep --max-ttft-ms or --max-tpot-ms; .* give more --max-memory"),
        ({"engine": "openvino"}, RequestError, "--engine openvino runs .* its race takes more than --max-memory"),
        ({"quality": 0.999}, NothingFits, "as it is stored, .* was not measured: allow it with --quality 0.99"),
    ],
)
def test_what_runs_partly_from_the_disk_holds_no_bounds(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = save(tmp_path, LlamaConfig(**{**SMALL, "hidden_size": 128, "num_hidden_layers": 8}, intermediate_size=512))
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    with pytest.raises(error, match=said):
        upshift.Generator(model, **{"quality": 0.99, "max_memory": {"cpu": "2500KiB"}, **options}).generate(["a"])


@pytest.mark.parametrize("limit", ["max_ttft_ms", "max_tpot_ms", "race_seconds"])
@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
def test_limits_are_finite(model: str, limit: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"--{limit.replace('_', '-')} {value:g} is not possible"):
        upshift.Generator(model, **{limit: value})


@pytest.mark.parametrize(
    "line", ['{"prompt": "a\\ud800b"}', '{"messages": [{"role": "user", "content": "\\udfff"}]}', "[" * 200_000]
)
def test_lines_that_no_tokenizer_takes(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    read = read_prompts(tmp_path / "p.jsonl")
    assert next(read) == "a"  # behind a byte order mark
    with pytest.raises(RequestError, match="line 2 is no prompt"):
        next(read)


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "other.jsonl").hardlink_to(tmp_path / "p.jsonl")
    with pytest.raises(RequestError, match=r"other.jsonl is the input itself, which would be lost"):
        check_files(tmp_path / "p.jsonl", tmp_path / "other.jsonl", overwrite=True)


def test_overwrite_without_a_file_is_refused(upshift: Command) -> None:
    refused = upshift("generate", "no-model", "--prompt", "fox", "--overwrite")
    assert refused.code == 2 and "--overwrite is for --output, and the answer to --prompt is printed" in refused.err


def test_what_set_says_counts(model: str, upshift: Command) -> None:
    command = ("generate", model, "--prompt", "fox", "--engine", "torch", "--json")
    plain = json.loads(upshift(*command, "--max-new-tokens", 6).out)
    assert json.loads(upshift(*command, "--set", "max_new_tokens=6").out)["text"] == plain["text"]
    stopped = json.loads(upshift(*command, "--set", f'stop_strings=["{plain["text"][1]}"]', "--stop", plain["text"][1]).out)
    assert stopped["ending"] == "stop"
    drawn = [
        json.loads(upshift(*command, "--set", "max_new_tokens=6", "--set", "temperature=5.0", *seed).out)["text"]
        for seed in (("--set", "seed=7"), ("--seed", 7), ("--seed", 7, "--set", "seed=7"), ("--seed", 8))
    ]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "max_new_tokens=5", "--max-new-tokens", 4), "--set max_new_tokens=5 and --max-new-tokens 4 say two things"),
        (("--set", "seed=5", "--seed", 0), "--set seed=5 and --seed 0"),
        (("--set", 'stop_strings="a"', "--stop", "b"), '--set stop_strings="a" and --stop b'),
    ],
)
def test_two_values_of_one_option(model: str, upshift: Command, options: tuple[Any, ...], said: str) -> None:
    wrong = upshift("generate", model, "--prompt", "fox", *options)
    assert wrong.code == 2 and said in " ".join(wrong.err.split())


@pytest.mark.parametrize("name, value", [("temperature", 0.5), ("top_k", 3), ("top_p", 0.9), ("min_p", 0.1), ("eta_cutoff", 0.1)])
@pytest.mark.parametrize("command", [("generate", "no-model", "--prompt", "fox"), ("serve", "no-model")])
def test_greedy_decoding_with_an_option_of_sampling(upshift: Command, command: tuple[str, ...], name: str, value: float) -> None:
    wrong = upshift(*command, "--set", "do_sample=False", "--set", f"{name}={value}")
    assert wrong.code == 2 and f"--set {name}={value} changes only what is sampled; leave out" in " ".join(wrong.err.split())


def test_greedy_decoding_with_options_that_change_nothing(model: str, upshift: Command) -> None:
    command = ("generate", model, "--prompt", "fox", "--engine", "torch", "--max-new-tokens", 4, "--json")
    neutral = [text for pair in ("do_sample=false", "temperature=1.0", "top_k=0", "top_p=1") for text in ("--set", pair)]
    assert json.loads(upshift(*command, *neutral).out)["text"] == json.loads(upshift(*command).out)["text"]


def test_answers_go_on_with_the_same_model_alone(tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory is free; not of other weights, another tokenizer, or as a chat."""
    model = save(tmp_path / "model", CONFIGS["llama"])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n" * 20)
    command = ("generate", model, "--prompts", prompts, "-o", tmp_path / "answers.jsonl", *FEW)

    def stop(lines: UnfinishedLines) -> None:
        raise RequestError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedLines, "finish", stop)
        assert "stopped" in upshift(*command, "--max-memory", "cpu=1MiB").err
    for file in ((tmp_path / "model" / name) for name in ("model.safetensors", "tokenizer.json")):
        before = file.stat()
        os.utime(file)
        wrong = upshift(*command)
        assert wrong.code == 2 and "unfinished output of another input, model or setup" in " ".join(wrong.err.split())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert upshift(*command, "--chat").code == 2
    done = upshift(*command, "--max-memory", "cpu=2MiB", "--json")
    assert done.code == 0 and json.loads(done.out)["generated"] == 0, done.err


def test_quantize_takes_no_chats(model: str, tmp_path: Path, upshift: Command) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "u"}]}\n' * 3)
    wrong = upshift("quantize", model, "--bits", 8, "--texts", tmp_path / "chats.jsonl", "-o", tmp_path / "new")
    assert wrong.code == 2 and "chats.jsonl line 1 is a chat, and only texts are used here" in " ".join(wrong.err.split())


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
PLAIN_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TOOL_TEMPLATE = "{{ tools | tojson }}" + PLAIN_TEMPLATE + "{{ messages[0].name }}"


def test_tools_and_parts_are_used_or_refused(model: str) -> None:
    """Whatever a chat holds changes the tokens, or is refused by its name."""
    prompts = Prompts(find_weights(model))
    prompts.tokenizer.chat_template = PLAIN_TEMPLATE
    text = [{"role": "user", "content": "what now?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]}]
    assert prompts.tokenize([parts]) == prompts.tokenize([text]) == prompts.tokenize([{"messages": parts}])
    named = [{**text[0], "name": "Ada"}]
    for prompt, word in (({"messages": text, "tools": TOOLS}, "tools"), (named, "name")):
        with pytest.raises(RequestError, match=f"prompt 1 has '{word}', which the chat template of .* does not use"):
            prompts.tokenize([prompt])
    prompts.tokenizer.chat_template = TOOL_TEMPLATE
    assert len({tuple(ids) for ids in prompts.tokenize([text, {"messages": text, "tools": TOOLS}, named])}) == 3
    image = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]
    with pytest.raises(RequestError, match="reads text, and the prompts have images; leave the images out"):
        prompts.tokenize([image])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "id": 3}, "a key 'id', which is not used"),
        ({"prompt": "a", "tools": TOOLS}, "a key 'tools', which is not used"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": 0.1}, "a key 'temperature'"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "is no prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "weather"}, "tools that are no list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "is no prompt"),
        ({"messages": [{"role": "user", "content": None}]}, "is no prompt"),
    ],
)
def test_a_line_holds_nothing_that_is_not_used(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + json.dumps(line) + "\n")
    with pytest.raises(RequestError, match=f"line 2 .*{words}"):
        list(read_prompts(tmp_path / "p.jsonl"))


def test_a_line_with_tools_is_one_prompt(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": TOOLS}
    call = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps(call) + "\n")
    first, second = read_prompts(tmp_path / "p.jsonl")
    assert prompt_record(first) == chat and prompt_record(second) == call


@pytest.mark.parametrize("config", [CONFIGS["llama"], SEQ2SEQ["bart, absolute positions"]], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("asked", [{}, {"min_new_tokens": 2}], ids=["min_length", "min_new_tokens before it"])
def test_a_least_length_counts_what_stands_before_as_in_transformers(config: Any, asked: dict[str, int], tmp_path: Path) -> None:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    said = {"eos_token_id": [*range(1, 250)], "pad_token_id": 0, "decoder_start_token_id": 2, "min_length": 9}
    model = save(tmp_path, config, kind, **said)
    texts = ["one", "of ten or more", "two"]
    reference, expected = kind.from_pretrained(model).eval(), []
    for ids in ids_of(texts, model):
        text = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, num_beams=1, **asked)[0].tolist()
        expected.append(text[1:] if config.is_encoder_decoder else text[len(ids) :])
    generator = upshift.Generator(model, engine="torch")
    assert [answer.tokens for answer in generator.generate(texts, max_new_tokens=12, **asked)] == expected
    without = generator.generate(texts, max_new_tokens=12, min_length=0)
    assert any(len(answer.tokens) < len(row) for answer, row in zip(without, expected, strict=True))


def test_keys_that_a_longer_row_would_change_are_not_computed(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **SMALL, intermediate_size=128, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope,
        original_max_position_embeddings=24,
    )  # fmt: skip
    generator = upshift.Generator(save(tmp_path, config), engine="torch")
    reference, (ids,) = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids_of(["a text"], str(tmp_path))
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=18, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert generator.generate(["a text"], max_new_tokens=18)[0].tokens == expected.tolist()
    assert len(generator.generate(["a text"], max_new_tokens=19)[0].tokens) == 19, "the last token is not computed"
    with pytest.raises(
        RequestError, match="prompt 2 has 6 tokens, and with max_new_tokens=20 it crosses a border: above 24 tokens"
    ):
        generator.generate(["text", "a text"], max_new_tokens=20)


def test_longrope_on_both_sides_of_its_border_is_each_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prompts are computed in chunks and begin alike: the first chunk alone would have other factors."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **SMALL, intermediate_size=128, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope,
        original_max_position_embeddings=48,
    )  # fmt: skip
    model = save(tmp_path, config)
    shorten_passes(monkeypatch, 32)
    same = "all of these prompts begin with the same words"
    texts = [f"{same} and this is long", "short", f"{same}, too, and longer: {same}", "x"]
    prompts = ids_of(texts, model)
    assert [len(prompt) > 48 for prompt in prompts] == [True, False, True, False]
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = []
    for ids in prompts:
        mask = torch.ones(1, len(ids), dtype=torch.long)
        text = reference.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected.append(text[0, len(ids) :].tolist())
    generator = upshift.Generator(model)
    assert [answer.tokens for answer in generator.generate(texts, max_new_tokens=8)] == expected
    assert generator.race is not None and generator.race.chosen.engine == "torch"
    with pytest.raises(RequestError, match=r"prompt 1 has 63 tokens.* in one pass.* and 100 KiB is free; shorten it"):
        upshift.Generator(model, max_memory={"cpu": "100KiB"}).read(texts, GenerationOptions())
    with pytest.raises(RequestError, match="more than 48 tokens, where the factors of longrope change, and openvino computes"):
        upshift.Generator(model, engine="openvino").generate(texts, max_new_tokens=8)


def test_a_long_prompt_at_the_end_of_a_file_is_known_before_the_race(tmp_path: Path, upshift: Command) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **SMALL, intermediate_size=128, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope,
        original_max_position_embeddings=24,
    )  # fmt: skip
    model, prompts, output = save(tmp_path / "model", config), tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    texts = ["short"] * 515 + ["a prompt of more tokens than the border"]
    prompts.write_text("\n".join(texts))
    command = ("generate", model, "--prompts", prompts, "--output", output, "--max-new-tokens", 4)
    assert upshift(*command).code == 0
    (ids,) = ids_of(texts[-1:], model)
    reference = AutoModelForCausalLM.from_pretrained(model).eval().generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=4, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == 516 and answers[-1]["text"] == Prompts(find_weights(model)).decode(reference[0, len(ids) :].tolist())
    prompts.write_text("\n".join([*texts, "this one crosses it all"]))
    refused = upshift(*command, "--overwrite")
    assert refused.code == 2 and "prompt 517 has 23 tokens, and with max_new_tokens=4 it crosses a border" in refused.err
    prompts.write_text("\n".join(texts))
    refused = upshift(*command, "--overwrite", "--engine", "openvino")
    assert refused.code == 2 and "a prompt has more than 24 tokens, where the factors of longrope change" in refused.err


@pytest.mark.parametrize(
    ("last", "message"), [("a" * 300, "prompt 514 has 300 tokens"), ("", "prompt 514 is empty; write what the text begins with")]
)
def test_every_prompt_of_a_file_is_checked_before_anything_starts(
    model: str, tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch, last: str, message: str
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("something started")

    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("short\n" * BLOCK_PROMPTS + "short\n" + last + "\n")
    monkeypatch.setattr(generator_module, "race", start)
    refused = upshift("generate", model, "--prompts", prompts, "--output", output, "--max-new-tokens", 4)
    assert refused.code == 2 and message in refused.err

    class XlaGenerator:
        generate_each = start

        def check(self, prompts: list[list[int]], options: Any, *, first: int) -> None:
            if any(len(prompt) > 256 for prompt in prompts):
                raise RequestError(f"prompt {first + len(prompts)} has 300 tokens")

    texts = Prompts(find_weights(model))
    with pytest.raises(RequestError, match=message):
        generate_xla._write_answers(XlaGenerator(), texts, prompts, output, GenerationOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "take 10.0 ms at the 10.0 GB/s"), ("cuda", "take 0.1 ms at the 1000.0 GB/s")]
)
def test_a_step_is_compared_with_the_memory_that_holds_the_weights(
    device: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1e9, memory_bytes_per_second=1e10),
        gpu=Rates(fp32=1e9, memory_bytes_per_second=1e12), dispatch_seconds=0.0, first_touch_seconds_per_byte=None,
        base_resident_bytes=None, compiler=None, probe_seconds=0.0,
    )  # fmt: skip
    monkeypatch.setattr("upshift.hardware.probe_cache.measure", lambda host: host.changed(measured=measured))
    setup = EngineSetup(engine="torch", precision="fp32", device=device, threads=1, batch=1)
    race = Race(runs=(Run(setup=setup, weight_bytes=10**8, step_seconds=0.02),), chosen=setup, file=None)
    generate_command._print_bandwidth_share(SimpleNamespace(race=race, host=detect()))
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed and ("the GPU's memory gives here" in printed) is (device == "cuda")


def test_what_a_file_asks_for_and_is_not_done_is_refused(tmp_path: Path, upshift: Command) -> None:
    model = save(tmp_path, CONFIGS["llama"], num_beams=4, max_new_tokens=2)
    generator = generator_module.Generator(model, engine="torch")
    with pytest.raises(RequestError, match="says num_beams=4, which Upshift does not do here"):
        generator.generate(["a text"])
    refused = upshift("generate", model, "--prompt", "a text", *FEW)
    assert refused.code == 2 and "give --set num_beams=1 (num_beams=1 in Python)" in refused.err
    assert upshift("generate", model, "--prompt", "a text", "--set", "num_beams=1", *FEW).code == 0
