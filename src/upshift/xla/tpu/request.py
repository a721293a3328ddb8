"""Define the request and the answer of the compiler's process. This module imports only what that process needs."""

from __future__ import annotations

from typing import Literal

from upshift.value import Value

Part = Literal["weights", "optimizer", "data"]


class Argument(Value):
    """Describe an argument of the program.

    ``becomes``: the index of the result that overwrites it. ``divided``: its first dimension is divided among the chips."""

    name: str
    part: Part
    num_bytes: int
    becomes: int | None = None
    divided: bool = False


class CompileRequest(Value):
    program: str  # file of a serialized HLO module
    version: str
    grid: str
    chips: int
    arguments: tuple[Argument, ...]
    num_results: int


class CompileAnswer(Value):
    """Hold the compiler's answer. Bytes and FLOPs are of one chip. ``problem`` is the compiler's message if it fails."""

    problem: str | None = None
    compile_seconds: float = 0.0
    peak_bytes: int = 0
    argument_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float = 0.0
    accessed_bytes: float = 0.0
    exchanges: int = 0  # all-reduces and their like among chips
    num_custom_calls: int = 0
    num_dynamic_dimensions: int = 0
