"""If nothing fits, the message names options with which a plan fits: each of them is planned again here, as a user would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from upshift.errors import NothingFits
from upshift.hardware import describe
from upshift.models.source import AdapterOptions
from upshift.planning.inference.plan import InferenceWorkload
from upshift.planning.inference.planner import InferencePlanning, plan_inference
from upshift.planning.planner import Planning, Problem, _advice, choose_profiler, find_source, plan
from upshift.units import format_bytes

MODEL = Path(__file__).parents[2] / "examples" / "decoder_8b.json"
LORA = {"lora_rank": 16}
QLORA = LORA | {"load_in_4bit": True}
SUGGESTION = re.compile(r"(--[a-z].*?) \(([\d.]+ [KMG]iB), ([\d,]+) tokens/s\)")
VALUES: dict[str, tuple[str, Any]] = {
    "--lora-rank": ("lora_rank", int), "--sequence-length": ("sequence_length", int), "--global-batch": ("global_batch", int),
    "--on": ("on", str), "--allow": ("allow", lambda names: tuple(names.split(","))), "--max-grad-norm": ("max_grad_norm", float),
    "--concurrency": ("concurrency", int), "--prompt-length": ("prompt_length", int), "--output-length": ("output_length", int),
}  # fmt: skip


def planned(options: dict[str, Any]) -> Planning:
    return plan(MODEL, **{"sequence_length": 512, "global_batch": 8, "quick": True} | options)


def options_of(words: str) -> dict[str, Any]:
    """Return the options of ``plan`` that words of the command line are."""
    found: dict[str, Any] = {}
    pending = shlex.split(words)
    while pending:
        option = pending.pop(0)
        if option == "--load-in-4bit":
            found["load_in_4bit"] = True
        else:
            name, convert = VALUES[option]
            found[name] = convert(pending.pop(0))
    return found


def message(options: dict[str, Any]) -> str:
    with pytest.raises(NothingFits) as refused:
        planned(options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"on": "3060"} | LORA, ["--load-in-4bit", "--on 2x3060"]),
        ({"on": "t4"} | LORA, ["--load-in-4bit", "--on 2xt4"]),
        ({"on": "RTX 3060 laptop"} | LORA, ["--load-in-4bit --on '2xrtx 3060 laptop'"]),
        ({"on": "rtx-3060-laptop"} | QLORA, ["--on 2xrtx-3060-laptop"]),
        ({"on": "rtx-4090"}, ["--lora-rank 16", "--on 8xrtx-4090"]),
        ({"on": "h100"}, ["--lora-rank 16", "--allow bf16-weights,8bit-optimizer", "--on 2xh100"]),
        ({"on": "rtx-4090", "global_batch": 6, "sequence_length": 4096}, None),
        ({"on": "3060", "sequence_length": 8192, "fixed": ("per_device_train_batch_size=4",)} | QLORA, None),
        ({"on": "l4", "sequence_length": 16384, "global_batch": 5, "fixed": ("activation_checkpointing=0",)} | QLORA, None),
    ],
)
def test_what_is_advised_fits(options: dict[str, Any], expected: list[str] | None) -> None:
    """By a plan of its own, with the memory and the speed that the message says."""
    suggestions = SUGGESTION.findall(message(options))
    assert suggestions and len(suggestions) <= 3
    assert expected is None or [words for words, *_ in suggestions] == expected
    for words, memory, speed in suggestions:
        best = planned(options | options_of(words)).ranking.candidates[0]
        assert (format_bytes(best.resident), f"{best.tokens_per_second:,.0f}") == (memory, speed), words


def test_a_smaller_model_is_named_where_no_option_is_enough() -> None:
    """An 8B model in 4 bits takes 5.2 GiB, beside the context of CUDA: no option makes it fit in 6 GB."""
    words = message({"on": "rtx-3060-laptop"} | QLORA)
    assert "no other option that was tried fits; use a smaller model or a larger device, or --on" in words
    least = {"sequence_length": 128, "global_batch": 1, "allow": ("bf16-weights", "8bit-optimizer"), "max_grad_norm": 0.0}
    assert "use a smaller model" in message({"on": "rtx-3060-laptop"} | QLORA | least)


def test_the_nearest_plan_says_why_it_is_in_full_precision() -> None:
    """Autocast keeps copies of the weights in 16 bits beside them."""
    found = re.search(r"needs ([\d.]+) GiB: fp32 .* \(copies in 16 bits add (\d+) MiB\)", message({"on": "3060"} | LORA))
    assert found is not None
    in_bf16 = message({"on": "3060", "fixed": ("precision=bf16",)} | LORA)
    needed = re.search(r"needs ([\d.]+) GiB: bf16", in_bf16)
    assert needed is not None and "copies" not in in_bf16
    assert float(needed[1]) - float(found[1]) == pytest.approx(int(found[2]) / 1024, abs=0.1)


def served(options: dict[str, Any]) -> InferencePlanning:
    fields = {"prompt_length": 512, "output_length": 256} | options
    source = find_source(MODEL, AdapterOptions())
    workload = InferenceWorkload(**{name: value for name, value in fields.items() if name != "on"})
    return plan_inference(source, describe(fields["on"]), workload, profiler=choose_profiler(source, quick=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"on": "3060"}, ["--allow fp8-weights,int8-weights,int4-weights", "--on 2x3060"]),
        ({"on": "t4", "prompt_length": 100_000, "output_length": 100}, None),
        ({"on": "h100", "prompt_length": 4000, "concurrency": 64, "max_ttft_ms": 100.0}, None),
        ({"on": "h100", "max_ttft_ms": 1.0}, []),
        ({"on": "m2-16gb"}, []),
        ({"on": "a100-40gb", "prompt_length": 8000, "concurrency": 256}, None),
    ],
)
def test_what_is_advised_for_inference_works(options: dict[str, Any], expected: list[str] | None) -> None:
    with pytest.raises(NothingFits) as refused:
        served(options)
    suggestions = SUGGESTION.findall(str(refused.value).partition("what is predicted")[2])
    assert expected is None or [words for words, *_ in suggestions] == expected
    assert bool(suggestions) != ("a smaller model" in str(refused.value))
    for words, memory, speed in suggestions:
        best = served(options | options_of(words)).ranking.candidates[0]
        assert (format_bytes(best.resident), f"{best.tokens_per_second:,.0f}") == (memory, speed), words


def test_what_needs_another_trace_is_not_said_to_be_too_big(tmp_path: Path) -> None:
    """The sizes in the config do not say enough about an encoder: with its own trace, only batches and devices are tried."""
    planning = planned({"on": "h100"} | QLORA)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    problem = Problem(find_source(tmp_path, AdapterOptions()), describe("3060"), planning.workload)
    advice = _advice(problem, planning.profile, fixed=(), described=True)
    assert advice.endswith("not tried, because it needs another trace: --lora-rank 16 --load-in-4bit, --sequence-length 128")
