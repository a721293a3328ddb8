"""Scripts of the tests, and upshift's own processes, run in forks as they do in processes of their own.

A case of ranks that fails takes no other along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import parallel_runs
import pytest
from parallel_runs import Case, Result, Results
from warm_processes import WarmProcess, WarmProcesses

from upshift import parent_process

SCRIPT = """
import os, sys, time
print(__name__, *sys.argv[1:], flush=True)
print("to stderr", file=sys.stderr, flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def test_a_script_runs_as_a_program(tmp_path: Path, warm_processes: WarmProcesses) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for code in (0, 3):
        ended = warm_processes.run(script, str(code), "more")
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, f"__main__ {code} more\n", "to stderr\n")
    with pytest.raises(AssertionError, match="took longer than 0.5 s"):
        warm_processes.run(script, "waits", timeout=0.5)
    assert warm_processes.run(script, "0").returncode == 0, "the next script runs as if nothing had been killed"


TELLS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sorted(os.environ.items()), os.getenv("GIVEN"), sys.stdin.read(), flush=True)
sys.exit(os.environ.get("CODE", "words"))
"""


@pytest.mark.parametrize("way", ["script", "module", "code"])
def test_a_command_has_what_a_new_process_has(way: str, tmp_path: Path, warm_processes: WarmProcesses) -> None:
    """Its arguments, its folder, its environment and its end; and the next command has them no longer."""
    (tmp_path / "telling.py").write_text(TELLS)
    arguments = {"script": [str(tmp_path / "telling.py")], "module": ["-m", "telling"], "code": ["-c", TELLS]}[way]
    command = [*arguments, "a b", "--c"]
    here = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    for environment in ({**here, "GIVEN": "a value", "HOME": "elsewhere"}, here):
        ended = warm_processes.run(*command, cwd=tmp_path, environment=environment)
        new = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout, ended.stderr) == (new.returncode, new.stdout, new.stderr)
        assert "telling.py" in new.stdout or "'-c'" in new.stdout
        assert ("a value" in new.stdout, new.stderr) == (environment != here, "words\n")


OWN_MODULE = """
import os, sys
from pathlib import Path
Path(sys.argv[2]).write_text(f"{sys.argv[0]} {os.getsid(0) == os.getpid()} {os.getcwd()} {os.environ.get('UPSHIFT_CACHE')}")
os.write(int(sys.argv[1]), sys.stdin.readline().encode())
exec(Path(sys.argv[3]).read_text())
"""


@pytest.fixture
def own_module(tmp_path: Path) -> Path:
    path = tmp_path / "own_module.py"
    path.write_text(OWN_MODULE)
    return path


def start(processes: Any, module: Path, code: str, **options: Any) -> tuple[Any, int]:
    """Start the module as upshift starts its own. Return the process, and a descriptor that it writes into."""
    read_end, write_end = os.pipe()
    folder = module.parent
    (folder / "code").write_text(code)
    command = parent_process.command(str(module), str(write_end), str(folder / "told"), str(folder / "code"))
    process = processes.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=(write_end,), **options)
    os.close(write_end)
    process.stdin.write("a line\n")
    process.stdin.close()
    return process, read_end


ENDINGS = (
    "", "raise SystemExit", "raise SystemExit(75)", "raise SystemExit('no')", "raise ValueError", "raise KeyboardInterrupt",
    "import signal; os.kill(os.getpid(), signal.SIGTERM)",
)  # fmt: skip


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_of_upshift_is_what_a_new_one_is(
    new_session: bool, own_module: Path, warm_processes: WarmProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder, its variables, its session, its descriptors and its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    outcomes: dict[object, list[object]] = {}
    for processes in (warm_processes, subprocess):
        for code in ENDINGS:
            process, descriptor = start(processes, own_module, code, start_new_session=new_session)
            code = process.wait(timeout=60)
            with os.fdopen(descriptor) as written:
                outcome = (code, written.read(), (tmp_path / "told").read_text())
            outcomes.setdefault(processes, []).append(outcome)
        assert isinstance(process, WarmProcess) == (processes is warm_processes)
    assert outcomes[warm_processes] == outcomes[subprocess]
    told = f"{own_module} {new_session} {tmp_path} {tmp_path}"
    assert outcomes[subprocess] == [(code, "a line\n", told) for code in (0, 0, 75, 1, 1, -signal.SIGINT, -signal.SIGTERM)]


def test_processes_at_the_same_time_end_for_themselves(own_module: Path, warm_processes: WarmProcesses, tmp_path: Path) -> None:
    first, _ = start(warm_processes, own_module, "import time; time.sleep(600)")
    while not (tmp_path / "told").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    second, _ = start(warm_processes, own_module, "pass")
    assert second.wait(timeout=60) == 0 and first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=0.1)
    first.kill()
    assert first.wait(timeout=60) == -signal.SIGKILL


def test_the_end_of_the_server_ends_its_processes(own_module: Path) -> None:
    processes = WarmProcesses("empty_imports")
    process, _ = start(processes, own_module, "import time; time.sleep(600)")
    assert isinstance(process, WarmProcess)
    processes.close()
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_other_variables_or_options_take_a_new_process(own_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read variables when they are imported. The first process decides nothing for the later ones."""
    processes = WarmProcesses("empty_imports")
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        process, _ = start(processes, own_module, "assert os.environ['OMP_NUM_THREADS'] == '7'")
    assert isinstance(process, subprocess.Popen) and process.wait(timeout=60) == 0
    command = parent_process.command("upshift.no_such_module", options=("-P",))
    process = processes.Popen(command, stderr=subprocess.DEVNULL)
    assert isinstance(process, subprocess.Popen) and process.wait(timeout=60) == 1
    process, _ = start(processes, own_module, "assert os.environ.get('OMP_NUM_THREADS') != '7'")
    assert isinstance(process, WarmProcess) and process.wait(timeout=60) == 0
    processes.close()


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
