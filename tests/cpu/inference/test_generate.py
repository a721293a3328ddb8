"""Every engine generates what transformers' generate() does, however prompts are batched; sampling, stopping, chats, the race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

import upshift
from upshift.errors import NothingFits, RequestError
from upshift.hardware import detect
from upshift.hardware.probe_process import compiler_works
from upshift.hardware.spec import Measured, Rates
from upshift.inference import quantize as quantize_module
from upshift.inference import registry
from upshift.inference.generation.batching import decode
from upshift.inference.generation.engines.base import DecoderBuild, Padding
from upshift.inference.generation.engines.openvino_export import convert
from upshift.inference.generation.model import generation_task
from upshift.inference.generation.options import GenerationOptions, read_options
from upshift.inference.generation.prefix import MIN_PREFIX_TOKENS, common_prefix, remaining_tokens
from upshift.inference.generation.prompts import Prompts, read_prompts
from upshift.inference.generation.quantize import rounding_of
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.quantize import quantize
from upshift.inference.race.forecast import forecast_encoding, forecast_generation
from upshift.inference.race.types import EXACT_DIFFERENCE, cosines
from upshift.inference.registry import QUANTIZED, EngineSetup
from upshift.inference.resumable_output import UnfinishedLines
from upshift.inference.weights import engine_folder, find_weights
from upshift.models.generation_config import read_defaults, start_token

SMALL = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL, intermediate_size=128, num_key_value_heads=2),
    "gemma2, sliding": Gemma2Config(**SMALL, intermediate_size=128, num_key_value_heads=2, head_dim=16, sliding_window=8),
    "gpt2": GPT2Config(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "bloom, alibi": BloomConfig(vocab_size=260, hidden_size=64, n_layer=2, n_head=4),
    "opt": OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=64),
    "mixtral, experts": MixtralConfig(
        **SMALL, intermediate_size=96, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2
    ),
}
SEQ2SEQ: dict[str, Any] = {
    "t5, relative positions": T5Config(
        vocab_size=260, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=None
    ),
    "bart, absolute positions": BartConfig(
        vocab_size=260, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=128, forced_eos_token_id=7,
    ),
}  # fmt: skip
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
TEXTS = ["one", "a longer one, of some words", "x", "the same words " * 4, "two two", "and a last one", "yes"]
NEW = 14
BUILT = pytest.mark.skipif(not registry.is_installed("llamacpp"), reason="llama-cpp-python is not installed: it compiles long")
RUN = [(engine, kind) for engine in ("torch", "openvino") for kind in CONFIGS] + [
    pytest.param("llamacpp", kind, marks=BUILT)
    for kind in ("llama", "gemma2, sliding", "gpt2")  # of those that it computes
]


def save(folder: Path, config: Any, kind: Any = AutoModelForCausalLM, **generation: Any) -> str:
    torch.manual_seed(0)
    model = kind.from_config(config)
    with torch.no_grad():  # logits far enough apart for a greedy choice to be one
        for weight in model.parameters():
            weight.mul_(3.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    config.eos_token_id = None
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save(tmp_path_factory.mktemp("models"), config) for kind, config in CONFIGS.items()}


def decoder_of(model: str, engine: Any, precision: Any = "fp32", *, task: Any = "generate") -> Any:
    source = find_weights(model)
    setup = EngineSetup(engine=engine, precision=precision, threads=1, batch=4)
    return registry.build_engine(task, engine, DecoderBuild(source, setup, engine_folder(task, source, engine)))


def ids_of(texts: list[str], model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(texts).input_ids


def by_transformers(model: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    found = []
    for prompt in prompts:
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, pad_token_id=0, **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


def run(
    decoder: Any, prompts: list[list[int]], rows: int, options: GenerationOptions, start: int | None = None
) -> list[list[int]]:
    decoder.keep([])
    sequences = [GeneratedSequence(place, prompt, options, None, start=start) for place, prompt in enumerate(prompts)]
    for _ in decode(decoder, sequences, rows=rows):
        pass
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_model_without_room_runs_from_the_disk(kind: str, tmp_path: Path, upshift: Command, made: dict[str, str]) -> None:
    wide = {"vocab_size": 260, "num_heads": 4, "num_layers": 4, "d_model": 128, "d_ff": 512, "decoder_start_token_id": 0}
    large = LlamaConfig(**{**SMALL, "hidden_size": 128, "num_hidden_layers": 8}, intermediate_size=512)
    config, auto = (large, AutoModelForCausalLM) if kind == "llama" else (T5Config(**wide), AutoModelForSeq2SeqLM)
    model = save(tmp_path, config, auto)
    asked = ("generate", model, "--prompt", "one two", "--max-new-tokens", 6)
    answer = upshift(*asked, "--max-memory", "cpu=2500KiB", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert "on the disk" in said["race"]["divided"] and not said["race"]["runs"]
    ids = torch.tensor(ids_of(["one two"], model))
    expected = auto.from_pretrained(model).eval().generate(ids, max_new_tokens=6, do_sample=False)[0]
    new = expected[len(ids[0]) if kind == "llama" else 1 :].tolist()
    assert said["text"] == Prompts(find_weights(model), chat=False).decode(new)
    refused = upshift(*asked, "--max-memory", "cpu=300KiB")
    assert refused.code == 3 and "one layer at a time" in refused.err


def shorten_passes(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Limit the passes of prompts in all engines that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("upshift.inference.generation.engines.") and hasattr(module, "PASS_TOKENS"):
            monkeypatch.setattr(module, "PASS_TOKENS", tokens)


@pytest.mark.parametrize(("engine", "kind"), RUN)
def test_greedy_text_is_that_of_transformers(
    made: dict[str, str], kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends differ, so that rows leave and others are admitted beside those that go on. Last, long prompts in parts."""
    prompts = ids_of(TEXTS, made[kind])
    plain = by_transformers(made[kind], prompts)
    end = max({token for row in plain for token in row}, key=lambda token: sum(token in row[2:-2] for row in plain))
    expected = by_transformers(made[kind], prompts, eos_token_id=end)
    assert len({len(row) for row in expected}) > 1
    decoder = decoder_of(made[kind], engine)
    for rows in (1, 3, len(TEXTS)):
        assert run(decoder, prompts, rows, GenerationOptions(max_new_tokens=NEW, eos_token_id=(end,))) == expected
    shorten_passes(monkeypatch, 16)
    assert run(decoder, prompts, 3, GenerationOptions(max_new_tokens=NEW, eos_token_id=(end,))) == expected


