"""What deaths cost copies that heal each other (upshift train --heal): one process after the other is killed, and comes back.

    python benchmarks/cases/healing.py [--quick] [--kills 5] [--every 5] [--steps 600]

Two copies of a small Llama on one machine, one thread each. Every time both have taken part in --every steps one of them, drawn
by a seed, gets SIGKILL; the other goes on alone until it is back with the other's weights. Losses are held against those of the
same run without deaths, and against one process. Goodput is the steps' time without deaths over the run's wall time with them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import LlamaConfig

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table
from upshift.hardware import detect
from upshift.record import Record
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.elastic.supervisor import WORKER
from upshift.training.loop.events import Event, StepDone, Waited
from upshift.training.run import Watcher, train

CLAIMS = (
    Claim(
        name="losses",
        text="deaths of copies that heal each other change no loss",
        ours="a run with deaths",
        baseline="one process, undisturbed",
        unit="of a loss",
        better="lower",
        goal=1e-5,
        of=Source(row="deaths", value="details.largest_loss_difference"),
    ),
    Claim(
        name="seconds",
        text="a death costs seconds where starting all ranks again costs 21",
        ours="a run with deaths",
        baseline="the undisturbed run",
        unit="seconds a death",
        better="lower",
        goal=5.0,
        of=Source(row="deaths", value="details.seconds_a_death"),
    ),
)
FIGURES = (
    Figure(name="stands-still", of=Source(row="deaths", value="details.longest_pause")),
    Figure(name="step", of=Source(row="deaths", value="details.median_step")),
    Figure(name="goodput", of=Source(row="deaths", value="details.goodput")),
)

SUITE = "--kills 1 --steps 150"
ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 320}
QUICK = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
FIXED = ("torch_compile=off", "precision=fp32", "per_device_train_batch_size=1", "threads_per_process=1")
COPIES = 2
RATE = 1e-5  # at 1e-3 what rounding changes has grown to 2 % of a loss after 600 steps, without any death
SHOWN = ("seconds", "largest_loss_difference", "seconds_a_death", "longest_pause", "goodput")


def made(folder: Path, *, quick: bool) -> tuple[Path, Path]:
    texts = [path.read_text(encoding="utf-8")[:20_000] for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60]]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    config = LlamaConfig(**(QUICK if quick else SIZES), max_position_embeddings=128, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(folder / "model")
    train_byte_level_bpe(texts, 320).save_pretrained(folder / "model")
    return folder / "model", data


class Deaths:
    """Kills, and takes the time between steps."""

    def __init__(self, kills: int, every: int) -> None:
        self.kills, self.every, self.killed = kills, every, 0
        self._random, self._since = random.Random(0), 0
        self._all_there = True
        self.ends: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.ends.append(time.perf_counter())
            self._since += self._all_there
            if self.killed < self.kills and self._since == self.every:
                self._kill()
        elif isinstance(event, Waited):
            print_progress(event.words)
            if "is here" in event.words:
                self._all_there, self._since = True, 0

    def _kill(self) -> None:
        servers = [child for child in psutil.Process().children() if child.cmdline()[-1] == WORKER]  # each forks one copy
        server = self._random.choice(sorted(servers, key=lambda one: one.create_time()))
        os.kill(server.children()[0].pid, signal.SIGKILL)
        self.killed += 1
        self._all_there, self._since = False, 0

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.ends[0]

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]


def run(folder: Path, name: str, steps: int, *, copies: int, deaths: Deaths, quick: bool) -> Record:
    model, data = folder / "model", folder / "data.jsonl"
    record = train(
        str(model), str(data), output=folder / name, from_config=True, sequence_length=32 if quick else 128, global_batch=4,
        trial_seconds=0.0, heal=copies > 1, fixed=(*FIXED, f"num_processes={copies}"),
        arguments={"max_steps": steps, "learning_rate": RATE}, watcher=Watcher(event=deaths),
    )  # fmt: skip
    assert record is not None
    return record


def difference(curve: Record, other: Record) -> float:
    pairs = zip(curve.details["loss_curve"], other.details["loss_curve"], strict=True)
    return max(abs(one - two) / abs(two) for (_, one), (_, two) in pairs)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--kills", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--every", type=int, default=5, help="steps of all copies between two deaths")
    parser.add_argument("--steps", type=int, help="default 600; 1500, which are shorter, with --quick")
    options = parser.parse_args(arguments)
    kills, steps = options.kills or (1 if options.quick else 5), options.steps or (1500 if options.quick else 600)
    settings = {"steps": steps, "every": options.every, "copies": COPIES, "learning_rate": RATE}
    case = Case("healing", options.results, detect(), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-healing-") as name:
        folder = Path(name)
        made(folder, quick=options.quick)
        watched = {"one process": Deaths(0, 1), "undisturbed": Deaths(0, 1), "deaths": Deaths(kills, options.every)}
        records = {
            name: run(folder, name, steps, copies=COPIES if name != "one process" else 1, deaths=deaths, quick=options.quick)
            for name, deaths in watched.items()
        }
    details: dict[str, dict[str, Any]] = {name: {"seconds": deaths.seconds} for name, deaths in watched.items()}
    calm, killed = watched["undisturbed"], watched["deaths"]
    details["undisturbed"]["largest_loss_difference"] = difference(records["undisturbed"], records["one process"])
    details["deaths"] |= {
        "kills": killed.killed, "largest_loss_difference": difference(records["deaths"], records["one process"]),
        "seconds_a_death": (killed.seconds - calm.seconds) / max(killed.killed, 1), "longest_pause": max(killed.pauses),
        "median_step": statistics.median(calm.pauses), "goodput": calm.seconds / killed.seconds,
    }  # fmt: skip
    for name, record in records.items():
        case.add(name, plan=record.plan, measured=record.measured, details=details[name])
    rows = [[name, *(f"{one[key]:.3g}" if key in one else "" for key in SHOWN)] for name, one in details.items()]
    print(format_table(("run", *SHOWN), rows))
    print(json.dumps({"case": "healing", **details}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
