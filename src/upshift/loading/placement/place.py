"""Choose a device for each part of a model: GPUs first, then the CPU, and the rest stays on the disk.

Parts on the CPU of a machine with GPUs, and parts on the disk, are brought to the device that computes them in their turn,
into buffers that are used again. The limits count these buffers, the buffers of the model, the activations, and the keys and
values of the workload as they count weights. The search leaves the fewest bytes on the disk: for every size that the largest
streamed part may have, larger parts must stay in memory, and the others follow in their order while they fit. An embedding
goes last, as only the rows of its tokens are read. Ignored: what the page cache of the system keeps of the disk, and the
memory of the libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from upshift.errors import NothingFits, RequestError
from upshift.units import format_bytes
from upshift.value import Value

DISK = "disk"
CPU = "cpu"


@dataclass(frozen=True)
class PlacementUnit:
    """Modules and parameters that stay together: a layer that must not be split, tied weights, or a single leaf."""

    names: tuple[str, ...]
    nbytes: int  # of parameters, tied ones once
    read: int  # of these, what one forward pass reads; 0 for rows that are looked up
    streams: bool = True  # its forward can be waited for; a parameter beside modules is read through the mapped file
    cache: int = 0  # keys and values that its layers keep in this workload


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory beside the weights, on the devices that compute. None: not known, and not counted."""

    batch: int
    sequence: int
    buffers: int = 0  # of the model
    activations: int | None = 0
    cache: int | None = 0

    @property
    def everywhere(self) -> int:
        return self.activations or 0


class ModulePlacement(Value):
    name: str  # of a module, or of a parameter that stands beside modules
    device: str  # cpu, disk, cuda:0 ...
    bytes: int  # 0 where they are counted at the module that it is tied to
    read: int  # of these, in one forward pass
    streams: bool
    why: str