def test_one_compilation_serves_rows_that_come_and_go(made: dict[str, str]) -> None:
    """Nothing is compiled once it is built, however long texts are and however many the rows; after a common beginning, too."""
    if not compiler_works():
        pytest.skip("no C++ compiler that torch inductor can use")
    prompts, options = ids_of(TEXTS, made["llama"]), GenerationOptions(max_new_tokens=NEW)
    expected, decoder = by_transformers(made["llama"], prompts), decoder_of(made["llama"], "torch-compiled")
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for rows in (1, 3, len(TEXTS)):
            assert run(decoder, prompts, rows, options) == expected
        alike = ids_of(["What a system says to all, once: " + text for text in TEXTS[:3]], made["llama"])
        assert run(decoder, alike, 2, options) == by_transformers(made["llama"], alike)
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("kind", [*CONFIGS, *SEQ2SEQ])
def test_what_computes_nothing_has_the_shapes_of_what_does(made: dict[str, str], tmp_path: Path, kind: str) -> None:
    task = "generate" if kind in CONFIGS else "seq2seq"
    model = made[kind] if kind in CONFIGS else save(tmp_path, SEQ2SEQ[kind], AutoModelForSeq2SeqLM)
    prompts = ids_of(TEXTS, model)
    nothing, torchs = (decoder_of(model, engine, task=task) for engine in ("nothing", "torch"))
    for decoder in (nothing, torchs):
        decoder.keep([])
    for found in (decoder.admit(prompts) for decoder in (nothing, torchs)):
        assert found.shape == (len(prompts), 260) and found.dtype == np.float32
    for decoder in (nothing, torchs):
        decoder.keep([0, 2])
        assert decoder.step(np.zeros(2, dtype=np.int64)).shape == (2, 260)
    assert {len(tokens) for tokens in run(nothing, prompts, 3, GenerationOptions(max_new_tokens=NEW))} == {NEW}


