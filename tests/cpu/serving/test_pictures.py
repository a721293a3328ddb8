"""Pictures in messages: the tokens of transformers, beside other requests, and one line for those that are not possible."""

from __future__ import annotations

import base64
import io
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
from test_tokens import Speaking

from upshift.errors import RequestError
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchStatesDecoder
from upshift.inference.generation.media import MediaPrompts
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.serving.engine import chat_template
from upshift.serving.engine.chat_template import ChatTemplate
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.engine.picture_support import PictureReader, computes_pictures
from upshift.serving.messages import EngineRequest, Refused
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
    assert ResponsesRequest.model_validate(openai).to_chat([]).prompts() == expected
    split = [{"role": "user", "content": blocks[:1]}, {"role": "user", "content": blocks[1:]}]
    assert MessagesRequest.model_validate(anthropic | {"messages": split}).to_chat().prompts() == expected


def test_a_picture_is_processed_once(worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    process = MediaPrompts.apply_template
    monkeypatch.setattr(MediaPrompts, "apply_template", lambda *args, **more: calls.append(1) or process(*args, **more))
    request = ChatRequest.model_validate(body_of(part_of("blue"), n=3))
    first, *others = answers(worker, *[request] * 3)
    assert others == [first] * 2 and len(calls) == 1


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
