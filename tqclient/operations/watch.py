"""Watching a partition: where a watcher stands, and how it goes on after its stream broke."""

from __future__ import annotations

from typing import Any

import msgpack

from tqclient.changes import Change, Changed, Listed, Removed, Settled, Tagged, Written
from tqclient.errors import InternalError, InvalidArgument, LeaseExpired, TQError, Unavailable
from tqclient.info import PartitionInfo, PartitionRef
from tqclient.operations.effects import Deadline, Operation, pause
from tqclient.operations.sessions import live_session, notice_end
from tqclient.state import ClientState
from tqclient.wire.packing import I64, unpack_array, unpack_blobs, unpack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1.common_pb2 import Packed


class Watcher:
    """One watch, over as many streams as it takes.

    Args:
        state: of the client.
        ref: the partition.
        from_seq: the last sequence that was seen whole.
        timeout: seconds to wait for the next change; None waits for ever.

    Raises:
        InvalidArgument: an argument is off.
    """

    def __init__(self, state: ClientState, ref: PartitionRef, from_seq: int, timeout: float | None) -> None:
        if isinstance(from_seq, bool) or not isinstance(from_seq, int) or not 0 <= from_seq < 1 << 63:
            raise InvalidArgument(f"from_seq={from_seq!r}: give the sequence of a change, or 0 for a listing")
        if timeout is not None and not Deadline(timeout, state.clock).timeout > 0:
            raise InvalidArgument(f"timeout={timeout!r}: the next change takes some time; None waits for ever")
        state.check_usable()
        self._state = state
        self._ref = ref
        self._timeout = timeout
        self._seen = from_seq
        self._group: list[Change] = []
        self._listing = False
        self._session = 0
        self._backoff = state.backoff()
        self.wait()

    def wait(self) -> None:
        """The wait for the next change begins."""
        self._deadline = None if self._timeout is None else self._state.deadline(self._timeout)

    def remaining(self) -> float | None:
        """Returns the seconds that are left of the wait; None: no end."""
        return None if self._deadline is None else self._deadline.remaining()

    def begin(self) -> Operation[pb.WatchRequest]:
        """Returns the request of a new stream. What was seen of a command in part is told again, so it is forgotten."""
        self._group.clear()
        self._listing = False
        session = yield from live_session(self._state, self._deadline or self._state.deadline(None))
        self._session = session.session
        return pb.WatchRequest(session=session.session, partition_id=self._ref.partition_id, from_sequence=self._seen)

    def recover(self, error: TQError) -> Operation[None]:
        """Gets ready to begin again after an error; raises what ends the watch."""
        self._state.check_usable()
        if not isinstance(error, Unavailable | LeaseExpired):
            raise error
        deadline = self._deadline or self._state.deadline(None)
        session = self._state.session
        if isinstance(error, LeaseExpired) and session is not None and session.session == self._session:
            try:
                yield from notice_end(self._state, session, deadline)
            except Unavailable:
                if self._deadline is not None:
                    raise
        yield from pause(self._backoff, deadline, error)

    def feed(self, change: pb.Change) -> list[Change]:
        """Takes in a message and returns the changes to yield: those of a command together, a listing in its pieces."""
        self._backoff = self._state.backoff()
        told = self._told(change)
        if told is None or (change.sequence <= self._seen and not isinstance(told, Listed)):
            return []
        if isinstance(told, Listed):
            if told.complete:
                self._seen = change.sequence
            return [told]
        self._group.append(told)
        if not change.last:
            return []
        whole, self._group = self._group, []
        self._seen = change.sequence
        return whole

    def _told(self, change: pb.Change) -> Change | None:
        kind = change.WhichOneof("change")
        place: dict[str, Any] = {"sequence": change.sequence, "last": change.last}
        if kind == "listing":
            listing = change.listing
            first, self._listing = not self._listing, not listing.complete
            return Listed(**place, **_named(listing), first=first, complete=listing.complete)
        if kind == "written":
            written = change.written
            return Written(**place, **_named(written), fields=tuple(written.fields), added=written.added)
        if kind == "removed":
            return Removed(**place, ids=_ids(change.removed.ids))
        if kind == "tagged":
            ids = _ids(change.tagged.ids)
            return Tagged(**place, ids=ids, tags=_tags(change.tagged.tags, len(ids)))
        if kind == "settled":
            settled = change.settled
            consumed, dropped = _ids(settled.consumed), _ids(settled.dropped)
            return Settled(**place, consumer=settled.consumer, consumed=consumed, dropped=dropped)
        if kind == "partition":
            return Changed(**place, info=PartitionInfo.from_wire(change.partition.partition))
        return None


def ended() -> TQError:
    """Returns what it means that a stream ended without an error."""
    return Unavailable("controller: Watch: the stream ended")


def _ids(data: bytes) -> Any:
    return unpack_array(data, I64, what="ids")


def _named(named: pb.Change.Listing | pb.Change.Written) -> dict[str, Any]:
    ids = _ids(named.ids)
    keys: list[str | None] = [None] * len(ids)
    if named.HasField("keys"):
        keys = [key or None for key in unpack_strings(named.keys, what="keys", rows=len(ids))]
    tags = _tags(named.tags, len(ids)) if named.HasField("tags") else [{} for _ in keys]
    return {"ids": ids, "keys": keys, "tags": tags}


def _tags(packed: Packed, rows: int) -> list[dict[str, Any]]:
    try:
        return [msgpack.unpackb(blob) if blob else {} for blob in unpack_blobs(packed, what="tags", rows=rows)]
    except ValueError as error:
        raise InternalError(f"controller: Watch: tags that cannot be read: {error}") from None
