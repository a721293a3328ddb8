"""Placement: everything once, nothing over its limit, and no more from the disk than any plain order would read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.loading.placement.cost import predict
from upshift.loading.placement.memory_limits import memory_limits, read_device, read_max_memory, read_size
from upshift.loading.placement.place import CPU, DISK, MemoryNeeds, Placement, PlacementUnit, follow_device_map, place_units
from upshift.units import GIB


@st.composite
def models(draw: st.DrawFn) -> list[PlacementUnit]:
    """An embedding, layers of a few sizes, a parameter beside modules, a head; keys and values in the layers."""
    layer_sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(layer_sizes), min_size=1, max_size=12))
    cache = draw(st.integers(0, 30))
    table, head = draw(st.integers(1, 900)), draw(st.integers(1, 900))
    tied = draw(st.booleans())
    units = [PlacementUnit(("embed", "head"), table, table)] if tied else [PlacementUnit(("embed",), table, 0)]
    units.append(PlacementUnit(("token",), draw(st.integers(1, 5)), 0, streams=False))
    units += [PlacementUnit((f"layers.{number}",), size, size, cache=cache) for number, size in enumerate(layers)]
    return units if tied else [*units, PlacementUnit(("head",), head, head)]


limits = st.one_of(
    st.fixed_dictionaries({CPU: st.integers(1, 6000)}),
    st.fixed_dictionaries({"cuda:0": st.integers(1, 3000), CPU: st.integers(1, 3000)}),
    st.fixed_dictionaries({"cuda:0": st.integers(1, 1500), "cuda:1": st.integers(1, 1500), CPU: st.integers(1, 3000)}),
).map(lambda sizes: {device: sizes[device] for device in sorted(sizes, key=lambda device: (device == CPU, device))})
works = st.builds(MemoryNeeds, batch=st.just(1), sequence=st.just(8), buffers=st.integers(0, 20), activations=st.integers(0, 60))


def in_order(units: list[PlacementUnit], limit: int, work: MemoryNeeds) -> int:
    """Bytes that a pass reads where parts go to the CPU in their order, room being left for the largest of the others."""
    room = limit - work.per_device - work.buffers - sum(unit.cache for unit in units)
    used = 0
    for number, unit in enumerate(units):
        rest = max(other.nbytes for other in units[number:])
        if used + unit.nbytes + (rest if used + sum(u.nbytes for u in units[number:]) > room else 0) > room:
            return sum(other.read for other in units[number:])
        used += unit.nbytes
    return 0


@given(models(), limits, works)
def test_everything_has_one_place_within_the_limits(
    units: list[PlacementUnit], limits: dict[str, int], work: MemoryNeeds
) -> None:
    work = MemoryNeeds(work.batch, work.sequence, work.buffers, work.activations, sum(unit.cache for unit in units))
    try:
        placement = place_units(units, limits, work)
    except NothingFits:
        assert min(limits.values()) < work.per_device + work.buffers + (work.cache or 0) + max(unit.nbytes for unit in units)
        return
    assert [place.name for place in placement.modules] == [name for unit in units for name in unit.names]
    for unit in units:
        assert len({placement.device_of(f"{name}.weight") for name in unit.names}) == 1
    assert sum(placement.totals.values()) == sum(unit.nbytes for unit in units)
    streamed = [place for place in placement.modules if place.device == DISK and place.read and place.streams]
    if streamed:
        assert placement.stream_bytes[CPU] >= max(place.bytes for place in streamed)
    if placement.main == CPU:
        assert placement.peak_bytes[CPU] <= limits[CPU]
        assert placement.disk_read <= in_order(units, limits[CPU], work)
    for device, total in placement.totals.items():
        assert device == DISK or total + placement.stream_bytes.get(device, 0) <= limits[device]
    assert Placement.from_json(placement.to_json()) == placement


def test_an_embedding_goes_to_the_disk_first_because_only_rows_are_read() -> None:
    units = [
        PlacementUnit(("embed",), 100, 0),
        *(PlacementUnit((f"layers.{number}",), 50, 50) for number in range(4)),
        PlacementUnit(("head",), 100, 100),
    ]
    placement = place_units(units, {CPU: 300}, MemoryNeeds(1, 8))
    assert placement.device_map == {"embed": DISK, **{f"layers.{number}": CPU for number in range(4)}, "head": CPU}
    assert placement.disk_read == 0 and placement.disk_bytes == 100


def test_a_large_head_stays_in_memory_and_layers_are_streamed() -> None:
    units = [*(PlacementUnit((f"layers.{number}",), 10, 10) for number in range(10)), PlacementUnit(("head",), 100, 100)]
    placement = place_units(units, {CPU: 150}, MemoryNeeds(1, 8))
    assert placement.device_of("head.weight") == CPU
    assert placement.disk_read == 60 and placement.stream_bytes == {CPU: 10}


def test_a_map_is_followed() -> None:
    units = [PlacementUnit(("embed", "head"), 100, 100), *(PlacementUnit((f"layers.{number}",), 50, 50) for number in range(4))]
    placement = follow_device_map({"": CPU, "layers.3": DISK}, units, {CPU: 1000}, MemoryNeeds(1, 8))
    assert placement.totals == {CPU: 250, DISK: 50} and placement.stream_bytes == {CPU: 100}
    with pytest.raises(RequestError, match="divides tied weights .*embed on cpu, head on disk"):
        follow_device_map({"": CPU, "head": DISK}, units, {CPU: 1000}, MemoryNeeds(1, 8))
    with pytest.raises(NothingFits, match="limited to 200 B"):
        follow_device_map({"": CPU}, units, {CPU: 200}, MemoryNeeds(1, 8))


def test_speed_is_that_of_the_slowest_way() -> None:
    host = describe("h100")
    units = [PlacementUnit((f"layers.{number}",), GIB, GIB) for number in range(10)]
    whole = predict(place_units(units, {"cuda:0": 20 * GIB, CPU: 20 * GIB}, MemoryNeeds(1, 8)), host)
    assert whole.bound == "memory" and whole.tokens_per_second is not None and host.gpu is not None and host.gpu.peak is not None
    assert whole.tokens_per_second == pytest.approx((host.gpu.peak.memory_bytes_per_second or 0) / (10 * GIB))
    half = place_units(units, {"cuda:0": 8 * GIB, CPU: 20 * GIB}, MemoryNeeds(1, 8))
    assert predict(half, host).bound == "the link to the GPU"
    little = place_units(units, {"cuda:0": 4 * GIB, CPU: 4 * GIB}, MemoryNeeds(1, 8))
    disk = predict(little, host, disk_bytes_per_second=1e9, stored_bytes=10 * GIB)
    assert disk.bound == "the disk" and disk.tokens_per_second == pytest.approx(1e9 / disk.disk_read, rel=0.01)
    assert disk.load_seconds == pytest.approx((10 * GIB - disk.disk_bytes) / 1e9)


def test_products_bind_where_they_are_slower_than_memory() -> None:
    placement = place_units(
        [PlacementUnit((f"layers.{number}",), GIB, GIB) for number in range(4)], {CPU: 20 * GIB}, MemoryNeeds(1, 8)
    )
    rates = {"memory_bytes_per_second": 10e9, "disk_bytes_per_second": 1e9, "stored_bytes": 4 * GIB}
    fast, slow = (predict(placement, describe("epyc-9554"), **rates, products_bytes_per_second=rate) for rate in (9e9, 2e9))
    assert (fast.bound, slow.bound) == ("memory", "products on the CPU")
    assert slow.tokens_per_second == pytest.approx(2e9 / (4 * GIB))


def test_sizes_and_devices_as_they_are_written() -> None:
    sizes = {"8GiB": 8 * GIB, "20GB": 20 * 10**9, " 1.5 gib": GIB + GIB // 2, "512": 512, 7: 7}
    assert [read_size(size) for size in sizes] == list(sizes.values())
    host = describe("2xh100")
    assert [read_device(device, host) for device in ("cpu", "disk", 0, "1", "cuda:1", "cuda")] == [
        "cpu", "disk", "cuda:0", "cuda:1", "cuda:1", "cuda:0",
    ]  # fmt: skip
    for wrong in ("8 parsecs", "-1", "", -1, True, None):
        with pytest.raises(RequestError, match="no size of memory"):
            read_size(wrong)  # type: ignore[arg-type]
    for wrong in (2, "cuda:2", "xpu:0", "hard disk"):
        with pytest.raises(RequestError, match="the devices are cpu, disk, 0, 1"):
            read_device(wrong, host)
    with pytest.raises(RequestError, match="cpu=8GiB"):
        read_max_memory(["cpu"])
    with pytest.raises(RequestError, match="gives cpu 1GiB and 1KB"):
        read_max_memory(["cpu=1GiB", "cpu=1024MiB", "cpu=1KB"])
    with pytest.raises(RequestError, match="gives cuda:0 1.00 GiB and 1KB"):
        memory_limits(host, {"0": "1GiB", "cuda:0": "1KB"})
    with pytest.raises(RequestError, match="leave out the disk"):
        memory_limits(host, {"disk": "1TB"})


def test_no_memory_is_a_limit_of_none() -> None:
    host = describe("epyc-9554")
    assert host.cpu is not None
    assert memory_limits(host.changed(cpu=host.cpu.changed(free_memory_bytes=0)), None) == {CPU: 0}


def test_what_is_not_known_is_said_so() -> None:
    with pytest.raises(NothingFits, match="takes at least 5 B.* keys and values unknown"):
        place_units([PlacementUnit(("layer",), 5, 5)], {CPU: 1}, MemoryNeeds(batch=1, sequence=8, cache=None))
