"""Start the process of one job: quiet the libraries, and only then import the module that runs the job.

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
    """Run the job in ``folder`` with the function ``run_folder`` of the module."""
    quiet_libraries()
    with importing():
        worker = importlib.import_module(module)
        gc.freeze()  # otherwise the garbage collector of each rank would visit, and copy, all objects of the libraries
    worker.run_folder(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
