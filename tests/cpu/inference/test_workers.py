"""Texts that several workers share: rows in order, each exactly once, whichever worker dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from decimal import Context, Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from command import Command
from hypothesis import given
from hypothesis import strategies as st
from test_media import saved, write_sound
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from upshift.errors import JobFailed, RequestError
from upshift.inference import registry
from upshift.inference.resumable_output import UnfinishedLines
from upshift.inference.workers import text_workers
from upshift.inference.workers.dispatcher import Answer, Dispatcher, Job, Task
from upshift.inference.workers.options import encoding_workers
from upshift.inference.workers.process_pool import ProcessPool
from upshift.inference.workers.ray_pool import RayPool
from upshift.inference.workers.worker import Worker

ENGINES = registry.ENGINES  # of the actors of a Ray cluster, whatever a test changes here
ROOTS = Job("decimal:Context", {"prec": 9})
TASKS = [Task("sqrt", (Decimal(number),)) for number in range(40)]
EXPECTED = [Context(prec=9).sqrt(Decimal(number)) for number in range(40)]


class OwnPool:
    """Workers in this process. ``script`` chooses who answers next, and who dies: a number below 0."""

    def __init__(self, job: Job, size: int, *, script: Iterator[int] | None = None, devices: int = 1) -> None:
        self.size = size
        self.job = job
        self.script = script if script is not None else iter(())
        self.workers = [Worker(job) for _ in range(size)]
        self.given: dict[int, Task] = {}
        self.most_given = 0

    def send(self, worker: int, task: Task) -> None:
        assert worker not in self.given
        self.given[worker] = task

    def receive(self) -> tuple[int, Answer | None]:
        choice = next(self.script, 0)
        worker = sorted(self.given)[choice % len(self.given)]
        task = self.given.pop(worker)
        return worker, None if choice < 0 else self.workers[worker].compute(task)

    def restart(self, worker: int) -> str:
        self.workers[worker] = Worker(self.job)
        return "signal 9"

    def close(self) -> None: ...


@given(size=st.integers(1, 4), script=st.lists(st.integers(0, 9)), deaths=st.sets(st.integers(0, 20), max_size=2))
def test_results_come_in_order_and_once_in_any_order_of_answers_and_deaths(
    size: int, script: list[int], deaths: set[int]
) -> None:
    choices = [-1 - choice if place in deaths else choice for place, choice in enumerate(script)]
    pool = OwnPool(ROOTS, size, script=iter(choices))
    dispatcher = Dispatcher(pool)
    begun = []

    def tasks() -> Iterator[Task]:
        for task in TASKS:
            begun.append(task)
            yield task

    dispatcher.set_up(Task("clear_flags"))
    results = []
    for result in dispatcher.in_order(tasks()):
        results.append(result)
        assert len(begun) - len(results) <= 3 * size  # what waits in memory is bounded
    assert results == EXPECTED


def test_a_task_that_kills_its_workers_and_one_that_fails_end_the_work() -> None:
    with pytest.raises(JobFailed, match="worker 1 of 2 ended 3 times at the same work, last with signal 9"):
        list(Dispatcher(OwnPool(ROOTS, 2, script=iter([0, -2, -2, -2]))).in_order(TASKS))
    with pytest.raises(JobFailed, match="a worker failed: AttributeError"):
        Dispatcher(OwnPool(ROOTS, 1)).ask(Task("no_such_method"))
    refused = Job("upshift.inference.generation.generator:Generator", {"model": "no model", "engine": "llama"})
    with pytest.raises(RequestError, match="no model"):
        Dispatcher(OwnPool(refused, 1)).ask(Task("options"))


def check_pool_survives_a_kill(pool: ProcessPool | RayPool) -> None:
    results = Dispatcher(pool).in_order(TASKS)
    first = next(results)
    before = list(pool.pids)
    os.kill(before[1], signal.SIGKILL)
    assert [first, *results] == EXPECTED
    assert pool.pids[0] == before[0] and len({*pool.pids, before[1]}) == 3


def test_a_killed_process_is_started_again_and_its_texts_computed_again() -> None:
    pool = ProcessPool(ROOTS, 2)
    try:
        check_pool_survives_a_kill(pool)
        (cores, _) = (os.sched_getaffinity(pid) for pid in pool.pids)
    finally:
        pool.close()
    assert len(cores) < len(os.sched_getaffinity(0)) or len(os.sched_getaffinity(0)) == 1
    for pid in pool.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine with two cores."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ADDRESS", "local")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_of_a_ray_cluster_is_started_again() -> None:
    pool = RayPool(ROOTS, 2)
    check_pool_survives_a_kill(pool)
    pool.close()
    with pytest.raises(RequestError, match="--replicas 3 is more than the Ray cluster has room for"):
        RayPool(ROOTS, 3)


@pytest.mark.usefixtures("cluster")
def test_a_ray_cluster_writes_the_answers_of_one_process_though_a_worker_is_killed(
    upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ENGINES", ENGINES)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, initializer_range=0.3)
    model = save(tmp_path / "model", transformers.LlamaForCausalLM(config))
    prompts = tmp_path / "texts.txt"
    prompts.write_text("".join(f"text {number}\n" for number in range(300)))
    ask = ("generate", model, "--prompts", prompts, "--engine", "torch", "--max-new-tokens", 3, "--set", "do_sample=true")
    alone = upshift(*ask, "--output", tmp_path / "alone.jsonl", "--replicas", 1)
    assert alone.code == 0, alone.err
    receive = RayPool.receive
    killed: list[int] = []
    dead: list[int] = []

    def receive_and_kill(pool: RayPool) -> tuple[int, Answer | None]:
        worker, answer = receive(pool)
        if answer is None:
            dead.append(worker)
        elif not killed and any(other != worker for other in pool._pending.values()):
            killed.append(1 - worker)
            os.kill(pool.pids[1 - worker], signal.SIGKILL)  # it has a task
        return worker, answer

    monkeypatch.setattr(RayPool, "receive", receive_and_kill)
    shared = upshift(*ask, "--output", tmp_path / "shared.jsonl", "--ray", "--replicas", 2)
    assert shared.code == 0 and killed == dead != [], shared.err
    assert (tmp_path / "shared.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def save(folder: Path, model: transformers.PreTrainedModel) -> str:
    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    factories = {
        "encode": registry.EngineFactory("torch_engine:TorchEngine", ("fp32",)),
        "media": registry.EngineFactory("torch_media:TorchMediaEngine", ("fp32",)),
        "generate": registry.EngineFactory("torch_decoder:TorchDecoder", ("fp32",)),
    }
    monkeypatch.setattr(registry, "ENGINES", {"torch": registry.ENGINES["torch"]._replace(factories=factories)})


SMALL = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 200 texts, for which workers are in this process."""
    monkeypatch.setattr(text_workers, "ProcessPool", OwnPool)
    monkeypatch.setattr(text_workers, "count_replicas", lambda replicas, devices=1: replicas or 1)
    monkeypatch.setattr("upshift.hardware.replicas.count_replicas", lambda replicas, devices=1: replicas or 1)
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {'x' * (number % 7)} {number}\n" for number in range(200)))
    return path


