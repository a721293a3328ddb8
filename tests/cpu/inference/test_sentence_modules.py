"""Sparse vectors (SPLADE), a vector for each token (ColBERT) and Dense modules: as sentence-transformers computes them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from test_encode import MINILM, READY
from test_encode_requests import no_race as no_race
from transformers import AutoTokenizer

from upshift.errors import RequestError
from upshift.inference import registry
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.encoding.run import Encoding
from upshift.inference.registry import EngineSetup

TEXTS = ["the cat, sat.", "dog", "", "a b c " * 40, "Who? ! it"]
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 30522,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
EXPANSIONS: dict[str, Any] = {
    "none": None,
    "unseen": {"strategy": "fixed", "attend": False, "length": 16},
    "seen": {"strategy": "min", "attend": True, "length": 16},
}


def saved(folder: Path, kind: str, expansion: str = "none", **pooling: str) -> Path:
    """A tiny model of one kind, saved by sentence-transformers."""
    torch.manual_seed(0)
    base = transformers.BertForMaskedLM if kind == "sparse" else transformers.BertModel
    base(transformers.BertConfig(**SMALL)).save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder / "base")
    path = str(folder / "base")
    if kind == "sparse":
        modules: Any = [Transformer(path, transformer_task="fill-mask"), SpladePooling(**pooling)]
        model: Any = SparseEncoder(modules=modules)
    elif kind == "dense":
        model = SentenceTransformer(modules=[Transformer(path), Pooling(32, "mean"), Dense(32, 16), Normalize()])
    else:
        by_token = {"module_input_name": "token_embeddings"}
        backbone = Transformer(path, query_expansion=EXPANSIONS[expansion], document_length=20)
        narrow = Dense(32, 16, bias=False, activation_function=torch.nn.Identity(), **by_token)
        modules = [backbone, narrow, MultiVectorMask(list(string.punctuation)), Normalize(**by_token)]
        model = MultiVectorEncoder(modules=modules, prompts={"query": "find : ", "document": "text : "})
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def rows_of(encoder: Encoder, engine: Any) -> np.ndarray:
    if not registry.is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    ids = encoder.tokenizer.tokenize(TEXTS)
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=128)
    return Encoding(encoder.source, encoder.config, setup, ids, pad=encoder.tokenizer.pad).rows(ids)


@pytest.mark.parametrize(
    ("engine", "pooling"),
    [*((name, {}) for name in READY), ("torch", {"pooling_strategy": "sum", "activation_function": "log1p_relu"})],
)
def test_sparse_vectors(engine: Any, pooling: dict[str, str], tmp_path: Path) -> None:
    folder = saved(tmp_path, "sparse", **pooling)
    expected = SparseEncoder(str(folder)).encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    found = rows_of(Encoder(str(folder)), engine)
    assert 0 < (expected > 0).mean() < 1
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", READY)
def test_a_vector_for_each_token(engine: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path, "tokens")
    expected = MultiVectorEncoder(str(folder)).encode_document(TEXTS)
    np.testing.assert_allclose(rows_of(Encoder(str(folder), task="document"), engine), np.concatenate(expected), atol=1e-5)


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_queries_and_documents(expansion: str, tmp_path: Path) -> None:
    """With their prompts, lengths and skipped words, and queries that are filled up."""
    folder = saved(tmp_path, "tokens", expansion)
    theirs = MultiVectorEncoder(str(folder))
    calls: Any = {None: theirs.encode, "query": theirs.encode_query, "document": theirs.encode_document}
    for task, encode in calls.items():
        found = Encoder(str(folder), task=task).encode(TEXTS)
        for ours, expected in zip(found, encode(TEXTS), strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.usefixtures("no_race")
def test_dense_modules(tmp_path: Path) -> None:
    folder = saved(tmp_path, "dense")
    np.testing.assert_allclose(Encoder(str(folder)).encode(TEXTS), SentenceTransformer(str(folder)).encode(TEXTS), atol=1e-5)


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_of_lists(suffix: str, tmp_path: Path, upshift: Command) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n")
    rows = {}
    for kind in ("sparse", "tokens"):
        output = tmp_path / f"{kind}{suffix}"
        folder = saved(tmp_path / kind, kind)
        answer = upshift("encode", str(folder), "-i", str(texts), "-o", str(output), "--engine", "torch")
        assert answer.code == 0, answer.err
        if suffix == ".jsonl":
            rows[kind] = [json.loads(line) for line in output.read_text().splitlines()]
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            rows[kind] = parquet.read_table(output).to_pylist()
    expected = SparseEncoder(str(tmp_path / "sparse" / "model")).encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    for row, weights in zip(rows["sparse"], expected, strict=True):
        found = np.zeros_like(weights)
        found[row["index"]] = row["value"]
        np.testing.assert_allclose(found, weights, atol=1e-5)
    matrices = MultiVectorEncoder(str(tmp_path / "tokens" / "model")).encode(TEXTS)
    for row, matrix in zip(rows["tokens"], matrices, strict=True):
        np.testing.assert_allclose(row["vectors"], matrix, atol=1e-5)
    wrong = upshift("encode", str(folder), "-i", str(texts), "-o", str(tmp_path / "x.npy"), "--engine", "torch")
    assert wrong.code == 2 and "rows that differ in length" in wrong.err.replace("\n", " ")


def test_what_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "tokens")
    with pytest.raises(RequestError, match="give query or document"):
        Encoder(str(folder), task="passage")  # type: ignore[arg-type]
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_type": "ColBERT"}))
    with pytest.raises(RequestError, match=r"was saved by PyLate; save it once .* MultiVectorEncoder\("):
        Encoder(str(folder))
    sparse = saved(tmp_path / "other", "sparse")
    config = sparse / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["BertModel"]}))
    with pytest.raises(RequestError, match=r"takes the logits of a \.\.\.ForMaskedLM"):
        Encoder(str(sparse))
