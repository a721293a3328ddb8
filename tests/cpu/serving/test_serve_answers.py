"""What answers may be asked to keep to, and to tell of themselves: forms, biases, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import jsonschema
import pytest
import torch
from pydantic import BaseModel
from running_server import Running, serving, write_models
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "the quick brown"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["color", "sizes", "inner"],
    "additionalProperties": False,
    "$defs": {
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    },
}  # fmt: skip


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    lazy: bool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(models, log, "tiny", "--engine", "torch", "--port", "0", "--concurrency", "4") as running:
        yield running


def chat(server: Running, **asked: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200, **asked}
    return server.post("/v1/chat/completions", body)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


Change = Callable[[torch.Tensor, list[int]], torch.Tensor]


def reference(models: Path, change: Change, count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens that are likeliest after ``change``, and the model's own log-probabilities in each of their places [count, V]."""
    model: Any = AutoModelForCausalLM.from_pretrained(models / "tiny").eval()
    ids, made, told = AutoTokenizer.from_pretrained(models / "tiny")(PROMPT).input_ids, list[int](), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids + made])).logits[0, -1]
        told.append(logits.log_softmax(-1))
        made.append(int(change(logits, made).argmax()))
    return made, torch.stack(told)


def test_an_answer_is_json_of_its_schema(server: Running) -> None:
    """A model of random weights says it, whatever it is asked."""
    for seed in range(4):
        answer = chat(server, response_format=of_schema(SCHEMA), temperature=1.5, seed=seed).json()["choices"][0]
        jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
        assert answer["finish_reason"] == "stop"
    likeliest = chat(server, response_format=of_schema(SCHEMA), temperature=0, n=2).json()["choices"]
    assert likeliest[0]["message"] == likeliest[1]["message"]
    jsonschema.validate(json.loads(likeliest[0]["message"]["content"]), SCHEMA)
    streamed = chat(server, response_format=of_schema(SCHEMA), temperature=0, stream=True).text
    events = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["delta"]["content"] for event in events) == likeliest[0]["message"]["content"]
    some = chat(server, response_format={"type": "json_object"}, max_tokens=20).json()["choices"][0]["message"]["content"]
    assert some.startswith("{")


def test_openais_client_reads_it_as_a_class(server: Running) -> None:
    found = server.client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "which one?"}], response_format=Animal, max_tokens=100
    )
    assert isinstance(found.choices[0].message.parsed, Animal)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (of_schema({"type": "nonsense"}), "the JSON schema is not possible"),
        (of_schema({"$ref": "#/$defs/missing"}), "the JSON schema is not possible"),
        (of_schema({"type": "string", "pattern": "(["}), "the JSON schema is not possible"),
        (of_schema({"$ref": "#"}), "the form cannot go on with any"),
        (of_schema(nested(195)), "the JSON schema is not possible"),
        (of_schema(nested(300)), "the body is nested too deeply"),
        (of_schema({"anyOf": [{"properties": {f"{one}": {}, f"{one}x": {}}} for one in range(2000)]}), "the form is too large"),
        (of_schema([]), "response_format.json_schema.json_schema.schema"),
        ({"type": "xml"}, "response_format"),
    ],
)
def test_a_form_that_is_not_possible(server: Running, form: Any, why: str) -> None:
    answer = chat(server, response_format=form)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    assert server.post("/v1/completions", ASKED).status_code == 200


def test_penalties_and_biases(server: Running, models: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "tiny")
    made, _ = reference(models, lambda logits, made: logits, 12)
    liked = made[-1]

    def change(logits: torch.Tensor, made: list[int]) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(made, dtype=torch.int64), minlength=len(logits))
        bias = torch.zeros(len(logits)).index_fill(0, torch.tensor([liked]), 0.1)
        return logits + bias + 1.5 * counts - 0.5 * (counts > 0)

    wanted, _ = reference(models, change, 12)
    more = {"frequency_penalty": -1.5, "presence_penalty": 0.5, "logit_bias": {str(liked): 0.1}}
    assert wanted != made
    assert server.post("/v1/completions", ASKED | more).json()["choices"][0]["text"] == tokenizer.decode(wanted)
    only = server.client.completions.create(**ASKED, logit_bias={str(liked): 100})
    assert only.choices[0].text == tokenizer.decode([liked] * 12)
    refused = server.post("/v1/completions", ASKED | {"logit_bias": {"5000": 1}})
    assert refused.status_code == 400 and "5000" in refused.json()["error"]["message"]


def test_log_probabilities(server: Running, models: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "tiny")
    made, told = reference(models, lambda logits, made: logits, 12)
    choice = server.client.completions.create(**ASKED, logprobs=3).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([float(told[place, token]) for place, token in enumerate(made)], abs=1e-4)
    assert choice.text == tokenizer.decode(made)
    placed = dict(zip(found.text_offset or [], found.tokens or [], strict=True))
    parts = {token for token in placed.values() if token.startswith("bytes:\\x")}
    assert parts and all(choice.text[start:].startswith(token) for start, token in placed.items() if token not in parts)
    for place, top in enumerate(found.top_logprobs or []):  # tokens that no word stands for are one
        known = told[place].topk(3).values
        assert len(top) >= 2 and max(top.values()) == pytest.approx(float(known[0]), abs=1e-4)
        assert all(float((known - said).abs().min()) < 1e-4 for said in top.values())
    events = server.client.completions.create(**ASKED, logprobs=3, stream=True)
    streamed = [event.choices[0].logprobs for event in events]
    assert [one for part in streamed for one in part.text_offset] == found.text_offset
    assert [one for part in streamed for one in part.token_logprobs] == pytest.approx(found.token_logprobs, abs=1e-5)


def test_log_probabilities_of_a_chat(server: Running) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 9, "temperature": 2, "seed": 3, "n": 2}
    for choice in chat(server, **asked).json()["choices"]:
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(one["bytes"]) for one in content).decode(errors="replace") == choice["message"]["content"]
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= one["top_logprobs"][0]["logprob"] <= 0 for one in content)
    plain = chat(server, **asked | {"logprobs": False, "top_logprobs": None}).json()["choices"][0]
    assert plain["logprobs"] is None
    refused = chat(server, top_logprobs=2)
    assert refused.status_code == 400 and "set logprobs to true" in refused.json()["error"]["message"]
