"""Run pytest with the given arguments. If few tests fail, run each of them again, alone in one process.

A test that fails beside others and passes alone fails because of the other processes on the machine. It is named, and does not
fail the run. The exit status is 0 if no test failed twice and every file was collected.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

MOST_REPEATED = 5  # more failures than this have a cause in the code


class FailedTests:
    """Collect the ids of the tests that failed, in the order of their failures, and of the files that could not be collected.

    xdist reports them in the main process."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.not_collected: dict[str, None] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_collected[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names[report.nodeid] = None


def main(arguments: list[str]) -> int:
    failed = FailedTests()
    status = int(pytest.main(arguments, plugins=[failed]))
    for name in failed.not_collected:
        print(f"not collected: {name}", flush=True)
    if failed.not_collected or status != pytest.ExitCode.TESTS_FAILED:
        return status
    if not 0 < len(failed.names) <= MOST_REPEATED:
        return status
    print(f"\n{len(failed.names)} failed; each runs once more, alone", flush=True)
    failed_twice = [name for name in failed.names if not passes_alone(name)]
    for name in failed.names:
        print(f"{'failed twice' if name in failed_twice else 'failed beside others, passed alone'}: {name}", flush=True)
    return status if failed_twice else 0


def passes_alone(name: str) -> bool:
    """Return whether the test passes in a new process. One that is skipped there, or that ends the process, does not pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "-q", name]
        if subprocess.run(command, check=False).returncode or not report.is_file():
            return False
        counts = ElementTree.parse(report).getroot().find("testsuite")
    assert counts is not None
    return int(counts.attrib["tests"]) > sum(int(counts.attrib[kind]) for kind in ("skipped", "failures", "errors"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
