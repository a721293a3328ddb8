"""Does a training step, or generation, of a model of 1.24 B parameters fit on TPUs: what Google's compiler says, without a TPU.

    python benchmarks/cases/xla_compile.py [--quick] [--only "train 256 v5e-4,generate v6e-4"]

The shape is Llama 3.2 1B's. A program is compiled ahead of time, for four chips, computed in bfloat16; nothing runs. Rows have
the highest moment of a chip's memory, what the compiler counted as dynamic dimensions and custom calls (0, or a rule is broken),
the exchanges between chips, its seconds, and the least time by the datasheet's rates. Where a program does not fit, the row has
the compiler's own words.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.errors import NothingFits
from upshift.hardware import detect
from upshift.record import Numbers
from upshift.units import GIB
from upshift.xla.tpu.compile import compile_for_tpu

CLAIMS = (
    Claim(
        name="fits", text="a training step of 4 x 256 tokens of a model of 1.24 B parameters fits on four v5e chips",
        ours="highest moment of a chip", baseline="its memory", options="--only 'train 256 v5e-4'", better="lower", goal=1.0,
        unit="of the memory", of=Source(row="train 256 v5e-4", value="measured.peak_gib"),
        over=Source(row="train 256 v5e-4", value="details.memory_gib"),
    ),
)  # fmt: skip
FIGURES = (
    Figure(name="train-256-v5e", of=Source(row="train 256 v5e-4", value="measured.peak_gib")),
    Figure(name="train-256-v5e-seconds", of=Source(row="train 256 v5e-4", value="measured.one_time_seconds")),
    Figure(name="train-256-v5e-least", of=Source(row="train 256 v5e-4", value="details.least_milliseconds")),
    Figure(name="train-512-v6e", of=Source(row="train 512 v6e-4", value="measured.peak_gib")),
    Figure(name="train-512-v6e-seconds", of=Source(row="train 512 v6e-4", value="measured.one_time_seconds")),
    Figure(name="train-512-v6e-least", of=Source(row="train 512 v6e-4", value="details.least_milliseconds")),
    Figure(name="generate-v5e", of=Source(row="generate v5e-4", value="measured.peak_gib")),
    Figure(name="generate-v5e-seconds", of=Source(row="generate v5e-4", value="measured.one_time_seconds")),
    Figure(name="generate-v5e-least", of=Source(row="generate v5e-4", value="details.least_milliseconds")),
    Figure(name="generate-v6e", of=Source(row="generate v6e-4", value="measured.peak_gib")),
    Figure(name="generate-v6e-seconds", of=Source(row="generate v6e-4", value="measured.one_time_seconds")),
    Figure(name="generate-v6e-least", of=Source(row="generate v6e-4", value="details.least_milliseconds")),
)
TABLES = (
    Table(
        name="programs",
        header=("program", "slice", "highest moment, GiB a chip", "of", "compiled in", "no faster than"),
        rows=(
            ("training step, 4 x 512 tokens", "v6e-4", "{train-512-v6e:.2f}", "31.25",
             "{train-512-v6e-seconds:.0f} s", "{train-512-v6e-least:.0f} ms"),
            ("training step, 4 x 512 tokens", "v5e-4", "does not fit", "15.75", "", ""),
            ("training step, 4 x 256 tokens", "v5e-4", "{train-256-v5e:.2f}", "15.75",
             "{train-256-v5e-seconds:.0f} s", "{train-256-v5e-least:.0f} ms"),
            ("generation, 4 prompts of 128 tokens, 32 new", "v5e-4", "{generate-v5e:.2f}", "15.75",
             "{generate-v5e-seconds:.0f} s", "{generate-v5e-least:.0f} ms"),
            ("generation, 4 prompts of 128 tokens, 32 new", "v6e-4", "{generate-v6e:.2f}", "31.25",
             "{generate-v6e-seconds:.0f} s", "{generate-v6e-least:.0f} ms"),
        ),
    ),
)  # fmt: skip

SUITE = "--only 'generate v5e-4'"
ROOT = Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_parameters": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip
PROGRAMS: dict[str, dict[str, Any]] = {
    "generate v5e-4": {"topology": "v5e-4", "kind": "generate", "length": 128, "max_new_tokens": 32},
    "generate v6e-4": {"topology": "v6e-4", "kind": "generate", "length": 128, "max_new_tokens": 32},
    "train 256 v5e-4": {"topology": "v5e-4", "kind": "train", "length": 256},
    "train 512 v5e-4": {"topology": "v5e-4", "kind": "train", "length": 512},
    "train 512 v6e-4": {"topology": "v6e-4", "kind": "train", "length": 512},
}  # fmt: skip


def compile_one(case: Case, name: str, model: str) -> None:
    print_progress(name)
    try:
        made = compile_for_tpu(model, rows=4, **PROGRAMS[name])
    except NothingFits as error:
        case.add(name, plan=PROGRAMS[name], measured=None, failure=str(error))
        return
    answer = made.answer
    details = {
        "num_parameters": made.num_parameters, "memory_gib": made.memory_bytes / GIB, "weight_gib": made.weight_bytes / GIB,
        "optimizer_gib": made.optimizer_bytes / GIB, "temporary_gib": answer.temporary_bytes / GIB,
        "exchanges": answer.exchanges, "num_dynamic_dimensions": answer.num_dynamic_dimensions,
        "num_custom_calls": answer.num_custom_calls, "least_milliseconds": 1000 * made.roofline_seconds,
        "compiler": made.versions,
    }  # fmt: skip
    measured = Numbers(peak_gib=answer.peak_bytes / GIB, one_time_seconds=answer.compile_seconds)
    case.add(name, plan=PROGRAMS[name], measured=measured, details=details)
    print(json.dumps({"program": name, "peak_gib": round(answer.peak_bytes / GIB, 2), **details}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    from transformers import LlamaConfig

    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs, with commas")
    options = parser.parse_args(arguments)
    asked = options.only.split(",")
    if unknown := [name for name in asked if name not in PROGRAMS]:
        parser.error(f"there is no program {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    case = Case("xla_compile", options.results, detect(), options.quick, {"shape": "tiny" if options.quick else "Llama 3.2 1B"})
    with tempfile.TemporaryDirectory(prefix="upshift-compile-") as folder:
        config = LlamaConfig(**(TINY if options.quick else SHAPE), architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        for name in asked:
            compile_one(case, name, str(Path(folder) / "config.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
