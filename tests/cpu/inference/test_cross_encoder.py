"""Pairs of texts have the scores of sentence-transformers' CrossEncoder, by every engine, the command and Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from command import Command
from test_encode import MINILM, READY
from test_encode_requests import no_race as no_race
from transformers import AutoTokenizer

from upshift.cli.encode import command
from upshift.errors import RequestError
from upshift.inference import registry
from upshift.inference.encoding.cross_encoder import CrossEncoder
from upshift.inference.encoding.model_config import read_pair_config
from upshift.inference.encoding.run import Encoding
from upshift.inference.encoding.text_pair import Pair
from upshift.inference.encoding.text_tokenizer import TextTokenizer
from upshift.inference.registry import EngineSetup
from upshift.models.source import find_model

PAIRS = [("who sat?", "The cat sat."), ("", ""), ("a " * 90, "b " * 40), ("a", "the [SEP] token " * 20), ("x", "y")]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 30522}


def made(folder: Path, kind: str, labels: int = 1, **config: Any) -> Path:
    """A tiny classifier with MiniLM's tokenizer, and weights so large that scores differ."""
    torch.manual_seed(0)
    if kind == "bert":  # is told which text a token is of
        options = transformers.BertConfig(**SMALL, num_labels=labels, max_position_embeddings=64, initializer_range=0.4)
        model: Any = transformers.BertForSequenceClassification(options)
    else:
        sizes = {"vocab_size": 30522, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64}
        options = transformers.DistilBertConfig(**sizes, num_labels=labels, initializer_range=0.4)
        model = transformers.DistilBertForSequenceClassification(options)
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    names = {"bert": ["input_ids", "token_type_ids", "attention_mask"], "distilbert": ["input_ids", "attention_mask"]}[kind]
    AutoTokenizer.from_pretrained(MINILM, model_input_names=names).save_pretrained(folder)
    return folder


def theirs(folder: Path) -> np.ndarray:
    return np.asarray(sentence_transformers.CrossEncoder(str(folder)).predict(PAIRS))


@pytest.mark.parametrize("engine", READY)
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_engines_give_the_scores_of_sentence_transformers(kind: str, engine: Any, tmp_path: Path) -> None:
    if not registry.is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    source = find_model(str(made(tmp_path, kind)))
    config = read_pair_config(source)
    tokenizer = TextTokenizer(source, config)
    assert tokenizer.has_segments == (kind == "bert")
    config = config.changed(segments=tokenizer.has_segments)
    ids = tokenizer.tokenize([Pair(*pair) for pair in PAIRS])
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=128)
    found = Encoding(source, config, setup, ids, pad=tokenizer.pad).rows(ids)
    expected = theirs(tmp_path)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (3, {}),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}),
    ],
)
def test_the_files_say_the_activation(labels: int, options: dict[str, Any], tmp_path: Path) -> None:
    folder = made(tmp_path, "bert", labels, **options)
    ours = CrossEncoder(str(folder), engine="torch")
    np.testing.assert_allclose(ours.predict(PAIRS), theirs(folder), atol=1e-5)
    if labels > 1:
        with pytest.raises(RequestError, match="has 3 labels"):
            ours.rank("x", ["y"])


@pytest.mark.usefixtures("no_race")
def test_saved_by_sentence_transformers(tmp_path: Path) -> None:
    """With a prompt, which stands before the first text, and the order of a rank."""
    plain = sentence_transformers.CrossEncoder(str(made(tmp_path / "plain", "bert")), prompts={"q": "find: "})
    plain.default_prompt_name = "q"
    plain.save_pretrained(str(tmp_path / "saved"))
    ours = CrossEncoder(str(tmp_path / "saved"), engine="torch")
    np.testing.assert_allclose(ours.predict(PAIRS), theirs(tmp_path / "saved"), atol=1e-5)
    documents = [pair[1] for pair in PAIRS]
    expected = plain.rank("who?", documents, top_k=3, return_documents=True)
    found = ours.rank("who?", documents, top_k=3, return_documents=True)
    assert [(one["corpus_id"], one["text"]) for one in found] == [(one["corpus_id"], one["text"]) for one in expected]
    np.testing.assert_allclose([one["score"] for one in found], [one["score"] for one in expected], atol=1e-5)
    assert ours.predict([]).shape == (0,)


@pytest.mark.usefixtures("no_race")
def test_pairs_of_a_file_and_texts_for_a_query(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "bert")
    scores = {}
    for number, (first, second) in enumerate((("query", "document"), ("text", "text_pair"))):
        file = tmp_path / f"pairs{number}.jsonl"
        file.write_text("".join(json.dumps({first: "who?", second: pair[1]}) + "\n" for pair in PAIRS))
        scores[first] = encoded(folder, file, tmp_path / f"{number}.npy")
    file = tmp_path / "texts.txt"
    file.write_text("".join(pair[1] + "\n" for pair in PAIRS))
    scores["option"] = encoded(folder, file, tmp_path / "q.npy", query="who?")
    expected = sentence_transformers.CrossEncoder(str(folder)).predict([("who?", pair[1]) for pair in PAIRS])
    for found in scores.values():
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


def encoded(folder: Path, file: Path, output: Path, **more: Any) -> np.ndarray:
    command(str(folder), file, output, engine="torch", **more)
    rows: np.ndarray = np.load(output)
    return rows


@pytest.mark.parametrize(
    ("line", "query", "words"),
    [
        ('{"query": "a"}', None, "line 2 is no pair of texts"),
        ('{"query": "a", "document": 7}', None, "line 2 is no pair of texts"),
        ('{"query": "a", "document": "b", "id": 1}', None, "line 2 is no pair of texts"),
        ('{"query": "a", "document": "b"}', "c", "has pairs of texts already; leave --query out"),
    ],
)
def test_wrong_pairs_are_refused(line: str, query: str | None, words: str, tmp_path: Path, upshift: Command) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"query": "a", "document": "b"}\n' + line + "\n")
    options = [] if query is None else ["--query", query]
    folder = made(tmp_path / "model", "bert")
    answer = upshift("encode", str(folder), "-i", str(file), "-o", str(tmp_path / "x.npy"), "--engine", "torch", *options)
    assert answer.code == 2 and words in answer.err.replace("\n", " ")


def test_models_that_score_no_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a BertModel; pairs of texts are scored by a cross-encoder"):
        CrossEncoder(str(MINILM))
    folder = made(tmp_path, "bert", sentence_transformers={"activation_fn": "theirs.Function"})
    with pytest.raises(RequestError, match="Python code that Upshift does not run"):
        CrossEncoder(str(folder))


@pytest.mark.parametrize("pairs", ["text", [("a",)], ["ab"], [("a", 7)], None, ("a", "b")])
def test_what_is_no_list_of_pairs(pairs: Any, tmp_path: Path) -> None:
    ours = CrossEncoder(str(made(tmp_path, "bert")), engine="torch")
    with pytest.raises(RequestError, match=r"use predict\(\[\(query, document\)\]\)|give a list of pairs of two texts"):
        ours.predict(pairs)
