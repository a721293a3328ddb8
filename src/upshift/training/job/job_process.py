"""Start the process of one job: quiet the libraries, and only then import the module that runs the job and imports them.

    python -m upshift.with_parent PID BY_KERNEL upshift.training.job.job_process MODULE FOLDER
"""

from __future__ import annotations

import runpy
import sys

from upshift.settings import quiet_libraries

PROCESS = "upshift.training.job.job_process"


def main() -> None:
    quiet_libraries()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
