"""Write the best plan as another program's configuration, and read a configuration of Accelerate as choices of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshift.atomic_file import write_whole
from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.programs import accelerate, axolotl, deepspeed, fsdp2, megatron_bridge, torchtitan
from upshift.planning.programs.job import Inexpressible, Job, yaml_text
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.ranking import Candidate
from upshift.planning.search.simplicity import simplest_first

# A configuration is a document, which the file's name makes JSON or YAML, or it is the file's text.
Configuration = Mapping[str, Any] | str
TRAINERS: Mapping[str, tuple[str, Callable[[Plan, Job], Configuration]]] = {  # by program: default file, writer
    "accelerate": ("accelerate_config.yaml", accelerate.config_of),
    "deepspeed": ("deepspeed.json", deepspeed.config_of),
    "fsdp2": ("fsdp2.py", fsdp2.config_of),
    "axolotl": ("axolotl.yaml", axolotl.config_of),
    "torchtitan": ("torchtitan_config.py", torchtitan.config_of),
    "megatron-bridge": ("megatron_bridge.yaml", megatron_bridge.config_of),
}
SERVERS: Mapping[str, str] = {"vllm": "vllm.yaml", "trtllm": "trtllm.yaml"}  # by program: default file
SUFFIXES: Mapping[str, tuple[str, ...]] = {  # of a program's file; of the others: YAML's
    "accelerate": (".yaml", ".yml", ".json"),
    "axolotl": (".yaml", ".yml", ".json"),
    "deepspeed": (".json",),
    "fsdp2": (".py",),
    "torchtitan": (".py",),
}


def read_target(text: str, *, serves: bool) -> tuple[str, Path]:
    """Return (program, file) of ``PROGRAM`` or ``PROGRAM=PATH``. Raise RequestError for a program that runs no such plan.

    ``serves``: the plan is one of generation.
    """
    program, _, path = text.partition("=")
    files = SERVERS if serves else {name: default for name, (default, _) in TRAINERS.items()}
    if program not in files:
        other = "; it is for --generate" if program in SERVERS else "; it trains" if program in TRAINERS else ""
        raise RequestError(f"--write {program} is not possible here{other}; use one of {', '.join(files)}")
    target = Path(path or files[program])
    suffixes = SUFFIXES.get(program, (".yaml", ".yml"))
    if target.suffix not in suffixes:
        raise RequestError(f"--write {program}: {target} has another ending; give a file that ends in {' or '.join(suffixes)}")
    if target.exists():
        raise RequestError(f"--write {program}: {target} exists; give another file, such as --write {program}=new-{target.name}")
    if not target.parent.is_dir():
        raise RequestError(f"--write {program}: there is no folder {target.parent}; give a file in a folder that exists")
    return program, target


def best_for(program: str, planning: Planning, job: Job) -> Candidate:
    """Return the best plan that a program's configuration can express. Raise Inexpressible if none of the plans can be."""
    problem = why_inexpressible(program, planning.best, job)
    if problem is None:
        return planning.ranking.candidates[0]
    expressible = [
        candidate for candidate in planning.ranking.candidates if why_inexpressible(program, candidate.plan, job) is None
    ]
    if not expressible:
        raise problem
    job_memory = JobMemory(planning.host, planning.profile, planning.workload)
    return simplest_first(replace(planning.ranking, candidates=expressible), planning.host, job_memory.fits).candidates[0]


def why_inexpressible(program: str, plan: Plan, job: Job) -> Inexpressible | None:
    """Return what a program's configuration has no word for; None if it has words for all."""
    _, document_of = TRAINERS[program]
    try:
        document_of(plan, job)
    except Inexpressible as problem:
        return problem
    return None


def write_training(program: str, path: Path, plan: Plan, job: Job) -> None:
    """Write a program's configuration for a plan. Raise Inexpressible for choices that it has no word for."""
    _, document_of = TRAINERS[program]
    write_document(path, document_of(plan, job))


def write_document(path: Path, document: Configuration) -> None:
    """Write a text as it is, and a document as JSON or, by the name of the file, as YAML."""
    try:
        write_whole(path, _text(path, document))
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; give a file in a folder that exists") from None


def _text(path: Path, document: Configuration) -> str:
    if isinstance(document, str):
        return document
    return json.dumps(document, indent=2) + "\n" if path.suffix == ".json" else yaml_text((), document)


def read_choices(path: Path) -> dict[str, Any]:
    """Return the choices of a plan that a configuration of Accelerate states, by the names of the plan's fields.

    Raise RequestError for a file that is none, and for what Upshift does not plan.
    """
    import yaml

    advice = "give a file that accelerate config wrote"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read --from {path}: {error.strerror}; {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"--from {path} is not valid YAML or JSON ({' '.join(str(error).split())}); {advice}") from None
    if not isinstance(document, dict) or not {"distributed_type", "compute_environment"} & document.keys():
        raise RequestError(f"--from {path} is no configuration of Accelerate: it has no distributed_type; {advice}")
    return accelerate.read(document, f"--from {path}")
