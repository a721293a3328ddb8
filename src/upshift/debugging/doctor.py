"""Examine everything about this machine, in the order in which a person reads it."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from upshift.debugging.cpu_memory import examine_cpu, examine_memory
from upshift.debugging.disks import examine_folder, examine_shm
from upshift.debugging.finding import Finding, error
from upshift.debugging.gpus import examine_gpus, examine_topology
from upshift.debugging.measured_rates import examine_rates
from upshift.debugging.plan_needs import PlanNeeds, examine_plan
from upshift.debugging.software import (
    LIBRARIES,
    examine_allocators,
    examine_chosen_gpus,
    examine_compilers,
    examine_cuda,
    examine_extras,
    examine_requirements,
    examine_switches,
    examine_threads,
    find_compilers,
)
from upshift.errors import UpshiftError
from upshift.hardware.cgroup import read_text
from upshift.hardware.detect import detect, find_nvml
from upshift.hardware.nvml import Gpus, read_gpus
from upshift.hardware.spec import Host
from upshift.settings import read_library_variables, read_ranks, read_settings
from upshift.text import one_line
from upshift.units import MIB
from upshift.value import Value
from upshift.versions import installed_versions, torch_cuda

# Bytes that are written to each folder and read back.
QUICK_BYTES = 16 * MIB
WHOLE_BYTES = 256 * MIB
TOOL_SECONDS = 5
ROOT = Path("/")


class Diagnosis(Value):
    """Hold a machine and the findings about it."""

    host: Host
    findings: tuple[Finding, ...]


def examine(*, quick: bool, output: Path, psu_watts: float | None = None, needs: PlanNeeds | None = None) -> Diagnosis:
    """Return the diagnosis of this machine.

    ``quick``: skip what takes seconds. ``output``: the folder that runs will write to. ``needs``: what a plan needs.
    """
    host = detect()
    gpus = read_gpus(find_nvml(), None)
    probe_bytes = QUICK_BYTES if quick else WHOLE_BYTES
    needed_bytes = needs.host_bytes if needs is not None else None
    findings = [
        *with_failure("GPUs", examine_gpus(gpus, psu_watts=psu_watts, process_name=process_name)),
        *with_failure("GPU topology", examine_topology(gpus)),
        *with_failure("machine", _machine(host, output, probe_bytes, needed_bytes)),
        *with_failure("plan", examine_plan(host, needs) if needs is not None else ()),
        *with_failure("software", _software(host, gpus)),
    ]
    measured_hosts: list[Host] = []
    if not quick:
        findings += with_failure("rates", _rates(host, gpus, measured_hosts.append))
    return Diagnosis(host=measured_hosts[0] if measured_hosts else host, findings=tuple(findings))


def with_failure(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, and an error if a look fails. The findings of the other looks often name its cause."""
    try:
        yield from findings
    except (UpshiftError, ImportError, OSError, ValueError) as failure:  # ValueError: a file or a variable in another form
        reason = one_line(failure, limit=None) or type(failure).__name__
        yield error(
            subject,
            what=f"cannot be examined any further: {reason[:300]}",
            evidence=type(failure).__name__,
            fix="fix the other errors and warnings in this list, then run: upshift doctor",
        )


def _machine(host: Host, output: Path, probe_bytes: int, needed_bytes: float | None) -> Iterator[Finding]:
    yield from with_failure("CPU", examine_cpu(host, ROOT))
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield from with_failure("memory", examine_memory(host, ROOT, needed_bytes=needed_bytes, open_files=open_files))
    cache = read_settings().cache_dir
    for purpose, folder, option in (
        ("cache", cache, "export UPSHIFT_CACHE=FOLDER"),
        ("output", output, "upshift train --output FOLDER"),
    ):
        look = examine_folder(folder, purpose=purpose, option=option, probe_bytes=probe_bytes)
        yield from with_failure(f"{purpose} folder", look)
    yield from with_failure("/dev/shm", examine_shm())


def _software(host: Host, gpus: Gpus) -> Iterator[Finding]:
    variables = read_library_variables()
    built, is_known = torch_cuda()
    yield from with_failure("GPUs", examine_chosen_gpus(host.origin["gpu"]))
    yield from with_failure("libraries", examine_requirements())
    yield from with_failure("CUDA", examine_cuda(gpus, built, is_known, variables))
    compilers = find_compilers(variables, shutil.which, _ask)
    yield from with_failure("compiler", examine_compilers(compilers, gpus, built, installed_versions(LIBRARIES)))
    yield from with_failure("threads", _threads(host, variables))
    yield from with_failure("variables", examine_switches(variables))
    yield from with_failure("allocator", examine_allocators(variables, ROOT))
    yield from with_failure("extras", examine_extras())


def _threads(host: Host, variables: Mapping[str, str]) -> Iterator[Finding]:
    ranks = read_ranks()
    usable_cores = host.cpu.usable_cores if host.cpu is not None else 1
    yield from examine_threads(variables, usable_cores=usable_cores, local_ranks=1 if ranks is None else ranks.local_size)


def _rates(host: Host, gpus: Gpus, on_measured: Callable[[Host], None]) -> Iterator[Finding]:
    """Measure the rates of the host, pass the host with them to ``on_measured``, and yield findings about them.

    The rates are measured while other programs run, because their effect should show.
    """
    from upshift.hardware.probe import probe

    measured = probe(host)
    assert measured.measured is not None
    on_measured(measured)
    limits = [gpu.limit_watts for gpu in gpus.states if gpu.limit_watts is not None]
    yield from examine_rates(measured, measured.measured, limit_watts=min(limits, default=None))


def process_name(pid: int) -> str | None:
    return read_text(ROOT / f"proc/{pid}/comm") or None


def _ask(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
