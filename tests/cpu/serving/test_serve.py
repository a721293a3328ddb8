"""``upshift serve`` as clients meet it: OpenAI's own client, broken requests, a dying engine, more load than it holds."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
import schemathesis
import torch
from command import Command
from hypothesis import HealthCheck, Phase, given, settings
from malformed import EXPECTED, broken
from running_server import KEY, WORDS, Running, serving, wait, write_models
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel
from web_driver import Page, driven

from upshift.serving import server as door
from upshift.serving.request_checks import Limits

OPTIONS = ("--engine", "torch", "--port", "0", "--concurrency", "4", "--max-waiting", "4", "--max-body-mb", "0.1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("log")
    (folder / "keys").write_text("first\nsecond\nschlüssel\n", encoding="utf-8")
    with serving(models, folder / "log", "tiny", "enc", "--api-key-file", str(folder / "keys"), *OPTIONS) as running:
        yield running


def greedy(models: Path, ids: list[int], count: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "tiny")
    model: Any = AutoModelForCausalLM.from_pretrained(models / "tiny")
    found = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :]
    said: str = tokenizer.decode(found, skip_special_tokens=True)
    return said


def mean_of_tokens(models: Path, text: str) -> np.ndarray:
    tokens = AutoTokenizer.from_pretrained(models / "enc")(text, return_tensors="pt")
    with torch.no_grad():
        found: np.ndarray = BertModel.from_pretrained(models / "enc").eval()(**tokens).last_hidden_state[0].mean(0).numpy()
    return found


def test_messages_tell_what_ended_them(server: Running, models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny")
    chat = [{"role": "user", "content": "fox"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    text = greedy(models, ids, 12)
    stop = text[4:6]
    body = {"model": "tiny", "messages": chat, "max_tokens": 12, "temperature": 0}
    endings = {}
    for name, more in {"whole": {}, "stopped": {"stop_sequences": [stop, "never"]}}.items():
        answer = server.post("/v1/messages", body | more, headers={"x-api-key": "second"}).json()
        endings[name] = (answer["content"][0]["text"], answer["stop_reason"], answer["stop_sequence"])
    assert endings["whole"] == (text, "max_tokens", None)
    assert endings["stopped"] == (text[: text.index(stop)], "stop_sequence", stop)
    counted = server.post("/v1/messages/count_tokens", {"model": "tiny", "messages": chat}).json()
    assert counted == {"input_tokens": len(ids)} and answer["usage"]["input_tokens"] == len(ids)


def test_anthropics_client(server: Running) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="second", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "fox"}], "extra_body": {"temperature": 0}}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert whole.content[0].text == streamed.content[0].text and whole.usage.output_tokens == 8
    assert (whole.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        client.with_options(api_key="wrong").messages.create(**asked)
    with pytest.raises(anthropic.NotFoundError, match="ask for one of tiny, enc"):
        client.messages.create(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked | {"max_tokens": 300})
    with pytest.raises(anthropic.BadRequestError, match="answers at /v1/embeddings"):
        client.messages.create(**asked | {"model": "enc"})


def test_openais_client(server: Running, models: Path) -> None:
    client, tokenizer = server.client, AutoTokenizer.from_pretrained(models / "tiny")
    assert [one.id for one in client.models.list()] == ["tiny", "enc"]
    prompt = "the quick brown"
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    assert whole.choices[0].text == greedy(models, tokenizer(prompt).input_ids, 12)
    assert whole.usage and whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
    words = " ".join(WORDS)
    messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": words}]}]
    said = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": words}]
    ids = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert said.choices[0].message.content == greedy(models, ids, 8)
    events = list(client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == said.choices[0].message.content and events[-1].usage.total_tokens == said.usage.total_tokens
    assert events[0].choices[0].delta.role == "assistant" and events[-2].choices[0].finish_reason == "length"


def test_a_conversation_is_not_computed_twice(server: Running, models: Path) -> None:
    messages: Any = [{"role": "user", "content": " ".join(WORDS)}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    first = server.client.chat.completions.create(messages=messages, **asked)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "a dog"}]
    second = server.client.chat.completions.create(messages=messages, **asked)
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert second.choices[0].message.content == greedy(models, ids, 8)
    assert first.usage.prompt_tokens - 2 <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_web_server_has_no_torch(server: Running) -> None:
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.engine()["processes"][0])]
    assert ["libtorch" in one for one in maps] == [False, True]


def test_several_texts_and_seeds(server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["fox", "dog"], "max_tokens": 6, "temperature": 1.5, "seed": 7, "n": 2}
    texts = [[one.text for one in server.client.completions.create(**asked).choices] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    assert server.client.completions.create(**asked).usage.prompt_tokens == prompt_tokens(server, "fox", "dog")
    pieces: dict[int, str] = {}
    for event in server.client.completions.create(**asked, stream=True):
        for one in event.choices:
            pieces[one.index] = pieces.get(one.index, "") + one.text
    assert [pieces[index] for index in range(4)] == texts[0]
    other = server.client.completions.create(**asked | {"seed": 8})
    assert [one.text for one in other.choices] != texts[0]


def prompt_tokens(server: Running, *prompts: str) -> int:
    bodies = [{"model": "tiny", "prompt": prompt, "max_tokens": 1} for prompt in prompts]
    return sum(server.post("/v1/completions", body).json()["usage"]["prompt_tokens"] for body in bodies)


def test_a_prompt_that_is_too_long_has_openais_code(server: Running) -> None:
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 300}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x " * 300}]}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 256}),
        ("/v1/embeddings", {"model": "enc", "input": [5] * 65}),
    ):
        answer = server.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), answer.text
        assert error["message"].startswith("This model's maximum context length is ") and "Please reduce" in error["message"]


def test_which_tokens_end_an_answer(server: Running, models: Path) -> None:
    asked = {"model": "tiny", "prompt": "moon", "max_tokens": 30, "temperature": 0, "logprobs": 0}
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny")
    model: Any = AutoModelForCausalLM.from_pretrained(models / "tiny")
    prompt = tokenizer("moon").input_ids
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)[
        0, len(prompt) :
    ].tolist()
    stop = next(token for token in tokens[3:] if token not in tokens[:3])

    def count(**fields: Any) -> tuple[int, str]:
        answer = server.post("/v1/completions", asked | fields).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert count(stop_token_ids=[stop]) == (tokens.index(stop) + 1, "stop")
    assert count(ignore_eos=True) == (30, "length")
    end = tokenizer.eos_token_id
    assert count(logit_bias={str(end): 100}) == (1, "stop")
    assert count(logit_bias={str(end): 100}, ignore_eos=True) == (30, "length")
    assert count(logit_bias={str(end): 100}, min_tokens=5) == (6, "stop")
    assert server.post("/v1/completions", asked | {"min_tokens": 31}).json()["error"]["message"].startswith("min_tokens is 31")


def test_a_text_ends_before_a_stop_string(server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "moon", "max_tokens": 30, "temperature": 0}
    whole = server.client.completions.create(**asked).choices[0].text
    stop = whole[5:8]
    for stream in (False, True):
        answer = server.post("/v1/completions", asked | {"stop": stop, "stream": stream})
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
            text, ending = "".join(event["choices"][0]["text"] for event in events), events[-1]["choices"][0]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            text, ending = choice["text"], choice["finish_reason"]
        assert (text, ending) == (whole[: whole.index(stop)], "stop")


def test_tokens_that_come_soon_are_sent_together(server: Running) -> None:
    """The first one at once. A tiny model has many in 10 ms."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "moon", "max_tokens": 200, "temperature": 0}
    whole = server.client.completions.create(**asked).choices[0].text
    events = list(server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [event.choices[0].text for event in events if event.choices]
    assert "".join(texts) == whole and len(texts) < 150 and len(texts[0]) <= 0.1 * len(whole)
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 200


def test_embeddings(server: Running, models: Path) -> None:
    texts = ["the quick fox", "a lazy dog jumps over the moon", "fox"]
    plain = server.client.embeddings.create(model="enc", input=texts, encoding_format="float")
    packed = server.client.embeddings.create(model="enc", input=texts)  # the client asks for base64
    rows = [np.array([one.embedding for one in answer.data]) for answer in (plain, packed)]
    expected = [mean_of_tokens(models, text) for text in texts]
    np.testing.assert_allclose(rows[0], expected, atol=1e-5)
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-7)
    ids = AutoTokenizer.from_pretrained(models / "enc")(texts).input_ids
    for sent, wanted in ((ids, rows[0]), (ids[0], rows[0][:1])):
        tokens = server.client.embeddings.create(model="enc", input=sent)
        np.testing.assert_allclose([one.embedding for one in tokens.data], wanted, atol=1e-6)
    short = server.client.embeddings.create(model="enc", input=texts, dimensions=5)
    np.testing.assert_allclose([one.embedding for one in short.data], rows[0][:, :5], atol=1e-7)


