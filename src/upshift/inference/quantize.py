"""Quantize the weights of a model to 8 or 4 bits for ``upshift quantize``, and compare its results with the original's.

torch:    for transformers. 8 bits by torchao, scaled by output channel; 4 bits by bitsandbytes (NF4).
openvino: for optimum-intel and Upshift, and for OpenVINO GenAI with language models. Encoder-decoders load in Upshift only.
          The rounding depends on the task: generation/quantize.py, encoding/quantize.py."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from upshift.atomic_file import exclusive_lock, write_whole
from upshift.errors import MissingExtra, RequestError
from upshift.hardware import detect
from upshift.inference.openvino_runtime import make_model_file
from upshift.inference.race.early_stopping import EarlyStopping
from upshift.inference.race.types import Contest, RaceRequest, Run, pick_evenly
from upshift.inference.registry import ENGINES, EngineName, EngineSetup, Task, check_engine, is_installed
from upshift.inference.resumable_output import check_folder
from upshift.inference.weights import engine_folder, find_weights, weights_size
from upshift.loading.output_lock import check_free, lock_file_beside, locked
from upshift.models.source import ModelSource
from upshift.value import Value

Bits = Literal[4, 8]
SAMPLE_TEXTS = 256  # the most texts that are read from a file
CALIBRATION_TEXTS = 64  # the texts that rounding is fitted to
CALIBRATION_TOKENS = 256  # tokens of each of these texts
HELD_OUT = 8  # texts that the report is measured on
COPIED_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*/config.json")  # config, tokenizer, modules after the model
REPORT = "upshift_quality.json"
WRITERS: tuple[EngineName, ...] = ("torch", "openvino")


class QuantizationReport(Value):
    """The effect of quantization on texts that it was not fitted to. ``before`` and ``after`` ran one after the other."""

    model: str
    task: Task
    bits: Bits
    engine: EngineName
    bytes_before: int
    bytes_after: int
    calibrated_on: int  # texts; 0: rounded without any
    before: Run  # transformers with the original weights in fp32
    after: Run


class ModelFile(NamedTuple):
    """One of the OpenVINO files of a quantized model.

    ``export`` returns the OpenVINO model in fp32. ``quantize`` returns the quantized model, from the bits, the model in fp32
    and token ids to fit to. ``folder`` is where races keep the fp32 file, below the folder of the engine."""

    file: str
    export: Callable[[], Any]
    quantize: Callable[[Bits, Any, list[list[int]]], Any]
    folder: str = ""


@dataclass(frozen=True)
class Rounding:
    """The inputs of quantization that depend on the task.

    ``ids``: token ids of the user's texts.
    ``held_out_tokens``: tokens of each text that the report is measured on.
    ``task_options``: the options of the comparison, as in a race.
    ``run_setup``: runs one setup on the texts.
    ``model_class``: the class of transformers that loads the model, or None for the default.
    ``fitted_bits``: the numbers of bits whose rounding is fitted to texts."""

    task: Task
    ids: list[list[int]]
    held_out_tokens: int
    task_options: str
    pad: int
    batch: int
    run_setup: Callable[[RaceRequest, EngineSetup, EarlyStopping], list[Run]]
    model_class: Any
    files: tuple[ModelFile, ...]
    fitted_bits: tuple[Bits, ...]


def quantize(source: ModelSource, rounding: Rounding, output: Path, *, bits: Bits, engine: EngineName) -> QuantizationReport:
    """Write the quantized model and its report to the folder ``output``.

    The folder appears only when it is complete. Raise RequestError for too few texts."""
    ids = list(map(list, dict.fromkeys(tuple(row) for row in rounding.ids if len(row) > 1)))
    if len(ids) < 2:
        raise RequestError("--texts needs two different texts or more: some to fit to, others to measure on; write a text a line")
    held_out = pick_evenly(ids, min(HELD_OUT, len(ids) // 2))
    calibration = [row[:CALIBRATION_TOKENS] for row in ids if row not in held_out]
    with locked(output, lock_file_beside(output)):
        return _write_and_compare(source, rounding, output, held_out, calibration, bits=bits, engine=engine)


def _write_and_compare(
    source: ModelSource,
    rounding: Rounding,
    output: Path,
    held_out: list[list[int]],
    calibration: list[list[int]],
    *,
    bits: Bits,
    engine: EngineName,
) -> QuantizationReport:
    temporary = output.with_name(f"{output.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        report = _write_to(temporary, source, rounding, held_out, calibration, bits=bits, engine=engine)
    except BaseException:  # also an interrupt
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(output, ignore_errors=True)
    temporary.replace(output)
    return report


def _write_to(
    temporary: Path,
    source: ModelSource,
    rounding: Rounding,
    held_out: list[list[int]],
    calibration: list[list[int]],
    *,
    bits: Bits,
    engine: EngineName,
) -> QuantizationReport:
    """Write the quantized model and its report into a folder that exists."""
    write = _write_torch if engine == "torch" else _write_openvino
    calibrated_on = write(source, rounding, pick_evenly(calibration, CALIBRATION_TEXTS), bits, temporary)
    quantized = find_weights(str(temporary))
    with tempfile.TemporaryDirectory(prefix="upshift-quantize-") as folder:
        texts = [row[: rounding.held_out_tokens] for row in held_out]
        before, after = _compare(source, quantized, engine, rounding, texts, Path(folder))
    report = QuantizationReport(
        model=source.reference,
        task=rounding.task,
        bits=bits,
        engine=engine,
        calibrated_on=calibrated_on,
        before=before,
        after=after,
        bytes_before=weights_size(source),
        bytes_after=weights_size(quantized),
    )
    write_whole(temporary / REPORT, report.to_json())
    return report


def choose_engine(task: Task, source: ModelSource, bits: Bits, requested: str | None) -> EngineName:
    """Return the requested engine, or without a request OpenVINO if it is installed, because it is fast on CPUs.

    Raise RequestError if the engine cannot write or load such weights."""
    if requested is not None and requested not in WRITERS:
        raise RequestError(f"--engine {requested!r} writes no weights here; use one of {', '.join(WRITERS)}")
    default = "openvino" if is_installed("openvino") and task in ENGINES["openvino"].factories else "torch"
    name = check_engine(task, requested or default, source, detect().cpu_alone())
    library, extra = ("torchao", "quant") if bits == 8 else ("bitsandbytes", "bitsandbytes")
    if name == "torch" and find_spec(library) is None:
        raise MissingExtra(library=library, extra=extra, purpose=f"--engine torch --bits {bits}")
    return name


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise RequestError if the output folder cannot be written, or holds files that are not ours."""
    check_folder(output)
    has_files = output.is_dir() and any(output.iterdir())
    is_ours = (output / REPORT).is_file()
    if output.is_file() or (has_files and not (overwrite and is_ours)):
        raise RequestError(f"--output {output} exists; give another name, or --overwrite what an earlier upshift quantize wrote")
    check_free(output, lock_file_beside(output))


