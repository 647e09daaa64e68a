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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node-b",
        ":7700",
        "node-b:",
        "node-b:http",
        "node-b:-1",
        "node-b:+1",
        "node-b: 7700",
        "node-b:7700\n",
        "node b:7700",
        "node-b:7700/",
        "fd00::7:7700",  # in brackets, or nobody knows where the address ends
        "[fd00::7]",
        "[node-b]:7700",
        "[10.0.0.7]:7700",
        "http://node-b:7700",
        "dns:///node-b:7700",
        "unix:/run/tq",
        "node-b:٧٧",
        "node\udcffb:7700",  # of bytes that are no UTF-8
        "node..b:7700",
        "n" * 64 + ":7700",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no HOST:PORT; write node-b:7700, 10.0.0.7:7700 or \[fd00::7\]:7700"):
        split_address(text)


@pytest.mark.parametrize(("port", "port_min"), [(65_536, 0), (99_999, 1), (73_236, 1), (10**30, 1), (0, 1)])
def test_a_port_that_there_is_not(port: int, port_min: int) -> None:
    with pytest.raises(ValueError, match=f"no port {port}; write one from {port_min} to 65535"):
        split_address(f"10.0.0.7:{port}", port_min=port_min)


@pytest.mark.parametrize(("port", "port_min"), [(65_535, 1), (1, 1), (0, 0)])
def test_the_ports_at_the_ends(port: int, port_min: int) -> None:
    assert split_address(f"[::1]:{port}", port_min=port_min) == ("::1", port)


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
