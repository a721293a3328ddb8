"""Predictions for hardware that is not here, against what others measured on it and published.

    python benchmarks/cases/published.py [--quick] [--sources torchtitan,llm-foundry] [--write docs/accuracy_published.md]

Every verified row of benchmarks/published/{training,memory}.jsonl that says its layout, micro-batch and recomputation, and
whose layout the model's Hugging Face code can take, is predicted by the planner as it is: nothing is fitted to a row here.
Constants that were fitted on some of the rows are named in the page. Times are compared as tokens/s a device; memory with the
allocator's figure (allocated), with reserved memory, or with what the device held, as the source says.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import leave_one_out
from published_page import PAGE
from published_programs import choices_of, config_of, program_of, recomputed_way

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table
from upshift.errors import RequestError
from upshift.hardware import Host, describe, detect
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.cost.process_memory import predict_reserved
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.ranking import Candidate, Coster
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.units import gib

CLAIMS = (
    Claim(
        name="time",
        text="predictions for hardware that is not here are what others measured on it",
        ours="the prediction",
        baseline="what was published",
        unit="mean error",
        better="lower",
        goal=0.15,
        of=Source(row="summary", value="details.speed.mean_error"),
    ),
)

SUITE = "--sources torchtitan"
ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "published"
MAX_POSITIONS, POSITIONS = 2**17, ("max_position_embeddings", "n_positions")
TRACED_LENGTH = 2048  # the polynomials of fused attention hold at any length
STATED_BANDWIDTH = {"HBM2e at 2.4 TB/s": 2.4e12}
NEEDED = ("fully_shard", "recompute", "micro_batch", "data_parallel", "tensor_parallel", "pipeline_parallel", "sequence_length")
STAGES = {"none": "no", "zero1": "optimizer", "zero2": "gradients", "zero3": "weights", "hybrid": "weights"}
SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved_1f1b", "interleaved_1f1b": "interleaved_1f1b", "gpipe": "gpipe"}
FULL = ("fp32", "tf32")
PRECISIONS = ("bf16", "fp16", "fp8", "fp32", "tf32")


CERTAIN = 0.9  # share of the pairs whose error the planner counts with
RANKED = {"": "order", "sequence_length": "order at one length"}  # rows among which plans are ranked by speed
# The rows to which constants of planning/cost were fitted, by their source and model.
FITTED = {
    "mosaicml/llm-foundry": ("MPT-125m", "MPT-760m", "MPT-3b", "MPT-13b", "MPT-70b"),
    "MooreThreads/SimuMax": ("Llama 3 70B, 12 layers",),
}
RESULTS = ROOT / "results" / "published.jsonl"
QUOTED = ("source", "path", "commit", "quote", "memory_kind", "host", "host_note")  # what a result has of its published row
# What may differ between two rows of one run: a run whose memory was published in two kinds has a row for each.
NOT_OF_A_RUN = ("memory_kind", "peak_gib", "quote", "notes", "path", "commit")


@dataclass(frozen=True)
class Scored:
    row: dict[str, Any]
    speed: float | None  # predicted over measured; None in every row of a run but the first
    memory: float | None
    mechanisms: tuple[bool, ...]  # of its plan

    @property
    def is_fitted(self) -> bool:
        return self.row["model"] in FITTED.get(self.row["source"], ())


def read_rows(sources: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for name in ("training.jsonl", "memory.jsonl"):
        for line in (PUBLISHED / name).read_text().splitlines():
            row = json.loads(line)
            asked = not sources or any(source in row["source"] for source in sources)
            full = row["method"] in ("pretrain", "full") and row["precision"] in PRECISIONS
            if asked and full and row["verified"] and all(row[field] is not None for field in NEEDED):
                rows.append(row)
    unique = {json.dumps({k: v for k, v in row.items() if k != "notes"}, sort_keys=True): row for row in rows}
    return list(unique.values())


def not_told(sources: tuple[str, ...]) -> dict[str, int]:
    """Why rows of these sources cannot be predicted, and how many."""
    reasons = defaultdict[str, int](int)
    for line in (PUBLISHED / "training.jsonl").read_text().splitlines():
        row = json.loads(line)
        asked = not sources or any(source in row["source"] for source in sources)
        if asked and row["method"] in ("pretrain", "full"):
            missing = [field for field in NEEDED if row[field] is None]
            if not row["verified"]:
                reasons[f"{row['source']}: the measurement itself (quoted from elsewhere)"] += 1
            elif row["precision"] not in PRECISIONS:
                reasons[f"{row['source']}: Upshift plans no {row['precision']}"] += 1
            elif missing:
                reasons[f"{row['source']}: {', '.join(missing)}"] += 1
    return dict(reasons)


def skipped_table(reasons: dict[str, int]) -> str:
    cells = [[count, *reason.partition(": ")[::2]] for reason, count in reasons.items()]
    return format_table(("rows", "source", "what is missing"), cells, markdown=True) if cells else "None."


def layout_of(row: dict[str, Any]) -> Layout:
    sharing = row["data_parallel"] * (row["context_parallel"] or 1)
    counts = row["host"].partition("@")[0].split("x")
    in_node = int(counts[-2]) if len(counts) > 1 and counts[-2].isdigit() else 1
    stage = STAGES[row["fully_shard"]] if sharing > 1 else "no"
    size = in_node if row["fully_shard"] == "hybrid" else sharing
    layout = Layout(
        fully_shard=stage, shard_size=size if stage != "no" else 1,  # type: ignore[arg-type]
        tensor_parallel=row["tensor_parallel"], sequence_parallel=bool(row["sequence_parallel"]),
        context_parallel=row["context_parallel"] or 1, pipeline_parallel=row["pipeline_parallel"],
        pipeline_schedule=SCHEDULES.get((row["schedule"] or "1f1b").lower(), "1f1b"),  # type: ignore[arg-type]
        virtual_stages=row["virtual_stages"] or 1, expert_parallel=row["expert_parallel"] or 1,
    )  # fmt: skip
    return program_of(row).layout_of(layout)


def profile_of(row: dict[str, Any], folder: Path, profiles: dict[str, ModelProfile | str]) -> ModelProfile | str:
    """Traced once for a config and way of recomputing; its reason where it cannot be."""
    positions = dict.fromkeys(POSITIONS, MAX_POSITIONS)
    config = json.dumps(config_of(row) | positions, sort_keys=True)
    way, attention = recomputed_way(row), choices_of(row).get("attention", "sdpa")
    key = f"{config} {way} {attention} {row['precision'] in FULL}"
    if key not in profiles:
        path = folder / f"{len(profiles)}.json"
        path.write_text(config)
        named = Variant("bf16", attention, False, True, selective=way == "selective", alternate=way == "alternate", compiled=True)
        pure = named._replace(precision="bf16-pure")
        variants = (pure,) if program_of(row).neox else (named, pure)
        if row["precision"] in FULL:
            variants = (named._replace(precision="fp32"),)
        print_progress(f"tracing {row['model']}")
        try:
            profiles[key] = profile_model(find_model(str(path)), sequence_length=TRACED_LENGTH, variants=variants)
        except (RequestError, ValueError, TypeError) as error:
            profiles[key] = f"{type(error).__name__}: {error}"
    return profiles[key]


def host_of(row: dict[str, Any]) -> Host:
    """Return the row's host, with the bandwidth of its memory where the source states another one than the vendor."""
    host = describe(row["host"])
    for words, bandwidth in STATED_BANDWIDTH.items():
        if words in (row["host_note"] or "") and host.gpu is not None and host.gpu.peak is not None:
            peak = host.gpu.peak.changed(memory_bytes_per_second=bandwidth)
            return host.changed(gpu=host.gpu.changed(peak=peak))
    return host


