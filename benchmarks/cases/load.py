"""How fast, and in how much memory, does a checkpoint become a model that has computed once?

    python benchmarks/cases/load.py [--quick] [--rounds 3] [--gigabytes 2] [--settings same,bf16,disk] [--caches cold,warm]

A Llama with random weights in fp32, in shards: loaded as it is, converted to bf16, and with only a part of it in memory, by
``upshift.load_model``, transformers' from_pretrained and accelerate's load_checkpoint_and_dispatch; dd reads the same files.
Contenders run in turn, each in a fresh process. Cold: each file is dropped from the page cache before (posix_fadvise).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load_run import LOADERS
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.hardware import detect
from upshift.record import Numbers
from upshift.units import GIB, MIB

CLAIMS = (
    Claim(
        name="same",
        text="a checkpoint becomes a model that has computed once sooner, cold",
        ours="upshift.load_model",
        baseline="transformers' from_pretrained",
        options="--settings same",
        goal=1.0,
        of=Source(row="same, cold/transformers", value="measured.one_time_seconds"),
        over=Source(row="same, cold/upshift", value="measured.one_time_seconds"),
    ),
    Claim(
        name="bf16",
        text="and converted to bf16",
        ours="upshift.load_model",
        baseline="transformers' from_pretrained",
        goal=1.0,
        of=Source(row="bf16, cold/transformers", value="measured.one_time_seconds"),
        over=Source(row="bf16, cold/upshift", value="measured.one_time_seconds"),
    ),
    Claim(
        name="bf16-memory",
        text="in less memory",
        ours="upshift.load_model",
        baseline="transformers' from_pretrained",
        better="lower",
        goal=1.0,
        of=Source(row="bf16, warm/upshift", value="measured.resident_gib"),
        over=Source(row="bf16, cold/transformers", value="measured.resident_gib"),
    ),
)
FIGURES = (
    Figure(name="same-dd-cold", of=Source(row="same, cold/dd", value="measured.one_time_seconds")),
    Figure(name="same-dd-warm", of=Source(row="same, warm/dd", value="measured.one_time_seconds")),
    Figure(name="same-upshift-cold", of=Source(row="same, cold/upshift", value="measured.one_time_seconds")),
    Figure(name="same-upshift-warm", of=Source(row="same, warm/upshift", value="measured.one_time_seconds")),
    Figure(
        name="same-upshift-resident",
        scale=1e-6,
        of=Source(row="same, cold/upshift", value="details.medians.resident"),
    ),
    Figure(
        name="same-upshift-anonymous",
        scale=1e-6,
        of=Source(row="same, cold/upshift", value="details.medians.anonymous"),
    ),
    Figure(
        name="same-transformers-cold",
        of=Source(row="same, cold/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="same-transformers-warm",
        of=Source(row="same, warm/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="same-transformers-resident",
        scale=1e-6,
        of=Source(row="same, cold/transformers", value="details.medians.resident"),
    ),
    Figure(
        name="same-transformers-anonymous",
        scale=1e-6,
        of=Source(row="same, cold/transformers", value="details.medians.anonymous"),
    ),
    Figure(name="bf16-upshift-cold", of=Source(row="bf16, cold/upshift", value="measured.one_time_seconds")),
    Figure(name="bf16-upshift-warm", of=Source(row="bf16, warm/upshift", value="measured.one_time_seconds")),
    Figure(
        name="bf16-upshift-resident",
        scale=1e-6,
        of=Source(row="bf16, warm/upshift", value="details.medians.resident"),
    ),
    Figure(
        name="bf16-upshift-anonymous",
        scale=1e-6,
        of=Source(row="bf16, cold/upshift", value="details.medians.anonymous"),
    ),
    Figure(
        name="bf16-transformers-cold",
        of=Source(row="bf16, cold/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="bf16-transformers-warm",
        of=Source(row="bf16, warm/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="bf16-transformers-resident",
        scale=1e-6,
        of=Source(row="bf16, cold/transformers", value="details.medians.resident"),
    ),
    Figure(
        name="bf16-transformers-anonymous",
        scale=1e-6,
        of=Source(row="bf16, cold/transformers", value="details.medians.anonymous"),
    ),
    Figure(
        name="bf16-accelerate-cold",
        of=Source(row="bf16, cold/accelerate", value="measured.one_time_seconds"),
    ),
    Figure(
        name="bf16-accelerate-warm",
        of=Source(row="bf16, warm/accelerate", value="measured.one_time_seconds"),
    ),
    Figure(
        name="bf16-accelerate-resident",
        scale=1e-6,
        of=Source(row="bf16, cold/accelerate", value="details.medians.resident"),
    ),
    Figure(
        name="bf16-accelerate-anonymous",
        scale=1e-6,
        of=Source(row="bf16, cold/accelerate", value="details.medians.anonymous"),
    ),
    Figure(name="disk-upshift-cold", of=Source(row="disk, cold/upshift", value="measured.one_time_seconds")),
    Figure(name="disk-upshift-warm", of=Source(row="disk, warm/upshift", value="measured.one_time_seconds")),
    Figure(
        name="disk-upshift-resident",
        scale=1e-6,
        of=Source(row="disk, cold/upshift", value="details.medians.resident"),
    ),
    Figure(
        name="disk-upshift-anonymous",
        scale=1e-6,
        of=Source(row="disk, cold/upshift", value="details.medians.anonymous"),
    ),
    Figure(
        name="disk-transformers-cold",
        of=Source(row="disk, cold/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="disk-transformers-warm",
        of=Source(row="disk, warm/transformers", value="measured.one_time_seconds"),
    ),
    Figure(
        name="disk-transformers-resident",
        scale=1e-6,
        of=Source(row="disk, cold/transformers", value="details.medians.resident"),
    ),
    Figure(
        name="disk-transformers-anonymous",
        scale=1e-6,
        of=Source(row="disk, cold/transformers", value="details.medians.anonymous"),
    ),
    Figure(
        name="disk-accelerate-cold",
        of=Source(row="disk, cold/accelerate", value="measured.one_time_seconds"),
    ),
    Figure(
        name="disk-accelerate-warm",
        of=Source(row="disk, warm/accelerate", value="measured.one_time_seconds"),
    ),
    Figure(
        name="disk-accelerate-resident",
        scale=1e-6,
        of=Source(row="disk, warm/accelerate", value="details.medians.resident"),
    ),
    Figure(
        name="disk-accelerate-anonymous",
        scale=1e-6,
        of=Source(row="disk, warm/accelerate", value="details.medians.anonymous"),
    ),
)
TABLES = (
    Table(
        name="seconds",
        header=("", "cold, s", "warm, s", "most memory, MB"),
        rows=(
            (
                "as stored: upshift",
                "{same-upshift-cold:.2f}",
                "{same-upshift-warm:.2f}",
                "{same-upshift-resident:,.0f}, of it {same-upshift-anonymous:.0f} not the files' own pages",
            ),
            (
                "transformers",
                "{same-transformers-cold:.2f}",
                "{same-transformers-warm:.2f}",
                "{same-transformers-resident:,.0f}, of it {same-transformers-anonymous:.0f}",
            ),
            (
                "dd of the same files, without any pass",
                "{same-dd-cold:.2f}",
                "{same-dd-warm:.2f}",
                "",
            ),
            (
                "to bf16: upshift",
                "{bf16-upshift-cold:.2f}",
                "{bf16-upshift-warm:.2f}",
                "{bf16-upshift-resident:,.0f}",
            ),
            (
                "transformers",
                "{bf16-transformers-cold:.2f}",
                "{bf16-transformers-warm:.2f}",
                "{bf16-transformers-resident:,.0f}",
            ),
            (
                "accelerate",
                "{bf16-accelerate-cold:.2f}",
                "{bf16-accelerate-warm:.2f}",
                "{bf16-accelerate-resident:,.0f}",
            ),
            (
                "partly on the disk: upshift",
                "{disk-upshift-cold:.2f}",
                "{disk-upshift-warm:.2f}",
                "{disk-upshift-resident:,.0f}, of it {disk-upshift-anonymous:.0f} its own",
            ),
            (
                "transformers",
                "{disk-transformers-cold:.2f}",
                "{disk-transformers-warm:.2f}",
                "{disk-transformers-resident:,.0f}, of it {disk-transformers-anonymous:.0f}",
            ),
            (
                "accelerate",
                "{disk-accelerate-cold:.2f}",
                "{disk-accelerate-warm:.2f}",
                "{disk-accelerate-resident:,.0f}, of it {disk-accelerate-anonymous:.0f}",
            ),
        ),
    ),
)
PEERS = {"transformers": "--contenders dd,upshift,transformers", "accelerate": "--contenders dd,upshift,accelerate"}

SUITE = "--rounds 1"  # of 1 GB accelerate fails: a file that is all on the disk it opens on a device "disk"
ROOT = Path(__file__).parents[1]
SETTINGS = ("same", "bf16", "disk")
CACHES = ("cold", "warm")
SHARDS = 5
TOKENS = 4
IN_MEMORY = 0.3  # of the model, where the rest is on the disk
QUICK_IN_MEMORY = 0.7  # what computing takes weighs more beside a small one
HIDDEN, FEED_FORWARD, VOCABULARY = 2048, 5632, 16_000
TIMEOUT_SECONDS = 900.0
COLUMNS = ("load", "first forward", "load anonymous", "anonymous", "load resident", "resident")


def config_of(gigabytes: float, *, quick: bool) -> LlamaConfig:
    """As many layers as make about this many bytes in fp32."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2048} if quick else {
        "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD, "vocab_size": VOCABULARY,
    }  # fmt: skip
    layer = 3 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD  # keys and values together are a square, too
    layers = 8 if quick else max(1, round((gigabytes * 1e9 / 4 - 2 * HIDDEN * VOCABULARY) / layer))
    return LlamaConfig(
        **shape, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, architectures=["LlamaForCausalLM"],
        max_position_embeddings=2048, dtype="float32",
    )  # fmt: skip


