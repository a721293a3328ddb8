"""Count the CPU-seconds of each test: of pytest's process, and of the processes that ended meanwhile. Print the dearest files.

Wall time also counts the waits for other processes on the machine. A fork server of several tests is counted where it ends.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

NAME = "cpu_seconds"
STARTED = pytest.StashKey[tuple[float, float]]()


def seconds_now() -> tuple[float, float]:
    """Return the CPU-seconds of this process, and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (usage.ru_utime + usage.ru_stime for usage in usages)
    return own, children


class CpuSeconds:
    """A plugin of pytest. A worker of xdist sends what it counted to the main process with the report of a test's teardown."""

    def __init__(self) -> None:
        self.by_file: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[STARTED] = seconds_now()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            before = item.stash[STARTED]
            item.user_properties.append((NAME, [now - then for now, then in zip(seconds_now(), before, strict=True)]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            own, children = dict(report.user_properties)[NAME]
            total = self.by_file[report.nodeid.partition("::")[0]]
            total[0] += own
            total[1] += children

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print as many files as ``--durations`` names tests."""
        if config.option.durations and self.by_file:
            terminalreporter.write_sep("=", "CPU-seconds by file: all, pytest's process, processes that ended")
            for line in self.lines()[: config.option.durations]:
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """Return a line for all files, and one for each file, the dearest first."""
        files = sorted(self.by_file.items(), key=lambda file: -sum(file[1]))
        whole = [sum(seconds) for seconds in zip(*self.by_file.values(), strict=True)]
        rows = [("all files", whole), *files]
        return [f"{sum(seconds):8.1f} {seconds[0]:8.1f} {seconds[1]:8.1f} {name}" for name, seconds in rows]
