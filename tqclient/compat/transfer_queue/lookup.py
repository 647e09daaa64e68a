"""Looking up rows without reading their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import msgpack

from tqclient import limits
from tqclient.arguments import pack_lookup_keys, row_ids
from tqclient.client import Client
from tqclient.compat.transfer_queue.columns import MARKER
from tqclient.consumer import Consumer
from tqclient.errors import SampleNotFound, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations import claims
from tqclient.operations.effects import CONTROLLER, Deadline, Operation, Work, call, pause
from tqclient.operations.sessions import in_session
from tqclient.partition import Partition
from tqclient.rows import RowSet
from tqclient.state import ClientState, Session
from tqclient.wire.packing import I64, pack_array, unpack_array, unpack_blobs, unpack_strings
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2 as pb


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples, without what their fields hold.

    Attributes:
        ids: of the samples.
        keys: of each; None where it has none.
        tags: of each, as they are stored.
    """

    ids: list[int]
    keys: list[str | None]
    tags: list[dict[str, Any]]

    @classmethod
    def from_set(cls, rows: RowSet) -> Rows:
        """Takes over what a reply said."""
        return cls(rows.ids.tolist(), rows.keys, rows.tags_by_row())

    def select(self, positions: Sequence[int]) -> Rows:
        """Returns some of the rows, in the order asked for."""
        return Rows(*([values[at] for at in positions] for values in (self.ids, self.keys, self.tags)))  # type: ignore[arg-type]


def locate(
    part: Partition, fields: Sequence[str], *, ids: Sequence[int] | None = None, keys: Sequence[str] | None = None
) -> Rows:
    """Finds samples that have all of the fields.

    Raises:
        SampleNotFound: a sample does not exist, or lacks a field; then `.ids` has the first of those that lack it.
    """
    client = part._client
    return client._run(_locate(client._state, part._ref, fields, ids, keys))


def _locate(
    state: ClientState, ref: PartitionRef, fields: Sequence[str], ids: Sequence[int] | None, keys: Sequence[str] | None
) -> Operation[Rows]:
    deadline = state.deadline(None)
    request = pb.LocateRequest(partition_id=ref.partition_id, fields=fields)
    if ids is not None:
        request.ids = pack_array(row_ids(ids), I64)
    if keys is not None:
        request.keys.CopyFrom(pack_lookup_keys(keys))

    def attempt(session: Session) -> Operation[pb.LocateReply]:
        request.session = session.session
        request.pin = pin = state.new_pin()
        try:
            reply: pb.LocateReply = yield from call(CONTROLLER, "Locate", request, deadline, state.rng)
            return reply
        finally:
            state.drop_pin(session.session, pin)

    reply = yield from in_session(state, deadline, attempt)
    ref.fields_changed(reply.fields)
    return Rows.from_set(RowSet.from_wire(reply.rows, [each.name for each in reply.fields]))


def tags_of(part: Partition, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Returns the stored tags of samples by id; one that does not exist is not in it."""
    try:
        rows = locate(part, [MARKER], ids=ids)
    except SampleNotFound:  # some are gone, or were put by the native client and have no marker
        rows = listing(part)
    return dict(zip(rows.ids, rows.tags, strict=True))


def missing(part: Partition, field: str, ids: Sequence[int]) -> set[int]:
    """Returns those of the samples that lack a field; samples that do not exist any more are among them."""
    lacking: set[int] = set()
    left = list(ids)
    while left:
        try:
            locate(part, [field], ids=left)
        except SampleNotFound as error:
            found = set(error.ids) & set(left)
            if not found:  # the partition has no such field
                return lacking | set(left)
            lacking |= found
            left = [each for each in left if each not in found]
        else:
            break
    return lacking


def listing(part: Partition) -> Rows:
    """Lists all samples of a partition, taken at one instant."""
    client = part._client
    return client._run(_listing(client, client._state, part._ref))


def _listing(client: Client, state: ClientState, ref: PartitionRef) -> Operation[Rows]:
    deadline = state.deadline(None)
    backoff = state.backoff()

    def attempt(session: Session) -> Operation[Rows]:
        request = pb.WatchRequest(session=session.session, partition_id=ref.partition_id, from_sequence=0)
        rows: Rows = yield Work(lambda: _read_listing(client, request, deadline))
        return rows

    while True:
        try:
            return (yield from in_session(state, deadline, attempt))
        except Unavailable as error:
            yield from pause(backoff, deadline, error)


def _read_listing(client: Client, request: pb.WatchRequest, deadline: Deadline) -> Rows:
    stub = client._connection.channels.stub(CONTROLLER)
    stream = stub.Watch(request, timeout=max(deadline.remaining(), limits.BACKOFF_FIRST))
    rows = Rows([], [], [])
    try:
        for listed in _listed(stream):
            ids = unpack_array(listed.ids, I64, what="ids").tolist()
            rows.ids.extend(ids)
            named = listed.HasField("keys")
            keys = unpack_strings(listed.keys, what="keys", rows=len(ids)) if named else [""] * len(ids)
            rows.keys.extend(key or None for key in keys)
            tagged = listed.HasField("tags")
            tags = unpack_blobs(listed.tags, what="tags", rows=len(ids)) if tagged else [b""] * len(ids)
            rows.tags.extend(msgpack.unpackb(each) if each else {} for each in tags)
            if listed.complete:
                break
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer="controller: Watch") from None
    finally:
        stream.cancel()
    return rows


def _listed(stream: Any) -> Iterator[Any]:
    for change in stream:
        if change.HasField("listing"):
            yield change.listing


class Claimed:
    """A claim of rows that were not read; to be settled at once.

    Attributes:
        rows: what was claimed.
    """

    def __init__(self, consumer: Consumer, batch_size: int, timeout: float) -> None:
        """Waits for the claim; raises what `Consumer.claim` raises."""
        self._client = client = consumer._client
        self._handle, rows = client._run(claims.claim_rows(client._state, consumer._ref, batch_size, timeout))
        self.rows = Rows.from_set(rows)

    def ack(self) -> None:
        """Consumes the rows."""
        self._client._run(claims.settle(self._client._state, self._handle, "acked"))

    def release(self) -> None:
        """Gives the rows back."""
        self._client._run(claims.settle(self._client._state, self._handle, "released"))

    def abandon(self) -> None:
        """Has the heartbeat give the rows back; makes no call."""
        claims.abandon(self._client._state, self._handle)
        self._client._state.wake.set()
