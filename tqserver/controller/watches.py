"""Those who watch partitions: each reads from the core at its own pace, and sleeps while there is nothing new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

from tqclient.errors import TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core
from tqserver.controller.core.changes import Listing


class Watches:
    """All watches under way.

    Args:
        core: that remembers the changes.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._events: dict[int, set[asyncio.Event]] = {}
        self._listings: WeakValueDictionary[int, Listing] = WeakValueDictionary()
        self._closed: TQError | None = None

    async def watch(self, partition_id: int, sequence: int) -> AsyncIterator[pb.Change]:
        """Yields what changed after a sequence, for ever; the core says how.

        Raises:
            PartitionNotFound: it was deleted.
        """
        event = asyncio.Event()
        events = self._events.setdefault(partition_id, set())
        events.add(event)
        try:
            while True:
                event.clear()
                changes = self._changes(partition_id, sequence)
                for change in changes:
                    yield change
                    sequence = change.sequence
                    if self._closed is not None:
                        raise self._closed
                    if isinstance(changes, Listing):
                        await asyncio.sleep(0)  # a long one is made piece by piece: others go on in between
                del changes  # or one that sleeps would keep a whole listing
                if self._core.changed_after(partition_id, sequence):
                    continue
                await event.wait()
                if self._closed is not None:
                    raise self._closed
        finally:
            events.discard(event)
            if not events:
                self._events.pop(partition_id, None)

    def _changes(self, partition_id: int, sequence: int) -> list[pb.Change] | Listing:
        listing = self._listings.get(partition_id)
        if sequence == 0 and listing is not None and not self._core.changed_after(partition_id, listing.sequence):
            return listing  # many begin at once when a job starts
        changes = self._core.changes(partition_id, sequence)
        if isinstance(changes, Listing):
            self._listings[partition_id] = changes
        return changes

    def wake(self, partition_id: int) -> None:
        """Something changed there, or it is gone."""
        for event in self._events.get(partition_id, ()):
            event.set()

    def close(self, error: TQError) -> None:
        """Ends all of them."""
        self._closed = error
        for partition_id in self._events:
            self.wake(partition_id)
