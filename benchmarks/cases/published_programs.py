"""What the programs behind published rows are documented to do, where a row's own fields do not say it.

By source, never by model or row, each with where it is written. Nothing here was fitted to a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from upshift.models.profile import Granularity
from upshift.planning.layout import Layout


@dataclass(frozen=True)
class Program:
    plan: dict[str, Any] = field(default_factory=dict)  # choices of Plan
    when_compiled: dict[str, Any] = field(default_factory=dict)  # of those that the row says were compiled
    layout: dict[str, Any] = field(default_factory=dict)  # of Layout, where the row's layout can have them
    selective: Granularity = "selective"  # what the source means by it


# Weights in bf16, gradients in fp32, the rest by the distributed optimizer: 6 + 12 / d bytes a parameter (Megatron Core user
# guide, "Distributed Optimizer"; --use-distributed-optimizer --accumulate-allreduce-grads-in-fp32 in SimuMax's launchers).
# Column-parallel inputs are gathered again and embedding, logits and loss divided by words (Korthikanti et al. 2022, section
# 4.2.2; Shoeybi et al. 2019, section 3). Transformer Engine's modules fuse norm, rotary embedding and SwiGLU; "cef" in a row's
# name is its cross entropy, which writes the gradient over the logits. Context parallelism there is all-to-all and nothing is
# exchanged while something is computed (docs/b200/b200_real_repro_guide.md, sections 3.3 and 7).
MEGATRON_WITH_TRANSFORMER_ENGINE = Program(
    plan={"fused_kernels": True, "loss_kernel": "fused"},
    layout={
        "master_weights": True,
        "gather_again": True,
        "vocabulary_parallel": True,
        "context_kind": "ulysses",
        "overlap": False,
    },
)
# torchtitan recomputes by operator unless told otherwise: all but every second mm (selective_ac_option = "op" in its
# train_configs); loss parallel wherever there is tensor parallelism (disable_loss_parallel is off). Until early 2025 its loss was
# not compiled ("compiling loss function causes CUDA errors, turning off for now", train.py of that time, not read at the very
# commit), then wherever the model is (build_cross_entropy_loss of components/loss.py).
TORCHTITAN_2024 = Program(layout={"vocabulary_parallel": True}, selective="alternate")
TORCHTITAN_2025 = Program(layout={"vocabulary_parallel": True}, selective="alternate", when_compiled={"loss_kernel": "compiled"})

PROGRAMS: dict[tuple[str, str], Program] = {  # repository, and how the file's path starts
    ("MooreThreads/SimuMax", ""): MEGATRON_WITH_TRANSFORMER_ENGINE,
    ("pytorch/torchtitan", "benchmarks/llama3_h100_202412"): TORCHTITAN_2024,
    ("pytorch/torchtitan", "docs/performance.md"): TORCHTITAN_2024,
    ("pytorch/torchtitan", "benchmarks/llama3-8b_h200_202506"): TORCHTITAN_2025,
    ("pytorch/ao", ""): TORCHTITAN_2025,
}


def program_of(row: dict[str, Any]) -> Program:
    """The row's; of a source that says nothing, that of Hugging Face modules."""
    for (source, path), program in PROGRAMS.items():
        if row["source"] == source and row["path"].startswith(path):
            return program
    return Program()


def with_program(layout: Layout, program: Program) -> Layout:
    """The layout with what the program does, where it has ranks to do it with."""
    possible = {
        "gather_again": layout.sequence_parallel and layout.tensor_parallel > 1,
        "vocabulary_parallel": layout.tensor_parallel > 1, "context_kind": layout.context_parallel > 1,
        "master_weights": layout.fully_shard in ("no", "optimizer"), "overlap": True,
    }  # fmt: skip
    update = {name: value for name, value in program.layout.items() if possible[name]}
    if update.get("master_weights"):  # one rank has all of the optimizer's state
        update["fully_shard"] = "optimizer"
    return layout.model_copy(update=update)
