"""Exchange plans with other programs (``--write``, ``--from``), and name the command that runs a plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.options import command_line_options, option
from upshift.cli.plan.questions import Request
from upshift.cli.usage.help_page import Panel
from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.models.source import AdapterOptions
from upshift.planning.planner import Planning
from upshift.planning.program import OWN
from upshift.planning.programs.job import Inexpressible, Job, trainer_arguments
from upshift.planning.programs.write import (
    best_for,
    read_choices,
    read_target,
    why_inexpressible,
    write_training,
)
from upshift.planning.search.ranking import Candidate

Write = Annotated[
    str | None,
    option(
        "--write", panel=Panel.OUTPUT, metavar="PROGRAM",
        text="Write the plan for a program such as torchtitan or vllm.",
    ),
]  # fmt: skip
Program = Annotated[
    str | None,
    option(
        "--program", panel=Panel.PLAN, metavar="NAME", default="upshift",
        text="Plan for a program such as vllm.",
    ),
]  # fmt: skip
From = Annotated[
    Path | None,
    option(
        "--from", panel=Panel.PLAN, metavar="PATH",
        text="Plan with the choices in this file of accelerate config.",
    ),
]  # fmt: skip
CONFIGURATIONS: Mapping[str, str] = {  # of programs that train
    "transformers": "accelerate",
    "axolotl": "axolotl",
    "torchtitan": "torchtitan",
    "megatron": "megatron-bridge",
}
RACK = "-nvl72"  # how the name of a whole rack ends
GPUS_OF_TRAY = 4
WITH_TRAINING_ARGUMENTS = ("accelerate", "deepspeed")  # the Trainer has the rest of the plan
# The options of `upshift plan` that `upshift train` has, too, with the same meaning.
SAME_IN_TRAINING = (
    "data", "text_column", "data_format", "loss_on", "chat_template", "split", "long_rows", "objective", "kto_loss",
    "sequence_length", "global_batch", "allow", "set_", "max_grad_norm", *AdapterOptions.model_fields, "nproc", "tensor_parallel",
    "pipeline_parallel", "context_parallel", "expert_parallel", "fully_shard",
)  # fmt: skip


def fixed_by_file(path: Path | None, assignments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the assignments of ``--from`` and ``--set`` together, and print those of the file.

    Raise RequestError for a field that both state, with different values."""
    if path is None:
        return assignments
    stated = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in read_choices(path).items()}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if stated.setdefault(name, value) != value:
            raise RequestError(
                f"--set {assignment} and --from {path} ({name}={stated[name]}) fix the same field; change one of them"
            )
    fixed = tuple(f"{name}={value}" for name, value in stated.items())
    tables.dim(f"From {path}: {', '.join(fixed)}", tables.err)
    return fixed


def write_target(write: str | None, *, serves: bool = False) -> tuple[str, Path] | None:
    """Return the program and the file of ``--write``, checked before the plan is made."""
    return None if write is None else read_target(write, serves=serves)


def write_plan(
    target: tuple[str, Path] | None, request: Request, planning: Planning, model: str, adapter: AdapterOptions, data: str | None
) -> None:
    """Write the configuration of the best plan that the program can run, and say what it does not hold."""
    if target is None:
        return
    program, path = target
    job = Job(
        model=model, data=data, num_layers=planning.profile.num_layers, adapter=adapter, num_nodes=machines(planning.host)[0],
        layer_classes=planning.profile.declares.no_split_modules, clips_gradients=planning.workload.clips_gradients,
        steps=planning.workload.total_steps, has_experts=planning.profile.experts is not None,
    )  # fmt: skip
    chosen = _best_for(program, request, planning, job)
    write_training(program, path, chosen.plan, job)
    tables.err.print(f"Wrote {path}", highlight=False)
    problem = why_inexpressible(program, planning.best, job)
    if problem is not None:
        change = chosen.tokens_per_second / planning.ranking.candidates[0].tokens_per_second - 1
        words = f"{problem.problem[:1].upper()}{problem.problem[1:]} of plan 1. It has the best plan that {program} can run"
        tables.err.print(f"{words}, predicted {change:+.1%}: {chosen.plan.label()}", highlight=False)
    if program in WITH_TRAINING_ARGUMENTS:
        arguments = " ".join(f"--{name} {value}" for name, value in trainer_arguments(chosen.plan).items())
        tables.dim(f"The rest of the plan, as TrainingArguments: {arguments}", tables.err)


def _best_for(program: str, request: Request, planning: Planning, job: Job) -> Candidate:
    """Return the best plan that the program can run. If none was compared, plan again with what it can express."""
    try:
        return best_for(program, planning, job)
    except Inexpressible as problem:
        if _names(request.fixed) & _names(problem.fixed):
            raise
        narrower = replace(request, fixed=(*request.fixed, *problem.fixed))
        try:
            return best_for(program, narrower.plan(planning.host, lambda done, total: None), job)
        except NothingFits:
            raise problem from None


def _names(assignments: tuple[str, ...]) -> set[str]:
    return {assignment.partition("=")[0].strip() for assignment in assignments}


def print_next_command(context: typer.Context, model: str, planning: Planning) -> None:
    """Print the command to type next, if there is one."""
    command = next_command(context, model, planning)
    if command is not None:
        tables.out.print(f"Next: {command}", soft_wrap=True, highlight=False)


def next_command(context: typer.Context, model: str, planning: Planning) -> str | None:
    """Return the command line that trains by the plan: with the options of this one, on every host if there are several.

    For another program, return the one that writes its configuration; None if no configuration of it is written.
    """
    options = command_line_options(context)
    host = planning.host
    program = planning.workload.program
    if program != OWN:
        target = CONFIGURATIONS.get(program) if "write" not in options else None
        asked = {name: flag for name, flag in options.items() if name not in ("model", "write")}
        again = [word for name, flag in asked.items() for word in _words(flag, context.params[name])]
        return None if target is None else shlex.join(["upshift", "plan", model, *again, "--write", target])
    words = ["upshift"]
    nodes, gpus = machines(host)
    if nodes > 1:
        words += ["launch", "--slurm", "--nodes", str(nodes), "--gpus", str(gpus), "--"]
    words += ["train", model]
    for name in SAME_IN_TRAINING:
        if name in options:
            words += _words(options[name], context.params[name])
    if "data" not in options:
        words += ["--data", "DATA"]
    return shlex.join([*words, "--output", "trained"])


def machines(host: Host) -> tuple[int, int]:
    """Return the number of a host's machines, and of the GPUs of each.

    A rack's trays are machines, although NVLink joins them.
    """
    written = re.match(r"(\d+)x(\d+)x", host.name)
    if host.num_nodes > 1 and written:
        return int(written[1]), int(written[2])
    if host.name.endswith(RACK):
        return host.num_devices // GPUS_OF_TRAY, GPUS_OF_TRAY
    return host.num_nodes, host.gpus_per_node


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (flag, str(one))]
