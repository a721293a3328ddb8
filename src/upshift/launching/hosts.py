"""Run torchrun on each of the named hosts, here by a shell, elsewhere by ssh. Stop all together, and report which hosts failed.

Paths are the same on all hosts: the interpreter, the folder, the model, the data. Nothing is copied.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.launching.request import GOES_ON, LOOPBACK, Launch
from upshift.launching.torchrun import SECONDS_TO_SAVE, of_host

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# A host notices that its ssh, or this process, is gone by the end of its standard input, and then ends what it started. The
# braces make its shell read all of the script first, from the same input.
WITH_LIFELINE = "{{\nexec 3<&0 </dev/null\n{{ cat <&3 >/dev/null 2>&1; kill -TERM 0; }} &\n{script}}}\n"
SECONDS_TO_STOP = SECONDS_TO_SAVE + 10.0  # torchrun's own end, after its ranks
POLL_SECONDS = 0.2


def is_here(host: str) -> bool:
    return host in LOOPBACK or host == socket.gethostname()


def as_script(launch: Launch) -> str:
    """Return the launch as a shell script, to read or to keep."""
    lines = [
        "#!/bin/bash",
        "# Written by `upshift launch --hosts`: one torchrun a host; they meet on the first, and start again together when a",
        "# rank dies. Interpreter, folder, model and data have the same paths on all hosts.",
    ]
    for number, host in enumerate(launch.hosts):
        shell = "bash -s" if is_here(host) else f"{shlex.join((*SSH, host))} bash -s"
        lines += ["", f"{shell} <<'END' &", of_host(launch, number) + "END"]
    return "\n".join([*lines, "", "wait"]) + "\n"


def run(launch: Launch) -> None:
    """Run until all hosts are done. Raise JobFailed once fewer than ``min_nodes`` are left, Interrupted after Ctrl-C."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, host in enumerate(launch.hosts):
            running[host] = _start(host, of_host(launch, number))
        _wait(launch, running)
    except KeyboardInterrupt:
        _stop(running, SECONDS_TO_STOP)
        raise Interrupted(f"interrupted on all hosts; {GOES_ON}") from None
    finally:
        _stop(running, 0.0)


def _start(host: str, script: str) -> subprocess.Popen[bytes]:
    arguments = ["bash", "-s"] if is_here(host) else [*SSH, host, "bash -s"]
    try:  # a session of its own: Ctrl-C comes here alone, and is passed on once
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
    except FileNotFoundError:
        raise RequestError(f"--hosts needs {arguments[0]}, which is not here; install it, or use --hosts localhost") from None
    assert process.stdin is not None
    with suppress(OSError):  # it is gone already: its exit code says so
        process.stdin.write(WITH_LIFELINE.format(script=script).encode())
        process.stdin.flush()
    return process


def _wait(launch: Launch, running: dict[str, subprocess.Popen[bytes]]) -> None:
    failed: dict[str, int] = {}
    while running:
        time.sleep(POLL_SECONDS)
        ended = {host: process.returncode for host, process in running.items() if process.poll() is not None}
        for host, code in ended.items():
            running.pop(host)
            if code:
                failed[host] = code
        if ended and failed and len(launch.hosts) - len(failed) < launch.min_nodes:
            _stop(running, SECONDS_TO_STOP)
            running.clear()
    if len(launch.hosts) - len(failed) < launch.min_nodes:
        said = ", ".join(f"{host} (exit code {code}{_meaning(host, code)})" for host, code in failed.items())
        raise JobFailed(f"of {len(launch.hosts)} hosts failed: {said}; their own words stand above; {GOES_ON}")


def _meaning(host: str, code: int) -> str:
    return ": ssh could not connect, or lost it" if code == 255 and not is_here(host) else ""


def _stop(running: dict[str, subprocess.Popen[bytes]], seconds: float) -> None:
    """Ask the hosts to stop, wait for ``seconds``, and kill the rest."""
    for process in running.values():
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # the lifeline
    until = time.monotonic() + seconds
    for process in running.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.0))
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
