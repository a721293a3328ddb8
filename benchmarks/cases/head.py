"""The loss in chunks against a model's plain head and loss, forward and backward, in one process and in turn.

    python benchmarks/cases/head.py [--quick] [--rounds 7] [--most-words 128000]

``plain`` is what transformers does: all logits in autocast's dtype, a copy in fp32, ``torch.nn.functional.cross_entropy``.
Memory is what is allocated above the hidden states, the weight and the labels, at its highest; the weight's gradient, which
both must make, is part of it (``with``), or is taken off both (``without``). ``labelled``: the share of tokens with a label.
Freed memory goes back to the system, as for users of transformers: kept, that of the plain head does not fit into 24 GiB.
The plain head of the largest shape holds 12 GiB.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from upshift.benchmarking.ab_test import ratio
from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table, interleave
from upshift.benchmarking.meters import allocated_peak
from upshift.benchmarking.timing import time_call
from upshift.hardware import detect
from upshift.models.ops.linear_cross_entropy import HeadLoss, linear_cross_entropy
from upshift.models.profile import LOSS_CHUNK_TOKENS
from upshift.record import Numbers, Spread
from upshift.units import GIB

CLAIMS = (
    Claim(
        name="time",
        text="128,000 words, 8,192 tokens, fp32: the loss in chunks takes hardly longer",
        ours="chunks",
        baseline="the model's plain head and loss",
        options="--rounds 3",
        better="lower",
        goal=1.1,
        of=Source(
            row="chunked", value="details.chunked_over_plain_time.value",
            where={"shape": "8192 tokens, 128000 words, width 1024, fp32"},
        ),
    ),
    Claim(
        name="memory",
        text="in a small part of the memory",
        ours="chunks, the weight's gradient among them",
        baseline="the model's plain head and loss",
        options="--rounds 3",
        better="lower",
        goal=0.12,
        of=Source(
            row="chunked", value="details.chunked_over_plain_memory.with",
            where={"shape": "8192 tokens, 128000 words, width 1024, fp32"},
        ),
    ),
    Claim(
        name="difference",
        text="with the same loss and gradients",
        ours="chunks",
        baseline="the model's plain head and loss",
        options="--rounds 3",
        unit="of the largest",
        better="lower",
        goal=1e-5,
        of=Source(
            row="chunked", value="details.relative_difference", where={"shape": "8192 tokens, 128000 words, width 1024, fp32"},
        ),
    ),
)  # fmt: skip
FIGURES = (
    Figure(
        name="bf16-time",
        of=Source(
            row="chunked", value="details.chunked_over_plain_time.value",
            where={"shape": "8192 tokens, 128000 words, width 1024, bf16 autocast"},
        ),
    ),
    Figure(
        name="small-time",
        of=Source(
            row="chunked", value="details.chunked_over_plain_time.value",
            where={"shape": "512 tokens, 4096 words, width 512, bf16 autocast"},
        ),
    ),
    Figure(
        name="memory-percent",
        scale=100.0,
        of=Source(
            row="chunked", value="details.chunked_over_plain_memory.with",
            where={"shape": "8192 tokens, 128000 words, width 1024, fp32"},
        ),
    ),
)  # fmt: skip

SUITE = "--rounds 3 --most-words 32000"
ROOT = Path(__file__).parents[1]


class Shape(NamedTuple):
    vocabulary: int
    tokens: int
    hidden: int
    autocast: bool
    labelled: float = 1.0

    def __str__(self) -> str:
        precision = "bf16 autocast" if self.autocast else "fp32"
        share = f", {self.labelled:.0%} labelled" if self.labelled < 1 else ""
        return f"{self.tokens} tokens, {self.vocabulary} words, width {self.hidden}, {precision}{share}"


FULL = [
    *(Shape(128_000, 8192, 1024, autocast) for autocast in (False, True)),
    *(Shape(32_000, 2048, 768, autocast) for autocast in (False, True)),
    *(Shape(4096, 512, 512, autocast) for autocast in (False, True)),
    Shape(32_000, 2048, 768, True, labelled=0.15),
]
QUICK = [Shape(3000, 1100, 16, False), Shape(3000, 1100, 16, True, labelled=0.15)]


class Head:
    """Hidden states, weight and labels of one shape, and the two ways from them to gradients."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hidden = torch.randn(shape.tokens, shape.hidden, requires_grad=True)
        self.weight = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * shape.hidden**-0.5)
        self.labels = torch.randint(shape.vocabulary, (shape.tokens,))
        self.labels[torch.rand(shape.tokens) >= shape.labelled] = -100

    def run(self, name: str) -> torch.Tensor:
        self.hidden.grad = self.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.shape.autocast):
            loss = self.plain() if name == "plain" else self.chunked()
        loss.backward()
        return loss.detach()

    def plain(self) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(self.hidden, self.weight).float(), self.labels)

    def chunked(self) -> torch.Tensor:
        total = linear_cross_entropy(self.hidden, self.weight, None, self.labels, HeadLoss(chunk_tokens=LOSS_CHUNK_TOKENS))
        return total / (self.labels != -100).sum()

    def peak_bytes(self, name: str) -> int:
        self.hidden.grad = self.weight.grad = None
        with allocated_peak("cpu", resident_bytes=0) as peak:
            self.run(name)
        assert peak.bytes is not None
        return peak.bytes

    def difference(self) -> float:
        """Of chunked from plain, relative: the largest of the loss's and both gradients'."""
        found = {}
        for name in ("plain", "chunked"):
            found[name] = (self.run(name), self.hidden.grad, self.weight.grad)
        return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*found.values(), strict=True))  # type: ignore[union-attr]


