"""Show a training run on standard error: a bar for each stage, and lines for what happened."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from upshift.cli import tables
from upshift.cli.progress import activity
from upshift.training.loop.events import EARLY_STOPPING
from upshift.units import GIB, format_bytes, format_seconds

MAX_TITLE = 90  # characters of a trial's title


class RunDisplay:
    """Bars and lines of a run on standard error: tokenizing, tracing, trials, training.

    ``quiet``: print nothing on a terminal. ``title``: a line printed at the start."""

    def __init__(self, *, quiet: bool = False, title: str | None = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.quiet = quiet
        self.title = title
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
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
            ready=self._print_plan,
            event=self._show_event,
        )

    def event_callback(self, name: str, predicted_bytes: float | None) -> Any:
        """Return an event callback for one of several runs. ``predicted_bytes``: of this run, if not as before."""

        def show_event(event: Any) -> None:
            previous = self.predicted_bytes
            self.predicted_bytes = predicted_bytes or previous
            self._show_event(event, name=name)
            self.predicted_bytes = previous

        return show_event

    def _show(self, title: str, done: float | None, total: float | None, *, text: str = "", key: str | None = None) -> None:
        """Update the bar of a stage and hide the bars of the stages before it. ``key``: the stage, if its title changes."""
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
            f"[dim]{len(planning.ranking.candidates):,} plans fit {planning.host.name}; best predicted: {best.plan.label()}, "
            f"{best.tokens_per_second:,.0f} tokens/s[/dim]"
        )

    def _print_trial(self, tried: Any) -> None:
        outcome = f"{tried.best.tokens_per_second:,.0f} tokens/s" if tried.ok else f"[red]{tried.failure}[/red]"
        self._print(f"[dim]tried {tried.candidate.plan.label()}: {outcome}[/dim]")

    def _print_notes(self, proof: Any) -> None:
        for note in proof.notes:
            self._print(f"[dim]{note}[/dim]")

    def _print_plan(self, prepared: Any) -> None:
        self._activity.update(title="Loading the model")
        resident_gib = prepared.predicted.resident_gib
        self.predicted_bytes = resident_gib * GIB if resident_gib else None
        self._print(f"[bold]Plan: {prepared.plan.label()}[/bold]")

    def _show_event(self, event: Any, *, name: str = "Step") -> None:
        kind = type(event).__name__
        if kind == "StepDone":
            self._show_step(event, name)
        elif kind == "OutOfMemory":
            self._print(
                f"[yellow]step {event.step} ran out of memory: {event.verdict}; it goes on with micro-batches of "
                f"{event.smaller[0]} x {event.smaller[1]} tokens, {event.largest[0]} x {event.largest[1]} before, and the same "
                f"gradients; {event.autopsy}[/yellow]"
            )
        elif kind == "Doubted":
            self._print(f"[yellow]{event.words}[/yellow]")
        elif kind == "Waited":
            self._print(f"[yellow]step {event.step}: {event.words}[/yellow]")
        elif kind in ("Evaluated", "Referenced"):
            self._print(f"[dim]{_held_out_text(event) if kind == 'Evaluated' else _reference_text(event)}[/dim]")
        elif kind == "Saved":
            self._print(f"[dim]saved {event.path}[/dim]")
        elif kind == "Finished" and event.reason == EARLY_STOPPING:
            self._print(f"ended early after step {event.step}: the held-out loss no longer falls")
        elif kind == "Started":
            self._activity.update(title="The first step")
            if event.resumed_from:
                self._print(f"[dim]resumed from {event.resumed_from} after step {event.step}[/dim]")

    def _show_step(self, event: Any, name: str) -> None:
        memory = format_bytes(event.resident_bytes)
        if self.predicted_bytes:
            memory += f" of {format_bytes(self.predicted_bytes)} predicted"
        speed = f"{event.tokens_per_second:,.0f} tokens/s"
        text = f"loss {event.loss:.3f}{_rewards_text(event)} · {speed} · {memory} · {format_seconds(event.seconds_left)} left"
        self._show(f"{name} {event.step}/{event.max_steps}", event.step, event.max_steps, text=text, key=name)
        if event.logged_loss is not None:
            norm = "" if event.gradient_norm is None else f" · gradient norm {event.gradient_norm:.3g}"
            numbers = (
                f"loss {event.logged_loss:.4f}{_rewards_text(event)} · learning rate {event.learning_rate:.3g}{norm} · {speed}"
            )
            self._print(f"{name} {event.step}/{event.max_steps}: {numbers}", soft_wrap=True)

    def _print(self, text: str, *, soft_wrap: bool = False) -> None:
        """Print a line. ``soft_wrap``: never break it, so that a log has one line for it."""
        if not self.quiet:
            self.progress.console.print(text, highlight=False, soft_wrap=soft_wrap)


def _rewards_text(event: Any) -> str:
    """Return the rewards of pairs, or nothing for other sequences."""
    if event.reward_accuracy is None:
        return ""
    return f" · reward accuracy {event.reward_accuracy:.0%} · margin {event.reward_margin:.3f}"


def _held_out_text(event: Any) -> str:
    return f"held-out loss after {event.tokens:,} tokens: {event.loss:.4f}{_rewards_text(event)}"


def _reference_text(event: Any) -> str:
    return f"log-probabilities of {event.num_pairs:,} pairs before the training: {format_seconds(event.seconds)}"
