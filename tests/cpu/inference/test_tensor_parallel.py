"""Models that several ranks compute together: the answers and rows of one process, and what cannot be divided in one line."""

from __future__ import annotations

import base64
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from chat_models import byte_level_tokenizer
from command import Command

from upshift.errors import EngineEnded, JobFailed, RequestError
from upshift.hardware.detect import detect
from upshift.inference import registry, tensor_parallel
from upshift.inference.generation.engines import torch_decoder
from upshift.inference.generation.engines.base import DecoderBuild, Prefix
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights
from upshift.inference.workers import rank_group, rank_process
from upshift.inference.workers.dispatcher import Job, Task
from upshift.inference.workers.rank_group import RankGroup
from upshift.serving.engine.admission import Ticket, TtftEstimator
from upshift.serving.engine.embedding import EmbeddingWorker
from upshift.serving.engine.generation import GenerationWorker, serve_texts
from upshift.serving.engine.scheduler import Scheduler
from upshift.serving.messages import Embed, EngineRequest, Generate, Ready, Refused, Vector

PROMPTS = ("the model writes", "a question about rivers and roads", "north", "every answer to the question", "a", "trees and")
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
SMALLER = {**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 1}
SERVING_SECONDS = 90.0  # of a test's engine; it takes a few
TWO = ("--tensor-parallel", 2)


