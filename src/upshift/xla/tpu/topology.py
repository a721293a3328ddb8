"""Name slices of Cloud TPUs by Google's names, such as v5e-4, and by the compiler's."""

from __future__ import annotations

import math
import re

from upshift.errors import RequestError
from upshift.hardware.facts import GpuFacts
from upshift.hardware.tpu import TPUS
from upshift.value import Value

GRIDS = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # of v5e and v6e, by chips
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
FLAT = ("v5e", "v6e")  # named by their chips; the others by their cores, two of a chip


class Topology(Value):
    name: str  # v5e-4
    version: str  # v5e, a key of hardware's table behind tpu-
    grid: str  # 2x2
    chips: int

    @property
    def accelerator_type(self) -> str:
        """Return the name as TPU_ACCELERATOR_TYPE has it."""
        return self.name.replace("v5e-", "v5litepod-")

    @property
    def facts(self) -> GpuFacts:
        return TPUS[f"tpu-{self.version}"]


def read_topology(text: str) -> Topology:
    """Return the slice. Raise RequestError with the names that there are."""
    found = re.fullmatch(r"(v\d+[a-z]?)-(\d+)", text.strip().lower())
    if found is None or f"tpu-{found[1]}" not in TPUS:
        versions = ", ".join(key.removeprefix("tpu-") for key in TPUS)
        raise RequestError(f"--topology {text!r} is not known; write a version ({versions}) and a size, such as v5e-4")
    version, size = found[1], int(found[2])
    flat = version in FLAT
    grids, per_chip = (GRIDS, 1) if flat else (CUBES, 2)
    if size % per_chip or size // per_chip not in grids:
        sizes = ", ".join(str(chips * per_chip) for chips in grids)
        of = "chips" if flat else "cores, two a chip"
        raise RequestError(f"--topology {text!r} is no slice that Google sells; sizes of {version} are {sizes} ({of})")
    chips = size // per_chip
    grid = grids[chips]
    assert math.prod(map(int, grid.split("x"))) == chips
    return Topology(name=f"{version}-{size}", version=version, grid=grid, chips=chips)
