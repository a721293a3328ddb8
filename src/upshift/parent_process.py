"""Make processes end with the one that started them, also if that one is killed (SIGKILL runs no code of it).

On Linux the kernel does it (PR_SET_PDEATHSIG of prctl(2)). Elsewhere, and for a child of a thread that may end before its
process does, a thread of the child looks at its parent a few times a second. Uses the standard library alone.

As a module it runs another module in this way: ``python -m upshift.parent_process`` with the words of ``command``.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.3


def command(module: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that starts a Python module, or a script (its name ends with .py), in a process that ends with this one.

    ``options``: of the interpreter."""
    by_kernel = str(int(threading.current_thread() is threading.main_thread()))
    return [sys.executable, *options, "-m", "upshift.parent_process", str(os.getpid()), by_kernel, module, *arguments]


def begin_again() -> list[str]:
    """Return the command of this process, for a child of its parent that runs the same from the beginning: call it in a fork of a
    process that ``command`` started."""
    start = sys.orig_argv.index("upshift.parent_process") + 1
    return [sys.executable, *sys.orig_argv[1:start], str(os.getppid()), "1", *sys.orig_argv[start + 2 :]]


def end_with(parent: int, *, by_kernel: bool = True) -> None:
    """Arrange that this process is killed when the process ``parent``, which started it, ends.

    ``by_kernel``: False for a child of a thread that may end earlier, which the kernel would take for the parent's end."""
    if not (by_kernel and sys.platform == "linux" and _ask_kernel()):
        threading.Thread(target=_watch, args=(parent,), name="upshift-with-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
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
