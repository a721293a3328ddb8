"""Check that a plan has room on this machine: compare what a file of plans needs of a host with the memory of its devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from upshift.debugging.finding import Finding, error, ok, unknown
from upshift.errors import RequestError
from upshift.hardware.spec import Gpu, Host
from upshift.units import GIB, format_bytes
from upshift.value import Value


class PlanNeeds(Value):
    """The memory and devices that the best plan of a file needs of each host."""

    device: str = Field(description="cpu, or the kind of accelerator: cuda, hpu, xla, mps")
    per_host: int = Field(gt=0, description="processes on a CPU, devices of an accelerator")
    bytes_each: float = Field(gt=0, description="that one process, or one device, holds")

    @property
    def host_bytes(self) -> float | None:
        """Return the bytes of the host's memory that all processes hold together; None where the plan is for an accelerator."""
        return self.per_host * self.bytes_each if self.device == "cpu" else None


def read_plan_needs(path: Path) -> PlanNeeds:
    """Return what the best plan of a file of ``upshift plan --json`` or ``--lock`` needs, by its own prediction.

    Raise RequestError for another file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        best = document["plans"][0]
        plan = best["plan"]
        predicted = best["predicted"]
        held = predicted.get("resident_gib") or predicted["peak_gib"]  # resident_gib: of a training plan
        num_hosts = (document.get("host") or document.get("lock", {}).get("host") or {}).get("num_nodes", 1)
        return PlanNeeds(device=plan["device"], per_host=-(-_count_devices(plan) // num_hosts), bytes_each=held * GIB)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{path} is not a file of plans; write one: upshift plan MODEL --json > {path}") from None


def _count_devices(plan: dict[str, Any]) -> int:
    """Return the processes of a training plan, or the devices of an inference plan."""
    if "num_processes" in plan:
        return int(plan["num_processes"])
    return int(plan["replicas"] * plan["tensor_parallel"] * plan["pipeline_parallel"])


def examine_plan(host: Host, needs: PlanNeeds) -> Iterator[Finding]:
    """Compare a plan for an accelerator with this machine's devices. A plan for a CPU is checked with the host's memory."""
    if needs.device == "cpu":
        return
    gpus = host.mixed_gpus or ((host.gpu,) * host.gpus_per_node if host.gpu is not None else ())
    again = "upshift plan again here, or run upshift doctor on the machine that the plan is for"
    if host.device != needs.device or not gpus:
        yield error("plan", what=f"it is for {needs.device} devices, and this machine has none", fix=again)
        return
    if len(gpus) < needs.per_host:
        have = f"this machine has {len(gpus)}"
        yield error("plan", what=f"it needs {needs.per_host} {needs.device} devices on each host, and {have}", fix=again)
        return
    free = [_free_bytes(gpu) for gpu in gpus]
    known = sorted((each for each in free if each is not None), reverse=True)[: needs.per_host]
    if len(known) < needs.per_host:
        yield unknown("plan", what="the free memory of the devices cannot be read", evidence=f"it needs {_each(needs)}")
        return
    evidence = f"{format_bytes(known[-1])} free of {gpus[0].name}"
    if needs.bytes_each <= known[-1]:
        yield ok("plan", what=f"has room: it needs {_each(needs)}", evidence=evidence)
        return
    end_it = "upshift plan again: it plans for what is free; or end what holds the device's memory: nvidia-smi"
    yield error("plan", what=f"it needs {_each(needs)}, and {format_bytes(known[-1])} are free", evidence=evidence, fix=end_it)


def _free_bytes(gpu: Gpu) -> int | None:
    return gpu.memory_bytes if gpu.free_memory_bytes is None else gpu.free_memory_bytes


def _each(needs: PlanNeeds) -> str:
    devices = "a device" if needs.per_host == 1 else f"each of {needs.per_host} devices"
    return f"{format_bytes(needs.bytes_each)} on {devices}"
