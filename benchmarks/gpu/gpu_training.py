"""Parts of the GPU check that train: by the plan that trials choose, by transformers.Trainer, and by nine settings."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_process import ANSWER, PartRequest
from gpu_rows import Answer, compare_speed
from gpu_sizes import SEED, Sizes, case_for, sizes_for
from trainer import LOSS_GOAL, Inputs, choose_plan, numbers, request_of, speeds
from trainer_data import Size
from trainer_run import CAREFUL, run_trainer, run_upshift

from upshift.benchmarking.ab_test import relative_error
from upshift.benchmarking.harness import percent
from upshift.errors import UpshiftError
from upshift.hardware import detect
from upshift.planning.optimizers import optimizers
from upshift.planning.search.space import can_compile, lacks_compiler
from upshift.planning.trials.select import Tried

UNIT = "tokens/s"
PICK_ALLOWED = ("adafactor",)  # as a setting uses; 8-bit optimizers of libraries with kernels of their own are not judged here
PLAIN_OPTIMIZER = "adamw_torch_fused"
DISK_BYTES_PER_PARAMETER = 40  # weights, two copies of the optimizer's state while it is replaced, and room


def train_small(request: PartRequest) -> Answer:
    sizes = sizes_for(request)
    return train(request, sizes, sizes.small, request.work / "model")


def train_large(request: PartRequest) -> Answer:
    sizes = sizes_for(request)
    if sizes.large is None:
        return Answer(reason=f"the GPU has {request.free_bytes / 2**30:.1f} GiB free; a larger model needs 12", skipped=True)
    from torch import device
    from transformers import AutoConfig, AutoModelForCausalLM

    with device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(request.work / "large"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    free = shutil.disk_usage(request.work).free
    needed = DISK_BYTES_PER_PARAMETER * parameters
    if free < needed:
        words = f"the disk of the output has {free / 1e9:.0f} GB free, and saving the model needs {needed / 1e9:.0f}"
        return Answer(reason=f"{words}; give --output on a larger disk", skipped=True)
    return train(request, sizes, sizes.large, request.work / "large")


def train(request: PartRequest, sizes: Sizes, size: Size, model: Path) -> Answer:
    """Let trials choose a plan, train by it, and compare the run with what the formula and the trial said."""
    with tempfile.TemporaryDirectory(prefix="plan-", dir=request.work) as scratch:
        inputs = Inputs(str(model), str(request.work / "data.jsonl"), Path(scratch), size, global_batch=sizes.global_batch)
        prepared = choose_plan(inputs, (), sizes.trial_seconds)
        (inputs.folder / "plan.json").write_text(prepared.plan.to_json())
        answer = run_upshift(request_of("upshift", inputs, collator="rows", seed=SEED))
    answer |= speeds(answer["seconds"], answer["tokens"])
    assert prepared.proof is not None
    chosen = prepared.proof.chosen
    formula = prepared.planning.numbers(chosen.candidate)
    case = case_for(request, f"gpu_{request.part.replace('-', '_')}", {**vars(size), "global_batch": sizes.global_batch})
    case.add(request.part, plan=prepared.plan.model_dump(), predicted=formula, measured=numbers(answer), details=answer)
    slower, words = compare_speed(answer["tokens_per_second"], formula.tokens_per_second, UNIT)
    memory = memory_in_words(formula.peak_gib, answer["peak_gib"])
    return Answer(
        reason=f"{words}{memory}; {prepared.plan.label()}", unit=UNIT, predicted=formula.tokens_per_second,
        measured=answer["tokens_per_second"], slower=slower,
        details={
            "trial_tokens_per_second": chosen.best.tokens_per_second, "evaluation_loss": answer["evaluation_loss"],
            "losses": answer["losses"], "trials": [trial_in_words(tried) for tried in prepared.proof.tried],
        },
    )  # fmt: skip


def memory_in_words(predicted: float | None, measured: float | None) -> str:
    if predicted is None or measured is None:
        return ""
    return f"; {measured:.2f} GiB, predicted {predicted:.2f}"


def trial_in_words(tried: Tried) -> str:
    return f"{tried.candidate.plan.label()}: {tried.failure or f'{tried.best.tokens_per_second or 0:.0f} {UNIT}'}"


def run_plain(request: PartRequest) -> Answer:
    return run_contender(request, "plain", {}, "pad")


def run_careful(request: PartRequest) -> Answer:
    flags = half_precision_flags()
    if can_compile(detect_measured()):
        return run_contender(request, "careful", flags, "rows")
    return run_contender(request, "careful", {**flags, "torch_compile": False}, "rows", "not compiled: Triton does not work here")


def run_liger(request: PartRequest) -> Answer:
    if find_spec("liger_kernel") is None:
        return Answer(reason="Liger is not installed: pip install liger-kernel", skipped=True)
    flags = {**half_precision_flags(), "torch_compile": False, "use_liger_kernel": True}
    return run_contender(request, "liger", flags, "rows")


def detect_measured() -> Any:
    from upshift.hardware.probe_cache import measure

    return measure(detect())


def half_precision_flags() -> dict[str, Any]:
    """Return the careful flags, with fp16 in place of bf16 where the GPU has no bf16."""
    gpu = detect().one_device().gpu
    if gpu is not None and gpu.supports("bf16") is False:
        return {**{name: value for name, value in CAREFUL.items() if name != "bf16"}, "fp16": True}
    return dict(CAREFUL)


def run_contender(request: PartRequest, name: str, flags: dict[str, Any], collator: str, note: str = "") -> Answer:
    """Train by transformers.Trainer with these flags, on the sequences and weights of the part train, and compare with it."""
    sizes = sizes_for(request)
    inputs = Inputs(
        str(request.work / "model"), str(request.work / "data.jsonl"), request.work, sizes.small, global_batch=sizes.global_batch
    )
    asked = request_of(name, inputs, collator=collator, seed=SEED) | {"flags": flags, "collator": collator}
    answer = run_trainer(asked)
    answer |= speeds(answer["seconds"], answer["tokens"])
    case = case_for(request, "gpu_trainer", {**vars(sizes.small), "global_batch": sizes.global_batch})
    case.add(name, plan={"flags": flags, "collator": collator}, measured=numbers(answer), details=answer)
    planned = json.loads((request.folder / "parts" / "train" / ANSWER).read_bytes())
    speed = answer["tokens_per_second"]
    ratio = planned["measured"] / speed
    error = relative_error(planned["details"]["evaluation_loss"], answer["evaluation_loss"])
    words = f"{speed:,.0f} {UNIT}; train is {ratio:.2f} times as fast" + (f"; {note}" if note else "")
    if error is None or not abs(error) <= LOSS_GOAL:  # a loss that is not a number fails, too
        wrong = f"the held-out loss of train is {percent(error, digits=2)} from this one, more than {LOSS_GOAL:.1%}"
        return Answer(
            reason=f"{wrong}; {words}", failed=True,
            unit=UNIT, measured=speed, details={"evaluation_loss": answer["evaluation_loss"], "losses": answer["losses"]},
        )  # fmt: skip
    return Answer(
        reason=words, unit=UNIT, measured=speed, slower=ratio < 1.0,
        details={"evaluation_loss": answer["evaluation_loss"], "loss_difference": error, "losses": answer["losses"]},
    )  # fmt: skip


@dataclass
class SettingsResult:
    """What the settings did. rows: by setting. not_run: settings that cannot run here, and why. broken: others' errors."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def run_settings(request: PartRequest) -> Answer:
    """Train a BERT by Upshift's pick and by nine settings that are set by hand, and compare speed and memory."""
    from nine_settings import FASTEST, SETTINGS

    result = try_settings(request)
    details = {"rows": result.rows, "not_run": result.not_run, "broken": result.broken}
    if result.broken:
        words = "; ".join(f"{name}: {error}" for name, error in result.broken.items())
        return Answer(reason=f"{len(result.broken)} failed: {words}", failed=True, details=details)
    by_hand = [name for name in SETTINGS if name in result.rows]
    if FASTEST not in result.rows or not by_hand:
        words = "; ".join(f"{name}: {why}" for name, why in result.not_run.items())
        return Answer(reason=f"nothing to compare: {words}", failed=True, details=details)
    pick = result.rows[FASTEST]
    fastest = max(by_hand, key=lambda name: float(result.rows[name]["samples_per_second"]))
    words = f"the pick {setting_in_words(pick)}, the fastest of {len(by_hand)} settings ({fastest}) "
    words += setting_in_words(result.rows[fastest])
    words += "".join(f"; not run: {name} ({why})" for name, why in result.not_run.items())
    return Answer(
        reason=words, unit="samples/s", measured=pick["samples_per_second"], details=details,
        slower=pick["samples_per_second"] < result.rows[fastest]["samples_per_second"],
    )  # fmt: skip


