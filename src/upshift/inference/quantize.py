"""``upshift quantize``: a directory with weights of 8 or 4 bits, and how near what it computes is to what came out before.

torch:    what transformers loads: 8 bits by torchao, weights scaled by output; 4 bits by bitsandbytes (NF4).
openvino: what optimum-intel, Upshift and, of language models, OpenVINO GenAI load; of encoder-decoders Upshift alone. How it
          rounds is the task's: generation/rounding.py, encoding/rounding.py.
"""

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
from upshift.inference.openvino_runtime import make
from upshift.inference.race.early_stopping import Standing
from upshift.inference.race.types import Contest, Entrants, Run, spread
from upshift.inference.registry import EngineName, EngineSetup, Task, check_engine, is_installed
from upshift.inference.resumable_output import check_folder
from upshift.inference.weights import engine_folder, find_weights, weights_size
from upshift.loading.output_lock import check_free, lock_file_beside, locked
from upshift.models.source import ModelSource
from upshift.value import Value

Bits = Literal[4, 8]
SAMPLE_TEXTS = 256  # of a file
FITTED, FITTED_TOKENS = 64, 256  # texts that rounding is fitted to, and tokens of each
HELD_OUT = 8  # texts that the report is made on
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*/config.json")  # config, tokenizer, what comes behind the model
REPORT = "upshift_quality.json"
WRITERS: tuple[EngineName, ...] = ("torch", "openvino")


class Quality(Value):
    """The effect of rounding, on texts that it was not fitted to; ``before`` and ``after`` ran one after the other."""

    model: str
    task: Task
    bits: Bits
    engine: EngineName
    bytes_before: int
    bytes_after: int
    calibrated_on: int  # texts; 0: rounded without any
    before: Run  # transformers, weights as they were, in fp32
    after: Run


class Part(NamedTuple):
    """An OpenVINO model of a directory. ``folder``: below the engine's own, where races keep it in fp32. ``rounded``: from the
    bits, OpenVINO's model in fp32 and token ids to fit to, to the rounded model."""

    file: str
    export: Callable[[], Any]
    rounded: Callable[[Bits, Any, list[list[int]]], Any]
    folder: str = ""


@dataclass(frozen=True)
class Rounding:
    """The inputs of rounding that depend on the task. ``fitted``: the numbers of bits whose rounding is fitted to texts."""

    task: Task
    ids: list[list[int]]  # of the user's texts
    held_out_tokens: int  # of a text
    asked: str  # of the contest between before and after
    pad: int
    batch: int
    run: Callable[[Entrants, EngineSetup, Standing], list[Run]]
    model_class: Any  # of transformers
    parts: tuple[Part, ...]
    fitted: tuple[Bits, ...]


