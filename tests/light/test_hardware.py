"""Hosts: described exactly or refused, detected from planted files and a planted NVML, the same after JSON."""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshift.debugging.software import examine_chosen_gpus
from upshift.errors import RequestError
from upshift.hardware import (
    CPUS,
    GPUS,
    PORTS,
    Cpu,
    Gpu,
    Host,
    Link,
    Measured,
    Rates,
    collective,
    describe,
    detect,
    gemm_efficiency,
    memory_efficiency,
    torch_build,
)
from upshift.hardware.catalog.apple import APPLE_GPUS
from upshift.hardware.catalog.efficiency import COLLECTIVES, GEMM_CLASSES, GEMM_EFFICIENCY
from upshift.hardware.catalog.interconnect import pcie_link
from upshift.hardware.catalog.lookup import ALIASES, AMBIGUOUS, find_product
from upshift.hardware.catalog.nvidia import NVIDIA_GPUS, key_by_nvml
from upshift.hardware.catalog.row import GpuFacts
from upshift.hardware.cgroup import read_limits
from upshift.hardware.host_memory import free_memory_bytes
from upshift.hardware.nvml import find_gpus, usable_handles
from upshift.loading.placement.memory_limits import memory_limits
from upshift.models.source import ModelSource
from upshift.planning import planner
from upshift.planning.search.space import weight_places
from upshift.units import GIB, MIB

# --- described hosts -------------------------------------------------------------------------------------------------

accelerators = st.sampled_from([*GPUS, *ALIASES])
DEVICE = {"cuda": "cuda", "rocm": "cuda", "hpu": "hpu", "xla": "xla", "mps": "mps"}


def devices_per_node(name: str) -> st.SearchStrategy[int]:
    return st.integers(1, GPUS[ALIASES.get(name, name)].max_per_node or 999)


@given(st.data(), st.integers(1, 999), accelerators, st.booleans())
def test_describe_reads_every_form(data: st.DataObject, nodes: int, name: str, upper: bool) -> None:
    gpus = data.draw(devices_per_node(name))
    forms = {name: (1, 1), f"{gpus}x{name}": (1, gpus), f" {nodes}x{gpus}x{name}\n": (nodes, gpus)}
    for text, counts in forms.items():
        host = describe(text.upper() if upper else text)
        assert (host.num_nodes, host.gpus_per_node) == counts or is_of_racks(name, counts)
        assert host.num_devices == counts[0] * counts[1]
        assert host.gpu == GPUS[ALIASES.get(name, name)].gpu
        assert host.device == DEVICE[host.gpu.backend]
        assert host.num_nodes > 1 or host.inter_node is None
        assert ("inter_node" in host.origin) == (host.num_nodes > 1)
        unknown = name == "gh200-96gb" or (name == "mi250-gcd" and counts[1] > 2)  # no source names a link between them
        assert (host.intra_node is None) == (host.gpus_per_node == 1 or unknown)


@given(st.data(), st.integers(2, 999), accelerators, st.sampled_from([*PORTS]), st.none() | st.integers(1, 999), st.booleans())
def test_describe_reads_the_link_between_nodes(
    data: st.DataObject, nodes: int, name: str, port: str, count: int | None, upper: bool
) -> None:
    gpus = data.draw(devices_per_node(name))
    counted = None if PORTS[port].per_node else count
    text = f"{nodes}x{gpus}x{name}@{f'{counted}x' if counted else ''}{port}"
    host = describe(text.upper() if upper else text)
    ports = counted or PORTS[port].per_node or gpus
    assert host.inter_node is not None
    assert host.inter_node.bytes_per_second == pytest.approx(ports * PORTS[port].bytes_per_second)
    assert host.inter_node.name == f"{ports}x {PORTS[port].name}"
    assert host.inter_node.latency_seconds is None
    assert host.origin["inter_node"].startswith("described")
    without = describe(text.partition("@")[0])
    same = host.changed(inter_node=None, name="", origin={}) == without.changed(inter_node=None, name="", origin={})
    assert same or is_of_racks(name, (nodes, gpus))


def is_of_racks(name: str, counts: tuple[int, int]) -> bool:
    """Whether NVLink joins the nodes of a host to some racks, which are its nodes then."""
    fabric = GPUS[ALIASES.get(name, name)].fabric
    return fabric is not None and fabric.name == "NVLink" and fabric.spans_nodes and counts[0] * counts[1] > fabric.largest


@pytest.mark.parametrize(("text", "counts"), [("36x4xgb200", (2, 72)), ("64x4xgb200", (4, 64)), ("20x4xgb200", (2, 40))])
def test_trays_of_several_racks_are_racks(text: str, counts: tuple[int, int]) -> None:
    host = describe(text)
    assert (host.num_nodes, host.gpus_per_node) == counts and "NVLink joins" in host.origin["num_nodes"]
    assert describe(f"{text}@ib-ndr").gpus_per_node == 4  # the user says what joins them


@given(accelerators, st.text(max_size=20))
def test_describe_answers_any_link_with_a_host_or_one_line(name: str, port: str) -> None:
    try:
        assert describe(f"2x1x{name}@{port}").inter_node is not None
    except RequestError as error:
        assert len(str(error).splitlines()) == 1


@given(st.text(max_size=40))
def test_describe_answers_any_text_with_a_host_or_one_line(text: str) -> None:
    try:
        describe(text)
    except RequestError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["h10", "h100x", "h1000", "xh100", "l4s", "0xh100", "8x", "", "8x8x8xh100", "4095", "rtx 4090 ti",
             "-1xh100", "1.5xh100", "8 h100", "h100-95tb", "h100 h100", "h100-nvl72",
             "2x2xgb200-nvl72", "nvl72", "٨xh100", "a\nb", "nul\0.json", "no such file.json",
             "tpu-v5", "m2-max", "m2-max-65gb", "m2-64gb", "mi300", "mi300a", "epyc", "epyc-965", "graviton", "nvidia", "amd",
             "epyc-9654-0gb", "rtx", "pcie", "80gb", "a100 pcie", "100", "rtx 4090 48gb", "gh200", "0x4090", "x4090",
             "3x2xgraviton-3", "1x4xepyc-9654", "0xepyc-9654", "16xh100", "80xgb200", "2xm1-8gb", "512xtpu-v5e",
             "2x8xh100@", "2x8xh100@ib", "2x8xh100@ndr", "2x8xh100@400", "2x8xh100@ ib-ndr", "2x8xh100@ib-ndr ndr", "@ib-ndr",
             "2x8xh100@0xib-ndr", "2x8xh100@-1xib-ndr", "2x8xh100@ib-ndr@ib-ndr", "2x8xh100@2xefa-p5", "8xh100@ib-ndr",
             "1x8xh100@ib-ndr", "epyc-9654@ethernet-25"]
)  # fmt: skip
def test_describe_refuses_near_misses(text: str) -> None:
    with pytest.raises(RequestError):
        describe(text)


@pytest.mark.parametrize("key", [*GPUS, *CPUS])
def test_a_product_is_found_however_its_words_are_joined(key: str) -> None:
    facts = find_product(key)
    for joint in ("", " ", "_", "-", "."):
        for text in (joint.join(key.split("-")), joint.join(key.upper().split("-"))):
            assert find_product(text) == facts, text
    if key in GPUS:
        counted = describe(f"2 x 1 x {key.upper().replace('-', ' ')}")
        assert (counted.num_nodes, counted.gpus_per_node, counted.gpu) == (2, 1, GPUS[key].gpu)
    name = GPUS[key].gpu.name if key in GPUS else CPUS[key].cpu.model_name
    assert name is not None
    if sum(facts.gpu.name == name for facts in GPUS.values()) > 1:  # products that differ in their memory alone
        return
    assert find_product(name) == facts
    assert find_product(name.replace(" ", "-").lower()) == facts


