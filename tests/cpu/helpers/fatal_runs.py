"""Real gloo ranks of which one runs out of memory for good: what the job says, how soon it ends, and whom it leaves."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallel_runs import Case, RunScript, a_plan, import_all, train

PATIENCE_SECONDS = 3.0  # with ranks that wait for one that is gone; 20 in use


@dataclass(frozen=True)
class Ending:
    kind: str  # of the error that the caller of the job sees
    words: str
    seconds: float
    left: int  # processes that outlived the job


def run_fatal(cases: dict[str, Case], folder: Path, run_script: RunScript) -> dict[str, Ending]:
    given, output = folder / "cases.json", folder / "endings.json"
    given.write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
    ended = run_script(__file__, str(given), str(output))
    assert ended.returncode == 0, ended.stderr[-5000:]
    return {name: Ending(**ending) for name, ending in json.loads(output.read_text()).items()}


def one_rank(case: Case, folder: Path) -> Any:
    from upshift.training.loop.monitor import explaining_out_of_memory
    from upshift.training.rank_processes import rank_environment

    rank, ranks = rank_environment()
    with explaining_out_of_memory(folder, rank=rank, ranks=ranks):  # as the training loop does
        return train(case)


def end(case: Case, output: Path) -> None:
    """In a process of its own: one that has computed cannot fork ranks any more."""
    from upshift.training import rank_processes

    rank_processes.PATIENCE_SECONDS = PATIENCE_SECONDS
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    began, ending = time.monotonic(), {"kind": "none", "words": ""}
    try:
        rank_processes.join_processes(a_plan(case), partial(one_rank, folder=output.parent), case)
    except BaseException as error:  # whatever it is, the test has to see it
        ending = {"kind": type(error).__name__, "words": str(error)}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    output.write_text(json.dumps(ending | {"seconds": time.monotonic() - began, "left": len(children)}))
    os._exit(0)


def main(given: Path, output: Path) -> None:
    import_all()
    endings = {}
    for name, described in json.loads(given.read_text()).items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        part = output.with_suffix(".one")
        end(Case(**described), part)
        endings[name] = json.loads(part.read_text())
        part.unlink()
    output.write_text(json.dumps(endings))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
