"""What clients, frameworks, browsers and proxies send beside a request, through HTTP and without an engine's process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import ssl
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from openai.types.chat import ChatCompletionMessage
from test_serve_faults import COMPLETION, Recording, app_of, posted
from test_serving_parts import of_several
from transformers import BertConfig, BertModel

from upshift.errors import RequestError
from upshift.inference.weights import find_weights
from upshift.serving import server as serving_server
from upshift.serving.app import Server, Site, make_app
from upshift.serving.engine.main import _select_engine
from upshift.serving.engine_process import RequestRefused
from upshift.serving.messages import EngineRequest, Refused
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest, CompletionRequest, EmbeddingRequest
from upshift.serving.request_checks import Limits

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SITE = "https://pages.example"


def called(method: str, path: str, *, site: Site | None = None, limits: Limits | None = None, **more: Any) -> httpx2.Response:
    metrics = Metrics()
    server = Server(
        ModelPool({"m": of_several(Recording()), "a/b": of_several(Recording())}, metrics), metrics, limits or Limits()
    )

    async def call() -> httpx2.Response:
        transport = httpx2.ASGITransport(make_app(server, site or Site()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://m") as client:
            return await client.request(method, path, **more)

    return asyncio.run(call())


IGNORED = {
    "metadata": {"run": "7"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
    "user": "u",
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_fields_that_openai_ignores_are_taken(path: str, body: dict[str, Any]) -> None:
    answer = called("POST", path, json=body | IGNORED)
    assert answer.status_code == 200, answer.text
    refused = called("POST", path, json=body | {"metadata": {"run": 7}})
    assert refused.status_code == 400 and "metadata.run" in refused.text


def test_hints_of_openai_are_taken() -> None:
    """What a model here does not know, and what changes no answer."""
    hints = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}
    assert called("POST", "/v1/chat/completions", json=CHAT | hints).status_code == 200
    body = {"model": "m", "input": "x", "text": {"verbosity": "high"}, "max_tool_calls": 2, "prompt_cache_retention": "24h"}
    assert called("POST", "/v1/responses", json=body).status_code == 200
    assert called("POST", "/v1/chat/completions", json=CHAT | {"verbosity": "loud"}).status_code == 400
    assert called("POST", "/v1/completions", json=COMPLETION | {"best_of": 2, "n": 2}).status_code == 200
    refused = called("POST", "/v1/completions", json=COMPLETION | {"best_of": 3})
    assert refused.status_code == 400 and "best_of is 3, and 1 texts are computed" in refused.text


def optional_fields(kind: Any, required: set[str]) -> dict[str, None]:
    fields = {field.alias or name for name, field in kind.model_fields.items()} - required
    assert len(fields) > 2
    return dict.fromkeys(sorted(fields))


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [("/v1/chat/completions", CHAT, ChatRequest), ("/v1/completions", COMPLETION, CompletionRequest),
     ("/v1/embeddings", {"model": "m", "input": "x"}, EmbeddingRequest)],
)  # fmt: skip
def test_null_is_the_same_as_nothing(path: str, body: dict[str, Any], kind: Any) -> None:
    """For every optional field, and for fields that only others know."""
    nulls = {**optional_fields(kind, set(body)), "modalities": None, "audio": None}
    answer = called("POST", path, json=nulls | body)
    plain = called("POST", path, json=body)
    assert answer.status_code == plain.status_code, answer.text
    assert plain.status_code == (400 if kind is EmbeddingRequest else 200), "this engine answers with texts"
    missing = called("POST", path, json=body | {"model": None})
    assert missing.status_code == 400 and "model" in missing.json()["error"]["message"]


def test_null_inside_of_objects() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": None, "description": None, "schema": {"const": None}}}
    body = CHAT | {"response_format": form, "stream": True, "stream_options": {"include_usage": None}}
    engine = Recording()
    (answer,) = posted(app_of(engine)[0], body, path="/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    assert json.loads(engine.requests[0].json_schema or "") == {"const": None}, "a schema is the user's own"


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_the_counts_of_a_stream(path: str, body: dict[str, Any]) -> None:
    """At its end, in each event as vLLM's clients want, or not at all; and never without a stream."""

    def counts(options: Any) -> list[int | None]:
        answer = posted(app_of(Recording(3))[0], body | {"stream": True, "stream_options": options}, path=path)[0]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return [event["usage"]["completion_tokens"] if "usage" in event else None for event in events]

    assert counts({}) == counts({"continuous_usage_stats": True}) == [None] * 3
    assert counts({"include_usage": True}) == [None, None, None, 3]
    assert counts({"include_usage": True, "continuous_usage_stats": True}) == [1, 2, 3, 3]
    refused = called("POST", path, json=body | {"stream_options": {"include_usage": True}})
    assert refused.status_code == 400 and "set stream to true" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_goes_on(stream: bool) -> None:
    """With echo it begins with the message that it goes on with."""
    engine = Recording(2)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    asked = {"model": "m", "messages": turns, "stream": stream, "continue_final_message": True, "add_generation_prompt": False}
    bodies = [asked, asked | {"echo": True}, asked | {"add_generation_prompt": True}, CHAT | {"echo": True}]
    answers = posted(app_of(engine)[0], *bodies, path="/v1/chat/completions")
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
    assert [request.template.ending for request in engine.requests] == ["open", "open"]
    texts = [re.sub(r'.*?"content":"(.*?)"|.+', r"\1", answer.text.replace("\n", "")) for answer in answers[:2]]
    assert texts == ["yesyes", "soyesyes"]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_need_no_other_site(path: str) -> None:
    """They work without a network, and behind a proxy's path."""
    page = called("GET", path)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    links = re.findall(r"(?:src|href|action)=\W?([^\s>\"']+)|fetch\(\W([^\"']+)|url\(([^)]+)", page.text)
    targets = ["".join(link) for link in links]
    assert targets and not [target for target in targets if "//" in target or target.startswith("/")]


