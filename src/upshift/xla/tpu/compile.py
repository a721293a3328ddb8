"""Compile a training step or generation for a TPU, and report the memory it takes and how fast it can be at most.

This is ``upshift xla compile``. The compiler runs in a process of its own, with the environment variables that it needs.
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
from upshift.planning.analysis.tpu_programs import store_program
from upshift.record import Numbers, Record
from upshift.settings import tpu_compiler_environment
from upshift.units import GIB
from upshift.value import Value
from upshift.versions import installed_version
from upshift.xla.tpu.request import CompileAnswer, CompileRequest

GRIDS_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # v5e and v6e, by chips
GRIDS_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
NAMED_BY_CHIPS = ("v5e", "v6e")  # the size in a slice's name counts chips; for other versions it counts cores, two a chip
COMPILER_LIBRARIES = ("jax", "libtpu")
MAX_LINES = 12  # the most lines of the compiler's message
Kind = Literal["train", "generate"]


class Topology(Value):
    """Describe a slice of Cloud TPUs, by Google's name and by the compiler's."""

    name: str  # v5e-4
    version: str  # v5e; with tpu- in front it is a key of the hardware table
    grid: str  # 2x2
    chips: int

    @property
    def accelerator_type(self) -> str:
        """Return the name that TPU_ACCELERATOR_TYPE expects."""
        return self.name.replace("v5e-", "v5litepod-")

    @property
    def facts(self) -> GpuFacts:
        return TPUS[f"tpu-{self.version}"]


def read_topology(text: str) -> Topology:
    """Return the slice of a name such as v5e-4. Raise RequestError with the valid names."""
    match = re.fullmatch(r"(v\d+[a-z]?)-(\d+)", text.strip().lower())
    if match is None or f"tpu-{match[1]}" not in TPUS:
        versions = ", ".join(key.removeprefix("tpu-") for key in TPUS)
        raise RequestError(f"--topology {text!r} is not known; write a version ({versions}) and a size, such as v5e-4")
    version = match[1]
    size = int(match[2])
    is_named_by_chips = version in NAMED_BY_CHIPS
    grids = GRIDS_2D if is_named_by_chips else GRIDS_3D
    per_chip = 1 if is_named_by_chips else 2
    if size % per_chip or size // per_chip not in grids:
        sizes = ", ".join(str(chips * per_chip) for chips in grids)
        unit = "chips" if is_named_by_chips else "cores, two a chip"
        raise RequestError(f"--topology {text!r} is no slice that Google sells; sizes of {version} are {sizes} ({unit})")
    chips = size // per_chip
    grid = grids[chips]
    assert math.prod(map(int, grid.split("x"))) == chips
    return Topology(name=f"{version}-{size}", version=version, grid=grid, chips=chips)


class TpuProgram(Value):
    """Describe a compiled program. Bytes are of one chip.

    ``roofline_seconds``: the least time that its arithmetic and its memory traffic take."""

    model: str
    model_hash: str
    kind: Kind
    topology: Topology
    rows: int  # the rows of all chips
    length: int
    max_new_tokens: int | None
    dtype: str
    num_parameters: int
    answer: CompileAnswer
    weight_bytes: int
    optimizer_bytes: int
    memory_bytes: int  # available to a program on one chip
    compute_seconds: float
    traffic_seconds: float
    versions: dict[str, str]

    @property
    def roofline_seconds(self) -> float:
        return max(self.compute_seconds, self.traffic_seconds)


def compile_for_tpu(
    model: str,
    topology: str,
    *,
    kind: Kind = "train",
    rows: int | None = None,
    length: int = 512,
    max_new_tokens: int = 128,
    dtype: str = "bfloat16",
    on_step: Callable[[str], None] = lambda text: None,
) -> TpuProgram:
    """Compile a program and store its record. ``rows``: the sequences of all chips together; None: one for each chip.

    Raise NothingFits with the compiler's message if the program needs too much memory."""
    tpu_slice = read_topology(topology)
    _need_compiler()
    rows = tpu_slice.chips if rows is None else rows
    if rows % tpu_slice.chips:
        raise RequestError(f"--batch {rows} does not divide over {tpu_slice.chips} chips; use a multiple of {tpu_slice.chips}")
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow("upshift xla compile")
    source = find_model(model)
    on_step("Lowering to HLO")
    lowered = _lower_model(source, kind, rows=rows, length=length, max_new_tokens=max_new_tokens, dtype=dtype)
    on_step(f"Compiling for {tpu_slice.name}")
    answer = _compile(lowered, tpu_slice)
    weight_bytes = sum(argument.num_bytes for argument in lowered.arguments if argument.part == "weights")
    optimizer_bytes = sum(argument.num_bytes for argument in lowered.arguments if argument.part == "optimizer")
    compute, traffic = _roofline(
        answer,
        tpu_slice,
        kind=kind,
        parameters=lowered.num_parameters,
        weights=weight_bytes,
        tokens=rows * length // tpu_slice.chips,
        steps=max_new_tokens - 1,
    )
    program = TpuProgram(
        model=model,
        model_hash=source.model_hash,
        kind=kind,
        topology=tpu_slice,
        rows=rows,
        length=length,
        max_new_tokens=max_new_tokens if kind == "generate" else None,
        dtype=dtype,
        num_parameters=lowered.num_parameters,
        answer=answer,
        weight_bytes=weight_bytes,
        optimizer_bytes=optimizer_bytes,
        memory_bytes=tpu_slice.facts.gpu.memory_bytes or 0,
        compute_seconds=compute,
        traffic_seconds=traffic,
        versions={name: installed_version(name) or "unknown" for name in COMPILER_LIBRARIES},
    )
    store_program(_record(program))
    return program