def test_replicas_write_the_answers_of_one_process_and_go_on_after_a_stop(
    texts: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, initializer_range=0.3)
    model = save(tmp_path / "model", transformers.LlamaForCausalLM(config))
    ask = ("generate", model, "--prompts", texts, "--engine", "torch", "--max-new-tokens", 3, "--set", "do_sample=true")
    alone = upshift(*ask, "--output", tmp_path / "alone.jsonl")
    assert alone.code == 0, alone.err
    add = UnfinishedLines.add

    def stop_later(lines: UnfinishedLines, added: Iterator[dict[str, object]]) -> None:
        if lines.done:
            raise JobFailed("stopped")
        add(lines, added)

    output = tmp_path / "shared.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedLines, "add", stop_later)
        assert upshift(*ask, "--output", output, "--replicas", 2).code == 1
    assert len((tmp_path / "shared.jsonl.partial").read_text().splitlines()) == 32
    again = upshift(*ask, "--output", output, "--replicas", 2)
    assert again.code == 0 and "(168 now" in again.out, again.err
    assert output.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_replicas_write_the_rows_of_one_process(texts: Path, upshift: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, initializer_range=0.3)
    model = save(tmp_path / "model", transformers.BertModel(config))
    ask = ("encode", model, "--input", texts, "--engine", "torch")
    for name, options in {"alone": (), "shared": ("--replicas", 3)}.items():
        answer = upshift(*ask, "--output", tmp_path / f"{name}.npy", *options)
        assert answer.code == 0, answer.err
    alone, shared = (np.load(tmp_path / f"{name}.npy") for name in ("alone", "shared"))
    assert alone.shape == (200, 32) and np.abs(alone - shared).max() < 1e-5


