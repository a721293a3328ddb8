"""Check that scripts of the tests, and upshift's own processes, do in forks what they do in processes of their own.

Check also that a failed case of ranks fails no other case."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import parallel_runs
import pytest
from parallel_runs import Case, Result, Results
from warm_processes import WarmProcess, WarmProcesses, surroundings

from upshift import parent_process, settings

END_SECONDS = 60.0
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
    """Compare its arguments, its folder, its environment and its end. The next command does not have them."""
    (tmp_path / "telling.py").write_text(TELLS)
    arguments = {"script": [str(tmp_path / "telling.py")], "module": ["-m", "telling"], "code": ["-c", TELLS]}[way]
    command = [*arguments, "a b", "--c"]
    here = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    for environment in ({**here, "GIVEN": "a value", "USER": "another"}, here):
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
told = Path(sys.argv[2])
told.write_text(f"{sys.argv[0]} {os.getsid(0) == os.getpid()} {os.getcwd()} {os.environ.get('UPSHIFT_CACHE')}")
os.write(int(sys.argv[1]), sys.stdin.readline().encode())
exec(Path(sys.argv[3]).read_text())
"""
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def own_module(tmp_path: Path) -> Path:
    path = tmp_path / "own_module.py"
    path.write_text(OWN_MODULE)
    return path


@pytest.fixture
def empty_server() -> Iterator[WarmProcesses]:
    """Yield processes whose server imports nothing."""
    processes = WarmProcesses("empty_imports")
    yield processes
    processes.close()


class Started(NamedTuple):
    process: Any
    output: IO[str]  # what the process writes into a descriptor that it was given
    told: Path  # a file of the process


def start(processes: Any, module: Path, code: str, **options: Any) -> Started:
    """Start the module as upshift starts its own. Each process has a folder for its code and its file."""
    read_end, write_end = os.pipe()
    folder = Path(tempfile.mkdtemp(dir=module.parent))
    (folder / "code").write_text(code)
    command = parent_process.command(str(module), str(write_end), str(folder / "told"), str(folder / "code"))
    process = processes.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=(write_end,), **options)
    os.close(write_end)
    process.stdin.write("a line\n")
    process.stdin.close()
    return Started(process, os.fdopen(read_end), folder / "told")


WRITES = "told.write_text(told.read_text() + ' WORDS')"
ENDINGS = {
    "": 0, "raise SystemExit": 0, "raise SystemExit(75)": 75, "raise SystemExit('no')": 1, "raise ValueError": 1,
    "raise KeyboardInterrupt": -signal.SIGINT, "import signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "sys.stdout.close(); sys.stderr = None": 0,
}  # fmt: skip
# The process ends when its threads have ended. Its exit handlers run then, also if it was interrupted.
LATE_ENDINGS = {
    f"""
import atexit, threading
@atexit.register
def write():
    {WRITES.replace("WORDS", "handled")}
def wait():
    threading.main_thread().join()
    {WRITES.replace("WORDS", "joined")}
threading.Thread(target=wait).start()
{ending}""": code
    for ending, code in {"": 0, "sys.exit(3)": 3, "raise KeyboardInterrupt": -signal.SIGINT}.items()
}


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_of_upshift_is_what_a_new_one_is(
    new_session: bool, own_module: Path, warm_processes: WarmProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare its folder, its variables, its session, its descriptors and its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    outcomes: dict[object, list[object]] = {}
    for processes in (warm_processes, subprocess):
        for code in (*ENDINGS, *LATE_ENDINGS):
            process, output, told = start(processes, own_module, code, start_new_session=new_session)
            exit_code = process.wait(timeout=END_SECONDS)
            with output:
                outcome = (exit_code, output.read(), told.read_text())
            outcomes.setdefault(processes, []).append(outcome)
        assert isinstance(process, WarmProcess) == (processes is warm_processes)
    assert outcomes[warm_processes] == outcomes[subprocess]
    words = f"{own_module} {new_session} {tmp_path} {tmp_path}"
    expected = [(code, "a line\n", words) for code in ENDINGS.values()]
    assert outcomes[subprocess] == expected + [(code, "a line\n", f"{words} joined handled") for code in LATE_ENDINGS.values()]


def test_processes_at_the_same_time_end_for_themselves(own_module: Path, warm_processes: WarmProcesses) -> None:
    first, output, _ = start(warm_processes, own_module, SLEEPS)
    with output:
        assert select.select([output], [], [], END_SECONDS)[0] and output.readline() == "a line\n", "the first does not run"
    second, output, _ = start(warm_processes, own_module, "pass")
    with output:
        assert second.wait(timeout=END_SECONDS) == 0 and first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=0.1)
    first.kill()
    assert first.wait(timeout=END_SECONDS) == -signal.SIGKILL


def test_the_end_of_the_server_ends_its_processes(own_module: Path, empty_server: WarmProcesses) -> None:
    process, output, _ = start(empty_server, own_module, SLEEPS)
    with output:
        assert isinstance(process, WarmProcess)
        empty_server.close()
        assert process.wait(timeout=END_SECONDS) == -signal.SIGKILL


SLOW_SERVER = """
import atexit, os, time
from pathlib import Path
close, server = os.close, os.getpid()
atexit.register(Path(__file__).with_name("handled").touch)

def close_slowly(descriptor):
    close(descriptor)
    if os.getpid() != server:
        time.sleep(0.1)

os.close = close_slowly

def begin(is_command):
    os.close = close
"""