def setting_in_words(row: dict[str, Any]) -> str:
    return f"{row['samples_per_second']:.1f} samples/s in {row['held_gib']:.2f} GiB"


def try_settings(request: PartRequest) -> SettingsResult:
    from nine_settings import FASTEST, SETTINGS, run_setting

    from upshift.training.out_of_memory import is_out_of_memory

    sizes = sizes_for(request)
    common = {
        "config": sizes.settings, "length": sizes.settings_length, "steps": sizes.settings_steps, "memory_limit": None,
        "trial_seconds": sizes.trial_seconds, "allow": PICK_ALLOWED,
    }  # fmt: skip
    case = case_for(request, "gpu_settings", common)
    compiler_is_missing = lacks_compiler(detect_measured())
    result = SettingsResult()
    for name, fields in {FASTEST: None, **SETTINGS}.items():
        if compiler_is_missing and fields is not None and optimizers()[fields.get("optim", PLAIN_OPTIMIZER)].compiles:
            result.not_run[name] = "no compiler works here"
            continue
        gc.collect()  # the last model's tensors, which cycles of references hold
        try:
            answer = run_setting({**common, "setting": fields})
        except (RuntimeError, ValueError, UpshiftError) as error:  # the others show what they can
            words = next(iter(str(error).splitlines()), type(error).__name__)
            if is_out_of_memory(error):
                result.not_run[name] = "out of memory"
            else:
                result.broken[name] = words
            case.add(name, plan=fields or {}, measured=None, failure=words)
            continue
        result.rows[name] = {key: answer[key] for key in ("samples_per_second", "held_gib", "label")}
        case.add(name, plan=answer["plan"], measured=None, details=answer)
    return result
