"""Ninety-six questions that a practitioner answers at once: the plan gives the answer that published guides and runs give.

The models are made from their sizes (made_sizes.py, made_generators.py) and the hosts are described, so nothing is traced. A
question names who publishes its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from made_generators import LLAMA_8B, MIXTURE, attention_shapes, cached, made_generator
from made_sizes import Size, decoder

from upshift.hardware import describe
from upshift.models.profile import ModelProfile
from upshift.planning.inference.plan import InferencePlan, InferenceWorkload
from upshift.planning.inference.planner import rank_plans
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.planner import calibrate_and_filter
from upshift.planning.search.ranking import Candidate, Coster
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.calibration import NO_RECORDS
from upshift.planning.workload import Workload

NANOGPT = "https://github.com/karpathy/nanoGPT"
TORCHTITAN = "https://github.com/pytorch/torchtitan/tree/main/benchmarks"
TORCHTITAN_PAPER = "https://arxiv.org/abs/2410.06511"
PLAYBOOK = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
ZERO_PAPER = "https://arxiv.org/abs/1910.02054"
QLORA = "https://arxiv.org/abs/2305.14314"
UNSLOTH = "https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements"
TORCHTUNE = "https://github.com/pytorch/torchtune"
FSDP_QLORA = "https://github.com/AnswerDotAI/fsdp_qlora"  # 2 cards without NVLink: copies are fastest
MEGATRON = "https://arxiv.org/abs/2104.04473"
VLLM = "https://docs.vllm.ai/en/v0.8.4/serving/distributed_serving.html"
UNSLOTH_LENGTHS = "https://docs.unsloth.ai/basics/unsloth-benchmarks"  # the longest rows with transformers and FlashAttention 2
UNSLOTH_MIXTURES = "https://unsloth.ai/docs/new/faster-moe"  # LoRA of Qwen3-30B-A3B in 16 bits: 63 GB
SPHERON = "https://www.spheron.network/blog/gpu-vram-requirements-fine-tune-llm-2026/"  # QLoRA of it: 21 GB
AXOLOTL_LONG = "https://huggingface.co/blog/axolotl-ai-co/long-context-with-sequence-parallelism-in-axolotl"
SENTENCES = "https://contextqmd.com/libraries/sentence-transformers/versions/5.5.0/pages/skills/train-sentence-transformers/references/hardware_guide"
LOCAL_70B = "https://localrig.pages.dev/can-i-run/hardware-to-run-a-70b-model-locally/"
MI300X_72B = (
    "https://dev.to/manikandan_t_6d72e32ac4e8/72b-parameters-zero-quantization-one-gpu-benchmarking-qwen2-vl-on-amd-mi300x-15mh"
)
VLLM_405B = "https://blog.vllm.ai/2024/07/23/llama31.html"
LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md"

SIZES = {
    "34M": Size(512, 1408, 6, 8, 8, 16000),
    "124M": Size(768, 2048, 12, 12, 12, 32000),
    "1B": Size(2048, 8192, 16, 32, 8),
    "7B": Size(4096, 11008, 32, 32, 32, 32000),
    "350M": Size(1024, 4096, 24, 16, 16, 50304),
    "3B": Size(3072, 8192, 28, 24, 8),
    "14B": Size(5120, 17408, 40, 40, 8, 151936),
    "32B": Size(5120, 27648, 64, 40, 8, 151936),
    "8B": Size(4096, 14336, 32, 32, 8),
    "13B": Size(5120, 13824, 40, 40, 40, 32000),
    "70B": Size(8192, 28672, 80, 64, 8),
    "405B": Size(16384, 53248, 126, 128, 8),
    "335M": Size(1024, 4096, 24, 16, 16, 30522),
    "30B-A3B": Size(2048, 768, 48, 32, 4, 151936, experts=128, per_token=8),
    "8x7B": Size(4096, 14336, 32, 32, 8, 32000, experts=8, per_token=2),
}
LLAMA_70B = made_generator(
    {**attention_shapes(8192, 1024, 80), (28672, 8192): 160, (8192, 28672): 80}, layers=80, vocabulary=128256, hidden=8192,
    heads=(64, 8), cache=(cached(80, 2048, 8),),
)  # fmt: skip
LLAMA_405B = made_generator(
    {**attention_shapes(16384, 1024, 126), (53248, 16384): 252, (16384, 53248): 126}, layers=126, vocabulary=128256,
    hidden=16384, heads=(128, 8), cache=(cached(126, 2048, 8),),
)  # fmt: skip
SERVED = {"8B": LLAMA_8B, "70B": LLAMA_70B, "405B": LLAMA_405B, "8x7B": MIXTURE}


def is_plain(plan: Plan) -> bool:
    """Return whether ranks only sum gradients."""
    layout = plan.layout
    return layout.fully_shard == "no" and layout.ranks_per_replica == 1 and layout.expert_parallel == 1


def is_alone(plan: Plan) -> bool:
    """Return whether the plan is of one process without weights outside its memory."""
    return plan.num_processes == 1 and plan.weight_offload == "none"


def is_bare(plan: Plan) -> bool:
    """Return whether a plan on one device recomputes nothing."""
    return is_alone(plan) and plan.activation_checkpointing == 0


def shares_states(plan: Plan) -> int:
    """Return among how many ranks the optimizer's state of a weight is divided."""
    layout = plan.layout
    return layout.shard_size * layout.tensor_parallel * layout.pipeline_parallel


