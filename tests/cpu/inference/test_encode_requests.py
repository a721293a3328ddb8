"""Encoding that is asked for what cannot be, or for what would be lost: one line each, and never other rows."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.inference import registry
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.encoding.files import Rows, check_files, read_texts
from upshift.inference.encoding.model_config import read_encoding_config
from upshift.inference.encoding.run import Encoding
from upshift.inference.encoding.text_tokenizer import TextTokenizer
from upshift.inference.registry import EngineSetup
from upshift.inference.resumable_output import UnfinishedLines, UnfinishedOutput
from upshift.models.config import padding_of
from upshift.models.isolation.check import _first_length, measure_isolation
from upshift.models.source import find_model
from upshift.serving.engine.embedding import _expected_texts
from upshift.serving.messages import EngineRequest

SMALL = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXTS = ["one", "two words", "", "three of them", "x"]
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling")]
MAKERS = {  # what makes an engine's files
    "openvino": "upshift.inference.openvino_runtime:_save",
    "onnxruntime": "upshift.inference.encoding.engines.onnxruntime_engine:_export",
    "ctranslate2": "upshift.inference.encoding.engines.ctranslate2_engine:_convert",
}


def save(folder: Path, model: Any, **tokens: str) -> str:
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = registry.EngineFactory("torch_engine:TorchEngine", ("fp32",))
    alone = registry.ENGINES["torch"]._replace(factories={"encode": factory})
    monkeypatch.setattr(registry, "ENGINES", {"torch": alone})


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("tokens", [{}, {"pad_token": "<pad>"}])
@pytest.mark.parametrize("pad", [258, None, -1])
def test_scores_of_a_decoder_are_those_of_its_last_token(tmp_path: Path, pad: int | None, tokens: dict[str, str]) -> None:
    """It finds the last token by the config's padding, whatever the tokenizer's is; without one it takes a text at a time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, pad_token_id=None, num_labels=3, initializer_range=0.3)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.config.pad_token_id = pad
    encoder = upshift.Encoder(save(tmp_path, model, **tokens))
    texts = [text for text in TEXTS if text]
    with torch.inference_mode():
        expected = np.concatenate([model(torch.tensor([ids])).logits for ids in encoder.tokenizer.tokenize(texts)])
    assert np.abs(encoder.encode(texts) - expected).max() < 1e-5


