"""Check that a plan fits on this machine: compare the memory that it needs with the memory of the devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from upshift.debugging.finding import Finding, error, ok, unknown
from upshift.errors import RequestError
from upshift.hardware.spec import Host, stated_memory
from upshift.units import GIB, format_bytes
from upshift.value import Value


class PlanNeeds(Value):
    """Hold the memory and the devices that the best plan of a file needs on each host."""

    device: str = Field(description="cpu, or the kind of accelerator: cuda, hpu, xla, mps")
    per_host: int = Field(gt=0, description="processes on a CPU, devices of an accelerator")
    bytes_each: float = Field(gt=0, description="that one process, or one device, holds")

    @property
    def host_bytes(self) -> float | None:
        """Return the bytes of host memory that all processes need, or None for a plan for an accelerator."""
        return self.per_host * self.bytes_each if self.device == "cpu" else None


def read_plan_needs(path: Path) -> PlanNeeds:
    """Return what the best plan in a file of ``upshift plan --json`` or ``--lock`` needs, as the plan predicts it.

    Raise RequestError for any other file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        best = document["plans"][0]
        plan = best["plan"]
        predicted = best["predicted"]
        gib_each = predicted.get("resident_gib") or predicted["peak_gib"]  # only training plans have resident_gib
        num_hosts = (document.get("host") or document.get("lock", {}).get("host") or {}).get("num_nodes", 1)
        return PlanNeeds(device=plan["device"], per_host=-(-_count_devices(plan) // num_hosts), bytes_each=gib_each * GIB)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{path} is not a file of plans; write one: upshift plan MODEL --json > {path}") from None


def _count_devices(plan: dict[str, Any]) -> int:
    """Return the processes of a training plan, or the devices of an inference plan."""
    if "num_processes" in plan:
        return int(plan["num_processes"])
    return int(plan["replicas"] * plan["tensor_parallel"] * plan["pipeline_parallel"])


def examine_plan(host: Host, needs: PlanNeeds) -> Iterator[Finding]:
    """Compare a plan for an accelerator with this machine's devices. ``examine_memory`` checks a plan for a CPU."""
    if needs.device == "cpu":
        return
    gpus = host.mixed_gpus or ((host.gpu,) * host.gpus_per_node if host.gpu is not None else ())
    advice = "upshift plan again here, or run upshift doctor on the machine that the plan is for"
    if host.device != needs.device or not gpus:
        yield error("plan", what=f"it is for {needs.device} devices, and this machine has none", fix=advice)
        return
    if len(gpus) < needs.per_host:
        have = f"this machine has {len(gpus)}"
        yield error("plan", what=f"it needs {needs.per_host} {needs.device} devices on each host, and {have}", fix=advice)
        return
    free = [stated_memory(gpu) for gpu in gpus]
    largest_free = sorted((free_bytes for free_bytes in free if free_bytes is not None), reverse=True)[: needs.per_host]
    if len(largest_free) < needs.per_host:
        yield unknown("plan", what="the free memory of the devices cannot be read", evidence=f"it needs {_describe_needs(needs)}")
        return
    evidence = f"{format_bytes(largest_free[-1])} free of {gpus[0].name}"
    if needs.bytes_each <= largest_free[-1]:
        yield ok("plan", what=f"has room: it needs {_describe_needs(needs)}", evidence=evidence)
        return
    fix = "upshift plan again: it plans for what is free; or end what holds the device's memory: nvidia-smi"
    yield error(
        "plan",
        what=f"it needs {_describe_needs(needs)}, and {format_bytes(largest_free[-1])} are free",
        evidence=evidence,
        fix=fix,
    )


def _describe_needs(needs: PlanNeeds) -> str:
    devices = "a device" if needs.per_host == 1 else f"each of {needs.per_host} devices"
    return f"{format_bytes(needs.bytes_each)} on {devices}"