@pytest.mark.parametrize(("engine", "kind"), RUN)
def test_what_prompts_begin_with_is_computed_once(
    made: dict[str, str], kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ids_of(["What a system says to all, once: " + text for text in TEXTS], made[kind])
    decoder, computed = decoder_of(made[kind], engine), list[int]()
    forward = decoder._run

    def watched(*given: Any) -> np.ndarray:
        padded = [one.size for one in given if isinstance(one, np.ndarray)]
        computed.append(padded[0] if padded else sum(map(len, given[1])))  # else rows and their tokens, in pages
        return forward(*given)

    monkeypatch.setattr(decoder, "_run", watched)
    assert run(decoder, prompts, 3, GenerationOptions(max_new_tokens=NEW)) == by_transformers(made[kind], prompts)
    steps = NEW * len(prompts)
    assert sum(computed) - steps < 0.7 * sum(map(len, prompts))
    check_that_a_row_goes_on(decoder, prompts)


def check_that_a_row_goes_on(decoder: Any, prompts: list[list[int]]) -> None:
    """Later, in several rows, beside others, and from less than all of it."""
    decoder.admit(prompts[:3])
    decoder.step(np.array([5, 6, 7]))
    known = decoder.prefix_of_row(1)
    said = [*prompts[1], 6]
    assert known.length == len(said)
    more = [[*said, 1, 2, 3], [*said, 9]]
    found = []
    for prefix in (known, known._replace(length=len(said) - 4)):
        decoder.keep([0, 2] if prefix is known else [0])
        found.append(decoder.admit(more, prefix))
        found.append(decoder.step(np.zeros(4 if prefix is known else 3, dtype=np.int64))[-2:])
    decoder.keep([])
    expected = [decoder.admit(more), decoder.step(np.zeros(2, dtype=np.int64))]
    for one, other in zip(found, expected * 2, strict=True):
        assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_encoder_decoders_give_the_text_of_transformers(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path, SEQ2SEQ[kind], AutoModelForSeq2SeqLM)
    prompts = ids_of(TEXTS, model)
    reference = AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.3}

    def by_reference(**more: Any) -> list[list[int]]:
        given = {"do_sample": False, "num_beams": 1, "pad_token_id": 0, **options, **more}
        return [reference.generate(torch.tensor([prompt]), **given)[0, 1:].tolist() for prompt in prompts]

    expected = by_reference()
    tokens = {token for row in expected for token in row}
    end = max(tokens, key=lambda token: len({(row + [token]).index(token) for row in expected}))  # at many lengths
    ending = by_reference(eos_token_id=end)
    assert len({len(row) for row in ending}) > 1
    source = find_weights(model)
    read, start = read_options(read_defaults(source), {**options, "eos_token_id": end}), start_token(source)
    found = {}
    for engine in ("torch", "openvino"):
        decoder = decoder_of(model, engine, task="seq2seq")
        assert run(decoder, prompts, 4, read, start) == ending
        decoder.keep([])
        found[engine] = decoder.admit(prompts)
    assert np.abs(found["torch"] - found["openvino"]).max() < EXACT_DIFFERENCE * max(np.abs(found["torch"]).max(), 1.0)
    generator = upshift.Generator(model, engine="torch")
    assert [one.tokens for one in generator.generate(TEXTS[:3], **options)] == expected[:3]
    assert generator.race is not None and generator.race.runs == ()  # one setup alone has nobody to race against


def test_rounded_weights_of_encoder_decoders(tmp_path: Path) -> None:
    model = save(tmp_path, SEQ2SEQ["bart, absolute positions"], AutoModelForSeq2SeqLM)
    prompts = ids_of(TEXTS, model)
    plain = decoder_of(model, "openvino", task="seq2seq")
    expected = plain.admit(prompts)
    for precision, least in (("int8", 0.99), ("int4-weights", 0.8)):
        rounded = decoder_of(model, "openvino", precision, task="seq2seq")
        assert rounded.weight_bytes < 0.6 * plain.weight_bytes
        cosine = cosines(rounded.admit(prompts), expected)
        assert least < cosine.min() < 0.9999999


