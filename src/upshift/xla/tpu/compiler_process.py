"""Compile the HLO of a TensorFlow function with libtpu's compiler, through jax. No TPU and no network are needed.

    python -m upshift.xla.tpu.compiler_process REQUEST.json ANSWER.json

XLA's own partitioner divides a program among several chips, as its arguments say. Every chip has a copy of each argument that is
not divided, and sums over chips become all-reduces.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from upshift.atomic_file import write_whole
from upshift.internals.jax_names import BINDINGS, COMPILER, IR, MLIR, XLA_CLIENT
from upshift.xla.tpu.request import CompileAnswer, CompileRequest

EXCHANGE = re.compile(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
TWO_CORES_AS_ONE = "megacore"  # by default a program sees the two cores of a v4 chip as one


def compile_program(request: CompileRequest, dump: Path) -> CompileAnswer:
    """Compile a program. ``dump``: an empty folder for the text of the program that the compiler writes."""
    import numpy as np
    from jax.experimental import topologies

    cores = {"chip_config_name": TWO_CORES_AS_ONE} if request.version == "v4" else {}
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=f"{request.version}:{request.grid}", **cores)
    devices: tuple[Any, ...] = tuple(slice_.devices[: request.chips])
    ir = IR.get()
    options = COMPILER.get().get_compile_options(
        num_replicas=1, num_partitions=request.chips, device_assignment=np.arange(request.chips).reshape(1, -1)
    )
    options.executable_build_options.use_spmd_partitioning = request.chips > 1
    options.executable_build_options.use_shardy_partitioner = False
    # The text is not read from the executable, because jax's XLA rejects programs of a newer compiler (sparse cores of v6e).
    options.executable_build_options.debug_options.xla_dump_to = str(dump)
    options.executable_build_options.debug_options.xla_dump_hlo_as_text = True
    with MLIR.get().make_ir_context(), ir.Location.unknown():
        module = _read_stablehlo(Path(request.program).read_bytes())
        text = str(module)
        _annotate(module, request)
        start = time.perf_counter()
        try:
            compiled = devices[0].client.compile(module, XLA_CLIENT.get().DeviceList(devices), options)
        except Exception as error:  # XlaRuntimeError has no stable import path; its message is the answer
            return CompileAnswer(problem=str(error), compile_seconds=time.perf_counter() - start)
    return _answer(compiled, time.perf_counter() - start, text, dump)


def _read_stablehlo(hlo: bytes) -> Any:
    """Read TensorFlow's HLO as StableHLO. Remove mhlo.copy, which changes nothing and which the compiler does not know."""
    ir = IR.get()
    module = ir.Module.parse(BINDINGS.get().mlir.hlo_to_stablehlo(hlo))
    copies = []

    def visit(operation: Any) -> Any:
        if operation.name == "mhlo.copy":
            operation.results[0].replace_all_uses_with(operation.operands[0])
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for copy in copies:
        copy.erase()
    return module


def _annotate(module: Any, request: CompileRequest) -> None:
    """Mark which results overwrite arguments, and how arguments are divided among the chips."""
    ir = IR.get()
    number = ir.IntegerType.get_signless(32)
    replicated = ir.StringAttr.get("{replicated}")
    is_divided = request.chips > 1
    attributes: list[Any] = []
    (main,) = (function for function in module.body.operations if function.attributes["sym_name"].value == "main")
    for argument in request.arguments:
        argument_attributes: dict[str, Any] = {}
        if argument.becomes is not None:
            argument_attributes["tf.aliasing_output"] = ir.IntegerAttr.get(number, argument.becomes)
        if is_divided:
            position = len(attributes)
            argument_attributes["mhlo.sharding"] = (
                _split_by_rows(main, position, request.chips) if argument.divided else replicated
            )
        attributes.append(ir.DictAttr.get(argument_attributes))
    if len(main.type.inputs) != len(attributes) or len(main.type.results) != request.num_results:
        raise RuntimeError(f"the program has {len(main.type.inputs)} arguments, of {len(attributes)} that it was made with")
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    if is_divided:
        results = [ir.DictAttr.get({"mhlo.sharding": replicated})] * request.num_results
        main.attributes["res_attrs"] = ir.ArrayAttr.get(results)
    module_attributes = {
        "sym_name": ir.StringAttr.get("upshift"),
        "mhlo.num_replicas": ir.IntegerAttr.get(number, 1),
        "mhlo.num_partitions": ir.IntegerAttr.get(number, request.chips),
    }
    for name, value in module_attributes.items():
        module.operation.attributes[name] = value


def _split_by_rows(main: Any, position: int, chips: int) -> Any:
    """Return the sharding that divides the first dimension of an argument of ``main``."""
    shape = ",".join([str(chips), *["1"] * (main.type.inputs[position].rank - 1)])
    return IR.get().StringAttr.get(f"{{devices=[{shape}]<=[{chips}]}}")


def _answer(compiled: Any, seconds: float, text: str, dump: Path) -> CompileAnswer:
    memory = compiled.get_compiled_memory_stats()
    cost = compiled.cost_analysis()
    (optimized,) = dump.glob("*.after_optimizations.txt")
    exchanges = len(EXCHANGE.findall(optimized.read_text(encoding="utf-8")))
    return CompileAnswer(
        compile_seconds=seconds,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
        exchanges=exchanges,
        num_custom_calls=text.count("custom_call"),
        num_dynamic_dimensions=len(re.findall(r"tensor<[^>]*\?", text)),
    )


def main() -> None:
    request_path, answer_path = map(Path, sys.argv[1:3])
    answer = compile_program(CompileRequest.from_file(request_path), answer_path.parent / "dump")
    write_whole(answer_path, answer.to_json().encode())


if __name__ == "__main__":
    main()
