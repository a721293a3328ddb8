"""LoRA adapters without merging: each request gets the tokens of peft's own generate(), whatever runs beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from peft import LoraConfig, PeftModel, get_peft_model
from running_server import Running, serving, write_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.serving.engine.adapters import check_fits
from upshift.serving.engine.answer_pieces import make_pieces
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.engine_process import EngineProcess
from upshift.serving.messages import Done, EngineRequest, Generate, LoadAdapter, Piece, UnloadAdapter

PROMPTS = ("the quick brown fox", "seven wizards", "lazy dog while the moon", "jumps over")
LENGTH = 12
LATER = {"model": "later", "prompt": "fox", "max_tokens": 2}


def write_adapter(models: Path, name: str, *, seed: int, saves_embedding: bool = False, **fields: Any) -> Path:
    """Save an adapter of ``tiny`` whose weights change the tokens."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **fields})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(models / "tiny"), config)
    for weight_name, weight in model.named_parameters():
        if "lora_" in weight_name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(models / "adapters" / name, save_embedding_layers=saves_embedding)
    return models / "adapters" / name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("adapters"))
    write_adapter(folder, "first", seed=1)
    write_adapter(folder, "second", seed=2, r=2, target_modules=["up_proj", "o_proj", "lm_head", "embed_tokens"])
    write_adapter(folder, "third", seed=3, use_rslora=True, rank_pattern={"layers.0.self_attn.q_proj": 2})
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Running]:
    adapters = [f"--adapter={name}={models / 'adapters' / folder}" for name, folder in (("a.b", "first"), ("two", "second"))]
    options = ("--port", "0", "--concurrency", "4", "--adapter-folder", str(models / "adapters"))
    with serving(models, models / "log", "tiny", *adapters, *options) as running:
        yield running


def peft_texts(models: Path, folder: str | None) -> list[str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "tiny")
    model: Any = AutoModelForCausalLM.from_pretrained(models / "tiny")
    if folder is not None:
        model = PeftModel.from_pretrained(model, str(models / "adapters" / folder))
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.generate(input_ids=ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def test_requests_for_several_adapters_run_together(server: Running, models: Path) -> None:
    """With rows of all adapters and of the model alone at the same time, and with prompts that are cached for one of them."""
    expected = {"tiny": peft_texts(models, None), "a.b": peft_texts(models, "first"), "two": peft_texts(models, "second")}
    assert len({tuple(texts) for texts in expected.values()}) == 3, "the adapters change the tokens"
    asked = [(name, prompt) for prompt in range(len(PROMPTS)) for name in expected] * 3

    def ask(name: str, prompt: int) -> str:
        body = {"model": name, "prompt": PROMPTS[prompt], "max_tokens": LENGTH, "temperature": 0}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, *zip(*asked, strict=True)))
    assert texts == [expected[name][prompt] for name, prompt in asked]


def test_a_conversation_is_cached_for_its_adapter_alone(server: Running) -> None:
    chat = [{"role": "user", "content": "the quick brown fox jumps over a lazy dog while seven wizards watch the moon " * 2}]
    cached = {}
    for name in ("a.b", "a.b", "two", "tiny"):
        answer = server.post("/v1/chat/completions", {"model": name, "messages": chat, "max_tokens": 2, "temperature": 0}).json()
        cached[name] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached["a.b"] > 20 and cached["two"] == cached["tiny"] == 0


def test_adapters_are_models(server: Running) -> None:
    listed = {model["id"]: model.get("parent") for model in server.client.models.list().model_dump()["data"]}
    assert listed == {"tiny": None, "a.b": "tiny", "two": "tiny"}
    assert server.client.models.retrieve("a.b").id == "a.b"
    missing = server.post("/v1/completions", {"model": "other", "prompt": "x"})
    assert missing.status_code == 404 and "ask for one of tiny, a.b, two" in missing.text
    message = {"model": "two", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    assert server.post("/v1/messages", message).json()["model"] == "two"
    assert server.post("/tokenize", {"model": "two", "prompt": "fox"}).json()["count"] > 0


def test_loading_and_unloading_while_the_server_runs(server: Running, models: Path) -> None:
    assert server.post("/v1/completions", LATER).status_code == 404
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": "third"})
    assert loaded.status_code == 200 and "added successfully" in loaded.text, loaded.text
    body = {"model": "later", "prompt": list(PROMPTS), "max_tokens": LENGTH, "temperature": 0}
    texts = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert texts == peft_texts(models, "third")
    again = server.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": "third"})
    assert again.status_code == 400 and "is served already" in again.text
    with server.client.completions.create(model="later", prompt="fox", max_tokens=200, stream=True, temperature=0) as stream:
        first = next(iter(stream)).choices[0].text
        unloaded = server.post("/v1/unload_lora_adapter", {"lora_name": "later"})
        assert unloaded.status_code == 200 and "removed successfully" in unloaded.text, unloaded.text
        rest = "".join(chunk.choices[0].text for chunk in stream)
    server.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": "third"})
    whole = server.post("/v1/completions", {**LATER, "max_tokens": 200, "temperature": 0}).json()["choices"][0]["text"]
    assert first + rest == whole, "a request goes on with the adapter that it began with"
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "later"}).status_code == 200
    assert server.post("/v1/completions", LATER).status_code == 404
    missing = server.post("/v1/unload_lora_adapter", {"lora_name": "later"})
    assert missing.status_code == 404 and "loaded are: a.b, two" in missing.text


@pytest.fixture(scope="module")
def worker(models: Path) -> GenerationWorker:
    worker = GenerationWorker(EngineRequest(model=str(models / "tiny"), takes_adapters=True, concurrency=2))
    assert worker.prepare().setup.startswith("torch")
    return worker


