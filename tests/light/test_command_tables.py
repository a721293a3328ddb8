"""The tables of the commands at 80 columns: no cell wraps over more than three lines, no line is wider, and no value is cut."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from made_up_plans import made_up_planning
from rich.table import Table

from upshift.cli import bench, encode, generate, inspect, load_test, quantize, tables, tune
from upshift.loading.placement.place import DISK, _placement_reason
from upshift.models.profile import Isolation
from upshift.planning.trials.select import Tried
from upshift.record import Numbers, Spread
from upshift.serving.load_test.run import LoadTest, Phase
from upshift.serving.load_test.traffic import Traffic

WIDTH = 80
MAX_LINES = 3  # of a cell


def rendered(table: Table, *, separated: bool) -> list[str]:
    """The lines of a table at 80 columns. ``separated``: with a blank line between rows, which changes no column's width."""
    file = io.StringIO()
    table.show_lines = separated
    tables.new_console(file=file, width=WIDTH).print(table)
    return file.getvalue().splitlines()


def check(table: Table) -> None:
    lines = rendered(table, separated=False)
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines)
    cells = [str(cell) for column in table.columns for cell in column.cells]
    shown = re.sub(r"\s", "", "".join(lines))
    for cell in cells:  # a number or a name stands in one line; of a text, every word
        for word in cell.split():
            assert word in "\n".join(lines) or len(word) > WIDTH // 4, (word, lines)
    assert table.row_count and shown
    body = "\n".join(line.rstrip() for line in rendered(table, separated=True))
    body = body.rpartition("\u2500\n")[2] if table.show_header else body.partition("\n\n")[2]
    rows = [row for row in body.split("\n\n") if row.strip()]
    assert max(len(row.strip("\n").splitlines()) for row in rows[: table.row_count]) <= MAX_LINES, body


def race_run(engine: str, precision: str, batch: int) -> SimpleNamespace:
    setup = SimpleNamespace(engine=engine, precision=precision, batch=batch, hint="latency")
    return SimpleNamespace(
        setup=setup, per_second=123_456.0, forecast_per_second=123_456.0, load_seconds=1234.5, first_seconds=12.34,
        step_seconds=12.3, weight_bytes=10**12, worst_cosine=-0.99999, largest_difference=1.2e-05,
    )  # fmt: skip


def race(batch: int) -> SimpleNamespace:
    runs = [race_run("torch-cuda-graphs", "int8-weights", batch), race_run("onnxruntime", "bf16", batch)]
    return SimpleNamespace(recalled=False, chosen=runs[0].setup, best=lambda: runs, seconds=1.0)


def phase(rate: float) -> Phase:
    seconds = {"p50": 12.345, "p95": 123.45, "p99": 123.45}
    return Phase(
        rate=rate, seconds=30.0, asked=12_345, statuses={"200": 12_345, "429": 1234, "503": 123, "no answer": 12},
        answered_per_second=123.45, tokens_per_second=123_456.0, first_token=seconds, token=seconds, within_promise=0.987,
        goodput=123.0, without_retry_after=0, reasons={},
    )  # fmt: skip


@pytest.mark.parametrize("promised", [True, False])
def test_load_test(promised: bool) -> None:
    phases = tuple(one if promised else one.changed(within_promise=None) for one in (phase(0.5), phase(128.0)))
    test = LoadTest(
        url="http://m", model="m", traffic=Traffic(), promised_ttft_ms=100.0 if promised else None,
        predicted_capacity=None, capacity=None, phases=phases,
    )  # fmt: skip
    table = load_test._table(test)
    check(table)
    assert ("in\npromise" in [one.header for one in table.columns]) is promised


def test_inspect() -> None:
    rules = {f"model.layers.*.mlp.experts.gate_up_proj_{number}": "packed_colwise" for number in range(12)}
    kernels = [f"flash_attention_{number}" for number in range(8)]
    declares = {"tensor_parallel_plan": rules, "attention_kernels": kernels, "expert_parallel": False, "no_split_modules": ["A"]}
    activations = [
        SimpleNamespace(precision="bf16, eager attention", whole_model=1.5e12, whole_model_recomputed=1e11, per_layer=1e10)
    ]
    inspection = SimpleNamespace(
        architecture="Qwen3OmniMoeThinkerForConditionalGeneration", objective="image-text-to-text", num_layers=128,
        declares=declares, parameters={"total": 123_456_789_012}, sequence_length=131_072,
        flops_forward=1.5e18, flops_train=4.5e18,
        activations=activations, kv_bytes=1e12, kv_bytes_per_token=1e7, isolation=Isolation(proven=False, reason="unknown " * 12),
        chunked_loss="the head is a plain linear layer, and its logits reach cross entropy in a known way",
    )  # fmt: skip
    shown = tables.inspection_tables(inspection)
    for table in shown:
        check(table)
    words = "\n".join(line for table in shown for line in rendered(table, separated=False))
    assert all(name in words for name in (*rules, *kernels)) and "False" not in words
    assert words.count("packed_colwise") == len(rules)


def test_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "out", tables.new_console(width=WIDTH))
    check(encode._encode_race_table(race(131_072)))
    check(generate._generate_race_table(race(1024)))


def test_trials_and_results() -> None:
    planning = made_up_planning(on="8xa100-40gb", global_batch=32)
    step = Spread(p20=123_456.0, p50=123_456.0, p80=123_456.0)
    numbers = Numbers(
        step_ms=step, tokens_per_second=9_876_543.0, peak_gib=1234.5, resident_gib=1234.5, evaluation_loss=12.3456
    )
    check(tables.prediction_table(numbers, numbers))
    check(tables.comparison_table([("plain default", numbers), ("chosen plan", numbers)]))
    failed = Tried(planning.ranking.candidates[0], wrong_loss=True)
    check(tables.trials_table([failed], failed))


def test_tune() -> None:
    names = ("learning_rate", "warmup_steps", "global_batch", "lr_scheduler_type", "weight_decay", "lora_rank", "adam_beta2")
    row = SimpleNamespace(
        number=1234, state="complete", values={"eval_loss": 12.34567, "time": 12345.6, "memory": 1234.5, "speed": 98765.4},
        parameters=dict.fromkeys(names, 1.2345e-05), seconds=12345.6, reason="",
    )  # fmt: skip
    check(tune._result_table([row]))


def test_placement() -> None:
    limits = {f"cuda:{number}": 80 * 2**30 for number in range(8)} | {"cpu": 2**40}
    unit = SimpleNamespace(read=10**10, nbytes=10**10)
    why = _placement_reason(unit, DISK, limits, SimpleNamespace(room=dict(limits)))
    check(inspect._placement_table([(DISK, "model.language_model.layers.0 to 127 (128)", 10**12, why)]))


def test_bench() -> None:
    seconds = SimpleNamespace(p20=12345.678, p50=12345.678, p80=12345.678)
    contender = SimpleNamespace(
        seconds=seconds, cpu_seconds=seconds, resident_gib=1234.5, result=SimpleNamespace(p50=123456.7),
    )  # fmt: skip
    check(bench._comparison_table(SimpleNamespace(a=contender, b=contender)))


def test_quantize() -> None:
    run = SimpleNamespace(per_second=123_456.0, median_cosine=0.99999, worst_cosine=-0.99999, same_tokens=0.999)
    for task in ("encode", "generate"):
        sizes = {"bytes_before": 10**12, "bytes_after": 10**12}
        result = SimpleNamespace(before=run, after=run, bits=8, engine="onnxruntime", task=task, **sizes)
        check(quantize._quality_table(result))
