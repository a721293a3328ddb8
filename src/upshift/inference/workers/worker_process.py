"""Run one worker: ``python -m upshift.inference.workers.worker_process DESCRIPTOR NUMBER SIZE DEVICES``.

The descriptor is a connection to the process that started this one. From there come the job and its tasks."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from upshift.hardware.replicas import take_share
from upshift.inference.workers.worker import Worker
from upshift.settings import quiet_libraries, wait_briefly


def main() -> None:
    descriptor, number, size, devices = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    quiet_libraries()
    wait_briefly()
    take_share(number, size, devices=devices)
    connection = Connection(descriptor)
    worker = Worker(connection.recv())
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(worker.compute(task))


if __name__ == "__main__":
    main()
