"""Upshift's CUDA paths on a GPU that is not there: whole commands, and every test of tests/gpu.

Speeds mean nothing here; results, memory, devices, forks and words do.
"""

from __future__ import annotations

import ast
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import functions_that_ran
import pytest
from pretended_gpus import Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Tests of tests/gpu that cannot pass here, and why.
NOT_HERE = {
    "test_packed_kernels_are_sdpa_on_packed_rows[flex_attention]": "flex attention on a GPU is compiled by Triton",
    "test_four_bit_weights_train_an_adapter": "bitsandbytes has kernels of its own for CUDA",
    "test_rounded_weights[int4-weights-0.9]": "the tiles of tinygemm are a CUDA kernel's",
}


# Little is traced: what a GPU adds to the search is tested on described hosts.
FIXED = ("--set", "torch_compile=off", "--set", "attention=sdpa", "--set", "packing=False")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and rows of token ids."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("job")
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=512,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(80):
            file.write(json.dumps({"input_ids": [rows.randrange(1, 512) for _ in range(rows.randrange(8, 60))]}) + "\n")
    return folder


@pytest.fixture
def train(on_gpus: Run, keep_probe: Callable[[str], None], job: Path) -> Callable[..., dict[str, object]]:
    """Return a function that trains on these GPUs and returns the record."""

    def run(gpus: str, output: Path, *options: str) -> dict[str, object]:
        keep_probe(gpus)
        done = on_gpus(gpus, *command(job, output), "--json", *FIXED, *options)
        assert done.returncode == 0, done.stderr
        assert "barrier()" not in done.stderr, done.stderr  # ranks that do not name their device are warned by torch
        record: dict[str, object] = json.loads(done.stdout)
        return record

    return run


def command(job: Path, output: Path) -> tuple[str, ...]:
    return (
        "-m", "upshift", "train", str(job / "model"), "--data", str(job / "data.jsonl"), "-o", str(output),
        "--sequence-length", "64", "--global-batch", "8", "--max-steps", "4",
    )  # fmt: skip


def losses(record: dict[str, object]) -> list[float]:
    details = record["details"]
    assert isinstance(details, dict)
    return [loss for _, loss in details["loss_curve"]]


def test_the_device_does_what_a_gpu_does(in_new_process: Run) -> None:
    done = in_new_process("2xh100", str(HERE / "use_device.py"))
    assert (done.returncode, done.stdout.strip()) == (0, "as a GPU does"), done.stderr


SEEN = """
import torch
started = torch.cuda.is_initialized()
count = torch.cuda.device_count()
total = torch.arange(3, device="cuda").sum().item() if count else 3
print(count, *(torch.cuda.get_device_name(number) for number in range(count)), started, total, sep=", ")
"""