FAILED = 500  # at this request alone
WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"model": "none", "prompt": "x"}, 404, "ask for one of tiny, enc"),
    ("/v1/completions", {"model": "enc", "prompt": "x"}, 400, "answers at /v1/embeddings"),
    ("/v1/embeddings", {"model": "tiny", "input": "x"}, 400, "answers at /v1/chat/completions"),
    ("/v1/completions", {"model": "tiny", "prompt": "x", "logprobs": 21}, 400, "logprobs"),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "suffix": "y"},
        400,
        "suffix needs control tokens for filling in the middle",
    ),
    ("/v1/embeddings", {"model": "enc", "input": "x", "dimensions": 33}, 400, "vectors of 32"),
    ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "is empty"),
    ("/v1/completions", {"model": "tiny", "prompt": [[1], [99999]], "max_tokens": 1}, 400, "99999"),
    ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1000}, 400, "maximum context length is 256 tokens"),
    ("/v1/completions", {"model": "tiny", "prompt": "x", "temperature": 9}, 400, "temperature"),
    ("/v1/completions", {"model": "tiny", "prompt": "x", "temperature": 1e-40}, 400, "temperature: 1e-40 is too small"),
    ("/v1/completions", {"model": "tiny", "prompt": "x", "repetition_penalty": 1e-40}, 400, "repetition_penalty"),
    ("/v1/completions", {"model": "tiny", "prompt": [[1]] * 257}, 400, "at most 256 items"),
    ("/v1/completions", {"model": "tiny", "prompt": ["x"] * 3, "n": 3}, 400, "ask for at most 8"),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x", "audio": {}}]}, 400, "0.audio is"),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "broken"}]}, FAILED, "division by zero"),
    ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages"),
    ("/v1/completions", {"model": "tiny", "prompt": "x" * 200_000}, 413, "larger than 100,000 bytes"),
    ("/v1/nothing", {}, 404, "this server has no address '/v1/nothing'; GET /docs lists"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), WRONG)
