from __future__ import annotations

import pytest

from tqclient.wire.addresses import host_of, is_loopback, join_address, split_address


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("10.0.0.7", 7701, "10.0.0.7:7701"), ("node-b", 1, "node-b:1"), ("fd00::7", 7701, "[fd00::7]:7701")],
)
def test_addresses_are_joined_and_split(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)
    assert host_of(address) == host


def test_a_port_is_a_number() -> None:
    with pytest.raises(ValueError, match="http"):
        split_address("node-b:http")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.7", False),
        ("0.0.0.0", False),
        ("::", False),
        ("node-b", False),
    ],
)
def test_what_leads_back_to_the_host_itself(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