def test_an_answer_can_be_sent_back() -> None:
    message = ChatCompletionMessage(role="assistant", content="yes", annotations=[], tool_calls=[])
    engine = Recording()
    turns = [{"role": "user", "content": "x", "name": "ann"}, message.model_dump(), {"role": "user", "content": "y"}]
    empty = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "function_call": None}
    app, _ = app_of(engine)
    bodies = [{"model": "m", "messages": turns}, {"model": "m", "messages": [*turns, empty]}]
    bodies += [{"model": "m", "messages": [{"role": "user", "content": None}]}, {"model": "m", "messages": [{"role": "system"}]}]
    answers = posted(app, *bodies, path="/v1/chat/completions")
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
    assert all("the content is missing" in answer.text for answer in answers[2:])
    prompts: list[Any] = [request.prompt for request in engine.requests]
    contents = [[turn["content"] for turn in prompt] for prompt in prompts]
    assert contents == [["x", "yes", "y"], ["x", "yes", "y", ""]]


def test_a_sound_is_refused_by_name() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    body = CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, sound]}]}
    answer = called("POST", "/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.0.content.1"
    assert error["message"].startswith("messages.0.content.1 is a sound, and models here read texts and pictures only")


def test_addresses_that_clients_look_at() -> None:
    assert called("GET", "/v1/models/m").json() == {"id": "m", "object": "model", "created": 0, "owned_by": "upshift"}
    assert called("GET", "/v1/models/a/b").json()["id"] == "a/b"
    missing = called("GET", "/v1/models/c")
    assert missing.status_code == 404 and "ask for one of m, a/b" in missing.json()["error"]["message"]
    assert called("GET", "/version").json()["version"]
    for path in ("/health", "/metrics", "/version", "/v1/models/m", "/docs"):
        head = called("HEAD", path)
        assert head.status_code == 200 and not head.content
    assert called("HEAD", "/health", limits=Limits(keys=("k",))).status_code == 200
    assert called("GET", "/v1/models/m", limits=Limits(keys=("k",))).status_code == 401


def test_addresses_of_other_servers() -> None:
    """SageMaker's and vLLM's: the fields of a body say for which address it is."""
    for body, kind in ((CHAT, "chat.completion"), (COMPLETION, "text_completion")):
        assert called("POST", "/invocations", json=body).json()["object"] == kind
    assert "answers at" in called("POST", "/invocations", json={"model": "m", "input": "x"}).text
    assert "give one of messages, prompt" in called("POST", "/invocations", json={"model": "m"}).json()["error"]["message"]
    wrong = called("POST", "/invocations", json=CHAT | {"n": 0})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
    assert called("GET", "/load").json() == {"server_load": 0}
    assert called("GET", "/ping", limits=Limits(keys=("k",))).status_code == 200


def test_what_other_servers_put_into_messages() -> None:
    """Fields that litellm, OpenRouter and clients of Anthropic's send with a history change nothing."""
    engine = Recording()
    more = {
        "id": "m1", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}, "thinking_blocks": [{}],
        "reasoning_details": [{}],
    }  # fmt: skip
    text = {"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}}
    said = [{"role": "assistant", "content": "no"}, {"role": "user", "content": "y"}]
    sent = [{"role": "assistant", "content": None, "refusal": "no", **more}, {"role": "user", "content": [text], **more}]
    parts = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "user", "content": "y"}]
    for messages in (said, sent, parts):
        body = CHAT | {"messages": [*CHAT["messages"], *messages], "modalities": ["text"]}
        assert posted(app_of(engine)[0], body, path="/v1/chat/completions")[0].status_code == 200
    first, *others = [request.prompt for request in engine.requests]
    assert others == [first] * 2


