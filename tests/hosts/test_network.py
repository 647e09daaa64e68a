"""The hosts that the other tests of this folder stand on are what they seem: apart, joined by a network, and gone."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.harness.hosts import Direction, Host, Network
from tests.harness.leaks import leaks_nothing
from tests.harness.remote import Remote
from tqclient.limits import MIB

SILENCE_SECONDS = 0.2
_rounds = itertools.count()


class Probe:
    """Looks around on its host, and listens for datagrams."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("0.0.0.0", 9000))

    def shm(self) -> tuple[int, list[str]]:
        """Size of /dev/shm, and what is in it."""
        room = os.statvfs("/dev/shm")
        return room.f_blocks * room.f_frsize, os.listdir("/dev/shm")

    def hostname(self) -> str:
        return socket.gethostname()

    def write(self, name: str) -> None:
        Path("/dev/shm", name).write_text(name)

    def send(self, text: str, address: str) -> None:
        self._socket.sendto(text.encode(), (address, 9000))

    def receive(self, timeout: float) -> list[str]:
        """Every datagram until it has been silent for so long."""
        self._socket.settimeout(timeout)
        found = []
        try:
            while True:
                found.append(self._socket.recv(1024).decode())
        except TimeoutError:
            return found

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module", params=[None, True], ids=["as-it-is", "in-a-user-namespace"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    directory = tmp_path_factory.mktemp("network")
    with leaks_nothing(), Network("abc", directory, shm_bytes=MIB, user_namespace=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def probes(network: Network) -> dict[str, Remote]:
    probes = {name: host.remote(Probe, name="probe") for name, host in network.hosts.items()}
    for probe in probes.values():
        probe.wait_made()
    return probes


def heard(probes: dict[str, Remote], hosts: dict[str, Host]) -> set[tuple[str, str]]:
    """(source, target) of each way that a datagram takes now; each host sends one to each."""
    text = f"round-{next(_rounds)}"  # one of an earlier round may have waited for an address to be resolved
    for source, probe in probes.items():
        for host in hosts.values():
            probe.call(Probe.send, f"{text} {source}", host.address)
    arrived = {target: probe.start(Probe.receive, SILENCE_SECONDS) for target, probe in probes.items()}
    words = [(line.split(), target) for target, lines in arrived.items() for line in lines.result(10)]
    return {(source, target) for (word, source), target in words if word == text}


EVERY_WAY = {(source, target) for source in "abc" for target in "abc"}


def test_each_host_has_a_name_and_shared_memory_of_its_own(network: Network, probes: dict[str, Remote]) -> None:
    probes["a"].call(Probe.write, "of a")
    assert [probe.call(Probe.hostname) for probe in probes.values()] == ["a", "b", "c"]
    assert [probe.call(Probe.shm) for probe in probes.values()] == [(MIB, ["of a"]), (MIB, []), (MIB, [])]
    assert os.listdir(network["a"].shm) == ["of a"]
    assert "of a" not in os.listdir("/dev/shm")


def test_they_hear_each_other(network: Network, probes: dict[str, Remote]) -> None:
    assert len({host.address for host in network.hosts.values()}) == 3
    assert heard(probes, network.hosts) == EVERY_WAY


@pytest.mark.parametrize(
    ("direction", "lost"),
    [
        ("both", {("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")}),
        ("out", {("a", "b"), ("a", "c")}),
        ("in", {("b", "a"), ("c", "a")}),
    ],
)
def test_a_partition_loses_what_it_is_meant_to_and_heals(
    network: Network, probes: dict[str, Remote], direction: Direction, lost: set[tuple[str, str]]
) -> None:
    with network.partitioned(network["a"], direction):
        assert heard(probes, network.hosts) == EVERY_WAY - lost
    wait_until(lambda: heard(probes, network.hosts) == EVERY_WAY, what="all hear each other again")


def test_an_error_there_is_raised_here(probes: dict[str, Remote]) -> None:
    with pytest.raises(ValueError, match="of its own"):
        probes["a"].call(Probe.fail, "of its own")


def test_nothing_is_left_when_a_test_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with Network("ab", tmp_path) as network:
            pids.extend(network[name].run(["sleep", "60"], name="sleeper").pid for name in "ab")
            probe = network["a"].remote(Probe, name="probe")
            pids.append(probe.child.pid)
            probe.child.stop()
            raise KeyError("the test's own")

    pids: list[int] = []
    with leaks_nothing(), pytest.raises(KeyError, match="own"):
        fail()
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_process_that_escaped_its_group_is_ended_and_reported(tmp_path: Path) -> None:
    def let_escape() -> None:
        with Network("a", tmp_path) as network:
            child = network["a"].run(["sh", "-c", "setsid sleep 60 & echo $!"], name="escaping")
            pid = int(child.wait_for(""))
            pids.append(pid)
            wait_until(lambda: os.getsid(pid) == pid, what="it has a group of its own")

    pids: list[int] = []
    with pytest.raises(AssertionError, match=r"left behind on the hosts: .*sleep 60"):
        let_escape()
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists(), what="the stray is gone")