def test_wrong_requests(path: str, body: Any, status: int, words: str, server: Running, models: Path) -> None:
    before = server.engine()["processes"]
    answer = server.post(path, body)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text
    assert "max_new_tokens" not in answer.text and str(models) not in answer.text
    assert server.engine()["processes"] == before


HALF = r'"\ud800"'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", f'{{"model": "tiny", "prompt": {HALF}}}'),
        ("completions", f'{{"model": "tiny", "prompt": "x", {HALF}: 1}}'),
        ("chat/completions", f'{{"model": "tiny", "messages": [{{"role": "user", "content": {HALF}}}]}}'),
        ("embeddings", f'{{"model": "enc", "input": ["x", {HALF}]}}'),
    ],
)
def test_half_a_character(path: str, body: str, server: Running) -> None:
    headers = KEY | {"Content-Type": "application/json"}
    answer = httpx2.post(f"{server.url}/v1/{path}", content=body, headers=headers)
    assert answer.status_code == 400 and r"\ud800 alone is no character" in answer.json()["error"]["message"]


def test_addresses_that_are_none_are_counted_as_one(server: Running) -> None:
    for path, size, status in (("/v1/made-up", 1, 404), ("/v1/made-up", 200_000, 413), ("/v1/completions", 1, 400)):
        assert server.post(path, "x" * size).status_code == status
    counted = httpx2.get(f"{server.url}/metrics", headers=KEY).text
    assert "made-up" not in counted and 'upshift_requests_total{path="other",status="413"}' in counted
    assert 'upshift_requests_total{path="/v1/completions",status="400"}' in counted


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory by Linux' own figures")
def test_malformed_requests(server: Running) -> None:
    """Broken JSON, wrong types, bodies that never end, clients that leave: always a status, and no growth."""
    chance = random.Random(0)
    process = psutil.Process(server.process.pid)
    broken(server, chance, 60)
    grown = []
    while not grown or (grown[-1] > 0 and len(grown) < 4):  # what leaks grows every time; what an allocator sets aside does not
        before = process.memory_info().rss
        statuses = broken(server, chance, 240)
        assert set(statuses) <= EXPECTED, statuses
        grown.append(process.memory_info().rss - 1.02 * before - 2**20)
    assert grown[-1] <= 0, grown
    wait(lambda: server.engine()["in_flight"] == 0)
    assert server.client.completions.create(model="tiny", prompt="fox", max_tokens=2).usage


