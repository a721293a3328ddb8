"""What the programs behind published rows are documented to do, where a row's own fields do not say it.

By source, never by model or row, each with where it is written. Nothing here was fitted to a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from upshift.hardware import AttentionKernel
from upshift.models.profile import Granularity
from upshift.planning.program import MEGATRON, TORCHTITAN, Program


@dataclass(frozen=True)
class Published(Program):
    """A program of a source, where it differs from the one that plans are made for today."""

    buffers: bool = False  # pipeline stages have a buffer for each stage, not for each micro-batch of a step
    kernel: AttentionKernel | None = None  # of attention; None: the one that torch takes today
    neox: bool = False  # its GPT has the matrices of GPT-NeoX, whose class says how ranks divide them


def of_today(program: Program, **differences: Any) -> Published:
    """Return a program that plans are made for, with what was different in a source."""
    return Published(**{one.name: getattr(program, one.name) for one in fields(Program)} | differences)


# "cef" in a row's name is Transformer Engine's cross entropy. Context parallelism there is all-to-all and nothing is exchanged
# while something is computed (docs/b200/b200_real_repro_guide.md, sections 3.3 and 7).
MEGATRON_WITH_TRANSFORMER_ENGINE = of_today(MEGATRON, layout={**MEGATRON.layout, "context_kind": "ulysses", "overlap": False})
# Until early 2025 torchtitan's loss was not compiled ("compiling loss function causes CUDA errors, turning off for now", train.py
# of that time, not read at the very commit), then wherever the model is.
TORCHTITAN_2025 = of_today(TORCHTITAN, kernel="flash_2")
TORCHTITAN_2024 = of_today(TORCHTITAN, when_compiled={}, kernel="flash_2")

# Megatron-DeepSpeed and Megatron-LM of 2022: GPT with one matrix for queries, keys and values (as in GPT-NeoX; learned positions
# or ALiBi for rotary embedding are nothing in time), words divided, 16-bit weights with an fp32 copy in the optimizer, gradients
# reduced after the last micro-batch, as many pipeline buffers as stages (DeepSpeed's PipelineEngine, num_pipe_buffers of its
# TrainSchedule). fp16 is predicted as bf16: as many bytes, as fast on an A100. Selective recomputation is of attention's core
# (Korthikanti et al. 2022, section 5).
MEGATRON_2022 = Published(
    always={"precision": "bf16"}, layout={"master_weights": True, "vocabulary_parallel": True, "overlap": False},
    granularity=None, buffers=True, kernel="flash_1", neox=True,
)  # fmt: skip
# All in bf16 (dtype: bf16 of its recipes, no autocast); the loss is compiled with the model (compile_loss of
# torchtune/training/_compile.py).
TORCHTUNE = Published(
    always={"precision": "bf16-weights", "rounding": "nearest"}, when_compiled={"loss_kernel": "compiled"}, kernel="flash_2",
)  # fmt: skip
# attn_impl: triton, which is FlashAttention 1 (llm-foundry's layers/attention.py of that time).
LLM_FOUNDRY = Published(kernel="flash_1")
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

PROGRAMS: dict[tuple[str, str], Published] = {  # repository, and how the file's path starts
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


def program_of(row: dict[str, Any]) -> Published:
    """The row's; of a source that says nothing, that of Hugging Face modules."""
    for (source, path), program in PROGRAMS.items():
        if row["source"] == source and row["path"].startswith(path):
            return program
    return Published()


def choices_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of Plan, beside what the row's own fields say."""
    program = program_of(row)
    noted = {name: value for words, found in NOTED.items() if words in (row["notes"] or "") for name, value in found.items()}
    whole = any(word in (row["attention"] or "") for word in ("eager", "not flash"))
    # Not traced as one of several ranks: there attention is one kernel.
    core = {"attention": "eager"} if whole and not program.neox else {}
    compiled = program.when_compiled if row["compile"] else {}
    return core | dict(program.always) | dict(compiled) | OPTIMIZERS[row["optimizer"]] | noted


def recomputed_way(row: dict[str, Any]) -> Granularity | None:
    """None: nothing but what sdpa computes again in any case."""
    if row["recompute"] == "none":
        return None
    return program_of(row).granularity if row["recompute"] == "selective" else "full"


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
