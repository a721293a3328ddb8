"""How far predicted speeds of inference are from those that others measured and published.

    python benchmarks/cases/published_inference.py [--worst 12]

Every verified row of benchmarks/published/inference.jsonl whose precision, host and degrees the planner knows is predicted from
its config, lengths and engine alone. Three kinds of rows: the most an engine reached (the planner's best concurrency and chunk),
a static batch (its prompts together, then its tokens together), and a rate of requests (the concurrency that has this rate;
time to first token and per token are scored). The few constants that were
fitted saw only the rows of FITTED_ON; the others are held out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import leave_one_out_inference

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.benchmarking.harness import format_table
from upshift.errors import UpshiftError
from upshift.hardware import describe, detect
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.models.source import ModelSource
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.inference.memory import replica_memory
from upshift.planning.inference.plan import InferenceWorkload, ReplicaShape
from upshift.planning.inference.planner import PROFILE_LENGTH, Candidate, rank_plans
from upshift.planning.inference.space import CHUNKS, legal_values
from upshift.planning.inference.time import StepTime, build_engine, predict_service

CLAIMS = (
    Claim(
        name="speed",
        text="predicted tokens/s of inference are what others measured, models that no constant was fitted on",
        ours="the prediction",
        baseline="what was published",
        unit="mean error",
        better="lower",
        goal=0.2,
        of=Source(row="summary", value="details.speed.held out.mean"),
    ),
    Claim(
        name="order",
        text="and rank hosts, degrees and precisions as the measurements do",
        ours="the prediction",
        baseline="what was published",
        unit="Kendall's tau",
        goal=0.9,
        of=Source(row="summary", value="details.held_out_tau"),
    ),
)
FIGURES = (
    Figure(name="tau", of=Source(row="summary", value="details.tau")),
    Figure(name="pairs", of=Source(row="summary", value="details.pairs")),
    Figure(name="held-out-pairs", of=Source(row="summary", value="details.held_out_pairs")),
    Figure(name="unseen-rows", of=Source(row="summary", value="details.left_one_out.all.rows")),
    Figure(name="unseen-median", of=Source(row="summary", value="details.left_one_out.all.median"), scale=100),
    Figure(name="unseen-near", of=Source(row="summary", value="details.left_one_out.all.near"), scale=100),
    Figure(name="unseen-inside", of=Source(row="summary", value="details.left_one_out.all.inside"), scale=100),
)
CELLS = ("{rows:.0f}", "{mean:.0%}", "{median:.0%}", "{worst:.0%}", "{bias:+.0%}")
TABLES = (
    Table(
        name="speed",
        header=("tokens/s, of which", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.speed",
        cells=CELLS,
    ),
    Table(
        name="first",
        header=("TTFT, of which", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.first",
        cells=CELLS,
    ),
    Table(
        name="token",
        header=("TPOT, of which", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.token",
        cells=CELLS,
    ),
    Table(
        name="memory",
        header=("memory, of which", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.memory",
        cells=CELLS,
    ),
    Table(
        name="sources",
        header=("tokens/s, by source", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.sources",
        cells=CELLS,
    ),
    Table(
        name="unseen",
        header=("tokens/s, by source", "rows", "median", "bias", "within 30%", "in interval"),
        of="summary",
        each="details.left_one_out",
        cells=("{rows:.0f}", "{median:.0%}", "{bias:+.0%}", "{near:.0%}", "{inside:.0%}"),
    ),
    Table(
        name="models",
        header=("tokens/s, by model", "rows", "mean", "median", "worst", "bias"),
        of="summary",
        each="details.models",
        cells=CELLS,
    ),
)
SUITE = "--worst 3"
ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "published" / "inference.jsonl"
METRICS = {"speed": "tokens/s", "first": "TTFT", "token": "TPOT", "memory": "memory"}
SHOWN = ("mean", "median", "worst", "bias")
QUICK_SHARE = 20  # of the rows one
FITTED_ON = ("llama-2-7b", "llama2-7b", "llama 2 7b", "3.1 8b", "3.1-8b", "v3.1 8b", "8x7b")  # models, in lower case
POSITIONS = 2**17  # the rows' configs restate sizes only, not how long a sequence may be
ASSUMED_OUTPUT = 200  # tokens, where a source of batch 1 prints none: the default of gpt-fast's generate.py
EAGER = ("LitGPT", "transformers generate")  # torch.compile of 4.38's generate, whose cache grows, changed nothing
UNKNOWN = {"gh200", "rtx-pro-6000", "mi250x"}  # products without rates in the table, or another form of one that is there
QUEUE_MS = 1000.0  # a longer time to first token: requests came faster than the engine could take them
REQUESTS = 500  # of each run of TensorRT-LLM 0.14 (notes of the rows)
ALLOW = ("fp8-weights", "int8-weights", "int4-weights", "fp8-kv")
GROUPS = {"G=32": 32, "int4wo-64": 64}  # weights that share a scale, as quoted
GB_IN_GIB = 1e9 / 2**30


class Score(NamedTuple):
    row: dict[str, Any]
    metric: str
    predicted: float
    measured: float
    seconds: StepTime | None = None  # of tokens/s, by term

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def load() -> list[dict[str, Any]]:
    return [row for row in map(json.loads, PUBLISHED.read_text().splitlines()) if row["verified"]]


@cache
def profile_of(config: str) -> ModelProfile:
    # No engine here drops what is behind a sliding window unless it is told to.
    fields = {"sliding_window": None, **json.loads(config), "max_position_embeddings": POSITIONS}
    source = ModelSource(reference="published", directory=None, config=fields)
    return profile_model(source, sequence_length=PROFILE_LENGTH, variants=())


def why_not(row: dict[str, Any]) -> str | None:
    """What keeps a row from being predicted."""
    if row["precision"] not in ("bf16", "fp16", "fp8", "int8", "int4"):
        return f"weights in {row['precision']}"
    if "int8dq" in row["quote"]:
        return "activations in int8"
    product = row["host"].lstrip("0123456789x")
    if product in UNKNOWN:
        return f"rates of {product} unknown"
    if row["input_length"] is None and row["concurrency"] != 1:
        return "lengths unknown"
    profile, degree = profile_of(json.dumps(row["config"])), row["tensor_parallel"]
    if degree not in legal_values(describe(row["host"]), profile, workload_of(row))["tensor_parallel"]:
        return "degree does not divide the heads (attention is data-parallel there)"
    return None


def workload_of(row: dict[str, Any]) -> InferenceWorkload:
    prompt, output = row["input_length"] or 5, row["output_length"] or ASSUMED_OUTPUT
    return InferenceWorkload(prompt_length=prompt, output_length=output, allow=ALLOW)


def shape_of(row: dict[str, Any]) -> ReplicaShape:
    """Precision and degrees of a row. An fp8 engine of TensorRT-LLM has an fp8 cache: 0.17 says so, 1.0's checkpoints do."""
    kv = row["kv_precision"] or ("fp8" if row["precision"] == "fp8" and "TensorRT" in row["engine"] else None)
    plain = row["precision"] if row["precision"] in ("bf16", "fp16") else "bf16"
    group = next((size for name, size in GROUPS.items() if name in row["quote"]), 128)
    execution = "eager" if row["engine"].startswith(EAGER) else "graphs"
    return ReplicaShape(
        row["precision"], kv or plain, row["tensor_parallel"], row["pipeline_parallel"], execution, group_size=group
    )


