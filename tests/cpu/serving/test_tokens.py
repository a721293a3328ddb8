"""/tokenize and /detokenize: as the tokenizer itself, of texts and of chats, in messages of any number."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from chat_models import CHATML, byte_level_tokenizer, save_model
from test_serve_faults import Recording, app_of, posted
from test_serving_parts import of_several
from test_tool_calls import TEMPLATES, TOOLS, USER, folder, make_tokenizer, message_of  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.errors import RequestError
from upshift.inference.generation.media import MediaPrompts
from upshift.inference.generation.prompts import Prompts
from upshift.models.source import ModelSource
from upshift.serving.app import Server, make_app
from upshift.serving.engine import tokenization
from upshift.serving.engine.admission import Ticket
from upshift.serving.engine.answer_pieces import NewToken, make_pieces
from upshift.serving.engine.chat_template import ChatTemplate, find_turn_end
from upshift.serving.engine.generation import GenerationWorker, answer_requests
from upshift.serving.engine.tokenization import (
    LONG_CHARACTERS,
    PromptReader,
    PromptThread,
    ReadPrompt,
    takes_long,
    token_replies,
)
from upshift.serving.engine_process import EngineProcess, RequestRefused
from upshift.serving.messages import (
    Cancel,
    Detokenize,
    EngineRequest,
    Generate,
    Piece,
    Refused,
    TemplateOptions,
    Tokenize,
    Tokens,
)
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.request_checks import Limits

TEMPLATE = "{% if brief %}brief{% endif %}"


class Speaking(Recording):
    """An engine that answers with the tokenizer of a worker of this process."""

    tokens, text = EngineProcess.tokens, EngineProcess.text

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.worker = worker

    async def _replies(self, request: Any) -> Any:
        for reply in self.worker.answer(request):
            if isinstance(reply, Refused):
                raise RequestRefused(reply)
            yield reply


@pytest.fixture(scope="module")
def worker(folder: Path) -> Any:  # noqa: F811
    tokenizer = make_tokenizer(TEMPLATES["hermes"])
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return GenerationWorker(EngineRequest(model=str(folder), engine="torch"))


def asked(worker: Any, path: str, **body: Any) -> httpx2.Response:
    return posted(app_of(Speaking(worker))[0], body, path=path)[0]


@pytest.mark.parametrize("size", [1, 3, 2048])
def test_a_text_there_and_back(size: int, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many messages as it takes."""
    monkeypatch.setattr(tokenization, "TOKENS_PER_MESSAGE", size)
    monkeypatch.setattr(tokenization, "CHARACTERS_PER_MESSAGE", size)
    tokenizer = worker.generator.prompts.tokenizer
    for text in ("the quick fox <|end|> \N{SNOWMAN}", ""):
        found = asked(worker, "/tokenize", model="m", prompt=text, return_token_strs=True).json()
        ids = tokenizer(text).input_ids
        assert found == {
            "count": len(ids),
            "max_model_len": None,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids),
        }
        assert asked(worker, "/detokenize", tokens=ids).json() == {"prompt": text}
    assert asked(worker, "/tokenize", prompt="fox", add_special_tokens=False).json()["token_strs"] is None


def test_a_chat(worker: Any) -> None:
    tokenizer = worker.generator.prompts.tokenizer

    def text_of(**body: Any) -> str:
        text: str = tokenizer.decode(asked(worker, "/tokenize", messages=[USER], **body).json()["tokens"])
        return text

    plain = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert text_of() == plain
    assert text_of(add_generation_prompt=False) == plain.removesuffix("<|assistant|>")
    assert text_of(chat_template_kwargs={"brief": True}) == "brief" + plain
    assert "<tool>" in text_of(tools=TOOLS)
    history = [USER, message_of([("now", {})]), {"role": "tool", "tool_call_id": "call_0" * 4, "content": "noon"}]
    found = asked(worker, "/tokenize", messages=history, tools=TOOLS).json()["tokens"]
    assert "<tool_call>" in tokenizer.decode(found) and "noon" in tokenizer.decode(found)


def test_the_settings_of_the_tokenizer(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's tokenizer_backend=remote reads them. They come in as many messages as it takes."""
    monkeypatch.setattr(tokenization, "CHARACTERS_PER_MESSAGE", 64)
    found = asyncio.run(server_of(Speaking(worker)).tokenizer_info())
    tokenizer = worker.generator.prompts.tokenizer
    assert (found["eos_token"], found["chat_template"]) == (tokenizer.eos_token, tokenizer.chat_template)
    assert found["tokenizer_class"] == type(tokenizer).__name__ and "/" not in str(found.get("name_or_path", ""))
    json.dumps(found, allow_nan=False)


def server_of(engine: Any) -> Server:
    metrics = Metrics()
    return Server(ModelPool({"m": of_several(engine)}, metrics), metrics, Limits())


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "give either a prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, "give either a prompt or messages"),
    ("/tokenize", {"prompt": "x", "tools": TOOLS}, "need messages instead of a prompt"),
    ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "leave out add_special_tokens"),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize is not used"),
    ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template is not possible here"),
    ("/tokenize", {"prompt": "x", "model": "other"}, "is not served here"),
    ("/detokenize", {"tokens": [320]}, "token 320 is not one of the model's 320"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ("/detokenize", {}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "words"), WRONG)
