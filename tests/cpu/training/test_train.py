"""The training loop: every plan trains the same way, a stopped run goes on bit for bit, failures come in words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    T5Config,
)

from upshift.benchmarking.timing import Timing
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.hardware import detect
from upshift.hardware.probe_process import compiler_works
from upshift.models.source import AdapterOptions, find_model
from upshift.planning.plan import Plan
from upshift.record import Numbers, Record
from upshift.settings import read_settings
from upshift.training import step as step_module
from upshift.training.arguments import Arguments
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.checkpoint import directory as checkpoint_files
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.job.job import Job, TrainingData, prepare_data, run_job
from upshift.training.job.job_process import PROCESS
from upshift.training.loop.events import (
    Evaluated,
    Event,
    Finished,
    OutOfMemory,
    Saved,
    Started,
    StepDone,
    event_from_json,
    event_to_json,
)
from upshift.training.loop.metrics import StepMeter
from upshift.training.loop.state import check_run_file
from upshift.training.out_of_memory import Autopsy
from upshift.training.run import train
from upshift.training.step import TrainStep

LENGTH, GLOBAL_BATCH, VOCABULARY = 32, 8, 300
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards watch the moon rise above old mountains".split()  # noqa: E501, SIM905
Curve = list[list[float]]


def sentences(count: int) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, size=generator.integers(4, 30))) for _ in range(count)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer, and configs of tiny models with dropout off, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("train")
    texts = sentences(120)
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = train_byte_level_bpe(texts, VOCABULARY)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    bert = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    configs: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(**llama, num_hidden_layers=3, max_position_embeddings=64, vocab_size=320),
        "gpt2": GPT2Config(**gpt2, vocab_size=320),  # with dropout
        "bert": BertConfig(**bert, max_position_embeddings=64, vocab_size=320),
        "t5": T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=320, decoder_start_token_id=0),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def prepared(home: Path) -> Callable[[str], TrainingData]:
    known: dict[str, TrainingData] = {}

    def prepare(model: str) -> TrainingData:
        if model not in known:
            known[model] = prepare_data(find_model(str(home / model)), home / "data.jsonl", sequence_length=LENGTH)
        return known[model]

    return prepare


def a_plan(**choices: Any) -> Plan:
    plain = {
        "device": "cpu", "host": "test", "model": "test", "sequence_length": LENGTH,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch",
    }  # fmt: skip
    return Plan(**(plain | choices))


def a_job(home: Path, output: Path, *, model: str = "llama", plan: Plan | None = None, **fields: Any) -> Job:
    options = {name: fields.pop(name) for name in list(fields) if name in Arguments.model_fields}
    arguments = Arguments(**({"max_steps": 5, "learning_rate": 3e-3, "warmup_steps": 2, "max_grad_norm": 0.5} | options))
    return Job(
        model_reference=str(home / model), from_config=True, plan=plan or a_plan(), arguments=arguments,
        data=str(home / "data.jsonl"), global_batch=GLOBAL_BATCH, output=str(output), **fields,
    )  # fmt: skip


def command_of(process: psutil.Process) -> list[str]:
    """Return the command of a process, which one that has ended does not have."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def curve(record: Record) -> Curve:
    return record.details["loss_curve"]


def difference(one: Record, other: Record) -> float:
    assert [tokens for tokens, _ in curve(one)] == [tokens for tokens, _ in curve(other)]
    pairs = zip(curve(one), curve(other), strict=True)
    losses = max(abs(a - b) for (_, a), (_, b) in pairs)
    assert one.measured and other.measured and one.measured.evaluation_loss and other.measured.evaluation_loss
    return max(losses, abs(one.measured.evaluation_loss - other.measured.evaluation_loss))


