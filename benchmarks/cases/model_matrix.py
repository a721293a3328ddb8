"""What Upshift does with every model type of the installed transformers that can be made tiny: right, refused in words, or wrong.

    python benchmarks/cases/model_matrix.py [--only bert,llama] [--sample N] [--cells load,encode] [--processes 2]
        [--write docs/model_matrix.md] [--what-runs docs/what_runs.md]

A model is two layers of width 32 or so with random weights, saved by transformers. Its cells:

inspect            traced whole: parameters, FLOPs, memory
load               upshift.load_model: logits against from_pretrained's
plan               plans for a machine
train plain        losses of three steps of the plain default against a plain torch loop that runs each sequence alone
train as planned   of the plan that is ranked best
recompute          with all activations computed again
packed             with several sequences in a row
encode             vectors of texts in one batch against each text alone
generate           logits of greedy generation of prompts in one batch against model.generate() of each alone

A cell is ok (with the largest difference), refused (with the words), WRONG (with figures) or none: transformers alone does not do
it. Each model runs in a process that is forked from one that has imported everything, with a limit of memory, and of processor
seconds for each cell. Cells that a row of these versions has are not run again: give another --results, or --again. --only and
--sample take few types, --cells few cells. --write and --what-runs make pages from the newest cells.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from tiny_models import every_model

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.hardware import describe, detect
from upshift.models.tasks import TASKS, ModelTask

ROOT = Path(__file__).parents[1]
HOST = "epyc-7763"  # plans are for this machine, wherever the case runs
CELLS = ("inspect", "load", "plan", "train plain", "train as planned", "recompute", "packed", "encode", "generate")
OUTCOMES = ("ok", "refused", "WRONG", "none")
LEGEND = """Find your `model_type` (it is in config.json). The table says what works for it.

| word | meaning |
| --- | --- |
| ok | the same numbers as transformers |
| refused | a message of one line says why, before anything slow starts. The messages are below the table |
| WRONG | other numbers than transformers, or a crash. The figures are below the table |
| none | transformers itself cannot do it |
| - | not run |

| column | what is compared with transformers |
| --- | --- |
| inspect, plan | `upshift inspect` and `upshift plan` work. Nothing is compared |
| load | the logits |
| train plain | the losses. The reference runs each sequence alone |
| train as planned | the same, with the best predicted plan |
| recompute | the losses with activation checkpointing in all layers |
| packed | the losses with several texts in one row |
| encode | the vectors. The reference encodes each text alone |
| generate | the text of `model.generate()` |

