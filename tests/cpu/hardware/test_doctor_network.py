"""Hosts that reach each other and hosts that do not: threads on loopback, and network namespaces with a port that is blocked."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from upshift.debugging import network
from upshift.debugging.finding import Finding
from upshift.debugging.network import Server, examine_network, own_index
from upshift.errors import RequestError

# Two namespaces joined by a wire, 10.7.0.1 and 10.7.0.2; the answers of some ports of the second one are dropped.
NAMESPACES = """
set -e
ip link set lo up
ip link add va type veth peer name vb
unshare -n sleep 60 > {folder}/sleep 2>&1 & other=$!
trap "kill $other" EXIT
sleep 0.3
ip link set vb netns $other
ip addr add 10.7.0.1/24 dev va; ip link set va up
enter="nsenter -t $other -n"
$enter ip link set lo up; $enter ip addr add 10.7.0.2/24 dev vb; $enter ip link set vb up
for ports in {blocked}; do
  $enter ip rule add ipproto tcp sport $ports blackhole  # its answers are dropped
done
run() {{ "$@" {command} > {folder}/$name 2> {folder}/$name.err || true; }}
name=two run $enter & second=$!
name=one run env
wait $second
"""


def in_namespaces(folder: Path, *, blocked: str = "") -> list[list[Finding]]:
    """What each of the two hosts found."""
    command = f"{sys.executable} -m upshift.cli.main doctor --network --hosts 10.7.0.1,10.7.0.2 --wait 1 --json"
    script = NAMESPACES.format(blocked=blocked, command=command, folder=folder)
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    done = subprocess.run(["unshare", "-Urn", "bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode and not (folder / "one").exists():
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()[-200:]}")
    found = []
    for name in ("one", "two"):
        text = (folder / name).read_text()
        assert text, (folder / f"{name}.err").read_text()
        found.append([Finding.model_validate(one) for one in json.loads(text)["findings"] if one["subject"] != "host name"])
    return found


def test_a_blocked_port_between_two_namespaces_is_named(tmp_path: Path) -> None:
    one, two = in_namespaces(tmp_path, blocked="29400")
    assert [finding.severity for finding in one] == ["error"], one
    assert one[0].subject == "10.7.0.1 -> 10.7.0.2"
    assert "port 29400 of 10.7.0.2 does not answer at 10.7.0.2:29400" in one[0].what
    assert "--dport 29400 -j ACCEPT" in (one[0].fix or "")
    assert [finding.severity for finding in two] in (["ok"], ["warning"], ["error"])  # that way is open, if it began in time


def test_a_firewall_that_lets_the_meeting_alone_through(tmp_path: Path) -> None:
    one, _ = in_namespaces(tmp_path, blocked="1025-29399 29401-65534")
    closed = next(finding for finding in one if finding.severity == "error")
    assert "which the system chose, is closed" in closed.what
    assert "iptables" in (closed.fix or "")


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def test_hosts_that_talk() -> None:
    """Two addresses of loopback are two hosts; one of them answers only."""
    port = free_port()
    server = Server(port)
    waits = threading.Thread(target=server.wait, args=(1, time.monotonic() + 20), daemon=True)
    waits.start()
    findings = list(network._examine_pair("127.0.0.1", "127.0.0.2", port, time.monotonic() + 5))
    waits.join(20)
    assert not waits.is_alive()
    assert [finding.severity for finding in findings] in (["ok"], ["warning"])  # a busy machine is slow
    assert "round trip" in findings[0].evidence


def test_nobody_listens_and_unknown_names() -> None:
    port = free_port()
    (refused,) = network._examine_pair("127.0.0.1", "127.0.0.2", port, time.monotonic())
    assert f"nobody listens at 127.0.0.2:{port}" in refused.what and "start the same command" in (refused.fix or "")
    unknown = [f for f in examine_network(["127.0.0.1", "nowhere.invalid"], port=port, wait_seconds=0) if "nowhere" in f.subject]
    assert "has no address here" in unknown[0].what and "/etc/hosts" in (unknown[0].fix or "")
    with socket.create_server(("", port)):
        taken = next(examine_network(["127.0.0.1", "127.0.0.2"], port=port, wait_seconds=0))
        assert f"sport = :{port}" in (taken.fix or "")


def test_wrong_hosts_are_refused() -> None:
    assert own_index(["203.0.113.1", "127.0.0.1"]) == 1
    with pytest.raises(RequestError, match="none of 203.0.113.1,203.0.113.2 is this host"):
        own_index(["203.0.113.1", "203.0.113.2"])
    with pytest.raises(RequestError, match="names one host"):
        list(examine_network(["127.0.0.1"], port=1, wait_seconds=0))


def test_ranks_of_a_launcher() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*launcher, "-m", "upshift.cli.main", "doctor", "--network", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    reduced, pair = json.loads(done.stdout)["findings"]  # rank 0 speaks
    assert reduced["severity"] == "ok" and "2 ranks allocate on cpu and reduce by gloo" in reduced["what"]
    assert pair["subject"] == "rank 0 <-> rank 1" and "round trip" in pair["evidence"]


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from upshift.debugging import network_ranks
    from upshift.settings import Ranks

    monkeypatch.setattr(network_ranks, "MEET_SECONDS", 1.0)
    port = free_port()
    (found,) = network_ranks.examine_ranks(Ranks(rank=0, size=2, local_rank=0, address="127.0.0.1", port=port))
    assert found.severity == "error" and f"127.0.0.1:{port}" in found.what and "env://" not in found.evidence
    assert "GLOO_SOCKET_IFNAME" in (found.fix or "")


def test_ranks_of_mpirun_meet_without_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    from upshift.debugging import network_ranks
    from upshift.settings import Ranks, read_ranks

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (reduced,) = network_ranks.examine_ranks(Ranks(rank=0, size=1, local_rank=0, address="127.0.0.1", port=free_port()))
    assert reduced.severity == "ok"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    ranks = read_ranks()
    assert ranks is not None
    with pytest.raises(RequestError, match="nothing says where they meet; set MASTER_ADDR"):
        network_ranks.examine_ranks(ranks)