def test_part_of_a_name_means_the_only_product_that_has_it() -> None:
    meant = {
        "4090": "rtx-4090", "2x4090": "rtx-4090", "2xrtx4090": "rtx-4090", "a100-80g": "a100-80gb", "A100 80GiB": "a100-80gb",
        "a100 pcie 40g": "a100-pcie-40gb", "A100-SXM-80GB": "a100-80gb", "h100 80gb": "h100-sxm", "H100 SXM5": "h100-sxm",
        "h100-80gb-pcie": "h100-pcie", "nvidia h100": "h100-sxm", "v5e": "tpu-v5e", "gaudi2": "gaudi-2", "l40s 48gb": "l40s",
        "4080": "rtx-4080", "4070ti super": "rtx-4070-ti-super", "rtx 4090 laptop gpu": "rtx-4090-laptop", "l40": "l40",
        "2080ti": "rtx-2080-ti", "a6000": "rtx-a6000", "rtx 6000 ada": "rtx-6000-ada", "rtx pro 6000": "rtx-pro-6000",
        "3080 12gb": "rtx-3080-12gb", "3060 8gb": "rtx-3060-8gb", "3060 12gb": "rtx-3060",
        "3080 laptop 8gb": "rtx-3080-laptop-8gb",
        "h100 nvl": "h100-nvl", "h100-94gb": "h100-nvl", "gh200 96gb": "gh200-96gb", "8xb300": "b300", "mi355x": "mi355x",
        "M2 Ultra 192GB": "m2-ultra-192gb", "b200 192gb": "b200", "8×h200": "h200",
    }  # fmt: skip
    for text, key in meant.items():
        gpu = describe(text).gpu
        assert gpu is not None
        assert gpu.table_key == key, text
    for text in ("9654", "EPYC9654", "amd epyc 9654", "epyc_9654_768g", "epyc 9654 768 GB"):
        cpu = describe(text).cpu
        assert cpu is not None
        assert cpu.model_name == "AMD EPYC 9654"
        assert cpu.memory_bytes == (768 * GIB if "768" in text else None)


