"""Examine each GPU by what its driver reports: heat, throttling, power, PCIe, NVLink, memory errors, processes that hold memory.

``examine_topology`` describes how the GPUs are connected, and which of them to use together for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from upshift.debugging.finding import Finding, error, hint, ok, unknown, warning
from upshift.hardware.catalog.lookup import GPUS
from upshift.hardware.nvml import GpuPair, Gpus, GpuState
from upshift.units import GIB, MIB, format_bytes

# Bits of nvmlClocksThrottleReasons. The reasons idle, application clocks and display are no faults.
HW_THERMAL = 0x40
SW_THERMAL = 0x20
HW_BRAKE = 0x80
HW_SLOWDOWN = 0x8
POWER_CAP = 0x4
SYNC_BOOST = 0x10
# Degrees Celsius: below 80 is good, throttling begins at 84 to 90 (transformers' custom hardware guide).
HOT_DEGREES = 80
THROTTLING_DEGREES = 84
LIMITED = 0.9  # share of the default power limit
BUSY = 50  # percent; an idle GPU lowers PCIe and clocks on purpose
PSU_SHARE = 0.8  # share of the rated power, because GPUs exceed their limit for milliseconds
NOTICED_BYTES = 256 * MIB
POWER_STEP = 5  # watts
# nvmlComputeMode_t.
EXCLUSIVE = 3
PROHIBITED = 2


def examine_gpus(gpus: Gpus, *, psu_watts: float | None, process_name: Callable[[int], str | None]) -> Iterator[Finding]:
    """Yield findings about each GPU, and about the power supply, which is rated at ``psu_watts`` (None: unknown)."""
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
        yield _gpu_finding(gpu, "error", "throttles because of heat", f"throttle reasons 0x{reasons:x}, {heat}{clock}", cool)
    elif gpu.temperature is not None and gpu.temperature >= (limit - 3 if limit else THROTTLING_DEGREES):
        yield _gpu_finding(gpu, "warning", "is about to throttle", f"{heat}{clock}", cool)
    elif gpu.temperature is not None and gpu.temperature >= HOT_DEGREES:
        yield _gpu_finding(gpu, "hint", f"is warmer than {HOT_DEGREES} C", f"{heat}{clock}", cool)
    if reasons & HW_BRAKE:
        yield _gpu_finding(
            gpu,
            "error",
            "is braked from outside: the power supply or the server asks for less",
            f"throttle reasons 0x{reasons:x}{clock}",
            "give each power socket of the card a cable of its own from the power supply; then: nvidia-smi -q -d PERFORMANCE",
        )
    elif reasons & HW_SLOWDOWN and not reasons & HW_THERMAL:
        yield _gpu_finding(
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
        evidence = "its power limit was lowered"
        if reasons & POWER_CAP:
            evidence += ", and it throttles by it now"
        yield _gpu_finding(
            gpu,
            "warning",
            f"may draw {limit:.0f} W of its {default:.0f} W",
            evidence,
            f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}, if the power supply and the cooling allow it",
        )
    if reasons & SYNC_BOOST:
        yield _gpu_finding(
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
    usable_watts = PSU_SHARE * psu_watts
    watts_each = int(usable_watts / len(states) // POWER_STEP) * POWER_STEP
    min_limit = max((gpu.min_limit_watts or 0 for gpu in states), default=0)
    indices = ",".join(str(gpu.index) for gpu in states)
    fix = f"sudo nvidia-smi -i {indices} -pl {watts_each}, or a power supply of {total / PSU_SHARE:.0f} W"
    if watts_each < min_limit:
        fix = f"export CUDA_VISIBLE_DEVICES=0 (fewer of them), or a power supply of {total / PSU_SHARE:.0f} W "
        fix += f"(the GPUs cannot be limited below {min_limit:.0f} W)"
    if total > psu_watts:
        yield error(
            "power supply",
            what=f"{psu_watts:.0f} W are too few: the machine can switch off under load",
            evidence=evidence,
            fix=fix,
        )
    elif total > usable_watts:
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
    link = f"PCIe {gpu.pcie_generation}.0 x{width}; card and slot can do {gpu.max_pcie_generation}.0 x{widest} (NVML)"
    device = f" -s {_short_bus(gpu.bus)}" if gpu.bus else ""
    fix = (
        f"take the card out and seat it again, in a slot that is wired x{widest}; look for other cards that share its lanes: "
        f"sudo lspci -vv{device} | grep LnkSta"
    )
    if width and widest and width < widest:
        yield _gpu_finding(
            gpu,
            "warning",
            f"has {width} PCIe lanes of {widest}: copies to and from it take {widest / width:.0f} times as long",
            link,
            fix,
        )
    busy = (gpu.utilization or 0) >= BUSY or gpu.performance_state == 0
    if busy and gpu.pcie_generation and gpu.max_pcie_generation and gpu.pcie_generation < gpu.max_pcie_generation:
        yield _gpu_finding(
            gpu,
            "warning",
            f"runs PCIe {gpu.pcie_generation}.0 under load instead of {gpu.max_pcie_generation}.0",
            link,
            "set the slot's speed to Auto or to its highest generation in the BIOS; a riser cable can be the cause: try without",
        )


def _nvlink(gpu: GpuState) -> Iterator[Finding]:
    facts = GPUS.get(gpu.table_key or "")
    expected = facts.gpu.nvlink_links if facts is not None else None
    fabric = "sudo systemctl restart nvidia-fabricmanager; then nvidia-smi nvlink -s -i " + str(gpu.index)
    if gpu.nvlink_states and not gpu.nvlink_links:
        yield _gpu_finding(
            gpu,
            "warning",
            f"has {gpu.nvlink_states} NVLinks, none active",
            "NVML",
            f"with a switch: {fabric}; between two cards: put the bridge on; one GPU in use alone needs none",
        )
    elif expected and gpu.nvlink_links is not None and 0 < gpu.nvlink_links < expected:
        yield _gpu_finding(gpu, "warning", f"has {gpu.nvlink_links} of {expected} NVLinks", f"NVML; table: {gpu.name}", fabric)


def _errors(gpu: GpuState) -> Iterator[Finding]:
    if gpu.remap_failed:
        yield _gpu_finding(
            gpu,
            "error",
            "could not remap a broken row of its memory",
            "NVML, remapped rows",
            f"have the card replaced; until then: export CUDA_VISIBLE_DEVICES without {gpu.index}",
        )
    if gpu.remap_pending:
        yield _gpu_finding(
            gpu,
            "warning",
            "waits for a reset to replace a broken row of its memory",
            "NVML, remapped rows",
            f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {gpu.index}",
        )
    if gpu.ecc_uncorrected:
        yield _gpu_finding(
            gpu,
            "error",
            f"had {gpu.ecc_uncorrected} memory errors that ECC could not correct",
            "NVML, since the driver was loaded",
            f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {gpu.index}; if they come back, have the card replaced",
        )
    if gpu.retired_pages:
        yield _gpu_finding(
            gpu,
            "warning",
            f"has {gpu.retired_pages} retired memory pages",
            "NVML",
            f"nvidia-smi -q -d PAGE_RETIREMENT -i {gpu.index}; NVIDIA replaces cards with 60 or more",
        )


def _memory(gpu: GpuState, process_name: Callable[[int], str | None]) -> Iterator[Finding]:
    if gpu.used_bytes is None or gpu.memory_bytes is None or gpu.used_bytes < NOTICED_BYTES or not gpu.holders:
        return
    processes = []
    for holder in gpu.holders:
        name = process_name(holder.pid) or "a process of another container"
        held = f", {holder.bytes / GIB:.1f} GiB" if holder.bytes is not None else ""
        processes.append(f"{name} (pid {holder.pid}{held})")
    pids = " ".join(str(holder.pid) for holder in gpu.holders)
    utilization = "unknown" if gpu.utilization is None else gpu.utilization
    yield _gpu_finding(
        gpu,
        "warning",
        f"is shared: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)} are taken",
        f"held by {', '.join(processes)}; {utilization} % busy",
        f"kill {pids}, if they are yours; or hide it: CUDA_VISIBLE_DEVICES",
    )


def _modes(gpu: GpuState) -> Iterator[Finding]:
    if gpu.compute_mode == PROHIBITED:
        yield _gpu_finding(
            gpu,
            "error",
            "is closed for computing (compute mode: prohibited)",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    elif gpu.compute_mode == EXCLUSIVE and gpu.holders:
        yield _gpu_finding(
            gpu,
            "error",
            "admits one process, and has one (compute mode: exclusive)",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    facts = GPUS.get(gpu.table_key or "")
    server = facts is not None and facts.reference is not None
    if gpu.ecc is False and server:
        yield _gpu_finding(
            gpu,
            "hint",
            "runs without ECC: memory errors stay unseen",
            "NVML",
            f"sudo nvidia-smi -i {gpu.index} -e 1, and a reboot",
        )
    if gpu.persistence is False:
        yield _gpu_finding(
            gpu,
            "hint",
            "loses its driver's state when nobody uses it: each start takes seconds more",
            "NVML, persistence mode off",
            f"sudo nvidia-smi -i {gpu.index} -pm 1",
        )


def _set_limit(gpu: GpuState, share: float) -> str:
    """Return the command that sets the power limit to a share of the default limit."""
    limit = gpu.default_limit_watts or gpu.limit_watts
    if limit is None:
        return f"sudo nvidia-smi -i {gpu.index} -pl WATTS"
    return f"sudo nvidia-smi -i {gpu.index} -pl {max(share * limit, gpu.min_limit_watts or 0):.0f}"


def _short_bus(bus: str | None) -> str:
    """Return the bus address as lspci writes it: 3b:00.0."""
    return (bus or "").lower().split(":", 1)[-1]


def _gpu_finding(gpu: GpuState, severity: str, what: str, evidence: str, fix: str) -> Finding:
    return Finding.model_validate(
        {"severity": severity, "subject": f"GPU {gpu.index}", "what": what, "evidence": evidence, "fix": fix}
    )


# nvmlGpuTopologyLevel_t, with the abbreviations of `nvidia-smi topo -m`. NVLINK is our own level, nearer than all of these.
LEVEL_DESCRIPTIONS = {
    0: "are on one board",
    10: "share one PCIe switch (PIX)",
    20: "are joined by several PCIe switches (PXB)",
    30: "meet at the CPU's PCIe host bridge (PHB)",
    40: "cross host bridges of one CPU socket (NODE)",
    50: "cross the CPU sockets (SYS)",
}
NVLINK = -1
ACROSS_SOCKETS = 50


def examine_topology(gpus: Gpus) -> Iterator[Finding]:
    """Yield findings about the connections between GPUs. The lower the level of a pair, the nearer its GPUs are."""
    levels: dict[frozenset[int], int] = {}
    for pair in gpus.pairs:
        level = _link_level(pair)
        if level is not None:
            levels[frozenset((pair.one, pair.other))] = level
    if not levels or len(levels) < len(gpus.pairs):
        if gpus.pairs:
            yield unknown("topology", what="the driver does not say how all GPUs are connected", evidence="NVML")
        return
    descriptions = [f"{_pair_names(pairs)} {_describe_level(level)}" for level, pairs in sorted(_pairs_by_level(levels).items())]
    count = len(gpus.states)
    order = best_order(count, levels)
    evidence = "; ".join(descriptions) + " (NVML)"
    neighbours = [levels[frozenset((index, index + 1))] for index in range(0, count - 1, 2)]
    best_pairs = [levels[frozenset(order[index : index + 2])] for index in range(0, count - 1, 2)]
    far_pairs = _pairs_by_level(levels).get(ACROSS_SOCKETS, []) if len(set(levels.values())) > 1 else []
    if sum(best_pairs) < sum(neighbours):
        numbers = ",".join(map(str, order))
        far = f"{_pair_names(far_pairs) or 'some'} {_describe_level(max(levels.values()))}"
        yield warning(
            "topology",
            evidence=evidence,
            what=f"neighbours in number are not neighbours in wire: {far}; put tensor parallel on {order[0]},{order[1]}",
            fix=f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}",
        )
        return
    yield ok("topology", what=f"{count} GPUs, best pairs are neighbours in number", evidence=evidence)
    if any(level == NVLINK for level in levels.values()) and any(level != NVLINK for level in levels.values()):
        pairs = [pair for pair, level in levels.items() if level != NVLINK]
        group = best_group(count, levels)
        yield hint(
            "topology",
            what=f"{_pair_names([tuple(sorted(pair)) for pair in pairs])} have no NVLink between them",
            evidence=evidence,
            fix=f"keep tensor parallelism among {','.join(map(str, group))}: --tensor-parallel {len(group)}",
        )


def _link_level(pair: GpuPair) -> int | None:
    return NVLINK if pair.nvlink else pair.level


def _describe_level(level: int) -> str:
    if level == NVLINK:
        return "are joined by NVLink"
    return LEVEL_DESCRIPTIONS.get(level, f"are at NVML's level {level}")


def _pairs_by_level(levels: Mapping[frozenset[int], int]) -> dict[int, list[tuple[int, ...]]]:
    pairs: dict[int, list[tuple[int, ...]]] = {}
    for pair, level in sorted(levels.items(), key=lambda item: sorted(item[0])):
        pairs.setdefault(level, []).append(tuple(sorted(pair)))
    return pairs


def _pair_names(pairs: list[tuple[int, ...]]) -> str:
    shown = ", ".join("-".join(f"GPU{number}" for number in pair) for pair in pairs[:6])
    return shown + (f" and {len(pairs) - 6} pairs more" if len(pairs) > 6 else "")


def best_order(count: int, levels: Mapping[frozenset[int], int]) -> list[int]:
    """Return the GPUs in pairs, each with its nearest remaining partner. Pairs that are near each other are neighbours."""
    remaining = list(range(count))
    order = list[int]()
    while remaining:
        last = order[-1] if order else None
        first = min(remaining)
        if last is not None:
            first = min(remaining, key=lambda gpu: (levels[frozenset((last, gpu))], gpu))
        remaining.remove(first)
        order.append(first)
        if remaining:
            partner = min(remaining, key=lambda gpu: (levels[frozenset((first, gpu))], gpu))
            remaining.remove(partner)
            order.append(partner)
    return order


def best_group(count: int, levels: Mapping[frozenset[int], int]) -> list[int]:
    """Return the largest set of GPUs that all have NVLink to each other, searched greedily from each GPU."""
    groups = []
    for start in range(count):
        group = [start]
        for candidate in range(count):
            if candidate != start and all(levels[frozenset((candidate, member))] == NVLINK for member in group):
                group.append(candidate)
        groups.append(sorted(group))
    return max(groups, key=len)