def test_replicas_read_the_sounds_of_one_process(
    texts: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors and texts of sounds that are named relative to the command's own folder."""
    del texts  # workers are in this process
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", "wav2vec2")
    letters = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *map(chr, range(97, 123))])}
    (tmp_path / "model" / "vocab.json").write_text(json.dumps(letters))
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "model" / "vocab.json")).save_pretrained(tmp_path / "model")
    for number in range(20):
        write_sound(tmp_path / f"{number}.wav", np.sin(np.arange(4_000) * 0.02 * (number + 1)) * 20_000)
    (tmp_path / "sounds.jsonl").write_text("".join(f'{{"audio": "{number}.wav"}}\n' for number in range(20)))
    for name, options in {"alone": (), "shared": ("--replicas", 3)}.items():
        encode = upshift("encode", "model", "--input", "sounds.jsonl", "--output", f"{name}.npy", "--engine", "torch", *options)
        assert encode.code == 0, encode.err
        write = upshift("generate", "model", "--prompts", "sounds.jsonl", "--output", f"{name}.jsonl", *options)
        assert write.code == 0, write.err
    assert Path("shared.jsonl").read_text() == Path("alone.jsonl").read_text()
    alone, shared = (np.load(f"{name}.npy") for name in ("alone", "shared"))
    assert alone.shape == (20, 32) and np.abs(alone - shared).max() < 1e-6
    assert len({row.tobytes() for row in alone}) == 20


def test_a_long_file_is_shared_by_a_copy_for_each_device(
    texts: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices, and as many texts as pay for two copies, or one text less."""
    monkeypatch.setattr("upshift.hardware.replicas.count_replicas", lambda replicas, devices=1: replicas or 2)
    monkeypatch.setattr(text_workers, "count_replicas", lambda replicas, devices=1: replicas or 2)
    model = save(tmp_path / "model", transformers.BertModel(transformers.BertConfig(**SMALL)))
    ask = ("encode", model, "--input", texts, "--output", tmp_path / "rows.npy", "--engine", "torch", "--overwrite")
    for least, copies, flags in ((100, 2, ()), (101, None, ()), (100, None, ("--replicas", 1))):
        monkeypatch.setattr("upshift.cli.encode.encoding_workers", partial(encoding_workers, least=least))
        answer = upshift(*ask, *flags)
        assert answer.code == 0 and (f"{copies} copies of the model" in answer.out) == (copies is not None), answer.err


def test_workers_that_are_not_possible_are_one_line(texts: Path, upshift: Command, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    model = save(tmp_path / "model", transformers.LlamaForCausalLM(config))
    output = tmp_path / "out.jsonl"
    file = ("--prompts", texts, "--output", output)
    wrong = {
        "--ray shares the texts of a file": ("--prompt", "a", "--ray"),
        "--replicas shares the texts of a file": (*file, "--replicas", 2, "--backend", "xla"),
        "--replicas is not possible with --format": (*file, "--replicas", 2, "--format", "openai-batch"),
        "--replicas 0": (*file, "--replicas", 0),
        "ask for at most": (*file, "--replicas", 3, "--max-memory", "cpu=20KiB"),
    }  # fmt: skip
    for text, options in wrong.items():
        answer = upshift("generate", model, *options)
        (line,) = (line for line in answer.err.splitlines() if line.startswith("upshift:"))
        assert answer.code in (2, 3) and text in line and "Traceback" not in answer.err, answer.err
