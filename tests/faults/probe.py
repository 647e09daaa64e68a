"""What a storage node holds, asked from outside of any client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from tests.harness import wait_until
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import storage_pb2, storage_pb2_grpc

LEASE = 1.0
"""Seconds: the leases of sessions and claims in these tests."""
ANSWER_SECONDS: Final = 5.0


class Used(NamedTuple):
    """Bytes that are not free."""

    sealed: int
    reserved: int = 0
    quarantined: int = 0


class NodeProbe:
    """Asks one storage node.

    Args:
        describe: how.
    """

    def __init__(self, describe: Callable[[], storage_pb2.DescribeNodeReply]) -> None:
        self.describe = describe

    def used(self) -> Used:
        reply = self.describe()
        return Used(reply.sealed_bytes, reply.reserved_bytes, reply.quarantined_bytes)

    def used_once_sealed(self) -> Used:
        """Waits until the node has heard of the first put, which was answered already; returns what is used then."""
        wait_until(lambda: self.used().sealed > 0, timeout=ANSWER_SECONDS, what="the node is told of the put")
        return self.used()

    def wait_used(self, expected: Used, *, timeout: float, what: str) -> None:
        try:
            wait_until(lambda: self.used() == expected, timeout=timeout, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.used()} instead of {expected}") from None


@contextmanager
def node_probe(address: str) -> Iterator[NodeProbe]:
    with dial(address) as channel:
        stub = storage_pb2_grpc.StorageStub(channel)
        yield NodeProbe(
            lambda: stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=ANSWER_SECONDS, wait_for_ready=True)
        )
