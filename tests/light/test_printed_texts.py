"""The command line prints texts of libraries, paths and names as they are, also if they look like rich's markup."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest

from upshift.cli import doctor, tables, train, train_xla, tune
from upshift.cli.plan import ranking
from upshift.cli.progress import Activity
from upshift.cli.run_display import RunDisplay
from upshift.debugging.finding import Finding
from upshift.training.loop.events import Event

PACKAGE = Path(tables.__file__).parents[1]
TEXTS = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer",
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
    "runs[a]/[bold]/[/]",
    "[link=x]:fire:[red",
    "\\[x] [@click=f()]y[/]",
)
MARKER = "Q"
STYLE_TAG = re.compile(r"\[(bold|dim|red|yellow|green|cyan|italic)\b[^\[\]]*\]|\[/\w*\]")


def printed(show: Callable[[str], Any], text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what ``show`` prints about a text, without white space: a line may break anywhere."""
    file = io.StringIO()
    for name in ("out", "err"):
        monkeypatch.setattr(tables, name, tables.new_console(file=file, width=1000))
    result = show(text)
    if result is not None:
        tables.out.print(result)
    return "".join(file.getvalue().replace("─", "").split())


def check_as_it_is(show: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, *, is_shown: bool = True) -> None:
    """Check that a text changes only the text itself in the output. ``is_shown``: the output has it."""
    reference = printed(show, MARKER * 7, monkeypatch)
    assert not is_shown or MARKER * 7 in reference, reference
    for text in TEXTS:
        assert printed(show, text, monkeypatch) == reference.replace(MARKER * 7, "".join(text.split()))


def events() -> list[tuple[type, str]]:
    """Return every field of every event that holds a text."""
    return [
        (kind, field.name)
        for kind in get_args(Event)
        for field in fields(kind)
        if get_type_hints(kind)[field.name] in (str, str | None)
    ]


def made_event(kind: type, name: str, text: str) -> Any:
    values: dict[Any, Any] = {str: "x", str | None: "x", int: 1, float: 1.0, float | None: 1.0, tuple[int, ...]: (2, 3)}
    types = get_type_hints(kind)
    made = {field.name: values[types[field.name]] for field in fields(kind) if field.default is MISSING}
    return kind(**made | {name: text})


@pytest.mark.parametrize(("kind", "name"), events())
def test_a_run_shows_the_texts_of_its_events(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(text: str) -> None:
        with RunDisplay() as display:
            display._show_event(made_event(kind, name, text))

    is_unused = (kind.__name__, name) in {("Started", "plan_label"), ("Finished", "reason")}
    check_as_it_is(show, monkeypatch, is_shown=not is_unused)


def named(text: str, **values: Any) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(label=lambda: text), **values)


def show_plans(text: str) -> None:
    with RunDisplay(title=text) as display:  # its private methods: its watcher imports torch
        display._print_trial(SimpleNamespace(ok=False, failure=text, candidate=named(text)))
        display._print_notes(SimpleNamespace(notes=[text]))
        display._print_plan(named(text, predicted=SimpleNamespace(resident_gib=None)))


def show_bars(text: str) -> None:
    with RunDisplay() as display:
        display._show(text, 1, 2, text=text)
        display.progress.columns = display.progress.columns[:-1]  # without the clock
        display.progress.stop()
        tables.err.print(display.progress.get_renderable())


def show_spinner(text: str) -> None:
    status = tables.err.status

    def show_status(title: Any) -> Any:
        tables.err.print(status(title).renderable.render(0))
        return nullcontext()

    with (
        patch.object(tables.err, "status", show_status),
        patch.object(tables, "format_seconds", lambda _: "some time"),
        tables.step(text),
    ):
        pass


def tune_row(text: str) -> Any:
    return SimpleNamespace(number=1, state=text, values=None, reason=text, parameters={"x": text}, seconds=None)


def failed_trial(text: str) -> Any:
    return SimpleNamespace(ok=False, failure=text, candidate=named(text))


def every_table(text: str) -> Any:
    table = tables.new_table(text, text, "choice", numbers=(text,))
    table.caption = text
    table.add_row(text, text, text)
    return table


def finding(text: str) -> Finding:
    return Finding(subject=text, severity="error", what=text, evidence=text, cause=text, fix=text)


SHOWN: dict[str, Callable[[str], Any]] = {
    "plans of a run": show_plans,
    "bars of a run": show_bars,
    "a spinner": show_spinner,
    "a table": every_table,
    "trials": lambda text: tables.trials_table([failed_trial(text)], failed_trial("x")),
    "a study": lambda text: tune._table([tune_row(text)]),
    "a finding": lambda text: doctor.show_finding(finding(text)),
    "a subject": lambda text: ranking.subject_line(text, SimpleNamespace(name=text), text),  # type: ignore[arg-type]
    "a detail": lambda text: tables.print_detail("type", text),
    "a note": tables.dim,
    "a line of progress": lambda text: Activity(text).line(),
    "the folder of a model": lambda text: train._print_record(record_in(text), as_json=False),
    "the folder of an XLA run": lambda text: train_xla._print_results(trained_in(text), [], 1.0, as_json=False),
}


def trained_in(text: str) -> Any:
    return SimpleNamespace(devices="2 CPU cores", widths=(8,), padded_share=0.1, losses=(3.0, 2.0, 1.0), model_directory=text)


def record_in(text: str) -> Any:
    from upshift.record import Numbers

    numbers = Numbers(tokens_per_second=1.0)
    details = {"model_step": 1, "steps": 1}
    return SimpleNamespace(predicted=numbers, measured=numbers, details=details, checkpoint=text)


@pytest.mark.parametrize("name", SHOWN)
def test_a_text_is_printed_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_it_is(SHOWN[name], monkeypatch)


def test_a_resumed_run_on_xla_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(lambda text: train_xla._print_results(trained_in(text), ["step 3"], 60.0, as_json=False), "x", monkeypatch)
    assert "1stepsin" in text and "after2stepsofearlierruns" in text


READ_MARKUP = {"Console", "TextColumn", "Spinner", "Status", "escape", "print", "from_markup"}  # of rich


def test_no_source_prints_markup() -> None:
    """Only tables.py makes consoles and columns of bars. A style tag in a text of ours would be printed as it is."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "rich" not in text and "tables." not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            name = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and STYLE_TAG.search(node.value):
                wrong.append(f"{name}: a style as markup")
            is_free = path.name in ("tables.py", "progress.py")  # progress.py names Console as a type
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich") and not is_free:
                wrong += [f"{name}: {alias.name} of rich" for alias in node.names if alias.name in READ_MARKUP]
            if isinstance(node, ast.keyword) and node.arg == "markup" and path.name != "tables.py":
                wrong.append(f"{name}: markup=")
    assert not wrong
