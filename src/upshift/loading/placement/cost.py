"""Predict the time to load a placed model, and the time of a forward pass that gives every sequence one token.

A pass reads every weight once: from the memory of the device that computes, over the link from the host, and from the disk.
The three overlap if the buffers hold two of the largest streamed module. If they hold one, nothing is read while a streamed
module is computed. Two effects are ignored: with many tokens, products are slower than memory; and the page cache saves reads.
"""

from __future__ import annotations

from upshift.hardware.spec import Host
from upshift.loading.placement.place import CPU, DISK, Placement, largest_streamed

PRODUCT_BOUND_SHARE = 0.8  # products are the bound if their rate is below this share of the memory's


def predict(
    placement: Placement,
    host: Host,
    *,
    memory_bytes_per_second: float | None = None,
    disk_bytes_per_second: float | None = None,
    stored_bytes: int | None = None,
    products_bytes_per_second: float | None = None,
) -> Placement:
    """Return the placement with its predicted times.

    ``memory_bytes_per_second``: the rate of the CPU's memory; those of GPUs are in ``host``. ``stored_bytes``: the size of the
    files, or None if there are none. ``products_bytes_per_second``: the bytes of weights that the CPU multiplies by one token
    in a second."""
    is_product_bound = products_bytes_per_second is not None and products_bytes_per_second < PRODUCT_BOUND_SHARE * (
        memory_bytes_per_second or 0.0
    )
    if is_product_bound:
        memory_bytes_per_second = products_bytes_per_second
    load_bytes = _load_bytes(placement, stored_bytes)
    written = 0 if stored_bytes is None or stored_bytes == sum(placement.totals.values()) else placement.disk_bytes
    seconds, bound = _pass_time(placement, host, memory_bytes_per_second, disk_bytes_per_second)
    has_rates = disk_bytes_per_second is not None and load_bytes is not None
    return placement.changed(
        disk_bytes_per_second=disk_bytes_per_second,
        load_bytes=load_bytes,
        load_seconds=((load_bytes or 0) + written) / disk_bytes_per_second if has_rates and disk_bytes_per_second else None,
        tokens_per_second=placement.batch / seconds if seconds else None,
        bound="products on the CPU" if is_product_bound and bound == "memory" and placement.main == CPU else bound,
    )


def _load_bytes(placement: Placement, stored_bytes: int | None) -> int | None:
    """Return the bytes to read before the first pass.

    If the files have another dtype, weights that stay on the disk are converted once, so they are read, too."""
    total = sum(placement.totals.values())
    if stored_bytes is None or stored_bytes != total:
        return stored_bytes
    return total - placement.disk_bytes


def _pass_time(
    placement: Placement, host: Host, memory_rate: float | None, disk_rate: float | None
) -> tuple[float | None, str | None]:
    """Return the seconds of a pass and the name of their bound. Return None twice if a rate is needed and unknown."""
    read_bytes = {device: 0 for device in placement.totals}
    for placed_module in placement.modules:
        read_bytes[placed_module.device] += placed_module.read
    rates = {device: _gpu_rate(host) for device in read_bytes if device not in (CPU, DISK)}
    rates[CPU] = memory_rate
    memory_bytes = dict(read_bytes)
    streamed = memory_bytes.pop(DISK)
    if placement.main != CPU:
        streamed += memory_bytes.pop(CPU, 0)
    memory_bytes[placement.main] = memory_bytes.get(placement.main, 0) + streamed
    transfers = {
        "the disk": (read_bytes[DISK], disk_rate),
        "the link to the GPU": (streamed if placement.main != CPU else 0, _link_rate(host)),
    }
    times = {name: _seconds(num_bytes, rate) for name, (num_bytes, rate) in transfers.items() if num_bytes}
    memory_times = [_seconds(num_bytes, rates[device]) for device, num_bytes in memory_bytes.items() if num_bytes]
    memory_seconds = None if None in memory_times else sum(time for time in memory_times if time)
    if None in times.values() or (memory_seconds is None and not times):
        return None, None
    slowest = max(times, key=lambda name: times[name] or 0.0, default="")
    transfer_seconds = (times[slowest] or 0.0) if slowest else 0.0
    exposed_seconds = 0.0 if _has_overlap(placement) else streamed / (rates[placement.main] or float("inf"))
    if memory_seconds is None or transfer_seconds + exposed_seconds >= memory_seconds:
        return transfer_seconds + exposed_seconds, slowest
    return memory_seconds, "memory"


def _seconds(num_bytes: int, rate: float | None) -> float | None:
    return num_bytes / rate if rate else None


def _has_overlap(placement: Placement) -> bool:
    """Return whether the CPU's buffers hold two of the largest streamed module, so that reading and computing overlap."""
    return placement.stream_bytes.get(CPU, 0) >= 2 * largest_streamed(placement.modules, (DISK,))


def _gpu_rate(host: Host) -> float | None:
    gpu = (host.measured and host.measured.gpu) or (host.gpu and host.gpu.peak)
    return gpu.memory_bytes_per_second if gpu else None


def _link_rate(host: Host) -> float | None:
    measured = host.measured and host.measured.host_to_device_bytes_per_second
    return measured or (host.host_to_device.bytes_per_second if host.host_to_device else None)
