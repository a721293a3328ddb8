"""A tracker that fails after the start costs the run nothing; before the start it is refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from upshift import settings
from upshift.errors import RequestError
from upshift.training import run, trackers
from upshift.training.arguments import Tracker, TrainRequest
from upshift.training.loop.events import Evaluated, Event, Finished, Started, StepDone, event_from_json, event_to_json
from upshift.training.trackers import PACKAGES, RunTrackers

EVENTS: list[Event] = [
    Started(step=0, max_steps=2, tokens=0, num_parameters=1, plan_label="", resumed_from=None),
    *(
        StepDone(
            step=step, max_steps=2, tokens=step, loss=1.0, learning_rate=0.1, gradient_norm=None, tokens_per_second=1.0,
            seconds_left=0.0, resident_bytes=1,
        )
        for step in (1, 2)
    ),
    Evaluated(step=2, tokens=2, loss=1.0),
    Finished(step=2, tokens=2, seconds=1.0, reason="finished"),
]  # fmt: skip
METHODS = ("__init__", "on_train_begin", "on_log", "on_train_end")
MakeTrackers = Callable[..., RunTrackers]


class Failing:
    """A callback that fails in one method, and notes all its calls."""

    def __init__(self, calls: list[str], failing: str) -> None:
        self.calls = calls
        self.failing = failing
        self.logging_dir = None
        self._call("__init__")

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.failing:
            raise OSError(f"no space left in {method}\nsecond line")

    def on_train_begin(self, *_: Any) -> None:
        self._call("on_train_begin")

    def on_log(self, *_: Any, logs: dict[str, Any]) -> None:
        self._call("on_log")

    def on_train_end(self, *_: Any) -> None:
        self._call("on_train_end")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeTrackers:
    """Return trackers with callbacks that fail in the methods of ``failing``. ``calls`` gets the calls by name."""

    def make(calls: dict[str, list[str]], on_event: Callable[[Event], None] = lambda event: None, **failing: str) -> RunTrackers:
        def callbacks(names: list[str]) -> list[Callable[[], Failing]]:
            return [lambda name=name: Failing(calls.setdefault(name, []), failing[name]) for name in names]  # type: ignore[misc]

        monkeypatch.setattr(trackers, "TRACKER_CALLBACKS", SimpleNamespace(get=lambda: callbacks))
        for name in failing:
            monkeypatch.setitem(PACKAGES, cast(Tracker, name), ("json",))
        request = TrainRequest(model="MODEL", data="DATA", output=tmp_path / "run", report_to=tuple(failing))
        return RunTrackers(request, on_event)

    return make


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
@pytest.mark.parametrize("method", METHODS)
def test_a_failure_in_each_method_is_refused_at_the_start_and_one_warning_later(
    method: str,
    tracker: str,
    make: MakeTrackers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: dict[str, list[str]] = {}
    events: list[Event] = []
    running = make(calls, events.append, **{tracker: method, "trackio": ""})
    words = rf"--report-to {tracker}: {tracker} failed \(no space left in {method}\)"
    if method == "__init__" or (method == "on_train_begin" and tracker != "tensorboard"):
        with pytest.raises(RequestError, match=words), running:
            running.begin()
        assert not caplog.messages
        return
    with running:
        running.begin()
        for event in EVENTS:
            running.event(event)
    assert events == EVENTS
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(words.replace("\\", ""))
    assert calls["trackio"] == ["__init__", "on_train_begin", *["on_log"] * 4, "on_train_end"]
    assert calls[tracker].count("on_log") == {"on_train_begin": 0, "on_log": 1, "on_train_end": 4}[method]
    assert calls[tracker][-1] == "on_train_end"


def test_the_error_of_a_run_is_not_hidden_by_a_tracker(make: MakeTrackers) -> None:
    running = make({}, mlflow="on_train_end")
    with pytest.raises(ZeroDivisionError), running:
        running.begin()
        raise ZeroDivisionError


def test_an_event_is_passed_on_before_the_trackers_get_it(make: MakeTrackers) -> None:
    calls: dict[str, list[str]] = {}
    seen: list[int] = []
    running = make(calls, lambda event: seen.append(calls["mlflow"].count("on_log")), mlflow="")
    with running:
        running.begin()
        for event in EVENTS:
            running.event(event)
    assert seen == [0, 0, 1, 2, 3]


def test_the_metrics_of_a_task_have_the_names_of_transformers(make: MakeTrackers, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Failing, "on_log", lambda self, *_, logs: sent.append(logs))
    running = make({}, mlflow="")
    with running:
        running.begin()
        running.event(event_from_json(event_to_json(Evaluated(step=2, tokens=8, loss=1.0, unit="rows", metrics={"f1": 0.5}))))
    assert sent == [{"eval_loss": 1.0, "num_input_rows_seen": 8, "eval_f1": 0.5}]


def test_a_tracker_that_is_named_twice_gets_the_numbers_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: list[str] = []

    def no_callbacks(requested: list[str]) -> list[Any]:
        names.extend(requested)
        return []

    monkeypatch.setattr(trackers, "TRACKER_CALLBACKS", SimpleNamespace(get=lambda: no_callbacks))
    request = TrainRequest(model="MODEL", data="DATA", output=tmp_path, report_to=("tensorboard", "wandb", "tensorboard"))
    monkeypatch.setitem(PACKAGES, "wandb", ("json",))
    with pytest.raises(ValueError, match="shorter"):  # there are no callbacks
        RunTrackers(request, lambda event: None).begin()
    assert names == ["tensorboard", "wandb"]


@pytest.mark.parametrize(
    ("tracker", "variable", "value"),
    [
        ("wandb", "WANDB_LOG_MODEL", "end"),
        ("wandb", "WANDB_LOG_MODEL", "checkpoint"),
        ("wandb", "WANDB_LOG_MODEL", "true"),
        ("wandb", "WANDB_WATCH", "all"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "1"),
        ("mlflow", "DISABLE_MLFLOW_INTEGRATION", "TRUE"),
    ],
)
def test_a_variable_that_a_tracker_cannot_use_is_refused_and_its_off_values_are_not(
    tracker: str,
    variable: str,
    value: str,
    make: MakeTrackers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[str, list[str]] = {}
    running = make(calls, **{tracker: ""})
    monkeypatch.setenv(variable, value)
    with pytest.raises(RequestError, match=f"^{variable}={value} does not work with --report-to {tracker}: .*; unset {variable}"):
        running.begin()
    assert not calls
    for off in ("", "false", "FALSE", "0"):
        monkeypatch.setenv(variable, off)
        assert settings.unusable_tracker_variables(tracker) == {}
    monkeypatch.setenv(variable, value)
    make(calls, tensorboard="").begin()  # of another tracker


def test_the_callers_own_checked_is_called_as_well(tmp_path: Path) -> None:
    order: list[str] = []
    watcher = run.Watcher(checked=lambda: order.append("caller"))
    request = TrainRequest(model="MODEL", data="DATA", output=tmp_path / "run", report_to=("tensorboard",))
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrackers, "begin", lambda self: order.append("trackers"))
        run._with_trackers(request, watcher, stack).checked()
    assert order == ["caller", "trackers"]


def test_a_killed_run_that_resumes_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    """It was killed after step 3, and goes on from the checkpoint of step 1."""
    board = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is missing, whose messages are read here")
    step = next(event for event in EVENTS if isinstance(event, StepDone))
    started = next(event for event in EVENTS if isinstance(event, Started))
    for first, last, resume in ((0, 3, False), (1, 4, True)):
        fields = {"model": "m", "data": "d", "output": tmp_path, "resume": resume, "report_to": ("tensorboard",)}
        sent = RunTrackers(TrainRequest.of(fields, {"max_steps": 4}), lambda event: None)
        sent.begin()
        sent.event(replace(started, step=first))
        for number in range(first + 1, last + 1):
            sent.event(replace(step, step=number, loss=float(number)))
        with sent:
            pass
        for path in (tmp_path / "upshift_tensorboard").glob("events.out.*"):  # the next file of this second has the same name
            path.rename(path.with_name(f"events.{first}"))
    shown: dict[int, float] = {}
    for path in sorted((tmp_path / "upshift_tensorboard").glob("events.*")):
        content = path.read_bytes()
        while content:  # https://github.com/tensorflow/tensorboard, backend/event_processing/event_accumulator.py
            (length,) = struct.unpack("<Q", content[:8])
            event = board.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == board.SessionLog.START:
                shown = {number: value for number, value in shown.items() if number < event.step}
            for value in event.summary.value:
                if value.tag == "train/loss":
                    assert event.step not in shown
                    shown[event.step] = value.simple_value
    assert shown == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