def predict(row: dict[str, Any], profile: ModelProfile) -> Candidate | str:
    try:
        host, layout = host_of(row), layout_of(row)
    except (RequestError, ValueError) as error:
        return str(error)
    way = recomputed_way(row)
    recomputed = 0 if way is None else profile.num_layers
    accumulation = row["gradient_accumulation"] or 1
    divided = profile.tensor_parallel
    if layout.tensor_parallel > 1 and (divided is None or divided.divisor % layout.tensor_parallel):
        return profile.tensor_parallel_reason
    plan = Plan(
        device="cuda", host=host.fingerprint, model=profile.model_hash, sequence_length=row["sequence_length"],
        precision=row["precision"], per_device_train_batch_size=row["micro_batch"], gradient_accumulation_steps=accumulation,
        activation_checkpointing=recomputed, recompute_granularity=way or "full",
        torch_compile="layer" if row["compile"] else "off", num_processes=host.num_devices, layout=layout,
    )  # fmt: skip
    plan = plan.model_copy(update=choices_of(row))
    workload = Workload(sequence_length=row["sequence_length"], global_batch=plan.global_batch, total_steps=10**9)
    if host.device != "cuda":
        return f"plans are for CPUs and CUDA devices, not {host.device}"
    found = Coster(host, profile, workload, kernel=program_of(row).kernel).cost(plan)
    return found if isinstance(found, Candidate) else found.reason


