"""The server with an engine that takes whole requests: by a toy and a pretended vLLM, and by a real one if there is one."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from chat_models import byte_level_tokenizer
from command import Command
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from pretended_vllm import REFUSED
from running_server import CHAT, START_SECONDS, Running, serving, wait
from safetensors.numpy import save_file
from test_generate_vllm import NEEDS_REAL, REAL, Pretended, save
from test_serving_parts import Clock, answer, ticket
from transformers import AutoModelForCausalLM

from upshift.errors import EngineEnded
from upshift.inference.adapters import engine_arguments
from upshift.inference.generation.engines.text_engine import Progress, TextRequest
from upshift.serving.engine.admission import TtftEstimator
from upshift.serving.engine.answer_pieces import make_pieces
from upshift.serving.engine.generation import GenerationWorker, serve_texts
from upshift.serving.engine.text_scheduler import TextScheduler
from upshift.serving.messages import EngineRequest, Generate, Ready, Refused


class WholeRequests:
    """A toy that gives ``at_once`` tokens of every request in a step. The first token of a prompt may not be 0."""

    weight_bytes = 0
    positions = 100
    cache_tokens = None
    pids: tuple[int, ...] = ()

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.begun = 0
        self.live: dict[int, list[int]] = {}
        self.refused: list[int] = []

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None: ...

    def sampling(self, sequence: Any) -> dict[str, Any]:
        return {}

    def greedy(self, new_tokens: int) -> dict[str, Any]:
        return {}

    def add(self, requests: Iterable[TextRequest]) -> list[int]:
        first = self.begun
        for request in requests:
            self.begun += 1
            if request.prompt[0] == 0:
                self.refused.append(self.begun)
            else:
                self.live[self.begun] = list(request.prompt)
        return list(range(first + 1, self.begun + 1))

    def step(self) -> list[Progress]:
        assert self.live or self.refused, "an engine with nothing to do never answers"
        steps = [Progress(number, (), has_ended=True, refusal="no") for number in self.refused]
        self.refused = []
        for number, tokens in self.live.items():
            new = answer(tokens, self.at_once)
            tokens += new
            steps.append(Progress(number, new))
        return steps

    def abort(self, requests: Iterable[int]) -> None:
        for number in requests:
            self.live.pop(number, None)

    def wait(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    rows=st.integers(1, 4), at_once=st.integers(1, 3), cancelled=st.sets(st.integers(0, 11)),
)  # fmt: skip
def test_every_request_gets_its_tokens_and_no_others(
    lengths: list[tuple[int, int]], rows: int, at_once: int, cancelled: set[int]
) -> None:
    clock = Clock()
    engine = WholeRequests(at_once)
    pace = TtftEstimator(token_seconds=0.0, step_seconds=0.0, output_length=8)
    scheduler = TextScheduler(engine, rows, 40, pace, clock=clock)
    tickets = [ticket(number, clock, prompt=prompt, new=new) for number, (prompt, new) in enumerate(lengths)]
    assert all(scheduler.add(one) is None for one in tickets)
    said: dict[int, list[int]] = {}
    steps = 0
    while scheduler.is_busy:
        if steps == 2:
            for number in cancelled:
                scheduler.cancel(number)
        steps += 1
        for one, token in scheduler.step():
            said.setdefault(one.id, []).append(token)
        assert len(scheduler.live) <= rows and sum(one.reserved_tokens for one in scheduler.live) <= 40
    refused = {one.id for one in tickets if one.sequence.prompt[0] == 0}
    assert refused >= {one.id for one, _ in scheduler.failed} >= refused - cancelled and not engine.live
    for one, (_, new) in zip(tickets, lengths, strict=True):
        if one.id not in cancelled | refused:
            assert said[one.id] == answer(one.sequence.prompt, new)


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Pretended:
    model = save(tmp_path_factory.mktemp("model"), layers=1, is_table=True)
    return Pretended(model, tmp_path_factory.mktemp("environment"))


def run(worker: GenerationWorker, requests: list[Generate]) -> list[Any]:
    """Return the joined pieces of each request's answer, or its refusal."""
    answers: list[Any] = []
    for request in requests:
        refused = worker.take(request)
        pieces = [] if refused is None else [refused]
        while worker.is_busy:
            pieces += make_pieces(list(worker.run_pass())) + worker.take_failures()
        if isinstance(pieces[-1], Refused):
            answers.append((pieces[-1].status, pieces[-1].why))
            continue
        scores = [(one.token, one.rank, round(one.logprob or 0, 3)) for piece in pieces for one in piece.scores]
        of_prompt = [(one.token, one.rank, round(one.logprob or 0, 3)) for piece in pieces for one in piece.prompt_scores]
        text = "".join(piece.text for piece in pieces)
        answers.append((text, sum(piece.tokens for piece in pieces), pieces[-1].ending, scores, of_prompt))
    return answers


