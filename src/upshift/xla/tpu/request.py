"""Define the request and the answer of the process that compiles. Imports nothing that the compiler's process does
not need."""

from __future__ import annotations

from typing import Literal

from upshift.value import Value

Part = Literal["weights", "optimizer", "data"]


class Argument(Value):
    """An argument of the program. ``becomes`` is the result that is written over it. ``divided``: over the chips, by
    its first dimension."""

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
    """The compiler's answer for one chip. ``problem`` holds the compiler's own words if it refuses."""

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