@pytest.mark.parametrize("order", ["12", "21"])
def test_the_last_adapter_and_the_first_can_leave(order: str, worker: GenerationWorker, models: Path) -> None:
    """An engine that began without adapters ends as it was."""

    def ask(adapter: str | None) -> str:
        options = {"max_new_tokens": 8, "do_sample": False}
        assert worker.take(Generate(id=1, prompt="fox", adapter=adapter, options=options)) is None
        text = ""
        while worker.is_busy:
            text += "".join(piece.text for piece in make_pieces(worker.run_pass()) if isinstance(piece, Piece))
        return text

    alone = ask(None)
    for name, folder in (("1", "first"), ("2", "second")):
        (answer,) = worker.answer(LoadAdapter(name=name, folder=str(models / "adapters" / folder)))
        assert isinstance(answer, Done)
    texts = {name: ask(name) for name in order}
    assert len({alone, *texts.values()}) == 3
    for number, name in enumerate(order):
        assert isinstance(worker.answer(UnloadAdapter(name=name))[0], Done)
        assert ask(None) == alone and all(ask(other) == texts[other] for other in order[number + 1 :])
        refused = worker.take(Generate(id=1, prompt="fox", adapter=name))
        assert refused is not None and "is not loaded" in refused.why


def test_adapters_that_cannot_be_loaded(server: Running, models: Path) -> None:
    broken = models / "adapters" / "broken"
    shutil.copytree(models / "adapters" / "first", broken)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    for path, words in (
        ("../tiny", "is not within the folder of --adapter-folder"),
        (str(models / "tiny"), "is not within"),
        ("none", "has no adapter_config.json"),
        ("broken", "and the model takes"),
        ("a\x00b", "is not within"),
    ):
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": path})
        assert answer.status_code == 400 and words in answer.text, answer.text
        assert path.startswith("/") or str(models) not in answer.text
    assert server.post("/v1/completions", {**LATER, "model": "two"}).status_code == 200


def test_what_is_wrong_with_an_adapter_is_said_before_an_engine_starts(
    upshift: Command, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: EngineProcess) -> None:
        raise AssertionError(f"{self.request.model} was started")

    monkeypatch.setattr(EngineProcess, "start", start)
    dora = write_adapter(models, "dora", seed=4, use_dora=True)
    saving = write_adapter(models, "saving", seed=5, modules_to_save=["lm_head"])
    tiny, first = models / "tiny", models / "adapters" / "first"
    bare = models / "bare"
    bare.mkdir()
    shutil.copy(first / "adapter_config.json", bare)
    for arguments, words in (
        ((tiny, "--adapter", "x"), "--adapter 'x' is no adapter; write NAME=FOLDER"),
        ((tiny, "--adapter", f"x={models / 'none'}"), "has no adapter_config.json"),
        ((tiny, "--adapter", f"x={tiny}"), "has no adapter_config.json"),
        ((tiny, "--adapter", f"x={bare}"), "has no adapter_model.safetensors"),
        ((tiny, "--adapter", f"x={dora}"), "use_dora"),
        ((tiny, "--adapter", f"x={saving}"), "modules_to_save"),
        ((tiny, "--adapter", f"tiny={first}"), "a model is called 'tiny'"),
        ((tiny, "--adapter", f"x={first}", "--adapter", f"x={first}"), "two adapters are called 'x'"),
        ((tiny, "--adapter", f"x={first}", "--engine", "onnxruntime"), "--engine onnxruntime computes no adapters"),
        ((f"a={models / 'enc'}", f"b={models / 'bare'}", "--adapter", f"x={first}"), "which is not served here"),
        ((tiny, "--adapter-folder", models / "none"), "does not exist"),
    ):
        answer = upshift("serve", *arguments, "--port", 0)
        assert answer.code == 2 and words in answer.err, answer.err


def test_an_adapter_of_another_model(upshift: Command, models: Path) -> None:
    """An engine says so before its race."""
    whole = write_adapter(models, "whole", seed=6, target_modules=["lm_head"], saves_embedding=True)
    source = find_model(str(models / "tiny"))
    with pytest.raises(RequestError, match="a weight of the model itself"):
        check_fits(source, whole)
    check_fits(source, models / "adapters" / "second")
    other = models / "other"
    shutil.copytree(models / "tiny", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    answer = upshift("serve", other, "--port", 0, "--adapter", f"x={models / 'adapters' / 'first'}")
    assert answer.code == 2 and "is not an adapter for" in answer.err and "layers.1" in answer.err, answer.err


def test_an_adapter_that_is_gone_does_not_stop_a_restart(models: Path) -> None:
    """The model and the other adapters go on; requests for the lost one are told why, and it can be unloaded."""
    gone = str(models / "adapters" / "gone")
    folders = {"here": str(models / "adapters" / "first"), "lost": gone}
    worker = GenerationWorker(EngineRequest(model=str(models / "tiny"), takes_adapters=True, adapters=folders, is_restart=True))
    ready = worker.prepare()
    assert ready.chats, "the chat page asks for it"
    assert list(ready.lost_adapters) == ["lost"] and gone not in ready.lost_adapters["lost"]
    assert worker.take(Generate(id=1, prompt="fox", adapter="here")) is None
    refused = worker.take(Generate(id=2, prompt="fox", adapter="lost"))
    assert refused is not None and refused.status == 400 and "was lost when the engine restarted" in refused.why
    assert isinstance(worker.answer(UnloadAdapter(name="lost"))[0], Done)