def test_wrong_bodies(path: str, body: dict[str, Any], words: str, worker: Any) -> None:
    answer = asked(worker, path, **body)
    assert answer.status_code == (404 if "served" in words else 400) and words in answer.json()["error"]["message"], answer.text


def test_the_only_model_needs_no_name(worker: Any) -> None:
    metrics = Metrics()
    engines = {name: of_several(Speaking(worker)) for name in "ab"}
    answer = posted(make_app(Server(ModelPool(engines, metrics), metrics, Limits())), {"prompt": "x"}, path="/tokenize")[0]
    assert answer.status_code == 400 and "model is missing; give one of a, b" in answer.text


def test_an_encoder_has_tokens_but_no_chats() -> None:
    tokenizer = make_tokenizer("")

    def refuse(request: Tokenize) -> list[int]:
        raise AssertionError("asked for a chat")

    (tokens,) = token_replies(Tokenize(id=7, prompt="fox"), tokenizer, refuse, 320)
    (text,) = token_replies(Detokenize(id=8, tokens=tokens.ids), tokenizer, refuse, 320)  # type: ignore[attr-defined]
    assert (tokens.id, text.id, text.text) == (7, 8, "fox")  # type: ignore[attr-defined]
    (refused,) = token_replies(Tokenize(id=9, prompt=(USER,)), tokenizer, refuse, 320)
    assert isinstance(refused, Refused) and refused.id == 9


def test_what_follows_the_last_message_of_a_chat(worker: Any) -> None:
    """A new answer, nothing, or more of that message, in which control tokens stay plain text."""
    tokenizer = worker.generator.prompts.tokenizer
    messages = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "The fox <|end|>"}]
    ids: dict[str, list[int]] = {}
    options_of: dict[str, Any] = {"nothing": {"add_generation_prompt": False}, "open": {"continue_final_message": True}}
    for name, options in ({"answer": {}} | options_of).items():
        ids[name] = asked(worker, "/tokenize", model="m", messages=messages, **options).json()["tokens"]
    texts = {name: tokenizer.decode(tokens, skip_special_tokens=False) for name, tokens in ids.items()}
    assert texts["answer"] == texts["nothing"] + "<|assistant|>" and texts["nothing"] == texts["open"] + "<|end|>"
    assert texts["open"].endswith("The fox <|end|>")
    both = asked(worker, "/tokenize", messages=messages, add_generation_prompt=True, continue_final_message=True)
    assert both.status_code == 400 and "set add_generation_prompt to false" in both.text


