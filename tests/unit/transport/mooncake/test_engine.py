"""What outlives an engine: the library's part of it, for the next peer."""

from __future__ import annotations

import socket

import pytest

from tqclient.errors import TransportUnavailable
from tqclient.limits import MIB
from tqclient.transport.mooncake import engine
from tqclient.transport.mooncake.engine import Engine

pytestmark = pytest.mark.usefixtures("engine_loaded", "no_leaks")


def test_what_ended_serves_another_peer_and_never_the_same_one_again() -> None:
    first = Engine("127.0.0.1", "127.0.0.1:1", MIB)
    address = first.address
    other = Engine("127.0.0.1", "127.0.0.1:2", MIB)
    assert other.address != address
    first.release()
    assert first.memory.size == 0
    again = Engine("127.0.0.1", "127.0.0.1:1", MIB)  # the node has another life on the same port
    assert again.address not in (address, other.address)
    third = Engine("127.0.0.1", "127.0.0.1:3", 2 * MIB)
    assert third.address == address
    assert (third.memory.size, third.counters.registrations) == (2 * MIB, 1)
    for each in (other, again, third):
        each.release()


def test_no_more_are_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PARKED_MAX", 1)
    engines = [Engine("127.0.0.1", "127.0.0.1:1", MIB) for _ in range(2)]
    for each in engines:
        each.release()
    ports = [int(each.address.rpartition(":")[2]) for each in engines]
    assert [listens(port) for port in ports] == [False, True]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_engine_with_a_holder_is_not_used_for_another_peer() -> None:
    first = Engine("127.0.0.1", "127.0.0.1:1", MIB)
    first.hold()
    first.release()
    second = Engine("127.0.0.1", "127.0.0.1:2", MIB)
    assert second.address != first.address
    for each in (first, second):
        each.release()


def test_an_engine_that_could_not_register_serves_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine("127.0.0.1", "127.0.0.1:1", MIB)
    library = first._library
    assert library is not None
    address, real = first.address, library.engine
    first.release()
    for _ in range(3):
        monkeypatch.setattr(library, "engine", Refusing())
        with pytest.raises(TransportUnavailable, match="registering 1048576 bytes returned -1"):
            Engine("127.0.0.1", "127.0.0.1:2", MIB)
    monkeypatch.setattr(library, "engine", real)
    again = Engine("127.0.0.1", "127.0.0.1:2", MIB)
    assert again.address == address
    again.release()


class Refusing:
    def register_memory(self, address: int, length: int) -> int:
        return -1