class ForkedRank:
    """Stands for ``subprocess.Popen`` of a rank: a fork of this process, which has imported everything."""

    started: ClassVar[list[ForkedRank]] = []

    def __init__(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **streams: object) -> None:
        start = command.index(rank_group.RANK)
        self.returncode: int | None = None
        self.waiting = threading.Lock()
        self.started.append(self)
        self.pid = os.fork()
        if not self.pid:
            try:
                os.environ.update(env)
                sys.argv = command[start:]
                assert pass_fds == [int(command[start + 1])]
                rank_process.main()
            finally:
                os._exit(0)

    def wait(self, timeout: float | None = None) -> int:
        with self.waiting:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forks, on a machine with eight cores, and no race."""
    host = detect()
    assert host.cpu is not None
    many_cores = host.changed(cpu=host.cpu.changed(usable_cores=8, physical_cores=8))
    monkeypatch.setattr(tensor_parallel, "detect", lambda: many_cores)
    forks = SimpleNamespace(Popen=ForkedRank, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(rank_group, "subprocess", forks)
    factories = {task: factory._replace(precisions=("fp32",)) for task, factory in registry.ENGINES["torch"].factories.items()}
    others = {name: spec for name, spec in registry.ENGINES.items() if name in ("openvino", "vllm")}
    monkeypatch.setattr(registry, "ENGINES", {"torch": registry.ENGINES["torch"]._replace(factories=factories), **others})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose answers vary, with a vocabulary that two ranks cannot halve, and a file of prompts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_tokenizer()
    vocabulary = len(tokenizer) + 1 - len(tokenizer) % 2
    torch.manual_seed(0)
    special = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **special)),
        "draft": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALLER, **special)),
        "bert": transformers.BertModel(transformers.BertConfig(**LLAMA, vocab_size=vocabulary)),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=vocabulary, decoder_start_token_id=0
            )
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def generate(folder: Path, *options: object) -> tuple[object, ...]:
    ask = ("generate", folder / "llama", "--prompts", folder / "prompts.txt", "--max-new-tokens", 9, "--engine", "torch")
    return (*ask, "--set", "do_sample=true", *options)


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "draft"])
def test_two_ranks_write_the_answers_of_one_process(folder: Path, upshift: Command, tmp_path: Path, draft: bool) -> None:
    options = ("--draft", folder / "draft") if draft else ()
    for name, devices in {"alone": (), "divided": TWO}.items():
        answer = upshift(*generate(folder, "--output", tmp_path / f"{name}.jsonl", *devices, *options))
        assert answer.code == 0, answer.err
        assert ("torch fp32 on 2 devices" in answer.out) == (name == "divided")
    alone, divided = ((tmp_path / f"{name}.jsonl").read_text() for name in ("alone", "divided"))
    assert divided == alone and len(set(alone.splitlines())) == len(PROMPTS)


def test_two_ranks_write_the_rows_of_one_process(folder: Path, upshift: Command, tmp_path: Path) -> None:
    for name, devices in {"alone": (), "divided": TWO}.items():
        ask = ("encode", folder / "llama", "--input", folder / "prompts.txt", "--output", tmp_path / f"{name}.npy")
        answer = upshift(*ask, "--engine", "torch", *devices)
        assert answer.code == 0, answer.err
    alone, divided = (np.load(tmp_path / f"{name}.npy") for name in ("alone", "divided"))
    assert alone.shape == (len(PROMPTS), 32) and 0 < np.abs(alone - divided).max() < 1e-5


def test_a_killed_rank_is_one_line_and_all_ranks_end(
    folder: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[RankGroup] = []

    class Dying(RankGroup):
        def compute(self, method: str, *arguments: object) -> object:
            if method == "step":
                groups.append(self)
                os.kill(self.pids[1], signal.SIGKILL)
            return super().compute(method, *arguments)

    monkeypatch.setattr(torch_decoder, "RankGroup", Dying)
    answer = upshift(*generate(folder, "--output", tmp_path / "out.jsonl", *TWO))
    (line,) = (line for line in answer.err.splitlines() if line.startswith("upshift:"))
    assert answer.code == 1 and "rank 1 of the 2 ranks of the model ended with signal 9 (SIGKILL)" in line
    for pid in groups[0].pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_error_of_one_rank_ends_the_others_that_wait_for_it() -> None:
    group = RankGroup(Job("decimal:Context", {"prec": 9}), 2, "cpu")
    with pytest.raises(JobFailed, match="a worker failed"):
        group.compute("no_such_method")
    with pytest.raises(EngineEnded, match="have ended"):
        group.compute("clear_flags")
    later = RankGroup(Job("decimal:Context", {"prec": 9}), 2, "cpu")
    later.compute("clear_flags")
    with pytest.raises(EngineEnded, match="rank . of the model ended: a worker failed"):  # a server then starts it again
        later.compute("no_such_method")


def test_what_cannot_be_divided_is_one_line(
    folder: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ("--prompts", folder / "prompts.txt", "--output", tmp_path / "out.jsonl")
    texts = ("--input", folder / "prompts.txt", "--output", tmp_path / "rows.npy")
    wrong = {
        "4 heads of queries and 2 of keys and values; use one of 2": ("generate", "llama", *file, "--tensor-parallel", 3),
        "more than the 8 cores that are here; ask for at most 8": ("generate", "wide", *file, "--tensor-parallel", 16),
        "--tensor-parallel 0": ("generate", "llama", *file, "--tensor-parallel", 0),
        "--engine is openvino; leave one": ("generate", "llama", *file, *TWO, "--engine", "openvino"),
        "--engine-set is for --engine vllm, and --tensor-parallel 2": (
            "generate", "llama", *file, *TWO, "--engine-set", "max_num_seqs=2"
        ),
        "--engine-set is for --engine vllm, and --tensor-parallel 2 ": ("serve", "llama", *TWO, "--engine-set", "max_num_seqs=2"),
        "--tensor-parallel 2 divides a model without adapters": ("serve", "llama", *TWO, "--adapter-folder", tmp_path),
        "divides decoders and encoders": ("generate", "t5", *file, *TWO),
        "does not take --tensor-parallel": ("generate", "llama", *file, *TWO, "--backend", "xla"),
        "--tensor-parallel is not possible with --format": ("generate", "llama", *file, *TWO, "--format", "openai-batch"),
        "(BertModel): the model declares no tensor-parallel plan": ("encode", "bert", *texts, *TWO),
    }  # fmt: skip
    wide = transformers.LlamaConfig(**{**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 16}, vocab_size=348)
    transformers.LlamaForCausalLM(wide).save_pretrained(folder / "wide")
    byte_level_tokenizer().save_pretrained(folder / "wide")
    for text, (command, model, *options) in wrong.items():
        answer = upshift(command, folder / model, *options)
        (line,) = (line for line in answer.err.splitlines() if line.startswith("upshift:"))
        assert answer.code == 2 and text in line and "Traceback" not in answer.err, answer.err
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for command, options in {"generate": file, "encode": texts}.items():
        answer = upshift(command, folder / "llama", *options)
        assert answer.code == 2 and "--tensor-parallel 2 for one model" in answer.err, answer.err


SIZES: dict[str, Any] = {"engine": "torch", "concurrency": 2, "prompt_length": 6, "output_length": 4}
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'


def serve_in_time(request: EngineRequest, inbox: queue.Queue[Any], send: Callable[[list[Any]], None]) -> None:
    """Run an engine of the server. After SERVING_SECONDS, end it and its ranks, so that a request without an answer fails."""

    def end() -> None:
        inbox.put(EngineEnded(f"the engine still ran after {SERVING_SECONDS:g} s"))
        for rank in ForkedRank.started:
            rank.kill()

    clock = threading.Timer(SERVING_SECONDS, end)
    clock.daemon = True
    clock.start()
    try:
        serve_texts(request, inbox, send)
    finally:
        clock.cancel()


def ask_server(request: EngineRequest, asked: list[Generate]) -> tuple[list[str], list[float]]:
    """What an engine of the server says to requests that come together: the text of each, and all log-probabilities."""
    inbox: queue.Queue[Any] = queue.Queue()
    said = dict.fromkeys(range(len(asked)), "")
    scores: list[float] = []
    is_over: set[int] = set()

    def send(messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                assert message.setup == f"torch fp32{' on 2 devices' if request.tensor_parallel == 2 else ''}"
                for number, one in enumerate(asked):
                    inbox.put(one.changed(id=number))
            elif hasattr(message, "id"):
                scores.extend(one.logprob for one in (*message.prompt_scores, *message.scores) if one.logprob)
                said[message.id] += message.text
                is_over.update([message.id] if message.last else ())
        if len(is_over) == len(asked):
            inbox.put(None)

    serve_in_time(request, inbox, send)
    return list(said.values()), scores


def test_a_divided_model_serves_the_answers_of_one_process(folder: Path) -> None:
    plain = Generate(prompt=PROMPTS[0], options={"max_new_tokens": 9, "do_sample": False})
    asked = [
        plain,
        plain.changed(prompt=PROMPTS[1], top=2, prompt_top=1),
        plain.changed(options={"max_new_tokens": 9, "do_sample": True, "seed": 5}),
        plain.changed(json_schema=SCHEMA, options={**plain.options, "max_new_tokens": 40}),
        plain.changed(prompt=tuple(range(3, 40)), ignore_eos=True),
        plain,
    ]
    request = EngineRequest(model=str(folder / "llama"), **SIZES)
    texts, scores = ask_server(request, asked)
    divided_texts, divided_scores = ask_server(request.changed(tensor_parallel=2), asked)
    assert divided_texts == texts and len(set(texts)) == len(asked) - 1
    assert divided_scores == pytest.approx(scores, abs=1e-4) and len(scores) > 9
    with pytest.raises(RequestError, match="use one of 2"):
        GenerationWorker(request.changed(tensor_parallel=3))


def build_decoder(folder: Path, ranks: int) -> Any:
    source = find_weights(str(folder / "llama"))
    setup = EngineSetup(engine="torch", precision="fp32", threads=ranks, batch=4, tensor_parallel=ranks)
    return torch_decoder.build_decoder(DecoderBuild(source, setup, folder / "files"))


def run_requests(decoder: Any, chunk: int) -> tuple[list[list[int]], int]:
    """Return the tokens of requests that come while others run, and how many tokens of their prompts were cached.

    No step of the rows waits for more than a chunk of a prompt."""
    estimator = TtftEstimator(token_seconds=0.0, step_seconds=0.0, output_length=8)
    estimator.record_prompts = lambda *_, **__: None  # type: ignore[method-assign]  # times would make the chunks longer
    scheduler = Scheduler(decoder, rows=4, cache_tokens=400, estimator=estimator, chunk_tokens=chunk)
    draws = np.random.default_rng(3)
    begin = draws.integers(3, 60, 34).tolist()
    prompts = [draws.integers(3, 60, size).tolist() for size in (3, 70, 5, 37, 4)]
    prompts += [[*begin, *draws.integers(3, 60, size).tolist()] for size in (30, 20, 1)]
    tickets = []
    for number, prompt in enumerate(prompts):
        options = GenerationOptions(max_new_tokens=9 + number)
        tickets.append(Ticket(number, GeneratedSequence(0, prompt, options, None), 0.0, is_conversation=True))
        scheduler.add(tickets[-1])
        scheduler.step()
        scheduler.step()
    while scheduler.is_busy:
        scheduler.step()
    assert not scheduler.failed
    return [one.sequence.tokens for one in tickets], sum(one.cached_tokens for one in tickets)


def test_chunks_and_cached_prompts_of_ranks_change_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks forget the prompts that the cache drops, and those whose client leaves between two chunks."""
    tokens, cached = run_requests(build_decoder(folder, 1), 4096)
    decoder = build_decoder(folder, 2)
    assert isinstance(decoder, torch_decoder.DividedDecoder)
    chunks: list[int] = []
    compute: Callable[..., Any] = decoder._compute

    def record_chunks(method: str, *arguments: Any) -> Any:
        chunks.extend(arguments[1:] if method == "compute_chunk" else ())
        return compute(method, *arguments)

    monkeypatch.setattr(decoder, "_compute", record_chunks)
    assert run_requests(decoder, 8) == (tokens, cached) and cached > 60
    assert chunks.count(8) > 5, "no prompt was computed beside the rows"
    left = decoder.compute_chunks([list(range(3, 40))], None, lambda: 8)
    assert next(left) is None
    left.close()
    del left
    gc.collect()
    decoder.keep([])
    for number in range(next(decoder._numbers)):  # of all that the ranks ever kept
        decoder.ranks._send(Task("_find", (Prefix(0, number),)))
        answers = [connection.recv() for connection in decoder.ranks._connections]
        assert all("KeyError" in (found.error or "") for found in answers), f"a rank keeps {number}"


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_killed_rank_ends_the_engine_of_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    groups: list[RankGroup] = []
    compute: Callable[..., Any] = RankGroup.compute
    is_ready = threading.Event()

    def compute_once(self: RankGroup, method: str, *arguments: object) -> object:
        groups.append(self)
        if is_ready.is_set() and method == "step":
            os.kill(self.pids[1], signal.SIGKILL)
        return compute(self, method, *arguments)

    monkeypatch.setattr(RankGroup, "compute", compute_once)
    inbox: queue.Queue[Any] = queue.Queue()

    def send(messages: list[Any]) -> None:
        if any(isinstance(message, Ready) for message in messages):
            is_ready.set()
            if is_idle:
                os.kill(groups[-1].pids[1], signal.SIGKILL)
            else:
                inbox.put(Generate(id=1, prompt="a", options={"max_new_tokens": 4}))

    request = EngineRequest(model=str(folder / "llama"), tensor_parallel=2, **SIZES)
    with pytest.raises(EngineEnded, match="a process of the engine has ended" if is_idle else "rank 1 of the 2 ranks"):
        serve_in_time(request, inbox, send)
    groups[-1].close()