def quantize(source: ModelSource, rounding: Rounding, output: Path, *, bits: Bits, engine: EngineName) -> Quality:
    """``output`` is put in place whole, report included. Raises RequestError for too few texts."""
    ids = list(map(list, dict.fromkeys(tuple(row) for row in rounding.ids if len(row) > 1)))
    if len(ids) < 2:
        raise RequestError("--texts needs two different texts or more: some to fit to, others to measure on; write a text a line")
    held_out = spread(ids, min(HELD_OUT, len(ids) // 2))
    fitted = [row[:FITTED_TOKENS] for row in ids if row not in held_out]
    with locked(output, lock_file_beside(output)):
        return _quantized(source, rounding, output, held_out, fitted, bits=bits, engine=engine)


def _quantized(
    source: ModelSource, rounding: Rounding, output: Path, held_out: list[list[int]], fitted: list[list[int]], *, bits: Bits,
    engine: EngineName,
) -> Quality:  # fmt: skip
    temporary = output.with_name(f"{output.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write = _write_torch if engine == "torch" else _write_openvino
    calibrated = write(source, rounding, spread(fitted, FITTED), bits, temporary)
    made = find_weights(str(temporary))
    with tempfile.TemporaryDirectory(prefix="upshift-quantize-") as folder:
        prompts = [row[: rounding.held_out_tokens] for row in held_out]
        before, after = _compare(source, made, engine, rounding, prompts, Path(folder))
    found = Quality(
        model=source.reference, task=rounding.task, bits=bits, engine=engine, calibrated_on=calibrated,
        before=before, after=after, bytes_before=weights_size(source), bytes_after=weights_size(made),
    )  # fmt: skip
    write_whole(temporary / REPORT, found.to_json())
    shutil.rmtree(output, ignore_errors=True)
    temporary.replace(output)
    return found


def choose_engine(task: Task, source: ModelSource, bits: Bits, asked: str | None) -> EngineName:
    """OpenVINO where it is installed, as it is what is fast on a CPU. Raises RequestError for what is not possible."""
    if asked is not None and asked not in WRITERS:
        raise RequestError(f"--engine {asked!r} writes no weights here; use one of {', '.join(WRITERS)}")
    name = check_engine(task, asked or ("openvino" if is_installed("openvino") else "torch"), source, detect().cpu_alone())
    library, extra = ("torchao", "quant") if bits == 8 else ("bitsandbytes", "bitsandbytes")
    if name == "torch" and find_spec(library) is None:
        raise MissingExtra(library=library, extra=extra, purpose=f"--engine torch --bits {bits}")
    return name


def check_output(output: Path, *, overwrite: bool) -> None:
    check_folder(output)
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (overwrite and (output / REPORT).is_file())):
        raise RequestError(f"--output {output} exists; give another name, or --overwrite what an earlier upshift quantize wrote")
    check_free(output, lock_file_beside(output))


def _write_torch(source: ModelSource, rounding: Rounding, fitted: list[list[int]], bits: Bits, folder: Path) -> int:
    from upshift.loading.load import load_source

    model = load_source(source, quantize="int4" if bits == 4 else "int8", model_class=rounding.model_class)
    exclusive_lock = [name for name in model.state_dict() if "." not in name]
    if bits == 8 and exclusive_lock:  # transformers splits each name at its last dot (torchao 0.18, safetensors_support.py)
        raise RequestError(
            f"transformers could not load the 8 bits of {type(model).__name__} again, which torchao writes, for the name of its "
            f"tensor {exclusive_lock[0]}; use --engine openvino, or --bits 4"
        )
    model.save_pretrained(folder)
    _copy_beside(source, folder, leave=("config.json",))
    return 0


def _write_openvino(source: ModelSource, rounding: Rounding, fitted: list[list[int]], bits: Bits, folder: Path) -> int:
    """Made beside the fp32 export, which races keep."""
    for part in rounding.parts:
        made = engine_folder(rounding.task, source, "openvino") / part.folder / f"int{bits}-written.xml"
        made.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(made):
            made.unlink(missing_ok=True)  # of other texts
            make(made, part.export, partial(_rounded, part, bits, fitted))
            for suffix in (".xml", ".bin"):
                shutil.copy(made.with_suffix(suffix), (folder / part.file).with_suffix(suffix))
                made.with_suffix(suffix).unlink()
    _copy_beside(source, folder)
    return len(fitted) if bits in rounding.fitted else 0


def _rounded(part: Part, bits: Bits, fitted: list[list[int]], model: Any) -> Any:
    return part.rounded(bits, model, fitted)


def _copy_beside(source: ModelSource, folder: Path, *, leave: tuple[str, ...] = ()) -> None:
    assert source.directory is not None
    for pattern in BESIDE:
        for path in source.directory.glob(pattern):
            name = path.relative_to(source.directory)
            if str(name) not in leave and not path.name.endswith(".index.json"):
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(path, folder / name)


def _compare(
    source: ModelSource, made: ModelSource, engine: EngineName, rounding: Rounding, texts: list[list[int]], folder: Path
) -> tuple[Run, Run]:
    """On the same texts; of a language model both follow the tokens that the first chooses."""
    cpu = detect().cpu
    threads = cpu.usable_cores if cpu else 1
    setup = EngineSetup(engine="torch", precision="fp32", threads=threads, batch=rounding.batch, hint="latency")
    sample, reference = folder / "sample.json", folder / "reference.npy"
    sample.write_text(json.dumps(texts))
    found = []
    for one, contestant in ((source, setup), (made, setup.changed(engine=engine, precision="stored"))):
        contest = Contest(
            task=rounding.task, source=one, asked=rounding.asked, pad=rounding.pad, batches=(rounding.batch,), hint="latency"
        )
        entrants = Entrants(contest=contest, setups=(contestant,), sample=sample, reference=reference)
        found += rounding.run(entrants, contestant, Standing(entrants))
    return found[0], found[1]
