"""What a user may set about the mooncake transport: environment variables, as there is one engine for each node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tqclient.errors import TransportUnavailable
from tqclient.limits import MIB
from tqclient.sizes import size_bytes
from tqclient.wire.addresses import split_address

STAGING_BYTES: Final = 64 * MIB
STAGING_BYTES_MIN: Final = 1 * MIB
STAGING_BYTES_MAX: Final = 256 * MIB
"""What is in flight to one peer is all in its staging memory, so this bounds that, too."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of every engine of this process.

    Attributes:
        staging_bytes: `TQ_MOONCAKE_STAGING`: memory that is registered for each storage node.
        host: `TQ_MOONCAKE_HOST`: name or address of this host; empty: the one that the node is reached from.
        devices: `TQ_MOONCAKE_DEVICES`: adapters to use, with commas; empty: all.
    """

    staging_bytes: int = STAGING_BYTES
    host: str = ""
    devices: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Options:
        """Reads them.

        Raises:
            InvalidArgument: a size is none.
            TransportUnavailable: it is out of bounds.
        """
        staging = size_bytes(environ.get("TQ_MOONCAKE_STAGING") or STAGING_BYTES, what="TQ_MOONCAKE_STAGING")
        if not STAGING_BYTES_MIN <= staging <= STAGING_BYTES_MAX:
            raise TransportUnavailable(
                f"TQ_MOONCAKE_STAGING is {staging} bytes: expected {STAGING_BYTES_MIN} to {STAGING_BYTES_MAX}"
            )
        return cls(staging, environ.get("TQ_MOONCAKE_HOST", ""), environ.get("TQ_MOONCAKE_DEVICES", ""))


def own_address(segment: str) -> str:
    """Returns the address of this host from which a segment's host is reached. Sends nothing.

    Raises:
        TransportUnavailable: there is no way to it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(*split_address(segment), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise TransportUnavailable(f"the node's engine {segment!r} cannot be reached from here: {error}") from None