def best_of(row: dict[str, Any], host: Host, profile: ModelProfile) -> Candidate | None:
    ranking = rank_plans(host, profile, workload_of(row), fixed=shape_of(row)._asdict())
    return max(ranking.candidates, key=lambda candidate: candidate.tokens_per_second, default=None)  # as many as benchmarks give


def predict(row: dict[str, Any]) -> list[Score] | str:
    host, profile = describe(row["host"]), profile_of(json.dumps(row["config"]))
    measured = row["tokens_per_second_per_device"]
    if row["concurrency"] is not None:
        return static_batch(row, host, profile, row["concurrency"])
    if row["ttft_ms"] is None:
        best = best_of(row, host, profile)
        if best is None:
            return "predicted not to fit"
        return [Score(row, "tokens/s", best.tokens_per_second / host.num_devices, measured, best.service.step)]
    if row["requests_per_second"] is None:
        return static_batch(row, host, profile, REQUESTS)[:1]
    return at_rate(row, host, profile)


def static_batch(row: dict[str, Any], host: Host, profile: ModelProfile, batch: int) -> list[Score] | str:
    workload, shape = workload_of(row), shape_of(row)
    engine = build_engine(host, profile, workload, shape)
    memory = replica_memory(host, profile, workload, shape, chunk_tokens=CHUNKS[-1])
    assert engine is not None and memory.largest_concurrency is not None
    if batch > memory.largest_concurrency:
        return "predicted not to fit"
    prompts = engine.step(float(batch * workload.prompt_length), 0.0, logits=batch)
    token = engine.step(0.0, float(batch))
    assert prompts is not None and token is not None
    terms = StepTime(*(first + workload.decode_steps * later for first, later in zip(prompts, token, strict=True)))
    replicas = host.num_devices // row["tensor_parallel"]
    predicted = batch * workload.output_length / terms.total / (host.num_devices / replicas)
    scores = [Score(row, "tokens/s", predicted, row["tokens_per_second_per_device"], terms)]
    if row["ttft_ms"] is not None:
        scores.append(Score(row, "TTFT", 1000 * prompts.total, row["ttft_ms"]))
    if row["tpot_ms"] is not None:
        scores.append(Score(row, "TPOT", 1000 * token.total, row["tpot_ms"]))
    quoted = row["quote"].split("|")[-1].split()  # ... | 13.88 GB
    printed = row["peak_gib"] or (float(quoted[0]) * GB_IN_GIB if quoted[-1] == "GB" else None)
    if printed is not None:  # allocated tensors: no context, no communicators
        parts = memory.parts(batch)
        scores.append(Score(row, "memory", (parts["weights"] + parts["kv cache"]) / 2**30, printed))
    return scores


