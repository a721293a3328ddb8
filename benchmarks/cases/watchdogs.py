"""What watching costs a run: the watch and the signs of a training step among ranks, and debug="underflow_overflow".

    python benchmarks/cases/watchdogs.py [--quick] [--rounds 15] [--steps 20]

Steps (forward, backward, exchange of gradients, AdamW; fp32) with and without, in one process of each rank and in turn: every
third step is watched, while the watch's threads run, one is a plain one's twin, in a random order; underflow_overflow every
other round. The ratio is the median of those of the rounds, each of medians of steps: the twin's says what is noise. noting is
the share of a step that the watchdogs' own lines take, timed in place. Asked for: below 1.01 for the watchdogs of every run,
below 2 for underflow_overflow.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.benchmarking.case import Case, Times, command_line
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, run_fresh
from upshift.debugging.numerics import DebugUnderflowOverflow
from upshift.hardware import detect
from upshift.planning.plan import Plan
from upshift.training.distributed.watchdog import watching
from upshift.training.loop.monitor import RunMonitor
from upshift.training.rank_processes import join_processes, rank_environment

CLAIMS = (
    Claim(
        name="watch",
        text="watching a run costs nothing that is seen",
        ours="a step that is watched",
        baseline="a plain step",
        better="lower",
        unit="of a step",
        goal=0.01,
        of=Source(row="two processes/watchdogs", value="details.noting_share"),
    ),
    Claim(
        name="underflow-overflow",
        text="debug='underflow_overflow' takes less than a step more",
        ours="a step whose ranges are looked at",
        baseline="a plain step",
        better="lower",
        goal=2.0,
        of=Source(row="one process/underflow_overflow", value="details.slower"),
    ),
)

SUITE = "--rounds 5"
ROOT = Path(__file__).parents[1]
MOST_SECONDS = 1800.0
Stepping = Callable[[int], AbstractContextManager[None]]
# ranks, hidden size, layers, rows, tokens a row
FULL = {"one process": (1, 256, 4, 4, 128), "two processes": (2, 256, 4, 2, 128), "small steps": (1, 64, 2, 2, 64)}
QUICK = {"one process": (1, 32, 1, 1, 16), "two processes": (2, 32, 1, 1, 16)}


class Steps:
    def __init__(self, hidden: int, layers: int, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=tokens,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.ids = torch.randint(0, 1024, (rows, tokens))

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        if dist.is_initialized():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, number: int, signs: RunMonitor | None, watched: Stepping) -> tuple[float, float]:
        """(of the step, of what was noted around it)."""
        start = time.perf_counter()
        if signs is not None:
            signs.begin_step()
            with signs.fetching_batch():
                pass
        with watched(number):
            begin = time.perf_counter()
            self.step()
            end = time.perf_counter()
        last = time.perf_counter()
        return last - start, begin - start + last - end

    def plain(self, count: int) -> list[float]:
        return [self.seconds(number, None, lambda number: nullcontext())[0] for number in range(count)]


def measure(request: dict[str, Any]) -> dict[str, list[float]]:
    """On each rank; the answer is rank 0's."""
    torch.set_num_threads(1)
    plan, rounds, count = request["plan"], request["rounds"], request["steps"]
    steps, chance = Steps(*request["shape"]), random.Random(0)  # the same steps on every rank
    found: dict[str, list[float]] = {name: [] for name in ("plain", "twin", "watchdogs", "noting", "underflow_overflow")}
    steps.plain(count)
    with tempfile.TemporaryDirectory() as folder:
        signs = RunMonitor(Path(folder), rank=rank_environment()[0], device="cpu", data_fix="", on_finding=lambda finding: None)
        for _ in range(rounds):
            with watching(plan, lambda step, words: None, Path(folder)) as watched:
                times: dict[str, list[float]] = {"plain": [], "twin": [], "watchdogs": []}
                for number in range(count):
                    for way in chance.sample(list(times), len(times)):
                        if way == "watchdogs":
                            whole, noting = steps.seconds(number, signs, watched)
                            times[way].append(whole)
                            found["noting"].append(noting)
                        else:
                            times[way] += steps.plain(1)
            for way, seconds in times.items():
                found[way].append(statistics.median(seconds))
            debugger = DebugUnderflowOverflow(steps.model, tell=lambda line: None)
            found["underflow_overflow"].append(statistics.median(steps.plain(count)))
            debugger.remove()
    return found


def in_ranks(ranks: int, shape: list[int], rounds: int, steps: int) -> dict[str, list[float]]:
    plan = Plan(
        device="cpu", host="benchmark", model="benchmark", sequence_length=shape[3], per_device_train_batch_size=shape[2],
        num_processes=ranks,
    )  # fmt: skip
    return join_processes(plan, measure, {"plan": plan, "shape": shape, "rounds": rounds, "steps": steps})


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", help="one measurement, as JSON: a fresh process, which forks its ranks")
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(in_ranks(**json.loads(options.worker))))
        return 0
    case = Case("watchdogs", options.results, detect(), options.quick, {"rounds": options.rounds, "steps": options.steps})
    lines, ratios = [], {}
    for name, (ranks, *shape) in (QUICK if options.quick else FULL).items():
        asked = {"ranks": ranks, "shape": shape, "rounds": options.rounds, "steps": options.steps}
        found = run_fresh([sys.executable, __file__, "--worker", json.dumps(asked)], timeout_seconds=MOST_SECONDS)
        noting = statistics.median(found["noting"]) / statistics.median(found["plain"])
        ratios[f"{name}, noting"] = noting
        lines.append([name, "noting", "", f"{noting:.2%}"])
        for way in ("twin", "watchdogs", "underflow_overflow"):
            times = Times(found[way], found["plain"], "plain")
            slower = 1 / times.ratio()
            details = {"shape": shape, "ranks": ranks, "slower": slower, "noting_share": noting}
            case.add_times(f"{name}/{way}", times, plan={"watched": way}, details=details)
            ratios[f"{name}, {way}"] = slower
            milliseconds = 1000 * statistics.median(found["plain"])
            lines.append([name, way, f"{milliseconds:.2f}", f"{slower:.4f}"])
    print(format_table(("steps", "watched by", "plain ms", "times as long"), lines))
    print(json.dumps({"case": "watchdogs", "times_as_long": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
