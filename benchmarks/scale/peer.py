"""A client without the client: bare stubs, so that what is timed is the service and not Python around it."""

from __future__ import annotations

import secrets
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from tqclient.channel import OPTIONS
from tqclient.limits import WIRE_VERSION
from tqclient.samplers import Sampler
from tqclient.wire.dialing import dial
from tqclient.wire.packing import I64, unpack_array
from tqclient.wire.v1 import common_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1.controller_pb2_grpc import ControllerStub

CALL_SECONDS: Final = 60.0
SESSION_LEASE: Final = 900.0
"""Seconds; nobody sends heartbeats here."""


class Peer:
    """A session, and the requests that it numbers.

    Args:
        stub: of the controller, blocking or for asyncio.
        at_once: whether calls run side by side; if not, whoever makes one has the answer to all before.
    """

    def __init__(self, stub: Any, *, at_once: bool = False) -> None:
        self.stub = stub
        self._at_once = at_once
        self._client_id = secrets.token_bytes(16)
        self._requests = 0
        self._session = 0

    @classmethod
    def connect(cls, address: str) -> tuple[Peer, grpc.Channel]:
        """Opens a channel of its own, which is the caller's to close, and a session over it."""
        channel = dial(address, options=OPTIONS)
        peer = cls(ControllerStub(channel))  # type: ignore[no-untyped-call]
        peer.opened(peer.stub.OpenSession(peer.opening(), timeout=CALL_SECONDS))
        return peer, channel

    @property
    def session(self) -> int:
        """Its number; 0 before it is open."""
        return self._session

    def opening(self) -> pb.OpenSessionRequest:
        """Returns the request for a session."""
        return pb.OpenSessionRequest(mutation=self._mutation(), label="tq-bench scale", wire_version=WIRE_VERSION)

    def opened(self, reply: pb.OpenSessionReply) -> None:
        """Takes in the answer to `opening`."""
        self._session = reply.session

    def renewing(self) -> pb.HeartbeatRequest:
        """Returns the request that keeps the session for another lease."""
        return pb.HeartbeatRequest(session=self._session)

    def claiming(
        self, partition_id: int, consumer: str, sampler: Sampler, rows: int, fields: list[str], wait_ms: int = 0
    ) -> pb.ClaimRequest:
        """Returns the request for a claim."""
        return pb.ClaimRequest(
            mutation=self._mutation(),
            partition_id=partition_id,
            consumer=consumer,
            fields=fields,
            batch_size=rows,
            sampler=sampler.to_wire(),
            wait_ms=wait_ms,
        )

    def acking(self, reply: pb.ClaimReply) -> pb.SettleRequest:
        """Returns the request that consumes a claim."""
        return pb.SettleRequest(mutation=self._mutation(), claim_id=reply.claim_id, verdict=pb.VERDICT_ACK)

    def reset(self, partition_id: int, consumer: str) -> None:
        """Makes everything unconsumed again."""
        request = pb.ResetConsumerRequest(mutation=self._mutation(), partition_id=partition_id, consumer=consumer)
        self.stub.ResetConsumer(request, timeout=CALL_SECONDS)

    def _mutation(self) -> common_pb2.Mutation:
        self._requests += 1
        return common_pb2.Mutation(
            client_id=self._client_id,
            request=self._requests,
            settled_below=0 if self._at_once else self._requests,
            session=self._session,
        )


def ids_of(reply: pb.ClaimReply) -> NDArray[np.int64]:
    """Returns the ids of a claim's samples, int64 [rows]."""
    return unpack_array(reply.rows.ids, I64, what="ids")