@pytest.fixture(scope="module")
def plain(home: Path, prepared: Callable[[str], TrainingData], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run_job(a_job(home, tmp_path_factory.mktemp("plain")), prepared("llama"))


SAME = {
    "micro-batch 8 x 1": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "micro-batch 3": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "packing": {"packing": True, "per_device_train_batch_size": 2},
    "recompute 2 of 3": {"activation_checkpointing": 2},
    "chunked loss": {"loss_chunk_tokens": 16},
    "eager attention": {"attention": "eager"},
    "eager attention, packed": {"attention": "eager", "packing": True},
    "block attention": {"attention": "block"},
    "block attention, one long row": {"attention": "block", "packing": True, "per_device_train_batch_size": 4},
    "block attention, packed, recompute": {"attention": "block", "packing": True, "activation_checkpointing": 2},
    "2 processes, block attention, packed": {"attention": "block", "num_processes": 2, "packing": True},
    "fused optimizer": {"optim": "adamw_torch_fused"},
    "tf32": {"precision": "tf32"},
    "2 processes, packed, recompute": {"num_processes": 2, "packing": True, "activation_checkpointing": 1},
    "keep memory": {"host_memory": "keep"},
}


@pytest.mark.parametrize("name", SAME)
def test_plans_train_alike(name: str, home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path) -> None:
    if name == "tf32" and detect().medium_is_bf16:
        pytest.skip("with this CPU's AMX torch computes tf32 in bf16, and no plan has it")
    record = run_job(a_job(home, tmp_path, plan=a_plan(**SAME[name])), prepared("llama"))
    largest = difference(plain, record)
    print(f"{name}: {largest:.1e}")
    assert largest < 1e-5
    assert curve(plain)[0][1] - curve(plain)[-1][1] > 0.05, "five steps must have taught something"


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_bf16_stays_near(
    precision: str, home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path
) -> None:
    record = run_job(a_job(home, tmp_path, plan=a_plan(precision=precision)), prepared("llama"))
    largest = difference(plain, record)
    print(f"{precision}: {largest:.1e}")
    assert largest < (1e-2 if precision == "bf16" else 5e-2)


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of compiled graphs, forward and backward."""
    calls: Counter[str] = Counter()
    call = CompiledFxGraph.__call__

    def counted(graph: CompiledFxGraph, inputs: Any) -> Any:
        calls["backward" if graph.fx_kwargs.get("is_backward") else "forward"] += 1
        return call(graph, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", counted)
    return calls


@pytest.mark.parametrize("choices", [{}, {"attention": "block", "packing": True}], ids=str)
def test_compiled_layers_train_alike(
    choices: dict[str, Any], home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path,
    compiled_calls: Counter[str],
) -> None:  # fmt: skip
    if not compiler_works():
        pytest.skip("no C++ compiler that torch inductor can use")
    try:
        record = run_job(a_job(home, tmp_path, plan=a_plan(torch_compile="layer", **choices)), prepared("llama"))
    finally:
        torch.compiler.reset()
    largest = difference(plain, record)
    print(f"compile layer: {largest:.1e}, {compiled_calls}")
    assert largest < 1e-5
    # The losses may be equal to the bit, as if nothing were compiled: three layers, five steps of two micro-batches or more.
    assert compiled_calls["backward"] >= 3 * 5 * (1 if choices else 2)
    assert compiled_calls["forward"] > compiled_calls["backward"]  # and an evaluation


def test_events_record_and_final_model(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    events: list[Event] = []
    job = a_job(
        home, tmp_path / "out", max_steps=8, eval_steps=3, save_steps=2, save_total_limit=3, evaluate_at_tokens=(300,),
        predicted=Numbers(peak_gib=0.1), model_flops_per_token=1e6,
    )  # fmt: skip
    assert Job.from_json(job.to_json()) == job
    data = prepared("llama")
    record = run_job(job, data, on_event=events.append)
    assert [event_from_json(event_to_json(event)) for event in events] == events
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, 9))
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished) and events[-1].reason == "finished"
    crossed = next(event.step for event in steps if event.tokens >= 300)
    assert {event.step for event in events if isinstance(event, Evaluated)} == {3, 6, 8, crossed}
    assert [Path(event.path).name for event in events if isinstance(event, Saved)] == [
        "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8", "out",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}
    assert all(event.tokens_per_second > 0 and event.resident_bytes > 2**20 for event in steps)
    assert steps[-1].seconds_left == 0 < steps[0].seconds_left

    measured = record.measured
    assert measured and measured.step_ms and measured.step_ms.num_samples == 5
    assert measured.peak_gib and 0 < measured.peak_gib < measured.resident_gib  # type: ignore[operator]
    assert measured.model_flops_per_second == pytest.approx(1e6 * measured.tokens_per_second)  # type: ignore[operator]
    assert record.prediction_error("peak_gib") is not None
    kept = [Record.from_json(line) for line in (read_settings().cache_dir / "records.jsonl").read_text().splitlines()]
    assert kept[-1] == record.changed(checkpoint=None)
    assert str(tmp_path) not in kept[-1].to_json() and str(home) not in kept[-1].to_json()

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("the moon")["input_ids"] == data.tokenizer("the moon")["input_ids"]
    held_out = data.evaluation
    assert held_out is not None
    ids = torch.from_numpy(held_out.tokens[None, : held_out.lengths[0]].astype(int))
    assert model(input_ids=ids, labels=ids).loss < curve(record)[0][1]


class Stop:
    """Sends this process a real signal when a step is done."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "choices"),
    [(signal.SIGINT, {}), (signal.SIGTERM, {"precision": "bf16"}), (signal.SIGINT, {"num_processes": 2})],
    ids=["SIGINT", "SIGTERM, bf16", "SIGINT, 2 processes"],
)
def test_interrupted_and_resumed_is_undisturbed(
    number: int, choices: dict[str, Any], home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path
) -> None:
    """GPT-2 with dropout: data order, random numbers, schedule and optimizer go on bit for bit."""
    data, plan = prepared("gpt2"), a_plan(**choices)
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    undisturbed = run_job(a_job(home, tmp_path / "one", model="gpt2", plan=plan, max_steps=7, eval_steps=2), data)
    job = a_job(home, tmp_path / "two", model="gpt2", plan=plan, max_steps=7, eval_steps=2)
    with pytest.raises(Interrupted, match="--resume") as stopped:
        run_job(job, data, on_event=Stop(4, number))
    assert stopped.value.exit_code == 130
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before
    checkpoint = newest_checkpoint(tmp_path / "two")
    assert checkpoint is not None and not (tmp_path / "two" / "config.json").exists()
    resumed = run_job(job.changed(resume=True), data)
    assert resumed.details["resumed_from_step"] == int(checkpoint.name.split("-")[1]) >= 4
    assert curve(resumed) == curve(undisturbed)
    assert resumed.details["evaluations"] == undisturbed.details["evaluations"]