def test_answers_are_those_of_an_engine_that_computes_token_by_token(pretended: Pretended) -> None:
    plain = Generate(id=1, prompt="roads to every question", options={"max_new_tokens": 9, "do_sample": False})
    sizes: dict[str, Any] = {"concurrency": 2, "prompt_length": 6, "output_length": 4}
    by_token = GenerationWorker(EngineRequest(model=pretended.model, engine="torch", **sizes))
    whole = GenerationWorker(EngineRequest(model=pretended.model, engine="vllm", engine_python=str(pretended.python), **sizes))
    ready = [worker.prepare() for worker in (by_token, whole)]
    assert [one.rows for one in ready] == [2, 2] and ready[1].setup == "vllm fp32" and ready[1].cache_tokens == 500
    (text, *_), *_ = run(by_token, [plain])
    requests = [
        plain,
        plain.changed(options={**plain.options, "stop_strings": [text[3]]}),
        plain.changed(top=2),
        plain.changed(top=0, prompt_top=1),
        plain.changed(ignore_eos=True, stop_token_ids=(5,)),
        plain.changed(prompt=tuple(range(3, 63))),
    ]
    expected = run(by_token, requests)
    assert run(whole, requests) == expected and expected[-1][0] == 400
    assert pretended.start["logprobs_mode"] == "raw_logprobs" and pretended.start["max_num_seqs"] == 2
    lacking = [plain.changed(options={**plain.options, "no_repeat_ngram_size": 2}), plain.changed(prompt=(REFUSED, 4))]
    (first_status, first), (second_status, second) = run(whole, lacking)
    assert first_status == second_status == 400 and "vllm has no no_repeat_ngram_size" in first and "this prompt is ref" in second
    assert run(whole, [plain]) == expected[:1], "the others go on"
    assert whole.generator.text_engine is not None
    whole.generator.text_engine.close()


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_killed_engine_ends_the_process_that_started_it(pretended: Pretended, is_idle: bool) -> None:
    request = EngineRequest(
        model=pretended.model, engine="vllm", engine_python=str(pretended.python), concurrency=1, prompt_length=6, output_length=4
    )
    inbox: queue.Queue[Any] = queue.Queue()

    def send(messages: list[Any]) -> None:
        if any(isinstance(message, Ready) for message in messages):
            os.kill(pretended.start["pid"], signal.SIGKILL)
            if not is_idle:
                inbox.put(Generate(id=1, prompt="a", options={"max_new_tokens": 4}))

    with pytest.raises(EngineEnded, match="engine"):
        serve_texts(request, inbox, send)


def test_adapters_that_vllm_does_not_compute_are_refused(pretended: Pretended, upshift: Command, tmp_path: Path) -> None:
    def write(name: str, **config: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
        save_file({}, folder / "adapter_model.safetensors")
        return str(folder)

    engine = ("--engine", "vllm", "--engine-python", pretended.python)
    for text, folder in {
        "has lora_bias": write("bias", lora_bias=True), "takes at most 512": write("large", r=600),
        "the rank 520": write("pattern", rank_pattern={"q": 520}),
    }.items():  # fmt: skip
        result = upshift("serve", pretended.model, *engine, "--adapter", f"a={folder}")
        assert result.code == 2 and text in result.err and len(result.err.strip().splitlines()) == 1, result.err
    result = upshift("serve", pretended.model, *engine, "--adapter-folder", tmp_path)
    assert result.code == 2 and "computes the adapters that it starts with" in result.err
    result = upshift("serve", pretended.model, "--engine", "torch", "--engine-set", "max_num_seqs=2")
    assert result.code == 2 and "--engine-set is for --engine vllm" in result.err
    small = write("small", rank_pattern={"q": 20})
    assert engine_arguments([small]) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 32}