def is_sharded_alone(plan: Plan) -> bool:
    """Return whether data-parallel ranks divide states, and nothing else is divided."""
    return plan.layout.fully_shard != "no" and plan.layout.ranks_per_replica == 1


@dataclass(frozen=True)
class Question:
    """A question about training. ``answer``: what holds of the plan; None: nothing fits."""

    name: str
    source: str
    model: str
    host: str
    answer: Callable[[Plan], bool] | None
    batch: int = 64
    length: int = 2048
    adapter: str = ""
    allow: tuple[str, ...] = ()


TRAINING = (
    Question("34M on a node is data parallel", PLAYBOOK, "34M", "8xh100", is_plain, length=1024),
    Question("34M with large batches, too", PLAYBOOK, "34M", "8xh100", is_plain, batch=512, length=1024),
    Question("124M on 8 A100 is DDP", NANOGPT, "124M", "8xa100-40gb", is_plain, batch=480, length=1024),
    Question("124M trains on one card without recomputation", NANOGPT, "124M", "rtx-4090", is_bare, length=1024),
    Question("34M trains on a laptop", NANOGPT, "34M", "rtx-4060-laptop", is_bare, batch=8, length=512),
    Question("1B on a node needs no model parallelism", PLAYBOOK, "1B", "8xh100", is_plain, length=4096),
    Question("1B on one H100 needs nothing", PLAYBOOK, "1B", "h100", is_bare, batch=32, length=4096),
    Question("7B with 16 bytes a parameter is too large for one H100", ZERO_PAPER, "7B", "h100", None, batch=8),
    Question("8B in full on a 24 GB card does not fit with AdamW", ZERO_PAPER, "8B", "rtx-4090", None, batch=8),
    Question(
        "7B in bf16 with 8-bit states fits one A100", TORCHTUNE, "7B", "a100-80gb", is_alone,
        batch=8, allow=("bf16-weights", "8bit-optimizer"),
    ),
    Question("7B on 8 A100 shards states, and has no tensor parallelism", TORCHTITAN, "7B", "8xa100-80gb", is_sharded_alone),
    Question("8B on 8 H100 is FSDP", TORCHTITAN, "8B", "8xh100", is_sharded_alone, length=8192),
    Question("13B on 8 A100 shards states alone", PLAYBOOK, "13B", "8xa100-80gb", is_sharded_alone),
    Question("8B on 128 H100 is FSDP", TORCHTITAN, "8B", "16x8xh100@ib-ndr", is_sharded_alone, batch=256, length=8192),
    Question("70B with fp32 states is too large for 8 H100", ZERO_PAPER, "70B", "8xh100", None, length=4096),
    Question(
        "70B all in bf16 on 8 H100 divides everything by 8", TORCHTUNE, "70B", "8xh100",
        lambda plan: shares_states(plan) == 8 and plan.activation_checkpointing == 80, length=4096, allow=("bf16-weights",),
    ),
    Question(
        "70B on 64 H100 is FSDP with recomputation", TORCHTITAN_PAPER, "70B", "8x8xh100@ib-ndr",
        lambda plan: is_sharded_alone(plan) and plan.activation_checkpointing > 0, batch=256, length=8192,
    ),
    Question(
        "70B on 1,024 H100 keeps tensor parallelism inside a node", MEGATRON, "70B", "128x8xh100@ib-ndr",
        lambda plan: 1 < plan.layout.tensor_parallel <= 8 and shares_states(plan) > 64, batch=1024, length=8192,
    ),
    Question(
        "405B on 1,024 H100 adds tensor parallelism to shards or stages", TORCHTITAN_PAPER, "405B", "128x8xh100@ib-ndr",
        lambda plan: 1 < plan.layout.tensor_parallel <= 8 and shares_states(plan) >= 128 and plan.layout.shard_size <= 512,
        batch=1024, length=8192,
    ),
    Question("405B does not train on 64 H100", ZERO_PAPER, "405B", "8x8xh100@ib-ndr", None, batch=64, length=8192),
    Question(
        "128k tokens want context parallelism and recomputation", TORCHTITAN, "8B", "8xh100",
        lambda plan: plan.layout.context_parallel > 1 and plan.activation_checkpointing > 0, batch=8, length=131072,
    ),
    Question("2k tokens want no context parallelism", TORCHTITAN, "8B", "8xh100", lambda plan: plan.layout.context_parallel == 1),
    Question("QLoRA of 8B fits a 24 GB card", UNSLOTH, "8B", "rtx-4090", is_alone, 8, adapter="qlora"),
    Question(
        "QLoRA of 1B fits a laptop", UNSLOTH, "1B", "rtx-4060-laptop", is_alone, batch=8, length=1024, adapter="qlora"
    ),
    Question("LoRA of 8B on one H100 recomputes nothing", UNSLOTH, "8B", "h100", is_bare, batch=16, adapter="lora"),
    Question("QLoRA of 70B fits one 80 GB GPU", QLORA, "70B", "h100", is_alone, batch=8, adapter="qlora"),
    Question("QLoRA of 70B does not fit a 24 GB card", UNSLOTH, "70B", "rtx-4090", None, batch=8, adapter="qlora"),
    Question("LoRA of 70B does not fit one 80 GB GPU", UNSLOTH, "70B", "h100", None, batch=8, adapter="lora"),
    Question(
        "LoRA of 70B on 8 H100 divides the frozen weights", TORCHTUNE, "70B", "8xh100", lambda plan: shares_states(plan) == 8,
        batch=16, adapter="lora",
    ),
    Question("350M trains on one A100 without recomputation", NANOGPT, "350M", "a100-40gb", is_bare, length=1024),
    Question("3B with fp32 states does not fit a 24 GB card", ZERO_PAPER, "3B", "rtx-4090", None, batch=16),
    Question("3B with fp32 states fits one H100", ZERO_PAPER, "3B", "h100", is_bare, batch=32, length=4096),
    Question("3B that fits one A100 is data parallel on two", PLAYBOOK, "3B", "2xa100-80gb", is_plain, batch=32, length=4096),
    Question("LoRA of 3B fits a 24 GB card", UNSLOTH, "3B", "rtx-4090", is_alone, batch=16, adapter="lora"),
    Question("8B on 4 A100 shards states alone", PLAYBOOK, "8B", "4xa100-80gb", is_sharded_alone, batch=32, length=4096),
    Question("LoRA of 8B on two H100 is data parallel", PLAYBOOK, "8B", "2xh100", is_plain, batch=32, adapter="lora"),
    Question("LoRA of 8B on two 4090 is data parallel", FSDP_QLORA, "8B", "2xrtx-4090", is_plain, batch=16, adapter="lora"),
    Question("also with a batch of 128", FSDP_QLORA, "8B", "2xrtx-4090", is_plain, batch=128, adapter="lora"),
    Question("LoRA of 8B on two 3090 is data parallel", FSDP_QLORA, "8B", "2xrtx-3090", is_plain, batch=32, adapter="lora"),
    Question("LoRA of 8B on four 4090 is data parallel", FSDP_QLORA, "8B", "4xrtx-4090", is_plain, batch=64, adapter="lora"),
    Question(
        "LoRA of 14B on two 4090 has no tensor parallelism over PCIe", MEGATRON, "14B", "2xrtx-4090",
        lambda plan: shares_states(plan) == 2 and plan.layout.tensor_parallel == 1, batch=16, length=1024, adapter="lora",
    ),
    Question("14B on 8 H100 shards states alone", TORCHTITAN, "14B", "8xh100", is_sharded_alone, length=4096),
    Question("QLoRA of 14B fits a 24 GB card", UNSLOTH, "14B", "rtx-4090", is_alone, batch=8, adapter="qlora"),
    Question("QLoRA of 32B fits one H100", UNSLOTH, "32B", "h100", is_alone, batch=16, adapter="qlora"),
    Question("32B on 16 H100 shards states alone", TORCHTITAN, "32B", "2x8xh100@ib-ndr", is_sharded_alone, length=4096),
    Question("124M on two cards is data parallel", NANOGPT, "124M", "2xrtx-4090", is_plain, batch=256, length=1024),
    Question("13B with 16 bytes a parameter is too large for two H100", ZERO_PAPER, "13B", "2xh100", None, batch=16),
    Question("QLoRA of 8B fits a 12 GB card", UNSLOTH, "8B", "rtx-3060", is_alone, batch=8, length=1024, adapter="qlora"),
    Question("LoRA of 8B in bf16 does not fit a 12 GB card", UNSLOTH, "8B", "rtx-3060", None, batch=8, adapter="lora"),
    Question(
        "64k tokens of 8B on a node want context or tensor parallelism, or recomputation", PLAYBOOK, "8B", "8xh100",
        lambda plan: plan.layout.ranks_per_replica > 1 or plan.activation_checkpointing > 0, batch=8, length=65536,
    ),
    Question("1B on 64 H100 has no model parallelism", PLAYBOOK, "1B", "8x8xh100@ib-ndr",
             lambda plan: plan.layout.ranks_per_replica == 1, batch=512, length=4096),
    Question("8x7B with fp32 states is too large for 8 H100", ZERO_PAPER, "8x7B", "8xh100", None, length=4096),
    Question(
        "8x7B on 64 H100 divides experts or shards, and has no pipeline", TORCHTITAN_PAPER, "8x7B", "8x8xh100@ib-ndr",
        lambda plan: plan.layout.pipeline_parallel == 1 and plan.layout.shard_size * plan.layout.expert_parallel >= 8,
        batch=256, length=4096,
    ),
    Question("QLoRA of 8B with 5,789 tokens fits a 24 GB card", UNSLOTH_LENGTHS, "8B", "rtx-4090", is_alone, 1, 5789, "qlora"),
    Question("QLoRA of 8B with 15,502 tokens fits a 48 GB card", UNSLOTH_LENGTHS, "8B", "a40", is_alone, 1, 15502, "qlora"),
    Question("QLoRA of 8B with 28,454 tokens fits 80 GB", UNSLOTH_LENGTHS, "8B", "a100-80gb", is_alone, 1, 28454, "qlora"),
    Question("QLoRA of 70B with 6,916 tokens fits 80 GB", UNSLOTH_LENGTHS, "70B", "a100-80gb", is_alone, 1, 6916, "qlora"),
    Question("QLoRA of 70B does not fit a 48 GB card", UNSLOTH_LENGTHS, "70B", "a40", None, 1, 2048, "qlora"),
    Question("LoRA of 8B with 128k tokens does not fit one H100", UNSLOTH_LENGTHS, "8B", "h100", None, 1, 131072, "lora"),
    Question(
        "LoRA of 8B with 128k tokens on a node divides the sequences", AXOLOTL_LONG, "8B", "8xh100",
        lambda plan: plan.layout.context_parallel > 1, 8, 131072, "lora",
    ),
    Question("QLoRA of 32B does not fit a 24 GB card", UNSLOTH, "32B", "rtx-4090", None, 8, 1024, "qlora"),
    Question("QLoRA of a mixture of 30B fits a 24 GB card", SPHERON, "30B-A3B", "rtx-4090", is_alone, 8, 1024, "qlora"),
    Question("LoRA of a mixture of 30B fits one H100", UNSLOTH_MIXTURES, "30B-A3B", "h100", is_alone, 16, adapter="lora"),
    Question("a mixture of 30B on 64 H100 shards states alone", PLAYBOOK, "30B-A3B", "8x8xh100@ib-ndr",
             lambda plan: plan.layout.pipeline_parallel == plan.layout.tensor_parallel == 1 < shares_states(plan), 256, 4096),
    Question("8B with fp32 states fits one B200", ZERO_PAPER, "8B", "b200", is_bare, batch=8, length=4096),
    Question("14B with fp32 states is too large for one MI300X", ZERO_PAPER, "14B", "mi300x", None, batch=8, length=4096),
    Question(
        "70B with fp32 states fits 8 B200, divided by 8", ZERO_PAPER, "70B", "8xb200",
        lambda plan: shares_states(plan) == 8 and plan.activation_checkpointing > 0, length=4096,
    ),
    Question("QLoRA of 7B on a T4 computes in fp16", UNSLOTH, "7B", "t4",
             lambda plan: is_alone(plan) and plan.precision == "fp16", 8, 512, "qlora"),
    Question("an embedding model on a node is data parallel", SENTENCES, "335M", "8xh100", is_plain, 4096, 128),
    Question("an embedding model trains on one card without recomputation", SENTENCES, "335M", "rtx-4090", is_bare, 256, 128),
    Question(
        "LoRA of 32B on two H100 divides the frozen weights", TORCHTUNE, "32B", "2xh100", lambda plan: shares_states(plan) == 2,
        batch=8, adapter="lora",
    ),
)  # fmt: skip