@pytest.mark.parametrize(
    ("text", "candidates"),
    [("a100 pcie", ("a100-pcie-40gb", "a100-pcie-80gb")), ("4060 ti", ("rtx-4060-ti-8gb", "rtx-4060-ti-16gb")),
     ("gh200", ("gh200-96gb", "gh200-144gb")), ("3080 laptop", ("rtx-3080-laptop-8gb", "rtx-3080-laptop-16gb")),
     ("m2 64gb", ("m2-max-64gb", "m2-ultra-64gb")), ("80g", ("a100-80gb", "a100-pcie-80gb")),
     ("nvidia a100", ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"))]
)  # fmt: skip
def test_a_spelling_that_fits_several_products_names_them(text: str, candidates: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=f"use one of {', '.join(candidates)}$"):
        describe(f"2x{text}")


@pytest.mark.parametrize("key", [key for key, facts in GPUS.items() if facts.gpu.memory_bytes])
def test_a_whole_name_with_another_memory_names_no_other_product(key: str) -> None:
    """Cards of one name exist with several memories, and the catalog may have one of them alone."""
    for gigabytes in (8, 12, 16, 24, 32, 80, 192):
        for text in (f"{key} {gigabytes}gb", f"{key.replace('-', '')}-{gigabytes}G"):
            try:
                facts = find_product(text)
            except RequestError as error:
                assert len(str(error).splitlines()) == 1
            else:
                assert isinstance(facts, GpuFacts) and facts == GPUS.get(f"{key}-{gigabytes}gb", GPUS[key]), text
                assert gigabytes == pytest.approx((facts.gpu.memory_bytes or 0) / GIB, rel=0.1), text


@pytest.mark.parametrize(
    ("text", "refusal"),
    [("rtx 3060 10gb", "rtx-3060 has 12 GiB here, not 10"), ("rtx 4080 12gb", "rtx-4080 has 16 GiB here, not 12"),
     ("3080 16gb", "rtx-3080 has 10 GiB here, not 16"), ("4060-16g", "rtx-4060 has 8 GiB here, not 16"),
     ("4070 16gb", "rtx-4070 has 12 GiB here, not 16"), ("5060 16gb", "rtx-5060 has 8 GiB here, not 16"),
     ("rtx 4000", "use rtx-4000-ada if you mean that one"), ("4500", "use rtx-4500-ada"), ("rtx 5000", "use rtx-5000-ada"),
     ("rtx 6000", "use one of rtx-6000-ada, rtx-pro-6000, rtx-pro-6000-max-q, rtx-pro-6000-server")]
)  # fmt: skip
def test_a_name_of_a_card_that_is_not_listed_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(RequestError, match=refusal):
        describe(f"2x{text}")


def test_a_rack_is_one_nvlink_domain() -> None:
    one = describe("gb200-nvl72")
    assert (one.num_nodes, one.gpus_per_node) == (1, 72)
    assert one.intra_node == describe("72xgb200").intra_node and one.intra_node is not None
    assert describe("GB300 NVL72").gpus_per_node == 72
    two = describe("2xgb200-nvl72")
    assert (two.num_nodes, two.gpus_per_node) == (2, 72)
    assert two.inter_node is not None and "NVLink" not in two.inter_node.name
    trays = describe("18x4xgb200")  # the same rack, host by host: NVLink joins the hosts, too
    assert trays.inter_node is not None and "NVLink" in trays.inter_node.name


def test_similar_names_are_different_products() -> None:
    names = ("l4", "l40s", "a10", "a10g", "a100-40gb", "h100", "h100-pcie")
    peaks = [describe(name).gpu.peak for name in names]  # type: ignore[union-attr]
    assert len({peak.to_json() for peak in peaks if peak}) == len(names)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_name_lists_the_choices(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        describe(f"8x{name}")
    assert AMBIGUOUS[name]
    assert all(choice in str(caught.value) and choice in {**GPUS, **CPUS} for choice in AMBIGUOUS[name])


def test_describe_reads_a_host_file(tmp_path: Path) -> None:
    host = describe("2x8xh100").changed(inter_node=Link(name="ours", bytes_per_second=4e9, latency_seconds=3e-6))
    path = tmp_path / "Host.JSON"
    path.write_text(host.to_json())
    assert describe(str(path)) == host
    path.write_text(host.to_json().replace('"num_nodes"', '"nodes"'))
    with pytest.raises(RequestError, match="num_nodes"):
        describe(str(path))


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", GPUS)
def test_rows_have_a_source_and_consistent_figures(key: str) -> None:
    facts = GPUS[key]
    gpu, peak = facts.gpu, facts.gpu.peak
    assert peak is not None
    vendors = {"cuda": "NVIDIA", "rocm": "AMD", "hpu": "Intel", "xla": "Google", "mps": "Apple"}
    assert facts.source.startswith(vendors[gpu.backend])
    assert gpu.table_key == key == key.lower()
    assert (key in NVIDIA_GPUS) == (gpu.backend == "cuda")
    assert 5 * GIB < (gpu.memory_bytes or 0) <= 512 * GIB
    assert 0.06e12 <= (peak.memory_bytes_per_second or 0) <= 8e12
    rates = [rate for rate in (peak.fp32, peak.bf16, peak.fp8) if rate is not None]
    assert rates == sorted(rates)
    assert peak.int8 is None or peak.int8 >= (peak.fp32 or 0)  # B300 has few units for integers
    assert peak.fp16 in (None, peak.bf16) or peak.bf16 is None
    assert gpu.tdp_watts is None or 70 <= gpu.tdp_watts <= 1400
    assert facts.fabric is None or facts.fabric.source
    assert facts.reference is None or (facts.reference.source and facts.reference.port in PORTS)


@pytest.mark.parametrize("key", NVIDIA_GPUS)
def test_rows_of_nvidia(key: str) -> None:
    facts = GPUS[key]
    gpu, peak = facts.gpu, facts.gpu.peak
    assert peak is not None
    assert key_by_nvml(gpu.name, gpu.memory_bytes) == key
    for precision in ("fp32", "fp32_medium", "bf16", "fp16", "fp8", "int8"):
        assert (peak.matrix(precision) is not None) == gpu.supports(precision), precision
    assert (peak.fp16 or 0) >= 1.9 * (peak.fp32 or 0) > 0
    assert (gpu.nvlink_bytes_per_second is None) == (gpu.nvlink_links == 0) == (facts.fabric is None)
    assert (gpu.tdp_watts is None) == (key in ("a10g", "gh200-96gb", "gh200-144gb"))  # unknown, not guessed
    sold_without_system = ("a800", "h800", "h20")
    assert (facts.reference is None) == (facts.fabric is None or key in sold_without_system)


def test_figures_are_dense() -> None:
    dense = {"a100-80gb": 312, "h100-sxm": 989.5, "h200": 989.5, "b200": 2250, "gb200": 2500, "l40s": 362, "l4": 121,
             "rtx-4090": 165, "mi300x": 1307, "mi250-gcd": 181, "gaudi-2": 432, "gaudi-3": 1835, "tpu-v4": 275, "tpu-v5e": 197,
             "tpu-v5p": 459, "tpu-v6e": 918}  # fmt: skip
    for key, tera in dense.items():
        peak = GPUS[key].gpu.peak
        assert peak is not None
        assert peak.bf16 == pytest.approx(tera * 1e12, rel=0.01)


def test_a_macs_memory_tells_its_bandwidth() -> None:
    bandwidth = {"m1-8gb": 68.25, "m2-ultra-192gb": 800, "m3-max-36gb": 300, "m3-max-48gb": 400, "m4-max-36gb": 410,
                 "m4-max-128gb": 546}  # fmt: skip
    for key, gb_s in bandwidth.items():
        gpu = GPUS[key].gpu
        assert gpu.peak is not None
        assert gpu.peak.memory_bytes_per_second == gb_s * 1e9
        assert gpu.memory_bytes == int(key.rpartition("-")[2].removesuffix("gb")) * GIB
        assert "unified" in describe(key).origin["gpu.memory_bytes"]


@pytest.mark.parametrize("key", CPUS)
def test_rows_of_cpus(key: str) -> None:
    facts = CPUS[key]
    cpu, peak = facts.cpu, facts.cpu.peak
    assert peak is not None
    assert cpu.isa is not None
    assert cpu.memory_bytes is None
    for part in ("20", "MHz x operations", "DDR"):  # a year, and how the rates come about
        assert part in facts.source
    for precision in ("fp32", "fp32_medium", "bf16", "fp16", "fp8", "int8"):
        assert (peak.matrix(precision) is not None) == (cpu.supports(precision) or False), precision
    assert (peak.fp32_medium == peak.bf16) == ("amx_bf16" in cpu.isa or cpu.architecture == "aarch64" and peak.bf16 is None)
    assert 1e12 < (peak.fp32 or 0) < (peak.int8 or 1e15)
    assert 1e11 < (peak.memory_bytes_per_second or 0) < 1e12


def test_described_cpus() -> None:
    host = describe("EPYC-9654")
    assert host.cpu is not None
    assert host.cpu.peak is not None
    assert (host.device, host.num_devices, host.cpu.usable_cores) == ("cpu", 1, 96)
    assert host.cpu.peak.bf16 == 96 * 2.4e9 * 64  # 16 lanes x 2 products x 2 x one 512-bit instruction
    assert host.cpu.peak.memory_bytes_per_second == 12 * 4800e6 * 8
    assert (host.supports("bf16"), host.supports("fp16"), host.supports("fp8")) == (True, False, False)
    four = describe("4x2xepyc-9654-768gb@2xib-hdr")
    assert four.cpu is not None
    assert four.cpu.peak is not None
    assert (four.num_nodes, four.num_devices, four.cpu.physical_cores) == (4, 4, 192)
    assert four.cpu.l3_total_bytes == 2 * 384 * MIB
    assert four.cpu.peak.bf16 == 2 * host.cpu.peak.bf16
    assert four.cpu.memory_bytes == 768 * GIB
    assert four.inter_node == Link(name="2x InfiniBand HDR", bytes_per_second=50e9, num_ports=2)
    assert describe("2xgraviton-3").inter_node is None
    assert describe("2xgraviton-3").origin["inter_node"].startswith("unknown")
    assert describe("2xgraviton-3@ethernet-25").inter_node == Link(name="1x Ethernet 25", bytes_per_second=3.125e9, num_ports=1)


def test_efficiency_classes_and_unknowns() -> None:
    assert gemm_efficiency("h100-sxm", 1e10) == 0.72
    assert gemm_efficiency("h100-sxm", 9.99e9) == 0.49
    assert gemm_efficiency("h100-sxm", 5e15) == 0.84
    assert gemm_efficiency("h100-sxm", 1e8) == 0.49  # below the measured sizes: that of the nearest one
    assert gemm_efficiency("a100-80gb", 2e13) == 0.93  # above them, likewise
    assert gemm_efficiency("t4", 1e12) is None
    assert memory_efficiency("l40s") == 0.75
    assert memory_efficiency("v100-16gb") is None
    assert all(key in GPUS and len(row) == len(GEMM_CLASSES) for key, row in GEMM_EFFICIENCY.items())
    assert all(key in GPUS and len(row) == 4 for key, row in COLLECTIVES.items())
    all_reduce = collective("h100-sxm", "all_reduce")
    assert all_reduce is not None
    assert (all_reduce.latency_seconds, all_reduce.bytes_per_second) == (20e-6, 218e9)
    assert collective("l40s", "all_gather") is None


def test_links_of_described_hosts() -> None:
    nvlink, pcie = describe("8xh100").intra_node, describe("8xl40s").intra_node
    assert nvlink == Link(name="NVLink x18", bytes_per_second=450e9)
    assert pcie is not None
    assert pcie.bytes_per_second == pytest.approx(31.5e9, rel=0.01)
    assert not pcie.measured
    assert describe("h100").intra_node is None


@pytest.mark.parametrize(
    ("text", "link", "gb_s"),
    [
        ("8xmi300x", "Infinity Fabric x7", 448),
        ("4xmi300x", "Infinity Fabric x3", 192),  # a mesh: no switch carries the idle peers' links
        ("2xmi250-gcd", "Infinity Fabric x4", 200),
        ("8xgaudi-2", "RoCE 100 x21", 262.5),
        ("8xgaudi-3", "RoCE 200 x21", 525),
        ("72xgb200", "NVLink x18", 900),
        ("2xtpu-v5e", "ICI x1", 50),
        ("4xtpu-v5e", "ICI x2", 100),
        ("256xtpu-v5e", "ICI x4", 200),
        ("64xtpu-v5p", "ICI x6", 600),
    ],
)
def test_fabrics(text: str, link: str, gb_s: float) -> None:
    assert describe(text).intra_node == Link(name=link, bytes_per_second=gb_s * 1e9)


@pytest.mark.parametrize(
    ("text", "gb_s", "system"),
    [
        ("2x8xv100-16gb", 50, "DGX-1"),
        ("2x8xa100-40gb", 200, "DGX A100"),
        ("2x8xh100", 400, "DGX H100"),
        ("2x4xh100", 200, "DGX H100"),
        ("2x8xh200", 400, "DGX H200"),
        ("2x8xb200", 400, "DGX B200"),
        ("18x4xgb200", 3600, "NVLink joins up to 72"),  # the trays of one rack
        ("2x72xgb200", 3600, "DGX GB200"),
        ("36x4xgb200", 3600, "DGX GB200"),  # the trays of two racks
        ("2x8xmi300x", 400, "MI300 series"),
        ("2x8xgaudi-2", 300, "HLS-2"),
        ("2x8xgaudi-3", 600, "HLS-3"),
        ("32x8xtpu-v5e", 1600, "ICI joins up to 256"),
        ("2x256xtpu-v5e", 800, "Cloud TPU v5e"),  # "6.4 Tbps per pod"
    ],
)
def test_reference_systems(text: str, gb_s: float, system: str) -> None:
    host = describe(text)
    assert host.inter_node is not None
    assert host.inter_node.bytes_per_second == pytest.approx(gb_s * 1e9)
    assert system in host.origin["inter_node"]
    assert "@" in host.origin["inter_node"]  # how to state another


@pytest.mark.parametrize("text", ["4x1xl4", "2x8xa10g", "2x8xa100-pcie-40gb", "2x8xmi250-gcd", "2x256xtpu-v6e", "2x1xm2-16gb"])
def test_without_a_reference_system_the_network_is_unknown(text: str) -> None:
    host = describe(text)
    assert host.inter_node is None
    assert host.origin["inter_node"].startswith("unknown")


def test_a_whole_nodes_network() -> None:
    assert describe("2x8xa100-40gb@efa-p4d").inter_node == Link(name="4x EFA", bytes_per_second=50e9, num_ports=4)
    assert describe("2x8xh100@efa-p5").inter_node == Link(name="32x EFA", bytes_per_second=400e9, num_ports=32)


@pytest.mark.parametrize("text", ["h100x8", "H100:8", "h100 x 8", "8*h100", "h100*8"])
def test_a_count_may_stand_on_either_side(text: str) -> None:
    host, usual = describe(text), describe("8xh100")
    assert (host.gpu, host.gpus_per_node, host.intra_node) == (usual.gpu, 8, usual.intra_node)


def test_a_name_that_ends_in_x_is_no_count() -> None:
    assert describe("mi300x").num_devices == 1
    assert describe("4x4090").num_devices == 4
    assert describe("8xmi300x").num_devices == describe("mi300x x 8").num_devices == 8


@pytest.mark.parametrize("text", ["8xh100,8xa100-80gb", "4xh100+4xa100-80gb", "h100 and l4"])
def test_devices_of_several_kinds(text: str) -> None:
    with pytest.raises(RequestError, match="several kinds of devices.*--compare"):
        describe(text)


@pytest.mark.parametrize("text", ["h100-mig-3g.40gb", "h100 1g.10gb", "NVIDIA A100 80GB PCIe MIG 2g.20gb"])
def test_a_slice_of_a_device(text: str) -> None:
    with pytest.raises(RequestError, match="MIG slice.*Host JSON file"):
        describe(text)


def test_every_product_that_a_message_leaves_out_is_listed_by_its_family() -> None:
    with pytest.raises(RequestError) as problem:
        describe("list")
    assert len(str(problem.value)) < 650
    left_out = [key for key in (*GPUS, *CPUS) if key not in str(problem.value) and key not in APPLE_GPUS]
    for key in left_out:
        with pytest.raises(RequestError) as listed:
            describe(key.partition("-")[0])
        assert key in str(listed.value)


def test_messages_end_in_the_next_step() -> None:
    steps = {
        "2x64xh100": "write 16x8xh100",
        "h100@ib-ndr": "write 2x1xh100@ib-ndr",
        "epyc-9654@ib-ndr": "write 2xepyc-9654@ib-ndr",
        "1x4xepyc-9654": "write 1x2xepyc-9654",
        "2x8xh100@2xefa-p5": "write @efa-p5",
        "2x8xh100@ib": "ib-ndr",
        "gaudi22": "gaudi-2",
        "m2-max-65gb": "m2-max-64gb",
    }
    for text, step in steps.items():
        with pytest.raises(RequestError) as caught:
            describe(text)
        assert step in str(caught.value)


# --- the values ------------------------------------------------------------------------------------------------------

rates = st.none() | st.floats(1e-3, 1e16)
counts = st.integers(1, 10**6)
sizes = st.none() | st.integers(0, 2**50)
seconds = st.floats(0, 1e6)
names = st.text(max_size=12)
all_rates = st.builds(Rates, fp32=rates, bf16=rates, fp8=rates, memory_bytes_per_second=rates)
cpus = st.builds(
    Cpu, model_name=st.none() | names, architecture=st.sampled_from([None, "x86_64", "aarch64"]), usable_cores=counts,
    isa=st.none() | st.sampled_from([(), ("avx2", "avx512f"), ("neon",)]), memory_bytes=sizes, free_memory_bytes=sizes,
    physical_cores=st.none() | counts, numa_nodes=st.none() | counts, l2_total_bytes=sizes, l3_total_bytes=sizes,
    peak=st.none() | all_rates,
)  # fmt: skip
gpus = st.builds(
    Gpu, name=names, memory_bytes=sizes, peak=st.none() | all_rates, tdp_watts=rates,
    backend=st.sampled_from(["cuda", "rocm", "hpu", "xla", "mps"]),
    compute_capability=st.none() | st.tuples(st.integers(1, 20), st.integers(0, 9)),
)  # fmt: skip
measurements = st.builds(
    Measured, cpu=all_rates, gpu=st.none() | all_rates, num_threads=counts, dispatch_seconds=seconds,
    first_touch_seconds_per_byte=st.none() | seconds, base_resident_bytes=sizes, probe_seconds=seconds,
)  # fmt: skip


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    mixed = tuple(draw(st.lists(gpus, max_size=3)))
    gpu = None if mixed else draw(st.none() | gpus)
    return Host(
        name=draw(names),
        num_nodes=draw(counts),
        cpu=draw(cpus) if gpu is None and not mixed else draw(st.none() | cpus),
        gpu=gpu,
        mixed_gpus=mixed,
        gpus_per_node=len(mixed) if gpu is None else draw(counts),
        inter_node=draw(st.none() | st.builds(Link, name=names, bytes_per_second=st.floats(1, 1e13))),
        measured=draw(st.none() | measurements),
        origin=draw(st.dictionaries(names, names, max_size=2)),
    )


@given(hosts())
def test_hosts_survive_json(host: Host) -> None:
    again = Host.from_json(host.to_json())
    assert again == host
    assert again.fingerprint == host.fingerprint
    assert host.supports("fp32") is True


@pytest.mark.parametrize("text", [*GPUS, *CPUS, "2x8xh100@4xib-hdr", "2x72xgb200", "4x2xepyc-9654-768gb@ethernet-100"])
def test_described_hosts_survive_json(text: str) -> None:
    host = describe(text)
    again = Host.from_json(host.to_json())
    assert again == host
    assert again.fingerprint == host.fingerprint


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "x"}',
        '{"name": "x", "gpus_per_node": 2}',
        '{"name": "x", "gpus_per_node": 2, "gpu": {"name": "y", "memory_bytes": 1}, "num_nodes": 0}',
        '{"name": "x", "gpu": {"name": "y", "memory_bytes": 1}}',
        '{"name": "x", "gpus_per_node": 1, "gpu": {"name": "y", "memory_bytes": 1, "peak": {"bf16": -1}}}',
        '{"name": "x", "gpus_per_node": 2, "mixed_gpus": [{"name": "y", "memory_bytes": 1}]}',
    ],
)
def test_impossible_hosts_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        Host.from_json(text)


