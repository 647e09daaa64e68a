"""Chooses the path to a storage node, by capability, and says why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import grpc

from tqclient.errors import InvalidArgument, TransportUnavailable, Unavailable
from tqclient.transport.base import NodeContact, NodeTransport
from tqclient.transport.mooncake import open_mooncake
from tqclient.transport.pool import BufferPool
from tqclient.transport.shm import open_shm
from tqclient.transport.stream import open_stream
from tqclient.wire.chunks import READ_METHOD, decode_chunk
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2, storage_pb2
from tqclient.wire.v1.storage_pb2_grpc import StorageStub

Opener = Callable[[NodeContact], NodeTransport]


OPENERS: Final[Mapping[str, Opener]] = {"shm": open_shm, "mooncake": open_mooncake, "grpc": open_stream}
"""Every transport, best first. An opener that cannot serve the node raises TransportUnavailable with the reason, or
Unavailable when it is likely to serve it soon."""

ALIASES: Final[Mapping[str, str]] = {"rdma": "mooncake"}
"""`rdma` is mooncake that really runs over RDMA: TCP is refused."""

BETTER_AFTER: Final = 10.0
"""Seconds after a fall-back at which a transport that was expected to serve the node soon is tried again."""

_log = logging.getLogger(__name__)


def check_name(prefer: str) -> str:
    """Checks the name of a transport, before anything is connected to.

    Returns:
        The name: `auto`, a key of `OPENERS`, or one of `ALIASES`.

    Raises:
        InvalidArgument: there is no such transport; the message lists those that there are.
    """
    names = ["auto", *OPENERS, *ALIASES]
    if prefer not in names:
        raise InvalidArgument(f"transport={prefer!r}: choose from {', '.join(names)}")
    return prefer


def open_transport(
    node: controller_pb2.Node, prefer: str, *, channel: grpc.Channel, pool: BufferPool, timeout: float
) -> NodeTransport:
    """Opens the best path to a node.

    Args:
        node: as the controller lists it.
        prefer: `auto` takes the first of `OPENERS` that can be had; any other name requires that one.
        channel: to the node's address; stays the caller's, and must outlive the transport.
        pool: where receive and staging buffers come from.
        timeout: seconds in which it must be open.

    Returns:
        The transport; its `reason` says why not a better one. The caller closes it.

    Raises:
        InvalidArgument: no transport is called that.
        TransportUnavailable: the required one cannot be had; the message says why.
        Unavailable: the node is away, serves another arena than the controller knows, or is about to offer the
            required transport.
    """
    check_name(prefer)
    contact = replace(_contact(node, channel, pool, timeout), rdma=prefer == "rdma")
    for candidate in OPENERS if prefer == "auto" else [ALIASES.get(prefer, prefer)]:
        try:
            transport = OPENERS[candidate](contact)
        except (TransportUnavailable, Unavailable) as error:
            soon = isinstance(error, Unavailable)
            if soon and prefer != "auto":
                raise
            contact = replace(
                contact,
                refusals=(*contact.refusals, f"no {candidate}: {error.message}"),
                better_after=BETTER_AFTER if soon else contact.better_after,
            )
            continue
        # A fall-back works, but is slow: that must not go unnoticed.
        level = logging.WARNING if contact.refusals and candidate == "grpc" else logging.INFO
        _log.log(level, "%s goes over %s: %s", contact.peer, candidate, transport.reason)
        return transport
    raise TransportUnavailable(f"transport={prefer!r} to {contact.peer}: {'; '.join(contact.refusals)}")


def _contact(node: controller_pb2.Node, channel: grpc.Channel, pool: BufferPool, timeout: float) -> NodeContact:
    deadline = time.monotonic() + timeout
    stub: Any = StorageStub(channel)  # type: ignore[no-untyped-call]
    stub.Read = channel.unary_stream(READ_METHOD, storage_pb2.ReadRequest.SerializeToString, decode_chunk)
    try:
        description = stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=timeout)
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer=f"storage node {node.name!r} ({node.address})") from None
    contact = NodeContact(node.address, description, stub, pool, deadline)
    if description.arena != node.arena:
        raise Unavailable(
            f"{contact.peer} serves arena {description.arena:016x}, "
            f"but the controller knows {node.arena:016x}: it has restarted, or is another one"
        )
    return contact