def test_what_transformers_cannot_load_again_is_not_written(tmp_path: Path) -> None:
    source = find_weights(save(tmp_path / "model", SEQ2SEQ["bart, absolute positions"], AutoModelForSeq2SeqLM))
    with pytest.raises(RequestError, match="final_logits_bias; use --engine openvino, or --bits 4"):
        quantize(source, rounding_of(source, WORDS), tmp_path / "small", bits=8, engine="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_converted_file_that_is_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may leave such a file. It would stop every later run of the model."""
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    model = save(tmp_path / "model", LlamaConfig(**{**SMALL, "num_hidden_layers": 1}, intermediate_size=64))
    expected = decoder_of(model, "openvino", "int8-weights").admit([[1, 2, 3]])
    folder = engine_folder("generate", find_weights(model), "openvino")
    whole = {path: path.read_bytes() for path in folder.glob("*.xml")}
    assert {path.name for path in whole} == {"fp32.xml", "int8.xml"}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert np.array_equal(decoder_of(model, "openvino", "int8-weights").admit([[1, 2, 3]]), expected)
    modified = {path: path.stat().st_mtime_ns for path in whole}
    (folder / "int8.xml").write_bytes(b"")
    assert np.array_equal(decoder_of(model, "openvino", "int8-weights").admit([[1, 2, 3]]), expected)
    assert (folder / "fp32.xml").stat().st_mtime_ns == modified[folder / "fp32.xml"]  # a whole file is kept


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_an_interrupted_quantize_leaves_nothing(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither beside the output nor in the cache, where the OpenVINO files are made."""
    source = find_weights(save(tmp_path / "model", LlamaConfig(**SMALL, intermediate_size=64)))
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    rounding = rounding_of(source, WORDS)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def write(path: Path, *_: object) -> None:
        path.with_suffix(".bin").touch()
        interrupt()

    monkeypatch.setattr(quantize_module, "make_model_file", write)
    monkeypatch.setattr("upshift.loading.load.load_source", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, rounding, tmp_path / "small", bits=8, engine=engine)
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "cache"}
    assert not [path for path in (tmp_path / "cache").rglob("*-written.*") if path.suffix != ".lock"]


@pytest.mark.parametrize(("engine", "bits"), [("openvino", 8), ("openvino", 4), ("torch", 4)])
def test_quantized_encoder_decoders_generate(tmp_path: Path, engine: Any, bits: Any) -> None:
    source = find_weights(save(tmp_path / "model", SEQ2SEQ["bart, absolute positions"], AutoModelForSeq2SeqLM))
    output = tmp_path / "small"
    found = quantize(source, rounding_of(source, WORDS), output, bits=bits, engine=engine)
    assert found.task == "seq2seq" and (found.calibrated_on > 0) is ((engine, bits) == ("openvino", 4))
    assert found.bytes_after == sum(path.stat().st_size for path in output.iterdir() if path.suffix in (".safetensors", ".bin"))
    assert found.bytes_after < 0.6 * found.bytes_before
    assert 0.9 < (found.after.worst_cosine or 0.0) < 0.9999999 and found.before.same_tokens == 1.0
    generator = upshift.Generator(str(output), quality="0.999")
    (answer,) = generator.generate([WORDS[0]], max_new_tokens=NEW)
    assert generator.race is not None and generator.race.chosen.label() == f"{engine} stored"
    if engine == "torch":
        expected = AutoModelForSeq2SeqLM.from_pretrained(output).eval().generate(
            torch.tensor(ids_of(WORDS[:1], str(output))), max_new_tokens=NEW, num_beams=1, do_sample=False, pad_token_id=0
        )  # fmt: skip
        assert answer.tokens == expected[0, 1:].tolist()
    else:
        assert len(answer.tokens) == NEW
        (output / "upshift_decoder.xml").unlink()
        with pytest.raises(RequestError, match="without .*safetensors or upshift_encoder.xml and upshift_decoder.xml"):
            upshift.Generator(str(output)).generate(["a"], max_new_tokens=2)


def test_a_trace_that_kept_a_value_is_refused() -> None:
    class Kept(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> Any:
            return (values * float(values.sum()),)

    with pytest.raises(RequestError, match="a trace of this model is wrong for other lengths or tokens"):
        convert(Kept(), (torch.ones(2),), (torch.arange(3.0),))


@pytest.mark.parametrize("precision", ["fp16-weights", *QUANTIZED])
def test_rounded_weights(made: dict[str, str], precision: str) -> None:
    prompts = ids_of(TEXTS[:1], made["llama"])
    plain, rounded = decoder_of(made["llama"], "openvino"), decoder_of(made["llama"], "openvino", precision)
    run(rounded, ids_of(TEXTS, made["llama"]), 3, GenerationOptions(max_new_tokens=NEW))  # rows come and go
    assert rounded.weight_bytes < 0.6 * plain.weight_bytes
    rounded.keep([])
    one, other = (decoder.admit(prompts)[0] for decoder in (plain, rounded))
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert {"fp16": 0.9999, "mixed": 0.999, "int8": 0.995, "int4": 0.8}[precision.removesuffix("-weights")] < cosine < 0.9999999
    for rows in (1, 8):  # more than before, from one token on: OpenVINO's 8-bit caches of one request gave NaN then
        rounded.keep([])
        rounded.admit([[token] for token in range(rows)])
        assert np.isfinite([rounded.step(np.arange(rows)) for _ in range(20)]).all()


@pytest.mark.parametrize("kind", ["gpt2", "opt", "mixtral, experts"])
def test_what_comes_first_keeps_16_bits(made: dict[str, str], kind: str) -> None:
    """Of matrices that are stored either way round, of a head that is the embedding, and beside experts."""
    prompts = ids_of(TEXTS, made[kind])
    kinds = ("fp32", "mixed-weights", "int8-weights")
    found = [decoder_of(made[kind], "openvino", precision).admit(prompts) for precision in kinds]
    print([1.0 - cosines(one, found[0]) for one in found[1:]])
    # Medians: rounding sends a few tokens to other experts.
    mixed, rounded = (1.0 - np.median(cosines(one, found[0])) for one in found[1:])
    assert 1e-7 < mixed < rounded
    assert mixed < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[65], [66, 67]]},
        {"suppress_tokens": [70, 71]},
        {"do_sample": True, "top_k": 1}, {"do_sample": True, "temperature": 1e-4, "top_p": 0.9},
    ],
)  # fmt: skip
def test_options_are_those_of_transformers(made: dict[str, str], options: dict[str, Any]) -> None:
    model = made["llama"]
    prompts = ids_of(TEXTS, model)
    read = read_options(read_defaults(find_weights(model)), {**options, "max_new_tokens": NEW})
    assert run(decoder_of(model, "torch"), prompts, 3, read) == by_transformers(model, prompts, **options)


def test_a_seed_gives_one_text_however_prompts_are_batched(made: dict[str, str]) -> None:
    decoder, prompts = decoder_of(made["llama"], "torch"), ids_of(TEXTS, made["llama"])
    options = GenerationOptions(max_new_tokens=NEW, do_sample=True, temperature=2.0, seed=7)
    alone = run(decoder, prompts, 1, options)
    assert run(decoder, prompts, 3, options) == alone
    assert run(decoder, prompts, 3, options.changed(seed=8)) != alone


def test_sampling_follows_the_probabilities(made: dict[str, str]) -> None:
    decoder, prompt = decoder_of(made["llama"], "torch"), ids_of(TEXTS[:1], made["llama"])[0]
    decoder.keep([])
    logits = decoder.admit([prompt])[0]
    options = GenerationOptions(do_sample=True, top_k=4, temperature=3.0)
    drawn = [GeneratedSequence(place, prompt, options, None).choose(logits) for place in range(2000)]
    likeliest = np.argsort(-logits)[:4]
    expected = np.exp(logits[likeliest] / 3.0) / np.exp(logits[likeliest] / 3.0).sum()
    shares = np.array([drawn.count(token) for token in likeliest]) / len(drawn)
    assert shares.sum() == 1.0 and np.abs(shares - expected).max() < 0.05


def test_generator_races_streams_chats_and_stops(made: dict[str, str]) -> None:
    generator = upshift.Generator(made["llama"], engine="openvino")
    found = generator.generate(TEXTS, max_new_tokens=NEW)
    assert generator.race is not None and not generator.race.recalled
    assert [run.setup.label() for run in generator.race.runs] == ["torch fp32", "openvino fp32"]
    assert [one.tokens for one in found] == by_transformers(made["llama"], ids_of(TEXTS, made["llama"]))
    assert {one.ending for one in found} == {"length"}
    assert "".join(generator.stream(TEXTS[1], max_new_tokens=NEW)) == found[1].text
    again = upshift.Generator(made["llama"], engine="openvino", chat=True)
    chats = again.generate(["hello", [{"role": "user", "content": "hello"}]], max_new_tokens=NEW)
    assert again.race is not None and chats[0] == chats[1] and chats[0].prompt_tokens == len("<user>hello<assistant>")
    stop = found[0].text[3:5]
    (stopped,) = generator.generate(TEXTS[:1], max_new_tokens=NEW, stop_strings=stop)
    assert stopped.ending == "stop" and stopped.text == found[0].text[: found[0].text.index(stop) + len(stop)]


def test_a_limit_of_time_is_held_by_fewer_rows(made: dict[str, str]) -> None:
    free = upshift.Generator(made["llama"], engine="torch", max_tpot_ms=1e6)
    assert len(free.generate(TEXTS, max_new_tokens=NEW)) == len(TEXTS)
    race = free.race
    assert race is not None and {run.setup.batch for run in race.runs} == {1, 2, 4, len(TEXTS)}  # the reference races alone
    assert all(run.first_seconds and run.step_seconds for run in race.runs)
    with pytest.raises(NothingFits, match=r"nearest is torch fp32 with a batch of \d: .* ms a token; allow more time"):
        upshift.Generator(made["llama"], engine="torch", max_tpot_ms=1e-6).generate(TEXTS, max_new_tokens=NEW)
    with pytest.raises(RequestError, match="--max-ttft-ms 0 is not possible; give milliseconds above 0"):
        upshift.Generator(made["llama"], max_ttft_ms=0)


def test_wrong_requests(made: dict[str, str], tmp_path: Path) -> None:
    model = made["llama"]
    generator = upshift.Generator(model, engine="torch")
    for options, said in (
        ({"num_beams": 4}, "num_beams.*the keys are"), ({"top_p": 2}, "top_p"), ({"max_new_tokens": 300}, "256 positions"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            generator.generate(["a text"], **options)
    with pytest.raises(RequestError, match="takes a list"):
        generator.generate("a text")
    with pytest.raises(RequestError, match="prompt 2 is empty"):
        generator.generate(["a", ""])
    with pytest.raises(RequestError, match="onnxruntime.*use one of torch, llamacpp, openvino"):
        upshift.Generator(model, engine="onnxruntime")
    BertModel(BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(RequestError, match="is a BertModel, which writes no text"):
        upshift.Generator(str(tmp_path / "bert"))


def test_a_model_that_reads_both_ways_is_refused(tmp_path: Path) -> None:
    """transformers computes the whole text again for every token: what a cache has kept would be another result."""
    config = BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    BertLMHeadModel(config).save_pretrained(tmp_path / "both")
    with pytest.raises(RequestError, match="BertLMHeadModel.*depend on the tokens behind it; use a model that reads"):
        upshift.Generator(str(tmp_path / "both"))
    config.is_decoder = True
    BertLMHeadModel(config).save_pretrained(tmp_path / "one")
    assert generation_task(find_weights(str(tmp_path / "one"))) == "generate"


def test_a_model_that_does_not_fit_is_not_loaded(made: dict[str, str]) -> None:
    for engine, said in (("torch", "one layer at a time takes"), ("openvino", "begins with transformers in fp32")):
        generator = upshift.Generator(made["llama"], engine=engine)
        cpu = generator.host.cpu
        assert cpu is not None
        generator.host = generator.host.changed(cpu=cpu.changed(free_memory_bytes=1000))
        with pytest.raises(NothingFits, match=said):
            generator.generate(["a text"])


def test_the_models_own_file_says_how_text_is_chosen(tmp_path: Path) -> None:
    model = save(tmp_path / "m", CONFIGS["llama"], do_sample=True, temperature=0.6, eos_token_id=[3, 4], transformers_version="5")
    source = find_weights(model)
    expected = GenerationOptions(do_sample=True, temperature=0.6, eos_token_id=(3, 4))
    assert read_options(read_defaults(source), {}).changed(seed=0) == expected
    (tmp_path / "m" / "generation_config.json").write_text('{"num_beams": 4, "num_return_sequences": 1, "top_k": 5}')
    with pytest.raises(RequestError, match=r"says num_beams=4, which Upshift does not do here; .* --set num_beams=1"):
        read_options(read_defaults(source), {})
    assert read_options(read_defaults(source), {"num_beams": 1}).top_k == 5
    assert read_options(read_defaults(source), {"num_beams": 1, "do_sample": False, "temperature": None}).do_sample is False
    assert read_options(read_defaults(find_weights(save(tmp_path / "n", CONFIGS["llama"]))), {"top_p": 0.5}).do_sample


def test_command_line(made: dict[str, str], tmp_path: Path, upshift: Command) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": text} for text in TEXTS] + [{"messages": [{"role": "user", "content": "hello"}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--engine", "torch", "--max-new-tokens", str(NEW)]
    files = ["--prompts", str(prompts), "--output", str(output)]
    done = upshift("generate", made["llama"], *files, *options, "--json")
    assert done.code == 0, done.err
    said, answers = json.loads(done.out), [json.loads(line) for line in output.read_text().splitlines()]
    assert said["prompts"] == said["generated"] == len(lines) and said["tokens"] == NEW * len(lines)
    assert [{name: answer[name] for name in line} for line, answer in zip(lines, answers, strict=True)] == lines
    expected = by_transformers(made["llama"], ids_of(TEXTS, made["llama"]))
    texts = Prompts(find_weights(made["llama"]))
    assert [answer["text"] for answer in answers[:-1]] == [texts.decode(tokens) for tokens in expected]
    streamed = upshift("generate", made["llama"], "--prompt", TEXTS[1], *options)
    assert streamed.out == texts.decode(expected[1]) + "\n", streamed.err
    wrong = upshift("generate", made["llama"], *files)
    assert wrong.code == 2 and "exists; give another name, or --overwrite" in wrong.err


def test_answers_go_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    answers = UnfinishedLines(output, 3, "this")
    answers.add([{"text": "one"}])
    with (tmp_path / "answers.jsonl.partial").open("a") as file:
        file.write('{"text": "of a block that was not no')
    answers.close()
    with pytest.raises(RequestError, match="another input, model or setup"):
        UnfinishedLines(output, 3, "that")
    again = UnfinishedLines(output, 3, "this")
    assert again.done == 1 and not output.exists()
    again.add([{"text": "two"}, {"text": "three"}])
    again.finish()
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["one", "two", "three"]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_forecast_is_the_roofline_of_its_setup(made: dict[str, str], tmp_path: Path) -> None:
    """Where memory is slow, seconds a token are bytes of the weights over its rate; where it is fast, FLOPs over theirs."""
    source = find_weights(made["llama"])
    measured = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1e15, memory_bytes_per_second=1e6),
        dispatch_seconds=0.0, first_touch_seconds_per_byte=None, base_resident_bytes=None, compiler=None, probe_seconds=0.0,
    )  # fmt: skip
    here = detect().cpu_alone()
    assert here.cpu is not None
    host = here.changed(measured=measured, cpu=here.cpu.changed(isa=("avx2",)))  # rounded weights compute in fp32 there
    setup = EngineSetup(engine="openvino", precision="fp32", threads=1, batch=1)
    count = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(made["llama"]).parameters())
    embedded = 260 * 64  # looked up, not read; the head is read
    says = forecast_generation(source, host, [1], 2)
    assert says(setup) == pytest.approx(1e6 / 4 / (count - embedded), rel=0.15)
    quarter, four = says(setup.changed(precision="int8-weights")), says(setup.changed(batch=4))
    assert quarter is not None and four is not None
    assert 1.5 < quarter / (says(setup) or 0.0) < 4.0 and four / (says(setup) or 0.0) == pytest.approx(4.0, rel=0.2)
    slow = measured.changed(cpu=Rates(fp32=1e9, memory_bytes_per_second=1e15))
    computed = forecast_generation(source, host.changed(measured=slow), [8], 1)(setup)
    assert computed == pytest.approx(1e9 / (2 * 8 * (count - 2 * embedded) + 2 * embedded), rel=0.15)
    texts = forecast_encoding(source, host.changed(measured=slow), [8, 8])(setup.changed(batch=16))
    assert texts == pytest.approx(1e9 / (2 * 8 * (count - 2 * embedded)), rel=0.15)
    seq2seq = find_weights(save(tmp_path, SEQ2SEQ["t5, relative positions"], AutoModelForSeq2SeqLM))
    assert forecast_generation(seq2seq, host, [10], 2)(setup) is None


@pytest.mark.parametrize(
    "line", ["[]", "plain", '{"text": "a"}', '{"prompt": 3}', '{"messages": []}', '{"messages": [{"role": "user"}]}']
)
def test_lines_that_are_no_prompt(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(RequestError, match="line 2 is no prompt"):
        list(read_prompts(tmp_path / "p.jsonl"))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 1), min_size=MIN_PREFIX_TOKENS),
    st.lists(st.lists(st.integers(0, 1), min_size=1), min_size=2, max_size=4),
)
def test_a_prefix_and_what_is_left_are_the_prompts(shared: list[int], tails: list[list[int]]) -> None:
    prompts = [shared + tail for tail in tails]
    prefix = common_prefix(prompts)
    assert len(prefix) >= len(shared) and all(prompt[: len(prefix)] == prefix and prompt != prefix for prompt in prompts)
    left = remaining_tokens(prompts, len(prefix))
    states = left.pad_states(np.array(prefix, dtype=np.int64)[None, None, :, None])[:, 0, :, 0]
    rows = np.concatenate([states, left.ids], axis=1)
    assert rows.shape == left.mask.shape and (np.diff(left.mask, axis=1) >= 0).all()
    assert [row[mask == 1].tolist() for row, mask in zip(rows, left.mask, strict=True)] == prompts
    for row, prompt, kept in zip(left.positions, prompts, left.prefix_tokens, strict=True):
        assert row[kept - len(prompt) :].tolist() == list(range(kept, len(prompt)))
    parts = list(left.chunks(lambda: 3 * len(prompts)))
    assert max(part.ids.size for part in parts) <= 3 * len(prompts)
    for of in (lambda one: one.ids, lambda one: one.positions):
        assert np.array_equal(np.concatenate([of(part) for part in parts], axis=1), of(left))
    assert common_prefix([[1] * (MIN_PREFIX_TOKENS - 1) + tail for tail in ([0], [1, 1])]) == []


@settings(max_examples=60)
@given(st.data())
def test_padding_places_every_token_where_it_would_be_alone(data: st.DataObject) -> None:
    """Rows come and go at random; each row's kept places are as many as its tokens, and its position is one more a step."""
    padding, lengths = Padding(), []
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["admit", "step", "keep"]))
        if what == "admit" or not lengths:
            new = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
            mask = np.array([[0] * (max(new) - length) + [1] * length for length in new])
            before = padding.mask.shape[1]
            dropped, left, right = padding.admit(mask)
            assert before - dropped + left == mask.shape[1] + right == padding.mask.shape[1] if before else not dropped
            lengths += new
        elif what == "step":
            assert (padding.step()[:, 0] == lengths).all()
            lengths = [length + 1 for length in lengths]
        else:
            kept = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
            padding.keep(kept)
            lengths = [lengths[row] for row in kept]
        assert padding.rows == len(lengths) and (padding.mask.sum(1) == lengths).all()
        assert all((np.diff(row) >= 0).all() for row in padding.mask)  # padding on the left, tokens behind