@pytest.mark.usefixtures("no_race")
def test_longrope_on_both_sides_of_its_border_is_each_text_alone(tmp_path: Path) -> None:
    """A text of more tokens than the border would rotate those of all texts in its batch by other factors."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = transformers.Phi3Config(
        **SMALL, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=12,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.Phi3Model(config).eval()
    encoder = upshift.Encoder(save(tmp_path, model, pad_token="<pad>"))
    texts = ["a text of more than twelve tokens", "short", "twelve token", "another that is long enough", "x"]
    ids = encoder.tokenizer.tokenize(texts)
    assert sorted(len(row) > 12 for row in ids) == [False, False, False, True, True]
    with torch.inference_mode():
        expected = np.concatenate([model(torch.tensor([row])).last_hidden_state.mean(1) for row in ids])
        wrong = model(torch.tensor([ids[1] + [0] * (len(ids[0]) - 5), ids[0]])).last_hidden_state[0, :5].mean(0)
    assert np.abs(wrong.numpy() - expected[1]).max() > 1e-2, "in one batch it is another vector"
    assert np.abs(encoder.encode(texts) - expected).max() < 1e-5


@pytest.mark.usefixtures("no_race")
def test_a_text_that_is_too_short_for_its_model_is_refused(tmp_path: Path, upshift: Command) -> None:
    """Funnel halves the number of tokens between its blocks."""
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48}
    config = transformers.FunnelConfig(vocab_size=260, block_sizes=[1, 1, 1], **sizes)
    torch.manual_seed(0)
    model = transformers.FunnelModel(config).eval()
    with pytest.raises(RuntimeError):
        model(torch.tensor([[5, 6]]))
    encoder = Encoder(save(tmp_path, model, pad_token="<pad>"))
    with pytest.raises(RequestError, match=r"text 2, .ab., has 2 tokens, and .* computes texts of \d or more; make it"):
        encoder.encode(["a longer text", "ab"])
    with torch.inference_mode():
        expected = model(torch.tensor(encoder.tokenizer.tokenize(["a longer text"]))).last_hidden_state.mean(1)
    assert np.abs(encoder.encode(["a longer text"]) - expected.numpy()).max() < 1e-5
    (tmp_path / "texts.txt").write_text("a longer text\n" * 5000 + "ab\n" + "a longer text\n")
    refused = upshift("encode", tmp_path, "--input", tmp_path / "texts.txt", "--output", tmp_path / "rows.npy")
    assert refused.code == 2 and "text 5001, 'ab', has 2 tokens" in refused.err
    assert not list(tmp_path.glob("rows*")), "before anything is computed"
    made_up = _expected_texts(EngineRequest(model=str(tmp_path), prompt_length=1), encoder.tokenizer.shortest)
    assert len(encoder.tokenizer.tokenize(made_up)) == len(made_up)


@pytest.mark.parametrize("block_sizes", [[1, 1], [2, 2, 2, 2], [1, 1, 1, 1, 1]])
def test_the_shortest_text_is_that_of_all_layers(block_sizes: list[int]) -> None:
    """A copy with fewer layers pools less often."""
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48}
    config = transformers.FunnelConfig(vocab_size=260, block_sizes=block_sizes, **sizes)
    model = transformers.FunnelModel(config).eval()
    refused = []
    for length in range(1, 33):
        try:
            model(torch.ones(1, length, dtype=torch.long))
        except RuntimeError:
            refused.append(length)
    assert measure_isolation(config, transformers.FunnelModel, None).shortest == max(refused, default=0) + 1


def test_an_error_that_is_not_of_the_length_makes_no_text_too_short() -> None:
    def fail(length: int) -> None:
        raise RuntimeError("out of luck")

    assert _first_length(fail) is None


def test_padding_of_a_config_without_a_vocabulary() -> None:
    assert padding_of(transformers.CanineConfig(pad_token_id=0)) == 0
    assert padding_of(transformers.LlamaConfig(**SMALL, pad_token_id=260)) is None
    assert padding_of(transformers.LlamaConfig(**SMALL, pad_token_id=None)) is None


BESIDE = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


# The files of Marian have no table of positions, and FSMT's encoder is a module that is no model.
@pytest.mark.parametrize("kind", ["T5Model", "T5EncoderModel", "BartModel", "MarianMTModel", "FSMTForConditionalGeneration"])
def test_an_encoder_decoder_gives_its_encoders_states(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    config: Any = transformers.T5Config(vocab_size=260, d_model=32, **sizes)
    if kind == "BartModel":
        config = transformers.BartConfig(vocab_size=260, **BESIDE)
    if kind == "MarianMTModel":
        config = transformers.MarianConfig(vocab_size=260, decoder_start_token_id=0, forced_eos_token_id=2, **BESIDE)
    if kind == "FSMTForConditionalGeneration":
        config = transformers.FSMTConfig(src_vocab_size=260, tgt_vocab_size=260, langs=["en", "de"], **BESIDE)
    model = getattr(transformers, kind)(config).eval()
    source = find_model(save(tmp_path, model))
    recipe = read_encoding_config(source)
    ids = TextTokenizer(source, recipe).tokenize(TEXTS)
    found = Encoding(source, recipe, EngineSetup(engine="torch", threads=1, batch=32, precision="fp32"), ids, pad=0).rows(ids)
    with torch.inference_mode():
        expected = [model.get_encoder()(torch.tensor([row]))[0][0].mean(0).numpy() if row else np.zeros(32) for row in ids]
    assert np.abs(found - np.stack(expected)).max() < 1e-5


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("said", "tokenizer", "read"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 60, "do_lower_case": True}}, {}, str.lower),
        (
            {"config_sentence_transformers.json": {"prompts": {"q": "Query: "}, "default_prompt_name": "q"}}, {},
            lambda text: f"Query: {text}",
        ),
        ({"sentence_roberta_config.json": {"max_seq_length": 5}}, {}, lambda text: text[:5]),
        ({"sentence_bert_config.json": {"max_seq_length": 9}}, {"model_max_length": 5}, lambda text: text[:9]),
        ({"sentence_bert_config.json": {"max_seq_length": 5}}, {"truncation_side": "left"}, lambda text: text[-5:]),
    ],
    ids=["lower case", "prompt", "first years", "longer than the tokenizer's", "left"],
)  # fmt: skip
def test_texts_are_read_as_sentence_transformers_does(tmp_path: Path, said: Any, tokenizer: Any, read: Any) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL, initializer_range=0.3)).eval()
    directory = save(tmp_path / "model", model, pad_token="!", **tokenizer)
    files = {
        "modules.json": [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in MODULES],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True}, **said,
    }  # fmt: skip
    (tmp_path / "model" / "1_Pooling").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
    texts = ["Upper and lower", "The Same"]
    ids = transformers.AutoTokenizer.from_pretrained(directory)([read(text) for text in texts], truncation=False).input_ids
    with torch.inference_mode():
        expected = [model(torch.tensor([row]))[0][0].mean(0).numpy() for row in ids]
    assert np.abs(upshift.Encoder(directory).encode(texts) - np.stack(expected)).max() < 1e-5


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("can_reserve", [True, False])
def test_rows_have_their_room_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_reserve: bool) -> None:
    """Where a file system has no call for it, too."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not can_reserve:
        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    rows = Rows(tmp_path / "rows.npy", 100_000, "this")
    rows.add(np.ones((2, 8), dtype=np.float32))
    partial = tmp_path / "rows.npy.partial"
    assert partial.stat().st_blocks * 512 >= partial.stat().st_size > 3_200_000
    assert np.load(partial)[:3, 0].tolist() == [1, 1, 0]
    with files_of_at_most(1_000_000), pytest.raises(JobFailed, match="more.npy could not be written: .*; nothing is kept of it"):
        Rows(tmp_path / "more.npy", 100_000, "this").add(np.ones((2, 8), dtype=np.float32))
    assert not (tmp_path / "more.npy.partial").exists()


