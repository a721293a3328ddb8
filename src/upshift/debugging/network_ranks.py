# needs torch
"""Check that the ranks of a launcher can allocate, reduce and send, and measure the latency and the rate of each pair."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from upshift.debugging.finding import Finding, error, ok, warning
from upshift.hardware.exchange_probe import meet
from upshift.settings import Ranks
from upshift.text import one_line
from upshift.units import MIB

MEET_SECONDS = 60.0
BULK_BYTES = 16 * MIB
PINGS = 10
SLOWER = 3.0  # a pair that is so many times slower than the median of all pairs is reported


def examine_ranks(ranks: Ranks) -> list[Finding]:
    """Return the findings about all ranks on rank 0, and no findings on the other ranks.

    A failure raises no error: it is a finding of the rank that sees it. Raise RequestError if the launcher names no address.
    """
    host, port = ranks.meeting_point()
    address = f"{host}:{port}"
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())  # under Slurm each rank may see only one
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method="env://" if ranks.store_is_there else f"tcp://{address}",  # torch reads torchrun's variables only
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=MEET_SECONDS),
        )
        summed = torch.full((MIB,), float(ranks.rank + 1), device=device)
        dist.all_reduce(summed)
        expected = ranks.size * (ranks.size + 1) / 2
        if not bool((summed == expected).all()):
            problem = f"all_reduce of {ranks.size} ranks gave {float(summed[0])}, not {expected}"
            return [
                error(
                    f"rank {ranks.rank}",
                    what=problem,
                    evidence=backend,
                    fix="export NCCL_P2P_DISABLE=1 and try again: then it is a link between GPUs",
                )
            ]
        pairs = {
            (first, second): _measure_pair(first, second, ranks.rank, device)
            for first in range(ranks.size)
            for second in range(first + 1, ranks.size)
        }
        gathered: list[dict[tuple[int, int], tuple[float, float] | None]] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(gathered, pairs)
    except (RuntimeError, ValueError) as failure:  # ValueError: an address that torch cannot parse
        message = one_line(failure, limit=200)
        variables = "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=NAME" if backend == "nccl" else "export GLOO_SOCKET_IFNAME=NAME"
        return [
            error(
                f"rank {ranks.rank}",
                what=f"cannot meet or exchange with the others at {address} by {backend}",
                evidence=message,
                fix=f"upshift doctor --network --hosts A,B on each host names the port; then {variables} (NAME: ip -br address)",
            )
        ]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return _pair_findings(gathered, backend, device) if ranks.rank == 0 else []


def _measure_pair(first: int, second: int, rank: int, device: torch.device) -> tuple[float, float] | None:
    """Return the seconds of a round trip and the bytes per second between two ranks, on the first of them.

    Every rank calls this function. The result is None on all ranks except the first one."""
    result = None
    if rank in (first, second):
        peer = first + second - rank
        small = torch.zeros(1, device=device)
        large = torch.ones(BULK_BYTES // 4, device=device)
        times = [_round_trip(small, peer, first=rank == first) for _ in range(PINGS)]
        bulk = min(_round_trip(large, peer, first=rank == first) for _ in range(2))
        result = (statistics.median(times), 2 * BULK_BYTES / bulk) if rank == first else None
    meet()
    return result


def _round_trip(tensor: torch.Tensor, peer: int, *, first: bool) -> float:
    start = time.perf_counter()
    for sends in (first, not first):
        if sends:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _pair_findings(
    gathered: list[dict[tuple[int, int], tuple[float, float] | None]], backend: str, device: torch.device
) -> list[Finding]:
    measured = {pair: numbers for pairs in gathered for pair, numbers in pairs.items() if numbers is not None}
    usual = statistics.median(rate for _, rate in measured.values()) if measured else 0.0
    findings = [
        ok(
            "ranks",
            what=f"{len(gathered)} ranks allocate on {device.type} and reduce by {backend}",
            evidence="all_reduce of 1 Mi numbers",
        )
    ]
    for (first, second), (latency, rate) in sorted(measured.items()):
        evidence = f"round trip {latency * 1e6:,.0f} us, {rate / 1e6:,.0f} MB/s"
        subject = f"rank {first} <-> rank {second}"
        if rate * SLOWER < usual:
            findings.append(
                warning(
                    subject,
                    what=f"{usual / rate:.1f} times slower than the median pair",
                    evidence=evidence,
                    fix="upshift doctor on both hosts; for GPUs: nvidia-smi topo -m",
                )
            )
        else:
            findings.append(ok(subject, what="talk", evidence=evidence))
    return findings
