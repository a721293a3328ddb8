"""Ask a server for a fork that runs a Python command, pass signals on to it, and end as it ends (warm_python.py).

python -I -S warm_stub.py SOCKET PYTHON ARGUMENTS
"""

import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
PARENT_SECONDS = 0.1
PREFIX = ["-m", "upshift.parent_process"]


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    path, *words = sys.argv[1:]
    rest = words[1:]
    while rest[0] in ("-u", "-P"):
        rest = rest[1:]
    # The fork has another parent, so this process watches the one that is meant.
    parent = int(rest[2]) if rest[:2] == PREFIX else None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    passed = [descriptor for descriptor in descriptors if descriptor != connection.fileno() and is_open(descriptor)]
    message = repr((words, dict(os.environ), os.getcwd(), passed, os.umask(0))).encode(errors="surrogateescape")
    socket.send_fds(connection, [len(message).to_bytes(8, "little")], passed)
    connection.sendall(message)
    child = int.from_bytes(read(connection, 8, parent), "little")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: send(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    end_with(int.from_bytes(read(connection, 8, parent), "little", signed=True))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # it was that of the list of descriptors
        return False
    return True


def send(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)


def read(connection: socket.socket, count: int, parent: int | None) -> bytes:
    """Return bytes from the server. End with SIGKILL if the parent or the server ends."""
    content = b""
    while len(content) < count:
        while not select.select([connection], [], [], PARENT_SECONDS)[0]:
            if parent is not None and os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
        part = connection.recv(count - len(content))
        if not part:
            os.kill(os.getpid(), signal.SIGKILL)
        content += part
    return content


def end_with(code: int) -> None:
    """End with this exit code, or by the signal that it stands for if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = signal.Signals(-code)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(code)


main()
