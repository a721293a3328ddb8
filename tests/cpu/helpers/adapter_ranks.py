"""Run jobs one after the other on the same gloo ranks, so that ranks start and import everything once.

A folder has the data of all jobs, as ``TrainingData`` stores it, and each job as ``NAME.job.json``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path

from warm_processes import WarmProcesses

from upshift.importing import importing

TIMEOUT_SECONDS = 200

with importing():
    import peft  # noqa: F401  else every rank imports it, and bitsandbytes with it

    from upshift.training.data.dataset import load_data
    from upshift.training.job.job import Job, TrainingData, open_job, run_rank
    from upshift.training.loop.signals import StopRequest
    from upshift.training.rank_processes import join_processes


def run_jobs(jobs: Mapping[str, Job], data: TrainingData, folder: Path, warm_processes: WarmProcesses) -> None:
    """Run the jobs, which have the same number of ranks, in a process of their own. Fail with the ranks' errors."""
    for path in data.folder.iterdir():
        (folder / path.name).symlink_to(path)
    for name, job in jobs.items():
        (folder / f"{name}.job.json").write_text(open_job(job, data).to_json(), encoding="utf-8")
    ended = warm_processes.run(__file__, str(folder), timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr[-5000:]


def main(folder: Path) -> None:
    gc.freeze()
    jobs = [Job.from_file(path) for path in sorted(folder.glob("*.job.json"))]
    with StopRequest(notice=False) as stop:

        def run_all(jobs: list[Job]) -> None:
            data = load_data(folder)
            for job in jobs:
                run_rank(job, data, lambda _: None, stop)

        join_processes(jobs[0].plan, run_all, jobs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
