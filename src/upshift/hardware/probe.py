"""Measure this machine for the cost model: matrix and memory rates, and the fixed costs of torch.

Each number is a median after warm-up, on all usable cores, at a shape that is typical of training; smaller shapes reach less.
Exchanges between processes are measured with gloo, and those between GPUs with NCCL, in processes of their own. fp8 and int8 are
not measured. Other work on the machine lowers the rates.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from upshift import parent_process
from upshift.errors import JobFailed, RequestError
from upshift.hardware.detect import detect
from upshift.hardware.exchange_probe import free_port
from upshift.hardware.spec import Cpu, Host, Link, Measured, Rates
from upshift.hardware.torch_build import lacks_cuda
from upshift.units import MIB
from upshift.versions import installed_version, torch_cuda

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# tokens, in features, out features
CPU_SHAPE = (1024, 1024, 4096)
CPU_SMALL_SHAPE = (128, 1024, 1024)
MIN_STREAM_BYTES = 64 * MIB  # of one array, if the last-level cache is small or unknown
MAX_STREAM_BYTES = 2048 * MIB
DISPATCHES = 2000
IMPORT_PATIENCE_SECONDS = 300.0  # importing torch and transformers took over a minute on a busy machine with cold files
POLL_SECONDS = 0.05
BASE_NAMES = ("resident_bytes", "compiler", "exchanges")  # the names of the measurements of the base process


def memory_rate(host: Host) -> float:
    """Return the bytes per second of the CPU's memory. If the host was not probed, measure them in less than a second."""
    if host.measured is not None and host.measured.cpu.memory_bytes_per_second is not None:
        return host.measured.cpu.memory_bytes_per_second
    return triad_rate("cpu", MIN_STREAM_BYTES, limit_seconds=0.5)


def probe(host: Host, *, budget_seconds: float = 10.0) -> Host:
    """Measure this machine in about `budget_seconds`, and return `host` with `measured` filled. Restore torch's settings.

    Raise RequestError if `host` is not this machine. Raise JobFailed if torch cannot run here.
    """
    if budget_seconds <= 0:
        raise RequestError(f"budget_seconds={budget_seconds} leaves no time; give more than 0, such as 10")
    cpu = _check_this_machine(host)
    start = time.perf_counter()
    base = _run_base_process(cpu.usable_cores, timeout_seconds=max(IMPORT_PATIENCE_SECONDS, budget_seconds))
    with _torch_settings(cpu.usable_cores):
        seconds_left = max(1.0, budget_seconds - (time.perf_counter() - start))
        cpu_rates, core_share = _cpu_rates(cpu, limit_seconds=0.7 * seconds_left)
        dispatch = dispatch_seconds("cpu")
        touch = _first_touch_seconds_per_byte(cpu)
        gpu = _gpu_numbers(host, 0.5 * seconds_left) if host.device == "cuda" else {}
    measured = Measured(
        torch_version=version("torch"),
        transformers_version=installed_version("transformers"),
        num_threads=cpu.usable_cores,
        cpu=cpu_rates,
        dispatch_seconds=dispatch,
        first_touch_seconds_per_byte=touch,
        exchanges=_links("gloo", base["exchanges"] or {}),
        base_resident_bytes=base["resident_bytes"],
        compiler=base["compiler"],
        probe_seconds=time.perf_counter() - start,
        core_share=core_share,
        failed=(*(name for name in BASE_NAMES if base[name] is None), *gpu.pop("failed", ())),
        **gpu,
    )
    return with_measured(host, measured)


def with_measured(host: Host, measured: Measured) -> Host:
    return host.model_copy(update={"measured": measured, "origin": host.origin | {"measured": "probe"}})


def _check_this_machine(host: Host) -> Cpu:
    """Return the host's CPU. Raise RequestError if the host is not this machine."""
    detected = detect()
    same_cpu = detected.cpu is not None and host.cpu is not None and detected.cpu.model_name == host.cpu.model_name
    gpu_names = {gpu.name for gpu in (detected.gpu, *detected.mixed_gpus) if gpu is not None}
    same_gpu = host.gpu is None or host.gpu.name in gpu_names
    if host.cpu is None or host.num_nodes != 1 or not same_cpu or not same_gpu:
        raise RequestError(f"host {host.name!r} is not this machine ({platform.node()}); probe the result of detect()")
    return host.cpu


