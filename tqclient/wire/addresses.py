"""`host:port`, where a host may be an IPv6 address, which stands in brackets then."""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int) -> str:
    """Returns `host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host of `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of `host:port`.

    Raises:
        ValueError: the port is no number.
    """
    return host_of(address), int(address.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Whether a name or address means the host itself, to whoever uses it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
