"""List the attention kernels that compute only the visible part of packed rows, by transformers' names: needs and devices.

PyTorch's own kernel (``sdpa``) needs a mask for packed sequences. With a mask it takes a slower kernel that computes every pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile


@dataclass(frozen=True)
class KernelFacts:
    capabilities: tuple[tuple[int, int], tuple[int, int]]  # CUDA devices from the first version to below the second
    library: str | None = None  # its import name; None: torch alone
    install: str = ""
    halves_only: bool = False  # 16-bit inputs
    one_row: bool = False  # finds sequences in a micro-batch of one row only (transformers' _is_packed_sequence)


PACKED_KERNELS: dict[str, KernelFacts] = {
    "flex_attention": KernelFacts(((7, 5), (99, 0))),
    "flash_attention_2": KernelFacts(
        ((8, 0), (99, 0)), "flash_attn", "pip install flash-attn --no-build-isolation", halves_only=True, one_row=True
    ),
    "flash_attention_3": KernelFacts(
        ((9, 0), (10, 0)), "flash_attn_interface", "build the hopper folder of github.com/Dao-AILab/flash-attention",
        halves_only=True, one_row=True,
    ),
}  # fmt: skip


def why_not(name: str, host: Host, profile: ModelProfile) -> str | None:
    """Return why one of PACKED_KERNELS cannot run this model on this host, or None."""
    facts = PACKED_KERNELS[name]
    if host.device != "cuda" or host.gpu is None:
        return "it trains on CUDA devices only"
    if name not in profile.declares.attention_kernels:
        return f"{profile.architecture} does not declare it, or drops attention weights"
    first, past = facts.capabilities
    found = host.gpu.compute_capability
    if found is None or not first <= found < past:
        needed = f"{first[0]}.{first[1]}" + ("" if past[0] == 99 else f" to below {past[0]}.{past[1]}")
        has = "is unknown" if found is None else f"is {found[0]}.{found[1]}"
        return f"it needs compute capability {needed}, and this device's {has}"
    if facts.library is not None and find_spec(facts.library) is None:
        return f"the library {facts.library} is not installed: {facts.install}"
    return None
