"""``upshift xla compile``: does the program compile for a TPU, how much of its memory does it take, how fast can it be.

Decides what is said of the compiler's answer. The compiler runs in a process of its own, with the variables that it needs.

Name slices of Cloud TPUs by Google's names, such as v5e-4, and by the compiler's.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from upshift import parent_process
from upshift.benchmarking.environment import environment
from upshift.errors import JobFailed, MissingExtra, NothingFits, RequestError
from upshift.hardware.catalog.row import GpuFacts
from upshift.hardware.catalog.tpu import TPUS
from upshift.hardware.detect import detect
from upshift.models.source import ModelSource, find_model
from upshift.planning.analysis.tpu_programs import keep_program
from upshift.record import Numbers, Record
from upshift.settings import tpu_compiler_environment
from upshift.units import GIB
from upshift.value import Value
from upshift.versions import installed_version
from upshift.xla.tpu.request import CompileAnswer, CompileRequest

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
    version = found[1]
    size = int(found[2])
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


Kind = Literal["train", "generate"]
NEEDED = ("jax", "libtpu")
SHOWN = 12  # lines of what the compiler says


class TpuProgram(Value):
    """A compiled program. Bytes are of one chip. ``roofline_seconds`` is the least that its arithmetic and its
    traffic take."""

    model: str
    model_hash: str
    kind: Kind
    topology: Topology
    rows: int  # of all chips
    length: int
    max_new_tokens: int | None
    dtype: str
    num_parameters: int
    answer: CompileAnswer
    weight_bytes: int
    optimizer_bytes: int
    memory_bytes: int  # that a chip has for a program
    compute_seconds: float
    traffic_seconds: float
    versions: dict[str, str]

    @property
    def roofline_seconds(self) -> float:
        return max(self.compute_seconds, self.traffic_seconds)


def compile_for_tpu(
    model: str, topology: str, *, kind: Kind = "train", rows: int | None = None, length: int = 512, max_new_tokens: int = 128,
    dtype: str = "bfloat16", on_step: Callable[[str], None] = lambda text: None,
) -> TpuProgram:  # fmt: skip
    """Compile a program. ``rows`` are the sequences of all chips together. None: one a chip. Raise NothingFits with
    the compiler's words if the program is too big."""
    where = read_topology(topology)
    _need_compiler()
    rows = where.chips if rows is None else rows
    if rows % where.chips:
        raise RequestError(f"--batch {rows} does not divide over {where.chips} chips; use a multiple of {where.chips}")
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow("upshift xla compile")
    source = find_model(model)
    on_step("Lowering to HLO")
    program = _lowered(source, kind, rows=rows, length=length, max_new_tokens=max_new_tokens, dtype=dtype)
    on_step(f"Compiling for {where.name}")
    with tempfile.TemporaryDirectory(prefix="upshift-tpu-") as folder:
        file = Path(folder) / "program.hlo"
        file.write_bytes(program.hlo)
        request = CompileRequest(
            program=str(file), version=where.version, grid=where.grid, chips=where.chips, arguments=program.arguments,
            num_results=program.num_results,
        )  # fmt: skip
        answer = _ask(request, where, Path(folder))
    if answer.problem is not None:
        _refuse(answer.problem, where)
    sizes = {part: sum(one.num_bytes for one in program.arguments if one.part == part) for part in ("weights", "optimizer")}
    compute, traffic = _roofline(answer, where, kind=kind, parameters=program.num_parameters, weights=sizes["weights"],
                                 tokens=rows * length // where.chips, steps=max_new_tokens - 1)  # fmt: skip
    made = TpuProgram(
        model=model, model_hash=source.model_hash, kind=kind, topology=where, rows=rows, length=length,
        max_new_tokens=max_new_tokens if kind == "generate" else None, dtype=dtype, num_parameters=program.num_parameters,
        answer=answer, weight_bytes=sizes["weights"], optimizer_bytes=sizes["optimizer"],
        memory_bytes=where.facts.gpu.memory_bytes or 0, compute_seconds=compute, traffic_seconds=traffic,
        versions={name: installed_version(name) or "unknown" for name in NEEDED},
    )  # fmt: skip
    keep_program(_record(made))
    return made


def _lowered(source: ModelSource, kind: Kind, *, rows: int, length: int, max_new_tokens: int, dtype: str) -> Any:
    from upshift.xla.generation.options import XlaGeneration
    from upshift.xla.tpu.abstract_program import DTYPES, generation_program, training_program

    if dtype not in DTYPES:
        raise RequestError(f"--dtype {dtype!r} is not known; use {' or '.join(DTYPES)}")
    if kind == "train":
        return training_program(source, rows=rows, length=length, dtype=dtype)
    options = XlaGeneration(max_new_tokens=max_new_tokens)
    return generation_program(source, options, rows=rows, width=length, dtype=dtype)


def _record(program: TpuProgram) -> Record:
    """Return a record of a program that was compiled, not run: the memory is the compiler's, and only its own time
    was measured."""
    where = program.topology
    return Record(
        kind="trial", name="tpu program",
        plan={
            "model": program.model_hash, "device": f"tpu-{where.version}", "topology": where.name, "kind": program.kind,
            "rows": program.rows, "length": program.length, "max_new_tokens": program.max_new_tokens, "dtype": program.dtype,
        },
        predicted=None, flop_convention="as XLA's cost analysis counts", environment=environment(detect()),
        measured=Numbers(peak_gib=program.answer.peak_bytes / GIB, one_time_seconds=program.answer.compile_seconds),
        details={"memory_gib": program.memory_bytes / GIB, "roofline_seconds": program.roofline_seconds},
    )  # fmt: skip


def _need_compiler() -> None:
    for library in NEEDED:
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="xla-compile", purpose="upshift xla compile")


def _ask(request: CompileRequest, where: Topology, folder: Path) -> CompileAnswer:
    asked = folder / "request.json"
    answer = folder / "answer.json"
    asked.write_text(request.to_json(), encoding="utf-8")
    command = parent_process.command("upshift.xla.tpu.compiler_process", str(asked), str(answer))
    environment = tpu_compiler_environment(where.accelerator_type)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not answer.is_file():
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise JobFailed(f"the TPU compiler's process ended with {done.returncode}: {' '.join(last)[:600]}")
    return CompileAnswer.from_file(answer)


def _refuse(problem: str, where: Topology) -> None:
    said = "\n".join(line for line in problem.splitlines()[:SHOWN] if line.strip())
    if "RESOURCE_EXHAUSTED" in problem or "OOM" in problem:
        gib = (where.facts.gpu.memory_bytes or 0) / GIB
        room = f"a chip of {where.name} has {gib:.2f} GiB for a program"
        raise NothingFits(f"{room}; use fewer or shorter rows, or another chip. The compiler says:\n{said}")
    raise JobFailed(f"the TPU compiler refuses the program: {said}")


def _roofline(
    answer: CompileAnswer, where: Topology, *, kind: Kind, parameters: int, weights: int, tokens: int, steps: int
) -> tuple[float, float]:
    """Return the seconds of one chip, of arithmetic at the datasheet's bf16 rate and of traffic at its memory's. The
    compiler counts a loop's turn once, so for generation it is 2 FLOPs a parameter and token, and the weights read at
    each step."""
    peak = where.facts.gpu.peak
    assert peak is not None and peak.bf16 is not None and peak.memory_bytes_per_second is not None
    if kind == "train":
        return answer.flops / peak.bf16, answer.accessed_bytes / peak.memory_bytes_per_second
    return 2.0 * parameters * tokens / peak.bf16, (1 + steps) * weights / peak.memory_bytes_per_second