class Placement(Value):
    modules: tuple[ModulePlacement, ...]
    limits: dict[str, int]
    main: str  # the device that computes all modules that are on no other GPU
    buffers: int  # of the model, on that device
    activations: int | None
    cache: int | None
    batch: int
    sequence: int
    stream_bytes: dict[str, int]  # buffers on the way from the disk (cpu) and from the host (the main GPU)
    disk_bytes_per_second: float | None = None
    load_bytes: int | None = None  # to be read of the files before the first pass; None: there are none
    load_seconds: float | None = None
    tokens_per_second: float | None = None
    bound: str | None = None

    @property
    def device_map(self) -> dict[str, str]:
        return {place_units.name: place_units.device for place_units in self.modules}

    @property
    def totals(self) -> dict[str, int]:
        found = dict.fromkeys([*self.limits, DISK], 0)
        for place_units in self.modules:
            found[place_units.device] = found.get(place_units.device, 0) + place_units.bytes
        return found

    @property
    def disk_bytes(self) -> int:
        return self.totals[DISK]

    @property
    def disk_read(self) -> int:
        """Return the bytes that one forward pass reads from the disk."""
        return sum(place_units.read for place_units in self.modules if place_units.device == DISK)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Return the most bytes on each device while it computes, without the libraries."""
        found = {device: total + self.stream_bytes.get(device, 0) for device, total in self.totals.items() if device != DISK}
        for device in found:
            if device != CPU or self.main == CPU:
                found[device] += self.activations or 0
        found[self.main] += self.buffers + (self.cache or 0)
        return found

    def device_of(self, name: str) -> str:
        """Return the device of a parameter, or a module, by the longest name around it."""
        devices = self.device_map
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        return next((devices[part] for part in around if part in devices), self.main)


@dataclass
class _Assignment:
    """One way to place the units. ``room`` is the rest of each limit."""

    room: dict[str, int]
    reserves: dict[str, int]
    devices: dict[int, str] = field(default_factory=dict)

    def cost(self, units: Sequence[PlacementUnit], main: str) -> tuple[int, int, int, int]:
        """Return bytes that a pass reads from the disk, bytes that it reads from the host, bytes on the disk, and bytes of
        buffers."""
        slow = [unit for number, unit in enumerate(units) if self.devices[number] == DISK]
        host = [unit for number, unit in enumerate(units) if self.devices[number] == CPU != main]
        return (
            sum(unit.read for unit in slow), sum(unit.read for unit in host), sum(unit.nbytes for unit in slow),
            sum(self.reserves.values()),
        )  # fmt: skip


def place_units(units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds) -> Placement:
    """Place the units. ``limits``: by device, fastest first. Raise NothingFits if not even the largest part and its work fit."""
    main = next(iter(limits))
    kept_elsewhere = 0  # keys and values of layers that are streamed, which stay on the main device
    while True:
        fills = [fill for fill in _fills(units, limits, work, main, kept_elsewhere) if fill is not None]
        if not fills:
            raise _nothing_fits(units, limits, work, main)
        best = min(fills, key=lambda fill: fill.cost(units, main))
        needed = sum(unit.cache for number, unit in enumerate(units) if best.devices[number] in (CPU, DISK))
        if needed <= kept_elsewhere or main == CPU:
            return _placement(units, limits, work, main, best)
        kept_elsewhere = needed


def _fills(
    units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str, kept_elsewhere: int
) -> Iterator[_Assignment | None]:
    """Yield one placement for every size that the largest part from the host, and from the disk, may have.

    None: it does not fit."""
    sizes = sorted({0, *(unit.nbytes for unit in units if unit.streams and unit.read)})
    fixed = work.everywhere + work.buffers + (sum(unit.cache for unit in units) if main == CPU else kept_elsewhere)
    for from_host in sizes if main != CPU else [0]:
        for from_disk in sizes:
            if main != CPU and from_disk > from_host:
                continue
            room = {device: limit - (work.everywhere if device != CPU else 0) for device, limit in limits.items()}
            room[main] = limits[main] - fixed
            reserves = {main: from_disk} if main == CPU else {main: from_host, CPU: from_disk}
            for device, reserve in reserves.items():
                room[device] = room.get(device, 0) - reserve
            yield _fill(units, _Assignment(room, reserves), main) if min(room.values()) >= 0 else None


def _fill(units: Sequence[PlacementUnit], fill: _Assignment, main: str) -> _Assignment | None:
    """Place all units, or return None if a part that is larger than its buffer finds no room."""
    gpus = [device for device in fill.room if device != CPU]
    on_gpus = _put(units, range(len(units)), gpus, fill, fill.reserves[main] if main != CPU else 0)
    rest = [number for number in range(len(units)) if number not in fill.devices]
    if not on_gpus or not _put(units, rest, [CPU], fill, fill.reserves.get(CPU, 0)):
        return None
    for number in range(len(units)):
        fill.devices.setdefault(number, DISK)
    return fill


def _put(
    units: Sequence[PlacementUnit], numbers: Iterable[int], devices: Sequence[str], fill: _Assignment, streamed: int
) -> bool:
    """Put units on the first device with room: those too large to be streamed, then the rest in order, then look-ups.

    Return False if a unit that cannot be streamed finds no room."""
    if not devices:
        return True

    def rank(number: int) -> int:
        unit = units[number]
        return 2 if not unit.read else 1 if unit.streams and unit.nbytes <= streamed else 0

    for number in sorted(numbers, key=rank):
        unit = units[number]
        cache = {device: unit.cache if device != CPU else 0 for device in devices}
        able = devices if unit.streams or devices[0] == CPU else devices[:1]  # code between modules runs on the main device
        device = next((device for device in able if unit.nbytes + cache[device] <= fill.room[device]), None)
        if device is not None:
            fill.room[device] -= unit.nbytes + cache[device]
            fill.devices[number] = device
        elif rank(number) == 0 and (unit.streams or devices[0] != CPU):
            return False
    return True


def _placement(
    units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str, fill: _Assignment
) -> Placement:
    """Return the placement.

    The rest of a limit enlarges its buffers, up to two of the largest part: one is read while one computes."""
    stream = {}
    for device, reserve in fill.reserves.items():
        if reserve:
            stream[device] = min(2 * reserve, reserve + fill.room[device])
    places = []
    for number, unit in enumerate(units):
        why = _why(unit, fill.devices[number], limits, fill)
        places += module_placements(unit, fill.devices[number], why)
    return Placement(
        modules=tuple(places), limits=dict(limits), main=main, buffers=work.buffers, activations=work.activations,
        cache=work.cache, batch=work.batch, sequence=work.sequence, stream_bytes=stream,
    )  # fmt: skip


def follow_device_map(
    devices: Mapping[str, str], units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds
) -> Placement:
    """Place units as a user's map says, for every name or for a name around it.

    Raise RequestError if the map divides tied weights, and NothingFits if a device would hold more than its limit."""
    main = next(iter(limits))
    places: list[ModulePlacement] = []
    for unit in units:
        said = {name: _said(devices, name) for name in unit.names}
        if len(set(said.values())) > 1:
            apart = ", ".join(f"{name} on {device}" for name, device in said.items())
            raise RequestError(f"device_map divides tied weights ({apart}); give them one device")
        places += module_placements(unit, said[unit.names[0]], "device_map says so")
    from_disk = max(
        (place_units.bytes for place_units in places if place_units.device == DISK and place_units.streams and place_units.read),
        default=0,
    )
    from_host = max(
        (
            place_units.bytes
            for place_units in places
            if place_units.device in (CPU, DISK) and place_units.streams and place_units.read
        ),
        default=0,
    )
    stream = {CPU: 2 * from_disk} if main == CPU else {main: 2 * from_host, CPU: 2 * from_disk}
    placement = Placement(
        modules=tuple(places), limits=dict(limits), main=main, buffers=work.buffers, activations=work.activations,
        cache=work.cache, batch=work.batch, sequence=work.sequence,
        stream_bytes={device: size for device, size in stream.items() if size},
    )  # fmt: skip
    for device, peak in placement.peak_bytes.items():
        if peak > limits.get(device, 0) and placement.totals[device]:
            raise NothingFits(
                f"device_map takes {format_bytes(peak)} of {device}, which is limited to {format_bytes(limits.get(device, 0))}; "
                'put more of it on the disk, or give device_map="auto"'
            )
    return placement


def _said(devices: Mapping[str, str], name: str) -> str:
    parts = name.split(".")
    return next(device for length in range(len(parts), -1, -1) if (device := devices.get(".".join(parts[:length]))))


def module_placements(unit: PlacementUnit, device: str, why: str) -> list[ModulePlacement]:
    first, *tied = unit.names
    return [
        ModulePlacement(name=first, device=device, bytes=unit.nbytes, read=unit.read, streams=unit.streams, why=why),
        *(
            ModulePlacement(name=name, device=device, bytes=0, read=0, streams=unit.streams, why=f"tied to {first}")
            for name in tied
        ),
    ]


def _why(unit: PlacementUnit, device: str, limits: Mapping[str, int], fill: _Assignment) -> str:
    order = list(limits)
    full = order if device == DISK else order[: order.index(device)]
    if not full:
        return "fits"
    left = ", ".join(f"{name} has {format_bytes(fill.room[name])} left" for name in full)
    if not unit.read:
        return f"{left}; only the rows of its tokens are read"
    return f"{left}, it takes {format_bytes(unit.nbytes)}"


def _nothing_fits(units: Sequence[PlacementUnit], limits: Mapping[str, int], work: MemoryNeeds, main: str) -> NothingFits:
    smallest = min((unit.nbytes for unit in units if unit.streams and unit.read), default=0)
    largest = max((unit.nbytes for unit in units if unit.streams and unit.read), default=smallest)
    cache = sum(unit.cache for unit in units)
    needed = work.everywhere + work.buffers + cache + largest
    kept, least = ("unknown", "at least ") if work.cache is None else (format_bytes(cache), "")
    return NothingFits(
        f"{main} is limited to {format_bytes(limits[main])}, and one layer at a time takes {least}{format_bytes(needed)}: the "
        f"largest {format_bytes(largest)}, activations {format_bytes(work.everywhere)}, keys and values {kept}, buffers "
        f"{format_bytes(work.buffers)}; allow more with --max-memory, or shorten --sequence-length or --batch"
    )