CHILD = """
import sys
from pathlib import Path
from upshift.models.source import AdapterOptions, find_model
from upshift.training.job.job import Job, prepare_data, run_job
job = Job.from_file(Path(sys.argv[1]))
data = prepare_data(find_model(job.model_reference), job.data, sequence_length=job.plan.sequence_length)
try:
    run_job(job, data, on_event=lambda event: print(type(event).__name__, flush=True))
except Exception as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def test_ctrl_c_in_a_child_process(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    job = a_job(home, tmp_path / "out", model="gpt2", max_steps=2000)
    (tmp_path / "job.json").write_text(job.to_json())
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "job.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    lines = iter(child.stdout.readline, "")
    while next(lines) != "StepDone\n":
        pass
    child.send_signal(signal.SIGINT)
    said, complaint = child.communicate(timeout=300)
    assert child.returncode == 130 and "continue with the same command and --resume" in said and "Ctrl-C again" in complaint
    checkpoint = newest_checkpoint(tmp_path / "out")
    assert checkpoint is not None
    steps = int(checkpoint.name.split("-")[1]) + 2
    same = a_job(home, tmp_path / "one", model="gpt2", max_steps=2000, stop_after_tokens=1)
    tokens = json.loads((tmp_path / "out" / "upshift_run.json").read_text())["tokens"][-1]
    resumed = run_job(job.changed(resume=True, stop_after_tokens=tokens + 1), prepared("gpt2"))
    straight = run_job(same.changed(stop_after_tokens=tokens + 1), prepared("gpt2"))
    assert len(curve(resumed)) == steps - 1 and curve(resumed) == curve(straight)


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """A shell's background jobs inherit that SIGINT is ignored; then there would be nothing to end at once by."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_second_signal_ends_at_once(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    def twice(event: Event) -> None:
        Stop(2)(event)
        time.sleep(0.2)  # two signals that wait for Python together are one
        Stop(2)(event)

    with pytest.raises(KeyboardInterrupt):
        run_job(a_job(home, tmp_path), prepared("llama"), on_event=twice)
    assert newest_checkpoint(tmp_path) is None