@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_of_the_document(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    for operation in schema.get_all_operations():
        if operation.ok().method.upper() == "POST":
            run_operation(operation.ok())


def run_operation(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=12, deadline=None, database=None, phases=(Phase.generate,), derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case: Any) -> None:
        case.call_and_validate(timeout=60, headers=KEY)

    check()


def test_who_leaves_is_not_computed_for(server: Running) -> None:
    with server.client.completions.create(model="tiny", prompt="fox", max_tokens=250, stream=True) as stream:
        next(iter(stream))
        assert server.engine()["in_flight"] == 1
    wait(lambda: server.engine()["in_flight"] == 0, 10)
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 250}
    with pytest.raises(httpx2.TimeoutException):
        server.post("/v1/completions", body, timeout=0.05)
    wait(lambda: server.engine()["in_flight"] == 0, 10)


def test_an_engine_that_is_killed(server: Running) -> None:
    """What was in its hands fails with words; the server starts it again."""
    said: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": "fox", "max_tokens": 250, "n": 4})
        said.put(answer)

    wait(lambda: server.engine()["spare_bytes"])
    asking = threading.Thread(target=ask)
    asking.start()
    wait(lambda: server.engine()["in_flight"] == 4)
    first = server.engine()
    before = first["processes"][0]
    os.kill(before, signal.SIGKILL)
    asking.join(timeout=60)
    answer = said.get(timeout=1)
    assert answer.status_code == 503 and "the engine died" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "fox", "max_tokens": 2}).status_code in (200, 503)
    wait(lambda: server.engine()["state"] == "ready" and server.engine()["processes"][0] != before)
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "fox", "max_tokens": 2}).status_code == 200
    assert first["late_imports"] > 1000 and server.engine()["late_imports"] < 10, "a spare process had imported the rest"
    counted = httpx2.get(f"{server.url}/metrics", headers=KEY).text
    assert re.search(r'upshift_engine_restarts_total{model="tiny"} 1\.0', counted)
    assert 'upshift_engine_start_seconds{model="tiny",part="racing and loading"}' in counted
    assert "fox" not in server.log.read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need a core each")
