"""Ranks on pretended GPUs that train a tiny model in some layout: tests/cpu/helpers/parallel_runs.py with ``device="cuda"``.

The worlds fork after their imports, as on CPUs. Some imports ask for the device's capability, which forbids a real process to
fork; no rank of this process computes before the fork.
"""

import sys
from pathlib import Path

import parallel_runs
import pretended_cuda

if __name__ == "__main__":
    parallel_runs.import_all()
    pretended_cuda.forget_questions()
    parallel_runs.main(Path(sys.argv[1]), Path(sys.argv[2]))