@cache
def profile_of(model: str, adapter: str) -> ModelProfile:
    return decoder(SIZES[model], adapter=adapter)


def best_plan(question: Question) -> Plan | None:
    host, profile = describe(question.host), profile_of(question.model, question.adapter)
    workload = Workload(sequence_length=question.length, global_batch=question.batch, allow=question.allow)
    ranking = search(host, profile, workload, fixed=parse_fixed((), host, profile, workload))
    candidates = calibrate_and_filter(ranking, host, profile, workload, NO_RECORDS).candidates
    return candidates[0].plan if candidates else None


@pytest.mark.parametrize("question", TRAINING, ids=lambda question: question.name)
def test_training(question: Question) -> None:
    plan = best_plan(question)
    if question.answer is None:
        assert plan is None, f"{question.source}: {plan.label()}"
    else:
        assert plan is not None and question.answer(plan), f"{question.source}: {plan and plan.label()}"


def published_cards(fully_shard: str) -> list[dict[str, Any]]:
    """Return the rows of Llama 2 7B on two GeForce cards, without offload."""
    rows = Path(__file__).parents[2] / "benchmarks" / "published" / "training.jsonl"
    read = (json.loads(line) for line in rows.read_text().splitlines())
    of_source = [row for row in read if row["source"].endswith("fsdp_qlora") and row["model"] == "Llama-2 7B"]
    return [row for row in of_source if row["fully_shard"] == fully_shard and "offload False" in row["quote"]]