@pytest.mark.usefixtures("worker")  # which saves the tokenizer
def test_long_prompts_are_read_while_others_are_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Texts and chats, for an answer or for their tokens: the engine takes steps meanwhile, and whoever leaves gets nothing."""
    worker = GenerationWorker(EngineRequest(model=str(folder), engine="torch", prompt_length=8, output_length=4, concurrency=2))
    worker.prepare()
    read, step = PromptReader.read, worker.scheduler.step
    stepped = threading.Event()
    waited: list[bool] = []
    inbox: queue.Queue[Any] = queue.Queue()

    def read_slowly(reader: PromptReader, *prompt: Any) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            stepped.clear()
            waited.append(stepped.wait(30))
        return read(reader, *prompt)

    def take_step() -> Any:
        stepped.set()
        return step()

    monkeypatch.setattr(PromptReader, "read", read_slowly)
    monkeypatch.setattr(worker.scheduler, "step", take_step)
    long = "the quick fox " * (LONG_CHARACTERS // 14 + 1)
    chat = ({"role": "user", "content": long},)
    endless = {"max_new_tokens": 100}
    first = Generate(id=1, prompt="the fox", options=endless, ignore_eos=True)
    cut = {"max_prompt_tokens": 8, "truncation_side": "left", "with_token_ids": True, "options": {"max_new_tokens": 2}}
    requests = [first, Generate(id=2, prompt=long, **cut), Generate(id=3, prompt=chat, **cut), Generate(id=4, prompt=long, **cut)]
    for request in (*requests, Tokenize(id=5, prompt=chat), Cancel(id=4)):
        inbox.put(request)
    said: list[Any] = []

    def send(messages: list[Any]) -> None:
        said.extend(messages)
        ended = {message.id for message in said if getattr(message, "last", False)}
        if ended >= {1, 2, 3, 5} and not any(message is None for message in inbox.queue):
            inbox.put(None)

    worker.watch(inbox)
    monkeypatch.setattr(tokenization, "deepcopy", None)  # the running answers would wait for a copy of the tokenizer
    answer_requests(worker, inbox, send)
    monkeypatch.undo()
    assert waited == [True] * 3, "the one that left is not read"
    pieces = [message for message in said if isinstance(message, Piece)]
    assert {piece.id for piece in pieces} == {1, 2, 3}
    ids = {piece.id: piece.prompt_ids for piece in pieces if piece.prompt_ids}
    tokenizer = worker.generator.prompts.tokenizer
    whole = worker._read_prompt(Tokenize(prompt=chat))
    assert ids == {2: tuple(tokenizer(long).input_ids[-8:]), 3: tuple(whole[-8:])}
    assert [token for message in said if isinstance(message, Tokens) for token in message.ids] == whole


class Panic(BaseException):
    """As the Rust code of tokenizers raises it: it is no Exception."""


ENDINGS = (ValueError, MemoryError, RecursionError, Panic, SystemExit, KeyboardInterrupt, GeneratorExit)


def test_every_ending_of_a_read_is_an_answer() -> None:
    """And the prompts behind it are read, without those that nobody waits for any longer."""
    answers: queue.Queue[ReadPrompt] = queue.Queue()
    begun: list[int] = []
    wanted = set(range(len(ENDINGS) + 3)) - {1, len(ENDINGS) + 1}

    def read(request: Any) -> list[int]:
        begun.append(request.id)
        if request.id < len(ENDINGS):
            raise ENDINGS[request.id]("why")
        return [7]

    thread = PromptThread(read, answers.put, wanted.__contains__)
    for number in range(len(ENDINGS) + 3):
        thread.begin(Tokenize(id=number, prompt="x"))
    found = [answers.get(timeout=30) for _ in wanted]
    assert [one.request.id for one in found] == begun == sorted(wanted)
    assert all(isinstance(one.read, Exception) and "why" in str(one.read) for one in found[:-2])
    assert [one.read for one in found[-2:]] == [[7], [7]]


def test_a_panic_of_the_tokenizer_fails_its_own_request(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and chats that the engine itself reads: the process, with the requests of others, goes on."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Panic("called Option::unwrap() on a None value")

    prompts = worker.generator.prompts
    monkeypatch.setattr(prompts, "tokenize", fail)
    monkeypatch.setattr(type(prompts.tokenizer), "__call__", fail)
    for request in (Generate(id=1, prompt="x"), Generate(id=1, prompt=(USER,)), Tokenize(id=1, prompt="x")):
        (refused,) = worker.answer(request)
        assert isinstance(refused, Refused) and (refused.status, refused.failure) == (500, "RuntimeError"), refused


GIVEN = "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}[answer]"


@pytest.mark.parametrize("own", ["", "{% for message in messages %}{{ message.content }}{% endfor %}"])
def test_a_given_template_writes_the_chats(own: str, tmp_path: Path) -> None:
    """It replaces a template that the model has. The engine does not start with a template that writes no chat."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = own or None
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    request = EngineRequest(model=str(tmp_path), engine="torch", chat_template=GIVEN)
    worker = GenerationWorker(request)
    chat = ({"role": "user", "content": "a question"},)
    (tokens,) = worker.answer(Tokenize(id=1, prompt=chat))
    assert tokens.ids == tuple(tokenizer("[user] a question [answer]", add_special_tokens=False).input_ids)  # type: ignore[attr-defined]
    assert worker._template.replaces == bool(own)
    for template, words in (("{% for", "is no Jinja template"), ("{{ 'hello' }}", "does not write a chat")):
        with pytest.raises(RequestError, match=f"--chat-template {words}"):
            GenerationWorker(request.changed(chat_template=template))
    (answered,) = GenerationWorker(request.changed(chat_template=None)).answer(Tokenize(id=1, prompt=chat))
    assert own or "start the server with --chat-template" in answered.why  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["im", "xy"])
