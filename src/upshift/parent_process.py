"""End a child process when its parent ends, even if the parent is killed by SIGKILL and runs no code.

On Linux the kernel does it (PR_SET_PDEATHSIG of prctl(2)). On other systems, and if the thread that started the child may end
before its process, a thread of the child checks its parent a few times a second. Only the standard library is used.

``python -m upshift.parent_process`` runs another module in this way; ``command`` returns the whole command line.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from typing import TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.3


def command(module: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that starts a Python module in a process that ends with this one.

    A ``module`` that ends with .py is run as a script. ``options``: options of the Python interpreter."""
    by_kernel = str(int(threading.current_thread() is threading.main_thread()))
    return [sys.executable, *options, "-m", "upshift.parent_process", str(os.getpid()), by_kernel, module, *arguments]


def restart_command() -> list[str]:
    """Return the command line that runs this process again from the beginning, as a child of its current parent.

    Call it in a fork of a process that ``command`` started."""
    start = sys.orig_argv.index("upshift.parent_process") + 1
    return [sys.executable, *sys.orig_argv[1:start], str(os.getppid()), "1", *sys.orig_argv[start + 2 :]]


def take_stdout() -> TextIO:
    """Return this process's standard output for an answer to its parent. Drop what else is written there from now on.

    C and C++ libraries print to their own standard output and flush it when the process ends, behind an answer that Python
    printed: NCCL does so with NCCL_DEBUG=INFO, and even NCCL_DEBUG=VERSION."""
    sys.stdout.flush()
    answer = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answer


def end_with(parent: int, *, by_kernel: bool = True) -> None:
    """Arrange that this process is killed when the process ``parent``, which started it, ends.

    ``by_kernel``: False if the thread that started this process may end earlier. The kernel would take that for the
    parent's end."""
    if not (by_kernel and sys.platform == "linux" and _ask_kernel()):
        threading.Thread(target=_watch, args=(parent,), name="upshift-with-parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the kernel could be asked
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_kernel() -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)
    except (OSError, AttributeError):  # no such library, or no such function in it
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parent, by_kernel, module, *arguments = sys.argv[1:]
    end_with(int(parent), by_kernel=by_kernel == "1")
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