def test_fingerprint_is_of_the_hardware() -> None:
    host = describe("8xh100")
    gpu = host.gpu
    assert gpu is not None
    assert host.fingerprint == describe("8xH100-SXM").fingerprint
    assert host.fingerprint == "19cf5de70606d905"  # stable over processes; a new field changes it: caches then refill
    plain = gpu.changed(free_memory_bytes=7, peak=None, tdp_watts=None)
    assert host.changed(gpu=plain, origin={}).fingerprint == host.fingerprint
    cpu_host = describe("epyc-9654")
    assert cpu_host.cpu is not None
    assert cpu_host.changed(cpu=cpu_host.cpu.changed(peak=None)).fingerprint == cpu_host.fingerprint
    others = [describe(text) for text in ("4xh100", "2x8xh100", "2x8xh100@ib-hdr", "8xh200", "8xa100-40gb", "8xa100-80gb")]
    others += [cpu_host, describe("1x2xepyc-9654"), describe("epyc-9654-768gb"), describe("8xmi300x"), describe("8xgaudi-3")]
    link = Link(name="Ethernet", bytes_per_second=1e9)
    others.append(host.changed(inter_node=link))
    assert len({other.fingerprint for other in [host, *others]}) == len(others) + 1


def test_supports() -> None:
    assert [describe("t4").supports(p) for p in ("bf16", "fp16", "int8")] == [False, True, True]
    assert [describe("v100-16gb").supports(p) for p in ("bf16", "fp16", "int8")] == [False, True, False]
    with_fp8 = {name for name in GPUS if describe(name).supports("fp8")}
    of_nvidia = {"l4", "l40", "l40s", "rtx-4060", "rtx-4090", "rtx-5090", "rtx-6000-ada", "h100-sxm", "b200", "gb200"}
    assert of_nvidia <= with_fp8
    assert not {"a100-80gb", "a40", "rtx-3090", "rtx-a6000", "v100-16gb", "t4"} & with_fp8
    assert with_fp8 - NVIDIA_GPUS.keys() == {"mi300x", "mi325x", "mi350x", "mi355x", "gaudi-2", "gaudi-3", "tpu-v5p"}
    unknown = Gpu(name="new", memory_bytes=None)
    assert Host(name="x", gpu=unknown, gpus_per_node=1).supports("bf16") is None
    t4 = GPUS["t4"].gpu
    mixed = Host(name="x", mixed_gpus=(t4, GPUS["l4"].gpu), gpus_per_node=2)
    assert mixed.supports("bf16") is False
    assert mixed.supports("fp16") is True
    assert Host(name="x", mixed_gpus=(t4, unknown), gpus_per_node=2).supports("fp16") is None


