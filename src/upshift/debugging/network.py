"""Check that hosts reach each other: every pair connects at the port where ranks meet and at one that the system chooses, both
ways.

The command is started on every host at the same time. It uses plain sockets, no torch. A host knows which one of the list it is
by its own addresses.
"""

from __future__ import annotations

import errno
import importlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from upshift.debugging.finding import Finding, error, ok, warning
from upshift.errors import RequestError
from upshift.units import MIB

CONNECT_SECONDS = 3.0  # of one try
PINGS = 20
BULK_BYTES = 32 * MIB
CHUNK = MIB
SLOW_BYTES = 110e6  # per second: one Gb/s
SLOW_SECONDS = 1e-3


class Reached(NamedTuple):
    latency: float  # seconds of a round trip
    rate: float  # bytes per second, to the other
    local: str  # our address on the way


class Server:
    """A server that answers other hosts until all have said goodbye."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server(("", port), backlog=64, reuse_port=False)
        self._left = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, others: int, deadline: float) -> None:
        for _ in range(others):
            if not self._left.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
        with suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rwb") as stream:
            for line in stream:
                word, _, size = line.decode().strip().partition(" ")
                if word == "ping":
                    stream.write(b"pong\n")
                elif word == "bulk":
                    left = int(size)
                    while left and (got := stream.read(min(left, CHUNK))):
                        left -= len(got)
                    stream.write(b"done\n")
                elif word == "another":
                    stream.write(f"{self._another()}\n".encode())
                elif word == "bye":
                    self._left.release()
                stream.flush()

    def _another(self) -> int:
        """Open a port that the system chooses, as NCCL's and gloo's are, and return it. One connection is accepted."""
        other = socket.create_server(("", 0))

        def take() -> None:
            other.settimeout(2 * CONNECT_SECONDS)
            with suppress(OSError):  # no connection came: the other side reports it
                other.accept()[0].close()
            other.close()

        threading.Thread(target=take, daemon=True).start()
        return int(other.getsockname()[1])


def own_place(hosts: list[str]) -> int:
    """Return which of the hosts this is: the one whose address an interface has."""
    own = interfaces()
    for place, host in enumerate(hosts):
        with suppress(OSError):
            address = socket.gethostbyname(host)
            if address in own or address.startswith("127."):
                return place
    raise RequestError(f"none of {','.join(hosts)} is this host ({socket.gethostname()}); name it as the others reach it")


def examine_network(hosts: list[str], *, port: int, wait_seconds: float) -> Iterator[Finding]:
    """Yield findings about the connections to the other hosts. ``wait_seconds``: how long the others may take to start."""
    if len(hosts) < 2:
        raise RequestError(f"--hosts {','.join(hosts)} names one host; name all, as a,b, and start the command on each")
    me = own_place(hosts)
    deadline = time.monotonic() + wait_seconds
    try:
        server = Server(port)
    except OSError as failure:
        yield error(
            "network",
            what=f"port {port} cannot be opened here: {failure.strerror}",
            fix=f"ss -ltnp 'sport = :{port}' shows who has it; or --port",
        )
        return
    yield from _own_name()
    for place, host in enumerate(hosts):
        if place != me:
            yield from _pair(hosts[me], host, port, deadline)
    server.wait(len(hosts) - 1, deadline + CONNECT_SECONDS + 1 if wait_seconds else deadline)


def _own_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    if address is None or address.startswith("127."):
        interface = next(iter(interfaces().values()), "eth0")
        yield warning(
            "host name", what=f"{name} is {address or 'unknown'} to this host itself, and gloo announces it",
            evidence="the system's resolver", fix=f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}",
        )  # fmt: skip


def interfaces() -> dict[str, str]:
    """Return the interface of each address, without loopback."""
    found = {}
    for name, addresses in importlib.import_module("psutil").net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                found[address.address] = name
    return found


def _pair(own: str, host: str, port: int, deadline: float) -> Iterator[Finding]:
    subject = f"{own} -> {host}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        yield error(
            subject,
            what=f"{host} has no address here",
            evidence="the system's resolver",
            fix=f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts",
        )
        return
    while True:
        try:
            with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
                reached, other = _talk(connection)
                yield from _other_port(subject, address, other)
            yield from _speed(subject, address, reached)
            return
        except OSError as failure:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            yield _blocked(subject, host, address, port, failure)
            return


def _talk(connection: socket.socket) -> tuple[Reached, int]:
    connection.settimeout(10 * CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection.makefile("rwb") as stream:

        def ask(words: bytes, load: int = 0) -> bytes:
            stream.write(words + b"\n")
            for _ in range(load // CHUNK):
                stream.write(block)
            stream.flush()
            answer: bytes = stream.readline()
            if not answer:
                raise ConnectionResetError(errno.ECONNRESET, "closed in the middle")
            return answer

        block = bytes(CHUNK)
        times = []
        for _ in range(PINGS):
            start = time.perf_counter()
            ask(b"ping")
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        ask(f"bulk {BULK_BYTES}".encode(), BULK_BYTES)
        rate = BULK_BYTES / (time.perf_counter() - start)
        other = int(ask(b"another"))
        stream.write(b"bye\n")
        stream.flush()
    return Reached(statistics.median(times), rate, connection.getsockname()[0]), other


def _other_port(subject: str, address: str, port: int) -> Iterator[Finding]:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        low, high = _ephemeral()
        yield error(
            subject, what=f"port {port}, which the system chose, is closed: ranks meet and then cannot exchange",
            evidence=f"{address}:{port} after {CONNECT_SECONDS:.0f} s", cause="a firewall lets only named ports through",
            fix=f"on {address}: sudo ufw allow from NETWORK to any port {low}:{high} proto tcp; "
            f"or sudo iptables -I INPUT -p tcp --dport {low}:{high} -s NETWORK -j ACCEPT",
        )  # fmt: skip


def _ephemeral() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return 32768, 60999
    return low, high


def _speed(subject: str, address: str, reached: Reached) -> Iterator[Finding]:
    interface = interfaces().get(reached.local, "lo")
    evidence = f"{address} by {interface}: round trip {reached.latency * 1e6:,.0f} us, {reached.rate / 1e6:,.0f} MB/s"
    settings = f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    if reached.rate < SLOW_BYTES or reached.latency > SLOW_SECONDS:
        yield warning(
            subject, what="slow for training over several hosts", evidence=evidence,
            fix=f"ethtool {interface} | grep Speed; another interface: export {settings.replace(interface, 'NAME')}",
        )  # fmt: skip
    else:
        yield ok(subject, what=f"talks; export {settings}", evidence=evidence)


def _blocked(subject: str, host: str, address: str, port: int, failure: OSError) -> Finding:
    where = f"{address}:{port}"
    if isinstance(failure, ConnectionRefusedError):
        return error(subject, what=f"nobody listens at {where}", evidence="connection refused",
                     fix=f"start the same command on {host}, within --wait; or there: sudo ufw allow {port}/tcp")  # fmt: skip
    if failure.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return error(
            subject,
            what=f"there is no way to {where}",
            evidence=str(failure),
            fix=f"ip route get {address}; name the host by an address of a shared network",
        )
    return error(
        subject, what=f"port {port} of {host} does not answer at {where}",
        evidence=f"{failure}, {CONNECT_SECONDS:.0f} s",
        cause="a firewall drops what is sent there, or the host is off or too busy to answer",
        fix=f"on {host}: sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT; or another port: --port",
    )  # fmt: skip