If a model draws random numbers in training, such as the noise of a router, both are compared without them.
"""
KINDS = "causal,masked,seq2seq,image-text"
SUITE = "--sample 6 --again"
QUICK = "gpt2,bert"
SECONDS_OF_A_CELL = 300  # of a processor: on a busy machine the clock says nothing of the cell
WAITED_SECONDS = 3600  # by the clock, of a cell that computes nothing
GIB_OF_A_MODEL = 3.0
CLAIMS = (
    Claim(
        name="wrong", text="no model type gives another result than transformers without a word", ours="Upshift",
        baseline="transformers", better="lower", unit="wrong cells", goal=0,
        of=Source(row="summary", value="details.counts.WRONG"),
    ),
    Claim(
        name="types", text="model types are tried in every cell", ours="Upshift", baseline="transformers",
        unit="model types", goal=150, of=Source(row="summary", value="details.types"),
    ),
)  # fmt: skip


def work(kind: str, model_type: str, architecture: str, file: Path, wanted: list[str]) -> None:
    """In a process of its own: a line of ``file`` for each cell that is wanted, as it ends."""
    import model_matrix_cells as matrix

    limit = int(GIB_OF_A_MODEL * 2**30)
    with tempfile.TemporaryDirectory(prefix="upshift-matrix-") as folder, file.open("a") as lines:
        os.environ["UPSHIFT_CACHE"] = f"{folder}/cache"
        try:
            model = matrix.TinyModel(kind, model_type, architecture, Path(folder) / "model", describe(HOST))
        except Exception as error:  # any of 400 configs and models may refuse these sizes in its own way
            print(json.dumps(["not tiny", [type(error).__name__, " ".join(str(error).split())[:300]]]), file=lines, flush=True)
            return
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        for name, run in matrix.cells(model).items():
            if name in wanted:
                print(json.dumps([name, None]), file=lines, flush=True)
                signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_A_CELL)  # both end the process
                signal.alarm(WAITED_SECONDS)
                found = matrix.outcome_of(run)
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
                print(json.dumps([name, found]), file=lines, flush=True)


def run_model(kind: str, model_type: str, architecture: str, wanted: tuple[str, ...] = CELLS) -> dict[str, Any]:
    """The outcome of each cell that is wanted. A cell that ends its process is wrong, and the others run in the next one."""
    with tempfile.NamedTemporaryFile(prefix="upshift-matrix-", suffix=".jsonl") as file:
        cells: dict[str, list[str]] = {}
        while len(cells) < len(wanted):
            child = os.fork()
            if child == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say on the way
                    work(kind, model_type, architecture, Path(file.name), [name for name in wanted if name not in cells])
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            lines = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
            cells |= {name: found for name, found in lines if found is not None}
            if "not tiny" in cells:
                return {"not_tiny": ": ".join(cells["not tiny"])}
            begun = [name for name, found in lines if found is None and name not in cells]
            if not begun and len(cells) < len(wanted):
                begun = [name for name in wanted if name not in cells]
            for name in begun:
                cells[name] = ["WRONG", _ending(status)]
    return {"cells": {name: cells[name] for name in wanted}}


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return f"not done in {SECONDS_OF_A_CELL} s of a processor, or {WAITED_SECONDS} s by the clock"
    return f"its process ended with status {status}"


def versions() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def newest_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Details by (kind, model type), of these versions, with the newest outcome of each cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in map(json.loads, lines):
        if row["details"].get("versions") == versions() and "model" in row["details"]:
            _add(found, row["details"])
    return found


def _add(known: dict[tuple[str, str], dict[str, Any]], details: dict[str, Any]) -> None:
    """Put a row's cells beside those that are known of its model."""
    key = (details["kind"], details["model"])
    if "cells" in details:
        cells = known.get(key, {}).get("cells", {}) | details["cells"]
        details = details | {"cells": {name: cells[name] for name in CELLS if name in cells}}
    known[key] = details


