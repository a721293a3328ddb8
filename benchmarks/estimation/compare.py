"""Compare quick plans with plans from a trace on thirty questions: the choice, the time and the memory.

    python benchmarks/estimation/compare.py        # ten minutes, most of it for traces, which are kept in the cache

Prints a line for each question, then how many choices are equal, and the ratios of the numbers of the traced plan's choice.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from upshift.errors import NothingFits
from upshift.hardware import describe
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.planner import Planning, plan_training
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.workload import Workload

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


def compare(name: str, traced: Planning | str, quick: Planning | str, rows: list[tuple[bool, float, float, float]]) -> None:
    """Print a question's line, and add (same choice, and the quick over the traced time, allocated and held memory)."""
    if isinstance(traced, str) or isinstance(quick, str):
        agree = isinstance(traced, str) and isinstance(quick, str)
        print(f"{name}: {'nothing fits, both' if agree else f'DIFFERENT: {traced} | {quick}'}"[:200])
        rows.append((agree, 1.0, 1.0, 1.0))
        return
    best, other = traced.ranking.candidates[0], quick.ranking.candidates[0]
    same = best.plan.label() == other.plan.label()
    again = cost_plan(best.plan, host=quick.host, profile=quick.profile, workload=quick.workload)
    assert isinstance(again, Candidate), again
    ratios = (again.time.total / best.time.total, again.memory.peak / best.memory.peak, again.resident / best.resident)
    rows.append((same, *ratios))
    choice = best.plan.label() if same else f"{best.plan.label()} | QUICK {other.plan.label()}"
    if not same:  # what the quick choice would cost by the trace
        quick_by_trace = cost_plan(other.plan, host=traced.host, profile=traced.profile, workload=traced.workload)
        if isinstance(quick_by_trace, Candidate):
            choice += f" ({quick_by_trace.tokens_per_second / best.tokens_per_second - 1:+.1%})"
    print(f"{name}: {' '.join(f'{ratio:.3f}' for ratio in ratios)} {choice}", flush=True)


def main() -> None:
    rows: list[tuple[bool, float, float, float]] = []
    for model, adapter, hosts in QUESTIONS:
        with tempfile.TemporaryDirectory() as folder:
            source = source_of(model, adapter, Path(folder))
            for host in hosts:
                plans = partial(planned, source, host)
                compare(f"{model} {adapter} on {host}", plans(profile_model), plans(quick_profile), rows)
    print(f"{len(rows)} questions, {sum(row[0] for row in rows)} equal choices")
    for index, what in enumerate(("time", "allocated", "held"), start=1):
        ratios = sorted(float(row[index]) for row in rows)
        print(f"{what}: quick over traced {ratios[0]:.3f} to {ratios[-1]:.3f}, median {ratios[len(ratios) // 2]:.3f}")


if __name__ == "__main__":
    main()