WORDS = [f"text {number} of words, and then {number * number} more" for number in range(24)]


@pytest.mark.parametrize(
    ("engine", "bits", "share"), [("openvino", 8, 0.5), ("openvino", 4, 0.4), ("torch", 8, 0.6), ("torch", 4, 0.5)]
)
def test_quantized_directories_generate(made: dict[str, str], tmp_path: Path, engine: Any, bits: Any, share: float) -> None:
    """The report says what a user sees: sizes of files, and texts that stay near; what it names loads the directory."""
    output = tmp_path / "small"
    source = find_weights(made["llama"])
    found = quantize(source, rounding_of(source, WORDS), output, bits=bits, engine=engine)
    assert (found.calibrated_on > 0) is ((engine, bits) == ("openvino", 4))
    assert found.bytes_after == sum(path.stat().st_size for path in output.iterdir() if path.suffix in (".safetensors", ".bin"))
    assert found.bytes_after < share * found.bytes_before
    assert found.before.worst_cosine == pytest.approx(1.0, abs=1e-6) and found.before.same_tokens == 1.0
    assert found.after.worst_cosine is not None and 0.5 < found.after.worst_cosine <= found.after.median_cosine  # type: ignore[operator]
    assert (found.after.median_cosine or 0.0) > (0.999 if bits == 8 else 0.9)
    assert json.loads((output / "upshift_quality.json").read_text())["after"]["setup"]["precision"] == "stored"
    generator = upshift.Generator(str(output), quality="0.999")
    (answer,) = generator.generate([WORDS[0]], max_new_tokens=NEW)
    assert generator.race is not None and generator.race.chosen.label() == f"{engine} stored" and not generator.race.runs
    if engine == "torch":
        assert [answer.tokens] == by_transformers(str(output), ids_of(WORDS[:1], made["llama"]))
    with pytest.raises(RequestError, match=f"stored for {engine}"):
        upshift.Generator(str(output), engine="torch" if engine == "openvino" else "openvino")


