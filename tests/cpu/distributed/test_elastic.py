"""Ranks that torchrun and mpirun start: a killed rank costs steps, not the run; one rank's words end all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from upshift.hardware.exchange_probe import free_port
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.settings import Ranks
from upshift.training.arguments import Arguments
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.job import rendezvous
from upshift.training.job.job import Job, prepare_data, run_job
from upshift.training.job.launched import run_launched

LENGTH, STEPS, LIMIT = 16, 24, 400
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
UPSHIFT = ("-m", "upshift.cli.main", "train")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
CHOICES = (  # what is left to plan is little
    "precision=fp32", "fully_shard=no", "tensor_parallel=1", "pipeline_parallel=1", "attention=eager", "optim=adamw_torch",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    texts = [f"sentence {number} of many, which says {number * number} and no more" for number in range(150)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = train_byte_level_bpe(texts, 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=64).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return folder


def arguments(home: Path, output: Path, *more: str, batch: int = 4) -> list[str]:
    return [
        str(home / "llama"), "--data", str(home / "data.jsonl"), "--from-config", "--sequence-length", str(LENGTH),
        "--global-batch", str(batch), "--max-steps", str(STEPS), "--save-steps", "2", "--learning-rate", "1e-3",
        *(f"--set={choice}" for choice in CHOICES), "--json", "--output", str(output), *more,
    ]  # fmt: skip


def undisturbed(home: Path, output: Path, plan: dict[str, Any]) -> list[list[float]]:
    """The curve of one process in this one, without restarts."""
    alone = {"num_processes": 1, "gradient_accumulation_steps": 4 // plan["per_device_train_batch_size"], "layout": {}}
    model = str(home / "llama")
    data = prepare_data(find_model(model), home / "data.jsonl", sequence_length=LENGTH)
    job = Job(
        model_reference=model, from_config=True, plan=Plan.model_validate(plan | alone), data="", global_batch=4,
        arguments=Arguments(max_steps=STEPS, learning_rate=1e-3, warmup_steps=0, weight_decay=0.0), output=str(output),
    )  # fmt: skip
    return run_job(job, data).details["loss_curve"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists(), f"ended with {process.poll()} before {path.name}"


def test_a_killed_rank_costs_steps_and_not_the_run(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*TORCHRUN, "--max-restarts=3", *UPSHIFT, *arguments(home, output)]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ | ENVIRONMENT)
        wait_for(output / "checkpoint-6", process)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, (tmp_path / "err").read_text()
    record = json.loads(said)  # of rank 0 alone
    assert record["details"]["resumed_from_step"] >= 4 and record["plan"]["num_processes"] == 2
    expected = undisturbed(home, tmp_path / "alone", record["plan"])
    assert record["details"]["loss_curve"] == [[tokens, pytest.approx(loss, abs=1e-5)] for tokens, loss in expected]
    assert not (output / "upshift_shared").exists() and (output / "model.safetensors").exists()


@pytest.mark.parametrize("batch", [4, 3], ids=["trains", "one rank waits"])
def test_mpirun_starts_ranks(batch: int, home: Path, tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    ended = subprocess.run(
        [mpirun, "--oversubscribe", "-n", "2", sys.executable, *UPSHIFT, *arguments(home, tmp_path / "run", batch=batch)],
        capture_output=True, text=True, env=os.environ | ENVIRONMENT | allowed | rendezvous, timeout=LIMIT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["plan"]["num_processes"] == (2 if batch == 4 else 1)


def test_a_rank_waits_for_a_run_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the global batch leaves nothing to, longer than ranks wait for a plan."""
    monkeypatch.setattr(rendezvous, "MAX_PLANNING_SECONDS", 0.5)
    port = free_port()
    first, second = (Ranks(rank=rank, size=2, local_rank=rank, address="127.0.0.1", port=port) for rank in (0, 1))
    plan = Plan(
        device="cpu", host="", model="", sequence_length=LENGTH, per_device_train_batch_size=1, gradient_accumulation_steps=1
    )
    job = Job(model_reference="", plan=plan, arguments=Arguments(max_steps=1), data="", global_batch=1, output="")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run_launched, second, make_job=lambda *_: pytest.fail(), global_batch=1, on_event=print)
        store = rendezvous.meet(first)
        store.set("local/0", "0")
        store.set("job", job.to_json())
        time.sleep(1.5)
        store.set("done", "")
        assert waiting.result(timeout=60) is None


def test_wrong_requests_are_said_once(home: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--max-restarts=0", *UPSHIFT, *arguments(home, tmp_path / "run", "--set", "num_processes=4")]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, timeout=LIMIT)
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("upshift: ")]
    assert lines == ["upshift: the launcher's ranks make 2 processes; leave num_processes (--nproc) to the launcher"]
    assert "exitcode: 2" in ended.stderr
