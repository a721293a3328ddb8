"""Batches of rows of tokens, padded to the longest with the token 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in batch])
    others = {name: torch.tensor([row[name] for row in batch]) for name in batch[0] if name != "input_ids"}
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **others}
