"""How far a job scales by the planner: tokens per second of a device, from one node to 10,000 devices with as much work each.

    python benchmarks/cases/weak_scaling.py --write docs

writes docs/weak_scaling.svg and prints the table of docs/distributed.md. Nothing is measured: these are predictions for described
hosts, whose assumptions the drawing names.
"""

from __future__ import annotations

import argparse
import tempfile
from math import log10
from pathlib import Path

from transformers import LlamaConfig

from upshift.errors import UpshiftError
from upshift.hardware import describe
from upshift.models.source import find_to_train
from upshift.planning.planner import plan_training
from upshift.planning.workload import Workload

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1250)
SEQUENCE, EACH = 4096, 4  # tokens; sequences of a device in a step
HOST = "8xh100@ib-ndr"
WAYS: dict[str, tuple[str, ...]] = {
    "the planner's choice": (),
    "weights divided among all ranks": ("fully_shard=weights", "tensor_parallel=1", "pipeline_parallel=1", "shard_size={ranks}"),
    "weights divided in a node, copied between nodes": (
        "fully_shard=weights", "tensor_parallel=1", "pipeline_parallel=1", "shard_size=8",
    ),
    "tensor parallel 8 in a node": ("tensor_parallel=8",),
}  # fmt: skip
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 820, 460, 70, 60, 20, 110
Line = list[tuple[int, float, str]]  # devices, tokens per second of a device, the plan


def predicted() -> dict[str, Line]:
    lines: dict[str, Line] = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_8B).save_pretrained(folder)
        source = find_to_train(folder)
        for name, fixed in WAYS.items():
            lines[name] = []
            for nodes in NODES:
                host = describe(f"{nodes}x{HOST}" if nodes > 1 else HOST.partition("@")[0])
                workload = Workload(sequence_length=SEQUENCE, global_batch=EACH * host.num_devices)
                asked = tuple(text.format(ranks=host.num_devices) for text in fixed)
                try:
                    best = plan_training(source, host, workload, fixed=asked, described=True).ranking.candidates[0]
                except UpshiftError as error:
                    print(f"{name}, {host.name}: {error}")
                    continue
                lines[name].append((host.num_devices, best.tokens_per_second / host.num_devices, best.plan.label()))
                print(f"{host.num_devices:6,}  {lines[name][-1][1]:9,.0f}  {name}: {best.plan.label()}", flush=True)
    return lines


def drawn(lines: dict[str, Line]) -> str:
    """An SVG without a program: devices on a logarithmic axis."""
    points = [point for line in lines.values() for point in line]
    most, least, top = max(p[0] for p in points), min(p[0] for p in points), 1.08 * max(p[1] for p in points)

    def x(devices: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(devices) - log10(least)) / (log10(most) - log10(least))

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="16">Llama 3 8B, predicted tokens/s of each device, {EACH} sequences of {SEQUENCE:,} '
        "tokens a device</text>",
        f'<text x="{LEFT}" y="42" fill="#57606a">nodes of 8 H100 SXM, an NDR InfiniBand port for each GPU; predictions, not '
        "measurements</text>",
    ]  # fmt: skip
    for devices in (8, 32, 128, 512, 2048, most):
        parts.append(f'<line x1="{x(devices):.1f}" y1="{TOP}" x2="{x(devices):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eaeef2"/>')
        parts.append(f'<text x="{x(devices):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{devices:,}</text>')
    for step in range(5):
        rate = top * step / 4
        parts.append(f'<line x1="{LEFT}" y1="{y(rate):.1f}" x2="{WIDTH - RIGHT}" y2="{y(rate):.1f}" stroke="#eaeef2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,.0f}</text>')
    for number, ((name, line), colour) in enumerate(zip(lines.items(), COLOURS, strict=True)):
        path = " ".join(f"{x(devices):.1f},{y(rate):.1f}" for devices, rate, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        column, row = LEFT + 360 * (number % 2), HEIGHT - 48 + 22 * (number // 2)
        ends = f'x1="{column}" y1="{row - 4}" x2="{column + 24}" y2="{row - 4}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{column + 32}" y="{row}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def table(lines: dict[str, Line]) -> str:
    rows = ["| devices | " + " | ".join(lines) + " | the planner's plan |", "| --- " * (len(lines) + 2) + "|"]
    for nodes in NODES:
        found = {name: next((one for one in line if one[0] == 8 * nodes), None) for name, line in lines.items()}
        cells = [f"{one[1]:,.0f}" if one else "does not fit" for one in found.values()]
        best = found[next(iter(lines))]
        rows.append(f"| {8 * nodes:,} | " + " | ".join(cells) + f" | {best[2] if best else ''} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="folder for weak_scaling.svg")
    folder = parser.parse_args().write
    found = predicted()
    print(table(found))
    if folder is not None:
        (folder / "weak_scaling.svg").write_text(drawn(found), encoding="utf-8")
