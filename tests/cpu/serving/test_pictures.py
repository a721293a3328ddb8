"""Pictures in messages: the tokens of transformers, beside other requests, and one line for those that are not possible."""

from __future__ import annotations

import base64
import io
import queue
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import transformers
from image_models import COLORS, qwen_prompt, save_llava, save_qwen
from test_serve_faults import app_of, posted
from test_serving_parts import Clock, made
from test_tokens import Speaking

from upshift.errors import RequestError
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchStatesDecoder
from upshift.inference.generation.media import MediaPrompt, MediaPrompts
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.serving.engine import chat_template
from upshift.serving.engine.admission import Ticket
from upshift.serving.engine.chat_template import ChatTemplate
from upshift.serving.engine.generation import GenerationWorker, answer_requests
from upshift.serving.engine.picture_support import PictureReader, computes_pictures
from upshift.serving.messages import Cancel, EngineRequest, Piece, Refused, Tokenize, Tokens
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.protocols.anthropic_requests import MessagesRequest
from upshift.serving.protocols.responses_requests import ResponsesRequest

pytestmark = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the pictures")
NEW = 6
BEFORE, AFTER = ({"type": "text", "text": text} for text in ("a ", "text"))


def file_of(color: str, form: str = "PNG") -> str:
    """Return a picture of one color as a file in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 36), COLORS[color]).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def part_of(color: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file_of(color)}", "detail": "auto"}}


def body_of(*content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"model": "m", "messages": messages, "max_tokens": NEW, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> GenerationWorker:
    pictures = folder / "pictures"
    pictures.mkdir()
    lengths = {"prompt_length": 4, "output_length": 4, "concurrency": 4}
    worker = GenerationWorker(EngineRequest(model=str(folder), engine="torch", image_folder=str(pictures), **lengths))
    worker.prepare()
    return worker


def answers(worker: GenerationWorker, *requests: ChatRequest) -> list[list[int]]:
    """Return the tokens of requests that run together."""
    for number, request in enumerate(requests):
        (prompt, *_) = request.prompts()
        refused = worker.answer(request.engine_request(prompt, seed=0).model_copy(update={"id": number}))
        assert refused == []
    tokens: list[list[int]] = [[] for _ in requests]
    while worker.is_busy:
        for new in worker.run_pass():
            tokens[new.request.ticket.id].append(new.token)
    return tokens


def by_transformers(folder: Path, *content: dict[str, Any]) -> list[int]:
    from PIL import Image

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    shown = [
        {"type": "image", "image": Image.new("RGB", (40, 36), COLORS[part["color"]])} if "color" in part else part
        for part in content
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": shown}], tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens: list[int] = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def test_pictures_beside_texts(folder: Path, worker: GenerationWorker) -> None:
    """A template that writes parts alone also gets the texts of chats without pictures."""
    chats = [body_of(AFTER), body_of(BEFORE, part_of("red"), AFTER), body_of(BEFORE, part_of("blue"), AFTER)]
    chats.append(body_of(AFTER) | {"messages": [{"role": "user", "content": "text"}]})
    text = by_transformers(folder, AFTER)
    red, blue = (by_transformers(folder, BEFORE, {"color": color}, AFTER) for color in COLORS)
    assert answers(worker, *map(ChatRequest.model_validate, chats)) == [text, red, blue, text]
    assert red != blue


def test_three_protocols_ask_the_same(worker: GenerationWorker) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": file_of("red")}
    blocks = [BEFORE, {"type": "image", "source": source}, AFTER]
    anthropic = {"model": "m", "max_tokens": NEW, "messages": [{"role": "user", "content": blocks}]}
    items = [
        {"type": "input_text", "text": "a "}, {"type": "input_image", "image_url": part_of("red")["image_url"]["url"]},
        {"type": "input_text", "text": "text"},
    ]  # fmt: skip
    openai = {"model": "m", "input": [{"role": "user", "content": items}]}
    expected = ChatRequest.model_validate(body_of(BEFORE, part_of("red"), AFTER)).prompts()
    assert MessagesRequest.model_validate(anthropic).to_chat().prompts() == expected
    answered = ResponsesRequest.model_validate(openai)
    items: Any = answered.own_items()
    assert answered.to_chat(items).prompts() == expected
    split = [{"role": "user", "content": blocks[:1]}, {"role": "user", "content": blocks[1:]}]
    assert MessagesRequest.model_validate(anthropic | {"messages": split}).to_chat().prompts() == expected


def test_a_picture_is_processed_once(worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    process = MediaPrompts.apply_template
    monkeypatch.setattr(MediaPrompts, "apply_template", lambda *args, **more: calls.append(1) or process(*args, **more))
    request = ChatRequest.model_validate(body_of(part_of("blue"), n=3))
    first, *others = answers(worker, *[request] * 3)
    assert others == [first] * 2 and len(calls) == 1


class Watched:
    """Counts the steps of an engine, and lets other threads wait until there are some more."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._changed = threading.Condition()
        self.steps = 0

    def step(self, tokens: np.ndarray) -> np.ndarray:
        with self._changed:
            self.steps += 1
            self._changed.notify_all()
        logits: np.ndarray = self._step(tokens)
        return logits

    def wait(self) -> bool:
        last = self.steps + 5
        with self._changed:
            return self._changed.wait_for(lambda: self.steps >= last, timeout=10)


