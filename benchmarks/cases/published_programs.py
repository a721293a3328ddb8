"""What the programs behind published rows are documented to do, where a row's own fields do not say it.

By source, never by model or row, each with where it is written. Nothing here was fitted to a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from upshift.hardware import AttentionKernel
from upshift.models.profile import Granularity
from upshift.planning.layout import Layout


@dataclass(frozen=True)
class Program:
    plan: dict[str, Any] = field(default_factory=dict)  # choices of Plan
    when_compiled: dict[str, Any] = field(default_factory=dict)  # of those that the row says were compiled
    layout: dict[str, Any] = field(default_factory=dict)  # of Layout, where the row's layout can have them
    selective: Granularity | None = "selective"  # what the source means by it; None: attention's core, which sdpa repeats
    buffers: bool = False  # pipeline stages have a buffer for each stage, not for each micro-batch of a step
    kernel: AttentionKernel | None = None  # of attention; None: the one that torch takes today
    neox: bool = False  # its GPT has the matrices of GPT-NeoX, whose class says how ranks divide them


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
# torch's sdpa ran FlashAttention 2 then, also on an H100.
TORCHTITAN_2024 = Program(layout={"vocabulary_parallel": True}, selective="alternate", kernel="flash_2")
TORCHTITAN_2025 = Program(
    layout={"vocabulary_parallel": True}, selective="alternate", when_compiled={"loss_kernel": "compiled"}, kernel="flash_2"
)

# Megatron-DeepSpeed and Megatron-LM of 2022: GPT with one matrix for queries, keys and values (as in GPT-NeoX; learned positions
# or ALiBi for rotary embedding are nothing in time), words divided, 16-bit weights with an fp32 copy in the optimizer, gradients
# reduced after the last micro-batch, as many pipeline buffers as stages (DeepSpeed's PipelineEngine, num_pipe_buffers of its
# TrainSchedule). fp16 is predicted as bf16: as many bytes, as fast on an A100. Selective recomputation is of attention's core
# (Korthikanti et al. 2022, section 5).
MEGATRON_2022 = Program(
    plan={"precision": "bf16"}, layout={"master_weights": True, "vocabulary_parallel": True, "overlap": False},
    selective=None, buffers=True, kernel="flash_1", neox=True,
)  # fmt: skip
# All in bf16 (dtype: bf16 of its recipes, no autocast); the loss is compiled with the model (compile_loss of
# torchtune/training/_compile.py).
TORCHTUNE = Program(plan={"precision": "bf16-weights"}, when_compiled={"loss_kernel": "compiled"}, kernel="flash_2")
# attn_impl: triton, which is FlashAttention 1 (llm-foundry's layers/attention.py of that time).
LLM_FOUNDRY = Program(kernel="flash_1")
# What rows have no field for is said in their notes. torchtune's LinearCrossEntropyLoss takes the tokens in 8 chunks.
NOTED: dict[str, dict[str, Any]] = {
    "oss in chunks": {"loss_chunk_tokens": 1024, "loss_kernel": "eager"},
    "optimizer in backward": {"optimizer_in_backward": True},
    "activations offloaded": {"activation_offload": True},
}  # fmt: skip
# By the names in the rows. A new name is a KeyError: it must not be predicted as AdamW.
OPTIMIZERS: dict[str | None, dict[str, Any]] = {
    **dict.fromkeys((None, "adam", "adamw", "decoupled_adamw", "adamw PyTorch (fused)"), {}),
    **dict.fromkeys(("adamw 8-bit", "adamw bnb 8-bit", "adam 8-bit (bitsandbytes)"), {"optim": "adamw_bnb_8bit"}),
    "adamw ao 8-bit": {"optim": "adamw_torch_8bit"},
    "adamw ao 4-bit": {"optim": "adamw_torch_4bit"},
    "adafactor": {"optim": "adafactor"},
}

PROGRAMS: dict[tuple[str, str], Program] = {  # repository, and how the file's path starts
    ("MooreThreads/SimuMax", ""): MEGATRON_WITH_TRANSFORMER_ENGINE,
    ("pytorch/torchtitan", "benchmarks/llama3_h100_202412"): TORCHTITAN_2024,
    ("pytorch/torchtitan", "docs/performance.md"): TORCHTITAN_2024,
    ("pytorch/torchtitan", "benchmarks/llama3-8b_h200_202506"): TORCHTITAN_2025,
    ("pytorch/ao", ""): TORCHTITAN_2025,
    ("bigscience-workshop/bigscience", ""): MEGATRON_2022,
    ("calculon-ai/calculon", ""): MEGATRON_2022,
    ("meta-pytorch/torchtune", ""): TORCHTUNE,
    ("mosaicml/llm-foundry", ""): LLM_FOUNDRY,
}
GPT_FIELDS = {"hidden_size": ("hidden_size", "n_embd"), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",)}
# Of pre-training codes: no dropout, one kernel for the activation (GPT-2's own in transformers is eight).
NO_DROPOUT = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "dropout": 0.0, "use_cache": False, "activation_function": "gelu",
}  # fmt: skip


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


def choices_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of Plan, beside what the row's own fields say."""
    program = program_of(row)
    noted = {name: value for words, found in NOTED.items() if words in (row["notes"] or "") for name, value in found.items()}
    whole = any(word in (row["attention"] or "") for word in ("eager", "not flash"))
    # Not traced as one of several ranks: there attention is one kernel.
    core = {"attention": "eager"} if whole and not program.neox else {}
    compiled = program.when_compiled if row["compile"] else {}
    return core | program.plan | compiled | OPTIMIZERS[row["optimizer"]] | noted


def recomputed_way(row: dict[str, Any]) -> Granularity | None:
    """None: nothing but what sdpa computes again in any case."""
    if row["recompute"] == "none":
        return None
    return program_of(row).selective if row["recompute"] == "selective" else "full"


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of the model as it is predicted."""
    config: dict[str, Any] = row["config"]
    if not program_of(row).neox:
        return NO_DROPOUT | config
    widths = {name: next(config[field] for field in fields if field in config) for name, fields in GPT_FIELDS.items()}
    same = {"vocab_size": config["vocab_size"], "tie_word_embeddings": config["tie_word_embeddings"]}
    inner = {"intermediate_size": 4 * widths["hidden_size"], "use_parallel_residual": False, "hidden_act": "gelu"}
    plain = {"model_type": "gpt_neox", "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cache": False}
    return plain | widths | same | inner