NAME = "adapted"
PROMPT = "north roads to every question and north"
NEW = 8
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A server of a real vLLM with two replicas and an adapter. It starts in about a minute."""
    folder = tmp_path_factory.mktemp("served")
    save(folder / "m", layers=2, positions=512)
    tokenizer = byte_level_tokenizer(None)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "m")
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "m"), config).save_pretrained(folder / NAME)
    replicas = min(os.cpu_count() or 1, 2)
    options = (
        "m", "--engine", "vllm", "--engine-python", str(REAL), "--engine-set", f"data_parallel_size={replicas}", "--port", "0",
        "--adapter", f"{NAME}={folder / NAME}", "--concurrency", "4", "--prompt-length", "8", "--output-length", "8",
    )  # fmt: skip
    with serving(folder, folder / "log", *options) as running:
        yield running, folder


def complete(running: Running, *, timeout: float = 60.0, **body: Any) -> dict[str, Any]:
    request = {"model": "m", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, **body}
    reply = running.post("/v1/completions", request, timeout=timeout)
    return {"status": reply.status_code, **reply.json()}


@NEEDS_REAL
def test_vllm_serves_the_tokens_of_transformers(real: tuple[Running, Path]) -> None:
    running, folder = real
    tokenizer = byte_level_tokenizer(None)
    ids = tokenizer(PROMPT).input_ids
    reference = AutoModelForCausalLM.from_pretrained(folder / "m").eval()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = tokenizer.decode(reference.generate(torch.tensor([ids]), **options)[0, len(ids) :], skip_special_tokens=True)
    with ThreadPoolExecutor(4) as clients:  # on both replicas
        answers = list(clients.map(lambda _: complete(running), range(4)))
    assert [one["choices"][0]["text"] for one in answers] == [expected] * 4
    repeated = [complete(running, prompt=[5, 6, 7] * 100) for _ in range(2)]  # vLLM's blocks of a cache have 128 tokens on a CPU
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in repeated] == [0, 256]
    assert repeated[0]["choices"] == repeated[1]["choices"]
    too_long = complete(running, prompt=[5] * 512)
    assert too_long["status"] == 400 and "maximum context length is 512 tokens" in too_long["error"]["message"]
    with_form = complete(running, guided_json=SCHEMA, max_tokens=30)["choices"][0]
    assert re.fullmatch(r'\{\s*"a"\s*:\s*[12]\s*\}', with_form["text"]) and with_form["finish_reason"] == "stop"
    scored = complete(running, prompt=ids, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [one[str(token)]["logprob"] for one, token in zip(scored[1:], ids[1:], strict=True)]
    assert found == pytest.approx([float(row[token]) for row, token in zip(logprobs, ids[1:], strict=False)], abs=1e-3)


@NEEDS_REAL
def test_an_adapter_is_a_model_of_its_own(real: tuple[Running, Path]) -> None:
    from peft import PeftModel

    running, folder = real
    tokenizer = byte_level_tokenizer(None)
    ids = tokenizer(PROMPT).input_ids
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "m"), folder / NAME).eval()
    tokens = adapted.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(ids) :]
    text = complete(running, model=NAME)["choices"][0]["text"]
    assert text == tokenizer.decode(tokens, skip_special_tokens=True) != complete(running)["choices"][0]["text"]
    listed = httpx2.get(f"{running.url}/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("m", None), (NAME, "m")]


@NEEDS_REAL
def test_a_killed_vllm_starts_again_and_a_drain_answers_what_runs(real: tuple[Running, Path]) -> None:
    running, _ = real
    (pid,) = running.engine("m")["processes"]
    first, *_ = psutil.Process(pid).children(recursive=True)
    first.kill()
    wait(lambda: running.engine("m")["state"] != "ready", 10.0)
    refused = complete(running, timeout=START_SECONDS)
    assert refused["status"] in (200, 503)  # it waits for the start, or says that the engine starts again
    wait(lambda: running.engine("m")["state"] == "ready")
    assert complete(running)["status"] == 200
    body = {"model": "m", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(rest)
    deadline = time.monotonic() + 30
    while running.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running.process.poll() == 0 and not psutil.pid_exists(first.pid)
