"""Block attention against PyTorch's own kernel for CPUs, forward and backward, in one process and in turn.

    python benchmarks/cases/attention.py [--quick] [--rounds 9]

``packed`` rows hold six sequences of different lengths, each seeing only itself. Freed memory stays with the process, as in
the plans that trials choose, so that page faults do not count.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from upshift.benchmarking.ab_test import Ratio, ratio
from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.benchmarking.harness import format_table, interleave
from upshift.benchmarking.timing import time_call
from upshift.hardware import detect
from upshift.models.ops.block_attention import block_attention_forward
from upshift.record import Numbers, Spread
from upshift.training.held_memory import keep_freed_memory

CLAIMS = (
    Claim(
        name="packed",
        text="block attention is faster on a packed row of 1,536 tokens",
        ours="block",
        baseline="PyTorch's sdpa",
        of=Source(
            row="block",
            value="details.sdpa_over_block.value",
            where={"shape": "1 x 1536 tokens, 12 heads of 64, bfloat16, packed"},
        ),
    ),
    Claim(
        name="512",
        text="and on rows of 512",
        ours="block",
        baseline="PyTorch's sdpa",
        of=Source(
            row="block", value="details.sdpa_over_block.value", where={"shape": "2 x 512 tokens, 12 heads of 64, bfloat16"}
        ),
    ),
)
FIGURES = (
    Figure(
        name="512-bf16-sdpa",
        of=Source(row="sdpa", value="measured.step_ms.p50", where={"shape": "2 x 512 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="512-bf16-block",
        of=Source(row="block", value="measured.step_ms.p50", where={"shape": "2 x 512 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="512-fp32-sdpa",
        of=Source(row="sdpa", value="measured.step_ms.p50", where={"shape": "2 x 512 tokens, 12 heads of 64, float32"}),
    ),
    Figure(
        name="512-fp32-block",
        of=Source(row="block", value="measured.step_ms.p50", where={"shape": "2 x 512 tokens, 12 heads of 64, float32"}),
    ),
    Figure(
        name="256-bf16-sdpa",
        of=Source(row="sdpa", value="measured.step_ms.p50", where={"shape": "8 x 256 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="256-bf16-block",
        of=Source(row="block", value="measured.step_ms.p50", where={"shape": "8 x 256 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="2048-bf16-sdpa",
        of=Source(row="sdpa", value="measured.step_ms.p50", where={"shape": "1 x 2048 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="2048-bf16-block",
        of=Source(row="block", value="measured.step_ms.p50", where={"shape": "1 x 2048 tokens, 12 heads of 64, bfloat16"}),
    ),
    Figure(
        name="packed-bf16-sdpa",
        of=Source(row="sdpa", value="measured.step_ms.p50", where={"shape": "1 x 1536 tokens, 12 heads of 64, bfloat16, packed"}),
    ),
    Figure(
        name="packed-bf16-block",
        of=Source(
            row="block", value="measured.step_ms.p50", where={"shape": "1 x 1536 tokens, 12 heads of 64, bfloat16, packed"}
        ),
    ),
)
TABLES = (
    Table(
        name="milliseconds",
        header=("tokens", "PyTorch's kernel", "block"),
        rows=(
            ("2 x 512, bf16", "{512-bf16-sdpa:.1f}", "{512-bf16-block:.1f}"),
            ("2 x 512, fp32", "{512-fp32-sdpa:.1f}", "{512-fp32-block:.1f}"),
            ("8 x 256, bf16", "{256-bf16-sdpa:.1f}", "{256-bf16-block:.1f}"),
            ("1 x 2048, bf16", "{2048-bf16-sdpa:.1f}", "{2048-bf16-block:.1f}"),
            ("1 x 1536, packed, bf16", "{packed-bf16-sdpa:.1f}", "{packed-bf16-block:.1f}"),
        ),
    ),
)

SUITE = "--rounds 3"
ROOT = Path(__file__).parents[1]
KERNELS = {"sdpa": sdpa_attention_forward, "block": block_attention_forward}
WIDTH = 64
# rows, heads, tokens a row, dtype, packed
FULL = [
    (2, 12, 512, "bfloat16", False), (2, 12, 512, "float32", False), (8, 12, 256, "bfloat16", False),
    (1, 12, 2048, "bfloat16", False), (1, 12, 1536, "bfloat16", True),
]  # fmt: skip
QUICK = [(1, 2, 256, "bfloat16", False), (1, 2, 192, "bfloat16", True)]
SHARES = (0.33, 0.24, 0.17, 0.13, 0.08)  # of a packed row, what is left being the sixth


class Attention(nn.Module):
    is_causal, num_key_value_groups = True, 1


def packed_mask(length: int) -> torch.Tensor:
    sizes = [int(share * length) for share in SHARES]
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor([*sizes, length - sum(sizes)]))
    return ((sequence[:, None] == sequence) & torch.ones(length, length).tril().bool())[None, None]


def run_shape(case: Case, shape: tuple[int, int, int, str, bool], *, rounds: int) -> tuple[list[object], Ratio]:
    rows, heads, length, dtype, packed = shape
    tensors = [torch.randn(rows, length, heads, WIDTH, dtype=getattr(torch, dtype)).transpose(1, 2) for _ in range(3)]
    inputs = [tensor.requires_grad_() for tensor in tensors]
    mask = packed_mask(length) if packed else None
    module, gradient = Attention(), torch.randn(rows, length, heads, WIDTH, dtype=getattr(torch, dtype))

    def once(kernel: Any) -> float:
        return 1000 * time_call(lambda: torch.autograd.grad(kernel(module, *inputs, mask)[0], inputs, gradient))

    runs = {name: partial(once, kernel) for name, kernel in KERNELS.items()}
    for run in runs.values():
        run()
    samples = interleave(runs, rounds=rounds)
    compared = ratio(samples["sdpa"], samples["block"])
    label = f"{rows} x {length} tokens, {heads} heads of {WIDTH}, {dtype}{', packed' if packed else ''}"
    for name, values in samples.items():
        case.add(
            name, plan={"attention": name}, measured=Numbers(step_ms=Spread.of(values, num_warmup=1)),
            details={"shape": label, "milliseconds": values, "sdpa_over_block": compared.model_dump()},
        )  # fmt: skip
    return [label, *(f"{statistics.median(values):.1f}" for values in samples.values()), str(compared)], compared


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    host = detect()
    torch.manual_seed(options.seed)
    keep_freed_memory()
    torch.set_num_threads(host.cpu.usable_cores if host.cpu else 1)
    case = Case("attention", options.results, host, options.quick, {"rounds": options.rounds})
    shapes = QUICK if options.quick else FULL
    results = [run_shape(case, shape, rounds=options.rounds) for shape in shapes]
    print(format_table(("shape", *(f"{name} ms" for name in KERNELS), "sdpa / block"), [cells for cells, _ in results]))
    print(json.dumps({"case": "attention", "sdpa_over_block": [compared.value for _, compared in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
