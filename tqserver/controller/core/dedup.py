"""Recorded replies: a repeated request has one effect and one answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from tqclient.errors import InvalidArgument
from tqclient.wire.packing import U64, unpack_array
from tqclient.wire.v1 import common_pb2, controller_pb2
from tqserver.controller.core import limits

REPLY_TYPES: Final[dict[str, type[Message]]] = {
    "open_session": controller_pb2.OpenSessionReply,
    "close_session": controller_pb2.CloseSessionReply,
    "create_partition": controller_pb2.PartitionReply,
    "seal_partition": controller_pb2.PartitionReply,
    "delete_partition": controller_pb2.DeletePartitionReply,
    "set_metadata": controller_pb2.PartitionReply,
    "set_version": controller_pb2.PartitionReply,
    "commit": controller_pb2.CommitReply,
    "clear": controller_pb2.ClearReply,
    "set_tags": controller_pb2.SetTagsReply,
    "claim": controller_pb2.ClaimReply,
    "settle": controller_pb2.SettleReply,
    "reset_consumer": controller_pb2.ResetConsumerReply,
    "requeue": controller_pb2.RequeueReply,
    "register_rank": controller_pb2.RegisterRankReply,
    "acquire_permit": controller_pb2.AcquirePermitReply,
    "return_permit": controller_pb2.ReturnPermitReply,
    "register_producer": controller_pb2.RegisterProducerReply,
    "unregister_producer": controller_pb2.UnregisterProducerReply,
}
"""Command kind → its reply; the kinds that carry a Mutation."""


class Settled(NamedTuple):
    """Which requests of a client have their answer: all below `below`, and those below `until` that are not `open`."""

    below: int = 0
    until: int = 0
    open: frozenset[int] = frozenset()

    @classmethod
    def of(cls, mutation: common_pb2.Mutation) -> Settled:
        """Returns what a mutation says.

        Raises:
            InvalidArgument: `open` is no array.
        """
        still = unpack_array(mutation.open, U64, what="mutation.open").tolist() if mutation.open else ()
        return cls(mutation.settled_below, mutation.settled_until, frozenset(still))

    def __contains__(self, request: object) -> bool:
        return isinstance(request, int) and (
            request < self.below or (request < self.until and request not in self.open)
        )

    def joined(self, later: Settled) -> Settled:
        """Returns this with what a mutation says that was made before or after; what is settled stays so."""
        older, newer = (self, later) if self.until <= later.until else (later, self)
        still = newer.open & older.open if newer.until == older.until else newer.open
        return Settled(max(self.below, later.below), newer.until, still)


NOTHING: Final = Settled()


def check_kind(request: int, first: str, repeated: str) -> None:
    """Raises InvalidArgument when a request was one kind of command, and is repeated as another one."""
    if first != repeated:
        raise InvalidArgument(f"request {request} was a {first}, and is now repeated as a {repeated}")


@dataclass(slots=True)
class _Client:
    settled: Settled = NOTHING
    sessions: int = 0
    size_bytes: int = 0
    # request → (kind, serialized reply, or None once it was forgotten), oldest first.
    replies: OrderedDict[int, tuple[str, bytes | None]] = field(default_factory=OrderedDict)


class Replies:
    """The recorded replies of every client."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # clients without a session, the longest idle first

    def recorded(self, mutation: common_pb2.Mutation, kind: str) -> Message | None:
        """Returns the reply that was given to this request, if it was applied.

        Args:
            mutation: who asks, and which request it is.
            kind: of the command.

        Raises:
            InvalidArgument: its reply is no longer known, or the request was another kind of command.
        """
        client = self._clients.get(mutation.client_id)
        if client is None:
            return None
        request = mutation.request
        recorded = client.replies.get(request)
        if recorded is None:
            if request in client.settled:
                raise InvalidArgument(
                    f"request {request}: this client has settled it, and all below {client.settled.below}"
                )
            return None
        recorded_kind, data = recorded
        check_kind(request, recorded_kind, kind)
        if data is None:
            raise InvalidArgument(
                f"request {request} was applied, but its reply was forgotten: more than "
                f"{limits.REPLY_BYTES_PER_CLIENT_MAX} bytes of unsettled replies"
            )
        return REPLY_TYPES[recorded_kind].FromString(data)

    def admit(self, mutation: common_pb2.Mutation) -> None:
        """Raises InvalidArgument when the client has no room for another unsettled reply."""
        client = self._clients.get(mutation.client_id)
        if client is None or len(client.replies) < limits.REPLIES_PER_CLIENT_MAX:
            return
        settled = Settled.of(mutation)
        if sum(request not in settled for request in client.replies) >= limits.REPLIES_PER_CLIENT_MAX:
            raise InvalidArgument(
                f"{limits.REPLIES_PER_CLIENT_MAX} replies of this client are unsettled: raise Mutation.settled_below, "
                "or settled_until"
            )

    def record(self, mutation: common_pb2.Mutation, kind: str, reply: Message) -> None:
        """Remembers the reply to a request that was just applied."""
        client = self._clients.get(mutation.client_id)
        if client is None:
            client = self._clients[mutation.client_id] = _Client()
            self._set_idle(mutation.client_id)
        settled = client.settled.joined(Settled.of(mutation))
        if settled != client.settled:
            client.settled = settled
            for request in [request for request in client.replies if request in settled]:
                client.size_bytes -= len(client.replies.pop(request)[1] or b"")
        data = reply.SerializeToString(deterministic=True)
        client.replies[mutation.request] = (kind, data)
        client.size_bytes += len(data)
        if client.size_bytes > limits.REPLY_BYTES_PER_CLIENT_MAX:
            self._forget(client)

    @staticmethod
    def _forget(client: _Client) -> None:
        for request, (kind, data) in client.replies.items():
            if client.size_bytes <= limits.REPLY_BYTES_PER_CLIENT_MAX:
                break
            client.size_bytes -= len(data or b"")
            client.replies[request] = (kind, None)

    def session_opened(self, client_id: bytes) -> None:
        """A client has one more live session."""
        self._clients.setdefault(client_id, _Client()).sessions += 1
        self._idle.pop(client_id, None)

    def session_ended(self, client_id: bytes) -> None:
        """A client has one live session less."""
        client = self._clients[client_id]
        client.sessions -= 1
        if client.sessions == 0:
            self._set_idle(client_id)

    def _set_idle(self, client_id: bytes) -> None:
        self._idle[client_id] = None
        if len(self._idle) > limits.IDLE_CLIENTS_MAX:
            del self._clients[self._idle.popitem(last=False)[0]]

    def to_tree(self) -> list[Any]:
        """Returns what a snapshot keeps."""
        clients = [
            [
                client_id,
                client.settled.below,
                client.sessions,
                [[r, *reply] for r, reply in client.replies.items()],
                client.settled.until,
                sorted(client.settled.open),
            ]
            for client_id, client in self._clients.items()
        ]
        return [clients, list(self._idle)]

    @classmethod
    def from_tree(cls, tree: list[Any]) -> Replies:
        """Rebuilds what `to_tree` returned."""
        table = cls()
        clients, idle = tree
        for client_id, below, sessions, rows, *more in clients:
            until, still = more or (0, [])  # a snapshot from before has none
            replies = OrderedDict((request, (kind, data)) for request, kind, data in rows)
            settled = Settled(below, until, frozenset(still))
            size_bytes = sum(len(data or b"") for _, data in replies.values())
            table._clients[client_id] = _Client(settled, sessions, size_bytes, replies)
        table._idle = OrderedDict.fromkeys(idle)
        return table