def _compile(lowered: Any, tpu_slice: Topology) -> CompileAnswer:
    """Compile a lowered program. Raise NothingFits or JobFailed with the compiler's message if it has a problem."""
    with tempfile.TemporaryDirectory(prefix="upshift-tpu-") as folder:
        file = Path(folder) / "program.hlo"
        file.write_bytes(lowered.hlo)
        request = CompileRequest(
            program=str(file),
            version=tpu_slice.version,
            grid=tpu_slice.grid,
            chips=tpu_slice.chips,
            arguments=lowered.arguments,
            num_results=lowered.num_results,
        )
        answer = _run_compiler(request, tpu_slice, Path(folder))
    if answer.problem is not None:
        _raise_problem(answer.problem, tpu_slice)
    return answer


def _lower_model(source: ModelSource, kind: Kind, *, rows: int, length: int, max_new_tokens: int, dtype: str) -> Any:
    from upshift.xla.generation.options import XlaGeneration
    from upshift.xla.tpu.abstract_program import DTYPES, generation_program, training_program

    if dtype not in DTYPES:
        raise RequestError(f"--dtype {dtype!r} is not known; use {' or '.join(DTYPES)}")
    if kind == "train":
        return training_program(source, rows=rows, length=length, dtype=dtype)
    options = XlaGeneration(max_new_tokens=max_new_tokens)
    return generation_program(source, options, rows=rows, width=length, dtype=dtype)


def _record(program: TpuProgram) -> Record:
    """Return the record of a program that was compiled but not run. Only the time of the compilation is measured."""
    topology = program.topology
    return Record(
        kind="trial",
        name="tpu program",
        plan={
            "model": program.model_hash,
            "device": f"tpu-{topology.version}",
            "topology": topology.name,
            "kind": program.kind,
            "rows": program.rows,
            "length": program.length,
            "max_new_tokens": program.max_new_tokens,
            "dtype": program.dtype,
        },
        predicted=None,
        flop_convention="as XLA's cost analysis counts",
        environment=environment(detect()),
        measured=Numbers(peak_gib=program.answer.peak_bytes / GIB, one_time_seconds=program.answer.compile_seconds),
        details={"memory_gib": program.memory_bytes / GIB, "roofline_seconds": program.roofline_seconds},
    )


def _need_compiler() -> None:
    for library in COMPILER_LIBRARIES:
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="xla-compile", purpose="upshift xla compile")


def _run_compiler(request: CompileRequest, topology: Topology, folder: Path) -> CompileAnswer:
    request_path = folder / "request.json"
    answer_path = folder / "answer.json"
    request_path.write_text(request.to_json(), encoding="utf-8")
    command = parent_process.command("upshift.xla.tpu.compiler_process", str(request_path), str(answer_path))
    environment = tpu_compiler_environment(topology.accelerator_type)
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode or not answer_path.is_file():
        last = [line for line in process.stderr.splitlines() if line.strip()][-3:]
        raise JobFailed(f"the TPU compiler's process ended with {process.returncode}: {' '.join(last)[:600]}")
    return CompileAnswer.from_file(answer_path)


def _raise_problem(problem: str, topology: Topology) -> None:
    excerpt = "\n".join(line for line in problem.splitlines()[:MAX_LINES] if line.strip())
    if "RESOURCE_EXHAUSTED" in problem or "OOM" in problem:
        gib = (topology.facts.gpu.memory_bytes or 0) / GIB
        room = f"a chip of {topology.name} has {gib:.2f} GiB for a program"
        raise NothingFits(f"{room}; use fewer or shorter rows, or another chip. The compiler says:\n{excerpt}")
    raise JobFailed(f"the TPU compiler refuses the program: {excerpt}")


def _roofline(
    answer: CompileAnswer, topology: Topology, *, kind: Kind, parameters: int, weights: int, tokens: int, steps: int
) -> tuple[float, float]:
    """Return the seconds of one chip for arithmetic, at the datasheet's bf16 rate, and for traffic, at its memory rate.

    The compiler counts the body of a loop once. So generation is counted as 2 FLOPs for each parameter and token of the prompts,
    and as one read of the weights for each step."""
    peak = topology.facts.gpu.peak
    assert peak is not None and peak.bf16 is not None and peak.memory_bytes_per_second is not None
    if kind == "train":
        return answer.flops / peak.bf16, answer.accessed_bytes / peak.memory_bytes_per_second
    return 2.0 * parameters * tokens / peak.bf16, (1 + steps) * weights / peak.memory_bytes_per_second
