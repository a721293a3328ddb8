"""The same question has the same answer in every process: no output depends on the order of a set of texts.

Python orders such sets by PYTHONHASHSEED, which differs in every process unless it is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("seeded_answers.py")
SEEDS = ("1", "2", "3")
ANSWERS = ("plan", "rejected", "why", "shadow prices", "changes", "refused layout", "inference plan")


def test_answers_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    processes = {}
    for seed in SEEDS:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, str(SCRIPT), str(tmp_path / seed)]
        processes[seed] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    answers = {seed: process.communicate()[0].splitlines() for seed, process in processes.items()}
    assert [process.returncode for process in processes.values()] == [0] * len(SEEDS)
    assert len(answers["1"]) == len(ANSWERS)
    differing = [
        (name, seed)
        for seed in SEEDS
        for name, answer, first in zip(ANSWERS, answers[seed], answers["1"], strict=True)
        if answer != first
    ]
    assert not differing
    pages = [(tmp_path / seed).read_bytes() for seed in SEEDS]
    assert pages[0] == pages[1] == pages[2]