def test_an_answer_ends_where_a_given_template_ends_a_turn(name: str, tmp_path: Path) -> None:
    """At the token for it, or at its text if the tokenizer has no such token. Answers to plain texts go on."""
    tokenizer = byte_level_tokenizer(None, adds_bos=False)
    template = CHATML.replace("im_", f"{name}_")
    request = EngineRequest(model=str(save_model(tmp_path, tokenizer)), engine="torch", chat_template=template)
    worker = GenerationWorker(request)
    ids = tokenizer(f"yes<|{name}_end|>\n<|{name}_start|>user\nfox").input_ids

    def answer(**fields: Any) -> Piece:
        request = Generate(id=1, options={"max_new_tokens": 99}, **fields)
        sequence = worker._make_sequence(request)
        opened = worker._open_request(request, Ticket(1, sequence, 0.0))
        tokens: list[NewToken] = []
        for token in ids:
            sequence.add(token)
            tokens.append(NewToken(opened, token, sequence.ending, not tokens, None))
            if sequence.ending is not None:
                break
        (piece,) = make_pieces(tokens)
        assert isinstance(piece, Piece)
        return piece

    for shows_stop in (False, True):
        piece = answer(prompt=(USER,), shows_stop_string=shows_stop)
        assert (piece.text, piece.ending, piece.stop_string) == ("yes", "stop", None)
    for more in ({"prompt": "x"}, {"prompt": (USER,), "ignore_eos": True}):
        piece = answer(**more)
        assert piece.text.endswith("fox") and piece.ending is None


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for message in messages %}{{ message.content + eos_token }}{% endfor %}", "</s>"),
        ("{% for message in messages %}{{ message.content }}\n\n{% endfor %}", ""),
        (GIVEN, ""),
        ("{% if messages|length == 2 %}{{ messages[0].content }} {{ messages[1].content }} END{% endif %}", ""),
        ("{% for one in messages %}{{ one.content }}{{ '|' if one.role == 'assistant' else '>' }}{% endfor %}", "|"),
    ],
)
def test_the_end_of_a_turn_is_what_follows_each_answer(template: str, end: str) -> None:
    """What a template writes behind the last turn alone is no end of a turn, and neither is white space."""
    assert find_turn_end(ChatTemplate(byte_level_tokenizer(template))) == end


@pytest.mark.parametrize("owns", [(False, False), (False, True), (True, False)])
def test_a_template_that_only_the_processor_has_is_replaced_too(owns: tuple[bool, bool]) -> None:
    tokenizer, processor = (SimpleNamespace(chat_template="{{ messages }}" if own else None) for own in owns)
    prompts = Prompts.__new__(Prompts)
    prompts.tokenizer = tokenizer
    prompts.media = MediaPrompts(ModelSource(reference="m", directory=None, config={}))
    prompts.media.__dict__["processor"] = processor  # as if it had been loaded
    assert prompts.use_template(GIVEN) == any(owns)
    assert tokenizer.chat_template == processor.chat_template == GIVEN


@pytest.mark.parametrize("marks", [*tokenization.FILL_MARKS, ()])
def test_a_suffix_follows_the_answer(marks: tuple[str, ...]) -> None:
    """The prompt has the control tokens of the tokenizer. If the tokenizer has none, the suffix is rejected."""
    tokenizer = byte_level_tokenizer(adds_bos=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    prompts: Any = SimpleNamespace(tokenizer=tokenizer, media=None, tokenize=lambda texts: tokenizer(texts).input_ids)
    reader = PromptReader(prompts, allow_special=False)
    if not marks:
        with pytest.raises(RequestError, match="suffix needs control tokens"):
            reader.read("a = ", None, TemplateOptions(), "b")
        return
    parts = [tokenizer(text).input_ids for text in ("a = ", "; print(a)")]
    before, after, middle = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    assert reader.read("a = ", None, TemplateOptions(), "; print(a)") == [before, *parts[0], after, *parts[1], middle]


def test_a_suffix_belongs_to_a_text() -> None:
    engine = Recording()
    app, _ = app_of(engine)
    asked: list[tuple[Any, str]] = [("x", "y"), ("x", ""), ([5], "y")]
    bodies: list[dict[str, Any]] = [{"prompt": prompt, "suffix": suffix} for prompt, suffix in asked]
    text, empty, ids, cut = posted(app, *bodies, {**bodies[0], "truncate_prompt_tokens": 9})
    assert [request.suffix for request in engine.requests] == ["y", None] and text.status_code == empty.status_code == 200
    assert ids.status_code == 400 and "suffix belongs to a prompt that is a text" in ids.json()["error"]["message"]
    assert cut.status_code == 400 and "truncate_prompt_tokens would cut the prompt" in cut.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "MUCH"},
        {"prompt": "x", "suffix": "MUCH"},
        {"prompt": ({"role": "user", "content": "MUCH"},)},
        {"prompt": (USER,), "tools": '["MUCH"]'},
        {"prompt": (USER,), "template": TemplateOptions(variables='{"brief": "MUCH"}')},
    ],
)
def test_a_long_text_in_any_field_is_read_in_the_thread(fields: dict[str, Any]) -> None:
    """The engine's own thread reads the short ones, and computes the answers of others meanwhile."""
    request = Generate(**fields)
    long = request.to_json().replace("MUCH", "x" * (LONG_CHARACTERS + 1))
    assert not takes_long(request) and takes_long(Generate.from_json(long, origin="the request"))
