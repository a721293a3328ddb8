"""Requests of every kind leave nothing behind: the memory of an engine and of the web server does not grow with their number."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from image_models import save_chat_model
from test_pictures import part_of
from test_serve_engines import Letters
from test_serve_faults import Recording, posted
from test_serving_parts import of_several
from test_tool_calls import TEMPLATES, TOOLS, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.serving.app import Server, make_app
from upshift.serving.engine import embedding
from upshift.serving.engine.answer_pieces import make_pieces
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.engine.main import write_line
from upshift.serving.engine.scheduler import PromptCache, Scheduler
from upshift.serving.engine_process import Vectors
from upshift.serving.messages import Cancel, Detokenize, Embed, EngineRequest, Generate, LearnedLoad, Piece, Tokenize
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.protocols.responses_store import ResponseStore

EACH = 15  # requests of each kind in a round
SETTLED_ROUNDS = 2  # in which caches fill
ROUNDS = 2
LEFT = EACH * ROUNDS - 5  # of one type: a kind of request that leaves one thing behind leaves more
CONTAINERS: tuple[type[Any], ...] = (dict, list, set, deque)
FULL = LearnedLoad(answer_lengths=(3,) * 256, ttft_ratios=(1.0,) * 256)  # so that nothing more is learned
TEXT_KINDS = 10
WORDS = ("the quick brown fox ", "jumps over a lazy dog ", "while seven wizards ")


def growth(make_round: Callable[[], None]) -> dict[str, int]:
    """Return what ROUNDS rounds have added: objects by their types, and the items in containers of each type.

    The first count makes some objects itself."""
    for _ in range(SETTLED_ROUNDS):
        make_round()
        before = count_objects()
    for _ in range(ROUNDS):
        make_round()
    added = count_objects() - before
    return {name: number for name, number in added.items() if number >= LEFT}


def count_objects() -> Counter[str]:
    gc.collect()
    objects = gc.get_objects()
    counts = Counter(type(one).__name__ for one in objects)
    for one in objects:
        kind = type(one)
        container = next((base for base in CONTAINERS if issubclass(kind, base)), None)
        if container is not None:
            counts[f"items of a {kind.__name__}"] += container.__len__(one)
    return counts


class OwnList(list[int]):
    pass


def test_a_kind_of_request_that_leaves_one_thing_is_found() -> None:
    """The thing may lie in any container. A round that leaves nothing is not reported."""
    kept: list[Any] = [{}, OrderedDict(), defaultdict(int), Counter(), [], OwnList(), set(), deque()]
    numbers = count()

    def make_round() -> None:
        for number in (next(numbers) for _ in range(EACH)):
            for container in kept:
                if isinstance(container, dict):
                    container[number] = [number]  # of what can hold others: the collector ignores a dict of numbers
                else:
                    (container.add if isinstance(container, set) else container.append)(number)

    assert {f"items of a {type(container).__name__}" for container in kept} <= growth(make_round).keys()
    assert growth(lambda: None) == {}


def save_talker(folder: Path) -> Path:
    tokenizer = make_tokenizer(TEMPLATES["hermes"])
    tokenizer.save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(**small, vocab_size=320, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def texts(number: int) -> dict[str, Any]:
    """Return the fields of the request with this number: one of TEXT_KINDS kinds, and no two prompts are the same."""
    text = f"{number} " + WORDS[number % 3] * (1 + number % 5)
    chat = ({"role": "user", "content": text},)
    kinds: list[dict[str, Any]] = [
        {"prompt": chat},
        {"prompt": text},
        {"prompt": chat, "tools": json.dumps(TOOLS)},
        {"prompt": chat, "tools": json.dumps(TOOLS), "forced_tools": ("now",)},
        {"prompt": str(number), "top": 2, "prompt_top": 1},
        {"prompt": text, "regex": f"[a-z]{{{1 + number % 40}}}"},
        {"prompt": chat, "json_schema": json.dumps({"type": "object", "properties": {str(number % 40): {"type": "null"}}})},
        {"prompt": chat, "adapter": f"none{number}"},  # rejected
        {"prompt": text, "stop_token_ids": (10**9,)},  # rejected
        {"prompt": tuple(range(3, 90)), "options": {"max_new_tokens": 3, "seed": number, "do_sample": True}},
    ]
    assert len(kinds) == TEXT_KINDS
    return kinds[number % TEXT_KINDS]


def pictures(number: int) -> dict[str, Any]:
    """Return the fields of the request with this number: its text is unlike the others, so its picture is read for it."""
    parts = [{"type": "text", "text": f"{number}"}, part_of(("red", "blue")[number % 2])]
    return {"prompt": ({"role": "user", "content": parts},)}


@pytest.mark.parametrize(
    ("save", "fields_of", "kinds"), [(save_talker, texts, TEXT_KINDS), (lambda at: save_chat_model(at, "llava"), pictures, 1)]
)
def test_an_engine_keeps_nothing_of_its_requests(
    save: Callable[[Path], Path],
    fields_of: Callable[[int], dict[str, Any]],
    kinds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chats, texts, tools, forms, scores, pictures: answered, canceled and rejected ones."""
    if fields_of is pictures and find_spec("PIL") is None:
        pytest.skip("pillow is not installed: it reads the pictures")
    monkeypatch.setattr("upshift.inference.generation.media.CACHED_BYTES", 2**16)
    request = EngineRequest(model=str(save(tmp_path)), engine="torch", prompt_length=4, output_length=4, learned=FULL)
    worker = GenerationWorker(request)
    worker.prepare()
    assert isinstance(worker.scheduler, Scheduler)
    worker.scheduler._prompt_cache = PromptCache(500)
    numbers = count()

    def answer_round() -> None:
        for number in (next(numbers) for _ in range(EACH * kinds)):
            fields = {"options": {"max_new_tokens": 1 + number % 4}, **fields_of(number)}
            worker.answer(Generate(id=number, **fields))
            worker.answer(Tokenize(id=number, prompt=f"text {number}"))
            worker.answer(Detokenize(id=number, tokens=(3, 4)))
            if number % 7 == 0:
                worker.answer(Cancel(id=number))
            while len(worker.scheduler.tickets) >= 16:
                run_pass()
        while worker.is_busy:
            run_pass()

    def run_pass() -> None:
        for message in [*make_pieces(worker.run_pass()), *worker.take_failures(), worker.heartbeat()]:
            write_line(message)

    assert growth(answer_round) == {}


