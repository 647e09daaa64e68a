"""A controller that is found by its name comes back at another address, as one does that an orchestrator has moved."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import tqclient as tq
from tests.harness import Child
from tests.harness.hosts import Host, Network
from tests.hosts.cluster import SERVING_SECONDS

NAME = "tq-controller.test"
PORT = 7700
FORMER = "10.77.0.1"
OTHERS = ("10.77.0.101", "10.77.0.102")
FOUND_SECONDS = 5.0


def serve(host: Host, address: str, directory: Path) -> Child:
    command = [sys.executable, "-m", "tqserver.controller", f"--listen={address}:{PORT}", f"--data-dir={directory}"]
    life = host.run(command, name=f"at-{address}")
    life.wait_for('"serving"', timeout=SERVING_SECONDS)
    return life


def create(client: tq.Client, name: str) -> float:
    """How long it takes to make a partition."""
    began = time.monotonic()
    client.create_partition(name)
    return time.monotonic() - began


def session(client: tq.Client) -> int | None:
    found = client._state.session
    return found.session if found else None


def test_a_client_finds_a_controller_that_has_moved_while_its_session_lives(tmp_path: Path) -> None:
    names = tmp_path / "hosts"

    def leads_to(address: str) -> None:
        names.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    with Network(["controller", "client"], tmp_path) as network:
        host = network["controller"]
        host.ip(*(f"address add {address}/24 dev eth0" for address in OTHERS))
        leads_to(FORMER)
        mounted = network["client"].run(["mount", "--bind", str(names), "/etc/hosts"], name="mount")
        assert mounted.wait(timeout=SERVING_SECONDS) == 0, mounted.report()
        life = serve(host, FORMER, tmp_path / "journal")
        client = network["client"].remote(tq.connect, f"{NAME}:{PORT}", timeout=60.0, name="client")
        client.call(create, FORMER)
        before = client.call(session)
        for address in OTHERS:
            life.kill()
            life.wait(timeout=SERVING_SECONDS)
            leads_to(address)
            life = serve(host, address, tmp_path / "journal")
            assert client.call(create, address) <= FOUND_SECONDS
            assert client.call(session) == before
