"""Two ranks load the same files, whole and in slices: each says whether it has the same, and what memory it took."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from parallel_runs import Case, a_plan, import_all
from torch.distributed.tensor import DTensor

from upshift.training.rank_processes import join_processes


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def growth(load: Any) -> tuple[Any, float]:
    before, most, ended = anonymous_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], anonymous_mib())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return load(), max(most[0], anonymous_mib()) - before
    finally:
        ended.set()
        thread.join()


def compare(given: tuple[str, Case]) -> dict[str, Any]:
    from upshift.models.source import find_model
    from upshift.training.distributed.mesh import all_gather_objects, init_mesh
    from upshift.training.prepare import load_or_build, load_shards, prepare_model

    folder, case = given
    plan, source = a_plan(case), find_model(folder)
    place = init_mesh(plan)
    found, sliced = growth(lambda: load_shards(source, plan, place, seed=0))
    assert found is not None
    mine = {name: local(tensor).clone() for name, tensor in found[0].state_dict().items()}
    del found
    whole, all_of_it = growth(lambda: prepare_model(load_or_build(source, plan, from_config=False, seed=0), plan, place))
    theirs = {name: local(tensor) for name, tensor in whole.state_dict().items()}
    same = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return {"same": all(all_gather_objects(same, plan)), "sliced": sliced, "whole": all_of_it, "tensors": len(mine)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    import_all()
    folder, layout = sys.argv[1], json.loads(sys.argv[2])
    case = Case(world=2, layout=layout)
    print(json.dumps(join_processes(a_plan(case), compare, (folder, case))))
