"""Check that hosts reach each other: each pair connects both ways, at the ranks' port and at one that the system chooses.

The command is started on every host at the same time. It uses plain sockets and no torch. A host finds itself in the list of
hosts by its own addresses.
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

CONNECT_SECONDS = 3.0  # time limit of one attempt
PINGS = 20
BULK_BYTES = 32 * MIB
CHUNK = MIB
SLOW_BYTES = 110e6  # per second: a link of one Gb/s
SLOW_SECONDS = 1e-3  # of a round trip


class Reached(NamedTuple):
    """Hold the measurements of a connection to another host."""

    latency: float  # seconds of a round trip
    rate: float  # bytes per second, sent to the other host
    local: str  # the address of this host on the connection


class Server:
    """Answer the other hosts until all of them have said goodbye."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server(("", port), backlog=64, reuse_port=False)
        self._goodbyes = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, num_others: int, deadline: float) -> None:
        """Wait for the goodbyes of the other hosts, then close the server."""
        for _ in range(num_others):
            if not self._goodbyes.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
        with suppress(OSError):  # wakes the thread that accepts connections
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
                command, _, size = line.decode().strip().partition(" ")
                if command == "ping":
                    stream.write(b"pong\n")
                elif command == "bulk":
                    bytes_left = int(size)
                    while bytes_left:
                        chunk = stream.read(min(bytes_left, CHUNK))
                        if not chunk:
                            break
                        bytes_left -= len(chunk)
                    stream.write(b"done\n")
                elif command == "another":
                    stream.write(f"{self._open_port()}\n".encode())
                elif command == "bye":
                    self._goodbyes.release()
                stream.flush()

    def _open_port(self) -> int:
        """Open a port that the system chooses, like those of NCCL and gloo, and return it. It accepts one connection."""
        listener = socket.create_server(("", 0))

        def accept_one() -> None:
            listener.settimeout(2 * CONNECT_SECONDS)
            with suppress(OSError):  # no connection came, which the other host reports
                listener.accept()[0].close()
            listener.close()

        threading.Thread(target=accept_one, daemon=True).start()
        return int(listener.getsockname()[1])


def own_index(hosts: list[str]) -> int:
    """Return the index of this host in the list. Raise RequestError if it is not in the list."""
    own_addresses = interfaces_by_address()
    for index, host in enumerate(hosts):
        with suppress(OSError):
            address = socket.gethostbyname(host)
            if address in own_addresses or address.startswith("127."):
                return index
    raise RequestError(f"none of {','.join(hosts)} is this host ({socket.gethostname()}); name it as the others reach it")


def examine_network(hosts: list[str], *, port: int, wait_seconds: float) -> Iterator[Finding]:
    """Yield findings about the connections to the other hosts. ``wait_seconds``: how long the other hosts may take to start."""
    if len(hosts) < 2:
        raise RequestError(f"--hosts {','.join(hosts)} names one host; name all, as a,b, and start the command on each")
    own_number = own_index(hosts)
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
    yield from _examine_own_name()
    for index, host in enumerate(hosts):
        if index != own_number:
            yield from _examine_pair(hosts[own_number], host, port, deadline)
    if wait_seconds:
        deadline += CONNECT_SECONDS + 1
    server.wait(len(hosts) - 1, deadline)


def _examine_own_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    if address is None or address.startswith("127."):
        interface = next(iter(interfaces_by_address().values()), "eth0")
        yield warning(
            "host name",
            what=f"{name} is {address or 'unknown'} to this host itself, and gloo announces it",
            evidence="the system's resolver",
            fix=f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}",
        )


def interfaces_by_address() -> dict[str, str]:
    """Return the network interface of each address of this host, without loopback."""
    interfaces = {}
    for name, addresses in importlib.import_module("psutil").net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                interfaces[address.address] = name
    return interfaces


def _examine_pair(own_host: str, host: str, port: int, deadline: float) -> Iterator[Finding]:
    subject = f"{own_host} -> {host}"
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
                reached, other_port = _measure_connection(connection)
                yield from _examine_port(subject, address, other_port)
            yield from _speed_finding(subject, address, reached)
            return
        except OSError as failure:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            yield _blocked_finding(subject, host, address, port, failure)
            return


def _measure_connection(connection: socket.socket) -> tuple[Reached, int]:
    """Return the measurements of a connection, and a second port of the other host."""
    connection.settimeout(10 * CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection.makefile("rwb") as stream:

        def request(command: bytes, payload_bytes: int = 0) -> bytes:
            stream.write(command + b"\n")
            for _ in range(payload_bytes // CHUNK):
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
            request(b"ping")
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        request(f"bulk {BULK_BYTES}".encode(), BULK_BYTES)
        rate = BULK_BYTES / (time.perf_counter() - start)
        other_port = int(request(b"another"))
        stream.write(b"bye\n")
        stream.flush()
    return Reached(statistics.median(times), rate, connection.getsockname()[0]), other_port


def _examine_port(subject: str, address: str, port: int) -> Iterator[Finding]:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        low, high = _ephemeral_ports()
        yield error(
            subject,
            what=f"port {port}, which the system chose, is closed: ranks meet and then cannot exchange",
            evidence=f"{address}:{port} after {CONNECT_SECONDS:.0f} s",
            cause="a firewall lets only named ports through",
            fix=f"on {address}: sudo ufw allow from NETWORK to any port {low}:{high} proto tcp; "
            f"or sudo iptables -I INPUT -p tcp --dport {low}:{high} -s NETWORK -j ACCEPT",
        )


def _ephemeral_ports() -> tuple[int, int]:
    """Return the first and the last port that the system chooses from."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return 32768, 60999
    return low, high


def _speed_finding(subject: str, address: str, reached: Reached) -> Iterator[Finding]:
    interface = interfaces_by_address().get(reached.local, "lo")
    evidence = f"{address} by {interface}: round trip {reached.latency * 1e6:,.0f} us, {reached.rate / 1e6:,.0f} MB/s"
    settings = f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    if reached.rate < SLOW_BYTES or reached.latency > SLOW_SECONDS:
        yield warning(
            subject,
            what="slow for training over several hosts",
            evidence=evidence,
            fix=f"ethtool {interface} | grep Speed; another interface: export {settings.replace(interface, 'NAME')}",
        )
    else:
        yield ok(subject, what=f"talks; export {settings}", evidence=evidence)


def _blocked_finding(subject: str, host: str, address: str, port: int, failure: OSError) -> Finding:
    endpoint = f"{address}:{port}"
    if isinstance(failure, ConnectionRefusedError):
        return error(
            subject,
            what=f"nobody listens at {endpoint}",
            evidence="connection refused",
            fix=f"start the same command on {host}, within --wait; or there: sudo ufw allow {port}/tcp",
        )
    if failure.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return error(
            subject,
            what=f"there is no way to {endpoint}",
            evidence=str(failure),
            fix=f"ip route get {address}; name the host by an address of a shared network",
        )
    return error(
        subject,
        what=f"port {port} of {host} does not answer at {endpoint}",
        evidence=f"{failure}, {CONNECT_SECONDS:.0f} s",
        cause="a firewall drops what is sent there, or the host is off or too busy to answer",
        fix=f"on {host}: sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT; or another port: --port",
    )