def test_resume_with_another_plan_and_with_other_mathematics(
    home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path
) -> None:
    data = prepared("llama")
    with pytest.raises(Interrupted):
        run_job(a_job(home, tmp_path), data, on_event=Stop(2))
    for field, value in (("seed", 1), ("learning_rate", 1e-3), ("global_batch", 4)):
        arguments = a_job(home, tmp_path, resume=True, **({field: value} if field != "global_batch" else {}))
        changed = arguments.changed(global_batch=4) if field == "global_batch" else arguments
        with pytest.raises(RequestError, match=f"{field}={value} differs"):
            run_job(changed, data)
    with pytest.raises(RequestError, match="max_steps=1 is less than the 2 steps"):
        run_job(a_job(home, tmp_path, resume=True, max_steps=1), data)
    with pytest.raises(RequestError, match="fp32|float32|bfloat16"):
        run_job(a_job(home, tmp_path, resume=True, plan=a_plan(precision="bf16-weights")), data)
    other = a_plan(packing=True, per_device_train_batch_size=2, activation_checkpointing=3, optim="adamw_torch_fused")
    record = run_job(a_job(home, tmp_path, resume=True, plan=other), data)
    assert difference(plain, record) < 1e-5


def test_resume_of_a_finished_run_and_of_none(
    home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path
) -> None:
    data = prepared("llama")
    record = run_job(a_job(home, tmp_path, resume=True), data)
    assert curve(record) == curve(plain)
    with pytest.raises(RequestError, match="is finished and has no checkpoint"):
        run_job(a_job(home, tmp_path, resume=True), data)
    with pytest.raises(RequestError, match="is finished and has no checkpoint"):  # before anything slow
        check_run_file(tmp_path, resume=True, adapter=AdapterOptions())
    again = run_job(a_job(home, tmp_path, overwrite=True, save_steps=5), data)
    assert curve(again) == curve(plain)
    longer = run_job(a_job(home, tmp_path, resume=True, max_steps=6, lr_scheduler_type="linear"), data)
    assert curve(longer)[:5] == curve(plain) and len(curve(longer)) == 6


def test_early_ends_keep_the_schedule(home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path) -> None:
    data, target = prepared("llama"), int(curve(plain)[2][0])
    by_tokens = run_job(a_job(home, tmp_path / "tokens", stop_after_tokens=target), data)
    assert curve(by_tokens) == curve(plain)[:3] and by_tokens.details["end"] == "tokens"
    by_seconds = run_job(a_job(home, tmp_path / "seconds", stop_after_seconds=1e-6), data)
    assert curve(by_seconds) == curve(plain)[:1] and by_seconds.details["end"] == "seconds"


