"""``upshift quantize``: a directory with weights of 8 or 4 bits, and how near its logits are to those before.

torch:    what transformers loads: 8 bits by torchao, weights scaled by output; 4 bits by bitsandbytes (NF4).
openvino: what OpenVINO GenAI, optimum-intel and Upshift load: 8 bits scaled by output; 4 bits by groups, calibrated on the
          user's own texts (AWQ, arXiv:2306.00978, and scale estimation, both of NNCF).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from upshift.errors import MissingExtra, RequestError
from upshift.hardware import detect
from upshift.inference.contestant import Contest, Entrants, Run
from upshift.inference.engines import check_engine, is_installed
from upshift.inference.generation.contest import run
from upshift.inference.generation.engines.openvino_export import export, int4_weights
from upshift.inference.generation.prompts import Prompts
from upshift.inference.generation.task import GenerationTask
from upshift.inference.openvino_model import int8_weights, make
from upshift.inference.sample import spread
from upshift.inference.setup import EngineName, EngineSetup
from upshift.inference.standing import Standing
from upshift.inference.weights import OPENVINO_FILE, engine_folder, find_weights, weights_size
from upshift.models.source import ModelSource
from upshift.value import Value
from upshift.whole_file import write_whole

Bits = Literal[4, 8]
SAMPLE_TEXTS = 256  # of a file
FITTED, FITTED_TOKENS = 64, 256  # texts that 4 bits are fitted to, and tokens of each
HELD_OUT, HELD_OUT_TOKENS = 8, 64  # texts that the report is made on, and tokens of each before those that are compared
FOLLOWED = 16
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")  # config and tokenizer
REPORT = "upshift_quality.json"


class Quality(Value):
    """What rounding did, on texts that it was not fitted to; ``before`` and ``after`` ran one after the other."""

    model: str
    bits: Bits
    engine: EngineName
    bytes_before: int
    bytes_after: int
    calibrated_on: int  # texts; 0: rounded without any
    before: Run  # transformers, weights as they were, in fp32
    after: Run


def quantize(source: ModelSource, texts: list[str], output: Path, *, bits: Bits, engine: EngineName) -> Quality:
    """``output`` is put in place whole, report included. Raises RequestError for too few texts."""
    ids = [row for row in Prompts(source).tokenizer(texts).input_ids if len(row) > 1]
    if len(ids) < 2:
        raise RequestError("--texts needs two texts or more: some to fit to, others to measure on; write a text a line")
    held_out = spread(ids, min(HELD_OUT, len(ids) // 2))
    fitted = [row[:FITTED_TOKENS] for row in ids if row not in held_out]
    temporary = output.with_name(f"{output.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    calibrated = WRITERS[engine](source, spread(fitted, FITTED), bits, temporary)
    made = find_weights(str(temporary))
    with tempfile.TemporaryDirectory(prefix="upshift-quantize-") as folder:
        before, after = _compare(source, made, engine, [row[:HELD_OUT_TOKENS] for row in held_out], Path(folder))
    found = Quality(
        model=source.reference, bits=bits, engine=engine, calibrated_on=calibrated, before=before, after=after,
        bytes_before=weights_size(source), bytes_after=weights_size(made),
    )  # fmt: skip
    write_whole(temporary / REPORT, found.to_json())
    shutil.rmtree(output, ignore_errors=True)
    temporary.replace(output)
    return found


def choose_engine(source: ModelSource, bits: Bits, asked: str | None) -> EngineName:
    """OpenVINO where it is installed, as it is what is fast on a CPU. Raises RequestError for what is not possible."""
    if asked is not None and asked not in WRITERS:
        raise RequestError(f"--engine {asked!r} writes no weights here; use one of {', '.join(WRITERS)}")
    name = check_engine("generate", asked or ("openvino" if is_installed("openvino") else "torch"), source, detect().cpu_alone())
    library, extra = ("torchao", "quant") if bits == 8 else ("bitsandbytes", "bitsandbytes")
    if name == "torch" and find_spec(library) is None:
        raise MissingExtra(library=library, extra=extra, purpose=f"--engine torch --bits {bits}")
    return name


def check_output(output: Path, *, overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise RequestError(f"--output {output}: the folder {output.parent} does not exist; make it first")
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (overwrite and (output / REPORT).is_file())):
        raise RequestError(f"--output {output} exists; give another name, or --overwrite what an earlier upshift quantize wrote")


def _write_torch(source: ModelSource, fitted: list[list[int]], bits: Bits, folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    from upshift.loading.load import load_source

    load_source(source, quantize="int4" if bits == 4 else "int8", model_class=AutoModelForCausalLM).save_pretrained(folder)
    _copy_beside(source, folder, leave=("config.json",))
    return 0


def _write_openvino(source: ModelSource, fitted: list[list[int]], bits: Bits, folder: Path) -> int:
    """Made beside the fp32 export, which races keep."""
    made = engine_folder("generate", source, "openvino") / ("int8.xml" if bits == 8 else "int4-calibrated.xml")
    if bits == 4:
        made.unlink(missing_ok=True)  # of other texts
    make(made, partial(export, source), int8_weights if bits == 8 else partial(int4_weights, texts=fitted))
    for suffix in (".xml", ".bin"):
        shutil.copy(made.with_suffix(suffix), (folder / OPENVINO_FILE).with_suffix(suffix))
    _copy_beside(source, folder)
    return len(fitted) if bits == 4 else 0


WRITERS: dict[EngineName, Callable[[ModelSource, list[list[int]], Bits, Path], int]] = {
    "torch": _write_torch,
    "openvino": _write_openvino,
}


def _copy_beside(source: ModelSource, folder: Path, *, leave: tuple[str, ...] = ()) -> None:
    assert source.directory is not None
    for pattern in BESIDE:
        for path in source.directory.glob(pattern):
            if path.name not in leave and not path.name.endswith(".index.json"):
                shutil.copy(path, folder)


def _compare(
    source: ModelSource, made: ModelSource, engine: EngineName, prompts: list[list[int]], folder: Path
) -> tuple[Run, Run]:
    """Both follow the tokens that the first chooses."""
    cpu, rows = detect().cpu, len(prompts)
    threads = cpu.usable_cores if cpu else 1
    setup = EngineSetup(engine="torch", precision="fp32", threads=threads, batch=rows, hint="latency")
    asked = GenerationTask(new_tokens=FOLLOWED).to_json()
    sample, reference = folder / "sample.json", folder / "reference.npy"
    sample.write_text(json.dumps(prompts))
    found = []
    for one, contestant in ((source, setup), (made, setup.changed(engine=engine, precision="stored"))):
        contest = Contest(task="generate", source=one, asked=asked, pad=0, batches=(rows,), hint="latency")
        entrants = Entrants(contest=contest, setups=(contestant,), sample=sample, reference=reference)
        found += run(entrants, contestant, Standing(entrants))
    return found[0], found[1]