def test_each_command_has_the_gpus_of_its_own_environment(on_gpus: Run) -> None:
    """Commands are forks of one process, which has other GPUs and has not used them."""
    card = "NVIDIA GeForce RTX 4090"
    for gpus, variables, expected in (
        ("2x4090", {}, f"2, {card}, {card}, False, 3"),
        ("t4", {}, "1, Tesla T4, False, 3"),
        ("2x4090", {"CUDA_VISIBLE_DEVICES": ""}, "0, False, 3"),
        ("2x4090", {"CUDA_VISIBLE_DEVICES": "1"}, f"1, {card}, False, 3"),
    ):
        done = on_gpus(gpus, "-c", SEEN, **variables)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_a_training_with_trials_is_that_of_the_cpu(
    train: Callable[..., dict[str, object]], on_gpus: Run, job: Path, tmp_path: Path
) -> None:
    """Trials, which are processes of their own, and the run itself find the device; the losses are the CPU's."""
    choices = (  # plans that are worth a trial are few
        "per_device_train_batch_size=4", "activation_checkpointing=0", "loss_chunk_tokens=0", "loss_kernel=eager",
        "fused_kernels=False", "optimizer_in_backward=False", "optim_offload=False", "activation_offload=False",
    )  # fmt: skip
    few = tuple(part for choice in choices for part in ("--set", choice))
    plain = ("--set", "precision=fp32", *few)
    on_gpu = train("h100", tmp_path / "gpu", "--trial-seconds", "90", *plain)
    assert on_gpu["measured"]["peak_gib"] > 0  # type: ignore[index]
    assert on_gpu["predicted"]["tier"] == "measured"  # type: ignore[index]
    on_cpu = on_gpus(
        "h100", *command(job, tmp_path / "cpu"), "--json", *FIXED, "--trial-seconds", "0", *plain, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert on_cpu.returncode == 0, on_cpu.stderr
    assert losses(on_gpu) == pytest.approx(losses(json.loads(on_cpu.stdout)), rel=1e-5)


def test_the_tests_of_gpus_pass(on_gpus: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = on_gpus("h100", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu"), f"--junit-xml={report}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name") or "" for case in cases if case.find("failure") is not None or case.find("error") is not None}
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert failed - set(NOT_HERE) == set(), done.stdout[-6000:]
    assert set(NOT_HERE) <= failed, "these pass now: take them off the list"
    assert len(cases) - len(failed) - len(skipped) >= 20, done.stdout[-3000:]


def test_a_gpu_that_is_full_is_refused_in_words(
    on_gpus: Run, keep_probe: Callable[[str], None], job: Path, tmp_path: Path
) -> None:
    keep_probe("t4")
    done = on_gpus("t4", *command(job, tmp_path / "out"), *FIXED, PRETENDED_USED_MIB="15300")
    assert done.returncode == 3, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr


def test_memory_that_others_take_halves_the_batches_and_is_named(
    on_gpus: Run, keep_probe: Callable[[str], None], job: Path, tmp_path: Path
) -> None:
    """A card that is shared: another process takes all but 8 MiB in the middle of the run."""
    keep_probe("h100")
    plain = (*FIXED, "--trial-seconds", "0", "--set", "precision=fp32", "--json")
    alone = on_gpus("h100", *command(job, tmp_path / "alone"), *plain)
    shared = on_gpus("h100", *command(job, tmp_path / "shared"), *plain, PRETENDED_LEFT="8 after 3")
    assert (alone.returncode, shared.returncode) == (0, 0), alone.stderr + shared.stderr
    assert losses(json.loads(shared.stdout)) == pytest.approx(losses(json.loads(alone.stdout)), rel=1e-5)
    assert not (tmp_path / "alone" / "upshift_out_of_memory.jsonl").exists()
    (line,) = (tmp_path / "shared" / "upshift_out_of_memory.jsonl").read_text().splitlines()
    assert re.fullmatch(r"other processes have taken 78\.\d GiB since the run began", json.loads(line)["verdict"])


def test_a_profiler_that_records_no_kernels_is_said(
    on_gpus: Run, keep_probe: Callable[[str], None], job: Path, tmp_path: Path
) -> None:
    """As on a GPU whose user may not use CUPTI."""
    keep_probe("h100")
    model, *rest = command(job, tmp_path / "profile")[3:]
    done = on_gpus("h100", "-m", "upshift", "profile", "--", "train", model, *rest, *FIXED, "--trial-seconds", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "recorded no kernel on the GPU" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr[-2000:]


def test_the_doctor_names_the_gpus(on_gpus: Run) -> None:
    done = on_gpus("2x4090", "-m", "upshift", "doctor", "--quick")
    assert "NVIDIA GeForce RTX 4090" in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, run_on_gpus: Run, job: Path) -> dict[str, dict[str, Any]]:
    """Return what happened in each case of count_waits.py."""
    done = run_on_gpus("h100", str(HERE / "count_waits.py"), str(job), str(tmp_path_factory.mktemp("counted")))
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {case.pop("case"): case for case in cases}


READ_LATER = {"device to host, not waited for": 1}


def test_the_host_never_waits_between_steps(counted: dict[str, dict[str, Any]]) -> None:
    """Loss and norm are copied while the next step runs. GradScaler asks once a step whether fp16 overflowed."""
    waits = {name: case["waits"] for name, case in counted.items() if case["failure"] is None and "Trainer" not in name}
    assert waits.pop("cpu") == {}
    assert waits.pop("fp16") == READ_LATER | {"aten::_local_scalar_dense": 1}
    assert waits == dict.fromkeys(waits, READ_LATER) and len(waits) >= 5


def test_a_planned_trainer_waits_less_than_transformers_own(counted: dict[str, dict[str, Any]]) -> None:
    """In two micro-batches: for whether the loss is a number, as transformers does twice, and once for masks and labels.

    transformers' own copies each entry of a batch to the GPU and waits, and so it does here.
    """
    plain = counted["Trainer"]
    entries = {"host to device, blocking": 3}
    assert plain["waits"] == entries | {"aten::_local_scalar_dense": 4}
    for name in ("planned Trainer", "planned Trainer, chunked loss"):
        copied_together = {"device to host, not waited for": 2}
        assert counted[name]["waits"] == entries | copied_together | {"aten::_local_scalar_dense": 3}, name
        assert counted[name]["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_what_is_read_late_is_told_for_its_own_step(counted: dict[str, dict[str, Any]]) -> None:
    """The same steps as on a CPU. A checkpoint has read the loss of its step."""
    cpu = counted["cpu"]
    gpu = counted["fp32"]
    assert gpu["steps"] == cpu["steps"] and gpu["checkpoints"] == cpu["checkpoints"]
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-5) and gpu["norms"] == pytest.approx(cpu["norms"], rel=1e-5)
    assert cpu["happened"][:6] == ["queue 1", "read 1", "done 1", "queue 2", "read 2", "done 2"]
    assert gpu["happened"][:7] == ["queue 1", "queue 2", "read 1", "done 1", "read 2", "done 2", "save 2"]
    assert counted["bf16"]["happened"][-5:] == ["queue 6", "read 5", "done 5", "read 6", "done 6"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_loss_that_is_not_finite_ends_the_run_before_a_further_checkpoint(
    counted: dict[str, dict[str, Any]], step: int
) -> None:
    """Step 4 would be saved. Step 3 is read while step 4 runs."""
    case = counted[f"not finite in step {step}"]
    assert case["failure"].startswith(f"step {step}: the loss became NaN") and case["reported_step"] == [step]
    assert case["checkpoints"] == ["checkpoint-2"] and case["steps"][-1][0] == step - 1


PROBE = """
import json, sys
from upshift.hardware.detect import detect
from upshift.hardware.probe_cache import measure
from upshift.planning.search.space import can_compile
if __name__ == "__main__":
    host = measure(detect())
    import torch
    used = torch.cuda.is_initialized() or torch.cuda.memory_allocated() > 0
    print(json.dumps({"measured": host.measured.model_dump(mode="json"), "used": used, "compiles": can_compile(host)}))
"""


@pytest.mark.parametrize(("gpus", "used_mib"), [("2xh100", "500"), ("t4", "15000")])
def test_the_probe_measures_every_gpu_in_processes_of_its_own(
    in_new_process: Run, gpus: str, used_mib: str, tmp_path: Path
) -> None:
    (tmp_path / "probing.py").write_text(PROBE)
    done = in_new_process(gpus, str(tmp_path / "probing.py"), PRETENDED_USED_MIB=used_mib)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    measured = answer["measured"]
    assert measured["gpu"]["fp32"] > 1e8 and measured["gpu"]["memory_bytes_per_second"] > 1e8
    assert (measured["gpu"]["bf16"] is None) == (gpus == "t4")  # the T4 has no bf16, and the probe does not try
    assert measured["gpu_compiler"] is answer["compiles"]
    assert not answer["used"]  # trials are forks, and a process that has used CUDA cannot fork
    exchanges = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"} if gpus == "2xh100" else set()
    assert set(measured["gpu_exchanges"]) == exchanges
    assert measured["gpu_exchange_ranks"] == (2 if exchanges else None)
    assert all("through the host" in link["name"] for link in measured["gpu_exchanges"].values())
    assert measured["probe_seconds"] < 90


def test_a_card_without_kernels_in_the_wheel_is_refused_before_planning(on_gpus: Run, job: Path, tmp_path: Path) -> None:
    done = on_gpus("v100", *command(job, tmp_path / "out"))
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "none for compute capability 7.0" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_two_gpus_of_one_command_train_as_one(train: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    """``--nproc 2`` starts its ranks anew, as a fork could not use CUDA."""
    plain = ("--set", "precision=fp32", "--trial-seconds", "0", "--save-steps", "2")
    one = train("2xh100", tmp_path / "one", *plain, "--nproc", "1")
    two = train("2xh100", tmp_path / "two", *plain, "--nproc", "2", "--fully-shard", "weights")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert two["plan"]["num_processes"] == 2 and two["plan"]["layout"]["fully_shard"] == "weights"  # type: ignore[index]


def test_offloads_change_no_loss(train: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    plain = ("--set", "precision=bf16", "--trial-seconds", "0")
    here = train("h100", tmp_path / "here", *plain)
    moved = train("h100", tmp_path / "moved", *plain, "--set", "activation_offload=True", "--set", "optim_offload=True")
    assert losses(moved) == pytest.approx(losses(here), rel=1e-3)


WORKERS = (
    "upshift.inference.encoding.raced_setup", "upshift.inference.generation.raced_setup",
    "upshift.training.elastic.replica_process", "upshift.training.job.server", "upshift.training.trials.worker",
    "upshift.tuning.mup_check", "upshift.tuning.trainer_trial",
)  # fmt: skip
ASKING_WORKER = """
import os, torch
from answers import Said
ASKED = torch.cuda.is_available(), torch.cuda.get_device_capability()
LOADED = os.getpid()

def main(path, answer):
    from upshift.internals.torch_names import is_fork_after_cuda
    torch.ones(2, device="cuda")
    same = ASKED == (torch.cuda.is_available(), torch.cuda.get_device_capability())
    answer(Said(text=f"forked {os.getppid() == LOADED}, lost CUDA {is_fork_after_cuda()}, same answers {same}"))
"""
ANSWERS = """
from upshift.value import Value

class Said(Value):
    text: str
"""
ASK = """
from answers import Said
from upshift.fork_server import fork_server
with fork_server("asking_worker") as server:
    for _ in range(2):
        print(*(getattr(one, "text", one) for one in server.ask(Said(text=""), Said, limit_seconds=60.0)), flush=True)
"""


def test_importing_a_worker_does_not_start_cuda(in_new_process: Run, tmp_path: Path) -> None:
    """A worker may import any library that asks for GPUs: its children are forks, which start in milliseconds."""
    (tmp_path / "asking_worker.py").write_text("".join(f"import {worker}\n" for worker in WORKERS) + ASKING_WORKER)
    (tmp_path / "answers.py").write_text(ANSWERS)
    done = in_new_process("2x4090", "-c", ASK)
    assert done.stdout.count("forked True, lost CUDA False, same answers True") == 2, done.stdout + done.stderr


def test_each_reason_is_of_a_function_and_names_tests_that_exist() -> None:
    """functions_that_ran.py compares the list with what ran. This needs no run."""
    reasons = functions_that_ran.reasons()
    assert reasons
    for name, reason in reasons.items():
        path, _, function = name.partition(":")
        tree = ast.parse((ROOT / "src" / "upshift" / path).read_text(encoding="utf-8"))
        assert function in dict(functions_that_ran.record_functions.functions(tree)), name
        for test in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / test).is_file(), f"{name}: {test}"


def test_a_record_says_which_functions_ran_and_which_side(in_new_process: Run, tmp_path: Path) -> None:
    record = tmp_path / "record"
    code = "from upshift.hardware.detect import detect; detect()"
    done = in_new_process("h100", "-c", code, FUNCTIONS_THAT_RAN=str(record))
    assert done.returncode == 0, done.stderr
    ran = record.read_text().splitlines()
    assert len(ran) == len(set(ran)) and {"hardware/detect.py:detect", "hardware/nvml.py:find_gpus"} <= set(ran)
    assert "hardware/nvml.py:read_gpus" not in ran
    assert any(re.fullmatch(r"hardware/nvml.py:find_gpus:\d+ False", line) for line in ran)  # there is an NVML
