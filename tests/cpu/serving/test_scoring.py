"""/rerank and /score in the forms of Cohere, Jina, TEI and vLLM, with the scores of a cross-encoder or the cosine of vectors."""

from __future__ import annotations

import asyncio
import base64
import queue
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from test_serving_parts import of_several

from upshift.errors import RequestError
from upshift.inference import registry
from upshift.inference.tokenizer import load_tokenizer
from upshift.inference.weights import find_weights
from upshift.serving.app import Server, make_app
from upshift.serving.engine.embedding import serve_embeddings
from upshift.serving.engine.main import _select_engine
from upshift.serving.engine_process import Vectors
from upshift.serving.messages import Embed, EngineRequest, Heartbeat, Ready, Vector
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.training.data.tokenizer import train_byte_level_bpe

DOCUMENTS = ["a dog", "the cat sat", "", "green"]


class Scorer:
    """An engine whose score of a pair is the second text's length, or whose vector of a text is that length and 1."""

    pid, state, in_flight, heartbeat = 1, "ready", 0, Heartbeat(live=0, waiting=0, resident_bytes=5)

    def __init__(self, task: Any) -> None:
        self.ready = Ready(task=task, setup="", rows=4, cache_tokens=None, positions=None, resident_bytes=5, seconds={})
        self.asked: list[Embed] = []

    async def vectors(self, request: Embed) -> Vectors:
        self.asked.append(request)
        rows = [[len(text)] for _, text in request.pairs] or [[len(text), 1] for text in request.texts]
        return Vectors([base64.b64encode(np.array(row, dtype="<f4").tobytes()).decode() for row in rows], tokens=9)


def ask(path: str, engine: Scorer, *others: Scorer, **body: Any) -> httpx2.Response:
    metrics = Metrics()
    engines = {"m" + "+" * number: of_several(one) for number, one in enumerate((engine, *others))}
    app = make_app(Server(ModelPool(engines, metrics), metrics))

    async def post() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return await client.post(path, json=body)

    return asyncio.run(post())


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("documents", [DOCUMENTS, [{"text": text} for text in DOCUMENTS]])
def test_documents_by_their_scores(path: str, documents: list[Any]) -> None:
    found = ask(path, Scorer("score"), model="m", query="who?", documents=documents, top_n=3, rank_fields=["text"]).json()
    order = [(one["index"], one["relevance_score"], one["document"]["text"]) for one in found["results"]]
    assert order == [(1, 11.0, "the cat sat"), (0, 5.0, "a dog"), (3, 5.0, "green")]
    assert found["model"] == "m" and found["usage"] == {"prompt_tokens": 9, "total_tokens": 9} and found["id"]
    bare = ask(path, Scorer("score"), query="who?", documents=documents, return_documents=False).json()["results"]
    assert [set(one) for one in bare] == [{"index", "relevance_score"}] * 4


def test_texts_in_the_form_of_tei() -> None:
    engine = Scorer("score")
    found = ask("/rerank", engine, query="who?", texts=DOCUMENTS, raw_scores=True, return_text=True, truncate=True).json()
    assert found[0] == {"index": 1, "score": 11.0, "text": "the cat sat"} and len(found) == 4
    assert engine.asked == [Embed(texts=(), pairs=tuple(("who?", text) for text in DOCUMENTS), raw=True)]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_in_the_form_of_vllm(names: tuple[str, str]) -> None:
    first, second = names
    one = ask("/score", Scorer("score"), model="m", **{first: "q", second: DOCUMENTS}).json()
    many = ask("/v1/score", Scorer("score"), model="m", **{first: ["q"] * 4, second: DOCUMENTS}).json()
    for found in (one, many):
        assert [row["score"] for row in found["data"]] == [5.0, 11.0, 0.0, 5.0] and found["object"] == "list"
        assert [(row["index"], row["object"]) for row in found["data"]] == [(index, "score") for index in range(4)]


def test_embeddings_are_compared_by_their_cosine() -> None:
    engine = Scorer("encode")
    found = ask("/score", engine, text_1=["xx", "y"], text_2=["xxx", "xx"]).json()["data"]
    vectors = torch.tensor([[2.0, 1], [1, 1]]), torch.tensor([[3.0, 1], [2, 1]])
    np.testing.assert_allclose([row["score"] for row in found], torch.cosine_similarity(*vectors), atol=1e-6)
    assert engine.asked[0].texts == ("xx", "xxx", "y"), "each text once"
    best = ask("/rerank", engine, query="xx", documents=["xxxxxxxx", "xx"]).json()["results"][0]
    assert best["index"] == 1 and abs(best["relevance_score"] - 1) < 1e-6


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "q"}, "give either documents or texts"),
        ("/rerank", {"query": "q", "texts": ["a"], "documents": ["a"]}, "give either documents or texts"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "texts": ["a"], "truncate": False}, "truncate"),
        ("/rerank", {"query": "q", "documents": ["a"], "max_chunks": 3}, "max_chunks"),
        ("/score", {"text_1": "a"}, "give text_1 and text_2"),
        ("/score", {"text_1": "a", "documents": "b", "text_2": "c"}, "give text_1 and text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3"),
    ],
)
def test_wrong_bodies(path: str, body: dict[str, Any], words: str) -> None:
    found = ask(path, Scorer("score"), **body)
    assert found.status_code == 400 and words in found.json()["error"]["message"]