def test_two_engines_of_one_model(models: Path, tmp_path: Path) -> None:
    """One of them is killed: the other one answers meanwhile."""
    with serving(models, tmp_path / "log", "tiny", "--replicas", "2", *OPTIONS) as running:
        said = running.engine()
        shares = [os.sched_getaffinity(process) for process in said["processes"]]
        assert said["replicas"] == 2 and said["rows"] == 8 and shares[0] and not shares[0] & shares[1]
        assert "8 at once in 2 engines" in running.log.read_text()
        os.kill(said["processes"][0], signal.SIGKILL)
        wait(lambda: running.engine()["processes"][0] != said["processes"][0])
        body = {"model": "tiny", "max_tokens": 3}
        assert all(running.post("/v1/completions", {**body, "prompt": word}).status_code == 200 for word in WORDS)


SLOW_FETCH = """
window.bodies = [];
window.fetch = (url, options) => {
  bodies.push(JSON.parse(options.body).messages.map(message => message.content));
  const stream = new ReadableStream({start(controller) {
    window.say = text => controller.enqueue(new TextEncoder().encode(
      'data: ' + JSON.stringify({choices: [{delta: {content: text}}]}) + '\\n\\n'));
    window.end = () => controller.close();
    options.signal.addEventListener("abort", () => controller.error(new DOMException("stopped", "AbortError")));
  }});
  return Promise.resolve(new Response(stream));
};
const enter = new KeyboardEvent("keydown", {key: "Enter", isComposing: true, cancelable: true});
document.querySelector("#text").value = "half a word";
document.querySelector("#text").dispatchEvent(enter);
return bodies.length;
"""


HIDDEN_BELOW = "const main = document.querySelector('main'); return main.scrollHeight - main.scrollTop - main.clientHeight"


def check_interruptions(page: Page) -> None:
    """Stop and New chat while an answer comes, and Enter of an input method: by a server that the test plays."""

    def idle() -> bool:
        return not page.run("return document.querySelector('#send').disabled")

    assert page.run(SLOW_FETCH) == 0, "Enter confirmed a word, and sent nothing"
    page.run("document.querySelector('#text').value = ''")
    page.type("#text", "one\ue007")
    wait(lambda: page.run("return bodies.length") == 1)
    page.click("#stop")
    wait(idle)
    page.type("#text", "two\ue007")
    wait(lambda: page.run("return bodies.length") == 2)
    page.run("say('half')")
    wait(lambda: "half" in page.text("main"))
    page.click("#stop")
    wait(idle)
    page.type("#text", "three\ue007")
    wait(lambda: page.run("return bodies.length") == 3)
    assert page.run("return bodies") == [["one"], ["two"], ["two", "half", "three"]]
    page.run("say('old')")
    page.click("#new")
    assert page.text("main") == "" and idle()
    page.type("#text", "four\ue007")
    wait(lambda: page.run("return bodies.length") == 4)
    page.run("say('new ' + 'line\\n'.repeat(200))")
    wait(lambda: "new" in page.text("main"))
    assert page.run(HIDDEN_BELOW) < 2, "the page follows an answer"
    page.run("document.querySelector('main').scrollTop = 0; say('last')")
    wait(lambda: "last" in page.text("main"))
    assert page.run(HIDDEN_BELOW) > 1000, "who reads its beginning is left there"
    page.run("end()")
    wait(idle)
    assert page.run("return bodies[3]") == ["four"] and "old" not in page.text("main")