def _write_torch(source: ModelSource, rounding: Rounding, calibration: list[list[int]], bits: Bits, folder: Path) -> int:
    """Write the weights for transformers. Return the number of texts that they are fitted to: none."""
    from upshift.loading.load import load_source

    model = load_source(source, quantize="int4" if bits == 4 else "int8", model_class=rounding.model_class)
    undotted_names = [name for name in model.state_dict() if "." not in name]
    if bits == 8 and undotted_names:  # transformers splits each name at its last dot (torchao 0.18, safetensors_support.py)
        raise RequestError(
            f"transformers could not load the 8 bits of {type(model).__name__} again, which torchao writes, for the name of its "
            f"tensor {undotted_names[0]}; use --engine openvino, or --bits 4"
        )
    model.save_pretrained(folder)
    _copy_other_files(source, folder, skip=("config.json",))
    return 0


def _write_openvino(source: ModelSource, rounding: Rounding, calibration: list[list[int]], bits: Bits, folder: Path) -> int:
    """Write the OpenVINO files. Return the number of texts that they are fitted to.

    Each file is made beside the fp32 file, which races keep."""
    for model_file in rounding.files:
        path = engine_folder(rounding.task, source, "openvino") / model_file.folder / f"int{bits}-written.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path):
            path.unlink(missing_ok=True)  # it may be fitted to other texts
            try:
                make_model_file(path, model_file.export, partial(_quantize_model, model_file, bits, calibration))
                for suffix in (".xml", ".bin"):
                    shutil.copy(path.with_suffix(suffix), (folder / model_file.file).with_suffix(suffix))
            finally:
                for suffix in (".xml", ".bin"):
                    path.with_suffix(suffix).unlink(missing_ok=True)
    _copy_other_files(source, folder)
    return len(calibration) if bits in rounding.fitted_bits else 0


def _quantize_model(model_file: ModelFile, bits: Bits, calibration: list[list[int]], model: Any) -> Any:
    return model_file.quantize(bits, model, calibration)


def _copy_other_files(source: ModelSource, folder: Path, *, skip: tuple[str, ...] = ()) -> None:
    """Copy the files of a model that are no weights, except those in ``skip``."""
    assert source.directory is not None
    for pattern in COPIED_FILES:
        for path in source.directory.glob(pattern):
            name = path.relative_to(source.directory)
            if str(name) not in skip and not path.name.endswith(".index.json"):
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(path, folder / name)


def _compare(
    source: ModelSource, quantized: ModelSource, engine: EngineName, rounding: Rounding, texts: list[list[int]], folder: Path
) -> tuple[Run, Run]:
    """Run the original and the quantized model on the same texts.

    Both language models follow the tokens that the original chooses."""
    cpu = detect().cpu
    threads = cpu.usable_cores if cpu else 1
    original_setup = EngineSetup(engine="torch", precision="fp32", threads=threads, batch=rounding.batch, hint="latency")
    quantized_setup = original_setup.changed(engine=engine, precision="stored")
    sample = folder / "sample.json"
    reference = folder / "reference.npy"
    sample.write_text(json.dumps(texts))
    runs = []
    for model, setup in ((source, original_setup), (quantized, quantized_setup)):
        contest = Contest(
            task=rounding.task,
            source=model,
            asked=rounding.task_options,
            pad=rounding.pad,
            batches=(rounding.batch,),
            hint="latency",
        )
        request = RaceRequest(contest=contest, setups=(setup,), sample=sample, reference=reference)
        runs += rounding.run_setup(request, setup, EarlyStopping(request))
    return runs[0], runs[1]