def test_quantize_on_the_command_line(made: dict[str, str], tmp_path: Path, upshift: Command) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    command = ["quantize", made["llama"], "--texts", tmp_path / "texts.txt"]
    done = upshift(*command, "--bits", "8", "--engine", "torch", "-o", tmp_path / "new")
    assert done.code == 0 and "8 bits, torch" in done.out and "loads with transformers" in " ".join(done.out.split())
    for options, said in (
        (["--bits", "3", "-o", str(tmp_path / "x")], "use one of 8, 4"),
        (["--bits", "8", "-o", str(tmp_path / "mine"), "--overwrite"], "exists"),
        (["--bits", "8", "--engine", "onnxruntime", "-o", str(tmp_path / "x")], "use one of torch, openvino"),
    ):
        wrong = upshift(*command, *options)
        assert wrong.code == 2 and said in wrong.err and "Traceback" not in wrong.err
    assert (tmp_path / "mine" / "file").read_text() == "kept"


def test_openvino_tells_nobody_that_it_is_used() -> None:
    """Its packages send usage data when they are imported, unless they believe to run in continuous integration."""
    code = (
        "import time, openvino_telemetry.backend.backend_ga4 as backend; told = []\n"
        "backend.GA4Backend.send = lambda self, message: told.append(message)\n"
        "from upshift.inference.openvino_runtime import core; core(); time.sleep(0.5); print(told)"
    )
    outside = {name: value for name, value in os.environ.items() if name not in ("CI", "NNCF_CI")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=outside, timeout=120)
    assert found.returncode == 0 and found.stdout.strip() == "[]", found.stdout + found.stderr