def test_nan_loss_fails_in_words(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    job = a_job(home, tmp_path, learning_rate=1e30, max_grad_norm=0.0, warmup_steps=0)
    with pytest.raises(JobFailed, match=r"step \d: the loss became .*no earlier checkpoint"):
        run_job(job, prepared("llama"))


@pytest.mark.parametrize("choices", [{}, {"attention": "block", "packing": True}], ids=["rows", "one long row"])
def test_out_of_memory_at_step_3_changes_the_micro_batch_and_nothing_else(
    choices: dict[str, Any], home: Path, prepared: Callable[[str], TrainingData], plain: Record, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The allocator refuses everything over half of a micro-batch, after its gradients were added."""
    limit = 4 * LENGTH
    accumulate = TrainStep.accumulate

    def refuse(stepper: TrainStep, micro_batch: Any, labels: int, *, last: bool) -> torch.Tensor:
        share = accumulate(stepper, micro_batch, labels, last=last)
        if int(stepper.schedule.last_epoch) >= 2 and micro_batch.num_padded_tokens > limit:
            raise torch.OutOfMemoryError("simulated")
        return share

    monkeypatch.setattr(TrainStep, "accumulate", refuse)
    events: list[Event] = []
    plan = a_plan(per_device_train_batch_size=8, gradient_accumulation_steps=1, **choices)
    record = run_job(a_job(home, tmp_path, plan=plan), prepared("llama"), on_event=events.append)
    (told,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert told.step == 3 and prod(told.smaller) <= limit < prod(told.largest)
    autopsy = Autopsy.from_json(Path(told.autopsy).read_text())
    assert autopsy.words == "simulated" and autopsy.shape == tuple(told.largest) and autopsy.verdict == told.verdict
    assert {part.part for part in autopsy.parts} >= {"weights", "gradients", "optimizer"}
    assert difference(plain, record) < 1e-5


WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused"}


def test_optimizer_in_backward_trains_alike_and_is_resumed(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path
) -> None:
    data, plan = prepared("gpt2"), a_plan(**WHOLE, optimizer_in_backward=True)
    common: dict[str, Any] = {"model": "gpt2", "max_steps": 6, "max_grad_norm": 0.0}
    plain = run_job(a_job(home, tmp_path / "plain", plan=a_plan(**WHOLE), **common), data)
    moved = run_job(a_job(home, tmp_path / "moved", plan=plan, **common), data)
    assert curve(moved) == curve(plain) and difference(moved, plain) == 0
    job = a_job(home, tmp_path / "stopped", plan=plan, **common)
    with pytest.raises(Interrupted):
        run_job(job, data, on_event=Stop(3))
    assert curve(run_job(job.changed(resume=True), data)) == curve(plain)


def test_optimizer_in_backward_goes_back_on_nothing(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory when some weights have moved is no smaller micro-batch but the end; a NaN stops before any has."""
    events: list[Event] = []
    plan = a_plan(**WHOLE, optimizer_in_backward=True)
    accumulate, loss_of = TrainStep.accumulate, step_module.compute_loss

    def refuse(stepper: TrainStep, *given: Any, last: bool) -> torch.Tensor:
        accumulate(stepper, *given, last=last)
        raise torch.OutOfMemoryError("simulated")

    with monkeypatch.context() as patch, pytest.raises(JobFailed, match="out of memory"):
        patch.setattr(TrainStep, "accumulate", refuse)
        run_job(a_job(home, tmp_path / "one", plan=plan, max_grad_norm=0.0), prepared("llama"), on_event=events.append)
    assert not any(isinstance(event, OutOfMemory) for event in events)
    models: list[Any] = []

    def nan(model: Any, *given: Any) -> torch.Tensor:
        models.append((model, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return loss_of(model, *given) * float("nan")

    monkeypatch.setattr(step_module, "compute_loss", nan)
    with pytest.raises(JobFailed, match="step 1: the loss became NaN"):
        run_job(a_job(home, tmp_path / "two", plan=plan, max_grad_norm=0.0), prepared("llama"))
    model, before = models[-1]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("choices", [{"optim": "muon"}, {"precision": "bf16-weights"}], ids=str)
def test_processes_round_and_update_alike(
    choices: dict[str, Any], home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path
) -> None:
    one, two = (
        run_job(a_job(home, tmp_path / str(n), plan=a_plan(num_processes=n, **choices)), prepared("llama")) for n in (1, 2)
    )
    assert difference(one, two) < (1e-3 if choices.get("optim") else 1e-2)  # Muon multiplies in bf16


def test_what_cannot_be_halved_fails_in_words(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, last: bool) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(TrainStep, "accumulate", refuse)
    with pytest.raises(JobFailed, match="out of memory"):
        run_job(a_job(home, tmp_path), prepared("llama"))


@pytest.mark.usefixtures("new_processes")
def test_a_killed_rank_fails_the_job(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            (rank_0,) = (child for child in psutil.Process().children() if PROCESS in command_of(child))
            (rank_1,) = rank_0.children()
            rank_1.kill()

    job = a_job(home, tmp_path, plan=a_plan(num_processes=2), max_steps=2000, save_steps=1)
    with pytest.raises(JobFailed, match=r"1 of 2 processes failed \(exit codes \[-9\]\)"):
        run_job(job, prepared("llama"), on_event=kill)
    assert newest_checkpoint(tmp_path) is not None


@pytest.mark.parametrize("processes", [1, 2])
def test_full_disk_leaves_the_previous_checkpoint(
    processes: int,
    home: Path,
    prepared: Callable[[str], TrainingData],
    plain: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = prepared("llama")

    def fill(event: Event) -> None:
        if isinstance(event, Saved):
            (tmp_path / "checkpoint-4.tmp").write_text("in the way of a directory")

    plan = a_plan(num_processes=processes)
    if processes == 1:
        usage = shutil.disk_usage(tmp_path)

        def full(path: Path) -> Any:
            return usage._replace(free=0) if newest_checkpoint(tmp_path) else usage

        monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", full)
        fill = lambda event: None  # noqa: E731
    with pytest.raises(JobFailed, match="checkpoint-4 .*checkpoint-2 is still loadable"):
        run_job(a_job(home, tmp_path, plan=plan, save_steps=2), data, on_event=fill)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    if processes == 2:
        return
    monkeypatch.undo()
    assert difference(run_job(a_job(home, tmp_path, plan=plan, resume=True), data), plain) < 1e-5


@pytest.mark.parametrize(("model", "kind"), [("bert", "masked-lm"), ("t5", "seq2seq-lm")])
def test_other_objectives(model: str, kind: str, home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    data = prepared(model)
    assert data.objective.kind == kind
    assert data.training.sequence_length == LENGTH * (2 if kind == "seq2seq-lm" else 1)  # encoder and decoder take LENGTH each
    record = run_job(a_job(home, tmp_path, model=model, max_steps=2), data)
    assert len(curve(record)) == 2 and record.measured and record.measured.evaluation_loss


def test_wrong_requests(home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path) -> None:
    data = prepared("llama")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="not empty"):
        run_job(a_job(home, tmp_path), data)
    with pytest.raises(RequestError, match="which Upshift did not write"):
        run_job(a_job(home, tmp_path, overwrite=True), data)
    with pytest.raises(RequestError, match="lr_scheduler_type: must be 'linear', 'cosine'.* \\(got \"lineer\"\\)"):
        train(str(home / "llama"), str(home / "data.jsonl"), output=tmp_path / "new", arguments={"lr_scheduler_type": "lineer"})
    with pytest.raises(RequestError, match="sequence_length=16 is not the data's 32"):
        run_job(a_job(home, tmp_path / "new", plan=a_plan(sequence_length=16)), data)
    assert not (tmp_path / "new").exists()
    with pytest.raises(RequestError, match="longer than the model.s 64 positions; use at most 64"):
        prepare_data(find_model(str(home / "llama")), home / "data.jsonl", sequence_length=65)
    shutil.copy(home / "llama" / "config.json", tmp_path / "bare.json")
    with pytest.raises(RequestError, match="without a tokenizer"):
        prepare_data(find_model(str(tmp_path / "bare.json")), home / "data.jsonl", sequence_length=LENGTH)
    small = LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(RequestError, match="the model's vocabulary has 100"):
        prepare_data(find_model(str(tmp_path / "small")), home / "data.jsonl", tokenizer=data.tokenizer, sequence_length=LENGTH)


def test_data_order_is_that_of_the_seed(home: Path, prepared: Callable[[str], TrainingData], plain: Record) -> None:
    layout = Layout(micro_batch=8)
    source = BatchSource(sequences=prepared("llama").training, global_batch=GLOBAL_BATCH, layout=layout, seed=42)
    tokens = np.cumsum([next(source.batches(source.position_of_step(step))).num_tokens for step in range(5)])
    assert tokens.tolist() == [tokens for tokens, _ in curve(plain)]


def test_the_speed_of_a_run_leaves_out_the_steps_that_the_measurement_of_memory_slowed_down() -> None:
    def speed(planned_steps: int) -> tuple[int, float | None]:
        plan = Plan(model="m", host="h", device="cpu", sequence_length=8, per_device_train_batch_size=1)
        meter = StepMeter(plan, planned_steps=planned_steps, longest_step=5)
        for step in range(1, 21):
            meter.begin()
            meter.add(100, Timing(10.0 if step < 3 else 3.0 if step == 5 else 2.0 if step < 9 and step > 5 else 1.0, 0.0))
        return len(meter.steady), meter.tokens_per_second

    assert speed(20) == (20 - 2 - 4, 100.0)  # the watched step, and three that fault its pages in again
    assert speed(8)[0] == 20 - 2 - 1  # planned to be short: it needs the other steps
