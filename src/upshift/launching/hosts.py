"""Run torchrun on each of the named hosts: on this machine by a shell, on others by ssh. Stop them together, and report failures.

Interpreter, folder, model and data have the same paths on all hosts. Nothing is copied.
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
from upshift.launching.request import LOOPBACK, RESUME_HINT, Launch
from upshift.launching.torchrun import SAVE_SECONDS, host_script

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# The end of standard input tells a host that its ssh, or this process, is gone; it then ends the processes that it started. The
# braces make the shell read the whole script, which comes from the same input, before it runs any of it.
WITH_LIFELINE = "{{\nexec 3<&0 </dev/null\n{{ cat; kill -TERM 0; }} <&3 >/dev/null 2>&1 &\n{script}}}\n"
STOP_SECONDS = SAVE_SECONDS + 10.0  # for torchrun to end after its ranks
POLL_SECONDS = 0.2


def is_this_machine(host: str) -> bool:
    return host in LOOPBACK or host == socket.gethostname()


# The functions of a script, which does what ``run`` does. A host's lifeline is the script's end of a pipe to the host's shell.
FUNCTIONS = """
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
names=()
pids=()
lifelines=()
failed=0

start() {  # NAME SHELL...: run the script of standard input there, in a process group that Ctrl-C does not reach
  local name=$1 pipe="$folder/${#names[@]}" lifeline
  shift
  mkfifo "$pipe"
  set -m
  (
    for lifeline in "${lifelines[@]}"; do exec {lifeline}>&-; done
    exec "$@" <"$pipe"
  ) &
  set +m
  names+=("$name")
  pids+=($!)
  exec {lifeline}<>"$pipe"
  lifelines+=("$lifeline")
  cat >&"$lifeline"
}

stop() {  # let the ranks save, and kill what has not ended by the deadline
  local lifeline pid deadline=$((SECONDS + STOP_SECONDS))
  trap '' INT TERM HUP
  for lifeline in "${lifelines[@]}"; do exec {lifeline}>&-; done
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep POLL_SECONDS; done
    kill -KILL -- "-$pid" 2>/dev/null
  done
}

wait_for_hosts() {  # MIN_NODES: until all have ended, or fewer than MIN_NODES are left
  local number code
  while [ "${#pids[@]}" -gt 0 ]; do
    sleep POLL_SECONDS
    for number in "${!pids[@]}"; do
      if kill -0 "${pids[number]}" 2>/dev/null; then continue; fi
      wait "${pids[number]}"
      code=$?
      unset "pids[number]"
      if [ "$code" -eq 0 ]; then continue; fi
      failed=$((failed + 1))
      echo "${names[number]} failed (exit code $code)" >&2
    done
    if [ "$failed" -gt 0 ] && [ $((${#names[@]} - failed)) -lt "$1" ]; then
      stop
      echo "RESUME_HINT" >&2
      exit 1
    fi
  done
}

trap 'stop; exit 130' INT TERM HUP
"""


def launch_script(launch: Launch) -> str:
    """Return a shell script that does the same as ``run``."""
    functions = FUNCTIONS.replace("STOP_SECONDS", f"{STOP_SECONDS:.0f}").replace("POLL_SECONDS", str(POLL_SECONDS))
    lines = [
        "#!/bin/bash",
        "# Written by `upshift launch --hosts`: one torchrun a host; they meet on the first, and start again together when a",
        "# rank dies. Interpreter, folder, model and data have the same paths on all hosts.",
        functions.replace("RESUME_HINT", RESUME_HINT),
    ]
    for number, host in enumerate(launch.hosts):
        shell = "bash -s" if is_this_machine(host) else f"{shlex.join((*SSH, host))} 'bash -s'"
        script = WITH_LIFELINE.format(script=host_script(launch, number))
        lines += [f"start {shlex.quote(host)} {shell} <<'END'", f"{script}END", ""]
    return "\n".join([*lines, f"wait_for_hosts {launch.min_nodes}"]) + "\n"


def run(launch: Launch) -> None:
    """Run until all hosts have ended. Raise JobFailed when fewer than ``min_nodes`` are left, Interrupted after Ctrl-C."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, host in enumerate(launch.hosts):
            processes[host] = _start(host, host_script(launch, number))
        _wait(launch, processes)
    except KeyboardInterrupt:
        _stop(processes, STOP_SECONDS)
        raise Interrupted(f"interrupted on all hosts; {RESUME_HINT}") from None
    finally:
        _stop(processes, 0.0)


def _start(host: str, script: str) -> subprocess.Popen[bytes]:
    arguments = ["bash", "-s"] if is_this_machine(host) else [*SSH, host, "bash -s"]
    try:  # in a new session, so that Ctrl-C reaches this process only, which passes it on once
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
    except FileNotFoundError:
        raise RequestError(f"--hosts needs {arguments[0]}, which is not here; install it, or use --hosts localhost") from None
    assert process.stdin is not None
    with suppress(OSError):  # the process ended already: its exit code is read later
        process.stdin.write(WITH_LIFELINE.format(script=script).encode())
        process.stdin.flush()
    return process


def _wait(launch: Launch, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    failed: dict[str, int] = {}
    while processes:
        time.sleep(POLL_SECONDS)
        exit_codes = {host: process.returncode for host, process in processes.items() if process.poll() is not None}
        for host, code in exit_codes.items():
            processes.pop(host)
            if code:
                failed[host] = code
        if exit_codes and failed and len(launch.hosts) - len(failed) < launch.min_nodes:
            _stop(processes, STOP_SECONDS)
            processes.clear()
    if len(launch.hosts) - len(failed) < launch.min_nodes:
        failures = ", ".join(f"{host} (exit code {code}{_explain(host, code)})" for host, code in failed.items())
        raise JobFailed(f"of {len(launch.hosts)} hosts failed: {failures}; their own words stand above; {RESUME_HINT}")


def _explain(host: str, exit_code: int) -> str:
    """Return the meaning of an exit code of ssh itself, else a blank text."""
    return ": ssh could not connect, or lost it" if exit_code == 255 and not is_this_machine(host) else ""


def _stop(processes: dict[str, subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """Ask the hosts to stop, wait for ``grace_seconds``, and kill those that still run."""
    for process in processes.values():
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # the host notices this, see WITH_LIFELINE
    deadline = time.monotonic() + grace_seconds
    for process in processes.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