def _run_base_process(num_threads: int, *, timeout_seconds: float) -> dict[str, Any]:
    """Return the measurements of a process that imports torch and transformers. One that failed, or came too late, is None."""
    unknown = dict.fromkeys(BASE_NAMES)
    command = parent_process.command("upshift.hardware.probe_process", str(num_threads), options=("-P",))
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=True)
    except subprocess.TimeoutExpired:
        logger.warning("no imports of torch, transformers in %.0f s: nothing is compiled, memory is underrated", timeout_seconds)
        return unknown
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise JobFailed(f"a process that imports torch and transformers fails here: {last_line}") from None
    answer = _read_answer(process.stdout)
    if answer is None:
        logger.warning("a process that imports torch and transformers gave no answer: nothing is compiled, memory is underrated")
        return unknown
    for name, message in answer.get("failures", {}).items():
        logger.warning("%s of a process are not measured: %s", name, message)
    return unknown | answer


def _read_answer(stdout: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of a process's standard output, or None if there is none."""
    try:
        answer = json.loads("".join(stdout.splitlines()[-1:]))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


@contextmanager
def _torch_settings(num_threads: int) -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def median_seconds(run: Callable[[], object], *, repeats: int, limit_seconds: float) -> float:
    """Return the median time of `run` after one untimed call. If the time limit is reached, there are fewer repeats."""
    run()
    end = time.perf_counter() + limit_seconds
    samples: list[float] = []
    while not samples or (len(samples) < repeats and time.perf_counter() < end):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _cpu_rates(cpu: Cpu, *, limit_seconds: float) -> tuple[Rates, float]:
    """Return the CPU's rates, and the share of the cores' time that this process got while it multiplied in fp32."""
    import torch

    seconds_each = limit_seconds / 5
    torch.set_float32_matmul_precision("highest")
    start = time.perf_counter()
    cpu_start = time.process_time()
    fp32 = _cpu_matrix_rate(torch.float32, limit_seconds=seconds_each)
    share = (time.process_time() - cpu_start) / (time.perf_counter() - start) / cpu.usable_cores
    torch.set_float32_matmul_precision("medium")
    medium = _cpu_matrix_rate(torch.float32, limit_seconds=seconds_each)
    bf16 = _cpu_matrix_rate(torch.bfloat16, limit_seconds=seconds_each)
    fp16 = _cpu_matrix_rate(torch.float16, limit_seconds=seconds_each)
    triad = triad_rate("cpu", _stream_bytes(cpu), limit_seconds=seconds_each)
    return Rates(fp32=fp32, fp32_medium=medium, bf16=bf16, fp16=fp16, memory_bytes_per_second=triad), share


def _cpu_matrix_rate(dtype: torch.dtype, *, limit_seconds: float) -> float:
    """Return the FLOP/s of a linear layer. If emulation is too slow for the usual shape, the small shape counts."""
    small = matrix_rate("cpu", dtype, CPU_SMALL_SHAPE, limit_seconds=limit_seconds / 4)
    m, k, n = CPU_SHAPE
    if 4 * (2 * m * k * n) / small > limit_seconds:
        return small
    return matrix_rate("cpu", dtype, CPU_SHAPE, limit_seconds=limit_seconds / 2)


def matrix_rate(device: str, dtype: torch.dtype, shape: tuple[int, int, int], *, limit_seconds: float) -> float:
    import torch

    m, k, n = shape
    inputs = torch.randn(m, k, device=device).to(dtype)
    weight = torch.randn(n, k, device=device).to(dtype)

    def run() -> None:
        torch.nn.functional.linear(inputs, weight)
        _synchronize(device)

    return 2 * m * k * n / median_seconds(run, repeats=9, limit_seconds=limit_seconds)


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _stream_bytes(cpu: Cpu) -> int:
    """Return the size of an array for streaming: at least four last-level caches, and at most an eighth of the free memory."""
    preferred = max(MIN_STREAM_BYTES, 4 * (cpu.l3_total_bytes or MIN_STREAM_BYTES))
    limit = MAX_STREAM_BYTES
    if cpu.free_memory_bytes is not None:
        limit = min(limit, cpu.free_memory_bytes // 8)
    return max(MIB, min(preferred, limit))


def triad_rate(device: str, num_bytes: int, *, limit_seconds: float) -> float:
    """Return the bytes per second of a = b + s * c, counted as in STREAM: two reads and one write, without write-allocate."""
    import torch

    a, b, c = (torch.ones(num_bytes // 4, device=device) for _ in range(3))

    def run() -> None:
        torch.add(b, c, alpha=2.0, out=a)
        _synchronize(device)

    return 3 * num_bytes / median_seconds(run, repeats=15, limit_seconds=limit_seconds)


def dispatch_seconds(device: str) -> float:
    """Return the seconds that Python and torch take to issue one operation on one element."""
    import torch

    element = torch.ones(1, device=device)
    samples = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(DISPATCHES):
            torch.add(element, element)
        samples.append((time.perf_counter() - start) / DISPATCHES)
        _synchronize(device)
    return statistics.median(samples[1:])


def _first_touch_seconds_per_byte(cpu: Cpu) -> float:
    """Return the extra seconds per byte of the first write to an allocation, when the kernel maps and clears its pages."""
    import torch

    num_bytes = min(_stream_bytes(cpu), 256 * MIB)
    differences = []
    for _ in range(3):
        fresh = torch.empty(num_bytes, dtype=torch.uint8)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            fresh.fill_(1)
            times.append(time.perf_counter() - start)
        differences.append(times[0] - times[1])
        del fresh
    return max(0.0, statistics.median(differences) / num_bytes)


def _gpu_numbers(host: Host, limit_seconds: float) -> dict[str, Any]:
    """Return the fields of Measured for the first GPU, and for the exchanges between all GPUs if there are several equal ones."""
    if lacks_cuda(*torch_cuda()):
        logger.warning("a GPU is here but torch cannot use it; install a CUDA build of torch")
        return {}
    gpu = host.one_device().gpu
    unsupported = [name for name in ("fp32_medium", "bf16", "fp16") if gpu is not None and gpu.supports(name) is False]
    numbers = _run_gpu_probe([["rates", str(limit_seconds), *unsupported]])
    if numbers is None:
        return {}
    failures = numbers.pop("failures")
    numbers["failed"] = tuple(failures)
    for name, message in failures.items():
        logger.warning("the GPU's rate (%s) is not measured: %s", name, message)
    ranks = host.gpus_per_node if host.gpu is not None else 1
    if ranks > 1:
        port = str(free_port())
        answer = _run_gpu_probe([["exchanges", str(rank), str(ranks), port] for rank in range(ranks)])
        if answer is not None:
            numbers["gpu_exchanges"] = _links(f"nccl {answer['path']},", answer["exchanges"])
            numbers["gpu_exchange_ranks"] = ranks
    return numbers


class _Rank(NamedTuple):
    """Hold a process of the GPU probe, and the files that its output goes to: a full pipe would block it."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def answer(self) -> dict[str, Any] | None:
        return _read_answer(_content(self.stdout))

    def why_failed(self) -> str:
        """Return the message of the failure in the process's answer, or else its last line, or how it ended."""
        failures: dict[str, str] = (self.answer() or {}).get("failures") or {}
        if failures:
            return next(iter(failures.values()))
        lines = _content(self.stderr).strip().splitlines()
        return lines[-1] if lines else f"it ended with {self.process.returncode}"


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _run_gpu_probe(arguments_of_ranks: list[list[str]]) -> dict[str, Any] | None:
    """Run one process for each list of arguments. Return the answer of the first one.

    Return None if a process fails. Its message is shown, and the others, which would wait for it, are killed."""
    kind = arguments_of_ranks[0][0]
    with ExitStack() as stack:
        ranks = [stack.enter_context(_running_rank(arguments)) for arguments in arguments_of_ranks]
        end = time.monotonic() + IMPORT_PATIENCE_SECONDS
        while True:
            codes = [rank.process.poll() for rank in ranks]
            failed = next((number for number, code in enumerate(codes) if code not in (None, 0)), None)
            if failed is not None:
                prefix = f"rank {failed} of {len(ranks)}: " if len(ranks) > 1 else ""
                logger.warning("GPUs are not measured (%s): %s%s", kind, prefix, ranks[failed].why_failed())
                return None
            if None not in codes:
                break
            if time.monotonic() > end:
                logger.warning("GPUs are not measured (%s): no answer in %.0f s", kind, IMPORT_PATIENCE_SECONDS)
                return None
            time.sleep(POLL_SECONDS)
        answer = ranks[0].answer()
    if answer is None:
        logger.warning("GPUs are not measured (%s): the process that measures them gave no answer", kind)
    return answer


@contextmanager
def _running_rank(arguments: list[str]) -> Iterator[_Rank]:
    """Run a process of the GPU probe while open, and kill it then."""
    command = parent_process.command("upshift.hardware.gpu_probe", *arguments, options=("-P",))
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        try:
            yield _Rank(process, stdout, stderr)
        finally:
            process.kill()
            process.wait()


def _links(name: str, exchanges: dict[str, tuple[float, float]]) -> dict[str, Link]:
    return {
        operation: Link(name=f"{name} {operation}", latency_seconds=latency, bytes_per_second=rate, measured=True)
        for operation, (latency, rate) in exchanges.items()
    }
