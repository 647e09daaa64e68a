"""`host:port`, where a host may be an IPv6 address, which stands in brackets then."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

PORT_MAX: Final = 65_535
_ADDRESS: Final = re.compile(r"(?:\[([^][]+)\]|([^]\s:/[]+)):([0-9]+)")


def join_address(host: str, port: int) -> str:
    """Returns `host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host of `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def split_address(address: str, *, port_min: int = 1) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of `host:port`.

    Args:
        address: to be split.
        port_min: 0 where the system may choose the port: of an address to listen on.

    Raises:
        ValueError: it is something else, or there is no such port. gRPC would take it all the same: a port modulo
            65536, and 443 where there is none.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not (_is_ipv6(match[1]) if match[1] else _is_name(match[2])):
        raise ValueError(f"{address!r} is no HOST:PORT; write node-b:7700, 10.0.0.7:7700 or [fd00::7]:7700")
    if not port_min <= int(match[3]) <= PORT_MAX:
        raise ValueError(f"{address!r}: there is no port {match[3]}; write one from {port_min} to {PORT_MAX}")
    return match[1] or match[2], int(match[3])


def _is_name(host: str) -> bool:
    """Whether a name or IPv4 address can be looked up: it is UTF-8, and no part of it is empty or over 63 bytes."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or address means the host itself, to whoever uses it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
