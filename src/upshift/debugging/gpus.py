"""Examine each GPU by its driver's answers: heat, throttling, power, PCIe, NVLink, memory errors, who holds memory.

Describe in words how the GPUs of this machine are connected, and which of them to put together for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from upshift.debugging.finding import Finding, error, hint, ok, unknown, warning
from upshift.hardware.catalog.lookup import GPUS
from upshift.hardware.nvml import GpuPair, Gpus, GpuState
from upshift.units import GIB, MIB, format_bytes

# Bits of nvmlClocksThrottleReasons. Idle, application clocks and display are no fault.
HW_THERMAL = 0x40
SW_THERMAL = 0x20
HW_BRAKE = 0x80
HW_SLOWDOWN = 0x8
POWER_CAP = 0x4
SYNC_BOOST = 0x10
# degrees: below 80 is good, throttling begins at 84 to 90 (the custom hardware guide)
HOT = 80
TOO_HOT = 84
LIMITED = 0.9  # of the default power limit
BUSY = 50  # percent; PCIe and clocks of an idle GPU are lowered on purpose
PSU_SHARE = 0.8  # of the rated power: GPUs draw more than their limit for milliseconds
NOTICED_BYTES = 256 * MIB
POWER_STEP = 5  # watts
# nvmlComputeMode_t
EXCLUSIVE = 3
PROHIBITED = 2


def examine_gpus(gpus: Gpus, *, psu_watts: float | None, process_name: Callable[[int], str | None]) -> Iterator[Finding]:
    if not gpus.states:
        yield unknown("GPU", what="no NVIDIA GPU to look at", evidence=gpus.origin)
        return
    for gpu in gpus.states:
        faults = [*_heat(gpu), *_power(gpu), *_pcie(gpu), *_nvlink(gpu), *_errors(gpu), *_memory(gpu, process_name), *_modes(gpu)]
        if not faults:
            faults.append(ok(f"GPU {gpu.index}", what="healthy", evidence=_summary(gpu)))
        yield from faults
    yield from _psu(gpus.states, psu_watts)


def _summary(gpu: GpuState) -> str:
    facts = [gpu.name]
    if gpu.temperature is not None:
        facts.append(f"{gpu.temperature} C")
    if gpu.watts is not None and gpu.limit_watts is not None:
        facts.append(f"{gpu.watts:.0f} of {gpu.limit_watts:.0f} W")
    if gpu.max_pcie_generation is not None and gpu.pcie_width is not None:
        facts.append(f"PCIe {gpu.max_pcie_generation}.0 x{gpu.pcie_width}")
    if gpu.nvlink_links:
        facts.append(f"{gpu.nvlink_links} NVLinks")
    if gpu.memory_bytes is not None and gpu.used_bytes is not None:
        facts.append(f"{format_bytes(gpu.memory_bytes - gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)} free")
    return ", ".join(facts)


def _heat(gpu: GpuState) -> Iterator[Finding]:
    reasons = gpu.throttle_reasons or 0
    limit = gpu.slowdown_temperature
    heat = "temperature unknown" if gpu.temperature is None else f"{gpu.temperature} C"
    if limit is not None:
        heat += f", slows down at {limit} C"
    clock = f", {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz" if gpu.clock_mhz and gpu.max_clock_mhz else ""
    cool = "clean its fans, leave a free slot beside it, open the case; or draw less: " + _set_limit(gpu, 0.8)
    if reasons & (HW_THERMAL | SW_THERMAL):
        yield _of(gpu, "error", "throttles because of heat", f"throttle reasons 0x{reasons:x}, {heat}{clock}", cool)
    elif gpu.temperature is not None and gpu.temperature >= (limit - 3 if limit else TOO_HOT):
        yield _of(gpu, "warning", "is about to throttle", f"{heat}{clock}", cool)
    elif gpu.temperature is not None and gpu.temperature >= HOT:
        yield _of(gpu, "hint", f"is warmer than {HOT} C", f"{heat}{clock}", cool)
    if reasons & HW_BRAKE:
        yield _of(
            gpu,
            "error",
            "is braked from outside: the power supply or the server asks for less",
            f"throttle reasons 0x{reasons:x}{clock}",
            "give each power socket of the card a cable of its own from the power supply; then: nvidia-smi -q -d PERFORMANCE",
        )
    elif reasons & HW_SLOWDOWN and not reasons & HW_THERMAL:
        yield _of(
            gpu,
            "error",
            "is slowed down by its hardware",
            f"throttle reasons 0x{reasons:x}{clock}",
            "look at power cables and heat: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )


def _power(gpu: GpuState) -> Iterator[Finding]:
    default = gpu.default_limit_watts
    limit = gpu.limit_watts
    reasons = gpu.throttle_reasons or 0
    if default and limit and limit < LIMITED * default:
        yield _of(
            gpu,
            "warning",
            f"may draw {limit:.0f} W of its {default:.0f} W",
            "its power limit was lowered" + (", and it throttles by it now" if reasons & POWER_CAP else ""),
            f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}, if the power supply and the cooling allow it",
        )
    if reasons & SYNC_BOOST:
        yield _of(
            gpu,
            "hint",
            "runs at the clock of the slowest GPU of its group (sync boost)",
            f"throttle reasons 0x{reasons:x}",
            f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE shows the group",
        )


def _psu(states: tuple[GpuState, ...], psu_watts: float | None) -> Iterator[Finding]:
    limits = [gpu.limit_watts for gpu in states]
    if psu_watts is None:
        if len(states) > 1:
            yield unknown(
                "power supply",
                what="its rating was not given: upshift doctor --psu WATTS compares it with what the GPUs may draw",
            )
        return
    if None in limits:
        yield unknown("power supply", what="a GPU does not say its power limit", evidence="NVML")
        return
    total = sum(limit for limit in limits if limit is not None)
    evidence = f"limits of {len(states)} GPUs: {total:.0f} W, without CPU, disks and fans"
    room = PSU_SHARE * psu_watts
    each = int(room / len(states) // POWER_STEP) * POWER_STEP
    least = max((gpu.min_limit_watts or 0 for gpu in states), default=0)
    all_of_them = ",".join(str(gpu.index) for gpu in states)
    fix = f"sudo nvidia-smi -i {all_of_them} -pl {each}, or a power supply of {total / PSU_SHARE:.0f} W"
    if each < least:
        fix = f"export CUDA_VISIBLE_DEVICES=0 (fewer of them), or a power supply of {total / PSU_SHARE:.0f} W "
        fix += f"(the GPUs cannot be limited below {least:.0f} W)"
    if total > psu_watts:
        yield error(
            "power supply",
            what=f"{psu_watts:.0f} W are too few: the machine can switch off under load",
            evidence=evidence,
            fix=fix,
        )
    elif total > room:
        yield warning(
            "power supply",
            evidence=evidence,
            fix=fix,
            what=f"GPUs may take {total / psu_watts:.0%} of {psu_watts:.0f} W: their short peaks go beyond",
        )
    else:
        yield ok("power supply", what=f"{psu_watts:.0f} W are enough for the GPUs", evidence=evidence)


def _pcie(gpu: GpuState) -> Iterator[Finding]:
    width = gpu.pcie_width
    widest = gpu.max_pcie_width
    now = f"PCIe {gpu.pcie_generation}.0 x{width}; card and slot can do {gpu.max_pcie_generation}.0 x{widest} (NVML)"
    seat = (
        f"take the card out and seat it again, in a slot that is wired x{widest}; look for other cards that share its lanes: "
        + (f"sudo lspci -vv -s {_short_bus(gpu.bus)} | grep LnkSta" if gpu.bus else "sudo lspci -vv | grep LnkSta")
    )
    if width and widest and width < widest:
        yield _of(
            gpu,
            "warning",
            f"has {width} PCIe lanes of {widest}: copies to and from it take {widest / width:.0f} times as long",
            now,
            seat,
        )
    busy = (gpu.utilization or 0) >= BUSY or gpu.performance_state == 0
    if busy and gpu.pcie_generation and gpu.max_pcie_generation and gpu.pcie_generation < gpu.max_pcie_generation:
        yield _of(
            gpu,
            "warning",
            f"runs PCIe {gpu.pcie_generation}.0 under load instead of {gpu.max_pcie_generation}.0",
            now,
            "set the slot's speed to Auto or to its highest generation in the BIOS; a riser cable can be the cause: try without",
        )


def _nvlink(gpu: GpuState) -> Iterator[Finding]:
    facts = GPUS.get(gpu.table_key or "")
    expected = facts.gpu.nvlink_links if facts is not None else None
    fabric = "sudo systemctl restart nvidia-fabricmanager; then nvidia-smi nvlink -s -i " + str(gpu.index)
    if gpu.nvlink_states and not gpu.nvlink_links:
        yield _of(
            gpu,
            "warning",
            f"has {gpu.nvlink_states} NVLinks, none active",
            "NVML",
            f"with a switch: {fabric}; between two cards: put the bridge on; one GPU in use alone needs none",
        )
    elif expected and gpu.nvlink_links is not None and 0 < gpu.nvlink_links < expected:
        yield _of(gpu, "warning", f"has {gpu.nvlink_links} of {expected} NVLinks", f"NVML; table: {gpu.name}", fabric)


def _errors(gpu: GpuState) -> Iterator[Finding]:
    if gpu.remap_failed:
        yield _of(
            gpu,
            "error",
            "could not remap a broken row of its memory",
            "NVML, remapped rows",
            f"have the card replaced; until then: export CUDA_VISIBLE_DEVICES without {gpu.index}",
        )
    if gpu.remap_pending:
        yield _of(
            gpu,
            "warning",
            "waits for a reset to replace a broken row of its memory",
            "NVML, remapped rows",
            f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {gpu.index}",
        )
    if gpu.ecc_uncorrected:
        yield _of(
            gpu,
            "error",
            f"had {gpu.ecc_uncorrected} memory errors that ECC could not correct",
            "NVML, since the driver was loaded",
            f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {gpu.index}; if they come back, have the card replaced",
        )
    if gpu.retired_pages:
        yield _of(
            gpu,
            "warning",
            f"has {gpu.retired_pages} retired memory pages",
            "NVML",
            f"nvidia-smi -q -d PAGE_RETIREMENT -i {gpu.index}; NVIDIA replaces cards with 60 or more",
        )


def _memory(gpu: GpuState, process_name: Callable[[int], str | None]) -> Iterator[Finding]:
    if gpu.used_bytes is None or gpu.memory_bytes is None or gpu.used_bytes < NOTICED_BYTES or not gpu.holders:
        return
    names = [
        f"{process_name(holder.pid) or 'a process of another container'} (pid {holder.pid}"
        + (f", {holder.bytes / GIB:.1f} GiB)" if holder.bytes is not None else ")")
        for holder in gpu.holders
    ]
    yield _of(
        gpu,
        "warning",
        f"is shared: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)} are taken",
        f"held by {', '.join(names)}; {gpu.utilization if gpu.utilization is not None else 'unknown'} % busy",
        f"kill {' '.join(str(holder.pid) for holder in gpu.holders)}, if they are yours; or hide it: CUDA_VISIBLE_DEVICES",
    )


def _modes(gpu: GpuState) -> Iterator[Finding]:
    if gpu.compute_mode == PROHIBITED:
        yield _of(
            gpu,
            "error",
            "is closed for computing (compute mode: prohibited)",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    elif gpu.compute_mode == EXCLUSIVE and gpu.holders:
        yield _of(
            gpu,
            "error",
            "admits one process, and has one (compute mode: exclusive)",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    facts = GPUS.get(gpu.table_key or "")
    server = facts is not None and facts.reference is not None
    if gpu.ecc is False and server:
        yield _of(
            gpu,
            "hint",
            "runs without ECC: memory errors stay unseen",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -e 1, and a reboot",
        )
    if gpu.persistence is False:
        yield _of(
            gpu,
            "hint",
            "loses its driver's state when nobody uses it: each start takes seconds more",
            "NVML, persistence mode off",
            f"sudo nvidia-smi -i {gpu.index} -pm 1",
        )


def _set_limit(gpu: GpuState, share: float) -> str:
    limit = gpu.default_limit_watts or gpu.limit_watts
    if limit is None:
        return f"sudo nvidia-smi -i {gpu.index} -pl WATTS"
    return f"sudo nvidia-smi -i {gpu.index} -pl {max(share * limit, gpu.min_limit_watts or 0):.0f}"


def _short_bus(bus: str | None) -> str:
    """Return the bus as lspci writes it: 3b:00.0."""
    return (bus or "").lower().split(":", 1)[-1]


def _of(gpu: GpuState, severity: str, what: str, evidence: str, fix: str) -> Finding:
    return Finding.model_validate(
        {"severity": severity, "subject": f"GPU {gpu.index}", "what": what, "evidence": evidence, "fix": fix}
    )


# nvmlGpuTopologyLevel_t, as `nvidia-smi topo -m` abbreviates them
WORDS = {
    0: "are on one board",
    10: "share one PCIe switch (PIX)",
    20: "are joined by several PCIe switches (PXB)",
    30: "meet at the CPU's PCIe host bridge (PHB)",
    40: "cross host bridges of one CPU socket (NODE)",
    50: "cross the CPU sockets (SYS)",
}
NVLINK = -1
ACROSS = 50


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
    left = list(range(count))
    order = list[int]()
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
