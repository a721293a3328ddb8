"""Choose a device for each unit of a model: GPUs first, then the CPU, and the rest stays on the disk.

Units on the CPU of a machine with GPUs, and units on the disk, are streamed: they are loaded into reused buffers on the device
that computes them. The limits of memory include these buffers, the buffers of the model, the activations, and the keys and
values of the workload. The search reads the fewest bytes from the disk: for each possible size of the largest streamed unit,
larger units must stay in memory, and the others follow in order while they fit. Embeddings come last, because only rows of
them are read. Two things are ignored: files in the system's page cache, and the memory of the libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from upshift.errors import NothingFits, RequestError
from upshift.units import format_bytes
from upshift.value import Value

MAX_NAMED = 2  # full devices in a reason: a table shows it
DISK = "disk"
CPU = "cpu"


@dataclass(frozen=True)
class PlacementUnit:
    """Modules and parameters that stay together: a layer that must not be split, tied weights, or a single module."""

    names: tuple[str, ...]
    nbytes: int  # the bytes of its parameters; tied ones count once
    read: int  # the bytes of these that one forward pass reads; 0 if only rows are read
    streams: bool = True  # hooks can load it; a parameter that is used between modules is read through the mapped file instead
    cache: int = 0  # bytes of keys and values that its layers cache in this workload


@dataclass(frozen=True)
class MemoryNeeds:
    """The bytes that devices need besides the weights. None means unknown, and is not counted."""

    batch: int
    sequence: int
    buffers: int = 0  # of the model, on the main device
    activations: int | None = 0
    cache: int | None = 0

    @property
    def per_device(self) -> int:
        return self.activations or 0


class ModulePlacement(Value):
    """The device of one module, and the reason."""

    name: str  # the name of a module, or of a parameter that is used between modules
    device: str  # cpu, disk, cuda:0 ...
    bytes: int  # 0 if they count at the module that it is tied to
    read: int  # the bytes of these that one forward pass reads
    streams: bool
    why: str


class Placement(Value):
    """The device of every module of a model, the memory that this takes, and the predicted times."""

    modules: tuple[ModulePlacement, ...]
    limits: dict[str, int]
    main: str  # the device that computes all modules that are not on another GPU
    buffers: int  # of the model, on the main device
    activations: int | None
    cache: int | None
    batch: int
    sequence: int
    stream_bytes: dict[str, int]  # buffers for weights from the disk (cpu) and from the host (the main GPU)
    disk_bytes_per_second: float | None = None
    load_bytes: int | None = None  # to read from the files before the first pass; None: there are no files
    load_seconds: float | None = None
    tokens_per_second: float | None = None
    bound: str | None = None

    @classmethod
    def of(
        cls,
        modules: Sequence[ModulePlacement],
        limits: Mapping[str, int],
        main: str,
        work: MemoryNeeds,
        stream_bytes: dict[str, int],
    ) -> Placement:
        """Return the placement for a job's needs, without predicted times."""
        return cls(
            modules=tuple(modules),
            limits=dict(limits),
            main=main,
            buffers=work.buffers,
            activations=work.activations,
            cache=work.cache,
            batch=work.batch,
            sequence=work.sequence,
            stream_bytes=stream_bytes,
        )

    @property
    def device_map(self) -> dict[str, str]:
        return {module.name: module.device for module in self.modules}

    @property
    def totals(self) -> dict[str, int]:
        totals = dict.fromkeys([*self.limits, DISK], 0)
        for module in self.modules:
            totals[module.device] = totals.get(module.device, 0) + module.bytes
        return totals

    @property
    def disk_bytes(self) -> int:
        return self.totals[DISK]

    @property
    def disk_read(self) -> int:
        """Return the bytes that one forward pass reads from the disk."""
        return sum(module.read for module in self.modules if module.device == DISK)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Return the peak bytes on each device while the model runs, without the libraries."""
        peaks = {device: total + self.stream_bytes.get(device, 0) for device, total in self.totals.items() if device != DISK}
        for device in peaks:
            if device != CPU or self.main == CPU:
                peaks[device] += self.activations or 0
        peaks[self.main] += self.buffers + (self.cache or 0)
        return peaks

    def device_of(self, name: str) -> str:
        """Return the device of a parameter or a module, from the longest name in the map that contains it."""
        devices = self.device_map
        path = name.split(".")
        candidates = (".".join(path[:length]) for length in range(len(path), -1, -1))
        return next((devices[candidate] for candidate in candidates if candidate in devices), self.main)


@dataclass
class _Assignment:
    """One assignment of units to devices."""

    room: dict[str, int]  # bytes that are left of each limit
    reserves: dict[str, int]  # bytes of each device's stream buffers
    devices: dict[int, str] = field(default_factory=dict)  # by the unit's number

    def cost(self, units: Sequence[PlacementUnit], main: str) -> tuple[int, int, int, int]:
        """Return the bytes that a pass reads from the disk and from the host, the bytes on the disk, and those of buffers."""
        slow = [unit for number, unit in enumerate(units) if self.devices[number] == DISK]
        host = [unit for number, unit in enumerate(units) if self.devices[number] == CPU != main]
        return (
            sum(unit.read for unit in slow),
            sum(unit.read for unit in host),
            sum(unit.nbytes for unit in slow),
            sum(self.reserves.values()),
        )


def place_units(units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds) -> Placement:
    """Place the units. ``limits``: by device, fastest first.

    Raise NothingFits if not even the largest unit fits with the memory that it needs to run."""
    main = next(iter(limits))
    main_cache = 0  # bytes of keys and values of streamed layers, which stay on the main device
    while True:
        assignments = [assignment for assignment in _assignments(units, limits, work, main, main_cache) if assignment is not None]
        if not assignments:
            raise _nothing_fits(units, limits, work, main)
        best = min(assignments, key=lambda assignment: assignment.cost(units, main))
        streamed_cache = sum(unit.cache for number, unit in enumerate(units) if best.devices[number] in (CPU, DISK))
        if streamed_cache <= main_cache or main == CPU:
            return _placement(units, limits, work, main, best)
        main_cache = streamed_cache


def _assignments(
    units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str, main_cache: int
) -> Iterator[_Assignment | None]:
    """Yield one assignment for each pair of sizes of the largest unit that is streamed from the host and from the disk.

    Yield None if it does not fit."""
    sizes = sorted({0, *(unit.nbytes for unit in units if unit.streams and unit.read)})
    fixed = work.per_device + work.buffers + (sum(unit.cache for unit in units) if main == CPU else main_cache)
    for from_host in sizes if main != CPU else [0]:
        for from_disk in sizes:
            if main != CPU and from_disk > from_host:
                continue
            room = {device: limit - (work.per_device if device != CPU else 0) for device, limit in limits.items()}
            room[main] = limits[main] - fixed
            reserves = {main: from_disk} if main == CPU else {main: from_host, CPU: from_disk}
            for device, reserve in reserves.items():
                room[device] = room.get(device, 0) - reserve
            yield _assign_all(units, _Assignment(room, reserves), main) if min(room.values()) >= 0 else None


def _assign_all(units: Sequence[PlacementUnit], assignment: _Assignment, main: str) -> _Assignment | None:
    """Assign all units, or return None if there is no room for a unit that is larger than its buffer."""
    gpus = [device for device in assignment.room if device != CPU]
    on_gpus = _assign(units, range(len(units)), gpus, assignment, assignment.reserves[main] if main != CPU else 0)
    remaining = [number for number in range(len(units)) if number not in assignment.devices]
    if not on_gpus or not _assign(units, remaining, [CPU], assignment, assignment.reserves.get(CPU, 0)):
        return None
    for number in range(len(units)):
        assignment.devices.setdefault(number, DISK)
    return assignment


def _assign(
    units: Sequence[PlacementUnit], numbers: Iterable[int], devices: Sequence[str], assignment: _Assignment, streamed: int
) -> bool:
    """Assign units to the first device with room: those too large to stream, then the others in order, then embeddings.

    Return False if there is no room for a unit that cannot be streamed."""
    if not devices:
        return True

    def rank(number: int) -> int:
        unit = units[number]
        return 2 if not unit.read else 1 if unit.streams and unit.nbytes <= streamed else 0

    for number in sorted(numbers, key=rank):
        unit = units[number]
        cache = {device: unit.cache if device != CPU else 0 for device in devices}
        is_loose = not unit.streams and devices[0] != CPU
        usable_devices = devices[:1] if is_loose else devices  # code between modules runs on the main device
        device = next((device for device in usable_devices if unit.nbytes + cache[device] <= assignment.room[device]), None)
        if device is not None:
            assignment.room[device] -= unit.nbytes + cache[device]
            assignment.devices[number] = device
        elif rank(number) == 0 and (unit.streams or devices[0] != CPU):
            return False
    return True


def _placement(
    units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str, assignment: _Assignment
) -> Placement:
    """Return the placement of an assignment.

    Memory that is left enlarges the buffers, up to two of the largest unit, so that one is read while the other computes."""
    stream_bytes = {}
    for device, reserve in assignment.reserves.items():
        if reserve:
            stream_bytes[device] = min(2 * reserve, reserve + assignment.room[device])
    modules = []
    for number, unit in enumerate(units):
        reason = _placement_reason(unit, assignment.devices[number], limits, assignment)
        modules += module_placements(unit, assignment.devices[number], reason)
    return Placement.of(modules, limits, main, work, stream_bytes)


def follow_device_map(
    devices: Mapping[str, str], units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds
) -> Placement:
    """Place units as a user's map says, for each name or for a name that contains it.

    Raise RequestError if the map divides tied weights, and NothingFits if a device would exceed its limit."""
    main = next(iter(limits))
    placed_modules: list[ModulePlacement] = []
    for unit in units:
        devices_by_name = {name: _mapped_device(devices, name) for name in unit.names}
        if len(set(devices_by_name.values())) > 1:
            assignments = ", ".join(f"{name} on {device}" for name, device in devices_by_name.items())
            raise RequestError(f"device_map divides tied weights ({assignments}); give them one device")
        placed_modules += module_placements(unit, devices_by_name[unit.names[0]], "device_map says so")
    from_disk = largest_streamed(placed_modules, (DISK,))
    from_host = largest_streamed(placed_modules, (CPU, DISK))
    stream = {CPU: 2 * from_disk} if main == CPU else {main: 2 * from_host, CPU: 2 * from_disk}
    stream_bytes = {device: size for device, size in stream.items() if size}
    placement = Placement.of(placed_modules, limits, main, work, stream_bytes)
    for device, peak in placement.peak_bytes.items():
        if peak > limits.get(device, 0) and placement.totals[device]:
            raise NothingFits(
                f"device_map takes {format_bytes(peak)} of {device}, which is limited to {format_bytes(limits.get(device, 0))}; "
                'put more of it on the disk, or give device_map="auto"'
            )
    return placement


def largest_streamed(modules: Iterable[ModulePlacement], devices: Sequence[str]) -> int:
    """Return the bytes of the largest module that is streamed from one of these devices."""
    return max((module.bytes for module in modules if module.device in devices and module.streams and module.read), default=0)


def _mapped_device(devices: Mapping[str, str], name: str) -> str:
    path = name.split(".")
    return next(device for length in range(len(path), -1, -1) if (device := devices.get(".".join(path[:length]))))


def module_placements(unit: PlacementUnit, device: str, reason: str) -> list[ModulePlacement]:
    first, *tied = unit.names
    return [
        ModulePlacement(name=first, device=device, bytes=unit.nbytes, read=unit.read, streams=unit.streams, why=reason),
        *(
            ModulePlacement(name=name, device=device, bytes=0, read=0, streams=unit.streams, why=f"tied to {first}")
            for name in tied
        ),
    ]


def _placement_reason(unit: PlacementUnit, device: str, limits: Mapping[str, int], assignment: _Assignment) -> str:
    order = list(limits)
    full = order if device == DISK else order[: order.index(device)]  # faster devices without room
    if not full:
        return "fits"
    room_text = ", ".join(f"{name} has {format_bytes(assignment.room[name])} left" for name in full)
    if len(full) > MAX_NAMED:
        room_text = f"{full[0]} to {full[-1]} have at most {format_bytes(max(assignment.room[name] for name in full))} left"
    if not unit.read:
        return f"{room_text}; only the rows of its tokens are read"
    return f"{room_text}, it takes {format_bytes(unit.nbytes)}"


def _nothing_fits(units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str) -> NothingFits:
    smallest = min((unit.nbytes for unit in units if unit.streams and unit.read), default=0)
    largest = max((unit.nbytes for unit in units if unit.streams and unit.read), default=smallest)
    cache = sum(unit.cache for unit in units)
    needed = work.per_device + work.buffers + cache + largest
    needed_text = format_bytes(needed)
    cache_text = format_bytes(cache)
    if work.cache is None:
        needed_text = f"at least {needed_text}"
        cache_text = "unknown"
    return NothingFits(
        f"{main} is limited to {format_bytes(limits[main])}, and one layer at a time takes {needed_text}: the largest "
        f"{format_bytes(largest)}, activations {format_bytes(work.per_device)}, keys and values {cache_text}, buffers "
        f"{format_bytes(work.buffers)}; allow more with --max-memory, or shorten --sequence-length or --batch"
    )
