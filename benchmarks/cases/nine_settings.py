"""The nine settings of transformers' single-GPU guide, and the plans that Upshift picks itself: speed against memory.

    python benchmarks/cases/nine_settings.py [--quick] [--rounds 2] [--write docs]

The guide (perf_train_gpu_one; bert-large, 512 random sequences of 512 tokens, batch 4) lets its reader try batch size 1 with
accumulation, checkpointing, fp16, Adafactor and 8-bit Adam one after the other. Here each runs through upshift.Trainer as a
plan of its own (bf16 for fp16, which CPUs have), on a smaller BERT; then Upshift's own picks: the fastest plan, and the
fastest within the memory of each of the nine that no other of them beats in both. All have the same global batch of 4
sequences. Memory is the highest that the process held while training, above what it held with the libraries imported.
--write draws both frontiers, as nine_settings.svg.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from drawing import Drawing

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source, Table
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.planning.planner import find_host
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="pick",
        text="Upshift's pick is faster than the fastest of the guide's nine settings",
        ours="Upshift's pick",
        baseline="the fastest of nine (bf16)",
        options="--rounds 1",
        goal=1.0,
        of=Source(row="summary", value="details.rows.Upshift's pick.samples_per_second"),
        over=Source(row="summary", value="details.rows.half.samples_per_second"),
    ),
    Claim(
        name="lean",
        text="its pick within the leanest's memory is faster than the leanest",
        ours="Upshift's pick within 0.75 GiB",
        baseline="the leanest of nine (accumulation, checkpoints, bf16, Adafactor)",
        options="--rounds 1",
        goal=1.0,
        of=Source(row="summary", value="details.rows.Upshift's pick within the leanest's memory.samples_per_second"),
        over=Source(row="summary", value="details.rows.bs 1, gas 4, ckpt, half, Adafactor.samples_per_second"),
    ),
    Claim(
        name="lean-memory",
        text="and holds no more than it",
        ours="Upshift's pick within the leanest's memory",
        baseline="the leanest of nine",
        options="--rounds 1",
        better="lower",
        goal=1.0,
        of=Source(row="summary", value="details.rows.Upshift's pick within the leanest's memory.held_gib"),
        over=Source(row="summary", value="details.rows.bs 1, gas 4, ckpt, half, Adafactor.held_gib"),
    ),
    Claim(
        name="frontier",
        text="within the memory of each of the nine that no other beats, its pick is faster",
        ours="Upshift's pick within that memory",
        baseline="the setting; where the least is won",
        options="--rounds 1",
        goal=1.0,
        of=Source(row="summary", value="details.least_speed"),
    ),
    Claim(
        name="frontier-memory",
        text="and holds no more",
        ours="Upshift's pick within that memory",
        baseline="the setting; where most is held",
        options="--rounds 1",
        better="lower",
        goal=1.0,
        of=Source(row="summary", value="details.most_memory"),
    ),
)

TABLES = (
    Table(
        name="settings",
        header=("setting", "samples/s", "GiB"),
        of="summary",
        each="details.rows",
        cells=("{samples_per_second:.2f}", "{held_gib:.2f}"),
    ),
)

SUITE = "--quick"
ROOT = Path(__file__).parents[1]
BATCH, WARMUP = 4, 2
FULL = {"vocab_size": 16384, "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
QUICK = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
SMALL_BATCH = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
LEAN = {**SMALL_BATCH, "activation_checkpointing": -1, "precision": "bf16"}
SETTINGS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "bs 1, gas 4": SMALL_BATCH,
    "bs 1, gas 4, ckpt": {**SMALL_BATCH, "activation_checkpointing": -1},
    "half": {"precision": "bf16"},
    "bs 1, gas 4, ckpt, half": LEAN,
    "Adafactor": {"optim": "adafactor"},
    "bs 1, gas 4, ckpt, half, Adafactor": {**LEAN, "optim": "adafactor"},
    "8-bit Adam": {"optim": "adamw_torch_8bit"},
    "bs 1, gas 4, ckpt, half, 8-bit Adam": {**LEAN, "optim": "adamw_torch_8bit"},
}
FASTEST, LEANEST = "Upshift's pick", "Upshift's pick within the leanest's memory"
Rows = dict[str, dict[str, float]]
PLANNED_STEPS = 1000
ALLOW = ("adafactor", "8bit-optimizer")  # as the nine use


def run_setting(request: dict[str, Any]) -> dict[str, Any]:
    """Train by one setting through upshift.Trainer, on the GPU if there is one; on a CPU in a fresh process."""
    import torch
    import transformers

    import upshift
    from upshift.benchmarking.meters import resident_bytes
    from upshift.hardware import detect
    from upshift.training.hf_trainer.choose_plan import plain_plan

    length = request["length"]
    torch.manual_seed(0)
    host = detect()
    device = host.device
    base = 0 if device == "cuda" else resident_bytes()  # torch's allocator counts tensors alone
    config = transformers.BertConfig(**request["config"], max_position_embeddings=length, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)  # fmt: skip
    with torch.device(device):  # a GPU draws random weights many times as fast
        model = transformers.BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, config.vocab_size, (64, length), generator=generator)
    data = [{"input_ids": row, "labels": number % 2} for number, row in enumerate(ids)]
    plan = None
    if request["setting"] is not None:
        chosen = dict(request["setting"])
        if chosen.get("activation_checkpointing"):
            chosen["activation_checkpointing"] = config.num_hidden_layers
        plan = plain_plan(host, device=device, batch=BATCH, accumulation=1, sequence_length=length).changed(**chosen)
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            reset_peak(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())
            control.should_training_stop = len(ends) >= request["steps"]

    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output, max_steps=PLANNED_STEPS, per_device_train_batch_size=BATCH, report_to="none", save_strategy="no",
            use_cpu=device == "cpu", disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = upshift.Trainer(
            model=model, args=arguments, train_dataset=data, callbacks=[Clock()], plan=plan,
            allow=request.get("allow", ALLOW) if plan is None else (),
            memory_limit_gib=request["memory_limit"], trial_seconds=request.get("trial_seconds"),
        )  # fmt: skip
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]
    return {
        "label": trainer.upshift_choice.plan.label(), "plan": trainer.upshift_choice.plan.model_dump(), "seconds": seconds,
        "losses": losses,
        "samples_per_second": BATCH / statistics.median(seconds), "held_gib": (peak_bytes(device) - base) / 2**30,
        "base_gib": base / 2**30,
    }  # fmt: skip


def reset_peak(device: str) -> None:
    import torch

    from upshift.benchmarking.meters import reset_resident_peak

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()


def peak_bytes(device: str) -> int:
    """Return the highest memory since the reset: of a GPU the tensors, of a CPU the resident memory of the process."""
    import torch

    from upshift.benchmarking.meters import resident_peak_bytes

    return torch.cuda.max_memory_allocated() if device == "cuda" else resident_peak_bytes()


def run_one(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    return run_fresh(
        [sys.executable, __file__, "--request", str(path)], timeout_seconds=1800.0,
        env={**os.environ, "UPSHIFT_CACHE": str(folder / "cache")},
    )  # fmt: skip


def medians(results: dict[str, list[dict[str, Any]]]) -> Rows:
    keys = ("samples_per_second", "held_gib", "base_gib")
    return {
        name: {key: statistics.median(answer[key] for answer in answers) for key in keys} for name, answers in results.items()
    }


def frontier(rows: Rows) -> list[str]:
    """The settings that no other beats in speed and memory at once, the leanest first."""
    kept: list[str] = []
    for name in sorted(rows, key=lambda one: rows[one]["held_gib"]):
        if not kept or rows[name]["samples_per_second"] > rows[kept[-1]]["samples_per_second"]:
            kept.append(name)
    return kept


def pick_within(setting: str, rows: Rows) -> str:
    leanest = min(rows, key=lambda one: rows[one]["held_gib"])
    return LEANEST if setting == leanest else f"{FASTEST} within the memory of {setting}"


def drawn(rows: Rows, within: dict[str, str]) -> str:
    """Memory to the right, speed upwards: the nine, which of them no other beats, and Upshift's picks."""
    most = max(row["held_gib"] for row in rows.values())
    drawing = Drawing(
        title="BERT of 6 layers, 4 sequences of 512 tokens a step, two CPU cores: samples/s against GiB",
        note="measured; GiB held above the imported libraries; the picks were told to stay within what is below them",
        x_ticks=[tick / 4 for tick in range(int(4 * most) + 2)], x_ends=(0.0, 1.1 * most),
        top=1.15 * max(row["samples_per_second"] for row in rows.values()), x_text="{:g}".format, y_text="{:.1f}".format,
    )  # fmt: skip

    def at(name: str) -> tuple[float, float]:
        return rows[name]["held_gib"], rows[name]["samples_per_second"]

    for title, names, dots in (
        ("the guide's nine settings", list(within.values()), list(SETTINGS)),
        ("what Upshift picks", frontier({name: rows[name] for name in (*within, FASTEST)}), [*within, FASTEST]),
    ):
        drawing.line(title, [at(name) for name in names])
        for name in dots:
            drawing.point(at(name), name if name in SETTINGS else "")
    return drawing.svg()


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, help="default 2; 1 with --quick")
    parser.add_argument("--write", type=Path, help="folder for nine_settings.svg")
    parser.add_argument("--steps", type=int, help="of each run; default 8, 4 with --quick")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 2)
    common = {
        "config": QUICK if options.quick else FULL, "length": 64 if options.quick else 512,
        "steps": options.steps or (4 if options.quick else 8), "memory_limit": None,
    }  # fmt: skip
    case = Case("nine_settings", options.results, find_host(None), options.quick, {"seed": 0, **common})

    def keep(number: int, name: str, answer: dict[str, Any]) -> None:
        print_progress(f"round {number + 1} {name}: {answer['samples_per_second']:.2f} samples/s, {answer['held_gib']:.2f} GiB")
        step_ms = Spread.of([1000 * value for value in answer["seconds"]], num_warmup=WARMUP)
        measured = Numbers(step_ms=step_ms, resident_gib=answer["held_gib"] + answer["base_gib"])
        case.add(name, plan=answer["plan"], measured=measured, details={"round": number} | answer)

    with tempfile.TemporaryDirectory(prefix="upshift-nine-") as name:
        folder = Path(name)
        requests = {setting: common | {"setting": fields} for setting, fields in SETTINGS.items()}
        runs = {setting: partial(run_one, request, folder) for setting, request in requests.items()}
        results = interleave(runs, rounds=rounds, on_result=keep)
        nine = medians(results)
        within = {pick_within(setting, nine): setting for setting in frontier(nine)}
        limits = {FASTEST: None} | {
            pick: nine[setting]["held_gib"] + nine[setting]["base_gib"] for pick, setting in within.items()
        }
        picks = {pick: common | {"setting": None, "memory_limit": limit} for pick, limit in limits.items()}
        for request in picks.values():
            run_one(request, folder)  # its trials, which the rounds recall
        own = {pick: partial(run_one, request, folder) for pick, request in picks.items()}
        results |= interleave({"vanilla again": runs["vanilla"], **own}, rounds=rounds, on_result=keep)
    rows = medians(results)
    ratios = {
        key: [rows[pick][key] / rows[setting][key] for pick, setting in within.items()]
        for key in ("samples_per_second", "held_gib")
    }
    case.add("summary", plan={}, measured=None, details={
        "rows": rows, "rounds": rounds, "within": within, "least_speed": min(ratios["samples_per_second"]),
        "most_memory": max(ratios["held_gib"]),
    })  # fmt: skip
    if options.write is not None:
        (options.write / "nine_settings.svg").write_text(drawn(rows, within), encoding="utf-8")
    shown = [
        [setting, f"{row['samples_per_second']:.2f}", f"{row['held_gib']:.2f}", results[setting][0]["label"]]
        for setting, row in rows.items()
    ]
    print(format_table(("setting", "samples/s", "GiB held", "plan"), shown))
    print(json.dumps({"case": "nine_settings", "rows": rows}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--request"]:
        print(json.dumps(run_setting(json.loads(Path(sys.argv[2]).read_bytes()))))
        sys.exit(0)
    sys.exit(main())
