"""Bring weights to the device that computes them: from the disk to the CPU, and from the disk and the host to a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upshift.loading.lanes import DeviceSlots, Lanes
from upshift.loading.place import CPU
from upshift.loading.reader import Group, Reader, make_groups
from upshift.loading.slots import BufferSlots, PageSlots, can_be_pages
from upshift.loading.waiting import Weight

Units = Sequence[Sequence[Weight]]
Starts = list[list[tuple[int, int]]]  # for each unit, for each weight: its piece, and where it starts in the piece


@dataclass(frozen=True)
class Feed:
    reader: Reader
    starts: Starts


def make_feed(units: Units, budgets: Mapping[str, int], main: str, *, keep: bool, lanes: Lanes | None) -> Feed:
    """Make the reader that brings the weights of all units, in their order.

    ``budgets``: bytes that may be on their way, on the host (cpu) and on the main device. ``keep``: the page cache has room."""
    if lanes is None:
        return _to_cpu(units, budgets.get(CPU, 0), keep=keep)
    waiting = [[weight.stored for weight in unit] for unit in units]
    in_memory = {number: unit[0].held for number, unit in enumerate(units) if unit[0].held is not None}
    on_disk = [number for number in range(len(units)) if number not in in_memory]
    size = min(budgets.get(device, 0) for device in (main, CPU)) if on_disk else budgets.get(main, 0)  # both need the same pieces
    groups, disk = make_groups(waiting, size), None
    if on_disk:
        wanted = [waiting[number] for number in on_disk]
        slots = BufferSlots([stored.file for unit in wanted for stored in unit], keep=keep, pin=lanes.pin)
        disk = Reader(make_groups(wanted, size), slots, budget=budgets.get(CPU, 0))
    sending = DeviceSlots(lanes, in_memory, disk, {group: number for number, group in enumerate(on_disk)})
    return Feed(Reader(groups, sending, budget=budgets.get(main, 0)), _starts(groups, units))


def _to_cpu(units: Units, budget: int, *, keep: bool) -> Feed:
    wanted = [[weight.stored for weight in unit] for unit in units]
    tensors = [stored for unit in wanted for stored in unit]
    files, in_place = [stored.file for stored in tensors], can_be_pages(tensors)
    groups = make_groups(wanted, budget, in_place=in_place)
    slots = PageSlots(files, keep=keep) if in_place else BufferSlots(files, keep=keep)
    return Feed(Reader(groups, slots, budget=budget), _starts(groups, units))


def _starts(groups: Sequence[Group], units: Units) -> Starts:
    starts = []
    for group, unit in zip(groups, units, strict=True):
        found = {
            stored: (number, start)
            for number, piece in enumerate(group.pieces)
            for stored, start in zip(piece.tensors, piece.starts, strict=True)
        }
        starts.append([found[weight.stored] for weight in unit])
    return starts