def predicted_over_published(row: dict[str, Any], layout: Layout) -> float:
    """Return the ratio of speeds. All layers are recomputed."""
    host, profile, size = describe(row["host"]), profile_of("7B", row["method"]), row["micro_batch"]
    length = row["sequence_length"]
    plan = Plan(
        device="cuda", host="h", model="m", sequence_length=length, precision="bf16", per_device_train_batch_size=size,
        activation_checkpointing=profile.num_layers, num_processes=2, layout=layout,
    )  # fmt: skip
    costed = Coster(host, profile, Workload(sequence_length=length, global_batch=2 * size)).cost(plan)
    assert isinstance(costed, Candidate)
    ratio = costed.tokens_per_second / 2 / row["tokens_per_second_per_device"]
    low, high = costed.basis("step").interval or (0.0, 0.0)
    assert low <= ratio <= high, (row["quote"], ratio)
    return ratio


def test_cards_that_train_copies_are_as_fast_as_was_published() -> None:
    """Two 3090 and two 4090, LoRA and QLoRA of Llama 2 7B with all layers recomputed. As other GPUs they were 55 % too slow."""
    rows = published_cards("none")
    assert len(rows) == 4
    for row in rows:
        assert 0.8 <= predicted_over_published(row, Layout()) <= 1.2, row["quote"]


