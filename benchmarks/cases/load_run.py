"""One contender of the load case, in this process: python load_run.py REQUEST.json. Its last line is the answer.

Seconds and memory are of loading and of the first forward pass, apart: what a mapped file leaves to that pass is seen there. The
libraries are imported before. Anonymous memory is what no file backs, sampled; resident memory is the system's own mark, which
counts mapped pages of the page cache too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from upshift.benchmarking.meters import (
    MemoryRecorder,
    anonymous_bytes,
    reset_resident_peak,
    resident_bytes,
    resident_peak_bytes,
)  # fmt: skip

SAMPLE_SECONDS = 0.004


def evict(files: list[Path]) -> None:
    """Out of the page cache; their pages are clean and nobody maps them."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Memory:
    """The highest of a while, less what was there before it."""

    def __enter__(self) -> Memory:
        self._base, self._resident_base = anonymous_bytes(), resident_bytes()
        reset_resident_peak()
        self._recorder = MemoryRecorder(interval_seconds=SAMPLE_SECONDS, measure=anonymous_bytes).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.__exit__()
        self.anonymous = self._recorder.highest() - self._base
        self.resident = resident_peak_bytes() - self._resident_base


def read_with_dd(files: list[Path]) -> float:
    start = time.perf_counter()
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)
    return time.perf_counter() - start


def load_upshift(folder: str, dtype: str, options: dict[str, Any]) -> Any:
    from upshift.loading.load import load_model

    return load_model(folder, dtype=dtype, **options)


def load_transformers(folder: str, dtype: str, options: dict[str, Any]) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def load_accelerate(folder: str, dtype: str, options: dict[str, Any]) -> Any:
    import torch
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import LlamaConfig, LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    where = {"device_map": {"": "cpu"}} | options
    return load_checkpoint_and_dispatch(model, folder, dtype=getattr(torch, dtype), **where).eval()


LOADERS = {"upshift": load_upshift, "transformers": load_transformers, "accelerate": load_accelerate}


def run(request: dict[str, Any]) -> dict[str, Any]:
    files = sorted(Path(request["model"]).glob("*.safetensors"))
    if request["contender"] == "dd":
        evict(files if request["cold"] else [])
        return {"load": read_with_dd(files)}
    import accelerate  # noqa: F401
    import torch
    from transformers import LlamaForCausalLM

    import upshift.loading.load  # noqa: F401

    LlamaForCausalLM  # noqa: B018  # transformers imports a model when its name is asked for
    load, ids = LOADERS[request["contender"]], torch.arange(request["tokens"])[None]
    evict(files if request["cold"] else [])
    answer: dict[str, Any] = {}
    with torch.inference_mode(False), torch.no_grad(), Memory() as loading:
        start = time.perf_counter()
        model = load(request["model"], request["dtype"], request["options"])
        answer["load"] = time.perf_counter() - start
    with torch.no_grad(), Memory() as forward:
        start = time.perf_counter()
        logits = model(input_ids=ids).logits
        answer["first forward"] = time.perf_counter() - start
    start = time.perf_counter()
    with torch.no_grad():
        model(input_ids=ids)
    answer |= {
        "second forward": time.perf_counter() - start, "checksum": float(logits.double().abs().sum()),
        "load resident": loading.resident, "load anonymous": loading.anonymous,
        "resident": loading.resident + forward.resident, "anonymous": loading.anonymous + forward.anonymous,
    }  # fmt: skip
    return answer


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