def measured_speed(row: dict[str, Any]) -> float | None:
    """Tokens a second and device."""
    speed: float | None = row.get("tokens_per_second_per_device")
    if speed is None and row.get("step_seconds") and row.get("global_batch"):
        devices = describe(row["host"]).num_devices
        speed = row["global_batch"] * row["sequence_length"] / row["step_seconds"] / devices
    return speed


def predicted_gib(candidate: Candidate, kind: str | None) -> float:
    memory = candidate.memory
    return gib({"allocated": memory.peak, "reserved": predict_reserved(memory)}.get(kind or "device", candidate.resident))


def held_by(row: dict[str, Any], profile: ModelProfile) -> Candidate | None:
    """The plan whose memory the row's program holds, where it is not the same: that of as many micro-batches as stages."""
    if not program_of(row).buffers or row["gradient_accumulation"] <= row["pipeline_parallel"]:
        return None
    found = predict(row | {"gradient_accumulation": row["pipeline_parallel"]}, profile)
    return found if isinstance(found, Candidate) else None


def score(rows: list[dict[str, Any]], case: Case) -> tuple[list[Scored], dict[str, int]]:
    scored, skipped = [], defaultdict[str, int](int)
    runs = set[str]()
    profiles: dict[str, ModelProfile | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            profile = profile_of(row, Path(folder), profiles)
            found = profile if isinstance(profile, str) else predict(row, profile)
            if isinstance(found, str):
                skipped[found[:100]] += 1
                continue
            devices = describe(row["host"]).num_devices
            speed, memory = measured_speed(row), row.get("peak_gib")
            held = predicted_gib(held_by(row, profile) or found, row["memory_kind"])
            predicted = Numbers(
                tokens_per_second=found.tokens_per_second / devices,
                peak_gib=held,
                binding_term=found.time.binding_term,
                tier="formula",
            )
            measured = Numbers(tokens_per_second=speed, peak_gib=memory)
            named = {key: row[key] for key in QUOTED}
            case.add(
                row["source"].split("/")[-1], plan=found.plan.model_dump(mode="json"), predicted=predicted,
                measured=measured, details={"published": named, "terms": found.time.terms},
            )  # fmt: skip
            scored.append(scored_row(row, predicted, measured, found.plan, runs))
    return scored, dict(skipped)


def scored_row(row: dict[str, Any], predicted: Numbers, measured: Numbers, plan: Plan, runs: set[str]) -> Scored:
    """Return the row with the ratios of its prediction. ``runs``: those of earlier rows, to which this row's is added."""
    facts = {key: value for key, value in row.items() if key not in NOT_OF_A_RUN and value is not None}
    run = json.dumps(facts, sort_keys=True)
    is_new = run not in runs
    runs.add(run)
    speed, memory = measured.tokens_per_second, measured.peak_gib
    return Scored(
        row,
        (predicted.tokens_per_second or 0.0) / speed if speed and is_new else None,
        (predicted.peak_gib or 0.0) / memory if memory else None,
        plan.mechanisms,
    )


def read_scored() -> list[Scored]:
    """Return the published rows with the predictions of the last run, from RESULTS."""
    records = [record for record in map(json.loads, RESULTS.read_text().splitlines()) if "published" in record["details"]]
    by_quote = {json.dumps([record["details"]["published"][name] for name in QUOTED]): record for record in records}
    runs = set[str]()
    scored = []
    for row in read_rows(()):
        record = by_quote.get(json.dumps([row[name] for name in QUOTED]))
        if record is not None:
            predicted, measured = (Numbers.model_validate(record[name]) for name in ("predicted", "measured"))
            scored.append(scored_row(row, predicted, measured, Plan.model_validate(record["plan"]), runs))
    return scored


def kendall_tau(pairs: list[tuple[float, float]]) -> float | None:
    """Over pairs of (predicted, measured) speeds: concordant minus discordant, of all pairs that differ by more than 2 %."""
    agree = differ = 0
    for number, (predicted, measured) in enumerate(pairs):
        for other_predicted, other_measured in pairs[:number]:
            if abs(measured / other_measured - 1) > 0.02:
                same = (predicted - other_predicted) * (measured - other_measured) > 0
                agree, differ = agree + same, differ + (not same)
    return (agree - differ) / (agree + differ) if agree + differ else None


def errors(ratios: list[float]) -> tuple[str, str, str, str]:
    """Return the mean and the median of the errors' sizes, the median error and the worst error, in percent."""
    signed = [ratio - 1 for ratio in ratios]
    sizes = [abs(error) for error in signed]
    worst = max(signed, key=abs)
    return (
        percent(statistics.mean(sizes)),
        percent(statistics.median(sizes)),
        f"{100 * statistics.median(signed):+.1f} %",
        f"{100 * worst:+.1f} %",
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def speed_table(scored: list[Scored], *, markdown: bool) -> str:
    """Return the errors of speed by source, of all rows, and of the rows that no constant was fitted to."""
    rows = [row for row in scored if row.speed is not None]
    groups = {"all": rows}
    groups |= {"not used for fitting": [row for row in rows if not row.is_fitted]}
    groups |= {"used for fitting": [row for row in rows if row.is_fitted]}
    groups |= by_name(rows, lambda row: row.row["source"])
    cells = [
        [
            name,
            len(group),
            *errors([row.speed for row in group if row.speed is not None]),
            *(tau(group, field) for field in RANKED),
        ]
        for name, group in groups.items()
        if group
    ]
    header = ("source", "runs", "mean error", "median error", "bias", "worst", *RANKED.values())
    return format_table(header, cells, markdown=markdown)


def memory_table(scored: list[Scored], *, markdown: bool) -> str:
    """Return the errors of memory by the kind of memory and by source."""
    rows = [row for row in scored if row.memory is not None]
    groups = by_name(rows, lambda row: ("all", row.row["memory_kind"]))
    groups |= by_name(rows, lambda row: (row.row["source"], row.row["memory_kind"]))
    cells = [
        [*name, len(group), *errors([row.memory for row in group if row.memory is not None])] for name, group in groups.items()
    ]
    return format_table(("source", "memory", "rows", "mean error", "median error", "bias", "worst"), cells, markdown=markdown)


def by_name(rows: list[Scored], name_of: Callable[[Scored], Any]) -> dict[Any, list[Scored]]:
    groups = defaultdict[Any, list[Scored]](list)
    for row in rows:
        groups[name_of(row)].append(row)
    return dict(sorted(groups.items()))


def summary(scored: list[Scored]) -> str:
    """Return the result in two sentences."""
    speeds = [row.speed for row in scored if row.speed is not None]
    fresh = [row.speed for row in scored if row.speed is not None and not row.is_fitted]
    sentences = []
    if speeds:
        mean, median, _, worst = errors(speeds)
        sentences.append(
            f"**Speed: half of {len(speeds)} predictions are within {median}. The mean error is {mean}, the worst {worst}.**"
        )
    if fresh:
        mean, median, _, worst = errors(fresh)
        sentences.append(
            f"Among the {len(fresh)} runs that were not used for fitting, half are within {median}; the mean is {mean}."
        )
    for of_mechanisms, words in (
        (False, ""),
        (True, ", with different kinds of parallelism, sharding or recomputation"),
    ):
        if pairs := pair_errors(scored, of_mechanisms=of_mechanisms):
            largest = percent(math.expm1(quantile(pairs)))
            sentences.append(
                f"Two predictions for one model on one host{words}: their ratio is within {largest} of the measured one in "
                f"{CERTAIN:.0%} of {len(pairs):,} pairs."
            )
    kinds = by_name([row for row in scored if row.memory is not None], lambda row: row.row["memory_kind"])
    medians = [f"{errors([row.memory for row in group if row.memory is not None])[1]} ({kind})" for kind, group in kinds.items()]
    if medians:
        sentences.append(f"Memory: half of the predictions are within {', '.join(medians)}.")
    return "\n".join(sentences)


def pair_errors(scored: list[Scored], *, of_mechanisms: bool = False) -> list[float]:
    """Return the errors of the ratios of two predicted speeds, as logarithms, ascending.

    The rows of a pair are of one source, model, host and sequence length, and both or none of them are in fp8. Nine tenths of the
    errors are below PAIR_ERROR of planning/search/simplicity.py. ``of_mechanisms``: count only pairs whose plans use different
    mechanisms; nine tenths of these errors are below MECHANISM_ERROR. The planner cannot tell plans apart that are that close.
    """
    groups: dict[str, list[tuple[float, tuple[bool, ...]]]] = defaultdict(list)
    for row in scored:
        if row.speed is not None:
            groups[pair_key(row)].append((row.speed, row.mechanisms))
    pairs = [pair for rows in groups.values() for pair in combinations(rows, 2)]
    return sorted(
        abs(math.log(speed / other_speed))
        for (speed, used), (other_speed, other_used) in pairs
        if not of_mechanisms or used != other_used
    )


def quantile(errors_of_pairs: list[float]) -> float:
    """Return the error that the share CERTAIN of the pairs do not exceed. ``errors_of_pairs``: ascending."""
    return errors_of_pairs[int(CERTAIN * len(errors_of_pairs))]


def pair_key(row: Scored) -> str:
    """Return what two rows must have in common to be a pair."""
    config = {name: value for name, value in config_of(row.row).items() if name not in POSITIONS}
    names = ("source", "host", "sequence_length")
    return json.dumps([config, row.row["precision"] == "fp8", *(row.row[name] for name in names)], sort_keys=True)


def tau(scored: list[Scored], field: str) -> str:
    """Return how well predictions rank the rows of one model that agree in ``field``: a mean weighted by the groups' rows."""
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for row in scored:
        speed = measured_speed(row.row)
        if row.speed is not None and speed is not None:
            model = {name: value for name, value in row.row["config"].items() if name not in POSITIONS}
            groups[json.dumps([row.row["source"], model, row.row.get(field)])].append((row.speed * speed, speed))
    values = [(value, len(pairs)) for pairs in groups.values() if (value := kendall_tau(pairs)) is not None]
    return f"{sum(v * n for v, n in values) / sum(n for _, n in values):.2f}" if values else ""


def worst_rows(scored: list[Scored], *, markdown: bool, count: int) -> str:
    cells = []
    for row in sorted(scored, key=lambda s: -max(abs((s.speed or 1) - 1), abs((s.memory or 1) - 1)))[:count]:
        speed = f"{100 * (row.speed - 1):+.0f} %" if row.speed else ""
        memory = f"{100 * (row.memory - 1):+.0f} % {row.row['memory_kind']}" if row.memory else ""
        cells.append([row.row["source"].split("/")[-1], row.row["host"], row.row["quote"].replace("|", "/"), speed, memory])
    return format_table(("source", "GPUs", "the published row", "speed", "memory"), cells, markdown=markdown)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--sources", default="", help="parts of repository names, separated by commas; default: all")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables to this Markdown file")
    options = parser.parse_args(arguments)
    sources = tuple(part for part in options.sources.split(",") if part)
    rows = read_rows(sources)
    rows = rows[:3] if options.quick else rows
    case = Case("published", options.results, detect(), options.quick, {"sources": sources})
    scored, skipped = score(rows, case)
    for reason, count in skipped.items():
        print_progress(f"left out {count}: {reason}")
    if speeds := [abs(one.speed - 1) for one in scored if one.speed is not None]:
        found = {"rows": len(speeds), "mean_error": statistics.mean(speeds), "median_error": statistics.median(speeds)}
        case.add("summary", plan={}, measured=None, details={"speed": found})
    parts = (speed_table(scored, markdown=False), memory_table(scored, markdown=False))
    print(*parts, worst_rows(scored, markdown=False, count=25), sep="\n\n")
    if options.write:
        left_out_rows = leave_one_out.read_rows()
        ratios = leave_one_out.left_out_ratios(left_out_rows)
        page = PAGE.format(
            left_out=leave_one_out.sentence(left_out_rows, ratios),
            intervals=leave_one_out.interval_table(ratios),
            left_out_table=leave_one_out.table(left_out_rows, ratios, markdown=True),
            summary=summary(scored),
            speed=speed_table(scored, markdown=True),
            memory=memory_table(scored, markdown=True),
            skipped=skipped_table(skipped | not_told(sources)),
            worst=worst_rows(scored, markdown=True, count=len(scored)),
            options=f" --sources {options.sources}" if sources else "",
        )
        options.write.write_text(page)
    print(json.dumps({"case": "published", "rows": len(scored)}))
    return 0 if scored else 1


if __name__ == "__main__":
    sys.exit(main())
