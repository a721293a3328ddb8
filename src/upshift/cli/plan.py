"""``upshift plan``: the ranked plans, with memory, time and reasons. Loads no weights, needs no accelerator."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from upshift.cli import show
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.planning.plan import CHANGES_MATHEMATICS
from upshift.planning.planner import find_host, plan_training
from upshift.planning.space import check_allow
from upshift.planning.workload import Workload

Model = Annotated[str, typer.Argument(help="local Hugging Face directory, a config.json, or a hub id")]
SequenceLength = Annotated[int, typer.Option("--sequence-length", min=2, help="tokens of the longest sequence")]
GlobalBatch = Annotated[int, typer.Option("--global-batch", min=1, help="sequences per optimizer step; no plan changes it")]
On = Annotated[str | None, typer.Option("--on", help="a described host such as 1xh100; default: this machine")]
Set = Annotated[list[str] | None, typer.Option("--set", help="fix a field of the plan: field=value (repeatable)")]
Allow = Annotated[
    str,
    typer.Option("--allow", help=f"allowed to change the mathematics: {','.join(CHANGES_MATHEMATICS)}"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def command(
    model: Model,
    sequence_length: SequenceLength = 512,
    global_batch: GlobalBatch = 8,
    train: Annotated[bool, typer.Option("--train", help="plan a training run (the only task so far)")] = True,
    on: On = None,
    set_: Set = None,
    allow: Allow = "",
    max_grad_norm: Annotated[float, typer.Option("--max-grad-norm", min=0.0, help="0: gradients are not clipped")] = 1.0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="optimizer steps that one-time costs are spread over")] = 1000,
    rows: Annotated[int, typer.Option("--rows", min=1, help="plans to show")] = 5,
    as_json: Json = False,
) -> None:
    """Ranked plans for training MODEL, with predicted memory and time and the reason for each choice."""
    source = find_model(model)
    workload = Workload(
        sequence_length=sequence_length, global_batch=global_batch, allow=check_allow(split(allow)), total_steps=steps,
        clips_gradients=max_grad_norm > 0,
    )  # fmt: skip
    with show.step("Measuring this machine" if on is None else f"Looking up {on}"):
        host = find_host(on)
    with show.bar("Tracing the model on fake tensors") as progress:
        planning = plan_training(source, host, workload, fixed=tuple(set_ or ()), progress=progress)
    if as_json:
        sys.stdout.write(json.dumps(planning.document()) + "\n")
        return
    size = f"global batch {global_batch} x {sequence_length} tokens"
    show.out.print(f"[bold]{planning.profile.architecture}[/bold] on [bold]{host.name}[/bold], {size}")
    show.out.print(show.plans_table(planning, rows=rows))
    show.out.print(show.time_line(planning.ranking.candidates[0]), highlight=False)
    show.out.print(show.memory_table(planning.numbers(planning.ranking.candidates[0])))
    show.out.print(show.reasons_table(planning))
    rejected = show.rejected_table(planning)
    if rejected is not None:
        show.out.print(rejected)
    show.out.print(planning.shadow_price)
    low, high = planning.numbers(planning.ranking.candidates[0]).interval or (1.0, 1.0)
    show.out.print(
        f"[dim]Times are predicted, untried: expect {low:.1f}x to {high:.1f}x. Held: what the process or device occupies.[/dim]"
    )


def split(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise RequestError(f"--allow {text!r} names nothing; give names separated by commas")
    return names