def at_rate(row: dict[str, Any], host: Host, profile: ModelProfile) -> list[Score] | str:
    if row["ttft_ms"] > QUEUE_MS:
        return "more requests than the engine could take, for a while"
    workload, shape, rate = workload_of(row), shape_of(row), row["requests_per_second"]
    engine = build_engine(host, profile, workload, shape)
    assert engine is not None
    services = (predict_service(engine, workload, concurrency, CHUNKS[-1]) for concurrency in range(1, 1024))
    found = next((service for service in services if service is not None and service.requests_per_second >= rate), None)
    if found is None or found.tpot is None:
        return "predicted not to keep up with the rate"
    return [Score(row, "TTFT", 1000 * found.ttft, row["ttft_ms"]), Score(row, "TPOT", 1000 * found.tpot, row["tpot_ms"])]


def fitted(row: dict[str, Any]) -> bool:
    return any(name in row["model"].lower() for name in FITTED_ON)


def kendall_tau(pairs: list[tuple[float, float]]) -> tuple[int, int]:
    """(concordant - discordant, pairs that differ in what was measured)."""
    agreed = total = 0
    for index, (predicted, measured) in enumerate(pairs):
        for other_predicted, other_measured in pairs[:index]:
            if measured == other_measured:
                continue
            total += 1
            product = (predicted - other_predicted) * (measured - other_measured)
            agreed += (product > 0) - (product < 0)
    return agreed, total


