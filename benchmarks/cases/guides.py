"""Headlines of the Transformers guides, measured here: what gradient checkpointing costs, what accumulation and compiling bring.

    python benchmarks/cases/guides.py [--quick] [--rounds 12] [--only checkpointing,accumulation,compile,quantized]

checkpointing  the guides: 20 to 30 % slower. A training step of a Llama with every layer recomputed, over one with none
accumulation   the guides: 20 to 30 % faster, as the optimizer runs less often. Eight micro-batches: one update over eight
compile        the guides' tables: 1.27 times (mean of 100 rows). A forward pass of a ViT on one picture: eager over compiled
quantized      the guides: 1.91 times less memory in 8 bits than in bf16, 3.04 in 4. Bytes of the weights that load_model holds

Plain torch and transformers, and upshift.load_model for the last. Both of a pair run in one process and in turn, in an order
that is drawn. On a GPU the shapes are those of 1 B parameters; two cores get small ones. DataParallel is one process with
several GPUs, which has no meaning on CPUs; for DistributedDataParallel see the case ranks, for decoding as one compiled graph
xla_generation, for attention kernels attention, for loading load, for the nine settings nine_settings.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from upshift.benchmarking import significance
from upshift.benchmarking.ab_test import orders
from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table
from upshift.benchmarking.timing import time_call
from upshift.hardware import detect
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="checkpointing", text="recomputing every layer makes a step slower by the guides' 20 to 30 %",
        ours="all layers recomputed", baseline="none recomputed", options="--only checkpointing", better="lower", goal=1.3,
        of=Source(row="checkpointing", value="details.ratio"),
    ),
    Claim(
        name="accumulation", text="eight micro-batches to an update are faster by the guides' 20 to 30 %",
        ours="one update for eight", baseline="eight updates", options="--only accumulation", goal=1.2,
        of=Source(row="accumulation", value="details.ratio"),
    ),
    Claim(
        name="compile", text="torch.compile makes a ViT's forward pass faster by the tables' mean", ours="compiled",
        baseline="eager", options="--only compile", goal=1.27, of=Source(row="compile", value="details.ratio"),
    ),
    Claim(
        name="quantized-int8", text="weights of 8 bits take less memory than bf16", ours="load_model(quantize='int8')",
        baseline="bf16", options="--only quantized", goal=1.91, of=Source(row="quantized int8", value="details.ratio"),
    ),
    Claim(
        name="quantized-int4", text="and of 4 bits", ours="load_model(quantize='int4')", baseline="bf16",
        options="--only quantized", goal=3.04, of=Source(row="quantized int4", value="details.ratio"),
    ),
)  # fmt: skip
SUITE = "--rounds 6"
ROOT = Path(__file__).parents[1]
# hidden size, layers, heads, words, tokens of a row, rows, pixels of a picture's side
SIZES = {
    "quick": (64, 2, 2, 256, 32, 1, 32),
    "cpu": (384, 6, 6, 4096, 256, 2, 224),
    "cuda": (2048, 16, 16, 32000, 2048, 4, 224),
    "weights": (2048, 4, 16, 4096, 256, 1, 224),  # embedding and head, which are not rounded, are as little of it as of 8 B
}
MICRO_BATCHES = 8


class Pair:
    """Two ways to do the same work; one name's number over the other's is the headline."""

    def __init__(self, slower: Callable[[], object], faster: Callable[[], object], *, calls: str) -> None:
        self.slower, self.faster, self.calls = slower, faster, calls


def llama(size: str) -> LlamaForCausalLM:
    hidden, layers, heads, words, *_ = SIZES[size]
    config = LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16 if size == "cuda" else torch.float32)


def pass_of(model: Any, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def tokens_of(size: str, device: str) -> torch.Tensor:
    _, _, _, words, length, rows, _ = SIZES[size]
    return torch.randint(0, words, (rows, length), device=device)


def checkpointing(size: str, device: str) -> Pair:
    tokens, models = tokens_of(size, device), [llama(size).to(device).train() for _ in range(2)]
    models[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Pair(*(partial(pass_of, model, tokens) for model in models), calls="all layers recomputed over none")


def accumulation(size: str, device: str) -> Pair:
    model, tokens = llama(size).to(device).train(), tokens_of(size, device)[:1]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(every: int) -> None:
        for number in range(MICRO_BATCHES):
            pass_of(model, tokens)
            if (number + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    return Pair(partial(step, 1), partial(step, MICRO_BATCHES), calls="eight updates over one")


@torch.inference_mode()
def picture(model: Any, pixels: torch.Tensor) -> None:
    model(pixel_values=pixels)


def compiled(size: str, device: str) -> Pair:
    hidden, layers, heads, *_, side = SIZES[size]
    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden, image_size=side
    )  # fmt: skip
    model = ViTModel(config).to(device).eval()
    pixels = torch.randn(1, 3, side, side, device=device)
    return Pair(partial(picture, model, pixels), partial(picture, torch.compile(model), pixels), calls="eager over compiled")


def held(model: Any) -> int:
    """Bytes of weights, as they are stored: a quantized tensor is several plain ones."""

    def size(tensor: Any) -> int:
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:
            return sum(size(getattr(tensor, name)) for name in inner()[0])
        state = getattr(getattr(tensor, "quant_state", None), "absmax", None)
        return tensor.numel() * tensor.element_size() + (0 if state is None else state.numel() * state.element_size())

    return sum(size(tensor) for tensor in (*model.parameters(), *model.buffers()))


def quantized(case: Case, size: str) -> list[list[str]]:
    from upshift import load_model

    rows = []
    with tempfile.TemporaryDirectory(prefix="upshift-guides-") as folder:
        llama(size).to(torch.bfloat16).save_pretrained(folder)
        plain = held(load_model(folder, dtype="bfloat16"))
        for name in ("int8", "int4"):
            small = held(load_model(folder, dtype="bfloat16", quantize=name))
            details = {"ratio": plain / small, "bf16_bytes": plain, "bytes": small}
            case.add(f"quantized {name}", plan={"quantize": name}, measured=Numbers(), details=details)
            rows.append([f"bytes of bf16 over {name}", f"{plain / small:.2f}", ""])
    return rows


def run_pair(case: Case, name: str, pair: Pair, *, rounds: int, device: str) -> list[str]:
    for call in (pair.slower, pair.faster, pair.slower, pair.faster):  # warm-up; the first one compiles
        call()
    samples: dict[str, list[float]] = {"A": [], "B": []}
    for order in orders(rounds):
        for letter in order:
            samples[letter].append(time_call(pair.faster if letter == "A" else pair.slower, device=device))
    logs = [float(torch.tensor(b / a).log()) for a, b in zip(samples["A"], samples["B"], strict=True)]
    found = significance.interval(logs, confidence=significance.CLAIM)
    ratio, *ends = (None if one is None else float(torch.tensor(one).exp()) for one in found)
    times = [Numbers(step_ms=Spread.of([1000 * one for one in of], num_warmup=2)) for of in samples.values()]
    details = {"ratio": ratio, "interval": ends, "verdict": significance.verdict(found), "seconds": samples, "what": pair.calls}
    case.add(name, plan={}, measured=times[0], baseline=times[1], baseline_name="the slower of the two", details=details)
    within = "too few rounds" if ends[0] is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
    return [pair.calls, f"{ratio:.2f}", within]


PAIRS = {"checkpointing": checkpointing, "accumulation": accumulation, "compile": compiled}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default=",".join((*PAIRS, "quantized")))
    options = parser.parse_args(arguments)
    host, device = detect(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and host.cpu is not None:
        torch.set_num_threads(host.cpu.usable_cores)
    torch.manual_seed(options.seed)
    size, rounds = ("quick", 2) if options.quick else (device, options.rounds)
    case = Case("guides", options.results, host, options.quick, {"rounds": rounds, "size": size, "shape": SIZES[size]})
    cells: list[list[str]] = []
    for name in options.only.split(","):
        print_progress(name)
        if name == "quantized":
            cells += quantized(case, "weights" if size == "cpu" else size)
        else:
            cells.append(run_pair(case, name, PAIRS[name](size, device), rounds=rounds, device=device))
    print(format_table(("headline", "times", "99.9 %"), cells))
    print(json.dumps({"case": "guides", "times": {cell[0]: float(cell[1]) for cell in cells}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
