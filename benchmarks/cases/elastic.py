"""What deaths cost a run: "hosts" in network namespaces of one machine, on which workers and whole hosts are killed (root, ip).

    python benchmarks/cases/elastic.py                     # four hosts: a worker, then a host killed, which comes back
    python benchmarks/cases/elastic.py --kills 20          # as many deaths of random workers, seeded (--lose-host: then a host)
    python benchmarks/cases/elastic.py --set fully_shard=weights

Every host runs the torchrun that ``upshift launch --hosts`` writes. The run's losses are held against those of a run that nobody
disturbs, on the same hosts (--quick: on one). Goodput is the time that the run's steps take (their number times their median)
over its wall time: start-up, planning, saving and what is done twice are the rest. The first host is never killed: the ranks meet
there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table
from upshift.hardware import detect
from upshift.launching.request import Launch
from upshift.launching.torchrun import host_script
from upshift.record import Numbers
from upshift.training.data.tokenizer import train_byte_level_bpe

CLAIMS = (
    Claim(
        name="seconds",
        text="three deaths among four hosts cost a run little",
        ours="a run with three deaths",
        baseline="the undisturbed run",
        better="lower",
        of=Source(row="disturbed", value="details.seconds", where={"kills": 0}),
        over=Source(row="undisturbed", value="details.seconds", where={"kills": 0}),
    ),
    Claim(
        name="losses",
        text="20 deaths of random workers among four hosts change no loss",
        ours="a run with 20 deaths",
        baseline="the undisturbed run",
        options="--kills 20 --every 2 --steps 80",
        unit="largest difference of a loss",
        better="lower",
        goal=1e-5,
        of=Source(row="deaths", value="details.largest_loss_difference", where={"kills": 20}),
    ),
    Claim(
        name="goodput",
        text="20 deaths of random workers among four hosts, two steps apart, leave time for steps",
        ours="a run with 20 deaths",
        baseline="its wall time",
        options="--kills 20 --every 2 --steps 80",
        unit="of the time in steps",
        of=Source(row="deaths", value="details.goodput", where={"kills": 20}),
    ),
)
FIGURES = (Figure(name="undisturbed-goodput", of=Source(row="deaths", value="details.undisturbed_goodput", where={"kills": 20})),)

SUITE = "--steps 60"
ROOT = Path(__file__).parents[1]
BRIDGE, NAMES, ADDRESS = "upshiftel", "upshiftel{}", "10.77.9.{}"
LIMIT_SECONDS, POLL_SECONDS = 3600.0, 0.05
CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320,
    "max_position_embeddings": 64,
}  # fmt: skip
CHOICES = (
    "precision=fp32", "tensor_parallel=1", "pipeline_parallel=1", "attention=eager", "optim=adamw_torch",
    "threads_per_process=1",  # each "host" takes all cores for its own
)  # fmt: skip


def ip(words: str, *, check: bool = True) -> str:
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True).stdout


def make_hosts(count: int) -> None:
    remove_hosts(count)
    ip(f"link add {BRIDGE} type bridge")
    ip(f"link set {BRIDGE} up")
    for number in range(count):
        name = NAMES.format(number)
        ip(f"netns add {name}")
        ip(f"link add {name} type veth peer name eth0 netns {name}")
        ip(f"link set {name} master {BRIDGE} up")
        ip(f"-n {name} addr add {ADDRESS.format(number + 1)}/24 dev eth0")
        ip(f"-n {name} link set eth0 up")
        ip(f"-n {name} link set lo up")


def remove_hosts(count: int) -> None:
    for number in range(count):
        ip(f"netns del {NAMES.format(number)}", check=False)
    ip(f"link del {BRIDGE}", check=False)


class Hosts:
    """One launch on all of them."""

    def __init__(self, count: int, output: Path, train: tuple[str, ...], *, name: str, log: Path, quick: bool) -> None:
        self.count, self.output, self.log, self.quick = count, output, log, quick
        self.launch = Launch(
            train=(*train, "--output", str(output)), name=name, hosts=tuple(ADDRESS.format(n + 1) for n in range(count)),
            min_nodes=max(count - 1, 1), max_nodes=count, nproc=1, max_restarts=100,
            environment=(("GLOO_SOCKET_IFNAME", "eth0"),),
        )  # fmt: skip
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.said: list[Path] = []
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        said = self.log.with_name(f"{self.log.name}-{len(self.said)}")
        self.said.append(said)
        with said.open("wb") as out, self.log.open("ab") as err:
            script = host_script(self.launch, number)
            if self.quick:  # torchrun waits for half a minute whether a lost host comes back at once
                script = script.replace("--rdzv-conf=", "--rdzv-conf=last_call_timeout=6,")
            command = ["ip", "netns", "exec", NAMES.format(number), "bash", "-c", script]
            self.running[number] = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)

    def processes(self, number: int) -> list[int]:
        return [int(pid) for pid in ip(f"netns pids {NAMES.format(number)}", check=False).split()]

    def workers(self, number: int) -> list[int]:
        torchrun = self.running[number].pid
        return [int(pid) for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()]

    def kill_worker(self, number: int) -> bool:
        workers = self.workers(number)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        return bool(workers)

    def kill_host(self, number: int) -> None:
        for pid in self.processes(number):
            os.kill(pid, signal.SIGKILL)
        self.running.pop(number).wait()

    def bring_back(self, number: int) -> None:
        """The run would be over before the host is there: its first rank waits until torchrun asks it to end."""
        waiting = self.workers(0)
        for worker in waiting:
            os.kill(worker, signal.SIGSTOP)
        self.start(number)
        until = time.monotonic() + LIMIT_SECONDS
        while any(not _is_asked_to_end(worker) for worker in waiting):
            self.check(until)
        for worker in waiting:
            os.kill(worker, signal.SIGCONT)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while self.newest() < step:
            self.check(until)

    def newest(self) -> int:
        return max((int(path.name.split("-")[1]) for path in self.output.glob("checkpoint-*[0-9]")), default=0)

    def check(self, until: float) -> None:
        time.sleep(POLL_SECONDS)
        failed = {number: process.returncode for number, process in self.running.items() if process.poll()}
        if failed or time.monotonic() > until or all(process.poll() == 0 for process in self.running.values()):
            raise SystemExit(f"the run ended too early, or too late (hosts failed: {failed}):\n{self.log.read_text()[-6000:]}")

    def finish(self) -> dict[str, Any]:
        for process in self.running.values():
            if process.wait(LIMIT_SECONDS):
                raise SystemExit(f"a host failed ({process.returncode}):\n{self.log.read_text()[-6000:]}")
        record: dict[str, Any] = json.loads("".join(path.read_text() for path in self.said))  # rank 0's alone
        return record

    def end(self) -> None:
        for number in list(self.running):
            self.kill_host(number)


def _is_asked_to_end(pid: int) -> bool:
    """Whether a process that is stopped has SIGTERM before it."""
    said = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(said["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1)


def disturb(hosts: Hosts, *, kills: int, every: int, seed: int, lose_host: bool) -> list[str]:
    """Each death after ``every`` further steps were saved."""
    dice, events, last = random.Random(seed), [], hosts.count - 1

    def tell(text: str) -> None:
        events.append(f"{text} after checkpoint {hosts.newest()}")
        print(events[-1], flush=True)

    while len(events) < kills:
        hosts.wait_for_step(hosts.newest() + every)
        number = dice.randrange(hosts.count)
        if hosts.kill_worker(number):
            tell(f"worker of host {number} killed")
    if lose_host:
        hosts.wait_for_step(hosts.newest() + every)
        hosts.kill_host(last)
        tell(f"host {last} killed")
        hosts.wait_for_step(hosts.newest() + every)
        hosts.bring_back(last)
        tell(f"host {last} back")
    return events


def run(case: Case, folder: Path, options: Any) -> dict[str, Any]:
    texts = [f"sentence {number} of many, which says {number * number} and no more" for number in range(400)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    LlamaConfig(**CONFIG).save_pretrained(folder / "model")
    train_byte_level_bpe(texts, 300).save_pretrained(folder / "model")
    choices = (*CHOICES, *(options.set or ["fully_shard=no"]))
    train = (
        "train", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--from-config", "--sequence-length", "16",
        "--global-batch", "12", "--max-steps", str(options.steps), "--save-steps", "2", "--learning-rate", "1e-3",
        *(f"--set={choice}" for choice in choices), "--json",
    )  # fmt: skip
    records, seconds, events = {}, {}, []
    counts = {"undisturbed": 1 if options.quick else options.hosts, "disturbed": options.hosts}
    for name, count in counts.items():
        start = time.monotonic()
        hosts = Hosts(count, folder / name, train, name=name, log=folder / f"{name}.log", quick=options.quick)
        try:
            if name == "disturbed":
                lose_host = options.lose_host or not options.kills
                events = disturb(
                    hosts, kills=options.kills or 1, every=options.every, seed=options.seed, lose_host=lose_host
                )  # fmt: skip
            records[name] = hosts.finish()
        finally:
            hosts.end()
        seconds[name] = time.monotonic() - start
    return judge(case, records, seconds, events)


def judge(case: Case, records: dict[str, Any], seconds: dict[str, float], events: list[str]) -> dict[str, Any]:
    curves = {name: record["details"]["loss_curve"] for name, record in records.items()}
    same_steps = [tokens for tokens, _ in curves["disturbed"]] == [tokens for tokens, _ in curves["undisturbed"]]
    pairs = zip(curves["disturbed"], curves["undisturbed"], strict=same_steps)
    largest = max(abs(one[1] - other[1]) for one, other in pairs)
    step = records["undisturbed"]["measured"]["step_ms"]["p50"] / 1000
    goodput = {name: step * len(curves[name]) / seconds[name] for name in curves}
    for name, record in records.items():
        details: dict[str, Any] = {"events": [], "seconds": seconds[name], "goodput": goodput[name]}
        if name == "disturbed":
            details |= {"events": events, "same_steps": same_steps, "largest_loss_difference": largest}
            details["undisturbed_goodput"] = goodput["undisturbed"]
        row = "deaths" if name == "disturbed" and case.settings["kills"] else name
        case.add(row, plan=record["plan"], measured=Numbers(), details={**details, "loss_curve": curves[name]})
    rows = [[name, f"{seconds[name]:.1f}", f"{len(curves[name])}", f"{goodput[name]:.3f}"] for name in curves]
    print(format_table(("run", "seconds", "steps", "goodput"), rows))
    return {
        "case": "elastic", "events": events, "same_steps": same_steps, "largest_loss_difference": largest, "goodput": goodput,
        "seconds": seconds, "step_seconds": step, "goal_reached": same_steps and largest <= 1e-5,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=0, help="of random workers; 0: of one, and of a host that comes back")
    parser.add_argument("--lose-host", action="store_true", help="after the kills, the last one, which comes back")
    parser.add_argument("--every", type=int, default=4, help="steps between two deaths, at least")
    parser.add_argument("--set", action="append", metavar="FIELD=VALUE", help="of the plan: another layout")
    options = parser.parse_args(arguments)
    names = ("hosts", "steps", "kills", "lose_host", "every", "seed", "set")
    case = Case("elastic", options.results, detect(), options.quick, {name: getattr(options, name) for name in names})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no host is left
    make_hosts(options.hosts)
    try:
        with tempfile.TemporaryDirectory(prefix="upshift-elastic-") as folder:
            outcome = run(case, Path(folder), options)
    finally:
        remove_hosts(options.hosts)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