def test_an_encoder_keeps_nothing_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered, canceled and rejected ones, texts that fail, and token ids."""
    monkeypatch.setattr(embedding, "Encoder", Letters)
    worker = embedding.EmbeddingWorker(EngineRequest(model="m", prompt_length=2))
    numbers = count()

    def answer_round() -> None:
        for number in (next(numbers) for _ in range(EACH)):
            for texts in (("a" * (1 + number % 9), "b"), ("ok", "wow!"), ("~",), ((3, 4),), ("a",), ((10**6,),)):
                worker.take(Embed(id=number, texts=texts))
            worker.take(Embed(id=-1, texts=("left",)))
            worker.take(Cancel(id=-1))
            while worker.waiting:
                worker.encode_waiting()
            for message in [*worker.take_answers(), worker.heartbeat()]:
                write_line(message)
        worker.encoder.passes.clear()  # type: ignore[union-attr]

    assert growth(answer_round) == {}


class Endless(Recording):
    """An engine whose answers to the prompt "for ever" have no end, and which has a vector for each text."""

    async def pieces(self, request: Generate) -> Any:
        while "for ever" in str(request.prompt):
            yield Piece(id=1, text="y", tokens=1, prompt_tokens=1)
            await asyncio.sleep(0.001)
        async for piece in super().pieces(request):
            yield piece

    async def vectors(self, request: Embed) -> Vectors:
        return Vectors(["AACAPw=="] * len(request.texts), len(request.texts))


def leave(app: Any, path: str, body: dict[str, Any]) -> None:
    """Post a request, and close the connection after the beginning of its answer."""

    async def run() -> None:
        has_begun = asyncio.Event()
        requests = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> dict[str, Any]:
            for request in requests:
                return request
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                has_begun.set()

        headers = [(b"content-type", b"application/json"), (b"host", b"m")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "client": ("127.0.0.1", 1)}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(run())


def test_the_web_server_keeps_nothing_of_its_requests() -> None:
    """Whole and streamed answers in each protocol, vectors, kept responses that follow each other, clients that leave, and
    requests for what is not there."""
    engine, encoder = Endless(), Endless()
    encoder.ready = encoder.ready.changed(task="encode")
    metrics = Metrics()
    server = Server(ModelPool({"m": of_several(engine), "e": of_several(encoder)}, metrics), metrics)
    server.responses._store = ResponseStore(max_responses=4)
    app = make_app(server)
    numbers = count()
    for number in range(200):  # the addresses that urllib keeps are as many as it ever keeps
        urlsplit(f"http://m/{number}")

    def answer_round() -> None:
        for number in (next(numbers) for _ in range(EACH)):
            chat = [{"role": "user", "content": f"hello {number}"}]
            for_ever = [{"role": "user", "content": f"for ever {number}"}]
            talk = {"model": "m", "messages": chat}
            found = posted(app, talk, {**talk, "stream": True}, path="/v1/chat/completions")
            found += posted(app, {"model": "m", "prompt": f"{number}"})
            found += posted(app, {**talk, "max_tokens": 5}, path="/v1/messages")
            found += posted(app, talk, {**talk, "stream": False}, path="/api/chat")
            found += posted(app, {"model": "m", "prompt": f"{number}"}, path="/api/generate")
            found += posted(app, {"model": "e", "input": f"{number}"}, path="/v1/embeddings")
            found += posted(app, {"model": "e", "input": [f"{number}"]}, path="/api/embed")
            (first,) = posted(app, {"model": "m", "input": f"{number}"}, path="/v1/responses")
            more = {"model": "m", "input": "more", "previous_response_id": first.json()["id"]}
            found += posted(app, more, path="/v1/responses")
            assert [answer.status_code for answer in found] == [200] * len(found), [answer.text for answer in found]
            posted(app, {"prompt": 5}, {"prompt": "x", "model": f"m{number}"})
            posted(app, {"a": 1}, path=f"/nowhere/{number}")
            leave(app, "/v1/chat/completions", {"model": "m", "messages": for_ever, "stream": True})
            leave(app, "/api/chat", {"model": "m", "messages": for_ever})
        engine.requests.clear()
        encoder.requests.clear()

    assert growth(answer_round) == {}


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_cached_prompt_takes_the_bytes_that_are_reserved_for_it(precision: Any, width: int, tmp_path: Path) -> None:
    """A prompt that begins with the cached one has the logits of a prompt that was computed whole."""
    source = find_weights(str(save_talker(tmp_path)))
    setup = EngineSetup(engine="torch", precision=precision, threads=1, batch=2)
    decoder = TorchDecoder(DecoderBuild(source, setup, tmp_path))
    prompt = list(range(3, 43))
    decoder.admit([[*range(50, 90), *prompt], prompt])
    prefix = decoder.prefix_of_row(1)
    assert sum(states.nbytes for states in prefix.states) == len(prompt) * 2 * 16 * width  # keys and values of one layer
    decoder.keep([])
    begun = decoder.admit([[*prompt, 7]], prefix)
    decoder.keep([])
    assert begun == pytest.approx(decoder.admit([[*prompt, 7]]), abs=1e-6 if precision == "fp32" else 2e-3)
