"""Scripts of the tests run in forks as they do in processes of their own, and a case of ranks that fails takes no other along."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import parallel_runs
import pytest
from parallel_runs import Case, Result, Results
from warm_scripts import WarmScripts

SCRIPT = """
import os, sys, time
print(__name__, *sys.argv[1:], flush=True)
print("to stderr", file=sys.stderr, flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def test_a_script_runs_as_a_program(tmp_path: Path, warm_scripts: WarmScripts) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for code in (0, 3):
        ended = warm_scripts.run(script, str(code), "more")
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, f"__main__ {code} more\n", "to stderr\n")
    with pytest.raises(AssertionError, match="took longer than 0.5 s"):
        warm_scripts.run(script, "waits", timeout=0.5)
    assert warm_scripts.run(script, "0").returncode == 0, "the next script runs as if nothing had been killed"


TELLS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sorted(os.environ.items()), os.getenv("GIVEN"), sys.stdin.read(), flush=True)
sys.exit(os.environ.get("CODE", "words"))
"""


@pytest.mark.parametrize("way", ["script", "module", "code"])
def test_a_command_has_what_a_new_process_has(way: str, tmp_path: Path, warm_scripts: WarmScripts) -> None:
    """Its arguments, its folder, its environment and its end; and the next command has them no longer."""
    (tmp_path / "telling.py").write_text(TELLS)
    arguments = {"script": [str(tmp_path / "telling.py")], "module": ["-m", "telling"], "code": ["-c", TELLS]}[way]
    command = [*arguments, "a b", "--c"]
    here = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    for environment in ({**here, "GIVEN": "a value", "HOME": "elsewhere"}, here):
        ended = warm_scripts.run(*command, cwd=tmp_path, environment=environment)
        new = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout, ended.stderr) == (new.returncode, new.stdout, new.stderr)
        assert "telling.py" in new.stdout or "'-c'" in new.stdout
        assert ("a value" in new.stdout, new.stderr) == (environment != here, "words\n")


def train(case: Case) -> Result:
    """Stand for the training of one process."""
    if case.model == "raises":
        raise ValueError("what it raises")
    if case.model == "dies":
        os._exit(3)
    if case.model == "hangs":
        time.sleep(600)
    return Result(losses=[1.0], norms=[2.0], evaluation=3.0)


def test_a_case_that_fails_is_named_and_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_runs, "train", train)
    output = tmp_path / "results.jsonl"
    output.touch()
    parallel_runs.run_cases({name: Case(name) for name in ("first", "raises", "dies", "last")}, output)
    monkeypatch.setattr(parallel_runs, "CASE_SECONDS", 0.5)
    parallel_runs.run_cases({"hangs": Case("hangs")}, output)
    results = Results(output.read_text().splitlines())
    assert results["first"] == results["last"] == Result(losses=[1.0], norms=[2.0], evaluation=3.0)
    for name, words in (("raises", "what it raises"), ("dies", "exit code 3"), ("hangs", "did not end within")):
        with pytest.raises(AssertionError, match=f"(?s)^{name}: .*{words}"):
            results[name]