def test_cards_that_gather_weights_over_pcie_are_within_their_interval() -> None:
    """Two 4090 with 16 lanes each are met. Two 3090 on an older board gather more slowly: weights of 16 bits cost most."""
    rows = published_cards("zero3")
    assert len(rows) == 8
    for row in rows:
        ratio = predicted_over_published(row, Layout(fully_shard="weights", shard_size=2))
        slow_board = row["host"] == "2xrtx-3090" and row["method"] == "lora"
        assert 0.8 <= ratio <= (3.0 if slow_board else 1.2), row["quote"]


@dataclass(frozen=True)
class Served:
    """A question about serving. ``answer``: what holds of the plan; None: nothing fits."""

    name: str
    source: str
    model: str
    host: str
    answer: Callable[[InferencePlan], bool] | None
    limits: tuple[tuple[str, Any], ...] = ()
    allow: tuple[str, ...] = ()


def degrees(plan: InferencePlan) -> tuple[int, int, int]:
    return plan.tensor_parallel, plan.pipeline_parallel, plan.replicas


ONE = (("concurrency", 1),)
SERVING = (
    Served("8B on one GPU needs no parallelism", VLLM, "8B", "h100", lambda plan: degrees(plan) == (1, 1, 1)),
    Served("many requests of 8B want replicas", VLLM, "8B", "8xh100", lambda plan: degrees(plan) == (1, 1, 8)),
    Served("one request of 8B wants tensor parallelism", VLLM, "8B", "4xh100", lambda plan: plan.tensor_parallel == 4, ONE),
    Served("one request of 70B on 4 GPUs wants tensor parallelism", VLLM, "70B", "4xh100",
           lambda plan: degrees(plan) == (4, 1, 1), ONE),
    Served("tokens of 70B within 20 ms want tensor parallelism", VLLM, "70B", "4xh100", lambda plan: plan.tensor_parallel == 4,
           (("max_tpot_ms", 20.0),)),
    Served("70B inside a node is tensor parallel", VLLM, "70B", "8xh100",
           lambda plan: plan.tensor_parallel > 1 and plan.pipeline_parallel == 1),
    Served("70B in bf16 does not fit one 80 GB GPU", VLLM, "70B", "h100", None),
    Served("70B in 4 bits fits one 80 GB GPU", LLAMA_CPP, "70B", "h100", lambda plan: plan.weights == "int4", (),
           ("int4-weights",)),
    Served("without NVLink a pipeline pays", VLLM, "70B", "4xl40s", lambda plan: plan.pipeline_parallel > 1),
    Served("405B in fp8 on a node is tensor parallel over 8", VLLM_405B, "405B", "8xh100",
           lambda plan: degrees(plan) == (8, 1, 1), (), ("fp8-weights",)),
    Served("405B in bf16 does not fit one node", VLLM_405B, "405B", "8xh100", None),
    Served("405B in bf16 is tensor parallel inside two nodes, a pipeline between them", VLLM_405B, "405B", "2x8xh100@ib-ndr",
           lambda plan: degrees(plan) == (8, 2, 1)),
    Served("8x7B in bf16 needs two 80 GB GPUs", VLLM, "8x7B", "2xh100", lambda plan: degrees(plan) == (2, 1, 1)),
    Served("70B in bf16 needs more than two 80 GB GPUs for many requests, and fits two", VLLM, "70B", "2xh100",
           lambda plan: degrees(plan) in ((2, 1, 1), (1, 2, 1))),
    Served("70B in bf16 does not fit two 48 GB GPUs", VLLM, "70B", "2xl40s", None),
    Served("8B in bf16 fits a 24 GB card", VLLM, "8B", "rtx-4090", lambda plan: degrees(plan) == (1, 1, 1)),
    Served("8B in bf16 does not fit a laptop of 8 GB", LLAMA_CPP, "8B", "rtx-4060-laptop", None),
    Served("8B in 4 bits fits a laptop of 8 GB", LLAMA_CPP, "8B", "rtx-4060-laptop", lambda plan: plan.weights == "int4", (),
           ("int4-weights",)),
    Served("8x7B in 4 bits does not fit a 24 GB card", LLAMA_CPP, "8x7B", "rtx-4090", None, ONE, ("int4-weights",)),
    Served("70B in 4 bits does not fit a 24 GB card", LOCAL_70B, "70B", "rtx-4090", None, ONE, ("int4-weights",)),
    Served("70B in 4 bits fits two 24 GB cards", LOCAL_70B, "70B", "2xrtx-4090",
           lambda plan: plan.weights == "int4" and degrees(plan) in ((2, 1, 1), (1, 2, 1)), ONE, ("int4-weights",)),
    Served("405B in bf16 fits 8 B200 and is tensor parallel", VLLM_405B, "405B", "8xb200",
           lambda plan: degrees(plan) == (8, 1, 1)),
    Served("405B in bf16 does not fit 4 GB200", VLLM_405B, "405B", "4xgb200", None),
    Served("70B in bf16 fits one MI300X", MI300X_72B, "70B", "mi300x", lambda plan: degrees(plan) == (1, 1, 1)),
    Served("8B in bf16 does not fit a T4", LLAMA_CPP, "8B", "t4", None),
)  # fmt: skip


@pytest.mark.parametrize("question", SERVING, ids=lambda question: question.name)
def test_serving(question: Served) -> None:
    workload = InferenceWorkload(prompt_length=512, output_length=256, allow=question.allow, **dict(question.limits))
    candidates = rank_plans(describe(question.host), SERVED[question.model], workload, fixed={}).candidates
    labels = [candidate.plan.label() for candidate in candidates[:1]]
    if question.answer is None:
        assert not candidates, f"{question.source}: {labels}"
    else:
        assert candidates and question.answer(candidates[0].plan), f"{question.source}: {labels}"


def test_an_unknown_rate_is_not_guessed() -> None:
    """A Mac generates with 4-bit weights in practice. No source publishes its rate, so the plan says what it needs to know."""
    workload = InferenceWorkload(prompt_length=512, output_length=256, allow=("int4-weights",), concurrency=1)
    ranking = rank_plans(describe("m2-max-64gb"), SERVED["8B"], workload, fixed={})
    assert not ranking.candidates
    assert all("rate" in entry.reason and "Host JSON file" in entry.reason for entry in ranking.rejected)