def ranking_tau(scores: list[Score]) -> tuple[float, int]:
    """Of hosts, degrees and precisions with the same model and lengths."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for score in scores:
        row = score.row
        key = (json.dumps(row["config"]), row["input_length"], row["output_length"], row["concurrency"], row["engine"].split()[0])
        groups[key].append((score.predicted, score.measured))
    counts = [kendall_tau(pairs) for pairs in groups.values()]
    total = sum(count for _, count in counts)
    return sum(agreed for agreed, _ in counts) / max(total, 1), total


def summary(scores: list[Score]) -> dict[str, float]:
    errors = [score.error for score in scores]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(scores), "mean": statistics.mean(sizes), "median": statistics.median(sizes), "worst": max(sizes),
        "bias": statistics.median(errors),
    }  # fmt: skip


def summaries(groups: dict[str, list[Score]]) -> dict[str, dict[str, float]]:
    """The largest mean error first."""
    found = {name: summary(scores) for name, scores in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]["mean"]))


def grouped(scores: list[Score], key: Any) -> dict[str, list[Score]]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[key(score)].append(score)
    return groups


def describe_row(row: dict[str, Any]) -> str:
    many = "" if row["concurrency"] is None else f" x {row['concurrency']}"
    lengths = f"{row['input_length']}+{row['output_length']}{many}"
    engine = row["engine"].split(" (")[0]
    return f"{row['model']}, {row['host']}, {row['precision']}, tp {row['tensor_parallel']}, {lengths}, {engine}"


def tables(scores: list[Score]) -> dict[str, dict[str, dict[str, float]]]:
    found = {}
    for name, metric in METRICS.items():
        of_metric = [score for score in scores if score.metric == metric]
        split = grouped(of_metric, lambda score: "fitted on" if fitted(score.row) else "held out")
        found[name] = summaries({"all": of_metric, **split})
    speeds = [score for score in scores if score.metric == "tokens/s"]
    found["sources"] = summaries(grouped(speeds, lambda score: score.row["engine"].split(" (")[0]))
    found["models"] = summaries(grouped(speeds, lambda score: score.row["model"]))
    return found


def speed_rows(scores: list[Score]) -> list[leave_one_out_inference.Row]:
    """Return the speeds whose seconds are known by term."""
    return [
        leave_one_out_inference.Row(
            score.row["source"], score.predicted, score.measured, score.seconds, score.row["engine"].split(" (")[0]
        )
        for score in scores
        if score.seconds is not None
    ]


def worst(scores: list[Score], count: int) -> list[str]:
    lines: list[str] = []
    for metric in METRICS.values():
        of_metric = [score for score in scores if score.metric == metric]
        lines += [f"Worst of {metric}:", ""]
        for score in sorted(of_metric, key=lambda score: -abs(score.error))[:count]:
            values = f"predicted {score.predicted:,.1f}, measured {score.measured:,.1f} ({score.error:+.0%})"
            lines.append(f"- {describe_row(score.row)}: {values}")
        lines.append("")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--worst", type=int, default=12, help="rows to print of each metric")
    options = parser.parse_args(arguments)
    rows = load()[:: QUICK_SHARE if options.quick else 1]
    scores: list[Score] = []
    left_out: dict[str, int] = defaultdict(int)
    for row in rows:
        try:
            found = why_not(row) or predict(row)
        except UpshiftError as error:
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, str):
            left_out[found] += 1
        else:
            scores += found
    speeds = [score for score in scores if score.metric == "tokens/s"]
    tau, pairs = ranking_tau(speeds)
    held_out_tau, held_out_pairs = ranking_tau([score for score in speeds if not fitted(score.row)])
    taus = {"tau": tau, "pairs": pairs, "held_out_tau": held_out_tau, "held_out_pairs": held_out_pairs}
    made = tables(scores)
    case = Case("published_inference", options.results, detect(), options.quick, {"rows": len(rows)})
    judged = speed_rows(scores)
    unseen = leave_one_out_inference.summaries(judged)
    intervals = leave_one_out_inference.intervals(judged)
    details = {**made, **taus, "left_out": dict(left_out), "left_one_out": unseen, "intervals": intervals}
    case.add("summary", plan={}, measured=None, details=details)
    for name, groups in made.items():
        cells = [[of, f"{one['rows']}", *(f"{one[key]:+.0%}" for key in SHOWN)] for of, one in groups.items()]
        print(format_table((name, "rows", *SHOWN), cells), end="\n\n")
    cells = [
        [of, f"{one['rows']}", f"{one['median']:.0%}", f"{one['bias']:+.0%}", f"{one['near']:.0%}", f"{one['inside']:.0%}"]
        for of, one in unseen.items()
    ]
    print(format_table(("each source left out", "rows", "median", "bias", "within 30%", "in interval"), cells), end="\n\n")
    print("\n".join(worst(scores, options.worst)))
    for why, count in sorted(left_out.items(), key=lambda item: -item[1]):
        print(f"left out {count}: {why}")
    print(json.dumps({"case": "published_inference", **taus}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