def test_other_texts_go_on_while_pictures_are_read_and_computed(
    worker: GenerationWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor and tower are so slow that five steps come meanwhile. One client leaves before each of them ends."""
    decoder = worker.scheduler.engine
    watched = Watched(decoder.step)
    came: dict[str, list[bool]] = {"reading": [], "computing": []}
    inbox: queue.Queue[Any] = queue.Queue()
    process, compute = MediaPrompts.apply_template, decoder.compute_apart

    def slow(kind: str, function: Any) -> Any:
        def wait_first(*args: Any, **more: Any) -> Any:
            if kind == "computing" and not isinstance(args[0][0], MediaPrompt):
                return function(*args, **more)
            came[kind].append(watched.wait())
            if len(came[kind]) == 1:  # the second request leaves while it is read, and the third while it is computed
                inbox.put(Cancel(id={"reading": 1, "computing": 2}[kind]))
                came[kind].append(watched.wait())
            return function(*args, **more)

        return wait_first

    monkeypatch.setattr(MediaPrompts, "apply_template", slow("reading", process))
    monkeypatch.setattr(decoder, "compute_apart", slow("computing", compute))
    monkeypatch.setattr(decoder, "step", watched.step)
    monkeypatch.setattr(worker, "_prompt_thread", None)  # that of the others, afterwards
    bodies = [body_of(AFTER, max_tokens=1500, ignore_eos=True), body_of(part_of("blue"), BEFORE)]
    bodies += [body_of(part_of("blue"), AFTER), body_of(BEFORE, part_of("red"), BEFORE, return_token_ids=True)]
    for number, body in enumerate(bodies):
        request = ChatRequest.model_validate(body)
        inbox.put(request.engine_request(request.prompts()[0], seed=0).model_copy(update={"id": number}))
    inbox.put(Tokenize(id=9, prompt=ChatRequest.model_validate(bodies[3]).prompts()[0]))
    said: list[Any] = []

    def send(messages: list[Any]) -> None:
        said.extend(messages)
        if any(getattr(message, "id", 0) == 3 and message.last for message in messages if isinstance(message, Piece)):
            inbox.put(Cancel(id=0))
            inbox.put(None)

    worker.watch(inbox)
    answer_requests(worker, inbox, send)
    assert came == {"reading": [True] * 4, "computing": [True] * 3}, "that of the last two is one"
    assert not any(isinstance(message, Refused) for message in said)
    pieces = [message for message in said if isinstance(message, Piece)]
    assert {piece.id for piece in pieces} == {0, 3}
    tokens = [token for piece in pieces if piece.id == 3 for token in piece.token_ids]
    assert tokens == by_transformers(folder, BEFORE, {"color": "red"}, BEFORE)
    (ids,) = {piece.prompt_ids for piece in pieces if piece.id == 3 and piece.prompt_ids}
    assert [message.ids for message in said if isinstance(message, Tokens)] == [ids]
    while worker.is_busy:
        worker.run_pass()


def test_a_picture_that_cannot_be_computed_fails_alone(worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = worker.scheduler.engine.compute_apart

    def fail(prompts: Any) -> Any:
        if isinstance(prompts[0], MediaPrompt):
            raise MemoryError("no room for it")
        return compute(prompts)

    monkeypatch.setattr(worker.scheduler.engine, "compute_apart", fail)
    for number, body in enumerate([body_of(AFTER), body_of(part_of("red"))]):
        request = ChatRequest.model_validate(body)
        assert worker.answer(request.engine_request(request.prompts()[0], seed=0).model_copy(update={"id": number})) == []
    tokens, failed = 0, []
    while worker.is_busy:
        tokens += len(worker.run_pass())
        failed += worker.take_failures()
    assert tokens == NEW and [(one.id, one.status, one.failure) for one in failed] == [(1, 500, "MemoryError")]


def test_pictures_that_would_wait_too_long_are_not_read() -> None:
    """The time to read them counts, and that of their inputs beside the tokens, for those that come after them, too."""
    clock = Clock()
    scheduler = made(clock, max_ttft=1.0)
    assert scheduler.begin_reading(0, 0.0) is None and scheduler.end_reading(0, 0.4)
    assert [scheduler.begin_reading(number, 0.0) for number in (1, 2)] == [None, None]
    refused = scheduler.begin_reading(3, 0.0)
    assert refused is not None and refused.status == 429 and refused.retry_after == pytest.approx(0.2)
    scheduler.cancel(1)
    assert not scheduler.end_reading(1, 0.4) and scheduler.begin_reading(3, 0.0) is None
    scheduler.estimator.record_prompts(3, 0.003 + 0.6, input_bytes=400)
    pixels = {"pixel_values": torch.zeros(100)}
    for number, refuses in enumerate([False, True]):
        sequence = GeneratedSequence(0, MediaPrompt([1, 2, 3], pixels), GenerationOptions(max_new_tokens=4), None)
        refused = scheduler.add(Ticket(number, sequence, clock()))
        assert (refused is not None and refused.status == 429) is refuses


def refusal(worker: Any, body: dict[str, Any], path: str = "/tokenize") -> httpx2.Response:
    answer = posted(app_of(Speaking(worker))[0], body, path=path)[0]
    assert answer.status_code == 400, answer.text
    return answer


URL = "image_url.url: pictures are taken as data: URLs"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/a.png", URL), ("file:a.png", URL), ("file://host/a.png", URL), ("data:text/plain;base64,AA==", URL),
        ("data:image/png;base64,!", "messages.0 cannot be read (it is no picture that pillow knows); send a PNG or JPEG"),
        ("data:image/png;base64,AA==", "cannot be read (it is no picture that pillow knows)"),
        (f"data:image/png;base64,{file_of('red')[:60]}", "cannot be read (it is no picture that pillow knows)"),
    ],
)  # fmt: skip
def test_pictures_that_cannot_be_read(url: str, words: str, worker: GenerationWorker) -> None:
    messages = body_of({"type": "image_url", "image_url": {"url": url}})["messages"]
    assert words in refusal(worker, {"messages": messages}).json()["error"]["message"]


def test_a_picture_by_the_path_of_a_file(worker: GenerationWorker, folder: Path) -> None:
    """The tokens are those of the same picture in base64, also if the file changes."""
    (folder / "pictures" / "a sub").mkdir()
    file = folder / "pictures" / "a sub" / "red.png"
    for color in ("red", "blue"):
        file.write_bytes(base64.b64decode(file_of(color)))
        named = {"type": "image_url", "image_url": {"url": f"{(folder / 'pictures').as_uri()}/a%20sub/../a%20sub/red.png"}}
        requests = [ChatRequest.model_validate(body_of(part, AFTER)) for part in (named, part_of(color))]
        by_path, by_data = answers(worker, *requests)
        assert by_path == by_data and len(by_path) == NEW


@pytest.mark.parametrize(
    "path", ["../config.json", "%2e%2e/config.json", "link/config.json", "link.png", "loop", "none.png", "", "a%00"]
)
def test_no_path_leads_out_of_the_folder(path: str, worker: GenerationWorker, folder: Path) -> None:
    pictures = folder / "pictures"
    for name, target in (("link", folder), ("link.png", folder / "config.json"), ("loop", pictures / "loop")):
        if not (pictures / name).is_symlink():
            (pictures / name).symlink_to(target)
    messages = body_of({"type": "image_url", "image_url": {"url": f"{pictures.as_uri()}/{path}"}})["messages"]
    message = refusal(worker, {"messages": messages}).json()["error"]["message"]
    assert "is no file within the folder of --image-folder; correct the path" in message


def test_a_server_without_a_folder_reads_no_file(worker: GenerationWorker) -> None:
    prompt = ({"role": "user", "content": [{"type": "image", "url": Path("/a.png").as_uri()}]},)
    with pytest.raises(RequestError, match="this server reads none; start it with --image-folder"):
        PictureReader(worker.generator, ChatTemplate(None)).read_files(prompt)


def test_what_goes_with_no_picture(worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ChatRequest.model_validate(body_of(part_of("red"), prompt_logprobs=1))
    (refused,) = worker.answer(asked.engine_request(asked.prompts()[0], seed=0))
    assert isinstance(refused, Refused) and "leave out prompt_logprobs, or the picture" in refused.why
    typed = body_of(part_of("red"), {"type": "text", "text": "<image>"})["messages"]
    assert "has the text <image>, which is a control token" in refusal(worker, {"messages": typed}).text
    monkeypatch.setattr(chat_template, "MAX_PIXELS", 1000)
    large = body_of(part_of("red"), {"type": "text", "text": "x"})["messages"]
    assert "it has more than 1,000 pixels" in refusal(worker, {"messages": large}).text
    system = [{"role": "system", "content": [part_of("red")]}]
    assert "only a message of the user has pictures" in refusal(worker, {"messages": system}).text


def test_an_image_that_takes_fewer_positions_than_tokens(tmp_path: Path) -> None:
    """Each row goes on at a position of its own, and an engine that counts them otherwise is found out."""
    source = find_weights(str(save_qwen(tmp_path)))
    setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=4, hint="latency")
    build = DecoderBuild(source, setup, tmp_path)
    decoder = TorchStatesDecoder(build)
    prompts: list[Any] = [qwen_prompt(0.9), [5, 6, 7], qwen_prompt(-0.5)]

    def alone(prompt: Any) -> list[int]:
        ids = torch.tensor([list(prompt)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **getattr(prompt, "inputs", {})}
        tokens: list[int] = decoder.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        return tokens

    expected = [alone(prompt) for prompt in prompts]
    logits: list[Any] = []
    found: list[list[int]] = [[] for _ in prompts]
    for step in range(NEW + len(prompts)):
        if step < len(prompts):
            logits.append(decoder.admit([prompts[step]])[0])
        tokens = [int(row.argmax()) for row in logits]
        for row, token in zip(found, tokens, strict=False):
            row.append(token)
        logits = list(decoder.step(np.array(tokens)))
    assert [row[:NEW] for row in found] == expected
    decoder.keep([])
    assert computes_pictures(decoder, build, prompts[0])
    decoder._counter = None
    assert not computes_pictures(decoder, build, prompts[0])
