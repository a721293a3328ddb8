"""Generates and evaluates with a model under a limit of memory, then without one. Prints both as one JSON object.

A process of its own: ``python larger_than_memory.py FOLDER LIMIT``. The limit is on all private memory that can be written to
(RLIMIT_DATA), libraries included; mapped files are not in it, as they are not in what a container is killed for.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import upshift


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Highest:
    def __enter__(self) -> Highest:
        self.before = self.most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.most = max(self.most, anonymous_bytes())


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
    with Highest() as loading:
        model: Any = upshift.load_model(folder, device_map="auto", max_memory={"cpu": limit // 2})
    with Highest() as running:
        limited = said(model)
    reader = model._upshift_offload.reader
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    found = {
        "limited": limited, "unlimited": said(AutoModelForCausalLM.from_pretrained(folder)), "read": reader.bytes_read,
        "loading": loading.most - loading.before, "running": running.most - running.before, "buffers": reader.most_held,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
