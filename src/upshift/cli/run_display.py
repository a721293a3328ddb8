"""Show a training run on standard error: a bar for each stage, and lines for what happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rich.text import Text

from upshift.cli import tables
from upshift.cli.progress import activity
from upshift.training.loop.events import EARLY_STOPPING
from upshift.units import GIB, format_bytes, format_seconds

MAX_TITLE = 90  # characters of a trial's title
WIDE = 110  # characters of a terminal where all numbers of a step fit beside a long bar, and the time that passed


class RunDisplay:
    """Bars and lines of a run on standard error: tokenizing, tracing, trials, training.

    ``quiet``: print nothing on a terminal. ``title``: a line printed at the start."""

    def __init__(self, *, quiet: bool = False, title: str | None = None) -> None:
        from rich.progress import BarColumn, Progress, ProgressColumn, TimeElapsedColumn
        from rich.table import Column

        self.quiet = quiet
        self.title = title
        self._is_wide = not tables.err.is_terminal or tables.err.width >= WIDE
        self._description = Column(no_wrap=True)
        columns: list[ProgressColumn] = [
            tables.text_column("{task.description}", self._description),
            BarColumn(bar_width=24 if self._is_wide else 10),
            tables.text_column("{task.fields[text]}"),
        ]
        if self._is_wide:
            columns.append(TimeElapsedColumn())
        self.progress = Progress(*columns, console=tables.err, transient=True, disable=quiet)
        self._tasks: dict[str, Any] = {}
        self.predicted_bytes: float | None = None
        self._stack = ExitStack()

    def __enter__(self) -> RunDisplay:
        self.progress.start()
        self._activity = self._stack.enter_context(activity("Reading the data"))
        if self.title is not None:
            self._print(self.title)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.progress.stop()

    @property
    def watcher(self) -> Any:
        """Return the callbacks of a run that update this display."""
        from upshift.training.run import Watcher

        return Watcher(
            tokenizing=lambda done, total: self._show("Tokenizing", done, total),
            tracing=lambda done, total: self._show("Tracing the model", done, total),
            planned=self._show_planning,
            trying=lambda plan: self._show(f"Trial {plan.label()}"[:MAX_TITLE], None, None, key="trial"),
            tried=self._print_trial,
            proved=self._print_notes,
            finding_rate=lambda done, total: self._show("Finding a learning rate", done, total),
            found_rate=self._print_rate,
            ready=self._print_plan,
            event=self._show_event,
        )

    def event_callback(self, name: str, predicted_bytes: float | None) -> Any:
        """Return an event callback for one of several runs. ``predicted_bytes``: the prediction for this run, if it is another
        one than before."""

        def show_event(event: Any) -> None:
            previous = self.predicted_bytes
            self.predicted_bytes = predicted_bytes or previous
            self._show_event(event, name=name)
            self.predicted_bytes = previous

        return show_event

    def _show(self, title: str, done: float | None, total: float | None, *, text: str = "", key: str | None = None) -> None:
        """Update the bar of a stage and hide the bars of the stages before it. ``key``: the stage, if its title changes."""
        self._description.min_width = None if key is None else len(title)  # the number of a step is never cut
        name = key or title
        if name not in self._tasks:
            for task in self._tasks.values():
                self.progress.update(task, visible=False)
            self._tasks[name] = self.progress.add_task(title, total=total, text=text)
        self.progress.update(self._tasks[name], description=title, completed=done or 0, total=total, text=text)
        activity_title = title if key is None or done is None else key
        self._activity.update(done, total, title=activity_title, text=text and f"{title}, {text}")
        if key is None and total and done is not None and done >= total:
            self._activity.update(title="Planning")  # the work between two stages that count

    def _show_planning(self, planning: Any) -> None:
        self._activity.update(title="Choosing among the plans")
        best = planning.ranking.candidates[0]
        self._print(
            f"{len(planning.ranking.candidates):,} plans fit {planning.host.name}; best predicted: {best.plan.label()}, "
            f"{best.tokens_per_second:,.0f} tokens/s",
            style="dim",
        )

    def _print_trial(self, tried: Any) -> None:
        outcome = f"{tried.best.tokens_per_second:,.0f} tokens/s" if tried.ok else str(tried.failure)
        outcome_style = "dim" if tried.ok else "dim red"
        self._print(Text.assemble((f"tried {tried.candidate.plan.label()}: ", "dim"), (outcome, outcome_style)))

    def _print_notes(self, proof: Any) -> None:
        for note in proof.notes:
            self._print(note, style="dim")

    def _print_rate(self, found: Any) -> None:
        self._activity.update(title="Loading the model")
        tried = f"{len(found.rates)} were tried, from {found.rates[0]:.2g} to {found.rates[-1]:.2g}"
        self._print(f"Learning rate: {found.learning_rate:g} ({tried})")

    def _print_plan(self, prepared: Any) -> None:
        self._activity.update(title="Loading the model")
        resident_gib = prepared.predicted.resident_gib
        self.predicted_bytes = resident_gib * GIB if resident_gib else None
        self._print(f"Plan: {prepared.plan.label()}", style="bold")

    def _show_event(self, event: Any, *, name: str = "Step") -> None:
        kind = type(event).__name__
        if kind == "StepDone":
            self._show_step(event, name)
        elif kind == "OutOfMemory":
            self._print(_out_of_memory_text(event), style="yellow")
        elif kind == "Doubted":
            self._print(event.words, style="yellow")
        elif kind == "Waited":
            self._print(f"step {event.step}: {event.words}", style="yellow")
        elif kind in _TEXTS:
            self._print(_TEXTS[kind](event), style="dim")
        elif kind == "Saved":
            self._print(f"saved {event.path}", style="dim")
        elif kind == "Finished" and event.reason == EARLY_STOPPING:
            self._print(f"ended early after step {event.step}: the held-out loss no longer falls")
        elif kind == "Started":
            self._activity.update(title="The first step")
            if event.resumed_from:
                self._print(f"resumed from {event.resumed_from} after step {event.step}", style="dim")

    def _show_step(self, event: Any, name: str) -> None:
        memory = format_bytes(event.resident_bytes)
        if self.predicted_bytes and self._is_wide:
            memory += f" ({format_bytes(self.predicted_bytes)} predicted)"
        speed = f"{event.tokens_per_second:,.0f} {event.unit}/s"
        rewards = _rewards_text(event.reward_accuracy, event.reward_margin, event.kl)
        left = f"{format_seconds(event.seconds_left)} left" if event.seconds_left > 0 else "ending"
        text = f"loss {event.loss:.3f}{rewards} · {speed} · {left} · {memory}"
        self._show(f"{name} {event.step}/{event.max_steps}", event.step, event.max_steps, text=text, key=name)
        if event.logged_loss is not None:
            norm = "" if event.gradient_norm is None else f" · gradient norm {event.gradient_norm:.3g}"
            rewards = _rewards_text(event.logged_reward_accuracy, event.logged_reward_margin, event.logged_kl)
            numbers = f"loss {event.logged_loss:.4f}{rewards} · learning rate {event.learning_rate:.3g}{norm} · {speed}"
            self._print(f"{name} {event.step}/{event.max_steps}: {numbers}", soft_wrap=True)

    def _print(self, text: str | Text, *, style: str | None = None, soft_wrap: bool = False) -> None:
        """Print a line. ``soft_wrap``: never break it, so that a log has one line for it."""
        if not self.quiet:
            self.progress.console.print(text, style=style, highlight=False, soft_wrap=soft_wrap)


def _rewards_text(accuracy: float | None, margin: float | None, kl: float | None) -> str:
    """Return the rewards of pairs and of rated completions, or nothing for other sequences."""
    accuracy_text = "" if accuracy is None else f" · reward accuracy {accuracy:.0%}"
    margin_text = "" if margin is None else f" · margin {margin:.3f}"
    kl_text = "" if kl is None else f" · KL {kl:.3f}"
    return accuracy_text + margin_text + kl_text


def _out_of_memory_text(event: Any) -> str:
    place = _FAILED_PLACES[event.failed].format(step=event.step)
    sizes = f"micro-batches of {event.smaller[0]} x {event.smaller[1]} tokens, {event.largest[0]} x {event.largest[1]} before"
    if event.failed == "step":
        after = f"it goes on with {sizes}, and the same gradients"
    else:
        after = f"passes without gradients go on with {sizes}, and training keeps its micro-batches"
    return f"{place} ran out of memory: {event.verdict}; {after}; {event.autopsy}"


def _held_out_text(event: Any) -> str:
    rewards = _rewards_text(event.reward_accuracy, event.reward_margin, event.kl)
    metrics = "".join(f" · {name} {value:.4f}" for name, value in event.metrics.items())
    return f"held-out loss after {event.tokens:,} {event.unit}: {event.loss:.4f}{rewards}{metrics}"


def _reference_started_text(event: Any) -> str:
    seconds = "an unknown time" if event.predicted_seconds is None else f"about {format_seconds(event.predicted_seconds)}"
    return (
        f"before the first step, the log-probabilities of all {event.num_pairs:,} {event.noun} by the model as it is are "
        f"computed once: {seconds} predicted"
    )


def _referenced_text(event: Any) -> str:
    return f"log-probabilities of {event.num_pairs:,} {event.noun} before the training: {format_seconds(event.seconds)}"


_FAILED_PLACES = {
    "step": "step {step}",
    "evaluation": "the held-out data after step {step}",
    "reference": "the pass of the model before the training",
    "KL pass": "the KL pass of step {step}",
}
_TEXTS: dict[str, Callable[[Any], str]] = {  # of the events that are printed as one dim line
    "Evaluated": _held_out_text,
    "ReferenceStarted": _reference_started_text,
    "Referenced": _referenced_text,
}
