"""Predict what a placement costs: the time of loading, and of a forward pass that gives every sequence one token.

A pass reads every weight once: from the memory of the device that computes, over the link from the host, and from the disk.
The three go on at the same time if the buffers hold two of the largest part. If they hold one, nothing is read while a
streamed part is computed. Ignored: that many tokens at once make products slower than memory, and what the page cache keeps.
"""

from __future__ import annotations

from upshift.hardware.spec import Host
from upshift.loading.placement.place import CPU, DISK, Placement

SLOWER = 0.8  # than memory: below this share, products are the bound


def predict(
    placement: Placement, host: Host, *, memory_bytes_per_second: float | None = None, disk_bytes_per_second: float | None = None,
    stored_bytes: int | None = None, products_bytes_per_second: float | None = None,
) -> Placement:  # fmt: skip
    """Return the placement with its predicted times.

    ``memory_bytes_per_second``: the CPU's; a GPU's is the host's. ``stored_bytes``: of the files; None: there are none.
    ``products_bytes_per_second``: of weights that the CPU multiplies with one token."""
    slow = products_bytes_per_second is not None and products_bytes_per_second < SLOWER * (memory_bytes_per_second or 0.0)
    if slow:
        memory_bytes_per_second = products_bytes_per_second
    load = _load_bytes(placement, stored_bytes)
    written = 0 if stored_bytes is None or stored_bytes == sum(placement.totals.values()) else placement.disk_bytes
    seconds, bound = _pass(placement, host, memory_bytes_per_second, disk_bytes_per_second)
    known = disk_bytes_per_second is not None and load is not None
    return placement.changed(
        disk_bytes_per_second=disk_bytes_per_second,
        load_bytes=load,
        load_seconds=((load or 0) + written) / disk_bytes_per_second if known and disk_bytes_per_second else None,
        tokens_per_second=placement.batch / seconds if seconds else None,
        bound="products on the CPU" if slow and bound == "memory" and placement.main == CPU else bound,
    )


def _load_bytes(placement: Placement, stored_bytes: int | None) -> int | None:
    """Return the bytes to read before the first pass.

    If the files hold another dtype, weights that stay on the disk are converted once, so they are read, too."""
    total = sum(placement.totals.values())
    if stored_bytes is None or stored_bytes != total:
        return stored_bytes
    return total - placement.disk_bytes


def _pass(
    placement: Placement, host: Host, memory_rate: float | None, disk_rate: float | None
) -> tuple[float | None, str | None]:
    """Return the seconds of a pass and what bounds them. Return None if a rate that it needs is not known."""
    read = {device: 0 for device in placement.totals}
    for place in placement.modules:
        read[place.device] += place.read
    rates = {CPU: memory_rate, **{device: _gpu_rate(host) for device in read if device not in (CPU, DISK)}}
    computed = dict(read)
    streamed = computed.pop(DISK)
    if placement.main != CPU:
        streamed += computed.pop(CPU, 0)
    computed[placement.main] = computed.get(placement.main, 0) + streamed
    parts = {
        "the disk": (read[DISK], disk_rate),
        "the link to the GPU": (streamed if placement.main != CPU else 0, _link_rate(host)),
    }
    times = {name: num_bytes / rate if rate else None for name, (num_bytes, rate) in parts.items() if num_bytes}
    in_memory = [num_bytes / rate if (rate := rates[device]) else None for device, num_bytes in computed.items() if num_bytes]
    memory = None if None in in_memory else sum(time for time in in_memory if time)
    if None in times.values() or (memory is None and not times):
        return None, None
    slowest = max(times, key=lambda name: times[name] or 0.0, default="")
    waiting = (times[slowest] or 0.0) if slowest else 0.0
    alone = 0.0 if _overlaps(placement) else streamed / (rates[placement.main] or float("inf"))
    if memory is None or waiting + alone >= memory:
        return waiting + alone, slowest
    return memory, "memory"


def _overlaps(placement: Placement) -> bool:
    streamed = (place.bytes for place in placement.modules if place.device == DISK and place.streams and place.read)
    return placement.stream_bytes.get(CPU, 0) >= 2 * max(streamed, default=0)


def _gpu_rate(host: Host) -> float | None:
    known = (host.measured and host.measured.gpu) or (host.gpu and host.gpu.peak)
    return known.memory_bytes_per_second if known else None


def _link_rate(host: Host) -> float | None:
    measured = host.measured and host.measured.host_to_device_bytes_per_second
    return measured or (host.host_to_device.bytes_per_second if host.host_to_device else None)
