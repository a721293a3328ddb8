"""Check the LoRA adapters that vLLM computes beside a model, and make its engine arguments for them.

serving/adapter_files.py has checked the folders before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.source import ADAPTER_FILE

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM 0.32 takes


def check_adapters(folders: Sequence[str]) -> None:
    """Raise RequestError for an adapter that vLLM does not compute."""
    for folder in folders:
        merge_it = f"merge it with its model: upshift merge {folder} --output DIR, or serve it with --engine torch"
        if read_json(Path(folder) / ADAPTER_FILE).get("lora_bias"):
            raise RequestError(f"the adapter {folder} has lora_bias, which vLLM does not compute; {merge_it}")
        rank = largest_rank(folder)
        if rank > RANKS[-1]:
            raise RequestError(f"the adapter {folder} has the rank {rank:,}, and vLLM takes at most {RANKS[-1]}; {merge_it}")


def largest_rank(folder: str) -> int:
    """Return the largest rank of an adapter."""
    config = read_json(Path(folder) / ADAPTER_FILE)
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(map(int, ranks))


def engine_arguments(folders: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's engine arguments for adapters of these folders."""
    if not folders:
        return {}
    largest = max(map(largest_rank, folders))
    return {
        "enable_lora": True,
        "max_loras": len(folders),
        "max_lora_rank": next(rank for rank in RANKS if rank >= largest),
    }
