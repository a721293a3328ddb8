"""The glossary explains each word that stands in the name of a plan."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest

from upshift.planning.layout import ContextKind, FullyShard, Layout, Schedule
from upshift.planning.plan import (
    HOW_RECOMPUTED,
    Attention,
    Compile,
    HostMemory,
    LossKernel,
    Plan,
    Precision,
    Rounding,
    WeightOffload,
)

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
VALUES = {
    "precision": get_args(Precision),
    "attention": get_args(Attention),
    "torch_compile": get_args(Compile),
    "host_memory": get_args(HostMemory),
    "weight_offload": get_args(WeightOffload),
    "loss_kernel": get_args(LossKernel),
    "rounding": get_args(Rounding),
    "recompute_granularity": tuple(HOW_RECOMPUTED),
    "fused_kernels": (True,),
    "packing": (True,),
    "activation_offload": (True,),
    "optimizer_in_backward": (True,),
    "optim_offload": (True,),
    "mup_base": ("width",),
    "loss_chunk_tokens": (64,),
}
LAYOUTS = (
    *(Layout(fully_shard=stage, shard_size=2) for stage in get_args(FullyShard)),
    *(Layout(pipeline_parallel=2, pipeline_schedule=schedule) for schedule in get_args(Schedule)),
    *(Layout(context_parallel=2, context_kind=kind) for kind in get_args(ContextKind)),
    Layout(tensor_parallel=2, sequence_parallel=True, gather_again=True, vocabulary_parallel=True),
    Layout(fully_shard="optimizer", shard_size=2, master_weights=True, bf16_gradients=True, overlap=False),
    Layout(expert_parallel=2),
)


def plan_with(**fields: Any) -> Plan:
    usual: dict[str, Any] = {
        "device": "cpu",
        "host": "host",
        "model": "model",
        "sequence_length": 64,
        "activation_checkpointing": 2,
    }
    return Plan.model_construct(**{**usual, "per_device_train_batch_size": 1, "num_processes": 2, **fields})


@pytest.mark.parametrize("name", VALUES)
def test_the_words_of_each_choice_are_explained(name: str) -> None:
    plans = [plan_with(**{"precision": "bf16-weights", name: value}) for value in VALUES[name]]
    assert unexplained([plan.label() for plan in plans]) == set()


def test_the_words_of_each_layout_are_explained() -> None:
    assert unexplained([layout.label() for layout in LAYOUTS]) == set()


def unexplained(labels: list[str]) -> set[str]:
    """The words of labels that are not in the glossary as they are."""
    explained = set(re.findall(r"[\w-]+", GLOSSARY.read_text(encoding="utf-8")))
    words = chain.from_iterable(re.findall(r"[\w-]+", label) for label in labels)
    return {word for word in words if not word.isdecimal()} - explained - {"x", "from", "width"}