def test_a_process_hears_an_interrupt_from_its_start_and_runs_no_exit_handler_of_the_server(tmp_path: Path) -> None:
    """Start it slowly. The server ignores SIGINT, and a fork begins with the server's handlers."""
    (tmp_path / "slow_server.py").write_text(SLOW_SERVER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = WarmProcesses("slow_server", {"PYTHONPATH": path}, taken=("PYTHONPATH",))
    try:
        process = processes.Popen([sys.executable, "-c", SLEEPS], stderr=subprocess.DEVNULL)
        process.send_signal(signal.SIGINT)
        assert isinstance(process, WarmProcess) and process.wait(timeout=END_SECONDS) == -signal.SIGINT
        assert processes.run("-c", "import sys; assert 'slow_server' in sys.modules").returncode == 0
        assert not (tmp_path / "handled").exists()
    finally:
        processes.close()


def test_a_process_that_a_thread_waits_for_can_be_killed(empty_server: WarmProcesses) -> None:
    process = empty_server.Popen([sys.executable, "-c", SLEEPS])
    codes: list[int] = []
    waiting = [threading.Thread(target=lambda: codes.append(process.wait()), daemon=True) for _ in range(2)]
    for thread in waiting:
        thread.start()
    killing = threading.Thread(target=process.kill, daemon=True)
    killing.start()
    for thread in (killing, *waiting):
        thread.join(END_SECONDS)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL] and process.wait() == -signal.SIGKILL


PASSES_IT_ON = """
import os, signal, sys, threading
from warm_processes import WarmProcesses

processes = WarmProcesses("empty_imports")
process = processes.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGUSR1, lambda *_: process.send_signal(signal.SIGINT))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
print(process.wait())
processes.close()
"""


def test_a_handler_of_a_signal_can_signal_the_process_that_its_thread_waits_for() -> None:
    """Do it in another process, which can be ended if it hangs. ``run_in_processes`` has such a handler."""
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", PASSES_IT_ON], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=END_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr


SPEAKS_TWICE = """
import sys, time
from pathlib import Path
print("one", flush=True)
print("a warning", file=sys.stderr, flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("two", sys.stdin.read(), "x" * 200_000)
"""


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("new_session", [False, True])
def test_output_is_complete_after_a_timeout(new_session: bool, text: bool, empty_server: WarmProcesses, tmp_path: Path) -> None:
    """Read more than a pipe holds. The process lives on after the timeout."""
    found = []
    for number, processes in enumerate((empty_server, subprocess)):
        process: Any = processes.Popen(  # type: ignore[attr-defined]
            [sys.executable, "-c", SPEAKS_TWICE, str(tmp_path / str(number))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=text, start_new_session=new_session,
        )  # fmt: skip
        assert isinstance(process, WarmProcess) == (processes is empty_server)
        for _ in range(2):
            with pytest.raises(subprocess.TimeoutExpired):
                process.communicate(timeout=0.1)
        assert process.poll() is None
        (tmp_path / str(number)).touch()
        found.append((process.communicate(timeout=END_SECONDS), process.returncode, process.stdout.closed))
    assert found[0] == found[1]
    output, errors = found[0][0]
    assert (len(output), len(errors)) == (len("one\ntwo  \n") + 200_000, len("a warning\n"))


def test_other_variables_or_options_take_a_new_process(own_module: Path, empty_server: WarmProcesses) -> None:
    """Libraries read variables when they are imported. The first process decides nothing for the later ones."""
    other = {**os.environ, "OMP_NUM_THREADS": "7"}
    process, output, _ = start(empty_server, own_module, "assert os.environ['OMP_NUM_THREADS'] == '7'", env=other)
    with output:
        assert isinstance(process, subprocess.Popen) and process.wait(timeout=END_SECONDS) == 0
    command = parent_process.command("upshift.no_such_module", options=("-P",))
    process = empty_server.Popen(command, stderr=subprocess.DEVNULL)
    assert isinstance(process, subprocess.Popen) and process.wait(timeout=END_SECONDS) == 1
    process, output, _ = start(empty_server, own_module, "assert os.environ.get('OMP_NUM_THREADS') != '7'")
    with output:
        assert isinstance(process, WarmProcess) and process.wait(timeout=END_SECONDS) == 0


# Names that Python's or a library's import reads, each with a value that nobody sets.
IMPORTED_WITH = (
    "GOMP_SPINCOUNT", "HF_HUB_CACHE", "HOME", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TMPDIR",
    "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_FREEZING", "TORCH_LOGS", "TRANSFORMERS_VERBOSITY",
)  # fmt: skip


def test_a_script_with_other_variables_runs_in_a_new_process(empty_server: WarmProcesses, tmp_path: Path) -> None:
    script = "import os, sys; print('empty_imports' in sys.modules, *map(os.getenv, sys.argv[1:]))"
    for name in IMPORTED_WITH[:2]:
        ended = empty_server.run("-c", script, name, environment={**os.environ, name: "5"}, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (0, "False 5\n")
    assert empty_server.run("-c", script, "GIVEN", environment={**os.environ, "GIVEN": "5"}).stdout == "True 5\n"


@pytest.mark.parametrize("name", IMPORTED_WITH)
def test_what_imports_read_takes_a_new_process(name: str) -> None:
    assert surroundings({name: "5"}) != surroundings({})
    assert surroundings({name: "5"}, [name]) == surroundings({}), "begin takes it"


def test_what_commands_set_for_themselves_takes_no_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that tests call set variables in the tests' process. Every later process would be new, which takes minutes."""
    monkeypatch.setattr(os, "environ", {})
    settings.quiet_libraries()
    settings.wait_briefly()
    assert len(os.environ) == 4 and surroundings(os.environ) == surroundings({})


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
