"""How long does a token take of a model that waits on the disk, and how busy is the disk meanwhile?

    python benchmarks/cases/offload.py [--quick] [--passes 8] [--gigabytes 2] [--dtypes float32,bfloat16]

A Llama with random weights of which 45 % may be in memory, by ``upshift.load_model`` and by accelerate's
load_checkpoint_and_dispatch, each in a process of its own, pass by pass in turn: first with the files that it reads out of the
page cache, then again. After each cold pass dd reads a copy of the files, out of the cache as well (of the files themselves pages
are mapped, which no system drops). At the end the whole model in memory must have said the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load import config_of, write_model
from load_run import evict, read_with_dd

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table
from upshift.errors import JobFailed
from upshift.hardware import detect
from upshift.record import Numbers
from upshift.units import MIB

CLAIMS = (
    Claim(
        name="disk",
        text="a model that waits on the disk keeps the disk busy",
        ours="a pass over the model",
        baseline="dd of a copy of its files",
        unit="of dd's rate",
        goal=0.7,
        of=Source(row="float32, cold/upshift", value="details.share_of_dd"),
    ),
    Claim(
        name="disk-bfloat16",
        text="the same in 16 bits",
        ours="a pass over the model",
        baseline="dd of a copy of its files",
        unit="of dd's rate",
        goal=0.7,
        of=Source(row="bfloat16, cold/upshift", value="details.share_of_dd"),
    ),
    Claim(
        name="accelerate",
        text="a token of a model that waits on the disk",
        ours="upshift.load_model",
        baseline="accelerate's load_checkpoint_and_dispatch",
        goal=1.0,
        of=Source(row="float32, cold/upshift", value="details.accelerate_over_this"),
    ),
    Claim(
        name="accelerate-bfloat16",
        text="the same in 16 bits",
        ours="upshift.load_model",
        baseline="accelerate's load_checkpoint_and_dispatch",
        goal=1.0,
        of=Source(row="bfloat16, cold/upshift", value="details.accelerate_over_this"),
    ),
    Claim(
        name="accelerate-warm",
        text="and where the page cache has the files",
        ours="upshift.load_model",
        baseline="accelerate's load_checkpoint_and_dispatch",
        goal=1.0,
        of=Source(row="float32, warm/upshift", value="details.accelerate_over_this"),
    ),
    Claim(
        name="accelerate-warm-bfloat16",
        text="the same in 16 bits",
        ours="upshift.load_model",
        baseline="accelerate's load_checkpoint_and_dispatch",
        goal=1.0,
        of=Source(row="bfloat16, warm/upshift", value="details.accelerate_over_this"),
    ),
)

SUITE = "--passes 2 --gigabytes 1"
ROOT = Path(__file__).parents[1]
IN_MEMORY = 0.45
QUICK_IN_MEMORY = 0.7  # what computing takes weighs more beside a small model
CONTENDERS = ("upshift", "accelerate")
CACHES = ("cold", "warm")
WHOLE = "transformers"  # in memory
RATIOS = ("share_of_dd", "accelerate_over_this")


class Runner:
    """A contender's process, which waits for its next token."""

    def __init__(self, request: dict[str, Any], scratch: Path) -> None:
        path = scratch / f"request-{request['contender']}.json"
        path.write_text(json.dumps(request))
        command = [sys.executable, str(Path(__file__).with_name("offload_run.py")), str(path)]
        quiet = os.environ | {"TQDM_DISABLE": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        self.files = [*Path(request["model"]).glob("*.safetensors"), *_within(request["options"].get("offload_folder"))]
        self.loaded = self._answer()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def one_pass(self, token: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{token}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"{self._process.args} ended with {self._process.wait()} and without an answer; its error is above")
        found: dict[str, Any] = json.loads(line)
        return found


def _within(folder: str | None) -> list[Path]:
    return [] if folder is None else [path for path in Path(folder).glob("**/*") if path.is_file()]


def measure(requests: dict[str, dict[str, Any]], folder: Path, scratch: Path, passes: int) -> dict[str, list[dict[str, Any]]]:
    """By cache and contender, what each pass said; cold ones with dd's rate after it."""
    copy = sorted(Path(shutil.copytree(folder, scratch / "copy")).glob("*.safetensors"))
    total = sum(file.stat().st_size for file in copy)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as processes:
        runners = {name: processes.enter_context(Runner(requests[name], scratch)) for name in CONTENDERS}
        for runner in runners.values():
            runner.files += _within(requests["accelerate"]["options"]["offload_folder"])
        os.sync()  # only clean pages can be dropped
        tokens = dict.fromkeys(runners, 0)
        for number in range(passes):
            for name in CONTENDERS if number % 2 else CONTENDERS[::-1]:
                evict(runners[name].files)
                for cache in CACHES:
                    found[f"{cache}/{name}"].append(runners[name].one_pass(tokens[name]))
                tokens[name] = found[f"cold/{name}"][-1]["token"]
                evict(copy)
                found[f"cold/{name}"][-1]["rate"] = total / read_with_dd(copy)
    return found


def whole(request: dict[str, Any], scratch: Path, passes: int) -> list[dict[str, Any]]:
    """The same tokens, in memory."""
    found: list[dict[str, Any]] = []
    with Runner(request, scratch) as runner:
        for _ in range(passes):
            found.append(runner.one_pass(found[-1]["token"] if found else 0))
    return found


def run(case: Case, dtype: str, folder: Path, model_bytes: int, scratch: Path, options: Any) -> dict[str, Any]:
    limit = int((QUICK_IN_MEMORY if case.quick else IN_MEMORY) * model_bytes) // MIB
    requests = {}
    for name in CONTENDERS:
        where = {"device_map": "auto", "max_memory": {"cpu": f"{limit}MiB"}, "offload_folder": str(scratch / name)}
        requests[name] = {"model": str(folder), "dtype": dtype, "contender": name, "options": where}
    requests["accelerate"]["options"]["no_split_module_classes"] = ["LlamaDecoderLayer"]
    print_progress(f"{dtype}: {', '.join(CONTENDERS)}, in turn")
    found = measure(requests, folder, scratch, options.passes)
    print_progress(f"{dtype}: in memory")
    found["warm/in memory"] = whole(requests["upshift"] | {"contender": WHOLE, "options": {}}, scratch, options.passes)
    tokens = [one["token"] for one in found["warm/in memory"]]
    if tokens != [one["token"] for one in found["cold/upshift"]]:
        raise JobFailed(f"{dtype}: from the disk come other tokens than from memory, {tokens}")
    return report(case, dtype, found, model_bytes)


def report(case: Case, dtype: str, found: dict[str, list[dict[str, Any]]], model_bytes: int) -> dict[str, Any]:
    outcome, table = {}, []
    for key, passes in found.items():
        cache, _, name = key.partition("/")
        seconds = median(one["seconds"] for one in passes)
        shares = [one["read"] / one["seconds"] / one["rate"] for one in passes if one["read"] and "rate" in one]
        theirs = found.get(f"{cache}/accelerate") if name == "upshift" else None
        details = {
            "passes": passes, "model_bytes": model_bytes, "share_of_dd": median(shares) if shares else None,
            "accelerate_over_this": median(a["seconds"] / b["seconds"] for a, b in zip(theirs, passes, strict=True))
            if theirs else None,
        }  # fmt: skip
        plan = {"dtype": dtype, "in_memory": QUICK_IN_MEMORY if case.quick else IN_MEMORY, "cache": cache}
        case.add(f"{dtype}, {key}", plan=plan, measured=Numbers(tokens_per_second=1 / seconds), details=details)
        outcome[f"{dtype}, {key}"] = {"seconds": seconds} | {name: details[name] for name in RATIOS}
        read = median(one["read"] for one in passes) / 1e6 if passes[0]["read"] else None
        rate = median(one["rate"] for one in passes) / 1e6 if "rate" in passes[0] else None
        cells = (read, rate, *(details[name] for name in RATIOS))
        shown = ["" if cell is None else f"{cell:.{digits}f}" for cell, digits in zip(cells, (0, 0, 2, 2), strict=True)]
        table.append([f"{dtype}, {key}", f"{seconds:.3f}", *shown])
    print(
        format_table(("weights, cache/contender", "s a token", "MB read", "dd MB/s", "of dd's rate", "accelerate over it"), table)
    )
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the files")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--scratch", type=Path, help="an existing folder on the disk to be measured; default: the system's own")
    options = parser.parse_args(arguments)
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