@pytest.mark.parametrize(
    ("text", "device", "precisions"),
    [
        ("mi300x", "cuda", {"fp32", "bf16", "fp16", "fp8", "int8"}),
        ("mi250-gcd", "cuda", {"fp32", "bf16", "fp16", "int8"}),
        ("gaudi-3", "hpu", {"fp32", "bf16", "fp8"}),
        ("tpu-v5e", "xla", {"fp32", "bf16", "int8"}),
        ("m4-max-64gb", "mps", {"fp32"}),
    ],
)
def test_supports_outside_cuda_is_what_the_table_has(text: str, device: str, precisions: set[str]) -> None:
    host = describe(text)
    assert host.device == device
    assert host.gpu is not None
    for precision in ("fp32", "fp32_medium", "bf16", "fp16", "fp8", "int8"):
        assert host.supports(precision) is (precision in precisions), precision
    unlisted = host.changed(gpu=host.gpu.changed(peak=None))
    assert unlisted.supports("bf16") is None
    assert unlisted.supports("fp32") is True


# --- planted machines ------------------------------------------------------------------------------------------------


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cpu_files(*, cpus: int, threads_per_core: int = 1, flags: str = "flags : avx2 avx512f amx_bf16") -> dict[str, str]:
    files = {
        "proc/cpuinfo": f"processor : 0\nmodel name : Planted CPU: fast\n{flags}\n\nprocessor : 1\nmodel name : B\n",
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\nHugePages: 0\n",
        "sys/devices/system/node/node0/cpulist": f"0-{cpus - 1}\n",
        "sys/devices/system/node/node1/cpulist": "\n",  # memory only
    }
    for cpu in range(cpus):
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        core = cpu // threads_per_core
        files[f"{folder}/topology/physical_package_id"] = "0\n"
        files[f"{folder}/topology/core_id"] = f"{core}\n"
        for index, level, size, shared in ((1, 2, "1024K", core), (2, 3, "32M", "all")):
            files[f"{folder}/cache/index{index}/level"] = f"{level}\n"
            files[f"{folder}/cache/index{index}/size"] = f"{size}\n"
            files[f"{folder}/cache/index{index}/shared_cpu_list"] = f"{shared}\n"
    return files


def test_detect_reads_planted_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    plant(tmp_path, cpu_files(cpus=8, threads_per_core=2))
    host = detect(tmp_path, nvml=None, affinity={0, 1, 2, 5})
    cpu = host.cpu
    assert cpu is not None
    assert (cpu.model_name, cpu.architecture) == ("Planted CPU: fast", "x86_64")
    assert (cpu.physical_cores, cpu.usable_cores, cpu.numa_nodes) == (4, 3, 1)  # 0 and 1 are one core's threads
    assert (cpu.l2_total_bytes, cpu.l3_total_bytes) == (4 * MIB, 32 * MIB)
    assert cpu.isa == ("avx2", "avx512f", "amx_bf16")
    assert (cpu.memory_bytes, cpu.free_memory_bytes) == (64 * GIB, 48 * GIB)
    assert (host.device, host.gpu, host.num_devices) == ("cpu", None, 1)
    assert host.supports("bf16") is True
    assert host.supports("fp16") is False
    fields = {f"cpu.{name}" for name in Cpu.model_fields} - {"cpu.architecture"}
    assert fields <= set(host.origin)


def test_detect_on_aarch64_and_without_any_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    files = cpu_files(cpus=2, flags="Features : asimd bf16 sve2")
    arm = detect(plant(tmp_path / "arm", files), nvml=None, affinity={1})
    assert arm.cpu is not None
    assert arm.cpu.isa == ("neon", "neon_bf16", "sve2")
    assert arm.supports("fp32_medium") is None
    bare = detect(tmp_path / "macos", nvml=None)
    assert bare.cpu is not None
    assert bare.cpu.isa is bare.cpu.model_name is bare.cpu.l3_total_bytes is None
    assert bare.supports("bf16") is None
    assert bare.cpu.usable_cores >= 1


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    plant(tmp_path, cpu_files(cpus=8) | {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/kubepods/pod1/box\n",
        f"{group}/box/cpu.max": "max 100000\n",
        f"{group}/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
        f"{group}/box/memory.max": f"{8 * GIB}\n",
        f"{group}/box/memory.current": f"{3 * GIB}\n",
        f"{group}/box/memory.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n",
        f"{group}/memory.max": f"{16 * GIB}\n",
        f"{group}/memory.current": f"{15 * GIB}\n",
        "sys/fs/cgroup/kubepods/memory.max": "max\n",
    })  # fmt: skip
    assert read_limits(tmp_path) == (2.5, 8 * GIB, 1 * GIB)  # least left in the parent
    host = detect(tmp_path, nvml=None, affinity=range(8))
    assert host.cpu is not None
    assert host.cpu.usable_cores == 2
    assert (host.cpu.memory_bytes, host.cpu.free_memory_bytes) == (8 * GIB, 1 * GIB)
    assert host.origin["cpu.memory_bytes"] == "cgroup limit"
    assert "2.5" in host.origin["cpu.usable_cores"]


