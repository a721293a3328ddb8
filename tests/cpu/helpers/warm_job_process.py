"""Import the module of a job once, and fork a process for each folder of a job that arrives on a socket (warm_jobs.py)."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType

from upshift.importing import importing
from upshift.parent_process import end_with
from upshift.settings import quiet_libraries

MESSAGE_BYTES = 4096
MOST_DESCRIPTORS = 16


def main(module: str, descriptor: int) -> None:
    """Answer each folder with the process id of its job, and then with its exit code."""
    quiet_libraries()
    with importing():
        worker = importlib.import_module(module)
        gc.freeze()  # as upshift.training.job.job_process does
    connection = socket.socket(fileno=descriptor)
    while True:
        folder, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not folder:
            return
        child = fork_job(worker, Path(os.fsdecode(folder)), descriptors)
        for inherited in descriptors:
            os.close(inherited)
        connection.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def fork_job(worker: ModuleType, folder: Path, descriptors: list[int]) -> int:
    """Return the id of a new process that has its own session. ``descriptors``: standard output, standard error, and others
    that it only holds open."""
    server = os.getpid()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        is_interrupted = False
        try:
            os.setsid()
            end_with(server)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[1], 2)
            os.close(read_end)
            os.close(write_end)
            worker.run_folder(folder)
            code = 0
        except SystemExit as ended:
            code = exit_code(ended)
        except KeyboardInterrupt:
            is_interrupted = True
            traceback.print_exc()
        except BaseException:  # a fork never returns into the server's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if is_interrupted:  # as Python itself ends then
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(code)
    os.close(write_end)
    os.read(read_end, 1)  # ends when the child has its session: its group can be killed from then on
    os.close(read_end)
    return child


def exit_code(ended: SystemExit) -> int:
    """Return the exit code that Python gives a process that ends so. It prints a text, and ends with 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
