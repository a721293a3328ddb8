"""How busy does a model that waits on the disk keep the disk, token by token?

    python benchmarks/cases/offload.py [--quick] [--passes 8] [--gigabytes 2] [--dtypes float32,bfloat16]

A Llama with random weights of which 45 % may be in memory, in a fresh process for each of ``upshift.load_model`` and accelerate's
load_checkpoint_and_dispatch. Before each token pass the files leave the page cache; after each, dd reads them all in the same
state, and its rate is what the pass is held against. The first pass, which reads what stays in memory too, is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load import config_of, write_model
from load_run import LOADERS, evict, read_with_dd

from upshift.benchmarking.case import Case, command_line, tell
from upshift.benchmarking.figures import Claim, Source
from upshift.benchmarking.harness import format_table, run_fresh
from upshift.hardware import detect
from upshift.record import Numbers
from upshift.units import MIB

CLAIMS = (
    Claim(
        name="disk",
        text="a model that waits on the disk keeps the disk busy",
        ours="a pass over the model",
        baseline="dd of the same bytes",
        unit="of dd's rate",
        goal=0.7,
        of=Source(row="float32/upshift", value="details.share_of_dd"),
    ),
    Claim(
        name="disk-bfloat16",
        text="the same in 16 bits",
        ours="a pass over the model",
        baseline="dd of the same bytes",
        unit="of dd's rate",
        goal=0.7,
        of=Source(row="bfloat16/upshift", value="details.share_of_dd"),
    ),
)

ROOT = Path(__file__).parents[1]
IN_MEMORY = 0.45
CONTENDERS = ("upshift", "accelerate")
TIMEOUT_SECONDS = 900.0


def passes(request: dict[str, Any]) -> dict[str, Any]:
    """In this process: the seconds of each pass, what it read, and the rate of dd after it."""
    files = sorted(Path(request["model"]).glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    model = LOADERS[request["contender"]](request["model"], request["dtype"], request["options"])
    reader, ids = getattr(getattr(model, "_upshift_offload", None), "reader", None), torch.arange(1)[None]
    found: dict[str, Any] = {"seconds": [], "rates": [], "read": []}
    with torch.no_grad():
        model(input_ids=ids)
        for _ in range(request["passes"]):
            evict(files)
            before, start = reader.bytes_read if reader else 0, time.perf_counter()
            model(input_ids=ids)
            found["seconds"].append(time.perf_counter() - start)
            found["read"].append(reader.bytes_read - before if reader else None)
            evict(files)
            found["rates"].append(total / read_with_dd(files))
    return found


def run(case: Case, dtype: str, folder: Path, model_bytes: int, scratch: Path, options: Any) -> dict[str, Any]:
    limit, table, outcome = int(IN_MEMORY * model_bytes) // MIB, [], {}
    for contender in CONTENDERS:
        tell(f"{dtype}: {contender}")
        where: dict[str, Any] = {
            "device_map": "auto", "max_memory": {"cpu": f"{limit}MiB"}, "offload_folder": str(scratch / f"{contender}-{dtype}")
        }  # fmt: skip
        if contender == "accelerate":
            where["no_split_module_classes"] = ["LlamaDecoderLayer"]
        request = {"model": str(folder), "dtype": dtype, "contender": contender, "options": where, "passes": options.passes}
        path = scratch / "request.json"
        path.write_text(json.dumps(request))
        found = run_fresh([sys.executable, str(Path(__file__)), "--of", str(path)], timeout_seconds=TIMEOUT_SECONDS)
        rows = list(zip(found["seconds"], found["read"], found["rates"], strict=True))
        shares = [read / seconds / rate for seconds, read, rate in rows if read]
        seconds, rate = median(found["seconds"]), median(found["rates"])
        share = median(shares) if shares else None
        case.add(
            f"{dtype}/{contender}", plan={"dtype": dtype, "in_memory": IN_MEMORY},
            measured=Numbers(tokens_per_second=1 / seconds),
            details=found | {"model_bytes": model_bytes, "share_of_dd": share},
        )  # fmt: skip
        outcome[f"{dtype}/{contender}"] = {"seconds": seconds, "share": share, "dd": rate}
        read = f"{found['read'][0] / 1e6:.0f}" if shares else ""
        table.append([f"{dtype}/{contender}", f"{seconds:.2f}", read, f"{rate / 1e6:.0f}", f"{share:.2f}" if share else ""])
    print(format_table(("weights/contender", "s a token", "MB read", "dd MB/s", "share of dd's rate"), table))
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the files")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--scratch", type=Path, help="an existing folder on the disk to be measured; default: the system's own")
    parser.add_argument("--of", type=Path, help="one contender's request, in this process")
    options = parser.parse_args(arguments)
    if options.of is not None:
        print(json.dumps(passes(json.loads(options.of.read_text()))))
        return 0
    outcome: dict[str, Any] = {}
    for dtype in options.dtypes.split(","):
        with tempfile.TemporaryDirectory(prefix="upshift-offload-", dir=options.scratch) as scratch:
            folder = Path(scratch) / "model"
            width = getattr(torch, dtype).itemsize
            config = config_of(options.gigabytes * 4 / width, quick=options.quick)
            config.dtype = getattr(torch, dtype)
            model_bytes = write_model(config, folder, options.seed)
            settings = {"bytes": model_bytes, "layers": config.num_hidden_layers, "passes": options.passes}
            case = Case("offload", options.results, detect(), options.quick, settings)
            outcome |= run(case, dtype, folder, model_bytes, Path(scratch), options)
    print(json.dumps({"case": "offload", "results": outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