def test_answers_on_a_full_disk(tmp_path: Path) -> None:
    answers = UnfinishedLines(tmp_path / "answers.jsonl", 9, "this")
    answers.add([{"text": "one"}])
    with files_of_at_most(1000), pytest.raises(JobFailed, match=r"its first 1 rows are safe in .*partial, and the same command"):
        answers.add([{"text": "a" * 2000}])
    answers.close()
    assert UnfinishedLines(tmp_path / "answers.jsonl", 9, "this").done == 1


def test_an_output_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Two of the same command wrote their lines among each other's."""
    first = UnfinishedLines(tmp_path / "answers.jsonl", 2, "this")
    with pytest.raises(RequestError, match=r"answers.jsonl is being written by process \d+ on .*; wait until that ends"):
        UnfinishedLines(tmp_path / "answers.jsonl", 2, "this")
    first.close()
    assert not list(tmp_path.iterdir())
    second = UnfinishedLines(tmp_path / "answers.jsonl", 2, "this")
    second.add([{"text": "one"}, {"text": "two"}])
    second.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(("engine", "maker"), MAKERS.items())
def test_two_processes_fill_one_cache(model: str, engine: Any, maker: str, monkeypatch: Any, tmp_path: Path) -> None:
    """As two threads here: each file is made once, by who comes first, and the other finds it whole."""
    if not registry.is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    module, name = maker.split(":")
    make, made = getattr(import_module(module), name), list[str]()

    def slowly(*given: Any) -> Any:
        made.append(engine)
        time.sleep(0.3)  # as long as the other takes to come as far
        return make(*given)

    monkeypatch.setattr(f"{module}.{name}", slowly)
    source = find_model(model)
    recipe, setup = read_encoding_config(source), EngineSetup(engine=engine, precision="fp32", threads=1, batch=64)
    ids = [[1, 2, 3], [4, 5, 6, 7]]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda _: Encoding(source, recipe, setup, ids, pad=0).rows(ids), range(2)))
    assert made == [engine] and np.array_equal(*rows)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody writes to")
