"""Generates and evaluates with a model under a limit of memory, then without one. Prints both as one JSON object.

A process of its own: ``python larger_than_memory.py FOLDER LIMIT``. The limit is on all private memory that can be written to
(RLIMIT_DATA), libraries included; mapped files are not in it, as they are not in what a container is killed for.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import upshift
from upshift.benchmarking.meters import MemoryRecorder, anonymous_bytes


@contextmanager
def more_memory(found: dict[str, Any], name: str) -> Iterator[None]:
    """Bytes that no file backs, at the highest moment of the block, above those before it."""
    before = anonymous_bytes()
    with MemoryRecorder(interval_seconds=0.01, measure=anonymous_bytes) as recorder:
        yield
        found[name] = recorder.highest() - before


def said(model: Any) -> dict[str, Any]:
    ids = 7 * torch.arange(12)[None]
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)[0, 12:].tolist()
    with torch.no_grad():
        return {"tokens": tokens, "loss": model(ids, labels=ids).loss.item()}


def main(folder: str, limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        torch.empty(limit, dtype=torch.uint8)
        raise AssertionError("the limit does not hold")
    except RuntimeError:
        pass
    found: dict[str, Any] = {}
    with more_memory(found, "loading"):
        model: Any = upshift.load_model(folder, device_map="auto", max_memory={"cpu": limit // 2})
    with more_memory(found, "running"):
        found["limited"] = said(model)
    reader = model._upshift_offload.reader
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    unlimited = said(AutoModelForCausalLM.from_pretrained(folder))
    found |= {"unlimited": unlimited, "read": reader.bytes_read, "buffers": reader.peak_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