def test_a_chat_in_a_browser(server: Running, tmp_path: Path) -> None:
    """The page at /: a key, a model, an answer as it comes, a new chat, a refusal in words."""
    with driven(tmp_path / "profile") as page:
        page.open(server.url)
        page.type("#key", "second\t")
        wait(lambda: page.run("return document.querySelector('#model').value") == "tiny")
        for _ in range(2):  # one turn each: the model's answers fill its positions
            page.click("#new")
            page.type("#text", "the quick brown")
            page.click("#send")
            wait(lambda: page.run("return document.querySelectorAll('main p.assistant').length") == 1)
            wait(lambda: not page.run("return document.querySelector('#send').disabled"))
            assert "tokens/s" in page.text("#figures") and page.text("main p.user") == "the quick brown"
            assert not page.text("main p.error") and page.text("main p.assistant") not in ("", "…")
        page.run("document.querySelector('#key').value = 'wrong'")
        page.type("#text", "and now?\ue007")
        wait(lambda: page.text("main p.error"))
        assert "send a key that this server knows" in page.text("main p.error")
        page.click("#new")
        assert page.text("main") == ""
        check_interruptions(page)
        said = [line for line in page.complaints() if not any(word in line for word in ("401", "favicon", "[DOM]"))]
        assert not said
        for width, height in ((1280, 800), (390, 844)):
            page.resize(width, height)
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), "wider than the window"


def test_load_test(server: Running, upshift: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "key").write_text("first\n")
    key = ("--api-key-file", tmp_path / "key")
    asked = ("load-test", server.url, *key, "--model", "tiny", "--rate", "5,10", "--duration", "1.5", "--prompt-words", "6")
    answer = upshift(*asked, "--max-tokens", "4", "--html", page, "--json")
    found = json.loads(answer.out)
    assert answer.code == 0 and [phase["rate"] for phase in found["phases"]] == [5.0, 10.0]
    for phase in found["phases"]:
        assert phase["statuses"] == {"200": phase["asked"]} and phase["asked"] > 0
        assert 0 < phase["first_token"]["p50"] <= phase["first_token"]["p99"]
    assert "Load test of tiny" in page.read_text()
    assert upshift("load-test", "http://127.0.0.1:9").code == 2
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "wrong").write_text("third\n")
    for options, words in (
        ((), "send a key that this server knows: Authorization: Bearer KEY, or x-api-key: KEY; give --api-key-file"),
        (("--api-key-file", tmp_path / "wrong"), "answers with status 401"),
        (("--api-key-file", tmp_path / "empty"), "has no key; write a key a line"),
    ):
        refused = upshift("load-test", server.url, *options)
        assert refused.code == 2 and words in refused.err, refused.err
    refused = upshift("load-test", server.url, *key)
    assert refused.code == 2 and "give --model one of tiny, enc" in refused.err


def test_keys(server: Running) -> None:
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 1}
    keys: list[tuple[dict[str, Any], int]] = [
        ({}, 401), ({"Authorization": "Bearer third"}, 401), ({"Authorization": "second"}, 401), (KEY, 200),
        ({"Authorization": "bearer second"}, 200), ({"Authorization": "Bearer schlüssel".encode()}, 200),
    ]  # fmt: skip
    for headers, status in keys:
        assert server.post("/v1/completions", body, headers=headers).status_code == status
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert httpx2.get(f"{server.url}/metrics").status_code == 401


def test_more_than_it_holds(server: Running) -> None:
    """Four rows and four that wait: the others are told when to come again."""
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 200, "temperature": 0}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(24)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 5
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)


class Opened(Exception):
    pass


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_an_address_of_either_kind(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(said: str) -> None:
        assert said.startswith(url) and said[len(url) :].isdigit()
        raise Opened

    monkeypatch.setattr(door, "stopping_on_signals", lambda ended: nullcontext())  # pytest has its own
    with pytest.raises(Opened):
        door.serve({}, door.Address(host, 0), Limits(), on_open=opened)


def test_the_end_lets_answers_end(server: Running) -> None:
    """The last one: SIGTERM. The fixture looks at the exit code."""
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 200, "temperature": 0}
        last = pool.submit(server.post, "/v1/completions", body)
        wait(lambda: server.engine()["in_flight"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert last.result().status_code == 200 and last.result().json()["usage"]["completion_tokens"] == 200
    assert server.process.wait(timeout=30) == 0
