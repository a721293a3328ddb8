"""Does the planner rank the layouts of two processes as they are measured, on one machine and over a slow link?

    python benchmarks/cases/scaling.py                  # two processes with one core each, and one with two
    python benchmarks/cases/scaling.py --mbit 200       # two "hosts" in network namespaces with a slow link (root, ip, tc)

Each rank runs whole steps of the one loop's own Stepper on synthetic full-length sequences. The rates and the link that the
predictions need are measured first, by the probe and between the ranks; predicted computation is then scaled by what half of the
batch takes one rank that exchanges nothing, as a trial would. Kendall's tau is of all pairs of layouts whose measured times
differ by more than 2 %: 1 if both orders are the same, -1 if one is the other's reverse.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from transformers import LlamaConfig

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table
from upshift.hardware.cluster import join_hosts, measure_link
from upshift.hardware.spec import Host, Link
from upshift.models.profile import Variant
from upshift.models.source import find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import find_host
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.workload import Workload
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="order", text="layouts over a link of 200 Mbit/s are predicted in the order in which they are measured",
        ours="the predicted order", baseline="the measured one", options="--mbit 200", unit="Kendall's tau", goal=0.8,
        of=Source(row="summary", value="details.kendall_tau", where={"mbit": 200}),
    ),
    Claim(
        name="best", text="the layout predicted to be the fastest over a link of 200 Mbit/s is the fastest",
        ours="a step of the predicted best", baseline="of the measured best", options="--mbit 200", better="lower", goal=1.0,
        of=Source(row="summary", value="details.predicted_best_over_best", where={"mbit": 200}),
    ),
)  # fmt: skip
FIGURES = (
    Figure(
        name="whole-copies-over-pipeline", of=Source(row="whole copies", value="measured.step_ms.p50", where={"mbit": 200}),
        over=Source(row="pipeline", value="measured.step_ms.p50", where={"mbit": 200}),
    ),
    Figure(
        name="whole-copies-over-pipeline-predicted",
        of=Source(row="whole copies", value="predicted.step_ms.p50", where={"mbit": 200}),
        over=Source(row="pipeline", value="predicted.step_ms.p50", where={"mbit": 200}),
    ),
)  # fmt: skip

SUITE = "--rounds 1"
ROOT = Path(__file__).parents[1]
SEQUENCE, BATCH, MICRO = 128, 8, 2
HALF = "half of the batch, alone"
ALIKE = 0.02  # measured times this near have no order
LIMIT_SECONDS = 580.0
CONFIG = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 2048, "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"], "use_cache": False,
}  # fmt: skip
QUICK = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
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
QUICK_LAYOUTS = ("whole copies", "zero 3", "pipeline")
NAMES, ADDRESSES, BRIDGE = ("upshift0", "upshift1"), ("10.77.7.1", "10.77.7.2"), "upshiftbr"


def plan_of(host: Host, model: str, layout: Layout, ranks: int) -> Plan:
    data = ranks // layout.ranks_per_replica
    cores = host.cpu.usable_cores if host.cpu else 1
    return Plan(
        device="cpu", host=host.fingerprint, model=model, sequence_length=SEQUENCE, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO // data, num_processes=ranks, layout=layout,
        threads_per_process=max(cores // host.ranks_per_node(ranks), 1),
    )  # fmt: skip


def run_rank(folder: Path, rank: int, ranks: int) -> None:
    """One rank's process: every plan of the folder in turn, in rounds; rank 0 writes what it measured."""
    import torch.distributed as dist

    asked = json.loads((folder / "asked.json").read_text())
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{ranks}", rank=rank, world_size=ranks)
    link = measure_link()
    plans = {name: Plan.model_validate(plan) for name, plan in asked["plans"].items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(asked["rounds"]):
        for name, plan in plans.items():
            seconds[name] += step_seconds(plan, folder, asked["steps"])
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps({"link": link.model_dump() if link else None, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def step_seconds(plan: Plan, folder: Path, steps: int) -> list[float]:
    """Of each step but the first."""
    import numpy as np
    import torch.distributed as dist

    from upshift.training.arguments import Arguments
    from upshift.training.batches.layout import layout_for
    from upshift.training.batches.model_objective import find_objective
    from upshift.training.batches.sampler import BatchSource
    from upshift.training.data.tokens import TokenizedCorpus, cut_sequences
    from upshift.training.distributed.mesh import init_mesh
    from upshift.training.prepare import configure_process, load_or_build, prepare_model
    from upshift.training.step import TrainStep

    configure_process(plan)
    place, source = init_mesh(plan), find_model_to_train(str(folder / "model"))
    model = prepare_model(load_or_build(source, plan, from_config=True, seed=1), plan, place)
    generator = np.random.default_rng(0)
    words = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    documents = [generator.integers(0, words, size=SEQUENCE).astype(np.int32) for _ in range(BATCH * steps)]
    objective = find_objective(source)
    batches = BatchSource(
        sequences=cut_sequences(TokenizedCorpus.from_documents(documents), SEQUENCE), global_batch=plan.global_batch,
        objective=objective,
        layout=layout_for(plan, objective, data_rank=place.data_rank), seed=1,
    ).batches()  # fmt: skip
    stepper, samples = TrainStep(model, place, Arguments(max_steps=steps)), []
    for batch in itertools.islice(batches, steps):
        dist.barrier()
        start = time.perf_counter()
        stepper.step(batch)
        dist.barrier()
        samples.append(time.perf_counter() - start)
    return samples[1:]


def measured_on(plans: dict[str, Plan], folder: Path, options: Any) -> tuple[Link | None, dict[str, list[float]]]:
    """With a limited link each rank is in its own network namespace."""
    (ranks,) = {plan.num_processes for name, plan in plans.items() if name != HALF}
    asked = {"plans": {name: plan.model_dump() for name, plan in plans.items()}, "steps": options.steps, "rounds": options.rounds}
    (folder / "asked.json").write_text(json.dumps(asked))
    inside = options.mbit is not None
    environment = {**os.environ, **({"GLOO_SOCKET_IFNAME": "eth0"} if inside else {})}
    started = []
    for rank in range(ranks):
        command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(ranks), "--folder", str(folder)]
        started.append(subprocess.Popen(["ip", "netns", "exec", NAMES[rank], *command] if inside else command, env=environment))
    try:
        failed = [process.returncode for process in started if process.wait(timeout=LIMIT_SECONDS)]
    finally:
        for process in started:
            process.kill()
    if failed:
        raise SystemExit(f"a rank failed ({failed[0]})")
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
    both = itertools.combinations(zip(first, second, strict=True), 2)
    agree = [(a - c) * (b - d) > 0 for (a, b), (c, d) in both if abs(b / d - 1) > ALIKE]
    return (2 * sum(agree) - len(agree)) / max(len(agree), 1)


def predicted(plans: dict[str, Plan], host: Host, profile: Any, half_seconds: float) -> dict[str, dict[str, float]]:
    """Terms of a step's time in seconds, of the plans that fit."""
    work = {name: Workload(sequence_length=SEQUENCE, global_batch=plan.global_batch) for name, plan in plans.items()}
    costs = {name: cost_plan(plan, host=host, profile=profile, workload=work[name]) for name, plan in plans.items()}
    times = {name: dict(one.time.terms) for name, one in costs.items() if isinstance(one, Candidate)}
    exchanged = {term for terms in times.values() for term in terms} - {*times[HALF], "pipeline idle"}
    factor = half_seconds / sum(times.pop(HALF).values())
    for terms in times.values():
        terms.update({term: value * factor for term, value in terms.items() if term not in exchanged})
    return times


def run(case: Case, folder: Path, options: Any) -> dict[str, Any]:
    here = find_host(None).cpu_alone()
    assert here.cpu is not None
    LlamaConfig(**(QUICK if options.quick else CONFIG)).save_pretrained(folder / "model")
    source = find_model_to_train(str(folder / "model"))
    profile = profile_model(source, sequence_length=SEQUENCE, variants=(Variant("fp32", "sdpa", False, divided=True),))
    chosen = {name: layout for name, layout in LAYOUTS.items() if not options.quick or name in QUICK_LAYOUTS}
    plans = {name: plan_of(here, source.model_hash, layout, 2) for name, layout in chosen.items()}
    plans[HALF] = plans["whole copies"].changed(num_processes=1)
    if options.mbit is None:
        alone = {"one process": plan_of(here, source.model_hash, ALONE, 1)}
        host, seconds = here, measured_on(plans, folder, options)[1] | measured_on(alone, folder, options)[1]
        plans |= alone
    else:
        half = here.changed(cpu=here.cpu.changed(usable_cores=max(here.cpu.usable_cores // 2, 1)))
        remove_hosts()
        make_hosts(options.mbit)
        try:
            link, seconds = measured_on(plans, folder, options)
        finally:
            remove_hosts()
        host = join_hosts([half, half], link)
        print(f"link: {link}")
    times = predicted(plans, host, profile, median(seconds[HALF]))
    return judge(case, {name: plans[name] for name in times}, times, seconds, options)


def judge(
    case: Case, plans: dict[str, Plan], times: dict[str, dict[str, float]], seconds: dict[str, list[float]], options: Any
) -> dict[str, Any]:
    whole = {name: sum(terms.values()) for name, terms in times.items()}
    took = {name: median(seconds[name]) for name in times}
    table = []
    for name in sorted(took, key=lambda name: took[name]):
        terms = {term: 1000 * value for term, value in times[name].items() if value > 0.01 * whole[name]}
        case.add(
            name, plan=plans[name].model_dump(mode="json"), details={"terms_ms": terms},
            predicted=Numbers(step_ms=Spread.of([1000 * whole[name]])),
            measured=Numbers(step_ms=Spread.of([1000 * one for one in seconds[name]], num_warmup=options.rounds)),
        )  # fmt: skip
        said = ", ".join(f"{term} {value:.0f}" for term, value in terms.items())
        print(f"{name}, predicted ms: {said}")
        table.append([name, f"{1000 * whole[name]:.0f}", f"{1000 * took[name]:.0f}"])
    print(format_table(("layout", "predicted ms", "measured ms"), table))
    best = min(whole, key=lambda name: whole[name])
    outcome = {
        "kendall_tau": tau([whole[name] for name in took], list(took.values())), "predicted_best": best,
        "predicted_best_over_best": took[best] / min(took.values()), "half_alone_ms": 1000 * median(seconds[HALF]),
        "steps_ms": {name: [1000 * one for one in samples] for name, samples in seconds.items()},
    }  # fmt: skip
    case.add("summary", plan={}, measured=None, details=outcome)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--mbit", type=int, help="of the link between two hosts in network namespaces; without: one machine")
    parser.add_argument("--steps", type=int, default=4, help="of each layout in a round; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="in which all layouts take their turn")
    parser.add_argument("--rank", type=int, help="this and the next two: of the processes that the case starts")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        run_rank(options.folder, options.rank, options.ranks)
        return 0
    settings = {"sequence_length": SEQUENCE, "global_batch": BATCH, "mbit": options.mbit}
    settings |= {"steps": options.steps, "rounds": options.rounds}
    case = Case("scaling", options.results, find_host(None), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-scaling-") as folder:
        outcome = run(case, Path(folder), options)
    print(json.dumps({"case": "scaling", "mbit": options.mbit, **outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
