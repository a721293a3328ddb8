"""Start the process of one job: quiet the libraries, and only then import the module that runs the job and imports them.

python -m upshift.parent_process PID BY_KERNEL upshift.training.job.job_process MODULE FOLDER
"""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

from upshift.importing import importing
from upshift.settings import quiet_libraries

PROCESS = "upshift.training.job.job_process"


def main(module: str, folder: Path) -> None:
    """Run the job that is written in ``folder`` with ``run_folder`` of the module."""
    quiet_libraries()
    with importing():
        worker = importlib.import_module(module)
        gc.freeze()  # else the garbage collector of every rank visits all objects of the libraries, and copies their pages
    worker.run_folder(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