def write_model(config: LlamaConfig, folder: Path, seed: int) -> int:
    """A shard at a time, so that making it takes no more memory than that, and to the disk: only clean pages can be dropped from
    the cache. -> bytes of weights."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = list(LlamaForCausalLM(config).state_dict().items())
    generator = torch.Generator().manual_seed(seed)
    names: dict[str, str] = {}
    total = 0
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = weights[number * len(weights) // SHARDS : (number + 1) * len(weights) // SHARDS]
        made = {name: (0.02 * torch.randn(weight.shape, generator=generator)).to(config.dtype) for name, weight in mine}
        save_file(made, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return total


def options_of(setting: str, contender: str, model_bytes: int, scratch: Path, *, quick: bool) -> dict[str, Any]:
    if setting != "disk" or contender == "dd":
        return {}
    limit = int((QUICK_IN_MEMORY if quick else IN_MEMORY) * model_bytes) // MIB
    folder = str(scratch / contender)
    found: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": f"{limit}MiB"}, "offload_folder": folder}
    if contender == "accelerate":
        found["no_split_module_classes"] = ["LlamaDecoderLayer"]
    return found


def measure(contender: str, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    path = scratch / "request.json"
    path.write_text(json.dumps(request | {"contender": contender}))
    return run_fresh([sys.executable, str(Path(__file__).with_name("load_run.py")), str(path)], timeout_seconds=TIMEOUT_SECONDS)


def combinations(settings: str, caches: str) -> Iterator[tuple[str, str]]:
    yield from ((setting, cache) for setting in settings.split(",") for cache in caches.split(","))


def run(case: Case, folder: Path, model_bytes: int, scratch: Path, options: Any) -> dict[str, Any]:
    table, outcome = [], {}
    for setting, cache in combinations(options.settings, options.caches):
        runs = {}
        for contender in options.contenders.split(","):
            request = {
                "model": str(folder), "dtype": "bfloat16" if setting == "bf16" else "float32", "cold": cache == "cold",
                "tokens": TOKENS, "options": options_of(setting, contender, model_bytes, scratch, quick=case.quick),
            }  # fmt: skip
            runs[contender] = partial(measure, contender, request, scratch)
        name = f"{setting}, {cache}"
        print_progress(f"{name}: {', '.join(runs)}")
        measured = interleave(runs, rounds=options.rounds)
        for contender, rounds in measured.items():
            found = {key: median(one[key] for one in rounds) for key in (*COLUMNS, "second forward") if key in rounds[0]}
            seconds = [one["load"] + one.get("first forward", 0.0) for one in rounds]
            over_dd = median(mine / one["load"] for mine, one in zip(seconds, measured["dd"], strict=True))
            peak = found.get("resident")
            case.add(
                f"{name}/{contender}", plan={"setting": setting, "cache": cache},
                measured=Numbers(one_time_seconds=median(seconds), resident_gib=None if peak is None else peak / GIB),
                details={"rounds": rounds, "medians": found, "over_dd": over_dd, "model_bytes": model_bytes},
            )  # fmt: skip
            outcome[f"{name}/{contender}"] = found | {"over dd": over_dd, "checksum": rounds[0].get("checksum")}
            cells = [_cell(key, found.get(key)) for key in COLUMNS]
            table.append([f"{name}/{contender}", f"{median(seconds):.2f}", f"{over_dd:.2f}", *cells])
    header = ("setting, cache/contender", "s", "over dd", "load s", "forward s", "load anon MB", "anon MB", "load MB", "MB")
    print(format_table(header, table))
    return outcome


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if column in COLUMNS[:2] else f"{value / 1e6:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the files")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--contenders", default=",".join(("dd", *LOADERS)), help="dd among them")
    parser.add_argument("--scratch", type=Path, help="an existing folder on the disk to be measured; default: the system's own")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="upshift-load-", dir=options.scratch) as scratch:
        folder = Path(scratch) / "model"
        config = config_of(options.gigabytes, quick=options.quick)
        model_bytes = write_model(config, folder, options.seed)
        settings = {"bytes": model_bytes, "layers": config.num_hidden_layers, "rounds": options.rounds, "tokens": TOKENS}
        case = Case("load", options.results, detect(), options.quick, settings)
        outcome = run(case, folder, model_bytes, Path(scratch), options)
    print(json.dumps({"case": "load", "bytes": model_bytes, "results": outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
