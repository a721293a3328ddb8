"""A test that fails beside others and passes alone does not fail `make test`; one that fails twice does, and a broken file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_seconds

SCRIPT = Path(__file__).parents[1] / "whole_suite.py"
TESTS = """
import pathlib
import pytest

SEEN = pathlib.Path(__file__).with_name("seen")


def test_passes():
    pass


@pytest.mark.parametrize("case", ["a b", "c::d"])
def test_fails_once(case):
    before = SEEN.read_text() if SEEN.exists() else ""
    SEEN.write_text(before + case)
    assert case in before


@pytest.mark.parametrize("case", range({failures}))
def test_fails(case):
    assert case < 0
"""


def run(folder: Path, failures: int) -> subprocess.CompletedProcess[str]:
    (folder / "test_made.py").write_text(TESTS.replace("{failures}", str(failures)))
    return start(folder, "test_made.py")


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "-p", "no:cacheprovider", "-q", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half of the time of each process
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("failures", "status", "twice"), [(0, 0, 0), (1, 1, 1), (4, 1, 0)], ids=["passes alone", "fails twice", "too many"]
)
def test_few_failures_are_run_again(failures: int, status: int, twice: int, tmp_path: Path) -> None:
    ended = run(tmp_path, failures)
    assert ended.returncode == status, ended.stdout + ended.stderr
    repeated = failures + 2 <= 5
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("failed beside others, passed alone: ")] == [
        f"failed beside others, passed alone: test_made.py::test_fails_once[{case}]" for case in ("a b", "c::d") if repeated
    ]
    assert [line for line in lines if line.startswith("failed twice: ")] == ["failed twice: test_made.py::test_fails[0]"] * twice
    first_summary = next(line for line in lines if " passed" in line)
    assert first_summary.startswith(f"{failures + 2} failed, 1 passed")


ENDINGS = """
import os
import pathlib
import pytest

SEEN = pathlib.Path(__file__).with_name("seen")


def test_other():
    pass


def test_ends():
    if not SEEN.exists():
        SEEN.write_text("")
        assert False
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("pass", 0), ("pytest.skip('no GPU')", 1), ("os._exit(0)", 1), ("pytest.xfail('later')", 1), ("assert False", 1)],
)
def test_only_a_test_that_passes_alone_counts_as_passed(ending: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(ENDINGS.replace("{ending}", ending))
    assert start(tmp_path, "test_made.py").returncode == status


@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["one process", "several processes"])
def test_a_file_that_cannot_be_collected_fails_the_run(options: tuple[str, ...], tmp_path: Path) -> None:
    """Also beside a test that fails once."""
    (tmp_path / "test_made.py").write_text(ENDINGS.replace("{ending}", "pass"))
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    ended = start(tmp_path, *options, "test_made.py", "test_broken.py")
    assert ended.returncode != 0 and "not collected: test_broken.py" in ended.stdout.splitlines(), ended.stdout + ended.stderr


COMPUTING = """
import subprocess
import sys
import time

WORK = "import time\\nwhile time.process_time() < {seconds}: pass"


def test_here():
    exec(WORK.format(seconds=time.process_time() + 0.3))


def test_in_a_child():
    subprocess.run([sys.executable, "-c", WORK.format(seconds=0.6)], check=True)
"""


@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["one process", "several processes"])
def test_a_file_s_cpu_seconds_are_those_of_its_processes(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_computes.py").write_text(COMPUTING)
    (tmp_path / "test_rests.py").write_text("def test_rests():\n    pass\n")
    (tmp_path / "conftest.py").write_text(
        "from cpu_seconds import CpuSeconds\n\n\ndef pytest_configure(config):\n    config.pluginmanager.register(CpuSeconds())\n"
    )
    path = str(Path(cpu_seconds.__file__).parent)
    ended = start(tmp_path, *options, "--durations=2", "-o", f"pythonpath={path}", "test_rests.py", "test_computes.py")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first = next(number for number, line in enumerate(lines) if line.endswith(" all files"))
    found = {name: [float(number) for number in numbers] for *numbers, name in map(str.split, (lines[first + 1],))}
    whole, own, children = found["test_computes.py"]
    assert 0.3 <= own < 3 and 0.6 <= children < 6 and whole == pytest.approx(own + children, abs=0.11)
