"""What a run does now, as a line of progress: from reading the data to its last step."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from test_progress import Clock, clock  # noqa: F401

from upshift.cli import progress, tables
from upshift.cli.run_display import RunDisplay
from upshift.reports.run.demo import summary_of
from upshift.training.loop.events import Started, StepDone

PHASES: list[tuple[str, Callable[[Any], None]]] = [
    ("Reading the data", lambda watcher: None),
    ("Tokenizing: 10.0 s so far, 5 of 10", lambda watcher: watcher.tokenizing(5, 10)),
    ("Tracing the model", lambda watcher: watcher.tracing(1, 3)),
    ("Trial plain", lambda watcher: watcher.trying(SimpleNamespace(label=lambda: "plain"))),
]


def step_done(step: int, max_steps: int, *, tokens_per_second: float) -> StepDone:
    return StepDone(
        step=step, max_steps=max_steps, tokens=70, loss=2.125, learning_rate=1.0, gradient_norm=None,
        tokens_per_second=tokens_per_second, seconds_left=95.0, resident_bytes=2**30,
    )  # fmt: skip


def test_the_steps_of_a_run(clock: Clock) -> None:  # noqa: F811
    told: list[str] = []
    writer = progress.LineWriter("upshift train", told.append)
    progress._writers.append(writer)
    try:
        with RunDisplay(quiet=True) as display:
            watcher = display.watcher
            for say, call in PHASES:
                call(watcher)
                clock.now += 10
                writer.write_line()
                assert say in told[-1], told[-1]
            watcher.event(Started(0, 100, 0, 10, "plain", None))
            writer.write_line()
            assert told[-1].startswith("The first step")
            watcher.event(step_done(7, 100, tokens_per_second=1606.0))
            writer.write_line()
            for words in ("Step 7/100", "loss 2.125", "1,606 tokens/s", "1 min 35 s left"):
                assert words in told[-1]
    finally:
        progress._writers.clear()


@pytest.mark.parametrize(("width", "shows_prediction"), [(80, False), (120, True)])
def test_no_number_of_a_step_is_cut(width: int, shows_prediction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the terminal of a notebook, which has 80 columns."""
    screen = StringIO()
    monkeypatch.setattr(tables, "err", Console(file=screen, width=width, force_terminal=True))
    with RunDisplay() as display:
        display.predicted_bytes = 2.5 * 2**30
        display.watcher.event(step_done(1234, 2000, tokens_per_second=17256.0))
        display.progress.refresh()
    text = screen.getvalue()
    for words in ("Step 1234/2000", "loss 2.125", "17,256 tokens/s", "1 min 35 s left", "1.00 GiB"):
        assert words in text
    assert "…" not in text
    assert ("2.50 GiB predicted" in text) is shows_prediction


def demo_result(*, chosen: float | None, baseline: float | None, same: bool = False) -> SimpleNamespace:
    def run(speed: float | None) -> SimpleNamespace:
        return SimpleNamespace(measured=SimpleNamespace(tokens_per_second=speed))

    plan = SimpleNamespace(label=lambda: "bf16 · 8 x 1")
    return SimpleNamespace(
        chosen=run(chosen), baseline=run(baseline), chose_the_default=same, prepared=SimpleNamespace(plan=plan)
    )


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (demo_result(chosen=300.0, baseline=100.0), "3.00x"),
        (demo_result(chosen=300.0, baseline=None), "too slow, or too busy"),
        (demo_result(chosen=None, baseline=None), "too slow, or too busy"),
        (demo_result(chosen=300.0, baseline=250.0, same=True), "Both runs have this plan"),
    ],
)
def test_the_demo_says_how_much_faster_or_why_not(result: SimpleNamespace, word: str) -> None:
    """A machine so busy that a run ends in its warm-up has no speed to compare."""
    text = summary_of(result)
    assert word in text and "bf16 · 8 x 1" in text
    assert result.chose_the_default or ("x as fast" in text) == (word == "3.00x")
