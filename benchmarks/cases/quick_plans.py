"""Compare quick plans with plans from a trace on thirty questions: the choice, the time and the memory.

    python benchmarks/cases/quick_plans.py        # ten minutes, most of it for traces, which are kept in the cache

For each question: is the choice the same, and what are the quick numbers of the traced plan's choice over the traced ones?
Nothing is measured. ``--quick`` asks about the smallest model on one device.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.errors import NothingFits
from upshift.hardware import describe, detect
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.planner import Planning, plan_training
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.workload import Workload

CLAIMS = (
    Claim(
        name="equal",
        text="a quick plan makes the choice of the traced one",
        ours="a quick plan",
        baseline="a plan from a trace",
        unit="of the questions",
        goal=0.9,
        of=Source(row="summary", value="details.equal_share"),
    ),
)
FIGURES = (
    Figure(name="same", of=Source(row="summary", value="details.equal")),
    Figure(name="questions", of=Source(row="summary", value="details.questions")),
)
TABLES = (
    Table(
        name="ratios",
        header=("number", "lowest", "median", "highest"),
        of="summary",
        each="details.ratios",
        cells=("{lowest:.2f}", "{median:.2f}", "{highest:.2f}"),
    ),
)
SUITE = "--quick"
ROOT = Path(__file__).parents[1]
NUMBERS = ("time of a step", "allocated memory", "held memory")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
MODELS: dict[str, dict[str, Any]] = {  # none of them was fitted to
    "34M": LLAMA | dict(zip(SIZES, (512, 1408, 6, 8, 8, 16000), strict=True)),
    "135M": LLAMA | dict(zip(SIZES, (576, 1536, 30, 9, 3, 49152), strict=True)) | {"tie_word_embeddings": True},
    "1B": LLAMA | dict(zip(SIZES, (2048, 8192, 16, 32, 8, 128256), strict=True)) | {"tie_word_embeddings": True},
    "4B": QWEN | dict(zip(SIZES, (2560, 9728, 36, 32, 8, 151936), strict=True)) | {"head_dim": 128, "tie_word_embeddings": True},
    "7B": MISTRAL | dict(zip(SIZES, (4096, 14336, 32, 32, 8, 32768), strict=True)) | {"sliding_window": None},
    "70B": LLAMA | dict(zip(SIZES, (8192, 28672, 80, 64, 8, 128256), strict=True)),
}
QUESTIONS = (  # model, adapter, hosts
    ("34M", "", ("rtx-4060-laptop", "rtx-4090", "h100", "8xh100")),
    ("135M", "", ("rtx-4060-laptop", "rtx-4090", "a100-40gb", "8xa100-40gb", "8xh100")),
    ("1B", "", ("rtx-4090", "a100-80gb", "h100", "8xa100-40gb", "8xh100", "2x8xh100@ib-ndr")),
    ("4B", "", ("h200", "8xa100-80gb", "8xh100", "4x8xh100@ib-ndr")),
    ("7B", "lora", ("rtx-4090", "l40s", "a100-80gb", "h100")),
    ("7B", "qlora", ("rtx-4060-laptop", "rtx-4090", "h100")),
    ("70B", "", ("8x8xh100@ib-ndr", "16x8xh100@ib-ndr", "128x8xh100@ib-ndr", "8x8xa100-80gb@ib-hdr")),
)  # fmt: skip
LENGTH = 2048
COMMON = {"max_position_embeddings": 1 << 17, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}


def source_of(model: str, adapter: str, folder: Path) -> ModelSource:
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[model]))
    options = AdapterOptions(lora_rank=16, load_in_4bit=adapter == "qlora") if adapter else None
    return find_model_to_train(str(folder), options)


def planned(source: ModelSource, host: str, profiler: Any) -> Planning | str:
    """Return the plans, or the message that nothing fits."""
    described = describe(host)
    workload = Workload(sequence_length=LENGTH, global_batch=max(64, 2 * described.num_devices))
    try:
        return plan_training(source, described, workload, described=True, profiler=profiler)
    except NothingFits as error:
        return str(error)


def quick_profile(source: ModelSource, *, sequence_length: int, **others: Any) -> Any:
    return estimate_profile(source, sequence_length=sequence_length, shapes={})


def compare(name: str, traced: Planning | str, quick: Planning | str) -> dict[str, Any]:
    """Return whether the choices are equal, both of them, and the quick over the traced numbers; {}: nothing fits."""
    if isinstance(traced, str) or isinstance(quick, str):
        same = isinstance(traced, str) and isinstance(quick, str)
        choices = [answer if isinstance(answer, str) else answer.best.label() for answer in (traced, quick)]
        return {"question": name, "same": same, "traced": choices[0], "quick": choices[1], "ratios": {}}
    best, other = traced.ranking.candidates[0], quick.ranking.candidates[0]
    again = cost_plan(best.plan, host=quick.host, profile=quick.profile, workload=quick.workload)
    assert isinstance(again, Candidate), again
    pairs = ((again.time.total, best.time.total), (again.memory.peak, best.memory.peak), (again.resident, best.resident))
    ratios = {number: ours / theirs for number, (ours, theirs) in zip(NUMBERS, pairs, strict=True)}
    labels = best.plan.label(), other.plan.label()
    answer = {"question": name, "same": labels[0] == labels[1], "traced": labels[0], "quick": labels[1], "ratios": ratios}
    by_trace = cost_plan(other.plan, host=traced.host, profile=traced.profile, workload=traced.workload)
    if labels[0] != labels[1] and isinstance(by_trace, Candidate):
        answer["quick_choice_by_trace"] = by_trace.tokens_per_second / best.tokens_per_second
    return answer


def main(arguments: list[str] | None = None) -> int:
    options = command_line(__doc__ or "", results=ROOT / "results").parse_args(arguments)
    case = Case("quick_plans", options.results, detect(), options.quick, {"sequence_length": LENGTH})
    answers = []
    for model, adapter, hosts in QUESTIONS[:1] if options.quick else QUESTIONS:
        with tempfile.TemporaryDirectory() as folder:
            source = source_of(model, adapter, Path(folder))
            for host in hosts[:1] if options.quick else hosts:
                plans = partial(planned, source, host)
                answer = compare(f"{model} {adapter} on {host}", plans(profile_model), plans(quick_profile))
                case.add("question", plan={}, measured=None, details=answer)
                answers.append(answer)
                print(json.dumps(answer), flush=True)
    values = {number: [answer["ratios"][number] for answer in answers if answer["ratios"]] for number in NUMBERS}
    ratios = {
        number: {"lowest": min(found), "median": statistics.median(found), "highest": max(found)}
        for number, found in values.items()
        if found
    }
    equal = sum(answer["same"] for answer in answers)
    summary = {"questions": len(answers), "equal": equal, "equal_share": equal / len(answers), "ratios": ratios}
    case.add("summary", plan={}, measured=None, details=summary)
    print(json.dumps({"case": "quick_plans", **summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