def test_the_request_at_which_the_ranks_fail_is_not_offered_to_another_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered before the engine ends. A request that only waits is not, so that another engine takes it."""
    compute: Callable[..., Any] = RankGroup.compute

    def fail_at_long(self: RankGroup, method: str, *arguments: Any) -> object:
        is_long = method == "admit_after" and max(map(len, arguments[0])) > 30
        return compute(self, "no_such_method" if is_long else method, *arguments)

    inbox: queue.Queue[Any] = queue.Queue()
    refused: list[Refused] = []

    def send(messages: list[Any]) -> None:
        refused.extend(message for message in messages if isinstance(message, Refused))
        if any(isinstance(message, Ready) for message in messages):
            monkeypatch.setattr(RankGroup, "compute", fail_at_long)
            for number in (1, 2, 3):
                inbox.put(Generate(id=number, prompt=tuple(range(3, 43 if number == 2 else 6)), options={"max_new_tokens": 9}))

    request = EngineRequest(model=str(folder / "llama"), tensor_parallel=2, **{**SIZES, "concurrency": 1})
    with pytest.raises(EngineEnded, match="of the model ended: a worker failed"):
        serve_in_time(request, inbox, send)
    assert [(one.id, one.status) for one in refused] == [(2, 500)]


def test_a_divided_encoder_serves_the_vectors_of_one_process_until_a_rank_dies(folder: Path) -> None:
    request = EngineRequest(model=str(folder / "llama"), engine="torch", prompt_length=6)
    workers = [EmbeddingWorker(request), EmbeddingWorker(request.changed(tensor_parallel=2))]
    assert workers[1].ready.setup == "torch fp32 on 2 devices"
    rows = []
    for worker in workers:
        assert worker.take(Embed(id=1, texts=PROMPTS)) == []
        worker.encode_waiting()
        vectors = [one.row for one in worker.take_answers() if isinstance(one, Vector)]
        rows.append(np.array([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in vectors]))
    assert rows[0].shape == (len(PROMPTS), 32) and 0 < np.abs(rows[0] - rows[1]).max() < 1e-5
    ranks: Any = workers[1].encoding.engine
    os.kill(ranks.pids[0], signal.SIGKILL)
    ranks.wait()
    workers[1].take(Embed(id=2, texts=PROMPTS))
    with pytest.raises(EngineEnded, match="rank 0 of the 2 ranks"):
        workers[1].encode_waiting()