def test_every_answer_has_a_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "upshift.serving")
    first = called("POST", "/v1/completions", json=COMPLETION, headers={"X-Request-Id": "abc-1"})
    assert first.headers["x-request-id"] == "abc-1"
    refused = called("POST", "/v1/completions", json={}, headers={"X-Request-Id": "abc-2"}, limits=Limits(keys=("k",)))
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "abc-2")
    made = [called("GET", "/health", headers=headers).headers["x-request-id"] for headers in ({}, {}, {"x-request-id": "a b"})]
    made.append(called("GET", "/health", headers={"x-request-id": "x" * 200}).headers["x-request-id"])
    assert len(set(made)) == 4 and all(len(request_id) == 32 for request_id in made)
    lines = [record.getMessage() for record in caplog.records if record.name == "upshift.serving.request_checks"]
    assert lines[0].startswith("abc-1 POST /v1/completions 200 ") and lines[1].startswith("abc-2 POST /v1/completions 401 ")


def test_pages_of_an_allowed_site() -> None:
    asks = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    site, limits = Site(origins=(SITE,)), Limits(keys=("k",))
    allowed = called("OPTIONS", "/v1/completions", site=site, limits=limits, headers=asks)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == SITE
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    key = {"Origin": SITE, "Authorization": "Bearer k"}
    answer = called("POST", "/v1/completions", site=site, limits=limits, json=COMPLETION, headers=key)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == SITE
    refused = called("POST", "/v1/completions", site=site, limits=limits, json=COMPLETION, headers={"Origin": SITE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == SITE, "the page can read why"
    other = called("OPTIONS", "/v1/completions", site=site, headers=asks | {"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in called("GET", "/health", headers={"Origin": SITE}).headers


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_leave_its_path_or_remove_it(prefix: str) -> None:
    """The guard sees the same address as the application, with the same rules."""
    more: dict[str, Any] = {"site": Site(root_path="/llm"), "limits": Limits(keys=("k",))}
    key = {"Authorization": "Bearer k"}
    assert called("POST", f"{prefix}/v1/completions", json=COMPLETION, headers=key, **more).status_code == 200
    assert called("POST", f"{prefix}/v1/completions", json=COMPLETION, **more).status_code == 401
    assert called("GET", f"{prefix}/health", **more).status_code == 200
    page = {"Origin": SITE, "Content-Type": "text/plain", **key}
    assert called("POST", f"{prefix}/v1/completions", content=b"{}", headers=page, **more).status_code == 415
    assert called("GET", f"{prefix}/openapi.json", **more).json()["servers"] == [{"url": "/llm"}]


class Refusing(Recording):
    async def pieces(self, request: Any) -> Any:
        raise RequestRefused(Refused(id=1, status=400, why="too long", code="context_length_exceeded"))
        yield


def test_the_code_of_a_refusal_reaches_the_client() -> None:
    error = posted(app_of(Refusing())[0], COMPLETION)[0].json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")


def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine, which makes the certificate")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    subprocess.run([*made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    servers: list[uvicorn.Server] = []
    original = uvicorn.Server.__init__

    def start(self: uvicorn.Server, config: uvicorn.Config) -> None:
        original(self, config)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", start)
    monkeypatch.setattr(serving_server, "stopping_on_signals", lambda stop: nullcontext())  # a thread has no signals
    urls: list[str] = []
    opened = threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        opened.set()

    address = serving_server.Address(port=0, certificate=certificate, private_key=key)
    thread = threading.Thread(target=serving_server.serve, args=({}, address, Limits()), kwargs={"on_open": tell})
    thread.start()
    assert opened.wait(30)
    try:
        context = ssl.create_default_context(cafile=certificate)
        answer = httpx2.get(f"{urls[0]}/health", verify=context)
        assert urls[0].startswith("https://") and answer.json() == {"status": "ok", "models": {}}
    finally:
        servers[0].should_exit = True
        thread.join(30)


WRONG = [
    (("--allow-origin", "example.org"), "--allow-origin 'example.org' is no origin; write a scheme and a host"),
    (("--allow-origin", "https://a.b/path"), "is no origin"),
    (("--root-path", "llm"), "--root-path 'llm' is no path of a proxy"),
    (("--root-path", "/llm/"), "is no path of a proxy"),
    (("--ssl-keyfile", "key.pem"), "--ssl-keyfile key.pem is the key of a certificate; give --ssl-certfile, too"),
    (("--ssl-certfile", "none.pem"), "--ssl-certfile none.pem cannot be used"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_options_of_the_web(options: tuple[str, ...], words: str, upshift: Any) -> None:
    refused = upshift("serve", "model", "--port", 0, *options)
    assert refused.code == 2 and words in refused.err and "Traceback" not in refused.err, refused.err


@pytest.mark.parametrize("models", [("tiny",), ("tiny", "other")])
def test_an_encoder_alone_refuses_what_only_texts_need(
    models: tuple[str, ...], tmp_path: Path, upshift: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a model that generates, the options are for that one."""
    requests: dict[str, EngineRequest] = {}
    options: list[Any] = []

    def serve(requested: dict[str, EngineRequest], *_: Any, **more: Any) -> None:
        requests.update(requested)
        options.append(more["generation_options"])

    monkeypatch.setattr(serving_server, "serve", serve)
    assert upshift("serve", *models, "--max-tpot-ms", 9, "--output-length", 7, "--concurrency", 3).code == 0
    names = ("--max-tpot-ms", "--output-length", "--concurrency")
    assert options == [names] and requests["tiny"].concurrency == 3
    alone = requests["tiny"].generation_options
    assert alone == (names if len(models) == 1 else ())
    assert upshift("serve", *models).code == 0 and options[-1] == () and requests["tiny"].concurrency == 8
    BertModel(BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    request = EngineRequest(model=str(tmp_path), generation_options=names)
    words = "only models that generate take --max-tpot-ms and --output-length and --concurrency, and"
    with pytest.raises(RequestError, match=words):
        _select_engine(find_weights(request.model), request)


def test_several_encoders_refuse_it_too() -> None:
    engines = {name: of_several(Recording()) for name in "ab"}
    pool = ModelPool(engines, Metrics())
    serving_server._check_options_are_used(pool, ("--concurrency",))
    for engine in engines.values():
        ready = engine.engines[0].ready
        assert ready is not None
        engine.engines[0].ready = ready.changed(task="encode")
        serving_server._check_options_are_used(pool, ())
    with pytest.raises(RequestError, match="only models that generate take --concurrency, and all models here encode texts"):
        serving_server._check_options_are_used(pool, ("--concurrency",))
