"""How far a job scales by the planner: tokens per second of a device, from one node to 10,000 devices with as much work each.

    python benchmarks/cases/weak_scaling.py --write docs

writes docs/weak_scaling.svg and prints the table of docs/distributed.md. Nothing is measured: these are predictions for described
hosts, whose assumptions the drawing names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drawing import Drawing
from transformers import LlamaConfig

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Source, Table
from upshift.hardware import describe, detect
from upshift.models.source import find_model_to_train
from upshift.planning.planner import plan_training
from upshift.planning.workload import Workload

CLAIMS = (
    Claim(
        name="share",
        text="of 10,000 devices each does nearly what one of 8 does, as predicted for H100 with NDR InfiniBand",
        ours="10,000 devices",
        baseline="8 devices",
        unit="of the tokens/s",
        goal=0.9,
        of=Source(row="summary", value="details.share"),
    ),
)
TABLES = (
    Table(
        name="devices",
        header=(
            "devices",
            "the planner's choice",
            "weights divided among all ranks",
            "weights divided in a node, copied between nodes",
            "tensor parallel 8 in a node",
            "the planner's plan",
        ),
        of="summary",
        each="details.devices",
        cells=("{chosen:,.0f}", "{all:,.0f}", "{node:,.0f}", "{tensor:,.0f}", "{plan}"),
    ),
)
SUITE = "--quick"
ROOT = Path(__file__).parents[1]
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1250)
SEQUENCE, EACH = 4096, 4  # tokens; sequences of a device in a step
HOST = "8xh100@ib-ndr"
SHORT = ("chosen", "all", "node", "tensor")
WAYS: dict[str, tuple[str, ...]] = {
    "the planner's choice": (),
    "weights divided among all ranks": ("fully_shard=weights", "tensor_parallel=1", "pipeline_parallel=1", "shard_size={ranks}"),
    "weights divided in a node, copied between nodes": (
        "fully_shard=weights", "tensor_parallel=1", "pipeline_parallel=1", "shard_size=8",
    ),
    "tensor parallel 8 in a node": ("tensor_parallel=8",),
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
Line = list[tuple[int, float, str]]  # devices, tokens per second of a device, the plan


def predicted(sizes: Sequence[int]) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_8B).save_pretrained(folder)
        source = find_model_to_train(folder)
        for name, fixed in WAYS.items():
            lines[name] = []
            for nodes in sizes:
                host = describe(f"{nodes}x{HOST}" if nodes > 1 else HOST.partition("@")[0])
                workload = Workload(sequence_length=SEQUENCE, global_batch=EACH * host.num_devices)
                asked = tuple(text.format(ranks=host.num_devices) for text in fixed)
                best = plan_training(source, host, workload, fixed=asked, described=True).ranking.candidates[0]
                lines[name].append((host.num_devices, best.tokens_per_second / host.num_devices, best.plan.label()))
                print(f"{host.num_devices:6,}  {lines[name][-1][1]:9,.0f}  {name}: {best.plan.label()}", flush=True)
    return lines


def drawn(lines: dict[str, Line]) -> str:
    """Devices on a logarithmic axis."""
    points = [point for line in lines.values() for point in line]
    most, least = max(point[0] for point in points), min(point[0] for point in points)
    drawing = Drawing(
        title=f"Llama 3 8B, predicted tokens/s of each device, {EACH} sequences of {SEQUENCE:,} tokens a device",
        note="nodes of 8 H100 SXM, an NDR InfiniBand port for each GPU; predictions, not measurements",
        x_ticks=(8, 32, 128, 512, 2048, most), x_ends=(least, most), top=1.08 * max(point[1] for point in points),
        x_text="{:,}".format, y_text="{:,.0f}".format, logarithmic=True,
    )  # fmt: skip
    for name, line in lines.items():
        drawing.line(name, [(devices, rate) for devices, rate, _ in line])
    return drawing.svg()


def by_devices(lines: dict[str, Line]) -> dict[str, dict[str, float | str]]:
    """Tokens/s of each device by the short names of WAYS, and the planner's plan."""
    found: dict[str, dict[str, float | str]] = {}
    for points in zip(*lines.values(), strict=True):
        devices, _, plan = points[0]
        rates = {short: rate for short, (_, rate, _) in zip(SHORT, points, strict=True)}
        found[f"{devices:,}"] = {**rates, "plan": plan}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--write", type=Path, help="folder for weak_scaling.svg")
    options = parser.parse_args(arguments)
    lines = predicted(NODES[:: len(NODES) - 1] if options.quick else NODES)
    chosen = lines[next(iter(WAYS))]
    share = chosen[-1][1] / chosen[0][1]
    case = Case(
        "weak_scaling", options.results, detect(), options.quick, {"sequence_length": SEQUENCE, "each": EACH, "host": HOST}
    )
    case.add("summary", plan={}, measured=None, details={"share": share, "devices": by_devices(lines)})
    if options.write is not None:
        (options.write / "weak_scaling.svg").write_text(drawn(lines), encoding="utf-8")
    print(json.dumps({"case": "weak_scaling", "share": share}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