def test_other_models_are_named_their_addresses() -> None:
    assert "answers at /v1/chat/completions" in ask("/score", Scorer("generate"), text_1="a", text_2="b").text
    assert "answers at /rerank and /score" in ask("/v1/embeddings", Scorer("score"), model="m", input="a").text


def cross_encoder(folder: Path, labels: int = 1) -> str:
    tokenizer = train_byte_level_bpe(["the cat sat on a mat and a dog ran"] * 9, 300)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320}
    options = transformers.BertConfig(**small, num_labels=labels, max_position_embeddings=64, initializer_range=0.4)
    transformers.BertForSequenceClassification(options).save_pretrained(folder)
    return str(folder)


def test_an_engine_scores_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the activation, several requests at once, by the function that the engine's process chooses."""
    factory = registry.EngineFactory("torch_engine:TorchEngine", ("fp32",))
    alone = registry.ENGINES["torch"]._replace(factories={"encode": factory})
    monkeypatch.setattr(registry, "ENGINES", {"torch": alone})  # nothing to race
    request = EngineRequest(model=cross_encoder(tmp_path), engine="torch", prompt_length=8)
    pairs = [("who?", text) for text in DOCUMENTS]
    inbox: queue.Queue[Any] = queue.Queue()
    said: list[Any] = []
    for number in (1, 2):
        inbox.put(Embed(id=number, texts=(), pairs=tuple(pairs), raw=number == 2))
    tokens = load_tokenizer(find_weights(request.model))(DOCUMENTS[0], add_special_tokens=False).input_ids
    beginning = load_tokenizer(find_weights(request.model)).decode(tokens[:1])
    long_pairs = [("who?", DOCUMENTS[0]), ("who?", beginning)]
    inbox.put(Embed(id=3, texts=(), pairs=tuple(long_pairs), max_document_tokens=1))

    def tell(values: list[Any]) -> None:
        said.extend(values)
        if inbox.empty():
            inbox.put(None)

    run = _select_engine(find_weights(request.model), request)
    assert run.func is serve_embeddings
    run(request, inbox, tell)
    assert said[0].task == "score"
    scores = {number: list[float]() for number in (1, 2, 3)}
    for vector in said:
        if isinstance(vector, Vector):
            scores[vector.id].append(float(np.frombuffer(base64.b64decode(vector.row), dtype="<f4")[0]))
    theirs = sentence_transformers.CrossEncoder(request.model)
    assert len(tokens) > 1 and scores[3][0] == pytest.approx(scores[3][1], abs=1e-5) != pytest.approx(scores[1][0], abs=1e-5)
    np.testing.assert_allclose(scores[1], theirs.predict(pairs), atol=1e-5)
    np.testing.assert_allclose(scores[2], theirs.predict(pairs, activation_fn=torch.nn.Identity()), atol=1e-5)


def test_a_classifier_of_several_labels_is_not_served(tmp_path: Path) -> None:
    request = EngineRequest(model=cross_encoder(tmp_path, labels=3))
    with pytest.raises(RequestError, match="a cross-encoder with one label"):
        _select_engine(find_weights(request.model), request)


def test_embeddings_in_the_forms_of_cohere_and_tei() -> None:
    engine = Scorer("encode")
    body = {"texts": ["abc", "d"], "input_type": "search_query", "embedding_types": ["float", "base64"], "output_dimension": 2}
    found = ask("/v2/embed", engine, model="m", **body).json()
    assert found["embeddings"]["float"] == [[3.0, 1.0], [1.0, 1.0]] and len(found["embeddings"]["base64"]) == 2
    assert found["meta"]["billed_units"] == {"input_tokens": 9} and found["texts"] == ["abc", "d"] and found["id"]
    plain = ask("/embed", engine, inputs=["abc", "d"], normalize=False).json()
    assert plain == [[3.0, 1.0], [1.0, 1.0]]
    np.testing.assert_allclose(ask("/embed", engine, inputs="abc").json(), [[3 / 10**0.5, 1 / 10**0.5]])
    assert [request.dimensions for request in engine.asked] == [2, None, None]
    for path, wrong in (
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}),
        ("/embed", {"inputs": "a", "truncate": False}),
    ):
        refused = ask(path, engine, **wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"], refused.text


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "/v1/completions": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"}, "/v1/responses": {"input": "x"}, "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/rerank": {"query": "x", "documents": ["x"]}, "/score": {"text_1": "x", "text_2": "x"}, "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]}, "/v2/embed": {"texts": ["x"]}, "/embed": {"inputs": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_the_only_model_is_meant_where_none_is_named(path: str, model: dict[str, Any]) -> None:
    """Of several models, one must be named."""
    found = ask(path, Scorer("encode"), **model, **BODIES[path])
    answers = found.status_code == 200 or "the model 'm' answers at" in found.text
    assert answers or "tokenize" in path and found.status_code == 500, "this engine has no tokenizer"
    several = ask(path, Scorer("encode"), Scorer("encode"), **model, **BODIES[path])
    assert several.status_code == 400 and "model is missing; give one of m, m+" in several.text


@pytest.mark.parametrize("path", ["/v2/nothing", "/v1/moderations", "/v1/conversations", "/v1/messages/batches"])
def test_an_unknown_address_is_named(path: str) -> None:
    refused = ask(path, Scorer("encode"), input="x")
    assert refused.status_code == 404 and f"no address '{path}'" in refused.json()["error"]["message"]