def chosen(only: str | None, sample: int | None) -> list[tuple[str, str, str]]:
    every = list(every_model(KINDS))
    if only is not None:
        return [entry for entry in every if entry[1] in only.split(",")]
    return every if sample is None else [every[number * len(every) // sample] for number in range(min(sample, len(every)))]


def _missing(known: dict[str, Any], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cells to run of a model of which this is known."""
    return () if "not_tiny" in known else tuple(name for name in wanted if name not in known.get("cells", {}))


def run_all(entries: list[tuple[Any, ...]], processes: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """In so many processes at once, each forked from this one, which has imported what they need. ``entries``: run_model's
    arguments."""
    running: dict[int, tuple[tuple[Any, ...], Path]] = {}
    waiting = list(entries)
    with tempfile.TemporaryDirectory(prefix="upshift-matrix-") as folder:
        while waiting or running:
            while waiting and len(running) < processes:
                entry = waiting.pop(0)
                file = Path(folder) / f"{len(waiting)}.json"
                child = os.fork()
                if child == 0:
                    try:
                        file.write_text(json.dumps(run_model(*entry)))
                    finally:
                        os._exit(0)
                running[child] = (entry, file)
            child, status = os.waitpid(-1, 0)
            entry, file = running.pop(child)
            yield *entry[:3], json.loads(file.read_text()) if file.exists() else {"not_tiny": _ending(status)}


def page(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The matrix, and the words behind it."""
    tried = {key: row for key, row in sorted(rows.items()) if "cells" in row}
    counts = Counter(found[0] for row in tried.values() for found in row["cells"].values())
    shown = versions()
    waiting = sum(name not in row["cells"] for row in tried.values() for name in CELLS)
    lines = [
        "# Model matrix",
        "",
        LEGEND,
        f"These are {len({model for _, model in tried})} model types of transformers {shown['transformers']} "
        f"(torch {shown['torch']}). Each model is tiny, with random weights. Transformers has the same weights.",
        "`python benchmarks/cases/model_matrix.py --write docs/model_matrix.md` writes this page. The",
        "[rows](../benchmarks/results/model_matrix.jsonl) have every figure.",
        "",
        f"{', '.join(f'{counts[name]:,} {name}' for name in OUTCOMES)}."
        + (f" {waiting:,} cells have not been run (-)." if waiting else ""),
        "",
        "| model type | kind | " + " | ".join(CELLS) + " |",
        "| --- | --- | " + " | ".join("---" for _ in CELLS) + " |",
    ]
    for (kind, model), row in sorted(tried.items(), key=lambda item: (item[0][1], item[0][0])):
        lines.append(f"| {model} | {kind} | " + " | ".join(row["cells"].get(name, "-")[0] for name in CELLS) + " |")
    for outcome in ("WRONG", "refused"):
        lines += ["", f"## {outcome[0].upper() + outcome[1:].lower()}", ""]
        lines += _words(tried, outcome) or ["Nothing."]
    left = sorted({model for (_, model), row in rows.items() if "not_tiny" in row} - {model for _, model in tried})
    lines += ["", "## Not tried", "", f"The case does not know how to make these types tiny: {', '.join(left) or 'none'}.", ""]
    return "\n".join(lines)


TASK_OF_KIND = {
    "causal": "text-generation", "masked": "fill-mask", "seq2seq": "text2text-generation", "image-text": "image-text-to-text",
}  # fmt: skip
COMMANDS = {  # of the cells that a command of its own runs
    "inspect": "`inspect`", "load": "`load_model`", "plan": "`plan`", "train as planned": "`train`", "encode": "`encode`",
    "generate": "`generate`",
}  # fmt: skip


def _trained_on(task: ModelTask) -> str:
    """Return what ``upshift train`` trains the models of a task on, if it makes no plan for their loss."""
    return f"the model's own, on {task.trained_on}" if task.trained_on else "none"


def _results_of(task: ModelTask) -> str:
    """Return whether ``upshift encode`` gives the results of the task as transformers' pipeline does."""
    if task.name == "text-classification":
        return "for labels that you give, by NLI models"
    return {"": "no", "own labels": "yes", "given labels": "for labels that you give"}[task.predicts]


def what_runs(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the page of what runs what: the table of tasks, and how many model types of each task a command runs."""
    tried = {key: row for key, row in rows.items() if "cells" in row}
    shown = versions()
    lines = [
        "# What runs what", "",
        "Upshift asks transformers which task a model is for. `architectures` in config.json names the model's class, and",
        "transformers' tables of Auto classes say the task of the class. Every command asks the same table.", "",
        "The last column says whether [`upshift encode`](encoding.md#masks-depth-boxes-and-labels) gives the results of the task",
        "with `--output results.jsonl`.", "",
        "| task | Auto class | preprocessor | output | loss that `upshift train` uses | results of the task |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    lines += [
        f"| {task.name} | {task.auto_class} | {task.preprocessor} | {task.output} | {task.objective or _trained_on(task)} | "
        f"{_results_of(task)} |"
        for task in TASKS
    ]
    lines += [
        "", "## How many model types run", "",
        f"The [model matrix](model_matrix.md) runs tiny models of transformers {shown['transformers']} (torch {shown['torch']}),",
        "and compares each with transformers. A cell is the number of model types with transformers' numbers, of those tried.",
        "`python benchmarks/cases/model_matrix.py --what-runs docs/what_runs.md` writes this page.", "",
        "| task | " + " | ".join(COMMANDS.values()) + " |", "| --- | " + " | ".join("---" for _ in COMMANDS) + " |",
    ]  # fmt: skip
    for kind, task in TASK_OF_KIND.items():
        counts = []
        for cell in COMMANDS:
            found = [row["cells"][cell][0] for (own, _), row in tried.items() if own == kind and cell in row["cells"]]
            counts.append(f"{found.count('ok')} of {len(found)}" if found else "-")
        lines.append(f"| {task} | {' | '.join(counts)} |")
    lines += ["", "## What `upshift generate` does not run", ""]
    lines += _generate_refusals(tried)
    return "\n".join([*lines, ""])


def _generate_refusals(tried: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Return the model types of each reason for which no text is generated, a line for each reason."""
    found: dict[str, list[str]] = {}
    for (kind, model), row in sorted(tried.items()):
        ended, text = row["cells"].get("generate", ("ok", ""))
        if ended != "ok":
            reason = re.sub(r"^.* is an? \w+, which |^.*\(\w+\) |^the model ", "", _plain(text).replace("\\", ""))
            found.setdefault(f"{ended}, {TASK_OF_KIND[kind]}: {reason}", []).append(model)
    return [f"- {reason.rstrip('.')}. Types: {', '.join(models)}." for reason, models in sorted(found.items())]


def _words(tried: dict[tuple[str, str], dict[str, Any]], outcome: str) -> list[str]:
    """Cells with the same words are one line."""
    found: dict[str, list[str]] = {}
    for (kind, model), row in tried.items():
        for name, (ended, text) in row["cells"].items():
            if ended == outcome:
                found.setdefault(f"{name}: {_plain(text)}", []).append(f"{model} ({kind})")
    return [f"- {text}. {', '.join(models)}" for text, models in sorted(found.items())]


def _plain(text: str) -> str:
    """Without the folder, and what a page would take for markup."""
    words = ["the model" if "upshift-matrix-" in word else word for word in text.split()]
    return " ".join(words).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--only", help="model types, with commas")
    parser.add_argument("--sample", type=int, help="so many, spread over all")
    parser.add_argument("--cells", default=",".join(CELLS), help="cells, with commas")
    parser.add_argument("--again", action="store_true", help="types that have a row, too")
    parser.add_argument("--processes", type=int, default=max(min(os.cpu_count() or 1, 8), 1), help="models at once")
    parser.add_argument("--write", type=Path, help="the page to make from the newest rows")
    parser.add_argument("--what-runs", type=Path, help="the page of what runs what to make from the newest rows")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    case = Case("model_matrix", options.results, detect(), options.quick, {"host": HOST})
    known, start = newest_rows(case.path), time.monotonic()
    entries = chosen(QUICK if options.quick else options.only, options.sample)
    wanted = tuple(name for name in CELLS if name in options.cells.split(","))
    left = [(*entry, wanted if options.again else _missing(known.get(entry[:2], {}), wanted)) for entry in entries]
    left = [entry for entry in left if entry[3]]
    import model_matrix_cells  # noqa: F401  once, before processes are forked

    for number, (kind, model, architecture, found) in enumerate(run_all(left, options.processes), start=1):
        found = {"kind": kind, "model": model, "class": architecture, "versions": versions(), **found}
        wrong = [name for name, (outcome, _) in found.get("cells", {}).items() if outcome == "WRONG"]
        case.add(
            f"{kind} {model}", plan={}, measured=None, details=found, failure=f"wrong: {', '.join(wrong)}" if wrong else None
        )
        _add(known, found)
        short = found.get("not_tiny") or " ".join(f"{name}={outcome}" for name, (outcome, _) in found["cells"].items())
        print_progress(f"{number}/{len(left)} {kind} {model}: {short}")
    tried = [row for row in known.values() if "cells" in row]
    counts = Counter(found[0] for row in tried for found in row["cells"].values())
    details = {
        "types": len({row["model"] for row in tried if len(row["cells"]) == len(CELLS)}),
        "begun": len({row["model"] for row in tried}),
        "models": len(tried), "minutes": (time.monotonic() - start) / 60,
        "counts": {name: counts[name] for name in OUTCOMES}, "versions": versions(),
    }  # fmt: skip
    case.add("summary", plan={}, measured=None, details=details)
    if options.write is not None:
        options.write.write_text(page(known), encoding="utf-8")
    if options.what_runs is not None:
        options.what_runs.write_text(what_runs(known), encoding="utf-8")
    print(json.dumps(details))
    return 0


if __name__ == "__main__":
    sys.exit(main())
