"""One contender of the offload case, in this process: python offload_run.py REQUEST.json. It loads the model and says so; then
each line that it is given, a token's number, is one forward pass of that token alone, and each line that it says what it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from load_run import LOADERS


def ready(request: dict[str, Any]) -> Any:
    """The model, after a first pass that reads what stays in memory, too."""
    start = time.perf_counter()
    model = LOADERS[request["contender"]](request["model"], request["dtype"], request["options"])
    one_pass(model, 0)
    print(json.dumps({"load": time.perf_counter() - start}), flush=True)
    return model


def one_pass(model: Any, token: int) -> dict[str, Any]:
    reader = getattr(getattr(model, "_upshift_offload", None), "reader", None)
    before, start = reader.bytes_read if reader else 0, time.perf_counter()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[token]])).logits
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "read": reader.bytes_read - before if reader else None, "token": int(logits[0, -1].argmax())}


if __name__ == "__main__":
    loaded = ready(json.loads(Path(sys.argv[1]).read_text()))
    for line in sys.stdin:
        print(json.dumps(one_pass(loaded, int(line))), flush=True)
