"""Describe in words how the GPUs of this machine are connected, and which of them to put together for tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from upshift.debugging.finding import Finding, hint, ok, unknown, warning
from upshift.hardware.gpu_state import GpuPair, Gpus

# nvmlGpuTopologyLevel_t, as `nvidia-smi topo -m` abbreviates them
WORDS = {
    0: "are on one board",
    10: "share one PCIe switch (PIX)",
    20: "are joined by several PCIe switches (PXB)",
    30: "meet at the CPU's PCIe host bridge (PHB)",
    40: "cross host bridges of one CPU socket (NODE)",
    50: "cross the CPU sockets (SYS)",
}
NVLINK, ACROSS = -1, 50


def examine_topology(gpus: Gpus) -> Iterator[Finding]:
    ways = {frozenset((pair.one, pair.other)): way for pair in gpus.pairs if (way := _way(pair)) is not None}
    if not ways or len(ways) < len(gpus.pairs):
        if gpus.pairs:
            yield unknown("topology", what="the driver does not say how all GPUs are connected", evidence="NVML")
        return
    words = [f"{_names(pairs)} {_words(way)}" for way, pairs in sorted(_by_way(ways).items())]
    count = len(gpus.states)
    order = best_order(count, ways)
    evidence = "; ".join(words) + " (NVML)"
    neighbours = [ways[frozenset((one, one + 1))] for one in range(0, count - 1, 2)]
    better = [ways[frozenset(order[at : at + 2])] for at in range(0, count - 1, 2)]
    mixed = [pair for pair in _by_way(ways).get(ACROSS, []) if len(set(ways.values())) > 1]
    if sum(better) < sum(neighbours):
        numbers = ",".join(map(str, order))
        yield warning(
            "topology",
            evidence=evidence,
            what=f"neighbours in number are not neighbours in wire: {_names(mixed) or 'some'} {_words(max(ways.values()))}; "
            f"put tensor parallel on {order[0]},{order[1]}",
            fix=f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}",
        )
        return
    yield ok("topology", what=f"{count} GPUs, best pairs are neighbours in number", evidence=evidence)
    if any(way == NVLINK for way in ways.values()) and any(way != NVLINK for way in ways.values()):
        pairs = [pair for pair, way in ways.items() if way != NVLINK]
        group = best_group(count, ways)
        yield hint(
            "topology",
            what=f"{_names([tuple(sorted(pair)) for pair in pairs])} have no NVLink between them",
            evidence=evidence,
            fix=f"keep tensor parallelism among {','.join(map(str, group))}: --tensor-parallel {len(group)}",
        )


def _way(pair: GpuPair) -> int | None:
    return NVLINK if pair.nvlink else pair.level


def _words(way: int) -> str:
    return "are joined by NVLink" if way == NVLINK else WORDS.get(way, f"are at NVML's level {way}")


def _by_way(ways: Mapping[frozenset[int], int]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for pair, way in sorted(ways.items(), key=lambda item: sorted(item[0])):
        found.setdefault(way, []).append(tuple(sorted(pair)))
    return found


def _names(pairs: list[tuple[int, ...]]) -> str:
    shown = ", ".join("-".join(f"GPU{number}" for number in pair) for pair in pairs[:6])
    return shown + (f" and {len(pairs) - 6} pairs more" if len(pairs) > 6 else "")


def best_order(count: int, ways: Mapping[frozenset[int], int]) -> list[int]:
    """Return GPUs two by two, each with the best partner that is left; pairs that are near each other follow each other."""
    left, order = list(range(count)), list[int]()
    while left:
        last = order[-1] if order else None
        first = min(left, key=lambda gpu: (ways[frozenset((last, gpu))] if last is not None else 0, gpu))
        left.remove(first)
        order.append(first)
        if left:
            partner = min(left, key=lambda gpu: (ways[frozenset((first, gpu))], gpu))
            left.remove(partner)
            order.append(partner)
    return order


def best_group(count: int, ways: Mapping[frozenset[int], int]) -> list[int]:
    """Return the largest set of GPUs of which all have NVLink to all others, found from each GPU greedily."""
    groups = []
    for start in range(count):
        group = [start]
        for other in range(count):
            if other != start and all(ways[frozenset((other, member))] == NVLINK for member in group):
                group.append(other)
        groups.append(sorted(group))
    return max(groups, key=len)
