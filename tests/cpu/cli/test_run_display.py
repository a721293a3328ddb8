"""What a run does now, as a line of progress: from reading the data to its last step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from test_progress import Clock, clock  # noqa: F401

from upshift.cli import progress
from upshift.cli.run_display import RunDisplay
from upshift.training.loop.events import Started, StepDone

PHASES: list[tuple[str, Callable[[Any], None]]] = [
    ("Reading the data", lambda watcher: None),
    ("Tokenizing: 10.0 s so far, 5 of 10", lambda watcher: watcher.tokenizing(5, 10)),
    ("Tracing the model", lambda watcher: watcher.tracing(1, 3)),
    ("Trial plain", lambda watcher: watcher.trying(SimpleNamespace(label=lambda: "plain"))),
]


def test_the_steps_of_a_run(clock: Clock) -> None:  # noqa: F811
    told: list[str] = []
    writer = progress.LineWriter(told.append)
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
            watcher.event(
                StepDone(
                    step=7, max_steps=100, tokens=70, loss=2.125, learning_rate=1.0, gradient_norm=None,
                    tokens_per_second=1606.0, seconds_left=95.0, resident_bytes=2**30,
                )
            )  # fmt: skip
            writer.write_line()
            for words in ("Step 7/100", "loss 2.125", "1,606 tokens/s", "1 min 35 s left"):
                assert words in told[-1]
    finally:
        progress._writers.clear()
