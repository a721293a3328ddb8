"""The published measurements in benchmarks/published: every row parses, says where it is from and agrees with itself."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from upshift.hardware.catalog.lookup import GPUS

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"
FILES = ("training", "inference", "memory")
FLOORS = {"training": (150, 5), "inference": (60, 3), "memory": (40, 3)}  # rows, sources

COMMON = {
    "source", "path", "commit", "quote", "verified", "model", "config", "host", "host_note", "precision", "tensor_parallel",
    "pipeline_parallel", "tokens_per_second_per_device", "peak_gib", "notes",
}  # fmt: skip
TRAINING = COMMON | {
    "method", "sequence_length", "global_batch", "micro_batch", "gradient_accumulation", "fully_shard", "data_parallel",
    "sequence_parallel", "schedule", "virtual_stages", "context_parallel", "expert_parallel", "recompute", "compile", "optimizer",
    "attention", "framework", "step_seconds", "tflops_per_device", "mfu", "mfu_convention", "memory_kind",
}  # fmt: skip
INFERENCE = COMMON | {
    "kv_precision", "engine", "input_length", "output_length", "concurrency", "requests_per_second", "ttft_ms", "tpot_ms",
}  # fmt: skip
FIELDS = {"training": TRAINING, "memory": TRAINING, "inference": INFERENCE}

COUNTS = {
    "sequence_length", "global_batch", "micro_batch", "gradient_accumulation", "data_parallel", "tensor_parallel",
    "pipeline_parallel", "virtual_stages", "context_parallel", "expert_parallel", "input_length", "output_length", "concurrency",
}  # fmt: skip
FIGURES = {
    "tokens_per_second_per_device", "step_seconds", "tflops_per_device", "mfu", "peak_gib", "requests_per_second", "ttft_ms",
    "tpot_ms",
}  # fmt: skip
CHOICES = {
    "method": {"pretrain", "full", "lora", "qlora"},
    "precision": {"fp32", "bf16", "fp16", "fp8", "mxfp8", "fp4", "nvfp4", "int8", "int4", "nf4"},
    "kv_precision": {"bf16", "fp16", "fp8"},
    "fully_shard": {"none", "zero1", "zero2", "zero3", "hybrid"},
    "schedule": {"1f1b", "interleaved 1f1b", "gpipe", "zero bubble"},
    "recompute": {"none", "full", "selective"},
    "memory_kind": {"allocated", "reserved", "device"},
    "compile": {True, False},
    "sequence_parallel": {True, False},
}
OTHER_DEVICES = {  # not in our own table
    "a5000", "b300", "gb200", "gb300", "gh200", "mi250x", "mi300x", "rtx-6000-ada", "rtx-a6000", "rtx-pro-6000", "tpu-v5e",
    "tpu-v5p", "tpu-v6e",
}  # fmt: skip
HOST = re.compile(r"(?:([1-9][0-9]*)x)?(?:([1-9][0-9]*)x)?([a-z][a-z0-9-]*)(?:@[a-z0-9-]+)?")  # nodes x devices x name @ link
EVERY = pytest.mark.parametrize("name", FILES)


@cache
def rows(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def given(row: dict[str, Any], *fields: str) -> list[Any] | None:
    """The values of these fields; None: at least one is unknown."""
    values = [row[field] for field in fields]
    return None if None in values else values


def devices(host: str) -> int:
    match = HOST.fullmatch(host)
    assert match is not None, host
    return int(match[1] or 1) * int(match[2] or 1)


def refuse(broken: list[str]) -> None:
    if broken:
        pytest.fail("\n  ".join([f"{len(broken)} rows:", *broken[:10]]), pytrace=False)


def where(name: str, number: int, why: object) -> str:
    return f"{name}.jsonl:{number}: {why}"


@EVERY
def test_fields(name: str) -> None:
    differ = ((number, sorted(FIELDS[name] ^ row.keys())) for number, row in enumerate(rows(name), start=1))
    refuse([where(name, number, fields) for number, fields in differ if fields])


@EVERY
def test_there_are_enough(name: str) -> None:
    least, sources = FLOORS[name]
    verified = [row for row in rows(name) if row["verified"]]
    assert len(verified) >= least
    assert len({row["source"] for row in verified}) >= sources


@EVERY
def test_every_row_says_where_it_is_from(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        url = str(row["source"]).startswith("https://")
        repository = re.fullmatch(r"[\w.-]+/[\w.-]+", row["source"]) is not None and bool(row["path"])
        commit = row["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", row["commit"]) is not None
        backed = url or (repository and row["commit"] is not None) or not row["verified"]
        if not (url or repository) or not commit or not backed or not row["quote"] or type(row["verified"]) is not bool:
            broken.append(where(name, number, row["source"]))
        if not row["verified"] and not row["notes"]:
            broken.append(where(name, number, "not verified, and no note says why"))
    refuse(broken)


@EVERY
def test_no_row_twice(name: str) -> None:
    seen: set[tuple[str, ...]] = set()
    broken = []
    for number, row in enumerate(rows(name), start=1):
        key = (row["source"], row["path"], row["quote"], row.get("memory_kind") or "")
        if key in seen:
            broken.append(where(name, number, key))
        seen.add(key)
    refuse(broken)


@EVERY
def test_numbers_are_positive(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        for field in COUNTS & row.keys():
            if row[field] is not None and not (type(row[field]) is int and row[field] > 0):
                broken.append(where(name, number, f"{field} {row[field]}"))
        for field in FIGURES & row.keys():
            value = row[field]
            if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value > 0):
                broken.append(where(name, number, f"{field} {value}"))
        if row.get("mfu") is not None and row["mfu"] >= 1:
            broken.append(where(name, number, f"mfu {row['mfu']} is a share, not a percentage"))
    refuse(broken)


@EVERY
def test_words_are_known(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        for field in CHOICES.keys() & row.keys():
            if row[field] is not None and row[field] not in CHOICES[field]:
                broken.append(where(name, number, f"{field} {row[field]!r}"))
    refuse(broken)


@EVERY
def test_hosts(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        match = HOST.fullmatch(row["host"])
        if match is None or match[3] not in GPUS.keys() | OTHER_DEVICES:
            broken.append(where(name, number, row["host"]))
    refuse(broken)


@EVERY
def test_configs_can_be_built(name: str) -> None:
    sizes = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("vocab_size",)
    broken = []
    for number, row in enumerate(rows(name), start=1):
        config = row["config"]
        whole = all(any(type(config.get(key)) is int for key in keys) for keys in sizes)
        if not config.get("model_type") or not whole:
            broken.append(where(name, number, config))
    refuse(broken)


@pytest.mark.parametrize("name", ["training", "memory"])
def test_degrees_multiply_to_the_devices(name: str) -> None:
    degrees = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    broken = []
    for number, row in enumerate(rows(name), start=1):
        known = given(row, *degrees)
        if known is not None and math.prod(known) != devices(row["host"]):
            broken.append(where(name, number, f"{known} on {row['host']}"))
        expert, data, context = row["expert_parallel"], row["data_parallel"], row["context_parallel"]
        if expert and data and context and (data * context * (row["tensor_parallel"] or 1)) % expert:
            broken.append(where(name, number, f"{expert} expert-parallel ranks in {data} data-parallel ones"))
    refuse(broken)


def test_inference_degrees_divide_the_devices() -> None:
    broken = []
    for number, row in enumerate(rows("inference"), start=1):
        known = given(row, "tensor_parallel", "pipeline_parallel")
        if known is not None and devices(row["host"]) % math.prod(known):
            broken.append(where("inference", number, f"{known} on {row['host']}"))
    refuse(broken)


@pytest.mark.parametrize("name", ["training", "memory"])
def test_batches_multiply(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        known = given(row, "micro_batch", "gradient_accumulation", "data_parallel", "global_batch")
        if known is not None and math.prod(known[:3]) != known[3]:
            broken.append(where(name, number, known))
    refuse(broken)


def test_step_time_and_throughput_agree() -> None:
    broken = []
    for number, row in enumerate(rows("training"), start=1):
        known = given(row, "global_batch", "sequence_length", "step_seconds", "tokens_per_second_per_device")
        if known is not None:
            batch, length, seconds, rate = known
            if abs(batch * length / seconds / devices(row["host"]) / rate - 1) > 0.02:
                broken.append(where("training", number, known))
    refuse(broken)


def test_every_row_measures_something() -> None:
    rates = "tokens_per_second_per_device", "step_seconds", "tflops_per_device"
    broken = [where("training", n, "") for n, row in enumerate(rows("training"), 1) if not any(row[key] for key in rates)]
    broken += [where("inference", n, "") for n, row in enumerate(rows("inference"), 1) if not row[rates[0]]]
    broken += [where("memory", n, "") for n, row in enumerate(rows("memory"), 1) if given(row, "peak_gib", "memory_kind") is None]
    refuse(broken)


@pytest.mark.parametrize("name", ["training", "memory"])
def test_a_memory_figure_says_which(name: str) -> None:
    broken = []
    for number, row in enumerate(rows(name), start=1):
        if (row["peak_gib"] is None) != (row["memory_kind"] is None):
            broken.append(where(name, number, row["quote"]))
    refuse(broken)
