"""A fork that stands for a Python process does what the process does; and a case of ranks that fails takes no other along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import parallel_runs
import psutil
import pytest
from parallel_runs import Case, Result, Results
from warm_python import Real

ENDINGS = (
    "pass", "raise SystemExit", "raise SystemExit(0)", "raise SystemExit(75)", "raise SystemExit('no')",
    "raise ValueError('why')", "raise KeyboardInterrupt", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import ctypes; ctypes.string_at(0)", "import atexit; atexit.register(print, 'at exit'); print('first', end='')",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "import os, sys; print(os.getcwd(), sys.argv, sys.path[:2], __name__, __file__ if '__file__' in globals() else None)",
    "import os; print(sorted(os.environ.items()), os.umask(0), os.getpgrp() == os.getpid(), sorted(os.listdir('/proc/self/fd')))",
    "import sys; print(sys.stdin.read().upper()); print('to stderr', file=sys.stderr)",
    "import json, sys; json.dump(sorted(sys.flags), sys.stdout)", "import no_such_module",
)  # fmt: skip
SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture
def forked() -> None:
    """See that there is a server, also where no process of this kind came before."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "pass"], check=True)


def ended(popen: type[subprocess.Popen[str]], command: list[str], folder: Path) -> tuple[int, str, str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = popen(command, text=True, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]
    out, err = process.communicate("what is read", timeout=60)
    return process.returncode, out, err


def test_a_fork_does_and_ends_as_a_process_does(forked: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv, sys.path[0], __file__, __name__); sys.exit(3)")
    (tmp_path / "a_module.py").write_text("import sys; print(sys.argv, sys.path[0], __file__, __name__, __spec__.name)")
    commands = [["-c", code, "one", "two"] for code in ENDINGS]
    commands += [["script.py", "-u"], ["-u", "-P", str(tmp_path / "script.py")], ["-m", "a_module", "-c"]]
    for rest in commands:
        command = [sys.executable, *rest]
        own = ended(Real, command, tmp_path)
        assert ended(subprocess.Popen, command, tmp_path) == own, rest
        assert subprocess.Popen is not Real


def start(code: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_signals_reach_the_fork_and_its_group_ends_with_it(forked: None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process, fork = start(SLEEPS)
        assert fork != process.pid
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
        assert not psutil.pid_exists(fork)
    process, sleeper = start("import os\nif os.fork(): os.wait()\n" + SLEEPS)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    psutil.wait_procs([psutil.Process(sleeper)] if psutil.pid_exists(sleeper) else [], timeout=60)
    assert not psutil.pid_exists(sleeper)


def test_a_process_of_a_fork_is_a_fork_and_ends_with_it(forked: None) -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"
    process, fork = start(inner)
    sleeper = psutil.Process(fork)
    process.kill()
    process.wait(timeout=60)
    sleeper.wait(timeout=60)


def test_descriptors_are_passed_by_their_numbers(forked: None) -> None:
    read_end, write_end = os.pipe()
    code = f"import os; os.write({write_end}, b'written')"
    subprocess.run([sys.executable, "-c", code], pass_fds=(write_end,), check=True)
    assert os.read(read_end, 20) == b"written"
    os.close(read_end)
    os.close(write_end)


def test_variables_that_imports_read_are_those_of_the_server(forked: None) -> None:
    """Another value of such a variable is another kind of process."""
    code = "import json, os, torch; print(json.dumps([os.environ['OMP_NUM_THREADS'], torch.get_num_threads()]))"
    for threads in ("1", "2"):
        variables = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [threads, int(threads)]


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
