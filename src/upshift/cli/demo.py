"""Run ``upshift demo``: every stage once, on this machine, in a few minutes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from upshift.cli import tables
from upshift.cli.options import option, output_folder
from upshift.cli.plan.ranking import print_plans
from upshift.cli.progress import importing_libraries
from upshift.cli.run_display import RunDisplay
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.units import format_count, format_seconds

SAME_PLAN = (
    "In the trials no plan was faster than the plain default, so both rows are runs of that plan. Their difference is that of "
    "this machine from one minute to the next: something else may be using it."
)

Output = Annotated[Path, output_folder("The folder for the model and the report.")]
Quick = Annotated[bool, option("--quick", text="Take a fifth of the time, for a first look.", panel=Panel.MEASUREMENT)]


def command(
    output: Output = Path("upshift-demo"),
    quick: Quick = False,
) -> None:
    """Plan, train for about two minutes, generate text and write a report, all on this machine. Needs no data."""
    with importing_libraries():
        from upshift.reports.run.demo import write_demo_page
        from upshift.training.demo import Timing, prepare_demo, run_demo, write_prompts

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output {output} is no folder and cannot be made one: {error.strerror}; give another") from None
    start = time.perf_counter()
    share = 0.2 if quick else 1.0
    timing = Timing(trials=60 * share, baseline=60 * share, training=120 * share)
    with RunDisplay() as display:
        prepared = prepare_demo(output, timing=timing, watcher=display.watcher)
        profile = prepared.planning.profile
        num_files = prepared.data.summary.num_documents
        model = f"{profile.architecture} with {format_count(profile.parameters.total)} parameters"
        tables.dim(f"{model}; {num_files} files of Python's standard library", tables.err)
        result = run_demo(
            prepared, output, timing=timing,
            on_baseline=display.event_callback("Plain default", prepared.planning.default.resident),
            on_chosen=display.event_callback("Chosen plan", None),
        )  # fmt: skip
    _print_result(result)
    page = write_demo_page(result, output / "report.html")
    tables.out.print(f"Model: {result.model_directory}   Report: {page}   ({format_seconds(time.perf_counter() - start)})")
    write_prompts(output / "prompts.txt")
    print_next_commands(next_commands(output))


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return three commands that use what the demo wrote into ``folder``, each with what it does."""
    model = ["--sequence-length", "128", "--global-batch", "8"]
    trained = str(folder / "trained")
    lines = {
        "let the model write": [
            "generate", trained, "--prompts", str(folder / "prompts.txt"), "--output", str(folder / "answers.jsonl"),
        ],
        "train it further": [
            "train", trained, "--data", str(folder / "text"), *model, "--max-steps", "50", "-o", str(folder / "longer"),
        ],
        "ask about another machine": ["plan", trained, "--train", "--on", "rtx-4090", *model],
    }  # fmt: skip
    return [(purpose, shlex.join([*program_words(), *words])) for purpose, words in lines.items()]


def program_words() -> list[str]:
    """Return the words that start this program in the user's shell: its name, or its path if the shell does not find it."""
    if shutil.which("upshift"):
        return ["upshift"]
    script = Path(sys.executable).with_name("upshift")
    if not script.is_file():
        return [sys.executable, "-m", "upshift"]
    return [os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)]


def print_next_commands(commands: list[tuple[str, str]]) -> None:
    """Print each command on a line of its own, which is not broken: a person copies it."""
    tables.out.print("Next, copy one of these lines:", style="bold")
    for purpose, line in commands:
        tables.out.print(f"{line}  # {purpose}", soft_wrap=True, highlight=False)


def _print_result(result: Any) -> None:
    prepared = result.prepared
    print_plans(prepared.planning, rows=3)
    if prepared.proof is not None:
        tables.out.print(tables.trials_table(prepared.proof.tried, prepared.proof.chosen))
    tables.out.print("The trained model continues a prompt", style="bold")
    tables.out.print(result.text, highlight=False, style="green")
    tables.out.print(tables.prediction_table(result.chosen.predicted, result.chosen.measured))
    at_equal_tokens = result.chosen.measured.changed(evaluation_loss=result.chosen_loss_at_equal_tokens)
    tables.out.print(tables.comparison_table([("plain default", result.baseline.measured), ("chosen plan", at_equal_tokens)]))
    if result.chose_the_default:
        tables.out.print(SAME_PLAN)
