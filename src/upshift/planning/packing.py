"""Choose which sequences share a row: bin packing with the standard library only.

Best fit keeps the guarantee of first fit (at most 11/9 of the optimum, plus one row). With whole-number capacities it needs one
bit-scan per sequence instead of a walk over all open rows: 4,096 sequences take milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`; the lengths of a row sum to at most `capacity`. Ties keep their order."""
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set while some row has exactly r tokens of room
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(index)
        else:
            room, row = capacity, len(rows)
            rows.append([index])
        if room > length:
            rows_with_room.setdefault(room - length, []).append(row)
            rooms |= 1 << (room - length)
    return rows


def spread_rows(lengths: Sequence[int], *, capacity: int, multiple: int = 1) -> list[list[int]]:
    """Return about as few rows as hold the sequences, equally full: longest first, each into the emptiest row (Graham 1969).

    The number of rows is a multiple of ``multiple``, so that each of so many processes gets as much; a row may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    more_than_half = sum(2 * length > capacity for length in lengths)  # no two of these sequences share a row
    count = round_up(max(-(-sum(lengths) // capacity), more_than_half, 1), multiple)
    while (rows := _spread(lengths, order, count, capacity)) is None:
        count += multiple
    return rows


def _spread(lengths: Sequence[int], order: list[int], count: int, capacity: int) -> list[list[int]] | None:
    """Return ``count`` rows, or None where a row overflows."""
    rows: list[list[int]] = [[] for _ in range(count)]
    fills = [(0, row) for row in range(count)]
    for index in order:
        fill, row = fills[0]
        if fill + lengths[index] > capacity:
            return None
        rows[row].append(index)
        heapq.heapreplace(fills, (fill + lengths[index], row))
    return rows


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
