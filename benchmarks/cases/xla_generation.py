"""The same greedy text by XLA, by TensorFlow without XLA, and by transformers in torch: what compiling whole generation brings.

    python benchmarks/cases/xla_generation.py [--quick] [--rounds 3] [--processor-time]

tensorflow eager   Upshift's generation as TensorFlow runs it line by line
tensorflow graph   the same as one tf.function, without XLA
xla                the same as one tf.function that XLA compiles: what upshift.xla.generate runs
torch eager        transformers' generate()
torch compiled     transformers' generate() with its static cache and a forward of torch.compile

GPT-2 of random weights at its 124 M shape, one prompt of 32 tokens and 32 new ones, fp32, all cores. Contenders run in turn, each
in a fresh process; what is timed is the best of a few calls after the first, whose time (export, tracing, compilation) is beside
it as first_seconds. same: share of the tokens that are torch eager's. With --processor-time each contender has one thread, and
what counts is the processor's seconds: for a machine that others use, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from upshift.benchmarking.case import Case, Times, command_line
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.hardware import detect

CLAIMS = (
    Claim(
        name="torch-eager",
        text="generation compiled whole by XLA is faster",
        ours="XLA",
        baseline="transformers in torch, eager",
        options="--rounds 2",
        goal=1.5,
        of=Source(row="124m, xla against torch eager", value="details.ratio", where={"processor_time": False}),
    ),
    Claim(
        name="torch-compiled",
        text="generation compiled whole by XLA is faster",
        ours="XLA",
        baseline="transformers in torch, static cache and torch.compile",
        options="--rounds 2",
        of=Source(row="124m, xla against torch compiled", value="details.ratio", where={"processor_time": False}),
    ),
    Claim(
        name="tensorflow-eager",
        text="generation compiled whole by XLA is faster",
        ours="XLA",
        baseline="TensorFlow, eager",
        options="--rounds 2",
        goal=8.0,
        of=Source(row="124m, xla against tensorflow eager", value="details.ratio", where={"processor_time": False}),
    ),
    Claim(
        name="tensorflow-graph",
        text="generation compiled whole by XLA is faster",
        ours="XLA",
        baseline="one tf.function without XLA",
        options="--rounds 2",
        of=Source(row="124m, xla against tensorflow graph", value="details.ratio", where={"processor_time": False}),
    ),
    Claim(
        name="fused-decode",
        text="one compiled step over a static cache decodes faster than eager",
        ours="transformers in torch, static cache and torch.compile",
        baseline="transformers in torch, eager",
        options="--rounds 2",
        better="lower",
        goal=1.0,
        of=Source(row="124m, xla against torch compiled", value="details.seconds", where={"processor_time": False}),
        over=Source(row="124m, xla against torch eager", value="details.seconds", where={"processor_time": False}),
    ),
)
FIGURES = (
    Figure(
        name="torch-eager-rate",
        of=Source(row="124m, xla against torch eager", value="details.tokens", where={"processor_time": False}),
        over=Source(row="124m, xla against torch eager", value="details.seconds", where={"processor_time": False}),
    ),
    Figure(
        name="torch-eager-first",
        of=Source(row="124m, xla against torch eager", value="details.first_seconds", where={"processor_time": False}),
    ),
    Figure(
        name="torch-compiled-rate",
        of=Source(row="124m, xla against torch compiled", value="details.tokens", where={"processor_time": False}),
        over=Source(row="124m, xla against torch compiled", value="details.seconds", where={"processor_time": False}),
    ),
    Figure(
        name="torch-compiled-first",
        of=Source(row="124m, xla against torch compiled", value="details.first_seconds", where={"processor_time": False}),
    ),
    Figure(
        name="tensorflow-eager-rate",
        of=Source(row="124m, xla against tensorflow eager", value="details.tokens", where={"processor_time": False}),
        over=Source(row="124m, xla against tensorflow eager", value="details.seconds", where={"processor_time": False}),
    ),
    Figure(
        name="tensorflow-eager-first",
        of=Source(row="124m, xla against tensorflow eager", value="details.first_seconds", where={"processor_time": False}),
    ),
    Figure(
        name="tensorflow-graph-rate",
        of=Source(row="124m, xla against tensorflow graph", value="details.tokens", where={"processor_time": False}),
        over=Source(row="124m, xla against tensorflow graph", value="details.seconds", where={"processor_time": False}),
    ),
    Figure(
        name="tensorflow-graph-first",
        of=Source(row="124m, xla against tensorflow graph", value="details.first_seconds", where={"processor_time": False}),
    ),
    Figure(
        name="xla-rate",
        of=Source(row="124m, xla against xla", value="details.tokens", where={"processor_time": False}),
        over=Source(row="124m, xla against xla", value="details.seconds", where={"processor_time": False}),
    ),
    Figure(
        name="xla-first", of=Source(row="124m, xla against xla", value="details.first_seconds", where={"processor_time": False})
    ),
)
TABLES = (
    Table(
        name="speed",
        header=("", "tokens/s", "XLA is faster by", "first call, seconds"),
        rows=(
            ("TensorFlow, eager", "{tensorflow-eager-rate:.1f}", "{tensorflow-eager:.1f}", "{tensorflow-eager-first:.1f}"),
            (
                "TensorFlow, one `tf.function` without XLA",
                "{tensorflow-graph-rate:.1f}",
                "{tensorflow-graph:.2f}",
                "{tensorflow-graph-first:.1f}",
            ),
            ("transformers in torch, eager", "{torch-eager-rate:.1f}", "{torch-eager:.2f}", "{torch-eager-first:.1f}"),
            (
                "transformers in torch, static cache and `torch.compile`",
                "{torch-compiled-rate:.1f}",
                "{torch-compiled:.2f}",
                "{torch-compiled-first:.1f}",
            ),
            ("XLA", "{xla-rate:.1f}", "1", "{xla-first:.1f}"),
        ),
    ),
)

SUITE = "--rounds 1"
ROOT = Path(__file__).parents[1]
CONTENDERS = ("torch eager", "torch compiled", "tensorflow eager", "tensorflow graph", "xla")
SHAPES: dict[str, dict[str, Any]] = {"124m": {}, "quick": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300}}
GOALS = {"tensorflow eager": 8.0, "torch eager": 1.5}  # times as fast
CALLS = 3
TIMEOUT_SECONDS = 900.0


def save_model(folder: Path, shape: str, seed: int) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**SHAPES[shape], initializer_range=0.05))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def by_torch(request: dict[str, Any], *, compiled: bool) -> Callable[[], list[int]]:
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(request["model"]).eval()
    cache = {}
    if compiled:
        model.forward = torch.compile(model.forward)
        cache = {"cache_implementation": "static"}
    ids = torch.tensor([request["prompt"]])
    settings = {"max_new_tokens": request["tokens"], "do_sample": False, "pad_token_id": 0, **cache}

    def generate() -> list[int]:
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return found[0, ids.shape[1] :].tolist()

    return generate


def by_tensorflow(request: dict[str, Any], kind: str) -> Callable[[], list[int]]:
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow()
    import tensorflow as tf

    from upshift.xla.generation.generator import XlaGenerator
    from upshift.xla.generation.sampling import Sampling
    from upshift.xla.lowering.registry import LOWERINGS
    from upshift.xla.model import build

    def written_by_choice(node: Any, value: Any, dim: int, places: Any, source: Any) -> Any:
        """The operation that XLA writes one place with is not there without it."""
        here = tf.range(value.shape[dim], dtype=places.dtype) == places[0]
        return tf.where(tf.reshape(here, [-1, *[1] * (len(value.shape) - dim - 1)]), source, value)

    if kind != "xla":
        LOWERINGS["aten.index_copy.default"] = written_by_choice
    generator = XlaGenerator(build(request["model"]))
    if kind == "xla":
        return lambda: generator.generate([request["prompt"]], max_new_tokens=request["tokens"])[0]
    run = generator.traced(generator.options(max_new_tokens=request["tokens"]).program())
    function = tf.function(run, autograph=False) if kind == "tensorflow graph" else run
    ids = tf.constant(np.array([request["prompt"]], np.int64))
    sampling = Sampling(tf.constant(1.0), tf.constant(50), tf.constant(1.0), tf.zeros((1, request["tokens"])))
    return lambda: function(ids, tf.ones_like(ids), sampling).numpy()[0].tolist()


def one_thread(*, torch_alone: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if not torch_alone:
        from upshift.xla.tensorflow import need_tensorflow

        need_tensorflow()
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def run_one(request: dict[str, Any]) -> dict[str, Any]:
    name = request["contender"]
    torch_alone = name.startswith("torch")
    if request["processor_time"]:
        one_thread(torch_alone=torch_alone)
    generate = by_torch(request, compiled=name.endswith("compiled")) if torch_alone else by_tensorflow(request, name)
    seconds, clock = [], time.process_time if request["processor_time"] else time.perf_counter
    for _ in range(CALLS + 1):
        start = clock()
        found = generate()
        seconds.append(clock() - start)
    reference = Path(request["folder"]) / "expected.json"
    if name == "torch eager":
        reference.write_text(json.dumps(found))
    expected = json.loads(reference.read_text())
    same = sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)
    return {"seconds": min(seconds[1:]), "first_seconds": seconds[0], "same": same, "tokens": len(found)}


def run(case: Case, shape: str, *, length: int, rounds: int, seed: int, processor_time: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="upshift-xla-") as name:
        folder = Path(name)
        save_model(folder / "model", shape, seed)
        prompt = [(7 * place * place + place // 5) % 290 + 5 for place in range(length)]
        asked = {"model": str(folder / "model"), "folder": name, "tokens": length, "prompt": prompt}
        asked["processor_time"] = processor_time

        def fresh(one: str) -> dict[str, Any]:
            path = folder / "request.json"
            path.write_text(json.dumps({"contender": one, **asked}))
            return run_fresh([sys.executable, __file__, "--request", str(path)], timeout_seconds=TIMEOUT_SECONDS)

        answers = interleave({one: partial(fresh, one) for one in CONTENDERS}, rounds=rounds)
    return report(case, answers, shape=shape)


def report(case: Case, answers: dict[str, list[dict[str, Any]]], *, shape: str) -> dict[str, Any]:
    ours = [answer["seconds"] for answer in answers["xla"]]
    ratios, cells = {}, []
    for name, found in answers.items():
        seconds, row = [answer["seconds"] for answer in found], found[-1]
        ratios[name] = Times(ours, seconds, name).ratio()  # how many times as fast XLA is
        case.add_times(f"{shape}, xla against {name}", Times(ours, seconds, name), plan={"contender": name}, details=row)
        rate = row["tokens"] / statistics.median(seconds)
        cells.append([name, f"{rate:,.1f}", f"{ratios[name]:.2f}", f"{row['first_seconds']:.1f}", f"{row['same']:.3f}"])
    print(format_table(("contender", "tokens/s", "xla is faster by", "first call s", "same"), cells))
    return {"ratios": ratios, "goals_reached": {name: ratios[name] >= goal for name, goal in GOALS.items()}}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--processor-time", action="store_true", help="one thread each, and CPU-seconds")
    parser.add_argument("--request", type=Path, help="one contender, in this process")
    options = parser.parse_args(arguments)
    if options.request:
        print(json.dumps(run_one(json.loads(options.request.read_text()))))
        return 0
    shape, length = ("quick", 8) if options.quick else ("124m", 32)
    rounds = options.rounds or (1 if options.quick else 3)
    settings = {"shape": shape, "rounds": rounds, "tokens": length, "processor_time": options.processor_time}
    case = Case("xla_generation", options.results, detect(), options.quick, settings)
    found = run(case, shape, length=length, rounds=rounds, seed=options.seed, processor_time=options.processor_time)
    print(json.dumps({"case": "xla_generation", **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
