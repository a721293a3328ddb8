"""Examine everything about this machine, in the order in which a person reads it."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from upshift.debugging.cpu_memory import examine_cpu, examine_memory
from upshift.debugging.disks import examine_folder, examine_shm
from upshift.debugging.finding import Finding
from upshift.debugging.gpus import examine_gpus, examine_topology
from upshift.debugging.plan_needs import PlanNeeds, examine_plan
from upshift.debugging.rates import examine_rates
from upshift.debugging.software import (
    LIBRARIES,
    examine_allocators,
    examine_compilers,
    examine_cuda,
    examine_extras,
    examine_requirements,
    examine_switches,
    examine_threads,
    find_compilers,
)
from upshift.hardware.cgroup import read_text
from upshift.hardware.detect import detect, find_nvml
from upshift.hardware.nvml import Gpus, read_gpus
from upshift.hardware.spec import Host
from upshift.settings import read_library_variables, read_ranks, read_settings
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
    findings = [
        *examine_gpus(gpus, psu_watts=psu_watts, process_name=process_name),
        *examine_topology(gpus),
        *_machine(host, output, QUICK_BYTES if quick else WHOLE_BYTES, needs.host_bytes if needs is not None else None),
        *(examine_plan(host, needs) if needs is not None else ()),
        *_software(host, gpus),
    ]
    if not quick:
        host, rates = _rates(host)
        findings += rates
    return Diagnosis(host=host, findings=tuple(findings))


def _machine(host: Host, output: Path, probe_bytes: int, needed_bytes: float | None) -> Iterator[Finding]:
    yield from examine_cpu(host, ROOT)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield from examine_memory(host, ROOT, needed_bytes=needed_bytes, open_files=open_files)
    cache = read_settings().cache_dir
    yield from examine_folder(cache, purpose="cache", option="export UPSHIFT_CACHE=FOLDER", probe_bytes=probe_bytes)
    yield from examine_folder(output, purpose="output", option="upshift train --output FOLDER", probe_bytes=probe_bytes)
    yield from examine_shm()


def _software(host: Host, gpus: Gpus) -> Iterator[Finding]:
    variables = read_library_variables()
    ranks = read_ranks()
    built, is_known = torch_cuda()
    yield from examine_requirements()
    yield from examine_cuda(gpus, built, is_known, variables)
    yield from examine_compilers(find_compilers(variables, shutil.which, _ask), gpus, built, installed_versions(LIBRARIES))
    usable = host.cpu.usable_cores if host.cpu is not None else 1
    yield from examine_threads(variables, usable_cores=usable, local_ranks=1 if ranks is None else ranks.local_size)
    yield from examine_switches(variables)
    yield from examine_allocators(variables, ROOT)
    yield from examine_extras()


def _rates(host: Host) -> tuple[Host, list[Finding]]:
    """Return the host with newly measured rates, and findings about them.

    The rates are measured while other programs run, because their effect should show.
    """
    from upshift.hardware.probe import probe

    measured = probe(host)
    assert measured.measured is not None
    return measured, list(examine_rates(measured, measured.measured))


def process_name(pid: int) -> str | None:
    return read_text(ROOT / f"proc/{pid}/comm") or None


def _ask(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