def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a")
    with pytest.raises(RequestError, match="--output /proc/rows.npy: /proc takes no files"):
        check_files(tmp_path / "texts.txt", Path("/proc/rows.npy"))


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(RequestError, match="is the input itself, which would be lost; give another name"):
        check_files(tmp_path / "texts.jsonl", tmp_path / "texts.jsonl", overwrite=True)


@pytest.mark.parametrize(("name", "content"), [("t.txt", "one\ntwo\n"), ("t.jsonl", '{"text": "one"}\n{"text": "two"}\n')])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(read_texts(tmp_path / name)) == ["one", "two"]
    (tmp_path / name).write_text("", encoding="utf-8-sig")
    with pytest.raises(RequestError, match="is empty; write a text a line"):
        check_files(tmp_path / name, tmp_path / "rows.npy")


@pytest.mark.parametrize("line", ['{"text": "a\\ud800b"}', "[" * 200_000])
def test_lines_that_no_tokenizer_takes(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(RequestError, match='line 2 is no JSON object with a "text" of Unicode characters'):
        list(read_texts(tmp_path / "t.jsonl"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    return save(tmp_path_factory.mktemp("model"), model, pad_token="<pad>", unk_token="!")


@pytest.mark.parametrize(
    ("texts", "said"), [([None], "text 1 is None"), (["a", "\ud800"], "text 2 is "), (None, "given None"), ({"a": 1}, "given {")]
)
def test_what_are_no_texts(model: str, texts: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        upshift.Encoder(model).encode(texts)


@pytest.mark.parametrize("limit", ["max_latency_ms", "race_seconds"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_limits_are_finite(model: str, limit: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"--{limit.replace('_', '-')} {value:g} is not possible"):
        upshift.Encoder(model, **{limit: value})


@pytest.mark.usefixtures("no_race")
def test_rows_go_on_with_the_same_recipe_alone(model: str, tmp_path: Path, upshift: Command, monkeypatch: Any) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    command = ("encode", model, "-i", tmp_path / "texts.txt", "-o", tmp_path / "rows.npy", "--json")

    def stop(*_: Any) -> None:
        raise RequestError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedOutput, "finish", stop)
        assert "stopped" in upshift(*command).err
    said = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (Path(model) / "1_Pooling").mkdir()
    (Path(model) / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    (Path(model) / "modules.json").write_text(json.dumps(said))
    wrong = upshift(*command)
    assert wrong.code == 2 and "unfinished output of another input, model or setup" in " ".join(wrong.err.split())
    (Path(model) / "modules.json").unlink()
    done = upshift(*command)
    assert done.code == 0 and json.loads(done.out)["encoded"] == 0, done.err


def test_a_line_of_texts_holds_nothing_that_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": "b", "prompt": "query: "}\n')
    with pytest.raises(RequestError, match="line 2 has a key 'prompt', which is not used"):
        list(read_texts(tmp_path / "t.jsonl"))


def test_a_file_of_prompts_is_a_file_of_texts(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"prompt": "b"}\n{"prompt": 1}\n')
    texts = read_texts(tmp_path / "t.jsonl")
    assert [next(texts), next(texts)] == ["a", "b"]
    with pytest.raises(RequestError, match='line 3 is no JSON object with a "text" of Unicode characters'):
        next(texts)
