"""Layouts of two processes, predicted and measured: on one machine, or as two hosts with a slow link (needs root, ip and tc).

    python benchmarks/cases/scaling.py                  # two processes with one core each against one with two
    python benchmarks/cases/scaling.py --mbit 200       # each layout of two "hosts" in network namespaces

Each rank runs whole steps of the one loop's own Stepper on synthetic full-length sequences. The rates and the link that the
predictions need are measured first, by the probe and between the ranks; predicted computation is then scaled by what half of the
batch takes one rank that exchanges nothing, as a trial would. Prints a table and Kendall's tau between predicted and
measured step times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from transformers import LlamaConfig

from upshift.hardware.several import join_hosts, measure_link
from upshift.hardware.spec import Host, Link
from upshift.models.source import find_to_train
from upshift.models.store import Variant, profile_model
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import find_host
from upshift.planning.rank import Candidate, cost_plan
from upshift.planning.workload import Workload

SEQUENCE, BATCH, MICRO = 128, 8, 2
HALF = "half of the batch, alone"
STEPS = 6  # of which the first is not counted
CONFIG = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 2048, "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"], "use_cache": False,
}  # fmt: skip
LAYOUTS = {
    "whole copies": ALONE,
    "zero 1": Layout(fully_shard="optimizer", shard_size=2),
    "zero 2": Layout(fully_shard="gradients", shard_size=2),
    "zero 3": Layout(fully_shard="weights", shard_size=2),
    "tensor": Layout(tensor_parallel=2),
    "tensor, tokens shared": Layout(tensor_parallel=2, sequence_parallel=True),
    "ulysses": Layout(context_parallel=2, context_kind="ulysses"),
    "pipeline": Layout(pipeline_parallel=2),
}
NAMES, ADDRESSES, PORT, BRIDGE = ("upshift0", "upshift1"), ("10.77.7.1", "10.77.7.2"), 29519, "upshiftbr"


def plan_of(host: Host, model: str, layout: Layout, ranks: int) -> Plan:
    data = ranks // layout.ranks_per_replica
    cores = host.cpu.usable_cores if host.cpu else 1
    return Plan(
        device="cpu", host=host.fingerprint, model=model, sequence_length=SEQUENCE, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO // data, num_processes=ranks, layout=layout,
        threads_per_process=max(cores // host.ranks_per_node(ranks), 1),
    )  # fmt: skip


def workload_of(plan: Plan) -> Workload:
    return Workload(sequence_length=SEQUENCE, global_batch=plan.global_batch)


def run_rank(folder: Path, rank: int, ranks: int, address: str) -> None:
    """One rank's process: every plan of the folder in turn; rank 0 writes what it measured."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=ranks)
    link = measure_link()
    plans = {name: Plan.model_validate(plan) for name, plan in json.loads((folder / "plans.json").read_text()).items()}
    seconds = {name: step_seconds(plan, folder, rank) for name, plan in plans.items()}
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps({"link": link.model_dump() if link else None, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def step_seconds(plan: Plan, folder: Path, rank: int) -> float:
    import numpy as np
    import torch.distributed as dist

    from upshift.training.arguments import Arguments
    from upshift.training.batches.of_plan import layout_for, objective_of
    from upshift.training.batches.source import BatchSource
    from upshift.training.data.tokens import TokenizedCorpus, cut_sequences
    from upshift.training.parallel.place import find_place
    from upshift.training.prepare import load_or_build, prepare, set_process
    from upshift.training.step import Stepper

    set_process(plan)
    place, source = find_place(plan), find_to_train(str(folder / "model"))
    model = prepare(load_or_build(source, plan, from_config=True, seed=1), plan, place)
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, CONFIG["vocab_size"], size=SEQUENCE).astype(np.int32) for _ in range(BATCH * STEPS)]
    objective = objective_of(source)
    batches = BatchSource(
        sequences=cut_sequences(TokenizedCorpus.from_documents(documents), SEQUENCE), global_batch=plan.global_batch,
        objective=objective,
        layout=layout_for(plan, objective, data_rank=place.data_rank), seed=1,
    ).batches()  # fmt: skip
    stepper, samples = Stepper(model, place, Arguments(max_steps=STEPS)), []
    for batch in itertools.islice(batches, STEPS):
        dist.barrier()
        start = time.perf_counter()
        stepper.step(batch)
        dist.barrier()
        samples.append(time.perf_counter() - start)
    return median(samples[1:])