def test_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: the mount's root is the container's group, so files lie at the mount point."""
    unlimited = 9223372036854771712
    plant(tmp_path, {
        "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw master:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/a:b\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert read_limits(tmp_path) == (0.5, 2 * GIB, GIB)
    host = detect(tmp_path, nvml=None, affinity={0, 1})
    assert host.cpu is not None
    assert host.cpu.usable_cores == 1  # half a core is still one thread
    plant(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{unlimited}\n"})
    assert read_limits(tmp_path).memory_bytes is None


@pytest.mark.parametrize(("limit_gib", "free_gib"), [(None, 48), (100, 48), (16, 14), (4, 2)])
def test_free_memory_is_the_least_of_the_machine_and_its_container(tmp_path: Path, limit_gib: int | None, free_gib: int) -> None:
    """Of 64 GiB 48 are available. The container's processes hold 2 GiB, and the pages of files that they read are 2 GiB more."""
    plant(tmp_path, {
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n",
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{'max' if limit_gib is None else limit_gib * GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{4 * GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file {3 * GIB // 2}\n",
    })  # fmt: skip
    assert free_memory_bytes(tmp_path) == free_gib * GIB


def test_no_cgroups_is_no_limit(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == (None, None, None)
    assert read_limits(plant(tmp_path, {"proc/self/mountinfo": V2_MOUNT})) == (None, None, None)


# --- planted NVML ----------------------------------------------------------------------------------------------------


class FakeNvml:
    """Answers for GPUs given as (name, free bytes); whatever a GPU does not know raises, as the driver does."""

    class NVMLError(Exception):
        pass

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(
        self, *gpus: tuple[str, int], links: int = 0, mig: bool = False, driver: bool = True, whole: tuple[int, ...] = ()
    ) -> None:
        self.gpus, self.links, self.mig, self.driver, self.is_open = gpus, links, mig, driver, False
        self.whole = whole  # GPUs that are not cut, with ``mig``

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[str, int, int]:
        assert self.is_open
        return (*self.gpus[index], index)

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        return handle[0].encode() if handle[2] else handle[0]  # both kinds of bindings

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"MIG-{handle[2]}f00" if "MIG" in handle[0] else f"GPU-{handle[2]}f00"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=80 * GIB, free=handle[1])

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        if not self.mig or handle[2] in self.whole:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> tuple[str, int, int]:
        if index < 2:
            raise self.NVMLError("Not Found")
        return (f"{handle[0]} MIG 1g.10gb", 9 * GIB, 10 * handle[2] + index)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> tuple[str, int, int]:
        return (*self.gpus[handle[2] // 10], handle[2] // 10)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        if "MIG" in handle[0]:
            raise self.NVMLError("Invalid Argument")
        return (9, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        if link >= 18:
            raise self.NVMLError("Invalid Argument")
        return int(link < self.links)

    def nvmlDeviceGetNvLinkVersion(self, handle: Any, link: int) -> int:
        return 6


H100 = "NVIDIA H100 80GB HBM3"


def test_nvml_equal_gpus_with_the_least_free_memory(tmp_path: Path) -> None:
    nvml = FakeNvml((H100, 70 * GIB), (H100, 30 * GIB), links=18)
    host = detect(tmp_path, nvml=nvml)
    assert not nvml.is_open
    assert host.gpus_per_node == host.num_devices == 2
    assert host.gpu is not None
    assert (host.gpu.table_key, host.gpu.memory_bytes, host.gpu.free_memory_bytes) == ("h100-sxm", 80 * GIB, 30 * GIB)
    assert host.gpu.peak == GPUS["h100-sxm"].gpu.peak
    assert host.gpu.tdp_watts == 700
    assert host.gpu.nvlink_bytes_per_second == GPUS["h100-sxm"].gpu.nvlink_bytes_per_second
    assert host.intra_node is not None
    assert host.host_to_device is None  # its PCIe width is unknown
    assert host.origin["gpu.peak"].startswith("table: NVIDIA H100")


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA H100 80GB HBM3 ", "nvidia h100 80gb hbm3", "NVIDIA H999", ""])
def test_nvml_unknown_names_have_no_peak(tmp_path: Path, name: str) -> None:
    gpu = detect(tmp_path, nvml=FakeNvml((name, GIB))).gpu
    assert gpu is not None
    assert gpu.peak is gpu.table_key is None
    assert gpu.nvlink_links == 0


def test_nvml_different_gpus_are_not_merged(tmp_path: Path) -> None:
    host = detect(tmp_path, nvml=FakeNvml((H100, GIB), ("NVIDIA L4", GIB)))
    assert host.gpu is None
    assert [gpu.table_key for gpu in host.mixed_gpus] == ["h100-sxm", "l4"]
    assert (host.device, host.num_devices) == ("cuda", 2)


@pytest.mark.parametrize(
    ("name", "total", "source"), [("NVIDIA GB10", 122570 * MIB, "table"), ("NVIDIA Thor", 128 * GIB, "/proc/meminfo")]
)
def test_a_gpu_that_shares_the_cpus_memory_has_what_is_free_there(name: str, total: int, source: str, tmp_path: Path) -> None:
    """For such a GPU NVML answers that the memory is not supported."""

    class Shared(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
            raise self.NVMLError("Not Supported")

    plant(tmp_path, {"proc/meminfo": f"MemTotal: {128 * 2**20} kB\nMemAvailable: {100 * 2**20} kB\n"})
    host = detect(tmp_path, nvml=Shared((name, 0)))
    assert host.gpu is not None
    assert (host.gpu.memory_bytes, host.gpu.free_memory_bytes) == (total, 100 * GIB)
    assert host.gpu.shares_host_memory
    for field in ("gpu.memory_bytes", "gpu.free_memory_bytes"):
        assert host.origin[field].endswith("shared with the CPU")
    assert host.origin["gpu.memory_bytes"].startswith(source)
    silent = detect(tmp_path, nvml=Shared((H100, 0)))  # a card with memory of its own, of which the driver says nothing
    assert silent.gpu is not None and silent.gpu.free_memory_bytes is None
    assert not silent.gpu.shares_host_memory
    plain = detect(tmp_path, nvml=FakeNvml((name, 7 * GIB)))
    assert plain.gpu is not None and plain.gpu.free_memory_bytes == 7 * GIB and "gpu.memory_bytes" not in plain.origin


def test_nvml_mig_is_one_instance_without_peak(tmp_path: Path) -> None:
    host = detect(tmp_path, nvml=FakeNvml((H100, GIB), (H100, GIB), mig=True))
    assert host.gpu is not None
    assert (host.gpus_per_node, host.gpu.name, host.gpu.peak) == (1, f"{H100} MIG 1g.10gb", None)


@pytest.mark.parametrize(
    ("visible", "whole", "names"),
    [
        (None, (), ["MIG-2f00"]),
        ("MIG-5f00", (), ["MIG-5f00"]),
        ("MIG-13f00", (), ["MIG-13f00"]),  # of the second GPU
        ("MIG-13f00,MIG-14f00", (), ["MIG-13f00"]),  # a process uses one
        ("MIG-4", (0,), []),  # the first GPU is not cut
        ("MIG-14f00", (0,), ["MIG-14f00"]),  # beside a whole GPU
        (None, (0,), ["GPU-0f00"]),
        ("0", (0,), ["GPU-0f00"]),
        ("0", (), ["MIG-2f00"]),
    ],
)
def test_an_instance_is_found_by_its_uuid(visible: str | None, whole: tuple[int, ...], names: list[str]) -> None:
    nvml = FakeNvml((H100, GIB), (H100, GIB), mig=True, whole=whole)
    nvml.nvmlInit()
    assert [nvml.nvmlDeviceGetUUID(handle) for handle in usable_handles(nvml, visible)] == names
    found, _ = find_gpus(nvml, visible)
    assert [gpu.compute_capability for gpu in found] == [(9, 0)] * len(names)


def test_detect_shows_what_the_variable_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks for the host: planning, inference, serving, the probe."""
    gpus = [(H100, index * GIB) for index in range(4)]
    for value, count in (("2,3", 2), ("", 0), ("1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert detect(tmp_path, nvml=FakeNvml(*gpus)).gpus_per_node == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert detect(tmp_path, nvml=FakeNvml(*gpus)).gpus_per_node == 4


def test_nvml_absent_or_without_driver(tmp_path: Path) -> None:
    assert "not installed" in detect(tmp_path, nvml=None).origin["gpu"]
    host = detect(tmp_path, nvml=FakeNvml((H100, GIB), driver=False))
    assert host.gpus_per_node == 0
    assert "Driver Not Loaded" in host.origin["gpu"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1,9,0", [1]),
        ("GPU-2f, GPU-1f", [2, 1]),
        ("GPU-2f, 1", [2]),  # torch reads either UUIDs or numbers
        ("1, GPU-2f", [1]),
        ("1,0,1", []),  # CUDA shows none where one is repeated
        ("GPU-1f,GPU-1f", []),
        (" +1 ,2x", [1, 2]),  # as strtoul reads them
        ("0;1", [0]),
        ("GPU-", []),  # the beginning of several
        ("x", []),
    ],
)
def test_visible_devices(visible: str | None, indices: list[int]) -> None:
    nvml = FakeNvml(*[(H100, index * GIB) for index in range(3)])
    found, _ = find_gpus(nvml, visible)
    assert [gpu.free_memory_bytes for gpu in found] == [index * GIB for index in indices]


@pytest.mark.parametrize("visible", ["7", "all", "[0]", "cuda:0", "0,0", "GPU-9"])
def test_a_value_that_shows_no_gpu_by_mistake_is_refused(visible: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a word a model would train on the CPU."""
    host = detect(tmp_path, nvml=FakeNvml((H100, GIB), (H100, GIB)), visible_devices=visible)
    monkeypatch.setattr(planner, "detect", lambda: host)
    words = f"CUDA_VISIBLE_DEVICES={visible!r} shows no GPU, and this machine has 2; set it to different numbers from 0 to 1"
    with pytest.raises(RequestError, match=re.escape(words)):
        planner.find_host(None)
    (finding,) = examine_chosen_gpus(host.origin["gpu"])
    assert finding.severity == "error" and finding.what in words


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles", "none"])
def test_a_value_that_hides_all_gpus_leaves_the_cpu(hidden: str, tmp_path: Path) -> None:
    torch_build.check_torch_uses_gpus(detect(tmp_path, nvml=FakeNvml((H100, GIB)), visible_devices=hidden))


@pytest.mark.parametrize("name", ["h100", "4090", "l4", "mi300x", "t4"])
def test_rates_that_no_probe_measures_follow_the_datasheet(name: str) -> None:
    """fp8 and int8 are planned with a GPU that is here, as they are with one that is described."""
    host = describe(name)
    assert host.gpu is not None and host.gpu.peak is not None
    peak = host.gpu.peak
    probed = Rates(bf16=peak.bf16 and peak.bf16 * 0.7, fp16=peak.fp16 and peak.fp16 * 0.6, memory_bytes_per_second=1e12)
    measured = Measured(
        torch_version="2", transformers_version="5", num_threads=1, cpu=Rates(fp32=1e12), dispatch_seconds=1e-6,
        first_touch_seconds_per_byte=0.0, base_resident_bytes=1, compiler=True, probe_seconds=1.0, gpu=probed,
    )  # fmt: skip
    rates = host.changed(measured=measured).measured_gpu
    share = 0.7 if peak.bf16 else 0.6
    for precision in ("fp8", "int8"):
        stated = peak.matrix(precision)
        assert rates is not None and rates.matrix(precision) == (None if stated is None else pytest.approx(share * stated))
    assert rates.changed(fp8=None, int8=None) == probed, "what was measured stays"
    assert host.measured_gpu is None


# --- this machine ----------------------------------------------------------------------------------------------------


def test_detect_here() -> None:
    host = detect()
    assert host.cpu is not None
    assert host.cpu.usable_cores >= 1
    assert (host.cpu.free_memory_bytes or 0) <= (host.cpu.memory_bytes or 0)
    assert detect().fingerprint == host.fingerprint
    assert Host.from_json(host.to_json()) == host


def test_import_is_light() -> None:
    code = "import sys, upshift.hardware; print(sorted({'torch', 'psutil', 'pynvml', 'numpy'} & set(sys.modules)))"
    path = f"import sys; sys.path[:] = {sys.path!r}; "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("built", "is_known", "driver", "words"),
    [
        (None, True, (13, 0), "without CUDA"),
        ((13, 0), True, (12, 8), "a driver of 580 or newer, or a torch for CUDA 12"),
        ((12, 8), True, (13, 0), None),  # a driver serves older releases
        ((13, 2), True, (13, 0), None),  # and all of its own number
        ((13, 0), True, None, None),
        (None, False, (12, 8), None),  # what torch was built for could not be read
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_told_before_planning(
    built: tuple[int, int] | None, is_known: bool, driver: tuple[int, int] | None, words: str | None,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    nvml: Any = FakeNvml((H100, 70 * GIB))
    if driver is not None:
        nvml.nvmlSystemGetCudaDriverVersion = lambda: driver[0] * 1000 + driver[1] * 10
    monkeypatch.setattr(torch_build, "torch_cuda", lambda: (built, is_known))
    monkeypatch.setattr(torch_build, "find_nvml", lambda: nvml)
    host = detect(tmp_path, nvml=nvml)
    torch_build.check_torch_uses_gpus(host.cpu_alone())
    if words is None:
        torch_build.check_torch_uses_gpus(host)
        return
    monkeypatch.setattr(planner, "detect", lambda: host)
    with pytest.raises(RequestError, match=f"{H100}.*{words}.*CUDA_VISIBLE_DEVICES"):
        planner.find_host(None)
    assert planner.find_host("h100").device == "cuda"  # a described one needs no torch


WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # torch's wheels for CUDA 13


@pytest.mark.parametrize(
    ("capability", "architectures", "words"),
    [
        ((7, 0), WHEEL, "none for compute capability 7.0.*an older CUDA"),
        ((6, 1), WHEEL, "none for compute capability 6.1"),
        ((7, 5), WHEEL, None),
        ((8, 9), WHEEL, None),  # code of 8.6 and 8.0
        ((12, 1), WHEEL, None),
        ((11, 0), WHEEL, "none for compute capability 11.0"),  # no code of another major number
        ((13, 0), WHEEL, "a newer CUDA"),
        ((13, 0), (*WHEEL, "compute_120"), None),  # the driver compiles it
        ((10, 0), ("sm_90", "sm_90a"), "a newer CUDA"),
        ((9, 1), ("sm_90a",), "none"),
        ((9, 0), ("sm_90a",), None),
        ((7, 0), (), None),  # unknown
        (None, WHEEL, None),
        ((7, 0), ("gfx942",), None),  # ROCm's names
    ],
)
def test_a_gpu_without_kernels_in_the_wheel_is_told(
    capability: tuple[int, int] | None, architectures: tuple[str, ...], words: str | None
) -> None:
    reason = torch_build.why_no_kernels(capability, architectures, (13, 0))
    assert (reason is None) == (words is None), reason
    assert words is None or re.search(words, str(reason))


@pytest.mark.parametrize("key", ["rtx-3090", "rtx-4090", "rtx-5090", "a100-80gb", "h100-sxm", "l40", "rtx-a6000"])
def test_an_unknown_card_is_described_by_its_cores_and_clocks(key: str, tmp_path: Path) -> None:
    """The estimate of a listed product under another name is near its datasheet. (cores, MHz, memory's MHz, bits of the bus)"""
    figures = {
        "rtx-3090": (10496, 1695, 9751, 384), "rtx-4090": (16384, 2520, 10501, 384), "rtx-5090": (21760, 2407, 14001, 512),
        "a100-80gb": (6912, 1410, 1593, 5120), "h100-sxm": (16896, 1980, 2619, 5120), "l40": (18176, 2490, 9001, 384),
        "rtx-a6000": (10752, 1800, 8001, 384),
    }  # fmt: skip
    cores, clock, memory_clock, bits = figures[key]
    listed = GPUS[key].gpu
    nvml: Any = FakeNvml((f"{listed.name} X", 24 * GIB))
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: listed.compute_capability
    assert detect(tmp_path, nvml=nvml).gpu.peak is None  # type: ignore[union-attr]
    nvml.nvmlDeviceGetNumGpuCores = lambda handle: cores
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: memory_clock if kind == 2 else clock
    nvml.nvmlDeviceGetMemoryBusWidth = lambda handle: bits
    host = detect(tmp_path, nvml=nvml)
    assert host.gpu is not None and host.gpu.peak is not None and listed.peak is not None
    assert host.gpu.table_key is None and "estimated" in host.origin["gpu.peak"]
    for name in ("fp32", "fp32_medium", "bf16", "fp16", "fp8"):
        ours, theirs = host.gpu.peak.matrix(name), listed.peak.matrix(name)
        assert (ours is None) == (theirs is None), name
        # L40 alone of its generation has half of the tensor cores' rate.
        assert ours is None or ours == pytest.approx(theirs, rel=1.01 if key == "l40" else 0.1), name
    assert host.gpu.peak.memory_bytes_per_second == pytest.approx(listed.peak.memory_bytes_per_second, rel=0.02)


FIGURES = {"cores": 10000, "clock": 2000, "fp32": 40e12}  # of made-up cards: cores, MHz, and the FP32 rate that they make


@pytest.mark.parametrize("capability", sorted({facts.gpu.compute_capability for facts in NVIDIA_GPUS.values()}))
@pytest.mark.parametrize("brand", ["GeForce RTX", "RTX", "Tesla"])
def test_an_unlisted_card_of_a_listed_capability_has_the_rates_of_its_generation(
    capability: tuple[int, int], brand: str, tmp_path: Path
) -> None:
    """Rates over the FP32 rate are within a factor of 3 of the median of the listed cards, and known where theirs are."""
    listed = [facts.gpu.peak for facts in NVIDIA_GPUS.values() if facts.gpu.compute_capability == capability and facts.gpu.peak]
    nvml: Any = FakeNvml((f"NVIDIA {brand} {'T4 X' if brand == 'Tesla' else '9999'}", 24 * GIB))
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: capability
    nvml.nvmlDeviceGetNumGpuCores = lambda handle: FIGURES["cores"]
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: FIGURES["clock"]
    nvml.nvmlDeviceGetMemoryBusWidth = lambda handle: 384
    host = detect(tmp_path, nvml=nvml)
    assert host.gpu is not None and host.gpu.peak is not None
    assert host.gpu.peak.fp32 == FIGURES["fp32"]
    for name in ("fp32_medium", "bf16", "fp16", "fp8", "int8"):
        shares = [rate / peak.fp32 for peak in listed if (rate := peak.matrix(name)) and peak.fp32]
        estimate = host.gpu.peak.matrix(name)
        assert (estimate is not None) == bool(shares), name
        if estimate is not None:
            assert 1 / 3 < estimate / FIGURES["fp32"] / statistics.median(shares) < 3, name


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1660 Ti", "NVIDIA T1000", "NVIDIA T400 4GB", "Quadro T2000"])
def test_turing_cards_without_tensor_cores_have_no_rates_of_them(name: str, tmp_path: Path) -> None:
    nvml: Any = FakeNvml((name, 4 * GIB))
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (7, 5)
    nvml.nvmlDeviceGetNumGpuCores = lambda handle: 1000
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1500
    peak = detect(tmp_path, nvml=nvml).gpu.peak  # type: ignore[union-attr]
    assert peak is not None and (peak.fp32, peak.fp16, peak.int8) == (3e12, 6e12, None)


@pytest.mark.parametrize("generation", range(1, 8))
def test_every_generation_of_pcie_has_a_rate(generation: int) -> None:
    """Each generation has about twice the rate of the one before it."""
    link = pcie_link(GPUS["h100-pcie"].gpu.changed(pcie_generation=generation))
    assert link is not None
    assert link.bytes_per_second == pytest.approx(4e9 * 2 ** (generation - 1), rel=0.06)


def test_memory_that_gpu_and_cpu_share_is_counted_once() -> None:
    cpu = describe("epyc-9654-768gb").cpu
    assert cpu is not None
    free = 100 * GIB
    own = Host(name="x", cpu=cpu.changed(free_memory_bytes=free), gpus_per_node=1, gpu=GPUS["h100-pcie"].gpu)
    shared = own.changed(gpu=GPUS["gb10"].gpu.changed(free_memory_bytes=free))
    link = own.gpu and pcie_link(own.gpu)
    assert sum(memory_limits(own.changed(gpu=own.gpu and own.gpu.changed(free_memory_bytes=free)), None).values()) > free
    assert sum(memory_limits(shared, None).values()) <= free
    divided = memory_limits(shared, {"0": "40GiB"})
    assert divided["cuda:0"] == 40 * GIB and sum(divided.values()) <= free
    assert memory_limits(shared, {"0": "40GiB", "cpu": "20GiB"}) == {"cuda:0": 40 * GIB, "cpu": 20 * GIB}
    assert "host" in weight_places(own.changed(host_to_device=link))
    assert "host" not in weight_places(shared.changed(host_to_device=link))
    assert all(facts.gpu.shares_host_memory for key, facts in GPUS.items() if facts.gpu.backend == "mps")


def test_amds_gpus_are_named_where_they_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    for number, simds in enumerate((0, 1216, 1216)):  # the CPU's node, and two GPUs
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count {0 if simds else 96}\nsimd_count {simds}\nmem_banks_count 1\n")
    host = detect(tmp_path, nvml=None)
    assert host.device == "cpu" and "AMD" in host.origin["gpu"] and host.origin["gpu"].endswith("2 here")
    monkeypatch.setattr(planner, "detect", lambda: host)
    planner.find_host(None, probe=False)
    assert "AMD's are planned for with --on only" in caplog.text
    caplog.clear()
    assert "AMD" not in detect(tmp_path / "elsewhere", nvml=None).origin["gpu"]
    assert detect(tmp_path, nvml=FakeNvml((H100, GIB))).device == "cuda"  # an NVIDIA GPU beside them is used


@pytest.mark.parametrize("text", ["rtx-409", "8xh10", "l40ss"])
def test_an_unknown_name_gets_the_three_nearest(text: str) -> None:
    with pytest.raises(RequestError, match=r"the nearest (is|are) ([\w-]+, ){0,2}[\w-]+; --on list shows all names$"):
        describe(text)


NAMED_KEYS = [key for key in GPUS if not key.startswith("gb")]  # the words of a rack are other forms


@pytest.mark.parametrize(("number", "words"), [(0, "colab {}"), (1, "my {} machine"), (2, "rented {} at home")])
def test_a_product_among_other_words_is_the_nearest(number: int, words: str) -> None:
    for key in NAMED_KEYS[number::3]:
        with pytest.raises(RequestError, match=rf"the nearest (is|are) .*\b{key}\b") as refused:
            describe(words.format(key.replace("-", " ")))
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("MacBook M2", "m2-8gb"), ("5090m", "rtx-5090"), ("rtx 4090ti", "rtx-4090"), ("rtx 4900", "rtx-4090"), ("l40ss", "l40s"),
        ("epyc 9655", "epyc-9654"), ("4x Colab T4", "t4"),
    ],
)  # fmt: skip
def test_a_slip_or_a_family_gets_its_products(text: str, nearest: str) -> None:
    with pytest.raises(RequestError, match=rf"the nearest (is|are) ([\w-]+, )*{nearest}\b"):
        describe(text)


@pytest.mark.parametrize(
    "text",
    [
        "cpu", "gtx 1080", "GTX 1650", "i7-12700h", "rx 7900 xtx", "intel arc", "my laptop", "p100", "kaggle p100", "rtx 9090",
        "titan", "arc a770",
    ],
)  # fmt: skip
def test_another_product_is_no_nearest_name(text: str) -> None:
    with pytest.raises(RequestError, match="leave out --on to plan for this machine, .* --on list shows all names$") as refused:
        describe(text)
    assert len(str(refused.value)) < 200 and "nearest" not in str(refused.value)


@pytest.mark.parametrize(("text", "device"), [("m2-16gb", "mps"), ("gaudi-3", "hpu"), ("tpu-v5e", "xla")])
def test_devices_without_training_plans_name_what_works(text: str, device: str) -> None:
    source = ModelSource(reference="small", directory=None, config={"model_type": "llama"})
    with pytest.raises(RequestError, match=rf"{text} has {device} devices; .*--generate or --encode.*leaving out --on there"):
        planner.check_device(describe(text), source)


def test_the_cards_of_laptops_have_the_names_that_shops_write() -> None:
    assert describe("4090 mobile").gpu == describe("rtx-4090-laptop").gpu != describe("rtx-4090").gpu


@pytest.mark.parametrize("text", ["t4 x2", "T4 × 2", "t4:2", "t4 *2", "t4x2"])
def test_a_count_behind_the_name_leaves_no_space(text: str) -> None:
    assert describe(text).name == "2xt4" and describe(text).num_devices == 2


def test_the_name_list_shows_all() -> None:
    with pytest.raises(RequestError, match="list is no product; use one of") as refused:
        describe("list")
    shown = re.findall(r"[\w-]+", str(refused.value))
    assert [key for key in GPUS if key not in shown and not key.startswith(("rtx", *APPLE_GPUS))] == []