def run_shape(case: Case, shape: Shape, *, rounds: int) -> tuple[list[object], dict[str, object]]:
    head = Head(shape)
    peaks = {name: head.peak_bytes(name) for name in ("plain", "chunked")}
    difference = head.difference()
    runs = {name: partial(lambda name: 1000 * time_call(lambda: head.run(name)), name) for name in peaks}
    samples = interleave(runs, rounds=rounds)
    compared = ratio(samples["chunked"], samples["plain"])
    gradient = 4 * shape.vocabulary * shape.hidden
    with_gradient = peaks["chunked"] / peaks["plain"]
    without_gradient = (peaks["chunked"] - gradient) / (peaks["plain"] - gradient)
    summary = {
        "shape": str(shape), "chunked_over_plain_time": compared.model_dump(), "relative_difference": difference,
        "chunked_over_plain_memory": {"with": with_gradient, "without": without_gradient},
    }  # fmt: skip
    for name, values in samples.items():
        case.add(
            name, plan={"loss_chunk_tokens": LOSS_CHUNK_TOKENS if name == "chunked" else 0},
            measured=Numbers(step_ms=Spread.of(values, num_warmup=2), peak_gib=peaks[name] / GIB),
            details={"milliseconds": values, **summary},
        )  # fmt: skip
    cells = [
        str(shape), *(f"{statistics.median(values):.0f}" for values in samples.values()), str(compared),
        *(f"{peak / GIB:.2f}" for peak in peaks.values()), f"{with_gradient:.1%}", f"{without_gradient:.1%}", f"{difference:.0e}",
    ]  # fmt: skip
    return cells, summary


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most-words", type=int, default=128_000, help="leave out shapes of more")
    options = parser.parse_args(arguments)
    host = detect()
    torch.manual_seed(options.seed)
    torch.set_num_threads(host.cpu.usable_cores if host.cpu else 1)
    case = Case("head", options.results, host, options.quick, {"rounds": options.rounds})
    shapes = [shape for shape in (QUICK if options.quick else FULL) if shape.vocabulary <= options.most_words]
    results = [run_shape(case, shape, rounds=options.rounds) for shape in shapes]
    header = ("shape", "plain ms", "chunked ms", "chunked / plain", "plain GiB", "chunked GiB", "with", "without", "difference")
    print(format_table(header, [cells for cells, _ in results]))
    print(json.dumps({"case": "head", "shapes": [summary for _, summary in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