def measured_on(plans: dict[str, Plan], folder: Path, ranks: int, *, inside: bool) -> tuple[Link | None, dict[str, float]]:
    """``inside``: each rank in its own network namespace."""
    (folder / "plans.json").write_text(json.dumps({name: plan.model_dump() for name, plan in plans.items()}))
    environment = {**os.environ, **({"GLOO_SOCKET_IFNAME": "eth0"} if inside else {})}
    started = []
    for rank in range(ranks):
        command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(ranks), "--folder", str(folder)]
        command += ["--address", ADDRESSES[0] if inside else "127.0.0.1"]
        started.append(subprocess.Popen(["ip", "netns", "exec", NAMES[rank], *command] if inside else command, env=environment))
    for process in started:
        if process.wait(timeout=580):
            raise SystemExit(f"a rank failed ({process.returncode})")
    answer = json.loads((folder / "measured.json").read_text())
    return Link.model_validate(answer["link"]) if answer["link"] else None, answer["seconds"]


def make_hosts(mbit: int) -> None:
    lines = [f"ip link add {BRIDGE} type bridge", f"ip link set {BRIDGE} up"]
    for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
        lines += [
            f"ip netns add {name}", f"ip link add upshiftv{number} type veth peer name eth0 netns {name}",
            f"ip link set upshiftv{number} master {BRIDGE} up", f"ip -n {name} addr add {address}/24 dev eth0",
            f"ip -n {name} link set eth0 up", f"ip -n {name} link set lo up",
            f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 32kb latency 400ms",
        ]  # fmt: skip
    for line in lines:
        subprocess.run(line.split(), check=True)


def remove_hosts() -> None:
    for line in (*(f"ip netns del {name}" for name in NAMES), f"ip link del {BRIDGE}"):
        subprocess.run(line.split(), check=False, capture_output=True)


def tau(first: list[float], second: list[float]) -> float:
    """Kendall's, of pairs whose second differs by more than 2 %."""
    both = itertools.combinations(zip(first, second, strict=True), 2)
    agree = [(a - c) * (b - d) > 0 for (a, b), (c, d) in both if abs(b / d - 1) > 0.02]
    return (2 * sum(agree) - len(agree)) / max(len(agree), 1)


def main(mbit: int | None) -> None:
    here = find_host(None).cpu_alone()
    assert here.cpu is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(**CONFIG).save_pretrained(folder / "model")
        source = find_to_train(str(folder / "model"))
        profile = profile_model(source, sequence_length=SEQUENCE, variants=(Variant("fp32", "sdpa", False, divided=True),))
        two = {name: plan_of(here, source.model_hash, layout, 2) for name, layout in LAYOUTS.items()}
        two[HALF] = two["whole copies"].changed(num_processes=1)
        alone = {"one process": plan_of(here, source.model_hash, ALONE, 1)}
        if mbit is None:
            host = here
            plans = {**two, **alone}
            seconds = measured_on(two, folder, 2, inside=False)[1] | measured_on(alone, folder, 1, inside=False)[1]
        else:
            half = here.changed(cpu=here.cpu.changed(usable_cores=max(here.cpu.usable_cores // 2, 1)))
            plans = two
            remove_hosts()
            make_hosts(mbit)
            try:
                link, seconds = measured_on(two, folder, 2, inside=True)
            finally:
                remove_hosts()
            host = join_hosts([half, half], link)
            print(f"link: {link}")
        found = {
            name: cost_plan(plan, host=host, profile=profile, workload=workload_of(plan))
            for name, plan in plans.items()
        }
    print(f"{'layout':24}{'predicted ms':>14}{'measured ms':>14}   terms")
    times = {name: one.time.terms for name, one in found.items() if isinstance(one, Candidate)}
    exchanged = {term for terms in times.values() for term in terms} - {*times[HALF], "pipeline idle"}
    factor = seconds.pop(HALF) / sum(times.pop(HALF).values())
    for terms in times.values():
        terms.update({term: value * factor for term, value in terms.items() if term not in exchanged})
    for name in sorted(times, key=lambda name: seconds[name]):
        total = sum(times[name].values())
        terms = ", ".join(f"{term} {1000 * value:.0f}" for term, value in times[name].items() if value > 0.01 * total)
        print(f"{name:24}{1000 * total:14.0f}{1000 * seconds[name]:14.0f}   {terms}")
    names = list(times)
    print(f"Kendall's tau {tau([sum(times[name].values()) for name in names], [seconds[name] for name in names]):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=int, help="of the link between two hosts in network namespaces; without: one machine")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--address")
    given = parser.parse_args()
    if given.rank is None:
        main(given.mbit)
    else:
        run_rank(given.folder, given.rank, given.ranks, given.address)
