"""Predictions for hardware that is not here, against what others measured on it and published.

    python benchmarks/cases/published.py [--quick] [--sources torchtitan,llm-foundry] [--write docs/accuracy_published.md]

Every verified row of benchmarks/published/{training,memory}.jsonl that says its layout, micro-batch and recomputation, and
whose layout the model's Hugging Face code can take, is predicted by the planner as it is: nothing is fitted to a row here.
Constants that were fitted on some of the rows are named in the page. Times are compared as tokens/s a device; memory with the
allocator's figure (allocated), with reserved memory, or with what the device held, as the source says.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_page import PAGE
from published_programs import choices_of, config_of, program_of, recomputed_way, with_program

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table
from upshift.errors import RequestError
from upshift.hardware import describe, detect
from upshift.models.profile import ModelProfile, Variant
from upshift.models.profile_model import profile_model
from upshift.models.source import find_model
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
NEEDED = ("fully_shard", "recompute", "micro_batch", "data_parallel", "tensor_parallel", "pipeline_parallel", "sequence_length")
STAGES = {"none": "no", "zero1": "optimizer", "zero2": "gradients", "zero3": "weights", "hybrid": "weights"}
SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved_1f1b", "interleaved_1f1b": "interleaved_1f1b", "gpipe": "gpipe"}
FULL = ("fp32", "tf32")
PRECISIONS = ("bf16", "fp16", "fp8", "fp32", "tf32")


RANKED = {"": "tau of a model's rows", "sequence_length": "tau at one length"}  # rows among which plans are ranked by speed


@dataclass(frozen=True)
class Scored:
    row: dict[str, Any]
    speed: float | None  # predicted over measured
    memory: float | None


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
                reasons[f"{row['source']}: second hand"] += 1
            elif row["precision"] not in PRECISIONS:
                reasons[f"{row['source']}: no plans in {row['precision']}"] += 1
            elif missing:
                reasons[f"{row['source']}: {', '.join(missing)} not told"] += 1
    return dict(reasons)


def layout_of(row: dict[str, Any]) -> Layout:
    sharing = row["data_parallel"] * (row["context_parallel"] or 1)
    in_node = int(row["host"].split("x")[-2]) if row["host"].count("x") and row["host"].split("x")[-2].isdigit() else 1
    stage = STAGES[row["fully_shard"]] if sharing > 1 else "no"
    size = in_node if row["fully_shard"] == "hybrid" else sharing
    layout = Layout(
        fully_shard=stage, shard_size=size if stage != "no" else 1,  # type: ignore[arg-type]
        tensor_parallel=row["tensor_parallel"], sequence_parallel=bool(row["sequence_parallel"]),
        context_parallel=row["context_parallel"] or 1, pipeline_parallel=row["pipeline_parallel"],
        pipeline_schedule=SCHEDULES.get((row["schedule"] or "1f1b").lower(), "1f1b"),  # type: ignore[arg-type]
        virtual_stages=row["virtual_stages"] or 1, expert_parallel=row["expert_parallel"] or 1,
    )  # fmt: skip
    return with_program(layout, program_of(row))


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


def predict(row: dict[str, Any], profile: ModelProfile) -> Candidate | str:
    try:
        host, layout = describe(row["host"]), layout_of(row)
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
    found = Coster(host, profile, workload).cost(plan)
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
            named = {key: row[key] for key in ("source", "path", "commit", "quote", "memory_kind", "host")}
            case.add(
                row["source"].split("/")[-1], plan=found.plan.model_dump(mode="json"), predicted=predicted,
                measured=measured, details={"published": named, "terms": found.time.terms},
            )  # fmt: skip
            scored.append(
                Scored(
                    row,
                    found.tokens_per_second / devices / speed if speed else None,
                    held / memory if memory else None,
                )
            )
    return scored, dict(skipped)


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
    """Mean and median of |error|, the bias, and the worst, in percent."""
    off = [ratio - 1 for ratio in ratios]
    worst = max(off, key=abs)
    size = [abs(error) for error in off]
    figures = (statistics.mean(size), statistics.median(size), statistics.median(off), worst)
    return tuple(f"{100 * figure:+.1f} %" if number > 1 else f"{100 * figure:.1f} %" for number, figure in enumerate(figures))  # type: ignore[return-value]


def tables(scored: list[Scored], *, markdown: bool) -> str:
    parts = []
    for title, pick, ranked in (("Speed", lambda s: s.speed, RANKED), ("Memory", lambda s: s.memory, {})):
        groups = defaultdict[str, list[Scored]](list)
        for one in scored:
            if pick(one) is not None:
                kind = f" ({one.row['memory_kind']})" if title == "Memory" else ""
                groups[one.row["source"] + kind].append(one)
                groups["all" + kind].append(one)
        cells = [
            [name, len(found), *errors([pick(one) for one in found]), *(tau(found, field) for field in ranked)]
            for name, found in sorted(groups.items())
        ]
        header = ("source", "rows", "mean size of errors", "median size", "median error", "worst", *ranked.values())
        parts.append(f"{title}, predicted against measured\n\n" + format_table(header, cells, markdown=markdown))
    return "\n\n".join(parts)


def tau(found: list[Scored], field: str) -> str:
    """Each pair of rows of one model, and the same ``field``, ranked; the mean over such groups, weighed by their rows."""
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for one in found:
        speed = measured_speed(one.row)
        if one.speed is not None and speed is not None:
            model = {name: value for name, value in one.row["config"].items() if name not in POSITIONS}
            groups[json.dumps([one.row["source"], model, one.row.get(field)])].append((one.speed * speed, speed))
    values = [(value, len(pairs)) for pairs in groups.values() if (value := kendall_tau(pairs)) is not None]
    return f"{sum(v * n for v, n in values) / sum(n for _, n in values):.2f}" if values else ""


def worst_rows(scored: list[Scored], *, markdown: bool, count: int) -> str:
    cells = []
    for one in sorted(scored, key=lambda s: -max(abs((s.speed or 1) - 1), abs((s.memory or 1) - 1)))[:count]:
        ratios = [f"{100 * (ratio - 1):+.0f} %" if ratio else "" for ratio in (one.speed, one.memory)]
        cells.append([one.row["source"].split("/")[-1], one.row["host"], one.row["quote"][:90].replace("|", "/"), *ratios])
    return format_table(("source", "host", "row", "speed", "memory"), cells, markdown=markdown)


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
    print(tables(scored, markdown=False), worst_rows(scored, markdown=False, count=25), sep="\n\n")
    if options.write:
        left = "\n".join(f"- {count}: {reason}" for reason, count in (skipped | not_told(sources)).items()) or "none"
        asked = f" --sources {options.sources}" if sources else ""
        options.write.write_text(
            PAGE.format(
                asked=asked, count=len(scored), skipped=left, tables=tables(scored, markdown=True),
                worst=worst_rows(scored, markdown=True, count=len(scored)),
            )
        )  # fmt: skip
    print(json.dumps({"case": "published", "rows": len(scored)}))
    return 0 if scored else 1


if __name__ == "__main__":
    sys.exit(main())
